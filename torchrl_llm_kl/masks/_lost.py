"""Texts of messages that a chat template does not write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torchrl_llm_kl.masks._messages import ASSISTANT
from torchrl_llm_kl.masks._template import SPOKEN, Marking, Renderings, Trace, core_of, mark_strings
from torchrl_llm_kl.masks._tokens import Span

#: The end of reasoning in many templates.
_END_OF_THOUGHT = "</think>"


class LostText(NamedTuple):
    """A text of a message that the template does not write, or changes.

    Args:
        message: the number of the message.
        field: ``"content"``, ``"reasoning"`` or ``"tool_calls"``.
        problem: the problem in words, which continues "the template ...".
    """

    message: int
    field: str
    problem: str


def lost_texts(chat: Renderings, trace: Trace, spans: Sequence[Span], owners: Sequence[int]) -> tuple[LostText, ...]:
    """The texts of a conversation that its rendering does not contain, by message and field.

    The marks at the edges of a string show whether the template writes it. A field without marks, in a template whose text
    would change by them, counts as written if the text contains its strings.
    """
    marking = Marking((), (), False) if trace.marking is None else trace.marking
    lost: dict[tuple[int, str], str] = {}
    for index, message in enumerate(chat.messages):
        fields: list[str] = []
        mark_strings(message, index, "", marking, fields)
        edges = {(mark.string, mark.is_end) for _, mark in trace.marks_of[index]}
        for string, field in enumerate(fields):
            if (string, True) not in edges:
                lost[index, _kind(field)] = "does not write"
            elif marking.both_edges and (string, False) not in edges:
                lost[index, _kind(field)] = "writes only a part of"
        for field in (*SPOKEN, "tool_calls"):
            if field not in marking.fields and any(text not in chat.text for text in _strings(message.get(field))):
                lost[index, _kind(field)] = "does not write"
    out = [
        LostText(index, field, f"{problem} the {field.replace('_', ' ')}") for (index, field), problem in lost.items()
    ]
    return (*out, *_second_thoughts(chat, spans, owners))


def _second_thoughts(chat: Renderings, spans: Sequence[Span], owners: Sequence[int]) -> list[LostText]:
    """Answers with the end of their reasoning inside the content, to which the template adds another one."""
    out = []
    for (start, end), owner in zip(spans, owners, strict=True):
        message = chat.messages[owner]
        own = "".join(_strings(message.get("content"))).count(_END_OF_THOUGHT)
        if message.get("role") == ASSISTANT and own and chat.text.count(_END_OF_THOUGHT, start, end) > own:
            out.append(LostText(owner, "reasoning", f"adds a second {_END_OF_THOUGHT} to the content"))
    return out


def _kind(field: str) -> str:
    return field if field in ("content", "tool_calls") else "reasoning"


def _strings(value: object) -> list[str]:
    """The texts of a field without white space and tags at their edges."""
    if isinstance(value, str):
        start, end = core_of(value)
        return [value[start:end]] if start < end else []
    if isinstance(value, dict):
        return [text for key, item in value.items() if key not in ("id", "type") for text in _strings(item)]
    return [text for item in value for text in _strings(item)] if isinstance(value, (list, tuple)) else []
