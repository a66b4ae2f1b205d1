"""The doctor: measures a batch and names its faults and their remedies, once or every few batches."""

from __future__ import annotations

import html
import json
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import Transform
from typing_extensions import Unpack

from torchrl_llm_kl._numerics import check_choice, check_range
from torchrl_llm_kl.diagnostics._attribution import Attribution, attribute_mismatch
from torchrl_llm_kl.diagnostics._case import Case, left_out
from torchrl_llm_kl.diagnostics._catalog import SURE, Finding
from torchrl_llm_kl.diagnostics._columns import Reading, TokenColumns, check_reading, read_columns
from torchrl_llm_kl.diagnostics._findings import find_causes
from torchrl_llm_kl.diagnostics._measures import Table, measure, retokenised, worst_tokens
from torchrl_llm_kl.diagnostics._rescored import Rescorer
from torchrl_llm_kl.masks import Tokenizer
from torchrl_llm_kl.rollouts import ModelInterface, TokenisingOptions, read_conversations, sub_key
from torchrl_llm_kl.scoring import LogProbScorer, WeightHistory, as_sampling, inner_module, not_text, placeholders

if TYPE_CHECKING:
    from rich.text import Text

_LOGGER = logging.getLogger(__name__)
_TAIL = 64  # number of last tokens of an answer that are searched for an end text


class DiagnosisWarning(UserWarning):
    """A batch has a fault. The message states the cause, its evidence and the remedy."""


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The result of :func:`diagnose`. ``print(diagnosis)`` prints a report, and ``rich.print`` prints it in colour.

    Args:
        measures: numbers by name. ``docs/doctor.md`` lists them.
        findings: faults, most certain first, then notes.
        tokens: the tokens with the largest KL to the reference, or with the largest mismatch.
        forwards: how often sequences were scored again to find a cause.
        left_out: the checks that the batch or the arguments did not allow, each with its reason.
        compared: whether log-probs of sampler and policy were compared.
        attribution: the causes of their difference in shares, if asked for.
    """

    measures: dict[str, float] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    tokens: tuple[dict[str, float], ...] = ()
    forwards: int = 0
    left_out: tuple[str, ...] = ()
    compared: bool = True
    attribution: Attribution | None = None

    @property
    def faults(self) -> tuple[Finding, ...]:
        """Findings that make numbers wrong, with a confidence of at least 0.5."""
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
        """1 if there is a fault, 4 if sampler and policy could not be compared, else 0."""
        return 1 if self.faults else 0 if self.compared else 4

    def to_dict(self) -> dict[str, object]:
        """Convert the diagnosis to JSON values. Infinities and NaN become strings."""
        fields = {**vars(self), "findings": [each.to_dict() for each in self.findings]}
        fields["attribution"] = None if self.attribution is None else asdict(self.attribution)
        return cast("dict[str, object]", json.loads(json.dumps(fields), parse_constant=str))

    def __str__(self) -> str:
        tokens, sequences = (int(self.measures.get(f"mask/{name}", 0)) for name in ("tokens", "sequences"))
        faults, notes = len(self.faults), len(self.notes)
        counts = f"{faults or 'no'} fault{'s' * (faults > 1)}, {notes} note{'s' * (notes != 1)}"
        compared = "" if self.compared else ", sampler and policy were not compared"
        lines = [f"{tokens} tokens of {sequences} sequences: {counts}{compared}"]
        for number, each in enumerate((*self.faults, *self.notes), 1):
            kind = "" if each.severity == "fault" else " (note)"
            lines.append(f"{number}. {each.title}{kind}, confidence {each.confidence:.2f} [{each.cause}]")
            lines += [f"   evidence: {_evidence(each)}", f"   remedy: {each.remedy}"]
        lines += [] if self.attribution is None else [str(self.attribution)]
        lines += [f"not checked: {each}" for each in self.left_out]
        families: dict[str, list[str]] = {}  # only measures over all tokens
        for name, value in self.measures.items():
            family, _, quantity = name.partition("/")
            if "@" not in name and not (family in ("nan", "zeros") and value == 0):
                families.setdefault(family, []).append(f"{quantity} {value:.4g}")
        return "\n".join(lines + [f"{family + ':':<13} {', '.join(each)}" for family, each in families.items()])

    def __rich__(self) -> Text:
        from rich.text import Text

        colour = "red" if self.faults else "yellow" if self.notes or not self.compared else "green"
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
    attribute: bool | WeightHistory = False,
    **reading: Unpack[Reading],
) -> Diagnosis:
    """Measure a batch of rollouts and name its faults.

    Call it right after sampling, before the policy's first step on the batch. After a step, the policy's drift looks like
    stale weights, unless the batch also has the trainer's log-probs from before the step
    (``("next", "log_probs", "full")`` besides the sampler's).

    Answers that the policy did not sample, for example from a data set, give the finding ``other_sampling``. The other
    measures remain valid.

    Models score only numbers that the batch lacks. The policy does not run if the batch has the trainer's log-probs and
    ``("next", "entropy")``, which ``RetrieveLogProb(..., extras=[Entropy(("next", "entropy"))])`` stores. The reference does
    not run if the batch also has its log-probs. Only after a deviation are up to 8192 tokens scored again, at most about
    20 times.

    Args:
        batch: rollouts, or their columns.

    Keyword Args:
        tokenizer: used to check retokenisation, truncated answers and templates. Default: the policy wrapper's tokenizer.
        clip_low: the objective clips the ratio below ``1 - clip_low``. Used for the share of clipped tokens.
        clip_high: the objective clips the ratio above ``1 + clip_high``.
        end: texts that end an answer, in addition to the tokenizer's end tokens, as in :func:`make_sampler`.
        attribute: split the KL between sampler and policy into the shares of its causes (:func:`attribute_mismatch`). A
            :class:`~torchrl_llm_kl.scoring.WeightHistory` of the policy also considers older weights.
        **reading: arguments of :func:`read_columns`. ``policy`` is the trainer's policy. Its log-probs are compared with
            the sampler's. Without it, fewer causes can be distinguished. ``options`` defaults to the tokenizer.

    Returns:
        The measures and the findings.

    Raises:
        KeyError: if the data has no tokens.
        ValueError: if the assistant's tokens cannot be separated from the prompt, or a number is out of range.

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
    ends = _end_tokens(tokenizer, model)
    measures = measure(columns, clip_low=clip_low, clip_high=clip_high, end=ends, ended=ended)
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
    bos = interface.bos if tokenizer is None else getattr(tokenizer, "bos_token_id", None)
    case = Case(columns, table, measures, rescorer, policy, reference, tokenizer, conversations, bos, unread)
    findings, tokens = tuple(find_causes(case)), tuple(worst_tokens(columns))
    forwards = 0 if rescorer is None else rescorer.forwards
    compared = table.recorded is not None and table.trainer is not None
    shares, unchecked = None, list(left_out(case))
    if attribute and (not compared or rescorer is None or isinstance(batch, TokenColumns)):
        unchecked.append(
            "shares of the causes: pass policy=, in this process, and a batch with the sampler's log-probs."
        )
    elif attribute:
        history = None if isinstance(attribute, bool) else attribute
        assert policy is not None
        assert not isinstance(batch, TokenColumns)
        shares = attribute_mismatch(batch, policy, history=history, tokenizer=tokenizer, **reading)
    return Diagnosis(measures, findings, tokens, forwards, tuple(unchecked), compared, shares)


def _columns_of(batch: TensorDictBase, reading: Reading) -> TokenColumns:
    """Read the batch's columns. Models score only the columns that the batch lacks."""
    needed = reading.copy()  # the first reading shows which columns the batch has
    needed["policy"] = needed["reference"] = None
    stored = read_columns(batch, **needed, strict=False)
    if not {"old_log_prob", "entropy"} <= set(stored.columns):
        needed["policy"] = reading.get("policy")
    if "ref_log_prob" not in stored.columns or needed["policy"] is not None:
        needed["reference"] = reading.get("reference")
    scores = needed["policy"] is not None or needed["reference"] is not None
    return read_columns(batch, **needed, strict=False) if scores else stored


#: Tokens that end a turn in common chat templates, besides the tokenizer's ``eos_token``.
_END_OF_TURN = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|call|>", "<|return|>"),
    *("<|endoftext|>", "<|end_of_text|>", "<|user|>", "<|observation|>"),
)


def _end_tokens(tokenizer: Tokenizer | None, model: object) -> list[int] | None:
    """The ids that end an answer: the policy's, the tokenizer's, and common end-of-turn tokens. None without any of them."""
    of_policy = getattr(getattr(inner_module(model), "generation_config", None), "eos_token_id", None)
    ends = set(of_policy if isinstance(of_policy, list) else [of_policy])
    if tokenizer is not None:
        names = tokenizer.get_vocab()
        ends |= {names[name] for name in _END_OF_TURN if name in names} | {tokenizer.eos_token_id}
    return sorted(ends - {None}) or None


def _ended(columns: TokenColumns, tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """Whether the last masked-in tokens of each sequence contain one of the texts, bool ``[S]``."""
    answers = columns.mask.split(columns.tokens.lengths.tolist())
    tails = [row[mask][-_TAIL:].tolist() for row, mask in zip(columns.tokens.to_list(), answers, strict=True)]
    return torch.tensor([any(text in tokenizer.decode(tail) for text in texts) for tail in tails])


# ------------------------------------------------------------------ every few batches


class Doctor(Transform):
    """Runs :func:`diagnose` on every ``every``-th batch. The batch is not changed.

    Append it to a replay buffer (it runs on ``sample``, or on ``extend`` with ``invert=True``) or to an env, pass it to a
    collector (``postproc=``), or call it on a batch. Models are not copied, and they are not part of the transform's state.

    Args:
        every: the number of batches from one diagnosis to the next. The first batch is diagnosed.

    Keyword Args:
        on_fault: ``"warn"`` issues a :class:`DiagnosisWarning` when a cause is first found. ``"raise"`` raises a RuntimeError.
            ``"log"`` writes each fault to the logger of this module.
        log: called with each :class:`Diagnosis`, for example to log ``diagnosis.measures``.
        tokenizer, clip_low, clip_high: see :func:`diagnose`.
        **reading: arguments of :func:`read_columns`. See :func:`diagnose`.

    Attributes:
        last: the last :class:`Diagnosis`, or None.
        batches: the number of batches seen.

    Raises:
        ValueError: if ``every`` is below 1, or ``on_fault`` is unknown.

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
        # A partial hides the models from nn.Module, which would otherwise register their parameters as the transform's.
        self._diagnose = partial(diagnose, tokenizer=tokenizer, clip_low=clip_low, clip_high=clip_high, **reading)
        self.last: Diagnosis | None = None
        self.batches = 0
        self._warned: set[str] = set()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Diagnose the batch if it is its turn, and return it unchanged."""
        self.batches += 1
        if (self.batches - 1) % self.every == 0 and tensordict.batch_size.numel():
            self._report(self._diagnose(tensordict))
        return tensordict

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        # A replay buffer calls this on `extend` if the transform was appended with `invert=True`. torchrl's MCAdvantage
        # passes None for an incomplete group.
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
                warnings.warn(text, DiagnosisWarning, stacklevel=4)  # the line that called the transform
