"""Masks of tokens from spans of characters, messages from TorchRL's histories, and the number of renderings."""

from collections.abc import Callable
from types import SimpleNamespace

import jinja2
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tensordict import lazy_stack
from tokenizers import AddedToken, normalizers, processors
from torchrl.data.llm import History

import template_pairs
from rollout_fixtures import _lists_become_stacks  # noqa: F401
from template_pairs import CALL, END, LOOP, PROMPT, assistant, marked, masked_by, user
from torchrl_llm_kl import masks
from torchrl_llm_kl.masks import (
    PLAIN_TEMPLATE,
    encode_with_mask,
    history_to_messages,
    mask_from_prompt_lengths,
    render_conversation,
)
from toy_tokenizer import CHATML, build_bos_tokenizer, build_tokenizer


def without_offsets(tokens: Callable[[str], list[int]]) -> SimpleNamespace:
    """A slow tokenizer: it encodes but returns no offsets."""

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return tokens(text)

    return SimpleNamespace(is_fast=False, encode=encode)


def masked(tokenizer, text, spans) -> str:
    ((ids, mask),) = encode_with_mask(tokenizer, [text], [spans])
    return tokenizer.decode(ids[mask])


def test_borders_inside_tokens_and_white_space_of_offsets_and_headers():
    tokenizer = build_tokenizer(merges=[("b", "c")])
    for span, expected in (((1, 3), "bc"), ((2, 3), "bc"), ((1, 2), "bc"), ((3, 4), "d"), ((0, 1), ""), ((2, 2), "")):
        assert masked(tokenizer, "abcd", [span]) == expected, span
    # "\n" ends the header and starts the answer; as one token, it holds part of the model's output.
    tokenizer = build_tokenizer(merges=[("Ċ", "Ċ")])
    rendered = render_conversation(tokenizer, [user("x"), assistant("\na")])
    assert tokenizer.decode(rendered.token_ids[rendered.assistant_mask]) == "\n\na<|im_end|>"
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert masked(tokenizer, "x a  b \n<|im_end|>\n", [(3, 18)]) == "  b \n<|im_end|>"
    assert masked(tokenizer, "x  y", [(2, 3)]) == " "
    tokenizer = build_tokenizer(extra_special_tokens=())
    bot, end = AddedToken("<bot>", rstrip=True, special=True), AddedToken("<end>", lstrip=True, special=True)
    tokenizer.add_tokens([bot, end])
    assert masked(tokenizer, "x<bot>  a<end>", [(6, 14)]) == "a<end>"
    assert masked(tokenizer, "x<bot>\n<end>", [(7, 12)]) == "<end>"
    assert masked(tokenizer, "x:\n<end>", [(3, 8)]) == "<end>"


@pytest.mark.parametrize(
    "template", [PLAIN_TEMPLATE, "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"]
)
@pytest.mark.parametrize("tokenizer", [build_bos_tokenizer(), build_tokenizer()], ids=["bos", "no bos"])
def test_a_plain_template_masks_exactly_the_contents(template, tokenizer):
    """White space at the edges of an answer belongs to the model, since no end token follows."""
    chat = [
        {"role": "system", "content": "Add.\n"},
        user("3 + 4 ="),
        assistant(" 7\n"),
        user("1 + 1 ="),
        assistant("\n2 \n\n"),
    ]
    rendered = render_conversation(tokenizer, chat, chat_template=template)
    bos = tokenizer.bos_token or ""
    assert rendered.text == bos + "Add.\n3 + 4 = 7\n1 + 1 =\n2 \n\n"
    assert [rendered.text[a:b] for a, b in rendered.assistant_spans] == [" 7\n", "\n2 \n\n"]
    # Each character is one token.
    expected = [False] * (13 if bos else 12) + [True] * 3 + [False] * 7 + [True] * 5
    assert rendered.assistant_mask.tolist() == expected
    prompt = render_conversation(tokenizer, chat[:2], chat_template=template, add_generation_prompt=True)
    assert prompt.text == bos + "Add.\n3 + 4 ="


def test_a_template_with_a_header_keeps_its_rule_about_white_space():
    loop = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template = loop + "{% if add_generation_prompt %}assistant: {% endif %}"
    rendered = render_conversation(build_tokenizer(template), [user("x"), assistant("y  ")])
    assert [rendered.text[a:b] for a, b in rendered.assistant_spans] == ["y"]


PIECES = ["ab", "b", " ", "  ", "\n", "é", "😀", "漢", "\u3000", "<bot>", "<end>"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=1), st.lists(st.integers(0, 30), max_size=6), st.booleans())
def test_the_mask_follows_from_the_characters_of_each_token(pieces, borders, trimmed):
    tokenizer = build_tokenizer(merges=[("a", "b"), ("Ġ", "Ġ"), ("Ġ", "b"), ("b", "Ċ")], extra_special_tokens=())
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trimmed)
    tokenizer.add_tokens(
        [AddedToken("<bot>", rstrip=True, special=True), AddedToken("<end>", lstrip=True, special=True)]
    )
    text, borders = "".join(pieces), sorted(borders)
    spans = [(min(a, len(text)), min(b, len(text))) for a, b in zip(borders[::2], borders[1::2], strict=False)]
    inside = {character for span in spans for character in range(*span)}
    encoded, end, expected = tokenizer(text, return_offsets_mapping=True), 0, []
    for token, (first, last) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        # White space that a tokenizer trims from its offsets belongs to the next token.
        own = range(min(first, end), last)
        end, held = last, inside.intersection(own)
        header = token in tokenizer.added_tokens_decoder and bool(held) and own[0] not in inside
        expected.append(bool(held) and not (header and all(text[c].isspace() for c in held)))
    ((found, mask),) = encode_with_mask(tokenizer, [text], [spans])
    assert (found.tolist(), mask.tolist()) == (encoded["input_ids"], [False, *expected[1:]])


def test_a_normalizer_that_inserts_characters_and_trimmed_offsets():
    """The space has the offsets (0, 0). They come after (0, 1) of the inserted x, so token ends decrease."""
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("x")
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert tokenizer(" a", return_offsets_mapping=True)["offset_mapping"][:2] == [(0, 1), (0, 0)]
    assert masked(tokenizer, " a", [(0, 1)]) == " "
    assert masked(tokenizer, " a", [(1, 2)]) == "a"


def test_all_tokens_of_a_character_are_masked_in_and_the_first_token_never():
    ((_, mask), (ids, empty), (_, none)) = encode_with_mask(build_tokenizer(), ["a😀b", "", "ab"], [[(1, 2)], [], []])
    assert mask.tolist() == [False, True, True, True, True, False]
    assert (ids.tolist(), empty.tolist(), none.tolist()) == ([], [], [False, False])
    assert masked(build_tokenizer(), "abc", [(0, 3)]) == "bc"
    tokenizer = build_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert render_conversation(tokenizer, [assistant("abc")]).assistant_mask.tolist() == [False, True, True]
    tokenizer = build_tokenizer("{{ bos_token }}" + CHATML, bos_token="<s>")  # by the template: not added twice
    assert (render_conversation(tokenizer, [user("x")]).token_ids == tokenizer.bos_token_id).sum() == 1
    ((ids, mask),) = encode_with_mask(without_offsets(lambda text: list(map(ord, text))), ["abcde"], [[(1, 2), (3, 5)]])
    assert (ids.tolist(), mask.int().tolist()) == ([97, 98, 99, 100, 101], [0, 1, 0, 1, 1])
    with pytest.raises(masks.AssistantMaskError, match=r"token 1 of 3 changes.*fast tokenizer"):
        encode_with_mask(without_offsets(lambda text: list(map(len, text.split()))), ["one two six"], [[(5, 9)]])


def test_masks_from_lengths_of_prompts():
    for prompts, lengths, expected in (
        ([2, 1], [3, 4], [0, 0, 1, 0, 1, 1, 1]),
        ([0], [3], [0, 1, 1]),  # no prefix, no log-prob
        ([3], [3], [0, 0, 0]),  # no answer
        ([0, 0, 2], [0, 1, 3], [0, 0, 0, 1]),  # empty sequences
        ([], [], []),
    ):
        for dtype in (torch.int32, torch.long):
            mask = mask_from_prompt_lengths(torch.tensor(prompts, dtype=dtype), torch.tensor(lengths, dtype=dtype))
            assert mask.dtype == torch.bool
            assert mask.int().tolist() == expected
    for prompts, lengths, message in (
        ([1, 4], [2, 3], "sequence 1 has 4 of 3 tokens"),
        ([-1], [2], "sequence 0 has -1 of 2 tokens"),
        ([1], [2, 3], r"shapes \(1,\) and \(2,\), expected \[S\] for both"),
    ):
        with pytest.raises(ValueError, match=message):
            mask_from_prompt_lengths(torch.tensor(prompts), torch.tensor(lengths))


LONG = [user("a"), assistant("b"), user("c"), assistant("d")]
SHORT = [user("a"), assistant("b")]


def test_histories_become_copies_of_their_messages_without_unset_fields():
    assert history_to_messages(History.from_chats(LONG)) == LONG
    assert history_to_messages(History(role="user", content="a")) == [user("a")]
    history = History(role=["user", "assistant"], content=["a", "b"], batch_size=(2,))
    assert history_to_messages(history) == SHORT
    assert history_to_messages(torch.stack([history, history])) == [SHORT, SHORT]
    with pytest.raises(TypeError, match="found list"):
        history_to_messages([user("a")])
    for chats in ([LONG, SHORT], [SHORT, LONG, [user("x")]], [[LONG, SHORT], [SHORT, SHORT]]):  # ragged
        assert history_to_messages(History.from_chats(chats)) == chats
    history = lazy_stack([lazy_stack([History(**m) for m in chat]) for chat in (SHORT, LONG)])
    assert history_to_messages(history) == [SHORT, LONG]
    for inplace in (False, True):
        history = History.from_chats([[user("a")], [user("c")]])
        extended = history.extend(History.from_chats([LONG[1:2], LONG[3:]]), dim=-1, inplace=inplace)
        assert history_to_messages(extended) == [LONG[:2], LONG[2:]]
    chat = [user("a"), assistant("", tool_calls=CALL), {"role": "<none>", "content": ""}, user("b")]
    history = History.from_chats(chat)
    assert history_to_messages(history) == [chat[0], chat[1], chat[3]]
    parts = [{"type": "text", "text": "a"}]
    incomplete = History.from_chats([user(parts), {**assistant("b"), "is_complete": False}])
    assert history_to_messages(incomplete) == [user(parts), assistant("b")]
    history_to_messages(history)[1]["tool_calls"][0]["function"]["name"] = "changed"
    assert history_to_messages(history)[1]["tool_calls"] == CALL


def test_defect_13_the_mask_belongs_to_the_tokens_that_are_returned():
    """Ragged histories give each conversation its own tokens and a mask of the same length, unpadded."""
    tokenizer = build_tokenizer()
    chats = history_to_messages(History.from_chats([LONG, SHORT]))
    long, short = masks.render_conversations(tokenizer, chats)
    assert tokenizer.decode(long.token_ids[long.assistant_mask]) == "b<|im_end|>d<|im_end|>"
    assert tokenizer.decode(short.token_ids[short.assistant_mask]) == "b<|im_end|>"
    assert len(short.token_ids) == len(short.assistant_mask) < len(long.token_ids) == len(long.assistant_mask)


TYPICAL = {
    "chatml": CHATML,
    "llama-3": "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' "
    "+ message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = '<|begin_of_text|>' + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    # no generation prompt at all
    "mistral": "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
    "gemma": "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    "phi-3": "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "default set": "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    + CHATML,
    "thinking prompt": LOOP + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    "marked": marked(LOOP, "{{ m.content }}<|im_end|>") + PROMPT,
}


def talk(turns: int) -> list[dict]:
    return [m for k in range(turns) for m in (user(f"Question {k}?"), assistant(f"Answer {k}."))]


@pytest.fixture
def renderings(monkeypatch):
    """A list that gets one item for each rendering of a template."""
    made: list[object] = []
    render = jinja2.Template.render
    monkeypatch.setattr(jinja2.Template, "render", lambda *args, **how: made.append(args[0]) or render(*args, **how))
    return made


@pytest.mark.parametrize("template", TYPICAL)
def test_the_number_of_renderings_does_not_depend_on_the_number_of_turns(renderings, template):
    """There are two renderings. Without an assistant turn there is one, and a third may show the generation prompt."""
    tokenizer = build_tokenizer(TYPICAL[template])
    with_prompt = 3 if template in ("mistral", "thinking prompt") else 2
    for turns, prompt, count in ((1, False, 2), (4, False, 2), (3, True, with_prompt), (0, False, 1), (0, True, 1)):
        messages = talk(turns) or [user("x")]
        render_conversation(tokenizer, messages, add_generation_prompt=prompt)  # its borders are confirmed once
        renderings.clear()
        rendered = render_conversation(tokenizer, messages, add_generation_prompt=prompt)
        assert len(rendered.assistant_spans) == turns, (turns, prompt)
        assert len(renderings) == count, (turns, prompt)


def test_without_a_mask_there_is_one_rendering_and_no_error(renderings):
    tokenizer = build_tokenizer()
    whole = render_conversation(tokenizer, talk(2), assistant_mask=False)
    assert len(renderings) == 1
    assert (whole.assistant_spans, whole.located_by, whole.assistant_mask.any().item()) == ((), "not asked", False)
    assert whole.token_ids.equal(render_conversation(tokenizer, talk(2)).token_ids)
    tokenizer = build_tokenizer("{{ messages | length }}{% for m in messages %}{{ m | length }}{% endfor %}")
    with pytest.raises(masks.AssistantMaskError):
        render_conversation(tokenizer, talk(1))
    assert render_conversation(tokenizer, talk(1), assistant_mask=False).text == "222"


# TRL's templates that need more than two renderings for four plain turns, and why.
MORE = {
    # the loop ends the last turn differently before a generation prompt: one rendering for each
    **dict.fromkeys(("gptoss", "gptoss_training"), 3),
    # the text after the loop depends on the last message: each turn is rendered with its prompt, and without
    **dict.fromkeys(("deepseek_r1_distill", "deepseek_r1_distill_training", "deepseekv3", "deepseekv3_training"), 18),
    **dict.fromkeys(("diffusion_gemma", "diffusion_gemma_training", "phi3_training", "phi3_5_training"), 14),
    **dict.fromkeys(("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"), 14),
    # no generation prompt, and content in parts: each header is found by rendering the turn with other content
    **dict.fromkeys(("llava_next", "llava_next_training"), 10),
}


@pytest.fixture(scope="module")
def shipped():
    pytest.importorskip("trl", reason="its templates are counted")
    return template_pairs.all_templates()


@pytest.mark.parametrize("part", range(12))
def test_renderings_of_the_templates_that_trl_ships(renderings, shipped, part):
    templates = shipped[part::12]
    counts = {}
    for template in templates:
        messages = talk(4)
        if template.removesuffix("_training") == "llava_next":
            messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        tokenizer = template_pairs.tokenizer_for(template)
        render_conversation(tokenizer, messages)
        renderings.clear()
        render_conversation(tokenizer, messages)
        counts[template] = len(renderings)
    assert counts == {template: MORE.get(template, 2) for template in templates}


def no_thinking(condition: str) -> str:
    thought = "{% if " + condition + " %}<think></think>{% endif %}"
    return "{% if add_generation_prompt %}<|im_start|>assistant\n" + thought + "{% endif %}"


def loop_with(more: str) -> str:
    return LOOP.replace("{% endfor %}", more + "{% endfor %}")


NOTED = "{% set ns = namespace(last='') %}"
# Each prompts for the first answer with an empty thinking block, and for the second without.
VARYING = {
    "namespace": NOTED + loop_with("{% set ns.last = m.content %}") + no_thinking("'/off' in ns.last"),
    "namespace in a macro": NOTED
    + "{% macro note(m) %}{% set ns.last = m.content %}{% endmacro %}"
    + loop_with("{{ note(m) }}")
    + no_thinking("'/off' in ns.last"),
    "last message": LOOP + no_thinking("'/off' in messages[-1].content"),
    "by way of a variable": "{% set said = messages | map(attribute='content') | list %}{% set last = said[-1] %}"
    + LOOP
    + no_thinking("'/off' in last"),
    "inside of the loop": loop_with("{% if loop.last %}" + no_thinking("'/off' in m.content") + "{% endif %}"),
}


@pytest.mark.parametrize("template", VARYING)
def test_each_turn_has_the_header_of_its_own_generation_prompt(template):
    messages = [user("a /off"), assistant("<think></think>yes"), user("b"), assistant("<think></think>no")]
    for prompt in (False, True):
        found = masked_by(build_tokenizer(VARYING[template]), messages, add_generation_prompt=prompt)
        assert found == ["yes" + END, "<think></think>no" + END], prompt


def test_without_a_generation_prompt_the_header_is_the_text_before_any_content():
    for shown, content, expected in (
        ("{{ m.role }}: {{ m.content | upper }}\n", "assistant", "ASSISTANT"),
        ("{{ m.role }}: {{ m.content }}\n", "assistant", "assistant"),
        ("{{ m.role }} {{ m.content }}\n", "assistant", "assistant"),
        (" {{ m.content }}</s>", "yes", " yes</s>"),
        (" {{ m.content }}</s>", "[INST]", " [INST]</s>"),
        ("<answer>{{ m.content }}</s>", "<answer>", "<answer></s>"),
        ("<answer>{{ m.content }}</s>", "answer", "answer</s>"),
    ):
        template = "{% for m in messages %}{% if m.role == 'user' %}[INST]{% else %}SHOWN{% endif %}{% endfor %}"
        template = template.replace("SHOWN", shown)
        found = masked_by(build_tokenizer(template), [user("x"), assistant(content)])
        assert found == [expected], (shown, content)
    for closes in ("", "{% else %}{{ eos_token }}"):  # an end token that only the prompt adds belongs to no answer
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
        template += "{% if add_generation_prompt %}{{ eos_token }}assistant: " + closes + "{% endif %}"
        found = masked_by(build_tokenizer(template), [user("x"), assistant("yes")], add_generation_prompt=True)
        assert found == ["yes" + END * bool(closes)], closes
