"""Models that are wrapped or sharded over ranks: DDP, FSDP, FSDP2, DeepSpeed.

Such a model gathers weights and synchronises gradients in hooks around its forward. A whole score, with all its packs and the
head, therefore runs inside one call of the model, and each rank calls the layers equally often.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchrl_llm_kl._private import active_ddp, compiled_inside, deepspeed_groups, reshard_fsdp1
from torchrl_llm_kl.scoring._checkpoints import ABSENT, CheckpointError, swapped

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

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

    deepspeed = sys.modules.get("deepspeed.runtime.engine")
    engines = () if deepspeed is None else (deepspeed.DeepSpeedEngine,)
    return DistributedDataParallel, FullyShardedDataParallel, *engines


def is_zero3(module: object) -> bool:
    """Whether hooks of DeepSpeed's ZeRO-3 gather the module's weights around its forward. Before, they are empty."""
    return isinstance(module, nn.Module) and "ds_id" in module.__dict__


def is_fsdp2(module: nn.Module) -> TypeGuard[FSDPModule]:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def reshard(model: nn.Module) -> None:
    """Free the whole weights that a forward left behind. Parameters are this rank's shards until the next forward."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for module in model.modules():
        if is_fsdp2(module):
            module.reshard()
        elif isinstance(module, FullyShardedDataParallel):
            reshard_fsdp1(module)


def _has_hooks(module: nn.Module) -> bool:
    return is_fsdp2(module) or is_zero3(module) or isinstance(module, _wrappers())


def is_sharded(model: nn.Module) -> bool:
    """Whether hooks around the forwards of its parts gather their weights. Hooks of DDP do not."""
    return any(_has_hooks(module) and not isinstance(module, DistributedDataParallel) for module in model.modules())


# ---------------------------------------------------------------------- agreement of ranks


class RankError(RuntimeError):
    """Another rank refused its share of the data. That rank's error has the reason."""


# The search walks through all modules, which would take time in every score.
_GROUPS: weakref.WeakKeyDictionary[nn.Module, list[dist.ProcessGroup]] = weakref.WeakKeyDictionary()


class Ranks:
    """The ranks that take part in a forward or backward of some models. Without wrappers, only this process.

    Attributes:
        groups: the process groups of ranks whose forwards are in step.
        witnesses: the groups of ranks to which an error is sent. Inside a forward of DDP they are more than ``groups``.
        context: the group whose ranks forward the same sequences together.
    """

    def __init__(self, models: Sequence[object], context: dist.ProcessGroup | None = None) -> None:
        self.context = context
        groups: dict[int, dist.ProcessGroup] = {} if context is None else {id(context): context}
        self.witnesses: list[dist.ProcessGroup] = []
        if dist.is_available() and dist.is_initialized():
            for model in models:
                # Models in other processes have no ranks here.
                if isinstance(model, nn.Module):
                    own_groups = _GROUPS.get(model) or _groups_of(model)
                    if own_groups:  # not cached if empty: the model may be sharded later
                        _GROUPS[model] = own_groups
                    groups |= {id(group): group for group in own_groups}
            around = {} if groups and context is None else _groups_of_ddp(models)
            self.witnesses = list((groups | around).values())
        self.groups = list(groups.values())

    def most(self, number: int) -> int:
        """The largest ``number`` over all ranks."""
        return _most(number, self.groups)

    def all(self, fact: bool) -> bool:
        """Whether ``fact`` holds on all ranks."""
        return self.most(int(not fact)) == 0

    def same_context(self, number: int) -> bool:
        """Whether all ranks of the context have the same ``number``."""
        return self.context is None or _most(number, [self.context]) == -_most(-number, [self.context])

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context for work without collectives. An error on one rank is raised on all, so the others do not hang."""
        try:
            yield
        except Exception:
            _most(1, self.witnesses)
            raise
        if _most(0, self.witnesses):
            raise RankError(_ELSEWHERE)


_ELSEWHERE = "another rank refused its share of the data: see that rank's error. Nothing was computed on this one."


def collective_device(backend: str) -> torch.device:
    """The device on which a backend of torch.distributed reduces tensors: the CPU for gloo, the accelerator for nccl."""
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


def most_of_ranks(number: int) -> int:
    """The largest ``number`` over all ranks of the default group."""
    return _most(number, [dist.GroupMember.WORLD] if dist.is_initialized() and dist.GroupMember.WORLD else [])


def _groups_of_ddp(models: Sequence[object]) -> dict[int, dist.ProcessGroup]:
    """The group of the DDP whose forward is running, if it contains a model and synchronises gradients."""
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
            group: dist.ProcessGroup = getattr(module, "process_group", None) or cast(Any, module).data_parallel_group
            groups[id(group)] = group
        if is_fsdp2(module):
            module.reshard()  # whole parameters are plain tensors, without a process group
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            groups |= {id(group): group for group in parameter.device_mesh.get_all_groups()}
        groups |= {id(group): group for group in deepspeed_groups(parameter)}
    return list(groups.values())


class ErrorGuard:
    """Keeps a rank in step with the others after an error in its forwards. Without ranks it does nothing.

    After the error, layers that ranks share are still called and gather weights, but they compute nothing.
    """

    def __init__(self, bodies: Sequence[nn.Module], ranks: Ranks) -> None:
        self._ranks = ranks
        # A rank that failed cannot take part in the exchanges of a context, so its error is raised at once.
        in_step = bool(ranks.groups) and ranks.context is None
        inner = [m for body in bodies if in_step for m in body.modules() if m is not body]
        self._layers = dict.fromkeys(m for m in inner if _has_hooks(m) and not is_zero3(m))
        # ZeRO-3 prefetches weights in the order of earlier forwards, which a failed rank cannot reproduce.
        self._at_once = not in_step or any(is_zero3(body) for body in bodies)
        self._called: list[nn.Module] = []
        self.error: Exception | None = None

    def forward(self, model: nn.Module, work: Callable[[], Result]) -> Result | None:
        """Run ``work``, which calls each layer of ``model`` once. After an error, call the layers and return None."""
        self._called = []
        with ExitStack() as stack:
            for layer in self._layers:
                inner = unwrapped(layer)
                stack.enter_context(replaced_forward(inner, partial(self._call, layer, inner.forward)))
            result = self.compute(work)
            # The other ranks wait in the collectives of the layers that this rank has not called.
            if self.error is not None:
                self._call_rest(model)
        return result

    def compute(self, work: Callable[[], Result]) -> Result | None:
        """Run ``work``. Returns None from the first error on."""
        if self._at_once:
            return work()
        if self.error is None:
            try:
                result = work()
                return result if self.error is None else None
            except Exception as error:
                self.error = self.error or error
        return None

    def check(self) -> None:
        """Raise the error of any rank on all of them. Called after the last forward."""
        own = 0
        if self.error is not None:  # all ranks retry together after the first two kinds of error
            own = 1 if isinstance(self.error, CheckpointError) else 2 if is_out_of_memory(self.error) else 3
        worst = self._ranks.most(own)
        if self.error is not None and own == worst:
            raise self.error
        if worst:
            others = {1: CheckpointError(), 2: torch.OutOfMemoryError("another rank is out of memory.")}
            raise others.get(worst) or RankError(_ELSEWHERE)

    def _call_rest(self, module: nn.Module) -> None:
        """Call the remaining layers of ``module``. They compute nothing after an error."""
        for layer in module.modules():
            if layer in self._layers and layer not in self._called:
                layer(torch.zeros(1, 1, device=next(layer.parameters()).device))

    def _call(self, layer: nn.Module, forward: Callable[..., object], *args: object, **options: object) -> object:
        self._called.append(layer)
        if self.error is None:
            try:
                return forward(*args, **options)
            except Exception as error:
                self.error = error
        self._call_rest(layer)
        # After an error, pass the input on: the next layer needs a tensor of the same shape.
        return next(x for x in (*args, *options.values()) if isinstance(x, torch.Tensor))


# Messages of allocators without their own error class: the CPU on Linux and Windows, Metal, and libraries of CUDA.
_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|\b[A-Z]+( backend| error:)? out of memory"
    r"|Invalid buffer size: |_STATUS_ALLOC_FAILED"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the allocator of any device failed."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or (isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None)


# ---------------------------------------------------------------------- one call


def inside(models: Sequence[tuple[nn.Module, nn.Module, nn.Module]], work: Callable[[], Result]) -> Result:
    """Run ``work`` inside one call of each ``(model, body, head)``, between the hooks around the model's forward."""
    for model, body, head in reversed(models):
        for module in reversed(_callers(model, body, head)):
            work = partial(_call_with, module, work)
    return work()


def _callers(model: nn.Module, body: nn.Module, head: nn.Module) -> list[nn.Module]:
    """The modules whose hooks must run around a score: those that contain the body, outermost first, then the head."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    path = next((name for name, module in model.named_modules() if module is body), "")
    chain = [module for name, module in model.named_modules() if not name or path.startswith(f"{name}.")]
    hooked = [module for module in (*chain, head) if _has_hooks(module)]
    # The call of a wrapper also calls the module inside it.
    return [module for i, module in enumerate(hooked) if i == 0 or unwrapped(hooked[i - 1]) is not module]


def _call_with(module: nn.Module, work: Callable[[], Result]) -> Result:
    """Call ``module`` with ``work`` as its forward, so that its hooks run."""
    with replaced_forward(unwrapped(module), lambda *_, **__: work()):
        return cast(Result, module())


def replaced_forward(module: nn.Module, forward: Callable[..., object]) -> AbstractContextManager[None]:
    """Context: ``module`` has another forward."""
    return swapped([(module, "forward", vars(module).get("forward", ABSENT), forward)])
