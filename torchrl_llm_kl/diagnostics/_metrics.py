"""What each metric means: formula, unit, what is normal, what a deviation says, and what to do.

Symbols: ``lp`` the current policy's log-prob of a token, ``old`` the one at sampling by the trainer, ``s`` the sampler's own,
``ref`` the reference's, ``A`` the advantage, ``r = exp(lp - old)``, ``d = old - s``. "mean" is over masked-in tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

#: Where a metric comes from.
Origin = Literal[
    "every loss", "sampler", "objective", "correction", "distillation", "preferences", "critic", "task", "service"
]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Args:
        formula: how it is computed.
        unit: ``nats``, ``share`` (0 to 1), ``1`` (a ratio or another pure number), ``tokens``, ``seconds``, ...
        normal: its value in a healthy run.
        deviation: what another value says.
        remedy: what to do about it.
        origin: what reports it.
    """

    formula: str
    unit: str
    normal: str
    deviation: str
    remedy: str
    origin: Origin


def _metric(origin: Origin, formula: str, unit: str, normal: str, deviation: str, remedy: str) -> Metric:
    return Metric(formula, unit, normal, deviation, remedy, origin)


def _quantile(which: str) -> Metric:
    return _metric(
        "every loss",
        f"{which} of `r`",
        "1",
        "1 at the first update on a batch; then inside the clip range but for a few per cent",
        "far outside: the policy moved much on this batch, or `old` is of other weights",
        "fewer epochs or minibatches, a lower learning rate; check what wrote `old`",
    )


_LOSS = {
    "num_tokens": _metric(
        "every loss",
        "number of masked-in tokens",
        "tokens",
        "about batch size times mean response length",
        "0 or much smaller: a mask is wrong; larger: prompts are trained on",
        "look at the mask with the inspector; `masking_strategy`",
    ),
    "num_sequences": _metric(
        "every loss",
        "number of sequences with a masked-in token",
        "sequences",
        "the batch size",
        "smaller: empty answers, or rows masked out",
        "look at `loss_mask` and at the empty answers",
    ),
    "ESS": _metric(
        "every loss",
        "`(sum r)^2 / sum r^2 / n`",
        "share",
        "1 at the first update; above 0.9 after the others",
        "a few tokens carry the whole gradient: the data is off-policy",
        "fewer epochs, fresher data, a correction (`rollout_is`)",
    ),
    "ratio_min": _quantile("smallest"),
    "ratio_q05": _quantile("5 % quantile"),
    "ratio_median": _quantile("median"),
    "ratio_q95": _quantile("95 % quantile"),
    "ratio_max": _quantile("largest"),
    "kl_to_sampler": _metric(
        "every loss",
        "mean of k3, `exp(lp - s) - 1 - (lp - s)`, of `s`, else of `old`",
        "nats per token",
        "0 at the first update on a batch, then below 0.01",
        "above 0 at the first update: scorer and sampler are not the same distribution",
        "run the doctor; compare temperature, top-k and top-p of both; `sampling=`",
    ),
    "kl_to_ref": _metric(
        "every loss",
        "mean of k3, `exp(ref - lp) - 1 - (ref - lp)`",
        "nats per token",
        "rises from 0 to its target, or levels off",
        "rises without end: the coefficient is too small; exactly 0 for ever: the reference is the policy",
        "`PIKLCoefficient(target=...)`; check that the reference is a copy",
    ),
    "entropy": _metric(
        "every loss",
        "mean of the entropy over the whole vocabulary",
        "nats per token",
        "falls slowly",
        "near 0: the policy has collapsed and no longer explores; rising: it is losing its form",
        "entropy bonus, `clip_high` above `clip_low`, a lower learning rate",
    ),
}

_SAMPLER = {
    "trainer_log_ppl": _metric(
        "sampler",
        "mean over sequences of `-mean old`",
        "nats per token",
        "equals `sampler_log_ppl`",
        "see `log_ppl_diff`",
        "see there",
    ),
    "sampler_log_ppl": _metric(
        "sampler",
        "mean over sequences of `-mean s`",
        "nats per token",
        "equals `trainer_log_ppl`",
        "see `log_ppl_diff`",
        "see there",
    ),
    "trainer_ppl": _metric(
        "sampler",
        "mean over sequences of `exp(-mean old)`",
        "1",
        "equals `sampler_ppl`",
        "see `ppl_ratio`",
        "see there",
    ),
    "sampler_ppl": _metric(
        "sampler", "mean over sequences of `exp(-mean s)`", "1", "equals `trainer_ppl`", "see `ppl_ratio`", "see there"
    ),
    "log_ppl_diff": _metric(
        "sampler",
        "mean over sequences of `-mean d`",
        "nats per token",
        "within 0.01 of 0 in one dtype, 0.05 across dtypes",
        "positive: the trainer finds the tokens less likely than the sampler did, as after top-p, top-k or a low temperature",
        "give the scorer the sampler's settings (`sampling=`)",
    ),
    "log_ppl_abs_diff": _metric(
        "sampler",
        "mean over sequences of `|mean d|`",
        "nats per token",
        "below 0.02 in one dtype",
        "large while `log_ppl_diff` is small: single sequences differ, as with stale weights or another template",
        "look at the sequences of largest mismatch in the inspector",
    ),
    "log_ppl_diff_max": _metric(
        "sampler",
        "largest `-mean d` of a sequence",
        "nats per token",
        "below 0.1",
        "one sequence was scored as other text",
        "inspect it",
    ),
    "log_ppl_diff_min": _metric(
        "sampler",
        "smallest `-mean d` of a sequence",
        "nats per token",
        "above -0.1",
        "one sequence was scored as other text",
        "inspect it",
    ),
    "ppl_ratio": _metric(
        "sampler",
        "mean over sequences of `exp(-mean d)`",
        "1",
        "1 within 0.02",
        "above 1: the sampler is sharper than what is scored; below: flatter",
        "give the scorer the sampler's settings; push weights before sampling",
    ),
    "mismatch_k1": _metric(
        "sampler",
        "mean of `-d`",
        "nats per token",
        "0 within its noise, never much below",
        "negative: the tokens were not drawn from `exp(s)`, so `s` is not what sampled them",
        "check the engine's log-prob mode (raw or processed)",
    ),
    "mismatch_k3": _metric(
        "sampler",
        "mean of `exp(d) - 1 - d`",
        "nats per token",
        "below 1e-3 in one dtype, 1e-2 across dtypes",
        "an estimate of KL(sampler || trainer): the gradient has that much bias",
        "`rollout_is=` corrects, the doctor names the cause",
    ),
    "chi2_token": _metric(
        "sampler",
        "mean of `exp(2 d) - 1`",
        "1",
        "below 0.02",
        "variance of token importance weights",
        'truncate them (`rollout_is="token"`)',
    ),
    "chi2_seq": _metric(
        "sampler",
        "mean over sequences of `exp(2 sum d) - 1`",
        "1",
        "below 1 for short answers; grows with length",
        "variance of sequence importance weights: sequence corrections will not help",
        '`rollout_is="token"`, or geometric',
    ),
}

_CORRECTION = {
    "weight_mean": _metric(
        "correction",
        "mean importance weight before bounds; for `sft_is`, `opmd` and weighted preferences the mean weight",
        "1",
        "1 within 0.05 for a correction; any positive number for a weighted objective",
        "below 1: the sampler leaves tokens out that the scorer counts (the mass that is kept)",
        "`sampling=` with the sampler's top-k and top-p",
    ),
    "weight_max": _metric(
        "correction",
        "largest importance weight before bounds",
        "1",
        "below 10",
        "a single token dominates",
        "truncate or mask it",
    ),
    "truncated_fraction": _metric(
        "correction",
        "share of weights cut at a bound",
        "share",
        "below 0.05",
        "the bound, not the data, sets the gradient",
        "find the mismatch",
    ),
    "masked_fraction": _metric(
        "correction",
        "share of weights outside the bounds, set to 0",
        "share",
        "below 0.05",
        "much data is thrown away",
        "find the mismatch",
    ),
    "effective_sample_size": _metric(
        "correction",
        "`(mean w)^2 / mean w^2` of one correction's weights",
        "share",
        "above 0.9",
        "few tokens count",
        "find the mismatch",
    ),
    "rejected_fraction": _metric(
        "correction",
        "share of tokens with weight 0",
        "share",
        "below 0.05",
        "much data is thrown away",
        "find the mismatch",
    ),
    "rejected_seq_fraction": _metric(
        "correction",
        "share of sequences with a token of weight 0",
        "share",
        "grows with length; below 0.2",
        "long answers are the ones that are dropped: a bias to short ones",
        "reject by sequence mean instead of by token",
    ),
    "correction_ess": _metric(
        "correction",
        "`(mean w)^2 / mean w^2` of the product of all weights",
        "share",
        "above 0.8",
        "little of the batch is left",
        "loosen one",
    ),
    "<divergence>_masked_fraction": _metric(
        "correction",
        "share of tokens that a rejection (`token_k1`, `seq_mean_k3`, ...) drops",
        "share",
        "below 0.05",
        "see `rejected_fraction`",
        "see there",
    ),
    "<divergence>_seq_masked_fraction": _metric(
        "correction",
        "share of sequences with such a token",
        "share",
        "below 0.2",
        "see `rejected_seq_fraction`",
        "see there",
    ),
    "sequence_masked_fraction": _metric(
        "correction",
        "share of tokens with `A < 0` in sequences with `mean(old - lp) > delta`",
        "share",
        "0 at the first update, below 0.1",
        "many bad answers have become unlikely: pushing them further destroys the policy",
        "fewer epochs",
    ),
    "entropy_threshold": _metric(
        "correction",
        "entropy that the kept tokens reach",
        "nats",
        "steady",
        "falls with the policy's entropy",
        "see `entropy`",
    ),
    "entropy_kept_fraction": _metric(
        "correction",
        "share of tokens kept",
        "share",
        "the `fraction` that was set",
        "more: many equal entropies",
        "none needed",
    ),
}

_OBJECTIVE = {
    "clip_fraction": _metric(
        "objective",
        "share of tokens whose gradient the clip range removes; `_low` those with `A < 0`, `_high` those with `A > 0`",
        "share",
        "0 at the first update, then 0.01 to 0.2",
        "0 for ever: the steps are tiny, or `old` is recomputed each time; above 0.3: the steps are too large",
        "learning rate, epochs, `clip_high`",
    ),
    "clip_fraction_low": _metric(
        "objective",
        "those with `A < 0` (for CISPO: weights raised)",
        "share",
        "as `clip_fraction`",
        "bad answers are left far behind",
        "fewer epochs",
    ),
    "clip_fraction_high": _metric(
        "objective",
        "those with `A > 0` (for CISPO: weights lowered)",
        "share",
        "as `clip_fraction`",
        "far above `_low`: rare good tokens cannot rise, and the entropy falls",
        "a `clip_high` of 0.28 (DAPO)",
    ),
    "clip_fraction_dual": _metric(
        "objective",
        "share of tokens with `A < 0` and `r > clip_ratio_c`",
        "share",
        "0",
        "the data is far off-policy",
        "fresher data",
    ),
    "token_masked_fraction": _metric(
        "objective", "share of tokens that CISPO's mask drops", "share", "below 0.1", "see `clip_fraction`", "see there"
    ),
    "tapered_fraction": _metric(
        "objective",
        "TOPR: share of tokens with a weight below 1",
        "share",
        "0 on policy",
        "the data is off-policy",
        "fresher data",
    ),
    "ratio_mean": _metric("objective", "mean of `r`", "1", "1 within 0.01", "drifts from 1: see `ESS`", "see there"),
    "gate_mean": _metric(
        "objective",
        "SAPO: mean slope of the gate, `4 p (1 - p)`",
        "1",
        "near 1",
        "small: most tokens are outside the soft range",
        "fewer epochs",
    ),
    "selected_fraction": _metric(
        "objective",
        "share of tokens selected by covariance",
        "share",
        "the `fraction` that was set",
        "0: the batch is too small",
        "a larger batch",
    ),
    "mu": _metric(
        "objective",
        "CHORD: weight of the experts' loss",
        "1",
        "follows its schedule",
        "stuck: `step` is not advanced",
        "add to `loss.step` after each step",
    ),
    "expert_fraction": _metric(
        "objective",
        "share of masked-in tokens that experts wrote",
        "share",
        "what the data was mixed to",
        "0: `expert_mask` is missing",
        "set it",
    ),
}

_OTHERS = {
    "captured_mass": _metric(
        "distillation",
        "mean of the teacher's probability in its top k",
        "share",
        "above 0.9",
        "the loss lumps the rest together: the student learns little of it",
        'a larger `top_k`, or `distribution="exact"`',
    ),
    "chosen_reward": _metric(
        "preferences",
        "mean of `beta sum(lp - ref)` of chosen answers",
        "nats",
        "rises, or falls less than the rejected one",
        "falls: the policy leaves the reference for both",
        "a larger `beta`, an SFT term",
    ),
    "rejected_reward": _metric(
        "preferences",
        "the same of rejected answers",
        "nats",
        "falls",
        "rises with the chosen one: pairs differ too little",
        "look at the pairs",
    ),
    "reward_margin": _metric(
        "preferences",
        "chosen minus rejected",
        "nats",
        "rises",
        "explodes: overfitting, labels without noise",
        "label smoothing, `ipo`, fewer epochs",
    ),
    "reward_accuracy": _metric(
        "preferences",
        "share of pairs whose chosen answer has the larger reward",
        "share",
        "0.5 at the start, then 0.6 to 0.9",
        "below 0.5: chosen and rejected are swapped; 1: overfitting",
        "check the data",
    ),
    "reference_point": _metric(
        "preferences",
        "KTO, BCO: the KL estimate `z` that answers are compared with",
        "nats",
        "small and positive",
        "0 for ever: mismatched answers are missing",
        "`parts.prepare` on the whole batch",
    ),
    "value_clip_fraction": _metric(
        "critic",
        "share of values whose clipped error is larger",
        "share",
        "below 0.2",
        "the critic moves too fast",
        "a lower learning rate for it",
    ),
    "value_mean": _metric(
        "critic",
        "mean value",
        "units of the reward",
        "near the mean return",
        "far from it: the critic has not converged",
        "critic warm-up",
    ),
    "explained_variance": _metric(
        "critic",
        "`1 - var(target - value) / var(target)`",
        "share",
        "0 at the start, then 0.3 to 0.9",
        "negative: worse than a constant",
        "warm the critic up, check its targets",
    ),
}

_TASK = {
    "reward_failures": _metric(
        "task",
        "share of answers for which a reward function raised, took too long or returned no finite number",
        "share",
        "0",
        "these parts of the reward count as 0, as if the answers were wrong",
        "the log (`torchrl_llm_kl.tasks`) has the first error; correct the function, or raise `timeout`",
    ),
}

_SERVICE = {
    "queue": _metric(
        "service",
        "requests that wait at a replica",
        "requests",
        "below the number of callers",
        "grows: too few replicas",
        "`max_replicas`, or the capacity model in docs/ray.md",
    ),
    "queue_tokens": _metric(
        "service", "their tokens", "tokens", "below `max_tokens`", "grows: see `queue`", "see there"
    ),
    "requests_per_batch": _metric(
        "service",
        "requests of a batch",
        "requests",
        "above 1 with several callers",
        "1 with many callers: they never meet",
        "a longer `max_wait`",
    ),
    "tokens_per_second": _metric(
        "service",
        "tokens scored for each second in the model",
        "tokens per second",
        "that of one process on full batches",
        "much lower: batches are small",
        "a larger `max_tokens`",
    ),
    "latency_p50": _metric(
        "service",
        "median time from arrival to answer, last 2,048 requests",
        "seconds",
        "one to two batches",
        "see `latency_p99`",
        "see there",
    ),
    "latency_p99": _metric(
        "service",
        "its 99 % quantile",
        "seconds",
        "three batches",
        "above: replicas restart, or are too few",
        "look at `restarts` and `queue`",
    ),
    "failures": _metric(
        "service", "requests answered with an error", "requests", "0", "the callers have the errors", "read them there"
    ),
    "restarts": _metric(
        "service",
        "starts of a replica after the first",
        "starts",
        "0",
        "memory, poison, or a lost node",
        "the log names the cause",
    ),
    "cache_hit_rate": _metric(
        "service",
        "share of tokens found in the cache",
        "share",
        "above 0.5 in conversations of several turns",
        "0: turns go to other replicas, or the weights change each step",
        "`remember`, fewer pushes",
    ),
}

#: All metrics, by name. A name in angle brackets stands for any word.
METRICS: Mapping[str, Metric] = {**_LOSS, **_SAMPLER, **_CORRECTION, **_OBJECTIVE, **_OTHERS, **_TASK, **_SERVICE}


def describe_metric(name: str) -> Metric | None:
    """What a metric means; None for one that is not of this package. ``_2`` for a second correction is understood.

    Example:
        >>> describe_metric("mismatch_k3").unit
        'nats per token'
        >>> describe_metric("token_k1_masked_fraction").origin, describe_metric("speed")
        ('correction', None)
    """
    base = re.sub(r"_[2-9]$", "", name)
    if base in METRICS:
        return METRICS[base]
    for known, metric in METRICS.items():
        pattern = re.sub(r"<\w+>", r"(?:token|seq_sum|seq_mean|seq_max)_k[1-3]", known)
        if pattern != known and re.fullmatch(pattern, base):
            return metric
    return None
