"""A causal language model's parts, configuration, inputs and outputs, whichever library it comes from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Configuration entries that scale the logits: 1 for a factor, -1 for a divisor.
_FACTORS = {"logit_scale": 1, "output_multiplier": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap")
_POSITION_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len")

# ---------------------------------------------------------------------- forward


def call(module: nn.Module, input_ids: Tensor, **options: Any) -> Any:
    """Call ``module`` by keyword, without the options that its ``forward`` does not name."""
    parameters = inspect.signature(module.forward).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        options = {name: value for name, value in options.items() if name in parameters}
        if "input_ids" not in parameters:
            return module(input_ids, **options)
    return module(input_ids=input_ids, **options)


def logits_of(output: Any) -> Tensor:
    """The logits ``[b, T, V]`` in the output of a language model."""
    return _tensor(output, "logits")


def hidden_of(output: Any) -> Tensor:
    """The last hidden states ``[b, T, H]`` in the output of a body."""
    return _tensor(output, "last_hidden_state")


def _tensor(output: Any, name: str) -> Tensor:
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
            f"{type(output).__name__}."
        )
    return found


# ---------------------------------------------------------------------- body and head


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


def body_and_head(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Both parts; a TypeError if the model does not expose them."""
    body, head = find_body(model), find_head(model)
    if body is None or head is None:
        raise TypeError(f"{type(model).__name__} has no separate body and head.")
    return body, head


@dataclass(frozen=True)
class LogitMap:
    """Turns the head's output into logits: a factor, then soft-capping ``c * tanh(logits / c)``."""

    scale: float = 1.0
    soft_cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)


def logit_map(model: nn.Module) -> LogitMap:
    """The factor and soft-cap in the model's configuration."""
    config = _text_config(model)
    scale = 1.0
    for name, power in _FACTORS.items():
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and value:
            scale *= float(value) ** power
    caps = [value for name in _SOFT_CAPS if isinstance(value := getattr(config, name, None), (int, float)) and value]
    return LogitMap(scale, float(caps[0]) if caps else None)


# ---------------------------------------------------------------------- configuration and weights


def vocab_size(model: nn.Module) -> int | None:
    """Number of token ids that the model can embed; None if unknown."""
    weight = getattr(_ask(model, "get_input_embeddings"), "weight", None)
    return weight.shape[0] if isinstance(weight, Tensor) and weight.ndim == 2 else None


def position_limit(model: nn.Module) -> int | None:
    """Number of positions that the configuration allows; None without a limit."""
    config = _text_config(model)
    limits = [getattr(config, name, None) for name in _POSITION_LIMITS]
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


def frequency_switches(model: nn.Module) -> set[int]:
    """Lengths beyond which the model uses other rotary frequencies (longrope); usually empty.

    The longest sequence of a forward decides for all, so sequences on either side of a switch must not share one.
    """
    config = _text_config(model)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(rope, Mapping):
        return set()
    kinds = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]  # for all layers, or by kind
    limits = [
        kind.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for kind in kinds
        if kind.get("rope_type", kind.get("type")) == "longrope"
    ]
    return {limit for limit in limits if isinstance(limit, int)}


def has_window(model: nn.Module) -> bool:
    """Whether the configuration limits some layers to a window of the past."""
    config = _text_config(model)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return any("sliding" in kind or "chunked" in kind for kind in kinds)
    window, limit = getattr(config, "sliding_window", None), position_limit(model)
    return isinstance(window, int) and (limit is None or window < limit)


def is_stateful(model: nn.Module) -> bool:
    """Whether the model declares a state along the sequence (recurrence, convolution)."""
    return any(getattr(module, "_is_stateful", False) for module in model.modules())


def layers_vary(model: nn.Module) -> bool:
    """Whether layers run again in the backward (checkpointing) or are dropped at random."""
    return any(
        getattr(module, "gradient_checkpointing", False) or (module.training and getattr(module, "layerdrop", 0))
        for module in model.modules()
    )


def is_on_meta(model: nn.Module) -> bool:
    """Whether weights are still to be loaded."""
    return any(parameter.is_meta for parameter in model.parameters())


def model_device(model: nn.Module, default: torch.device) -> torch.device:
    """The device on which the model expects token ids."""
    weight = getattr(_ask(model, "get_input_embeddings"), "weight", None)
    if isinstance(weight, Tensor):
        return weight.device
    return next((parameter.device for parameter in model.parameters()), default)


def _ask(model: nn.Module, method: str) -> Any:
    """``model.method()``; None if there is no such method or the model does not implement it."""
    function = getattr(model, method, None)
    try:
        return function() if callable(function) else None
    except (AttributeError, NotImplementedError):
        return None


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    return get_text_config(decoder=True) if callable(get_text_config) else config
