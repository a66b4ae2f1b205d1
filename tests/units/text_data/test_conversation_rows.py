"""Conversations as files hold them: other formats, calls, parts, weights, variables, lost texts, and one row for each turn.

The templates are those that TRL ships, from 30 model families, so that each row meets every way in which templates read it.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import template_pairs
from torchrl_llm_kl import from_completions, from_conversations
from torchrl_llm_kl.datasets import DataError, Encoder, Row, Skip, Skipped, SkippedRowsWarning
from torchrl_llm_kl.masks import render_conversation
from torchrl_llm_kl.tasks import Prompts
from toy_tokenizer import CHATML, build_tokenizer

TOKENIZER = build_tokenizer(CHATML)
USER = {"role": "user", "content": "what is it?"}
ANSWER = {"role": "assistant", "content": "it rains9"}
CHAT = [USER, ANSWER]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "description": "?", "parameters": {}}}]
#: Templates of TRL that raise for a conversation with a call, and those that leave the call out.
RAISES = {"cohere", "cohere2", "gemma", "gemma3", "idefics3", "llava_next", "smolvlm"}
LOSES_CALLS = {"deepseek_r1_distill", "lfm2", "llama3", "phi3", "phi3_5", "qwen2_5_vl"}


def call(arguments: object) -> dict[str, Any]:
    return {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def with_call(arguments: object) -> list[dict[str, Any]]:
    asked = {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}
    return [USER, asked, {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "rain"}, ANSWER]


def encode(value: dict[str, Any], tokenizer: PreTrainedTokenizerBase = TOKENIZER, **options: Any) -> list[Any]:
    return Encoder("messages", tokenizer, **options).encode(Row(0, "row 1", value))


def trained(value: dict[str, Any], **options: Any) -> list[str]:
    """The trained text of each sequence of a row."""
    answers = encode(value, **options)
    assert not any(isinstance(answer, Skip) for answer in answers), answers
    return [TOKENIZER.decode(answer.tokens[answer.mask]) for answer in answers]


@pytest.fixture(params=range(12))
def families(request: pytest.FixtureRequest) -> list[str]:
    """A part of the templates."""
    pytest.importorskip("trl", reason="its templates are rendered")
    return template_pairs.all_templates()[request.param :: 12]


@cache
def family(name: str) -> PreTrainedTokenizerBase:
    return template_pairs.tokenizer_for(name)


# ------------------------------------------------------------------ every template


def test_arguments_as_a_dict_and_as_json_text_are_rendered_alike(families: list[str]) -> None:
    for name in families:
        encoded = [
            encode({"messages": with_call(x), "tools": TOOLS}, family(name))
            for x in ({"city": "Oslo5"}, '{"city": "Oslo5"}')
        ]
        (one,), (other,) = encoded
        if isinstance(one, Skip):
            assert (name.removesuffix("_training") in RAISES, other.reason) == (True, "template"), name
            continue
        assert torch.equal(one.tokens, other.tokens), name
        text = family(name).decode(one.tokens)
        lost = "the template does not write the tool calls of a message" in one.notes
        assert lost == ("Oslo5" not in text) == (name.removesuffix("_training") in LOSES_CALLS), name
        assert '\\"city' not in text, name
        assert "'city'" not in text, name


def test_text_parts_and_an_empty_list_of_calls_change_nothing(families: list[str]) -> None:
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in CHAT]
    for name in families:
        (plain,) = encode({"messages": CHAT}, family(name))
        assert "it rains9" in family(name).decode(plain.tokens[plain.mask]), name
        for messages in (parts, [USER, {**ANSWER, "tool_calls": []}]):
            (other,) = encode({"messages": messages}, family(name))
            assert torch.equal(plain.tokens, other.tokens), name
            assert torch.equal(plain.mask, other.mask), name


def test_reasoning_that_a_template_does_not_write_is_reported(families: list[str]) -> None:
    note = "the template does not write the reasoning of a message"
    messages = [USER, {**ANSWER, "reasoning_content": "thought8"}, USER, {**ANSWER, "reasoning_content": "second6"}]
    for name in families:
        rendered = render_conversation(family(name), messages)
        seen = "thought8" in rendered.text, "second6" in rendered.text
        assert [each.message for each in rendered.lost] == [i for i, each in zip((1, 3), seen, strict=True) if not each]
        (answer,) = encode({"messages": messages}, family(name))
        assert (note in answer.notes) == (not all(seen)), name
        (last,) = encode({"messages": messages}, family(name), turns="last")
        assert (note in last.notes) == (not seen[1]), name  # the reasoning of earlier turns is not trained
        strict = encode({"messages": messages}, family(name), strict=True)[0]
        assert isinstance(strict, Skip) == (not all(seen)), name


def test_reasoning_inside_the_content(families: list[str]) -> None:
    """Some templates cut it off, and Qwen3.8's adds a second end of it."""
    messages = [USER, {"role": "assistant", "content": "<think>thought8</think>\n\nit rains9"}]
    problems = {name: {each.problem for each in render_conversation(family(name), messages).lost} for name in families}
    cut = {"writes only a part of the content"}
    again = {"adds a second </think> to the content"}
    expected = dict.fromkeys(("deepseek_r1_distill", "deepseekv3", "deepseekv3_training"), cut)
    expected |= dict.fromkeys(("qwen3_8", "qwen3_8_training"), again)
    assert problems == {name: expected.get(name, set()) for name in families}


# ------------------------------------------------------------------ rows


def test_nulls_of_arrow_go_at_every_depth(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    tokenizer = family("qwen3")
    rows = [
        {
            "messages": with_call({"city": "Oslo"}),
            "tools": [{"name": "weather", "parameters": {"city": {"type": "string"}}}],
        },
        {"messages": with_call({"a": 1, "b": 2}), "tools": [{"name": "add", "parameters": {"a": {"type": "int"}}}]},
    ]
    pandas.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    plain = from_conversations(rows, tokenizer)
    stored = from_conversations(tmp_path / "rows.parquet", tokenizer)
    for one, other in zip(plain, stored, strict=True):
        assert torch.equal(one["tokens", "full"], other["tokens", "full"])


def test_formats_of_other_frameworks() -> None:
    said = "it rains9<|im_end|>"
    sharegpt = [{"from": "human", "value": "what is it?"}, {"from": "gpt", "value": "it rains9"}]
    for row in (
        {"messages": CHAT},
        {"conversations": sharegpt},
        {"messages": sharegpt},
        {"messages": json.dumps(CHAT)},
        {"conversation": CHAT, "source": "x"},
    ):
        (row_td,) = from_conversations([row], TOKENIZER)
        assert (
            TOKENIZER.decode(row_td["tokens", "full"])
            == TOKENIZER.apply_chat_template(CHAT, tokenize=False).rstrip() + "\n"
        )
        assert TOKENIZER.decode(row_td["tokens", "full"][row_td["masks", "all_assistant_mask"]]) == said
    called = [*sharegpt[:1], {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo5"}}'}]
    rows = [
        {"conversations": [*called, {"from": "observation", "value": "rain"}, sharegpt[1]], "tools": json.dumps(TOOLS)}
    ]
    (td,) = from_conversations(rows, family("qwen3"))
    assert '{"name": "weather", "arguments": {"city": "Oslo5"}}' in family("qwen3").decode(td["tokens", "full"])
    alpaca = {"instruction": "Add.", "input": "1 + 1", "output": "2"}
    (td,) = from_completions([alpaca], TOKENIZER, as_chat=True)
    assert "Add.\n\n1 + 1" in TOKENIZER.decode(td["tokens", "prompt"])
    assert (
        Prompts([{"conversations": sharegpt[:1]}, {"instruction": "Add.", "output": "2"}])[0].question == "what is it?"
    )


def test_unpaired_rows_with_labels() -> None:
    rows = [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "c", "completion": "d", "label": False}]
    data = from_completions(rows, TOKENIZER)
    assert data["chosen"].tolist() == [True, False]
    assert "chosen" not in from_completions([{"prompt": "a", "completion": "b", "label": "x"}], TOKENIZER)[0]


@pytest.mark.parametrize("key", ["weight", "loss", "trainable", "loss_mask", "train", "train_on_turn"])
def test_turns_marked_as_bad_are_not_trained(key: str) -> None:
    bad = {"role": "assistant", "content": "bad"}
    messages = [USER, {**bad, key: 0}, USER, ANSWER]
    assert trained({"messages": messages}) == ["it rains9<|im_end|>"]
    (td,) = from_conversations([messages], TOKENIZER)
    assert TOKENIZER.decode(td["tokens", "full"][td["masks", "all_assistant_mask"]]) == "it rains9<|im_end|>"
    assert trained({"messages": [USER, {**bad, key: True}]}) == ["bad<|im_end|>"]
    (skip,) = encode({"messages": [USER, {**bad, key: 0.5}]})
    assert skip.detail == f"has the {key} 0.5 in a message, expected 0 or 1"
    (skip,) = encode({"messages": [USER, {**bad, key: False}]})
    assert (skip.reason, skip.detail) == ("no assistant turn", "no turn of the assistant that is trained")


def test_variables_tools_and_system_prompts_of_a_row() -> None:
    template = (
        "{% if thinking is defined and not thinking %}[fast]{% endif %}{% if tone %}[{{ tone }}]{% endif %}"
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = build_tokenizer(template)
    row = {"messages": CHAT, "thinking": False, "tools": json.dumps(TOOLS), "system": "Be brief.", "level": 3}
    row["chat_template_kwargs"] = {"tone": "dry"}
    (td,) = from_conversations([row], tokenizer, template_kwargs={"tone": "warm", "thinking": True})
    text = tokenizer.decode(td["tokens", "full"])
    assert text == "[fast][dry][weather]<system>Be brief.<end><user>what is it?<end><assistant>it rains9<end>"
    assert int(td["metadata", "level"]) == 3


def test_one_row_for_each_turn() -> None:
    """Every turn's reasoning is written once, in the row where it was sampled."""
    tokenizer = family("qwen3")
    thought = [{**ANSWER, "content": f"answer{i}", "reasoning_content": f"thought{i}"} for i in range(3)]
    messages = [USER, thought[0], USER, {**thought[1], "weight": 0}, USER, thought[2]]
    with pytest.warns(SkippedRowsWarning, match="used 1 in which the template does not write the reasoning"):
        (whole,) = from_conversations([{"messages": messages, "level": 4}], tokenizer)
    assert "thought0" not in tokenizer.decode(whole["tokens", "full"])
    data = from_conversations([{"messages": messages, "level": 4}, CHAT], tokenizer, turns="each")
    assert data.batch_size == (3,)
    texts = [tokenizer.decode(row["tokens", "full"][len(row["tokens", "prompt"]) :]) for row in data]
    assert [("thought0" in text, "answer0" in text, "answer2" in text) for text in texts] == [
        (True, True, False),
        (False, False, True),
        (False, False, False),
    ]
    assert [row["metadata", "level"] for row in data] == [4, 4, None]
    with pytest.raises(ValueError, match='turns="each" has no meaning for pairs'):
        Encoder("preference", TOKENIZER, turns="each")


def test_tokens_across_the_border_of_prompt_and_completion_are_counted() -> None:
    words = Tokenizer(models.WordLevel({"the": 0, "weath": 1, "er": 2, "weather": 3, "is": 4}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    counted: list[Skipped] = []
    rows = [{"prompt": "the weath", "completion": "er is"}, {"prompt": "the ", "completion": "weather"}]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    from_completions(rows, tokenizer, add_eos=False, on_skip=counted.append)
    assert counted[0].notes == {"a token crosses the border of prompt and completion": 1}
    assert "used 1 in which a token crosses the border of prompt and completion" in str(counted[0])


def test_strict_rows_are_refused() -> None:
    messages = [USER, {**ANSWER, "reasoning_content": "thought8"}]
    with pytest.raises(
        DataError, match="row 1 of the list, not written: the template does not write the reasoning of a message"
    ):
        from_conversations([messages], TOKENIZER, strict=True, on_skip="raise")
