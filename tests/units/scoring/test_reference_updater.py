"""A reference that follows the policy: averages and resets."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from torchrl_llm_kl import LogProbScorer, Ragged, ReferenceUpdater
from toy_models import tiny_model

IDS = torch.tensor([5, 9, 11, 2, 40, 3])


def moved(model: nn.Module, by: float = 0.1, seed: int = 0) -> nn.Module:
    """A copy with other weights."""
    model, rng = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=rng).to(parameter.dtype)
    return model


def kl(policy: Any, reference: LogProbScorer) -> Tensor:
    found = LogProbScorer(policy).evaluate(Ragged.from_list([IDS]), reference=reference).kl
    assert found is not None
    return found.values[1:]


@pytest.mark.parametrize("decay", [0.9, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_thousand_averages_of_a_drifting_policy(decay: float, dtype: torch.dtype) -> None:
    """A policy at ``a + b t`` after ``t`` steps: the average is ``a + b (t - (1 - d^t) d / (1 - d))``; a bfloat16 reference is
    that rounded once, where plain bfloat16 arithmetic would stand still."""
    policy, reference = nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, dtype=dtype)
    if dtype == torch.float32:
        policy = policy.float()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(parameter.bfloat16())
    start = {name: value.detach().double().clone() for name, value in policy.named_parameters()}
    reference.load_state_dict({name: value.to(dtype) for name, value in start.items()})
    updater, slope = ReferenceUpdater(reference, policy, decay=decay), 2.0**-12
    with torch.no_grad():
        for step in range(1, 1001):
            for name, parameter in policy.named_parameters():
                parameter.copy_(start[name] + slope * step)
            updater.step()
    want = 1000 - (1 - decay**1000) * decay / (1 - decay)
    for name, found in reference.named_parameters():
        expected = start[name] + slope * want
        if dtype == torch.bfloat16:
            assert_close(found.detach(), expected.bfloat16(), atol=0, rtol=2**-7)
        else:
            assert_close(found.detach().double(), expected, atol=1e-6 if dtype == torch.float32 else 1e-12, rtol=0)
    assert updater.steps == 1000


def test_a_resting_policy_is_reached_to_the_last_bits() -> None:
    """``r_t = p + d^t (r_0 - p)``: plain float32 arithmetic stops ``eps / (1 - d)`` before it."""
    policy = moved(tiny_model("llama"), by=0.05)
    reference = moved(policy, by=0.01, seed=1)
    start = {name: value.detach().double().clone() for name, value in reference.named_parameters()}
    updater = ReferenceUpdater(reference, policy, decay=0.995)
    for _ in range(1000):
        updater.step()
    for (name, found), target in zip(reference.named_parameters(), policy.parameters(), strict=True):
        want = target.double() + 0.995**1000 * (start[name] - target.double())
        assert_close(found.double(), want, atol=1e-6, rtol=0)


def test_steps_between_averages_and_resets() -> None:
    policy, reference = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    policy.weight.data.fill_(1.0), reference.weight.data.fill_(0.0)
    updater, found = ReferenceUpdater(reference, policy, decay=0.75, every=2, reset_every=5), []
    for _ in range(6):
        updater.step()
        found.append(reference.weight.item())
    assert found == [0.0, 0.25, 0.25, 0.4375, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kl_is_0_after_a_reset_and_the_cache_knows(dtype: torch.dtype) -> None:
    policy = tiny_model("qwen2").to(dtype)
    reference = LogProbScorer(moved(policy))
    rows = Ragged.from_list([IDS])
    updater = ReferenceUpdater(reference, policy, decay=0.5, reset_every=2)
    before = reference.score(rows, remember=True).values
    assert kl(policy, reference).min() > 1e-3
    updater.step()
    assert_close(reference.score(rows, remember=True).values, reference.score(rows).values, atol=1e-5, rtol=0)
    assert (reference.score(rows, remember=True).values - before).abs().max() > 1e-3
    updater.step()
    assert kl(policy, reference).abs().max() == 0
    policy_scores = LogProbScorer(policy).score(rows, remember=True).values
    assert torch.equal(reference.score(rows, remember=True).values, policy_scores)
    updater.step()
    assert kl(policy, reference).abs().max() == 0, "an average of equal weights is equal"


@pytest.mark.parametrize("own", [True, False], ids=["adapter of the policy's model", "model of its own"])
def test_adapters(own: bool) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    policy = peft.get_peft_model(tiny_model("qwen2", seed=0), config).eval()
    if own:
        policy.add_adapter("ref", config)
        reference = LogProbScorer(policy, adapters="ref")
    else:
        reference = LogProbScorer(moved(policy, by=0.0))
        with torch.no_grad():
            for name, parameter in reference.model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(2)
    updater = ReferenceUpdater(reference, policy, decay=0.75, reset_every=2)
    assert kl(policy, reference).max() > 1e-3
    weights = dict(policy.named_parameters())
    trained = {n: v.detach().clone() for n, v in weights.items() if ".ref." not in n}
    name = next(n for n in weights if "lora_A.default" in n)
    at = name.replace("default", "ref") if own else name
    before = dict(reference.model.named_parameters())[at].detach().clone()
    updater.step()
    assert_close(dict(reference.model.named_parameters())[at], 0.75 * before + 0.25 * weights[name])
    updater.step()
    assert kl(policy, reference).abs().max() == 0
    for n, value in trained.items():
        assert torch.equal(weights[n], value), n
    assert list(policy.active_adapters) == ["default"]


class Served:
    """Takes weights as a service does."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.version = model, 3

    def update_weights(self, weights: Any) -> None:
        self.version += 1
        assert not self.model.load_state_dict(weights, strict=False).unexpected_keys


def test_a_served_reference() -> None:
    policy = tiny_model("llama")
    service = Served(copy.deepcopy(policy))
    updater = ReferenceUpdater(service, policy, decay=0.75, every=2, reset_every=3)
    start = policy.get_output_embeddings().weight.detach().clone()
    policy.load_state_dict(moved(policy).state_dict())
    now = policy.get_output_embeddings().weight.detach().clone()
    updater.step()
    assert service.version == 3
    updater.step()
    assert service.version == 4
    assert_close(service.model.get_output_embeddings().weight, 0.75 * start + 0.25 * now)
    updater.step()
    assert kl(policy, LogProbScorer(service.model)).abs().max() == 0
    state = copy.deepcopy(updater.state_dict())
    policy.load_state_dict(moved(policy, seed=4).state_dict())
    updater.step()
    updater.load_state_dict(state)
    assert_close(service.model.get_output_embeddings().weight, now)
    assert service.version == 7


def test_state_is_saved_and_resumed_to_the_last_bit() -> None:
    first = tiny_model("llama")
    policies = [moved(first, seed=seed) for seed in range(6)]

    def run(updater: ReferenceUpdater, policy: nn.Module, steps: range) -> None:
        for step in steps:
            policy.load_state_dict(policies[step].state_dict())
            updater.step()

    options: Any = {"decay": 0.9, "every": 2, "reset_every": 5}
    policy, reference = copy.deepcopy(first), copy.deepcopy(first)
    whole = ReferenceUpdater(reference, policy, **options)
    run(whole, policy, range(4))
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    run(whole, policy, range(4, 6))
    again, resumed = copy.deepcopy(first), tiny_model("llama", seed=9)
    file.seek(0)
    updater = ReferenceUpdater(resumed, again, **options)
    updater.load_state_dict(torch.load(file))
    assert updater.steps == 4
    run(updater, again, range(4, 6))
    for a, b in zip(reference.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    state = whole.state_dict()
    with pytest.raises(KeyError, match=r"another reference: model.norm.weight"):
        updater.load_state_dict(
            {**state, "weights": {n: v for n, v in state["weights"].items() if n != "model.norm.weight"}}
        )
    with pytest.raises(ValueError, match=r"model.norm.weight: the reference has shape .*32,.*the state .*1, 2"):
        updater.load_state_dict({**state, "weights": {**state["weights"], "model.norm.weight": torch.zeros(1, 2)}})


def test_what_cannot_follow_is_refused() -> None:
    model = tiny_model("llama")
    for options, message in [
        ({}, "the reference would never change: pass decay="),
        ({"decay": 1.0}, "decay .* less than 1, got 1.0"),
        ({"decay": -0.1}, "at least 0 .* got -0.1"),
        ({"decay": 0.5, "every": 0}, "every must be at least 1, got 0"),
        ({"reset_every": 0}, "reset_every must be at least 1, got 0"),
        ({"reset_every": 4, "every": 2}, "every=2 is the time between averages, and there is none"),
    ]:
        with pytest.raises(ValueError, match=message):
            ReferenceUpdater(copy.deepcopy(model), model, **options)
    for reference, message in [
        (model, "share weights: make the reference a copy"),
        (tiny_model("gpt2"), "no counterpart of 'transformer.wte.weight' of the reference"),
        (tiny_model("llama", num_hidden_layers=1), "reference has no counterpart of 'model.layers.1"),
        (
            tiny_model("llama", vocab_size=50),
            r"embed_tokens.weight: the reference has shape \(50, 32\), the policy \(97",
        ),
        (tiny_model("llama").to("meta"), "meta device"),
    ]:
        with pytest.raises(ValueError, match=message):
            ReferenceUpdater(reference, model, decay=0.5)
    with pytest.raises(TypeError, match=r"reference must be a model, got 'base': load it first"):
        ReferenceUpdater("base", model, decay=0.5)


def test_adapters_that_cannot_follow_are_refused() -> None:
    peft = pytest.importorskip("peft")
    config = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False}
    policy = peft.get_peft_model(tiny_model("qwen2"), peft.LoraConfig(**config))
    policy.add_adapter("ref", peft.LoraConfig(**config))
    policy.add_adapter("wide", peft.LoraConfig(**{**config, "target_modules": ["q_proj", "v_proj"]}))
    policy.add_adapter("rank", peft.LoraConfig(**{**config, "r": 2}))
    for adapters, message in [
        (False, "adapters=False: the base model never changes"),
        ("default", "'default' follows the policy's active adapter, and active are 'default': activate the one"),
        ("wide", "no counterpart of .*v_proj.*same targets"),
        ("rank", r"q_proj.lora_A.rank.weight: the reference has shape \(2, 32\), the policy \(4, 32\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            ReferenceUpdater(LogProbScorer(policy, adapters=adapters), policy, decay=0.5)
    with pytest.raises(ValueError, match=r"no counterpart of .* of the"):
        ReferenceUpdater(tiny_model("qwen2"), policy, decay=0.5)


def test_adapters_with_another_factor_are_refused() -> None:
    """The same weights times another factor are another model."""
    peft = pytest.importorskip("peft")
    own = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(lora_alpha=4, **own))
    model.add_adapter("ref", peft.LoraConfig(lora_alpha=32, **own))
    with pytest.raises(ValueError, match=r"'ref' scales its weights by 16\.0, the policy's 'default' by 2\.0"):
        ReferenceUpdater(LogProbScorer(model, adapters="ref"), model, reset_every=2)
