"""What a part of a loss claims to need is what it raises without, also after later changes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from objective_cases import raises_without, random_batch
from policy_batches import batch
from torchrl_llm_kl.estimators import available_estimators, corrected_k3, get_estimator, k2
from torchrl_llm_kl.losses import (
    Correction,
    EntropyBonus,
    ImportanceWeights,
    KLToReference,
    KLToSampler,
    LossTerm,
    OffPolicySequenceMask,
    PolicyLoss,
    TermPart,
    TopEntropyMask,
)
from toy_models import tiny_model


def every_input() -> dict[str, Tensor]:
    data = random_batch(0)
    return {**data, **dict.fromkeys(("entropy", "kl"), -data["log_prob"]), "sampler_log_prob": data["old_log_prob"]}


ESTIMATORS = [
    *(name for name in available_estimators() if name != "exact"),
    k2,
    corrected_k3,
    functools.partial(corrected_k3, ratio_max=3.0),
    get_estimator("corrected_k3+"),
]


@pytest.mark.filterwarnings("ignore:KL estimator")
@pytest.mark.parametrize("leave_out_experts", [False, True])
def test_terms_need_what_they_state(leave_out_experts: bool) -> None:
    parts = [KLToReference(0.1, each, leave_out_experts=leave_out_experts) for each in [*ESTIMATORS, "exact"]]
    parts += [KLToSampler(0.1, each, leave_out_experts=leave_out_experts) for each in ESTIMATORS]
    parts += [EntropyBonus(0.1, leave_out_experts=leave_out_experts)]
    for part in parts:
        assert set(part.needs) == raises_without(part, every_input()), part
        assert ("expert_mask" in part.needs) == leave_out_experts


def test_corrections_need_what_they_state() -> None:
    expected = {
        ImportanceWeights(): {"old_log_prob", "sampler_log_prob"},
        ImportanceWeights(level="sequence", mode="mask", low=0.5): {"old_log_prob", "sampler_log_prob"},
        OffPolicySequenceMask(): {"old_log_prob", "advantage"},
        TopEntropyMask(0.3): {"entropy"},
        TopEntropyMask(threshold=0.5): {"entropy"},
    }
    for part, needs in expected.items():
        assert set(part.needs) == raises_without(part, every_input()) == needs


def test_a_function_of_ones_own_needs_its_inputs_without_a_default() -> None:
    def mine(
        log_prob: Tensor, mask: Tensor, *, advantage: Tensor, scale: float, ref_log_prob: Tensor | None = None, **_: Any
    ) -> tuple[LossTerm, ...]:
        return (LossTerm("mine", scale * advantage * log_prob, mask),)

    assert TermPart(mine, scale=1.0).needs == ("advantage",)
    assert TermPart(functools.partial(mine, scale=1.0)).needs == ("advantage",)
    assert Correction(lambda mask, entropy: (entropy, {})).needs == ("entropy",)


# ---------------------------------------------------------------------- what is set later


def test_old_log_probs_are_no_longer_needed_once_the_fallback_is_set() -> None:
    loss, data = PolicyLoss(tiny_model(seed=0)), batch()
    old = loss.tensor_keys.old_log_prob
    assert old in loss.in_keys
    bare = data.exclude(*(("next", name) for name in ("log_probs", "ref_log_probs", "sampler_log_probs")))
    with pytest.raises(KeyError, match="ppo needs old_log_prob"):
        loss(bare)
    loss.fallback_to_policy_gradient = True
    assert old not in loss.in_keys
    fresh = PolicyLoss(tiny_model(seed=0), fallback_to_policy_gradient=True)
    out, expected = loss(bare), fresh(bare)
    torch.testing.assert_close(out["loss_objective"], expected["loss_objective"])
    assert set(loss.out_keys) == set(fresh.out_keys) == set(out.keys())
    assert "ESS" not in loss.out_keys
    loss.fallback_to_policy_gradient = False
    assert old in loss.in_keys
    with pytest.raises(KeyError, match="ppo needs old_log_prob"):
        loss(bare)


def test_names_of_metrics_follow_later_settings() -> None:
    loss, data = (
        PolicyLoss(tiny_model(seed=0)),
        batch().exclude(("next", "sampler_log_probs"), ("next", "ref_log_probs")),
    )
    assert "sequence_masked_fraction" not in loss.out_keys
    loss.enable_sequence_masking = True
    assert "sequence_masked_fraction" in loss.out_keys
    assert set(loss(data).keys()) == set(loss.out_keys)
    loss.clip_ratio_c = None
    assert "clip_fraction_dual" not in loss.out_keys
    assert set(loss(data).keys()) == set(loss.out_keys)
    loss.out_keys = ["loss_objective"]
    assert loss.out_keys == ["loss_objective"]
    loss.out_keys = None
    assert set(loss(data).keys()) == set(loss.out_keys)


def test_the_inputs_of_a_term_follow_later_settings() -> None:
    loss = PolicyLoss(tiny_model(seed=0), "gpg", terms=[KLToReference(0.1)])
    assert "expert_mask" not in loss.in_keys
    loss.kl_to_ref_leave_out_experts = True
    assert "expert_mask" in loss.in_keys
    with pytest.raises(KeyError, match="needs expert_mask"):
        loss(batch())
