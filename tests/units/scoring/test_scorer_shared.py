"""Shared prefixes: every shared stretch goes through the body once, and values and gradients stay those of plain models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from scoring_reference import SHARED, assert_scores, body_tokens, conversation, ids
from torchrl_llm_kl import LogProbScorer, Ragged
from torchrl_llm_kl.scoring import _attention
from torchrl_llm_kl.scoring._model import Route, Setup
from torchrl_llm_kl.scoring._passes import PackedPass
from torchrl_llm_kl.scoring._request import Request
from torchrl_llm_kl.scoring._scores import Wanted, read
from torchrl_llm_kl.scoring._tree import PrefixTree
from toy_models import tiny_model


def test_each_shared_stretch_goes_through_the_body_once() -> None:
    model, rows = tiny_model("llama"), conversation()
    batch = Ragged.from_list(rows)
    # By hand, without each sequence's last token: 20 + 17 shared, 5 + 2 + 3 + 6 after it; 18 shared, 4 + 8; 10; 0.
    scorer = LogProbScorer(model)
    for grad in (False, True):
        assert body_tokens(model, lambda grad=grad: scorer.score(batch, grad=grad)) == SHARED == 37 + 16 + 18 + 12 + 10
    apart = LogProbScorer(model, share_prefixes=False)
    assert not apart.shares_prefixes
    assert body_tokens(model, lambda: apart.score(batch)) == sum(len(row) - 1 for row in rows)
    assert torch.equal(scorer.score(batch).values, LogProbScorer(model).score(batch).values)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(0, 12)), min_size=2, max_size=7))
def test_any_tree_of_prefixes(shape: list[tuple[int, int, int]]) -> None:
    """Sequences cut from four trunks at any length, with their own tails, including exact copies."""
    model = tiny_model("mistral")  # a sliding window shorter than most sequences
    rows = [torch.cat([ids(40, trunk)[:cut], ids(tail, 50 + trunk)]) for trunk, cut, tail in shape]
    assert_scores(LogProbScorer(model), model, rows)


def test_the_models_own_attention_is_restored() -> None:
    model, batch = tiny_model("gemma2"), Ragged.from_list(conversation())
    scorer, before = LogProbScorer(model), model.config._attn_implementation
    scorer.score(batch)
    assert model.config._attn_implementation == before
    model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scorer.score(batch)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("gemma2", {"attn_logit_softcapping": 2.0}),
        ("gemma2", {"sliding_window": 3}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gpt_oss", {}),
    ],
)
def test_soft_capped_scores_short_windows_and_sinks(family: str, own: dict[str, Any]) -> None:
    model: Any = tiny_model(family, **own)
    if own:
        model.set_attn_implementation("eager")  # the only attention of transformers with soft-capping
    scorer = LogProbScorer(model, tokens_per_batch=11)
    assert scorer.shares_prefixes
    assert_scores(scorer, model, conversation())


# ------------------------------------------------------------------ the varlen kernel of GPUs


def slow_kernel(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor, *most: int, **options: Any
) -> Tensor:
    """The documented contract of ``varlen_attn``: the last query of a sequence sees its last key."""
    assert query_ends.dtype == key_ends.dtype == torch.int32
    assert most == (int(query_ends.diff().max()), int(key_ends.diff().max()))
    scale, window, groups = options["scale"], options["window_size"][0], query.shape[1] // key.shape[1]
    assert options["enable_gqa"] == (groups > 1)
    out = torch.empty_like(query)
    for i in range(len(query_ends) - 1):
        q = query[query_ends[i] : query_ends[i + 1]]
        k, v = (t[key_ends[i] : key_ends[i + 1]].repeat_interleave(groups, 1) for t in (key, value))
        distance = torch.arange(len(k)) - (torch.arange(len(q)).unsqueeze(-1) + len(k) - len(q))
        seen = (distance <= 0) & ((distance >= -window) | (window < 0))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[query_ends[i] : query_ends[i + 1]] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gpt2"])
def test_every_query_sees_its_own_keys(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index passed to the kernel, checked with a slow one of the same contract, which is never used on a CPU."""
    assert not _attention.takes_varlen(torch.zeros(1, 2, 3, 64, dtype=torch.bfloat16))
    monkeypatch.setattr(_attention, "takes_varlen", lambda query: True)
    monkeypatch.setattr(_attention, "varlen_attn", slow_kernel)
    model, rows = tiny_model(family), conversation()
    for tokens_per_batch in (9, 30, 8192):
        scorer = LogProbScorer(model, tokens_per_batch=tokens_per_batch)
        assert scorer.shares_prefixes
        for turn in (rows, [torch.cat([row, ids(4, 11)]) for row in rows]):
            assert_scores(scorer, model, turn, remember=True)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen2", "llama", "mistral", "gpt2", "opt", "cohere"])  # no soft-capping
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
