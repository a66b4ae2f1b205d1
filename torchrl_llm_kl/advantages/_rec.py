"""Group-relative REINFORCE with some failures left out."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_choice, check_range
from torchrl_llm_kl.advantages._groups import Groups, normalised
from torchrl_llm_kl.advantages._registry import advantage

__all__ = ["rec"]


@advantage("rec", "outcome", source="Yao et al. 2025 (arXiv 2509.24203)")
def rec(
    reward: Tensor,
    group: Tensor,
    *,
    epsilon: float = 1e-6,
    std_normalize: bool = False,
    drop: str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""``r - mu``, optionally over ``sigma + epsilon``, optionally after leaving out failures at random.

    Args:
        reward: the outcome of each sequence; ``[B]``.
        group: which sequences answer the same prompt; integers ``[B]``.

    Keyword Args:
        epsilon: added to ``sigma``.
        std_normalize: divide by the standard deviation of the group, the biased one (``n``), of the rewards that are kept.
        drop: ``"balance"``: where rewards below the group's mean are in the majority, leave out as many of them, at random,
            as it takes to have no more than there are others: they get 0, and mean and ``sigma`` are of the rest. None to
            keep all.
        generator: of the random choice; torch's own by default.

    Returns:
        ``[B]``, without graph; exactly 0 for what is left out, for a group of one, and where all rewards are equal.

    Raises:
        ValueError: if shapes differ or a hyper-parameter is out of range.

    Example:
        >>> reward, group = torch.tensor([0.0, 0.0, 3.0, 5.0]), torch.tensor([0, 0, 0, 1])
        >>> rec(reward, group)
        tensor([-1., -1.,  2.,  0.])
        >>> rec(reward, group, drop="balance").sort().values
        tensor([-1.5000,  0.0000,  0.0000,  1.5000])

    Source: Yao et al. 2025 ("Group-relative REINFORCE is secretly an off-policy algorithm", arXiv 2509.24203); dropping
    is its RED-Drop.
    """
    check_choice((None, "balance"), drop=drop)
    check_range(0.0, epsilon=epsilon)
    groups = Groups(group)
    dropped = torch.zeros_like(reward, dtype=torch.bool)
    if drop == "balance":
        dropped = _surplus(groups, groups.centred(reward) < 0, generator)
        groups = Groups(2 * groups.ids + dropped)  # what is kept of a group is a group
    result = groups.centred(reward)
    if std_normalize:
        result = normalised(result, groups.std(reward, unbiased=False), epsilon)
    return torch.where(dropped, 0, result)


def _surplus(groups: Groups, negative: Tensor, generator: torch.Generator | None) -> Tensor:
    """Which rows to leave out so that no group has more negative rows than others."""
    rows = len(negative)
    device = negative.device if generator is None else generator.device
    order = torch.randperm(rows, generator=generator, device=device).to(negative.device)
    surplus = 2 * groups.sum(negative.long()) - groups.size
    among_negative = groups.rank(torch.where(negative, order, order + rows))
    return negative & (among_negative < surplus)
