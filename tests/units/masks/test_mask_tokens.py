"""From characters to tokens: borders inside tokens, characters of several tokens, trimmed offsets, no offsets."""

from __future__ import annotations

import pytest
import torch
from tokenizers import AddedToken, processors

from template_pairs import assistant, user
from torchrl_llm_kl.masks import AssistantMaskError, encode_with_mask, mask_from_prompt_lengths, render_conversation
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


def test_a_token_that_straddles_the_border_is_masked_in():
    tokenizer = build_tokenizer(merges=[("b", "c")])
    for span, expected in (((1, 3), "bc"), ((2, 3), "bc"), ((1, 2), "bc"), ((3, 4), "d"), ((0, 1), ""), ((2, 2), "")):
        assert masked(tokenizer, "abcd", [span]) == expected, span
    # "\n" ends the header and starts the answer; as one token, it holds part of the model's output.
    tokenizer = build_tokenizer(merges=[("Ċ", "Ċ")])
    rendered = render_conversation(tokenizer, [user("x"), assistant("\na")])
    assert tokenizer.decode(rendered.token_ids[rendered.assistant_mask]) == "\n\na<|im_end|>"


def test_every_token_of_a_character_is_masked_in():
    ((_, mask), (ids, empty), (_, none)) = encode_with_mask(build_tokenizer(), ["a😀b", "", "ab"], [[(1, 2)], [], []])
    assert mask.tolist() == [False, True, True, True, True, False]
    assert (ids.tolist(), empty.tolist(), none.tolist()) == ([], [], [False, False])


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
    tokenizer = build_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert render_conversation(tokenizer, [assistant("abc")]).assistant_mask.tolist() == [False, True, True]


def test_without_offsets_the_pieces_must_have_the_tokens_of_the_whole():
    ((ids, mask),) = encode_with_mask(WithoutOffsets(words=False), ["abcde"], [[(1, 2), (3, 5)]])
    assert ids.tolist() == [97, 98, 99, 100, 101]
    assert mask.tolist() == [False, True, False, True, True]
    with pytest.raises(AssistantMaskError, match=r"changes token 1 of 3.*fast version"):
        encode_with_mask(WithoutOffsets(words=True), ["one two six"], [[(5, 9)]])


def test_bos_written_by_the_template_is_not_added_twice():
    tokenizer = build_tokenizer("{{ bos_token }}" + CHATML, bos_token="<s>")
    assert (render_conversation(tokenizer, [user("x")]).token_ids == tokenizer.bos_token_id).sum() == 1


# ------------------------------------------------------------------ lengths of prompts in flat data


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


def test_impossible_lengths():
    for prompts, lengths, message in (
        ([1, 4], [2, 3], "sequence 1 has prompt length 4 and length 3"),
        ([-1], [2], "sequence 0 has prompt length -1"),
        ([1], [2, 3], r"shape \(1,\) and lengths \(2,\)"),
        ([[1]], [[2]], "Flatten batch dimensions"),
    ):
        with pytest.raises(ValueError, match=message):
            mask_from_prompt_lengths(torch.tensor(prompts), torch.tensor(lengths))
    with pytest.raises(TypeError, match=r"lengths has dtype torch.float32"):
        mask_from_prompt_lengths(torch.tensor([1]), torch.tensor([2.0]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_mask_from_lengths_stays_on_the_device():
    mask = mask_from_prompt_lengths(torch.tensor([1]), torch.tensor([2], device="cuda"))
    assert mask.device.type == "cuda"
    assert mask.tolist() == [False, True]
