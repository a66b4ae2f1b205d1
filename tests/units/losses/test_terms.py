"""Penalties and bonuses by hand: compared policies, tokens and gradients. Aggregation over tokens."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from by_hand import called, tensor
from refused import refused
from torchrl_llm_kl import losses
from torchrl_llm_kl.estimators import FixedKLCoefficient, k3
from torchrl_llm_kl.losses import DivergenceToTeacher, KLToReference, LossInputs, aggregate, available_objectives, count
from torchrl_llm_kl.losses.terms import entropy_bonus, kl_to_ref, kl_to_sampler

NAN = float("nan")
MASK = torch.tensor([[True, True, False]])
REF, OLD, SAMPLER = (tensor([[*x, NAN]]) for x in ([-1.5, -1.0], [-1.2, -2.4], [-0.7, -2.6]))
# Of the policy's -1 and -2: d = 0.5, -1; 0.2, 0.4; -0.3, 0.6.
K3 = [0.1065307, 0.7182818]
EXPERTS = torch.tensor([[False, True, True]])
BOTH: dict[str, Any] = {"old_log_prob": OLD, "sampler_log_prob": SAMPLER}


def policy() -> Tensor:
    return tensor([[-1.0, -2.0, NAN]]).requires_grad_()


def assert_term(term: losses.LossTerm, leaf: Tensor, value: list[float], gradient: list[float]) -> None:
    assert_close(term.value.detach()[MASK], tensor(value), rtol=1e-6, atol=1e-8)
    (found,) = torch.autograd.grad(torch.where(term.mask, term.value, 0).sum(), leaf)
    assert_close(found, tensor([[*gradient, 0.0]]), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("function", "given", "weight", "value", "gradient"),
    [
        (kl_to_ref, {"ref_log_prob": REF, "estimator": "k1", "coeff": 0.25}, 0.25, [0.5, -1.0], [1.0, 1.0]),
        (kl_to_ref, {"ref_log_prob": REF, "estimator": k3, "coeff": 0.25}, 0.25, K3, [0.3934693, -1.7182818]),
        (kl_to_ref, {"ref_log_prob": REF, "estimator": "k3+", "coeff": 0.25}, 0.25, K3, [0.5, -1.0]),
        # The default is k2 with Trinity's coefficient.
        (kl_to_ref, {"ref_log_prob": REF}, 1e-3, [0.125, 0.5], [0.5, -1.0]),
        (kl_to_sampler, {"old_log_prob": OLD}, 1e-3, [0.02, 0.08], [0.2, 0.4]),
        # The sampler's own log-probs are preferred.
        (kl_to_sampler, {**BOTH, "coeff": 0.5}, 0.5, [0.045, 0.18], [-0.3, 0.6]),
    ],
)
def test_penalties_by_hand(function: Any, given: Any, weight: float, value: list[float], gradient: list[float]) -> None:
    log_prob = policy()
    (term,) = called(function, log_prob, MASK, **given)
    assert (term.name, term.weight) == (function.__name__, weight)
    assert torch.equal(term.mask, MASK)
    assert_term(term, log_prob, value, gradient)


def test_other_estimators_of_a_penalty() -> None:
    """Some estimators read the sampler's log-probs. An exact KL has its own gradient."""
    coeff = torch.tensor(0.3)
    assert kl_to_ref(LossInputs(policy(), MASK, ref_log_prob=REF), coeff=coeff)[0].weight is coeff
    assert (kl_to_ref(LossInputs(policy(), MASK, ref_log_prob=REF), estimator="none")[0].value == 0).all()
    (term,) = kl_to_ref(LossInputs(policy(), MASK, ref_log_prob=REF, old_log_prob=OLD), estimator="corrected_k3")
    assert term.value[MASK].tolist() == pytest.approx([K3[0] * math.exp(0.2), K3[1] * math.exp(0.4)], rel=1e-6)
    (term,) = called(kl_to_sampler, policy(), MASK, **BOTH, estimator="corrected_k3")  # times the ratio to the sampler
    expected = tensor([(math.exp(-d) - 1 + d) * math.exp(d) for d in (-0.3, 0.6)])
    assert_close(term.value.detach()[MASK], expected)
    kl = tensor([[0.3, 0.7, NAN]]).requires_grad_()
    assert_term(kl_to_ref(LossInputs(policy(), MASK, kl=kl), estimator="exact")[0], kl, [0.3, 0.7], [1.0, 1.0])


def test_entropy_is_rewarded() -> None:
    entropy = tensor([[0.5, 2.0, NAN]]).requires_grad_()
    (term,) = entropy_bonus(LossInputs(policy(), MASK, entropy=entropy), coeff=0.01)
    assert (term.name, term.weight) == ("entropy", 0.01)
    assert_term(term, entropy, [-0.5, -2.0], [-1.0, -1.0])
    (term,) = losses.EntropyBonus(-0.25)(losses.LossInputs(policy(), MASK, entropy=entropy))  # less of it
    assert float(term.weight) == -0.25
    assert term.value[MASK].tolist() == [-0.5, -2.0]


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (kl_to_ref, {"ref_log_prob": REF}),
        (kl_to_ref, {"kl": REF, "estimator": "exact"}),
        (kl_to_sampler, {"old_log_prob": OLD}),
        (entropy_bonus, {"entropy": -REF, "coeff": 0.1}),
    ],
)
def test_terms_keep_the_promises_of_objectives_and_can_leave_experts_out(function: Any, inputs: dict[str, Any]) -> None:
    (term,) = called(function, policy(), MASK, **inputs, expert_mask=EXPERTS, leave_out_experts=True)
    assert term.mask.tolist() == [[True, False, False]]
    (term,) = called(function, policy(), MASK, **inputs, expert_mask=EXPERTS)
    assert torch.equal(term.mask, MASK)
    assert (term.value[~MASK] == 0).all()
    assert function.__name__ not in available_objectives()
    with pytest.raises(ValueError, match=f"{function.__name__} needs expert_mask: pass expert_mask="):
        called(function, policy(), MASK, **inputs, leave_out_experts=True)
    with pytest.raises(TypeError, match=f"{function.__name__} has no hyper-parameter 'koeff'.*Did you mean 'coeff'"):
        called(function, policy(), MASK, **inputs, koeff=0.1)


@pytest.mark.parametrize("part", [KLToReference, losses.KLToSampler, DivergenceToTeacher])
def test_penalties_refuse_negative_weights(part: Any) -> None:
    for wrong in (-0.1, math.nan, math.inf, torch.tensor(-1.0), torch.tensor(math.nan)):  # also in a tensor of the CPU
        with pytest.raises(ValueError, match=rf"coeff must be a finite number of at least 0, got {float(wrong)}"):
            part(wrong)
    made = part(0.1)
    with pytest.raises(ValueError, match=r"got -1.0: .* Pass FixedKLCoefficient\(-1.0\) if that is meant"):
        made.coeff = -1
    assert float(made.coeff) == float(torch.tensor(0.1)) == float(part(torch.tensor(0.1)).coeff)
    assert float(part(FixedKLCoefficient(-0.5)).coeff()) == -0.5  # on purpose


def test_an_estimator_with_another_gradient_warns() -> None:
    with pytest.warns(UserWarning, match=r"KL estimator 'k3' in the loss: .*forward KL.*Use 'k2'"):
        KLToReference(0.1, "k3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KLToReference(0.1, "k3+")


test_missing_inputs_are_named = refused(
    lambda function, inputs: called(function, policy(), MASK, **inputs),
    (kl_to_ref, {}, "kl_to_ref needs ref_log_prob: pass ref_log_prob="),
    (kl_to_ref, {"ref_log_prob": REF, "estimator": "k4"}, "unknown KL estimator 'k4'"),
    (kl_to_ref, {"ref_log_prob": REF, "estimator": "corrected_k3"}, "kl_to_ref needs old_log_prob"),
    (kl_to_ref, {"ref_log_prob": REF, "estimator": "exact"}, "kl_to_ref needs kl: pass kl="),
    (kl_to_sampler, {}, "kl_to_sampler needs old_log_prob"),
    (kl_to_sampler, {"old_log_prob": OLD, "estimator": "exact"}, "kl_to_sampler needs kl"),
    (entropy_bonus, {"coeff": 0.01}, "entropy_bonus needs entropy: pass entropy="),
)


# ---------------------------------------------------------------------- sums over tokens and sequences
# Two tokens, one token, none.
ROWS = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]) == 1
VALUE = tensor([[1.0, 2.0, NAN, NAN], [6.0, NAN, NAN, NAN], [NAN, NAN, NAN, NAN]])


@pytest.mark.parametrize(
    ("mode", "max_len", "loss", "first", "second"),
    [
        ("token-mean", None, 9 / 3, 1 / 3, 1 / 3),
        ("seq-mean-token-sum", None, (3 + 6) / 2, 1 / 2, 1 / 2),
        ("seq-mean-token-mean", None, (1.5 + 6) / 2, 1 / 4, 1 / 2),
        ("seq-mean-token-sum-norm", None, 9 / (2 * 4), 1 / 8, 1 / 8),
        ("seq-mean-token-sum-norm", 1, 9 / 2, 1 / 2, 1 / 2),
    ],
)
def test_aggregations_by_hand(mode: str, max_len: int | None, loss: float, first: float, second: float) -> None:
    for shape in ((3, 4), (3, 1, 4)):
        value, mask = VALUE.clone().requires_grad_(), ROWS.view(shape)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = aggregate(value.view(shape), mask, mode, max_len=max_len)
            of_whole = aggregate(value.view(shape), mask, mode, denominator=2 * count(mask, mode, max_len=max_len))
        assert_close([result.item(), of_whole.item()], [loss, loss / 2])
        slopes = tensor([[first, first, 0, 0], [second, 0, 0, 0], [0, 0, 0, 0]])
        assert_close(torch.autograd.grad(result, value)[0], slopes)


def test_aggregation_none_and_half_precision() -> None:
    value = VALUE.clone().requires_grad_()
    result = aggregate(value, ROWS, "none")
    assert_close(result, tensor([[1, 2, 0, 0], [6, 0, 0, 0], [0, 0, 0, 0]]))
    assert_close(torch.autograd.grad(result.sum(), value)[0], ROWS.double())
    value = torch.full((1, 4), 0.1, dtype=torch.bfloat16, requires_grad=True)
    result = aggregate(value, torch.ones(1, 4, dtype=torch.bool))
    assert result.dtype == torch.float32
    assert_close(torch.autograd.grad(result, value)[0], torch.full((1, 4), 0.25, dtype=torch.bfloat16))


def test_empty_masks_and_invalid_counts() -> None:
    with pytest.warns(UserWarning, match="the mask is empty"):
        assert aggregate(VALUE[2:], ROWS[2:]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert aggregate(VALUE[2:], ROWS[2:], denominator=0) == 0  # of a whole batch without tokens
    for denominator in (math.inf, NAN, -1.0):
        with pytest.raises(ValueError, match=f"denominator must be a count of tokens or sequences, got {denominator}"):
            aggregate(VALUE, ROWS, denominator=denominator)
    with pytest.raises(TypeError, match="mask must be boolean"):
        count(ROWS.float())
    with pytest.raises(ValueError, match="max_len must be at least 1, got 0"):
        count(ROWS, "seq-mean-token-sum-norm", max_len=0)
