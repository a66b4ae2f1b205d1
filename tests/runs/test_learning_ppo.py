"""PPO with a critic: the policy converges to pi*, and the critic to its soft values."""

from __future__ import annotations

from functools import partial

import torch

from optima import pi_star
from torchrl_llm_kl.algorithms import make_algorithm
from toy_tasks import TabularCritic, chain, total_variation
from toy_training import best_probability, train

ADAM = partial(torch.optim.Adam, betas=(0.8, 0.98))


def test_the_preset_finds_the_best_answer_and_its_value() -> None:
    task = chain()
    actor, critic = task.policy(), TabularCritic(task)
    parts = make_algorithm("ppo", actor, reference=task.policy(), critic=critic)
    collect = lambda rng: task.sample(actor, 128, rng)  # noqa: E731
    train(parts, collect, steps=40, epochs=2, micro_batches=2, optimiser=ADAM, lr=0.15)
    assert best_probability(task, actor) > 0.9
    # The mean reward from here on: nearly the best reward, and all of it at the end of the best answer.
    mean = (task.log_probs(actor).exp() * task.reward).sum(-1)
    for p, prompt in enumerate(task.prompts):
        best = task.answers[int(task.reward[p].argmax())]
        assert abs(critic.of(prompt) - mean[p]) < 0.1
        assert abs(critic.of(prompt, *best[:-1]) - task.reward[p].max()) < 0.15


def test_kl_in_the_reward_leads_to_pi_star_and_to_soft_values() -> None:
    """``V(s) = beta log E_ref[exp(r / beta) | s]``: reward less penalty to come, which is certain at pi*."""
    task, beta = chain(), 0.5
    actor, critic = task.policy(), TabularCritic(task)
    kl = {"kl_loss": "none", "kl_reward": "k1", "kl_reward_coeff": beta}
    parts = make_algorithm("ppo", actor, reference=task.policy(), critic=critic, **kl)
    train(parts, lambda rng: task.sample(actor, 128, rng), steps=50, epochs=2, optimiser=ADAM, lr=0.15)
    assert total_variation(task.log_probs(actor), pi_star(task, beta)) < 0.03
    for p, prompt in enumerate(task.prompts):
        weighted = (task.reference[p] + task.reward[p] / beta).exp()
        for prefix in ((), (0,), (1,), (2,)):
            inside = torch.tensor([answer[: len(prefix)] == prefix for answer in task.answers])
            soft = beta * (weighted[inside].sum() / task.reference[p].exp()[inside].sum()).log()
            assert abs(critic.of(prompt, *prefix) - soft) < 0.1
        top = task.reward[p].max()
        assert abs(critic.of(prompt) - top) > 0.3  # and not what a policy without penalty would get
