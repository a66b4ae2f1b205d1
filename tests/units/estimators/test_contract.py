"""The contract table, verified by sums over a whole vocabulary. Nothing is sampled, so the tolerance covers only rounding."""

import re
import warnings
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close

from torchrl_llm_kl import estimators
from torchrl_llm_kl._registry import UnknownNameError
from torchrl_llm_kl.estimators import KLPlacementWarning, available_estimators, check_placement, get_estimator

CONTRACT = {contract.name: contract for contract in estimators.contracts()}
PER_TOKEN = [name for name in CONTRACT if name != "exact"]
COMPUTABLE = [key for key in estimators.QUANTITIES if key not in ("chosen", "none")]
each_estimator = pytest.mark.parametrize("name", PER_TOKEN)
any_distributions = given(seed=st.integers(0, 2**32 - 1), vocab=st.integers(2, 9))
quick = settings(max_examples=12, deadline=None)


class Setting:
    """A policy p whose logits require grad, a reference q and a sampler, for one token."""

    def __init__(self, logits_p, logits_q, other):
        self.logits = logits_p.double().requires_grad_()
        self.log_p = self.logits.log_softmax(-1)
        self.log_q = logits_q.double().log_softmax(-1)
        self.p = self.log_p.detach().exp()
        # At least 0.6 p, so that no ratio p / sampler reaches the clamp at 2.
        self.sampler = 0.6 * self.p + 0.4 * other.double().softmax(-1)

    @classmethod
    def drawn(cls, seed, vocab):
        # Logits inside +-0.6 keep |log p - log q| below 2.4: no clamp of low_var_kl is active (the nearest is at 2.61).
        rng = torch.Generator().manual_seed(seed)
        p, q = 1.2 * torch.rand(2, vocab, generator=rng, dtype=torch.float64) - 0.6
        return cls(p, q, torch.randn(vocab, generator=rng))

    def quantity(self, key):
        p, log_p, log_q = self.log_p.exp(), self.log_p, self.log_q
        reverse, forward = (p * (log_p - log_q)).sum(), (log_q.exp() * (log_q - log_p)).sum()
        return {
            "zero": 0.0 * self.logits.sum(),
            "reverse": reverse,
            "forward": forward,
            "total_variation": (p - log_q.exp()).abs().sum(),
            "reverse_minus_forward": reverse - forward,
            "minus_sampler": -(self.sampler * (self.sampler.log() - log_p)).sum(),
        }[key]

    def gradient(self, scalar):
        if not scalar.requires_grad:
            return torch.zeros_like(self.logits)
        return torch.autograd.grad(scalar, self.logits, retain_graph=True)[0]

    def means(self, name):
        """The estimator's mean under the policy and under the sampler, and the surrogate of its policy gradient as a reward."""
        on = get_estimator(name)(self.log_p, self.log_q, self.log_p.detach())
        off = get_estimator(name)(self.log_p, self.log_q, self.sampler.log())
        return (self.p * on).sum(), (self.sampler * off).sum(), (self.p * on.detach() * self.log_p).sum()


# Three tokens without near ties: a promise that is not made must fail visibly here.
FIXED = Setting(torch.tensor([0.5, -0.4, 0.1]), torch.tensor([-0.5, 0.3, 0.55]), torch.tensor([2.0, 0.0, -1.0]))


def test_the_table_and_the_type_have_every_name_once():
    """The type lets a type checker report ``get_estimator("k9")``."""
    assert tuple(CONTRACT) == available_estimators()
    assert get_args(estimators.EstimatorName) == available_estimators()
    assert get_estimator("exact") is estimators.exact_kl  # its values and gradients: test_exact.py
    assert issubclass(estimators.UnknownEstimatorError, UnknownNameError)


@each_estimator
@quick
@any_distributions
def test_promised_values_and_gradients(name, seed, vocab):
    """The gradients of a loss, on-policy and off-policy, and the policy gradient of a reward."""
    case, contract = Setting.drawn(seed, vocab), CONTRACT[name]
    on, off, reward = case.means(name)
    for unbiased, mean in ((contract.unbiased, on), (contract.unbiased_off_policy, off)):
        if unbiased:
            assert_close(mean, case.quantity("reverse"))
    gradients = contract.loss_gradient, contract.loss_gradient_off_policy, contract.reward_gradient
    for key, mean in zip(gradients, (on, off, reward), strict=True):
        if key != "none":
            assert_close(case.gradient(mean), case.gradient(case.quantity(key)))


@each_estimator
def test_every_no_of_the_contract_table(name):
    """A "no" is a claim too, because it makes users choose another estimator."""
    contract, kl = CONTRACT[name], FIXED.quantity("reverse")
    on, off, reward = FIXED.means(name)
    assert contract.unbiased or abs(on - kl) > 1e-3
    assert contract.unbiased_off_policy or abs(off - kl) > 1e-3
    gradients = contract.loss_gradient, contract.loss_gradient_off_policy, contract.reward_gradient
    for key, scalar in zip(gradients, (on, off, reward), strict=True):
        if key == "none":
            for other in COMPUTABLE:
                distance = (FIXED.gradient(scalar) - FIXED.gradient(FIXED.quantity(other))).abs().max()
                assert distance > 1e-3, other


@pytest.mark.parametrize(("name", "logit", "bias_sign"), [("low_var_kl", -5.0, -1), ("corrected_k3", 5.0, -1)])
def test_an_active_clamp_breaks_both_promises(name, logit, bias_sign):
    """This is why the table says "while no clamp is active"."""
    case = Setting(torch.tensor([logit, 0.0]), torch.zeros(2), torch.zeros(2))
    # Nearly all of the sampler's mass is off the policy's favourite token: the ratio there is about 15.
    case.sampler = torch.tensor([0.05, 0.95], dtype=torch.float64) if name == "corrected_k3" else case.p
    _, mean, _ = case.means(name)
    assert (mean - case.quantity("reverse")) * bias_sign > 1e-3
    for key in ("reverse", "forward"):
        assert (case.gradient(mean) - case.gradient(case.quantity(key))).abs().max() > 1e-3


OUT_OF_PLACE = {
    "loss": {
        "k1": "its mean gradient is zero.*Use 'k2'",
        "k3": "its mean gradient belongs to the forward KL.*'k3\\+'",
        "low_var_kl": "its mean gradient belongs to the forward KL",
        "abs": "its mean gradient belongs to the total variation",
        "corrected_k3": "it is clamped.*nothing pulls back.*Use 'k2'",
    },
    "reward": dict.fromkeys(set(CONTRACT) - {"none", "k1", "k1+"}, "detached.*Use 'k1'"),
}


@pytest.mark.parametrize(("place", "warns"), OUT_OF_PLACE.items())
def test_an_estimator_out_of_place_warns_and_others_do_not(place, warns):
    """An estimator is in place if its gradient in a loss, or its policy gradient in a reward, is the reverse KL's."""
    for name, message in warns.items():
        said = f"'{re.escape(name)}' in the {place}: {message}"
        with pytest.warns(KLPlacementWarning, match=said) as caught:
            check_placement(name, place, stacklevel=1)
        assert [Path(each.filename).name for each in caught] == [Path(__file__).name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", KLPlacementWarning)
        for estimator in (*(set(CONTRACT) - set(warns)), get_estimator("k3"), None):
            check_placement(estimator, place)
