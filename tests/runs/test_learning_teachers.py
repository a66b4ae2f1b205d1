"""Distillation: the student becomes the teacher."""

from typing import Any

import pytest
import torch
from torch import Tensor

from torchrl_llm_kl.algorithms import make_algorithm
from toy_tasks import Task, chain, total_variation
from toy_training import train


def teacher_of(task: Task) -> Tensor:
    """Log-probs of answers, far from those of the student at first."""
    return (2.5 * task.reference.flip(-1)).log_softmax(-1)


@pytest.mark.parametrize("name", ["on_policy_distill", "jsd", "iw_opd", "ref_kl"])
def test_the_student_becomes_the_teacher(name: str) -> None:
    task = chain()
    target = teacher_of(task)
    actor, teacher = task.policy(), task.policy(target)
    preset, settings = (name, {}) if name != "ref_kl" else ("on_policy_distill", {"objective": name, "advantage": None})
    parts = make_algorithm(preset, actor, reference=teacher, **settings)  # type: ignore[arg-type]
    assert total_variation(task.reference, target) > 0.4
    lr = 60.0 if name == "jsd" else 20.0
    kl = train(parts, lambda rng: task.sample(actor, 128, rng).exclude("query", "next"), lr=lr, steps=60)
    assert total_variation(task.log_probs(actor), target) < 0.03
    quarters = torch.tensor(kl).reshape(4, -1).mean(-1)
    assert (quarters[:3].diff() < 0).all()  # the last is the noise of what is left
    assert kl[-1] < 0.1 * kl[0]


@pytest.mark.parametrize(
    ("name", "settings", "own_answers"),
    [
        ("gkd", {}, True),
        ("gkd", {}, False),
        ("gkd", {"top_k": 3, "beta": 0.0}, False),
        ("gkd", {"top_k": 3, "beta": 0.8}, True),
        ("on_policy_distill", {"top_k": 3}, False),
        ("jsd", {"top_k": 3}, True),
    ],
)
def test_distributions_at_each_token(name: str, settings: dict[str, Any], own_answers: bool) -> None:
    """The vocabulary has one token more than the top 3. The divergence is that of each prefix, whoever wrote it."""
    task = chain()
    target = teacher_of(task)
    actor, teacher, other = task.policy(), task.policy(target), task.policy()
    parts = make_algorithm(name, actor, reference=teacher, **settings)
    assert parts.loss.objective.function.__name__ == "distill"
    assert parts.advantage is None
    writer = actor if own_answers else other
    whole_kl = settings.get("beta") == 0.0 or name == "on_policy_distill"
    lr = 20.0 if whole_kl else 60.0
    train(parts, lambda rng: task.sample(writer, 128, rng).exclude("query", "next"), lr=lr, steps=60)
    assert total_variation(task.log_probs(actor), target) < 0.03
