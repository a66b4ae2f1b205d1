"""Mixed batches: experts show answers that the policy never samples, and it keeps them because they are rewarded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchrl.data import ListStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

from torchrl_llm_kl.algorithms import make_algorithm, mix_buffers
from toy_tasks import MIN_P, chain, experts, mixed, unlikely
from toy_training import best_probability, train


def learned(name: str, **settings: Any) -> float:
    task = chain()
    actor, reference = unlikely(task), unlikely(task)
    parts = make_algorithm(name, actor, reference=reference, group_key="query", **settings)
    assert best_probability(task, actor) < MIN_P / 2
    train(parts, lambda rng: mixed(task, actor, rng), steps=50, optimiser=torch.optim.Adam, lr=0.4, micro_batches=2)
    return best_probability(task, actor)


@pytest.mark.parametrize("name", ["mix", "mix_chord"])
def test_the_answer_of_experts_is_learned(name: str) -> None:
    assert learned(name) > 0.9


@pytest.mark.parametrize(("name", "none"), [("mix", {"mu": 0.0}), ("mix_chord", {"mu_peak": 0.0, "mu_valley": 0.0})])
def test_without_their_weight_it_is_not(name: str, none: dict[str, float]) -> None:
    """Rollouts alone settle on the best answer that the policy can find."""
    assert learned(name, **none) < MIN_P


def test_batches_from_two_replay_buffers() -> None:
    """The way of a user: rollouts are prepared and stored; rows of experts hold tokens alone."""
    task = chain()
    actor = unlikely(task)
    parts = make_algorithm("mix", actor, reference=unlikely(task), group_key="query")
    rollouts, shown = (ReplayBuffer(storage=ListStorage(96), sampler=SamplerWithoutReplacement()) for _ in range(2))
    shown.extend(experts(task, 96).select("tokens", "masks"))
    mixture = mix_buffers(rollouts, shown, batch_size=128, expert_data_ratio=0.25)
    optimiser, rng = torch.optim.Adam(actor.parameters(), lr=0.2), torch.Generator().manual_seed(0)
    for step in range(50):
        fresh = task.sample(actor, 96, rng, 8, min_p=MIN_P)
        fresh["expert_mask"] = torch.zeros(96, dtype=torch.bool)
        rollouts.empty()
        rollouts.extend(parts.prepare(fresh))
        batch = parts.loss.count(mixture.sample())
        assert int(batch["expert_mask"].sum()) == 32
        optimiser.zero_grad()
        losses: list[Tensor] = [x for key, x in parts.loss(batch).items() if key.startswith("loss_")]
        sum(losses).backward()
        optimiser.param_groups[0]["lr"] = 0.2 * (1 - step / 50)
        optimiser.step()
    assert best_probability(task, actor) > 0.9
