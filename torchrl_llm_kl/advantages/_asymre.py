"""A baseline on purpose below the mean."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl.advantages._groups import Groups
from torchrl_llm_kl.advantages._registry import advantage

__all__ = ["asymre"]


@advantage("asymre", "outcome", source="Arnal et al. 2025 (AsymRE, arXiv 2506.20520)")
def asymre(reward: Tensor, group: Tensor, *, baseline_shift: float = -0.1) -> Tensor:
    r"""``r - (mu + baseline_shift)``: off-policy REINFORCE that leans on successes more than on failures.

    With samples of an older policy a baseline above the mean collapses the policy; a little below it is stable.

    Args:
        reward: the outcome of each sequence; ``[B]``.
        group: which sequences answer the same prompt; integers ``[B]``.

    Keyword Args:
        baseline_shift: in units of reward; negative for a baseline below the mean.

    Returns:
        ``[B]``, without graph. A group whose rewards are all equal has ``-baseline_shift``; a group of one has 0: nothing
        says what to expect of its prompt.

    Raises:
        ValueError: if the shapes differ.

    Example:
        >>> import torch
        >>> asymre(torch.tensor([0.0, 0.0, 3.0, 5.0]), torch.tensor([0, 0, 0, 1]))
        tensor([-0.9000, -0.9000,  2.1000,  0.0000])

    Source: Arnal et al. 2025 (AsymRE, arXiv 2506.20520).
    """
    groups = Groups(group)
    return torch.where(groups.size > 1, groups.centred(reward) - baseline_shift, 0)
