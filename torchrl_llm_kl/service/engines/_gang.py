""":class:`GangEngine`: one model over several processes, the ranks, which start and end together."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

import ray
import torch
import torch.distributed as dist
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from torchrl_llm_kl._numerics import check_choice, check_range
from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.scoring import (
    DEFAULT_MEMORY,
    ScoreOptions,
    Scorer,
    ScoreRequest,
    Scores,
    collective_device,
    is_wrapper,
    unwrap,
)
from torchrl_llm_kl.service._errors import EngineLost, ServiceTimeout, portable
from torchrl_llm_kl.service._messages import ANSWERED, columns_of
from torchrl_llm_kl.service.engines._engine import Engine, TransformersEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: A rank's scores at the masked-in tokens of its share of a request, by name. Each is ``[K, ...]``.
Columns = dict[str, Tensor]
#: A name, or a function of the model and the mesh of all ranks. The function returns the model, or None if it works in place.
Shard = Literal["fsdp2", "tp", "none"] | Callable[[object, DeviceMesh], object]


class GangEngine(Engine):
    """An engine for a model that is sharded over several Ray actors, the ranks of one ``torch.distributed`` group.

    Pass it as the factory of a service: each replica then creates its own ranks in a placement group, and ends with
    them. If one rank dies, the replica exits. If one hangs, the replica's health shows it. In both cases Serve starts the
    replica with all its ranks again.

    Args:
        factory: returns the model, on every rank. The process group exists when it is called.

    Keyword Args:
        ranks: number of processes.
        shard: ``"fsdp2"`` shards each layer (``fully_shard``). ``"tp"`` applies the tensor parallel plan of transformers.
            ``"none"`` changes nothing, for a factory that has sharded the model. A function takes the model and the mesh
            ``[ranks]``, and returns the sharded model. With FSDP and with whole models each rank scores a part of the
            sequences. With other shards all ranks score all of them.
        num_cpus, num_gpus, resources: of each rank. The service's own resources are for the replica's process, which only
            passes requests on and needs few.
        strategy: of the placement group. ``"STRICT_PACK"`` keeps all ranks on one node.
        backend: of the process group. By default ``"nccl"`` with GPUs, else ``"gloo"``.
        start_timeout: seconds until all ranks are placed, and the longest time that a rank waits for the others.
        tokens_per_batch: tokens of one forward of a rank, see :class:`~torchrl_llm_kl.LogProbScorer`.
        memory: the most bytes of keys and values that each rank caches for continued conversations.

    Raises:
        ServiceTimeout: if the cluster has no room for the ranks within ``start_timeout``.
        EngineLost: if a rank dies.
        Exception: the error of the factory.

    Example:
        >>> gang = partial(GangEngine, load, ranks=8, shard="fsdp2", num_gpus=1)  # doctest: +SKIP
        >>> service = ScoringService(factory=gang, name="reference", num_cpus=0.1)  # doctest: +SKIP
    """

    offers = ANSWERED - {"images", "versions"}
    place = "a gang of ranks"
    instead = Scorer.instead

    def __init__(
        self,
        factory: Callable[[], object],
        *,
        ranks: int,
        shard: Shard = "fsdp2",
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        strategy: str = "STRICT_PACK",
        backend: str | None = None,
        start_timeout: float = 600.0,
        tokens_per_batch: int | None = None,
        memory: int = DEFAULT_MEMORY,
    ) -> None:
        check_range(1, ranks=ranks)
        if not callable(shard):
            check_choice(("fsdp2", "tp", "none"), shard=shard)
        self._ranks: list[ActorHandle] = []
        self._group: PlacementGroup | None = None
        self._lost: EngineLost | None = None
        self._turn = threading.Lock()
        options = {"num_cpus": num_cpus, "num_gpus": num_gpus, "resources": dict(resources or {})}
        try:
            group = self._place(ranks, {"CPU": num_cpus, "GPU": num_gpus, **(resources or {})}, strategy, start_timeout)
            # A thread of its own.
            remote = ray.remote(concurrency_groups={"life": 1})(GangRank)  # type: ignore[call-overload]
            for rank in range(ranks):
                where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
                self._ranks.append(remote.options(scheduling_strategy=where, **options).remote(rank, ranks))
            self._lives = [rank.life.remote() for rank in self._ranks]
            backend = backend or ("nccl" if num_gpus else "gloo")
            # The store lives in this process, on a free port, so that it ends with the gang.
            address = ray.util.get_node_ip_address()
            self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
            store = (address, self._store.port)
            start = (ray.put(factory), shard, store, backend, start_timeout, tokens_per_batch, memory)
            made = self._ask("start", [start] * ranks)
        except BaseException:
            self.close()
            raise
        self._interface: tuple[ModelInterface, bool] = made[0][0]
        self._tensors: list[list[str]] = made[0][2]
        self._split = all(may for _, may, _ in made)

    def _place(self, ranks: int, resources: Mapping[str, float], strategy: str, timeout: float) -> PlacementGroup:
        """Reserves a place for each rank. The group ends with this process, which owns it, and so do the ranks."""
        bundle = {name: amount for name, amount in resources.items() if amount}
        self._group = group = ray.util.placement_group([bundle or {"CPU": 0.001}] * ranks, strategy=strategy)
        if not group.wait(timeout):
            raise ServiceTimeout(
                f"{ranks} ranks with {bundle} each ({strategy}) had no room for {timeout:g} s. The cluster has "
                f"{ray.available_resources()} free. Add nodes, ask for less, or raise start_timeout=."
            )
        return group

    # ------------------------------------------------------------------ scores

    def run(self, request: ScoreRequest, options: ScoreOptions) -> Scores:
        """See :meth:`Engine.run`. The numbers are those of one process."""
        ranks = len(self._ranks)
        try:
            return self._run(request, options, split(request, ranks if self._split else 1))
        except ValueError:
            if not self._split or ranks == 1:
                raise
        # The error of a rank counts the sequences of its share only. One rank scores them all for the right count.
        return self._run(request, options, [request, *[None] * (ranks - 1)])

    def _run(self, request: ScoreRequest, options: ScoreOptions, shares: Sequence[ScoreRequest | None]) -> Scores:
        """Returns the scores of one share for each rank, or of one share that all of them score."""
        first = request.select(torch.zeros(1, dtype=torch.long))
        # A rank without a share still takes part in the collectives of the others.
        nothing = replace(first, mask=torch.zeros_like(first.mask))
        each = [nothing if share is None else share for share in shares]
        sent = [ray.put(each[0])] * len(self._ranks) if len(shares) == 1 else each
        answers: list[Columns] = self._ask("run", [(share, options) for share in sent])[: len(shares)]
        parts = [answer for answer, share in zip(answers, shares, strict=True) if share is not None]
        columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return Scores.spread(request.layout, request.mask.nonzero().squeeze(-1), **columns)

    def interface(self) -> tuple[ModelInterface, bool]:
        """See :meth:`Engine.interface`."""
        return self._interface

    # ------------------------------------------------------------------ weights

    def own_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See :meth:`Engine.own_weights`. Every rank checks, since all ranks must make the same calls."""
        names: dict[str, str] = self._ask("fitting_names", [(ray.put(dict(weights)),)] * len(self._ranks))[0]
        return {own: weights[given] for given, own in names.items()}

    def update_weights(self, weights: Mapping[str, Tensor], *, checked: bool = False) -> None:
        """Copies whole weights into the shards. Each rank takes its shards from one copy in the object store.

        The ranks check the weights again, which also finds their names in the shards.
        """
        self._ask("update_weights", [(ray.put(dict(weights)),)] * len(self._ranks))

    def tensors(self) -> list[list[str]]:
        """See :meth:`Engine.tensors`."""
        return self._tensors

    # ------------------------------------------------------------------ calls of all ranks

    def _ask(self, method: str, arguments: Sequence[tuple[object, ...]]) -> list[Any]:
        """Calls a method of all ranks, each with its arguments. Returns their answers, or raises the error of one of them.

        Raises :class:`EngineLost` if a rank dies, or if the ranks are out of step after an error.
        """
        with self._turn:  # two calls at once would reach the ranks in different orders
            answers = self._wait_for(method, arguments)
            errors = [answer for answer in answers if isinstance(answer, Exception)]
            if not errors:
                return answers
            if method != "start":
                apart = [x for x in self._wait_for("in_step", [()] * len(self._ranks)) if x is not None]
                if apart or (method == "update_weights" and len(errors) < len(answers)):
                    raise self._lose(f"its ranks are out of step after {errors[0]!r}")
        # Each rank raises a RankError for an error of another rank. Raise the original.
        raise next((error for error in errors if type(error).__name__ != "RankError"), errors[0])

    def _wait_for(self, method: str, arguments: Sequence[tuple[object, ...]]) -> list[object]:
        if self._lost is not None:
            raise self._lost.with_traceback(None)
        answers: list[object] = [None] * len(arguments)
        pairs = zip(self._ranks, arguments, strict=True)
        waiting = {rank.call.remote(method, *args): i for i, (rank, args) in enumerate(pairs)}
        while waiting:
            ready, _ = ray.wait([*waiting, *self._lives], num_returns=1)
            try:
                answer = ray.get(ready[0])
            except ray.exceptions.RayError as error:
                raise self._lose(f"a rank died: {error}") from error
            if method == "start" and isinstance(answer, Exception):
                return [answer]  # this rank cannot start, and the others wait for it
            answers[waiting.pop(ready[0])] = answer
        return answers

    def _lose(self, why: str) -> EngineLost:
        self._lost = self._lost or EngineLost(f"the gang of {len(self._ranks)} ranks is lost: {why}.")
        self.close()
        return self._lost

    def close(self) -> None:
        """Ends all ranks and frees their resources."""
        self._lost = self._lost or EngineLost("the gang was closed.")
        ranks, self._ranks = self._ranks, []
        with contextlib.suppress(Exception):  # the cluster may be gone
            for rank in ranks:
                ray.kill(rank, no_restart=True)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)


def split(request: ScoreRequest, ranks: int) -> list[ScoreRequest | None]:
    """Splits a request into one share for each rank, with about equally many tokens; None for a rank without a sequence.

    A share holds neighbouring sequences: answers to one prompt are neighbours, and share the prompt's forward.
    """
    if ranks == 1:
        return [request]
    ends, total = request.tokens.offsets[1:], max(request.tokens.values.shape[0], 1)
    owners = ((ends - request.tokens.lengths / 2) * ranks / total).long().clamp(0, ranks - 1)
    rows = [(owners == rank).nonzero().squeeze(-1) for rank in range(ranks)]
    return [request.select(some) if len(some) else None for some in rows]


# ------------------------------------------------------------------ one rank


class RankEngine(TransformersEngine):
    """The engine of a model whose weights may be shards. All ranks make the same calls."""

    def own_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Checks whole weights. Returns this rank's shards of them, without communication."""
        own = self._module().state_dict(keep_vars=True)
        return {name: _sharded_as(own[name], value) for name, value in super().own_weights(weights).items()}

    def _module(self) -> nn.Module:
        module = super()._module()
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # FSDP keeps the root's parameters whole after a forward
        return module


def _sharded_as(own: Tensor, value: Tensor) -> Tensor:
    """Shards ``value`` in the way of ``own``."""
    if not isinstance(own, DTensor) or isinstance(value, DTensor):
        return value
    value = value.to(own.device)
    return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)


class GangRank:
    """An actor. The model runs in one thread."""

    _engine: RankEngine  # after start

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def call(self, method: str, *args: object) -> object:
        """Calls another method. Returns its error as a value, since the gang compares the errors of its ranks."""
        try:
            return getattr(self, method)(*args)
        except Exception as error:
            return portable(error)

    def start(
        self,
        factory: Callable[[], object],
        shard: Shard,
        store: tuple[str, int],
        backend: str,
        timeout: float,
        tokens_per_batch: int | None,
        memory: int,
    ) -> tuple[tuple[ModelInterface, bool], bool, list[list[str]]]:
        """Joins the other ranks and loads the model.

        Returns its interface, whether ranks may score different sequences, and the names of its tensors.
        """
        # Ray shows each rank only its own GPU, as device 0.
        os.environ.update(RANK=str(self._rank), WORLD_SIZE=str(self._ranks), LOCAL_RANK="0")
        limit = timedelta(seconds=timeout)
        server = dist.TCPStore(*store, self._ranks, is_master=False, timeout=limit)
        dist.init_process_group(backend, store=server, rank=self._rank, world_size=self._ranks, timeout=limit)
        mesh = init_device_mesh(collective_device(backend).type, (self._ranks,))
        made = shard_model(factory(), shard, mesh)
        self._engine = RankEngine(cast(nn.Module, made), tokens_per_batch=tokens_per_batch, memory=memory)
        self.in_step()
        return self._engine.interface(), may_split(made), self._engine.tensors()

    def run(self, request: ScoreRequest, options: ScoreOptions) -> Columns:
        """Returns the scores of this rank's share of a request."""
        return columns_of(self._engine.run(request, options), request.mask)

    def fitting_names(self, weights: Mapping[str, Tensor]) -> dict[str, str]:
        """Maps the names of whole weights to the model's own. Raises an error if they do not fit the model."""
        self._engine.own_weights(weights)
        return self._engine.own_names(weights)

    def update_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copies this rank's shards of whole weights into the model. Raises an error if they do not fit."""
        self._engine.update_weights(weights)

    def in_step(self) -> None:
        """Waits for the other ranks. It fails if they are in other collectives."""
        dist.all_reduce(torch.ones(1, device=collective_device(dist.get_backend())))

    @ray.method(concurrency_group="life")
    def life(self) -> None:
        """Never returns. The reference to this call gets ready when the process ends."""
        threading.Event().wait()


# ------------------------------------------------------------------ sharding


def shard_model(made: object, shard: Shard, mesh: DeviceMesh) -> object:
    """Shards ``made``, a model or a TorchRL wrapper of one, in place. A function ``shard`` may return another object."""
    if callable(shard):
        sharded = shard(made, mesh)
        return made if sharded is None else sharded
    model = cast("PreTrainedModel", unwrap(made) if is_wrapper(made) else made)
    if shard == "fsdp2":
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
        for layer in getattr(decoder, "layers", ()):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif shard == "tp":
        _shard_by_plan(model, mesh)
    return made


def may_split(made: object) -> bool:
    """Whether ranks may score different sequences. They may with FSDP and whole models, but not with tensor parallelism."""
    model = unwrap(made) if is_wrapper(made) else made
    parts = list(model.modules()) if isinstance(model, nn.Module) else []
    sharded = [x for part in parts for x in part.parameters(recurse=False) if isinstance(x, DTensor)]
    by_fsdp = any(isinstance(part, FSDPModule) for part in parts) and all(x.device_mesh.ndim == 1 for x in sharded)
    return by_fsdp or not sharded


def _shard_by_plan(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Applies the tensor parallel plan that transformers has for the model. Embeddings stay whole."""
    styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    }
    plan = {name: style for name, style in (model.tp_plan or {}).items() if "embed" not in name}
    heads = getattr(model.config, "num_key_value_heads", mesh.size())
    if not plan or not set(plan.values()) <= styles.keys() or heads % mesh.size():
        raise ValueError(
            f"shard='tp': {type(model).__name__} has the plan {plan or None} and {heads} heads of keys and values, but needs "
            f"a plan of only {', '.join(styles)}, and heads that {mesh.size()} ranks share equally. Pass shard='fsdp2', a "
            "function that shards the model, or another number of ranks."
        )
    model.to(mesh.device_type)  # type: ignore[arg-type]
    parallelize_module(model, mesh, {name: styles[style] for name, style in plan.items()})
