"""Tools that a policy calls: their schemas, the parsers of calls in an answer, and the conversation after a call."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import starmap
from typing import Any

from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.masks import Message, Tokenizer, call_id, call_message, render_conversation
from torchrl_llm_kl.tasks._calls import Call, Caller, Failure

#: A function from the text of an answer to its calls, each a :class:`ToolCall` or a dict with ``name`` and ``arguments``.
#: Parsers of torchrl (``XMLBlockParser``, ``JSONCallParser``) are accepted too.
ToolParser = Callable[[str], object]


#: The beginning of a result that is an error.
TOOL_ERROR = "Error: "


@dataclass(frozen=True)
class ToolCall:
    """A call in an answer.

    Args:
        name: the tool's name.
        arguments: the arguments by name.
        error: the reason why the call cannot run, which the policy gets as the result. Empty if the call can run.
    """

    name: str
    arguments: dict[str, object] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Parsed:
    """The text of an answer without its calls, and the calls in order."""

    content: str
    calls: list[ToolCall]


# ------------------------------------------------------------------ calls in an answer
# An answer may be any text, so each parser takes time that is linear in its length.

#: The deepest nesting of lists and objects in the arguments of a call. Copies and templates recurse, and fail at about 1000.
_DEEPEST = 64


def _read_call(value: object) -> ToolCall:
    """Convert a parsed call of any form."""
    if hasattr(value, "tool") and hasattr(value, "args"):  # a call of torchrl's parsers
        value = ToolCall(str(value.tool), dict(value.args))
    if isinstance(value, ToolCall):
        return _not_too_deep(value)
    value = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return ToolCall("", error="a call is a JSON object with `name` and `arguments`")
    name, arguments = value["name"], value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(name, error=f"its arguments are not JSON: {error}")
    if arguments is not None and not isinstance(arguments, Mapping):
        return ToolCall(name, error="its arguments are not a JSON object")
    return _not_too_deep(ToolCall(name, dict(arguments or {})))


def _not_too_deep(call: ToolCall) -> ToolCall:
    level: list[Mapping[str, object] | Sequence[object]] = [call.arguments]
    for _ in range(_DEEPEST):
        items = (item for each in level for item in (each.values() if isinstance(each, Mapping) else each))
        level = [item for item in items if isinstance(item, (Mapping, list, tuple))]
        if not level:
            return call
    return ToolCall(call.name, error=f"its arguments are nested more than {_DEEPEST} levels deep")


def _json_calls(text: str) -> list[ToolCall]:
    """The calls in JSON text, which is one object or a list of objects."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # an answer may hold thousands of brackets
        return [ToolCall("", error=f"the call is not JSON: {error}")]
    return [_read_call(call) for call in (value if isinstance(value, list) else [value])]


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _tagged_blocks(text: str, head: re.Pattern[str]) -> tuple[str, list[tuple[re.Match[str], str]]]:
    """Split a text at its blocks, which begin with ``<tool_call>`` and the head and end with ``</tool_call>`` or the text.

    Returns:
        The text around the blocks, and the head and the body of each block.
    """
    content, blocks, read = [], [], 0
    at = text.find(_OPEN)
    while at >= 0:
        after = at + len(_OPEN)
        begin = head.match(text, after)
        if begin is not None:  # a tag without a head is text
            end = text.find(_CLOSE, begin.end())
            content.append(text[read:at])
            blocks.append((begin, text[begin.end() : end if end >= 0 else len(text)]))
            read = after = end + len(_CLOSE) if end >= 0 else len(text)
        at = text.find(_OPEN, after)
    return "".join([*content, text[read:]]).strip(), blocks


_NO_HEAD = re.compile("")


def parse_hermes(text: str) -> Parsed:
    """Parse ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, the format of Hermes and Qwen.

    Example:
        >>> parse_hermes('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        Parsed(content='Let me see.', calls=[ToolCall(name='add', arguments={'a': 1}, error='')])
    """
    content, blocks = _tagged_blocks(text, _NO_HEAD)
    return Parsed(content, [call for _, body in blocks for call in _json_calls(body.strip())])


def parse_mistral(text: str) -> Parsed:
    """Parse ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]`` or ``[TOOL_CALLS]name[ARGS]{...}``, Mistral's formats.

    Example:
        >>> parse_mistral('[TOOL_CALLS]add[ARGS]{"a": 1}').calls
        [ToolCall(name='add', arguments={'a': 1}, error='')]
    """
    content, *parts = text.split("[TOOL_CALLS]")
    return Parsed(content.strip(), [call for part in parts for call in _mistral_calls(part.strip())])


def _mistral_calls(part: str) -> list[ToolCall]:
    name, brace, rest = part.partition("{")
    if part.startswith("[") or not brace:
        return _json_calls(part)
    return [_read_call({"name": name.removesuffix("[ARGS]").strip(), "arguments": brace + rest})]


def parse_llama(text: str) -> Parsed:
    """Parse an answer that is ``{"name": ..., "parameters": {...}}``, the format of Llama 3.

    Example:
        >>> parse_llama('{"name": "add", "parameters": {"a": 1}}').calls
        [ToolCall(name='add', arguments={'a': 1}, error='')]
    """
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return Parsed(text.strip(), [])
    return Parsed("", _json_calls(body))


_TAGGED = re.compile(r"\s*(?:<function=([^<>\n]+)>|([^<\n]+))")
_TAG = re.compile(r"<parameter=([^<>\n]+)>|</parameter>|</?arg_(?:key|value)>")


def parse_tagged(text: str, schemas: Sequence[Json] = ()) -> Parsed:
    """Parse calls whose arguments have tags, the format of Qwen 3.5, Nemotron 3 and GLM 4.5.

    A value is text if the tool's schema says so. Otherwise it is parsed as JSON, then as a Python literal.

    Example:
        >>> parse_tagged("<tool_call><function=add><parameter=a>1</parameter></function></tool_call>").calls
        [ToolCall(name='add', arguments={'a': 1}, error='')]
    """
    functions = {schema["function"]["name"]: schema["function"].get("parameters", {}) for schema in schemas}
    content, blocks = _tagged_blocks(text, _TAGGED)

    def call(head: re.Match[str], body: str) -> ToolCall:
        name = (head[1] or head[2]).strip()
        types = functions.get(name, {}).get("properties", {})
        arguments = {key: _value(text, types.get(key, {}).get("type")) for key, text in _tagged_arguments(body)}
        return _not_too_deep(ToolCall(name, arguments))

    return Parsed(content, list(starmap(call, blocks)))


def _tagged_arguments(body: str) -> Iterator[tuple[str, str]]:
    """Parse ``<parameter=key>value</parameter>`` and ``<arg_key>key</arg_key><arg_value>value</arg_value>``."""
    key, awaited, start = "", "", 0  # `awaited` is the tag that ends the open key or value, which begins at `start`
    for tag in _TAG.finditer(body):
        if awaited and tag[0] != awaited:
            if awaited != "<arg_value>":
                continue  # another tag inside a key or a value is part of its text
            awaited = ""
        text, start = body[start : tag.start()], tag.end()
        if awaited == "</parameter>":
            yield key, text.removeprefix("\n").removesuffix("\n")
            awaited = ""
        elif awaited == "</arg_key>":
            key, awaited = text, "<arg_value>"
        elif awaited == "<arg_value>":
            awaited = "</arg_value>" if not text.strip() else ""
        elif awaited == "</arg_value>":
            yield key, text
            awaited = ""
        elif tag[1]:
            key, awaited = tag[1], "</parameter>"
        elif tag[0] == "<arg_key>":
            awaited = "</arg_key>"


def _value(text: str, kind: object) -> object:
    """Parse the value of an argument. Some templates write ``True``, others ``true``."""
    if kind != "string":
        for read in (json.loads, _read_python):
            with suppress(ValueError, RecursionError):
                return read(text)
    return text


def _read_python(text: str) -> object:
    """Parse a Python literal into the types of JSON. Any other text is a ValueError."""
    try:
        return json.loads(json.dumps(ast.literal_eval(text)))
    except (SyntaxError, TypeError, MemoryError) as error:
        raise ValueError(f"not a Python literal of JSON's types: {error}") from None


def read_calls(parser: ToolParser, text: str) -> Parsed:
    """Parse the calls of an answer with any parser. Calls inside ``<think>``, closed or not, are ignored."""
    thought, tag, answer = text.rpartition("</think>")
    answer, *unfinished = answer.partition("<think>")
    parsed: Any = parser(answer)
    if isinstance(parsed, Mapping):  # the result of torchrl's parsers
        parsed = Parsed(str(parsed.get("text", "")), parsed.get("calls") or [])
    elif not isinstance(parsed, Parsed):
        parsed = Parsed(answer, parsed or [])
    return Parsed(thought + tag + parsed.content + "".join(unfinished), [_read_call(call) for call in parsed.calls])


# ------------------------------------------------------------------ tools


class Tools:
    """Functions that the policy may call.

    Args:
        functions: sync or async functions with type hints and a Google-style docstring that describes each argument.
        timeout: seconds for each call. None sets no limit.
        workers: the number of threads for sync functions, and of concurrent async calls.

    Raises:
        ValueError: if a function lacks its description, or two functions have one name.
    """

    def __init__(
        self, functions: Sequence[Callable[..., object]], *, timeout: float | None, workers: int | None = None
    ) -> None:
        from transformers.utils import get_json_schema

        self.functions: dict[str, Callable[..., object]] = {}
        self.schemas: list[Json] = []  # in the format of transformers' get_json_schema
        for function in functions:
            name = getattr(function, "__name__", type(function).__name__)
            try:
                schema = get_json_schema(function)
            except Exception as error:  # transformers raises errors of its own, with no common base
                advice = "give it type hints and a docstring whose `Args:` describe each argument"
                raise ValueError(f"the tool {name!r} has no schema ({error}): {advice}.") from error
            if name in self.functions:
                raise ValueError(f"two tools are called {name!r}: rename one.")
            self.functions[name] = function
            self.schemas.append(schema)
        self._call_all = Caller(timeout, workers)

    def run(self, rows: Sequence[Sequence[ToolCall]]) -> list[list[str]]:
        """Run the calls of each row. Results and errors are texts for the policy."""
        calls = [call for row in rows for call in row]
        known = [call for call in calls if not self._refusal(call)]
        results = iter(self._call_all([Call(self.functions[call.name], kwargs=call.arguments) for call in known]))
        texts = iter([self._refusal(call) or _result(next(results)) for call in calls])
        return [[next(texts) for _ in row] for row in rows]

    def _refusal(self, call: ToolCall) -> str:
        """The error of a call that cannot run. Empty if it can."""
        if not call.error and call.name not in self.functions:
            return f"{_no_tool(call.name)}. Tools: {', '.join(self.functions)}"
        return f"{TOOL_ERROR}{call.error}" if call.error else ""


def _no_tool(name: str) -> str:
    return f"{TOOL_ERROR}the tool {name!r} does not exist"


def called_tool(message: Message) -> str:
    """The name of the tool whose result a message holds. ``"unknown"`` if the policy made the name up.

    Example:
        >>> called_tool({"role": "tool", "name": "add", "content": "3"})
        'add'
    """
    name = str(message["name"])
    return "unknown" if str(message["content"]).startswith(_no_tool(name)) else name


def _result(value: object) -> str:
    try:
        if isinstance(value, Failure):
            text = f"{TOOL_ERROR}{type(value.error).__name__}: {value.error}"
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    except Exception as error:  # keys that JSON lacks, circular values, a failing __str__
        text = f"{TOOL_ERROR}the result cannot be written as JSON: {type(error).__name__}: {error}"
    return as_unicode(text)


def as_unicode(text: str) -> str:
    """Replace lone surrogates by ``?``: tokenizers refuse them.

    Example:
        >>> as_unicode("a" + chr(0xD83D))
        'a?'
    """
    return text.encode("utf-8", "replace").decode()


# ------------------------------------------------------------------ the conversation after an answer


class Dialog:
    """Conversations of several turns on one chat template.

    The policy's own text is never rendered again. Only the template's text from an answer to the next one is appended, so each
    prompt begins with the previous prompt and its answer, even if the template changes earlier answers.

    Calls are parsed by ``parser`` or by the tokenizer's ``response_template``. Without both, the first known format is used
    that parses the template's own text of a call.

    Args:
        tokenizer: the tokenizer with the chat template.
        tools: the tools. None for a dialog only with a user.
        template_kwargs: further variables of the template.
        parser: parses the calls of an answer.

    Raises:
        ValueError: if the template does not render the reply to an answer, or writes calls in an unknown format.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Tools | None,
        template_kwargs: Mapping[str, object],
        parser: ToolParser | None = None,
    ) -> None:
        self.tokenizer, self.tools = tokenizer, tools
        self.template_kwargs: Json = dict(template_kwargs)
        self.special = special_tokens(tokenizer)
        self._parser = parser
        self._closing = ""
        self._check()

    @property
    def schemas(self) -> list[Any] | None:
        """The schemas of the tools, which the template gets."""
        return None if self.tools is None else self.tools.schemas

    def parse(self, prompt: str, answer: str) -> Parsed:
        """Parse the calls of an answer to a prompt. An error of the parser becomes a call with this error."""
        if self.tools is None:
            return Parsed(answer, [])
        try:
            if self._parser is not None:
                thinks = prompt.rstrip().endswith("<think>")  # some templates open the thought in the prompt
                parsed = read_calls(self._parser, f"<think>{answer}" if thinks else answer)
                return Parsed(parsed.content.removeprefix("<think>") if thinks else parsed.content, parsed.calls)
            message = self.tokenizer.parse_response(answer, prefix=prompt, tools=self.schemas)
            calls = [_read_call(call) for call in message.get("tool_calls") or []]
            return Parsed(str(message.get("content") or ""), calls)
        except Exception as error:  # an odd answer may raise anything in a parser
            return Parsed(answer, [ToolCall("", error=f"the call cannot be read: {type(error).__name__}: {error}")])

    def assistant(self, answer: str, parsed: Parsed) -> Message:
        """The message of the assistant for an answer."""
        if not parsed.calls or any(call.error for call in parsed.calls):
            return {"role": "assistant", "content": answer}
        calls = [call_message(i, call.name, call.arguments) for i, call in enumerate(parsed.calls)]
        return {"role": "assistant", "content": parsed.content, "tool_calls": calls}

    def tool_messages(self, parsed: Parsed, results: Sequence[str]) -> list[Message]:
        """The messages with the results of an answer's calls."""
        return [
            {"role": "tool", "tool_call_id": call_id(i), "name": call.name or "unknown", "content": result}
            for i, (call, result) in enumerate(zip(parsed.calls, results, strict=True))
        ]

    def next_prompt(self, text: str, messages: Sequence[Message], replies: Sequence[Message]) -> str:
        """The next prompt: ``text`` and the template's text after the answer.

        Args:
            text: the prompt and the answer as it was sampled.
            messages: the conversation up to and including the answer.
            replies: the messages after the answer.

        Raises:
            Exception: any error of the template.
        """
        turn, after = self._rendered([*messages, *replies])
        own = next((token for token in self.special if turn.endswith(token)), "")
        # Without an end token in the template, a special token at the end of a turn belongs to a call.
        closing = own if self._closing else ""
        return text + ("" if text.endswith(self.special) else closing) + after

    def _rendered(self, messages: Sequence[Message]) -> tuple[str, str]:
        """The template's text of the last answer of a conversation, and its text after the answer."""
        rendered = render_conversation(
            self.tokenizer,
            _stand_ins(messages),
            tools=self.schemas,
            add_generation_prompt=True,
            **self.template_kwargs,
        )
        start, end = rendered.assistant_spans[-1]
        return rendered.text[start:end], rendered.text[end:]

    # ------------------------------------------------------------------ does the template fit?

    def _check(self) -> None:
        """Try the template on a short dialog, and find how it writes calls."""
        question = {"role": "user", "content": "?"}
        answer, mark = {"role": "assistant", "content": "x"}, "reply-7351"  # a text that no template has
        try:
            turn, _ = self._try([question, answer, {"role": "user", "content": mark}], mark, "a user's reply")
        except ValueError:
            if self.tools is None:
                raise
            turn = ""  # a template may render the results of tools, but no second message of the user
        self._closing = next((token for token in self.special if turn.endswith(token)), "")
        if self.tools is None:
            return
        call = _example(self.tools.schemas[0])
        asked = [question, self.assistant("x", Parsed("x", [call])), *self.tool_messages(Parsed("x", [call]), [mark])]
        turn, _ = self._try(asked, mark, "results of tools")
        plain, told = (
            self.tokenizer.apply_chat_template([question], tokenize=False, tools=tools, **self.template_kwargs)
            for tools in (None, self.schemas)
        )
        if told == plain:
            warnings.warn("the chat template does not show the tools: describe them in system_prompt=.", stacklevel=5)
        if self._parser is None and getattr(self.tokenizer, "response_template", None) is None:
            self._parser = self._format(asked[:2], call)

    def _try(self, messages: list[Message], mark: str, what: str) -> tuple[str, str]:
        advice = "pass one that does, template_kwargs={'chat_template': ...}."
        try:
            turn, after = self._rendered(messages)
        except Exception as error:  # a template may raise anything
            raise ValueError(f"the chat template fails to render {what} ({error}): {advice}") from error
        if mark not in after:
            raise ValueError(f"the chat template does not render {what}: {advice}")
        return turn, after

    def _format(self, messages: list[Message], call: ToolCall) -> ToolParser:
        """The parser of the template's format of calls. Hermes' format if the template writes no calls."""
        assert self.tools is not None
        rendered = render_conversation(self.tokenizer, messages, tools=self.schemas, **self.template_kwargs)
        written = rendered.text[slice(*rendered.assistant_spans[-1])]
        if call.name not in written:  # the format must be in the system prompt: Hermes' is the most common one
            return parse_hermes
        tagged = partial(parse_tagged, schemas=self.tools.schemas)
        for parse in (parse_hermes, tagged, parse_mistral, parse_llama):
            if read_calls(parse, strip_end(written, self.special)).calls == [call]:
                return parse
        raise ValueError(f"the chat template writes calls in an unknown format: {written!r}. Pass tool_parser=.")


def _example(schema: Json) -> ToolCall:
    """An example call of a tool, with a value of the right type for each argument."""
    values = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}
    function = schema["function"]
    properties = function.get("parameters", {}).get("properties", {})
    kinds = {name: each.get("type") for name, each in properties.items()}
    return ToolCall(function["name"], {n: values.get(k, "s") if isinstance(k, str) else "s" for n, k in kinds.items()})


# Tokens that end a call must stay in the answer, since the parsers need them.
_OF_CALLS = re.compile(r"tool[_▁ ]?(?:call|arg)", re.IGNORECASE)


def special_tokens(tokenizer: Tokenizer | None) -> tuple[str, ...]:
    """The special tokens of a tokenizer except the tokens of calls, the longest first. Empty without a tokenizer.

    Example:
        >>> special_tokens(None)
        ()
    """
    if tokenizer is None:
        return ()
    added = tokenizer.added_tokens_decoder.values()
    tokens = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
    tokens = {token for token in tokens if not _OF_CALLS.search(token)}
    return tuple(sorted(tokens, key=lambda token: (-len(token), token)))


def check_padding(tokenizer: Tokenizer) -> None:
    """Warn if the padding token looks like ordinary text, which would be removed from prompts and answers.

    transformers makes every padding token a special token, so only its form can show that.
    """
    pad = tokenizer.pad_token
    if pad is not None and not re.search(r"[<>\[\]|{}_]|(?i:pad)", pad):
        warnings.warn(
            f"the tokenizer's padding token {pad!r} looks like ordinary text, which would be removed from answers. If it is, "
            "reload the tokenizer with a special token as padding, from_pretrained(..., pad_token=tokenizer.eos_token), and "
            "save it to a folder for model.tokenizer.",
            stacklevel=3,
        )


def strip_end(text: str, special: tuple[str, ...]) -> str:
    """Remove the special tokens at the end of a text.

    Example:
        >>> strip_end("42<end><pad><pad>", ("<end>", "<pad>"))
        '42'
    """
    end = _reversed(special).match(text[::-1])
    return text[: len(text) - (end.end() if end else 0)]


@lru_cache(maxsize=64)
def _reversed(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern of any number of the tokens, each reversed.

    Matching at the start of a reversed text takes linear time. Searching for the tokens before the end takes quadratic time.
    """
    return re.compile(f"(?:{'|'.join(re.escape(token[::-1]) for token in tokens)})*")


def _stand_ins(messages: Sequence[Message]) -> list[Message]:
    """Replace the text of each answer by a plain word: the text after an answer must not depend on the policy's words.

    Each result gets a call, since templates demand one, even if the answer's call could not be parsed.
    """
    out: list[Message] = []
    answer: Json = {}  # the last message of the assistant
    for message in messages:
        if message["role"] == "assistant":
            message = answer = {"role": "assistant", "content": "x"}
        elif message["role"] == "tool" and out and out[-1]["role"] in ("assistant", "tool"):
            call = call_message(0, str(message.get("name", "unknown")), {})
            answer.setdefault("tool_calls", []).append({**call, "id": message.get("tool_call_id", call["id"])})
        out.append(message)
    return out
