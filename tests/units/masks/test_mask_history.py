"""Conversion of TorchRL histories to the message dicts of transformers."""

from __future__ import annotations

import pytest
import tensordict
import torch
from tensordict import lazy_stack
from torchrl.data.llm import History

from template_pairs import CALL, assistant, user
from torchrl_llm_kl.masks import history_to_messages, render_conversations
from toy_tokenizer import build_tokenizer


@pytest.fixture(autouse=True)
def _lists_are_stacks():
    with tensordict.set_list_to_stack(True):
        yield


LONG = [user("a"), assistant("b"), user("c"), assistant("d")]
SHORT = [user("a"), assistant("b")]


def test_one_conversation():
    assert history_to_messages(History.from_chats(LONG)) == LONG
    assert history_to_messages(History(role="user", content="a")) == [user("a")]
    history = History(role=["user", "assistant"], content=["a", "b"], batch_size=(2,))
    assert history_to_messages(history) == SHORT
    assert history_to_messages(torch.stack([history, history])) == [SHORT, SHORT]
    with pytest.raises(TypeError, match="found list"):
        history_to_messages([user("a")])


def test_ragged_batches():
    for chats in ([LONG, SHORT], [SHORT, LONG, [user("x")]], [[LONG, SHORT], [SHORT, SHORT]]):
        assert history_to_messages(History.from_chats(chats)) == chats
    history = lazy_stack([lazy_stack([History(**m) for m in chat]) for chat in (SHORT, LONG)])
    assert history_to_messages(history) == [SHORT, LONG]


def test_extended():
    for inplace in (False, True):
        history = History.from_chats([[user("a")], [user("c")]])
        answers = History.from_chats([[assistant("b")], [assistant("d")]])
        extended = history.extend(answers, dim=-1, inplace=inplace)
        assert history_to_messages(extended) == [[user("a"), assistant("b")], [user("c"), assistant("d")]]


def test_placeholders_and_unset_fields_are_dropped():
    chat = [user("a"), assistant("", tool_calls=CALL), {"role": "<none>", "content": ""}, user("b")]
    assert history_to_messages(History.from_chats(chat)) == [chat[0], chat[1], chat[3]]


def test_content_in_parts_and_incomplete_messages():
    parts = [{"type": "text", "text": "a"}]
    history = History.from_chats([user(parts), {**assistant("b"), "is_complete": False}])
    assert history_to_messages(history) == [user(parts), assistant("b")]


def test_the_history_is_not_modified():
    history = History.from_chats([assistant("", tool_calls=CALL)])
    history_to_messages(history)[0]["tool_calls"][0]["function"]["name"] = "changed"
    assert history_to_messages(history)[0]["tool_calls"] == CALL


def test_defect_13_the_mask_belongs_to_the_tokens_that_are_returned():
    """Ragged histories give each conversation its own tokens and a mask of the same length, unpadded."""
    tokenizer = build_tokenizer()
    chats = history_to_messages(History.from_chats([LONG, SHORT]))
    long, short = render_conversations(tokenizer, chats)
    assert tokenizer.decode(long.token_ids[long.assistant_mask]) == "b<|im_end|>d<|im_end|>"
    assert tokenizer.decode(short.token_ids[short.assistant_mask]) == "b<|im_end|>"
    assert len(short.token_ids) == len(short.assistant_mask) < len(long.token_ids) == len(long.assistant_mask)
