"""The weights of whatever torchrl and torch hold weights in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn

__all__ = ["state_dict_of"]


def state_dict_of(weights: Any) -> dict[str, Tensor]:
    """Tensors by the names that ``state_dict()`` gives them.

    Args:
        weights: a module, a TensorDict of its parameters (nested, as torchrl's collectors hold them), or a mapping. Those of a
            TorchRL wrapper lose the prefix of the wrapper.

    Raises:
        TypeError: if it is something else.
    """
    if isinstance(weights, nn.Module):
        inner = getattr(weights, "model", None)
        wrapped = hasattr(weights, "input_mode") and isinstance(inner, nn.Module)
        return dict((inner if wrapped and inner is not None else weights).state_dict())
    if isinstance(weights, TensorDictBase):
        return {key: value.data for key, value in weights.flatten_keys(".").items()}
    if isinstance(weights, Mapping):
        return dict(weights)
    raise TypeError(
        f"weights are a module, a TensorDict or a mapping of names to tensors, got {type(weights).__name__}"
    )
