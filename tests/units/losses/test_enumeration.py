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
    *[(name, {}) for name in ("vespo", "kl_cov", "fipo", "ctpo")],
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
    ("ctpo", {"clip_low": 90.0, "clip_high": 90.0, "clip_c": None}),
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


@pytest.mark.parametrize("age", [0, 1, 5])
def test_the_two_ratios_of_a3po_are_the_importance_weight_at_any_age(age: int) -> None:
    for seed, vocab in DRAWS:
        bandit, ages = Bandit(seed, vocab, 1.0), torch.full((vocab, 1), age)
        found = bandit.mean_gradient("a3po", age=ages, clip_low=1.0, clip_high=1e6, weight_max=None)
        assert_close(found, bandit.policy_gradient(), rtol=1e-9, atol=1e-12)


class Chain:
    """Every sequence of a few words with its log-probs under two autoregressive policies, its outcome and its advantages.

    The policies' logits differ by at most 1. An advantage is the current policy's expected outcome after the token minus that
    before it.
    """

    def __init__(self, seed: int, words: int, length: int) -> None:
        rng = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng, dtype=torch.float64)

        ids = torch.cartesian_prod(*[torch.arange(words)] * length)
        #: The number of each sequence's prefix of 0, 1, ... words.
        self.prefixes = [torch.zeros(len(ids), dtype=torch.long)]
        for column in ids.unbind(-1):
            self.prefixes.append(self.prefixes[-1] * words + column)
        self.outcome = normal(len(ids))
        self.logits = [normal(words**t, words).requires_grad_() for t in range(length)]
        self.log_prob = self.log_probs(self.logits)
        self.old = self.log_probs([x.detach() + normal(*x.shape).clamp(-1, 1) for x in self.logits])
        weight, means = self.log_prob.detach().sum(-1).exp(), []
        for prefix in self.prefixes:
            total, mass = (torch.zeros_like(weight).index_add(0, prefix, x) for x in (weight * self.outcome, weight))
            means.append((total / mass)[prefix])
        self.advantage = torch.stack(means, -1).diff(dim=-1)

    def log_probs(self, logits: list[Tensor]) -> Tensor:
        pairs = zip(logits, self.prefixes[1:], strict=True)
        return torch.stack([x.log_softmax(-1).flatten()[prefix] for x, prefix in pairs], -1)

    def gradient(self, loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, self.logits, retain_graph=True)

    def mean_gradient(self, name: str, **hyper: Any) -> tuple[Tensor, ...]:
        """The mean gradient of an objective, summed over tokens, over sequences of the old policy."""
        mask, given = (
            torch.ones_like(self.old, dtype=torch.bool),
            {"old_log_prob": self.old, "advantage": self.advantage},
        )
        (term,) = called(get_objective(name), self.log_prob, mask, **given, **hyper)
        return self.gradient((self.old.sum(-1, keepdim=True).exp() * term.value).sum())


@pytest.mark.parametrize(("words", "length"), [(3, 2), (3, 3)])
def test_the_ratio_of_the_prefix_has_the_policy_gradient_of_whole_sequences(words: int, length: int) -> None:
    """The ratio of the token has another gradient."""
    for seed in range(3):
        chain = Chain(seed, words, length)
        expected = chain.gradient(-(chain.log_prob.sum(-1).exp() * chain.outcome).sum())
        found = chain.mean_gradient("ctpo", clip_low=90.0, clip_high=90.0, clip_c=None)
        assert_close(found, expected, rtol=1e-9, atol=1e-12)
        per_token = chain.mean_gradient("importance_sampling")
        assert max((x - y).abs().max() for x, y in zip(per_token, expected, strict=True)) > 1e-3
