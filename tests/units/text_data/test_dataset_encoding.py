"""Rows of every layout: their tokens and masks by hand, and what is wrong with a bad one."""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from torchrl_llm_kl.datasets import Answer, Encoder, Row, Skip, layout_of
from toy_tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(pad_token="<|pad|>")
HI = [{"role": "user", "content": "hi"}]
EARLIER = [*HI, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "and?"}]


ABCD = TOKENIZER("abcd").input_ids


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def encode(value: Any, *, tokenizer: Any = TOKENIZER, **settings: Any) -> list[Answer | Skip]:
    return Encoder(layout_of(value), tokenizer, **settings).encode(Row(0, "line 1", value))


def scored(answer: Answer | Skip, tokenizer: Any = TOKENIZER) -> str:
    """The text of the tokens that are masked in."""
    assert isinstance(answer, Answer), answer
    assert answer.tokens.shape == answer.mask.shape
    return tokenizer.decode(answer.tokens[answer.mask])


SCORED = [
    ({"messages": [*HI, *said("yes")]}, ["yes<|im_end|>"]),
    ({"messages": [*EARLIER, *said("no")]}, ["ho<|im_end|>no<|im_end|>"]),
    ({"prompt": "2 + 2 =", "completion": " 4"}, [" 4"]),
    ({"prompt": "", "completion": "abc"}, ["bc"]),  # the first token has no prefix
    ({"prompt": HI, "completion": said("yes")}, ["yes<|im_end|>"]),
    ({"prompt": EARLIER, "completion": said("no")}, ["no<|im_end|>"]),  # the prompt's own turn is not scored
    ({"prompt": "a", "chosen": "bc", "rejected": "d"}, ["bc", "d"]),
    ({"prompt": EARLIER, "chosen": said("x"), "rejected": said("yz")}, ["x<|im_end|>", "yz<|im_end|>"]),
    # the prompt is what both share
    ({"chosen": [*EARLIER, *said("x")], "rejected": [*EARLIER, *said("yz")]}, ["x<|im_end|>", "yz<|im_end|>"]),
    ({"tokens": ABCD, "prompt_length": 3}, ["d"]),
    ({"input_ids": ABCD, "mask": [0, 1, 0, 1]}, ["bd"]),
    ({"input_ids": ABCD, "completion_mask": [False, False, True, True]}, ["cd"]),
    ({"tokens": ABCD, "assistant_masks": [1, 1, 0, 0]}, ["b"]),  # the first has no prefix
    ({"messages": [{**said("yes")[0], "tool_calls": None}, {"role": "user", "content": "?"}]}, ["yes<|im_end|>"]),
    # lists of pandas are arrays
    ({"messages": np.array([*HI, *said("b")], dtype=object)}, ["b<|im_end|>"]),
    ({"tokens": np.array(ABCD), "mask": np.array([False, True, False, False])}, ["b"]),
]


def test_what_is_scored() -> None:
    for value, expected in SCORED:
        assert [scored(answer) for answer in encode(value)] == expected, value
    (answer,) = encode({"prompt": "2 + 2 =", "completion": " 4"})
    assert isinstance(answer, Answer)
    assert TOKENIZER.decode(answer.tokens) == "2 + 2 = 4"  # plain text is not templated


def test_a_begin_of_sequence_token_is_a_prefix() -> None:
    from tokenizers import processors

    tokenizer = build_tokenizer(bos_token="<|begin|>")
    bos = ("<|begin|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[bos])
    (answer,) = encode({"prompt": "ab", "completion": "cd"}, tokenizer=tokenizer)
    assert isinstance(answer, Answer)
    assert tokenizer.decode(answer.tokens) == "<|begin|>abcd"
    assert answer.mask.tolist() == [False, False, False, True, True]
    (alone,) = encode({"prompt": "", "completion": "cd"}, tokenizer=tokenizer)
    assert scored(alone, tokenizer) == "cd"
    (written,) = encode({"prompt": "<|begin|>ab", "completion": "cd"}, tokenizer=tokenizer)
    assert isinstance(written, Answer)
    assert written.tokens.tolist() == answer.tokens.tolist()


SKIPPED = [
    ({"messages": []}, "empty", "no message"),
    ({"messages": HI}, "no assistant turn", ""),
    ({"prompt": HI, "completion": []}, "empty", "no message"),
    ({"prompt": HI, "completion": HI}, "no assistant turn", ""),
    ({"prompt": "a", "completion": ""}, "empty", "no text to score"),
    ({"prompt": "", "completion": "a"}, "empty", "no token to score"),
    ({"tokens": [], "prompt_length": 0}, "empty", "no tokens"),
    ({"tokens": [3, 4], "prompt_length": 2}, "empty", "no token to score"),
    ({"tokens": [3, 4], "prompt_length": 3}, "malformed", "expected a whole number from 0 to 2"),
    ({"tokens": [3, 4], "prompt_length": True}, "malformed", "expected a whole number"),
    ({"tokens": [3, -100], "prompt_length": 1}, "malformed", "the token id -100"),
    ({"tokens": [3, 300], "prompt_length": 1}, "malformed", "outside the vocabulary of 259"),
    ({"tokens": [3, 4.5], "prompt_length": 1}, "malformed", "4.5 in `tokens`"),
    ({"tokens": [3, 2**70], "prompt_length": 1}, "malformed", "in `tokens`, expected whole numbers"),
    ({"tokens": "34", "prompt_length": 1}, "malformed", "`tokens` of str"),
    ({"tokens": [[3, 4]], "prompt_length": 1}, "malformed", "[3, 4] in `tokens`"),
    ({"tokens": [3, 4], "mask": [1]}, "malformed", "has 1 numbers in `mask`, expected 2"),
    ({"tokens": [3, 4], "mask": 5}, "malformed", "has `mask` of int, expected a list"),
    ({"tokens": [3, 4], "mask": [0, 2]}, "malformed", "1 at the tokens to score"),
    ({"messages": "hi"}, "malformed", "`messages` of str"),
    ({"messages": [HI]}, "malformed", "expected an object with `role`"),
    ({"prompt": "a", "completion": said("b")}, "malformed", "give both alike"),
    ({"chosen": "b", "rejected": "c"}, "malformed", "without a `prompt`"),
    ({"prompt": 3, "completion": "b"}, "malformed", "give both alike"),
    ({"prompt": "a", "completion": "b\ud83d"}, "malformed", "no Unicode: '\\ud83d' at character 2"),
    ({"messages": [*HI, {"role": "assistant", "content": {"a": 1}}]}, "template", ""),
    ({"messages": [*HI, *said("x" * 50)]}, "too long", "73 tokens, at most 60"),
]


def test_what_is_skipped() -> None:
    for value, reason, detail in SKIPPED:
        for skip in encode(value, vocab_size=259, max_length=60):
            assert isinstance(skip, Skip), skip
            assert skip.reason == reason, value
            assert detail in skip.detail, value
    chosen, rejected = encode({"prompt": "a", "chosen": "b", "rejected": ""})  # one bad answer leaves the other
    assert scored(chosen) == "b"
    assert isinstance(rejected, Skip)
    assert (rejected.part, rejected.reason) == ("rejected", "empty")


def test_text_without_tokens() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "<end>": 1}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    encoder = Encoder("completion", PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>"), add_eos=True)
    (skip,) = encoder.encode(Row(0, "row 1", {"prompt": "", "completion": " "}))
    assert isinstance(skip, Skip)
    assert (skip.reason, skip.detail) == ("empty", "no token to score")


def test_a_template_that_refuses_a_conversation_is_the_reason() -> None:
    strict = build_tokenizer("{{ raise_exception('roles must alternate') }}")
    (skip,) = encode({"messages": [*HI, *said("yes")]}, tokenizer=strict)
    assert isinstance(skip, Skip)
    assert skip.reason == "template"
    assert "roles must alternate" in skip.detail


def test_rows_of_another_layout_are_malformed() -> None:
    encoder = Encoder("messages", TOKENIZER)
    (skip,) = encoder.encode(Row(3, "line 4", {"prompt": "a", "completion": "b"}))
    assert isinstance(skip, Skip)
    assert skip.detail == "holds completion, expected messages as in the first row"
