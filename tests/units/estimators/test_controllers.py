"""Coefficients that hold a target: hand-computed steps, and step responses of policies whose equilibrium is known."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from torchrl_llm_kl import AdaptiveKLCoefficient, DualKLCoefficient, PIKLCoefficient
from torchrl_llm_kl.transforms import KLComputation

BOTH = [PIKLCoefficient, DualKLCoefficient]


def pi(**changes: Any) -> PIKLCoefficient:
    settings = {"init": 0.2, "target": 0.5, "proportional": 0.5, "integral": 0.1, "smoothing": 0.0, "warmup": 0}
    return PIKLCoefficient(**{**settings, **changes})


def dual(**changes: Any) -> DualKLCoefficient:
    return DualKLCoefficient(**{"init": 0.2, "target": 0.5, "rate": 0.05, "warmup": 0, **changes})


def values(coefficient: Any, measured: Sequence[Any]) -> list[float]:
    seen = []
    for kl in measured:
        coefficient.update(kl, n=8)
        seen.append(coefficient().item())
    return seen


# ------------------------------------------------------------------ steps by hand


@pytest.mark.parametrize("as_input", [float, torch.tensor, lambda kl: torch.tensor([[kl]], dtype=torch.float64)])
def test_steps_of_the_pi_coefficient_by_hand(as_input: Callable[[float], Any]) -> None:
    """The averages are 1, 0.5, 0.5 and 0.55: weights of the past 1/2, and its sums 1/2, 3/4, 7/8, 15/16."""
    coefficient = pi(smoothing=0.5, max_step=0.1)
    seen = values(coefficient, [as_input(kl) for kl in (1.0, 0.25, 0.5, 0.59375)])
    want = [
        0.2 * 2**0.1,  # nothing came before: the integral term alone
        0.2 * 2**0.1 * math.exp(-0.1),  # -0.5 log 2 + 0, clipped
        0.2 * 2**0.1 * math.exp(-0.1),  # on the target, and not moving
        0.2 * 2**0.1 * math.exp(-0.1) * 1.1**0.6,  # 0.5 log 1.1 + 0.1 log 1.1
    ]
    assert want[-1] == pytest.approx(0.2053711, rel=1e-6)
    assert seen == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("as_input", [float, torch.tensor])
def test_steps_of_the_dual_coefficient_by_hand(as_input: Callable[[float], Any]) -> None:
    seen = values(dual(max_step=0.1), [as_input(kl) for kl in (0.75, 0.0, -0.1, 5.0)])
    steps = [0.025, -0.05, -0.06, 0.1]  # 0.05 * (KL / 0.5 - 1), the last clipped
    assert seen == pytest.approx([0.2 * math.exp(sum(steps[: i + 1])) for i in range(4)], rel=1e-6)


def test_the_softplus_of_the_dual_coefficient_by_hand() -> None:
    """log(e^x - 1) moves: relative steps far below 1, absolute ones far above."""
    assert values(dual(parametrisation="softplus"), [0.75]) == pytest.approx(
        [math.log1p(math.expm1(0.2) * math.exp(0.025))]
    )
    small = dual(parametrisation="softplus", init=1e-3)
    large = dual(parametrisation="softplus", init=90.0)
    assert values(small, [0.75]) == pytest.approx([1e-3 * math.exp(0.025)], rel=1e-4)
    assert values(large, [0.75]) == pytest.approx([90.025], rel=1e-6)


def test_the_warm_up_holds_the_coefficient_until_the_kl_has_risen() -> None:
    seen = values(pi(warmup=9, max_step=0.1), [0.0, 0.1, 0.24, 0.25, 0.0])
    risen = 0.5 * math.log(0.25 / 0.24) + 0.1 * math.log(0.5)
    # Over for good: a KL of 0 counts as a tenth of the target, and the step is clipped.
    want = [0.2, 0.2, 0.2, 0.2 * math.exp(risen), 0.2 * math.exp(risen - 0.1)]
    assert seen == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(("make", "step"), [(pi, 0.1 * math.log(0.1)), (dual, -0.05)])
def test_the_warm_up_ends(make: Callable[..., Any], step: float) -> None:
    """A coefficient too large for any KL must fall in the end."""
    seen = values(make(warmup=2, max_step=1.0), [0.0] * 4)
    assert seen == pytest.approx([0.2, 0.2, 0.2 * math.exp(step), 0.2 * math.exp(2 * step)], rel=1e-5)


def test_bounds_and_clipped_steps_wind_nothing_up() -> None:
    coefficient = pi(proportional=0.0, low=0.15, high=0.3)
    assert values(coefficient, [50.0] * 40)[-1] == pytest.approx(0.3)
    assert values(coefficient, [0.25])[0] == pytest.approx(0.3 * 0.5**0.1)  # the next step leaves the bound
    assert values(coefficient, [0.0] * 40)[-1] == pytest.approx(0.15)
    assert values(coefficient, [1.0])[0] == pytest.approx(0.15 * 2**0.1)


# ------------------------------------------------------------------ step responses

TARGET = 0.5


def gaussian(beta: float) -> float:
    """The optimum of E[a x] - beta KL for N(m, 1) and N(0, 1), m = a / beta, here with a = 0.1; its KL is m ** 2 / 2."""
    return (0.1 / beta) ** 2 / 2


def softmax(beta: float) -> float:
    """KL of the optimum pi_ref exp(r / beta) from pi_ref, over a vocabulary of three tokens; one is right."""
    reference, reward = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), torch.tensor([1.0, 0.0, 0.1])
    optimum = (reference.log() + reward / beta).log_softmax(-1)
    return float((optimum.exp() * (optimum - reference.log())).sum())


def at_target(equilibrium: Callable[[float], float]) -> float:
    """The coefficient with a KL of 0.5, by bisection of the falling function."""
    low, high = 1e-3, 1e3
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if equilibrium(middle) > TARGET else (low, middle)
    return low


def response(
    coefficient: Any, equilibrium: Callable[[float], float], *, updates: int, lag: float = 20.0
) -> list[float]:
    """KL of a policy that starts at its reference and moves a share ``1 / lag`` of the way to the optimum of each moment."""
    kl, seen = 0.0, []
    for _ in range(updates):
        seen.append(kl)
        coefficient.update(kl, n=8)
        kl += (equilibrium(float(coefficient())) - kl) / lag
    return seen


def test_the_coefficients_of_the_target() -> None:
    assert at_target(gaussian) == pytest.approx(0.1)
    assert softmax(at_target(softmax)) == pytest.approx(TARGET)


DUAL_PEAKS = {0.5: 2.3, 1.0: 1.25, 4.0: 1.25}
CASES = {
    "pi": (PIKLCoefficient, {}, 140, {0.5: 1.5, 1.0: 1.01, 4.0: 1.01}),
    "dual": (DualKLCoefficient, {}, 220, DUAL_PEAKS),
    "softplus": (DualKLCoefficient, {"parametrisation": "softplus"}, 220, DUAL_PEAKS),
}


@pytest.mark.parametrize("equilibrium", [gaussian, softmax])
@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("case", CASES)
def test_step_response(case: str, factor: float, equilibrium: Any) -> None:
    """With the default gains: settled within 2 % of the target after so many updates, at the coefficient of the target.

    At half of that coefficient the KL would go to 4 or 2.6 times the target; the peak is bounded. Started at that
    coefficient or above, PI control overshoots by less than 1 %: the warm-up holds it while the KL rises.
    """
    kind, settings, settles, peaks = CASES[case]
    wanted = at_target(equilibrium)
    coefficient = kind(wanted * factor, TARGET, **settings)
    seen = response(coefficient, equilibrium, updates=settles + 80)
    assert max(seen) < peaks[factor] * TARGET
    assert max(abs(kl / TARGET - 1) for kl in seen[settles:]) < 0.02
    assert float(coefficient()) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("equilibrium", [gaussian, softmax])
def test_ziegler_overshoots_from_the_right_coefficient(equilibrium: Any) -> None:
    """At the demo's rate of 10 % an update: the coefficient falls while the KL rises from 0, and returns late."""
    coefficient = AdaptiveKLCoefficient(at_target(equilibrium), TARGET, horizon=16)
    assert max(response(coefficient, equilibrium, updates=140)) > 1.5 * TARGET


def test_the_mean_of_a_noisy_kl_is_on_target() -> None:
    """With the noise of 128 answers, a fifth of the KL: the average keeps it out of the coefficient."""
    torch.manual_seed(0)
    coefficient = PIKLCoefficient(0.1, TARGET)
    kl, seen, used = 0.5, [], []
    for _ in range(600):
        coefficient.update(kl * (1 + 0.2 * torch.randn(())), n=128)
        kl += (gaussian(float(coefficient())) - kl) / 10
        seen.append(kl)
        used.append(float(coefficient()))
    assert sum(seen) / len(seen) == pytest.approx(TARGET, rel=0.03)
    assert max(used) / min(used) < 2


# ------------------------------------------------------------------ state, dtypes, devices


@pytest.mark.parametrize("make", [pi, dual])
@pytest.mark.parametrize("at", [1, 4])
def test_a_restored_coefficient_goes_on_bit_for_bit(make: Callable[..., Any], at: int) -> None:
    """In the warm-up and after it."""
    measured = [0.1, 0.2, 0.3, 0.7, 0.4, 0.6, 0.55]
    whole, first, second = (make(smoothing=0.7, warmup=3) for _ in range(3))
    values(whole, measured)
    values(first, measured[:at])
    assert list(first.state_dict()) == ["value", "average", "mass", "warmup_left"]
    second.load_state_dict(first.state_dict())
    values(second, measured[at:])
    for name, buffer in whole.state_dict().items():
        assert torch.equal(buffer, second.state_dict()[name]), name


@pytest.mark.parametrize("make", [pi, dual])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_independent(make: Callable[..., Any], duplicate: Callable[[Any], Any]) -> None:
    source = make()
    other = duplicate(source)
    other.update(5.0, 10)
    assert float(source()) == pytest.approx(0.2) != float(other())


@pytest.mark.parametrize("make", [pi, dual])
def test_the_state_stays_float32_in_a_half_precision_model(make: Callable[..., Any]) -> None:
    model = nn.ModuleDict({"layer": nn.Linear(1, 1), "coeff": make(smoothing=0.9)}).bfloat16()
    values(model["coeff"], [0.5001] * 3)
    assert {buffer.dtype for buffer in model["coeff"].buffers()} == {torch.float32}
    assert model["layer"].weight.dtype == torch.bfloat16
    assert float(model["coeff"].average) == pytest.approx(0.5001, rel=1e-6)


@pytest.mark.parametrize("make", [pi, dual])
def test_nothing_is_read_on_the_host(make: Callable[..., Any]) -> None:
    meta = make(warmup=2).to("meta")
    meta.update(torch.tensor(0.3, device="meta"), torch.tensor(8, device="meta"))  # reading them would raise
    assert meta().shape == ()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("make", [pi, dual])
def test_update_on_a_device_does_not_synchronise(make: Callable[..., Any]) -> None:
    coefficient, kl = make().to("cuda"), torch.tensor(0.75, device="cuda")
    coefficient.update(kl, 10)
    torch.cuda.set_sync_debug_mode("error")
    try:
        coefficient.update(kl, 10)
        coefficient.update(0.5, 10)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("make", [pi, dual])
def test_an_update_between_forward_and_backward(make: Callable[..., Any]) -> None:
    coefficient, kl = make(), torch.tensor(3.0, requires_grad=True)
    loss = coefficient() * kl
    coefficient.update(kl, 10)
    loss.backward()
    assert_close(kl.grad, torch.tensor(0.2))
    assert not coefficient.value.requires_grad


def test_a_transform_reads_it_at_every_call() -> None:
    """As any coefficient; ``make_algorithm`` and losses: ``tests/units/algorithms/test_algorithm_state.py``."""
    coefficient = dual()
    assert KLComputation(coeff=coefficient).coeff is coefficient
    other = KLComputation(coeff=dual(init=0.9))
    values(coefficient, [0.75])
    other.load_state_dict(KLComputation(coeff=coefficient).state_dict())
    assert float(other.coeff()) == pytest.approx(0.2 * math.exp(0.025))


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize("make", [pi, dual])
@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_a_kl_that_is_not_finite(make: Callable[..., Any], kl: float) -> None:
    coefficient = make()
    values(coefficient, [0.6])
    before = copy.deepcopy(coefficient.state_dict())
    with pytest.raises(ValueError, match=f"current_kl is {kl}"):
        coefficient.update(kl, 10)
    coefficient.update(torch.tensor(kl), 10)
    assert all(torch.equal(before[name], now) for name, now in coefficient.state_dict().items())


@pytest.mark.parametrize("n", [0, torch.tensor(0)])
def test_no_samples_change_nothing(n: Any) -> None:
    coefficient = pi()
    coefficient.update(torch.tensor(math.nan), n)
    coefficient.update(torch.tensor(9.0), n)
    assert coefficient.state_dict() == pi().state_dict()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"current_kl": torch.zeros(3), "n": 1}, r"current_kl must have one element, got shape \(3,\)"),
        ({"current_kl": 0.5, "n": -1}, "n is -1; expected the number of samples"),
        ({"current_kl": 0.5, "n": math.nan}, "n is nan"),
        ({"current_kl": 0.5, "n": torch.ones(2)}, r"n must have one element, got shape \(2,\)"),
    ],
)
def test_bad_updates(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pi().update(**arguments)


def test_all_ranks_without_a_group() -> None:
    with pytest.raises(RuntimeError, match=r"all_ranks=True, but torch\.distributed is not initialised"):
        pi().update(0.5, 1, all_ranks=True)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init": 0.0}, "expected 0 < low <= init <= high and finite, got low=0.0001, init=0.0"),
        ({"init": math.nan}, "init=nan"),
        ({"low": 0.3}, "got low=0.3, init=0.2"),
        ({"high": math.inf}, "high=inf"),
        ({"target": -0.5}, "target must be finite and positive, got -0.5"),
        ({"max_step": 0.0}, "max_step must be finite and positive, got 0"),
        ({"smoothing": 1.0}, "smoothing must be at least 0 and below 1, got 1.0"),
        ({"warmup": -1}, "warmup must be a whole number of updates, 0 for none, got -1"),
        ({"warmup": 0.5}, "warmup must be a whole number"),
    ],
)
def test_bad_settings(kind: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**{"init": 0.2, "target": 0.5, **changes})


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (pi, {"proportional": -0.1}, "proportional must be finite and at least 0"),
        (pi, {"integral": 0.0}, "integral must be finite and positive, got 0.0: without it an error remains"),
        (dual, {"rate": math.inf}, "rate must be finite and positive, got inf"),
        (dual, {"parametrisation": "exp"}, "parametrisation must be one of 'log', 'softplus', got 'exp'"),
    ],
)
def test_bad_gains(make: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)
