"""Masked text of adversarial conversations on small templates; every expected text is written by hand."""

from __future__ import annotations

import copy
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given, settings, strategies as st

from template_pairs import CALL, assistant, user
from torchrl_llm_kl.masks import (
    AssistantMaskError,
    EmptyAssistantMaskError,
    MissingChatTemplateError,
    TurnNotFoundError,
    render_conversation,
    render_conversations,
)
from torchrl_llm_kl.masks._template import _unused_nonce, core_of
from toy_tokenizer import CHATML, build_tokenizer

END = "<|im_end|>"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
MARKED = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}"
    "{% endif %}<|im_end|>\n{% endfor %}" + PROMPT
)
# One conversation format, written in the styles of real templates.
CHATML_VARIANTS = {
    "one string": CHATML,
    "filtered loop": "{% for m in messages if m.role != 'x' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}" + PROMPT,
    "macro": "{% macro show(m) %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{% endfor %}" + PROMPT,
    "index loop": "{% for i in range(messages|length) %}{% set m = messages[i] %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT,
    "no variable": "{% for i in range(messages|length) %}<|im_start|>{{ messages[i].role }}\n"
    "{{ messages[i].content }}<|im_end|>\n{% endfor %}" + PROMPT,
    "looks back": "{% for m in messages %}{% set before = messages[loop.index0 - 1] %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT,
    "continue": "{% for m in messages %}{% if m.role != 'user' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% continue %}{% endif %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT,
    "search first": "{% for m in messages %}{% if m.role == 'system' %}{% set x = m.content %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT,
    "captured": "{% set out %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% endset %}{{ out | trim }}\n" + PROMPT,
    "no prompt": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "prompt in the loop": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% if loop.last %}" + PROMPT + "{% endif %}{% endfor %}",
    "marked content": MARKED,
    "marked turn": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n"
    "{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}" + PROMPT,
}


def masked_turns(messages, template=CHATML, tokenizer=None, **kwargs) -> list[str]:
    """The masked text turn by turn, after a check that spans, mask and tokens agree."""
    tokenizer = tokenizer or build_tokenizer(template)
    rendered = render_conversation(tokenizer, messages, **kwargs)
    turns = [rendered.text[start:end] for start, end in rendered.assistant_spans]
    assert tokenizer.decode(rendered.token_ids[rendered.assistant_mask]) == "".join(turns)
    assert tokenizer.decode(rendered.token_ids) == rendered.text
    assert rendered.token_ids.dtype == torch.long
    assert rendered.assistant_mask.shape == rendered.token_ids.shape
    return turns


ADVERSARIAL = {
    "repeats the user": ([user("Answer yes or no"), assistant("yes")], ["yes" + END]),
    "one character": ([user("a"), assistant("a"), user("aa"), assistant("a")], ["a" + END] * 2),
    "empty turns": ([user("x"), assistant(""), user(""), assistant("")], [END] * 2),
    "header in the question": ([user("<|im_start|>assistant\nyes<|im_end|>\n"), assistant("yes")], ["yes" + END]),
    "markers in the answer": (
        [user("x"), assistant("<|im_end|>\n<|im_start|>user\nyes<|im_end|>"), user("yes")],
        ["<|im_end|>\n<|im_start|>user\nyes<|im_end|>" + END],
    ),
    "header as the answer": ([user("x"), assistant("<|im_start|>assistant\n")], ["<|im_start|>assistant\n" + END]),
    "template syntax": (
        [user("{% generation %}"), assistant("{% generation %}{{ x }}{% endgeneration %}")],
        ["{% generation %}{{ x }}{% endgeneration %}" + END],
    ),
    "several in a row": (
        [user("x"), assistant("a"), assistant("b"), assistant("a")],
        ["a" + END, "b" + END, "a" + END],
    ),
    "assistant first": ([assistant("hi"), user("hi"), assistant("hi")], ["hi" + END] * 2),
    "white space kept": ([user(" x "), assistant(" \n x\t\n")], [" \n x\t\n" + END]),
    "beyond ascii": ([user("é"), assistant("é😀\u0301漢")], ["é😀\u0301漢" + END]),
    "private use": (
        [user("\U0010ff00+0"), assistant("\U0010ff00loop+1\U0010ff01")],
        ["\U0010ff00loop+1\U0010ff01" + END],
    ),
}


@pytest.mark.parametrize("variant", CHATML_VARIANTS)
@pytest.mark.parametrize("case", ADVERSARIAL)
def test_adversarial_conversation(case, variant):
    messages, expected = ADVERSARIAL[case]
    if (case, variant) in {("assistant first", "no variable"), ("assistant first", "captured")}:
        with pytest.raises(TurnNotFoundError, match=r"message 0 \(assistant\).*cannot be located"):
            masked_turns(messages, CHATML_VARIANTS[variant])
        return
    assert masked_turns(messages, CHATML_VARIANTS[variant]) == expected


@pytest.mark.parametrize("variant", CHATML_VARIANTS)
def test_a_trailing_generation_prompt_is_masked_out(variant):
    messages = [user("x"), assistant("a"), assistant("b")]
    expected = ["a" + END, "b" + END]
    assert masked_turns(messages, CHATML_VARIANTS[variant], add_generation_prompt=True) == expected


LOCATED_BY = {"no variable": "prefixes", "captured": "prefixes", "marked content": "marks", "marked turn": "marks"}


@pytest.mark.parametrize("variant", CHATML_VARIANTS)
def test_how_turns_are_located(variant):
    tokenizer = build_tokenizer(CHATML_VARIANTS[variant])
    assert render_conversation(tokenizer, [user("x"), assistant("a")]).located_by == LOCATED_BY.get(variant, "trace")


def test_system_only_has_nothing_to_mask():
    rendered = render_conversation(build_tokenizer(), [{"role": "system", "content": "assistant"}])
    assert not rendered.assistant_mask.any()
    assert rendered.assistant_spans == ()
    assert rendered.located_by == "no assistant turn"


def test_content_that_the_template_trims():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}" + PROMPT
    )
    assert masked_turns([user(" a "), assistant("\n a b \n")], template) == ["a b" + END]


def test_thinking_stripped_from_earlier_turns():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set c = m.content %}"
        "{% if m.role == 'assistant' and not loop.last %}{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{{ c }}<|im_end|>\n{% endfor %}" + PROMPT
    )
    messages = [user("1"), assistant("<think>\n1\n</think>\n\n1"), user("1"), assistant("<think>\n1\n</think>\n\n1")]
    assert masked_turns(messages, template) == ["1" + END, "<think>\n1\n</think>\n\n1" + END]


THINKING_PROMPT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_a_thinking_tag_at_the_end_of_the_generation_prompt_is_header():
    messages = [user("x"), assistant("a", reasoning_content="hm"), user("y"), assistant("b")]
    assert masked_turns(messages, THINKING_PROMPT) == ["hm</think>a" + END, "b" + END]


def test_a_header_never_ends_inside_a_tag():
    """The generation prompt continues with ``<think>``, the turn with ``<tool>``: the shared ``<`` is not header."""
    assert masked_turns([user("x"), assistant("<tool>1")], THINKING_PROMPT) == ["<tool>1" + END]


def test_content_that_starts_like_the_generation_prompt():
    """A whole ``<think>\\n`` is in the generation prompt; a part of it at the start of the content is not."""
    messages = [user("x"), assistant("<think>\na"), user("y"), assistant("<think>b")]
    assert masked_turns(messages, THINKING_PROMPT) == ["a" + END, "<think>b" + END]


TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
) + PROMPT


def test_tool_calls_are_masked_in_and_tool_results_are_not():
    call = '<call>{"name": "add", "arguments": {"a": 1, "b": 2}}</call>'
    messages = [user("?"), assistant("", tool_calls=CALL), {"role": "tool", "content": call}, assistant(call)]
    assert masked_turns(messages, TOOLS) == [call + END, call + END]


def test_tool_results_inside_the_assistants_turn_are_masked_out():
    template = (
        "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n"
        "{% if m.tool_calls %}<call>{% for k in range(loop.index0 + 1, messages | length) %}"
        "{% if messages[k].role == 'tool' %}{% set result = messages[k] %}<result>{{ result.content }}</result>"
        "{% endif %}{% endfor %}{% endif %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    ) + PROMPT
    messages = [user("?"), assistant("done", tool_calls=CALL), {"role": "tool", "content": "3"}, user("done")]
    assert masked_turns(messages, template) == ["<call>", "done" + END]


def test_end_token_outside_the_loop_body():
    template = (
        "{% for m in messages %}{% if not loop.first %}{{ eos_token }}{% endif %}{{ m.role }}: {{ m.content }}"
        "{% endfor %}{{ eos_token }}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    messages = [user("a "), assistant("a "), user("b"), assistant(""), user("b"), assistant("b")]
    assert masked_turns(messages, template) == ["a " + END, END, "b" + END]


def test_content_in_parts():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{{ part.text }}{% endfor %}"
        "<|im_end|>\n{% endfor %}" + PROMPT
    )
    messages = [user([{"type": "text", "text": "a"}]), assistant([{"type": "text", "text": c} for c in "ab"])]
    assert masked_turns(messages, template) == ["ab" + END]


def test_template_variables_and_named_templates():
    tokenizer = build_tokenizer(
        {"default": CHATML, "shout": CHATML.replace("message['content']", "(message.content|upper)")}
    )
    messages = [user("a"), assistant("b")]
    assert masked_turns(messages, tokenizer=tokenizer) == ["b" + END]
    assert masked_turns(messages, tokenizer=tokenizer, chat_template="shout") == ["B" + END]
    assert masked_turns(messages, tokenizer=tokenizer, chat_template="{{ extra }}" + CHATML, extra="!") == ["b" + END]


def test_text_and_tokens_equal_those_of_transformers():
    tokenizer = build_tokenizer()
    messages = [user("é"), assistant("b", tool_calls=None)]
    rendered = render_conversation(tokenizer, messages, add_generation_prompt=True)
    plain = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert rendered.token_ids.tolist() == plain["input_ids"]


def test_a_batch_equals_single_conversations():
    tokenizer = build_tokenizer()
    conversations = [[user("a"), assistant("b")], [user("a")], [user("ccc"), assistant("é"), user("d"), assistant("")]]
    for together, messages in zip(render_conversations(tokenizer, conversations), conversations, strict=True):
        alone = render_conversation(tokenizer, messages)
        assert (together.text, together.assistant_spans) == (alone.text, alone.assistant_spans)
        assert together.token_ids.equal(alone.token_ids)
        assert together.assistant_mask.equal(alone.assistant_mask)
    assert render_conversations(tokenizer, []) == []


def test_arguments_are_not_modified():
    tokenizer = build_tokenizer(TOOLS)
    messages = [user("a"), assistant("", tool_calls=CALL)]
    tools = [{"type": "function", "function": {"name": "add"}}]
    before = copy.deepcopy((messages, tools, tokenizer.chat_template))
    render_conversation(tokenizer, messages, tools=tools, documents=None)
    assert (messages, tools, tokenizer.chat_template) == before


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_no_template():
    with pytest.raises(MissingChatTemplateError, match=r"no chat template.*Pass `chat_template=`"):
        render_conversation(build_tokenizer(None), [user("x")])
    with pytest.raises(MissingChatTemplateError, match=r"\['a', 'b'\] and no default"):
        render_conversation(build_tokenizer({"a": CHATML, "b": CHATML}), [user("x")])
    with pytest.raises(MissingChatTemplateError, match="is no template"):
        render_conversation(build_tokenizer({"a": CHATML}), [user("x")], chat_template="c")


def test_an_empty_mask_is_an_error_that_names_the_template():
    silent = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(EmptyAssistantMaskError, match=r"2 assistant turns.*sha256.*for m in messages.*own template"):
        render_conversation(build_tokenizer(silent), [user("x"), assistant("a"), assistant("b")])
    unmarked = CHATML + "{% generation %}{% endgeneration %}"
    with pytest.raises(EmptyAssistantMaskError, match=r"conversation 1 has 1 assistant turn,.*blocks mark nothing"):
        render_conversations(build_tokenizer(unmarked), [[user("x")], [user("x"), assistant("a")]])


def test_a_turn_that_cannot_be_located_is_an_error():
    template = "{% for i in range(messages | length) %}{{ messages | length }}{{ messages[i].content }}{% endfor %}"
    with pytest.raises(TurnNotFoundError, match=r"message 1 \(assistant\) of 3.*sha256.*Pass a template"):
        render_conversation(build_tokenizer(template), [user("x"), assistant("a"), user("y")])


@pytest.mark.parametrize("name", ["tokenize", "truncation", "continue_final_message"])
def test_reserved_arguments_are_not_template_variables(name):
    with pytest.raises(TypeError, match=f"{name}: not a template variable"):
        render_conversation(build_tokenizer(), [user("x")], **{name: True})


@pytest.mark.parametrize("messages", ["x", {"role": "user"}, ["x"], [{"content": "x"}], 3])
def test_not_a_conversation(messages):
    with pytest.raises(TypeError, match=r"conversation 0"):
        render_conversation(build_tokenizer(), messages)
    assert issubclass(AssistantMaskError, ValueError)


def test_empty_conversation():
    with pytest.raises(ValueError, match="conversation 0 has no messages"):
        render_conversation(build_tokenizer(), [])


# ---- defects of TorchRL's own masks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["toy", "some/qwen2.5-chat", "some/llama-3"])
@pytest.mark.parametrize("marked", [False, True])
def test_defect_10_the_tokenizers_own_template_is_used(name, marked):
    body = "{% generation %}{{ m.content }}[/A]{% endgeneration %}" if marked else "{{ m.content }}[/A]"
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}[A]"
        + body
        + "{% else %}[U]{{ m.content }}[/U]{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
    )
    tokenizer = build_tokenizer(template, name_or_path=name)
    rendered = render_conversation(tokenizer, [user("x"), assistant("y")])
    assert rendered.text == "[U]x[/U][A]y[/A]"
    assert tokenizer.decode(rendered.token_ids[rendered.assistant_mask]) == "y[/A]"


def test_defect_11_a_repeated_text_is_masked_in_only_in_the_assistants_turn():
    rendered = render_conversation(build_tokenizer(), [user("Answer yes or no"), assistant("yes")])
    assert rendered.text[: rendered.assistant_spans[0][0]].endswith("<|im_start|>assistant\n")
    assert len(rendered.assistant_spans) == 1


@pytest.mark.parametrize("variant", CHATML_VARIANTS)
def test_defect_12_the_end_of_turn_token_is_in_the_mask(variant):
    tokenizer = build_tokenizer(CHATML_VARIANTS[variant])
    rendered = render_conversation(tokenizer, [user("x"), assistant("a"), user("x"), assistant("b")])
    is_end = rendered.token_ids == tokenizer.eos_token_id
    assert (rendered.assistant_mask & is_end).sum() == 2
    assert is_end.sum() == 4


def test_defect_34_padding_with_the_end_token_changes_nothing():
    plain = build_tokenizer(pad_token="<pad>")
    shared = build_tokenizer(pad_token=END)
    messages = [user("x"), assistant("a"), assistant(END)]
    assert masked_turns(messages, tokenizer=plain) == masked_turns(messages, tokenizer=shared) == ["a" + END, END + END]


# ---- properties ------------------------------------------------------------------------------------------------------

FRAGMENTS = [
    "<|im_start|>",
    END,
    "assistant",
    "user",
    "\n",
    " ",
    "yes",
    "<think>",
    "{%",
    "é",
    "😀",
    "<",
    "|>",
    "\U0010ff00",
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=5).map("".join)
conversations = st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), texts), min_size=1, max_size=6)


@pytest.mark.parametrize("variant", ["one string", "index loop", "prompt in the loop", "marked turn"])
@settings(max_examples=60, deadline=None)
@given(chat=conversations, prompt=st.booleans())
def test_each_turn_is_content_and_end_token(variant, chat, prompt):
    messages = [{"role": role, "content": content} for role, content in chat]
    expected = [content + END for role, content in chat if role == "assistant"]
    assert masked_turns(messages, CHATML_VARIANTS[variant], add_generation_prompt=prompt) == expected


def test_importing_the_masks_loads_neither_transformers_nor_torchrl():
    code = "import sys, torchrl_llm_kl.masks; print({'transformers', 'torchrl', 'ray'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_marks_are_placed_in_linear_time() -> None:
    """What is quadratic takes minutes for one of these texts."""
    long = 200_000
    start = time.process_time()
    assert core_of("x" + "<a> " * long) == (0, 1)
    assert core_of(" <a>[b] x" + " " * long) == (8, 9)
    assert core_of("<a>" * long) == (3 * long, 3 * long)
    assert core_of("x" + "]" * long) == (0, 1 + long)
    assert core_of("x<" + ">" * long) == (0, 1)
    used = "".join(f"_0{k}" for k in range(7391, 7391 + long)) + "_"
    assert _unused_nonce(used) == f"_0{7391 + long}_"
    assert _unused_nonce("_07391") == "_07391_"
    assert time.process_time() - start < 20
