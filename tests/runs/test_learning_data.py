"""Tests of learning from given answers and teachers: imitation, preferences, labels, experts, distillation."""

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from optima import forward_kl_optimum, pi_star
from torchrl_llm_kl.algorithms import make_algorithm
from toy_tasks import MIN_P, Task, bandit, chain, mixed, product, total_variation, unlikely
from toy_training import best_probability, learned, train


def test_sft_learns_the_distribution_of_the_data() -> None:
    """The most frequent answer of the data is a tenth as frequent under the first policy."""
    task = chain()
    counts = torch.zeros_like(task.reward).long()
    counts[0, torch.tensor([2, 6, 12])] = torch.tensor([10, 50, 40])
    counts[1, torch.tensor([0, 1, 4, 8])] = torch.tensor([25, 25, 45, 5])
    prompts, answers = (torch.repeat_interleave(x, counts[counts > 0]) for x in counts.nonzero().unbind(1))
    data = task.batch(prompts, answers).exclude(("next", "reward"))
    found = learned(task, "sft", data=data, how={"steps": 50, "micro_batches": 2})
    assert total_variation(found, (counts / 100).log()) < 0.03


# ------------------------------------------------------------------ preferences
def worths(task: Task) -> Tensor:
    """The worths are whole numbers, so that the data holds each pair exactly as often as it is preferred."""
    return torch.randint(1, 5, task.reward.shape, generator=torch.Generator().manual_seed(1))


def preferred(task: Task, worth: Tensor) -> TensorDict:
    """All pairs of answers to a prompt. Each answer is preferred as in the Bradley-Terry model, in w out of w + w' cases."""
    rows = []
    for p in range(len(task.prompts)):
        for i, j in permutations(range(len(task.answers)), 2):
            rows += [(p, i), (p, j)] * int(worth[p, i])
    prompts, answers = torch.tensor(rows).unbind(1)
    return task.batch(prompts, answers).exclude(("next", "reward"))


def odds(factor: float) -> Callable[[Task], Tensor]:
    """The policy whose odds are those of the preferences to a power."""
    return lambda task: (factor * worths(task).double().log()).log_softmax(-1)


def bradley_terry(beta: float) -> Callable[[Task], Tensor]:
    return lambda task: pi_star(task, beta, worths(task).double().log())


def forward(task: Task) -> Tensor:
    return forward_kl_optimum(replace(task, reward=worths(task).double().log()), 0.5)


def start(task: Task) -> Tensor:
    return task.reference


SLOW, QUICK = {"steps": 40, "lr": 30.0}, {"steps": 30, "lr": 30.0}
F_DPO, BT = {"beta": 0.5, "f_divergence": "forward_kl"}, bradley_terry(0.5)


@pytest.mark.parametrize(
    ("name", "task", "settings", "how", "target", "others"),
    [
        ("dpo", product(), {"beta": 0.5}, {**QUICK, "lr": 100.0}, BT, {start: 0.3, bradley_terry(1.0): 0.1}),
        ("dpo", bandit(0), F_DPO, {"steps": 60}, forward, {BT: 0.05}),
        # Answers of two tokens: beta / 2 times the difference of log-probs is the log of the odds, whatever the reference.
        ("simpo", product(), {"margin": 0.0, "beta": 3.0}, QUICK, odds(2 / 3), {start: 0.2, odds(1 / 3): 0.05}),
        # With beta 1 both terms have their optimum at the worths: answers are chosen as often as they are worth.
        ("cpo", product(), {"beta": 1.0}, SLOW, odds(1.0), {start: 0.3}),
        ("tpo", product(), {"beta": 1.0}, SLOW, odds(1.0), {start: 0.3}),  # the same two terms; the rows are triples
    ],
)
def test_optima_of_preferences(name: str, task: Task, settings: Any, how: Any, target: Any, others: Any) -> None:
    data = preferred(task, worths(task))
    if name == "tpo":  # the preferred answer again, as the third of each pair
        rows = torch.arange(len(data)).view(-1, 2)
        data = data[torch.cat([rows, rows[:, :1]], 1).flatten()]
    found = learned(task, name, data=data, how=how, objective_args=settings)
    assert total_variation(found, target(task)) < 0.01
    for other, distance in others.items():
        assert total_variation(other(task), target(task)) > distance


def test_orpo_learns_between_the_likelihood_and_the_odds() -> None:
    """There are two answers, and the first is preferred 4 and 2 times out of 5. Bisection gives the optimum."""
    reference = torch.tensor([[0.3, 0.7], [0.8, 0.2]], dtype=torch.float64).log()
    task = Task(2, (0, 1), ((0,), (1,)), torch.zeros_like(reference), reference)
    data = preferred(task, torch.tensor([[4, 1], [2, 3]]))
    found = learned(task, "orpo", data=data, objective_args={"beta": 0.5}, how={"steps": 45})
    low, high, share = torch.tensor(-9.0), torch.tensor([9.0, 9.0]).double(), torch.tensor([0.8, 0.4]).double()
    for _ in range(80):
        y = (low + high) / 2  # log odds: the slope of the likelihood, and of 0.5 times that of twice the log odds
        rising = y.sigmoid() - share + 0.5 * 2 * ((2 * y).sigmoid() - share) > 0
        low, high = torch.where(rising, low, y), torch.where(rising, y, high)
    assert (y.sigmoid() - share).abs().min() > 0.03  # SFT alone ends elsewhere
    assert total_variation(found, torch.stack([y.sigmoid(), (-y).sigmoid()], -1).log()) < 0.01


# ------------------------------------------------------------------ labels
def test_bco_learns_pi_star_of_the_odds_of_the_labels() -> None:
    """Labels are balanced, so the shift is the log of the normaliser, and the classifier can be exact."""
    task, beta = bandit(0), 0.6
    good, bad = torch.tensor([6, 1, 3, 2, 4]), torch.tensor([1, 6, 3, 4, 2])
    answers = torch.cat([torch.arange(5).repeat_interleave(good), torch.arange(5).repeat_interleave(bad)])
    data = task.batch(torch.zeros_like(answers), answers).exclude(("next", "reward"))
    data["chosen"] = torch.arange(len(answers)) < int(good.sum())
    found = learned(task, "bco", data=data, objective_args={"beta": beta}, how={"steps": 60})
    target = pi_star(task, beta, (good / bad).double().log().expand(2, -1))
    assert total_variation(task.reference[:1], target[:1]) > 0.2
    assert total_variation(found[:1], target[:1]) < 0.01


def test_kto_learns_the_desirable_answer() -> None:
    """One in 13 answers is desirable, with the weight that the paper recommends for this share."""
    task = chain()
    prompts = torch.arange(2).repeat_interleave(13)
    data = task.batch(prompts, torch.arange(13).repeat(2)).exclude(("next", "reward"))
    data["chosen"] = (task.reward == task.reward.amax(-1, keepdim=True)).flatten()
    actor = task.policy()
    parts = make_algorithm(
        "kto", actor, reference=task.policy(), objective_args={"beta": 0.5, "desirable_weight": 12.0}
    )
    assert best_probability(task, task.reference) < 0.2
    first = parts.prepare(data.clone())["reference_point"]
    train(parts, lambda rng: data.clone(), steps=30, micro_batches=2)
    assert best_probability(task, task.log_probs(actor)) > 0.9
    last = parts.prepare(data.clone())["reference_point"]
    assert first.abs().max() < 1e-5  # the policy is the reference
    assert (last.shape, len(last.unique())) == ((26,), 1)


# ------------------------------------------------------------------ experts
@pytest.mark.parametrize("succeeds", [True, False])
@pytest.mark.parametrize(("name", "settings"), [("mix", {}), ("mix_chord", {}), ("echo", {"mu": 1.0})])
def test_the_answer_of_experts_is_learned(name: str, settings: dict[str, float], succeeds: bool) -> None:
    """The policy itself never samples this answer at first.

    Without the experts' weight rollouts alone settle on the best answer that the policy can find.
    """
    task, settings = chain(), settings if succeeds else {"mu": 0.0}
    actor = unlikely(task)
    reference: Any = {} if name == "echo" else {"reference": unlikely(task)}
    parts = make_algorithm(name, actor, **reference, group_key="query", objective_args=settings)
    assert best_probability(task, task.log_probs(actor)) < MIN_P / 2
    steps = 50 if name == "mix_chord" else 40
    train(parts, lambda rng: mixed(task, actor, rng), steps=steps, optimiser=torch.optim.Adam, lr=0.4, micro_batches=2)
    found = best_probability(task, task.log_probs(actor))
    assert found > 0.9 if succeeds else found < MIN_P


# ------------------------------------------------------------------ teachers
@pytest.mark.parametrize(
    ("name", "settings", "own_answers", "lr"),
    [
        ("on_policy_distill", {}, True, 20.0),
        ("on_policy_distill", {"objective": "ref_kl", "advantage": None}, True, 20.0),
        ("jsd", {}, True, 60.0),
        ("iw_opd", {}, True, 20.0),
        # Distributions at each token: the divergence is that of each prefix, whoever wrote it.
        ("gkd", {}, True, 60.0),
        ("gkd", {}, False, 60.0),
        # The vocabulary has one token more than the top 3.
        ("gkd", {"top_k": 3, "objective_args": {"beta": 0.0}}, False, 20.0),
        ("gkd", {"top_k": 3, "objective_args": {"beta": 0.8}}, True, 60.0),
        ("on_policy_distill", {"top_k": 3}, False, 20.0),
        ("jsd", {"top_k": 3}, True, 60.0),
    ],
)
def test_the_student_becomes_the_teacher(name: str, settings: dict[str, Any], own_answers: bool, lr: float) -> None:
    task = chain()
    target = (2.5 * task.reference.flip(-1)).log_softmax(-1)  # far from the student at first
    actor, teacher, other = task.policy(), task.policy(target), task.policy()
    parts = make_algorithm(name, actor, reference=teacher, **settings)
    assert total_variation(task.reference, target) > 0.4
    writer = actor if own_answers else other
    kl = train(parts, lambda rng: task.sample(writer, 128, rng).exclude("query", "next"), lr=lr, steps=60)
    assert total_variation(task.log_probs(actor), target) < 0.03
    if name == "gkd" or "top_k" in settings:
        assert (parts.loss.objective.function.__name__, parts.advantage) == ("distill", None)
    else:
        quarters = torch.tensor(kl).reshape(4, -1).mean(-1)
        assert (quarters[:3].diff() < 0).all()  # the last is the noise of what is left
        assert kl[-1] < 0.1 * kl[0]
