"""Talk to a causal language model: find its parts, call them by keyword, read what they return."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "LogitMap",
    "call",
    "evaluating",
    "find_body",
    "find_head",
    "frequency_switches",
    "has_window",
    "is_on_meta",
    "is_stateful",
    "logit_map",
    "logits_of",
    "model_device",
    "position_limit",
    "vocab_size",
]

# A configuration's name for a factor on the logits, and whether it multiplies (1) or divides (-1).
_FACTORS = {"logit_scale": 1, "output_multiplier": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap")
_POSITION_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len")


def call(module: nn.Module, input_ids: Tensor, **options: Any) -> Any:
    """Call ``module``, everything by keyword, leaving out the options that its ``forward`` does not name."""
    parameters = inspect.signature(module.forward).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        options = {name: value for name, value in options.items() if name in parameters}
        if "input_ids" not in parameters:
            return module(input_ids, **options)
    return module(input_ids=input_ids, **options)


def logits_of(output: Any) -> Tensor:
    """The logits ``[b, T, V]`` in what a language model returned."""
    return _read(output, "logits")


def hidden_of(output: Any) -> Tensor:
    """The last hidden states ``[b, T, H]`` in what a body returned."""
    return _read(output, "last_hidden_state")


def _read(output: Any, name: str) -> Tensor:
    found = getattr(output, name, None)
    if found is None and isinstance(output, Mapping):
        found = output.get(name)
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0]
    if found is None and isinstance(output, Tensor):
        found = output
    if not isinstance(found, Tensor):
        raise TypeError(
            f"expected the model to return an object or mapping with {name!r}, or a tuple that starts with it, got "
            f"{type(output).__name__}"
        )
    return found


def find_head(model: nn.Module) -> nn.Module | None:
    """The module that maps hidden states to logits."""
    head = _ask(model, "get_output_embeddings")
    return head if isinstance(head, nn.Module) else None


def find_body(model: nn.Module) -> nn.Module | None:
    """The module that maps token ids to the hidden states that the head reads."""
    for candidate in (_ask(model, "get_decoder"), getattr(model, "base_model", None), getattr(model, "model", None)):
        if isinstance(candidate, nn.Module) and candidate is not model:
            return candidate
    return None


@dataclass(frozen=True)
class LogitMap:
    """What is done to the head's output: a factor, then soft-capping ``c * tanh(logits / c)``."""

    scale: float = 1.0
    soft_cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)


def logit_map(model: nn.Module) -> LogitMap:
    """What the model's configuration says is done to the head's output."""
    config = _text_config(model)
    scale = 1.0
    for name, power in _FACTORS.items():
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and value:
            scale *= float(value) ** power
    caps = [value for name in _SOFT_CAPS if isinstance(value := getattr(config, name, None), (int, float)) and value]
    return LogitMap(scale, float(caps[0]) if caps else None)


def frequency_switches(model: nn.Module) -> set[int]:
    """The lengths beyond which the model turns its positions by other frequencies (longrope); empty if it never does.

    Sequences on both sides of one must not share a forward: the longest decides for all.
    """
    config = _text_config(model)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(rope, Mapping):
        return set()
    kinds = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]  # one for all layers, or by kind
    limits = [
        kind.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for kind in kinds
        if kind.get("rope_type", kind.get("type")) == "longrope"
    ]
    return {limit for limit in limits if isinstance(limit, int)}


def has_window(model: nn.Module) -> bool:
    """Whether the configuration says that some layers do not see the whole past."""
    config = _text_config(model)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return any("sliding" in kind or "chunked" in kind for kind in kinds)
    window, limit = getattr(config, "sliding_window", None), position_limit(model)
    return isinstance(window, int) and (limit is None or window < limit)


def is_stateful(model: nn.Module) -> bool:
    """Whether the model says that it carries a state along a sequence (recurrence, convolution)."""
    return any(getattr(module, "_is_stateful", False) for module in model.modules())


def position_limit(model: nn.Module) -> int | None:
    """How many positions the model's configuration allows; None where it states no limit."""
    config = _text_config(model)
    limits = [getattr(config, name, None) for name in _POSITION_LIMITS]
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


def vocab_size(model: nn.Module) -> int | None:
    """How many token ids the model can embed; None where it does not say."""
    weight = getattr(_ask(model, "get_input_embeddings"), "weight", None)
    return weight.shape[0] if isinstance(weight, Tensor) and weight.ndim == 2 else None


def model_device(model: nn.Module, default: torch.device) -> torch.device:
    """Where the model expects token ids."""
    weight = getattr(_ask(model, "get_input_embeddings"), "weight", None)
    if isinstance(weight, Tensor):
        return weight.device
    return next((parameter.device for parameter in model.parameters()), default)


def is_on_meta(model: nn.Module) -> bool:
    """Whether weights are still to be loaded."""
    return any(parameter.is_meta for parameter in model.parameters())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, each submodule's own mode again afterwards, also after an error."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def _ask(model: nn.Module, method: str) -> Any:
    """``model.method()``; None where there is no such method, or the model refuses."""
    function = getattr(model, method, None)
    try:
        return function() if callable(function) else None
    except (AttributeError, NotImplementedError):
        return None


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    return get_text_config(decoder=True) if callable(get_text_config) else config
