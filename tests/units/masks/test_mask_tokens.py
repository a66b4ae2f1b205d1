"""From characters to tokens: borders inside tokens, trimmed offsets, no offsets; and TorchRL's histories as messages."""

from __future__ import annotations

import pytest
import tensordict
import torch
from tensordict import lazy_stack
from tokenizers import AddedToken, processors
from torchrl.data.llm import History

from template_pairs import CALL, assistant, user
from torchrl_llm_kl.masks import (
    AssistantMaskError,
    encode_with_mask,
    history_to_messages,
    mask_from_prompt_lengths,
    render_conversation,
    render_conversations,
)
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


def test_every_token_of_a_character_is_masked_in_and_the_first_never():
    ((_, mask), (ids, empty), (_, none)) = encode_with_mask(build_tokenizer(), ["a😀b", "", "ab"], [[(1, 2)], [], []])
    assert mask.tolist() == [False, True, True, True, True, False]
    assert (ids.tolist(), empty.tolist(), none.tolist()) == ([], [], [False, False])
    assert masked(build_tokenizer(), "abc", [(0, 3)]) == "bc"
    tokenizer = build_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert render_conversation(tokenizer, [assistant("abc")]).assistant_mask.tolist() == [False, True, True]
    tokenizer = build_tokenizer("{{ bos_token }}" + CHATML, bos_token="<s>")  # by the template: not added twice
    assert (render_conversation(tokenizer, [user("x")]).token_ids == tokenizer.bos_token_id).sum() == 1


def test_white_space_that_trimmed_offsets_omit_or_a_header_token_swallows():
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


def test_without_offsets_the_pieces_must_have_the_tokens_of_the_whole():
    ((ids, mask),) = encode_with_mask(WithoutOffsets(words=False), ["abcde"], [[(1, 2), (3, 5)]])
    assert ids.tolist() == [97, 98, 99, 100, 101]
    assert mask.tolist() == [False, True, False, True, True]
    with pytest.raises(AssistantMaskError, match=r"changes token 1 of 3.*fast version"):
        encode_with_mask(WithoutOffsets(words=True), ["one two six"], [[(5, 9)]])


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


@pytest.fixture
def _lists_are_stacks():
    with tensordict.set_list_to_stack(True):
        yield


LONG = [user("a"), assistant("b"), user("c"), assistant("d")]
SHORT = [user("a"), assistant("b")]


@pytest.mark.usefixtures("_lists_are_stacks")
def test_histories_are_messages():
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


@pytest.mark.usefixtures("_lists_are_stacks")
def test_messages_have_what_is_set_and_are_copies():
    chat = [user("a"), assistant("", tool_calls=CALL), {"role": "<none>", "content": ""}, user("b")]
    history = History.from_chats(chat)
    assert history_to_messages(history) == [chat[0], chat[1], chat[3]]
    parts = [{"type": "text", "text": "a"}]
    incomplete = History.from_chats([user(parts), {**assistant("b"), "is_complete": False}])
    assert history_to_messages(incomplete) == [user(parts), assistant("b")]
    history_to_messages(history)[1]["tool_calls"][0]["function"]["name"] = "changed"
    assert history_to_messages(history)[1]["tool_calls"] == CALL


@pytest.mark.usefixtures("_lists_are_stacks")
def test_defect_13_the_mask_belongs_to_the_tokens_that_are_returned():
    """Ragged histories give each conversation its own tokens and a mask of the same length, unpadded."""
    tokenizer = build_tokenizer()
    chats = history_to_messages(History.from_chats([LONG, SHORT]))
    long, short = render_conversations(tokenizer, chats)
    assert tokenizer.decode(long.token_ids[long.assistant_mask]) == "b<|im_end|>d<|im_end|>"
    assert tokenizer.decode(short.token_ids[short.assistant_mask]) == "b<|im_end|>"
    assert len(short.token_ids) == len(short.assistant_mask) < len(long.token_ids) == len(long.assistant_mask)
