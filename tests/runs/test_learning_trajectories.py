"""Trajectories of three steps, each a prompt and an answer of its own: states are prompts, answers are actions."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_llm_kl.algorithms import make_algorithm
from toy_tasks import TabularPolicy, Task, total_variation
from toy_training import ADAM, train

STEPS, LOST = 3, 3
RIGHT = torch.tensor([2, 0, 3])
Rewards = tuple[float, float, float]
#: Of a right action in each state.
AT_THE_END, AT_EACH_STEP = (0.0, 0.0, 1.0), (0.2, 0.3, 0.5)


def maze() -> Task:
    """One right action in each of three states leads on to the next; any other to a state that nothing leads out of."""
    rng = torch.Generator().manual_seed(0)
    reference = (0.5 * torch.randn(4, 4, generator=rng, dtype=torch.float64)).log_softmax(-1)
    return Task(4, (0, 1, 2, LOST), ((0,), (1,), (2,), (3,)), torch.zeros(4, 4, dtype=torch.float64), reference)


def roll_out(task: Task, actor: TabularPolicy, runs: int, rewards: Rewards, rng: torch.Generator) -> TensorDict:
    """``[runs, 3]``; ``rewards`` of a right action in each state."""
    policy, state, steps = task.log_probs(actor).exp(), torch.zeros(runs, dtype=torch.long), []
    for at in range(STEPS):
        action = torch.multinomial(policy[state], 1, generator=rng).squeeze(-1)
        right = (state == at) & (action == RIGHT[at])
        row = task.batch(state, action)
        row["next", "reward"] = torch.where(right, rewards[at], 0.0).unsqueeze(-1)
        row["run"], row["step"], row["state"] = torch.arange(runs), torch.full_like(state, at), state
        steps.append(row)
        state = torch.where(right, at + 1, LOST)
    return torch.stack(steps, 1)


def optimum(task: Task, beta: float, gain: float, rewards: Rewards) -> Tensor:
    """``ref(a | s) exp(gain Q(s, a) / beta)``, from the last state backwards: a KL per token sees no later KL."""
    found, value = task.reference.clone(), torch.zeros((), dtype=torch.float64)
    for at in reversed(range(STEPS)):
        q = torch.zeros(4, dtype=torch.float64)
        q[RIGHT[at]] = rewards[at] + value
        found[at] = (task.reference[at] + gain * q / beta).log_softmax(-1)
        value = found[at].exp() @ q
    return found


def success(task: Task, actor: TabularPolicy) -> float:
    return float(task.log_probs(actor)[torch.arange(STEPS), RIGHT].exp().prod())


def test_multi_step_grpo_finds_the_best_trajectory() -> None:
    """Rewarded at the end alone, rows in any order, run and step beside them."""
    task = maze()
    actor = task.policy()
    keys = {"run": "run", "step": "step"}
    parts = make_algorithm("multi_step_grpo", actor, reference=task.policy(), advantage_args={"keys": keys})
    assert success(task, actor) < 0.05

    def collect(rng: torch.Generator) -> TensorDict:
        data = roll_out(task, actor, 128, AT_THE_END, rng)
        data["query"] = (torch.arange(128) // 8).unsqueeze(-1).expand(128, STEPS)
        return data.reshape(-1)[torch.randperm(128 * STEPS, generator=rng)]

    train(parts, collect, **ADAM, steps=20, epochs=2, micro_batches=2)
    assert success(task, actor) > 0.9


def test_gigpo_finds_the_best_trajectory_from_rewards_of_steps() -> None:
    task = maze()
    actor = task.policy()
    parts = make_algorithm("gigpo", actor, reference=task.policy(), group_size=8)
    train(parts, lambda rng: roll_out(task, actor, 128, AT_EACH_STEP, rng), **ADAM, steps=25)
    assert success(task, actor) > 0.9


@pytest.mark.parametrize(
    ("name", "settings", "beta", "gain", "rewards", "bound"),
    [
        # Groups of two and rewards of 0 and 1: (r - r') / sqrt(2).
        ("multi_step_grpo", {"group_size": 2}, 0.25, 2**-0.5, AT_THE_END, 0.04),
        # The trajectory counts once and the step half, of the rewards from a step on.
        ("gigpo", {"group_size": 256, "omega": 0.5}, 0.5, 1.5, AT_EACH_STEP, 0.03),
    ],
)
def test_a_strong_kl_leads_to_the_optimum_of_its_gain(
    name: str, settings: dict[str, Any], beta: float, gain: float, rewards: Rewards, bound: float
) -> None:
    task = maze()
    actor = task.policy()
    parts = make_algorithm(name, actor, reference=task.policy(), kl_loss_coeff=beta, **settings)
    train(parts, lambda rng: roll_out(task, actor, 256, rewards, rng), **ADAM, steps=40)
    target = optimum(task, beta, gain, rewards)
    assert total_variation(task.reference, target) > 0.4
    assert total_variation(optimum(task, beta, 1.0, rewards), target) > 0.1
    assert total_variation(task.log_probs(actor), target) < bound
