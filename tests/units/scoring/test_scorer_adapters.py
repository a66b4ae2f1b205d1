"""The base model, or another adapter, of a model with PEFT adapters."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

from closeness import assert_near
from torchrl_llm_kl import LogProbScorer, Ragged, RetrieveKL, RetrieveLogProb, make_algorithm
from torchrl_llm_kl.scoring import ScorerSlot
from toy_models import FORWARD, tiny_model
from toy_rollouts import plain_log_probs

peft = pytest.importorskip("peft")
IDS = torch.tensor([5, 9, 11, 2, 40, 3])
BATCH = Ragged.from_list([IDS])


def with_adapters(seed: int = 0) -> tuple[Any, Any]:
    """A model with LoRA adapters far from 0, and a copy of the base model from before."""
    base = tiny_model("qwen2", seed=seed)
    before = copy.deepcopy(base)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, config).eval(), before


def with_two_adapters() -> tuple[Any, Any]:
    """A model with the adapters "default" (active) and "ref", partly on other layers, and a copy with "ref" active."""
    model, _ = with_adapters()
    torch.manual_seed(2)
    model.add_adapter("ref", peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    alone = copy.deepcopy(model)
    alone.set_adapter("ref")
    return model, alone


@pytest.mark.parametrize("native", [False, True], ids=["PeftModel", "transformers' own"])
def test_adapters_off_is_the_base_model(native: bool) -> None:
    model, base = with_adapters()
    model = model.get_base_model() if native else model
    with_lora, without = LogProbScorer(model), LogProbScorer(model, adapters=False)
    assert without.path == "head"
    assert_near(without.score(BATCH).values, plain_log_probs(base, IDS), **FORWARD)
    assert_near(with_lora.score(BATCH).values, plain_log_probs(model, IDS), **FORWARD)
    assert (with_lora.score(BATCH).values - without.score(BATCH).values).abs().max() > 0.05


@pytest.mark.parametrize(
    ("adapters", "native", "state"),
    [
        (False, False, "active"),
        (False, True, "raises"),
        ("ref", True, "active"),
        ("ref", False, "disabled"),
        ("ref", True, "disabled"),
        ("ref", False, "raises"),
    ],
)
def test_another_state_is_scored_alone_and_the_models_own_restored(adapters: Any, native: bool, state: str) -> None:
    model, alone = with_two_adapters()
    model = model.get_base_model() if native else model
    want = plain_log_probs(alone if adapters else with_adapters()[1], IDS)
    assert (want - plain_log_probs(model, IDS)).abs().max() > 0.05
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    if state == "disabled":
        for layer in model.modules():
            if hasattr(layer, "lora_A"):
                layer.enable_adapters(False)
    before = plain_log_probs(model, IDS)
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    scorer = LogProbScorer(model, adapters=adapters)
    assert scorer.path == "head"
    if state == "raises":
        handle = model.get_output_embeddings().register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scorer.score(BATCH)
        handle.remove()
    assert_near(scorer.score(BATCH).values, want, **FORWARD)
    assert torch.equal(plain_log_probs(model, IDS), before)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == flags


def test_whole_layers_of_a_named_adapter() -> None:
    """A head trained with ``modules_to_save`` is that of the adapter too."""
    model = tiny_model("qwen2", seed=0)
    config = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(modules_to_save=["lm_head"], **config)).eval()
    model.add_adapter("ref", peft.LoraConfig(**config))
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "modules_to_save.default" in n).mul_(1.5)
    alone = copy.deepcopy(model)
    alone.set_adapter("ref")
    before = plain_log_probs(model, IDS)
    for name, want in {"ref": plain_log_probs(alone, IDS), "default": before}.items():
        assert_near(LogProbScorer(model, adapters=name).score(BATCH).values, want, **FORWARD)
    assert torch.equal(plain_log_probs(model, IDS), before)


def test_what_is_refused() -> None:
    model, _ = with_two_adapters()
    for adapters, message in [
        (False, "grad=True with adapters=False"),
        ("ref", r"grad=True with adapters='ref': the adapter 'ref' is a reference.*adapters=True"),
    ]:
        with pytest.raises(ValueError, match=message):
            LogProbScorer(model, adapters=adapters).score(BATCH, grad=True)
        with pytest.raises(ValueError, match=r"has no PEFT adapters to switch off.*get_peft_model"):
            LogProbScorer(tiny_model(), adapters=adapters)
    message = r"adapters='old', but the adapters in the layers .* 'default', 'ref'.*add_adapter"
    with pytest.raises(ValueError, match=message):
        LogProbScorer(model, adapters="old")
    for wrong in (None, 1, 0, ["default"]):
        message = rf"adapters must be True, False or a name, got {re.escape(repr(wrong))}"
        for make in (LogProbScorer, RetrieveLogProb):
            with pytest.raises(TypeError, match=message):
                make(model, adapters=wrong)
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"merged into its weights.*unmerge_adapter"):
        LogProbScorer(model, adapters=False)


def test_the_exact_kl_and_the_cache_of_a_named_adapter() -> None:
    model, alone = with_two_adapters()
    policy, reference = LogProbScorer(model), LogProbScorer(model, adapters="ref")
    scores = policy.evaluate(Ragged.from_list([IDS]), reference=reference, remember=True)
    with torch.no_grad():
        p, q = (m(IDS[None]).logits[0, :-1].double().log_softmax(-1) for m in (model, alone))
        assert_near(scores.kl.values[1:].double(), (p.exp() * (p - q)).sum(-1), **FORWARD, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if ".ref." in name:
                parameter.mul_(0.5)
        alone.load_state_dict(model.state_dict())
    found = reference.score(Ragged.from_list([IDS]), remember=True).values
    assert_near(found, plain_log_probs(alone, IDS), **FORWARD)


def test_a_policy_against_its_own_named_adapter() -> None:
    from tensordict import TensorDict

    model, alone = with_two_adapters()
    data = TensorDict(tokens=TensorDict(prompt=IDS[None, :2], full=IDS[None], batch_size=[1]), batch_size=[1])
    data["next"] = TensorDict(reward=torch.ones(1, 1), batch_size=[1])
    transform = RetrieveKL(model, "base", ref_adapters="ref")
    found = transform(data.clone())
    assert_near(found["next", "ref_log_probs", "full"][0, 2:], plain_log_probs(alone, IDS)[2:], **FORWARD)
    assert_near(found["next", "log_probs", "full"][0, 2:], plain_log_probs(model, IDS)[2:], **FORWARD)
    transform.adapters = False
    assert [part.adapters for part in transform.transforms[:2]] == [False, "ref"]
    with pytest.raises(ValueError, match="ref_adapters=True is the policy itself"):
        RetrieveKL(model, "base", ref_adapters=True)
    for kl in ("kl_reward", "kl_loss"):
        parts = make_algorithm(
            "grpo", actor=model, reference=LogProbScorer(model, adapters="ref"), group_size=2, **{kl: "k2"}
        )
        found = parts.kl_transform(data.clone())
        assert_near(found["next", "ref_log_probs", "full"][0, 2:], plain_log_probs(alone, IDS)[2:], **FORWARD)


def test_adapters_of_a_model_in_another_process() -> None:
    class Remote:
        def make_scorer(self, **settings: Any) -> dict[str, Any]:
            return settings

    assert ScorerSlot().get(Remote(), adapters=False) == {"adapters": False}
    assert ScorerSlot().get(Remote(), adapters="ref") == {"adapters": "ref"}
    with pytest.raises(TypeError, match="adapters must be True, False or a name, got 3"):
        ScorerSlot().get(Remote(), adapters=3)
