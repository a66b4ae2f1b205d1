"""The assistant's spans in the rendered text.

A turn starts with a role header, the text that the generation prompt already provides; the model produces the rest. The
span of a turn is found in the trace of the rendering; without a trace, by rendering the conversation up to the turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchrl_llm_kl.masks._messages import ASSISTANT, Message, TurnNotFoundError
from torchrl_llm_kl.masks._template import BLOCK, LOOP, SET, Renderer, Renderings, Trace, common_prefix_length
from torchrl_llm_kl.masks._tokens import Span

# Pattern of control tokens.
_CONTROL = r"<[^<>\s]+>|\[[^\[\]\s]+\]"
_CONTROL_TOKENS = re.compile(f"(?:{_CONTROL})+")
_BORDER = re.compile(rf"{_CONTROL}|\s|\Z")
# Units of the comparison between a generation prompt and a turn that holds only its beginning.
_UNITS = re.compile(rf"{_CONTROL}|\w+|\s|[^\w\s]")
_FILLER = "\U0010fefe"


def locate_turns(
    renderer: Renderer, messages: Sequence[Message], generation_prompt: bool
) -> tuple[str, tuple[Span, ...], str]:
    """Text, assistant spans and ``located_by`` of a :class:`RenderedConversation`."""
    chat = Renderings(renderer, messages, generation_prompt)
    turns = [i for i, message in enumerate(messages) if message.get("role") == ASSISTANT]
    if not turns:
        return chat.text, (), "no assistant turn"

    trace = _trace_without_prompt(chat)
    spans: list[Span] = []
    traced = False
    for turn in turns:
        written = _written(trace, turn) if trace is not None else None
        if written is None and not chat.template.has_generation_blocks:
            spans.append(_span_between_prefixes(chat, turn))
        elif written is None:
            return chat.text, _spans_of_blocks(chat), "marks"
        elif trace is not None and written[0] < written[1]:
            traced = True
            spans += _spans_of_turn(chat, trace, turn, written)
    located_by = "marks" if chat.template.has_generation_blocks else "trace" if traced else "prefixes"
    return chat.text, _merge(spans), located_by


# ------------------------------------------------------------------ from the trace


def _trace_without_prompt(chat: Renderings) -> Trace | None:
    """The trace of the text without its final generation prompt, which some templates write into the last turn."""
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


def _written(trace: Trace, turn: int) -> Span | None:
    """The span that the template wrote for one message, header and end included; (0, 0) if nothing, None if unknown."""
    spans = trace.of(LOOP, turn) or trace.of(SET, turn)
    outermost = [a for a in spans if not any(b[0] <= a[0] and a[1] <= b[1] and a != b for b in spans)]
    if len(outermost) == 1:
        return outermost[0]
    visited = any(kind == LOOP and index == turn for kind, index, _, _ in trace.spans)
    return (0, 0) if visited and not spans else None


def _spans_of_turn(chat: Renderings, trace: Trace, turn: int, written: Span) -> list[Span]:
    start = written[0] + _header_length(chat, trace, turn, written)
    end = _end_of_turn(chat, trace.text, turn, start, written[1])
    spans = [(start, end)] if start < end else []
    if chat.template.has_generation_blocks:
        spans = _blocks_of_turn(chat, trace, written, start, end)
    return _subtract(spans, _other_messages(trace, chat.messages, turn, written))


def _end_of_turn(chat: Renderings, text: str, turn: int, start: int, end: int) -> int:
    """End of the turn without trailing white space, but with its end token."""
    spoken = text[start:end].rstrip()
    eos = chat.eos_token
    # Some templates write the end token outside of the turn: before the next one, or after the last.
    content = chat.messages[turn].get("content")
    unclosed = isinstance(content, str) and content.rstrip().endswith(spoken.lstrip())
    if eos and unclosed and text.startswith(eos, end):
        return end + len(eos)
    return start + len(spoken)


def _other_messages(trace: Trace, messages: Sequence[Message], turn: int, written: Span) -> list[Span]:
    """Messages of other roles that the template writes inside the turn, such as tool responses."""
    holes: list[Span] = []
    for other, message in enumerate(messages):
        if other == turn or message.get("role") == ASSISTANT:
            continue
        inside = [s for kind in (LOOP, SET) for s in trace.of(kind, other) if written[0] <= s[0] and s[1] <= written[1]]
        own = [s for s in trace.of(LOOP, other) if s not in inside]
        if not own:
            holes += inside
    return holes


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
    """Sorted and disjoint; adjacent spans stay separate, since they are different turns."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        start = max(start, merged[-1][1]) if merged else start
        if start < end:
            merged.append((start, end))
    return tuple(merged)


# ------------------------------------------------------------------ the role header


def _header_length(chat: Renderings, trace: Trace, turn: int, written: Span) -> int:
    """Length of the role header: the part of the turn that the generation prompt already holds."""
    text = trace.text[slice(*written)]
    lead = len(text) - len(text.lstrip())
    # Whether the last message loop writes the turn, directly after another message unless it is the first.
    follows = turn == 0 or any(k == LOOP and i < turn and end == written[0] for k, i, _, end in trace.spans)
    fixed = follows and written[1] <= trace.messages_end
    partial = 0
    for count in filter(None, (turn, len(chat.messages))):
        for prompt in chat.prompts(count, fixed=fixed):
            if not prompt.strip():
                continue
            skip = len(prompt) - len(prompt.lstrip())  # compare with and without leading white space
            candidates = [(0, prompt), (lead, prompt[skip:]), (0, prompt[skip:]), (lead, prompt)]
            whole = [at + len(rest) for at, rest in candidates if text.startswith(rest, at)]
            if whole:
                return max(whole)
            partial = max(partial, *(_end_of_shared_units(text, rest, at) for at, rest in candidates))
        if partial:
            break
    if _content_follows(text, partial, chat.messages[turn]):
        return partial
    constant = _constant_prefix_length(chat, text, turn)
    if partial:
        return partial if constant is None else min(partial, constant)
    if constant is None:
        raise TurnNotFoundError(
            f"message {turn} (assistant): {chat.renderer.name} shows no generation prompt at its start, so its header "
            "cannot be told from the model's output. Pass a template with {% generation %} blocks as `chat_template=`."
        )
    return constant


def _end_of_shared_units(text: str, prompt: str, at: int) -> int:
    """End of the longest run of whole units that the turn shares with the generation prompt from ``at`` on, or 0."""
    start = at
    for unit in _UNITS.findall(prompt):
        if not text.startswith(unit, at):
            break
        at += len(unit)
    return at if text[start:at].strip() else 0


def _content_follows(text: str, start: int, message: Message) -> bool:
    """Whether the turn shows its content unchanged from ``start`` on: the header then ends there.

    False if in doubt: content that occurs twice in the turn, or that may be a control token.
    """
    content = message.get("content")
    if not isinstance(content, str) or content.lstrip()[:1] in ("", "<", "["):
        return False
    at = text.find(content)
    if not start <= at == text.rfind(content) or not _BORDER.match(text, at + len(content)):
        return False
    return not text[start:at].strip() or (start > 0 and message.keys() <= {"role", "content"})


def _constant_prefix_length(chat: Renderings, text: str, turn: int) -> int | None:
    """Length of the text that the template writes for the turn before any content; None if it cannot be determined."""
    content = chat.messages[turn].get("content")
    filler: Any = [{"type": "text", "text": _FILLER}] if isinstance(content, (list, tuple)) else _FILLER
    shortened = [*chat.messages[:turn], {"role": ASSISTANT, "content": filler}]
    try:
        trace = Renderings(chat.renderer, shortened, False).trace(turn + 1, False)
    except Exception:  # the template rejects the shortened conversation
        return None
    written = _written(trace, turn) if trace is not None else None
    if trace is None or written is None or _FILLER not in trace.text[slice(*written)]:
        return None
    shared = common_prefix_length(text, trace.text[slice(*written)])
    return shared if text[:shared].strip() else 0


# ------------------------------------------------------------------ generation blocks


def _blocks_of_turn(chat: Renderings, trace: Trace, written: Span, start: int, end: int) -> list[Span]:
    """The template's generation blocks in a turn, without header and trailing white space, with the end token."""
    blocks = [(max(a, start), min(b, end)) for a, b in trace.of(BLOCK) if written[0] <= a and b <= max(written[1], end)]
    blocks = [(a, b) for a, b in blocks if a <= b]
    if blocks:
        first, last = blocks[-1]
        rest = trace.text[last:end].strip()
        # Control tokens between the answer and the end of the turn: the end token.
        if _CONTROL_TOKENS.fullmatch(rest) or rest == chat.eos_token:
            blocks[-1] = (first, end)
    joined: list[Span] = []
    for a, b in blocks:
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        elif a < b:
            joined.append((a, b))
    return joined


def _spans_of_blocks(chat: Renderings) -> tuple[Span, ...]:
    """All generation blocks, each including a control token after it, for a template whose messages cannot be traced."""
    text = chat.text
    trace = chat.renderer.trace(chat.messages, chat.generation_prompt, text, mark_messages=False)
    if trace is None:
        raise TurnNotFoundError(
            f"{chat.renderer.name} renders another text when its {{% generation %}} blocks are traced. Keep side effects "
            "(assignments that later turns read) out of the blocks."
        )
    spans: list[Span] = []
    for start, end in trace.of(BLOCK):
        stripped = start + len(text[start:end].rstrip())
        after = re.compile(_CONTROL).match(text, end)
        if after and not re.search(rf"(?:{_CONTROL})\Z", text[start:stripped]):
            stripped = after.end()
        spans.append((start, stripped))
    return _merge(spans)


# ------------------------------------------------------------------ without a trace


def _span_between_prefixes(chat: Renderings, turn: int) -> Span:
    """The turn between two renderings: of the messages before it with a generation prompt, and up to its end."""
    try:
        before = chat.plain(turn, True)
        after = chat.plain(turn + 1, False).rstrip()
    except Exception as error:
        before, after, reason = "", "", f"it rejects a shortened conversation ({error})"
    else:
        reason = "rendering the conversation up to it yields another text than rendering it whole"
    if not (before and after.startswith(before) and chat.text.startswith(after)):
        raise TurnNotFoundError(
            f"message {turn} (assistant) of {len(chat.messages)} cannot be located in the text that {chat.renderer.name} "
            f"renders: its loop over the messages cannot be followed, and {reason}. Pass one with {{% generation %}} "
            "blocks as `chat_template=`."
        )
    return len(before), len(after)
