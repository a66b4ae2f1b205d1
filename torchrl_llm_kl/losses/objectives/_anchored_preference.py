"""Learning from preferences: losses that hold each answer of a pair against the reference by itself."""

from __future__ import annotations

from torch import Tensor

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.losses._numerics import Scalar
from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm
from torchrl_llm_kl.losses.objectives._preference import pair_up, preference

__all__ = ["apo_zero", "sppo_hard"]

_PER_PAIR = "seq-mean-token-sum"


@objective(
    "apo_zero",
    needs=("ref_log_prob",),
    aggregation=_PER_PAIR,
    source="D'Oosterlinck et al. 2024 (arXiv 2408.06266), eq. 7, plus 1",
)
def apo_zero(
    log_prob: Tensor,
    mask: Tensor,
    *,
    ref_log_prob: Tensor,
    pair_id: Tensor | None = None,
    chosen: Tensor | None = None,
    beta: Scalar = 0.1,
) -> tuple[LossTerm, ...]:
    r"""Anchored preference optimisation: ``1 - sigmoid(beta * c) + sigmoid(beta * r)`` for each pair.

    ``c`` and ``r`` are the log-ratios of policy to reference of the chosen and the rejected answer, summed over tokens. The
    gradient makes the chosen answer likelier and the rejected one less likely than under the reference, each for itself: for
    data whose chosen answers are better than the model's own.

    Args:
        log_prob: see :func:`~torchrl_llm_kl.losses.dpo`.
        mask: see :func:`~torchrl_llm_kl.losses.dpo`.

    Keyword Args:
        ref_log_prob: see :func:`~torchrl_llm_kl.losses.dpo`.
        pair_id: see :func:`~torchrl_llm_kl.losses.dpo`.
        chosen: see :func:`~torchrl_llm_kl.losses.dpo`.
        beta: how strongly the reference holds; per nat.

    Returns:
        As :func:`~torchrl_llm_kl.losses.dpo`; values from 0 to 2. The paper's formula is 1 less.

    Raises:
        ValueError: as :func:`~torchrl_llm_kl.losses.dpo`.

    Example:
        >>> import torch
        >>> log_prob = torch.tensor([[-1.0], [-4.0]])
        >>> ref_log_prob = torch.tensor([[-2.0], [-2.0]])
        >>> apo_zero(log_prob, torch.ones(2, 1, dtype=torch.bool), ref_log_prob=ref_log_prob, beta=0.5)[0].value
        tensor([[0.6465]])

    Source: D'Oosterlinck et al. 2024 (arXiv 2408.06266), eq. 7.
    """
    check_range(above=0.0, beta=beta)
    pairs = pair_up(log_prob, mask, ref_log_prob, pair_id, chosen)
    return preference((-beta * pairs.chosen).sigmoid() + (beta * pairs.rejected).sigmoid(), pairs, beta)


@objective(
    "sppo_hard",
    needs=("ref_log_prob",),
    aggregation=_PER_PAIR,
    source="Wu et al. 2024 (arXiv 2405.00675), eq. 4.7 with probabilities of winning of 1 and 0",
)
def sppo_hard(
    log_prob: Tensor,
    mask: Tensor,
    *,
    ref_log_prob: Tensor,
    pair_id: Tensor | None = None,
    chosen: Tensor | None = None,
    beta: Scalar = 0.1,
) -> tuple[LossTerm, ...]:
    r"""Self-play preference optimisation: ``(c - 1 / (2 beta))**2 + (r + 1 / (2 beta))**2`` for each pair.

    ``c`` and ``r`` are the log-ratios of policy to reference of the chosen and the rejected answer, summed over tokens; the
    reference is the policy of the previous round of play. The gradient pulls each of them to its own target. Not the ``sppo``
    of :func:`~torchrl_llm_kl.losses.get_objective`, which learns from advantages.

    Args:
        log_prob: see :func:`~torchrl_llm_kl.losses.dpo`.
        mask: see :func:`~torchrl_llm_kl.losses.dpo`.

    Keyword Args:
        ref_log_prob: see :func:`~torchrl_llm_kl.losses.dpo`.
        pair_id: see :func:`~torchrl_llm_kl.losses.dpo`.
        chosen: see :func:`~torchrl_llm_kl.losses.dpo`.
        beta: one over the paper's eta, per nat.

    Returns:
        As :func:`~torchrl_llm_kl.losses.dpo`; nats squared.

    Raises:
        ValueError: as :func:`~torchrl_llm_kl.losses.dpo`.

    Example:
        >>> import torch
        >>> log_prob = torch.tensor([[-1.0], [-4.0]])
        >>> ref_log_prob = torch.tensor([[-2.0], [-2.0]])
        >>> sppo_hard(log_prob, torch.ones(2, 1, dtype=torch.bool), ref_log_prob=ref_log_prob, beta=0.1)[0].value
        tensor([[25.]])

    Source: Wu et al. 2024 (arXiv 2405.00675), eq. 4.7.
    """
    check_range(above=0.0, beta=beta)
    pairs = pair_up(log_prob, mask, ref_log_prob, pair_id, chosen)
    target = 1 / (2 * beta)
    return preference((pairs.chosen - target).square() + (pairs.rejected + target).square(), pairs, beta)
