"""A batch under diagnosis, the findings that need no comparison of sampler and trainer, and the checks that were left out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from torchrl_llm_kl.diagnostics._catalog import Finding, finding
from torchrl_llm_kl.diagnostics._columns import COLUMNS, TokenColumns
from torchrl_llm_kl.diagnostics._measures import Table
from torchrl_llm_kl.diagnostics._rescored import Rescorer
from torchrl_llm_kl.masks import Message, Tokenizer
from torchrl_llm_kl.ragged import segment_sum
from torchrl_llm_kl.rollouts import MisalignedEntryError
from torchrl_llm_kl.scoring import ModelOrScorer, NotTextError, inner_module

#: The smallest root mean square of log-ratios that counts as a difference, in nats, by the policy's precision.
FLOORS = {torch.float64: 2e-3, torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
#: The same if the precision is unknown.
UNKNOWN_FLOOR = 4e-2
#: The multiple of the policy's own noise that counts as a difference. Another engine rounds about as much as other packs do.
NOISES = 2.5


@dataclass(eq=False)
class Case:
    """A batch and the state of the search for causes.

    Args:
        columns: the batch.
        table: its masked-in tokens.
        measures: the measures by name.
        rescorer: scores some sequences again. None without a policy in this process.
        policy: the given policy.
        reference: the given reference.
        tokenizer: the tokenizer, or None.
        conversations: the messages of each prompt, or None.
        bos: the id of the beginning-of-text token, or None.
        unread: the errors of columns that do not fit the tokens, by name.
        moved: whether the policy differs from the one that computed the trainer's log-probs.
    """

    columns: TokenColumns
    table: Table
    measures: dict[str, float]
    rescorer: Rescorer | None = None
    policy: ModelOrScorer | None = None
    reference: ModelOrScorer | None = None
    tokenizer: Tokenizer | None = None
    conversations: list[list[Message]] | None = None
    bos: int | None = None
    unread: Mapping[str, ValueError] = field(default_factory=dict)
    moved: bool = False

    @property
    def least_floor(self) -> float:
        """The smallest difference that counts for a policy without noise, in nats."""
        return UNKNOWN_FLOOR if self.rescorer is None else FLOORS.get(self.rescorer.dtype, UNKNOWN_FLOOR)

    @property
    def floor(self) -> float:
        """The smallest difference that counts, in nats. Measuring the policy's noise scores some sequences again."""
        return max(self.least_floor, 0.0 if self.rescorer is None else NOISES * self.rescorer.noise)


# ------------------------------------------------------------------ causes that need no comparison


def unreadable(case: Case) -> list[Finding]:
    """Find columns that do not fit the tokens, and models whose log-probs are not finite."""
    out = []
    for name, error in case.unread.items():
        cause, confidence = "unreadable", 0.9
        if name == "log_prob":  # an error of scoring the batch
            cause, confidence = "not_text" if isinstance(error, NotTextError) else "nan", 0.95
        elif isinstance(error, MisalignedEntryError):
            cause, confidence = "lengths", 0.95
        out.append(finding(cause, confidence, {"column": name, "error": str(error)}))
    if not case.columns.sampled and case.table.recorded is not None:
        tokens = "rendered from text, with log-probs of sampled tokens beside them"
        out.append(finding("retokenised", 0.6, {"tokens": tokens}))
    return out


def not_finite(case: Case) -> list[Finding]:
    """Find NaN and infinities. The sampler stores NaN for a token that it did not score, which is not a fault."""
    out = []
    for name in ("log_prob", "old_log_prob", "ref_log_prob", "kl", "entropy", "sampler_log_prob"):
        values = case.table.columns.get(name)
        if values is None or not values.numel():
            continue
        bad = values.isinf() if name == "sampler_log_prob" else ~values.isfinite()
        if bool(bad.any()):
            sequences = float(case.table.sequences[bad].unique().numel())
            out.append(finding("nan", 0.95, {"column": name, "share": share_of(bad), "sequences": sequences}))
    return out


def reference_faults(case: Case) -> list[Finding]:
    """Find a KL of exactly 0. The reference then has the policy's weights, now or from before its first step."""
    policy, reference = case.table.first("log_prob", "old_log_prob"), case.table.get("ref_log_prob")
    if policy is None or reference is None:
        return []
    known = policy.isfinite() & reference.isfinite()
    if not bool(known.any()) or bool((policy != reference)[known].any()):
        return []
    evidence = {"kl/k1": 0.0, "tokens": float(known.sum())}
    share, drift = shared_weights(case.policy, case.reference), case.measures.get("drift/max_abs", 0.0)
    if share:
        return [finding("reference_is_policy", 0.99 * share, {"shared_weights": share, **evidence})]
    if drift:
        return [finding("reference_is_policy", 0.9, {**evidence, "drift/max_abs": drift})]
    return [finding("zero_kl", 0.3, evidence)]


def shared_weights(policy: object, reference: object) -> float:
    """The share of the reference's weights that are in the policy's memory. 0 if it is scored with other adapters."""
    if policy is None or reference is None or getattr(policy, "adapters", True) != getattr(reference, "adapters", True):
        return 0.0
    models = [inner_module(model) for model in (policy, reference)]
    modules = [model for model in models if isinstance(model, nn.Module)]
    weights = [{weight.data_ptr() for weight in module.parameters() if weight.numel()} for module in modules]
    if len(weights) < 2 or not weights[1]:
        return float(policy is reference)
    return len(weights[0] & weights[1]) / len(weights[1])


#: The largest log-prob that rounding explains, in nats.
ROUNDING = 1e-3


def positive_log_probs(case: Case) -> list[Finding]:
    """Find log-probs above 0, which are probabilities, or log-probs with the wrong sign."""
    out = []
    for name in ("sampler_log_prob", "old_log_prob", "ref_log_prob", "log_prob"):
        values = case.table.columns.get(name)
        values = None if values is None else values[values.isfinite()]
        if values is None or not bool((values > ROUNDING).any()):
            continue
        within = bool((values >= 0).all()) and bool((values <= 1 + ROUNDING).all())
        remedy = "Store their logarithms: these numbers are probabilities." if within else None
        evidence = {"column": name, "share": share_of(values > ROUNDING), "largest": float(values.max())}
        out.append(finding("positive_log_probs", 0.99, evidence, remedy))
    return out


#: The mean entropy below which a policy has collapsed, in nats per token.
COLLAPSED = 1e-3
#: The KL above which a policy may be, and is, far from its reference, in nats per token.
MAYBE_FAR, FAR = 1.0, 10.0


def policy_state(case: Case) -> list[Finding]:
    """Find a policy without entropy, and one far from its reference."""
    out = []
    entropy = case.measures.get("surprisal/entropy", math.nan)
    if entropy < COLLAPSED:
        out.append(finding("collapsed", 0.9, {"surprisal/entropy": entropy}))
    name = "kl/exact" if "kl/exact" in case.measures else "kl/k1"
    kl = case.measures.get(name, math.nan)
    if kl > MAYBE_FAR:  # another model may be as far by design, so only a very large KL is certain
        out.append(finding("far_from_reference", 0.8 if kl > FAR else 0.4, {name: kl}))
    return out


#: The smallest standard score of a difference between answers that were left out and the others.
SURVIVORS_Z = 4.0


def _survivors(case: Case) -> list[Finding]:
    """Find a shift of lengths or rewards by the answers that are left out of training."""
    tokens = case.columns.tokens
    left = segment_sum(case.columns.mask.long(), tokens.lengths) == 0
    if case.columns.left_out is not None:
        left |= case.columns.left_out
    evidence: dict[str, float | str] = {"left_out": share_of(left)}
    for name, values in (("length", tokens.lengths), ("reward", case.columns.rows.get("reward"))):
        if values is None or int(left.sum()) < 8 or int((~left).sum()) < 8:
            continue
        out, stay = values[left].double(), values[~left].double()
        error = float((out.var() / len(out) + stay.var() / len(stay)).sqrt())
        difference = float(stay.mean() - out.mean())
        if abs(difference) > SURVIVORS_Z * error:
            evidence |= {f"{name}_left_out": float(out.mean()), f"{name}_that_stays": float(stay.mean())}
    return [finding("survivors", 0.9, evidence)] if len(evidence) > 1 else []


def left_out(case: Case) -> Iterator[str]:
    """Name the checks that the batch or the arguments did not allow, each with its reason. Those of log-probs come first."""
    columns, table = case.columns, case.table
    unused = f" {', '.join(columns.unused)} may hold them, but nothing reads this key." if columns.unused else ""
    if table.recorded is None and table.trainer is None:
        keys = " or ".join(map(repr, (COLUMNS["sampler_log_prob"].key, COLUMNS["old_log_prob"].key)))
        yield f"sampler against policy: the batch has no log-probs under {keys}, and no policy was passed.{unused}"
    elif table.recorded is None:
        yield f"sampler against policy: the batch has no log-probs of the sampler.{unused}"
    elif table.trainer is None:
        yield "sampler against policy: pass policy=, since the batch has log-probs of one of them only."
    if case.measures.get("surprisal/gap") is None:
        yield "whether the tokens are samples of the policy: pass policy=, which gives the entropy."
    if case.tokenizer is None:
        yield "retokenisation, templates and end tokens: pass tokenizer=."
    if table.get("ref_log_prob") is None and table.get("kl") is None:
        yield "the KL to the reference: pass reference=, or store its log-probs."
    if not columns.sampled:
        yield "the sampled tokens: the batch has only text, which was encoded again."


#: End tokens are missing if more than this share of the answers have none and are shorter than the longest answer.
WITHOUT_END = 0.3
#: Notes about answers and groups: cause, measure, and the value of the measure above which the note is given.
NOTES = (
    ("truncated_answers", "answers/truncated", 0.5),
    ("duplicated_prompts", "groups/duplicated_prompts", 0.0),
    ("no_spread", "groups/without_spread", 0.5),
    ("clipped", "clipped/outside", 0.3),
)


def notes(case: Case) -> list[Finding]:
    """Findings about answers and groups that are worth knowing but are not errors."""
    return _note_shares(case) + _survivors(case)


def _note_shares(case: Case) -> list[Finding]:
    at_limit = case.measures.get("answers/at_limit", 0.0)
    findings = []
    for cause, name, limit in NOTES:
        share = case.measures.get(name, 0.0)
        evidence = {name: share}
        if cause == "truncated_answers":
            evidence |= {"answers/at_limit": at_limit}
            cause = "no_end_tokens" if share - at_limit > WITHOUT_END else cause
        if share > limit and (cause != "truncated_answers" or at_limit > WITHOUT_END):
            findings.append(finding(cause, min(0.95, 0.5 + share / 2), evidence))
    return findings


def share_of(where: Tensor) -> float:
    """The share of True. 0 without tokens."""
    return float(where.double().mean()) if where.numel() else 0.0


def zeros_of_one_column(case: Case) -> list[Finding]:
    """Find exact zeros in stored log-probs, without other log-probs to compare with."""
    out = []
    for name in ("sampler_log_prob", "old_log_prob", "ref_log_prob"):
        share = case.measures.get(f"zeros/{name}", 0.0)
        if share > 0.2:  # a model that is certain also has log-probs that are nearly 0
            values = case.table.columns[name]
            if share > 3 * share_of((values < 0) & (values > -1e-4)):
                out.append(finding("zeros", 0.5 + share / 3, {"column": name, "share": share}))
    return out
