"""Coefficients: hand-computed steps, step responses of policies whose equilibrium is known, state, dtypes and devices."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from refused import refused
from torchrl_llm_kl import AdaptiveKLCoefficient, DualKLCoefficient, PIKLCoefficient, estimators
from torchrl_llm_kl.estimators import AdaptiveEntropyCoefficient, FixedKLCoefficient, _coefficients, as_coefficient


def ziegler(**changes):
    return AdaptiveKLCoefficient(**{"init": 0.2, "target": 6.0, "horizon": 100, **changes})


def pi(**changes):
    settings = {"init": 0.2, "target": 0.5, "proportional": 0.5, "integral": 0.1, "smoothing": 0.0, "warmup": 0}
    return PIKLCoefficient(**{**settings, **changes})


def dual(**changes):
    return DualKLCoefficient(**{"init": 0.2, "target": 0.5, "rate": 0.05, "warmup": 0, **changes})


def entropy(**changes):
    """A coefficient of the entropy, not of a KL. By default its value is 0.2, after one entropy below the target."""
    settings = {"init": 0.18, "target": 0.5, "delta": 0.02, "low": 0.01, "high": 0.6}
    made = AdaptiveEntropyCoefficient(**{**settings, **changes})
    if not changes:
        made.update(0.4)
    return made


each_kind = pytest.mark.parametrize("make", [ziegler, pi, dual, entropy])
in_any_form = pytest.mark.parametrize("as_input", [float, torch.tensor, lambda x: torch.tensor([[x]]).double()])


def update(coefficient, measured, n=10):
    coefficient.update(measured, *([] if isinstance(coefficient, AdaptiveEntropyCoefficient) else [n]))


def values(coefficient, measured, n=8):
    seen = []
    for each in measured:
        update(coefficient, each, n)
        seen.append(coefficient().item())
    return seen


# ------------------------------------------------------------------ steps by hand
PI_STEPS = [0.1 * math.log(2), -0.1, 0.0, 0.6 * math.log(1.1)]
DUAL_STEPS = [0.025, -0.05, -0.06, 0.1]
RISEN = [0.0, 0.0, 0.0, 0.5 * math.log(0.25 / 0.24) + 0.1 * math.log(0.5), -0.1]


def moved(steps, init=0.2):
    return [init * math.exp(sum(steps[: i + 1])) for i in range(len(steps))]


@in_any_form
@pytest.mark.parametrize(
    ("make", "measured", "expected"),
    [
        # Error +1 is clipped to +.2: * 1.02; error +.1: * 1.05; error -1 is clipped to -.2: * .96.
        (ziegler, [(12.0, 10), (6.6, 50), (0.0, 20)], [0.204, 0.2142, 0.205632]),
        # The averages are 1, 0.5, 0.5 and 0.55: weights of the past 1/2, and its sums 1/2, 3/4, 7/8, 15/16. Nothing came
        # before: the integral term alone; -0.5 log 2 + 0, clipped; on the target, and not moving; (0.5 + 0.1) log 1.1.
        (lambda: pi(smoothing=0.5, max_step=0.1), [(x, 8) for x in (1.0, 0.25, 0.5, 0.59375)], moved(PI_STEPS)),
        # 0.05 * (KL / 0.5 - 1), the last clipped
        (lambda: dual(max_step=0.1), [(x, 8) for x in (0.75, 0.0, -0.1, 5.0)], moved(DUAL_STEPS)),
        # The warm-up holds it until the KL has risen, and is over for good: a KL of 0 counts as a tenth of the target.
        (lambda: pi(warmup=9, max_step=0.1), [(x, 8) for x in (0.0, 0.1, 0.24, 0.25, 0.0)], moved(RISEN)),
        # It ends: a coefficient too large for any KL must fall in the end.
        (lambda: pi(warmup=2, max_step=1.0), [(0.0, 8)] * 4, moved([0, 0, *[0.1 * math.log(0.1)] * 2])),
        (lambda: dual(warmup=2, max_step=1.0), [(0.0, 8)] * 4, moved([0, 0, -0.05, -0.05])),
    ],
    ids=["ziegler", "pi", "dual", "warm-up", "end of the warm-up of pi", "end of the warm-up of dual"],
)
def test_steps_by_hand(make, measured, expected, as_input):
    coefficient, seen = make(), []
    for kl, n in measured:
        seen += values(coefficient, [as_input(kl)], n)
    assert seen == pytest.approx(expected, rel=1e-6)


def test_the_softplus_of_the_dual_coefficient_by_hand():
    """The steps apply to log(e^x - 1). They are relative for x far below 1 and absolute for x far above 1."""
    step = math.exp(0.025)
    middle = math.log1p(math.expm1(0.2) * step)
    for init, want, rel in ((0.2, middle, 1e-6), (1e-3, 1e-3 * step, 1e-4), (90.0, 90.025, 1e-6)):
        assert values(dual(parametrisation="softplus", init=init), [0.75]) == pytest.approx([want], rel=rel)


@in_any_form
def test_steps_of_the_entropy_coefficient_by_hand(as_input):
    """It rises below the target, up to the upper bound, and falls above the target, where it returns 0."""
    coefficient, kept, used = entropy(init=0.03, high=0.06), [], []
    assert coefficient() == 0  # nothing measured
    for measured in (0.4, 0.1, 0.5, 0.7, 0.6, 9.0, 0.49):
        used += values(coefficient, [as_input(measured)])
        kept.append(coefficient.value.item())
    assert kept == pytest.approx([0.05, 0.06, 0.06, 0.04, 0.02, 0.01, 0.03], rel=1e-6)
    assert used == pytest.approx([0.05, 0.06, 0.06, 0.0, 0.0, 0.0, 0.03], rel=1e-6)
    coefficient = AdaptiveEntropyCoefficient()  # as in its paper
    assert values(coefficient, [0.19, 0.0])[-1] == pytest.approx(0.01)
    assert (coefficient.target, coefficient.low, coefficient.high) == (0.2, 0.0, 1.0)


def test_fixed_coefficient_is_constant():
    coefficient = FixedKLCoefficient(0.25)
    assert values(coefficient, [12.0, torch.tensor(math.nan)]) == [0.25, 0.25]
    assert list(coefficient.state_dict()) == ["value"]


def test_bounds_and_clipped_steps_do_not_wind_up_the_integral():
    coefficient = pi(proportional=0.0, low=0.15, high=0.3)
    assert values(coefficient, [50.0] * 40 + [0.25])[-2:] == pytest.approx([0.3, 0.3 * 0.5**0.1])
    assert values(coefficient, [0.0] * 40 + [1.0])[-2:] == pytest.approx([0.15, 0.15 * 2**0.1])


def test_a_runaway_kl_raises_the_coefficient_by_half():
    """The KL is above twice the target and does not fall. Without smoothing, the last batch is the average."""
    coefficient = pi()
    falling, below = 0.5 * math.log(1.1 / 1.3) + 0.1 * math.log(2.2), 0.1
    steps = [math.log(1.5), math.log(1.5), falling, math.log(1.5), -0.1]
    expected = [0.2 * math.exp(sum(steps[: i + 1])) for i in range(len(steps))]
    assert values(coefficient, [1.2, 1.3, 1.1, 1.1, 0.2]) == pytest.approx(expected)
    assert values(pi(max_step=2.0, integral=1.0), [50.0]) == pytest.approx([0.2 * math.exp(2.0)])  # larger than by half
    noisy = values(pi(smoothing=0.9), [0.5] * 20 + [1.1])  # the average is 0.57
    assert noisy[-1] < 0.2 * math.exp(0.1)
    assert values(pi(), [1.0]) == pytest.approx([0.2 * math.exp(below * math.log(2))])  # not above


# ------------------------------------------------------------------ step responses
TARGET = 0.5


def gaussian(beta):
    """The KL at the optimum of E[a x] - beta KL(N(m, 1) || N(0, 1)) with a = 0.1: m = a / beta, and the KL is m ** 2 / 2."""
    return (0.1 / beta) ** 2 / 2


def softmax(beta):
    """KL of the optimum pi_ref exp(r / beta) to pi_ref, over a vocabulary of three tokens."""
    log_ref = [math.log(p) for p in (0.2, 0.5, 0.3)]
    scores = [x + r / beta for x, r in zip(log_ref, (1.0, 0.0, 0.1), strict=True)]
    norm = max(scores) + math.log(sum(math.exp(x - max(scores)) for x in scores))
    return sum(math.exp(x - norm) * (x - norm - y) for x, y in zip(scores, log_ref, strict=True))


def at_target(equilibrium):
    """The coefficient with a KL of 0.5, by bisection of the falling function."""
    low, high = 1e-3, 1e3
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if equilibrium(middle) > TARGET else (low, middle)
    assert equilibrium(low) == pytest.approx(TARGET)
    return low


def response(coefficient, equilibrium, updates):
    """The KLs of a policy that starts at its reference. Each step covers a twentieth of the way to the current optimum."""
    kl, seen = 0.0, []
    for _ in range(updates):
        seen.append(kl)
        coefficient.update(kl, n=8)
        kl += (equilibrium(float(coefficient())) - kl) / 20
    return seen


#: Bounds of the peak, over the target, by the start, over the right coefficient; half of it would lead to 4 or 2.6.
DUAL_PEAKS = {0.5: 2.3, 1.0: 1.25, 4.0: 1.25}
CASES = {
    "pi": (PIKLCoefficient, {}, 140, {0.5: 1.5, 1.0: 1.01, 4.0: 1.01}),
    "dual": (DualKLCoefficient, {}, 220, DUAL_PEAKS),
    "softplus": (DualKLCoefficient, {"parametrisation": "softplus"}, 220, DUAL_PEAKS),
}


@pytest.mark.parametrize("equilibrium", [gaussian, softmax])
@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("case", CASES)
def test_step_response(case, factor, equilibrium):
    """With the default gains the KL settles on target. PI control overshoots only if the coefficient starts too small."""
    kind, settings, settles, peaks = CASES[case]
    wanted = at_target(equilibrium)
    coefficient = kind(wanted * factor, TARGET, **settings)
    seen = response(coefficient, equilibrium, settles + 80)
    assert max(seen) < peaks[factor] * TARGET
    assert max(abs(kl / TARGET - 1) for kl in seen[settles:]) < 0.02
    assert float(coefficient()) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(("equilibrium", "peak", "updates"), [(gaussian, 3.3, 15), (softmax, 2.05, 3)])
def test_a_coefficient_far_too_small_grows_quickly(equilibrium, peak, updates):
    """It starts at a fifth of the right value. With steps of 10 %, the peaks would be 4.4 and 2.1 times the target."""
    seen = response(PIKLCoefficient(at_target(equilibrium) / 5, TARGET), equilibrium, 260)
    assert max(seen) < peak * TARGET
    assert sum(kl > 2 * TARGET for kl in seen) < updates
    assert max(abs(kl / TARGET - 1) for kl in seen[220:]) < 0.02


@pytest.mark.parametrize("equilibrium", [gaussian, softmax])
def test_ziegler_overshoots_from_the_right_coefficient(equilibrium):
    """At a rate of 10 % per update, the coefficient falls while the KL rises from 0, and recovers late."""
    coefficient = AdaptiveKLCoefficient(at_target(equilibrium), TARGET, horizon=16)
    assert max(response(coefficient, equilibrium, 140)) > 1.5 * TARGET


def test_the_mean_of_a_noisy_kl_is_on_target():
    """The noise of 128 answers is a fifth of the KL. Averaging keeps it out of the coefficient."""
    rng, coefficient = torch.Generator().manual_seed(0), PIKLCoefficient(0.1, TARGET)
    kl, seen, used = 0.5, [], []
    for noise in torch.randn(600, generator=rng):
        coefficient.update(kl * (1 + 0.2 * noise), n=128)
        kl += (gaussian(float(coefficient())) - kl) / 10
        seen.append(kl)
        used.append(float(coefficient()))
    assert sum(seen) / len(seen) == pytest.approx(TARGET, rel=0.03)
    assert max(used) / min(used) < 2


# ------------------------------------------------------------------ state, dtypes, devices
AVERAGING = ["value", "average", "mass", "warmup_left"]
STATE = {ziegler: ["value"], pi: AVERAGING, dual: AVERAGING, entropy: ["value", "entropy"]}


@each_kind
@pytest.mark.parametrize("at", [1, 4])
def test_a_restored_coefficient_goes_on_bit_for_bit(make, at):
    """The state is saved during the warm-up, if there is one, or after it."""
    measured = [0.1, 0.2, 0.3, 0.7, 0.4, 0.6, 0.55]
    changes = {"smoothing": 0.7, "warmup": 3} if make in (pi, dual) else {}
    whole, first, second = (make(**changes) for _ in range(3))
    values(whole, measured)
    values(first, measured[:at])
    assert list(first.state_dict()) == STATE[make]
    second.load_state_dict(first.state_dict())
    values(second, measured[at:])
    assert_close(second.state_dict(), whole.state_dict(), rtol=0, atol=0)


@each_kind
def test_copies_casts_and_devices(make):
    """Copies are independent, the state stays float32 in a half-precision model, and nothing is read on the host."""
    for duplicate in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        source = make()
        other = duplicate(source)
        update(other, 5.0)
        assert float(source()) == pytest.approx(0.2) != float(other())
    for cast in (nn.Module.half, nn.Module.bfloat16, lambda m: m.to(torch.bfloat16)):
        model = cast(nn.ModuleDict({"layer": nn.Linear(1, 1), "coeff": make()}))
        update(model["coeff"], torch.tensor(0.5001))
        assert model["layer"].weight.dtype != torch.float32
        assert {buffer.dtype for buffer in model["coeff"].buffers()} == {torch.float32}
    assert make().double()().dtype == torch.float64
    meta = make().to("meta")  # reading its tensors would raise
    update(meta, torch.tensor(0.3, device="meta"), torch.tensor(8, device="meta") if make in (pi, dual) else 8)
    assert (meta().device.type, meta().shape) == ("meta", ())


@each_kind
def test_an_update_between_forward_and_backward(make):
    coefficient, measured = make(), torch.tensor(3.0, requires_grad=True)
    loss = coefficient() * measured
    update(coefficient, measured)
    loss.backward()
    assert_close(measured.grad, torch.tensor(0.2))
    assert float(coefficient()) != pytest.approx(0.2)
    assert not coefficient.value.requires_grad


@each_kind
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_must_be_finite_and_infinite_tensors_change_nothing(make, bad):
    coefficient = make()
    update(coefficient, 0.3)
    before = copy.deepcopy(coefficient.state_dict())
    with pytest.raises(ValueError, match=f"current_{'entropy' if make is entropy else 'kl'} is {bad}"):
        update(coefficient, bad)
    update(coefficient, torch.tensor(bad))
    assert all(torch.equal(before[name], now) for name, now in coefficient.state_dict().items())


test_bad_updates = refused(
    lambda make, arguments: make().update(*arguments),
    (ziegler, (0.0, -1), r"n=-1 with horizon=100: expected 0 <= n < 5 \* horizon"),  # it could flip the sign
    (ziegler, (0.0, 500), r"n=500 with horizon=100: expected 0 <= n < 5 \* horizon"),
    (pi, (0.5, -1), "n is -1, expected the number of samples"),
    (pi, (0.5, math.nan), "n is nan"),
)


def test_no_samples_change_nothing_and_ranks_need_a_group():
    for make, n in ((pi, 0), (pi, torch.tensor(0)), (ziegler, 0)):
        coefficient = make()
        values(coefficient, [torch.tensor(math.nan), torch.tensor(9.0)], n)
        assert coefficient.state_dict() == make().state_dict()
    assert values(pi(), [0.9, 0.7], 1) == values(pi(), [0.9, 0.7], 100), "one sample is a mean too"
    with pytest.raises(ValueError, match="process group has not been initialized"):
        pi().update(0.5, 1, all_ranks=True)


test_bad_settings = refused(
    lambda make, changes: make(**changes),
    (ziegler, {"init": -0.1}, "init must be at least 0, got -0.1"),
    (ziegler, {"horizon": math.inf}, "horizon must be greater than 0 and less than inf, got inf"),
    (pi, {"target": math.inf}, "target must be greater than 0 and less than inf, got inf"),
    (dual, {"rate": math.inf}, "rate must be greater than 0 and less than inf, got inf"),
    (ziegler, {"horizon": 0}, "horizon must be greater than 0 and less than inf, got 0"),
    (pi, {"init": 0.0}, "init must be greater than 0 and less than inf, got 0.0"),
    (pi, {"low": 0.3}, "expected 0 <= low <= init <= high, got low=0.3, init=0.2 and high=100"),
    (dual, {"target": math.nan}, "target must be greater than 0 and less than inf, got nan"),
    (pi, {"smoothing": 1.0}, "smoothing must be at least 0 and less than 1, got 1.0"),
    (dual, {"warmup": -1}, "warmup must be at least 0, got -1"),
    (dual, {"parametrisation": "exp"}, "parametrisation must be one of 'log', 'softplus', got 'exp'"),
    (entropy, {"init": 0.7}, "expected 0 <= low <= init <= high, got low=0.01, init=0.7 and high=0.6"),
)


test_as_coefficient_of_invalid_input = refused(
    as_coefficient,
    (nn.Parameter(torch.tensor(0.1)), "requires grad"),
    (math.nan, "must be a finite number of at least 0, got nan"),
    (True, TypeError, "must be a number, a tensor or a module, got True"),
    (torch.tensor([-0.5]), r"at least 0, got -0.5: .* Pass FixedKLCoefficient\(-0.5\) if that is"),
)


def test_as_coefficient_of_numbers_and_modules():
    for coeff in (1, 0.5, 0, torch.tensor(0.5), torch.tensor([0.5], dtype=torch.float64)):
        module = as_coefficient(coeff)
        assert isinstance(module, FixedKLCoefficient)
        assert (module().shape, module().item()) == ((), float(coeff))
        assert as_coefficient(module) is module


def test_registered_controllers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_coefficients._CONTROLLERS, "data", dict(_coefficients._CONTROLLERS))
    kinds = {"pi": PIKLCoefficient, "dual": DualKLCoefficient, "ziegler": AdaptiveKLCoefficient}
    assert {name: estimators.get_controller(name) for name in kinds} == kinds

    @estimators.controller("held")
    def held(init: float, target: float) -> FixedKLCoefficient:
        return FixedKLCoefficient(init * target)

    assert float(estimators.get_controller("held")(0.5, 4.0)()) == 2.0
    with pytest.raises(ValueError, match=r"unknown KL controller 'helt'\. Did you mean 'held'"):
        estimators.get_controller("helt")
