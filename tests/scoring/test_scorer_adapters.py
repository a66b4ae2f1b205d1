"""The base model of a model with PEFT adapters."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from torchrl_llm_kl import LogProbScorer, Ragged, RetrieveLogProb
from torchrl_llm_kl.scoring import ScorerSlot
from toy_models import tiny_model
from toy_rollouts import plain_log_probs

peft = pytest.importorskip("peft")
IDS = torch.tensor([5, 9, 11, 2, 40, 3])


def with_adapters(seed: int = 0) -> tuple[Any, Any]:
    """A model with LoRA adapters far from 0, and a copy of the base model from before."""
    base = tiny_model("qwen2", seed=seed)
    before = copy.deepcopy(base)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, config).eval(), before


@pytest.mark.parametrize("native", [False, True], ids=["PeftModel", "transformers' own"])
def test_adapters_off_is_the_base_model(native: bool) -> None:
    model, base = with_adapters()
    model = model.get_base_model() if native else model
    sequences = Ragged.from_list([IDS, IDS[:3]])
    with_lora, without = LogProbScorer(model), LogProbScorer(model, adapters=False)
    assert without.path == "head"
    assert_close(without.score(sequences).values[:6], plain_log_probs(base, IDS), atol=1e-5, rtol=0)
    assert_close(with_lora.score(sequences).values[:6], plain_log_probs(model, IDS), atol=1e-5, rtol=0)
    assert (with_lora.score(sequences).values - without.score(sequences).values).abs().max() > 0.05


@pytest.mark.parametrize("raises", [False, True])
def test_the_state_of_the_adapters_is_restored(raises: bool) -> None:
    model, _ = with_adapters()
    frozen = next(p for n, p in model.named_parameters() if "lora_A" in n)
    frozen.requires_grad_(False)
    flags = {n: p.requires_grad for n, p in model.named_parameters()}
    want = plain_log_probs(model, IDS)
    scorer = LogProbScorer(model, adapters=False)
    if raises:
        broken = model.get_base_model().lm_head
        handle = broken.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scorer.score(Ragged.from_list([IDS]))
        handle.remove()
    else:
        scorer.score(Ragged.from_list([IDS]))
    assert {n: p.requires_grad for n, p in model.named_parameters()} == flags
    assert_close(plain_log_probs(model, IDS), want)


def test_no_adapters_merged_adapters_and_gradient_are_errors() -> None:
    with pytest.raises(ValueError, match=r"has no PEFT adapters to switch off.*get_peft_model"):
        LogProbScorer(tiny_model(), adapters=False)
    model, _ = with_adapters()
    with pytest.raises(ValueError, match="grad=True with adapters=False"):
        LogProbScorer(model, adapters=False).score(Ragged.from_list([IDS]), grad=True)
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"merged into its weights.*unmerge_adapter"):
        LogProbScorer(model, adapters=False)


@pytest.mark.parametrize("adapters", ["default", None, 1, 0, ["default"]])
def test_adapters_is_true_or_false(adapters: Any) -> None:
    """A name would score the active adapter, whichever that is."""
    model, message = (
        with_adapters()[0],
        rf"adapters must be True or False, got {re.escape(repr(adapters))}.*set_adapter",
    )
    with pytest.raises(TypeError, match=message):
        LogProbScorer(model, adapters=adapters)
    with pytest.raises(TypeError, match=message):
        RetrieveLogProb(model, adapters=adapters)


def test_adapters_of_a_model_in_another_process() -> None:
    class Remote:
        def make_scorer(self, **settings: Any) -> dict[str, Any]:
            return settings

    assert ScorerSlot().get(Remote(), adapters=False) == {"adapters": False}
    with pytest.raises(TypeError, match="adapters must be True or False, got 'default'"):
        ScorerSlot().get(Remote(), adapters="default")
