"""The head under ``torch.compile``, with truncated sampling."""

from __future__ import annotations

import torch

from head_reference import assert_same, make_head
from torchrl_llm_kl.head import Truncation, linear_log_prob, linear_top_k


def test_one_graph_when_compiled():
    inputs = hidden, weight, bias = make_head(grad=True, dtype=torch.float32)
    targets = linear_top_k(hidden, weight, 1, bias=bias).indices.squeeze(1)

    def values(hidden, weight, bias):
        return linear_log_prob(hidden, weight, targets, bias=bias, truncation=Truncation(9, 0.7), entropy=True)

    compiled = torch.compile(values, backend="aot_eager", fullgraph=True)
    assert_same(compiled(hidden, weight, bias), values(hidden, weight, bias), inputs)
