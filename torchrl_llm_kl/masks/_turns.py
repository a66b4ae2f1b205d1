"""Where in the rendered text the assistant speaks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchrl_llm_kl.masks._errors import TurnNotFoundError
from torchrl_llm_kl.masks._render import Conversation, Message, Renderer, common_prefix_length
from torchrl_llm_kl.masks._trace import LOOP, MARK, SET, Span, Trace

__all__: list[str] = []

ASSISTANT = "assistant"

# The shapes of control tokens; one or more of them, and nothing else, may stand between an answer and the next turn.
_CONTROL = r"<[^<>\s]+>|\[[^\[\]\s]+\]"
_CONTROL_TOKENS = re.compile(f"(?:{_CONTROL})+")
_BORDER = re.compile(rf"{_CONTROL}|\s|\Z")
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
    chat = Conversation(renderer, messages, generation_prompt)
    turns = [i for i, message in enumerate(messages) if message.get("role") == ASSISTANT]
    if not turns:
        return Turns(chat.whole, (), "no assistant turn")

    trace = _trace_without_prompt(chat)
    spans: list[Span] = []
    traced = False
    for turn in turns:
        region = _region(trace, turn) if trace is not None else None
        if region is None and not renderer.has_marks:
            spans.append(_span_between_prefixes(chat, turn))
        elif region is None:
            return Turns(chat.whole, _normalised_marks(chat), "marks")
        elif trace is not None and region[0] < region[1]:
            traced = True
            spans += _spans_in_region(chat, trace, turn, region)
    located_by = "marks" if renderer.has_marks else "trace" if traced else "prefixes"
    return Turns(chat.whole, _merge(spans), located_by)


def _trace_without_prompt(chat: Conversation) -> Trace | None:
    """The trace of the text without its last generation prompt, which some templates write into the last turn."""
    asking = None if chat.renderer.loop_asks else chat.asking
    if asking is not None:
        eos = _eos(chat)
        # An end token behind the last turn is not the turn's if it comes with the prompt alone.
        if not (chat.asks and eos and asking.text.startswith(eos, asking.last_border)):
            return replace(asking, text=chat.whole)
    trace = chat.trace(len(chat.messages), False)
    if chat.asks and (trace is None or not chat.whole.startswith(trace.text)):
        return chat.trace(len(chat.messages), True)
    return trace


def _eos(chat: Conversation) -> str | None:
    return getattr(chat.renderer.tokenizer, "eos_token", None)


def _region(trace: Trace, turn: int) -> Span | None:
    """All that the template wrote for one message: header, what was said, what follows. Empty if it wrote nothing."""
    written = trace.of(LOOP, turn) or trace.of(SET, turn)
    outermost = [a for a in written if not any(b[0] <= a[0] and a[1] <= b[1] and a != b for b in written)]
    if len(outermost) == 1:
        return outermost[0]
    visited = any(kind == LOOP and index == turn for kind, index, _, _ in trace.spans)
    return (0, 0) if visited and not written else None


def _spans_in_region(chat: Conversation, trace: Trace, turn: int, region: Span) -> list[Span]:
    start = region[0] + _header_length(chat, trace, turn, region)
    end = _end_of_turn(chat, trace.text, turn, start, region[1])
    spans = [(start, end)] if start < end else []
    if chat.renderer.has_marks:
        spans = _clip_marks(chat, trace, region, start, end)
    return _subtract(spans, _foreign(trace, chat.messages, turn, region))


def _header_length(chat: Conversation, trace: Trace, turn: int, span: Span) -> int:
    """Length of the role header: the part of the turn that the generation prompt already holds."""
    region = trace.text[slice(*span)]
    lead = len(region) - len(region.lstrip())
    fixed = _is_of_the_last_loop(trace, turn, span)
    partial = 0
    for count in filter(None, (turn, len(chat.messages))):
        for prompt in chat.prompts(count, fixed=fixed):
            if not prompt.strip():
                continue
            candidates = [(at, prompt[skip:]) for at, skip in _alignments(region, prompt, lead)]
            whole = [at + len(rest) for at, rest in candidates if region.startswith(rest, at)]
            if whole:
                return max(whole)
            partial = max(partial, *(_shared_units(region, rest, at) for at, rest in candidates))
        if partial:
            break
    if _content_follows(region, partial, chat.messages[turn]):
        return partial
    constant = _constant_start(chat, region, turn)
    if partial:
        return partial if constant is None else min(partial, constant)
    if constant is None:
        raise TurnNotFoundError(
            f"message {turn} (assistant): {chat.renderer.name} shows no generation prompt at its start, so its header "
            "can't be told from what the model produced. Pass a template with {% generation %} blocks as "
            "`chat_template=`."
        )
    return constant


def _is_of_the_last_loop(trace: Trace, turn: int, span: Span) -> bool:
    """Whether the turn is written by the loop that ends the conversation, behind another message if one comes before."""
    follows = turn == 0 or any(k == LOOP and i < turn and end == span[0] for k, i, _, end in trace.spans)
    return follows and span[1] <= trace.last_border


def _content_follows(region: str, start: int, message: Message) -> bool:
    """Whether the turn shows its content unchanged from ``start`` on: no header then ends later, or goes on into it.

    Where that can't be told (content that the turn holds twice, or that may be a control token) the answer is no.
    """
    content = message.get("content")
    if not isinstance(content, str) or content.lstrip()[:1] in ("", "<", "["):
        return False
    at = region.find(content)
    if not start <= at == region.rfind(content) or not _BORDER.match(region, at + len(content)):
        return False
    return not region[start:at].strip() or (start > 0 and message.keys() <= {"role", "content"})


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


def _constant_start(chat: Conversation, region: str, turn: int) -> int | None:
    """Length of what the template writes for the turn before any content, None if it can't be seen."""
    content = chat.messages[turn].get("content")
    filler: Any = [{"type": "text", "text": _FILLER}] if isinstance(content, (list, tuple)) else _FILLER
    shortened = [*chat.messages[:turn], {"role": ASSISTANT, "content": filler}]
    try:
        trace = Conversation(chat.renderer, shortened, False).trace(turn + 1, False)
    except Exception:  # the template refuses the shortened conversation, in its own words
        return None
    other = _region(trace, turn) if trace is not None else None
    if trace is None or other is None or _FILLER not in trace.text[slice(*other)]:
        return None
    shared = common_prefix_length(region, trace.text[slice(*other)])
    return shared if region[:shared].strip() else 0


def _end_of_turn(chat: Conversation, text: str, turn: int, start: int, end: int) -> int:
    """End of the last thing written for the turn, without the white space behind it."""
    spoken = text[start:end].rstrip()
    eos = _eos(chat)
    # Some templates close the turn outside of it: before the next one, or after the last.
    content = chat.messages[turn].get("content")
    unclosed = isinstance(content, str) and content.rstrip().endswith(spoken.lstrip())
    if eos and unclosed and text.startswith(eos, end):
        return end + len(eos)
    return start + len(spoken)


def _clip_marks(chat: Conversation, trace: Trace, region: Span, start: int, end: int) -> list[Span]:
    """The template's own marks in one turn: without header and trailing white space, with the end-of-turn token."""
    marks = [(max(a, start), min(b, end)) for a, b in trace.of(MARK) if region[0] <= a and b <= max(region[1], end)]
    marks = [(a, b) for a, b in marks if a <= b]
    if marks:
        first, last = marks[-1]
        rest = trace.text[last:end].strip()
        if _CONTROL_TOKENS.fullmatch(rest) or rest == _eos(chat):
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


def _span_between_prefixes(chat: Conversation, turn: int) -> Span:
    """Fallback without a trace: the turn lies between the prompt for it and the conversation that ends with it."""
    try:
        before = chat.text(turn, True)
        after = chat.text(turn + 1, False).rstrip()
    except Exception as error:
        before, after, reason = "", "", f"it refuses a shortened conversation ({error})"
    else:
        reason = "rendering the conversation up to it gives another text than the whole does"
    if not (before and after.startswith(before) and chat.whole.startswith(after)):
        raise TurnNotFoundError(
            f"message {turn} (assistant) of {len(chat.messages)} can't be located in the text that {chat.renderer.name} "
            f"renders: the loop over the messages can't be followed, and {reason}. Pass one with {{% generation %}} "
            "blocks as `chat_template=`."
        )
    return len(before), len(after)


def _normalised_marks(chat: Conversation) -> tuple[Span, ...]:
    """A marked template whose loop can't be followed: its marks, up to and including control tokens at their end."""
    text = chat.whole
    trace = chat.renderer.trace(chat.messages, chat.asks, text, turns=False)
    if trace is None:
        raise TurnNotFoundError(
            f"{chat.renderer.name} renders another text when its {{% generation %}} blocks are followed. Keep side effects "
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
