"""Loss terms, corrected."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrl_llm_kl.losses._numerics import sequence_mean
from torchrl_llm_kl.losses._term import LossTerm

__all__ = ["apply_correction"]


def apply_correction(terms: Sequence[LossTerm], weights: Tensor, mask: Tensor | None = None) -> tuple[LossTerm, ...]:
    """Multiply the values of loss terms. Masks stay, and with them what the terms are divided by.

    A term of one value per token gets the weight of each token. One of a value per sequence ``[*B, 1]`` gets the mean of the
    weights of that sequence's tokens: for weights that are the same for all of them, these themselves. Hand over the terms
    that are to be corrected: usually the objective, not the KL to the reference.

    Args:
        terms: from an objective.
        weights: from a correction; ``[*B, T]``.
        mask: tokens that the weights were made for; bool, same shape. Needed for terms of a value per sequence: a token that
            was dropped counts in the mean, one that never was there does not.

    Returns:
        New terms. A value whose weight is 0 passes no gradient, whatever it is.

    Raises:
        ValueError: if a term is neither per token nor per sequence of the weights, or ``mask`` is needed and missing.

    Example:
        >>> term = LossTerm("objective", torch.tensor([[1.0, 2.0]]), torch.ones(1, 2, dtype=torch.bool))
        >>> apply_correction([term], torch.tensor([[2.0, 0.0]]))[0].value
        tensor([[2., 0.]])
    """
    return tuple(_corrected(term, weights, mask) for term in terms)


def _corrected(term: LossTerm, weights: Tensor, mask: Tensor | None) -> LossTerm:
    if term.value.shape != weights.shape:
        if term.value.shape != (*weights.shape[:-1], 1):
            raise ValueError(
                f"{term.name} has shape {tuple(term.value.shape)}, the weights {tuple(weights.shape)}: a correction is for "
                f"terms of one value per token or per sequence"
            )
        if mask is None:
            raise ValueError(
                f"{term.name} has one value per sequence: pass mask=, to average the weights over its tokens"
            )
        weights = sequence_mean(weights, mask)
    weights = weights.to(term.value.dtype)
    return term.replace(value=torch.where(weights == 0, 0, term.value) * weights)
