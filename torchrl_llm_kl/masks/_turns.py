"""The assistant's spans in the rendered text.

A turn starts with a role header, which the generation prompt already provides. The model produces the rest. The trace of the
rendering proposes the span of a turn. Renderings of the conversation up to the turn confirm or correct the span, or locate a
turn that cannot be traced. A span that they contradict raises an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from torchrl_llm_kl.masks._lost import LostText, lost_texts
from torchrl_llm_kl.masks._messages import ASSISTANT, Message, TurnNotFoundError
from torchrl_llm_kl.masks._prefixes import (
    CONTROL,
    check_gaps,
    end_of_prompt,
    end_of_shared_units,
    end_of_turn,
    has_only_header,
    headers_of,
    holds,
    is_omitted,
    not_found,
    own_gaps,
    prompt_is_fixed,
    start_of_turn,
)
from torchrl_llm_kl.masks._template import (
    BLOCK,
    FILLER,
    LOOP,
    SET,
    SPOKEN,
    Renderer,
    Renderings,
    Trace,
    common_prefix_length,
    core_of,
)
from torchrl_llm_kl.masks._tokens import Span

_CONTROL_TOKENS = re.compile(f"(?:{CONTROL})+")
_BORDER = re.compile(rf"{CONTROL}|\s|\Z")


class LocatedTurns(NamedTuple):
    """The spans of the assistant's turns in ``text``, sorted and disjoint, the message of each span, and the method."""

    text: str
    spans: tuple[Span, ...]
    messages: tuple[int, ...]
    located_by: str
    lost: tuple[LostText, ...] = ()

    @classmethod
    def of(cls, chat: Renderings, whole: Trace, owned: Sequence[tuple[int, int, int]], located_by: str) -> LocatedTurns:
        """Merge spans of messages ``(start, end, message)``. ``whole`` is the trace of the text."""
        merged = _merge(owned)
        spans, messages = tuple((a, b) for a, b, _ in merged), tuple(message for _, _, message in merged)
        return cls(chat.text, spans, messages, located_by, lost_texts(chat, whole, spans, messages))


def locate_turns(renderer: Renderer, messages: Sequence[Message], generation_prompt: bool) -> LocatedTurns:
    """Locate the assistant's turns."""
    chat = Renderings(renderer, messages, generation_prompt)
    turns = [i for i, message in enumerate(messages) if message.get("role") == ASSISTANT]
    if not turns:
        return LocatedTurns.of(chat, Trace(chat.text, (), 0), (), "no assistant turn")
    if (only_contents := _contents(chat)) is not None:
        return only_contents

    trace = _trace_without_prompt(chat)
    whole = trace or chat.trace(len(messages), generation_prompt) or Trace(chat.text, (), 0)
    whole = replace(whole, text=chat.text)
    spans: list[tuple[int, int, int]] = []
    traced, ended = False, 0
    for turn in turns:
        written = _span_of(trace, turn) if trace is not None else None
        regions: list[Span] = []
        if trace is not None and written:
            try:
                regions = _traced_regions(chat, trace, turn, written)
            except TurnNotFoundError:
                pass  # renderings of prefixes may still show the header
            else:
                if not regions and has_only_header(chat, trace, turn, written):
                    continue
        traced = traced or bool(regions)
        if regions or not is_omitted(chat, whole, turn):
            try:
                regions = _confirmed(chat, whole, turn, regions)
            except TurnNotFoundError:
                if chat.template.has_generation_blocks:
                    return LocatedTurns.of(chat, whole, _spans_of_blocks(chat, whole, turn), "marks")
                raise
            if regions and regions[0][0] < ended:
                raise not_found(chat, turn, "it would begin before an earlier turn ends")
            ended = regions[-1][1] if regions else ended
            own = _blocks_in(chat, whole, turn, regions) if chat.template.has_generation_blocks else regions
            spans += [(start, end, turn) for start, end in own]
    located_by = "marks" if chat.template.has_generation_blocks else "trace" if traced else "prefixes"
    return LocatedTurns.of(chat, whole, spans, located_by)


def _contents(chat: Renderings) -> LocatedTurns | None:
    """The turns of a text that is only the contents of its messages, after BOS at most. None for any other text.

    Such a text has no headers and no end tokens, so a turn keeps the white space at its edges.
    """
    plain = [m["content"] for m in chat.messages if m.keys() == {"role", "content"}]
    contents = [content for content in plain if isinstance(content, str)]
    if len(contents) < len(chat.messages):
        return None
    before = chat.text.removesuffix("".join(contents))
    borders = list(accumulate(map(len, contents), initial=len(before)))
    if before not in ("", chat.bos_token) or borders[-1] != len(chat.text):
        return None
    turns = [i for i, m in enumerate(chat.messages) if m["role"] == ASSISTANT and contents[i]]
    spans = [(borders[i], borders[i + 1]) for i in turns]
    blocks = chat.trace(len(chat.messages), chat.generation_prompt) if chat.template.has_generation_blocks else None
    if blocks is not None and [span for span in blocks.of[BLOCK, -1] if span[0] < span[1]] != spans:
        return None
    return LocatedTurns(chat.text, tuple(spans), tuple(turns), "contents")


def _traced_regions(chat: Renderings, trace: Trace, turn: int, written: Span) -> list[Span]:
    """The regions of a turn according to the trace, without messages of other roles that the template writes inside it."""
    if written[0] == written[1]:
        return []
    start = written[0] + _header_length(chat, trace, turn, written)
    end = _end_of_turn(chat, trace.text, turn, start, written[1])
    return _subtract([(start, end)] if start < end else [], _other_messages(trace, chat.messages, turn, written))


# ------------------------------------------------------------------ confirmation


_MAX_KNOWN = 4096  # borders per template, a few MB


@lru_cache(maxsize=64)
def _known_borders(template: tuple[str, str]) -> dict[object, tuple[int, int, bool]]:
    """A cache of confirmed borders for one template and one set of variables, keyed by the text around the message's strings.

    It makes the number of renderings independent of the number of turns. The last entry of a value states whether the start
    holds for every turn with that text, regardless of the contents.
    """
    return {}


def _confirmed(chat: Renderings, whole: Trace, turn: int, regions: list[Span]) -> list[Span]:
    """Render the conversation up to a turn to confirm the turn's regions, or to locate the turn if it has none."""
    text = whole.text
    traced = (regions[0][0], regions[-1][1]) if regions else (None, None)
    own, low, high = _surroundings(whole, turn, regions)
    first, last = (own[0], own[-1]) if own else (low, low)
    roles = tuple(m.get("role") for m in chat.messages[max(turn - 1, 0) : turn + 2])
    offsets = (regions[0][0] - first, regions[-1][1] - last) if regions else None
    gaps = own_gaps(whole, turn, first, last)
    key = (turn == 0, roles, gaps, chat.generation_prompt, bool(own), offsets, text[low:first], text[last:high])
    borders = _known_borders(chat.renderer.identity)
    known = borders.get(key) if len(regions) < 2 else None  # interrupted turns are not cached
    if known and known[2]:
        start = first + known[0]
    else:
        content = _start_of_content(chat, text, turn, first) if own else traced[1] or 0
        start = start_of_turn(chat, whole, turn, low, content, traced[0])
        start = end_of_prompt(chat, whole, turn, start)
    if len(regions) > 1:
        regions = _with_stop_tokens(chat, text, turn, [(start, regions[0][1]), *regions[1:]])
    elif known and first + known[0] == start:
        regions = [(start, last + known[1])]
    else:
        regions = [(start, end_of_turn(chat, whole, turn, start, last if own else start, traced[1]))]
    if not known:
        for start, end in regions:
            if end < start:
                raise not_found(chat, turn, "it would end before it starts")
            check_gaps(chat, whole, turn, start, end)
        if len(regions) == 1:
            if len(borders) >= _MAX_KNOWN:
                borders.clear()
            borders[key] = (start - first, end - last, prompt_is_fixed(chat, turn))
    _check_contents(chat, whole, turn, regions)
    return [(start, end) for start, end in regions if start < end]


def _surroundings(whole: Trace, turn: int, regions: list[Span]) -> tuple[list[int], int, int]:
    """The positions of the turn's marks, of the last mark before the turn, and of the first mark after it."""
    marks = whole.marks
    if regions:
        low, high = regions[0][0], regions[-1][1]
        own = [p for p, _ in whole.marks_of[turn] if low <= p <= high]
        return own, *whole.marks_around(own[0] if own else low, own[-1] if own else high, turn)
    own = []
    for position, mark in marks:
        if mark.message == turn:
            own.append(position)
        elif own:
            break
    before = [p for p, mark in marks if mark.message < turn and (not own or p <= own[0])]
    low = max(before, default=0)
    after = [p for p, mark in marks if mark.message > turn and p >= (own[-1] if own else low)]
    return own, low, min(after, default=len(whole.text))


def _start_of_content(chat: Renderings, text: str, turn: int, mark: int) -> int:
    """The position of a turn's first string. Its mark comes after the leading tags of the string."""
    values = (chat.messages[turn].get(field) for field in SPOKEN)
    tags = [value[: core_of(value)[0]].lstrip() for value in values if isinstance(value, str)]
    return mark - max((len(tag) for tag in tags if text.endswith(tag, 0, mark)), default=0)


def _with_stop_tokens(chat: Renderings, text: str, turn: int, regions: list[Span]) -> list[Span]:
    """Extend each region that another message interrupts by the control token that stops the model there."""
    upto = chat.prefix(turn + 1, False)
    stop = re.search(rf"(?:{CONTROL})\Z", upto.text.rstrip()) if upto else None
    *interrupted, final = regions
    if stop is None:
        return regions
    return [(a, b + len(stop[0]) if text.startswith(stop[0], b) else b) for a, b in interrupted] + [final]


def _check_contents(chat: Renderings, whole: Trace, turn: int, regions: list[Span]) -> None:
    """Raise if content of a message is on the wrong side of a border."""
    for position, mark in whole.marks_of[turn]:
        if mark.spoken and not any(a <= position <= b for a, b in regions):
            raise not_found(chat, turn, "the template writes a part of it elsewhere")
    for a, b in regions:
        for position, mark in whole.marks_in(a, b):
            inside = a < position < b or (a < b and position == (b if mark.is_end else a))
            if inside and mark.message != turn:
                raise not_found(chat, turn, f"it contains text of message {mark.message}")


# ------------------------------------------------------------------ from the trace


def _trace_without_prompt(chat: Renderings) -> Trace | None:
    """The trace of the text without its final generation prompt. Some templates write the prompt into the last turn."""
    prompted = None if chat.template.loop_reads_flag else chat.prompted
    if prompted is not None:
        # An end token after the last turn is not part of the turn if only the generation prompt adds it.
        eos = chat.eos_token
        if not (chat.generation_prompt and eos and prompted.text.startswith(eos, prompted.messages_end)):
            return replace(prompted, text=chat.text)
    trace = chat.trace(len(chat.messages), False)
    if chat.generation_prompt and (trace is None or not chat.text.startswith(trace.text)):
        return chat.trace(len(chat.messages), True)
    return trace


def _span_of(trace: Trace, turn: int) -> Span | None:
    """The span that the template wrote for a message, including header and end. (0, 0) if empty, None if unknown."""
    spans = trace.of[LOOP, turn] or trace.of[SET, turn]
    # A nested loop over the same message writes only a part of the span.
    outermost = [a for a in spans if not any(b[0] <= a[0] and a[1] <= b[1] and a != b for b in spans)]
    if len(outermost) == 1:
        return outermost[0]
    visited = any(kind == LOOP and index == turn for kind, index, _, _ in trace.spans)
    return (0, 0) if visited and not spans else None


def _end_of_turn(chat: Renderings, text: str, turn: int, start: int, end: int) -> int:
    """The end of the turn, after its end token and without trailing white space."""
    spoken = text[start:end].rstrip()
    eos = chat.eos_token
    # Some templates write the end token outside the turn: before the next turn, or after the last one.
    content = chat.messages[turn].get("content")
    unclosed = isinstance(content, str) and content.rstrip().endswith(spoken.lstrip())
    if eos and unclosed and text.startswith(eos, end):
        return end + len(eos)
    return start + len(spoken)


def _other_messages(trace: Trace, messages: Sequence[Message], turn: int, written: Span) -> list[Span]:
    """The spans of messages of other roles inside the turn, such as tool responses."""
    holes: list[Span] = []
    for other in sorted(trace.inside(written) - {turn}):
        if messages[other].get("role") == ASSISTANT:
            continue
        inside = [s for kind in (LOOP, SET) for s in trace.of[kind, other] if written[0] <= s[0] and s[1] <= written[1]]
        own = [s for s in trace.of[LOOP, other] if s not in inside]
        if not own:
            holes += inside
    return holes


def _subtract(spans: list[Span], holes: list[Span]) -> list[Span]:
    """The parts of the spans outside the holes."""
    for low, high in holes:
        spans = [
            piece
            for start, end in spans
            for piece in ((start, min(end, low)), (max(start, high), end))
            if piece[0] < piece[1]
        ]
    return sorted(set(spans))


def _merge(spans: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Sort spans of messages and make them disjoint. Adjacent spans stay separate, since they are different turns."""
    merged: list[tuple[int, int, int]] = []
    for start, end, message in sorted(spans):
        start = max(start, merged[-1][1]) if merged else start
        if start < end:
            merged.append((start, end, message))
    return merged


# ------------------------------------------------------------------ the role header


def _header_length(chat: Renderings, trace: Trace, turn: int, written: Span) -> int:
    """The length of the role header, which is the part of the turn that the generation prompt already contains."""
    text = trace.text[slice(*written)]
    lead = len(text) - len(text.lstrip())
    # Whether the last message loop writes the turn, and directly after another message unless it is the first.
    follows = turn == 0 or trace.first_ending_at(written[0], turn) < turn
    fixed = follows and written[1] <= trace.messages_end
    partial = 0
    # The prompt before the turn comes first. Without it, the prompt after the conversation is tried.
    for count in filter(None, (turn, len(chat.messages))):
        for prompt in chat.prompts(count, fixed=fixed):
            if not prompt.strip():
                continue
            skip = len(prompt) - len(prompt.lstrip())  # templates may trim white space, so both forms are tried
            candidates = [(0, prompt), (lead, prompt[skip:]), (0, prompt[skip:]), (lead, prompt)]
            whole = [at + len(rest) for at, rest in candidates if text.startswith(rest, at)]
            if whole:
                return max(whole)
            partial = max(partial, *(_visible_end(text, rest, at) for at, rest in candidates))
        if partial:
            break
    if _content_follows(text, partial, chat.messages[turn]):
        return partial
    constant = _constant_prefix_length(chat, text, turn)
    if partial:
        return partial if constant is None else min(partial, constant)
    if constant is None:
        raise not_found(chat, turn, "it does not begin with a generation prompt")
    return constant


def _visible_end(text: str, prompt: str, at: int) -> int:
    """The end of the units that the turn shares with the prompt from ``at`` on, or 0 if they contain no header."""
    end = end_of_shared_units(text, prompt, at)
    return end if text[at:end].strip() and holds(text[at:end], headers_of([prompt])) else 0


def _content_follows(text: str, start: int, message: Message) -> bool:
    """Whether the content is unchanged in the turn from ``start`` on, so that the header ends there.

    Returns False in doubt: if the content occurs twice in the turn, or may be a control token.
    """
    content = message.get("content")
    if not isinstance(content, str) or content.lstrip()[:1] in ("", "<", "["):
        return False
    at = text.find(content)
    if not start <= at == text.rfind(content) or not _BORDER.match(text, at + len(content)):
        return False
    return not text[start:at].strip() or (start > 0 and message.keys() <= {"role", "content"})


def _constant_prefix_length(chat: Renderings, text: str, turn: int) -> int | None:
    """The length of the text that the template writes before any content of the turn. None if it cannot be determined."""
    trace = chat.prefix(turn, False, ASSISTANT)
    written = _span_of(trace, turn) if trace is not None else None
    if trace is None or written is None or FILLER not in trace.text[slice(*written)]:
        return None
    shared = common_prefix_length(text, trace.text[slice(*written)])
    return shared if text[:shared].strip() else 0


# ------------------------------------------------------------------ generation blocks


def _blocks_in(chat: Renderings, whole: Trace, turn: int, regions: list[Span]) -> list[Span]:
    """The template's generation blocks in a turn, with the end token and without header and trailing white space."""
    joined: list[Span] = []
    for start, end in regions:
        blocks = [(max(a, start), min(b, end)) for a, b in whole.of[BLOCK, -1] if a < end and (b > start or a == start)]
        if blocks:
            first, last = blocks[-1]
            rest = whole.text[last:end].strip()
            # A control token between the answer and the end of the turn is the end token.
            if _CONTROL_TOKENS.fullmatch(rest) or rest == chat.eos_token:
                blocks[-1] = (first, end)
            elif _CONTROL_TOKENS.fullmatch("".join(rest.split())):
                raise not_found(chat, turn, f"its end token may be any of {rest!r}")
        for a, b in blocks:
            if joined and joined[-1][1] == a:
                joined[-1] = (joined[-1][0], b)
            elif a < b:
                joined.append((a, b))
    return joined


def _spans_of_blocks(chat: Renderings, whole: Trace, turn: int) -> list[tuple[int, int, int]]:
    """All generation blocks with the control token after each. For a template whose messages cannot be located."""
    text = whole.text
    if not whole.spans:
        raise not_found(
            chat, turn, "its {% generation %} blocks change the text when traced: move {% set %} out of them"
        )
    spans: list[tuple[int, int, int]] = []
    for start, end in whole.of[BLOCK, -1]:
        stripped = start + len(text[start:end].rstrip())
        inside = [(p, mark.message) for p, mark in whole.marks if start <= p <= end]
        start = end_of_prompt(chat, whole, inside[0][1] if inside else turn, start)
        after = re.compile(CONTROL).match(text, end)
        if after and not re.search(rf"(?:{CONTROL})\Z", text[max([start, *(p for p, _ in inside)]) : stripped]):
            if after[0] != chat.eos_token:
                raise not_found(chat, turn, f"{after[0]!r} after its generation block may be a header or its end token")
            stripped = after.end()
        held = {mark.message for p, mark in whole.marks if start < p < stripped}
        if any(chat.messages[message].get("role") != ASSISTANT for message in held):
            raise not_found(chat, turn, "its {% generation %} blocks contain text of other messages")
        for message in held or {turn}:
            check_gaps(chat, whole, message, start, stripped)
        spans.append((start, stripped, min(held or {turn})))
    return spans
