"""Speed of a workload relative to a bare matrix product on the same machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.measure import Contender


@dataclass(frozen=True)
class BodyShape:
    """Widths of a decoder with rotary attention and a gated MLP.

    Args:
        hidden: width of the residual stream.
        intermediate: width of the MLP.
        queries: width of all query heads together.
        keys: width of all key heads together, and of all value heads.
        layers: number of layers.
        vocab: outputs of the head.
    """

    hidden: int
    intermediate: int
    queries: int
    keys: int
    layers: int
    vocab: int

    @classmethod
    def of(cls, config: Any) -> BodyShape:
        """Read the widths from a transformers configuration of the Qwen2 family."""
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            queries=config.num_attention_heads * size,
            keys=config.num_key_value_heads * size,
            layers=config.num_hidden_layers,
            vocab=config.vocab_size,
        )


@dataclass(frozen=True)
class Roofline:
    """The multiply-adds of a workload, the speed of the machine, and the time that the work took.

    Args:
        multiply_adds: that the work needs, without repetition.
        product_flops: floating-point operations per second of the best matrix product of the run.
        seconds: time of the work.
    """

    multiply_adds: int
    product_flops: float
    seconds: float

    @property
    def fraction(self) -> float:
        """Fraction of the product's speed: 1 if the work takes no longer than its products alone at full speed."""
        return 2 * self.multiply_adds / self.product_flops / self.seconds


def needed_multiply_adds(sequences: Sequence[Sequence[int]], scored: Sequence[Sequence[bool]], shape: BodyShape) -> int:
    """Multiply-adds needed to score tokens under one model, without repeated or unused work.

    Every distinct prefix that a scored token depends on passes through the body once: the linear layers, and attention over
    all its tokens (queries times keys, weights times values). Every distinct prefix that predicts a scored token passes
    through the head once.

    Args:
        sequences: token ids of each sequence.
        scored: True for each scored token, never the first of a sequence.
        shape: widths of the model.
    """
    depths, heads = _distinct_prefixes(sequences, scored)
    return _multiply_adds(len(depths), sum(depths), heads, shape)


def padded_multiply_adds(rows: int, width: int, scored: int, shape: BodyShape) -> int:
    """Multiply-adds of a padded forward of ``rows`` of ``width`` tokens, with the head at ``scored`` positions.

    Under a mask of the padding every token attends to all of its row.
    """
    return _multiply_adds(rows * width, rows * width * width, scored, shape)


def _multiply_adds(tokens: int, attended: int, heads: int, shape: BodyShape) -> int:
    linear = shape.hidden * (2 * shape.queries + 2 * shape.keys + 3 * shape.intermediate)
    return shape.layers * (tokens * linear + attended * 2 * shape.queries) + heads * shape.hidden * shape.vocab


def _distinct_prefixes(sequences: Sequence[Sequence[int]], scored: Sequence[Sequence[bool]]) -> tuple[list[int], int]:
    """Lengths of the distinct prefixes to compute, and the number of them that predict a scored token."""
    nodes: dict[tuple[int, int], int] = {}  # (node of the prefix without its last token, last token) -> node
    depths: list[int] = []
    predicting: set[int] = set()
    for tokens, asked in zip(sequences, scored, strict=True):
        last = max((position for position, wanted in enumerate(asked) if wanted), default=0)
        node = -1
        for position in range(last):
            key = (node, tokens[position])
            if key not in nodes:
                nodes[key] = len(depths)
                depths.append(position + 1)
            node = nodes[key]
            if asked[position + 1]:
                predicting.add(node)
    return depths, len(predicting)


def matrix_product(size: int) -> Contender:
    """A bare float32 product of two square matrices, ``2 size^3`` operations: the best speed of the machine."""
    a, b = torch.rand(size, size), torch.rand(size, size)
    out = torch.empty(size, size)
    return Contender(lambda _: torch.mm(a, b, out=out))
