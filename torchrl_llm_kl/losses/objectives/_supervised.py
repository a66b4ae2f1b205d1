"""Imitation of experts: the likelihood of their tokens, also with PPO, and the divergence to a teacher's distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypedDict

from torch import Tensor
from typing_extensions import Unpack

from torchrl_llm_kl._numerics import (
    NonNegative,
    NonPositive,
    Positive,
    PositiveShare,
    Scalar,
    Share,
    check_range,
    masked_mean,
)
from torchrl_llm_kl.estimators import top_k_divergence
from torchrl_llm_kl.losses._arithmetic import Aggregation, bounded_exp, clamp
from torchrl_llm_kl.losses._objective import LossInputs, LossTerm, Terms, objective
from torchrl_llm_kl.losses.objectives._clipped import ppo

#: The roles of messages. Their index is the number in ``message_role``.
ROLES = ("system", "user", "assistant", "tool")


@objective("sft")
def sft(inputs: LossInputs) -> Terms:
    """Supervised fine-tuning: ``-log_prob`` per token, in nats.

    It has the gradient of the cross-entropy between the data distribution and the policy.

    Example:
        >>> sft(LossInputs(torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool)))[0].value
        tensor([[1., 2.]])

    Source: maximum likelihood. Trinity-RFT 0.6.0: sft.
    """
    return (LossTerm("objective", -inputs.log_prob, inputs.mask),)


@objective("sft_is")
def sft_is(inputs: LossInputs) -> Terms:
    """Imitation weighted by the token's probability ``p`` under the policy: ``-sg(p) log p``.

    It has the gradient of ``-p``, so tokens with a probability near 0 hardly move the policy.

    Metrics: ``weight_mean``.

    Example:
        >>> sft_is(LossInputs(torch.tensor([[0.5, 0.1]]).log(), torch.ones(1, 2, dtype=torch.bool)))[0].value
        tensor([[0.3466, 0.2303]])

    Source: Trinity-RFT 0.6.0: sft_is. Wu et al. 2025 (arXiv 2508.05629), DFT.
    """
    weight = inputs.log_prob.detach().exp()
    metrics = {"weight_mean": masked_mean(weight, inputs.mask)}
    return (LossTerm("objective", -weight * inputs.log_prob, inputs.mask, metrics=metrics),)


@objective("sft_phi")
def sft_phi(inputs: LossInputs, *, cutoff_prob: PositiveShare = 1.0) -> Terms:
    """Imitation weighted towards uncertain tokens: ``-sg(p (1 - p)) log p`` with the token's probability ``p``.

    It has the gradient of ``-(p - p**2 / 2)``. The gradient is largest at ``p = 1/2``. It vanishes for tokens that the policy
    already predicts, and for very unlikely tokens, which would disrupt the policy.

    Hyper-parameters:
        cutoff_prob: tokens more probable than this stop training. Their ``log p`` becomes ``log(cutoff_prob)``, without
            gradient. In ``(0, 1]``. The paper has no such bound, which is equivalent to 1.0.

    Metrics: ``weight_mean``, at most 1/4.

    Example:
        >>> probability = torch.tensor([[0.9, 0.5, 0.01]])
        >>> sft_phi(LossInputs(probability.log(), torch.ones(1, 3, dtype=torch.bool)))[0].value
        tensor([[0.0095, 0.1733, 0.0456]])

    Source: Zhang et al. 2025 (arXiv 2508.11408), CHORD-phi. The cut-off is Trinity-RFT 0.6.0's.
    """
    decided = inputs.log_prob.detach()
    # 1 - p would round to 0 for p near 1. expm1 does not.
    weight = -decided.exp() * decided.expm1()
    cutoff = cutoff_prob.log() if isinstance(cutoff_prob, Tensor) else math.log(cutoff_prob)
    value = -weight * clamp(inputs.log_prob, high=cutoff)
    metrics = {"weight_mean": masked_mean(weight, inputs.mask)}
    return (LossTerm("objective", value, inputs.mask, metrics=metrics),)


# ------------------------------------------------------------------ beside PPO


@objective("vapo")
def vapo(
    inputs: LossInputs,
    *,
    mu: NonNegative = 0.1,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.28,
    clip_ratio_c: Scalar | None = None,
    nll_aggregation: Aggregation | None = "token-mean",
) -> Terms:
    r""":func:`ppo` on all answers plus ``mu`` times the negative log-likelihood of right answers (``chosen`` is True).

    The policy thus also imitates its own successes.

    Hyper-parameters:
        mu: weight of the likelihood, at least 0. NeMo-RL: ``positive_example_nll_weight``.
        clip_low, clip_high, clip_ratio_c: see :func:`ppo`. The paper has no dual clip.
        nll_aggregation: aggregation of the likelihood over the tokens of right answers. None: the aggregation of the loss.

    Returns:
        Two terms: ``objective`` with the metrics of :func:`ppo`, and ``nll``.

    Example:
        >>> log_prob, one = torch.tensor([[-1.0], [-3.0]]), torch.ones(2, 1)
        >>> right = torch.tensor([True, False])
        >>> policy, nll = vapo(LossInputs(log_prob, one > 0, old_log_prob=log_prob, advantage=one, chosen=right))
        >>> policy.value.flatten(), nll.value[nll.mask], nll.weight
        (tensor([-1., -1.]), tensor([1.]), 0.1)

    Source: Yue et al. 2025 (VAPO, arXiv 2504.05118), eq. 10 with mu 0.1 and clip 0.2 / 0.28. NeMo-RL:
    ``positive_example_nll_weight``.
    """
    policy = ppo(inputs, clip_low=clip_low, clip_high=clip_high, clip_ratio_c=clip_ratio_c)
    right = inputs.mask & inputs.chosen.unsqueeze(-1)
    return *policy, LossTerm("nll", -inputs.log_prob, right, weight=mu, aggregation=nll_aggregation)


@objective("echo")
def echo(
    inputs: LossInputs,
    *,
    mu: NonNegative = 0.1,
    roles: dict[str, float] | None = None,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    clip_ratio_c: Scalar | None = None,
    nll_aggregation: Aggregation | None = "token-mean",
) -> Terms:
    r""":func:`ppo` on the policy's tokens plus ``mu`` times the negative log-likelihood of observed tokens (``expert_mask``).

    The policy learns to predict its environment: the answers of tools and users after its first turn. Each part is divided by
    its own number of tokens. (In :func:`mix` the two weights add up to 1.) The mask must hold both kinds of tokens but not the
    first prompt: use ``masking_strategy="generic"`` with a ``loss_mask`` per token.

    Hyper-parameters:
        mu: weight of the likelihood, at least 0. prime-rl: ``alpha``.
        roles: role -> factor of ``mu``, at least 0, for the roles of :data:`ROLES` that are learned. The input ``message_role``
            gives each token's role. Each role is then divided by its own number of tokens, whereas prime-rl divides all roles
            by the number of all tokens. None: one term for all observed tokens.
        clip_low, clip_high, clip_ratio_c: see :func:`ppo`.
        nll_aggregation: aggregation of the likelihood. None: the aggregation of the loss.

    Returns:
        The term ``objective`` with the metrics of :func:`ppo`, and the term ``observation``, or with ``roles`` one term per
        role, such as ``observation_tool``.

    Example:
        >>> log_prob, one = torch.tensor([[-1.0, -3.0]]), torch.ones(1, 2)
        >>> tools = torch.tensor([[False, True]])
        >>> policy, seen = echo(LossInputs(log_prob, one > 0, old_log_prob=log_prob, advantage=one, expert_mask=tools))
        >>> policy.value[policy.mask], seen.value[seen.mask], seen.weight
        (tensor([-1.]), tensor([3.]), 0.1)

    Source: prime-rl: ``echo`` and its component ``ce``. The weight 0.1 of tools' answers is its default.
    """
    own, said = inputs.within(~inputs.expert_mask), inputs.mask & inputs.expert_mask
    policy = ppo(own, clip_low=clip_low, clip_high=clip_high, clip_ratio_c=clip_ratio_c)
    if not roles:
        return *policy, LossTerm("observation", -inputs.log_prob, said, weight=mu, aggregation=nll_aggregation)
    check_range(low=0.0, **roles)
    return *policy, *(
        LossTerm(
            f"observation_{role}",
            -inputs.log_prob,
            said & (inputs.message_role == ROLES.index(role)),
            weight=mu * share,
            aggregation=nll_aggregation,
        )
        for role, share in roles.items()
    )


@objective("sdar")
def sdar(
    inputs: LossInputs,
    *,
    mu: NonNegative = 0.1,
    beta: NonNegative = 5.0,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    clip_ratio_c: Scalar | None = None,
) -> Terms:
    r""":func:`ppo` plus ``mu`` times ``sg(g) (ref_log_prob - log_prob)`` with ``g = sigmoid(beta (ref_log_prob - log_prob))``.

    The reference is the teacher: often the policy itself with more context, such as a retrieved skill. The second part has the
    gradient ``-g``. It raises every sampled token, and most of all the tokens that the teacher finds likelier. Over the
    policy's own tokens this is a policy gradient with the advantage ``mu g``. A constant gate has no effect in the mean.

    Hyper-parameters:
        mu: weight of the second part, at least 0. ms-swift: ``sdar_loss_coef``.
        beta: sharpness of the gate per nat. 0 for a gate of 1/2 everywhere. ms-swift: ``sdar_gate_beta``.
        clip_low, clip_high, clip_ratio_c: see :func:`ppo`.

    Returns:
        Two terms: ``objective`` with the metrics of :func:`ppo`, and ``distillation`` with ``gate_mean`` and ``reverse_kl``,
        the mean of ``log_prob - ref_log_prob``.

    Example:
        >>> log_prob, one = torch.tensor([[-1.0, -3.0]]), torch.ones(1, 2)
        >>> inputs = LossInputs(log_prob, one > 0, old_log_prob=log_prob, advantage=one, ref_log_prob=-2 * one)
        >>> policy, teacher = sdar(inputs, beta=1.0)
        >>> teacher.value, teacher.weight  # gates 0.2689 and 0.7311
        (tensor([[-0.2689,  0.7311]]), 0.1)

    Source: Lu et al. 2026 (SDAR, arXiv 2605.15155). beta 5 and the loss: its authors' code. mu 0.1: ms-swift.
    """
    policy = ppo(inputs, clip_low=clip_low, clip_high=clip_high, clip_ratio_c=clip_ratio_c)
    lead = inputs.ref_log_prob - inputs.log_prob
    gate = (beta * lead.detach()).sigmoid()
    metrics = {"gate_mean": masked_mean(gate, inputs.mask), "reverse_kl": masked_mean(-lead.detach(), inputs.mask)}
    return *policy, LossTerm("distillation", gate * lead, inputs.mask, weight=mu, metrics=metrics)


# ------------------------------------------------------------------ mixed with PPO


class MixOptions(TypedDict, total=False):
    """Options of :func:`mix` that :func:`mix_chord` shares."""

    clip_low: Scalar
    clip_high: Scalar
    clip_ratio_c: Scalar | None
    usual_aggregation: Aggregation | None
    expert_aggregation: Aggregation | None


@objective("mix")
def mix(
    inputs: LossInputs,
    *,
    mu: Share = 0.1,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    clip_ratio_c: Scalar | None = 3.0,
    usual_aggregation: Aggregation | None = None,
    expert_aggregation: Aggregation | None = None,
) -> Terms:
    r"""``(1 - mu)`` of :func:`ppo` on the policy's own tokens plus ``mu`` of :func:`sft` on experts' tokens.

    Each part is averaged over its own tokens, so ``mu`` is the weight of the experts whatever their number. A part without
    tokens is 0. At experts' tokens ``old_log_prob`` and ``advantage`` are ignored and may be NaN.

    Hyper-parameters:
        mu: weight of the experts, 0 to 1.
        clip_low, clip_high, clip_ratio_c: see :func:`ppo`.
        usual_aggregation: aggregation of the usual part. None: the aggregation of the loss. Trinity: ``grpo_loss_agg_mode``.
        expert_aggregation: aggregation of the experts' part, in the same way. Trinity: ``sft_loss_agg_mode``.

    Returns:
        Two terms: ``usual`` with the metrics of :func:`ppo`, and ``expert`` with the metric ``expert_fraction``, the experts'
        share of the masked-in tokens.

    Example:
        >>> log_prob, one = torch.tensor([[-1.0], [-3.0]]), torch.ones(2, 1)
        >>> experts = torch.tensor([[False], [True]])
        >>> usual, expert = mix(LossInputs(log_prob, one > 0, old_log_prob=log_prob, advantage=one, expert_mask=experts))
        >>> usual.value[usual.mask], expert.value[expert.mask], expert.weight
        (tensor([-1.]), tensor([3.]), 0.1)

    Source: Zhang et al. 2025 (arXiv 2508.11408), the loss with a fixed mu. Trinity-RFT 0.6.0: mix.
    """
    # Narrowing the inputs also cleans them: NaN at experts' tokens must not reach PPO.
    own, written = inputs.within(~inputs.expert_mask), inputs.within(inputs.expert_mask)
    (usual,) = ppo(own, clip_low=clip_low, clip_high=clip_high, clip_ratio_c=clip_ratio_c)
    (expert,) = sft(written)
    fraction = masked_mean(expert.mask.to(expert.value.dtype), inputs.mask)
    return (
        usual.replace(name="usual", weight=1 - mu, aggregation=usual_aggregation),
        expert.replace(name="expert", weight=mu, aggregation=expert_aggregation, metrics={"expert_fraction": fraction}),
    )


@objective("mix_chord", options=mix)
def mix_chord(
    inputs: LossInputs, *, mu: Share = 0.1, enable_phi_function: bool = True, **options: Unpack[MixOptions]
) -> Terms:
    r""":func:`mix` with weighted tokens of experts, and a ``mu`` that may follow a schedule.

    Hyper-parameters:
        mu: weight of the experts, 0 to 1, or a :class:`~torchrl_llm_kl.estimators.ScheduledCoefficient`.
        enable_phi_function: weight the tokens of experts as :func:`sft_phi` does (CHORD-phi) instead of equally (CHORD-mu).
        clip_low, clip_high, clip_ratio_c: see :func:`ppo`.
        usual_aggregation, expert_aggregation: see :func:`mix`.

    Returns:
        The two terms of :func:`mix`. With weighted tokens, ``expert`` also has the metric ``weight_mean``. A loss logs ``mu``
        if it is a module.

    Example:
        >>> one = torch.ones(1, 1)
        >>> inputs = LossInputs(-one, one > 0, old_log_prob=-one, advantage=one, expert_mask=one < 0)
        >>> usual, expert = mix_chord(inputs, mu=0.25)
        >>> usual.weight, expert.weight
        (0.75, 0.25)

    Source: Zhang et al. 2025 (arXiv 2508.11408), CHORD-mu and CHORD-phi. Trinity-RFT 0.6.0: mix_chord.
    """
    usual, expert = mix(inputs, mu=mu, **options)
    if enable_phi_function:
        (weighted,) = sft_phi(inputs.within(inputs.expert_mask))
        expert = expert.replace(value=weighted.value, metrics={**weighted.metrics, **expert.metrics})
    return usual, expert


# ------------------------------------------------------------------ distributions of teachers

#: The outcomes that a distillation compares: a teacher's top k and "any other token", or every token of a local teacher.
Distribution = Literal["top_k", "exact"]


@objective("distill", only_with=dict.fromkeys(("teacher_weights", "log_prob_min"), ("distribution", ("top_k",))))
def distill(
    inputs: LossInputs,
    *,
    beta: Share = 0.5,
    distribution: Distribution = "top_k",
    teacher_weights: Sequence[float] | None = None,
    ratio_max: Positive | None = None,
    value_max: Positive | None = None,
    log_prob_min: NonPositive | None = None,
) -> Terms:
    r"""Generalised Jensen-Shannon divergence to a teacher, at each token over ``k + 1`` outcomes or the whole vocabulary.

    With the student's distribution ``q``, the teacher's ``p`` and :math:`m = \beta p + (1 - \beta) q`, the value is
    :math:`\beta KL(p \| m) + (1-\beta) KL(q \| m)`. At ``beta=0`` it is the forward :math:`KL(p \| q)`, and at ``beta=1`` the
    reverse :math:`KL(q \| p)`. See :func:`~torchrl_llm_kl.estimators.top_k_divergence`. The gradient is the gradient of this
    value given the prefix, whoever wrote the prefix. With the student's own answers this is on-policy distillation. With
    answers of others it is supervised distillation.

    With several teachers the value is a weighted sum of divergences, each over the teacher's own top k. If the weights add up
    to 1 and every token is listed, the sum of forward KLs has the gradient of the forward KL to the weighted mean of the
    teachers' distributions. The sum of reverse KLs has the gradient of the reverse KL to their normalised weighted geometric
    mean.

    Hyper-parameters:
        beta: the teacher's share of the mixture, 0 to 1, as in TRL.
        distribution: ``"top_k"`` reads ``outcomes`` and ``teacher_outcomes``. ``"exact"`` reads ``teacher_divergence``, which
            :class:`~torchrl_llm_kl.losses.PolicyLoss` computes from both models with this ``beta``.
        teacher_weights: one weight for each teacher, used without normalisation. None: equal weights that add up to 1.
        ratio_max: multiply by the ratio to the sampler, capped here, without gradient. For answers of an older student. None
            for no ratio. TRL: ``distillation_is_clip``.
        value_max: largest value of a token in nats, above 0, without gradient beyond. None for no bound. verl:
            ``loss_max_clamp``.
        log_prob_min: smallest log-prob of an outcome of ``"top_k"``, at most 0, without gradient below. None for no bound.
            verl: ``log_prob_min_clamp``.

    Metrics, with ``"top_k"``: ``captured_mass``, the teacher's probability of its top k, averaged over several teachers with
    their weights. If it is far below 1, the value is far below the divergence over all tokens.

    Example:
        >>> teacher, student = torch.tensor([[[0.7, 0.2, 0.1]]]).log(), torch.tensor([[[0.4, 0.4, 0.2]]]).log()
        >>> log_prob, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
        >>> (term,) = distill(LossInputs(log_prob, mask, outcomes=student, teacher_outcomes=teacher), beta=0.0)
        >>> term.value, term.metrics["captured_mass"]
        (tensor([[0.1838]]), tensor(0.9000))

    Source: Agarwal et al. 2024 (GKD, arXiv 2306.13649), eq. 1 and algorithm 1. TRL 1.16:
    GKDTrainer.generalized_jsd_loss. ratio_max: Huebotter et al. 2026 (SDPO, arXiv 2601.20802), 2 in TRL. The other
    bounds: verl 0.9.1, 10 and -10.
    """
    mask, metrics = inputs.mask, dict[str, Tensor]()
    if distribution == "exact":
        value = inputs.teacher_divergence
    else:
        # One teacher may come without the dimension of teachers.
        both = inputs.outcomes, inputs.teacher_outcomes
        outcomes, teacher = (x.unsqueeze(-2) if x.ndim == mask.ndim + 1 else x for x in both)
        weight = _teacher_weights(teacher_weights, outcomes)
        captured = -(weight / weight.sum() * teacher[..., -1].expm1()).sum(-1)
        metrics["captured_mass"] = masked_mean(captured, mask)
        outcomes, teacher = clamp(outcomes, low=log_prob_min), clamp(teacher, low=log_prob_min)
        value = (weight * top_k_divergence(outcomes, teacher, beta=beta)).sum(-1)
    value = clamp(value, high=value_max)
    if ratio_max is not None:
        value = value * clamp(bounded_exp(inputs.log_ratio), high=ratio_max).detach()
    return (LossTerm("objective", value, mask, metrics=metrics),)


def _teacher_weights(given: Sequence[float] | None, outcomes: Tensor) -> Tensor:
    """The weight of each teacher, ``[M]``."""
    number = outcomes.shape[-2]
    if given is None:
        return outcomes.new_full((number,), 1 / number)
    if len(given) != number:
        raise ValueError(f"teacher_weights has {len(given)} numbers for {number} teachers: pass one for each.")
    if not (min(given) >= 0 and 0 < sum(given) < math.inf):
        raise ValueError(f"teacher_weights must be finite and at least 0, and not all 0, got {list(given)}.")
    return outcomes.new_tensor(list(given))
