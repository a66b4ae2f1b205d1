"""OPMD: the policy gradient with a step that a regularizer shortens."""

from __future__ import annotations

from torch import Tensor

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.losses._numerics import Scalar
from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm

__all__ = ["opmd"]


@objective(
    "opmd",
    needs=("advantage",),
    source="Pan et al. 2025, Trinity-RFT (arXiv 2505.17826), appendix A: the simple variant of OPMD",
)
def opmd(log_prob: Tensor, mask: Tensor, *, advantage: Tensor, tau: Scalar = 1.0) -> tuple[LossTerm, ...]:
    r"""``-A log_prob / (1 + tau)`` per token, whoever sampled it: no ratio, no clipping.

    With advantages ``r - mean(r)`` of a group it is, at the old policy, the gradient of an objective that pulls the policy
    towards ``pi_old exp(r / tau)``; elsewhere it needs no importance weight. ``tau`` only scales it.

    Args:
        log_prob: nats, under the current policy, of tokens that some policy sampled; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        advantage: same shape.
        tau: strength of the regularizer. Trinity: the same name.

    Returns:
        One term, ``objective``, without metrics.

    Raises:
        ValueError: if shapes differ or ``tau`` is negative.

    Example:
        >>> log_prob, advantage = torch.tensor([[-1.0, -2.0]]), torch.tensor([[1.0, -1.0]])
        >>> opmd(log_prob, torch.ones(1, 2, dtype=torch.bool), advantage=advantage, tau=3.0)[0].value
        tensor([[ 0.2500, -0.5000]])

    Source: Pan et al. 2025, Trinity-RFT (arXiv 2505.17826), appendix A: the simple variant of OPMD.
    """
    check_range(low=0.0, tau=tau)
    return (LossTerm("objective", -advantage * log_prob / (1 + tau), mask),)
