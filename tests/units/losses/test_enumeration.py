"""Expectations as sums over every token of a small vocabulary. There is no sampling noise, only rounding."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from by_hand import called
from torchrl_llm_kl.losses import get_objective

#: Seeds and sizes of the vocabulary.
DRAWS = [(7 * i, 5 + i % 3) for i in range(6)]


class Bandit:
    """One position with old and new logits, and an advantage for each token."""

    def __init__(self, seed: int, vocab: int, distance: float) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.old_logits, step, self.advantage = torch.randn(3, vocab, generator=rng, dtype=torch.float64).unbind()
        self.logits = (self.old_logits + distance * step.clamp(-2, 2)).requires_grad_()
        self.old, self.policy = self.old_logits.softmax(-1), self.logits.softmax(-1)

    def mean_gradient(self, name: str, **hyper: Any) -> Tensor:
        """The mean gradient of an objective over tokens of the old policy. Each token is a whole sequence."""
        inputs = [self.logits.log_softmax(-1), self.old_logits.log_softmax(-1), self.advantage]
        log_prob, old, advantage = (x.unsqueeze(-1) for x in inputs)
        mask = torch.ones_like(log_prob, dtype=torch.bool)
        (term,) = called(get_objective(name), log_prob, mask, old_log_prob=old, advantage=advantage, **hyper)
        return self.gradient((self.old * term.value.squeeze(-1)).sum())

    def gradient(self, loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, self.logits, retain_graph=True)[0]

    def policy_gradient(self) -> Tensor:
        """The gradient of minus the current policy's expected advantage."""
        return self.gradient(-(self.policy * self.advantage).sum())


#: Objectives whose mean gradient is the policy gradient: on policy, off policy, and off policy but inside their bounds.
ON_POLICY: list[tuple[str, dict[str, Any]]] = [
    *[(name, {}) for name in ("ppo", "dapo", "dr_grpo", "luspo", "gmpo", "sppo", "importance_sampling", "gpg")],
    *[(name, {}) for name in ("vespo", "kl_cov")],
    ("ppo_on_policy", {}),
    *[(name, {"level": level}) for name in ("gspo", "topr", "dro") for level in ("token", "sequence")],
    ("dro", {"beta": 0.7}),
    ("cispo", {"enable_mask_clip": True}),
    ("sapo", {"tau_pos": 0.5, "tau_neg": 2.0}),
    *[("dppo", {"divergence": divergence}) for divergence in ("tv", "kl")],
    ("clip_cov", {"cov_low": 100.0, "cov_high": 200.0}),
    *[("rec", {"clip_mode": mode}) for mode in ("none", "one-side", "two-side", "ring", "gspo-one-side")],
    *[("rec", {"weight": weight}) for weight in ("importance_sampling", "gspo_importance_sampling")],
    ("rec", {"regularizer": "k2", "regularizer_coef": 0.7}),
]
OFF_POLICY: list[tuple[str, dict[str, Any]]] = [
    ("importance_sampling", {}),
    ("rec", {"weight": "importance_sampling"}),
    ("rec", {"weight": "gspo_importance_sampling"}),  # of one token, whose geometric mean is its ratio
    ("cispo", {"clip_high": 1e6}),
    ("dppo", {"clip_low": 1.0, "clip_high": 1.0, "clip_ratio_c": None}),
    ("ppo", {"clip_low": 1.0, "clip_high": 1e6, "clip_ratio_c": None}),
]
# Logits within 0.08: ratios within exp(0.16) = 1.174.
INSIDE = [(name, {}) for name in ("ppo", "dapo", "dr_grpo")]


@pytest.mark.parametrize(
    ("name", "hyper", "distance"),
    [(*case, distance) for cases, distance in ((ON_POLICY, 0.0), (OFF_POLICY, 1.0), (INSIDE, 0.04)) for case in cases],
)
def test_the_mean_gradient_is_the_policy_gradient(name: str, hyper: dict[str, Any], distance: float) -> None:
    for seed, vocab in DRAWS:
        bandit = Bandit(seed, vocab, distance)
        assert_close(bandit.mean_gradient(name, **hyper), bandit.policy_gradient(), rtol=1e-9, atol=1e-12)
