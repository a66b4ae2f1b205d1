"""The baselines of online policy mirror descent."""

from __future__ import annotations

from torch import Tensor

from torchrl_llm_kl._numerics import check_choice, check_range
from torchrl_llm_kl.advantages._groups import Groups
from torchrl_llm_kl.advantages._registry import advantage

__all__ = ["opmd"]


@advantage("opmd", "outcome", source="Pan et al. 2025 (Trinity-RFT, arXiv 2505.17826)")
def opmd(reward: Tensor, group: Tensor, *, opmd_baseline: str = "mean", tau: float = 1.0) -> Tensor:
    r"""``r - mu``, or ``r - tau * log(mean(exp(r / tau)))``.

    The second is the value of the prompt in a problem with a KL penalty of weight ``tau``, estimated from the group; it lies
    between the mean (large ``tau``) and the greatest reward (small ``tau``).

    Args:
        reward: the outcome of each sequence; ``[B]``.
        group: which sequences answer the same prompt; integers ``[B]``.

    Keyword Args:
        opmd_baseline: ``"mean"`` or ``"logavgexp"``.
        tau: the weight of the KL penalty, in units of reward; only for ``"logavgexp"``.

    Returns:
        ``[B]``, without graph; exactly 0 for a group of one, and for one whose rewards are all equal.

    Raises:
        ValueError: if shapes differ or a hyper-parameter is out of range.

    Example:
        >>> import torch
        >>> reward, group = torch.tensor([0.0, 0.0, 3.0, 5.0]), torch.tensor([0, 0, 0, 1])
        >>> opmd(reward, group)
        tensor([-1., -1.,  2.,  0.])
        >>> opmd(reward, group, opmd_baseline="logavgexp", tau=0.5)
        tensor([-2.4532, -2.4532,  0.5468,  0.0000])

    Source: Pan et al. 2025 (Trinity-RFT, arXiv 2505.17826).
    """
    check_choice(("mean", "logavgexp"), opmd_baseline=opmd_baseline)
    check_range(above=0.0, tau=tau)
    groups = Groups(group)
    if opmd_baseline == "mean":
        return groups.centred(reward)
    below = reward - groups.max(reward)  # so that no exponential overflows
    return below - tau * groups.mean((below / tau).exp()).log()
