"""Corrections of an objective: weights per token, to correct for a sampler that differs from the trainer or to select tokens.

Each returns ``(weights, metrics)``. The weights are ``[*B, T]``, in float32 or wider, without graph and finite. They are 1
where nothing is corrected and 0 where the mask is False. The metrics are as in :class:`~torchrl_llm_kl.losses.LossTerm`.
:func:`apply_correction` multiplies an objective by the weights. Inputs are as for objectives (see ``docs/losses.md``). Unequal
shapes and hyper-parameters out of range raise a ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import (
    NonNegative,
    Number,
    Positive,
    Scalar,
    Share,
    check_is_mask,
    check_is_scalar,
    check_range,
    check_same_shape,
    masked_mean,
    widen,
)
from torchrl_llm_kl._registry import Range
from torchrl_llm_kl.estimators import get_estimator
from torchrl_llm_kl.losses._arithmetic import (
    LARGEST_LOG_RATIO,
    bounded_exp,
    check_inputs,
    checked,
    clamp,
    sequence_mean,
    sequence_sum,
)
from torchrl_llm_kl.losses._objective import LossInputs, LossTerm, Terms, Weights, loss_part


def apply_correction(terms: Sequence[LossTerm], weights: Tensor, mask: Tensor | None = None) -> Terms:
    """Multiply the values of loss terms by weights. Their masks, and so their denominators, are unchanged.

    A term with one value per token gets the weight of each token. A term with one value per sequence, ``[*B, 1]``, gets the
    mean weight of the sequence's tokens. A value whose weight is 0 passes no gradient, even if it is not finite. Weights never
    pass a gradient.

    Args:
        terms: usually those of the objective, not the KL to the reference.
        weights: from a correction, ``[*B, T]``.
        mask: the mask used to compute the weights, bool ``[*B, T]``. It is required for terms with a value per sequence. Their
            mean weight includes dropped tokens, but not masked-out tokens.

    Raises:
        ValueError: if the shape of a term does not fit the weights, or ``mask`` is required and missing.

    Example:
        >>> term = LossTerm("objective", torch.tensor([[1.0, 2.0]]), torch.ones(1, 2, dtype=torch.bool))
        >>> apply_correction([term], torch.tensor([[2.0, 0.0]]))[0].value
        tensor([[2., 0.]])
    """
    return tuple(_corrected(term, weights, mask) for term in terms)


def _corrected(term: LossTerm, weights: Tensor, mask: Tensor | None) -> LossTerm:
    if term.value.shape != weights.shape:
        if mask is None:
            raise ValueError(f"{term.name} has one value per sequence: pass mask= to average weights over its tokens.")
        check_same_shape(weights=weights, mask=mask)
        check_is_mask(mask=mask)
        weights = sequence_mean(weights, mask)
        check_same_shape(**{term.name: term.value, "the weights of sequences": weights})
    weights = weights.detach().to(term.value.dtype)
    # where before the product: 0 times an infinite value would be NaN, in the value and in the gradient.
    return term.replace(value=torch.where(weights == 0, 0, term.value) * weights)


@torch.no_grad()
def correction_metrics(weights: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Metrics of the product of the weights of several corrections.

    :class:`~torchrl_llm_kl.PolicyLoss` logs them. ``rejected_fraction`` is the share of tokens with weight 0, and
    ``rejected_seq_fraction`` the share of sequences with such a token. ``correction_ess`` is ``(mean w)**2 / mean w**2`` over
    tokens, the effective share of the batch. It is 0 if every token is rejected.

    Args:
        weights: the product, ``[*B, T]``.
        mask: bool ``[*B, T]``.

    Returns:
        0-dim tensors without graph, 0 for an empty mask.

    Example:
        >>> weights, mask = torch.tensor([[2.0, 0.0], [1.0, 9.0]]), torch.tensor([[True, True], [True, False]])
        >>> {name: round(float(value), 4) for name, value in correction_metrics(weights, mask).items()}
        {'rejected_fraction': 0.3333, 'rejected_seq_fraction': 0.5, 'correction_ess': 0.6}

    Source: verl 0.9.1 logs the first two as ``rollout_rs_masked_fraction`` and ``rollout_rs_seq_masked_fraction``.
    """
    (weights,) = checked(mask, weights=weights)
    rejected = mask & (weights == 0)
    return {
        "rejected_fraction": masked_mean(rejected.to(weights.dtype), mask),
        "rejected_seq_fraction": masked_mean(rejected.any(-1).to(weights.dtype), mask.any(-1)),
        "correction_ess": _effective_size(weights, mask),
    }


#: The ratio that a correction bounds. ``"mismatch"`` compares trainer and sampler with the weights that sampled each token, and
#: ``"staleness"`` compares later weights with those, both in the trainer. Their product is ``"both"``.
Ratio = Literal["both", "mismatch", "staleness"]
#: The scope of an importance weight: one token, the product over a sequence, or the geometric mean over a sequence.
Level = Literal["token", "sequence", "geometric"]


@loss_part("importance_weights")
@torch.no_grad()
def importance_weights(
    inputs: LossInputs,
    *,
    level: Level = "token",
    mode: Literal["truncate", "mask"] = "truncate",
    low: Scalar | None = None,
    high: Positive | None = 2.0,
    ratio: Ratio = "both",
) -> Weights:
    r"""Bounded :math:`\pi_{old} / \pi_{sampler}`, or one of its two causes.

    Without bounds, the mean of a token's loss times its weight equals the mean loss over tokens sampled from the trainer's
    distribution.

    =========================== ============================================================== ===========================
    setting                     known as                                                       usual bounds
    =========================== ============================================================== ===========================
    ``token``, ``truncate``     truncated importance sampling (TIS)                            ``high=2``
    ``token``, ``mask``         IcePop                                                         ``low=0.5, high=5``
    ``sequence``, ``truncate``  sequence TIS                                                   ``high=2`` (verl), ``3`` (TRL)
    ``sequence``, ``mask``      masked importance sampling, TRL's default                      ``high=3``
    ``geometric``, ``truncate`` geometric TIS                                                  ``high=2``
    ``geometric``, ``mask``     geometric mask of long answers                                 close to 1
    =========================== ============================================================== ===========================

    The trainer computes ``old_log_prob`` before its first update on the tokens. The sampler computes ``sampler_log_prob``.
    Where that is NaN (not scored), the log-ratio is 0.

    Hyper-parameters:
        level: ``"token"`` is the ratio of each token. ``"sequence"`` is the product over a sequence, for all of its tokens.
            ``"geometric"`` is the geometric mean over a sequence. verl: ``rollout_is``. TRL: part of
            ``vllm_importance_sampling_mode``.
        mode: ``"truncate"`` moves weights outside the bounds to the nearest bound. ``"mask"`` sets them to 0.
        low: smallest weight. None for no bound. TRL: ``vllm_importance_sampling_clip_min``.
        high: largest weight. None for no bound. verl: ``rollout_is_threshold``. TRL: ``vllm_importance_sampling_clip_max``.
        ratio: see :data:`Ratio`. A cause needs ``behavior_log_prob``. ``"staleness"`` with :func:`ppo` is decoupled PPO.

    Returns:
        The weights and metrics. Weights are finite: log-ratios of tokens are clamped to +-80 nats, and their sums to 80.
        Metrics are over tokens, or over sequences for the other levels: ``weight_mean`` and ``weight_max`` before the bounds,
        ``truncated_fraction`` or ``masked_fraction`` outside the bounds, and ``effective_sample_size``, which is
        ``(mean w)**2 / mean w**2`` of the bounded weights.

    Example:
        >>> old, sampler = torch.tensor([[-1.0, -1.0, -3.0]]), torch.tensor([[-1.0, -3.0, -1.0]])
        >>> inputs = LossInputs(old, old < 0, old_log_prob=old, sampler_log_prob=sampler)
        >>> importance_weights(inputs)[0]
        tensor([[1.0000, 2.0000, 0.1353]])
        >>> importance_weights(inputs, mode="mask", low=0.5, high=5.0)[0]
        tensor([[1., 0., 0.]])

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (TIS). Ling team 2025
    (arXiv 2510.18855), IcePop. Li et al. 2025, "When Speed Kills Stability" (sequence and geometric). Causes: Guan et al.
    2026 (arXiv 2605.12070). Decoupled PPO: Hilton et al. 2022 (arXiv 2110.00641).
    """
    Range(0.0, high if isinstance(high, (int, float)) else math.inf).check("low", low)
    log_ratio, mask = _trainer_to_sampler(inputs, ratio), inputs.mask
    counts = mask
    if level != "token":
        log_ratio = (sequence_sum if level == "sequence" else sequence_mean)(log_ratio, mask)
        counts = mask.any(-1, keepdim=True)
    free = bounded_exp(log_ratio)
    weight = clamp(free, low, high)
    outside = weight != free  # unlike comparisons with the bounds, this works for bounds of None and for tensors
    if mode == "mask":
        weight = torch.where(outside, 0, free)
    fraction = "truncated_fraction" if mode == "truncate" else "masked_fraction"
    metrics = {
        "weight_mean": masked_mean(free, counts),
        "weight_max": torch.where(counts, free, 0).max() if free.numel() else free.new_zeros(()),
        fraction: masked_mean(outside.to(free.dtype), counts),
        "effective_sample_size": _effective_size(weight, counts),
    }
    return torch.where(mask, weight, 0), metrics


def _effective_size(weight: Tensor, mask: Tensor) -> Tensor:
    """``(mean w)**2 / mean w**2``, in (0, 1]. 0 if all weights are 0."""
    # The scale cancels. It keeps the squares of large weights finite.
    scaled = weight / weight.amax().clamp(min=1.0) if weight.numel() else weight
    square = masked_mean(scaled.square(), mask)
    return masked_mean(scaled, mask).square() / torch.where(square == 0, 1, square)


#: A divergence of sampler and trainer, per token or summarised over a sequence. See :func:`rejection_mask`.
Divergence = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k1", "seq_max_k2", "seq_max_k3",
]  # fmt: skip


@loss_part("rejection_mask")
@torch.no_grad()
def rejection_mask(
    inputs: LossInputs,
    *,
    divergence: Divergence,
    low: Scalar | None = None,
    high: Scalar | None = None,
    ratio: Ratio = "both",
) -> Weights:
    r"""0 for tokens or sequences on which sampler and trainer disagree too much, 1 for all others.

    The log-ratio is ``d = old_log_prob - sampler_log_prob``, or 0 where the sampler's log-prob is NaN (not scored). The
    estimates of :math:`KL(\pi_{sampler} \| \pi_{old})` are ``k1 = -d``, ``k2 = d^2 / 2`` and ``k3 = exp(d) - 1 - d``.

    ============== ===========================================================
    divergence     rejected
    ============== ===========================================================
    ``token_*``    each token outside the bounds
    ``seq_sum_*``  all tokens of a sequence whose sum is outside
    ``seq_mean_*`` all tokens of a sequence whose mean is outside
    ``seq_max_*``  all tokens of a sequence that has a token outside
    ============== ===========================================================

    ``seq_mean_k1`` bounds the geometric mean of the ratio. It keeps means between ``a`` and ``b`` with ``low=-log(b)`` and
    ``high=-log(a)``. Rejected tokens stay in the denominator, so loss and gradient are 0 if every token is rejected. With
    several masks, a token is kept only if all masks accept it.

    Hyper-parameters:
        divergence: one of :data:`Divergence`, the names of verl's ``rollout_rs``.
        low: smallest value that is kept, in nats, at most 0. Only for ``k1``, because the others are never negative. verl
            states bounds of ``k1`` as ratios of sampler to trainer: ``low = log(lower)``, ``high = log(upper)``.
        high: largest value that is kept, in nats, at least 0 for ``k1`` and above 0 for the others. At least one bound is
            required.
        ratio: see :data:`Ratio`.

    Returns:
        The weights, and the metrics ``<divergence>_masked_fraction`` of tokens and ``<divergence>_seq_masked_fraction`` of
        sequences with a rejected token.

    Example:
        >>> old, sampler = torch.tensor([[-1.0, -2.0], [-1.0, -1.1]]), torch.tensor([[-1.0, -1.0], [-1.0, -1.0]])
        >>> inputs = LossInputs(old, old < 0, old_log_prob=old, sampler_log_prob=sampler)
        >>> rejection_mask(inputs, divergence="token_k2", high=0.1)[0]
        tensor([[1., 0.],
                [1., 1.]])
        >>> rejection_mask(inputs, divergence="seq_max_k2", high=0.1)[0]
        tensor([[0., 0.],
                [1., 1.]])

    Source: Liu et al. 2025, "When Speed Kills Stability" (masked importance sampling, geometric mask). Names: verl 0.9.1.
    """
    level, estimator = divergence.rsplit("_", 1)
    if (low is None and high is None) or (low is not None and estimator != "k1"):
        raise ValueError(f"{divergence} needs a bound: pass high=, or low= for k1. The others are never negative.")
    Range(high=0.0).check("low", low)  # sampler and trainer agree at 0
    (Range(0.0) if estimator == "k1" else Range(above=0.0)).check("high", high)
    log_ratio, mask = _trainer_to_sampler(inputs, ratio), inputs.mask
    # The estimators take two log-probs. Only their difference matters, which is minus the log-ratio here.
    value = get_estimator(estimator)(torch.zeros_like(log_ratio), log_ratio)  # type: ignore[arg-type]
    if level in ("seq_sum", "seq_mean"):
        value = (sequence_sum if level == "seq_sum" else sequence_mean)(value, mask)
    rejected = mask & (value != clamp(value, low, high))  # a masked-out 0 may be outside of a bound
    if level == "seq_max":
        rejected = rejected.any(-1, keepdim=True)
    dtype = value.dtype
    metrics = {
        f"{divergence}_masked_fraction": masked_mean(rejected.to(dtype), mask),
        f"{divergence}_seq_masked_fraction": masked_mean(rejected.any(-1).to(dtype), mask.any(-1)),
    }
    return (mask & ~rejected).to(dtype), metrics


def _trainer_to_sampler(inputs: LossInputs, ratio: Ratio) -> Tensor:
    """A log-ratio of trainer to sampler, within +-80 nats, and 0 where one of its log-probs is NaN."""
    later = inputs.behavior_log_prob if ratio == "mismatch" else inputs.old_log_prob
    earlier = inputs.behavior_log_prob if ratio == "staleness" else inputs.sampler_log_prob
    return (later - earlier).nan_to_num(nan=0.0).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


@loss_part("staleness_mask")
@torch.no_grad()
def staleness_mask(inputs: LossInputs, *, max_age: NonNegative | None = None, decay: Share = 1.0) -> Weights:
    """``decay ** age`` for each token, and 0 for tokens that are too old.

    Hyper-parameters:
        max_age: the largest age that is trained, in steps. None for no limit.
        decay: the weight of a token of age 1, in (0, 1]. 1 leaves all weights at 1.

    Returns:
        The weights, and the metrics ``age_mean``, ``age_max`` and ``too_old_fraction`` of tokens.

    Example:
        >>> age = torch.tensor([[0.0, 1.0, 5.0]])
        >>> staleness_mask(LossInputs(-age, age >= 0, age=age), max_age=4, decay=0.5)[0]
        tensor([[1.0000, 0.5000, 0.0000]])

    Source: the limit is AReaL's (arXiv 2505.24298). The decay is our own.
    """
    check_range(above=0.0, high=1.0, decay=decay)
    age, mask = inputs.age, inputs.mask
    old = torch.zeros_like(mask) if max_age is None else age > max_age
    metrics = {
        "age_mean": masked_mean(age, mask),
        "age_max": torch.where(mask, age, 0).max() if age.numel() else age.new_zeros(()),
        "too_old_fraction": masked_mean(old.to(age.dtype), mask),
    }
    return torch.where(mask & ~old, decay**age, 0), metrics


@torch.no_grad()
def mismatch_metrics(old_log_prob: Tensor, sampler_log_prob: Tensor, mask: Tensor) -> dict[str, Tensor]:
    r"""Metrics of the difference between the sampler's and the trainer's log-probs of the same tokens.

    :class:`~torchrl_llm_kl.PolicyLoss` logs them. They use ``d = old_log_prob - sampler_log_prob``, and leave out tokens that
    the sampler did not score (NaN) and sequences without tokens:

    ======================================== =========================================================================
    ``trainer_log_ppl``, ``sampler_log_ppl`` minus the mean log-prob of a sequence in nats per token, mean over sequences
    ``trainer_ppl``, ``sampler_ppl``         the perplexity, the exponential of the above, mean over sequences
    ``log_ppl_diff``                         trainer's minus sampler's log-perplexity, mean over sequences
    ``log_ppl_abs_diff``                     its absolute value, mean over sequences
    ``log_ppl_diff_max``, ``_min``           its largest and smallest value
    ``ppl_ratio``                            trainer's over sampler's perplexity, mean over sequences
    ``mismatch_k1``, ``mismatch_k3``         estimates of :math:`KL(\pi_{sampler} \| \pi_{old})`: ``-d`` and
                                             ``exp(d) - 1 - d``, mean over tokens
    ``chi2_token``, ``chi2_seq``             :math:`\chi^2(\pi_{old} \| \pi_{sampler})`: ``mean r^2 - 1``, with the ratio
                                             ``r = exp(d)`` of tokens, or ``exp(sum d)`` of sequences
    ======================================== =========================================================================

    Args:
        old_log_prob: nats, as computed by the trainer, ``[*B, T]``.
        sampler_log_prob: nats, as computed by the sampler, same shape.
        mask: bool ``[*B, T]``.

    Returns:
        0-dim tensors without graph, 0 for an empty mask. Exponents are capped at 80.

    Example:
        >>> old, sampler = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -1.5]])
        >>> metrics = mismatch_metrics(old, sampler, torch.ones(1, 2, dtype=torch.bool))
        >>> metrics["mismatch_k1"], metrics["log_ppl_diff"], metrics["chi2_seq"]
        (tensor(0.2500), tensor(0.2500), tensor(-0.6321))

    Source: Liu et al. 2025, "When Speed Kills Stability". verl 0.9.1 logs the same numbers as ``rollout_corr/*``.
    """
    check_inputs(mask, old_log_prob=old_log_prob, sampler_log_prob=sampler_log_prob)
    old, sampler = widen(old_log_prob, sampler_log_prob)
    log_ratio = (old - sampler).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    scored = mask & (log_ratio == log_ratio)  # not NaN
    k3 = torch.expm1(log_ratio) - log_ratio
    # One kernel sums everything over tokens, and one over sequences: separate sums would be a dozen small kernels.
    columns = torch.stack([old, sampler, log_ratio, k3, _square_less_1(log_ratio), torch.ones_like(old)])
    sums = torch.where(scored, columns, 0).sum(-1, keepdim=True)
    lengths, totals = sums[5], sums[2:].flatten(1).sum(1)
    k1, *of_tokens = (totals[:-1] / totals[-1].clamp(min=1)).unbind()
    log_ppl, rows = sums[:3] / -lengths.clamp(min=1), lengths.clamp(max=1)
    difference = log_ppl[2]
    of_rows = [log_ppl, bounded_exp(log_ppl), difference.abs().unsqueeze(0), _square_less_1(sums[2:3])]
    # Sequences without tokens are finite here, so the product with 0 leaves them out.
    totals = (torch.cat([*of_rows, rows.unsqueeze(0)]) * rows).flatten(1).sum(1)
    means = totals[:-1] / totals[-1].clamp(min=1)
    # Sequences without tokens are replaced by the mean, which is neither the largest nor the smallest value.
    ends = torch.lerp(means[2], difference, rows).aminmax() if rows.numel() else (means[2], means[2])
    return {
        **dict(zip(_OF_SEQUENCES, means.unbind(), strict=True)),
        **dict(zip(("log_ppl_diff_min", "log_ppl_diff_max"), ends, strict=True)),
        "mismatch_k1": -k1,
        **dict(zip(("mismatch_k3", "chi2_token"), of_tokens, strict=True)),
    }


_OF_SEQUENCES = (
    "trainer_log_ppl", "sampler_log_ppl", "log_ppl_diff", "trainer_ppl", "sampler_ppl", "ppl_ratio", "log_ppl_abs_diff",
    "chi2_seq",
)  # fmt: skip


def _square_less_1(log_ratio: Tensor) -> Tensor:
    """``ratio**2 - 1``, with the exponent capped at 80."""
    return torch.expm1((2 * log_ratio).clamp(max=LARGEST_LOG_RATIO))


#: The smallest age of each group of :func:`staleness_metrics`.
_AGES = (0, 1, 2, 4, 8)


@torch.no_grad()
def staleness_metrics(
    log_prob: Tensor, behavior_log_prob: Tensor, mask: Tensor, age: Tensor | None = None
) -> dict[str, Tensor]:
    r"""Metrics of the difference between the current policy and the weights that sampled the tokens, both in the trainer.

    :class:`~torchrl_llm_kl.PolicyLoss` logs them. With ``d = log_prob - behavior_log_prob``, ``staleness_k1`` is the mean
    of ``-d`` and ``staleness_k3`` the mean of ``exp(d) - 1 - d``. Both estimate :math:`KL(\pi_{behavior} \| \pi)`. With
    ages there are also ``staleness_k3_age<n>`` and ``age<n>_fraction`` for tokens of age 0, 1, 2 to 3, 4 to 7, and 8 or more.

    Args:
        log_prob: nats, under the current policy, ``[*B, T]``.
        behavior_log_prob: nats, under the weights that sampled each token, same shape.
        mask: bool ``[*B, T]``.
        age: in steps, ``[*B, T]``.

    Returns:
        0-dim tensors without graph, 0 for groups without tokens. Exponents are capped at 80.

    Example:
        >>> log_prob, behavior = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -1.5]])
        >>> metrics = staleness_metrics(log_prob, behavior, log_prob < 0, torch.tensor([[0.0, 3.0]]))
        >>> metrics["staleness_k1"], metrics["staleness_k3_age2"], metrics["age2_fraction"]
        (tensor(0.2500), tensor(0.1065), tensor(0.5000))
    """
    check_inputs(mask, log_prob=log_prob, behavior_log_prob=behavior_log_prob)
    log_prob, behavior_log_prob = widen(log_prob, behavior_log_prob)
    log_ratio = (log_prob - behavior_log_prob).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    k3 = torch.expm1(log_ratio) - log_ratio
    metrics = {"staleness_k1": masked_mean(-log_ratio, mask), "staleness_k3": masked_mean(k3, mask)}
    if age is not None:
        groups = torch.stack([mask & (age >= low) & (age < high) for low, high in pairwise([*_AGES, math.inf])])
        counts, sums = (x.flatten(1).sum(1) for x in (groups, torch.where(groups, k3, 0)))
        means, shares = sums / counts.clamp(min=1), counts / mask.sum().clamp(min=1)
        metrics |= {f"staleness_k3_age{low}": mean for low, mean in zip(_AGES, means.unbind(), strict=True)}
        metrics |= {f"age{low}_fraction": share for low, share in zip(_AGES, shares.unbind(), strict=True)}
    return metrics


@loss_part("off_policy_sequence_mask")
@torch.no_grad()
def off_policy_sequence_mask(inputs: LossInputs, *, delta: NonNegative) -> Weights:
    """0 for tokens with a negative advantage in sequences that have become unlikely, 1 for all others.

    A sequence has become unlikely if the mean of ``old_log_prob - log_prob`` over its tokens is above ``delta``.

    Hyper-parameters:
        delta: nats per token, at least 0. Trinity: ``delta_sequence_masking``. TRL: ``off_policy_mask_threshold``.

    Returns:
        The weights, and the metric ``sequence_masked_fraction``, the share of dropped tokens.

    Example:
        >>> old, log_prob = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-2.0, -1.0]])
        >>> inputs = LossInputs(log_prob, old < 0, old_log_prob=old, advantage=torch.tensor([[1.0, -1.0]]))
        >>> off_policy_sequence_mask(inputs, delta=0.1)[0]
        tensor([[1., 0.]])

    Source: DeepSeek-V3.2 (arXiv 2512.02556), eq. 9.
    """
    mask = inputs.mask
    drift = sequence_mean(-inputs.log_ratio, mask)
    dropped = (drift > delta) & (inputs.advantage < 0)
    return (mask & ~dropped).to(drift.dtype), {"sequence_masked_fraction": masked_mean(dropped.to(drift.dtype), mask)}


@loss_part("total_variation_mask")
@torch.no_grad()
def total_variation_mask(inputs: LossInputs, *, delta: NonNegative) -> Weights:
    r"""0 for tokens whose gradient leads further away from the sampler, in sequences that are far from it. 1 for all others.

    A sequence is far if the mean of ``|r - 1| / 2`` over its tokens is above ``delta``. This estimates the total variation of
    the current policy and the policy that sampled the tokens, averaged over positions. A gradient leads further away if
    ``A (log_prob - old_log_prob) > 0``. (:func:`~torchrl_llm_kl.losses.dppo` decides for each token by the change of its own
    probability.)

    Hyper-parameters:
        delta: a total variation, at least 0. open-instruct: half of ``rho_mask_upper_bound`` with
            ``rho_mask_tv_divergence``, which compares the trainer with the sampling program instead.

    Returns:
        The weights, and the metrics ``total_variation``, the mean over sequences, and ``total_variation_masked_fraction``,
        the share of dropped tokens.

    Example:
        >>> old, log_prob = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-2.0, -1.0]])
        >>> inputs = LossInputs(log_prob, old < 0, old_log_prob=old, advantage=torch.tensor([[-1.0, -1.0]]))
        >>> total_variation_mask(inputs, delta=0.1)[0]  # the mean of 0.316 and 0
        tensor([[0., 1.]])

    Source: Honari et al. 2026 (VACO, arXiv 2603.01365), the filter. Per sequence: allenai/open-instruct, pull request 1681.
    """
    mask, log_ratio = inputs.mask, inputs.log_ratio
    distance = sequence_mean((bounded_exp(log_ratio) - 1).abs() / 2, mask)
    dropped = (distance > delta) & (inputs.advantage * log_ratio > 0)
    metrics = {
        "total_variation": masked_mean(distance, mask.any(-1, keepdim=True)),
        "total_variation_masked_fraction": masked_mean(dropped.to(distance.dtype), mask),
    }
    return (mask & ~dropped).to(distance.dtype), metrics


@loss_part("top_entropy_mask")
@torch.no_grad()
def top_entropy_mask(inputs: LossInputs, *, fraction: Scalar = 0.2, threshold: Number | None = None) -> Weights:
    """1 for the tokens of highest policy entropy, 0 for all others.

    Hyper-parameters:
        fraction: share of the masked-in tokens to keep, 0 to 1. See :func:`entropy_threshold` for the exact number. More tokens
            are kept if several have the entropy of the last one. TRL: ``top_entropy_quantile``.
        threshold: keep tokens with at least this entropy, instead of a fraction of this batch. For the parts of a batch, pass
            the threshold of the whole batch.

    Returns:
        The weights, and the metrics ``entropy_threshold`` and ``entropy_kept_fraction``.

    Example:
        >>> entropy = torch.tensor([[0.1, 2.0, 0.3, 1.0]])
        >>> top_entropy_mask(LossInputs(-entropy, torch.tensor([[True, True, True, False]]), entropy=entropy), fraction=0.6)[0]
        tensor([[0., 1., 1., 0.]])

    Source: Wang et al. 2025 (arXiv 2506.01939), "Beyond the 80/20 Rule".
    """
    entropy, mask = inputs.entropy, inputs.mask
    if threshold is None:
        threshold = entropy_threshold(entropy, mask, fraction)
    kept = (mask & (entropy >= threshold)).to(entropy.dtype)
    metrics = {
        "entropy_threshold": torch.as_tensor(threshold, dtype=entropy.dtype, device=entropy.device),
        "entropy_kept_fraction": masked_mean(kept, mask),
    }
    return kept, metrics


@torch.no_grad()
def entropy_threshold(entropy: Tensor, mask: Tensor, fraction: Scalar = 0.2) -> Tensor:
    """The ``k``-th largest entropy, where ``k`` is ``fraction`` times the number of masked-in tokens.

    ``fraction`` is in (0, 1]. ``k`` is rounded to the nearest whole number (halves to the even one) and is at least 1. The
    result is 0-dim, and 0 for an empty mask. It is not read on the host.

    Example:
        >>> entropy_threshold(torch.tensor([[0.1, 2.0, 0.3, 1.0]]), torch.ones(1, 4, dtype=torch.bool), fraction=0.5)
        tensor(1.)

    Source: Wang et al. 2025 (arXiv 2506.01939).
    """
    check_range(above=0.0, high=1.0, fraction=fraction)
    check_is_scalar(fraction=fraction)
    (entropy,) = checked(mask, entropy=entropy)
    if entropy.numel() == 0:
        return entropy.new_zeros(())
    # Sorting instead of topk, which would need k on the host.
    largest = torch.where(mask, entropy, -torch.inf).flatten().sort(descending=True).values
    tokens = mask.sum()
    k = (fraction * tokens).round().clamp(min=1).long()
    return torch.where(tokens == 0, 0, largest.gather(0, (k - 1).reshape(1)).reshape(()))
