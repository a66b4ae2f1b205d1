"""Models that are wrapped or sharded over ranks: DDP, FSDP, FSDP2.

Such a model gathers weights and synchronises gradients in hooks around its forward. So a whole score, with all its packs and
the head, runs inside one call of the model, and the calls of its layers are as many on each rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

Result = TypeVar("Result")

# ---------------------------------------------------------------------- what wraps a model


def unwrapped(model: Any) -> Any:
    """The model inside DDP, FSDP and ``torch.compile``."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and dist.is_available() and isinstance(model, _wrappers()):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


_GROUPS: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()


def groups_of(*models: nn.Module) -> list[Any]:
    """The process groups that take part in a forward or backward of ``models``; none for models of one process."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    for model in models:
        if model not in _GROUPS:
            _GROUPS[model] = _find_groups(model)
    return list({id(group): group for model in models for group in _GROUPS[model]}.values())


def _find_groups(model: nn.Module) -> list[Any]:
    from torch.distributed.tensor import DTensor

    found: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, _wrappers()):
            found[id(module.process_group)] = module.process_group
        if is_fsdp2(module):
            module.reshard()  # layers may be unsharded after a forward; then their parameters do not tell
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            found |= {id(group): group for group in parameter.device_mesh.get_all_groups()}
    return list(found.values())


def agree_on_most(number: int, groups: Sequence[Any]) -> int:
    """The largest ``number`` of all ranks of the groups."""
    for group in groups:
        kind = dist.get_backend(group)
        device = torch.device("cuda", torch.cuda.current_device()) if kind == "nccl" else torch.device("cpu")
        most = torch.tensor(number, device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        number = int(most)
    return number


def _wrappers() -> tuple[type, ...]:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel, FullyShardedDataParallel


def is_fsdp2(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


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
        module = module if not part else getattr(module, part)
        chain.append(module)
    return [module for module in (*chain, head) if is_fsdp2(module) or isinstance(module, _wrappers())]


def _call_with(module: nn.Module, work: Callable[[], Result]) -> Result:
    """Call ``module`` with ``work`` in place of its forward."""
    replaced = unwrapped(module)
    before = replaced.__dict__.get("forward")
    replaced.__dict__["forward"] = lambda *_, **__: work()
    try:
        return module()
    finally:
        if before is None:
            del replaced.__dict__["forward"]
        else:
            replaced.__dict__["forward"] = before
