"""Penalties and bonuses: which policies are compared, over which tokens, with whose gradient."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from torchrl_llm_kl.estimators import FixedKLCoefficient, k3
from torchrl_llm_kl.losses import (
    DivergenceToTeacher,
    EntropyBonus,
    KLToReference,
    KLToSampler,
    LossTerm,
    available_objectives,
)
from torchrl_llm_kl.losses.terms import entropy_bonus, kl_to_ref, kl_to_sampler

NAN = float("nan")
MASK = torch.tensor([[True, True, False]])
REF = torch.tensor([[-1.5, -1.0, NAN]], dtype=torch.float64)  # d = 0.5, -1
OLD = torch.tensor([[-1.2, -2.4, NAN]], dtype=torch.float64)  # 0.2, 0.4
SAMPLER = torch.tensor([[-0.7, -2.6, NAN]], dtype=torch.float64)  # -0.3, 0.6
EXPERTS = torch.tensor([[False, True, True]])


def policy() -> Tensor:
    return torch.tensor([[-1.0, -2.0, NAN]], dtype=torch.float64, requires_grad=True)


def assert_term(term: LossTerm, log_prob: Tensor, value: list[float], gradient: list[float]) -> None:
    width = len(value)
    assert_close(term.value.detach()[0, :width], torch.tensor(value, dtype=torch.float64), rtol=1e-6, atol=1e-8)
    (found,) = torch.autograd.grad(torch.where(term.mask, term.value, 0).sum(), log_prob)
    assert_close(found, torch.tensor([gradient], dtype=torch.float64), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", [0.5, -1.0], [1.0, 1.0, 0.0]),
        ("k2", [0.125, 0.5], [0.5, -1.0, 0.0]),
        ("k3", [0.1065307, 0.7182818], [0.3934693, -1.7182818, 0.0]),
        (k3, [0.1065307, 0.7182818], [0.3934693, -1.7182818, 0.0]),
        ("k3+", [0.1065307, 0.7182818], [0.5, -1.0, 0.0]),
        ("abs", [0.5, 1.0], [1.0, -1.0, 0.0]),
        ("none", [0.0, 0.0], None),
    ],
)
def test_kl_to_ref_by_hand(estimator: Any, value: list[float], gradient: list[float] | None) -> None:
    log_prob = policy()
    (term,) = kl_to_ref(log_prob, MASK, ref_log_prob=REF, estimator=estimator, coeff=0.25)
    assert (term.name, term.weight) == ("kl_to_ref", 0.25)
    assert torch.equal(term.mask, MASK)
    if gradient is None:
        assert (term.value == 0).all()
    else:
        assert_term(term, log_prob, value, gradient)


def test_the_default_is_k2_with_trinitys_coefficient() -> None:
    (term,) = kl_to_ref(policy(), MASK, ref_log_prob=REF)
    assert_close(term.value.detach()[0, :2], torch.tensor([0.125, 0.5], dtype=torch.float64))
    assert term.weight == 1e-3
    coeff = torch.tensor(0.3)
    assert kl_to_ref(policy(), MASK, ref_log_prob=REF, coeff=coeff)[0].weight is coeff


def test_corrected_k3_reads_who_sampled() -> None:
    (term,) = kl_to_ref(policy(), MASK, ref_log_prob=REF, old_log_prob=OLD, estimator="corrected_k3")
    expected = torch.tensor([0.1065307 * math.exp(0.2), 0.7182818 * math.exp(0.4)], dtype=torch.float64)
    assert_close(term.value.detach()[0, :2], expected, rtol=1e-6, atol=1e-8)
    with pytest.raises(ValueError, match=r"kl_to_ref needs old_log_prob: .* or change estimator='corrected_k3'"):
        kl_to_ref(policy(), MASK, ref_log_prob=REF, estimator="corrected_k3")


def test_an_exact_kl_comes_with_its_own_gradient() -> None:
    kl = torch.tensor([[0.3, 0.7, NAN]], dtype=torch.float64, requires_grad=True)
    (term,) = kl_to_ref(policy(), MASK, kl=kl, estimator="exact")
    assert_term(term, kl, [0.3, 0.7], [1.0, 1.0, 0.0])
    with pytest.raises(ValueError, match=r"kl_to_ref needs kl: pass kl=, .* or change estimator='exact'"):
        kl_to_ref(policy(), MASK, ref_log_prob=REF, estimator="exact")


def test_kl_to_sampler_prefers_the_samplers_own_log_probs() -> None:
    log_prob = policy()
    (term,) = kl_to_sampler(log_prob, MASK, old_log_prob=OLD, sampler_log_prob=SAMPLER, coeff=0.5)
    assert (term.name, term.weight) == ("kl_to_sampler", 0.5)
    assert_term(term, log_prob, [0.045, 0.18], [-0.3, 0.6, 0.0])
    log_prob = policy()
    (term,) = kl_to_sampler(log_prob, MASK, old_log_prob=OLD)
    assert term.weight == 1e-3
    assert_term(term, log_prob, [0.02, 0.08], [0.2, 0.4, 0.0])


def test_corrected_k3_to_the_sampler_is_the_reverse_kl() -> None:
    """Over every token of a vocabulary, each with the sampler's probability, instead of sampled ones."""
    logits = torch.tensor([0.3, -0.8, 0.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.6, -0.2, 0.1], dtype=torch.float64).log_softmax(-1)
    new = logits.log_softmax(-1)
    exact = (new.exp() * (new - old)).sum()
    (term,) = kl_to_sampler(new[None], torch.ones(1, 3).bool(), old_log_prob=old[None], estimator="corrected_k3")
    mean = (old.exp() * term.value[0]).sum()
    assert_close(mean, exact)
    (found,) = torch.autograd.grad(mean, logits, retain_graph=True)
    assert_close(found, torch.autograd.grad(exact, logits)[0])


def test_entropy_is_rewarded() -> None:
    entropy = torch.tensor([[0.5, 2.0, NAN]], dtype=torch.float64, requires_grad=True)
    (term,) = entropy_bonus(policy(), MASK, entropy=entropy, coeff=0.01)
    assert (term.name, term.weight) == ("entropy", 0.01)
    assert_term(term, entropy, [-0.5, -2.0], [-1.0, -1.0, 0.0])
    with pytest.raises(ValueError, match="entropy_bonus needs entropy: pass entropy="):
        entropy_bonus(policy(), MASK, coeff=0.01)


TERMS: list[tuple[Any, dict[str, Any]]] = [
    (kl_to_ref, {"ref_log_prob": REF}),
    (kl_to_ref, {"kl": REF, "estimator": "exact"}),
    (kl_to_sampler, {"old_log_prob": OLD}),
    (entropy_bonus, {"entropy": -REF, "coeff": 0.1}),
]


@pytest.mark.parametrize(("function", "inputs"), TERMS)
def test_terms_keep_the_promises_of_objectives_and_can_leave_experts_out(function: Any, inputs: dict[str, Any]) -> None:
    (term,) = function(policy(), MASK, **inputs, expert_mask=EXPERTS, leave_out_experts=True)
    assert term.mask.tolist() == [[True, False, False]]
    (term,) = function(policy(), MASK, **inputs, expert_mask=EXPERTS)
    assert torch.equal(term.mask, MASK)
    with pytest.raises(ValueError, match=r"needs expert_mask: pass expert_mask=, .* or change leave_out_experts=True"):
        function(policy(), MASK, **inputs, leave_out_experts=True)
    assert (term.value[~MASK] == 0).all()
    half = {key: value.bfloat16() if isinstance(value, Tensor) else value for key, value in inputs.items()}
    assert function(policy().bfloat16(), MASK, **half)[0].value.dtype == torch.float32
    assert pickle.loads(pickle.dumps(function)) is function
    assert function.__name__ not in available_objectives()
    with pytest.raises(ValueError, match=r"mask has shape \(1, 3\) but log_prob has shape \(1, 2\)"):
        function(policy()[:, :2], MASK, **inputs)
    with pytest.raises(TypeError, match=f"{function.__name__} has no hyper-parameter 'koeff'.*Did you mean 'coeff'"):
        function(policy(), MASK, **inputs, koeff=0.1)


@pytest.mark.parametrize("part", [KLToReference, KLToSampler, DivergenceToTeacher])
def test_a_penalty_has_no_negative_weight(part: Any) -> None:
    for wrong in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"coeff must be a finite number of at least 0, got {wrong}"):
            part(wrong)
    made = part(0.1)
    with pytest.raises(ValueError, match=r"got -1.0: .* Pass FixedKLCoefficient\(-1.0\) if that is meant"):
        made.coeff = -1
    assert float(made.coeff) == float(torch.tensor(0.1))
    assert float(part(FixedKLCoefficient(-0.5)).coeff()) == -0.5  # on purpose


def test_less_entropy_is_a_negative_weight() -> None:
    entropy = torch.tensor([[0.5, 2.0, NAN]])
    (term,) = EntropyBonus(-0.25)({"log_prob": policy(), "mask": MASK, "entropy": entropy})
    assert float(term.weight) == -0.25
    assert term.value[MASK].tolist() == [-0.5, -2.0]


def test_missing_inputs_are_named() -> None:
    with pytest.raises(ValueError, match="kl_to_ref needs ref_log_prob: pass ref_log_prob="):
        kl_to_ref(policy(), MASK)
    with pytest.raises(ValueError, match="kl_to_sampler needs log-probs of the sampler"):
        kl_to_sampler(policy(), MASK)
    with pytest.raises(ValueError, match="kl_to_sampler has no 'exact'"):
        kl_to_sampler(policy(), MASK, old_log_prob=OLD, estimator="exact")
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'"):
        kl_to_ref(policy(), MASK, ref_log_prob=REF, estimator="k4")
