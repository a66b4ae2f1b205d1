"""The index passed to the varlen GPU kernel, checked with a slow kernel of the same contract; and the kernel itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from scoring_reference import assert_scores, conversation, ids
from torchrl_llm_kl import LogProbScorer, Ragged
from torchrl_llm_kl.scoring import _attention
from torchrl_llm_kl.scoring._model import Route, Setup
from torchrl_llm_kl.scoring._passes import PackedPass
from torchrl_llm_kl.scoring._request import Request
from torchrl_llm_kl.scoring._scores import Wanted, read
from torchrl_llm_kl.scoring._tree import PrefixTree
from toy_models import tiny_model

FAMILIES = ["qwen2", "llama", "mistral", "gpt2", "opt", "cohere"]  # the kernel does not support gemma2's soft-capping


def slow_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    most_queries: int,
    most_keys: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """The documented contract of ``varlen_attn``: the last query of a sequence sees its last key."""
    assert query_ends.dtype == key_ends.dtype == torch.int32
    assert (most_queries, most_keys) == (int(query_ends.diff().max()), int(key_ends.diff().max()))
    assert enable_gqa == (query.shape[1] != key.shape[1])
    groups = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    for i in range(len(query_ends) - 1):
        q = query[query_ends[i] : query_ends[i + 1]]
        k, v = (t[key_ends[i] : key_ends[i + 1]].repeat_interleave(groups, 1) for t in (key, value))
        distance = torch.arange(len(k)) - (torch.arange(len(q)).unsqueeze(-1) + len(k) - len(q))
        seen = (distance <= 0) & ((distance >= -window_size[0]) | (window_size[0] < 0))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[query_ends[i] : query_ends[i + 1]] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


@pytest.fixture
def _with_slow_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_attention, "takes_varlen", lambda query: True)
    monkeypatch.setattr(_attention, "varlen_attn", slow_kernel)


@pytest.mark.usefixtures("_with_slow_kernel")
@pytest.mark.parametrize("tokens_per_batch", [9, 30, 8192])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_query_sees_its_own_keys(family: str, tokens_per_batch: int) -> None:
    model, rows = tiny_model(family), conversation()
    scorer = LogProbScorer(model, tokens_per_batch=tokens_per_batch)
    assert scorer.shares_prefixes
    for turn in (rows, [torch.cat([row, ids(4, 11)]) for row in rows]):
        assert_scores(scorer, model, turn, remember=True)


def test_the_kernel_is_never_used_on_a_cpu() -> None:
    assert not _attention.takes_varlen(torch.zeros(1, 2, 3, 64, dtype=torch.bfloat16))


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernel_on_a_gpu(family: str, dtype: torch.dtype) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "initializer_range": 0.1}  # heads of 16
    model = tiny_model(family, **sizes).to("cuda", dtype)
    scorer = LogProbScorer(model, tokens_per_batch=30)
    assert scorer.shares_prefixes
    batch = Ragged.from_list([row.cuda() for row in conversation()])
    packed = scorer.score(batch, remember=True).values
    apart = LogProbScorer(model, share_prefixes=False).score(batch).values
    exact = LogProbScorer(tiny_model(family, **sizes).cuda()).score(batch).values
    assert (packed - exact).abs().max() < 2 * (apart - exact).abs().max() + 1e-3


@pytest.mark.gpu
@needs_gpu
def test_gradients_through_the_kernel() -> None:
    model = tiny_model("llama", hidden_size=64, initializer_range=0.1).to("cuda", torch.bfloat16)
    batch, parameters = Ragged.from_list([row.cuda() for row in conversation()]), list(model.parameters())
    packed, apart = (
        torch.autograd.grad(LogProbScorer(model, share_prefixes=share).score(batch, grad=True).values.sum(), parameters)
        for share in (True, False)
    )
    a, b = (torch.cat([g.float().flatten() for g in grads]) for grads in (packed, apart))
    assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.99


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_forward_synchronises(dtype: torch.dtype) -> None:
    model = tiny_model("llama", hidden_size=64).to("cuda", dtype)
    scorer = LogProbScorer(model)
    batch = Ragged.from_list(conversation())
    scorer.score(batch)  # builds everything that is built once
    request = Request.build(batch, None)
    tree = PrefixTree.build(request.tokens, request.forward_lengths)
    packed = PackedPass(Setup(model, Route("head"), torch.device("cuda")), request, tree, 40)
    targets = [request.tokens.values[some].cuda() for some in packed.elements]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            for index, wanted in enumerate(targets):
                read(packed.run(index), wanted, Wanted(entropy=True), chunk=8, recompute=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
