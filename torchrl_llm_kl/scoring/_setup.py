"""How a model is run while it is scored: route, mode, adapters, device; one scorer of a model at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from torchrl_llm_kl.scoring._model import find_body


@dataclass(frozen=True)
class Route:
    """How to get logits out of a model: body, then head at scored positions only; or the model's own full forward."""

    path: Literal["head", "full"]
    # Pass attention_mask: a causal model never attends to padding on its right, but flash attention saves the work.
    mask: bool = True
    positions: bool = True  # pass position_ids
    packed: bool = False  # the body can attend within a pack of several sequences


@dataclass(frozen=True, eq=False)
class Setup:
    """A model and the settings of one call; those without a comment are :class:`LogProbScorer`'s."""

    model: nn.Module
    route: Route
    device: torch.device  # where the model expects token ids
    temperature: float = 1.0
    adapters: bool = True
    dtype: torch.dtype | None = None
    grad: bool = False  # keep the graph and the model's own mode; otherwise evaluation mode without a graph

    @contextmanager
    def active(self) -> Iterator[None]:
        """Apply the settings to the model inside; restore its state afterwards, also after an error."""
        with ExitStack() as stack:
            if not self.adapters:
                stack.enter_context(adapters_disabled(self.model))
            if not self.grad:
                stack.enter_context(torch.no_grad())
                stack.enter_context(evaluating(self.model))
            if self.dtype is not None:
                stack.enter_context(torch.autocast(self.device.type, self.dtype))
            yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; restores each submodule's own mode afterwards, also after an error."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def send(data: Tensor, device: torch.device) -> Tensor:
    """Asynchronous host-to-device copy."""
    return data.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else data.to(device)


# ---------------------------------------------------------------------- PEFT adapters


def check_adapters(adapters: object) -> None:
    """Raise a TypeError unless ``adapters`` is True or False."""
    if not isinstance(adapters, bool):
        raise TypeError(
            f"adapters must be True or False, got {adapters!r}: True scores the model with its active adapters, False "
            "the base model. To score another adapter, activate it with model.set_adapter(name) and pass True."
        )


def adapter_layers(model: nn.Module) -> list[Any]:
    """PEFT's layers, whose ``disable_adapters`` is a flag; on a transformers model that name is a method."""
    return [module for module in model.modules() if isinstance(getattr(module, "disable_adapters", None), bool)]


def check_has_adapters(model: nn.Module) -> None:
    """Raise a ValueError if disabling the adapters would change nothing, or would change merged weights."""
    layers = adapter_layers(model)
    if not layers and not hasattr(model, "disable_adapter"):
        raise ValueError(
            f"{type(model).__name__} has no PEFT adapters to switch off: as its own reference its KL would be 0 "
            "everywhere. Pass a reference model, or wrap the policy with peft.get_peft_model first."
        )
    if any(getattr(layer, "merged", False) for layer in layers):
        raise ValueError(
            f"the PEFT adapters of {type(model).__name__} are merged into its weights, and switching them off would undo "
            "the merge: call unmerge_adapter() first."
        )


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """The base model inside; restores each adapter and every ``requires_grad`` afterwards, also after an error."""
    check_has_adapters(model)
    layers = adapter_layers(model)
    enabled = [layer for layer in layers if not layer.disable_adapters]
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        # A PeftModel also disables what is no layer: prompts and prefixes.
        with cast(Any, model).disable_adapter() if hasattr(model, "disable_adapter") else nullcontext():
            for layer in layers:
                if not layer.disable_adapters:
                    layer.enable_adapters(False)
            yield
    finally:
        for layer in layers:
            if layer.disable_adapters != (layer not in enabled):
                layer.enable_adapters(layer in enabled)
        for parameter, flag in trainable:
            parameter.requires_grad_(flag)


# ---------------------------------------------------------------------- locks

_LOCKS: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_LOCKS_GUARD = threading.Lock()


@contextmanager
def locked(*models: Any) -> Iterator[None]:
    """Hold the lock of each model's body: a call may change the model's mode, adapters and attention while it runs."""
    with ExitStack() as stack:
        # Models that share a body share its lock. One order for all callers, so that no two wait for each other.
        for model in sorted((find_body(m) or m if isinstance(m, nn.Module) else m for m in models), key=id):
            with _LOCKS_GUARD:
                lock = _LOCKS.setdefault(model, threading.RLock())
            stack.enter_context(lock)
        yield
