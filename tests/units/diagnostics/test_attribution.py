"""Shares of seeded faults, against Shapley values that plain forwards compute; and the mismatch of a low precision."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from seeded_mismatch import ANSWER, PROMPT, ROWS, Seeded, check_shares, distribution
from torchrl_llm_kl import LogProbScorer, tiny_chat_model
from torchrl_llm_kl.diagnostics import _rescored, attribute_mismatch, diagnose, predict_mismatch
from torchrl_llm_kl.diagnostics._attribution import lowered
from torchrl_llm_kl.scoring import ScoreRequest
from toy_models import tiny_model


@pytest.mark.parametrize(
    "faults", [("temperature",), ("truncation",), ("version",), ("dtype",), ("truncation", "temperature")], ids="+".join
)
def test_shares_of_seeded_faults(faults: tuple[str, ...]) -> None:
    check_shares(faults)


def test_nothing_is_attributed_without_a_mismatch() -> None:
    seeded = Seeded(())
    found = attribute_mismatch(seeded.batch, seeded.model, history=seeded.history)
    assert found.shares == {}
    assert found.left_over == found.kl < 1e-10
    assert "left over" in str(found)


def test_an_unknown_cause_is_left_over() -> None:
    seeded = Seeded(("temperature",))
    noise = torch.randn(ROWS, ANSWER, generator=torch.Generator().manual_seed(1)).double()
    seeded.batch["next", "sampler_log_probs", "full"][:, PROMPT:] += 0.1 * noise
    found = attribute_mismatch(seeded.batch, seeded.model)
    assert list(found.shares) == ["temperature"]
    assert found.left_over == pytest.approx(0.1**2 / 2, rel=0.2)


def test_another_beginning_of_the_prompt() -> None:
    """The sampler saw one token before the prompt, which the data lacks."""
    seeded = Seeded(())
    _, tokenizer = tiny_chat_model()
    tokenizer.bos_token = "<|im_start|>"
    ids = torch.cat([torch.full((ROWS, 1), tokenizer.bos_token_id), seeded.ids], 1)
    log_probs = distribution(seeded.model, ids, 0.9)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    seeded.batch["next", "sampler_log_probs", "full"][:, PROMPT:] = log_probs[:, PROMPT:]
    found = attribute_mismatch(seeded.batch, seeded.model, tokenizer=tokenizer)
    assert found.setup["prompt"] == "one beginning-of-text token more"
    assert found.setup["temperature"] == pytest.approx(0.9, abs=2e-3)
    assert found.left_over < 1e-8


def test_other_experts() -> None:
    """The sampler's router chose other experts, which the data holds."""
    torch.manual_seed(0)
    model = tiny_model("mixtral")
    ids = torch.randint(5, 90, (ROWS, 12))
    routing = torch.randint(0, 6, (ROWS, 12, 3, 1))
    routing = torch.cat([routing, (routing + 1) % 6], -1)
    mask = torch.arange(12).expand(ROWS, 12) >= 4
    request = ScoreRequest.of(ids, mask, attention_mask=torch.ones_like(ids), routing=routing)
    recorded = LogProbScorer(model).score(request).restore()
    td = TensorDict(tokens=TensorDict(full=ids, prompt=ids[:, :4], batch_size=[ROWS]), batch_size=[ROWS])
    td["next", "sampler_log_probs", "full"], td["routed_experts"] = recorded, routing
    found = attribute_mismatch(td, model)
    assert found.setup == {"routing": True}
    assert found.shares["routing"] == pytest.approx(found.kl, rel=1e-6)


def test_data_and_models_that_cannot_be_compared() -> None:
    seeded = Seeded(())
    with pytest.raises(ValueError, match="the batch has no log-probs of the sampler"):
        attribute_mismatch(seeded.batch.exclude("next"), seeded.model)


def test_bars_in_the_report_of_the_doctor() -> None:
    seeded = Seeded(("truncation", "temperature"))
    diagnosis = diagnose(seeded.batch, policy=seeded.model, attribute=True)
    text = str(diagnosis).partition("KL of sampler to trainer: 0.")[2]
    first, second = (line for line in text.splitlines()[1:3])
    shares = diagnosis.to_dict()["attribution"]
    assert isinstance(shares, dict)
    assert set(shares["shares"]) == {"truncation", "temperature"}
    assert diagnose(seeded.batch, policy=seeded.model).attribution is None
    assert first.startswith("truncation")
    assert first.count("█") > second.count("█") > 0
    assert "('top_k', 20)" in first


# ------------------------------------------------------------------ a prediction


@pytest.mark.parametrize("precision", ["bfloat16", "float8", "int8"])
def test_the_mismatch_of_a_low_precision(precision: str) -> None:
    seeded = Seeded(())
    twin = copy.deepcopy(seeded.model)
    if precision == "bfloat16":
        twin = twin.bfloat16()
    else:  # by hand: each row is scaled to the largest number of the type
        for layer in [x for name, x in twin.named_modules() if isinstance(x, nn.Linear) and name != "lm_head"]:
            scale = layer.weight.abs().amax(-1, keepdim=True) / (448 if precision == "float8" else 127)
            grid = layer.weight / scale
            grid = grid.to(torch.float8_e4m3fn).float() if precision == "float8" else grid.round()
            layer.weight.data = grid * scale
    ids = seeded.ids
    own, theirs = (
        distribution(model, ids)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)[:, PROMPT - 1 :]
        for model in (seeded.model, twin)
    )
    weights = (own - theirs).exp()
    found = predict_mismatch(seeded.batch, seeded.model, precision, tolerance=1e-4)  # type: ignore[arg-type]
    assert found.k3 == pytest.approx(float((weights - 1 - weights.log()).mean()), rel=2e-3)
    assert found.weight_error == pytest.approx(float((weights - 1).abs().mean()), rel=2e-3)
    assert found.weight_max == pytest.approx(float(weights.max()), rel=1e-4)
    assert found.high is not None
    # The limit is the smallest one: what is cut off is the tolerance.
    assert float((weights - found.high).clamp(min=0).mean()) == pytest.approx(1e-4, rel=0.02)
    assert found.correction.startswith("ImportanceWeights(high=1.")
    assert predict_mismatch(seeded.batch, seeded.model, precision, tolerance=0.9).correction == "none"  # type: ignore[arg-type]


def test_the_twin_is_a_copy() -> None:
    model = tiny_model("llama")
    before = copy.deepcopy(model.state_dict())
    twin = lowered(model, "int8")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(twin.lm_head.weight, model.lm_head.weight)
    layer = twin.model.layers[0].mlp.up_proj.weight
    assert len((layer[0] / layer[0].abs().max() * 127).round().unique()) > 10
    assert not torch.equal(layer, before["model.layers.0.mlp.up_proj.weight"])


def test_other_precisions_are_refused() -> None:
    seeded = Seeded(())
    with pytest.raises(ValueError, match="precision"):
        predict_mismatch(seeded.batch, seeded.model, "int4")  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "gpt_oss"])
def test_every_matrix_of_the_layers_is_rounded(family: str) -> None:
    """GPT-2 has transposed matrices, and a mixture keeps all experts in one tensor. Routers and embeddings stay."""
    model = tiny_model(family)
    before = dict(model.named_parameters())
    changed = {name: not torch.equal(x, before[name]) for name, x in lowered(model, "int8").named_parameters()}
    kept = ("wte", "wpe", "embed", "lm_head", "gate.weight", "router")
    for name, value in before.items():
        expected = value.ndim > 1 and not any(part in name for part in kept) and "sinks" not in name
        assert changed[name] == expected, name


def test_a_model_that_is_too_large_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rescored, "LARGEST_COPY", 0)
    seeded = Seeded(("temperature", "dtype"))
    found = attribute_mismatch(seeded.batch, seeded.model)
    assert found.setup["temperature"] == pytest.approx(0.8, abs=2e-3)
    with pytest.raises(ValueError, match="precision"):
        predict_mismatch(seeded.batch, seeded.model, "float8")
    assert predict_mismatch(seeded.batch, seeded.model, "bfloat16").k3 > 0


def test_a_trainer_that_rounds_beside_a_precise_sampler() -> None:
    seeded = Seeded(())
    found = attribute_mismatch(seeded.batch, copy.deepcopy(seeded.model).bfloat16())
    assert found.setup == {"dtype": "float32"}
    assert found.left_over < 0.5 * found.kl  # the weights themselves stay rounded


def test_versions_at_another_place_and_some_that_are_lost() -> None:
    seeded = Seeded(("version",))
    versions = seeded.batch.pop("policy_version")
    versions[0], versions[1] = -7, 5  # of the present weights, and of weights that are not held
    seeded.batch["next", "policy_version"] = versions
    recorded = seeded.batch["next", "sampler_log_probs", "full"]
    recorded[0, PROMPT:] = seeded.log_prob(())[0]
    found = attribute_mismatch(seeded.batch, seeded.model, history=seeded.history)
    assert found.setup == {"version": True}
    assert found.left_over < 1e-9
    assert found.tokens == (ROWS - 1) * ANSWER


def test_shares_that_cannot_be_computed_are_named() -> None:
    diagnosis = diagnose(Seeded(()).batch, attribute=True)
    assert any(each.startswith("shares of the causes: pass policy=") for each in diagnosis.left_out)
