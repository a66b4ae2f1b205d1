"""The base model under a model with PEFT adapters, without a second copy of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

from torch import nn

__all__ = ["adapters_off", "check_has_adapters"]


def _adapter_layers(model: nn.Module) -> list[Any]:
    """PEFT's layers: they can be switched, and know whether they are off (a transformers model has methods so named)."""
    return [module for module in model.modules() if isinstance(getattr(module, "disable_adapters", None), bool)]


def check_has_adapters(model: nn.Module) -> None:
    """Check that switching the adapters off would change anything, and nothing for good.

    Raises:
        ValueError: if there are no adapters, or they are merged into the weights.
    """
    layers = _adapter_layers(model)
    if not layers and not hasattr(model, "disable_adapter"):
        raise ValueError(
            f"{type(model).__name__} has no PEFT adapters to switch off: as its own reference its KL would be 0 everywhere. "
            f"Pass a reference model, or wrap the policy with peft.get_peft_model first."
        )
    if any(getattr(layer, "merged", False) for layer in layers):
        raise ValueError(
            f"the PEFT adapters of {type(model).__name__} are merged into its weights, which switching them off would undo: "
            f"call unmerge_adapter() first."
        )


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The base model inside; each adapter's state and every ``requires_grad`` as before afterwards, also after an error."""
    check_has_adapters(model)
    layers = _adapter_layers(model)
    on = [layer for layer in layers if not layer.disable_adapters]
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        # A PeftModel also switches off what is no layer: prompts and prefixes.
        with cast(Any, model).disable_adapter() if hasattr(model, "disable_adapter") else nullcontext():
            for layer in layers:
                if not layer.disable_adapters:
                    layer.enable_adapters(False)
            yield
    finally:
        for layer in layers:
            if layer.disable_adapters != (layer not in on):
                layer.enable_adapters(layer in on)
        for parameter, flag in trainable:
            parameter.requires_grad_(flag)
