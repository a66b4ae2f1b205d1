"""Where each estimator and each place of the KL lets training come to rest: and that they are different places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_learning_rewards import ADAM
from torch import Tensor

from optima import forward_kl_optimum, pi_star, self_consistent, token_kl_optimum
from torchrl_llm_kl.algorithms import make_algorithm
from torchrl_llm_kl.losses import KLPlacementWarning
from toy_tasks import Task, bandit, chain, total_variation
from toy_training import best_probability, train


def trained(task: Task, name: str, *, group: int = 4, rows: int = 256, **settings: Any) -> Tensor:
    actor = task.policy()
    how = {key: settings.pop(key) for key in ("steps", "lr", "optimiser") if key in settings}
    parts = make_algorithm(name, actor, reference=task.policy(), **settings)
    train(parts, lambda rng: task.sample(actor, rows, rng, group), **{"lr": 15.0, **how})
    return task.log_probs(actor)


@pytest.mark.parametrize("estimator", ["k2", "exact"])
def test_a_kl_per_token_in_the_loss_ignores_later_kl(estimator: str) -> None:
    """It treats prefixes as fixed: a token is worth the mean reward after it, without its effect on later KL."""
    task, beta = chain(), 0.5
    found = trained(task, "rloo", group=8, kl_loss=estimator, kl_loss_coeff=beta, lr=25.0)
    assert total_variation(found, token_kl_optimum(task, beta)) < 0.04
    assert total_variation(found, pi_star(task, beta)) > 0.15


def test_k2_in_the_loss_is_the_reverse_kl() -> None:
    task, beta = bandit(3), 0.5
    found = trained(task, "rloo", kl_loss="k2", kl_loss_coeff=beta)
    assert total_variation(found, pi_star(task, beta)) < 0.02
    assert total_variation(found, forward_kl_optimum(task, beta)) > 0.1


def test_k3_in_the_loss_is_the_forward_kl() -> None:
    task, beta = bandit(3), 0.5
    with pytest.warns(KLPlacementWarning, match="k3.*forward KL"):
        found = trained(task, "rloo", kl_loss="k3", kl_loss_coeff=beta)
    assert total_variation(found, forward_kl_optimum(task, beta)) < 0.02
    assert total_variation(found, pi_star(task, beta)) > 0.1


def test_k3_with_the_gradient_of_k2_is_the_reverse_kl() -> None:
    task, beta = bandit(3), 0.5
    found = trained(task, "rloo", kl_loss="k3+", kl_loss_coeff=beta)
    assert total_variation(found, pi_star(task, beta)) < 0.02


def test_k1_in_the_loss_holds_nothing() -> None:
    """Its gradient has mean 0, whatever its weight: the policy goes to the best answer. k2 with that weight holds it."""
    task, beta = chain(), 1.0
    actor = task.policy()
    with pytest.warns(KLPlacementWarning, match="k1.*mean gradient is zero"):
        parts = make_algorithm(
            "rloo", actor, reference=task.policy(), group_key="query", kl_loss="k1", kl_loss_coeff=beta
        )
    train(parts, lambda rng: task.sample(actor, 128, rng, 4), **ADAM)
    assert best_probability(task, actor) > 0.9
    held = trained(task, "rloo", kl_loss="k2", kl_loss_coeff=beta)
    assert total_variation(held, token_kl_optimum(task, beta)) < 0.03
    assert float(held.exp().amax()) < 0.5


# ---------------------------------------------------------------------- presets whose advantages are scaled


def better_of_two(p: Tensor, reward: Tensor) -> Tensor:
    """Mean GRPO advantage of each answer in groups of two: (r - r') / 2 over |r - r'| / sqrt(2)."""
    wins = (reward.unsqueeze(-1) - reward.unsqueeze(-2)).sign()
    return (wins * p.unsqueeze(-2)).sum(-1) / 2**0.5


def whitened_by(lengths: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    def advantage(p: Tensor, reward: Tensor) -> Tensor:
        weight = p * lengths / (p * lengths).sum()  # over the tokens of both prompts
        mean = (weight * reward).sum()
        return (reward - mean) / (weight * (reward - mean).square()).sum().sqrt()

    return advantage


@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo", "gspo", "sapo", "reinforce_plus_plus"])
def test_scaled_advantages_have_a_temperature_of_their_own(name: str) -> None:
    """Not pi*: dividing by a deviation changes the reward. The fixed point, from the mean advantage of every answer."""
    task, beta = chain(), 1.0
    lengths = torch.tensor([len(answer) for answer in task.answers])
    advantage = whitened_by(lengths) if name == "reinforce_plus_plus" else better_of_two
    target = self_consistent(task, beta, advantage)
    # A mean per sequence would weigh tokens of short answers more.
    found = trained(task, name, group=2, kl_loss="k2", kl_loss_coeff=beta, use_reference=True, aggregation="token-mean")
    assert total_variation(found, target) < 0.03
    assert total_variation(token_kl_optimum(task, beta), target) > 0.08
    assert total_variation(task.reference, target) > 0.1
