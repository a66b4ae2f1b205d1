"""References in less memory: bfloat16, int8, layers in the host's memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from closeness import assert_near
from torchrl_llm_kl import LogProbScorer, Ragged, ReferenceUpdater, prepare_reference
from toy_models import FORWARD, tiny_model
from toy_rollouts import plain_log_probs

ROWS = [torch.tensor(row) for row in ([5, 9, 11, 2, 40, 3], [5, 9, 11, 2, 7, 8, 1], [60, 2])]


def layers_of(model: Any) -> list[nn.Module]:
    body = model.get_decoder()
    return list(getattr(body, "layers", getattr(body, "h", None)))


def reference_of(policy: nn.Module, **options: Any) -> Any:
    return prepare_reference(copy.deepcopy(policy), **options)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gemma2"])
def test_an_offloaded_reference_scores_the_same_with_two_layers_resident(family: str, tied: bool) -> None:
    policy = tiny_model(family, num_hidden_layers=5, tie_word_embeddings=tied)
    reference = reference_of(policy, offload_to="cpu")
    layers = layers_of(reference)
    at_rest = [[weight for weight in layer.parameters()] for layer in layers]
    slots: dict[int, set[int]] = {}  # layer -> where its weights were while it ran
    counts: list[int] = []

    def look(index: int) -> Any:
        def hook(*_: Any) -> None:
            here = [w.untyped_storage().data_ptr() for w in layers[index].parameters()]
            slots.setdefault(index, set()).update(here)
            assert not {w.untyped_storage().data_ptr() for w in at_rest[index]} & set(here)
            others = [i for i, layer in enumerate(layers) if i != index]
            counts.append(
                sum(any(a is not b for a, b in zip(layers[i].parameters(), at_rest[i], strict=True)) for i in others)
            )

        return hook

    scorer = LogProbScorer(reference, tokens_per_batch=8)
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(look(index))
    found = scorer.score(Ragged.from_list(ROWS), remember=True)
    assert scorer.path == "head"
    for row, ours in zip(ROWS, found.to_list(), strict=True):
        assert_near(ours, plain_log_probs(policy, row), **FORWARD)
    assert sorted(slots) == [0, 1, 2, 3, 4]
    assert set(counts) == {0}, "layers other than the one that runs hold their own weights"
    assert len(set().union(*slots.values())) == 2, "all layers share two places"
    for layer, rest in zip(layers, at_rest, strict=True):
        assert all(a is b for a, b in zip(layer.parameters(), rest, strict=True))
    want = LogProbScorer(policy).evaluate(Ragged.from_list(ROWS), reference=scorer).kl
    assert want is not None
    assert want.values.abs().max() < 1e-6


def test_changed_weights_and_errors_leave_nothing_stale() -> None:
    policy = tiny_model("llama", num_hidden_layers=3)
    scorer = LogProbScorer(reference_of(policy, offload_to="cpu"))
    rows = Ragged.from_list(ROWS)
    scorer.score(rows, remember=True)
    layers = layers_of(scorer.model)
    handle = layers[0].self_attn.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scorer.score(rows)
    handle.remove()
    assert not any(w.requires_grad for w in scorer.model.parameters())
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    ReferenceUpdater(scorer, policy, reset_every=1).step()
    for row, ours in zip(ROWS, scorer.score(rows, remember=True).to_list(), strict=True):
        assert_near(ours, plain_log_probs(policy, row), **FORWARD)


def test_bfloat16_beside_a_float32_policy() -> None:
    policy = tiny_model("qwen2")
    reference = reference_of(policy, dtype=torch.bfloat16, offload_to="cpu")
    assert {w.dtype for w in reference.parameters()} == {torch.bfloat16}
    frequencies = reference.get_decoder().rotary_emb.inv_freq
    assert torch.equal(frequencies, policy.get_decoder().rotary_emb.inv_freq), (
        "rounded frequencies would shift positions"
    )
    scores = LogProbScorer(policy).evaluate(Ragged.from_list(ROWS), reference=LogProbScorer(reference))
    assert scores.kl is not None
    assert scores.ref_log_prob is not None
    assert scores.kl.values.dtype == scores.ref_log_prob.values.dtype == torch.float32
    assert 0 < scores.kl.values.max() < 0.1
    assert [w.dtype for w in policy.parameters()] == [torch.float32] * len(list(policy.parameters()))


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_int8_is_the_nearest_of_255_steps_of_each_row(offload: str | None) -> None:
    policy = tiny_model("llama")
    reference = reference_of(policy, dtype=torch.int8, offload_to=offload)
    rounded = copy.deepcopy(policy)
    seen = 0
    with torch.no_grad():
        for name, linear in rounded.get_decoder().layers.named_modules():
            if isinstance(linear, nn.Linear):
                for row in linear.weight:
                    steps = torch.linspace(-1, 1, 255, dtype=torch.float64) * row.abs().max().double()
                    row.copy_(steps[(row.double()[:, None] - steps).abs().argmin(1)])
                weight = reference.get_decoder().layers.get_submodule(name).weight
                assert (weight.dtype, weight.shape, int(weight.abs().max())) == (torch.int8, linear.weight.shape, 127)
                seen += 1
    assert seen == 14
    scores = LogProbScorer(policy).evaluate(Ragged.from_list(ROWS), reference=LogProbScorer(reference))
    assert scores.kl is not None
    assert scores.ref_log_prob is not None
    for row, ours in zip(ROWS, scores.ref_log_prob.to_list(), strict=True):
        assert_near(ours, plain_log_probs(rounded, row), **FORWARD)
    assert 0 < scores.kl.values.max() < 0.2
    own, eighth = (
        sum(w.numel() * w.element_size() for w in layers_of(m)[0].mlp.parameters()) for m in (policy, reference)
    )
    assert eighth < 0.3 * own


def test_a_row_of_zeros_in_int8_is_zeros() -> None:
    policy = tiny_model("llama")
    with torch.no_grad():
        layers_of(policy)[0].mlp.up_proj.weight.zero_()
    reference = reference_of(policy, dtype=torch.int8)
    out = layers_of(reference)[0].mlp.up_proj(torch.ones(1, 32))
    assert out.dtype == torch.float32
    assert not out.any()


def test_what_cannot_be_prepared_is_refused() -> None:
    with pytest.raises(TypeError, match=r"dtype must be torch.int8 or a floating-point type, got torch.int32"):
        reference_of(tiny_model("llama"), dtype=torch.int32)
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel hold no nn.Linear .* use dtype=torch.bfloat16"):
        reference_of(tiny_model("gpt2"), dtype=torch.int8)
    with pytest.raises(ValueError, match="meta device: load them"):
        prepare_reference(tiny_model("llama").to("meta"))
    with pytest.raises(TypeError, match="no separate body and head"):
        prepare_reference(nn.Linear(1, 1))
    model = reference_of(tiny_model("llama"), offload_to="cpu")
    with pytest.raises(ValueError, match="offloaded already"):
        prepare_reference(model, offload_to="cpu")
    with pytest.raises(ValueError, match="grad=True, but LlamaForCausalLM is offloaded"):
        LogProbScorer(model).score(Ragged.from_list(ROWS), grad=True)
    int8 = reference_of(tiny_model("llama"), dtype=torch.int8)
    with pytest.raises(
        ValueError, match=r"q_proj.weight has dtype torch.int8, which cannot follow .* in bfloat16 or wider"
    ):
        ReferenceUpdater(int8, tiny_model("llama"), decay=0.5)


@pytest.mark.gpu
def test_on_a_gpu_two_layers_and_the_head_are_resident() -> None:
    policy = tiny_model(
        "llama", num_hidden_layers=12, hidden_size=512, intermediate_size=2048, tie_word_embeddings=False
    )
    layer = sum(w.numel() * w.element_size() for w in layers_of(policy)[0].parameters())
    before = torch.cuda.memory_allocated()
    scorer = LogProbScorer(reference_of(policy, offload_to="cuda"))
    for _ in range(3):
        found = scorer.score(Ragged.from_list(ROWS))
    assert torch.cuda.max_memory_allocated() - before < 4 * layer
    for row, ours in zip(ROWS, found.to_list(), strict=True):
        assert_close(ours, plain_log_probs(policy, row), atol=1e-4, rtol=0)
