"""The first coefficient of a run with a target KL."""

import math

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_llm_kl.training._steps import first_coefficient


def batch_of(rewards: Tensor, groups: Tensor) -> TensorDict:
    step = TensorDict(reward=rewards[:, None], batch_size=[len(rewards)])
    return TensorDict(next=step, group=groups, batch_size=[len(rewards)])


@pytest.mark.parametrize("rewards", [(0.0, 1.0), (0.0, 0.0, 0.0, 1.0), (3.0, 1.0, -2.0, 0.5)])
@pytest.mark.parametrize("target", [1e-3, 0.02])
def test_the_optimum_has_the_target_kl(rewards: tuple[float, ...], target: float) -> None:
    """By enumeration: equally likely answers, and the policy that maximises reward minus coefficient times KL."""
    values = torch.tensor(rewards, dtype=torch.float64)
    many = values.repeat(1000)  # a small sample has a larger unbiased variance than its distribution
    batch = batch_of(many, torch.zeros(len(many), dtype=torch.long))
    coefficient = first_coefficient(batch, target, charged=True)
    assert coefficient is not None
    optimum = torch.softmax(values / coefficient, 0)
    kl = (optimum * (optimum * len(values)).log()).sum().item()
    assert kl == pytest.approx(target, rel=2 * math.sqrt(target) + 1e-3)


def test_prompts_of_different_difficulty() -> None:
    """By hand: deviations 1, -1, 2, -2 from the groups' means 1 and 5 have the unbiased variance 10 / 2."""
    batch = batch_of(torch.tensor([2.0, 0.0, 7.0, 3.0]), torch.tensor([4, 4, 9, 9]))
    assert first_coefficient(batch, 0.2, charged=True) == pytest.approx(math.sqrt(5 / 0.4))
    # One group with the mean 3, for an algorithm that compares no answers.
    alike = math.sqrt(26 / 3 / 0.4)
    assert first_coefficient(batch.exclude("group"), 0.2, charged=True) == pytest.approx(alike)
    assert first_coefficient(batch, 0.2, charged=True, compares=False) == pytest.approx(alike)


def test_the_kl_in_the_rewards_is_no_spread() -> None:
    """By hand: the rewards are equal before 0.5 times the KL of each answer is subtracted."""
    kl = torch.tensor([[0.2, 0.4], [0.1, 0.0]])
    batch = batch_of(1.0 - 0.5 * kl.sum(-1), torch.tensor([0, 0]))
    batch["next", "kl_penalty"] = kl
    assert first_coefficient(batch, 0.5, charged=True, coefficient=0.5) is None
    assert first_coefficient(batch, 0.5, charged=True) == pytest.approx(0.25 / math.sqrt(2))


def test_the_spread_of_advantages() -> None:
    """By hand, per answer and per token. Tokens outside the mask do not count, and a constant changes nothing."""
    for baseline in (0.0, 10.0):
        per_answer = TensorDict(advantage=torch.tensor([[3.0], [-1.0]]) + baseline, batch_size=[2])
        assert first_coefficient(per_answer, 0.5, charged=False) == pytest.approx(2.0)
    mask = torch.tensor([[True, True, False], [False, True, False]])
    for advantage in (torch.tensor([[[3.0]], [[-1.0]]]), torch.tensor([[3.0, 3.0, 9.0], [9.0, -1.0, 9.0]])[..., None]):
        batch = TensorDict(advantage=advantage, masks=TensorDict(all_assistant_mask=mask), batch_size=[2])
        assert first_coefficient(batch, 0.5, charged=False) == pytest.approx(math.sqrt(32 / 9))


def test_nothing_to_compare() -> None:
    equal = batch_of(torch.ones(4), torch.tensor([0, 0, 1, 1]))
    assert first_coefficient(equal, 0.5, charged=True) is None
    assert first_coefficient(equal, 0.5, charged=False) is None
    assert first_coefficient(equal.set("advantage", torch.ones(4, 1)), 0.5, charged=False) is None
