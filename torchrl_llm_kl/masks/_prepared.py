"""Messages in the form that a chat template reads.

Frameworks store the arguments of a call as a dict or as JSON text, and a content as text or as a list of parts. Most templates
read only one of the forms, and write the other one wrongly without an error. A short conversation shows which form it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal

from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.masks._messages import Message, Tokenizer
from torchrl_llm_kl.masks._template import Renderer


def prepare_messages(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[object] | None = None, **template_kwargs: Any
) -> list[Message]:
    """:func:`prepared` for the tokenizer's template, or for ``chat_template`` in ``template_kwargs``."""
    template = template_kwargs.pop("chat_template", None)
    return prepared(Renderer(tokenizer, template, tools, template_kwargs), messages)


def prepared(renderer: Renderer, messages: Sequence[Message]) -> list[Message]:
    """Messages in the form that the template reads.

    Arguments of calls become a dict, or JSON text if the template needs it. Lists of text parts are joined if the template
    reads text, and text becomes a part if it reads only parts. An empty list of calls is removed.
    """
    return [_prepared(renderer, message) for message in messages]


def _prepared(renderer: Renderer, message: Message) -> Message:
    content, calls = message.get("content"), message.get("tool_calls")
    out = dict(message)
    if isinstance(content, (list, tuple)) and all(map(_is_text, content)) and _probe(renderer, "text"):
        out["content"] = "".join(part["text"] for part in content)
    elif isinstance(content, str) and content and not _probe(renderer, "text") and _probe(renderer, "parts"):
        out["content"] = [{"type": "text", "text": content}]
    if isinstance(calls, (list, tuple)) and calls:
        as_json = not _probe(renderer, "dict") and _probe(renderer, "json")
        out["tool_calls"] = [_with_arguments(call, as_json=as_json) for call in calls]
    elif calls is not None and not calls:
        del out["tool_calls"]
    return out


#: Texts that no template contains.
_NAME, _VALUE = "k7351", "v7351"


def _probe(renderer: Renderer, form: Literal["text", "parts", "dict", "json"]) -> bool:
    """Whether the template writes a content that is text, or arguments of a call in one form."""
    known = _probes(renderer.identity)
    if form not in known:
        known[form] = any(_writes(renderer, form, messages) for messages in _probe_messages(form))
    return known[form]


@lru_cache(maxsize=256)
def _probes(template: tuple[str, str]) -> dict[str, bool]:
    """A cache of the probes of one template with one set of variables."""
    return {}


def _probe_messages(form: str) -> Iterator[list[Message]]:
    if form in ("text", "parts"):
        yield [{"role": "user", "content": _VALUE if form == "text" else [{"type": "text", "text": _VALUE}]}]
        return
    arguments = {_NAME: _VALUE}
    call = call_message(0, "f", json.dumps(arguments) if form == "json" else arguments)
    asked: list[Message] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    yield asked
    yield [*asked, {"role": "tool", "tool_call_id": call["id"], "name": "f", "content": "?"}]


def _writes(renderer: Renderer, form: str, messages: Sequence[Message]) -> bool:
    try:
        text = renderer.text(messages, False)
    except Exception:  # a template can raise any error
        return False
    quoted_twice, python = f'\\"{_NAME}', f"'{_NAME}'"
    return (_VALUE if form in ("text", "parts") else _NAME) in text and quoted_twice not in text and python not in text


def call_message(index: int, name: str, arguments: object) -> Json:
    """A call in the format of a message, which chat templates read."""
    return {"id": call_id(index), "type": "function", "function": {"name": name, "arguments": arguments}}


def call_id(index: int) -> str:
    """The id of a call by its place among the calls of a message."""
    return f"call{index:05d}"  # Mistral's templates demand nine characters


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _with_arguments(call: object, *, as_json: bool) -> object:
    """A call whose arguments are JSON text or a dict. A call of another kind is returned unchanged."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"], as_json=as_json)}
    arguments = call.get("arguments")
    if as_json and isinstance(arguments, Mapping):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    if not as_json and isinstance(arguments, str):
        with suppress(ValueError):
            parsed = json.loads(arguments)
            return {**call, "arguments": parsed} if isinstance(parsed, dict) else call
    return call
