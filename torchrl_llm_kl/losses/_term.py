"""What an objective returns: one unreduced part of a loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_same_shape

__all__ = ["LossTerm"]


@dataclass(frozen=True, eq=False)
class LossTerm:
    """One part of a loss, before it is summed over tokens.

    A part that is a number for each sequence, or for each pair of sequences, has ``T = 1``.

    The mask must not depend on log-probs: it is what denominators are counted from, before any model has run. Tokens that
    an objective drops for what they are (clipped, too far from the sampler) keep their place in the mask and have the
    value 0.

    Args:
        name: the part is reported as ``loss_<name>``.
        value: to be minimised; nats or rewards per token; ``[*B, T]``. Whatever it holds where the mask is False is ignored.
        mask: True where a token counts; bool ``[*B, T]``.
        weight: factor of the whole part, dimensionless.
        metrics: numbers to log, by name: 0-dim tensors without graph, on the device of ``value``.
        aggregation: how this part is summed (see :func:`~torchrl_llm_kl.losses.aggregate`); None for as its surroundings say.

    Raises:
        ValueError: if value and mask have different shapes.
        TypeError: if the mask is not boolean.
    """

    name: str
    value: Tensor
    mask: Tensor
    weight: float | Tensor = 1.0
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    aggregation: str | None = None

    def __post_init__(self) -> None:
        check_same_shape(value=self.value, mask=self.mask)
        check_is_mask(mask=self.mask)

    def replace(self, **changes: Any) -> LossTerm:
        """The same part with other values for some of its fields."""
        return replace(self, **changes)


def check_is_mask(**named: Tensor | None) -> None:
    """Raise a TypeError for any tensor that is given and not boolean."""
    for name, tensor in named.items():
        if tensor is not None and tensor.dtype != torch.bool:
            raise TypeError(f"{name} must be boolean, got {tensor.dtype}: pass {name}.bool()")
