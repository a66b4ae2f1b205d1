"""TRL's marked templates as the oracle for masks found on the models' own, unmarked templates."""

from __future__ import annotations

import importlib.util

import pytest

pytest.importorskip("trl", reason="TRL's chat templates are the oracle")

import template_pairs
from project import PROJECT
from template_pairs import CALL, CONVERSATIONS, assistant, compare, conversation, pairs, read, tokenizer_for, user
from torchrl_llm_kl.masks import render_conversation

# Marked by TRL and not by us: role headers, the thinking tags that a generation prompt ends with, the white space
# after an end-of-turn token, and Phi's second end token, which closes the conversation and no turn.
ONLY_TRL = {
    "cohere": set(),
    "cohere2": set(),
    "deepseek_r1_distill": {"<｜Assistant｜>", "<｜tool▁outputs▁end｜>"},
    "deepseekv3": {"<｜Assistant｜>"},
    "diffusion_gemma": {"\n"},
    "gemma": {"\n"},
    "gemma3": {"\n"},
    "glm4moe": set(),
    "gptoss": {"<|start|>assistant"},
    "idefics3": {"\n"},
    "lfm2": {"\n"},
    "lfm2_v2": {"\n"},
    "llama3": set(),
    "llava_next": set(),
    "muse_glimmer": {"<|start|>assistant"},
    "nemotron_3_5_lightning": {"\n", "<think>", "<think>\n"},
    "nemotron_3_nano": {"\n", "<think>", "<think>\n"},
    "nemotron_3_super": {"\n", "<think>", "<think>\n"},
    "nemotron_3_ultra": {"\n", "<think>", "<think>\n"},
    "phi3": {"\n", "\n<EOS>"},
    "phi3_5": {"\n", "\n<EOS>"},
    "qwen2_5": {"\n"},
    "qwen2_5_vl": {"\n"},
    "qwen3": {"\n"},
    "qwen3_5_nothink": {"\n", "<think>\n\n</think>\n\n"},
    "qwen3_5_think": {"\n", "<think>\n"},
    "qwen3_6": {"\n", "<think>\n"},
    "qwen3_8": {"\n", "<think>\n"},
    "qwen3_instruct_2507": {"\n"},
    "qwen3_vl": {"\n"},
    "smolvlm": {"\n"},
}
# The blocks of this template end on the emoji; of its four byte tokens, transformers masks in the first.
ONLY_OURS = {
    ("diffusion_gemma", "system"): ("\ufffd" * 3,),
    # the control token that stops the model after a tool call
    ("diffusion_gemma", "tools"): ("<|tool_response>",),
}

ALTERNATE = "Conversation roles must alternate"
REFUSED = {
    ("cohere", "tools"): ALTERNATE,
    ("cohere2", "tools"): ALTERNATE,
    ("deepseekv3", "tools"): "can only concatenate str",
    ("gemma", "system"): "System role not supported",
    ("gemma", "tools"): ALTERNATE,
    ("gemma3", "tools"): ALTERNATE,
    ("llava_next", "tools"): "Only user and assistant roles",
}
# TRL's version writes one newline less (glm4moe) or keeps the thinking blocks of earlier turns (the others).
TEXTS_DIFFER = {("glm4moe", kind) for kind in CONVERSATIONS} | {
    (template, kind)
    for template in ("qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6")
    for kind in ("multi", "system", "tools", "reasoning")
}
UNPAIRED = {
    *("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"),
    *("lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "llama3_1", "llama3_2"),
}


def masked_turns(template: str, messages: list[dict], **kwargs) -> list[str]:
    rendered = render_conversation(tokenizer_for(template), messages, **kwargs)
    return [rendered.text[start:end] for start, end in rendered.assistant_spans]


def test_every_template_is_accounted_for():
    assert set(pairs()) == set(ONLY_TRL)
    training = {f"{name}_training" for name in pairs()}
    assert set(template_pairs.all_templates()) == set(ONLY_TRL) | training | UNPAIRED


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("template", ONLY_TRL)
def test_mask_agrees_with_the_generation_blocks(template, kind):
    outcome = compare(template, kind)
    if (template, kind) in REFUSED:
        assert outcome.status == "refused"
        assert REFUSED[template, kind] in outcome.reason
    elif (template, kind) in TEXTS_DIFFER:
        assert outcome.status == "texts differ"
    else:
        assert outcome.status == "agrees", outcome
        assert set(outcome.only_trl) <= ONLY_TRL[template]
        assert outcome.only_ours == ONLY_OURS.get((template, kind), ())


@pytest.mark.parametrize("template", ONLY_TRL)
def test_the_listed_differences_all_occur(template):
    seen = {text for kind in CONVERSATIONS for text in compare(template, kind).only_trl}
    assert seen == ONLY_TRL[template]


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("template", ONLY_TRL)
def test_normalised_blocks_equal_the_mask_without_blocks(template, kind):
    """One conversation on both templates: after our normalisation, neither headers nor white space differ."""
    if compare(template, kind).status != "agrees":
        assert (template, kind) in REFUSED.keys() | TEXTS_DIFFER
        return
    messages = conversation(template, kind)
    found = render_conversation(tokenizer_for(template), messages)
    marked = render_conversation(tokenizer_for(template), messages, chat_template=read(f"{template}_training"))
    assert (found.located_by, marked.located_by) == ("trace", "marks")
    assert found.assistant_spans == marked.assistant_spans
    assert found.assistant_mask.equal(marked.assistant_mask)


ACCEPTED = [(t, k) for t in sorted(set(ONLY_TRL) | UNPAIRED) for k in CONVERSATIONS if (t, k) not in REFUSED]


@pytest.mark.parametrize(("template", "kind"), ACCEPTED)
def test_answers_are_masked_in_and_questions_are_not(template, kind):
    turns = masked_turns(template, conversation(template, kind))
    spoken = [m for m in CONVERSATIONS[kind] if m["role"] == "assistant"]
    # deepseek_r1_distill omits the tool calls of a message with content, but it writes the turn
    assert len(turns) == len(spoken)
    for turn, message in zip(turns, spoken, strict=True):
        assert message["content"] in turn
        assert turn == turn.rstrip()
        assert "<|im_start|>" not in turn


CHATML_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
GLM_CALL = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>"
)
GEMMA_CALL = "<|tool_call>call:add{a:1,b:2}<tool_call|>"
GEMMA_STOP = "<|tool_response>"  # written by the model, which stops there
# Hand-written, for cases that no marked template covers.
EXPECTED = {
    ("qwen3", "multi"): ["Hello there<|im_end|>", "<think>\n\n</think>\n\nHi<|im_end|>"],
    ("qwen3", "tools"): [CHATML_CALL, "It is 3.<|im_end|>", "<think>\n\n</think>\n\nWelcome<|im_end|>"],
    # the thinking of the earlier turn is stripped by the template
    ("qwen3", "reasoning"): ["3<|im_end|>", "<think>\ntwo and two\n</think>\n\n4<|im_end|>"],
    # the generation prompt ends with "<think>\n"
    ("qwen3_5_think", "reasoning"): ["3<|im_end|>", "two and two\n</think>\n\n4<|im_end|>"],
    ("qwen3_6", "multi"): ["Hello there<|im_end|>", "\n</think>\n\nHi<|im_end|>"],
    # the generation prompt ends with an empty thinking block
    ("qwen3_5_nothink", "multi"): ["Hello there<|im_end|>", "Hi<|im_end|>"],
    # no end-of-turn token: the next header stops the model
    ("glm4moe", "reasoning"): ["\n<think></think>\n3", "\n<think>two and two</think>\n4"],
    ("glm4moe", "tools"): [
        f"\n<think></think>\n{GLM_CALL}\n</tool_call>",
        "\n<think></think>\nIt is 3.",
        "\n<think></think>\nWelcome",
    ],
    # the tool's response is inside the model's turn, which continues after it
    ("gemma4_v5", "tools"): [GEMMA_CALL + GEMMA_STOP, "It is 3.<turn|>", "Welcome<turn|>"],
    ("gemma4_v5", "reasoning"): ["3<turn|>", "<|channel>thought\ntwo and two\n<channel|>4<turn|>"],
    ("llama3_1", "tools"): [
        '{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>',
        "It is 3.<|eot_id|>",
        "Welcome<|eot_id|>",
    ],
    ("gptoss", "single"): ["<|channel|>final<|message|>yes<|return|>"],
    ("llava_next", "single"): [" yes</s>"],
    ("lfm2_2_5_v2", "reasoning"): ["3<|im_end|>", "<think>two and two</think>4<|im_end|>"],
}


@pytest.mark.parametrize(("template", "kind"), EXPECTED)
def test_masked_text(template, kind):
    assert masked_turns(template, conversation(template, kind)) == EXPECTED[template, kind]


def test_closed_thinking_belongs_to_the_prompt_when_thinking_is_off():
    messages = [user("1+2?"), assistant("3")]
    assert masked_turns("qwen3", messages, enable_thinking=False) == ["3<|im_end|>"]
    assert masked_turns("qwen3", messages, enable_thinking=True) == ["<think>\n\n</think>\n\n3<|im_end|>"]


@pytest.mark.parametrize("content", ["", "<|end|>", "a"])
def test_the_second_end_token_of_phi_is_masked_out(content):
    messages = [user("x"), assistant(content)]
    assert masked_turns("phi3", messages) == [content + "<|end|>"]
    assert masked_turns("phi3", messages, chat_template=read("phi3_training")) == [content + "<|end|>"]


def test_two_calls_and_their_responses_in_one_gemma_turn():
    second = [{**CALL[0], "id": "c1"}]
    messages = [
        user("?"),
        assistant("", tool_calls=[*CALL, *second]),
        {"role": "tool", "tool_call_id": "c0", "content": "3"},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        assistant("3"),
    ]
    assert masked_turns("gemma4_v5", messages) == [GEMMA_CALL * 2 + GEMMA_STOP, "3<turn|>"]


def test_the_published_table_is_current():
    path = PROJECT / "docs" / "build_chat_template_table.py"
    spec = importlib.util.spec_from_file_location("build_chat_template_table", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text(encoding="utf-8")
    if f"TRL {template_pairs.version()} " not in page:
        pytest.skip(f"the page is of another TRL version than {template_pairs.version()}")
    assert page == script.build(script.published()), "run `python docs/build_chat_template_table.py`"
