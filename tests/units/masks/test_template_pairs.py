"""TRL's marked templates as the oracle for masks found on the models' own, unmarked templates."""

import pytest

pytest.importorskip("trl", reason="TRL's chat templates are the oracle")

import transformers
from packaging.version import Version

import template_pairs
from project import PROJECT, script, tables
from template_pairs import CALL, CONVERSATIONS, assistant, conversation, masked_by, read, tokenizer_for, user
from torchrl_llm_kl.masks import render_conversation

# Marked by TRL and not by us: role headers, the thinking tags that a generation prompt ends with, the white space
# after an end-of-turn token, and Phi's second end token, which closes the conversation and no turn.
ONLY_TRL = {
    template: texts
    for templates, texts in (
        ("cohere cohere2 glm4moe llama3 llava_next", set()),
        ("gptoss muse_glimmer", {"<|start|>assistant"}),
        ("diffusion_gemma gemma gemma3 idefics3 lfm2 lfm2_v2 smolvlm", {"\n"}),
        ("qwen2_5 qwen2_5_vl qwen3 qwen3_instruct_2507 qwen3_vl", {"\n"}),
        ("nemotron_3_5_lightning nemotron_3_nano nemotron_3_super nemotron_3_ultra", {"\n", "<think>", "<think>\n"}),
        ("qwen3_5_think qwen3_6 qwen3_8", {"\n", "<think>\n"}),
        ("qwen3_5_nothink", {"\n", "<think>\n\n</think>\n\n"}),
        ("phi3 phi3_5", {"\n", "\n<EOS>"}),
        ("deepseek_r1_distill deepseekv3", {"<｜Assistant｜>", "<｜tool▁outputs▁end｜>"}),
    )
    for template in templates.split()
}
# The control token that stops the model after a tool call.
ONLY_OURS = {("diffusion_gemma", "tools"): ("<|tool_response>",)}
if Version(transformers.__version__) < Version("5.24"):
    # The blocks of this template end on the emoji. Before 5.24 transformers masks in only the first of its four byte tokens.
    ONLY_OURS["diffusion_gemma", "system"] = ("\ufffd" * 3,)

ALTERNATE = "Conversation roles must alternate"
REFUSED = {
    ("cohere", "tools"): ALTERNATE,
    ("cohere2", "tools"): ALTERNATE,
    ("gemma", "system"): "System role not supported",
    ("gemma", "tools"): ALTERNATE,
    ("gemma3", "tools"): ALTERNATE,
    ("llava_next", "tools"): "Only user and assistant roles",
}
# TRL's version writes one newline less (glm4moe) or keeps the thinking blocks of earlier turns (the others).
TEXTS_DIFFER = {("glm4moe", kind) for kind in CONVERSATIONS}
for _template in ("qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"):
    TEXTS_DIFFER |= {(_template, kind) for kind in ("multi", "system", "tools", "reasoning")}
UNPAIRED = {"gemma4", *(f"gemma4_v{i}" for i in range(2, 6)), "llama3_1", "llama3_2"}
UNPAIRED |= {f"lfm2_2_5{x}" for x in ("", "_v2", "_vl")}


def test_every_template_is_accounted_for():
    assert set(template_pairs.pairs()) == set(ONLY_TRL)
    training = {f"{name}_training" for name in ONLY_TRL}
    assert set(template_pairs.all_templates()) == set(ONLY_TRL) | training | UNPAIRED


@pytest.mark.parametrize("template", sorted({*ONLY_TRL, *UNPAIRED}))
def test_mask_agrees_with_the_generation_blocks(template):
    """All listed differences occur. In templates without blocks, answers are masked in and questions are not."""
    seen, tokenizer = set(), tokenizer_for(template)
    for kind in CONVERSATIONS:
        messages = conversation(template, kind)
        outcome = template_pairs.compare(template, kind) if template in ONLY_TRL else None
        if (template, kind) in REFUSED:
            assert outcome.status == "refused", kind
            assert REFUSED[template, kind] in outcome.reason
            continue
        turns = masked_by(tokenizer, messages)
        spoken = [m["content"] for m in CONVERSATIONS[kind] if m["role"] == "assistant"]
        # deepseek_r1_distill omits the tool calls of a message with content, but it writes the turn
        for turn, content in zip(turns, spoken, strict=True):
            assert content in turn, kind
            assert turn == turn.rstrip(), kind
            assert "<|im_start|>" not in turn, kind
        if outcome is None:
            continue
        seen |= set(outcome.only_trl)
        if (template, kind) in TEXTS_DIFFER:
            assert outcome.status == "texts differ", kind
            continue
        assert outcome.status == "agrees", (kind, outcome)
        assert outcome.only_ours == ONLY_OURS.get((template, kind), ()), kind
        found = render_conversation(tokenizer, messages)
        marked = render_conversation(tokenizer, messages, chat_template=read(f"{template}_training"))
        assert (found.located_by, marked.located_by) == ("trace", "marks"), kind
        assert found.assistant_spans == marked.assistant_spans, kind
        assert found.assistant_mask.equal(marked.assistant_mask), kind
    assert seen == ONLY_TRL.get(template, set())


GEMMA_CALL = "<|tool_call>call:add{a:1,b:2}<tool_call|>"
EXPECTED = tables(__file__, "masked_text")


def test_masked_text():
    for case, expected in EXPECTED.items():
        template, kind = case.split()
        assert masked_by(tokenizer_for(template), conversation(template, kind)) == expected, case
    messages = [user("1+2?"), assistant("3")]  # closed thinking belongs to the prompt when thinking is off
    assert masked_by(tokenizer_for("qwen3"), messages, enable_thinking=False) == ["3<|im_end|>"]
    assert masked_by(tokenizer_for("qwen3"), messages, enable_thinking=True) == ["<think>\n\n</think>\n\n3<|im_end|>"]
    for content in ("", "<|end|>", "a"):  # the second end token of Phi is masked out
        for source in ("phi3", "phi3_training"):
            found = masked_by(tokenizer_for("phi3"), [user("x"), assistant(content)], chat_template=read(source))
            assert found == [content + "<|end|>"]
    # two calls and their responses in one turn
    results = [{"role": "tool", "tool_call_id": call, "content": "3"} for call in ("c0", "c1")]
    messages = [user("?"), assistant("", tool_calls=[*CALL, {**CALL[0], "id": "c1"}]), *results, assistant("3")]
    assert masked_by(tokenizer_for("gemma4_v5"), messages) == [GEMMA_CALL * 2 + "<|tool_response>", "3<turn|>"]


def test_the_published_table_is_current():
    page = (PROJECT / "docs" / "chat_templates.md").read_text(encoding="utf-8")
    if f"TRL {template_pairs.version()} " not in page:
        pytest.skip(f"the page is of another TRL version than {template_pairs.version()}")
    assert page == script("docs/build_pages.py").render("chat_templates"), (
        "run `python docs/build_pages.py chat_templates`"
    )
