"""Which sequences share a forward."""

from __future__ import annotations

from torch import Tensor

__all__ = ["plan_micro_batches"]


def plan_micro_batches(lengths: Tensor, tokens_per_batch: int) -> list[Tensor]:
    """Split sequences into micro-batches of similar length under a token budget.

    A micro-batch costs ``rows * longest``: padding counts. The longest sequences come first, so that a run that does
    not fit into memory fails at once.

    Args:
        lengths: tokens to forward per sequence; ``[S]``, int64. A sequence of 0 tokens is in no micro-batch.
        tokens_per_batch: the budget. A sequence longer than the budget gets a micro-batch of its own.

    Returns:
        Sequence indices, int64 on the CPU, one tensor for each micro-batch; together every sequence of at least one
        token exactly once.

    Raises:
        ValueError: if the budget is below 1 or a length is negative.

    Example:
        >>> import torch
        >>> [batch.tolist() for batch in plan_micro_batches(torch.tensor([2, 9, 0, 3, 4]), 10)]
        [[1], [4, 3], [0]]
    """
    if tokens_per_batch < 1:
        raise ValueError(f"tokens_per_batch must be at least 1, got {tokens_per_batch}")
    longest_first, order = lengths.cpu().sort(descending=True, stable=True)
    if len(order) and int(longest_first[-1]) < 0:
        raise ValueError(f"lengths must not be negative, got {int(longest_first[-1])} for sequence {int(order[-1])}")
    batches = []
    start, stop = 0, int((longest_first > 0).sum())
    while start < stop:
        rows = max(1, tokens_per_batch // int(longest_first[start]))
        batches.append(order[start : min(start + rows, stop)])
        start += rows
    return batches
