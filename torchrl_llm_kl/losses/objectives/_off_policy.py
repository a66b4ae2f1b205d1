"""Policy gradients and importance weighting: ``-A w log_prob`` per token, with different weights ``w``."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import AboveOne, NonNegative, Positive, PositiveShare, Scalar, masked_mean
from torchrl_llm_kl.losses._arithmetic import (
    Aggregation,
    bounded_exp,
    clamp,
    clip_fractions,
    sequence_mean,
    sequence_sum,
)
from torchrl_llm_kl.losses._objective import LossInputs, LossTerm, Terms, objective


@objective("gpg")
def gpg(inputs: LossInputs) -> Terms:
    r"""The plain policy gradient: ``-A log_prob`` per token, without ratio, clipping or hyper-parameters.

    The mean gradient is the policy gradient if the current policy sampled the tokens.

    Example:
        >>> log_prob, advantage = torch.tensor([[-1.0, -2.0]]), torch.tensor([[1.0, -1.0]])
        >>> gpg(LossInputs(log_prob, torch.ones(1, 2, dtype=torch.bool), advantage=advantage))[0].value
        tensor([[ 1., -2.]])

    Source: Chu et al. 2025 (arXiv 2504.02546). Williams 1992 (REINFORCE).
    """
    return (LossTerm("objective", -inputs.advantage * inputs.log_prob, inputs.mask),)


@objective("opmd")
def opmd(inputs: LossInputs, *, tau: NonNegative = 1.0) -> Terms:
    r"""``-A log_prob / (1 + tau)`` per token, on- or off-policy: no ratio, no clipping.

    At the old policy, with advantages ``reward - mean(reward)`` of a group, it has the gradient of an objective that pulls the
    policy towards ``pi_old exp(reward / tau)``. Off-policy it needs no importance weight. ``tau`` only scales the loss.

    Hyper-parameters:
        tau: strength of the regulariser, at least 0.

    Example:
        >>> log_prob, advantage = torch.tensor([[-1.0, -2.0]]), torch.tensor([[1.0, -1.0]])
        >>> opmd(LossInputs(log_prob, torch.ones(1, 2, dtype=torch.bool), advantage=advantage), tau=3.0)[0].value
        tensor([[ 0.2500, -0.5000]])

    Source: Pan et al. 2025, Trinity-RFT (arXiv 2505.17826), appendix A: the simple variant of OPMD.
    """
    return (LossTerm("objective", -inputs.advantage * inputs.log_prob / (1 + tau), inputs.mask),)


@objective("importance_sampling")
def importance_sampling(inputs: LossInputs) -> Terms:
    r"""The unbiased off-policy policy gradient: ``-A r`` per token, without clipping.

    At each position it has the mean gradient of ``-E_pi[A]``, whichever policy sampled the tokens. Its variance grows with the
    distance between the two policies. Log-ratios are capped at 80 nats, without gradient above, so that the exponential does
    not overflow.

    Metrics: ``ratio_mean``, about 1 for tokens of the old policy.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
        >>> importance_sampling(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage))[0].value
        tensor([[-1.6487,  0.6065]])

    Source: Kahn and Marshall 1953. Schulman et al. 2017 (arXiv 1707.06347), eq. 6.
    """
    ratio = bounded_exp(inputs.log_ratio)
    metrics = {"ratio_mean": masked_mean(ratio.detach(), inputs.mask)}
    return (LossTerm("objective", -inputs.advantage * ratio, inputs.mask, metrics=metrics),)


@objective("topr")
def topr(
    inputs: LossInputs, *, advantage_threshold: Scalar = 0.0, level: Literal["token", "sequence"] = "token"
) -> Terms:
    r"""Tapered off-policy REINFORCE: ``-A sg(a) log_prob`` with ``a = min(r, 1)`` where ``A <= advantage_threshold``, else 1.

    The gradient raises good tokens whatever their ratio. It lowers bad tokens less as they become less likely. The loss has no
    lower bound, and this keeps it from diverging.

    Hyper-parameters:
        advantage_threshold: tokens with advantages up to this are bad.
        level: ``"token"``: each token has its own ratio, as in Trinity. ``"sequence"``: each token has the ratio of its whole
            sequence, the product of the token ratios, as in the paper (which sums over tokens: ``seq-mean-token-sum``).

    Metrics: ``weight_mean``, the mean of ``a``, and ``tapered_fraction``, the share of tokens with ``a < 1``.

    Example:
        >>> log_prob, old = torch.tensor([[-2.0, -2.0]]), torch.tensor([[-1.5, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
        >>> topr(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage))[0].value
        tensor([[ 2.0000, -1.2131]])

    Source: Le Roux et al. 2025 (arXiv 2503.14286), the gradient of canonical TOPR.
    """
    advantage, mask, log_ratio = inputs.advantage, inputs.mask, inputs.log_ratio.detach()
    if level == "sequence":
        log_ratio = sequence_sum(log_ratio, mask)
    # Clamped before exp, so that it cannot overflow.
    weight = torch.where(advantage <= advantage_threshold, log_ratio.clamp(max=0).exp(), 1)
    metrics = {"weight_mean": masked_mean(weight, mask), "tapered_fraction": masked_mean((weight < 1).float(), mask)}
    return (LossTerm("objective", -advantage * weight * inputs.log_prob, mask, metrics=metrics),)


@objective("sppo")
def sppo(inputs: LossInputs, *, epsilon: NonNegative = 0.3) -> Terms:
    r"""A log-ratio surrogate: ``-A (log_prob - old_log_prob)`` where ``1 / (1 + epsilon) <= r <= 1 + epsilon``, else 0.

    The gradient is ``-A`` inside the interval and 0 outside, on both sides and for both signs of ``A``. Nothing pulls a token
    back after it has left the interval.

    Hyper-parameters:
        epsilon: the ratio may differ from 1 by the factor ``1 + epsilon`` in both directions.

    Metrics: ``clip_fraction`` (``_low``: ratio below the interval, ``_high``: above).

    Example:
        >>> log_prob, old = torch.tensor([[-1.5, -2.0]]), torch.tensor([[-1.75, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[2.0, -1.0]])
        >>> sppo(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage))[0].value
        tensor([[-0.5000,  0.0000]])

    Source: Vaswani et al. 2022 (arXiv 2108.05828), section 4.2 (sPPO).
    """
    log_ratio = inputs.log_ratio
    ratio = bounded_exp(log_ratio.detach())  # only for the bounds
    below, above = ratio < 1 / (1 + epsilon), ratio > 1 + epsilon
    value = torch.where(below | above, 0, -inputs.advantage * log_ratio)
    return (LossTerm("objective", value, inputs.mask, metrics=clip_fractions(below, above, inputs.mask)),)


@objective("dro")
def dro(inputs: LossInputs, *, beta: Positive = 0.05, level: Literal["token", "sequence"] = "token") -> Terms:
    r"""Direct reward optimisation: ``-A log_prob + beta / 2 (log_prob - old_log_prob)^2``.

    The gradient is ``-(A - beta log r)`` times the gradient of the log-prob. This is a regression of ``beta log r`` on the
    advantage, divided by ``beta``, on data of any fixed policy. It vanishes where ``beta log r = A``. With
    ``level="sequence"``, answers of the old policy, rewards of whole answers and ``A = reward - beta log E exp(reward /
    beta)`` (the advantage
    ``opmd`` with ``opmd_baseline="logavgexp"``), the optimum is ``pi_old exp(reward / beta)``, normalised.

    Hyper-parameters:
        beta: weight of the quadratic penalty, above 0, in units of the advantage per nat. verl: ``dro_beta``. The paper:
            ``tau``.
        level: ``"token"``: one value per token, as in verl and Tinker. ``"sequence"``: one value per answer, ``[*B, 1]``, from
            its whole log-prob and its mean advantage, as in the paper.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
        >>> dro(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage), beta=0.4)[0].value
        tensor([[ 1.0500, -1.8000]])

    Source: Richemond et al. 2024 (DRO, arXiv 2405.19107), section 3, the gradient of DRO-V. Per token and towards the
    sampler: verl 0.9.1. beta: the example of Thinking Machines' Tinker.
    """
    log_prob, advantage, mask, log_ratio = inputs.log_prob, inputs.advantage, inputs.mask, inputs.log_ratio
    if level == "sequence":
        log_prob, log_ratio = sequence_sum(log_prob, mask), sequence_sum(log_ratio, mask)
        advantage, mask = sequence_mean(advantage, mask), mask.any(-1, keepdim=True)
    return (LossTerm("objective", -advantage * log_prob + beta / 2 * log_ratio.square(), mask),)


#: Divergence -> the authors' bound.
_DPPO_BOUNDS = {"tv": 0.15, "kl": 0.05}


@objective("dppo")
def dppo(
    inputs: LossInputs,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    clip_low: NonNegative | None = None,
    clip_high: NonNegative | None = None,
    clip_ratio_c: AboveOne | None = 20.0,
) -> Terms:
    r"""``-A sg(min(r, clip_ratio_c)) log_prob`` per token, and 0 where the policy has moved too far along the advantage.

    The trust region bounds probabilities, not their ratio. The distance is between distributions of two outcomes, this token
    and any other token, where the token's probability is ``p`` now and ``q`` at sampling. ``"tv"`` is ``|p - q|``, and
    ``"kl"`` is ``q log(q / p) + (1 - q) log((1 - q) / (1 - p))``. A token is dropped if ``A > 0``, ``p > q`` and the distance
    is above ``clip_high``, or if ``A <= 0``, ``p < q`` and the distance is above ``clip_low``. The gradient of all other
    tokens is the off-policy policy gradient with a bounded weight. Unlikely tokens may change by large factors.

    Hyper-parameters:
        divergence: ``"tv"`` or ``"kl"``, which are verl's ``dppo_tv`` and ``dppo_kl``.
        clip_low, clip_high: bounds where ``A <= 0`` and ``A > 0``. None for 0.15 (tv, a probability) or 0.05 (kl, nats).
        clip_ratio_c: upper bound of an importance weight, above 1. None for no bound.

    Metrics: ``clip_fraction`` (``_low``: A <= 0, ``_high``: A > 0) and ``truncated_fraction`` (weights lowered).

    Example:
        >>> log_prob, old = torch.tensor([[0.5, 0.02]]).log(), torch.tensor([[0.25, 0.01]]).log()
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, 1.0]])
        >>> dppo(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage))[0].value
        tensor([[0.0000, 7.8240]])

    Source: Qi et al. 2026 (arXiv 2602.04879), the binary TV and binary KL variants.
    """
    clip_low = _DPPO_BOUNDS[divergence] if clip_low is None else clip_low
    clip_high = _DPPO_BOUNDS[divergence] if clip_high is None else clip_high
    advantage, old_log_prob, now = inputs.advantage, inputs.old_log_prob, inputs.log_prob.detach()
    distance = (now.exp() - old_log_prob.exp()).abs() if divergence == "tv" else _binary_kl(now, old_log_prob)
    up = advantage > 0
    too_high, too_low = (distance > clip_high) & (now > old_log_prob), (distance > clip_low) & (now < old_log_prob)
    dropped = torch.where(up, too_high, too_low)
    ratio = bounded_exp(now - old_log_prob)
    weight = clamp(ratio, high=clip_ratio_c)
    metrics = clip_fractions(dropped & ~up, dropped & up, inputs.mask)
    metrics["truncated_fraction"] = masked_mean((weight < ratio).float(), inputs.mask)
    value = torch.where(dropped, 0, -advantage * weight * inputs.log_prob)
    return (LossTerm("objective", value, inputs.mask, metrics=metrics),)


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q || p) of the two outcomes. It is infinite if ``p`` is 1 and ``q`` is not."""
    rest_p, rest_q = -torch.expm1(log_p), -torch.expm1(log_q)  # 1 - p would be 0 near p = 1
    # Without room for another token at sampling, its term is 0, not 0 times infinity.
    rest = torch.where(rest_q > 0, rest_q * (rest_q.log() - rest_p.log()), 0)
    return log_q.exp() * (log_q - log_p) + rest


@objective("mask_ipo")
def mask_ipo(
    inputs: LossInputs,
    *,
    clip_low: NonNegative = 0.1,
    clip_high: NonNegative | None = 0.1,
    one_sided: bool = False,
    kl_tau: NonNegative = 1e-3,
) -> Terms:
    r"""``-A r`` per token whose probability has moved by at most a bound, else 0, plus ``kl_tau (log r)^2`` on every token.

    The token's probability is ``p`` now and ``q`` at sampling. Tokens with ``p - q < -clip_low`` or ``p - q > clip_high`` are
    left out whatever their advantage. The second part pulls all tokens back to the sampler. (:func:`ipo` is another method, a
    preference loss.)

    Hyper-parameters:
        clip_low, clip_high: bounds of the change of probability. ``clip_high=None`` sets no upper bound. prime-rl:
            ``ipo_threshold`` for both, or ``dppo_mask_low`` and ``dppo_mask_high`` (0.2) of its default loss.
        one_sided: leave out only tokens that moved along the advantage: up if ``A > 0``, else down. This is prime-rl's default
            loss. :func:`dppo` has the same gradient without the second part.
        kl_tau: weight of the squared log-ratio, at least 0.

    Metrics: ``clip_fraction`` (``_low``: fell too far, ``_high``: rose too far).

    Example:
        >>> log_prob, old = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.2]]).log()
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, 2.0]])
        >>> mask_ipo(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage), kl_tau=0.0)[0].value
        tensor([[ 0.0000, -2.5000]])

    Source: prime-rl: ``trainer.loss`` of type ``ipo``, and ``default`` with ``one_sided``: the binary TV mask of Qi et
    al. 2026 (DPPO, arXiv 2602.04879) and the squared log-ratio of Kimi K2.5 (arXiv 2602.02276).
    """
    advantage, mask, log_ratio = inputs.advantage, inputs.mask, inputs.log_ratio
    moved = inputs.log_prob.detach().exp() - inputs.old_log_prob.exp()
    fell, rose = moved < -clip_low, torch.zeros_like(mask) if clip_high is None else moved > clip_high
    if one_sided:
        fell, rose = fell & (advantage <= 0), rose & (advantage > 0)
    value = torch.where(fell | rose, 0, -advantage * bounded_exp(log_ratio)) + kl_tau * log_ratio.square()
    return (LossTerm("objective", value, mask, metrics=clip_fractions(fell, rose, mask)),)


@objective("ref_kl")
def ref_kl(inputs: LossInputs, *, clip_low: Scalar = 0.2, kl_tau: Scalar = 1e-3) -> Terms:
    r"""Distillation: ``-sg(ref_log_prob - log_prob) r`` per token, plus ``kl_tau (log r)^2``. The reference is the teacher.

    The advantage is the current policy's log-ratio to the teacher. (The advantage :func:`on_policy_distill` uses the sampler's
    log-ratio.) Over the sampler's tokens the mean gradient at each position is therefore the gradient of
    :math:`KL(\pi \| \pi_{ref})`, however old the tokens are. Tokens whose probability fell by more than ``clip_low`` since
    sampling keep only the second part.

    Hyper-parameters:
        clip_low: largest fall of the probability.
        kl_tau: as in :func:`mask_ipo`.

    Metrics: those of :func:`mask_ipo`, and ``reverse_kl``, the mean of ``log_prob - ref_log_prob``.

    Example:
        >>> log_prob, old, ref = (torch.tensor([[p]]).log() for p in (0.5, 0.25, 1.0))
        >>> ref_kl(LossInputs(log_prob, log_prob < 0, old_log_prob=old, ref_log_prob=ref), kl_tau=0.0)[0].value
        tensor([[-1.3863]])

    Source: prime-rl: the loss component ``ref_kl`` of ``opd`` and ``opsd``.
    """
    lead = (inputs.ref_log_prob - inputs.log_prob).detach()  # the advantage is a constant
    (term,) = mask_ipo(inputs.replace(advantage=lead), clip_low=clip_low, clip_high=None, kl_tau=kl_tau)
    return (term.replace(metrics={**term.metrics, "reverse_kl": masked_mean(-lead, inputs.mask)}),)


@objective("a2po", aggregation="seq-mean-token-sum")
def a2po(inputs: LossInputs, *, beta: Positive = 1e-3) -> Terms:
    r"""A*-PO: ``(beta log(pi / pi_ref) - A)^2`` for each whole answer, a regression on its optimal advantage.

    Use ``A = reward - V*``: the advantage :func:`remax` with :func:`~torchrl_llm_kl.advantages.soft_value` of the reference's
    answers as the baseline. The loss is then 0 at ``pi_ref exp(reward / beta) / Z``, whoever sampled the answers. It uses
    neither groups nor ratios.

    Hyper-parameters:
        beta: weight of the KL to the reference, above 0, in units of reward per nat. TRL: ``beta2``.

    Returns:
        One term with one value per sequence, ``[*B, 1]``, from the sequence's mean advantage. Metrics: ``implicit_reward``, the
        mean of ``beta log(pi / pi_ref)``.

    Example:
        >>> log_prob, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-2.0, -2.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[0.5, 0.5]])
        >>> a2po(LossInputs(log_prob, mask, ref_log_prob=ref, advantage=advantage), beta=2.0)[0].value
        tensor([[6.2500]])

    Source: Brantley et al. 2025 (A*-PO, arXiv 2505.20686), the regression of the second stage. beta 1e-3: TRL 1.16.
    """
    mask = inputs.mask
    implicit = beta * sequence_sum(inputs.log_prob - inputs.ref_log_prob, mask)
    present = mask.any(-1, keepdim=True)
    value = torch.where(present, (implicit - sequence_mean(inputs.advantage, mask)).square(), 0)
    metrics = {"implicit_reward": masked_mean(implicit.detach(), present)}
    return (LossTerm("objective", value, present, metrics=metrics),)


@objective("vespo")
def vespo(
    inputs: LossInputs,
    *,
    k_pos: NonNegative = 2.0,
    lambda_pos: Positive = 3.0,
    k_neg: NonNegative = 3.0,
    lambda_neg: Positive = 2.0,
) -> Terms:
    r"""REINFORCE: ``-A sg(phi) log_prob`` with ``phi = w^k exp(lambda (1 - w))`` and ``w`` the ratio of the whole sequence.

    ``w`` is the probability ratio of the whole sequence, the product of its token ratios, without length normalisation. The
    weight is 1 on-policy, has its maximum at ``w = k / lambda``, and falls to 0 on both sides. Sequences that have become much
    more or much less likely thus drop out. The weight passes no gradient.

    Hyper-parameters:
        k_pos, lambda_pos: rates at which the weight falls towards ``w = 0`` and for large ``w``, where ``A >= 0``.
        k_neg, lambda_neg: the same rates where ``A < 0``. TRL uses the prefix ``vespo_`` for all four.

    Metrics: ``weight_mean``, the mean of ``phi``.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -1.0]])  # w = 1/e
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
        >>> vespo(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage))[0].value
        tensor([[ 0.9016, -0.3525]])

    Source: Shen et al. 2026 (arXiv 2602.10693). The values are TRL 1.16's.
    """
    advantage, mask = inputs.advantage, inputs.mask
    log_w = sequence_sum(inputs.log_ratio.detach(), mask)
    # An infinite w is harmless: lambda is above 0, so its weight is exp(-inf) = 0.
    room = 1 - log_w.exp()
    log_weight = torch.where(advantage >= 0, k_pos * log_w + lambda_pos * room, k_neg * log_w + lambda_neg * room)
    weight = log_weight.exp()
    metrics = {"weight_mean": masked_mean(weight, mask)}
    return (LossTerm("objective", -advantage * weight * inputs.log_prob, mask, metrics=metrics),)


_CLIPPING = ("one-side", "two-side", "ring", "gspo-one-side")


@objective(
    "rec",
    only_with={
        **dict.fromkeys(("epsilon_low", "epsilon_high"), ("clip_mode", _CLIPPING)),
        **dict.fromkeys(("epsilon_low_prime", "epsilon_high_prime"), ("clip_mode", ("ring",))),
        "temp": ("weight", ("advantage",)),
        "regularizer_coef": ("regularizer", ("k2", "forward-kl")),
    },
)
def rec(
    inputs: LossInputs,
    *,
    clip_mode: Literal["none", "one-side", "two-side", "ring", "gspo-one-side"] = "none",
    epsilon_low: PositiveShare = 0.2,
    epsilon_high: Positive = 0.2,
    epsilon_low_prime: PositiveShare = 0.6,
    epsilon_high_prime: Positive = 2.0,
    weight: Literal["none", "importance_sampling", "gspo_importance_sampling", "advantage"] = "none",
    temp: Positive = 1.0,
    regularizer: Literal["none", "k2", "forward-kl"] = "none",
    regularizer_coef: NonNegative = 0.0,
) -> Terms:
    r"""``-A sg(w) log_prob`` where the ratio passes ``clip_mode``, plus a regulariser on every token. ``weight`` chooses ``w``.

    ``s`` is the geometric mean of a sequence's ratios. A token is in range under these conditions:

    ================= ==================================================================================================
    ``none``          always
    ``one-side``      ``r <= 1 + epsilon_high`` if A > 0, ``r >= 1 - epsilon_low`` if A < 0: where PPO has a gradient
    ``two-side``      both
    ``ring``          both, or ``r <= 1 - epsilon_low_prime`` if A > 0, ``r >= 1 + epsilon_high_prime`` if A < 0
    ``gspo-one-side`` as ``one-side``, with ``s`` for ``r``. The loss is then averaged per sequence, ``seq-mean-token-mean``
    ================= ==================================================================================================

    The gradient in range is ``-A w``, the policy gradient. It is biased off-policy unless ``w`` corrects for the sampler. All
    names and values are Trinity's.

    Hyper-parameters:
        clip_mode: a row of the table.
        epsilon_low, epsilon_low_prime: see the table, in ``(0, 1]``.
        epsilon_high, epsilon_high_prime: see the table, above 0.
        weight: ``w`` is 1 (``none``), ``r`` (``importance_sampling``), ``s`` (``gspo_importance_sampling``) or
            ``exp(A / temp)`` (``advantage``). Every weight can be combined with every clip mode.
        temp: temperature of the weight ``advantage``, in units of the advantage.
        regularizer: ``k2`` adds ``regularizer_coef (log_prob - old_log_prob)^2``, which keeps the policy near the old policy.
            ``forward-kl`` adds ``-regularizer_coef log_prob``, which imitates the old policy.
        regularizer_coef: at least 0.

    ``old_log_prob`` is required by every clip mode except ``none``, by both importance weights and by ``k2``.

    Metrics, if the mode clips: ``clip_fraction`` (``_low``: A < 0, ``_high``: A > 0).

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, 1.0]])
        >>> rec(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage), clip_mode="one-side")[0].value
        tensor([[0., 2.]])

    Source: Yao et al. 2025 (arXiv 2509.24203), sections 3-4.
    """
    log_prob, advantage, mask = inputs.log_prob, inputs.advantage, inputs.mask
    compares = clip_mode != "none" or weight not in ("none", "advantage") or regularizer == "k2"
    # Not read unless needed: reading an input makes it required.
    log_ratio = inputs.log_ratio if compares else torch.zeros_like(log_prob)
    ratio = bounded_exp(log_ratio.detach())
    sequence_ratio = bounded_exp(sequence_mean(log_ratio.detach(), mask)).expand_as(ratio)

    measured = sequence_ratio if clip_mode == "gspo-one-side" else ratio
    low_enough, high_enough = measured <= 1 + epsilon_high, measured >= 1 - epsilon_low
    good, bad = advantage > 0, advantage < 0
    if clip_mode == "none":
        in_range = torch.ones_like(mask)
    elif clip_mode in ("one-side", "gspo-one-side"):
        in_range = (low_enough | ~good) & (high_enough | ~bad)
    else:
        in_range = low_enough & high_enough
    if clip_mode == "ring":
        in_range = in_range | (good & (ratio <= 1 - epsilon_low_prime)) | (bad & (ratio >= 1 + epsilon_high_prime))

    if weight == "importance_sampling":
        advantage = advantage * ratio
    elif weight == "gspo_importance_sampling":
        advantage = advantage * sequence_ratio
    elif weight == "advantage":
        advantage = advantage * bounded_exp(advantage / temp)
    value = torch.where(in_range, -advantage * log_prob, 0)

    if regularizer == "k2":
        value = value + regularizer_coef * log_ratio.square()
    elif regularizer == "forward-kl":
        value = value - regularizer_coef * log_prob
    metrics: dict[str, Tensor] = {}
    if clip_mode != "none":
        metrics = clip_fractions(~in_range & bad, ~in_range & good, mask)
        # Tokens with A = 0 may be out of range too. They are in neither of the two parts.
        metrics["clip_fraction"] = masked_mean((~in_range).float(), mask)
    per_sequence: Aggregation | None = "seq-mean-token-mean" if clip_mode == "gspo-one-side" else None
    return (LossTerm("objective", value, mask, metrics=metrics, aggregation=per_sequence),)
