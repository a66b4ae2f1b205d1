"""Hand-computed values and gradients; clamps, dtypes, shapes and names."""

import copy
import math
import pickle

import pytest
import torch
from torch.testing import assert_close

from torchrl_llm_kl import estimators, losses
from torchrl_llm_kl.estimators import _per_token, available_estimators, corrected_k3, get_estimator, k3, low_var_kl

PER_TOKEN = [name for name in available_estimators() if name != "exact"]
E = math.e
#: Bounds of low_var_kl: of the log-ratio, of the value; and of corrected_k3.
LOG_RATIO, VALUE, RATIO, INF = "log_ratio_clamp", "value_clamp", "ratio_max", math.inf


@pytest.mark.parametrize(
    ("name", "log_probs", "clamps", "value", "gradient"),
    [
        ("k1", (-1.0, -1.5), {}, 0.5, 1.0),
        ("k1", (-2.0, -1.0), {}, -1.0, 1.0),
        ("k2", (-1.0, -1.5), {}, 0.125, 0.5),
        ("k2", (-2.0, -1.0), {}, 0.5, -1.0),
        ("k3", (-2.0, -1.0), {}, E - 2, 1 - E),
        ("k3", (-1.0, -2.0), {}, 1 / E, 1 - 1 / E),
        ("abs", (-1.0, -1.5), {}, 0.5, 1.0),
        ("abs", (-2.0, -1.0), {}, 1.0, -1.0),
        ("abs", (-2.0, -2.0), {}, 0.0, 0.0),
        ("k1+", (-2.0, -1.0), {}, -1.0, -1.0),
        ("k2+", (-2.0, -1.0), {}, 0.5, -1.0),
        ("k3+", (-2.0, -1.0), {}, E - 2, -1.0),
        ("abs+", (-1.0, -3.0), {}, 2.0, 2.0),
        ("low_var_kl", (-2.0, -1.0), {}, E - 2, 1 - E),
        ("low_var_kl", (-1.0, -2.0), {}, 1 / E, 1 - 1 / E),
        ("low_var_kl", (-4.0, 0.0), {}, 10.0, 0.0),  # k3 would be 49.598
        ("low_var_kl", (-2.62, 0.0), {}, 10.0, 0.0),
        ("low_var_kl", (-2.6, 0.0), {}, 9.863738, -12.463738),  # e**2.6 = 13.463738: just inside
        ("low_var_kl", (10.9, 0.0), {}, 9.900018, 0.999982),  # e**-10.9 = 1.8458e-5
        ("low_var_kl", (12.0, 0.0), {}, 10.0, 0.0),
        ("low_var_kl", (-1000.0, 0.0), {}, 10.0, 0.0),
        ("low_var_kl", (1000.0, 0.0), {}, 10.0, 0.0),
        ("low_var_kl", (-25.0, 0.0), {VALUE: INF}, 485165195.40979 - 21, 0.0),  # the log-ratio is clamped at 20
        ("low_var_kl", (-25.0, 0.0), {LOG_RATIO: 2.0, VALUE: INF}, 4.3890561, 0.0),  # e**2 - 3
        # e**.5 - 1.5; with the two exchanged it would be 0.5
        ("low_var_kl", (-3.0, 0.0), {LOG_RATIO: 0.5, VALUE: 1.0}, 0.1487213, 0.0),
        ("low_var_kl", (3.0, 0.0), {LOG_RATIO: 1.0, VALUE: 9.0}, 0.3678794, 0.0),  # e**-1
        ("low_var_kl", (-1.0, 0.0), {LOG_RATIO: 2.0, VALUE: 0.5}, 0.5, 0.0),
        ("low_var_kl", (-5.0, 0.0), {LOG_RATIO: INF, VALUE: INF}, 142.4131591, -147.4131591),  # e**5 = 148.4131591
        ("corrected_k3", (-2.0, -1.0, -2.0), {RATIO: 2.0}, 0.7182818, -1.0),  # r = 1: k3 + k3' = (e - 2) + (1 - e)
        ("corrected_k3", (-2.0, -1.0, -2.5), {RATIO: 2.0}, 1.1842472, -1.6487213),  # r = e**.5 = 1.6487213
        ("corrected_k3", (-2.0, -1.0, -1.5), {RATIO: 2.0}, 0.4356600, -0.6065307),  # r = e**-.5 = 0.6065307
        ("corrected_k3", (-2.0, -1.0, -4.0), {RATIO: 2.0}, 1.4365637, -3.4365637),  # 7.389: 2 (e - 2) and 2 (1 - e)
        ("corrected_k3", (-2.0, -1.0, -2.5), {RATIO: 1.2}, 0.8619382, -2.0619382),
        ("corrected_k3", (-2.0, -1.0, -4.0), {RATIO: INF}, 5.3074245, -7.3890561),
        # The ratio overflows; its clamp must not make NaN of the gradient.
        ("corrected_k3", (-2.0, -1.0, -2000.0), {RATIO: 2.0}, 1.4365637, -3.4365637),
        # A clamp of the base leaves the straight-through gradient.
        ("low_var_kl+", (-5.0, -1.0, -9.0), {}, 10.0, -4.0),
        ("low_var_kl+", (-5.0, -1.0, -9.0), {VALUE: 3.0}, 3.0, -4.0),
        ("corrected_k3+", (-5.0, -1.0, -9.0), {}, 2 * (E**4 - 5), -4.0),
    ],
)
def test_by_hand(name, log_probs, clamps, value, gradient):
    """``log_probs`` of one token are the policy's, the reference's and the sampler's."""
    log_prob, *others = (torch.tensor([x], dtype=torch.float64) for x in log_probs)
    found = get_estimator(name)(log_prob.requires_grad_(), *others, **clamps)
    slope = torch.autograd.grad(found.sum(), log_prob)[0]
    assert (found.item(), slope.item()) == pytest.approx((value, gradient), rel=1e-6)


def test_what_is_refused():
    for name in ("corrected_k3", "corrected_k3+"):
        with pytest.raises(ValueError, match=r"needs old_log_prob.*log_prob\.detach\(\)"):
            get_estimator(name)(torch.zeros(2), torch.zeros(2))
    for function, name in ((low_var_kl, LOG_RATIO), (low_var_kl, VALUE), (corrected_k3, "ratio_max")):
        for bound in (0.0, -1.0, math.nan):
            with pytest.raises(ValueError, match=f"{name} must be greater than 0, got {bound}"):
                function(*torch.zeros(3, 1), **{name: bound})


def test_k3_of_nearly_equal_models_is_not_negative():
    """The formula ``exp(d) - 1 - d`` would round to -6e-8 for about a quarter of these."""
    d = torch.logspace(-9, -2, 10_001)
    for sign in (1, -1):
        assert k3(sign * d, torch.zeros_like(d)).min() >= 0


@pytest.mark.parametrize("name", PER_TOKEN)
def test_promises_of_every_estimator(name):
    """Equal models give exactly 0. Dtypes and shapes are kept, half precision is widened, and nothing broadcasts."""
    estimator = get_estimator(name)
    log_prob = -100 * torch.rand(257, generator=torch.Generator().manual_seed(0))
    assert torch.equal(estimator(log_prob, log_prob, log_prob), torch.zeros(257))
    # Both are exact in either dtype, so the float64 result is the truth; rounding it to bfloat16 costs 4e-3.
    for dtype in (torch.float16, torch.bfloat16):
        args = [torch.tensor([x], dtype=dtype) for x in (-8.0, -8.0625, -8.25)]
        got = estimator(*args)
        assert got.dtype == torch.float32
        assert_close(got.double(), estimator(*(x.double() for x in args)), rtol=1e-4, atol=0)
        assert name != "none" or not estimator(args[0].requires_grad_(), args[1]).requires_grad
        if name == "k3":
            assert got.item() == pytest.approx(0.001913063, rel=1e-4)  # e**-.0625 = 0.939413063
    wide, narrow = torch.zeros(2, 3, 4, dtype=torch.float64), torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    got = estimator(narrow, wide, wide)
    assert (got.shape, got.dtype) == ((2, 3, 4), torch.float64)
    with pytest.raises(ValueError, match=r"log_prob has shape \(2, 3, 4\) but ref_log_prob has shape \(2, 3, 1\)"):
        estimator(wide, wide[..., :1], wide)
    with pytest.raises(ValueError, match=r"log_prob has shape \(2, 3, 4\) but old_log_prob has shape \(3, 4\)"):
        estimator(wide, wide, wide[0])


def test_names():
    for name in available_estimators():
        estimator = get_estimator(name)
        assert get_estimator(name) is estimator
        assert pickle.loads(pickle.dumps(estimator)) == copy.deepcopy(estimator) == estimator
    base = {"k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3"}
    assert set(available_estimators()) == {"none", "exact"} | base | {f"{name}+" for name in base}
    assert get_estimator("k3+") == estimators.StraightThrough(k3)


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(estimators.UnknownEstimatorError, match=r"unknown KL estimator 'K3 \+'\. Did you mean 'k3\+'"):
        get_estimator("K3 +")


def test_a_user_estimator_works_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It works by name, with a ``+`` for the gradient of k2, and warns according to its contract."""
    monkeypatch.setattr(_per_token._REGISTRY, "data", dict(_per_token._REGISTRY))
    monkeypatch.setattr(_per_token, "_CONTRACTS", dict(_per_token._CONTRACTS))

    @estimators.estimator(estimators.EstimatorContract("fourth", False, "zero", "none"))
    def fourth(log_prob, ref_log_prob, old_log_prob=None):
        return (log_prob - ref_log_prob) ** 4

    assert {"fourth", "fourth+"} < set(estimators.available_estimators())
    log_prob = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    inputs = losses.LossInputs(log_prob, log_prob < 0, ref_log_prob=torch.tensor([[-1.5, -1.0]]))
    for name, gradient in (("fourth", [0.5, -4.0]), ("fourth+", [0.5, -1.0])):
        (term,) = losses.kl_to_ref(inputs, estimator=name)
        assert term.value.tolist() == [[0.0625, 1.0]]
        assert torch.autograd.grad(term.value.sum(), log_prob, retain_graph=True)[0].tolist() == [gradient]
    with pytest.warns(estimators.KLPlacementWarning, match="'fourth' in the loss: its mean gradient is zero"):
        losses.KLToReference(0.1, "fourth")
    with pytest.raises(ValueError, match="the KL estimator 'k2' is registered already"):
        estimators.estimator(estimators.EstimatorContract("k2", False, "zero", "none"))(fourth)
