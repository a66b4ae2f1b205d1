"""Training only the tokens at which the policy decides something."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_range, check_same_shape
from torchrl_llm_kl.losses._numerics import Scalar, clean, masked_mean
from torchrl_llm_kl.losses._term import check_is_mask

__all__ = ["entropy_threshold", "top_entropy_mask"]


@torch.no_grad()
def top_entropy_mask(
    entropy: Tensor, mask: Tensor, *, fraction: Scalar = 0.2, threshold: Scalar | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """1 for the tokens at which the policy is least decided, 0 for all others.

    Args:
        entropy: of the policy's distribution over the vocabulary, nats; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        fraction: of the tokens that count, how many to keep, 0 to 1; see :func:`entropy_threshold` for the exact number. More
            are kept if several have the same entropy as the last. TRL: ``top_entropy_quantile``.
        threshold: keep what has at least this entropy, instead of a fraction of this batch: for the parts of a batch, that of
            the whole.

    Returns:
        Weights, ``[*B, T]``, without graph, 0 where the mask is False; metrics ``entropy_threshold`` and
        ``entropy_kept_fraction``.

    Raises:
        ValueError: if shapes differ or ``fraction`` is not in (0, 1].

    Example:
        >>> entropy = torch.tensor([[0.1, 2.0, 0.3, 1.0]])
        >>> top_entropy_mask(entropy, torch.tensor([[True, True, True, False]]), fraction=0.6)[0]
        tensor([[0., 1., 1., 0.]])

    Source: Wang et al. 2025 (arXiv 2506.01939), "Beyond the 80/20 Rule".
    """
    if threshold is None:
        threshold = entropy_threshold(entropy, mask, fraction)
    check_same_shape(mask=mask, entropy=entropy)
    check_is_mask(mask=mask)
    entropy = clean(entropy, mask)
    kept = (mask & (entropy >= threshold)).to(entropy.dtype)
    metrics = {
        "entropy_threshold": torch.as_tensor(threshold, dtype=entropy.dtype, device=entropy.device),
        "entropy_kept_fraction": masked_mean(kept, mask),
    }
    return kept, metrics


@torch.no_grad()
def entropy_threshold(entropy: Tensor, mask: Tensor, fraction: Scalar = 0.2) -> Tensor:
    """The entropy that a fraction of the tokens reach: the ``k``-th largest, ``k`` being ``fraction`` times their number.

    ``k`` is rounded to the nearest whole number (halves to the even one), and at least 1.

    Args:
        entropy: nats; ``[*B, T]``.
        mask: tokens that count; bool, same shape.
        fraction: 0 to 1.

    Returns:
        0-dim; 0 if no token counts. It is not read on the host.

    Raises:
        ValueError: if shapes differ or ``fraction`` is not in (0, 1].

    Example:
        >>> entropy_threshold(torch.tensor([[0.1, 2.0, 0.3, 1.0]]), torch.ones(1, 4, dtype=torch.bool), fraction=0.5)
        tensor(1.)

    Source: Wang et al. 2025 (arXiv 2506.01939).
    """
    check_range(above=0.0, high=1.0, fraction=fraction)
    check_same_shape(mask=mask, entropy=entropy)
    check_is_mask(mask=mask)
    entropy = clean(entropy, mask)
    if entropy.numel() == 0:
        return entropy.new_zeros(())
    largest = torch.where(mask, entropy, -torch.inf).flatten().sort(descending=True).values
    tokens = mask.sum()
    k = (fraction * tokens).round().clamp(min=1).long()
    return torch.where(tokens == 0, 0, largest.gather(0, (k - 1).reshape(1)).reshape(()))
