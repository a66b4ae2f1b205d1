"""Learning from preferences and from labels, to optima that are known without training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from test_learning_data import preferred
from torch import Tensor

from optima import forward_kl_optimum, pi_star
from torchrl_llm_kl.algorithms import make_algorithm
from toy_tasks import Task, bandit, chain, product, total_variation
from toy_training import best_probability, train


def worths(task: Task, seed: int = 1) -> Tensor:
    return torch.randint(1, 5, task.reward.shape, generator=torch.Generator().manual_seed(seed))


def learned(name: str, task: Task, data: TensorDict, *, steps: int = 40, lr: float = 100.0, **settings: Any) -> Tensor:
    """Log-probs of answers after training on the same data at each step."""
    actor = task.policy()
    parts = make_algorithm(name, actor, **settings)
    train(parts, lambda rng: data.clone(), steps=steps, lr=lr)
    return task.log_probs(actor)


def test_simpo_learns_the_odds_of_the_preferences_per_token() -> None:
    """Answers of two tokens: ``beta / 2`` times the difference of log-probs is the log of the odds, whatever the reference."""
    task = product()
    worth = worths(task)
    found = learned("simpo", task, preferred(task, worth), margin=0.0, beta=3.0, lr=30.0)
    target = (worth.double().log() * 2 / 3.0).log_softmax(-1)
    assert total_variation(task.reference, target) > 0.2
    assert total_variation((worth.double().log() / 3.0).log_softmax(-1), target) > 0.05
    assert total_variation(found, target) < 0.01


def test_cpo_learns_the_odds_of_the_preferences() -> None:
    """With ``beta`` 1 both terms have their optimum at the worths: answers are chosen as often as they are worth."""
    task = product()
    worth = worths(task)
    target = worth.double().log().log_softmax(-1)
    assert total_variation(task.reference, target) > 0.3
    assert total_variation(learned("cpo", task, preferred(task, worth), beta=1.0, lr=30.0), target) < 0.01


def test_orpo_learns_between_the_likelihood_and_the_odds() -> None:
    """Two answers of one token, the first preferred 4 and 2 times out of 5: the optimum by bisection."""
    reward = torch.zeros(2, 2, dtype=torch.float64)
    reference = torch.tensor([[0.3, 0.7], [0.8, 0.2]], dtype=torch.float64).log()
    task = Task(2, (0, 1), ((0,), (1,)), reward, reference)
    found = learned("orpo", task, preferred(task, torch.tensor([[4, 1], [2, 3]])), beta=0.5, lr=20.0, steps=60)
    low, high, share = torch.tensor(-9.0), torch.tensor([9.0, 9.0]).double(), torch.tensor([0.8, 0.4]).double()
    for _ in range(80):
        y = (low + high) / 2  # log odds: the slope of the likelihood, and of 0.5 times that of twice the log odds
        rising = y.sigmoid() - share + 0.5 * 2 * ((2 * y).sigmoid() - share) > 0
        low, high = torch.where(rising, low, y), torch.where(rising, y, high)
    assert (y.sigmoid() - share).abs().min() > 0.03  # SFT alone ends elsewhere
    assert total_variation(found, torch.stack([y.sigmoid(), (-y).sigmoid()], -1).log()) < 0.01


def test_dpo_with_the_forward_kl_learns_its_optimum() -> None:
    task, beta = bandit(0), 0.5
    worth = worths(task)
    target = forward_kl_optimum(replace(task, reward=worth.double().log()), beta)
    settings = {"reference": task.policy(), "beta": beta}
    found = learned("dpo", task, preferred(task, worth), **settings, f_divergence="forward_kl", lr=20.0, steps=60)
    assert total_variation(pi_star(task, beta, worth.double().log()), target) > 0.05
    assert total_variation(found, target) < 0.01


def counted(task: Task, good: Tensor, bad: Tensor) -> TensorDict:
    """Answers to the first prompt with their labels, each as often as it is counted."""
    answers = torch.arange(len(task.answers))
    both = torch.cat([answers.repeat_interleave(good), answers.repeat_interleave(bad)])
    data = task.batch(torch.zeros_like(both), both).exclude(("next", "reward"))
    data["chosen"] = torch.arange(len(both)) < int(good.sum())
    return data


def test_bco_learns_pi_star_of_the_odds_of_the_labels() -> None:
    """Good as often as another is bad: the shift is the log of the normaliser, and the classifier can be exact."""
    task, beta = bandit(0), 0.6
    good = torch.tensor([6, 1, 3, 2, 4])
    bad = torch.tensor([1, 6, 3, 4, 2])
    found = learned("bco", task, counted(task, good, bad), reference=task.policy(), beta=beta, lr=20.0, steps=80)
    target = pi_star(task, beta, (good / bad).double().log().expand(2, -1))
    assert total_variation(task.reference[:1], target[:1]) > 0.2
    assert total_variation(found[:1], target[:1]) < 0.01


def test_kto_learns_the_desirable_answer() -> None:
    """One in 13 is desirable, and weighs as the paper recommends for so few."""
    task = chain()
    prompts = torch.arange(2).repeat_interleave(13)
    data = task.batch(prompts, torch.arange(13).repeat(2)).exclude(("next", "reward"))
    data["chosen"] = (task.reward == task.reward.amax(-1, keepdim=True)).flatten()
    actor = task.policy()
    parts = make_algorithm("kto", actor, reference=task.policy(), beta=0.5, desirable_weight=12.0)
    assert best_probability(task, actor) < 0.2
    first = parts.prepare(data.clone())["reference_point"]
    train(parts, lambda rng: data.clone(), steps=40, lr=20.0, micro_batches=2)
    assert best_probability(task, actor) > 0.9
    last = parts.prepare(data.clone())["reference_point"]
    assert first.abs().max() < 1e-5  # the policy is the reference
    assert last.shape == (26,)
    assert len(last.unique()) == 1
