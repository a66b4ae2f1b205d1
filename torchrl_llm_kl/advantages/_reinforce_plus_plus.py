"""The whitened return of each token."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.advantages._gae import estimate
from torchrl_llm_kl.advantages._registry import advantage
from torchrl_llm_kl.advantages._whiten import whitened

__all__ = ["reinforce_plus_plus"]


@advantage("reinforce_plus_plus", "token", source="Hu et al. 2025 (REINFORCE++, arXiv 2501.03262)")
def reinforce_plus_plus(reward: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    r"""The discounted sum of the rewards from each token on, whitened over all tokens of the batch: no critic, no groups.

    The KL belongs in the reward (``KLRewardTransform``), so that each token answers for the penalties behind it.

    Args:
        reward: of each token; ``[*B, T]``. An outcome sits on the last response token.
        mask: response tokens; bool, same shape. The others do not count as steps of discounting.

    Keyword Args:
        gamma: discount per response token.

    Returns:
        ``[*B, T]``, without graph, 0 where the mask is False; the mean over the others is 0, their variance 1. All 0 if the
        returns are all equal.

    Raises:
        ValueError: if shapes differ or ``gamma`` is out of range.
        TypeError: if the mask is not boolean.

    Example:
        >>> reinforce_plus_plus(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), torch.tensor([[True, True], [True, False]]))
        tensor([[ 0.5774,  0.5774],
                [-1.1547,  0.0000]])

    Source: Hu et al. 2025 (REINFORCE++, arXiv 2501.03262); Trinity's name is ``reinforceplusplus``.
    """
    check_range(0.0, 1.0, gamma=gamma)
    returns, _ = estimate(reward, torch.zeros_like(reward), mask, gamma, 1.0)
    return whitened(returns, mask)
