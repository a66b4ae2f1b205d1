"""Several turns: calls in an answer, their results in the next prompt, the reward at the end, each token charged once."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch.testing import assert_close
from torchrl.collectors.llm import LLMCollector
from torchrl.envs.llm.transforms import XMLBlockParser

from task_lab import BOT, END, HERMES, add, last_user, make_tokenizer, scripted_policy
from torchrl_llm_kl import RetrieveKL, make_algorithm
from torchrl_llm_kl.masks import render_conversation
from torchrl_llm_kl.tasks import ToolCall, make_env, whole_groups
from torchrl_llm_kl.tasks._tools import (
    Dialog,
    Parsed,
    Tools,
    parse_hermes,
    parse_llama,
    parse_mistral,
    parse_tagged,
    read_calls,
    strip_end,
)
from toy_rollouts import make_model, response_log_probs, steps
from toy_tokenizer import CHATML
from waits import LONG


async def slow(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long.
    """
    await asyncio.sleep(seconds)
    return "done"


def tools_of(*functions: Any, timeout: float | None = None) -> Tools:
    return Tools(list(functions), timeout=timeout)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


# ------------------------------------------------------------------ calls in an answer

ADD = ToolCall("add", {"a": 1, "b": 2})


CALLS = [
    (parse_hermes, "No call.", "No call.", []),
    (parse_hermes, "See:\n" + call("add", a=1, b=2), "See:", [ADD]),
    (parse_hermes, call("add", a=1, b=2) + "\n" + call("slow", s=0), "", [ADD, ToolCall("slow", {"s": 0})]),
    (parse_hermes, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', "", [ADD]),
    (parse_mistral, "No call.", "No call.", []),
    (parse_mistral, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]', "", [ADD]),
    (parse_mistral, 'x[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]f{}', "x", [ADD, ToolCall("f")]),
    (parse_llama, "No call.", "No call.", []),
    (parse_llama, '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ADD]),
]


def test_calls_are_read() -> None:
    for parse, text, content, calls in CALLS:
        assert parse(text) == Parsed(content, calls), (parse, text)
    found = parse_llama("{not a call")
    assert found.content == ""
    assert "not JSON" in found.calls[0].error


def test_a_damaged_call_is_told_to_the_policy() -> None:
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


def test_a_call_in_a_thought_is_none(tokenizer: Any) -> None:
    own = call("add", a=1, b=2)
    assert read_calls(parse_hermes, f"<think>{own}</think>3").calls == []
    assert read_calls(parse_hermes, f"<think>{own}</think>{own}").calls == [ADD]
    assert read_calls(parse_hermes, f"<think>{own}") == Parsed(f"<think>{own}", [])  # unfinished
    assert read_calls(parse_hermes, f"{own}<think>{own}").calls == [ADD]
    dialog = Dialog(tokenizer, tools_of(add), {})
    begun = BOT + "<think>\n"  # by the template
    assert dialog.parse(begun, own) == Parsed(own, [])
    assert dialog.parse(begun, "hm</think>" + own) == Parsed("hm</think>", [ADD])


def test_other_parsers() -> None:
    assert read_calls(lambda text: [{"name": "add", "arguments": {"a": 1, "b": 2}}], "x").calls == [ADD]
    assert read_calls(XMLBlockParser(), '<tool name="add">{"a": 1, "b": 2}</tool> y').calls == [ADD]
    assert read_calls(lambda text: None, "x").calls == []


def test_results_and_errors_are_texts() -> None:
    def fails(x: int) -> int:
        """Fail.

        Args:
            x: a number.
        """
        raise RuntimeError("no")

    waits = [ToolCall("add", {"a": 1, "b": 2}), ToolCall("slow", {"seconds": LONG})]
    wrong = [ToolCall("fails", {"x": 1}), ToolCall("add", {"a": 1}), ToolCall("sub")]
    first, second, third = tools_of(add, slow, fails, timeout=0.2).run([waits, [], wrong])
    assert first == ["3", "Error: TimeoutError: took longer than 0.2 s"]
    assert second == []
    assert third[0] == "Error: RuntimeError: no"
    assert "missing 1 required positional argument: 'b'" in third[1]
    assert third[2] == "Error: there is no tool 'sub'. Tools: add, slow, fails"


def test_results_that_are_no_text() -> None:
    itself: list[Any] = []
    itself.append(itself)
    values = {"keys": {(1, 2): 3}, "itself": itself, "half": "a\ud83d", "fine": {"a": math.nan}}

    def look(name: str) -> Any:
        """Look up.

        Args:
            name: what.
        """
        return values[name]

    (found,) = tools_of(look).run([[ToolCall("look", {"name": name}) for name in values]])
    assert found[0].startswith("Error: the result is no JSON: TypeError: keys must be str")
    assert found[1] == "Error: the result is no JSON: ValueError: Circular reference detected"
    assert found[2:] == ["a?", '{"a": NaN}']


def test_tools_need_a_description() -> None:
    with pytest.raises(ValueError, match=r"the tool '<lambda>' has no schema.*Args:"):
        tools_of(lambda x: x)
    with pytest.raises(ValueError, match="two tools are called 'add'"):
        tools_of(add, add)
    with pytest.raises(TypeError, match="a tool must be a function"):
        tools_of("add")


# ------------------------------------------------------------------ chat templates of models

#: Templates that TRL ships -> what each writes after the raw answer "RAW" and the tool's result "R", by reading it.
FAMILIES = {
    "qwen3": "<|im_end|>\n<|im_start|>user\n<tool_response>\nR\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "qwen3_5_think": (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nR\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    ),
    "nemotron_3_nano": (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nR\n</tool_response>\n<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    ),
    "glm4moe": "<|observation|>\n<tool_response>\nR\n</tool_response><|assistant|>",
    "llama3_1": (
        "<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"
        '"R"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
    ),
}
FAMILIES["qwen2_5"] = FAMILIES["qwen3"]


def describe(city: str, days: int, exact: bool) -> str:
    """Describe the weather.

    Args:
        city: where.
        days: how far ahead.
        exact: whether to be exact.
    """
    return f"{city} {days} {exact}"


def of_family(name: str) -> Any:
    trl = pytest.importorskip("trl")
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    special = sorted(set(re.findall(r"<\|[^|<>\s]+\|>|</?tool_call>", template)))
    end = {"llama3_1": "<|eot_id|>", "glm4moe": "<|endoftext|>"}.get(name, "<|im_end|>")
    return make_tokenizer(template, extra_special_tokens=special, eos_token=end, bos_token="<bos>")


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_read_as_the_template_writes_them(name: str) -> None:
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lfm2_v2", r"writes calls in a format that is not known here: .*add\(a=1, b=1\).*Pass tool_parser="),
        ("deepseekv3", "writes calls in a format that is not known here"),
        ("gemma3", "does not render results of tools, TemplateError: Conversation roles must alternate"),
        ("phi3", "does not render results of tools: pass one that does"),
    ],
)
def test_templates_that_cannot_be_used_say_so_at_the_start(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Dialog(of_family(name), tools_of(add), {})


def test_a_parser_of_ones_own_reads_an_unknown_format() -> None:
    def parser(text: str) -> list[dict[str, Any]]:
        found = re.search(r"\[(\w+)\(a=(\d+), b=(\d+)\)\]", text)
        return [{"name": found[1], "arguments": {"a": int(found[2]), "b": int(found[3])}}] if found else []

    dialog = Dialog(of_family("lfm2_v2"), tools_of(add), {}, parser)
    assert dialog.parse("", "<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>").calls == [ADD]


def test_a_parser_that_fails_does_not_stop_the_run(tokenizer: Any) -> None:
    dialog = Dialog(tokenizer, tools_of(add), {}, lambda text: [] if "ok" in text else [][0])
    assert dialog.parse("", "ok").calls == []
    (found,) = dialog.parse("", "x").calls
    assert found.error == "the call cannot be read: IndexError: list index out of range"
    (found,) = Dialog(tokenizer, tools_of(add), {}).parse("", "<tool_call>" + "[" * 100_000).calls
    assert found.error


def test_values_in_tags_have_the_types_of_the_schema() -> None:
    call = "<function=describe>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n12\n</parameter>\n"
    schemas = tools_of(describe).schemas
    (found,) = parse_tagged(f"<tool_call>\n{call}<parameter=exact>\nmaybe\n</parameter>\n</function>", schemas).calls
    assert found == ToolCall("describe", {"city": "12", "days": 12, "exact": "maybe"})


# ------------------------------------------------------------------ an episode

ROWS = [{"question": "1 2"}, {"question": "5 5"}]


def script(prompt: str) -> str:
    """Adds the two numbers, adds 1 to the sum, then says it; "5 5" only once."""
    said = last_user(prompt)
    if not said.startswith("<tool_response>"):
        a, b = said.split()
        return "See " + call("add", a=int(a), b=int(b))
    result = said.removeprefix("<tool_response>").removesuffix("</tool_response>")
    return call("add", a=3, b=1) if result == "3" else f"It is {result}."


ANSWERS = ["See " + call("add", a=1, b=2), call("add", a=3, b=1), "It is 4."]


def right(question: str, answer: str, metadata: dict[str, Any]) -> float:
    return 2.0 if answer == {"1 2": "It is 4.", "5 5": "It is 10."}[question] else -1.0


def toy_env(tokenizer: Any, reward: Any = lambda *_: 1.0, **kwargs: Any) -> Any:
    settings = {"tools": [add], "max_turns": 3, "group_size": 1, "num_prompts": 2, "seed": None}
    return make_env(kwargs.pop("rows", ROWS), reward, tokenizer, **{**settings, **kwargs})


def rows_of(env: Any, policy: Any, turns: int) -> list[TensorDictBase]:
    """The rows of one batch of a collector."""
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=turns, total_dialog_turns=turns)
    rows = [row for batch in collector for row in steps(batch)]
    collector.shutdown()
    return rows


def of_next(rows: list[TensorDictBase], name: str) -> list[float]:
    return [row["next", name].item() for row in rows]


def episodes(rows: list[TensorDictBase]) -> dict[int, list[TensorDictBase]]:
    found: dict[int, list[TensorDictBase]] = {}
    for row in rows:
        found.setdefault(int(row["run"]), []).append(row)
    return found


def test_three_turns(tokenizer: Any) -> None:
    seen: list[list[dict[str, Any]]] = []

    def reward(question: str, answer: str, metadata: dict[str, Any]) -> float:
        seen.append(metadata["messages"])
        return right(question, answer, metadata)

    rows = rows_of(toy_env(tokenizer, reward), scripted_policy(tokenizer, script), 6)
    first, second = episodes(rows)[0], episodes(rows)[1]
    system = "<|im_start|>system\nTools: add <|im_end|>\n"
    prompt = f"{system}<|im_start|>user\n1 2{END}\n{BOT}"
    for row, answer, result in zip(first, ANSWERS, ["3", "4", ""], strict=True):
        assert row["text", "prompt"] == prompt
        assert row["text", "response"] == answer + END
        prompt += answer + END
        prompt += f"\n<|im_start|>user\n<tool_response>{result}</tool_response>{END}\n{BOT}" if result else ""
        assert row["next", "text", "prompt"] == prompt
    assert [row["step"].item() for row in first] == [0, 1, 2]
    assert of_next(first, "reward") == [0.0, 0.0, 2.0]
    assert of_next(first, "terminated") == [False, False, True]
    assert of_next(first, "truncated") == [False] * 3
    # The second row ends after two turns and poses the next prompt, which is the first of the next epoch.
    assert of_next(second, "reward") == [0.0, 2.0]
    assert of_next(second, "done") == [False, True]
    (third,) = episodes(rows)[3]
    assert (third["query"], third["group"].item()) == ("5 5", 3)
    roles = ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [[m["role"] for m in messages] for messages in seen] == [roles[:4], roles]
    assert seen[1][1]["content"] == "See"
    assert seen[1][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert seen[1][2]["content"] == "3"
    assert seen[1][-1] == {"role": "assistant", "content": "It is 4."}


def test_an_episode_that_reaches_the_limit_is_truncated(tokenizer: Any) -> None:
    policy = scripted_policy(tokenizer, lambda prompt: call("add", a=1, b=1))
    for run in episodes(rows_of(toy_env(tokenizer, max_turns=2), policy, 4)).values():
        assert of_next(run, "truncated") == [False, True]
        assert of_next(run, "terminated") == [False, False]
        assert of_next(run, "reward") == [0.0, 1.0]
        assert [m["role"] for m in run[-1]["next", "messages"]] == ["user", "assistant", "tool", "assistant"]


def test_each_token_of_the_assistant_is_charged_once_and_none_of_a_tool(tokenizer: Any, padded: bool) -> None:
    model, ref = make_model(tokenizer, seed=0), make_model(tokenizer, seed=1)
    policy = scripted_policy(tokenizer, script, pad_output=padded, model=model)
    kl = RetrieveKL("from_collector", ref, coeff=0.25, padding_side="left")
    run = episodes(rows_of(toy_env(tokenizer, right, kl_transform=kl), policy, 6))[0]
    scored, total = "", 0.0
    for row in run:
        difference = response_log_probs(model, row) - response_log_probs(ref, row)
        assert_close(row["next", "kl_penalty"], difference, atol=2e-5, rtol=0)
        charged = (row["next", "kl_penalty"] != 0) & row["masks", "all_attention_mask"]
        scored += tokenizer.decode(row["tokens", "full"][charged])
        total += float(difference.sum())
    assert scored == "".join(answer + END for answer in ANSWERS)
    assert abs(total) > 1.0
    paid = sum(float(row["next", "reward"].sum()) for row in run)
    assert paid == pytest.approx(2.0 - 0.25 * total, abs=1e-3)


def test_errors_of_calls_go_back_to_the_policy(tokenizer: Any) -> None:
    damaged = '<tool_call>{"name": "add"'
    policy = scripted_policy(tokenizer, lambda prompt: "ok" if "<tool_response>" in prompt else damaged)
    run = episodes(rows_of(toy_env(tokenizer), policy, 4))[0]
    assert "<tool_response>Error: the call is not JSON" in run[1]["text", "prompt"]
    assert run[1]["text", "prompt"].startswith(run[0]["text", "full"])
    assert run[1]["next", "terminated"].item()
    assert run[1]["next", "messages"][1] == {"role": "assistant", "content": damaged}


def test_an_answer_that_was_cut_gets_its_end_token(tokenizer: Any) -> None:
    dialog = Dialog(tokenizer, tools_of(add), {})
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x"}]
    replies = [{"role": "tool", "name": "add", "content": "3"}]
    after = f"\n<|im_start|>user\n<tool_response>3</tool_response>{END}\n{BOT}"
    assert dialog.next_prompt("x", messages, replies) == f"x{END}{after}"
    assert dialog.next_prompt(f"x{END}", messages, replies) == f"x{END}{after}"


def test_a_user_who_answers(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def reply(messages: list[dict[str, Any]], metadata: dict[str, Any]) -> str | None:
        said = messages[-1]["content"]
        return None if said == "bye" else f"{metadata['mood']} {said}"

    policy = scripted_policy(tokenizer, lambda prompt: {"hi": "a", "sad a": "b"}.get(last_user(prompt), "bye"))
    settings: Any = {"rows": [{"prompt": "hi", "mood": "sad"}], "tools": None, "num_prompts": 1}
    env = toy_env(tokenizer, lambda q, answer, m: len(answer), max_turns=4, reply=reply, **settings)
    rows = rows_of(env, policy, 3)
    assert [row["text", "response"] for row in rows] == [f"a{END}", f"b{END}", f"bye{END}"]
    assert of_next(rows, "done") == [False, False, True]
    assert of_next(rows, "reward") == [0.0, 0.0, 3.0]
    ended = toy_env(tokenizer, max_turns=2, reply=lambda m, _: "more", **settings)
    assert of_next(rows_of(ended, policy, 2), "truncated") == [False, True]
    (row,) = rows_of(toy_env(tokenizer, reply=lambda m, _: 1 / 0, **settings), policy, 1)
    assert row["next", "terminated"].item()
    assert "reply= failed in row 0, whose episode ends: ZeroDivisionError" in caplog.text


def test_a_template_that_fails_later_ends_the_episode(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    odd = "{% for m in messages if m.content == '12' %}{{ raise_exception('no twelve') }}{% endfor %}"
    policy = scripted_policy(tokenizer, lambda prompt: call("add", a=6, b=6))
    rows = rows_of(toy_env(tokenizer, template_kwargs={"chat_template": odd + HERMES}), policy, 2)
    assert of_next(rows, "truncated") == [True, True]
    assert of_next(rows, "reward") == [1.0, 1.0]
    assert "the template cannot continue row 0, whose episode ends: TemplateError: no twelve" in caplog.text


# ------------------------------------------------------------------ groups


def test_whole_groups_of_episodes_of_several_lengths_train(tokenizer: Any) -> None:
    model, ref = make_model(tokenizer, seed=0), make_model(tokenizer, seed=1)
    turn = iter(range(1000))

    def answer(prompt: str) -> str:  # of 1 to 3 turns
        return "It is 4." if next(turn) % 3 == 0 else script(prompt)

    args = {"keys": {"run": "run", "step": "step"}}
    parts = make_algorithm("multi_step_grpo", model, reference=ref, group_key="group", advantage_args=args)
    env = toy_env(tokenizer, right, group_size=2, kl_transform=parts.kl_transform)
    policy = scripted_policy(tokenizer, answer, model=model)
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=4, total_dialog_turns=24)
    seen: list[int] = []
    for batch in whole_groups(collector, group_size=2, num_groups=2):
        runs = episodes(list(batch.unbind(0)))
        groups = set(batch["group"].flatten().tolist())
        assert len(groups) == 2
        assert {run // 2 for run in runs} == groups
        for own in runs.values():
            assert [int(row["step"]) for row in own] == list(range(len(own)))
            assert of_next(own, "done") == [False] * (len(own) - 1) + [True]
        seen += sorted(groups)
        outcome = {run: float(own[-1]["next", "reward"].sum()) for run, own in runs.items()}
        prepared = parts.prepare(batch)
        for row in prepared.unbind(0):
            run = int(row["run"])
            difference = outcome[run] - outcome[run ^ 1]
            assert torch.sign(row["advantage"]).item() == (difference > 0) - (difference < 0)
        parts.loss(prepared).total_loss.backward()
    collector.shutdown()
    assert len(seen) == len(set(seen)) >= 2


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_turns": 1}, "tools= has no effect with one answer"),
        ({"max_turns": 1, "tools": None, "reply": print}, "reply= has no effect with one answer"),
        ({"tools": None}, "nothing follows an answer"),
        ({"tools": None, "reply": print, "tool_parser": parse_hermes}, "tool_parser= has no effect without tools="),
        ({"input_mode": "history"}, "several turns need"),
        ({"max_turns": 0}, "max_turns must be at least 1"),
    ],
)
def test_arguments_without_effect_are_errors(tokenizer: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy_env(tokenizer, **kwargs)


def test_templates_that_hide_tools_or_results() -> None:
    with pytest.warns(UserWarning, match="does not show the tools"):
        toy_env(make_tokenizer(CHATML))
    hides = HERMES.replace("{{ m.content }}</tool_response>", "</tool_response>")
    with pytest.raises(ValueError, match="does not render results of tools"):
        toy_env(make_tokenizer(hides))


# ---------------------------------------------------------------------- any text: linear work, no error


_LONG = 50_000
_HOSTILE = [
    head + (unit * (_LONG // len(unit))) + tail
    for head, unit, tail in (
        ("<tool_call>a", " ", ""),
        ("<tool_call>", "\n", "<x"),
        ("", "<tool_call>", ""),
        ("", "<tool_call>a", "</tool_call>"),
        ("<tool_call>", "<function=", ""),
        ("<tool_call>a", "<parameter=a>", ""),
        ("<tool_call>a", "<parameter=", ""),
        ("<tool_call>a<parameter=a>", "\n", ""),
        ("<tool_call>a<parameter=a>'", "\\'", "</parameter>"),
        ("<tool_call>a", "<arg_key>", "</arg_key>"),
        ("<tool_call>a", "<arg_key>k</arg_key> ", ""),
        ("<tool_call>a<arg_key>k</arg_key>", "<arg_value>", ""),
        ("", "[TOOL_CALLS]a{", ""),
        ("{", '"a":{', ""),
        ("", "<think>", ""),
        ("", "</think>", ""),
    )
]


@pytest.mark.parametrize("parse", [parse_hermes, parse_tagged, parse_mistral, parse_llama])
def test_work_grows_with_the_length_alone(parse: Any) -> None:
    """What is quadratic takes minutes for one of these texts; the limit of a unit fails it."""
    for text in _HOSTILE:
        read_calls(parse, text)


def test_the_end_is_stripped_in_linear_time() -> None:
    assert strip_end("x" + "<end><pad>" * 100_000, ("<end>", "<pad>")) == "x"
    assert strip_end("<pad>" * 200_000, ("<end>", "<pad>")) == ""
    assert strip_end("x<pad>", ()) == "x<pad>"
    assert strip_end("xaba", ("ba", "a")) == "x"


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_hermes, '<tool_call>{"name": "add", "arguments": {"a": %s}}</tool_call>'),
        (parse_mistral, '[TOOL_CALLS][{"name": "add", "arguments": {"a": %s}}]'),
        (parse_mistral, '[TOOL_CALLS]add[ARGS]{"a": %s}'),
        (parse_llama, '{"name": "add", "parameters": {"a": %s}}'),
        (parse_tagged, "<tool_call>add<arg_key>a</arg_key><arg_value>%s</arg_value></tool_call>"),
    ],
)
def test_a_call_that_is_nested_too_deeply_is_told(parse: Any, text: str) -> None:
    def nested(depth: int) -> list[ToolCall]:
        return read_calls(parse, text % ("[" * depth + "]" * depth)).calls

    (call,) = nested(63)  # and the object of the arguments
    assert call.name == "add"
    assert not call.error
    assert isinstance(call.arguments["a"], list)
    for depth in (64, 900):
        (call,) = nested(depth)
        assert (call.arguments, call.error) == ({}, "its arguments are nested more than 64 levels deep")
    (call,) = nested(100_000)
    if parse is parse_tagged:  # what cannot be read is text
        assert call.arguments == {"a": "[" * 100_000 + "]" * 100_000}
    else:
        assert "nested too deeply" in call.error


class Template:
    """A tokenizer whose ``response_template`` finds as many calls as an answer has brackets."""

    chat_template = "{{ messages }}"
    response_template = True

    def parse_response(self, text: str, prefix: str, tools: Any) -> dict[str, Any]:
        return {"content": "", "tool_calls": [{"name": "f", "arguments": {}}] * text.count("<")}


def test_too_many_calls_are_told() -> None:
    one = '<tool_call>{"name": "add"}</tool_call>'
    assert len(parse_hermes(one * 1000).calls) == 1000
    dialog = Dialog.__new__(Dialog)
    dialog.tools, dialog._parser, dialog.tokenizer = SimpleNamespace(schemas=[]), None, Template()
    assert len(dialog.parse("", "<" * 10).calls) == 10
    for found in (
        read_calls(parse_hermes, one * 1001),
        read_calls(parse_hermes, f"<tool_call>[{'{},' * 1000}{{}}]</tool_call>"),
        dialog.parse("", "<" * 1001),
    ):
        assert [call.error for call in found.calls] == ["an answer has at most 1000 calls"]
    # The tokenizer's own parser would take minutes: it does not get such an answer.
    (call,) = dialog.parse("", "<tool_call></tool_call>" * 50_000).calls
    assert "1,150,000 characters is too long" in call.error


def test_values_as_python_prints_them() -> None:
    values = ["it's", 'say "x"', 'it\'s "x"', "\\", "a\nb\x07", True, None, {"k": [1.5, -2, "True"]}]
    for value in ([values], *([value] for value in values)):
        text = f"<tool_call>f<arg_key>a</arg_key><arg_value>{value!r}</arg_value></tool_call>"
        assert parse_tagged(text).calls == [ToolCall("f", {"a": value})], value
    for value in (True, None, values[-1]):
        text = f"<tool_call>f<arg_key>a</arg_key><arg_value>{value!r}</arg_value></tool_call>"
        assert parse_tagged(text).calls == [ToolCall("f", {"a": value})], value


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
]


def test_arguments_with_tags() -> None:
    for body, arguments in BODIES:
        text = f"<tool_call><function=f>{body}</function></tool_call>"
        assert parse_tagged(text).calls == [ToolCall("f", arguments)], body
    found = parse_tagged("a <tool_call><x><tool_call>f</tool_call> b <tool_call>g")  # a block without a head is text
    assert found == Parsed("a <tool_call><x> b", [ToolCall("f"), ToolCall("g")])
