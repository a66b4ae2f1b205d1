"""Counted by hand."""

from __future__ import annotations

import pytest

pytest.importorskip("rich")
from benchmarks.roofline import BodyShape, Roofline, needed_multiply_adds, padded_multiply_adds

# Every width another, so that none can stand for its neighbour. A token takes in one layer 2 x (2x3 + 2x5) for queries,
# output and keys, values, and 3 x 2x7 in the MLP: 74.
SHAPE = BodyShape(hidden=2, intermediate=7, queries=3, keys=5, layers=1, vocab=11)
TOKEN, HEAD = 74, 2 * 11


def attention(*lengths: int) -> int:
    """A query of width 3 with each key, and each weight with a value of width 3."""
    return sum(2 * 3 * length for length in lengths)


@pytest.mark.parametrize(
    ("sequences", "scored", "expected"),
    [
        pytest.param([[1, 2, 3]], ["..x"], 2 * TOKEN + attention(1, 2) + HEAD, id="the last token is never forwarded"),
        pytest.param([[1, 2, 3]], [".x."], TOKEN + attention(1) + HEAD, id="nor any behind the last scored"),
        pytest.param([[1, 2, 3]], ["..."], 0, id="nothing asked"),
        pytest.param(
            [[1, 2, 3], [1, 2, 4]], ["..x", "..x"], 2 * TOKEN + attention(1, 2) + HEAD, id="one prefix predicts both"
        ),
        # Prefixes 1, 12, 123, 14: the head at 12 and 123 for the first answer, at 1 and 14 for the second.
        pytest.param(
            [[1, 2, 3, 9], [1, 4, 5]], ["..xx", ".xx"], 4 * TOKEN + attention(1, 2, 3, 2) + 4 * HEAD, id="a tree"
        ),
        # The same tokens behind another first one are another prefix.
        pytest.param(
            [[1, 2, 3], [5, 2, 3]],
            ["..x", "..x"],
            4 * TOKEN + attention(1, 2, 1, 2) + 2 * HEAD,
            id="no suffix is shared",
        ),
        # The second stops early inside the first, and asks the head where the first does not.
        pytest.param(
            [[1, 2, 3, 4], [1, 2]], ["...x", ".x"], 3 * TOKEN + attention(1, 2, 3) + 2 * HEAD, id="a prefix of another"
        ),
    ],
)
def test_multiply_adds_by_hand(sequences, scored, expected):
    masks = [[mark == "x" for mark in marks] for marks in scored]
    assert needed_multiply_adds(sequences, masks, SHAPE) == expected


def test_layers_multiply_the_body_alone():
    deep = BodyShape(hidden=2, intermediate=7, queries=3, keys=5, layers=4, vocab=11)
    assert needed_multiply_adds([[1, 2, 3]], [[False, False, True]], deep) == 4 * (2 * TOKEN + attention(1, 2)) + HEAD


def test_shape_of_a_configuration():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = transformers.Qwen2Config(**sizes, num_hidden_layers=3, vocab_size=50)
    assert BodyShape.of(config) == BodyShape(hidden=24, intermediate=40, queries=24, keys=8, layers=3, vocab=50)


def test_fraction():
    """500 multiply-adds are 1,000 operations: 10 s at 100 a second, half of the 20 s that it took."""
    assert Roofline(multiply_adds=500, product_flops=100.0, seconds=20.0).fraction == 0.5


def test_padded_multiply_adds() -> None:
    # Two rows of 3 tokens, each attending to 3; 4 positions in the head.
    assert padded_multiply_adds(2, 3, 4, SHAPE) == 6 * TOKEN + attention(*[3] * 6) + 4 * HEAD
