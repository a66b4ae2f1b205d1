"""The reward itself, and the reward less that of a greedy answer."""

from __future__ import annotations

from torch import Tensor

from torchrl_llm_kl.advantages._registry import advantage

__all__ = ["reinforce", "remax"]


@advantage("reinforce", "outcome", source="Williams 1992, section 5, with a baseline of 0")
def reinforce(reward: Tensor) -> Tensor:
    """The reward: no baseline, unbiased, the variance of the rewards.

    Args:
        reward: the outcome of each sequence; ``[B]``.

    Returns:
        ``[B]``, without graph; a copy. Nothing is compared, so that a sequence alone keeps its reward.

    Example:
        >>> import torch
        >>> reinforce(torch.tensor([1.0, -2.0]))
        tensor([ 1., -2.])

    Source: Williams 1992 ("Simple statistical gradient-following algorithms"), section 5, with a baseline of 0.
    """
    return reward.clone()


@advantage("remax", "outcome", source="Li et al. 2023 (ReMax, arXiv 2310.10505), algorithm 1")
def remax(reward: Tensor, baseline: Tensor) -> Tensor:
    """The reward minus that of the greedy answer to the same prompt, which costs one more rollout for each prompt.

    Args:
        reward: the outcome of each sequence; ``[B]``.
        baseline: the outcome of the greedy answer to the same prompt, by the same reward (with the same KL penalty in it, or
            without one in both); ``[B]``. Trinity: ``reward_baselines``.

    Returns:
        ``[B]``, without graph.

    Raises:
        ValueError: if the shapes differ or the baseline is missing.

    Example:
        >>> import torch
        >>> remax(torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.5]))
        tensor([ 0.5000, -2.5000])

    Source: Li et al. 2023 (ReMax, arXiv 2310.10505), algorithm 1.
    """
    return reward - baseline
