"""Several turns: calls in an answer, their results in the next prompt, the reward at the end, each token charged once."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch.testing import assert_close
from torchrl.collectors.llm import LLMCollector
from torchrl.envs.llm.transforms import XMLBlockParser

from task_lab import BOT, END, HERMES, last_user, make_tokenizer, scripted_policy
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


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


async def slow(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long.
    """
    await asyncio.sleep(seconds)
    return "done"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


# ------------------------------------------------------------------ calls in an answer

ADD = ToolCall("add", {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("parse", "text", "content", "calls"),
    [
        (parse_hermes, "No call.", "No call.", []),
        (parse_hermes, "See:\n" + call("add", a=1, b=2), "See:", [ADD]),
        (
            parse_hermes,
            call("add", a=1, b=2) + "\n" + call("slow", seconds=0),
            "",
            [ADD, ToolCall("slow", {"seconds": 0})],
        ),
        (parse_hermes, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', "", [ADD]),
        (parse_mistral, "No call.", "No call.", []),
        (parse_mistral, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]', "", [ADD]),
        (parse_mistral, 'x[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]f{}', "x", [ADD, ToolCall("f")]),
        (parse_llama, "{not a call", "", None),
        (parse_llama, "No call.", "No call.", []),
        (parse_llama, '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ADD]),
    ],
)
def test_calls_are_read(parse: Any, text: str, content: str, calls: list[ToolCall] | None) -> None:
    parsed = parse(text)
    assert parsed.content == content
    if calls is None:
        assert "not JSON" in parsed.calls[0].error
    else:
        assert parsed.calls == calls


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('{"name": "add", "argum', "the call is not JSON"),
        ('{"arguments": {}}', "JSON object with `name`"),
        ('{"name": "add", "arguments": [1]}', "not a JSON object"),
        ('{"name": "add", "arguments": "{"}', "arguments are not JSON"),
        ("[1]", "JSON object with `name`"),
    ],
)
@pytest.mark.parametrize("closed", ["</tool_call>", ""])
def test_a_damaged_call_is_told_to_the_policy(body: str, error: str, closed: str) -> None:
    (found,) = parse_hermes(f"<tool_call>{body}{closed}").calls
    assert error in found.error
    assert Tools([add], timeout=5.0).run([[found]])[0][0].startswith("Error: ")


def test_a_call_in_a_thought_is_none() -> None:
    thought = f"<think>{call('add', a=1, b=2)}</think>"
    assert read_calls(parse_hermes, thought + "3").calls == []
    assert read_calls(parse_hermes, thought + call("add", a=1, b=2)).calls == [ADD]


def test_a_call_in_an_unfinished_thought_is_none(tokenizer: Any) -> None:
    thought = f"<think>{call('add', a=1, b=2)}"
    assert read_calls(parse_hermes, thought) == Parsed(thought, [])
    assert read_calls(parse_hermes, call("add", a=1, b=2) + thought).calls == [ADD]
    dialog = Dialog(tokenizer, Tools([add], timeout=None), {})
    begun = BOT + "<think>\n"  # by the template
    assert dialog.parse(begun, call("add", a=1, b=2)) == Parsed(call("add", a=1, b=2), [])
    assert dialog.parse(begun, "hm</think>" + call("add", a=1, b=2)) == Parsed("hm</think>", [ADD])


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

    tools = Tools([add, slow, fails], timeout=0.2)
    started = time.monotonic()
    results = tools.run(
        [
            [ToolCall("add", {"a": 1, "b": 2}), ToolCall("slow", {"seconds": 60})],
            [],
            [ToolCall("fails", {"x": 1}), ToolCall("add", {"a": 1}), ToolCall("sub")],
        ]
    )
    assert time.monotonic() - started < 10
    assert results[0] == ["3", "Error: TimeoutError: took longer than 0.2 s"]
    assert results[1] == []
    assert results[2][0] == "Error: RuntimeError: no"
    assert "missing 1 required positional argument: 'b'" in results[2][1]
    assert results[2][2] == "Error: there is no tool 'sub'. Tools: add, slow, fails"


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

    (found,) = Tools([look], timeout=None).run([[ToolCall("look", {"name": name}) for name in values]])
    assert found[0].startswith("Error: the result is no JSON: TypeError: keys must be str")
    assert found[1] == "Error: the result is no JSON: ValueError: Circular reference detected"
    assert found[2:] == ["a?", '{"a": NaN}']


def test_tools_need_a_description() -> None:
    with pytest.raises(ValueError, match=r"the tool '<lambda>' has no schema.*Args:"):
        Tools([lambda x: x], timeout=None)
    with pytest.raises(ValueError, match="two tools are called 'add'"):
        Tools([add, add], timeout=None)
    with pytest.raises(TypeError, match="a tool must be a function"):
        Tools(["add"], timeout=None)  # type: ignore[list-item]


# ------------------------------------------------------------------ chat templates of models

#: Templates that TRL ships -> what each writes after the raw answer "RAW" and the tool's result "R", by reading it.
FAMILIES = {
    "qwen2_5": (
        "RAW<|im_end|>\n<|im_start|>user\n<tool_response>\nR\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    ),
    "qwen3": "RAW<|im_end|>\n<|im_start|>user\n<tool_response>\nR\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "qwen3_5_think": (
        "RAW<|im_end|>\n<|im_start|>user\n<tool_response>\nR\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    ),
    "nemotron_3_nano": (
        "RAW<|im_end|>\n<|im_start|>user\n<tool_response>\nR\n</tool_response>\n<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    ),
    "glm4moe": "RAW<|observation|>\n<tool_response>\nR\n</tool_response><|assistant|>",
    "llama3_1": (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"R"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
    ),
}


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
    ends = {"llama3_1": "<|eot_id|>", "glm4moe": "<|endoftext|>"}
    return make_tokenizer(
        template, extra_special_tokens=special, eos_token=ends.get(name, "<|im_end|>"), bos_token="<bos>"
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_read_as_the_template_writes_them(name: str) -> None:
    tokenizer = of_family(name)
    dialog = Dialog(tokenizer, Tools([describe, add], timeout=None), {})
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
    want = FAMILIES[name]
    assert after == (want if want.startswith("RAW") else f"RAW<|eot_id|>{want}")


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
        Dialog(of_family(name), Tools([add], timeout=None), {})


def test_a_parser_of_ones_own_reads_an_unknown_format() -> None:
    def parser(text: str) -> list[dict[str, Any]]:
        found = re.search(r"\[(\w+)\(a=(\d+), b=(\d+)\)\]", text)
        return [{"name": found[1], "arguments": {"a": int(found[2]), "b": int(found[3])}}] if found else []

    dialog = Dialog(of_family("lfm2_v2"), Tools([add], timeout=None), {}, parser)
    assert dialog.parse("", "<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>").calls == [ADD]


def test_a_parser_that_fails_does_not_stop_the_run(tokenizer: Any) -> None:
    def parser(text: str) -> list[Any]:
        return [] if "ok" in text else [][0]

    dialog = Dialog(tokenizer, Tools([add], timeout=None), {}, parser)
    assert dialog.parse("", "ok").calls == []
    (found,) = dialog.parse("", "x").calls
    assert found.error == "the call cannot be read: IndexError: list index out of range"
    plain = Dialog(tokenizer, Tools([add], timeout=None), {})
    (found,) = plain.parse("", "<tool_call>" + "[" * 100_000).calls
    assert found.error


def test_values_in_tags_have_the_types_of_the_schema() -> None:
    call = "<function=describe>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n12\n</parameter>\n"
    schemas = Tools([describe], timeout=None).schemas
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
    if result == "3":
        return call("add", a=3, b=1)
    return f"It is {result}."


def right(question: str, answer: str, metadata: dict[str, Any]) -> float:
    return 2.0 if answer == {"1 2": "It is 4.", "5 5": "It is 10."}[question] else -1.0


def toy_env(tokenizer: Any, reward: Any = right, **kwargs: Any) -> Any:
    settings = {"tools": [add], "max_turns": 3, "group_size": 1, "num_prompts": 2, "seed": None}
    return make_env(ROWS, reward, tokenizer, **{**settings, **kwargs})


def rows_of(collector: LLMCollector) -> list[TensorDictBase]:
    rows = [row for batch in collector for row in steps(batch)]
    collector.shutdown()
    return rows


def episodes(rows: list[TensorDictBase]) -> dict[int, list[TensorDictBase]]:
    found: dict[int, list[TensorDictBase]] = {}
    for row in rows:
        found.setdefault(int(row["run"]), []).append(row)
    return found


def test_three_turns(tokenizer: Any, padded: bool) -> None:
    policy = scripted_policy(tokenizer, script, pad_output=padded)
    seen: list[list[dict[str, Any]]] = []

    def reward(question: str, answer: str, metadata: dict[str, Any]) -> float:
        seen.append(metadata["messages"])
        return right(question, answer, metadata)

    env = toy_env(tokenizer, reward)
    rows = rows_of(LLMCollector(env, policy=policy, dialog_turns_per_batch=6, total_dialog_turns=6))
    first, second = episodes(rows)[0], episodes(rows)[1]
    system = "<|im_start|>system\nTools: add <|im_end|>\n"
    prompt = f"{system}<|im_start|>user\n1 2{END}\n{BOT}"
    answers = ["See " + call("add", a=1, b=2), call("add", a=3, b=1), "It is 4."]
    for row, answer, result in zip(first, answers, ["3", "4", ""], strict=True):
        assert row["text", "prompt"] == prompt
        assert row["text", "response"] == answer + END
        prompt += answer + END
        prompt += f"\n<|im_start|>user\n<tool_response>{result}</tool_response>{END}\n{BOT}" if result else ""
        assert row["next", "text", "prompt"] == prompt
    assert [row["step"].item() for row in first] == [0, 1, 2]
    assert [row["next", "reward"].item() for row in first] == [0.0, 0.0, 2.0]
    assert [row["next", "terminated"].item() for row in first] == [False, False, True]
    assert [row["next", "truncated"].item() for row in first] == [False] * 3
    # The second row ends after two turns and poses the next prompt, which is the first of the next epoch.
    assert [row["next", "reward"].item() for row in second] == [0.0, 2.0]
    assert [row["next", "done"].item() for row in second] == [False, True]
    (third,) = episodes(rows)[3]
    assert third["query"] == "5 5"
    assert third["group"].item() == 3
    roles = ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [[m["role"] for m in messages] for messages in seen] == [roles[:2] + roles[2:4], roles]
    called = {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert seen[1][1]["content"] == "See"
    assert seen[1][1]["tool_calls"][0]["function"] == called
    assert seen[1][2]["content"] == "3"
    assert seen[1][-1] == {"role": "assistant", "content": "It is 4."}


def test_an_episode_that_reaches_the_limit_is_truncated(tokenizer: Any) -> None:
    policy = scripted_policy(tokenizer, lambda prompt: call("add", a=1, b=1))
    env = toy_env(tokenizer, lambda *_: 1.0, max_turns=2)
    rows = rows_of(LLMCollector(env, policy=policy, dialog_turns_per_batch=4, total_dialog_turns=4))
    for run in episodes(rows).values():
        assert [row["next", "truncated"].item() for row in run] == [False, True]
        assert [row["next", "terminated"].item() for row in run] == [False, False]
        assert [row["next", "reward"].item() for row in run] == [0.0, 1.0]
        assert [m["role"] for m in run[-1]["next", "messages"]] == ["user", "assistant", "tool", "assistant"]


def test_each_token_of_the_assistant_is_charged_once_and_none_of_a_tool(tokenizer: Any, padded: bool) -> None:
    model, ref = make_model(tokenizer, seed=0), make_model(tokenizer, seed=1)
    policy = scripted_policy(tokenizer, script, pad_output=padded, model=model)
    env = toy_env(tokenizer, kl_transform=RetrieveKL("from_collector", ref, coeff=0.25, padding_side="left"))
    rows = rows_of(LLMCollector(env, policy=policy, dialog_turns_per_batch=6, total_dialog_turns=6))
    run = episodes(rows)[0]
    scored, total = "", 0.0
    for row in run:
        attention = row["masks", "all_attention_mask"]
        gen, reference = response_log_probs(model, row), response_log_probs(ref, row)
        assert_close(row["next", "kl_penalty"], gen - reference, atol=2e-5, rtol=0)
        charged = (row["next", "kl_penalty"] != 0) & attention
        scored += tokenizer.decode(row["tokens", "full"][charged])
        total += float((gen - reference).sum())
    answers = ["See " + call("add", a=1, b=2), call("add", a=3, b=1), "It is 4."]
    assert scored == "".join(answer + END for answer in answers)
    assert abs(total) > 1.0
    paid = sum(float(row["next", "reward"].sum()) for row in run)
    assert paid == pytest.approx(2.0 - 0.25 * total, abs=1e-3)


def test_errors_of_calls_go_back_to_the_policy(tokenizer: Any) -> None:
    def answer(prompt: str) -> str:
        return "ok" if "<tool_response>" in prompt else '<tool_call>{"name": "add"'

    env = toy_env(tokenizer, lambda *_: 1.0, max_turns=4)
    policy = scripted_policy(tokenizer, answer)
    rows = rows_of(LLMCollector(env, policy=policy, dialog_turns_per_batch=4, total_dialog_turns=4))
    run = episodes(rows)[0]
    assert "<tool_response>Error: the call is not JSON" in run[1]["text", "prompt"]
    assert run[1]["text", "prompt"].startswith(run[0]["text", "full"])
    assert run[1]["next", "terminated"].item()
    assert run[1]["next", "messages"][1] == {"role": "assistant", "content": '<tool_call>{"name": "add"'}


def test_an_answer_that_was_cut_gets_its_end_token(tokenizer: Any) -> None:
    dialog = Dialog(tokenizer, Tools([add], timeout=None), {})
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x"}]
    replies = [{"role": "tool", "name": "add", "content": "3"}]
    after = f"\n<|im_start|>user\n<tool_response>3</tool_response>{END}\n{BOT}"
    assert dialog.next_prompt("x", messages, replies) == f"x{END}{after}"
    assert dialog.next_prompt(f"x{END}", messages, replies) == f"x{END}{after}"


def test_a_user_who_answers(tokenizer: Any) -> None:
    async def reply(messages: list[dict[str, Any]], metadata: dict[str, Any]) -> str | None:
        said = messages[-1]["content"]
        return None if said == "bye" else f"{metadata['mood']} {said}"

    policy = scripted_policy(tokenizer, lambda prompt: {"hi": "a", "sad a": "b"}.get(last_user(prompt), "bye"))
    env = make_env(
        [{"prompt": "hi", "mood": "sad"}],
        lambda q, answer, m: len(answer),
        tokenizer,
        group_size=1,
        max_turns=4,
        reply=reply,
    )
    rows = rows_of(LLMCollector(env, policy=policy, dialog_turns_per_batch=3, total_dialog_turns=3))
    assert [row["text", "response"] for row in rows] == [f"a{END}", f"b{END}", f"bye{END}"]
    assert [row["next", "done"].item() for row in rows] == [False, False, True]
    assert rows[-1]["next", "reward"].item() == 3.0
    ended = make_env(["hi"], lambda *_: 1.0, tokenizer, group_size=1, max_turns=2, reply=lambda m, _: "more")
    rows = rows_of(LLMCollector(ended, policy=policy, dialog_turns_per_batch=2, total_dialog_turns=2))
    assert [row["next", "truncated"].item() for row in rows] == [False, True]


def test_a_reply_that_fails_ends_the_episode(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    policy = scripted_policy(tokenizer, lambda prompt: "a")
    env = make_env(["hi"], lambda *_: 1.0, tokenizer, group_size=1, max_turns=3, reply=lambda m, _: 1 / 0)
    (row,) = rows_of(LLMCollector(env, policy=policy, dialog_turns_per_batch=1, total_dialog_turns=1))
    assert row["next", "terminated"].item()
    assert "reply= failed in row 0, whose episode ends: ZeroDivisionError" in caplog.text


def test_a_template_that_fails_later_ends_the_episode(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    odd = "{% for m in messages if m.content == '12' %}{{ raise_exception('no twelve') }}{% endfor %}"
    policy = scripted_policy(tokenizer, lambda prompt: call("add", a=6, b=6))
    env = toy_env(tokenizer, lambda *_: 1.0, template_kwargs={"chat_template": odd + HERMES})
    rows = rows_of(LLMCollector(env, policy=policy, dialog_turns_per_batch=2, total_dialog_turns=2))
    assert [row["next", "truncated"].item() for row in rows] == [True, True]
    assert [row["next", "reward"].item() for row in rows] == [1.0, 1.0]
    assert "the template cannot continue row 0, whose episode ends: TemplateError: no twelve" in caplog.text


# ------------------------------------------------------------------ groups


def test_whole_groups_of_episodes_of_several_lengths_train(tokenizer: Any) -> None:
    model, ref = make_model(tokenizer, seed=0), make_model(tokenizer, seed=1)
    turn = iter(range(1000))

    def answer(prompt: str) -> str:  # of 1 to 3 turns
        return "It is 4." if next(turn) % 3 == 0 else script(prompt)

    parts = make_algorithm(
        "multi_step_grpo",
        model,
        reference=ref,
        group_key="group",
        advantage_args={"keys": {"run": "run", "step": "step"}},
    )
    env = toy_env(tokenizer, group_size=2, kl_transform=parts.kl_transform)
    policy = scripted_policy(tokenizer, answer, model=model)
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=4, total_dialog_turns=24)
    seen: list[int] = []
    for batch in whole_groups(collector, group_size=2, num_groups=2):
        runs = batch["run"].flatten().tolist()
        groups = batch["group"].flatten().tolist()
        assert len(set(groups)) == 2
        assert {run // 2 for run in runs} == set(groups)
        for run in set(runs):
            own = [row for row in batch.unbind(0) if int(row["run"]) == run]
            assert [int(row["step"]) for row in own] == list(range(len(own)))
            assert [bool(row["next", "done"]) for row in own] == [False] * (len(own) - 1) + [True]
        seen += sorted(set(groups))
        prepared = parts.prepare(batch)
        outcome = {
            int(row["run"]): float(row["next", "reward"].sum()) for row in batch.unbind(0) if row["next", "done"]
        }
        for row in prepared.unbind(0):
            run = int(row["run"])
            other = outcome[run ^ 1]
            assert torch.sign(row["advantage"]).item() == (outcome[run] > other) - (outcome[run] < other)
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


_LONG = 200_000
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
    """What is quadratic takes minutes for one of these texts."""
    start = time.process_time()
    for text in _HOSTILE:
        read_calls(parse, text)
    assert time.process_time() - start < 30


def test_the_end_is_stripped_in_linear_time() -> None:
    start = time.process_time()
    assert strip_end("x" + "<end><pad>" * 100_000, ("<end>", "<pad>")) == "x"
    assert strip_end("<pad>" * 200_000, ("<end>", "<pad>")) == ""
    assert strip_end("x<pad>", ()) == "x<pad>"
    assert strip_end("xaba", ("ba", "a")) == "x"
    assert time.process_time() - start < 10


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


def test_too_many_calls_are_told() -> None:
    one = '<tool_call>{"name": "add"}</tool_call>'
    assert len(parse_hermes(one * 1000).calls) == 1000
    for parse, text in ((parse_hermes, one * 1001), (parse_hermes, f"<tool_call>[{'{},' * 1000}{{}}]</tool_call>")):
        (call,) = read_calls(parse, text).calls
        assert call.error == "an answer has at most 1000 calls"


def test_numbers_of_many_digits_are_told() -> None:
    (call,) = parse_hermes(f'<tool_call>{{"name": "add", "arguments": {{"a": {"1" * 5000}}}}}</tool_call>').calls
    assert call.error.startswith("the call is not JSON: Exceeds the limit")


_ROUND_TRIP = ["it's", 'say "x"', 'it\'s "x"', "\\", "a\nb\x07", True, None, {"k": [1.5, -2, "True"]}]


@pytest.mark.parametrize("value", [*_ROUND_TRIP, _ROUND_TRIP])
def test_values_as_python_prints_them(value: Any) -> None:
    text = repr(value) if not isinstance(value, str) else repr([value])
    text = f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"
    assert parse_tagged(text).calls == [ToolCall("f", {"a": [value] if isinstance(value, str) else value})]


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        (
            "<parameter=a>\n\n1\n\n</parameter>",
            {"a": 1},
        ),  # JSON reads white space; one newline of each side is the tags'
        ("<parameter=a>\n\nx\n\n</parameter>", {"a": "\nx\n"}),
        ("<parameter=a>x<parameter=b>1</parameter>", {"a": "x<parameter=b>1"}),
        ("<parameter=a></arg_value></parameter><parameter=b>2", {"a": "</arg_value>"}),
        ("<arg_key>a</arg_key>\n<arg_value>True</arg_value><arg_key>b</arg_key>", {"a": True}),
        ("<arg_key>a</arg_key>x<arg_value>1</arg_value><arg_key>b</arg_key><arg_value>2</arg_value>", {"b": 2}),
        ("<arg_key>a</arg_key><arg_key>b</arg_key><arg_value>2</arg_value>", {"b": 2}),
        ("<parameter=a>'x</parameter>", {"a": "'x"}),
        ("<parameter=a>True story</parameter>", {"a": "True story"}),
    ],
)
def test_arguments_with_tags(body: str, arguments: dict[str, Any]) -> None:
    assert parse_tagged(f"<tool_call><function=f>{body}</function></tool_call>").calls == [ToolCall("f", arguments)]


def test_blocks_without_a_head_are_text() -> None:
    found = parse_tagged("a <tool_call><x><tool_call>f</tool_call> b <tool_call>g")
    assert found == Parsed("a <tool_call><x> b", [ToolCall("f"), ToolCall("g")])
