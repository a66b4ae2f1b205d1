"""The doctor: measures of a batch, its faults and their remedies, once or every few batches."""

from __future__ import annotations

import html
import json
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import Transform
from typing_extensions import Unpack

from torchrl_llm_kl._numerics import check_choice, check_range
from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.diagnostics._catalog import SURE, Finding
from torchrl_llm_kl.diagnostics._columns import Reading, TokenColumns, check_reading, read_columns
from torchrl_llm_kl.diagnostics._findings import Case, find_causes
from torchrl_llm_kl.diagnostics._measures import Table, measure, retokenised, worst_tokens
from torchrl_llm_kl.diagnostics._rescored import Rescorer
from torchrl_llm_kl.masks import Tokenizer
from torchrl_llm_kl.rollouts import ModelInterface, TokenisingOptions, read_conversations, sub_key
from torchrl_llm_kl.scoring import LogProbScorer, as_sampling, inner_module, not_text, placeholders

if TYPE_CHECKING:
    from rich.text import Text

_LOGGER = logging.getLogger(__name__)
_TAIL = 64  # tokens at the end of an answer, in which a text that ends it is looked for


class DiagnosisWarning(UserWarning):
    """A batch has a fault: the message names the cause, its evidence and the remedy."""


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The result of :func:`diagnose`. ``print(diagnosis)`` is a report, which rich prints in colour.

    Args:
        measures: numbers by name; ``docs/doctor.md`` lists them.
        findings: faults, most certain first, then notes.
        tokens: the tokens with the largest KL to the reference, or the largest mismatch.
        forwards: how often sequences were scored to find a cause, beside the batch's own columns.
    """

    measures: dict[str, float] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    tokens: tuple[dict[str, float], ...] = ()
    forwards: int = 0

    @property
    def faults(self) -> tuple[Finding, ...]:
        """Findings that make numbers wrong, of a confidence of 0.5 at least."""
        return tuple(each for each in self.findings if each.severity == "fault" and each.confidence >= SURE)

    @property
    def notes(self) -> tuple[Finding, ...]:
        """All other findings."""
        return tuple(each for each in self.findings if each not in self.faults)

    @property
    def worst(self) -> Finding | None:
        """The most certain fault, or None."""
        return self.faults[0] if self.faults else None

    @property
    def exit_code(self) -> int:
        """1 if there is a fault, else 0."""
        return int(bool(self.faults))

    def to_dict(self) -> Json:
        """All of it as plain lists, strings and numbers, for JSON; infinities and NaN as strings."""
        fields = {**vars(self), "findings": [each.to_dict() for each in self.findings]}
        return cast(Json, json.loads(json.dumps(fields), parse_constant=str))

    def __str__(self) -> str:
        tokens, sequences = (int(self.measures.get(f"mask/{name}", 0)) for name in ("tokens", "sequences"))
        faults, notes = len(self.faults), len(self.notes)
        counts = f"{faults or 'no'} fault{'s' * (faults > 1)}, {notes} note{'s' * (notes != 1)}"
        lines = [f"{tokens} tokens of {sequences} sequences: {counts}"]
        for number, each in enumerate((*self.faults, *self.notes), 1):
            kind = "" if each.severity == "fault" else " (note)"
            lines.append(f"{number}. {each.title}{kind}, confidence {each.confidence:.2f} [{each.cause}]")
            lines += [f"   evidence: {_evidence(each)}", f"   remedy: {each.remedy}"]
        families: dict[str, list[str]] = {}  # of measures over all tokens
        for name, value in self.measures.items():
            family, _, quantity = name.partition("/")
            if "@" not in name and not (family in ("nan", "zeros") and value == 0):
                families.setdefault(family, []).append(f"{quantity} {value:.4g}")
        return "\n".join(lines + [f"{family + ':':<13} {', '.join(each)}" for family, each in families.items()])

    def __rich__(self) -> Text:
        from rich.text import Text

        colour = "red" if self.faults else "yellow" if self.notes else "green"
        headline, _, rest = str(self).partition("\n")
        return Text(headline, style=f"bold {colour}").append(f"\n{rest}", style="not bold default")

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _evidence(finding: Finding) -> str:
    return ", ".join(f"{name} {x if isinstance(x, str) else format(x, '.4g')}" for name, x in finding.evidence.items())


# ------------------------------------------------------------------ one batch


@torch.no_grad()
def diagnose(
    batch: TensorDictBase | TokenColumns,
    *,
    tokenizer: Tokenizer | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    end: Sequence[str] = (),
    **reading: Unpack[Reading],
) -> Diagnosis:
    """Measure a batch of rollouts and name its faults.

    Call it right after sampling, before the policy's first step on the batch: later, its drift counts as stale weights, unless
    the batch holds the trainer's log-probs of before (``("next", "log_probs", "full")`` beside the sampler's).

    Of answers that the policy did not sample, such as data, it finds that they are not samples of the policy
    (``other_sampling``); all other measures hold.

    Models score only numbers that the batch lacks: with the trainer's log-probs and ``("next", "entropy")``, as
    ``RetrieveLogProb(..., extras=[Entropy(("next", "entropy"))])`` stores them, the policy is not run, and the reference is
    not if the batch has its log-probs too. Only where something was found, up to 8192 tokens are scored
    again, some 20 times at most.

    Args:
        batch: rollouts, or their columns.

    Keyword Args:
        tokenizer: by default the policy wrapper's: for retokenisation, truncated answers and templates.
        clip_low: the objective's lower bound of the ratio is ``1 - clip_low``, for the share of clipped tokens.
        clip_high: its upper bound is ``1 + clip_high``.
        end: texts that end an answer, besides the tokenizer's own end tokens, as :func:`make_sampler` takes them.
        **reading: arguments of :func:`read_columns`. ``policy`` is the trainer's, which is compared with the sampler's
            log-probs; without it fewer causes can be told apart. ``options`` is by default the tokenizer.

    Returns:
        Measures and findings.

    Raises:
        KeyError: if the data holds no tokens.
        ValueError: if the assistant's tokens cannot be told from the prompt, or a number is out of range.

    Example:
        >>> from tensordict import TensorDict
        >>> full = torch.tensor([[3, 4, 5, 6, 7, 8]] * 8)
        >>> td = TensorDict(tokens=TensorDict(prompt=full[:, :1], full=full, batch_size=[8]), batch_size=[8])
        >>> td["next", "log_probs", "full"] = torch.arange(48.0).reshape(8, 6).sin() - 2  # of the trainer
        >>> td["next", "sampler_log_probs", "full"] = td["next", "log_probs", "full"].roll(1, -1)  # of the sampler
        >>> diagnosis = diagnose(td)
        >>> diagnosis.worst.cause, diagnosis.exit_code
        ('off_by_one', 1)
        >>> round(diagnosis.measures["mismatch/ess_token"], 2)
        0.71

    Source: surprisal minus entropy as a test of the sampler, and the causes: ``docs/doctor.md``.
    """
    check_range(0.0, 1.0, clip_low=clip_low)
    check_range(0.0, clip_high=clip_high)
    check_reading(reading)
    policy, reference = reading.get("policy"), reading.get("reference")
    scored, model = as_sampling(reading.get("temperature", 1.0), reading.get("sampling")), policy
    if isinstance(policy, LogProbScorer):
        scored, model = policy.options.sampling, policy.model
    interface = ModelInterface.of(model)
    tokenizer = interface.tokenizer if tokenizer is None else tokenizer
    conversations = None
    if isinstance(batch, TokenColumns):
        columns = batch
    else:
        if tokenizer is not None:
            reading.setdefault("options", TokenisingOptions(tokenizer))
        columns = _columns_of(batch, reading)
        conversations = read_conversations(batch, sub_key(interface.history_key, "prompt"))
    ended = None if tokenizer is None or not end else _ended(columns, tokenizer, end)
    measures = measure(columns, clip_low=clip_low, clip_high=clip_high, end=_end_tokens(tokenizer), ended=ended)
    if tokenizer is not None:
        measures |= retokenised(columns, tokenizer)
    table = Table.of(columns)
    unread = dict(columns.unread)
    for each in () if columns.has_images else (policy, reference):
        error = not_text(columns.tokens, placeholders(inner_module(each)))
        if error is not None:
            unread.setdefault("log_prob", error)
    rescorer = None
    usable = not columns.has_images and "log_prob" not in unread and bool(columns.mask.any())
    if usable and policy is not None and Rescorer.can_score(policy):
        rescorer = Rescorer(policy, columns, table, scored)
    case = Case(columns, table, measures, rescorer, policy, reference, tokenizer, conversations, unread)
    findings, tokens = tuple(find_causes(case)), tuple(worst_tokens(columns))
    return Diagnosis(measures, findings, tokens, 0 if rescorer is None else rescorer.forwards)


def _columns_of(batch: TensorDictBase, reading: Reading) -> TokenColumns:
    """The batch's columns. Models score only the columns that the batch does not hold."""
    needed = reading.copy()
    needed["policy"] = needed["reference"] = None
    stored = read_columns(batch, **needed, strict=False)
    if not {"old_log_prob", "entropy"} <= set(stored.columns):
        needed["policy"] = reading.get("policy")
    if "ref_log_prob" not in stored.columns or needed["policy"] is not None:
        needed["reference"] = reading.get("reference")
    scores = needed["policy"] is not None or needed["reference"] is not None
    return read_columns(batch, **needed, strict=False) if scores else stored


def _end_tokens(tokenizer: Tokenizer | None) -> list[int] | None:
    """Ids that end an answer, as far as the tokenizer knows."""
    if tokenizer is None:
        return None
    names = tokenizer.get_vocab()
    known = [names[name] for name in ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>") if name in names]
    return [*known, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])] or None


def _ended(columns: TokenColumns, tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """Whether each sequence's last masked-in tokens have one of the texts, bool ``[S]``."""
    answers = columns.mask.split(columns.tokens.lengths.tolist())
    tails = [row[mask][-_TAIL:].tolist() for row, mask in zip(columns.tokens.to_list(), answers, strict=True)]
    return torch.tensor([any(text in tokenizer.decode(tail) for text in texts) for tail in tails])


# ------------------------------------------------------------------ every few batches


class Doctor(Transform):
    """Runs :func:`diagnose` on every ``every``-th batch that passes; the batch is not changed.

    Append it to a replay buffer (on ``sample``; on ``extend`` with ``invert=True``) or an env, pass it to a collector
    (``postproc=``), or call it on a batch. Models are not copied, and the transform's state does not hold them.

    Args:
        every: batches between two diagnoses; the first batch is diagnosed.

    Keyword Args:
        on_fault: ``"warn"``: a :class:`DiagnosisWarning` for each cause when it is first found; ``"raise"``: a RuntimeError;
            ``"log"``: to the logger of this module, every time.
        log: called with each :class:`Diagnosis`, for instance to log ``diagnosis.measures``.
        tokenizer, clip_low, clip_high: see :func:`diagnose`.
        **reading: arguments of :func:`read_columns`. See :func:`diagnose`.

    Attributes:
        last: the last :class:`Diagnosis`, or None.
        batches: how many batches passed.

    Raises:
        ValueError: if ``every`` is below 1, or ``on_fault`` unknown.

    Example:
        >>> from tensordict import TensorDict
        >>> full = torch.tensor([[3, 4, 5, 6]])
        >>> td = TensorDict(tokens=TensorDict(prompt=full[:, :2], full=full, batch_size=[1]), batch_size=[1])
        >>> doctor = Doctor(every=10)
        >>> _ = doctor(td)
        >>> doctor.last.measures["mask/tokens"], doctor.last.worst
        (2.0, None)
    """

    def __init__(
        self,
        every: int = 1,
        *,
        on_fault: Literal["warn", "raise", "log"] = "warn",
        log: Callable[[Diagnosis], object] | None = None,
        tokenizer: Tokenizer | None = None,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        **reading: Unpack[Reading],
    ) -> None:
        check_range(1, every=every)
        check_choice(("warn", "raise", "log"), on_fault=on_fault)
        super().__init__(in_keys=[], out_keys=[])
        self.every, self.on_fault, self.log = every, on_fault, log
        # In a partial, modules are not registered: they are not the transform's own parameters.
        self._diagnose = partial(diagnose, tokenizer=tokenizer, clip_low=clip_low, clip_high=clip_high, **reading)
        self.last: Diagnosis | None = None
        self.batches = 0
        self._warned: set[str] = set()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Look at a batch, and return it."""
        self.batches += 1
        if (self.batches - 1) % self.every == 0 and tensordict.batch_size.numel():
            self._report(self._diagnose(tensordict))
        return tensordict

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        # A replay buffer calls this on `extend` when the transform was appended with `invert=True`. An incomplete
        # group of torchrl's MCAdvantage arrives as None.
        return None if next_tensordict is None else self.forward(next_tensordict)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        self.forward(tensordict.copy().set("next", next_tensordict))
        return next_tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return tensordict_reset

    def _report(self, diagnosis: Diagnosis) -> None:
        self.last = diagnosis
        if self.log is not None:
            self.log(diagnosis)
        for each in diagnosis.faults:
            text = f"batch {self.batches}: {each.title} (confidence {each.confidence:.2f}; {_evidence(each)}). {each.remedy}"
            if self.on_fault == "raise":
                raise RuntimeError(text)
            if self.on_fault == "log":
                _LOGGER.warning(text)
            elif each.cause not in self._warned:
                self._warned.add(each.cause)
                warnings.warn(text, DiagnosisWarning, stacklevel=4)
