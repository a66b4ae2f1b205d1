"""Learning from given answers: imitation, the best of the policy's own, preferences."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from optima import pi_star
from torchrl_llm_kl.algorithms import make_algorithm
from toy_tasks import Task, chain, product, total_variation
from toy_training import best_probability, train


def test_sft_learns_the_distribution_of_the_data() -> None:
    """Whose most frequent answer is a tenth as frequent under the policy at first."""
    task = chain()
    counts = torch.zeros_like(task.reward).long()
    counts[0, torch.tensor([2, 6, 12])] = torch.tensor([10, 50, 40])
    counts[1, torch.tensor([0, 1, 4, 8])] = torch.tensor([25, 25, 45, 5])
    prompts, answers = (torch.repeat_interleave(x, counts[counts > 0]) for x in counts.nonzero().unbind(1))
    data, actor = task.batch(prompts, answers).exclude(("next", "reward")), task.policy()
    parts = make_algorithm("sft", actor)
    train(parts, lambda rng: data.clone(), steps=60, micro_batches=2)
    assert total_variation(task.log_probs(actor), (counts / 100).log()) < 0.03


def test_raft_learns_the_best_answer() -> None:
    task = chain()
    actor = task.policy()
    parts = make_algorithm("raft", actor, group_key="query")
    train(parts, lambda rng: task.sample(actor, 256, rng, 8), steps=50, optimiser=torch.optim.Adam, lr=0.3)
    assert best_probability(task, actor) > 0.9


def preferred(task: Task, worth: torch.Tensor) -> TensorDict:
    """Every two answers to a prompt, each preferred as often as in the Bradley-Terry model: w out of w + w'."""
    rows = []
    for p in range(len(task.prompts)):
        for i in range(len(task.answers)):
            for j in range(len(task.answers)):
                if i != j:
                    rows += [(p, i), (p, j)] * int(worth[p, i])
    prompts, answers = torch.tensor(rows).unbind(1)
    return task.batch(prompts, answers).exclude(("next", "reward"))


def test_dpo_learns_pi_star_of_the_reward_of_the_preferences() -> None:
    """Rewards are logs of whole numbers, so that the data holds each pair exactly as often as it is preferred."""
    task, beta = product(), 0.5
    worth = torch.randint(1, 5, task.reward.shape, generator=torch.Generator().manual_seed(1))
    data, actor = preferred(task, worth), task.policy()
    parts = make_algorithm("dpo", actor, reference=task.policy(), beta=beta)
    train(parts, lambda rng: data.clone(), steps=40, lr=100.0)
    target = pi_star(task, beta, worth.double().log())
    assert total_variation(task.reference, target) > 0.3
    assert total_variation(pi_star(task, 2 * beta, worth.double().log()), target) > 0.1
    assert total_variation(task.log_probs(actor), target) < 0.01
