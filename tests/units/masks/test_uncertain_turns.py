"""Templates on which a turn was lost, or its mask held text that the model does not write."""

from __future__ import annotations

import pytest

from template_pairs import CALL, END, PROMPT, TURN, assistant, masked_by, user
from torchrl_llm_kl.masks import TurnNotFoundError
from toy_tokenizer import build_tokenizer

SCAN = "{% for m in messages %}{% endfor %}"
LAST = "{% for m in messages[:-1] %}BODY{% endfor %}{% set m = messages[-1] %}BODY".replace("BODY", TURN)
CHAT = [user("Hi"), assistant("yes"), user("Bye"), assistant("no")]


def masked(template: str, messages: list[dict]) -> list[str]:
    return masked_by(build_tokenizer(template), messages)


def test_the_last_message_outside_of_the_loop():
    """Nemotron-Nano-v2: a loop looks at all messages, another one writes all but the last, also with marks."""
    marked = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    marked += "{% else %}{{ m.content }}<|im_end|>{% endif %}"
    marked = LAST.replace("{{ m.content }}<|im_end|>", marked) + PROMPT
    for scan in (SCAN, ""):
        for template in (scan + LAST + PROMPT, scan + LAST, scan + marked):
            assert masked(template, CHAT) == ["yes" + END, "no" + END], template
        assert masked(scan + LAST + PROMPT, CHAT[:2]) == masked(scan + LAST, CHAT[:2]) == ["yes" + END]


def test_the_stop_token_of_a_tool_call_that_a_tool_answers_in_the_turn():
    """gemma-4: the tool's answer follows in the same turn, after the token that stopped the model."""
    template = (
        "{% for m in messages %}{% if m.role != 'tool' %}<turn>{{ m.role }}\n"
        "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}</call>{% set ns = namespace(answered=false) %}"
        "{% for k in range(loop.index, messages | length) %}{% if messages[k].role == 'tool' %}"
        "{% set result = messages[k] %}<response>{{ result.content }}</response>{% set ns.answered = true %}"
        "{% endif %}{% endfor %}{% if not ns.answered %}<response>{% endif %}{% else %}{{ m.content }}<end>\n{% endif %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt and messages[-1].role == 'user' %}<turn>assistant\n{% endif %}"
    )
    messages = [user("1+2?"), assistant("", tool_calls=CALL), {"role": "tool", "content": "3"}]
    assert masked(template, messages[:2]) == masked(template, messages) == ["<call>add</call><response>"]


def test_a_second_header_inside_of_a_turn_is_an_error():
    """DeepSeek-R1-Distill: a tool call with string content is written as two turns of the assistant."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% else %}<bot>"
        "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}</call><|im_end|><bot>{% endif %}"
        "{{ m.content }}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    )
    assert masked(template, CHAT) == ["yes" + END, "no" + END]
    with pytest.raises(TurnNotFoundError, match=r"message 1 \(assistant\) of 2.*holds a header.*<bot>.*chat_template="):
        masked(template, [user("1+2?"), assistant("Let me add.", tool_calls=CALL)])


def test_two_assistant_messages_in_a_row_without_a_prompt_between_them():
    """Reka: after an assistant's message, the template adds no generation prompt; the header is still no answer."""
    template = (
        "{% set ns = namespace(out='') %}{% for i in range(messages | length) %}{% set ns.out = ns.out ~ messages[i].role"
        " ~ ': ' ~ messages[i].content ~ '<sep>' %}{% endfor %}{{ ns.out }}"
        "{% if add_generation_prompt and messages[-1].role != 'assistant' %}assistant: {% endif %}"
    )
    messages = [user("x"), assistant("first"), assistant("second")]
    assert masked(template, messages) == ["first<sep>", "second<sep>"]


def test_content_in_the_wrong_order_is_an_error():
    template = (
        "{% for m in messages | reverse %}" + TURN + "{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(TurnNotFoundError, match="message 1"):
        masked(template, CHAT)


def test_a_turn_that_the_template_never_writes_is_omitted():
    template = "{% for m in messages if m.content != 'no' %}" + TURN + "{% endfor %}" + PROMPT
    assert masked(template, [user("Hi"), assistant("yes")]) == ["yes" + END]
    silent = SCAN + "{% for m in messages %}{% if loop.index != 2 %}" + TURN + "{% endif %}{% endfor %}" + PROMPT
    assert masked(silent, CHAT) == ["no" + END]
