"""KL-Cov: a penalty on the movement of those tokens that cost the most entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.losses._numerics import Scalar, masked_mean, probability_ratio
from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm
from torchrl_llm_kl.losses.objectives._covariance import select_kl_cov

__all__ = ["kl_cov"]


@objective(
    "kl_cov",
    needs=("old_log_prob", "advantage"),
    aliases={"kl_cov_ratio": "fraction", "ppo_kl_coef": "coeff"},
    source="Cui et al. 2025 (arXiv 2505.22617), section 4.2 (KL-Cov)",
)
def kl_cov(
    log_prob: Tensor,
    mask: Tensor,
    *,
    old_log_prob: Tensor,
    advantage: Tensor,
    selected: Tensor | None = None,
    coeff: Scalar = 1.0,
    fraction: float = 2e-4,
) -> tuple[LossTerm, ...]:
    r"""``-A r`` per token, plus ``coeff |log r|`` for tokens chosen by the covariance of their log-prob and advantage.

    ``r`` is the probability ratio of the policy to the one that sampled; there is no clipping. The penalty pulls a chosen
    token's log-prob to where it was with the constant force ``coeff``, and with none at ``r = 1``. The choice depends on the
    whole batch: make it with :func:`select_kl_cov` before cutting micro-batches, and hand each its part of ``selected``.

    Args:
        log_prob: nats, under the current policy, of tokens that the old policy sampled; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        old_log_prob: the same tokens under the policy that sampled; same shape, without graph.
        advantage: same shape.
        selected: the chosen tokens; bool, same shape. None: choose among the tokens at hand.
        coeff: of the penalty, per nat. verl: ``ppo_kl_coef``.
        fraction: as for :func:`select_kl_cov`, where ``selected`` is None. verl: ``kl_cov_ratio``.

    Returns:
        One term, ``objective``; metrics ``selected_fraction`` and ``ratio_mean`` over the tokens that count.

    Raises:
        ValueError: if shapes differ or a hyper-parameter is out of range.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
        >>> selected = torch.tensor([[True, False]])
        >>> kl_cov(log_prob, mask, old_log_prob=old, advantage=advantage, selected=selected)[0].value
        tensor([[-1.1487,  0.6065]])

    Source: Cui et al. 2025 (arXiv 2505.22617), section 4.2 (KL-Cov).
    """
    check_range(low=0.0, coeff=coeff)
    if selected is None:
        selected = select_kl_cov(log_prob, mask, advantage=advantage, fraction=fraction)
    ratio = probability_ratio(log_prob, old_log_prob)
    penalty = torch.where(selected, coeff * (log_prob - old_log_prob).abs(), 0)
    metrics = {
        "selected_fraction": masked_mean(selected.float(), mask),
        "ratio_mean": masked_mean(ratio.detach(), mask),
    }
    return (LossTerm("objective", -advantage * ratio + penalty, mask, metrics=metrics),)
