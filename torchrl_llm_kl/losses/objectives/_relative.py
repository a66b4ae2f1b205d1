"""Preference losses that compare an answer with the whole batch: unpaired answers (KTO, BCO) and distributions (AOT).

What is taken from the batch is an input, ``reference_point`` or ``match_id``, one value per sequence. Compute it once, before
splitting into micro-batches: with :meth:`~torchrl_llm_kl.losses.PolicyLoss.batch_inputs`, or with the functions below. Without
it, all but :func:`kto` take it from their own rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchrl_llm_kl._numerics import NonNegative, Positive, Scalar, masked_mean
from torchrl_llm_kl.losses._arithmetic import checked, sequence_sum
from torchrl_llm_kl.losses._objective import LossTerm, Once, Terms, objective
from torchrl_llm_kl.losses.objectives._preference import (
    Pairing,
    Pairs,
    finish,
    interleaving,
    logistic,
    pair_up,
    pairing_of,
    preference,
)

# ------------------------------------------------------------------ one label per answer


@torch.no_grad()
def kto_reference_point(log_prob: Tensor, mask: Tensor, *, ref_log_prob: Tensor) -> Tensor:
    r"""The reference point of :func:`kto`: :math:`KL(\pi \| \pi_{ref})` of whole answers, from mismatched pairs.

    The inputs are log-probs of mismatched pairs: of the answer to another prompt after this one
    (:func:`~torchrl_llm_kl.rollouts.mismatch`), for a whole batch. The estimate is the mean over pairs of the summed log-ratio,
    at least 0.

    Returns:
        Nats, the same number for each sequence; ``[*B]``.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-4.0], [-3.0]]), torch.tensor([[-2.0], [-3.0], [-5.0]])
        >>> kto_reference_point(log_prob, torch.ones(3, 1, dtype=torch.bool), ref_log_prob=ref_log_prob)
        tensor([0.6667, 0.6667, 0.6667])

    Source: Ethayarajh et al. 2024 (arXiv 2402.01306), the estimate of z_0 in section 4.
    """
    log_prob, ref_log_prob = checked(mask, log_prob=log_prob, ref_log_prob=ref_log_prob)
    ratio = sequence_sum(log_prob - ref_log_prob, mask).squeeze(-1)
    return masked_mean(ratio, mask.any(-1)).clamp(min=0).expand(ratio.shape)


@objective("kto", aggregation="seq-mean-token-sum", once=Once("reference_point", kto_reference_point, mismatched=True))
def kto(
    log_prob: Tensor,
    mask: Tensor,
    *,
    ref_log_prob: Tensor,
    chosen: Tensor,
    reference_point: Tensor,
    beta: Positive = 0.1,
    desirable_weight: NonNegative = 1.0,
    undesirable_weight: NonNegative = 1.0,
) -> Terms:
    r"""Kahneman-Tversky optimisation: each answer is desirable or not, without pairs.

    With the log-ratio ``c`` of an answer, the sum of ``log_prob - ref_log_prob``, and ``z = reference_point``, the loss is
    ``desirable_weight * sigmoid(-beta (c - z))`` for a desirable answer (``chosen`` is True) and
    ``undesirable_weight * sigmoid(beta (c - z))`` for an undesirable one. The gradient is greatest at ``c = z`` and vanishes
    far from it on both sides.

    ``z`` is the KL to the reference of the policy's answers: a desirable answer has to become more likely than answers do on
    average. :meth:`~torchrl_llm_kl.losses.PolicyLoss.batch_inputs` estimates it from mismatched prompts and answers
    (:func:`kto_reference_point`). With 0 the loss is the unpaired :func:`apo_zero`.

    Hyper-parameters:
        beta: per nat, above 0; greater: closer to the reference.
        desirable_weight, undesirable_weight: of the two kinds, at least 0. With as many times the weight as there are fewer
            answers of a kind, both kinds count alike; up to 4/3 of that is usual for the desirable one.

    Returns:
        One term, ``objective``, with one value per sequence ``[*B, 1]``. Metrics: ``chosen_reward`` and ``rejected_reward``
        (the means of ``beta c`` of each kind), ``reward_margin``, their difference, and ``reference_point``.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-4.0]]), torch.full((2, 1), -2.0)
        >>> mask, chosen = torch.ones(2, 1, dtype=torch.bool), torch.tensor([True, False])
        >>> z = torch.full((2,), 0.5)
        >>> kto(log_prob, mask, ref_log_prob=ref_log_prob, chosen=chosen, reference_point=z, beta=0.5)[0].value
        tensor([[0.4378],
                [0.2227]])

    Source: Ethayarajh et al. 2024 (arXiv 2402.01306), eq. 7.
    """
    ratio, z = sequence_sum(log_prob - ref_log_prob, mask), reference_point.unsqueeze(-1)
    surprise = _signed(beta * (z - ratio), chosen).sigmoid()
    value = torch.where(chosen.unsqueeze(-1), desirable_weight * surprise, undesirable_weight * surprise)
    return _of_answers(value, ratio, z, mask, chosen, beta)


@torch.no_grad()
def bco_reference_point(
    log_prob: Tensor, mask: Tensor, *, ref_log_prob: Tensor, chosen: Tensor | None = None
) -> Tensor:
    r"""The reference point of :func:`bco` and :func:`bco_pair`: half way between the mean log-ratios of the two kinds.

    Inputs are as in :func:`bco`, for a whole batch; without ``chosen``, rows are chosen, rejected, chosen, ... If the batch
    has answers of one kind only, it is their mean. Average the results for a running mean over batches.

    Returns:
        Nats, the same number for each sequence; ``[*B]``.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-4.0], [-3.0]]), torch.full((3, 1), -2.0)
        >>> mask, chosen = torch.ones(3, 1, dtype=torch.bool), torch.tensor([True, False, False])
        >>> bco_reference_point(log_prob, mask, ref_log_prob=ref_log_prob, chosen=chosen)
        tensor([-0.2500, -0.2500, -0.2500])

    Source: Jung et al. 2024 (arXiv 2404.04656), the reward shift, here in nats.
    """
    log_prob, ref_log_prob = checked(mask, log_prob=log_prob, ref_log_prob=ref_log_prob)
    ratio, present = sequence_sum(log_prob - ref_log_prob, mask).squeeze(-1), mask.any(-1)
    if chosen is None:
        chosen = (torch.arange(ratio.numel(), device=mask.device) % 2 == 0).view(ratio.shape)
    kinds = [present & chosen, present & ~chosen]
    number = torch.stack([kind.any() for kind in kinds]).sum().clamp(min=1)
    return (torch.stack([masked_mean(ratio, kind) for kind in kinds]).sum() / number).expand(ratio.shape)


_BCO = Once("reference_point", bco_reference_point)


@objective("bco", aggregation="seq-mean-token-sum", once=_BCO)
def bco(
    log_prob: Tensor,
    mask: Tensor,
    *,
    ref_log_prob: Tensor,
    chosen: Tensor,
    reference_point: Tensor | None = None,
    beta: Positive = 0.1,
) -> Terms:
    r"""Binary classifier optimisation: the cross-entropy of a classifier of answers whose logit is ``beta (c - z)``.

    Each answer is good (``chosen`` is True) or bad, without pairs. With its log-ratio ``c``, the sum of
    ``log_prob - ref_log_prob``, and ``z = reference_point``, the loss is ``-logsigmoid(beta (c - z))`` for a good answer and
    ``-logsigmoid(-beta (c - z))`` for a bad one: together an upper bound of :func:`dpo`'s. Without ``reference_point``,
    :func:`bco_reference_point` of the same rows. ``beta`` and metrics are as in :func:`kto`.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-4.0]]), torch.full((2, 1), -2.0)
        >>> mask, chosen = torch.ones(2, 1, dtype=torch.bool), torch.tensor([True, False])
        >>> bco(log_prob, mask, ref_log_prob=ref_log_prob, chosen=chosen, beta=0.5)[0].value  # z = -0.5
        tensor([[0.3869],
                [0.3869]])

    Source: Jung et al. 2024 (arXiv 2404.04656), the loss with the reward shift.
    """
    if reference_point is None:
        reference_point = bco_reference_point(log_prob, mask, ref_log_prob=ref_log_prob, chosen=chosen)
    ratio, z = sequence_sum(log_prob - ref_log_prob, mask), reference_point.unsqueeze(-1)
    return _of_answers(-logsigmoid(_signed(beta * (ratio - z), chosen)), ratio, z, mask, chosen, beta)


def _signed(value: Tensor, chosen: Tensor) -> Tensor:
    return torch.where(chosen.unsqueeze(-1), value, -value)


def _of_answers(value: Tensor, ratio: Tensor, z: Tensor, mask: Tensor, chosen: Tensor, beta: Scalar) -> Terms:
    """One term with one value per sequence ``[*B, 1]``, 0 for one without masked-in tokens, and the metrics of each kind."""
    present, good, reward = mask.any(-1, keepdim=True), chosen.unsqueeze(-1), beta * ratio.detach()
    won, lost = masked_mean(reward, present & good), masked_mean(reward, present & ~good)
    metrics = {
        "chosen_reward": won,
        "rejected_reward": lost,
        "reward_margin": won - lost,
        "reference_point": masked_mean(z, present),
    }
    return (LossTerm("objective", torch.where(present, value, 0), present, metrics=metrics),)


# ------------------------------------------------------------------ pairs


@preference("bco_pair", ("ref_log_prob", "sharp_log_prob", "weighting", "reference_point"), once=_BCO)
def bco_pair(pairs: Pairs) -> Tensor:
    r""":func:`bco` on pairs: ``-logsigmoid(beta (c - z)) - logsigmoid(-beta (l - z))``, an upper bound of :func:`dpo`'s.

    Without ``reference_point``, ``z`` is the mean of ``c`` and ``l`` over these pairs. TRL's has ``z = 0``. ``c``, ``l``,
    pairs, ``beta``, ``weighting`` and metrics are as in :func:`dpo`.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-4.0]]), torch.full((2, 1), -2.0)
        >>> bco_pair(log_prob, torch.ones(2, 1, dtype=torch.bool), ref_log_prob=ref_log_prob, beta=0.5)[0].value
        tensor([[0.7737]])

    Source: Jung et al. 2024 (arXiv 2404.04656), the loss with the reward shift, on pairs.
    """
    z = pairs.reference_point
    if z is None:
        z = (masked_mean(pairs.chosen, pairs.mask) + masked_mean(pairs.rejected, pairs.mask)).detach() / 2
    return -logsigmoid(pairs.beta * (pairs.chosen - z)) - logsigmoid(pairs.beta * (z - pairs.rejected))


@torch.no_grad()
def aot_reference_point(
    log_prob: Tensor,
    mask: Tensor,
    *,
    ref_log_prob: Tensor,
    pair_id: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Tensor:
    r"""The reference point of :func:`aot`: the reference's lead of the same rank, less its lead in this pair.

    Inputs are as in :func:`aot`, for a whole batch. A lead is the log-prob of the chosen answer less the rejected one's.


    Returns:
        Nats, equal for both rows of a pair; ``[*B]``.

    Example:
        >>> log_prob = torch.tensor([[-1.0], [-2.0], [-1.0], [-4.0]])  # leads of 1 and 3
        >>> ref_log_prob = torch.tensor([[-1.0], [-3.0], [-1.0], [-1.5]])  # leads of 2 and 0.5
        >>> aot_reference_point(log_prob, torch.ones(4, 1, dtype=torch.bool), ref_log_prob=ref_log_prob)
        tensor([-1.5000, -1.5000,  1.5000,  1.5000])

    Source: Melnyk et al. 2024 (arXiv 2406.05882), the paired variant: both distributions sorted.
    """
    log_prob, ref_log_prob = checked(mask, log_prob=log_prob, ref_log_prob=ref_log_prob)
    pairing = pairing_of(mask.shape[:-1], pair_id=pair_id, chosen=chosen)
    pairs = pair_up(log_prob, mask, ref_log_prob=ref_log_prob, pairing=pairing)
    return pairs.pairing.rows(_of_equal_rank(pairs).expand(-1, 2)).view(mask.shape[:-1])


def _of_equal_rank(pairs: Pairs) -> Tensor:
    """The reference's lead of the policy's rank less the pair's; ``[P, 1]``, 0 for pairs that are left out."""
    summed = pairs.pairing.pairs(sequence_sum(pairs.log_prob.detach(), pairs.token_mask))
    policy = summed[:, :1] - summed[:, 1:]
    reference = policy - pairs.delta.detach()
    absent = ~pairs.mask  # rank last
    rank = policy.masked_fill(absent, torch.inf).argsort(0).argsort(0)
    equal = reference.masked_fill(absent, torch.inf).sort(0).values.gather(0, rank)
    return torch.where(absent, 0, equal - reference)


@preference("aot", ("ref_log_prob", "reference_point"), once=Once("reference_point", aot_reference_point))
def aot(pairs: Pairs, *, label_smoothing: Scalar = 0.0) -> Tensor:
    r"""Alignment via optimal transport: :func:`dpo` between leads of equal rank, the policy's and the reference's.

    The leads (log-prob of the chosen answer less the rejected one's) of policy and reference over the batch are sorted,
    and the k-th of the one is compared with the k-th of the other, so that the distribution of the policy's leads comes to
    dominate the reference's. That is ``-logsigmoid(beta * (delta - z))`` with ``z = reference_point``
    (:func:`aot_reference_point`), by default among these pairs. Pairs, ``delta``, ``beta``, ``label_smoothing`` and metrics
    are as in :func:`dpo`.

    Example:
        >>> log_prob = torch.tensor([[-1.0], [-2.0], [-1.0], [-4.0]])  # leads of 1 and 3
        >>> ref_log_prob = torch.tensor([[-1.0], [-3.0], [-1.0], [-1.5]])  # leads of 2 and 0.5
        >>> aot(log_prob, torch.ones(4, 1, dtype=torch.bool), ref_log_prob=ref_log_prob, beta=0.5)[0].value
        tensor([[0.5759],
                [0.4741]])

    Source: Melnyk et al. 2024 (arXiv 2406.05882), the paired variant with the logistic loss.
    """
    z = _of_equal_rank(pairs) if pairs.reference_point is None else pairs.reference_point
    return logistic(pairs.beta * (pairs.delta - z), label_smoothing)


# ------------------------------------------------------------------ unpaired answers, matched by rank


@torch.no_grad()
def aot_match(log_prob: Tensor, mask: Tensor, *, ref_log_prob: Tensor, chosen: Tensor) -> Tensor:
    r"""The matches of :func:`aot_unpaired`: the rank of an answer's log-ratio among answers of its kind.

    Inputs are as in :func:`aot_unpaired`, for a whole batch. Answers without masked-in tokens rank last.

    Returns:
        The rank from 0, equal for a chosen answer and the rejected one that it is compared with; int64 ``[*B]``.

    Raises:
        ValueError: if there are not as many chosen as rejected answers.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-4.0], [-2.0], [-3.0]]), torch.full((4, 1), -2.0)
        >>> chosen = torch.tensor([True, False, True, False])
        >>> aot_match(log_prob, torch.ones(4, 1, dtype=torch.bool), ref_log_prob=ref_log_prob, chosen=chosen)
        tensor([1, 0, 0, 1])

    Source: Melnyk et al. 2024 (arXiv 2406.05882), the unpaired variant: both distributions sorted.
    """
    log_prob, ref_log_prob = checked(mask, log_prob=log_prob, ref_log_prob=ref_log_prob)
    ratio, present = sequence_sum(log_prob - ref_log_prob, mask).reshape(-1), mask.any(-1).reshape(-1)
    good = chosen.reshape(-1)
    if not torch.compiler.is_compiling():
        for rows, what in ((present, "answers with masked-in tokens"), (torch.ones_like(good), "rows")):
            number = int((rows & good).sum()), int((rows & ~good).sum())
            if number[0] != number[1]:
                raise ValueError(
                    f"aot_unpaired compares as many chosen as rejected answers, found {number[0]} and {number[1]} {what}: "
                    "leave some out."
                )
    order = ratio.masked_fill(~present, torch.inf).argsort(stable=True)
    rank = torch.where(good[order], good[order].cumsum(0), (~good[order]).cumsum(0)) - 1
    return torch.empty_like(rank).index_put((order,), rank).view(mask.shape[:-1])


@objective("aot_unpaired", aggregation="seq-mean-token-sum", once=Once("match_id", aot_match))
def aot_unpaired(
    log_prob: Tensor,
    mask: Tensor,
    *,
    ref_log_prob: Tensor,
    chosen: Tensor,
    match_id: Tensor | None = None,
    beta: Positive = 0.1,
    label_smoothing: Scalar = 0.0,
) -> Terms:
    r"""Alignment via optimal transport: :func:`dpo` between a chosen and a rejected answer whose log-ratios have equal rank.

    Each answer is chosen or rejected, as many of the one as of the other, to any prompts. The log-ratios of both kinds are
    sorted, and the k-th of the one is compared with the k-th of the other, so that the chosen answers' distribution
    comes to dominate. ``match_id`` names the matches (:func:`aot_match`), by default among these rows; keep them
    together in a split. ``beta``, ``label_smoothing``, result and metrics are as in :func:`dpo`, in the order of ranks.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-4.0], [-2.0], [-3.0]]), torch.full((4, 1), -2.0)
        >>> mask, chosen = torch.ones(4, 1, dtype=torch.bool), torch.tensor([True, False, True, False])
        >>> aot_unpaired(log_prob, mask, ref_log_prob=ref_log_prob, chosen=chosen, beta=0.5)[0].value
        tensor([[0.3133],
                [0.3133]])

    Source: Melnyk et al. 2024 (arXiv 2406.05882), the unpaired variant with the logistic loss.
    """
    if match_id is None:
        match_id = aot_match(log_prob, mask, ref_log_prob=ref_log_prob, chosen=chosen)
    pairing = Pairing(interleaving(match_id.reshape(-1), chosen.reshape(-1), "match_id"))
    pairs = pair_up(log_prob, mask, ref_log_prob=ref_log_prob, pairing=pairing, beta=beta)
    return finish(logistic(beta * pairs.delta, label_smoothing), pairs)
