"""Tools that a policy calls between its answers: their schemas, the calls in an answer, and the conversation after them."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torchrl_llm_kl.masks import AssistantMaskError, render_conversation
from torchrl_llm_kl.tasks._calls import Call, Caller, Failure

#: Reads the calls of an answer: text -> calls, each a :class:`ToolCall` or a dict with ``name`` and ``arguments``; torchrl's
#: parsers (``XMLBlockParser``, ``JSONCallParser``) are accepted too.
ToolParser = Callable[[str], Any]


@dataclass(frozen=True)
class ToolCall:
    """A call in an answer.

    Args:
        name: of the tool.
        arguments: by name.
        error: why the call cannot be run, told to the policy; empty if it can.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Parsed:
    """An answer's text beside its calls, and the calls in order."""

    content: str
    calls: list[ToolCall]


# ------------------------------------------------------------------ calls in an answer


def _call(value: Any) -> ToolCall:
    """A call from any form of a parsed one."""
    if isinstance(value, ToolCall):
        return value
    if hasattr(value, "tool") and hasattr(value, "args"):  # torchrl's
        return ToolCall(str(value.tool), dict(value.args))
    value = value.get("function", value) if isinstance(value, Mapping) else None
    arguments = value.get("arguments", value.get("parameters")) if isinstance(value, Mapping) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            return ToolCall(str(value.get("name")), error=f"its arguments are not JSON: {error}")
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return ToolCall("", error="a call is a JSON object with `name` and `arguments`")
    if arguments is not None and not isinstance(arguments, Mapping):
        return ToolCall(value["name"], error="its arguments are not a JSON object")
    return ToolCall(value["name"], dict(arguments or {}))


def _json_calls(text: str) -> list[ToolCall]:
    """The calls of JSON text: one object or a list of them."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        return [ToolCall("", error=f"the call is not JSON: {error}")]
    return [_call(item) for item in (found if isinstance(found, list) else [found])]


_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


def parse_hermes(text: str) -> Parsed:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen write calls.

    Example:
        >>> parse_hermes('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        Parsed(content='Let me see.', calls=[ToolCall(name='add', arguments={'a': 1}, error='')])
    """
    return Parsed(
        _HERMES.sub("", text).strip(), [call for found in _HERMES.findall(text) for call in _json_calls(found)]
    )


def parse_mistral(text: str) -> Parsed:
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}]`` or ``[TOOL_CALLS]name[ARGS]{...}``, as Mistral writes calls.

    Example:
        >>> parse_mistral('[TOOL_CALLS]add[ARGS]{"a": 1}').calls
        [ToolCall(name='add', arguments={'a': 1}, error='')]
    """
    content, *parts = text.split("[TOOL_CALLS]")
    calls: list[ToolCall] = []
    for part in map(str.strip, parts):
        name, brace, rest = part.partition("{")
        if part.startswith("[") or not brace:
            calls += _json_calls(part)
        else:
            calls.append(_call({"name": name.removesuffix("[ARGS]").strip(), "arguments": brace + rest}))
    return Parsed(content.strip(), calls)


def parse_llama(text: str) -> Parsed:
    """``{"name": ..., "parameters": {...}}`` as the whole answer, as Llama 3 writes a call.

    Example:
        >>> parse_llama('{"name": "add", "parameters": {"a": 1}}').calls
        [ToolCall(name='add', arguments={'a': 1}, error='')]
    """
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return Parsed(text.strip(), [])
    return Parsed("", _json_calls(body))


#: What a chat template with calls contains -> how its model writes them.
_FORMATS: tuple[tuple[str, Callable[[str], Parsed]], ...] = (
    ("[TOOL_CALLS]", parse_mistral),
    ("<tool_call>", parse_hermes),
    ("<|python_tag|>", parse_llama),
    ('"parameters"', parse_llama),
)


def _format_of(template: Any) -> Callable[[str], Parsed]:
    """How the model of a chat template writes calls; Hermes' format if the template does not show it."""
    text = template if isinstance(template, str) else json.dumps(template or "", ensure_ascii=False)
    return next((parse for mark, parse in _FORMATS if mark in text), parse_hermes)


def read_calls(parser: Callable[[str], Any], text: str) -> Parsed:
    """The calls of an answer by any parser; those inside ``<think>`` are none."""
    thought, tag, answer = text.rpartition("</think>")
    found = parser(answer)
    if isinstance(found, Mapping):
        content, calls = str(found.get("text", "")), found.get("calls") or []
    else:
        content, calls = (found.content, found.calls) if isinstance(found, Parsed) else (answer, found or [])
    return Parsed(thought + tag + content, [_call(call) for call in calls])


# ------------------------------------------------------------------ tools


class Tools:
    """Functions that the policy may call.

    Args:
        functions: with type hints and a Google-style docstring that describes each argument; sync or async.
        timeout: seconds for each call; None for no limit.
        workers: threads for sync functions, and the most async calls at a time.

    Raises:
        TypeError: for what is not a function.
        ValueError: for a function without description, or two of one name.
    """

    def __init__(
        self, functions: Sequence[Callable[..., Any]], *, timeout: float | None, workers: int | None = None
    ) -> None:
        from transformers.utils import get_json_schema

        self.functions: dict[str, Callable[..., Any]] = {}
        self.schemas: list[dict[str, Any]] = []
        for function in functions:
            if not callable(function):
                raise TypeError(f"a tool must be a function, got {function!r:.60}.")
            name = getattr(function, "__name__", type(function).__name__)
            try:
                schema = get_json_schema(function)
            except Exception as error:  # transformers raises errors of its own
                raise ValueError(
                    f"the tool {name!r} has no schema: {error}. Give it type hints and a docstring with an `Args:` section "
                    "that describes each argument."
                ) from error
            if name in self.functions:
                raise ValueError(f"two tools are called {name!r}: rename one.")
            self.functions[name] = function
            self.schemas.append(schema)
        self._call_all = Caller(timeout, workers)

    def run(self, rows: Sequence[Sequence[ToolCall]]) -> list[list[str]]:
        """The result of each call as text; of one that failed, the error, which the policy reads."""
        calls = [call for row in rows for call in row]
        known = [call for call in calls if not call.error and call.name in self.functions]
        results: Iterator[Any] = iter(
            self._call_all([Call(self.functions[call.name], kwargs=call.arguments) for call in known])
        )
        texts = iter(
            [
                _result(next(results)) if not call.error and call.name in self.functions else self._refusal(call)
                for call in calls
            ]
        )
        return [[next(texts) for _ in row] for row in rows]

    def _refusal(self, call: ToolCall) -> str:
        if call.error:
            return f"Error: {call.error}"
        return f"Error: there is no tool {call.name!r}. Tools: {', '.join(self.functions)}"


def _result(value: Any) -> str:
    if isinstance(value, Failure):
        return f"Error: {type(value.error).__name__}: {value.error}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# ------------------------------------------------------------------ the conversation after an answer


class Dialog:
    """Conversations of several turns on one chat template.

    The text that the policy wrote stays as it is; what the template writes after it, up to the next answer, is appended. So
    each prompt begins with the one before and its answer, whatever the template does to earlier answers.

    Args:
        tokenizer: with the chat template.
        tools: None for a dialog with a user alone.
        template_kwargs: further variables of the template.
        parser: reads the calls of an answer; by default in the format of the template, or by the tokenizer's
            ``response_template``.

    Raises:
        ValueError: if the template does not render the reply to an answer.
    """

    def __init__(
        self, tokenizer: Any, tools: Tools | None, template_kwargs: Mapping[str, Any], parser: ToolParser | None = None
    ) -> None:
        self.tokenizer, self.tools, self.template_kwargs = tokenizer, tools, dict(template_kwargs)
        template = self.template_kwargs.get("chat_template") or getattr(tokenizer, "chat_template", None)
        self._parser = parser or (None if _knows_responses(tokenizer) else _format_of(template))
        self.special = special_tokens(tokenizer)
        self._check()

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        """Of the tools, as the template gets them."""
        return None if self.tools is None else self.tools.schemas

    def parse(self, prompt: str, answer: str) -> Parsed:
        """The calls of an answer to a prompt; none without tools."""
        if self.tools is None:
            return Parsed(answer, [])
        if self._parser is not None:
            return read_calls(self._parser, answer)
        message = self.tokenizer.parse_response(answer, prefix=prompt, tools=self.schemas)
        return Parsed(str(message.get("content") or ""), [_call(call) for call in message.get("tool_calls") or []])

    def assistant(self, answer: str, parsed: Parsed) -> dict[str, Any]:
        """The message of an answer."""
        if not parsed.calls or any(call.error for call in parsed.calls):
            return {"role": "assistant", "content": answer}
        calls = [
            {"id": _call_id(i), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for i, call in enumerate(parsed.calls)
        ]
        return {"role": "assistant", "content": parsed.content, "tool_calls": calls}

    def tool_messages(self, parsed: Parsed, results: Sequence[str]) -> list[dict[str, Any]]:
        """The messages with the results of an answer's calls."""
        return [
            {"role": "tool", "tool_call_id": _call_id(i), "name": call.name or "unknown", "content": result}
            for i, (call, result) in enumerate(zip(parsed.calls, results, strict=True))
        ]

    def next_prompt(
        self, text: str, messages: Sequence[Mapping[str, Any]], replies: Sequence[Mapping[str, Any]]
    ) -> str:
        """The next prompt: ``text``, which ends with the policy's answer, and what the template writes after it.

        Args:
            text: the prompt and the answer as it was sampled.
            messages: the conversation up to and including the answer.
            replies: the messages after it.
        """
        rendered = render_conversation(
            self.tokenizer,
            _with_calls([*messages, *replies]),
            tools=self.schemas,
            add_generation_prompt=True,
            **self.template_kwargs,
        )
        start, end = rendered.assistant_spans[-1]
        closing = next((token for token in self.special if rendered.text[start:end].endswith(token)), "")
        return text + ("" if text.endswith(self.special) else closing) + rendered.text[end:]

    def _check(self) -> None:
        """Try the template on a short dialog."""
        question = {"role": "user", "content": "?"}
        parsed = Parsed("", [ToolCall(next(iter(self.tools.functions)))]) if self.tools else Parsed("x", [])
        mark = "reply-7351"
        replies = self.tool_messages(parsed, [mark]) if self.tools else [{"role": "user", "content": mark}]
        try:
            after = self.next_prompt("", [question, self.assistant("x", parsed)], replies)
        except (AssistantMaskError, IndexError) as error:
            raise ValueError(f"the chat template cannot continue a conversation after an answer: {error}") from error
        if mark not in after:
            what = "results of tools" if self.tools else "a user's reply"
            raise ValueError(
                f"the chat template does not render {what}: pass one that does, template_kwargs={{'chat_template': ...}}."
            )
        if self.tools:
            plain = self.tokenizer.apply_chat_template([question], tokenize=False, **self.template_kwargs)
            told = self.tokenizer.apply_chat_template(
                [question], tokenize=False, tools=self.schemas, **self.template_kwargs
            )
            if told == plain:
                warnings.warn(
                    "the chat template does not show the tools to the model: describe them in system_prompt=, or pass a "
                    "template that does.",
                    stacklevel=5,
                )


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """The special tokens of a tokenizer, the longest first; empty without a tokenizer.

    Example:
        >>> special_tokens(None)
        ()
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    tokens = {*getattr(tokenizer, "all_special_tokens", ()), *(str(token) for token in added if token.special)}
    return tuple(sorted(tokens, key=lambda token: (-len(token), token)))


def strip_end(text: str, special: tuple[str, ...]) -> str:
    """A text without the special tokens at its end.

    Example:
        >>> strip_end("42<end><pad><pad>", ("<end>", "<pad>"))
        '42'
    """
    while special and text.endswith(special):
        text = text[: -next(len(token) for token in special if text.endswith(token))]
    return text


def _with_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which a result always follows a call, as templates demand; calls that could not be read were none."""
    unknown = {"id": _call_id(0), "type": "function", "function": {"name": "unknown", "arguments": {}}}
    out = [dict(message) for message in messages]
    for message, after in pairwise(out):
        if message["role"] == "assistant" and after["role"] == "tool":
            message.setdefault("tool_calls", [unknown])
    return out


def _knows_responses(tokenizer: Any) -> bool:
    return getattr(tokenizer, "response_template", None) is not None and hasattr(tokenizer, "parse_response")


def _call_id(index: int) -> str:
    return f"call{index:05d}"  # nine characters, as Mistral's templates demand
