"""Learning from preferences: the logistic loss of the difference between the two answers of a pair."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.losses._numerics import Scalar
from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm
from torchrl_llm_kl.losses.objectives._preference import pair_up, preference

__all__ = ["dpo", "robust"]

_PER_PAIR = "seq-mean-token-sum"


@objective(
    "dpo",
    needs=("ref_log_prob",),
    aggregation=_PER_PAIR,
    source="Rafailov et al. 2023 (arXiv 2305.18290), eq. 7; label smoothing: Mitchell 2023, 'A note on DPO with noisy "
    "preferences & relationship to IPO'",
)
def dpo(
    log_prob: Tensor,
    mask: Tensor,
    *,
    ref_log_prob: Tensor,
    pair_id: Tensor | None = None,
    chosen: Tensor | None = None,
    beta: Scalar = 0.1,
    label_smoothing: Scalar = 0.0,
    length_normalised: bool = False,
) -> tuple[LossTerm, ...]:
    r"""Direct preference optimisation: ``-logsigmoid(beta * delta)`` for each pair of a chosen and a rejected answer.

    ``delta`` is the log-ratio of policy to reference of the chosen answer, summed over its tokens, minus that of the rejected
    one. The gradient raises the chosen answer and lowers the rejected one, by ``beta`` times the probability
    ``sigmoid(-beta * delta)`` that the policy still gives to the wrong order.

    Args:
        log_prob: nats, under the current policy, of answers that anyone may have written; ``[*B, T]``.
        mask: tokens that count; bool, same shape. A pair counts when both of its answers have such tokens.

    Keyword Args:
        ref_log_prob: the same tokens under the reference; same shape.
        pair_id: which pair a row belongs to; integer ``[*B]``, in any order. By default rows are chosen, rejected, chosen, ...
            (leading batch dimensions are one list of rows). Checking them reads them on the host once.
        chosen: True for the chosen row of each pair; bool ``[*B]``; goes with ``pair_id``.
        beta: how strongly the reference holds; per nat.
        label_smoothing: probability that a label is wrong, up to 1/2 (cDPO).
        length_normalised: average log-ratios over tokens instead of summing them.

    Returns:
        One term, ``objective``, of one value per pair: ``[P, 1]``, in the order of rows or of ``pair_id``. Metrics, means over
        pairs: ``chosen_reward`` and ``rejected_reward`` (``beta`` times the log-ratio), ``reward_margin``,
        ``reward_accuracy``.

    Raises:
        ValueError: if shapes differ, a pair has not exactly one chosen and one rejected row, or a number is out of range.

    Example:
        >>> import torch
        >>> log_prob = torch.tensor([[-1.0, -1.0], [-2.0, -3.0]])  # chosen, rejected
        >>> ref_log_prob = torch.tensor([[-1.5, -1.5], [-2.0, -2.0]])
        >>> dpo(log_prob, torch.ones(2, 2, dtype=torch.bool), ref_log_prob=ref_log_prob, beta=0.5)[0].value
        tensor([[0.3133]])

    Source: Rafailov et al. 2023 (arXiv 2305.18290), eq. 7; label smoothing: Mitchell 2023, "A note on DPO with noisy
    preferences & relationship to IPO".
    """
    check_range(above=0.0, beta=beta)
    check_range(low=0.0, high=0.5, label_smoothing=label_smoothing)
    pairs = pair_up(log_prob, mask, ref_log_prob, pair_id, chosen, length_normalised=length_normalised)
    right, wrong = -logsigmoid(beta * pairs.delta), -logsigmoid(-beta * pairs.delta)
    return preference((1 - label_smoothing) * right + label_smoothing * wrong, pairs, beta)


@objective(
    "robust",
    needs=("ref_log_prob",),
    aggregation=_PER_PAIR,
    source="Chowdhury et al. 2024 (arXiv 2403.00409), the loss of robust DPO",
)
def robust(
    log_prob: Tensor,
    mask: Tensor,
    *,
    ref_log_prob: Tensor,
    pair_id: Tensor | None = None,
    chosen: Tensor | None = None,
    beta: Scalar = 0.1,
    label_smoothing: Scalar = 0.0,
) -> tuple[LossTerm, ...]:
    r"""Robust DPO: the loss whose mean over labels that are wrong with a known probability is :func:`dpo` on right ones.

    With ``e = label_smoothing`` it is ``((1 - e) * right - e * wrong) / (1 - 2 e)``, where ``right`` is :func:`dpo`'s loss of
    the pair and ``wrong`` that of the pair turned round. It is not bounded below.

    Args:
        log_prob: see :func:`dpo`.
        mask: see :func:`dpo`.

    Keyword Args:
        ref_log_prob: see :func:`dpo`.
        pair_id: see :func:`dpo`.
        chosen: see :func:`dpo`.
        beta: see :func:`dpo`.
        label_smoothing: probability that a label is wrong, below 1/2.

    Returns:
        As :func:`dpo`.

    Raises:
        ValueError: as :func:`dpo`.

    Example:
        >>> import torch
        >>> log_prob = torch.tensor([[-1.0], [-3.0]])
        >>> ref_log_prob = torch.tensor([[-2.0], [-2.0]])
        >>> mask = torch.ones(2, 1, dtype=torch.bool)
        >>> robust(log_prob, mask, ref_log_prob=ref_log_prob, beta=0.5, label_smoothing=0.2)[0].value
        tensor([[-0.0201]])

    Source: Chowdhury et al. 2024 (arXiv 2403.00409).
    """
    check_range(above=0.0, beta=beta)
    check_range(low=0.0, high=0.5, label_smoothing=label_smoothing)
    if not isinstance(label_smoothing, Tensor) and label_smoothing == 0.5:
        raise ValueError(
            "label_smoothing must be below 0.5, got 0.5: labels that are wrong half of the time say nothing"
        )
    pairs = pair_up(log_prob, mask, ref_log_prob, pair_id, chosen)
    right, wrong = -logsigmoid(beta * pairs.delta), -logsigmoid(-beta * pairs.delta)
    value = ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
    return preference(value, pairs, beta)
