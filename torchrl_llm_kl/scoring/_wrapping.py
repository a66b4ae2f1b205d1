"""Models that are wrapped or sharded over ranks: DDP, FSDP, FSDP2, DeepSpeed.

Such a model gathers weights and synchronises gradients in hooks around its forward. So a whole score, with all its packs and
the head, runs inside one call of the model, and the calls of its layers are as many on each rank.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from torchrl_llm_kl._private import active_ddp, compiled_inside, deepspeed_groups, reshard_fsdp1
from torchrl_llm_kl.scoring._asked import asked
from torchrl_llm_kl.scoring._checkpoints import ABSENT, CheckpointError, swapped

Result = TypeVar("Result")

# ---------------------------------------------------------------------- what wraps a model


def unwrapped(model: object) -> Any:
    """The model inside DDP, FSDP, DeepSpeed and ``torch.compile``."""
    while True:
        inner = compiled_inside(model)
        if inner is None and dist.is_available() and isinstance(model, _wrappers()):
            inner = model.module  # type: ignore[attr-defined]
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _wrappers() -> tuple[type, ...]:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    deepspeed = sys.modules.get("deepspeed.runtime.engine")
    engines = () if deepspeed is None else (deepspeed.DeepSpeedEngine,)
    return DistributedDataParallel, FullyShardedDataParallel, *engines


def is_zero3(module: object) -> bool:
    """Whether hooks of DeepSpeed's ZeRO-3 gather the module's weights around its forward; until then they are empty."""
    return isinstance(module, nn.Module) and "ds_id" in module.__dict__


def is_fsdp2(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def reshard(model: nn.Module) -> None:
    """Free weights that are whole since a forward: until the next one, parameters are this rank's shards."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for module in model.modules():
        if is_fsdp2(module):
            cast(Any, module).reshard()
        elif isinstance(module, FullyShardedDataParallel):
            reshard_fsdp1(module)


def _has_hooks(module: nn.Module) -> bool:
    return is_fsdp2(module) or is_zero3(module) or isinstance(module, _wrappers())


def is_sharded(model: nn.Module) -> bool:
    """Whether hooks around forwards of its parts gather their weights; DDP's do not."""
    from torch.nn.parallel import DistributedDataParallel

    return any(_has_hooks(module) and not isinstance(module, DistributedDataParallel) for module in model.modules())


# ---------------------------------------------------------------------- what ranks agree on


class RankError(RuntimeError):
    """Another rank refused its share of the data; its own message says why."""


_GROUPS: weakref.WeakKeyDictionary[nn.Module, list[dist.ProcessGroup]] = weakref.WeakKeyDictionary()


class Ranks:
    """The ranks that take part in a forward or backward of some models; this process alone for models of one process.

    Attributes:
        groups: the process groups of ranks whose forwards are in step.
        witnesses: the groups of ranks that must hear of an error; more than ``groups`` inside a forward of DDP.
    """

    def __init__(self, models: Sequence[object]) -> None:
        groups: dict[int, dist.ProcessGroup] = {}
        self.witnesses: list[dist.ProcessGroup] = []
        if dist.is_available() and dist.is_initialized():
            for model in models:
                if isinstance(model, nn.Module):
                    own_groups = _GROUPS.get(model) or _groups_of(model)
                    if own_groups:  # a model of this process alone may be sharded later
                        _GROUPS[model] = own_groups
                    groups |= {id(group): group for group in own_groups}
            self.witnesses = list((groups or _groups_of_ddp(models)).values())
        self.groups = list(groups.values())

    def most(self, number: int) -> int:
        """The largest ``number`` of all ranks."""
        return _most(number, self.groups)

    def all(self, fact: bool) -> bool:
        """Whether it is so on all ranks."""
        return self.most(int(not fact)) == 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context for work without collectives: an error on one rank is an error on all, instead of a hang of the others."""
        try:
            yield
        except Exception:
            _most(1, self.witnesses)
            raise
        if _most(0, self.witnesses):
            raise RankError(_ELSEWHERE)


_ELSEWHERE = "another rank refused its share of the data: see that rank's error. Nothing was computed on this one."


def collective_device(backend: str) -> torch.device:
    """Where a backend of torch.distributed reduces tensors: the CPU for gloo, this process's accelerator for nccl or xccl."""
    kinds = dist.Backend.backend_capability
    parts = [part.rpartition(":")[2] for part in backend.split(",")]  # cpu:gloo,cuda:nccl
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or all("cpu" in kinds.get(part, ["cpu"]) for part in parts):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _most(number: int, groups: Sequence[dist.ProcessGroup]) -> int:
    for group in groups:
        most = torch.tensor(number, device=collective_device(dist.get_backend(group)))
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        number = int(most)
    return number


def _groups_of_ddp(models: Sequence[object]) -> dict[int, dist.ProcessGroup]:
    """The group of the DDP whose forward runs, if it holds a model and its backward synchronises gradients."""
    ddp = active_ddp()
    if ddp is None or not (torch.is_grad_enabled() and ddp.require_backward_grad_sync):
        return {}
    inside = any(module is model for module in ddp.modules() for model in models)
    return {id(ddp.process_group): ddp.process_group} if inside else {}


def _groups_of(model: nn.Module) -> list[dist.ProcessGroup]:
    from torch.distributed.tensor import DTensor

    groups: dict[int, dist.ProcessGroup] = {}
    for module in model.modules():
        if isinstance(module, _wrappers()):
            group: Any = asked(module, "process_group", object) or cast(Any, module).data_parallel_group
            groups[id(group)] = group
        if is_fsdp2(module):
            cast(Any, module).reshard()  # parameters that are whole do not tell their group
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            groups |= {id(group): group for group in parameter.device_mesh.get_all_groups()}
        groups |= {id(group): group for group in deepspeed_groups(parameter)}
    return list(groups.values())


class ErrorGuard:
    """Keeps a rank in step with the others after an error in its forwards; without ranks it does nothing.

    From the error on, layers that ranks share are called, and gather weights, but compute nothing.
    """

    def __init__(self, bodies: Sequence[nn.Module], ranks: Ranks) -> None:
        self._ranks = ranks
        inner = [m for body in bodies if ranks.groups for m in body.modules() if m is not body]
        self._layers = dict.fromkeys(m for m in inner if _has_hooks(m) and not is_zero3(m))
        # ZeRO-3 gathers weights ahead, in the order of earlier forwards: a rank in error cannot keep that.
        self._at_once = any(is_zero3(body) for body in bodies)
        self._called: list[nn.Module] = []
        self.error: Exception | None = None

    def forward(self, model: nn.Module, work: Callable[[], Result]) -> Result | None:
        """``work()``, which calls each layer of ``model`` once; None after an error, but the layers are called."""
        self._called = []
        with ExitStack() as stack:
            for layer in self._layers:
                inner = unwrapped(layer)
                stack.enter_context(replaced_forward(inner, partial(self._call, layer, inner.forward)))
            result = self.compute(work)
            if self.error is not None:
                self._call_rest(model)
        return result

    def compute(self, work: Callable[[], Result]) -> Result | None:
        """``work()``; None from the first error on."""
        if not self._ranks.groups or self._at_once:
            return work()
        if self.error is None:
            try:
                result = work()
                return result if self.error is None else None
            except Exception as error:
                self.error = self.error or error
        return None

    def check(self) -> None:
        """After the last forward: an error on one rank is an error on all."""
        own = 0
        if self.error is not None:  # ranks try again together after the first two kinds
            own = 1 if isinstance(self.error, CheckpointError) else 2 if is_out_of_memory(self.error) else 3
        worst = self._ranks.most(own)
        if self.error is not None and own == worst:
            raise self.error
        if worst:
            others = {1: CheckpointError(), 2: torch.OutOfMemoryError("another rank is out of memory.")}
            raise others.get(worst) or RankError(_ELSEWHERE)

    def _call_rest(self, module: nn.Module) -> None:
        """Call the layers in ``module`` that were not called yet, which compute nothing after an error."""
        for layer in module.modules():
            if layer in self._layers and layer not in self._called:
                layer(torch.zeros(1, 1, device=next(layer.parameters()).device))

    def _call(self, layer: nn.Module, forward: Callable[..., object], *args: Any, **options: Any) -> Any:
        self._called.append(layer)
        if self.error is None:
            try:
                return forward(*args, **options)
            except Exception as error:
                self.error = error
        self._call_rest(layer)
        return next(x for x in (*args, *options.values()) if isinstance(x, torch.Tensor))


# How allocators without an error class of their own begin: the CPU's on Linux and Windows, Metal's, and libraries of CUDA.
_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|\b[A-Z]+( backend| error:)? out of memory"
    r"|Invalid buffer size: |_STATUS_ALLOC_FAILED"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator failed, of whatever device."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or (isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None)


# ---------------------------------------------------------------------- one call


def inside(models: Sequence[tuple[nn.Module, nn.Module, nn.Module]], work: Callable[[], Result]) -> Result:
    """``work()`` inside one call of each model ``(model, body, head)``: between the hooks before and after its forward."""
    for model, body, head in reversed(models):
        for module in reversed(_callers(model, body, head)):
            work = partial(_call_with, module, work)
    return work()


def _callers(model: nn.Module, body: nn.Module, head: nn.Module) -> list[nn.Module]:
    """The modules whose hooks must run around a score, outermost first; those that contain the body, then the head."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    chain: list[nn.Module] = []
    path = next((name for name, module in model.named_modules() if module is body), "")
    module: nn.Module = model
    for part in ["", *path.split(".")][:-1]:
        module = module if not part else asked(module, part, nn.Module, module)
        chain.append(module)
    hooked = [module for module in (*chain, head) if _has_hooks(module)]
    return [
        m for i, m in enumerate(hooked) if i == 0 or unwrapped(hooked[i - 1]) is not m
    ]  # the call of a wrapper calls it


def _call_with(module: nn.Module, work: Callable[[], Result]) -> Result:
    """Call ``module`` with ``work`` in place of its forward."""
    with replaced_forward(unwrapped(module), lambda *_, **__: work()):
        return cast(Result, module())


def replaced_forward(module: nn.Module, forward: Callable[..., object]) -> AbstractContextManager[None]:
    """Context: ``module`` has another forward."""
    return swapped([(module, "forward", vars(module).get("forward", ABSENT), forward)])
