"""Statements about expectations, from every token of a small vocabulary instead of samples: no noise, only rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from torchrl_llm_kl.losses import get_objective

#: Seeds and sizes of the vocabulary.
DRAWS = [(7 * i, 5 + i % 3) for i in range(6)]
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


class Bandit:
    """One position: old and new logits, and an advantage for each token."""

    def __init__(self, seed: int, vocab: int, distance: float) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.old_logits, step, self.advantage = torch.randn(3, vocab, generator=rng, dtype=torch.float64).unbind()
        self.logits = (self.old_logits + distance * step.clamp(-2, 2)).requires_grad_()
        self.old = self.old_logits.softmax(-1)

    @property
    def policy(self) -> Tensor:
        return self.logits.softmax(-1)

    def mean_gradient(self, name: str, **hyper: Any) -> Tensor:
        """Of an objective, over tokens of the old policy. Each token is a sequence of its own."""
        inputs = {
            "log_prob": self.logits.log_softmax(-1),
            "old_log_prob": self.old_logits.log_softmax(-1),
            "advantage": self.advantage,
        }
        mask = torch.ones_like(self.advantage, dtype=torch.bool).unsqueeze(-1)
        (term,) = get_objective(name)(mask=mask, **{key: x.unsqueeze(-1) for key, x in inputs.items()}, **hyper)
        return self.gradient((self.old * term.value.squeeze(-1)).sum())

    def gradient(self, loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, self.logits)[0]

    def policy_gradient(self) -> Tensor:
        """Of minus the expected advantage of the current policy."""
        return self.gradient(-(self.policy * self.advantage).sum())

    def weighted(self, weight: Tensor) -> Tensor:
        """The gradient of log-probs with these weights, in terms of the softmax: sum_i w_i (p - e_i) for -w_i log p_i."""
        weight = weight.detach()
        return weight.sum() * self.policy.detach() - weight


ON_POLICY: list[tuple[str, dict[str, Any]]] = [
    ("ppo", {}),
    ("ppo", {"fallback_to_policy_gradient": True}),
    ("dapo", {}),
    ("dr_grpo", {}),
    ("gspo", {"level": "token"}),
    ("gspo", {"level": "sequence"}),
    ("luspo", {}),
    ("dro", {"beta": 0.7}),
    ("dro", {"beta": 0.7, "level": "sequence"}),
    ("gmpo", {}),
    ("cispo", {"enable_mask_clip": True}),
    ("topr", {}),
    ("topr", {"level": "sequence"}),
    ("sppo", {}),
    ("sapo", {"tau_pos": 0.5, "tau_neg": 2.0}),
    ("importance_sampling", {}),
    ("gpg", {}),
    ("vespo", {}),
    ("dppo", {"divergence": "tv"}),
    ("dppo", {"divergence": "kl"}),
    ("clip_cov", {"cov_low": 100.0, "cov_high": 200.0}),
    ("kl_cov", {}),
    *[("rec", {"clip_mode": mode}) for mode in ("none", "one-side", "two-side", "ring", "gspo-one-side")],
    *[("rec", {"weight": weight}) for weight in ("importance_sampling", "gspo_importance_sampling")],
    ("rec", {"regularizer": "k2", "regularizer_coef": 0.7}),
]


@pytest.mark.parametrize(("name", "hyper"), ON_POLICY)
def test_on_policy_it_is_the_policy_gradient(name: str, hyper: dict[str, Any]) -> None:
    for seed, vocab in DRAWS:
        bandit = Bandit(seed, vocab, distance=0.0)
        assert_close(bandit.mean_gradient(name, **hyper), bandit.policy_gradient(), **CLOSE)


def test_opmd_is_a_fraction_of_it() -> None:
    for (seed, vocab), tau in zip(DRAWS, (0.0, 0.1, 0.5, 1.0, 2.3, 5.0), strict=True):
        bandit = Bandit(seed, vocab, distance=0.0)
        assert_close(bandit.mean_gradient("opmd", tau=tau) * (1 + tau), bandit.policy_gradient(), **CLOSE)


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("importance_sampling", {}),
        ("rec", {"weight": "importance_sampling"}),
        # A sequence of one token: its geometric mean is its ratio.
        ("rec", {"weight": "gspo_importance_sampling"}),
        ("cispo", {"clip_high": 1e6}),
        ("dppo", {"clip_low": 1.0, "clip_high": 1.0, "clip_ratio_c": None}),
        ("ppo", {"clip_low": 1.0, "clip_high": 1e6, "clip_ratio_c": None}),
    ],
)
def test_off_policy_it_is_the_policy_gradient(name: str, hyper: dict[str, Any]) -> None:
    """Of the current policy, from tokens of another one, unbiased."""
    for seed, vocab in DRAWS:
        bandit = Bandit(seed, vocab, distance=1.0)
        assert_close(bandit.mean_gradient(name, **hyper), bandit.policy_gradient(), **CLOSE)


@pytest.mark.parametrize("name", ["ppo", "dapo", "dr_grpo"])
def test_inside_its_bounds_so_is_ppo(name: str) -> None:
    for seed, vocab in DRAWS:
        bandit = Bandit(seed, vocab, distance=0.04)  # logits within 0.08: ratios within exp(0.16) = 1.174
        assert_close(bandit.mean_gradient(name), bandit.policy_gradient(), **CLOSE)


@pytest.mark.parametrize(("name", "factor"), [("gpg", 1.0), ("opmd", 0.5), ("rec", 1.0)])
def test_without_a_ratio_it_imitates_the_old_policy_by_advantage(name: str, factor: float) -> None:
    for seed, vocab in DRAWS:
        bandit = Bandit(seed, vocab, distance=1.0)
        assert_close(bandit.mean_gradient(name), factor * bandit.weighted(bandit.old * bandit.advantage), **CLOSE)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_topr_pushes_down_with_the_lesser_probability(level: str) -> None:
    for seed, vocab in DRAWS:
        bandit = Bandit(seed, vocab, distance=1.0)
        lesser = torch.minimum(bandit.policy, bandit.old)
        weight = torch.where(bandit.advantage > 0, bandit.old, lesser) * bandit.advantage
        assert_close(bandit.mean_gradient("topr", level=level), bandit.weighted(weight), **CLOSE)


@pytest.mark.parametrize("seed", range(5))
def test_topr_of_a_sequence_pushes_down_with_the_lesser_probability_of_all_of_it(seed: int) -> None:
    """All sequences of two independent tokens, all of them bad."""
    rng = torch.Generator().manual_seed(seed)
    old_logits, step = torch.randn(2, 2, 3, generator=rng, dtype=torch.float64).unbind()
    logits = (old_logits + step).requires_grad_()
    tokens = torch.cartesian_prod(torch.arange(3), torch.arange(3))

    def log_probs(logits: Tensor) -> Tensor:
        return torch.stack([logits.log_softmax(-1)[position, tokens[:, position]] for position in range(2)], -1)

    log_prob, old = log_probs(logits), log_probs(old_logits)
    advantage = -torch.rand(9, 1, generator=rng, dtype=torch.float64).expand(9, 2) - 0.1
    mask = torch.ones(9, 2, dtype=torch.bool)
    (term,) = get_objective("topr")(log_prob, mask, old_log_prob=old, advantage=advantage, level="sequence")
    p, q = log_prob.sum(-1).exp(), old.sum(-1).exp()
    (got,) = torch.autograd.grad((q[:, None] * term.value).sum(), logits, retain_graph=True)
    lesser = torch.minimum(p, q).detach()
    (want,) = torch.autograd.grad(-(lesser * advantage[:, 0] * log_prob.sum(-1)).sum(), logits)
    assert_close(got, want, **CLOSE)


def test_cispo_never_weighs_more_than_its_bound() -> None:
    for seed, vocab in DRAWS:
        bandit = Bandit(seed, vocab, distance=1.0)
        bounded = torch.minimum(bandit.policy, 1.28 * bandit.old)
        assert_close(bandit.mean_gradient("cispo"), bandit.weighted(bounded * bandit.advantage), **CLOSE)


def test_recs_forward_kl_is_the_kl_of_the_old_policy_to_the_new() -> None:
    for seed, vocab in DRAWS:
        bandit = Bandit(seed, vocab, distance=1.0)
        got = bandit.mean_gradient("rec", regularizer="forward-kl", regularizer_coef=0.3) - bandit.mean_gradient("rec")
        kl = (bandit.old * (bandit.old.log() - bandit.policy.log())).sum()
        assert_close(got, 0.3 * bandit.gradient(kl), **CLOSE)


def test_vespo_weighs_by_a_gamma_density() -> None:
    for seed, vocab in DRAWS:
        bandit = Bandit(seed, vocab, distance=1.0)
        w = bandit.policy / bandit.old
        density = torch.where(bandit.advantage > 0, w**2 * (3 - 3 * w).exp(), w**3 * (2 - 2 * w).exp())
        assert_close(bandit.mean_gradient("vespo"), bandit.weighted(bandit.old * density * bandit.advantage), **CLOSE)
