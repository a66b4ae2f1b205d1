"""Shared prefixes: every shared stretch goes through the body once, and the numbers stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from closeness import assert_near
from scoring_reference import assert_scores, body_tokens, conversation, ids
from torchrl_llm_kl import LogProbScorer, Ragged
from toy_models import BACKWARD, FAMILIES, FORWARD, VOCAB_SIZE, tiny_model
from toy_rollouts import plain_log_probs


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens_per_batch", [7, 64, 8192])
def test_exact_for_every_family(family: str, tokens_per_batch: int) -> None:
    model = tiny_model(family)
    scorer = LogProbScorer(model, tokens_per_batch=tokens_per_batch)
    assert scorer.shares_prefixes
    assert_scores(scorer, model, conversation())


def test_each_shared_stretch_goes_through_the_body_once() -> None:
    model, rows = tiny_model("llama"), conversation()
    batch = Ragged.from_list(rows)
    # By hand, without each sequence's last token: 20 + 17 shared, 5 + 2 + 3 + 6 after it; 18 shared, 4 + 8; 10; 0.
    scorer = LogProbScorer(model)
    for grad in (False, True):
        assert body_tokens(model, lambda grad=grad: scorer.score(batch, grad=grad)) == 37 + 16 + 18 + 12 + 10
    apart = LogProbScorer(model, share_prefixes=False)
    assert not apart.shares_prefixes
    assert body_tokens(model, lambda: apart.score(batch)) == sum(len(row) - 1 for row in rows)


def test_mask_and_temperature_hold() -> None:
    model, rows = tiny_model("qwen2"), conversation()
    batch = Ragged.from_list(rows)
    mask = (batch.positions > 0) & (torch.arange(len(batch.values)) % 3 == 0)
    found = LogProbScorer(model, temperature=0.7).score(batch, mask)
    for row, log_probs, asked in zip(rows, found.to_list(), batch.like(mask).to_list(), strict=True):
        with torch.no_grad():
            logits = model(input_ids=row[None]).logits[0].float() / 0.7
        want = torch.cat([torch.zeros(1), logits.log_softmax(-1)[:-1].gather(-1, row[1:, None])[:, 0]])
        assert_near(log_probs, torch.where(asked, want, 0.0), **FORWARD)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 12)), min_size=2, max_size=7))
def test_any_tree_of_prefixes(shape: list[tuple[int, int, int]]) -> None:
    """Sequences cut from four trunks at any length, with their own tails, including exact copies."""
    model = tiny_model("mistral")  # a sliding window shorter than most sequences
    rows = [torch.cat([ids(40, trunk)[:cut], ids(tail, 50 + trunk)]) for trunk, cut, tail in shape]
    rows = [row if len(row) else ids(2, 99) for row in rows]
    assert_scores(LogProbScorer(model), model, rows)


@pytest.mark.parametrize("tokens_per_batch", [9, 8192])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_flow_through_what_is_shared(family: str, tokens_per_batch: int) -> None:
    """Every parameter's gradient is the sum over the sequences, each forwarded alone by the plain model."""
    model, rows = tiny_model(family).double(), conversation()[:6]
    scorer = LogProbScorer(model, tokens_per_batch=tokens_per_batch)
    assert scorer.shares_prefixes
    weights = [torch.randn(len(row), dtype=torch.float64) for row in rows]

    found = scorer.score(Ragged.from_list(rows), grad=True).to_list()
    loss = sum((w * f).sum() for w, f in zip(weights, found, strict=True))
    parameters = [p for p in model.parameters() if p.requires_grad]
    got = torch.autograd.grad(loss, parameters, allow_unused=True)
    plain = sum((w[1:] * _plain_with_grad(model, row)).sum() for w, row in zip(weights, rows, strict=True))
    want = torch.autograd.grad(plain, parameters, allow_unused=True)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert_near(a, b, **BACKWARD, dtype=torch.float32)  # norms and rotations are float32 even here


def _plain_with_grad(model: Any, row: Tensor) -> Tensor:
    log_probs = model(input_ids=row[None]).logits[0].log_softmax(-1)
    return log_probs[:-1].gather(-1, row[1:, None])[:, 0]


def test_a_body_with_its_own_mask_is_padded() -> None:
    """The probe detects a body that passes its own mask to every layer."""
    model = tiny_model("llama")
    forward = model.model.forward

    def masked(*args: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        t = input_ids.shape[1]
        own = torch.full((t, t), -torch.inf).triu(1).expand(input_ids.shape[0], 1, t, t)
        return forward(*args, input_ids=input_ids, **{**kwargs, "attention_mask": own})

    model.model.forward = masked
    scorer = LogProbScorer(model)
    assert scorer.path == "head"
    assert not scorer.shares_prefixes
    rows = conversation()
    for row, log_probs in zip(rows, scorer.score(Ragged.from_list(rows)).to_list(), strict=True):
        assert_near(log_probs, plain_log_probs(tiny_model("llama"), row), **FORWARD)


def test_a_layer_with_a_state_along_the_row_is_detected() -> None:
    """Convolutions and recurrences would see the previous sequence: the probe must notice."""
    model = tiny_model("llama")
    layer = model.model.layers[0]

    class Shifted(type(layer.mlp)):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1))

    layer.mlp.__class__ = Shifted
    scorer, rows = LogProbScorer(model), conversation()
    assert not scorer.shares_prefixes
    assert_scores(scorer, model, rows)


@pytest.mark.parametrize("fails", [False, True])
def test_the_models_own_attention_is_restored(fails: bool) -> None:
    model, batch = tiny_model("gemma2"), Ragged.from_list(conversation())
    scorer = LogProbScorer(model)
    before = model.config._attn_implementation
    if fails:
        model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("out of order")))
        with pytest.raises(RuntimeError, match="out of order"):
            scorer.score(batch)
    else:
        scorer.score(batch)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    "own", [{"attn_logit_softcapping": 2.0}, {"sliding_window": 3}, {"attn_logit_softcapping": None}]
)
def test_soft_capped_scores_and_short_windows(own: dict[str, Any]) -> None:
    model, rows = tiny_model("gemma2", **own), conversation()
    model.set_attn_implementation("eager")  # the only attention of transformers with soft-capping
    scorer = LogProbScorer(model, tokens_per_batch=11)
    assert scorer.shares_prefixes
    assert_scores(scorer, model, rows)


def test_attention_sinks() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
        initializer_range=0.4,
        max_position_embeddings=64,
        pad_token_id=None,
    )
    model, rows = GptOssForCausalLM(config).eval(), conversation()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    scorer = LogProbScorer(model, tokens_per_batch=11)
    assert scorer.shares_prefixes
    assert_scores(scorer, model, rows)


def test_kl_of_a_model_with_itself_stays_exactly_zero() -> None:
    model, batch = tiny_model("qwen2"), Ragged.from_list(conversation())
    assert torch.equal(LogProbScorer(model).score(batch).values, LogProbScorer(model).score(batch).values)
