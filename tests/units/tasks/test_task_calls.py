"""Tests of tool calls: their parsers, the errors that go back to the policy, and the next prompt with the results."""

import asyncio
import math
import re
from typing import Any

import pytest
from torchrl.envs.llm.transforms import XMLBlockParser

from refused import refused
from task_lab import BOT, END, add, call, make_tokenizer
from template_pairs import read
from torchrl_llm_kl.masks import render_conversation
from torchrl_llm_kl.tasks import ToolCall, _tools
from torchrl_llm_kl.tasks._tools import Dialog, Parsed, Tools, parse_hermes, read_calls, strip_end
from waits import LONG

ADD = ToolCall("add", {"a": 1, "b": 2})
FG = [ToolCall("f"), ToolCall("g")]


async def slow(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long.
    """
    await asyncio.sleep(seconds)
    return "done"


def describe(city: str, days: int, exact: bool) -> Any:
    """Describe the weather.

    Args:
        city: where.
        days: how far ahead.
        exact: whether to be exact.
    """
    return WEATHER[city]


ITSELF: list[Any] = []
ITSELF.append(ITSELF)
WEATHER = {"keys": {(1, 2): 3}, "itself": ITSELF, "half": "a\ud83d", "fine": {"a": math.nan}}


def tools_of(*functions: Any, timeout: float | None = None) -> Tools:
    return Tools(list(functions), timeout=timeout)


#: Format, text, what is left of it, and the calls in it.
CALLS = [
    *((name, "No call.", "No call.", []) for name in ("hermes", "tagged", "mistral", "llama")),
    ("hermes", "See:\n" + call("add", a=1, b=2), "See:", [ADD]),
    ("hermes", call("add", a=1, b=2) + "\n" + call("slow", s=0), "", [ADD, ToolCall("slow", {"s": 0})]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', "", [ADD]),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]', "", [ADD]),
    ("mistral", 'x[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]f{}', "x", [ADD, ToolCall("f")]),
    ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ADD]),
    # a block without a head is text
    ("tagged", "a <tool_call><x><tool_call>f</tool_call> b <tool_call>g", "a <tool_call><x> b", FG),
]
#: Arguments with tags.
BODIES = [
    # JSON reads white space; one newline of each side is the tags'
    ("<parameter=a>\n\n1\n\n</parameter>", {"a": 1}),
    ("<parameter=a>\n\nx\n\n</parameter>", {"a": "\nx\n"}),
    ("<parameter=a>x<parameter=b>1</parameter>", {"a": "x<parameter=b>1"}),
    ("<parameter=a></arg_value></parameter><parameter=b>2", {"a": "</arg_value>"}),
    ("<arg_key>a</arg_key>\n<arg_value>True</arg_value><arg_key>b</arg_key>", {"a": True}),
    ("<arg_key>a</arg_key>x<arg_value>1</arg_value><arg_key>b</arg_key><arg_value>2</arg_value>", {"b": 2}),
    ("<arg_key>a</arg_key><arg_key>b</arg_key><arg_value>2</arg_value>", {"b": 2}),
    ("<parameter=a>'x</parameter>", {"a": "'x"}),
    ("<parameter=a>True story</parameter>", {"a": "True story"}),
    # as Python prints them
    *(
        (f"<arg_key>a</arg_key><arg_value>{value!r}</arg_value>", {"a": value})
        for each in ["it's", 'say "x"', 'it\'s "x"', "\\", "a\nb\x07", True, None, {"k": [1.5, -2, "True"]}]
        for value in (each, [each])
        if not isinstance(each, str) or value is not each
    ),
]


def test_calls_are_parsed() -> None:
    for name, text, content, calls in CALLS:
        assert getattr(_tools, f"parse_{name}")(text) == Parsed(content, calls), (name, text)
    for body, arguments in BODIES:
        text = f"<tool_call><function=f>{body}</function></tool_call>"
        assert _tools.parse_tagged(text).calls == [ToolCall("f", arguments)], body
    for parse, text in (  # a user's own, and torchrl's
        (lambda text: [{"name": "add", "arguments": {"a": 1, "b": 2}}], "x"),
        (XMLBlockParser(), '<tool name="add">{"a": 1, "b": 2}</tool> y'),
    ):
        assert read_calls(parse, text).calls == [ADD]
    assert read_calls(lambda text: None, "x").calls == []
    # values in tags have the types of the schema
    body = "".join(f"<parameter={x}>\n{v}\n</parameter>" for x, v in {"city": 12, "days": 12, "exact": "maybe"}.items())
    (found,) = _tools.parse_tagged(f"<tool_call><function=describe>{body}</function>", tools_of(describe).schemas).calls
    assert found == ToolCall("describe", {"city": "12", "days": 12, "exact": "maybe"})


def test_a_malformed_call_returns_an_error_to_the_policy() -> None:
    for body, error in (
        ('{"name": "add", "argum', "the call is not JSON"),
        ('{"arguments": {}}', "JSON object with `name`"),
        ('{"name": "add", "arguments": [1]}', "not a JSON object"),
        ('{"name": "add", "arguments": "{"}', "arguments are not JSON"),
        ("[1]", "JSON object with `name`"),
        ('{"name": "add", "arguments": {"a": %s}}' % ("1" * 5000), "the call is not JSON: Exceeds the limit"),
    ):
        for closed in ("</tool_call>", ""):
            (found,) = parse_hermes(f"<tool_call>{body}{closed}").calls
            assert error in found.error, (body, closed)
            assert tools_of(add).run([[found]])[0][0].startswith("Error: "), (body, closed)
    found = _tools.parse_llama("{not a call")
    assert (found.content, "not JSON" in found.calls[0].error) == ("", True)


def test_calls_in_thoughts_are_ignored_and_truncated_answers_are_closed(tokenizer: Any) -> None:
    own = call("add", a=1, b=2)
    assert read_calls(parse_hermes, f"<think>{own}</think>3").calls == []
    assert read_calls(parse_hermes, f"<think>{own}</think>{own}").calls == [ADD]
    assert read_calls(parse_hermes, f"<think>{own}") == Parsed(f"<think>{own}", [])  # unfinished
    assert read_calls(parse_hermes, f"{own}<think>{own}").calls == [ADD]
    dialog = Dialog(tokenizer, tools_of(add), {})
    begun = BOT + "<think>\n"  # by the template
    assert dialog.parse(begun, own) == Parsed(own, [])
    assert dialog.parse(begun, "hm</think>" + own) == Parsed("hm</think>", [ADD])
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x"}]
    after = f"x{END}\n<|im_start|>user\n<tool_response>3</tool_response>{END}\n{BOT}"
    for answer in ("x", f"x{END}"):
        assert dialog.next_prompt(answer, messages, [{"role": "tool", "name": "add", "content": "3"}]) == after


def test_results_and_errors_are_texts() -> None:
    def fails(x: int) -> int:
        """Fail.

        Args:
            x: a number.
        """
        raise RuntimeError("no")

    waits = [ADD, ToolCall("slow", {"seconds": LONG})]
    wrong = [ToolCall("fails", {"x": 1}), ToolCall("add", {"a": 1}), ToolCall("sub")]
    first, second, third = tools_of(add, slow, fails, timeout=0.2).run([waits, [], wrong])
    assert first == ["3", "Error: TimeoutError: took longer than 0.2 s"]
    assert second == []
    assert third[0] == "Error: RuntimeError: no"
    assert "missing 1 required positional argument: 'b'" in third[1]
    assert third[2] == "Error: the tool 'sub' does not exist. Tools: add, slow, fails"
    calls = [ToolCall("describe", {"city": city, "days": 1, "exact": True}) for city in WEATHER]
    (found,) = tools_of(describe).run([calls])
    assert found[0].startswith("Error: the result cannot be written as JSON: TypeError: keys must be str")
    unwritable = "Error: the result cannot be written as JSON"
    assert found[1:] == [f"{unwritable}: ValueError: Circular reference detected", "a?", '{"a": NaN}']
    with pytest.raises(ValueError, match=r"the tool '<lambda>' has no schema.*Args:"):
        tools_of(lambda x: x)
    with pytest.raises(ValueError, match="two tools are called 'add'"):
        tools_of(add, add)


RESULT = "<|im_start|>user\n<tool_response>\nR\n</tool_response>"
#: Templates that TRL ships -> what each writes after the raw answer "RAW" and the tool's result "R", by reading it.
FAMILIES = {
    "qwen3": f"{END}\n{RESULT}{END}\n{BOT}",
    "qwen2_5": f"{END}\n{RESULT}{END}\n{BOT}",
    "qwen3_5_think": f"{END}\n{RESULT}{END}\n{BOT}<think>\n",
    "nemotron_3_nano": f"{END}\n{RESULT}\n{END}\n{BOT}<think>\n",
    "glm4moe": "<|observation|>\n<tool_response>\nR\n</tool_response><|assistant|>",
    "llama3_1": "<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"
    '"R"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
}


def of_family(name: str) -> Any:
    pytest.importorskip("trl")
    template = read(name)
    special = sorted(set(re.findall(r"<\|[^|<>\s]+\|>|</?tool_call>", template)))
    end = {"llama3_1": "<|eot_id|>", "glm4moe": "<|endoftext|>"}.get(name, "<|im_end|>")
    return make_tokenizer(template, extra_special_tokens=special, eos_token=end, bos_token="<bos>")


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_parsed_in_the_format_of_the_template(name: str) -> None:
    tokenizer = of_family(name)
    dialog = Dialog(tokenizer, tools_of(describe, add), {})
    question = {"role": "user", "content": "?"}
    arguments = {"city": "7", "days": 3, "exact": True}
    asked = {"id": "call00000", "type": "function", "function": {"name": "describe", "arguments": arguments}}
    messages = [question, {"role": "assistant", "content": "", "tool_calls": [asked]}]
    rendered = render_conversation(tokenizer, messages, tools=dialog.schemas)
    written = rendered.text[slice(*rendered.assistant_spans[-1])]
    assert "describe" in written
    assert dialog.parse("", strip_end(written, dialog.special)).calls == [ToolCall("describe", arguments)]
    assert dialog.parse("", "It is sunny.").calls == []
    result = {"role": "tool", "name": "describe", "content": "R"}
    after = dialog.next_prompt("RAW", [question, {"role": "assistant", "content": "RAW"}], [result])
    assert after == "RAW" + FAMILIES[name]


test_unsupported_templates_are_refused_at_construction = refused(
    lambda name: Dialog(of_family(name), tools_of(add), {}),
    ("lfm2_v2", r"writes calls in an unknown format: .*add\(a=1, b=1\).*Pass tool_parser="),
    ("deepseekv3", "writes calls in an unknown format"),
    ("gemma3", r"fails to render results of tools \(Conversation roles must alternate"),
    ("phi3", "does not render results of tools: pass one that does"),
)


def test_a_custom_parser(tokenizer: Any) -> None:
    """A custom parser supports any format, and its errors do not end the run."""

    def parser(text: str) -> list[dict[str, Any]]:
        found = re.search(r"\[(\w+)\(a=(\d+), b=(\d+)\)\]", text)
        return [{"name": found[1], "arguments": {"a": int(found[2]), "b": int(found[3])}}] if found else []

    dialog = Dialog(of_family("lfm2_v2"), tools_of(add), {}, parser)
    assert dialog.parse("", "<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>").calls == [ADD]
    dialog = Dialog(tokenizer, tools_of(add), {}, lambda text: [] if "ok" in text else [][0])
    assert dialog.parse("", "ok").calls == []
    (found,) = dialog.parse("", "x").calls
    assert found.error == "the call cannot be read: IndexError: list index out of range"
    (found,) = Dialog(tokenizer, tools_of(add), {}).parse("", "<tool_call>" + "[" * 100_000).calls
    assert found.error


_LONG = 50_000
_HOSTILE = [
    head + (unit * (_LONG // len(unit))) + tail
    for head, unit, tail in (
        ("<tool_call>a", " ", ""),
        ("<tool_call>", "\n", "<x"),
        ("", "<tool_call>", ""),
        ("<tool_call>", "<function=", ""),
        ("<tool_call>a", "<parameter=a>", ""),
        ("<tool_call>a<parameter=a>", "\n", ""),
        ("<tool_call>a<parameter=a>'", "\\'", "</parameter>"),
        ("<tool_call>a", "<arg_key>", "</arg_key>"),
        ("<tool_call>a<arg_key>k</arg_key>", "<arg_value>", ""),
        ("", "[TOOL_CALLS]a{", ""),
        ("{", '"a":{', ""),
        ("", "</think>", ""),
    )
]


@pytest.mark.parametrize("name", ["hermes", "tagged", "mistral", "llama"])
def test_parsers_take_linear_time(name: str) -> None:
    """Quadratic time would take minutes for each of these texts, so the time limit of unit tests would fail."""
    for text in _HOSTILE:
        read_calls(getattr(_tools, f"parse_{name}"), text)
    assert strip_end("x" + "<end><pad>" * 100_000, ("<end>", "<pad>")) == "x"
    assert strip_end("<pad>" * 200_000, ("<end>", "<pad>")) == ""
    assert strip_end("x<pad>", ()) == "x<pad>"
    assert strip_end("xaba", ("ba", "a")) == "x"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": %s}}</tool_call>'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": %s}}]'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": %s}'),
        ("llama", '{"name": "add", "parameters": {"a": %s}}'),
        ("tagged", "<tool_call>add<arg_key>a</arg_key><arg_value>%s</arg_value></tool_call>"),
    ],
)
def test_a_deeply_nested_call_returns_an_error(name: str, text: str) -> None:
    def nested(depth: int) -> ToolCall:
        (found,) = read_calls(getattr(_tools, f"parse_{name}"), text % ("[" * depth + "]" * depth)).calls
        return found

    found = nested(63)  # and the object of the arguments
    assert (found.name, found.error, type(found.arguments["a"])) == ("add", "", list)
    for depth in (64, 900):
        found = nested(depth)
        assert (found.arguments, found.error) == ({}, "its arguments are nested more than 64 levels deep")
    found = nested(100_000)
    if name == "tagged":  # what cannot be read is text
        assert found.arguments == {"a": "[" * 100_000 + "]" * 100_000}
    else:
        assert "recursion" in found.error
