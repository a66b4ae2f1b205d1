"""Several ranks: their shares, random numbers that do not depend on their number, sharded models, checkpoints."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import LogitsProcessor

from countdown.sharing import SENT_BACK, join
from countdown.task import Problem

# ------------------------------------------------------------------ ranks


def start_ranks() -> torch.device:
    """Join the ranks that torchrun started, if it did; returns this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return device


@dataclass(frozen=True)
class Ranks:
    """This rank among all; the only one if torch.distributed is not initialised."""

    number: int = field(default_factory=lambda: dist.get_rank() if dist.is_initialized() else 0)
    count: int = field(default_factory=lambda: dist.get_world_size() if dist.is_initialized() else 1)

    @property
    def first(self) -> bool:
        """Whether this rank prints and writes."""
        return self.number == 0

    def share(self, indices: range) -> range:
        """This rank's part of ``indices``, which are dealt in order; sizes differ by one at most."""
        size, more = divmod(len(indices), self.count)
        start = self.number * size + min(self.number, more)
        return indices[start : start + size + (self.number < more)]

    def add_up(self, value: float) -> float:
        """The sum over all ranks."""
        total = torch.tensor(value, dtype=torch.float64)
        if self.count > 1:
            dist.all_reduce(total)
        return float(total)

    def any(self, flag: bool) -> bool:
        """Whether it is True on any rank."""
        return self.add_up(float(flag)) > 0

    def gather(self, answers: TensorDictBase) -> TensorDictBase:
        """The answers of all ranks, in order: token ids, log-probs and rewards, no text.

        A few bytes per token. Every rank then sees the whole batch, so that advantages that compare answers of several ranks
        and all metrics equal the ones of a single process.
        """
        answers = answers.select(*SENT_BACK, strict=False).contiguous().cpu()
        if self.count == 1:
            return answers
        shares: list[Any] = [None] * self.count
        dist.all_gather_object(shares, answers)
        return join(shares)

    def from_first(self, model: nn.Module) -> None:
        """Copy the first rank's weights to all."""
        if self.count > 1:
            for value in model.state_dict().values():
                dist.broadcast(value, 0)

    def wait(self) -> None:
        """Wait for all."""
        if self.count > 1:
            dist.barrier()


class Stop:
    """Is True after Ctrl-C, or after the signal by which torchrun and schedulers end a process, which no longer ends it."""

    def __init__(self) -> None:
        self._asked = False

    def __bool__(self) -> bool:
        return self._asked

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Take the signals."""
        before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, *_: Any) -> None:
        self._asked = True


# ------------------------------------------------------------------ random numbers for each problem


def generator(*key: int | str) -> torch.Generator:
    """A separate generator for a key such as (seed, step, problem): the draw does not depend on the rank or the batch."""
    return torch.Generator().manual_seed(random.Random(repr(key)).getrandbits(32))


def problem_at(problems: Sequence[Problem], index: int, *, seed: int) -> Problem:
    """The problem that comes as number ``index`` in a run: all problems in random order, then all in another one."""
    epoch, place = divmod(index, len(problems))
    order = torch.randperm(len(problems), generator=generator(seed, "order", epoch))
    return problems[int(order[place])]


class Gumbel(LogitsProcessor):
    """Adds Gumbel noise, from one generator for each problem: the most likely token is then an exact sample.

    ``argmax(logits - log E)`` with exponential E has the softmax as its distribution. torch's multinomial draws for a whole
    batch from one generator instead, so that an answer depends on the answers beside it, and so on the number of ranks.
    """

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._generators: list[torch.Generator] = []

    def start(self, generators: Sequence[torch.Generator]) -> None:
        """Begin a batch of ``group_size`` answers to each problem."""
        self._generators = list(generators)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Add the noise of the next token, ``[B, V]``."""
        shape = (self._group_size, scores.shape[-1])
        drawn = [torch.empty(shape, dtype=torch.float64).exponential_(generator=g) for g in self._generators]
        return scores.double() - torch.cat(drawn).log().to(scores.device)


# ------------------------------------------------------------------ sharded models


def shard(model: nn.Module) -> None:
    """Shard the weights over the ranks, layer by layer (FSDP2). A single process keeps its model unchanged."""
    if dist.is_initialized():
        body = getattr(model, "body", None)  # of a critic
        for layer in (model.get_decoder() if body is None else body).layers:  # type: ignore[operator]
            fully_shard(layer)
        fully_shard(model)


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Gather the weights once, for generation: ranks may then make different numbers of forwards.

    In between a rank holds the whole model. One that is too large for that samples in an engine (vLLM, SGLang), which gets the
    weights after each step.
    """
    parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not model, recurse=False)  # torch's default: the root stays whole
            part.reshard()


# ------------------------------------------------------------------ checkpoints


def save(
    folder: Path, state: dict[str, Any], models: nn.Module, optimizer: torch.optim.Optimizer, **parts: Any
) -> None:
    """Save a run: sharded tensors in ``checkpoint-<step>``, each rank its own, and ``state`` in ``run.json``.

    Args:
        folder: of the run. Its earlier checkpoint is removed once the new one is complete.
        state: plain values, with the number of steps done as ``"step"``.
        models: all that are saved.
        optimizer: of some of their parameters.
        parts: objects with ``state_dict`` and ``load_state_dict``.
    """
    ranks, name = Ranks(), f"checkpoint-{state['step']}"
    sharded = {"models": get_model_state_dict(models), "optimizer": get_optimizer_state_dict(models, optimizer)}
    dcp.save(sharded | parts, checkpoint_id=folder / name, no_dist=ranks.count == 1)
    if ranks.first:
        new = folder / "run.json.new"
        new.write_text(json.dumps(state, indent=1) + "\n")
        new.rename(folder / "run.json")
        for earlier in folder.glob("checkpoint-*"):
            if earlier.name != name:
                shutil.rmtree(earlier)
    ranks.wait()


def load(folder: Path, models: nn.Module, optimizer: torch.optim.Optimizer, **parts: Any) -> None:
    """Load what :func:`save` saved on any number of ranks, into models that are sharded over these, or not."""
    step = read_state(folder)["step"]
    sharded = {"models": get_model_state_dict(models), "optimizer": get_optimizer_state_dict(models, optimizer)}
    dcp.load(sharded | parts, checkpoint_id=folder / f"checkpoint-{step}", no_dist=Ranks().count == 1)
    set_model_state_dict(models, sharded["models"])
    set_optimizer_state_dict(models, optimizer, sharded["optimizer"])


def read_state(folder: Path) -> dict[str, Any]:
    """The plain values of the last checkpoint."""
    state: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return state
