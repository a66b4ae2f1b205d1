"""Tests of the optimum of training for each estimator and place of the KL. The optima differ."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from optima import forward_kl_optimum, pi_star, self_consistent, token_kl_optimum
from torchrl_llm_kl.losses import KLPlacementWarning
from toy_tasks import Task, bandit, chain, total_variation
from toy_training import best_probability, learned

SGD: dict[str, Any] = {"lr": 15.0, "steps": 35}


@pytest.mark.parametrize("estimator", ["k2", "exact"])
def test_a_kl_per_token_in_the_loss_ignores_later_kl(estimator: str) -> None:
    """The gradient treats prefixes as fixed, so the effect of a token on later KL does not count."""
    task, beta = chain(), 0.5
    found = learned(task, "rloo", group=8, rows=256, how={"lr": 25.0}, kl_loss=estimator, kl_loss_coeff=beta)
    assert total_variation(found, token_kl_optimum(task, beta)) < 0.04
    assert total_variation(found, pi_star(task, beta)) > 0.15


@pytest.mark.parametrize(("name", "steps"), [("rloo", 35), ("ctpo_kl", 60)])
def test_the_kl_of_whole_answers_in_the_loss_counts_later_kl(name: str, steps: int) -> None:
    task, beta = chain(), 0.5
    how: dict[str, Any] = {"lr": 25.0, "steps": steps}
    parts = {"kl_loss": "exact", "kl_level": "sequence", "kl_loss_coeff": beta}
    found = learned(task, name, group=8, rows=256, how=how, **parts)
    assert total_variation(found, pi_star(task, beta)) < 0.04
    assert total_variation(found, token_kl_optimum(task, beta)) > 0.15


REVERSE = pi_star, forward_kl_optimum


@pytest.mark.parametrize(
    ("estimator", "warns", "optimum", "other"),
    [("k2", None, *REVERSE), ("k3", "k3.*forward KL", *REVERSE[::-1]), ("k3+", None, *REVERSE)],
)
def test_the_optimum_of_each_estimator_in_the_loss(estimator: str, warns: str | None, optimum: Any, other: Any) -> None:
    task, beta = bandit(3), 0.5
    with pytest.warns(KLPlacementWarning, match=warns) if warns else contextlib.nullcontext():
        found = learned(task, "rloo", rows=256, how=SGD, kl_loss=estimator, kl_loss_coeff=beta)
    assert total_variation(found, optimum(task, beta)) < 0.02
    assert total_variation(found, other(task, beta)) > 0.1


def test_k1_in_the_loss_has_no_effect() -> None:
    """The mean gradient of k1 is 0 for any weight, so the policy moves to the best answer. k2 with this weight holds it."""
    task, beta = chain(), 1.0
    with pytest.warns(KLPlacementWarning, match="k1.*mean gradient is zero"):
        free = learned(task, "rloo", kl_loss="k1", kl_loss_coeff=beta)
    assert best_probability(task, free) > 0.9
    held = learned(task, "rloo", rows=256, how=SGD, kl_loss="k2", kl_loss_coeff=beta)
    assert total_variation(held, token_kl_optimum(task, beta)) < 0.03
    assert float(held.exp().amax()) < 0.5


# ------------------------------------------------------------------ mean advantages, from all answers or all pairs
LENGTHS = torch.tensor([len(answer) for answer in chain().answers])


def whitened(p: Tensor, reward: Tensor) -> Tensor:
    weight = p * LENGTHS / (p * LENGTHS).sum()  # over the tokens of both prompts
    mean = (weight * reward).sum()
    return (reward - mean) / (weight * (reward - mean).square()).sum().sqrt()


def difference(reward: Tensor) -> Tensor:
    """The reward of each answer minus that of each other answer, ``[P, R, R]``."""
    return reward.unsqueeze(-1) - reward.unsqueeze(-2)


def of_pairs(p: Tensor, advantage: Tensor) -> Tensor:
    """The mean advantage over the other answer of a pair."""
    return (p.unsqueeze(-2) * advantage).sum(-1)


def better_of_two(p: Tensor, reward: Tensor) -> Tensor:
    """The mean GRPO advantage in groups of two is (r - r') / 2 divided by |r - r'| / sqrt(2)."""
    return of_pairs(p, difference(reward).sign()) / 2**0.5


def from_the_mean(p: Tensor, reward: Tensor) -> Tensor:
    return of_pairs(p, difference(reward) / 2)


def by_gradient(p: Tensor, reward: Tensor) -> Tensor:
    """The baseline is the mean of a pair, weighted with the squared norm of the gradient of the log-prob (for one token)."""
    weight = 1 - 2 * p + p.square().sum(-1, keepdim=True)
    return of_pairs(p, difference(reward) * weight.unsqueeze(-2) / (weight.unsqueeze(-1) + weight.unsqueeze(-2)))


def best_of_two(p: Tensor, reward: Tensor) -> Tensor:
    return of_pairs(p, difference(reward).clamp(min=0))


def whitened_pairs(p: Tensor, reward: Tensor) -> Tensor:
    weight = p.unsqueeze(-1) * p.unsqueeze(-2) * LENGTHS.unsqueeze(-1)  # tokens of both prompts
    weight = weight / weight.sum()
    mean = (weight * difference(reward) / 2).sum()
    return (from_the_mean(p, reward) - mean) / (weight * (difference(reward) / 2 - mean).square()).sum().sqrt()


@pytest.mark.parametrize(
    ("name", "task", "advantage", "beta", "from_plain"),
    [
        *((name, chain(), better_of_two, 1.0, 0.0) for name in ("grpo", "dapo", "cispo", "gspo", "sapo")),
        ("reinforce_plus_plus", chain(), whitened, 1.0, 0.0),
        ("reinforce_plus_plus_baseline", chain(), whitened_pairs, 1.0, 0.08),
        ("pass_at_k", chain(), best_of_two, 0.5, 0.08),
        ("optimal_token_baseline", bandit(3), by_gradient, 0.3, 0.035),
    ],
)
def test_temperatures_of_scaled_advantages(name: str, task: Task, advantage: Any, beta: float, from_plain: Any) -> None:
    """Dividing by a deviation changes the reward, so the optimum is not pi*. The mean advantages give the fixed point.

    Other baselines than the mean of the group lead elsewhere than that one.
    """
    target = self_consistent(task, beta, advantage)
    # A mean per sequence would weigh tokens of short answers more.
    settings = {"kl_loss": "k2", "kl_loss_coeff": beta, "use_reference": True, "aggregation": "token-mean"}
    found = learned(task, name, group=2, rows=256, how=SGD, **settings)
    assert total_variation(found, target) < 0.03
    assert total_variation(task.reference, target) > 0.1
    if from_plain:
        assert total_variation(self_consistent(task, beta, from_the_mean), target) > from_plain
    else:
        assert total_variation(token_kl_optimum(task, beta), target) > 0.08
