"""Other baselines, several rewards, and control of the entropy: where training must end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from test_learning_kl import trained
from test_learning_rewards import ADAM, GROUP
from torch import Tensor

from optima import pi_star, self_consistent
from torchrl_llm_kl.algorithms import make_algorithm
from toy_tasks import Task, bandit, chain, total_variation
from toy_training import best_probability, train

# ------------------------------------------------------------------ mean advantages of pairs, from all pairs


def difference(reward: Tensor) -> Tensor:
    """Of each answer from each other; ``[P, R, R]``."""
    return reward.unsqueeze(-1) - reward.unsqueeze(-2)


def of_pairs(p: Tensor, advantage: Tensor) -> Tensor:
    """Mean over the other answer of a pair."""
    return (p.unsqueeze(-2) * advantage).sum(-1)


def weighted(weight: Tensor, reward: Tensor) -> Tensor:
    """Advantage of an answer, beside another: its distance from the mean of both, weighted."""
    return difference(reward) * weight.unsqueeze(-2) / (weight.unsqueeze(-1) + weight.unsqueeze(-2))


def by_gradient(p: Tensor, reward: Tensor) -> Tensor:
    """Answers of one token: the squared norm of the gradient of its log-prob."""
    return of_pairs(p, weighted(1 - 2 * p + p.square().sum(-1, keepdim=True), reward))


def best_of_two(p: Tensor, reward: Tensor) -> Tensor:
    return of_pairs(p, difference(reward).clamp(min=0))


def whitened_pairs(lengths: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    def advantage(p: Tensor, reward: Tensor) -> Tensor:
        centred = difference(reward) / 2
        weight = p.unsqueeze(-1) * p.unsqueeze(-2) * lengths.unsqueeze(-1)  # tokens of both prompts
        weight = weight / weight.sum()
        mean = (weight * centred).sum()
        return (of_pairs(p, centred) - mean) / (weight * (centred - mean).square()).sum().sqrt()

    return advantage


LENGTHS = torch.tensor([len(answer) for answer in chain().answers])


@pytest.mark.parametrize(
    ("name", "task", "advantage", "beta"),
    [
        ("reinforce_plus_plus_baseline", chain(), whitened_pairs(LENGTHS), 1.0),
        ("pass_at_k", chain(), best_of_two, 0.5),
        ("optimal_token_baseline", bandit(3), by_gradient, 0.3),
    ],
)
def test_optimum_of_pairs_with_a_kl_in_the_loss(
    name: str, task: Task, advantage: Callable[[Tensor, Tensor], Tensor], beta: float
) -> None:
    """The fixed point, from the mean advantage of every answer. The plain mean as a baseline leads elsewhere."""
    target = self_consistent(task, beta, advantage)
    found = trained(task, name, group=2, kl_loss="k2", kl_loss_coeff=beta, use_reference=True, aggregation="token-mean")
    assert total_variation(found, target) < 0.03
    assert total_variation(task.reference, target) > 0.1
    plain = self_consistent(task, beta, lambda p, reward: of_pairs(p, difference(reward) / 2))
    assert total_variation(plain, target) > (0.035 if name == "optimal_token_baseline" else 0.08)


def test_the_optimal_token_baseline_leads_to_pi_star_with_a_kl_in_the_reward() -> None:
    task, beta = bandit(3), 0.5
    actor = task.policy()
    kl: dict[str, Any] = {"kl_reward": "k1", "kl_reward_coeff": beta, "use_reference": True}
    parts = make_algorithm("optimal_token_baseline", actor, reference=task.policy(), **kl)
    train(parts, lambda rng: task.sample(actor, 128, rng, GROUP), **ADAM)
    target = pi_star(task, beta)
    assert total_variation(task.reference, target) > 0.3
    assert total_variation(task.log_probs(actor), target) < 0.03


def test_pass_at_k_finds_the_best_answer_and_leaves_room_for_others() -> None:
    """One of four is nearly always the best, while answers alone are so less often than grpo's."""
    task = chain()
    found = {}
    for name in ("pass_at_k", "grpo"):
        actor = task.policy()
        parts = make_algorithm(name, actor, reference=task.policy())
        train(parts, lambda rng, actor=actor: task.sample(actor, 128, rng, GROUP), **ADAM, steps=60)
        found[name] = best_probability(task, actor)
    assert 1 - (1 - found["pass_at_k"]) ** GROUP > 0.99
    assert found["pass_at_k"] < found["grpo"] - 0.02


# ------------------------------------------------------------------ several rewards


@pytest.mark.parametrize(
    ("name", "learned"), [("gdpo", True), ("grpo", False)], ids=["each by itself", "added up, the small one drowns"]
)
def test_a_reward_a_thousand_times_smaller_than_a_noisy_one_is_learned(name: str, learned: bool) -> None:
    """The large one is noise, whatever the answer; the small one is that of the task."""
    task = bandit(3)
    actor = task.policy()

    def collect(rng: torch.Generator) -> TensorDict:
        data = task.sample(actor, 128, rng, GROUP)
        noise, small = torch.randn(128, 1, generator=rng), 1e-3 * data["next"].pop("reward")
        if name == "grpo":
            data["next", "reward"] = noise + small
        else:
            data["noise"], data["next", "small"] = noise, small
        return data

    keys = {"advantage_args": {"keys": {"rewards": ["noise", "small"]}}} if name == "gdpo" else {}
    train(make_algorithm(name, actor, reference=task.policy(), **keys), collect, **ADAM, steps=60)
    assert (best_probability(task, actor) > 0.9) == learned


def test_a_kl_in_one_of_several_rewards_is_refused() -> None:
    task = bandit(3)
    with pytest.raises(ValueError, match=r"kl_reward='k1' adds the KL to one reward.*pass kl_reward='none'"):
        make_algorithm("gdpo", task.policy(), reference=task.policy(), kl_reward="k1")


# ------------------------------------------------------------------ control of the entropy


def test_less_entropy_is_lost_while_failures_are_left_out() -> None:
    """After as many steps, clip_v's policy has more entropy than grpo's, which clip_v without a limit is otherwise."""
    task = chain()
    entropy = {}
    for name, hyper in (("grpo", {"kl_loss": "none"}), ("clip_v", {"mu": 0.5, "max_frac": 1.0})):
        actor = task.policy()
        parts = make_algorithm(name, actor, **hyper)
        train(parts, lambda rng, actor=actor: task.sample(actor, 128, rng, GROUP), **ADAM, steps=10)
        log_p = task.log_probs(actor)
        entropy[name] = float(-(log_p.exp() * log_p).sum(-1).mean())
    assert entropy["clip_v"] > entropy["grpo"] + 0.05
