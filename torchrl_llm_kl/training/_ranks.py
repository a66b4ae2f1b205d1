"""The ranks of a run: processes that sample, score and train one model together. torchrun or Ray Train starts them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.functional import pad

from torchrl_llm_kl._private import layers_of
from torchrl_llm_kl.scoring import ReferenceUpdater, collective_device
from torchrl_llm_kl.training._config import ConfigError, TrainConfig, refuse

V = TypeVar("V")
PROMPT, FULL, KEPT_IDS = ("tokens", "prompt"), ("tokens", "full"), ("kept", "ids")
#: The environment that torchrun sets for each process.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of a run.

    Args:
        number: the number of this rank, from 0.
        count: the number of ranks.
        active: whether a process group connects the ranks. A single process under torchrun has one, too.

    Example:
        >>> ranks = Ranks()  # a process without torchrun
        >>> ranks.first, ranks.any(False), ranks.gather("a")
        (True, False, ['a'])
    """

    number: int = 0
    count: int = 1
    active: bool = False

    @classmethod
    def current(cls) -> Ranks:
        """The ranks of the default process group. Without a group, only this process.

        Example:
            >>> Ranks.current()
            Ranks(number=0, count=1, active=False)
        """
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), True)
        return cls()

    @property
    def first(self) -> bool:
        """Whether this rank writes the files and messages of the run."""
        return self.number == 0

    def check(self, config: TrainConfig) -> None:
        """Check the settings that depend on the number of ranks.

        Raises:
            ConfigError: if the ranks cannot share a step, or would share a device.

        Example:
            >>> Ranks().check(config)  # doctest: +SKIP
        """
        prompts, device = config.data.num_prompts, config.model.device
        placed = self.count > 1 and ":" in (device or "")
        shards = config.model.shard and not self.active
        sharded, algorithm = self.shards(config), config.algorithm
        copies = algorithm.max_staleness and sharded and not config.sampler.is_server
        advice = "choose a multiple, or start another number of ranks"
        refuse(
            (prompts % self.count, f"data.num_prompts is {prompts} for {self.count} ranks: {advice}."),
            (placed, f"model.device is {device}, but each rank takes a device of its own: leave it out."),
            (
                copies,
                "algorithm.max_staleness needs a server if weights are sharded: set sampler.engine, or model.shard=false.",
            ),
            (
                algorithm.exact_old and sharded,
                "algorithm.exact_old needs whole weights on each rank: set model.shard=false.",
            ),
            (shards, "model.shard=true needs ranks: start the command with torchrun, or leave it out."),
        )

    def shards(self, config: TrainConfig) -> bool:
        """Whether each rank holds only a shard of the weights (``model.shard``)."""
        wanted = config.lora is None if config.model.shard is None else config.model.shard
        return self.active and wanted

    # ------------------------------------------------------------------ exchange of values

    def gather(self, value: V) -> list[V]:
        """The values of all ranks, in their order. The values are pickled."""
        values = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is True on any rank."""
        return self.most(int(flag)) > 0

    def most(self, number: int) -> int:
        """The largest ``number`` of all ranks."""
        most = torch.tensor(number)
        return int(self._reduced(most, dist.ReduceOp.MAX)) if self.count > 1 else number

    def wait(self) -> None:
        """Wait until all ranks are here."""
        self.most(0)

    def of_first(self, function: Callable[[], V]) -> V:
        """The result of a function that only the first rank calls. Its error is raised on all ranks.

        Example:
            >>> Ranks().of_first(lambda: 3)
            3
        """
        if self.count == 1:
            return function()
        result: list[Any] = [None, None]
        if self.first:
            try:
                result[0] = function()
            except Exception as error:
                result[1] = error
        shared = [result[0], _portable(result[1])]
        dist.broadcast_object_list(shared)
        failure = result[1] or shared[1]  # the first rank's own error has its traceback
        if failure is not None:
            raise failure
        return cast(V, shared[0])

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block without collectives. An error of one rank is raised on all, so that none waits for the others.

        Example:
            >>> with Ranks().together():
            ...     raise ConfigError("no such file.")
            Traceback (most recent call last):
            ...
            torchrl_llm_kl.training._config.ConfigError: no such file.
        """
        try:
            yield
        except Exception as error:
            self.gather(_portable(error))
            raise
        for rank, other in enumerate(self.gather(cast("Exception | None", None))):
            if other is not None:
                raise ConfigError(f"rank {rank} failed: {type(other).__name__}: {other}") from other

    @contextmanager
    def writing(self, enter: Callable[[], AbstractContextManager[Path]]) -> Iterator[Path]:
        """Let all ranks write into one folder. The first rank enters its context and leaves it after all have written.

        The file system must be shared by the ranks.
        """
        with enter() if self.first else nullcontext(Path()) as folder:
            yield self.of_first(lambda: folder)
            self.wait()
        self.wait()

    def _reduced(self, values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """A tensor reduced over the ranks, on its device."""
        sent = values.to(collective_device(dist.get_backend()))
        dist.all_reduce(sent, operation)
        return sent.to(values.device)

    # ------------------------------------------------------------------ a step

    def gather_rows(self, batch: TensorDictBase) -> TensorDictBase:
        """The rows of all ranks in their order, on each rank. Only tensors are sent, a few bytes per token.

        Each rank then computes advantages and figures from the whole batch.

        Args:
            batch: the answers of this rank, whose tokens are padded, prompts on the left and answers on the right.

        Returns:
            All rows, dense, padded to one width.
        """
        # Texts stay where they are: no loss reads them.
        keys = [key for key, value in batch.items(True, True) if isinstance(value, Tensor)]
        own = batch.select(*keys).contiguous()
        shares = self.gather(own.cpu())
        prompt = max(share[PROMPT].shape[1] for share in shares)
        answer = max(share[FULL].shape[1] - share[PROMPT].shape[1] for share in shares)
        # The ids of kept tokens are a list of their own length, whatever the tokens are.
        lists = [share.pop(KEPT_IDS, None) for share in shares]
        joined: TensorDictBase = torch.cat([padded_rows(share, prompt, answer) for share in shares])
        if all(ids is not None for ids in lists):
            most = max(ids.shape[1] for ids in lists)
            joined.set(KEPT_IDS, torch.cat([pad(ids, (0, most - ids.shape[1])) for ids in lists]))
        return joined.to(own[FULL].device)

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients of weights that each rank holds whole. FSDP averages the gradients of shards itself."""
        from torch.distributed.tensor import DTensor

        wholes = [each for each in parameters if not isinstance(each, DTensor)]
        for each in wholes:
            if each.grad is None:  # this rank had no rows, but the others wait for its share
                each.grad = torch.zeros_like(each.data)
        for dtype in dict.fromkeys(each.dtype for each in wholes) if self.count > 1 else ():
            gradients = [each.grad for each in wholes if each.grad is not None and each.dtype == dtype]
            total = self._reduced(torch.cat([each.flatten() for each in gradients])) / self.count
            for gradient, mean in zip(gradients, total.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(mean.view_as(gradient))

    def means(self, pieces: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Tensor]:
        """The numbers of a minibatch from the outputs of the losses for its pieces on all ranks.

        Losses and counts of tokens and sequences are sums over the pieces. The other numbers are means over the pieces,
        weighted by their tokens. So all equal the numbers of one process, except the effective sample size and quantiles.
        """
        rows = []
        for outputs in pieces:
            values = {name: value for output in outputs for name, value in output.items() if value.numel() == 1}
            tokens = values["num_tokens"].double()
            row = {}
            for name, value in values.items():
                number = value.detach().double().reshape(()).to(tokens.device)
                if name.startswith("loss_"):
                    row[name] = number / self.count
                elif not name.startswith("num_"):
                    row[name] = torch.where(tokens > 0, number, 0) * tokens
                else:
                    row[name] = number
            rows.append(row)
        names = sorted(rows[0])
        sums = self._reduced(torch.stack([torch.stack([row[name] for name in names]) for row in rows]).sum(0))
        total = dict(zip(names, sums.unbind(), strict=True))
        tokens = total["num_tokens"].clamp(min=1)
        kept = ("loss_", "num_")
        return {name: value if name.startswith(kept) else value / tokens for name, value in total.items()}


def _portable(error: Exception | None) -> Exception | None:
    """An error that can be pickled, with the same message."""
    import pickle

    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def padded_rows(rows: TensorDictBase, prompt: int, answer: int) -> TensorDictBase:
    """Pad the prompts of rows on the left and their answers on the right. Entries per token are padded alike.

    Args:
        rows: dense rows ``[B]``.
        prompt: the width of the prompts afterwards.
        answer: the width of the answers afterwards.

    Example:
        >>> from tensordict import TensorDict
        >>> tokens = TensorDict(prompt=torch.tensor([[5]]), full=torch.tensor([[5, 6]]), batch_size=[1])
        >>> padded_rows(TensorDict(tokens=tokens, batch_size=[1]), 2, 3)["tokens", "full"]
        tensor([[0, 5, 6, 0, 0]])
    """
    width, own = rows[FULL].shape[1], rows[PROMPT].shape[1]
    sides = {
        own: (prompt - own, 0),
        width - own: (0, answer - width + own),
        width: (prompt - own, answer - width + own),
    }
    rows = rows.copy()
    for key, value in list(rows.items(True, True)):
        of = {PROMPT: own, ("tokens", "response"): width - own}.get(key, width)
        if key != KEPT_IDS and value.ndim > 1 and value.shape[1] == of:
            rows[key] = pad(value, ((0, 0) * (value.ndim - 2)) + sides[of])
    return rows


# ------------------------------------------------------------------ the process group


@contextmanager
def joined_ranks(device: str | None = None) -> Iterator[Ranks]:
    """Join the processes that torchrun started, and leave them at the end. A process group that exists is used.

    Ranks communicate over gloo, and over NCCL between GPUs. Each rank takes the GPU of its ``LOCAL_RANK``.

    Args:
        device: the setting ``model.device``. ``"cpu"`` takes no GPU.

    Example:
        >>> with joined_ranks() as ranks:  # without torchrun
        ...     ranks.count
        1
    """
    started = all(name in os.environ for name in _TORCHRUN) and not dist.is_initialized()
    if started:
        backend = "gloo"
        if torch.cuda.is_available() and device != "cpu":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend)
    try:
        yield Ranks.current()
    finally:
        if started:
            dist.destroy_process_group()


# ------------------------------------------------------------------ sharded weights


def shard(model: nn.Module, device: torch.device | str) -> None:
    """Shard the weights of a model over all ranks, layer by layer (FSDP2), in place.

    The weights move to ``device`` layer by layer, so a model that was loaded on the CPU never needs the device's memory for
    all its weights. Shard models before the optimiser is built.

    Args:
        model: a transformers model, with or without adapters, or a critic of one.
        device: the device of this rank.

    Raises:
        RuntimeError: without a process group.

    Example:
        >>> shard(model, "cuda")  # doctest: +SKIP
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        raise RuntimeError("no process group shares the weights: start the script with torchrun, and use joined_ranks.")
    # One mesh for all layers, since each mesh has a process group of its own.
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """Gather the sharded weights inside a module once, so that ranks may make different numbers of forwards.

    Generation needs it. In the block each rank holds all weights. A module without sharded weights is not changed.

    Example:
        >>> with whole(torch.nn.Linear(2, 2)):
        ...     pass
    """
    from torch.distributed.fsdp import FSDPModule

    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for number, part in enumerate(parts):
            part.set_reshard_after_forward(number > 0, recurse=False)  # FSDP's default: the root stays whole
            part.reshard()


def is_gathered(model: nn.Module) -> bool:
    """Whether :func:`whole` has gathered the weights of a sharded model.

    Example:
        >>> is_gathered(torch.nn.Linear(2, 2))  # not sharded
        False
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    return isinstance(model, FSDPModule) and not any(isinstance(each, DTensor) for each in model.parameters())


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The gathered weights of a sharded model by name, on the CPU of the first rank. Empty on the others.

    Tied weights have one name.

    Example:
        >>> sorted(whole_weights(torch.nn.Linear(2, 2)))
        ['bias', 'weight']
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    names, once = ({name for name, _ in model.named_parameters(remove_duplicate=each)} for each in (False, True))
    return {name: cast(Tensor, value) for name, value in weights.items() if name not in names - once}


def save_shards(
    folder: Path, optimizer: torch.optim.Optimizer, models: nn.ModuleDict, updater: ReferenceUpdater | None = None
) -> None:
    """Write the optimiser's state and the critic's weights, each rank its shards (``torch.distributed.checkpoint``).

    Args:
        folder: a folder that all ranks share.
        optimizer: the optimiser of parameters of ``models``.
        models: the trained models by name. The weights of ``"policy"`` are left out.
        updater: a moving reference.

    Example:
        >>> save_shards(folder, optimizer, models)  # doctest: +SKIP
    """
    import torch.distributed.checkpoint as dcp

    dcp.save(_shards(optimizer, models, updater), checkpoint_id=folder)


def load_shards(
    folder: Path, optimizer: torch.optim.Optimizer, models: nn.ModuleDict, updater: ReferenceUpdater | None = None
) -> None:
    """Restore what :func:`save_shards` wrote on any number of ranks.

    Example:
        >>> load_shards(folder, optimizer, models)  # doctest: +SKIP
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

    state = _shards(optimizer, models, updater)
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(models, optimizer, state["optimizer"])
    set_model_state_dict(models, state["models"], options=StateDictOptions(strict=False))


def _shards(
    optimizer: torch.optim.Optimizer, models: nn.ModuleDict, updater: ReferenceUpdater | None
) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    weights = {name: x for name, x in get_model_state_dict(models).items() if not name.startswith("policy.")}
    state = {"optimizer": get_optimizer_state_dict(models, optimizer), "models": weights}
    return state if updater is None else {**state, "reference": updater}


def on_the_cpu(config: TrainConfig) -> TrainConfig:
    """A configuration that loads models on the CPU, from where :func:`shard` moves each layer.

    Example:
        >>> on_the_cpu(config).model.device  # doctest: +SKIP
        'cpu'
    """
    return replace(config, model=replace(config.model, device="cpu"))
