"""The causes of a batch's faults. Hypotheses are tested on the measures, and on a few sequences that are scored again.

A difference between sampler and trainer is explained by *predicting* the sampler's log-probs: at another temperature, over the
tokens that a truncation keeps, or with other weights. Nothing is scored again unless there is a deviation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchrl_llm_kl.diagnostics._case import (
    UNKNOWN_FLOOR,
    Case,
    not_finite,
    notes,
    policy_state,
    positive_log_probs,
    reference_faults,
    share_of,
    unreadable,
    zeros_of_one_column,
)
from torchrl_llm_kl.diagnostics._catalog import SURE, Evidence, Finding, finding
from torchrl_llm_kl.diagnostics._measures import Mean, clustered_mean, retokenised, surprisal_gap
from torchrl_llm_kl.diagnostics._rescored import Rescorer

#: The smallest surprisal minus entropy that counts, in nats and in (normal) standard errors.
SMALLEST_GAP, LARGEST_Z = 0.02, 4.75
#: The usual limit of rounding as a root mean square, in nats.
LARGEST_ROUNDING = 0.2
#: Mean and spread of the logarithm of the policy's own rounding over the difference: if the sampler rounds with other kernels,
#: and if it has other weights.
OTHER_KERNELS, OTHER_WEIGHTS = (0.1, 0.2), (0.0, 1.5)
#: Mean and spread of their correlation in the same two cases.
SHARED_ROUNDING, CHANCE = (0.3, 0.1), (0.0, 0.07)
#: Mean and spread of the logarithm of the root mean square in nats, if bfloat16 rounds it and if the weights differ.
ROUNDED, CHANGED = (math.log(0.03), 0.5), (math.log(0.1), 1.2)
#: Mean and spread of the logarithm of the squared difference in the first quarter of answers over the rest, after another
#: prompt and with other weights. The odds of the former if no known prompt explains the difference.
FADES, STEADY, UNKNOWN_PROMPT = (1.2, 0.6), (0.0, 0.5), 0.5
#: The share of the squared difference that a cause must explain to be named, and the share that ends the search.
NAMED, CERTAIN = 0.6, 0.99
#: The largest share of tokens that counts as few. The share of the squared difference that all other tokens may have.
FEW, LEFT = 0.05, 0.01
#: The KL per token, in nats, above which another prompt is more likely than older weights.
LARGEST_DRIFT = 1.5
#: The gain in log-likelihood, in nats, that a sampler's setting needs if the sampler's log-probs are unknown.
LEAST_GAIN = 6.0
#: Causes of a difference in log-probs that also explain deviations of the tokens, so that no further search is needed.
OF_TOKENS_TOO = {"wrong_temperature", "top_p", "top_k", "min_p", "chat_template", "stale_weights", "adapter_off"}
#: The remedy for tokens that are not samples of the policy at any temperature.
_OF_OTHERS = (
    "They are not samples of the policy at any temperature. This is expected for answers that it did not sample (data, another "
    "model, other weights), which need no ratio to the sampler. If the policy sampled them, compare weights and prompts."
)


def find_causes(case: Case) -> list[Finding]:
    """Find all causes. Faults come before notes, and the most certain ones first."""
    findings = unreadable(case)
    if not findings and not bool(case.columns.mask.any()):
        return [finding("empty_mask", 0.99, {"tokens": float(case.columns.mask.numel())})]
    impossible = positive_log_probs(case)
    findings += impossible + not_finite(case) + reference_faults(case) + policy_state(case)
    of_mismatch = [] if impossible else explain_mismatch(case)
    explained = bool(OF_TOKENS_TOO & {each.cause for each in of_mismatch})
    if case.columns.several_versions:
        of_mismatch = [_stale_by_design(each) for each in of_mismatch]
    if not impossible and not explained:
        of_mismatch += explain_tokens(case)
    findings += of_mismatch + notes(case)
    return sorted(findings, key=lambda each: (each.severity != "fault", -each.confidence))


def _stale_by_design(each: Finding) -> Finding:
    """Older weights are no fault in a batch of several policy versions.

    After an update inside an answer, its later tokens differ, which looks like retokenisation.
    """
    if each.cause not in ("retokenised", "stale_weights", "few_tokens", "mismatch"):
        return each
    return finding("stale_by_design", each.confidence, {"looks_like": each.cause, **each.evidence})


# ------------------------------------------------------------------ differences between sampler and trainer


@dataclass(frozen=True, eq=False)
class Difference:
    """The tokens for which both the sampler's and the trainer's log-probs are known.

    Args:
        trainer: log-probs of the trainer, in nats, ``[n]``.
        recorded: log-probs of the sampler, in nats, ``[n]``.
        sequences: the sequence of each token, ``[n]``.
        places: the place of each token in its answer, ``[n]``.
        where: True at these ``n`` tokens among the masked-in tokens of the batch, bool.
        names: the names of the columns of trainer and sampler.
    """

    trainer: Tensor
    recorded: Tensor
    sequences: Tensor
    places: Tensor
    where: Tensor
    names: tuple[str, str]

    def without(self, out: Tensor) -> Difference:
        """The same without the tokens ``out``, bool ``[n]``."""
        columns = {name: getattr(self, name)[~out] for name in ("trainer", "recorded", "sequences", "places")}
        return replace(self, **columns, where=self.where.masked_scatter(self.where, ~out))

    @property
    def d(self) -> Tensor:
        """The log-ratio of trainer to sampler, in nats, ``[n]``."""
        return self.trainer - self.recorded

    @property
    def rms(self) -> float:
        """The root mean square of the log-ratio. 0 without tokens."""
        return float(self.d.square().mean().sqrt()) if self.d.numel() else 0.0

    def explained(self, predicted: Tensor, where: Tensor | None = None) -> float:
        """The share of the squared difference that a prediction of the sampler's log-probs removes. May be negative."""
        recorded, trainer = (x if where is None else x[where] for x in (self.recorded, self.trainer))
        before = _capped(trainer - recorded).sum()
        return float(1 - _capped(predicted - recorded).sum() / before) if float(before) > 0 else 0.0


def _capped(d: Tensor) -> Tensor:
    """Squares with an upper limit, so that a few tokens in the tails do not dominate."""
    return d.square().clamp(max=4.0)


def explain_mismatch(case: Case) -> list[Finding]:
    """Find the causes of a difference between the sampler's and the trainer's log-probs of the same tokens."""
    trainer, recorded = case.table.trainer, case.table.recorded
    if trainer is None or recorded is None:
        return zeros_of_one_column(case)
    where = trainer[1].isfinite() & recorded[1].isfinite()
    sequences, places, names = case.table.sequences[where], case.table.places[where], (trainer[0], recorded[0])
    whole = Difference(trainer[1][where], recorded[1][where], sequences, places, where, names)
    if whole.rms <= case.least_floor or whole.rms <= case.floor:  # `floor` scores again, so it comes second
        return []
    zeros, rest = _zeros(case, whole)
    zeros = _greedy(case, zeros) + _zeros_of_trainer(whole)
    if rest.rms <= case.floor:
        return zeros
    seen = {"mismatch/rms": rest.rms, "mismatch/k3": case.measures.get("mismatch/k3", math.nan)}
    causes = _off_by_one(rest) + _rounded(rest)
    causes += _retokenised(case, rest, _best(causes))
    if case.rescorer is not None and _best(causes) < 0.9:
        causes += _rescored(case, rest, causes)
    causes += _otherwise(case, rest, max(_best(causes), _explained(causes)))
    if _best(zeros + causes) < SURE:  # the difference is a fault even if no cause is likely enough
        remedy = None if case.rescorer is None else "Diagnose more sequences at once to distinguish the causes below."
        causes = [finding("mismatch", SURE, {}, remedy), *(c for c in causes if c.cause != "mismatch")]
    return zeros + [replace(each, evidence={**seen, **each.evidence}) for each in causes]


def _best(findings: list[Finding]) -> float:
    """The largest confidence. 0 without findings."""
    return max((each.confidence for each in findings), default=0.0)


def _explained(findings: list[Finding]) -> float:
    """The confidence that a difference is explained, even if several causes explain it equally well."""
    shares = [float(each.evidence["explained"]) for each in findings if "explained" in each.evidence]
    return _confidence(max(shares)) if shares else 0.0


def _confidence(explained: float) -> float:
    """The confidence of a cause: 0.5 if it explains just enough to be named, 0.99 if it explains everything."""
    return 0.5 + 0.49 * max(0.0, (explained - NAMED) / (1 - NAMED))


def _zeros(case: Case, whole: Difference) -> tuple[list[Finding], Difference]:
    """Find exact zeros of the sampler at uncertain tokens. Also returns the difference without them."""
    zero = (whole.recorded == 0) & (whole.trainer < -case.floor)
    if not bool(zero.any()):
        return [], whole
    rest = whole.without(zero)
    explained, share = 1 - float(_capped(rest.d).sum() / _capped(whole.d).sum()), share_of(zero)
    others = float(rest.trainer.mean()) if rest.trainer.numel() else -1.0
    # A truncation to a single token also gives a log-prob of 0, where the model is nearly certain.
    certain = float(whole.trainer[zero].mean()) > 0.3 * others
    if certain or (share < 0.01 and explained < 0.1):
        return [], rest
    seen: Evidence = {"share": share, "mean_place": float(whole.places[zero].double().mean()), "explained": explained}
    # Zeros have no other explanation, so even a few of them are certain.
    return [finding("zeros", 0.7 + 0.29 * max(0.0, explained), {"column": whole.names[1], **seen})], rest


def _greedy(case: Case, zeros: list[Finding]) -> list[Finding]:
    """Replace zeros at all tokens by the finding of a greedy sampler, if each token is the most probable one."""
    if not zeros or float(zeros[0].evidence["share"]) < 0.99 or case.rescorer is None:
        return zeros
    if case.rescorer.top.tightest().get("top_k") != 1:
        return zeros
    remedy = "The sampler is greedy: set do_sample=True, or a temperature above 0. A policy gradient needs samples."
    return [finding("top_k", 0.97, {"top_k": 1, **zeros[0].evidence}, remedy)]


def _zeros_of_trainer(whole: Difference) -> list[Finding]:
    """Find exact zeros in the trainer's stored log-probs. A policy that is scored here has zeros only at certain tokens."""
    zero, name = (whole.trainer == 0) & (whole.recorded < -0.1), whole.names[0]
    if name == "log_prob" or int(zero.sum()) < 3:
        return []
    return [finding("zeros", 0.9, {"column": name, "share": share_of(zero)})]


def _off_by_one(rest: Difference) -> list[Finding]:
    """Find a shift: the sampler's log-prob of a token is the trainer's log-prob of a neighbour."""
    out = []
    for shift in (1, -1, 2, -2):
        n = rest.trainer.numel() - abs(shift)
        if n < 8:  # too few tokens for evidence
            continue
        a = slice(max(shift, 0), max(shift, 0) + n)  # the token
        b = slice(max(-shift, 0), max(-shift, 0) + n)  # its neighbour, whose log-prob may be stored at the token
        same = (rest.sequences[a] == rest.sequences[b]) & (rest.places[a] - rest.places[b] == shift)
        recorded, here, there = rest.recorded[a][same], rest.trainer[a][same], rest.trainer[b][same]
        before = _capped(here - recorded).sum()
        if not recorded.numel() or float(before) == 0:
            continue
        share = 1 - float(_capped(there - recorded).sum() / before)
        if share > NAMED:
            remedy = f"Move them by {-shift}: entry t must hold log p(token t | tokens before t)."
            out.append(finding("off_by_one", _confidence(share), {"shift": float(shift), "explained": share}, remedy))
    return out


def _rounded(rest: Difference) -> list[Finding]:
    """Find log-probs that were rounded to a low-precision type. The differences have the size of its rounding."""
    for dtype, relative in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        exact = share_of(rest.recorded.to(dtype).double() == rest.recorded)
        within = share_of(rest.d.abs() <= 4 * relative * rest.recorded.abs().clamp(min=1.0))
        if exact > 0.999 and within > 0.5:
            name = str(dtype).removeprefix("torch.")
            evidence: Evidence = {"precision": name, "exactly_held": exact, "within_rounding": within}
            return [finding("low_precision", 0.6 + 0.38 * within, evidence)]
    return []


@dataclass(frozen=True, eq=False)
class Again:
    """A difference at tokens that are scored again.

    Args:
        case: the batch.
        rescorer: scores ``m`` tokens of the batch again.
        rest: the difference, at ``n`` tokens.
        here: which tokens of the difference are scored again, bool ``[n]``.
        inner: which tokens that are scored again are part of the difference, bool ``[m]``.
    """

    case: Case
    rescorer: Rescorer
    rest: Difference
    here: Tensor
    inner: Tensor

    def explained(self, predicted: Tensor) -> float:
        """The share of the squared difference that predictions ``[m]`` remove."""
        return self.rest.explained(predicted[self.inner], self.here)


def _rescored(case: Case, rest: Difference, before: list[Finding]) -> list[Finding]:
    """Find causes for which the policy scores again. The search ends when a cause explains the difference."""
    rescorer = case.rescorer
    assert rescorer is not None
    picked = rescorer.picked & rest.where
    again = Again(case, rescorer, rest, picked[rest.where], picked[rescorer.picked])
    if int(again.here.sum()) < 8:  # too few tokens for evidence
        return []
    if not rescorer.sampling.truncates:
        drift = rescorer.log_prob[again.inner] - rest.trainer[again.here]
        case.moved = float(drift.square().mean().sqrt()) > case.floor
        if case.moved:  # the policy has changed since, so its scores explain nothing
            return []
    out: list[Finding] = []
    last = (_precision, _other_prompt) if rest.rms < LARGEST_ROUNDING else (_other_prompt, _precision)
    for attempt in (_adapter, _raw, _truncation, _temperature, *last):
        out += attempt(again)
        if max(_best(out), _explained(out), _best(before)) > _confidence(CERTAIN) - 0.02:
            break
    return out


def _adapter(again: Again) -> list[Finding]:
    """The sampler's log-probs equal the base model's, without the adapter."""
    base = again.rescorer.without_adapters()
    share = 0.0 if base is None else again.explained(base)
    return [] if share < NAMED else [finding("adapter_off", _confidence(share), {"explained": share})]


def _raw(again: Again) -> list[Finding]:
    """The sampler recorded log-probs over the whole vocabulary, at temperature 1 or at the scored temperature.

    Engines record such log-probs by default, regardless of the distribution that they sample from. Only the tokens identify the
    sampling distribution. If tokens are sampled as they are scored, their likelihood as recorded is larger by
    :data:`LEAST_GAIN` with a probability of at most ``exp(-LEAST_GAIN)``. Only such a gain is evidence of other sampling.
    """
    rescorer, scored = again.rescorer, again.rescorer.sampling
    if scored.temperature == 1.0 and not scored.truncates:
        return []
    # Some engines divide by the temperature before they record log-probs, but do not truncate.
    whole = [1.0, scored.temperature] if scored.truncates else [1.0]
    share, at = max(((again.explained(rescorer.at(each)[0]), each) for each in whole), key=lambda pair: pair[0])
    if share <= NAMED:
        return []
    raw, tempered = rescorer.at(at)[0], rescorer.at(scored.temperature)[0]
    gains: dict[str, float] = {}  # log-likelihood gains if the tokens are samples of the recorded distribution
    if at != scored.temperature:
        gains["wrong_temperature"] = float((raw - tempered).sum())
    if scored.truncates:
        gains["scored_truncation"] = float((tempered - rescorer.as_scored()).sum())
    gain = sum(gains.values())
    evidence: dict[str, float | str] = {"explained": share, "temperature_of_log_probs": at, "scored": str(scored)}
    evidence["gain_of_recorded"] = gain
    evidence |= _gaps(rescorer, as_scored=scored.temperature, as_recorded=at)
    if gain >= LEAST_GAIN:
        others = {name: 1.0 for name, own in gains.items() if own > 0}
        likely = float(gains.get("wrong_temperature", 0.0) <= -LEAST_GAIN)  # a truncation that was not sampled
    elif gain <= -LEAST_GAIN:
        likely, others = 1.0, {}
    else:
        likely = max(0.6, 1 / (1 + math.exp(gain)))
        others = dict.fromkeys(gains, 1 - likely)
    remedies = {"wrong_temperature": _temperature_remedy(at, scored.temperature)}
    sure = _confidence(share)
    out = [finding(name, sure * odds, evidence, remedies.get(name)) for name, odds in others.items()]
    return out + ([finding("raw_log_probs", sure * likely, evidence)] if likely else [])


def _gaps(rescorer: Rescorer, **temperatures: float) -> dict[str, float]:
    """Surprisal minus entropy at each temperature, and its standard score, by name."""
    out: dict[str, float] = {}
    for name, temperature in temperatures.items():
        log_prob, entropy = rescorer.at(temperature)
        mean = clustered_mean(-log_prob - entropy, rescorer.sequences)
        out |= {f"gap_{name}": mean.value, f"z_{name}": mean.z}
    return out


def _temperature_remedy(fitted: float, scored: float) -> str:
    change = f"temperature={fitted:.3g} instead of {scored:g}"
    return f"Score at the sampler's temperature, {change}, or sample at temperature={scored:g}."


def _truncation(again: Again) -> list[Finding]:
    """The sampler's log-probs are over the tokens that top-k, top-p or min-p keeps. The log-ratio shows the kept mass."""
    rescorer, rest, here, inner = again.rescorer, again.rest, again.here, again.inner
    # Apart from rounding, truncation never lowers a log-prob.
    limit = max(again.case.floor, 0.2)
    if not rescorer.sampling.truncates and share_of(rest.d[here] > limit) > 0.05:
        return []
    top = rescorer.top
    d = (top.log_prob[inner] - rest.recorded[here]).clamp(max=20.0)
    if share_of(d > limit) > 0.05:
        return []
    best, out = NAMED, []
    for cause, value in top.select(inner).candidates(d.clamp(max=0.0).exp()):
        mass = top.mass(cause, value)
        share = again.explained(top.log_prob - mass.log())
        if share > best:
            evidence = {"kept_mass": float(mass[inner].mean()), "mean_ratio": float(d.exp().mean())}
            best, out = share, [finding(cause, _confidence(share), {"explained": share, cause: value, **evidence})]
    return out


def _other_prompt(again: Again) -> list[Finding]:
    """The sampler's log-probs follow another rendering of the prompt."""
    case, best, name = again.case, 0.0, ""
    for candidate, predicted, known in again.rescorer.renderings(case.tokenizer, case.conversations, case.bos):
        usable = known[again.inner]
        if int(usable.sum()) >= 8:
            where = again.here.clone()
            where[again.here] = usable
            best, name = max((best, name), (again.rest.explained(predicted[again.inner][usable], where), candidate))
        if best > CERTAIN:  # no other rendering can be better
            break
    if best < NAMED:
        return []
    return [finding("chat_template", _confidence(best), {"explained": best, "sampler_s_prompt": name})]


def _temperature(again: Again) -> list[Finding]:
    """The sampler's log-probs equal the policy's at another temperature."""
    rescorer, scored = again.rescorer, again.rescorer.sampling.temperature
    temperature, log_prob = rescorer.fit_recorded(again.rest.recorded[again.here], again.inner)
    share = again.explained(log_prob)
    raw = abs(math.log(temperature)) < 0.02  # temperature 1 is the case of `_raw`
    if share < NAMED or raw or abs(math.log(temperature / scored)) < 0.005:
        return []
    gain = float((log_prob - rescorer.at(scored)[0]).sum())
    evidence = {"explained": share, "temperature_of_log_probs": temperature, "temperature_scored": scored}
    evidence |= _gaps(rescorer, as_scored=scored, there=temperature)
    sure = _confidence(share) / (1 + math.exp(-min(50.0, abs(gain))))
    if gain < 0:  # the tokens fit the scored temperature, so only the log-probs are of another one
        return [finding("raw_log_probs", sure, evidence)]
    return [finding("wrong_temperature", sure, evidence, _temperature_remedy(temperature, scored))]


def _precision(again: Again) -> list[Finding]:
    """The sampler's log-probs are the policy's in bfloat16, or differ by rounding errors of the same kind and size."""
    rest, here = again.rest, again.here
    rounded = again.rescorer.in_bfloat16()
    if rounded is None:
        return []
    d, own = -rest.d[here], rounded[again.inner] - rest.trainer[here]
    spread = float(own.std(correction=0) * d.std(correction=0))
    if spread == 0:
        return []
    correlation = clustered_mean((own - own.mean()) * (d - d.mean()) / spread, rest.sequences[here])
    size = float(own.square().mean().sqrt() / d.square().mean().sqrt())
    share = again.explained(rounded)
    evidence = {"explained": share, "correlation": correlation.value, "z": correlation.z, "size_of_rounding": size}
    if share > NAMED:
        return [finding("low_precision", _confidence(share), evidence)]
    ratio = _mean_ratio(rest)
    if abs(ratio.z) > LARGEST_Z:  # rounding has no bias
        return []
    # Other kernels round differently. Over many layers little of the rounding is shared, but its size is the same.
    odds = _odds_of_rounding(size, correlation)
    likely = odds / (1 + odds)
    return [finding("low_precision", 0.97 * likely, {**evidence, "z_of_ratio": ratio.z})] if likely > 0.1 else []


def _odds_of_rounding(size: float, correlation: Mean) -> float:
    """The odds of rounding with other kernels against other weights.

    Args:
        size: the size of the policy's own rounding errors over the size of the difference.
        correlation: the correlation of both.
    """
    x = math.log(size)
    of_size = _density(x, *OTHER_KERNELS) / _density(x, *OTHER_WEIGHTS)
    error = correlation.error if math.isfinite(correlation.error) else correlation.count**-0.5
    # A larger correlation than the usual one gives no evidence against rounding. The bound below avoids an underflow.
    shared = max(-5 * error, min(correlation.value, SHARED_ROUNDING[0]))
    of_correlation = [_density(shared, mean, math.hypot(spread, error)) for mean, spread in (SHARED_ROUNDING, CHANCE)]
    return of_size * of_correlation[0] / of_correlation[1]


def _density(x: float, mean: float, spread: float) -> float:
    """The density of a normal distribution."""
    return math.exp(-0.5 * ((x - mean) / spread) ** 2) / (spread * math.sqrt(2 * math.pi))


def _mean_ratio(rest: Difference) -> Mean:
    """The mean of the ratio minus 1. It is 0 for samples of the sampler, regardless of the trainer's weights."""
    return clustered_mean(rest.d.clamp(max=20.0).expm1(), rest.sequences)


def _onsets(case: Case, rest: Difference) -> tuple[Tensor, Tensor, Tensor, int]:
    """Where log-probs first differ.

    Returns:
        Uncertain tokens, tokens that agree, the place of the first disagreement in each sequence, and the number that stands
        for no disagreement in these places.
    """
    # Certain tokens agree after any prefix, so they show nothing.
    clear = (rest.trainer < -0.05) | (rest.recorded < -0.05)
    clean = (rest.d.abs() <= max(case.floor, 1e-3)) | ~clear
    never = int(rest.places.max()) + 1
    onset = torch.full((int(rest.sequences.max()) + 1,), never, dtype=torch.long)
    onset = onset.scatter_reduce(0, rest.sequences, torch.where(clean, never, rest.places), "amin")
    return clear, clean, onset, never


def _retokenised(case: Case, rest: Difference, best: float) -> list[Finding]:
    """Sampler and trainer agree up to some token of each answer, and nowhere after it."""
    if best > 0.9:
        return []
    clear, clean, onset, never = _onsets(case, rest)
    after = clear & (rest.places > onset[rest.sequences])
    before = clear & (rest.places < onset[rest.sequences])
    tail = clear & (onset[rest.sequences] < never) & (rest.places >= onset[rest.sequences])
    agrees_after = share_of(clean[after])
    share = float(before.sum()) / max(int(clear.sum()), 1)
    expected = agrees_after / max(1 - agrees_after, 1e-9)  # mean onset of differences at random places
    seen = rest.sequences.unique()
    mean_onset = float(before.sum()) / max(seen.numel(), 1)
    if int(before.sum()) < 8 or int(tail.sum()) < 3 or share < 0.1 or agrees_after > 0.5 or mean_onset < 3 * expected:
        return []
    confidence = 0.75 + 0.2 * (1 - 2 * agrees_after)
    answers = share_of(onset[seen] < never)
    evidence = {"agree_before": share, "agree_after": agrees_after, "answers": answers}
    if case.tokenizer is not None:
        change = retokenised(case.columns, case.tokenizer).get("retokenised/answers", 1.0)
        evidence["answers_that_change_again"] = change
        confidence += 0.04 if change == 0 else -0.4 - 0.4 * change  # no change when encoded again fits
    return [finding("retokenised", confidence, evidence)]


def _few_tokens(case: Case, rest: Difference, best: float) -> list[Finding]:
    """A few tokens have the whole difference. Other weights would change all tokens.

    The tokens are few, or they are nearly all tokens after some token of an answer.
    """
    carries = rest.d.abs() > case.floor
    squares = _capped(rest.d)
    if float(squares[~carries].sum()) > LEFT * float(squares.sum()):
        return []
    answers, sizes = rest.sequences[carries].unique(return_counts=True)
    # Among very few tokens, no share is small enough to be "few".
    if len(carries) < 32 or int(carries.sum()) > FEW * len(carries):
        clear, clean, onset, _ = _onsets(case, rest)
        before = rest.sequences[clear & (rest.places < onset[rest.sequences])].unique()
        after = clear & (rest.places > onset[rest.sequences])
        agree = share_of(clean[after])
        if agree > 0.5 or 2 * int(torch.isin(answers, before).sum()) <= len(answers):
            return []
    places = []
    for answer in answers[sizes.argsort(descending=True, stable=True)][:3].tolist():
        at = rest.places[carries & (rest.sequences == answer)].tolist()
        places.append(f"sequence {answer}: " + (", ".join(map(str, at)) if len(at) <= 3 else f"{at[0]} to {at[-1]}"))
    tokens, of = f"{int(carries.sum())} of {len(carries)}", f"{len(answers)} of {len(rest.sequences.unique())}"
    listed = "; ".join(places) + ("; ..." if len(answers) > 3 else "")
    return [finding("few_tokens", 0.9 * (1 - best), {"tokens": tokens, "answers": of, "places": listed})]


def _otherwise(case: Case, rest: Difference, best: float) -> list[Finding]:
    """The remaining causes. They are other weights or an unknown prompt if the policy is known and explains nothing."""
    if best > 0.9:
        return []
    ratio = _mean_ratio(rest)
    evidence = {"mean_ratio": 1 + ratio.value, "z_of_ratio": ratio.z}
    few = _few_tokens(case, rest, best)
    guesses = _guesses(rest, ratio, best)
    known = case.rescorer is not None and not case.moved
    if case.rescorer is not None and case.rescorer.narrow:
        known = known and all(each.cause != "low_precision" for each in guesses)
    if not known:
        above = share_of(rest.d > case.floor)
        if ratio.value < -SMALLEST_GAP and above < 0.01 and rest.d.numel() >= 32:  # noise would have both signs
            text = "Score the sampler's top-k, top-p or min-p with sampling=Sampling(...). Pass policy= to fit it."
            return [finding("other_sampling", 0.7, evidence, text)]
        remedy = "Diagnose before the policy's first step on the batch to find the cause." * case.moved
        guesses = few or guesses
        rest_of_odds = (0.3 if few else 0.6) * (1 - max(best, _best(guesses)))
        return [*guesses, finding("mismatch", rest_of_odds, evidence, remedy)]
    if few:
        return few
    fading, odds = _fading(rest)
    kl = float((rest.d.clamp(max=20.0).expm1() - rest.d).mean())
    evidence |= {"early_over_late": fading, "kl_of_weights": kl}
    odds = max(odds, 2.0 * (kl > LARGEST_DRIFT))
    other_prompt = 0.95 * odds / (1 + odds) * (1 - best)
    out = [finding("chat_template", other_prompt, evidence)] if other_prompt > 0.1 else []
    fits = 1.0 if abs(ratio.z) < LARGEST_Z else 0.6
    out.append(finding("stale_weights", 0.95 * fits * (1 - best - other_prompt), evidence))
    return out


def _fading(rest: Difference) -> tuple[float, float]:
    """Whether the difference fades along the answers, as after another prompt. Other weights change all places alike.

    Returns:
        The mean squared difference of the first quarter of places over that on the rest, and the odds of another prompt
        against other weights.
    """
    first = rest.places < max(1, int(rest.places.max() + 1) // 4)
    squares = _capped(rest.d)
    early, late = (clustered_mean(squares[part], rest.sequences[part]) for part in (first, ~first))
    if early.count < 8 or late.count < 8 or not (early.value > 0 and late.value > 0):
        return 1.0, 0.0
    ratio = early.value / late.value
    noise = math.hypot(early.error / early.value, late.error / late.value)
    noise = noise if math.isfinite(noise) else 1.0  # a single sequence
    x = max(0.0, math.log(ratio))
    fades, steady = (_density(x, mean, math.hypot(spread, noise)) for mean, spread in (FADES, STEADY))
    return ratio, UNKNOWN_PROMPT * fades / steady


def _guesses(rest: Difference, ratio: Mean, best: float) -> list[Finding]:
    """Rounding, other weights or another prompt, judged by size, bias and places of the difference, without a policy."""
    x = math.log(rest.rms)
    rounding = _density(x, *ROUNDED) / _tail(UNKNOWN_FLOOR, *ROUNDED)
    rounding /= _density(x, *CHANGED) / _tail(UNKNOWN_FLOOR, *CHANGED)
    rounding *= abs(ratio.z) < LARGEST_Z  # rounding has no bias
    fading, prompt = _fading(rest)
    evidence = {"mean_ratio": 1 + ratio.value, "z_of_ratio": ratio.z, "early_over_late": fading}
    odds = {"low_precision": rounding, "stale_weights": 1.0, "chat_template": prompt}
    # Temperatures and truncations have not been tried. They rarely change log-probs as little as rounding does.
    certain = {"low_precision": 0.8, "stale_weights": 0.45, "chat_template": 0.6}
    shares = {name: certain[name] * own / sum(odds.values()) for name, own in odds.items()}
    return [finding(name, share * (1 - best), evidence) for name, share in shares.items() if share > 0.1]


def _tail(above: float, mean: float, spread: float) -> float:
    """The probability that a value with a log-normal distribution is above a bound."""
    return 0.5 * math.erfc((math.log(above) - mean) / (spread * math.sqrt(2)))


# ------------------------------------------------------------------ tokens that do not fit the scored distribution


def explain_tokens(case: Case) -> list[Finding]:
    """Find causes of a surprisal that differs from the entropy: the tokens are not samples of the scored distribution."""
    gap = surprisal_gap(case.table)
    if gap is None or case.measures.get("drift/mean_abs", 0.0) > 0.05:
        return []
    known = gap.isfinite()
    mean = clustered_mean(gap[known], case.table.sequences[known])
    if abs(mean.value) <= SMALLEST_GAP or abs(mean.z) <= LARGEST_Z:  # too small to matter, or noise
        return []
    evidence: Evidence = {"surprisal/gap": mean.value, "surprisal/error": mean.error, "surprisal/z": mean.z}
    rescorer = case.rescorer
    if rescorer is None or rescorer.sampling.truncates:
        return [finding("other_sampling", 0.6, evidence)]
    scored, own = rescorer.sampling.temperature, rescorer.log_prob
    temperature, log_prob = rescorer.fit_tokens()
    of_temperature = {"temperature_of_tokens": temperature, "temperature_scored": scored}
    # Each cause has a gain in log-likelihood and evidence.
    gains: dict[str, tuple[float, Evidence]] = {"wrong_temperature": (float((log_prob - own).sum()), of_temperature)}
    if mean.value < 0:  # the tokens are less surprising than the distribution, so a truncation may have removed some
        top = rescorer.top
        for name, value in top.tightest().items():
            gains[name] = (-float(top.mass(name, value).log().sum()), {name: value})
    for name, predicted, usable in rescorer.renderings(case.tokenizer, case.conversations, case.bos):
        gain = float((predicted - own)[usable].mean()) * len(own)  # scaled to the tokens of the other causes
        if gain > (gains["chat_template"][0] if "chat_template" in gains else 0.0):
            gains["chat_template"] = (gain, {"sampler_s_prompt": name})
    cause, (gain, own_evidence) = max(gains.items(), key=lambda item: item[1][0])
    second = max((own for name, (own, _) in gains.items() if name != cause), default=0.0)
    if gain < LEAST_GAIN:
        return [finding("other_sampling", 0.6, evidence)]
    confidence = 0.55 + 0.4 * (1 - math.exp(-max(0.0, gain - max(second, 0.0)) / 3))
    evidence = {**evidence, "log_likelihood_gain": gain, "gain_of_the_next": second, **own_evidence}
    if cause != "wrong_temperature":
        return [finding(cause, confidence, evidence)]
    fit = clustered_mean(rescorer.calibration(temperature), rescorer.sequences)
    if abs(fit.z) > LARGEST_Z:  # they are not samples at that temperature either
        return [finding("other_sampling", 0.7, {**evidence, "z_there": fit.z}, _OF_OTHERS)]
    return [finding(cause, confidence, evidence, _temperature_remedy(temperature, scored))]
