"""Models that a short probe could wrongly pack: windows too wide and states too small to show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from closeness import assert_near
from scoring_reference import assert_scores, body_tokens, ids
from torchrl_llm_kl import LogProbScorer, Ragged
from toy_models import FORWARD, VOCAB_SIZE, tiny_model
from toy_rollouts import plain_log_probs

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def group(length: int = 40) -> list[Tensor]:
    prompt = ids(length, 0)
    return [torch.cat([prompt, ids(n, n)]) for n in (9, 4, 13)] + [ids(11, 5)]


def assert_exact(model: nn.Module, **options: Any) -> LogProbScorer:
    scorer = LogProbScorer(model, **options)
    assert_scores(scorer, model, group())
    return scorer


@pytest.mark.parametrize("window", [15, 20])
def test_a_window_that_is_only_in_the_mask(window: int) -> None:
    """Phimoe passes no window to its attention, and the probe's sequences are shorter than the window."""
    from transformers import PhimoeConfig, PhimoeForCausalLM

    torch.manual_seed(0)
    config = PhimoeConfig(
        **SIZES, sliding_window=window, num_local_experts=2, num_experts_per_tok=1, initializer_range=0.4
    )
    assert not assert_exact(PhimoeForCausalLM(config).eval()).shares_prefixes


@pytest.mark.parametrize("window", [15, 20])
@pytest.mark.parametrize("family", ["mistral", "gemma2", "qwen2"])
def test_a_window_that_is_passed_to_the_attention(family: str, window: int) -> None:
    own: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 0} if family == "qwen2" else {}
    model = tiny_model(family, sliding_window=window, max_position_embeddings=128, **own)
    assert assert_exact(model).shares_prefixes


class Leaking(nn.Module):
    """A decoder layer that leaks a little of each position into the next, also into another sequence."""

    def __init__(self, layer: nn.Module, share: float) -> None:
        super().__init__()
        self.layer, self.share = layer, share

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)
        return self.layer(hidden + self.share * before, *args, **kwargs)


@pytest.mark.parametrize("head", ["as it is", "zero"])
@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 0.02), (torch.float32, 0.02), (torch.float32, 1.0)])
def test_a_leak_below_half_precision_is_detected(dtype: torch.dtype, share: float, head: str) -> None:
    model = tiny_model("llama", initializer_range=0.02)
    model.model.layers[0] = Leaking(model.model.layers[0], share)
    if head == "zero":
        nn.init.zeros_(model.lm_head.weight)
    assert not LogProbScorer(model.to(dtype)).shares_prefixes
    if dtype == torch.float32:
        assert not LogProbScorer(model, dtype=torch.bfloat16).shares_prefixes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("family", ["qwen2", "llama", "mistral", "gemma2", "gpt2", "opt"])
@pytest.mark.parametrize("width", [0.02, 0.4])
def test_no_false_alarm_in_any_precision(family: str, dtype: torch.dtype, width: float) -> None:
    assert LogProbScorer(tiny_model(family, initializer_range=width).to(dtype)).shares_prefixes


def test_zeros_prove_nothing() -> None:
    model = tiny_model("llama")
    nn.init.zeros_(model.model.embed_tokens.weight)
    assert not LogProbScorer(model).shares_prefixes


def test_a_model_that_declares_a_state() -> None:
    model = tiny_model("llama")
    model._is_stateful = True
    assert not assert_exact(model).shares_prefixes


@pytest.mark.parametrize("nested", [False, True])
def test_longrope_of_all_layers_or_by_kind(nested: bool) -> None:
    """The length of the whole sequence decides: a mask of the first tokens alone gives the same numbers as a full one."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
        **factors,
    }
    family, own = ("gemma3", {}) if nested else ("llama", {"rope_parameters": rope})
    if nested:
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        torch.manual_seed(0)
        config = Gemma3TextConfig(
            **{**SIZES, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5, "initializer_range": 0.4},
            rope_parameters={"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
        )
        model: Any = Gemma3ForCausalLM(config).eval()
    else:
        model = tiny_model(family, max_position_embeddings=128, head_dim=8, **own)
    scorer, rows = LogProbScorer(model), [*group(), ids(17, 3), ids(16, 4)]
    batch = Ragged.from_list(rows)
    for mask in (batch.positions > 0, (batch.positions > 0) & (batch.positions < 9)):
        found = scorer.score(batch, mask).to_list()
        for row, log_probs, asked in zip(rows, found, batch.like(mask).to_list(), strict=True):
            assert_near(log_probs, torch.where(asked, plain_log_probs(model, row), 0.0), **FORWARD)


def test_layerdrop_is_scored_without_packs() -> None:
    model = tiny_model("opt", layerdrop=0.5).train()
    scorer, batch = LogProbScorer(model, tokens_per_batch=16), Ragged.from_list(group(20))
    assert scorer.shares_prefixes
    with pytest.warns(UserWarning, match=r"^Layers are dropped at random: .* share no prefixes where OPTForCausalLM"):
        assert body_tokens(model, lambda: scorer.score(batch, grad=True)) == sum(len(row) - 1 for row in group(20))


def test_more_embedded_than_predicted() -> None:
    """Like models with an extra token for padding or audio."""
    model = tiny_model("llama")
    wide = nn.Embedding(VOCAB_SIZE + 40, 32)
    with torch.no_grad():
        wide.weight[:VOCAB_SIZE] = model.model.embed_tokens.weight
    model.model.embed_tokens = wide
    assert assert_exact(model).shares_prefixes
