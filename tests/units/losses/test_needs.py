"""The inputs that a part of a loss claims to need are those it raises without, also after later changes."""

from __future__ import annotations

import functools
import inspect
import typing
from typing import Any

import pytest
import torch
from torch import Tensor

from objective_cases import CASES, inputs_of, random_batch
from policy_batches import batch
from torchrl_llm_kl.estimators import available_estimators, corrected_k3, get_estimator, k2
from torchrl_llm_kl.losses import (
    Correction,
    EntropyBonus,
    ImportanceWeights,
    KLToReference,
    KLToSampler,
    LossTerm,
    ObjectiveArgs,
    ObjectiveName,
    OffPolicySequenceMask,
    PolicyLoss,
    TermPart,
    TopEntropyMask,
    available_objectives,
    get_objective,
    spec_of,
)
from toy_models import tiny_model

#: Of each objective every choice and every switch that is not among the cases.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *CASES.values(),
    *((name, {}) for name in available_objectives()),
    ("ppo", {"fallback_to_policy_gradient": True, "enable_sequence_masking": True}),
    *(
        ("rec", {"clip_mode": mode, "weight": weight, "regularizer": regularizer, "regularizer_coef": 0.1})
        for mode in ("none", "one-side", "two-side", "ring", "gspo-one-side")
        for weight in ("none", "importance_sampling", "gspo_importance_sampling", "advantage")
        for regularizer in ("none", "k2", "forward-kl")
    ),
    ("mix_chord", {"enable_phi_function": False, "mu_warmup_steps": 3}),
    ("dpo", {"label_smoothing": 0.2}),
]


def inputs(part: Any) -> dict[str, Tensor]:
    data = random_batch(0)
    if spec_of(part.function) is not None and spec_of(part.function).name in available_objectives():
        data = inputs_of(spec_of(part.function).name, data)
    one_each = {name: -data["log_prob"] for name in ("entropy", "kl")}
    return {**data, **one_each, "sampler_log_prob": data["old_log_prob"], "selected": data["expert_mask"]}


def raises_without(part: Any) -> set[str]:
    """The inputs without which the part raises: each left out by itself, all others there."""
    given = inputs(part)
    part(given)
    return {name for name in given if name not in ("log_prob", "mask") and _raises(part, without(given, name))}


def without(given: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in given.items() if key != name}


def _raises(part: Any, given: dict[str, Tensor]) -> bool:
    try:
        part(given)
    except (TypeError, ValueError):
        return True
    return False


@pytest.mark.parametrize(("name", "hyper"), VARIANTS)
def test_objectives_need_what_they_state(name: str, hyper: dict[str, Any]) -> None:
    part = TermPart(get_objective(name), **hyper)
    assert set(part.needs) == raises_without(part)
    assert set(spec_of(get_objective(name)).required(hyper)) == set(part.needs)


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
        assert set(part.needs) == raises_without(part), part
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
        assert set(part.needs) == raises_without(part) == needs


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


# ---------------------------------------------------------------------- typed names


def test_the_literal_lists_every_objective() -> None:
    assert typing.get_args(ObjectiveName) == available_objectives()


def test_the_typed_arguments_are_those_of_every_objective() -> None:
    specs = [spec_of(get_objective(name)) for name in available_objectives()]
    assert set(ObjectiveArgs.__annotations__) == {name for spec in specs for name in spec.hyperparameters.accepted}
    assert not ObjectiveArgs.__required_keys__


@pytest.mark.parametrize("name", available_objectives())
def test_a_spec_lists_the_hyper_parameters_of_its_function(name: str) -> None:
    spec, parameters = spec_of(get_objective(name)), inspect.signature(get_objective(name)).parameters
    assert {key: parameters[key].default for key in spec.hyper} == spec.defaults
    assert set(spec.needs) <= set(parameters)
    assert {key for key in spec.needs if parameters[key].default is not inspect.Parameter.empty} == set()
    assert {own for target in spec.aliases.values() for own in target} <= set(spec.hyper)
