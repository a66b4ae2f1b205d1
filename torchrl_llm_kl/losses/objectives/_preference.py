"""Preference losses on pairs of a chosen and a rejected answer, relative to a reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchrl_llm_kl._numerics import Scalar, check_range, masked_mean
from torchrl_llm_kl.losses._arithmetic import sequence_mean, sequence_sum
from torchrl_llm_kl.losses._objective import LossTerm, objective


@objective(
    "dpo",
    aggregation="seq-mean-token-sum",
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
    r"""Direct preference optimisation: ``-logsigmoid(beta * delta)`` per pair of a chosen and a rejected answer.

    ``c`` and ``l`` are the log-ratios ``log_prob - ref_log_prob`` of the chosen and the rejected (lost) answer, summed over
    tokens, and ``delta = c - l``. The gradient raises the chosen answer and lowers the rejected one, by ``beta`` times
    ``sigmoid(-beta * delta)``, the probability that the policy still assigns to the wrong order.

    Rows are chosen, rejected, chosen, ... unless ``pair_id`` and ``chosen`` are given: then rows may be in any order, and
    checking them takes one host sync. Leading batch dimensions are flattened into rows. A pair in which an answer has no
    masked-in token is left out.

    Hyper-parameters:
        beta: strength of the pull to the reference; per nat, above 0.
        label_smoothing: probability that a label is wrong, up to 1/2 (cDPO).
        length_normalised: average log-ratios over tokens instead of summing them.

    Returns:
        One term, ``objective``, with one value per pair: ``[P, 1]``, in the order of rows or of ``pair_id``. Metrics, means
        over pairs: ``chosen_reward`` and ``rejected_reward`` (``beta c`` and ``beta l``), ``reward_margin``,
        ``reward_accuracy``.

    Raises:
        ValueError: if a pair does not have exactly one chosen and one rejected row.

    Example:
        >>> log_prob = torch.tensor([[-1.0, -1.0], [-2.0, -3.0]])  # chosen, rejected
        >>> ref_log_prob = torch.tensor([[-1.5, -1.5], [-2.0, -2.0]])
        >>> dpo(log_prob, torch.ones(2, 2, dtype=torch.bool), ref_log_prob=ref_log_prob, beta=0.5)[0].value
        tensor([[0.3133]])
    """
    check_range(low=0.0, high=0.5, label_smoothing=label_smoothing)
    pairs = _pair_up(log_prob, mask, ref_log_prob, pair_id, chosen, beta, length_normalised=length_normalised)
    right, wrong = -logsigmoid(beta * pairs.delta), -logsigmoid(-beta * pairs.delta)
    return _preference((1 - label_smoothing) * right + label_smoothing * wrong, pairs)


@objective(
    "robust",
    aggregation="seq-mean-token-sum",
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
    r"""Robust DPO: with noisy labels its mean is the loss of :func:`dpo` on the true ones.

    With ``e = label_smoothing`` it is ``((1 - e) * right - e * wrong) / (1 - 2 e)``, where ``right`` is :func:`dpo`'s loss of
    the pair and ``wrong`` that of the pair with its answers swapped. It is not bounded below. Pairs, ``beta`` and metrics are
    those of :func:`dpo`.

    Hyper-parameters:
        label_smoothing: probability that a label is wrong, below 1/2.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-3.0]]), torch.tensor([[-2.0], [-2.0]])
        >>> mask = torch.ones(2, 1, dtype=torch.bool)
        >>> robust(log_prob, mask, ref_log_prob=ref_log_prob, beta=0.5, label_smoothing=0.2)[0].value
        tensor([[-0.0201]])
    """
    check_range(low=0.0, high=0.5, label_smoothing=label_smoothing)
    if not isinstance(label_smoothing, Tensor) and label_smoothing == 0.5:
        raise ValueError(
            "label_smoothing must be below 0.5, got 0.5: labels wrong half of the time hold no information."
        )
    pairs = _pair_up(log_prob, mask, ref_log_prob, pair_id, chosen, beta)
    right, wrong = -logsigmoid(beta * pairs.delta), -logsigmoid(-beta * pairs.delta)
    value = ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
    return _preference(value, pairs)


@objective(
    "hinge",
    aggregation="seq-mean-token-sum",
    source="Zhao et al. 2023 (SLiC-HF, arXiv 2305.10425) relative to a reference: Liu et al. 2023 (RSO, arXiv 2309.06657)",
)
def hinge(
    log_prob: Tensor,
    mask: Tensor,
    *,
    ref_log_prob: Tensor,
    pair_id: Tensor | None = None,
    chosen: Tensor | None = None,
    beta: Scalar = 0.1,
) -> tuple[LossTerm, ...]:
    r"""SLiC's hinge: ``max(0, 1 - beta * delta)`` for each pair; pairs, ``delta`` and metrics as in :func:`dpo`.

    The gradient is ``-beta`` times that of ``delta`` until the chosen answer leads by the margin, ``1 / beta`` nats, then 0.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-3.0]]), torch.tensor([[-2.0], [-2.0]])
        >>> hinge(log_prob, torch.ones(2, 1, dtype=torch.bool), ref_log_prob=ref_log_prob, beta=0.2)[0].value
        tensor([[0.6000]])
    """
    pairs = _pair_up(log_prob, mask, ref_log_prob, pair_id, chosen, beta)
    return _preference((1 - beta * pairs.delta).relu(), pairs)


@objective("ipo", aggregation="seq-mean-token-sum", source="Azar et al. 2023 (arXiv 2310.12036), eq. 17")
def ipo(
    log_prob: Tensor,
    mask: Tensor,
    *,
    ref_log_prob: Tensor,
    pair_id: Tensor | None = None,
    chosen: Tensor | None = None,
    beta: Scalar = 0.1,
    length_normalised: bool = False,
) -> tuple[LossTerm, ...]:
    r"""IPO: ``(delta - 1 / (2 beta))**2`` for each pair, nats squared; pairs, ``delta`` and metrics as in :func:`dpo`.

    The gradient pulls the lead of the chosen answer to ``1 / (2 beta)`` nats from both sides, so that the lead stays bounded.
    ``beta`` is the paper's tau, per nat.

    Hyper-parameters:
        length_normalised: average log-ratios over tokens instead of summing them, as TRL does, so that long answers do not
            reach the target at once. The paper's formula sums.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-3.0]]), torch.tensor([[-2.0], [-2.0]])
        >>> ipo(log_prob, torch.ones(2, 1, dtype=torch.bool), ref_log_prob=ref_log_prob, beta=0.1)[0].value
        tensor([[9.]])
    """
    pairs = _pair_up(log_prob, mask, ref_log_prob, pair_id, chosen, beta, length_normalised=length_normalised)
    return _preference((pairs.delta - 1 / (2 * beta)).square(), pairs)


@objective(
    "apo_zero", aggregation="seq-mean-token-sum", source="D'Oosterlinck et al. 2024 (arXiv 2408.06266), eq. 7, plus 1"
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
    r"""Anchored preference optimisation: ``1 - sigmoid(beta * c) + sigmoid(beta * l)`` for each pair, from 0 to 2.

    The gradient independently raises the chosen answer and lowers the rejected one relative to the reference: for data whose
    chosen answers are better than the model's. The paper's formula is 1 less. Pairs, ``c``, ``l``, ``beta`` and metrics are
    those of :func:`dpo`.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-4.0]]), torch.tensor([[-2.0], [-2.0]])
        >>> apo_zero(log_prob, torch.ones(2, 1, dtype=torch.bool), ref_log_prob=ref_log_prob, beta=0.5)[0].value
        tensor([[0.6465]])
    """
    pairs = _pair_up(log_prob, mask, ref_log_prob, pair_id, chosen, beta)
    return _preference((-beta * pairs.chosen).sigmoid() + (beta * pairs.rejected).sigmoid(), pairs)


@objective(
    "sppo_hard",
    aggregation="seq-mean-token-sum",
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
    r"""Self-play preference optimisation: ``(c - 1 / (2 beta))**2 + (l + 1 / (2 beta))**2`` for each pair, nats squared.

    The reference is the policy of the previous round of play. The gradient pulls each log-ratio to its own target. Pairs,
    ``c``, ``l`` and metrics are those of :func:`dpo`; ``beta`` is one over the paper's eta, per nat. (:func:`sppo` is another
    method, which learns from advantages.)

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-4.0]]), torch.tensor([[-2.0], [-2.0]])
        >>> sppo_hard(log_prob, torch.ones(2, 1, dtype=torch.bool), ref_log_prob=ref_log_prob, beta=0.1)[0].value
        tensor([[25.]])
    """
    pairs = _pair_up(log_prob, mask, ref_log_prob, pair_id, chosen, beta)
    target = 1 / (2 * beta)
    return _preference((pairs.chosen - target).square() + (pairs.rejected + target).square(), pairs)


# ------------------------------------------------------------------ pairs


@dataclass(frozen=True, eq=False)
class _Pairs:
    r""":math:`\log(\pi / \pi_{ref})` of whole answers, ``[P, 1]`` each; ``mask`` is True where both have masked-in tokens."""

    chosen: Tensor
    rejected: Tensor
    mask: Tensor
    beta: Scalar

    @property
    def delta(self) -> Tensor:
        """The lead of the chosen answer, nats."""
        return self.chosen - self.rejected


def _pair_up(
    log_prob: Tensor,
    mask: Tensor,
    ref_log_prob: Tensor,
    pair_id: Tensor | None,
    chosen: Tensor | None,
    beta: Scalar,
    *,
    length_normalised: bool = False,
) -> _Pairs:
    check_range(above=0.0, beta=beta)
    reduce = sequence_mean if length_normalised else sequence_sum
    ratio = reduce(log_prob - ref_log_prob, mask).reshape(-1)
    present = mask.any(-1).reshape(-1)
    if pair_id is not None and chosen is not None:
        order = _interleaving(pair_id.reshape(-1), chosen.reshape(-1))
        ratio, present = ratio[order], present[order]
    elif pair_id is not None or chosen is not None:
        given, missing = ("pair_id", "chosen") if chosen is None else ("chosen", "pair_id")
        raise ValueError(f"got {given} without {missing}: pass both, or neither for rows chosen, rejected, chosen, ...")
    elif ratio.numel() % 2:
        raise ValueError(
            f"expected pairs of rows (chosen, rejected, chosen, ...), got {ratio.numel()} rows: row {ratio.numel() - 1} has "
            "no partner. Leave it out, or name the pairs with pair_id= and chosen=."
        )
    ratio, present = ratio.view(-1, 2), present.view(-1, 2)
    return _Pairs(ratio[:, :1], ratio[:, 1:], present.all(-1, keepdim=True), beta)


def _interleaving(pair_id: Tensor, chosen: Tensor) -> Tensor:
    """The order of rows that makes pairs adjacent, by id, chosen first."""
    if not torch.compiler.is_compiling():
        ids, pair = pair_id.unique(return_inverse=True)
        found = torch.stack([torch.bincount(pair[chosen == side], minlength=len(ids)) for side in (True, False)], -1)
        for at in (found != 1).any(-1).nonzero().flatten().tolist()[:1]:
            rows = f"{int(found[at, 0])} chosen and {int(found[at, 1])} rejected rows"
            raise ValueError(f"pair_id {int(ids[at])} has {rows}, expected one of each.")
    first = (~chosen).long().argsort(stable=True)
    return first[pair_id[first].argsort(stable=True)]


def _preference(value: Tensor, pairs: _Pairs) -> tuple[LossTerm, ...]:
    """One term with one value per pair ``[P, 1]``, 0 for pairs that are left out, and the metrics of the family."""
    mask = pairs.mask
    won, lost = pairs.beta * pairs.chosen.detach(), pairs.beta * pairs.rejected.detach()
    metrics = {
        "chosen_reward": masked_mean(won, mask),
        "rejected_reward": masked_mean(lost, mask),
        "reward_margin": masked_mean(won - lost, mask),
        "reward_accuracy": masked_mean((won > lost).to(won.dtype), mask),
    }
    return (LossTerm("objective", torch.where(mask, value, 0), mask, metrics=metrics),)
