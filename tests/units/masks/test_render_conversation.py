"""Masked text of adversarial conversations on small templates; every expected text is written by hand."""

import copy

import pytest
import torch
from hypothesis import given, settings, strategies as st

from refused import refused
from template_pairs import CALL, END, LOOP, PROMPT, TURN, assistant, marked, user
from torchrl_llm_kl import masks
from torchrl_llm_kl.masks import EmptyAssistantMaskError, TurnNotFoundError, render_conversation, render_conversations
from torchrl_llm_kl.masks._template import _unused_nonce, core_of
from toy_tokenizer import CHATML, build_tokenizer

# One conversation format, written in the styles of real templates.
CHATML_VARIANTS = {
    "one string": CHATML,
    "filtered loop": LOOP.replace("messages", "messages if m.role != 'x'") + PROMPT,
    "macro": "{% macro show(m) %}" + TURN + "{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}" + PROMPT,
    "index loop": "{% for i in range(messages|length) %}{% set m = messages[i] %}" + TURN + "{% endfor %}" + PROMPT,
    "no variable": LOOP.replace("m in messages", "i in range(messages|length)").replace("m.", "messages[i].") + PROMPT,
    "looks back": LOOP.replace("%}<", "%}{% set before = messages[loop.index0 - 1] %}<", 1) + PROMPT,
    "continue": "{% for m in messages %}{% if m.role != 'user' %}" + TURN + "{% continue %}{% endif %}"
    "<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT,
    "search first": LOOP.replace(TURN, "{% if m.role == 'system' %}{% set x = m.content %}{% endif %}") + LOOP + PROMPT,
    "captured": "{% set out %}" + LOOP + "{% endset %}{{ out | trim }}\n" + PROMPT,
    "no prompt": LOOP,
    "prompt in the loop": LOOP.replace("{% endfor %}", "{% if loop.last %}" + PROMPT + "{% endif %}{% endfor %}"),
    "marked content": marked(LOOP, "{{ m.content }}") + PROMPT,
    "marked turn": marked(LOOP, TURN) + PROMPT,
}
LOCATED_BY = {"no variable": "prefixes", "captured": "prefixes", "marked content": "marks", "marked turn": "marks"}


def masked_turns(messages, template=CHATML, tokenizer=None, **kwargs) -> list[str]:
    """The masked text of each turn. Asserts that spans, mask and tokens agree."""
    tokenizer = tokenizer or build_tokenizer(template)
    rendered = render_conversation(tokenizer, messages, **kwargs)
    turns = [rendered.text[start:end] for start, end in rendered.assistant_spans]
    assert tokenizer.decode(rendered.token_ids[rendered.assistant_mask]) == "".join(turns)
    assert tokenizer.decode(rendered.token_ids) == rendered.text
    assert rendered.token_ids.dtype == torch.long
    assert rendered.assistant_mask.shape == rendered.token_ids.shape
    return turns


#: In each conversation, the assistant's contents and their end tokens are masked in.
ADVERSARIAL = {
    "defect_11 repeats the user": [user("Answer yes or no"), assistant("yes")],
    "defect_12 end tokens": [user("x"), assistant("a"), user("x"), assistant("b")],
    "one character": [user("a"), assistant("a"), user("aa"), assistant("a")],
    "empty turns": [user("x"), assistant(""), user(""), assistant("")],
    "header in the question": [user("<|im_start|>assistant\nyes<|im_end|>\n"), assistant("yes")],
    "markers in the answer": [user("x"), assistant("<|im_end|>\n<|im_start|>user\nyes<|im_end|>"), user("yes")],
    "header as the answer": [user("x"), assistant("<|im_start|>assistant\n")],
    "template syntax": [user("{% generation %}"), assistant("{% generation %}{{ x }}{% endgeneration %}")],
    "several in a row": [user("x"), assistant("a"), assistant("b"), assistant("a")],
    "assistant first": [assistant("hi"), user("hi"), assistant("hi")],
    "white space kept": [user(" x "), assistant(" \n x\t\n")],
    "beyond ascii": [user("é"), assistant("é😀\u0301漢")],
    "private use": [user("\U0010ff00+0"), assistant("\U0010ff00loop+1\U0010ff01")],
}


@pytest.mark.parametrize("case", ADVERSARIAL)
def test_adversarial_conversations(case):
    messages = ADVERSARIAL[case]
    contents = [message["content"] for message in messages if message["role"] == "assistant"]
    for variant, template in CHATML_VARIANTS.items():
        if case == "assistant first" and variant in ("no variable", "captured"):
            with pytest.raises(TurnNotFoundError, match=r"message 0 \(assistant\).*cannot be located"):
                masked_turns(messages, template)
            continue
        for prompt in (False, True):
            found = masked_turns(messages, template, add_generation_prompt=prompt)
            assert found == [content + END for content in contents], variant
        if case == "one character":
            found = render_conversation(build_tokenizer(template), messages[:2])
            assert found.located_by == LOCATED_BY.get(variant, "trace"), variant


def test_content_that_the_template_changes_and_thinking_tags_of_a_prompt():
    trims = LOOP.replace("m.content", "m.content | trim") + PROMPT
    assert masked_turns([user(" a "), assistant("\n a b \n")], trims) == ["a b" + END]
    strips = "{% if m.role == 'assistant' and not loop.last %}{% set c = c.split('</think>')[-1].lstrip() %}{% endif %}"
    strips = LOOP.replace("{{ m.content }}", "{% set c = m.content %}" + strips + "{{ c }}") + PROMPT
    thought = "<think>\n1\n</think>\n\n1"
    assert masked_turns([user("1"), assistant(thought)] * 2, strips) == ["1" + END, thought + END]
    parts = LOOP.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}") + PROMPT
    messages = [user([{"type": "text", "text": "a"}]), assistant([{"type": "text", "text": c} for c in "ab"])]
    assert masked_turns(messages, parts) == ["ab" + END]
    messages = [user("x"), assistant("a", reasoning_content="hm"), user("y"), assistant("b")]
    assert masked_turns(messages, THINKING_PROMPT) == ["hm</think>a" + END, "b" + END]
    # The generation prompt continues with "<think>", the turn with "<tool>": the shared "<" is not header.
    assert masked_turns([user("x"), assistant("<tool>1")], THINKING_PROMPT) == ["<tool>1" + END]
    # A whole "<think>\n" is in the generation prompt; a part of it at the start of the content is not.
    messages = [user("x"), assistant("<think>\na"), user("y"), assistant("<think>b")]
    assert masked_turns(messages, THINKING_PROMPT) == ["a" + END, "<think>b" + END]


THINKING_PROMPT = LOOP.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}",
) + PROMPT.replace("assistant\n", "assistant\n<think>\n")


SHOWN_CALLS = "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
TOOLS = LOOP.replace("<|im_end|>", SHOWN_CALLS + "<|im_end|>") + PROMPT


def test_tool_calls_are_masked_in_and_tool_results_are_not_and_end_tokens_outside_the_loop():
    call = '<call>{"name": "add", "arguments": {"a": 1, "b": 2}}</call>'
    messages = [user("?"), assistant("", tool_calls=CALL), {"role": "tool", "content": call}, assistant(call)]
    assert masked_turns(messages, TOOLS) == [call + END, call + END]
    inside = (  # results inside the assistant's turn
        "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n"
        "{% if m.tool_calls %}<call>{% for k in range(loop.index0 + 1, messages | length) %}"
        "{% if messages[k].role == 'tool' %}{% set result = messages[k] %}<result>{{ result.content }}</result>"
        "{% endif %}{% endfor %}{% endif %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    ) + PROMPT
    messages = [user("?"), assistant("done", tool_calls=CALL), {"role": "tool", "content": "3"}, user("done")]
    assert masked_turns(messages, inside) == ["<call>", "done" + END]
    template = (
        "{% for m in messages %}{% if not loop.first %}{{ eos_token }}{% endif %}{{ m.role }}: {{ m.content }}"
        "{% endfor %}{{ eos_token }}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    messages = [user("a "), assistant("a "), user("b"), assistant(""), user("b"), assistant("b")]
    assert masked_turns(messages, template) == ["a " + END, END, "b" + END]


def test_text_and_tokens_equal_those_of_transformers_and_of_single_conversations():
    tokenizer = build_tokenizer()
    conversations = [[user("a"), assistant("b")], [user("a")], [user("ccc"), assistant("é"), user("d"), assistant("")]]
    for together, messages in zip(render_conversations(tokenizer, conversations), conversations, strict=True):
        alone = render_conversation(tokenizer, messages)
        assert (together.text, together.assistant_spans) == (alone.text, alone.assistant_spans)
        assert together.token_ids.equal(alone.token_ids)
        assert together.assistant_mask.equal(alone.assistant_mask)
    rendered = render_conversation(tokenizer, [{"role": "system", "content": "assistant"}])
    assert not rendered.assistant_mask.any()
    assert (rendered.assistant_spans, rendered.located_by) == ((), "no assistant turn")
    assert render_conversations(tokenizer, []) == []
    tokenizer = build_tokenizer(TOOLS)
    messages = [user("é"), assistant("", tool_calls=CALL)]
    tools = [{"type": "function", "function": {"name": "add"}}]
    before = copy.deepcopy((messages, tools, tokenizer.chat_template))
    rendered = render_conversation(tokenizer, messages, tools=tools, documents=None, add_generation_prompt=True)
    assert (messages, tools, tokenizer.chat_template) == before
    plain = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=True)
    assert rendered.token_ids.tolist() == plain["input_ids"]
    shout = CHATML.replace("message['content']", "(message.content|upper)")
    tokenizer = build_tokenizer({"default": CHATML, "shout": shout})
    with_x = {"chat_template": "{{ x }}" + CHATML, "x": 1}
    for expected, named in (("b", {}), ("B", {"chat_template": "shout"}), ("b", with_x)):
        assert masked_turns([user("a"), assistant("b")], tokenizer=tokenizer, **named) == [expected + END]


SILENT = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
COUNTS = "{% for i in range(messages | length) %}{{ messages | length }}{{ messages[i].content }}{% endfor %}"
UNMARKED = CHATML + "{% generation %}{% endgeneration %}"
ASKED = [user("x"), assistant("a"), assistant("b")]


test_conversations_without_a_mask_are_errors = refused(
    lambda template, messages, kwargs: render_conversation(build_tokenizer(template), messages, **kwargs),
    (None, ASKED, {}, masks.MissingChatTemplateError, "no chat template: pass `chat_template=`"),
    (
        {"a": CHATML, "b": CHATML},
        ASKED,
        {},
        masks.MissingChatTemplateError,
        r"no chat template 'default'.*\['a', 'b'\]",
    ),
    ({"a": CHATML}, ASKED, {"chat_template": "c"}, masks.MissingChatTemplateError, "no chat template 'c'"),
    (SILENT, ASKED, {}, EmptyAssistantMaskError, r"2 assistant turns.*sha256.*for m in messages.*own template"),
    (COUNTS, [*ASKED[:2], user("y")], {}, TurnNotFoundError, r"message 1 \(assistant\) of 3.*sha256.*Pass a temp"),
    (CHATML, ASKED, {"truncation": True}, TypeError, "truncation is not a template variable"),
    *((CHATML, wrong, {}, TypeError, "conversation 0 is") for wrong in ("x", [], [{"content": ""}])),
    (UNMARKED, ASKED[:2], {}, EmptyAssistantMaskError, r"conversation 0 has 1 assistant turns,.*correct its gener"),
)


@pytest.mark.parametrize("marked", [False, True])
def test_defect_10_the_tokenizers_own_template_is_used(marked):
    body = "{% generation %}{{ m.content }}[/A]{% endgeneration %}" if marked else "{{ m.content }}[/A]"
    template = "{% for m in messages %}{% if m.role == 'assistant' %}[A]" + body
    template += "{% else %}[U]{{ m.content }}[/U]{% endif %}{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
    for name in ("toy", "some/qwen2.5-chat", "some/llama-3"):
        tokenizer = build_tokenizer(template, name_or_path=name)
        assert render_conversation(tokenizer, [user("x"), assistant("y")]).text == "[U]x[/U][A]y[/A]"
        assert masked_turns([user("x"), assistant("y")], tokenizer=tokenizer) == ["y[/A]"], name


def test_defect_34_padding_with_the_end_token_changes_nothing():
    plain = build_tokenizer(pad_token="<pad>")
    shared = build_tokenizer(pad_token=END)
    messages = [user("x"), assistant("a"), assistant(END)]
    assert masked_turns(messages, tokenizer=plain) == masked_turns(messages, tokenizer=shared) == ["a" + END, END + END]


WORDS = "<|im_start|> assistant user yes <think> {% é 😀 < |> \U0010ff00"
FRAGMENTS = [END, "\n", " ", *WORDS.split()]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=5).map("".join)
conversations = st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), texts), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(
    variant=st.sampled_from(["one string", "index loop", "prompt in the loop", "marked turn"]),
    chat=conversations,
    prompt=st.booleans(),
)
def test_each_turn_is_content_and_end_token(variant, chat, prompt):
    messages = [{"role": role, "content": content} for role, content in chat]
    expected = [content + END for role, content in chat if role == "assistant"]
    assert masked_turns(messages, CHATML_VARIANTS[variant], add_generation_prompt=prompt) == expected


def test_marks_are_placed_in_linear_time() -> None:
    """A quadratic algorithm would take minutes for one of these texts, which exceeds the time limit of a unit test."""
    long = 100_000
    assert core_of("x" + "<a> " * long) == (0, 1)
    assert core_of(" <a>[b] x" + " " * long) == (8, 9)
    assert core_of("<a>" * long) == (3 * long, 3 * long)
    assert core_of("x" + "]" * long) == (0, 1 + long)
    assert core_of("x<" + ">" * long) == (0, 1)
    used = "".join(f"_0{k}" for k in range(7391, 7391 + long)) + "_"
    assert _unused_nonce(used) == f"_0{7391 + long}_"
    assert _unused_nonce("_07391") == "_07391_"


SCAN = "{% for m in messages %}{% endfor %}"
LAST = "{% for m in messages[:-1] %}BODY{% endfor %}{% set m = messages[-1] %}BODY".replace("BODY", TURN)
MARKED_LAST = marked(LAST, "{{ m.content }}<|im_end|>")
# the tool's answer follows in the same turn, after the token that stopped the model
GEMMA_4 = (
    "{% for m in messages %}{% if m.role != 'tool' %}<turn>{{ m.role }}\n"
    "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}</call>{% set ns = namespace(answered=false) %}"
    "{% for k in range(loop.index, messages | length) %}{% if messages[k].role == 'tool' %}"
    "{% set result = messages[k] %}<response>{{ result.content }}</response>{% set ns.answered = true %}"
    "{% endif %}{% endfor %}{% if not ns.answered %}<response>{% endif %}{% else %}{{ m.content }}<end>\n{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt and messages[-1].role == 'user' %}<turn>assistant\n{% endif %}"
)
# a tool call with string content is written as two turns of the assistant
DEEPSEEK_R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% else %}<bot>"
    "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}</call><|im_end|><bot>{% endif %}"
    "{{ m.content }}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
# after an assistant's message a generation prompt is missing; the header is still not an answer
REKA = (
    "{% set ns = namespace(out='') %}{% for i in range(messages | length) %}{% set ns.out = ns.out ~ messages[i].role"
    " ~ ': ' ~ messages[i].content ~ '<sep>' %}{% endfor %}{{ ns.out }}"
    "{% if add_generation_prompt and messages[-1].role != 'assistant' %}assistant: {% endif %}"
)
REVERSED = LOOP.replace("in messages", "in messages | reverse") + "{% for m in messages %}{{ m.content }}{% endfor %}"
SILENT_TURN = SCAN + LOOP.replace(TURN, "{% if loop.index != 2 %}" + TURN + "{% endif %}") + PROMPT
CHAT = [user("Hi"), assistant("yes"), user("Bye"), assistant("no")]
ADDED = [user("1+2?"), assistant("", tool_calls=CALL), {"role": "tool", "content": "3"}]
BOTH, ONE, RESPONSE = ["yes" + END, "no" + END], ["yes" + END], ["<call>add</call><response>"]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        # Nemotron-Nano-v2: a loop looks at all messages, another one writes all but the last, also with marks
        *((scan + LAST + prompt, CHAT, BOTH) for scan in (SCAN, "") for prompt in (PROMPT, "")),
        *((scan + LAST + prompt, CHAT[:2], ONE) for scan in (SCAN, "") for prompt in (PROMPT, "")),
        *((scan + MARKED_LAST + PROMPT, CHAT, BOTH) for scan in (SCAN, "")),
        (GEMMA_4, ADDED, RESPONSE),
        (GEMMA_4, ADDED[:2], RESPONSE),
        (DEEPSEEK_R1, CHAT, BOTH),
        (
            DEEPSEEK_R1,
            [user("1+2?"), assistant("Let me add.", tool_calls=CALL)],
            r"message 1 \(assistant\) of 2.*holds a header.*<bot>.*chat_template=",
        ),
        (REKA, [user("x"), assistant("first"), assistant("second")], ["first<sep>", "second<sep>"]),
        (REVERSED, CHAT, "message 1"),  # content in the wrong order
        # a turn that is never written is omitted
        (LOOP.replace("messages", "messages if m.content != 'no'") + PROMPT, CHAT[:2], ONE),
        (SILENT_TURN, CHAT, BOTH[1:]),
    ],
)
def test_templates_that_once_lost_a_turn_or_masked_in_template_text(template, messages, expected):
    if isinstance(expected, list):
        assert masked_turns(messages, template) == expected
        return
    with pytest.raises(TurnNotFoundError, match=expected):
        masked_turns(messages, template)
