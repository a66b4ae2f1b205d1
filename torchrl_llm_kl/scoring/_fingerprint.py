"""Whether a model is still the one that was scored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["fingerprint"]

_SAMPLES = 16


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """Equal for the same weights in the same place, with the same adapters active.

    Addresses and version counters tell every change that autograd sees: an optimiser's step, ``load_state_dict``,
    ``.to``. Writing through ``.data``, as weight updaters do, bumps no counter: a few values of each tensor tell those.
    """
    tensors = [_local(t) for t in (*model.parameters(), *model.buffers())]
    where = tuple((t.data_ptr(), t.device, t.dtype, -1 if t.is_inference() else t._version) for t in tensors)
    samples: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        samples.setdefault(tensor.device, []).append(_samples(tensor))
    # One synchronisation for each device.
    values = tuple(torch.cat(some).cpu().numpy().tobytes() for some in samples.values())
    return where, values, _adapters(model)


def _local(tensor: Any) -> Tensor:
    """This process's part of a tensor that is spread over several."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _samples(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].double()


def _adapters(model: nn.Module) -> tuple[Any, ...]:
    """Which PEFT adapters are active, layer by layer."""
    return tuple(
        (module.disable_adapters, tuple(getattr(module, "active_adapters", ())), getattr(module, "merged", False))
        for module in model.modules()
        if isinstance(getattr(module, "disable_adapters", None), bool)
    )
