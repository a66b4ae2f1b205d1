"""REINFORCE with the mean of the others as the baseline."""

from __future__ import annotations

from torch import Tensor

from torchrl_llm_kl.advantages._groups import Groups
from torchrl_llm_kl.advantages._registry import advantage

__all__ = ["rloo"]


@advantage("rloo", "outcome", source="Ahmadian et al. 2024 (arXiv 2402.14740); Kool et al. 2019")
def rloo(reward: Tensor, group: Tensor) -> Tensor:
    r"""``r`` minus the mean reward of the *other* sequences of the group, which is ``n / (n - 1) * (r - mu)``.

    A baseline that does not depend on the sequence itself leaves the policy gradient unbiased.

    Args:
        reward: the outcome of each sequence; ``[B]``.
        group: which sequences answer the same prompt; integers ``[B]``.

    Returns:
        ``[B]``, without graph; exactly 0 for a group of one, which has no others, and for one whose rewards are all equal.

    Raises:
        ValueError: if the shapes differ.

    Example:
        >>> import torch
        >>> rloo(torch.tensor([0.0, 0.0, 3.0, 5.0]), torch.tensor([0, 0, 0, 1]))
        tensor([-1.5000, -1.5000,  3.0000,  0.0000])

    Source: Ahmadian et al. 2024 (arXiv 2402.14740); Kool et al. 2019 ("Buy 4 REINFORCE samples, get a baseline for
    free!").
    """
    groups = Groups(group)
    return groups.centred(reward) * groups.size / (groups.size - 1).clamp(min=1)
