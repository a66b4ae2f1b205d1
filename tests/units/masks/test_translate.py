"""Prompts of one chat template in another one, against the other template's own rendering."""

import pytest

from torchrl_llm_kl.masks import PromptTranslator
from toy_tokenizer import build_bos_tokenizer, build_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: A default system prompt, BOS, and "model" for the assistant, whose turn must follow a user's.
TURNS = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% set messages = messages[1:] %}"
    "{% else %}{{ 'Be brief.\n\n' }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}{% endif %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
ASKED = [{"role": "user", "content": "How many?\n"}, {"role": "assistant", "content": "2 <b>\n"}]
SYSTEM = {"role": "system", "content": "You count."}
MORE = {"role": "user", "content": "And now? assistant\n"}


def chatml():
    return build_tokenizer(CHATML, ["<|im_start|>"], eos_token="<|im_end|>")


def turns():
    tokenizer = build_bos_tokenizer(TURNS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>", "<end>"]})
    return tokenizer


def ids_of(tokenizer, messages, after=""):
    """The token ids of a rendering with a generation prompt, after the last occurrence of ``after``."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text.rpartition(after)[2] if after else text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("messages", [ASKED[:1], [SYSTEM, *ASKED[:1]], [*ASKED, MORE], [SYSTEM, *ASKED, MORE]])
@pytest.mark.parametrize("back", [False, True])
def test_a_prompt_is_the_other_templates_rendering(messages, back):
    source, target = (turns(), chatml()) if back else (chatml(), turns())
    stripped = messages if back else [{**m, "content": m["content"].strip()} for m in messages]  # ChatML trims
    got = PromptTranslator(source, target)(ids_of(source, messages))
    if back and "system" not in (m["role"] for m in messages):
        # The default prompt belongs to the template, and is not a message.
        assert target.decode(got).startswith("<|im_start|>user")
    assert got == ids_of(target, stripped)


@pytest.mark.parametrize("back", [False, True])
def test_the_turns_after_an_answer(back):
    """The answer ends with the token that the policy sampled, so the text begins after it."""
    source, target = (turns(), chatml()) if back else (chatml(), turns())
    ends = {True: ("<end>", "<|im_end|>"), False: ("<|im_end|>", "<end>")}[back]
    more = {**MORE, "content": MORE["content"].strip()}
    talk = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "2 QQ"}, more]
    given, want = (ids_of(tokenizer, talk, "QQ" + end) for tokenizer, end in zip((source, target), ends, strict=True))
    assert source.decode(given).startswith("\n<")
    assert PromptTranslator(source, target).between(given) == want
    # An answer that was cut off, or a mask without end tokens: the text has the source's end token.
    given, want = (ids_of(tokenizer, talk, "QQ") for tokenizer in (source, target))
    assert PromptTranslator(source, target).between(given) == want


def test_a_message_that_the_other_template_leaves_out_or_refuses():
    target = turns()
    target.chat_template = TURNS.replace("messages[0].content + '\n\n'", "''")
    with pytest.raises(ValueError, match=r"leaves out the system message 'You count\.'"):
        PromptTranslator(chatml(), target)(ids_of(chatml(), [SYSTEM, *ASKED[:1]]))
    with pytest.raises(ValueError, match="refuses messages of user, user: roles"):
        PromptTranslator(chatml(), turns())(ids_of(chatml(), [ASKED[0], MORE]))


def test_a_long_text_without_a_generation_prompt_fails_at_once():
    """Places from which no messages follow are tried once. Without that, this would take 2 ** 40 calls."""
    source = chatml()
    text = source.apply_chat_template(ASKED * 20, tokenize=False) + "tail"
    with pytest.raises(ValueError, match="does not render"):
        PromptTranslator(source, turns())(source(text, add_special_tokens=False).input_ids)


def test_a_text_that_the_template_does_not_render():
    translator = PromptTranslator(chatml(), turns())
    with pytest.raises(ValueError, match="does not render 'plain text'"):
        translator(chatml()("plain text").input_ids)
