"""Which answers are the best of their group."""

from __future__ import annotations

from torch import Tensor

from torchrl_llm_kl.advantages._groups import Groups
from torchrl_llm_kl.advantages._registry import advantage

__all__ = ["best_of_group"]


@advantage("best_of_group", "outcome", source="Dong et al. 2023 (RAFT, arXiv 2304.06767), algorithm 1")
def best_of_group(reward: Tensor, group: Tensor) -> Tensor:
    """1 for the best answers of each group, 0 for all others: what rejection sampling trains on.

    Written under ``loss_mask`` it takes all but the best out of a loss; as an advantage of the plain policy gradient it gives
    the same direction, divided by the tokens of all answers.

    Args:
        reward: the outcome of each sequence; ``[B]``.
        group: equal for the sequences of a group; int ``[B]``.

    Returns:
        ``[B]`` of 0 and 1, without graph. Equally good answers are all the best; so is a sequence alone.

    Raises:
        ValueError: if the shapes differ.

    Example:
        >>> import torch
        >>> best_of_group(torch.tensor([1.0, 2.0, 2.0, -1.0]), torch.tensor([5, 5, 5, 8]))
        tensor([0., 1., 1., 1.])

    Source: Dong et al. 2023 (RAFT, arXiv 2304.06767), algorithm 1.
    """
    return (reward == Groups(group).max(reward)).to(reward.dtype)
