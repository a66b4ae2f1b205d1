"""Preference losses that compare an answer with the whole batch: unpaired answers (KTO, BCO) and distributions (AOT).

They read an input with one value per sequence, ``reference_point`` or ``match_id``, that depends on the whole batch. Compute it
once before splitting into micro-batches, with :meth:`~torchrl_llm_kl.losses.PolicyLoss.batch_inputs` or with the functions
below. If it is missing, every loss except :func:`kto` computes it from its own rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchrl_llm_kl._numerics import NonNegative, Positive, Scalar, masked_mean
from torchrl_llm_kl.losses._arithmetic import sequence_mean, sequence_sum
from torchrl_llm_kl.losses._objective import LossInputs, LossTerm, Once, Smoothing, Terms, Weighting, objective
from torchrl_llm_kl.losses.objectives._preference import SUM, Pairing, Pairs, interleaving, logistic, pair_up

# ------------------------------------------------------------------ one label per answer


@torch.no_grad()
def kto_reference_point(inputs: LossInputs) -> Tensor:
    r"""The reference point of :func:`kto`: :math:`KL(\pi \| \pi_{ref})` of whole answers, from mismatched pairs.

    The inputs are log-probs of a whole batch of mismatched pairs: each prompt is followed by the answer to another prompt
    (:func:`~torchrl_llm_kl.rollouts.mismatch`). The estimate is the mean over pairs of the summed log-ratio, and at least 0.

    Returns:
        Nats, the same number for each sequence, ``[*B]``.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-4.0], [-3.0]]), torch.tensor([[-2.0], [-3.0], [-5.0]])
        >>> kto_reference_point(LossInputs(log_prob, torch.ones(3, 1, dtype=torch.bool), ref_log_prob=ref_log_prob))
        tensor([0.6667, 0.6667, 0.6667])

    Source: Ethayarajh et al. 2024 (arXiv 2402.01306), the estimate of z_0 in section 4.
    """
    ratio = _log_ratio(inputs).squeeze(-1)
    return masked_mean(ratio, inputs.mask.any(-1)).clamp(min=0).expand(ratio.shape)


def _log_ratio(inputs: LossInputs) -> Tensor:
    """The log-ratio of policy and reference for whole answers, ``[*B, 1]``."""
    return sequence_sum(inputs.log_prob - inputs.ref_log_prob, inputs.mask)


@objective("kto", aggregation=SUM, once=Once("reference_point", kto_reference_point, mismatched=True))
def kto(
    inputs: LossInputs,
    *,
    beta: Positive = 0.1,
    desirable_weight: NonNegative = 1.0,
    undesirable_weight: NonNegative = 1.0,
) -> Terms:
    r"""Kahneman-Tversky optimisation: each answer is desirable or undesirable, without pairs.

    With the log-ratio ``c`` of an answer, the sum of ``log_prob - ref_log_prob``, and ``z = reference_point``, the loss is
    ``desirable_weight * sigmoid(-beta (c - z))`` for a desirable answer (``chosen`` is True) and
    ``undesirable_weight * sigmoid(beta (c - z))`` for an undesirable one. The gradient is greatest at ``c = z`` and vanishes
    far from it on both sides.

    ``z`` is the KL of the policy's answers to the reference. A desirable answer therefore has to become more likely than an
    average answer. :meth:`~torchrl_llm_kl.losses.PolicyLoss.batch_inputs` estimates ``z`` from mismatched prompts and answers
    (:func:`kto_reference_point`). With ``z = 0`` the loss is the unpaired :func:`apo_zero`.

    Hyper-parameters:
        beta: per nat, above 0. A greater value keeps the policy closer to the reference.
        desirable_weight, undesirable_weight: weights of the two kinds, at least 0. Both kinds count equally if the weights are
            inversely proportional to the numbers of answers. Up to 4/3 of that is usual for the desirable kind.

    Returns:
        One term, ``objective``, with one value per sequence, ``[*B, 1]``. Metrics: ``chosen_reward`` and ``rejected_reward``
        (the means of ``beta c`` of each kind), their difference ``reward_margin``, and ``reference_point``.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-4.0]]), torch.full((2, 1), -2.0)
        >>> mask, chosen = torch.ones(2, 1, dtype=torch.bool), torch.tensor([True, False])
        >>> z = torch.full((2,), 0.5)
        >>> kto(LossInputs(log_prob, mask, ref_log_prob=ref_log_prob, chosen=chosen, reference_point=z), beta=0.5)[0].value
        tensor([[0.4378],
                [0.2227]])

    Source: Ethayarajh et al. 2024 (arXiv 2402.01306), eq. 7.
    """
    # Required: the rows at hand hold no mismatched pairs to estimate it from.
    ratio, z, chosen = _log_ratio(inputs), inputs.reference_point.unsqueeze(-1), inputs.chosen
    surprise = _signed(beta * (z - ratio), chosen).sigmoid()
    value = torch.where(chosen.unsqueeze(-1), desirable_weight * surprise, undesirable_weight * surprise)
    return _of_answers(inputs, value, ratio, z, beta)


@torch.no_grad()
def bco_reference_point(inputs: LossInputs) -> Tensor:
    r"""The reference point of :func:`bco` and :func:`bco_pair`: halfway between the mean log-ratios of good and bad answers.

    Inputs are as in :func:`bco`, for a whole batch. Without ``chosen``, rows are chosen, rejected, chosen, and so on. If the
    batch has answers of only one kind, the result is their mean. Average the results for a running mean over batches.

    Returns:
        Nats, the same number for each sequence, ``[*B]``.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-4.0], [-3.0]]), torch.full((3, 1), -2.0)
        >>> mask, chosen = torch.ones(3, 1, dtype=torch.bool), torch.tensor([True, False, False])
        >>> bco_reference_point(LossInputs(log_prob, mask, ref_log_prob=ref_log_prob, chosen=chosen))
        tensor([-0.2500, -0.2500, -0.2500])

    Source: Jung et al. 2024 (arXiv 2404.04656), the reward shift, here in nats.
    """
    ratio, present, chosen = _log_ratio(inputs).squeeze(-1), inputs.mask.any(-1), inputs.get("chosen")
    if chosen is None:
        chosen = (torch.arange(ratio.numel(), device=ratio.device) % 2 == 0).view(ratio.shape)
    kinds = [present & chosen, present & ~chosen]
    number = torch.stack([kind.any() for kind in kinds]).sum().clamp(min=1)
    return (torch.stack([masked_mean(ratio, kind) for kind in kinds]).sum() / number).expand(ratio.shape)


_BCO = Once("reference_point", bco_reference_point)


@objective("bco", aggregation=SUM, once=_BCO)
def bco(inputs: LossInputs, *, beta: Positive = 0.1) -> Terms:
    r"""Binary classifier optimisation: cross-entropy of the logit ``beta (c - z)`` of each answer, ``z = reference_point``.

    Each answer is good (``chosen`` is True) or bad, without pairs. ``c`` is the answer's log-ratio, the sum of
    ``log_prob - ref_log_prob``, and ``z = reference_point``. The loss is ``-logsigmoid(beta (c - z))`` for a good answer and
    ``-logsigmoid(-beta (c - z))`` for a bad one. Their sum is an upper bound of :func:`dpo`'s loss. If ``reference_point`` is
    missing, :func:`bco_reference_point` of the same rows is used. ``beta`` and metrics are as in :func:`kto`.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-4.0]]), torch.full((2, 1), -2.0)
        >>> mask, chosen = torch.ones(2, 1, dtype=torch.bool), torch.tensor([True, False])
        >>> bco(LossInputs(log_prob, mask, ref_log_prob=ref_log_prob, chosen=chosen), beta=0.5)[0].value  # z = -0.5
        tensor([[0.3869],
                [0.3869]])

    Source: Jung et al. 2024 (arXiv 2404.04656), the loss with the reward shift.
    """
    ratio, chosen, point = _log_ratio(inputs), inputs.chosen, inputs.get("reference_point")
    z = (bco_reference_point(inputs) if point is None else point).unsqueeze(-1)
    return _of_answers(inputs, -logsigmoid(_signed(beta * (ratio - z), chosen)), ratio, z, beta)


@objective("real", aggregation=SUM)
def real(inputs: LossInputs, *, tau: Positive = 0.5) -> Terms:
    r"""Rewards as labels: each answer of a group is classified by its mean log-ratio ``s`` to the sampler.

    ``log(1 + sum exp(-s / tau))`` over the right answers of the group (``chosen`` is True) plus
    ``log(1 + sum exp(s / tau))`` over the wrong ones. ``s`` is the mean of ``log_prob - old_log_prob`` over the answer's
    tokens. The gradient of an answer's ``s`` is at most ``1 / tau``. It is largest for the right answer that has become the
    least likely and for the wrong answer that has become the most likely, unlike in GRPO. It uses no advantage.

    ``match_id`` is equal for the answers to one prompt, and a split must keep them together. Without it each answer is its own
    group: binary cross-entropy of the logits ``s / tau``.

    Hyper-parameters:
        tau: temperature of the logits, in nats per token. ms-swift: ``real_tau``.

    Returns:
        One term with one value per sequence, ``[*B, 1]``: the loss of its group. Their mean is a mean over groups of equal
        size. Metrics: ``reward_accuracy``, the share of answers whose ``s`` has the sign of its label. An ``s`` of 0 is half
        right.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0], [-4.0], [-2.0]]), torch.full((3, 1), -2.0)
        >>> chosen, group = torch.tensor([True, False, False]), torch.tensor([7, 7, 7])
        >>> real(LossInputs(log_prob, old < 0, old_log_prob=old, chosen=chosen, match_id=group), tau=1.0)[0].value
        tensor([[1.0719],
                [1.0719],
                [1.0719]])

    Source: Zhai et al. 2026 (REAL, arXiv 2602.05630), the loss with anchor logits. tau 0.5: ms-swift, ``loss_type`` ``real``.
    """
    present, chosen, group = inputs.mask.any(-1, keepdim=True), inputs.chosen.reshape(-1), inputs.get("match_id")
    score = sequence_mean(inputs.log_ratio, inputs.mask)
    group = torch.arange(len(chosen), device=chosen.device) if group is None else group.reshape(-1)
    same = (group == group.unsqueeze(-1)) & present.reshape(-1)
    logits = (score / tau).reshape(-1).expand(len(chosen), -1)
    value = torch.zeros_like(score).reshape(-1)
    for kind, sign in ((chosen, -1), (~chosen, 1)):
        others = (sign * logits).masked_fill(~(same & kind), -torch.inf)
        value = value + torch.cat([others, torch.zeros_like(others[:, :1])], -1).logsumexp(-1)
    right = _signed(score.detach(), inputs.chosen).sign()
    metrics = {"reward_accuracy": masked_mean((right + 1) / 2, present)}
    return (LossTerm("objective", value.view_as(score), present, metrics=metrics),)


def _signed(value: Tensor, chosen: Tensor) -> Tensor:
    return torch.where(chosen.unsqueeze(-1), value, -value)


def _of_answers(inputs: LossInputs, value: Tensor, ratio: Tensor, z: Tensor, beta: Scalar) -> Terms:
    """A term with one value per sequence, ``[*B, 1]``, and the metrics of each kind. Sequences without tokens are 0."""
    present, good = inputs.mask.any(-1, keepdim=True), inputs.chosen.unsqueeze(-1)
    reward = beta * ratio.detach()
    won, lost = masked_mean(reward, present & good), masked_mean(reward, present & ~good)
    metrics = {
        "chosen_reward": won,
        "rejected_reward": lost,
        "reward_margin": won - lost,
        "reference_point": masked_mean(z, present),
    }
    return (LossTerm("objective", torch.where(present, value, 0), present, metrics=metrics),)


# ------------------------------------------------------------------ pairs


@objective("bco_pair", aggregation=SUM, once=_BCO)
def bco_pair(inputs: LossInputs, *, beta: Positive = 0.1, weighting: Weighting = "none") -> Terms:
    r""":func:`bco` on pairs: ``-logsigmoid(beta (c - z)) - logsigmoid(-beta (l - z))``, an upper bound of :func:`dpo`.

    Without ``reference_point``, ``z`` is the mean of ``c`` and ``l`` over these pairs. TRL uses ``z = 0``. ``c``, ``l``,
    pairs, ``beta``, ``weighting`` and metrics are as in :func:`dpo`.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-4.0]]), torch.full((2, 1), -2.0)
        >>> bco_pair(LossInputs(log_prob, torch.ones(2, 1, dtype=torch.bool), ref_log_prob=ref_log_prob), beta=0.5)[0].value
        tensor([[0.7737]])

    Source: Jung et al. 2024 (arXiv 2404.04656), the loss with the reward shift, on pairs.
    """
    pairs, point = pair_up(inputs, beta, weighting=weighting), inputs.get("reference_point")
    if point is None:
        # Detached, as a stored reference point is.
        z = (masked_mean(pairs.chosen, pairs.mask) + masked_mean(pairs.rejected, pairs.mask)).detach() / 2
    else:
        z = pairs.pairing.pairs(point)[:, :1]
    return pairs.terms(-logsigmoid(beta * (pairs.chosen - z)) - logsigmoid(beta * (z - pairs.rejected)))


@torch.no_grad()
def aot_reference_point(inputs: LossInputs) -> Tensor:
    r"""The reference point of :func:`aot`, from the sorted leads of policy and reference.

    Inputs are as in :func:`aot`, for a whole batch. A lead is the chosen answer's log-prob minus the rejected one's. The
    result is the reference's lead with the rank of the policy's lead in this pair, minus the reference's lead in this pair.

    Returns:
        Nats, equal for both rows of a pair, ``[*B]``.

    Example:
        >>> log_prob = torch.tensor([[-1.0], [-2.0], [-1.0], [-4.0]])  # leads of 1 and 3
        >>> ref_log_prob = torch.tensor([[-1.0], [-3.0], [-1.0], [-1.5]])  # leads of 2 and 0.5
        >>> aot_reference_point(LossInputs(log_prob, torch.ones(4, 1, dtype=torch.bool), ref_log_prob=ref_log_prob))
        tensor([-1.5000, -1.5000,  1.5000,  1.5000])

    Source: Melnyk et al. 2024 (arXiv 2406.05882), the paired variant: both distributions sorted.
    """
    pairs = pair_up(inputs, 1.0)
    return pairs.pairing.rows(_of_equal_rank(inputs, pairs).expand(-1, 2)).view(inputs.mask.shape[:-1])


def _of_equal_rank(inputs: LossInputs, pairs: Pairs) -> Tensor:
    """The reference's lead of the policy's rank minus the pair's lead, ``[P, 1]``. Pairs that are left out get 0."""
    summed = pairs.pairing.pairs(sequence_sum(inputs.log_prob.detach(), inputs.mask))
    policy = summed[:, :1] - summed[:, 1:]
    reference = policy - pairs.delta.detach()
    absent = ~pairs.mask  # infinite leads put pairs without tokens last
    rank = policy.masked_fill(absent, torch.inf).argsort(0).argsort(0)
    equal = reference.masked_fill(absent, torch.inf).sort(0).values.gather(0, rank)
    return torch.where(absent, 0, equal - reference)


@objective("aot", aggregation=SUM, once=Once("reference_point", aot_reference_point))
def aot(inputs: LossInputs, *, beta: Positive = 0.1, label_smoothing: Smoothing = 0.0) -> Terms:
    r"""AOT: :func:`dpo` with leads (chosen minus rejected log-prob) of policy and reference compared by rank in the batch.

    AOT stands for alignment via optimal transport. The leads of the policy over the batch are sorted, and so are the leads of
    the reference. The k-th lead of the policy is compared with the k-th lead of the reference. The distribution of the
    policy's leads thus comes to dominate the reference's. The loss is ``-logsigmoid(beta * (delta - z))`` with
    ``z = reference_point`` (:func:`aot_reference_point`), by default computed from these pairs. Pairs, ``delta``, ``beta``,
    ``label_smoothing`` and metrics are as in :func:`dpo`.

    Example:
        >>> log_prob = torch.tensor([[-1.0], [-2.0], [-1.0], [-4.0]])  # leads of 1 and 3
        >>> ref_log_prob = torch.tensor([[-1.0], [-3.0], [-1.0], [-1.5]])  # leads of 2 and 0.5
        >>> aot(LossInputs(log_prob, torch.ones(4, 1, dtype=torch.bool), ref_log_prob=ref_log_prob), beta=0.5)[0].value
        tensor([[0.5759],
                [0.4741]])

    Source: Melnyk et al. 2024 (arXiv 2406.05882), the paired variant with the logistic loss.
    """
    pairs, point = pair_up(inputs, beta), inputs.get("reference_point")
    z = _of_equal_rank(inputs, pairs) if point is None else pairs.pairing.pairs(point)[:, :1]
    return pairs.terms(logistic(beta * (pairs.delta - z), label_smoothing))


# ------------------------------------------------------------------ unpaired answers, matched by rank


@torch.no_grad()
def aot_match(inputs: LossInputs) -> Tensor:
    r"""The matches of :func:`aot_unpaired`: the rank of an answer's log-ratio among the answers of its kind.

    Inputs are as in :func:`aot_unpaired`, for a whole batch. Answers without masked-in tokens rank last.

    Returns:
        Ranks from 0, int64 ``[*B]``. A chosen answer is compared with the rejected answer of the same rank.

    Raises:
        ValueError: if there are not as many chosen as rejected answers.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-4.0], [-2.0], [-3.0]]), torch.full((4, 1), -2.0)
        >>> chosen = torch.tensor([True, False, True, False])
        >>> aot_match(LossInputs(log_prob, torch.ones(4, 1, dtype=torch.bool), ref_log_prob=ref_log_prob, chosen=chosen))
        tensor([1, 0, 0, 1])

    Source: Melnyk et al. 2024 (arXiv 2406.05882), the unpaired variant: both distributions sorted.
    """
    ratio, present, good = _log_ratio(inputs).reshape(-1), inputs.mask.any(-1).reshape(-1), inputs.chosen.reshape(-1)
    if not torch.compiler.is_compiling():
        # Rows without masked-in tokens would be matched last, and leave out a row that has some.
        chosen, rejected = int((present & good).sum()), int((present & ~good).sum())
        if chosen != rejected:
            raise ValueError(f"aot_unpaired compares as many chosen as rejected answers, got {chosen} and {rejected}.")
    order = ratio.masked_fill(~present, torch.inf).argsort(stable=True)
    # Counting the answers of a kind in sorted order gives their ranks.
    rank = torch.where(good[order], good[order].cumsum(0), (~good[order]).cumsum(0)) - 1
    return torch.empty_like(rank).index_put((order,), rank).view(inputs.mask.shape[:-1])


@objective("aot_unpaired", aggregation=SUM, once=Once("match_id", aot_match))
def aot_unpaired(inputs: LossInputs, *, beta: Positive = 0.1, label_smoothing: Smoothing = 0.0) -> Terms:
    r"""Alignment via optimal transport: :func:`dpo` between a chosen and a rejected answer whose log-ratios have equal rank.

    Each answer is chosen or rejected, to any prompt, with equally many of both kinds. The log-ratios of both kinds are sorted,
    and the k-th of one is compared with the k-th of the other. The distribution of the chosen answers thus comes to dominate.
    ``match_id`` names the matches (:func:`aot_match`), by default computed from these rows. A split must keep matches
    together. ``beta``, ``label_smoothing``, result and metrics are as in :func:`dpo`, in the order of ranks.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-4.0], [-2.0], [-3.0]]), torch.full((4, 1), -2.0)
        >>> mask, chosen = torch.ones(4, 1, dtype=torch.bool), torch.tensor([True, False, True, False])
        >>> aot_unpaired(LossInputs(log_prob, mask, ref_log_prob=ref_log_prob, chosen=chosen), beta=0.5)[0].value
        tensor([[0.3133],
                [0.3133]])

    Source: Melnyk et al. 2024 (arXiv 2406.05882), the unpaired variant with the logistic loss.
    """
    matches = inputs.get("match_id")
    if matches is None:
        matches = aot_match(inputs)
    pairing = Pairing(interleaving(matches.reshape(-1), inputs.chosen.reshape(-1), "match_id"))
    pairs = pair_up(inputs, beta, pairing=pairing)
    return pairs.terms(logistic(beta * pairs.delta, label_smoothing))
