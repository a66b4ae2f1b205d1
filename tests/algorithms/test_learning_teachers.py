"""Distillation on the student's own answers: it becomes the teacher."""

from __future__ import annotations

import pytest
import torch
from toy_tasks import chain, total_variation
from toy_training import train

from torchrl_llm_kl.algorithms import make_algorithm


@pytest.mark.parametrize("name", ["on_policy_distill", "jsd"])
def test_the_student_becomes_the_teacher(name: str) -> None:
    task = chain()
    teacher_log_probs = 2.5 * task.reference.flip(-1)
    target = teacher_log_probs.log_softmax(-1)
    actor, teacher = task.policy(), task.policy(target)
    parts = make_algorithm(name, actor, reference=teacher)
    assert total_variation(task.log_probs(actor), target) > 0.4
    kl = train(
        parts,
        lambda rng: task.sample(actor, 128, rng).exclude("query", "next"),
        lr={"jsd": 60.0}.get(name, 20.0),
        steps=60,
    )
    assert total_variation(task.log_probs(actor), target) < 0.03
    quarters = torch.tensor(kl).reshape(4, -1).mean(-1)
    assert (quarters.diff() < 0).all()
    assert kl[-1] < 0.1 * kl[0]
