"""Where in the rendered text the assistant speaks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_llm_kl.masks._errors import TurnNotFoundError
from torchrl_llm_kl.masks._render import Message, Renderer, common_prefix_length
from torchrl_llm_kl.masks._trace import LOOP, MARK, SET, Span, Trace

__all__: list[str] = []

ASSISTANT = "assistant"

# The shapes of control tokens; one or more of them, and nothing else, may stand between an answer and the next turn.
_CONTROL = r"<[^<>\s]+>|\[[^\[\]\s]+\]"
_CONTROL_TOKENS = re.compile(f"(?:{_CONTROL})+")
# Units in which a generation prompt is compared with a turn that shows only the first part of it.
_UNITS = re.compile(rf"{_CONTROL}|\w+|\s|[^\w\s]")
_FILLER = "\U0010fefe"


@dataclass(frozen=True)
class Turns:
    """The rendered text, the assistant's character spans in it, and how they were found."""

    text: str
    spans: tuple[Span, ...]
    located_by: str


def locate_turns(renderer: Renderer, messages: Sequence[Message], generation_prompt: bool) -> Turns:
    """Renders a conversation and finds what the assistant produced in it."""
    text = renderer.text(messages, generation_prompt)
    turns = [i for i, message in enumerate(messages) if message.get("role") == ASSISTANT]
    if not turns:
        return Turns(text, (), "no assistant turn")

    trace = _trace_without_prompt(renderer, messages, text, generation_prompt)
    spans: list[Span] = []
    traced = False
    for turn in turns:
        region = _region(trace, turn) if trace is not None else None
        if region is None and not renderer.has_marks:
            spans.append(_span_between_prefixes(renderer, messages, turn, text))
        elif region is None:
            return Turns(text, _normalised_marks(renderer, messages, text, generation_prompt), "marks")
        elif trace is not None and region[0] < region[1]:
            traced = True
            spans += _spans_in_region(renderer, trace, messages, turn, region)
    located_by = "marks" if renderer.has_marks else "trace" if traced else "prefixes"
    return Turns(text, _merge(spans), located_by)


def _trace_without_prompt(
    renderer: Renderer, messages: Sequence[Message], text: str, generation_prompt: bool
) -> Trace | None:
    """The trace of the text without its last generation prompt, which some templates write into the last turn."""
    trace = renderer.trace(messages, False, clean=None if generation_prompt else text)
    if generation_prompt and (trace is None or not text.startswith(trace.text)):
        return renderer.trace(messages, True)
    return trace


def _region(trace: Trace, turn: int) -> Span | None:
    """All that the template wrote for one message: header, what was said, what follows. Empty if it wrote nothing."""
    written = trace.of(LOOP, turn) or trace.of(SET, turn)
    outermost = [a for a in written if not any(b[0] <= a[0] and a[1] <= b[1] and a != b for b in written)]
    if len(outermost) == 1:
        return outermost[0]
    visited = any(kind == LOOP and index == turn for kind, index, _, _ in trace.spans)
    return (0, 0) if visited and not written else None


def _spans_in_region(
    renderer: Renderer, trace: Trace, messages: Sequence[Message], turn: int, region: Span
) -> list[Span]:
    start = region[0] + _header_length(renderer, trace.text[slice(*region)], messages, turn)
    end = _end_of_turn(renderer, trace.text, messages[turn], start, region[1])
    spans = [(start, end)] if start < end else []
    if renderer.has_marks:
        spans = _clip_marks(renderer, trace, region, start, end)
    return _subtract(spans, _foreign(trace, messages, turn, region))


def _header_length(renderer: Renderer, region: str, messages: Sequence[Message], turn: int) -> int:
    """Length of the role header: the part of the turn that the generation prompt already holds."""
    lead = len(region) - len(region.lstrip())
    for prefix in (messages[:turn], messages):
        partial = 0
        for read_prompt in (renderer.prompt_after_loop, renderer.prompt_added):
            try:
                prompt = read_prompt(prefix) if prefix else ""
            except Exception:  # the template refuses the shortened conversation, in its own words
                prompt = ""
            if not prompt.strip():
                continue
            candidates = [(at, prompt[skip:]) for at, skip in _alignments(region, prompt, lead)]
            whole = [at + len(rest) for at, rest in candidates if region.startswith(rest, at)]
            if whole:
                return max(whole)
            partial = max(partial, *(_shared_units(region, rest, at) for at, rest in candidates))
        if partial:
            constant = _constant_start(renderer, region, messages, turn)
            return partial if constant is None else min(partial, constant)
    constant = _constant_start(renderer, region, messages, turn)
    if constant is None:
        raise TurnNotFoundError(
            f"message {turn} (assistant): {renderer.name} shows no generation prompt at its start, so its header can't "
            "be told from what the model produced. Pass a template with {% generation %} blocks as `chat_template=`."
        )
    return constant


def _alignments(region: str, tail: str, lead: int) -> list[Span]:
    """Where to start comparing in the turn and in the generation prompt: with and without leading white space."""
    skip = len(tail) - len(tail.lstrip())
    return [(0, 0), (lead, skip), (0, skip), (lead, 0)]


def _shared_units(region: str, tail: str, at: int) -> int:
    """End of the longest run of whole units that the generation prompt and the turn share, 0 if there is none."""
    start = at
    for unit in _UNITS.findall(tail):
        if not region.startswith(unit, at):
            break
        at += len(unit)
    return at if region[start:at].strip() else 0


def _constant_start(renderer: Renderer, region: str, messages: Sequence[Message], turn: int) -> int | None:
    """Length of what the template writes for the turn before any content, None if it can't be seen."""
    content = messages[turn].get("content")
    filler: Any = [{"type": "text", "text": _FILLER}] if isinstance(content, (list, tuple)) else _FILLER
    try:
        trace = renderer.trace([*messages[:turn], {"role": ASSISTANT, "content": filler}], False)
    except Exception:  # the template refuses the shortened conversation, in its own words
        return None
    other = _region(trace, turn) if trace is not None else None
    if trace is None or other is None or _FILLER not in trace.text[slice(*other)]:
        return None
    shared = common_prefix_length(region, trace.text[slice(*other)])
    return shared if region[:shared].strip() else 0


def _end_of_turn(renderer: Renderer, text: str, message: Message, start: int, end: int) -> int:
    """End of the last thing written for the turn, without the white space behind it."""
    spoken = text[start:end].rstrip()
    eos = getattr(renderer.tokenizer, "eos_token", None)
    # Some templates close the turn outside of it: before the next one, or after the last.
    content = message.get("content")
    unclosed = isinstance(content, str) and content.rstrip().endswith(spoken.lstrip())
    if eos and unclosed and text.startswith(eos, end):
        return end + len(eos)
    return start + len(spoken)


def _clip_marks(renderer: Renderer, trace: Trace, region: Span, start: int, end: int) -> list[Span]:
    """The template's own marks in one turn: without header and trailing white space, with the end-of-turn token."""
    marks = [(max(a, start), min(b, end)) for a, b in trace.of(MARK) if region[0] <= a and b <= max(region[1], end)]
    marks = [(a, b) for a, b in marks if a <= b]
    if marks:
        first, last = marks[-1]
        rest = trace.text[last:end].strip()
        if _CONTROL_TOKENS.fullmatch(rest) or rest == getattr(renderer.tokenizer, "eos_token", None):
            marks[-1] = (first, end)
    joined: list[Span] = []
    for a, b in marks:
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        elif a < b:
            joined.append((a, b))
    return joined


def _foreign(trace: Trace, messages: Sequence[Message], turn: int, region: Span) -> list[Span]:
    """Messages of others that the template writes inside of the turn, such as tool responses."""
    foreign: list[Span] = []
    for other, message in enumerate(messages):
        if other == turn or message.get("role") == ASSISTANT:
            continue
        inside = [s for kind in (LOOP, SET) for s in trace.of(kind, other) if region[0] <= s[0] and s[1] <= region[1]]
        own = [s for s in trace.of(LOOP, other) if s not in inside]
        if not own:
            foreign += inside
    return foreign


def _subtract(spans: list[Span], holes: list[Span]) -> list[Span]:
    for low, high in holes:
        spans = [
            piece
            for start, end in spans
            for piece in ((start, min(end, low)), (max(start, high), end))
            if piece[0] < piece[1]
        ]
    return sorted(set(spans))


def _merge(spans: list[Span]) -> tuple[Span, ...]:
    """Sorted and disjoint; spans that touch stay apart, since they are different turns."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        start = max(start, merged[-1][1]) if merged else start
        if start < end:
            merged.append((start, end))
    return tuple(merged)


def _span_between_prefixes(renderer: Renderer, messages: Sequence[Message], turn: int, text: str) -> Span:
    """Fallback without a trace: the turn lies between the prompt for it and the conversation that ends with it."""
    try:
        before = renderer.text(messages[:turn], True)
        after = renderer.text(messages[: turn + 1], False).rstrip()
    except Exception as error:
        before, after, reason = "", "", f"it refuses a shortened conversation ({error})"
    else:
        reason = "rendering the conversation up to it gives another text than the whole does"
    if not (before and after.startswith(before) and text.startswith(after)):
        raise TurnNotFoundError(
            f"message {turn} (assistant) of {len(messages)} can't be located in the text that {renderer.name} renders: "
            f"the loop over the messages can't be followed, and {reason}. Pass one with {{% generation %}} blocks "
            "as `chat_template=`."
        )
    return len(before), len(after)


def _normalised_marks(
    renderer: Renderer, messages: Sequence[Message], text: str, generation_prompt: bool
) -> tuple[Span, ...]:
    """A marked template whose loop can't be followed: its marks, up to and including control tokens at their end."""
    trace = renderer.trace(messages, generation_prompt, turns=False)
    if trace is None:
        raise TurnNotFoundError(
            f"{renderer.name} renders another text when its {{% generation %}} blocks are followed. Keep side effects "
            "(assignments that later turns read) out of the blocks."
        )
    spans: list[Span] = []
    for start, end in trace.of(MARK):
        stripped = start + len(text[start:end].rstrip())
        behind = re.compile(_CONTROL).match(text, end)
        if behind and not re.search(rf"(?:{_CONTROL})\Z", text[start:stripped]):
            stripped = behind.end()
        spans.append((start, stripped))
    return _merge(spans)
