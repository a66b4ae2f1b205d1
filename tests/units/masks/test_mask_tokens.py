"""From characters to tokens: borders inside tokens, characters of several tokens, trimmed offsets, no offsets."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, processors

from torchrl_llm_kl.masks import AssistantMaskError, encode_with_mask, render_conversation
from toy_tokenizer import CHATML, build_tokenizer


class WithoutOffsets:
    """A slow tokenizer: it encodes but returns no offsets. Tokens are words if ``words``, else characters."""

    is_fast = False

    def __init__(self, words: bool) -> None:
        self.words = words

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [len(word) for word in text.split()] if self.words else [ord(c) for c in text]


def masked(tokenizer, text, spans) -> str:
    ((ids, mask),) = encode_with_mask(tokenizer, [text], [spans])
    return tokenizer.decode(ids[mask])


@pytest.mark.parametrize(
    ("span", "expected"), [((1, 3), "bc"), ((2, 3), "bc"), ((1, 2), "bc"), ((3, 4), "d"), ((0, 1), ""), ((2, 2), "")]
)
def test_a_token_that_straddles_the_border_is_masked_in(span, expected):
    tokenizer = build_tokenizer(merges=[("b", "c")])
    assert masked(tokenizer, "abcd", [span]) == expected


def test_a_token_of_header_and_answer_is_masked_in():
    """ "\\n" ends the header and starts the answer; as one token, it holds part of the model's output."""
    tokenizer = build_tokenizer(merges=[("Ċ", "Ċ")])
    rendered = render_conversation(
        tokenizer, [{"role": "user", "content": "x"}, {"role": "assistant", "content": "\na"}]
    )
    assert tokenizer.decode(rendered.token_ids[rendered.assistant_mask]) == "\n\na<|im_end|>"


def test_every_token_of_a_character_is_masked_in():
    tokenizer = build_tokenizer()
    ((_, mask),) = encode_with_mask(tokenizer, ["a😀b"], [[(1, 2)]])
    assert mask.tolist() == [False, True, True, True, True, False]


def test_white_space_that_trimmed_offsets_omit():
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert masked(tokenizer, "x a  b \n<|im_end|>\n", [(3, 18)]) == "  b \n<|im_end|>"
    assert masked(tokenizer, "x  y", [(2, 3)]) == " "


def test_a_header_token_that_swallows_white_space_is_masked_out():
    tokenizer = build_tokenizer(extra_special_tokens=())
    tokenizer.add_tokens(
        [AddedToken("<bot>", rstrip=True, special=True), AddedToken("<end>", lstrip=True, special=True)]
    )
    assert masked(tokenizer, "x<bot>  a<end>", [(6, 14)]) == "a<end>"
    assert masked(tokenizer, "x<bot>\n<end>", [(7, 12)]) == "<end>"
    assert masked(tokenizer, "x:\n<end>", [(3, 8)]) == "<end>"


def test_the_first_token_is_never_masked_in():
    assert masked(build_tokenizer(), "abc", [(0, 3)]) == "bc"
    rendered = render_conversation(
        build_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}"), [{"role": "assistant", "content": "abc"}]
    )
    assert rendered.assistant_mask.tolist() == [False, True, True]


def test_empty_text_and_no_spans():
    ((ids, mask), (_, none)) = encode_with_mask(build_tokenizer(), ["", "ab"], [[], []])
    assert (ids.tolist(), mask.tolist(), none.tolist()) == ([], [], [False, False])


def test_without_offsets_the_pieces_must_have_the_tokens_of_the_whole():
    ((ids, mask),) = encode_with_mask(WithoutOffsets(words=False), ["abcde"], [[(1, 2), (3, 5)]])
    assert ids.tolist() == [97, 98, 99, 100, 101]
    assert mask.tolist() == [False, True, False, True, True]
    with pytest.raises(AssistantMaskError, match=r"changes token 1 of 3.*fast version"):
        encode_with_mask(WithoutOffsets(words=True), ["one two six"], [[(5, 9)]])


def test_bos_written_by_the_template_is_not_added_twice():
    tokenizer = build_tokenizer("{{ bos_token }}" + CHATML, bos_token="<s>")
    rendered = render_conversation(tokenizer, [{"role": "user", "content": "x"}])
    assert (rendered.token_ids == tokenizer.bos_token_id).sum() == 1
