"""Distillation: the student becomes the teacher."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchrl_llm_kl.algorithms import make_algorithm
from toy_tasks import chain, total_variation
from toy_training import train


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


@pytest.mark.parametrize("own_answers", [True, False])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gkd", {}),
        ("gkd", {"top_k": 3, "beta": 0.0}),
        ("gkd", {"top_k": 3, "beta": 0.8}),
        ("on_policy_distill", {"top_k": 3}),
        ("jsd", {"top_k": 3}),
    ],
)
def test_distributions_at_each_token(name: str, settings: dict[str, Any], own_answers: bool) -> None:
    """The vocabulary has one token more than the top 3. The divergence is that of each prefix, whoever wrote it."""
    task = chain()
    target = (2.5 * task.reference.flip(-1)).log_softmax(-1)
    actor, teacher, other = task.policy(), task.policy(target), task.policy()
    parts = make_algorithm(name, actor, reference=teacher, **settings)
    assert parts.loss.objective.function.__name__ == "distill"
    assert parts.advantage is None
    seen: list[float] = []

    def collect(rng: torch.Generator) -> Any:
        with torch.no_grad():
            seen.append(total_variation(task.log_probs(actor), target))
        return task.sample(actor if own_answers else other, 128, rng).exclude("query", "next")

    whole_kl = settings.get("beta") == 0.0 or name == "on_policy_distill"
    train(parts, collect, lr=20.0 if whole_kl else 60.0, steps=60)
    assert seen[0] > 0.4
    assert total_variation(task.log_probs(actor), target) < 0.03


def test_a_top_k_replaces_the_advantage() -> None:
    task = chain()
    made = {name: make_algorithm(name, task.policy(), reference=task.policy(), top_k=2) for name in ("gkd", "jsd")}
    made["on_policy_distill"] = make_algorithm("on_policy_distill", task.policy(), reference=task.policy(), top_k=2)
    betas = {name: round(float(parts.loss.beta), 6) for name, parts in made.items()}
    assert betas == {"gkd": 0.5, "jsd": 0.5, "on_policy_distill": 1.0}
    assert all(parts.loss.distribution == "top_k" and parts.advantage is None for parts in made.values())
    parts = make_algorithm("on_policy_distill", task.policy(), reference=task.policy(), top_k=2, beta=0.7)
    assert round(float(parts.loss.beta), 6) == 0.7
    parts = make_algorithm("jsd", task.policy(), reference=task.policy(), top_k=2, advantage_args={})
    assert parts.algorithm.objective == "distill"
    sampled = make_algorithm("on_policy_distill", task.policy(), reference=task.policy(), top_k=0)
    assert sampled.algorithm.objective == "ppo"
    assert make_algorithm("gkd", task.policy(), reference=task.policy()).loss.distribution == "exact"


def test_a_teacher_in_the_data() -> None:
    task = chain()
    batch = task.sample(task.policy(), 16, torch.Generator().manual_seed(0)).exclude("query", "next")
    teacher = task.policy((2.5 * task.reference.flip(-1)).log_softmax(-1))
    scored = make_algorithm("gkd", task.policy(), reference=teacher, top_k=2)
    given = make_algorithm("gkd", task.policy(), reference="data", top_k=2)
    assert given.kl_transform is None
    data = scored.prepare(batch.clone())
    torch.testing.assert_close(given.loss(given.prepare(data)).total_loss, scored.loss(data).total_loss)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "gkd",
            {},
            r"gkd compares with a teacher: pass reference=, or reference='data' .* a teacher's top k \(with top_k=\)",
        ),
        ("gkd", {"reference": "data"}, r"gkd compares whole distributions, which the data does not hold: .*top_k="),
        ("gkd", {"distribution": "top_k"}, r"distribution='top_k' contradicts top_k=0"),
        ("grpo", {"top_k": 4}, "top_k=4 has no effect on objective='ppo'"),
        ("gkd", {"top_k": 4, "kl_reward": "k1", "use_reference": True}, r"top_k=4 beside log-probs of the sampler"),
    ],
)
def test_contradictions(name: str, settings: dict[str, Any], message: str) -> None:
    task = chain()
    given = {"reference": task.policy(), **settings} if settings else {}
    with pytest.raises(ValueError, match=message):
        make_algorithm(name, task.policy(), **given)
