"""Coefficients: hand-computed steps, state, copies, dtypes and devices."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from closeness import assert_near
from torchrl_llm_kl.estimators import (
    AdaptiveEntropyCoefficient,
    AdaptiveKLCoefficient,
    FixedKLCoefficient,
    as_coefficient,
)


def adaptive():
    return AdaptiveKLCoefficient(init=0.2, target=6.0, horizon=100)


@pytest.mark.parametrize("as_input", [float, torch.tensor, lambda kl: torch.tensor([[kl]], dtype=torch.float64)])
def test_three_steps_by_hand(as_input):
    coefficient = adaptive()
    seen = []
    for kl, n in ((12.0, 10), (6.6, 50), (0.0, 20)):
        coefficient.update(as_input(kl), n)
        seen.append(coefficient().item())
    # error +1 is clipped to +.2: * 1.02; error +.1: * 1.05; error -1 is clipped to -.2: * .96
    assert seen == pytest.approx([0.204, 0.2142, 0.205632], rel=1e-6)


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_an_error(kl):
    coefficient = adaptive()
    with pytest.raises(ValueError, match=f"current_kl is {kl}"):
        coefficient.update(kl, 10)
    assert_close(coefficient(), torch.tensor(0.2))


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_a_tensor_that_is_not_finite_changes_nothing(kl):
    coefficient = adaptive()
    coefficient.update(torch.tensor(kl), 10)
    assert_close(coefficient(), torch.tensor(0.2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_update_on_a_device_does_not_synchronise():
    coefficient, kl = adaptive().to("cuda"), torch.tensor(12.0, device="cuda")
    coefficient.update(kl, 10)
    torch.cuda.set_sync_debug_mode("error")
    try:
        coefficient.update(kl, 10)
        coefficient.update(6.0, 10)
        result = coefficient()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.item() == pytest.approx(0.2 * 1.02 * 1.02)


def test_an_update_between_forward_and_backward():
    coefficient, kl = adaptive(), torch.tensor(3.0, requires_grad=True)
    loss = coefficient() * kl
    coefficient.update(kl, 10)
    loss.backward()
    assert_close(kl.grad, torch.tensor(0.2))
    assert_close(coefficient(), torch.tensor(0.196))
    assert not coefficient.value.requires_grad


def test_state_dict_round_trip():
    source, target = adaptive(), adaptive()
    source.update(12.0, 10)
    assert list(source.state_dict()) == ["value"]
    target.load_state_dict(source.state_dict())
    target.update(12.0, 10)
    assert target().item() == pytest.approx(0.2 * 1.02 * 1.02)
    assert source().item() == pytest.approx(0.204)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_independent(duplicate):
    source = adaptive()
    other = duplicate(source)
    other.update(12.0, 10)
    assert (source().item(), other().item()) == pytest.approx((0.2, 0.204))


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16, lambda m: m.to(torch.bfloat16)])
def test_coefficient_stays_float32_in_a_half_precision_model(cast):
    model = cast(nn.ModuleDict({"layer": nn.Linear(1, 1), "coeff": AdaptiveKLCoefficient(0.001, 6.0, 10_000)}))
    assert model["layer"].weight.dtype != torch.float32
    model["coeff"].update(12.0, 1)  # * 1.00002
    assert model["coeff"]().dtype == torch.float32
    assert_near(model["coeff"](), 0.00100002)


def test_other_dtypes_and_devices():
    assert adaptive().double()().dtype == torch.float64
    assert adaptive().to("meta")().device.type == "meta"


def test_fixed_coefficient_is_constant():
    coefficient = FixedKLCoefficient(0.25)
    coefficient.update(12.0, 10)
    coefficient.update(torch.tensor(math.nan), 10)
    assert_close(coefficient(), torch.tensor(0.25))
    assert list(coefficient.state_dict()) == ["value"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-0.1, 6.0, 100), "init must be finite and not negative, got -0.1"),
        ((math.nan, 6.0, 100), "init must be finite"),
        ((0.1, 0.0, 100), "target must be finite and positive, got 0.0"),
        ((0.1, -6.0, 100), "target must be finite and positive, got -6.0"),
        ((0.1, 6.0, 0), "horizon must be finite and positive, got 0"),
        ((0.1, 6.0, math.inf), "horizon must be finite and positive, got inf"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveKLCoefficient(*arguments)


@pytest.mark.parametrize("n", [-1, 500])
def test_a_step_that_could_flip_the_sign(n):
    with pytest.raises(ValueError, match=f"n={n} with horizon=100: expected 0 <= n < 5 \\* horizon"):
        adaptive().update(0.0, n)


def test_a_kl_that_is_not_reduced():
    with pytest.raises(ValueError, match=r"one element, got shape \(3,\)"):
        adaptive().update(torch.zeros(3), 10)


@pytest.mark.parametrize("coeff", [1, 0.5, 0, torch.tensor(0.5), torch.tensor([0.5], dtype=torch.float64)])
def test_as_coefficient_of_numbers(coeff):
    module = as_coefficient(coeff)
    assert isinstance(module, FixedKLCoefficient)
    assert module().shape == ()
    assert module().item() == float(coeff)


def test_as_coefficient_of_a_module():
    coefficient = adaptive()
    assert as_coefficient(coefficient) is coefficient


@pytest.mark.parametrize(
    ("coeff", "error", "message"),
    [
        ("0.1", TypeError, "got str"),
        (True, TypeError, "got bool"),
        (None, TypeError, "got NoneType"),
        (nn.Linear(1, 1), TypeError, r"Linear has no method update"),
        (torch.zeros(2), ValueError, r"one element, got shape \(2,\)"),
        (nn.Parameter(torch.tensor(0.1)), ValueError, "requires grad"),
        (math.nan, ValueError, "must be a finite number of at least 0, got nan"),
        (math.inf, ValueError, "must be a finite number of at least 0, got inf"),
        (-1, ValueError, r"at least 0, got -1: .* Pass FixedKLCoefficient\(-1\) if that is meant"),
        (
            torch.tensor([-0.5]),
            ValueError,
            r"at least 0, got -0.5: .* Pass FixedKLCoefficient\(-0.5\) if that is meant",
        ),
    ],
)
def test_as_coefficient_of_invalid_input(coeff, error, message):
    with pytest.raises(error, match=message):
        as_coefficient(coeff)


# ------------------------------------------------------------------ entropy


def entropy_coefficient(**changes):
    return AdaptiveEntropyCoefficient(
        **{"init": 0.03, "target": 0.5, "delta": 0.02, "low": 0.01, "high": 0.06, **changes}
    )


@pytest.mark.parametrize("as_input", [float, torch.tensor, lambda x: torch.tensor([[x]], dtype=torch.float64)])
def test_steps_of_the_entropy_coefficient_by_hand(as_input):
    """Up below the target to the upper bound, as it is at the target, down above it to the lower bound, where it is off."""
    coefficient = entropy_coefficient()
    assert coefficient() == 0  # nothing measured
    seen = []
    for entropy in (0.4, 0.1, 0.5, 0.7, 0.6, 9.0, 0.49):
        coefficient.update(as_input(entropy))
        seen.append((coefficient.value.item(), coefficient().item()))
    values = [0.05, 0.06, 0.06, 0.04, 0.02, 0.01, 0.03]
    applied = [0.05, 0.06, 0.06, 0.0, 0.0, 0.0, 0.03]
    assert [value for value, _ in seen] == pytest.approx(values, rel=1e-6)
    assert [value for _, value in seen] == pytest.approx(applied, rel=1e-6)


def test_the_entropy_coefficient_starts_as_in_its_paper():
    coefficient = AdaptiveEntropyCoefficient()
    coefficient.update(0.19)
    coefficient.update(0.0)
    assert coefficient().item() == pytest.approx(0.01)
    assert (coefficient.target, coefficient.low, coefficient.high) == (0.2, 0.0, 1.0)


def test_the_entropy_coefficient_saves_both_numbers():
    source, target = entropy_coefficient(), entropy_coefficient()
    source.update(0.4)
    assert list(source.state_dict()) == ["value", "entropy"]
    target.load_state_dict(source.state_dict())
    assert target().item() == pytest.approx(0.05)
    copied = pickle.loads(pickle.dumps(source))
    copied.update(0.7)
    assert (copied().item(), copied.value.item(), source().item()) == pytest.approx((0.0, 0.03, 0.05))


def test_the_entropy_coefficient_without_data_and_in_half_precision():
    coefficient = entropy_coefficient().bfloat16()
    coefficient.update(torch.tensor(0.4999, dtype=torch.float32))
    assert (coefficient.value.dtype, coefficient.entropy.dtype) == (torch.float32, torch.float32)
    assert coefficient().item() == pytest.approx(0.05)
    meta = entropy_coefficient().to("meta")
    meta.update(torch.tensor(0.3, device="meta"))  # reading it would raise
    assert meta().shape == ()


def test_an_update_of_the_entropy_coefficient_between_forward_and_backward():
    coefficient, entropy = entropy_coefficient(), torch.tensor(0.3, requires_grad=True)
    coefficient.update(0.4)
    loss = coefficient() * entropy
    coefficient.update(entropy)
    loss.backward()
    assert_close(entropy.grad, torch.tensor(0.05))
    assert not coefficient.value.requires_grad


@pytest.mark.parametrize("entropy", [math.nan, math.inf, -math.inf])
def test_an_entropy_that_is_not_finite(entropy):
    coefficient = entropy_coefficient()
    coefficient.update(0.4)
    with pytest.raises(ValueError, match=f"current_entropy is {entropy}"):
        coefficient.update(entropy)
    coefficient.update(torch.tensor(entropy))
    assert coefficient().item() == pytest.approx(0.05)
    with pytest.raises(ValueError, match=r"current_entropy must have one element, got shape \(2,\): reduce it"):
        coefficient.update(torch.zeros(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": 0.0}, "target must be finite and positive, got 0.0"),
        ({"delta": -0.1}, "delta must be finite and positive, got -0.1"),
        ({"low": -0.1}, "expected 0 <= low <= init <= high and finite, got low=-0.1, init=0.03 and high=0.06"),
        ({"init": 0.07}, "got low=0.01, init=0.07 and high=0.06"),
        ({"high": math.inf}, "high=inf"),
        ({"init": math.nan}, "init=nan"),
    ],
)
def test_bad_settings_of_the_entropy_coefficient(changes, message):
    with pytest.raises(ValueError, match=message):
        entropy_coefficient(**changes)
