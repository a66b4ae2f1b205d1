"""Advantages of tokens: by hand, against a slow loop, and with holes in the mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.testing import assert_close

from torchrl_llm_kl.advantages import (
    clip_b,
    clip_v,
    gae,
    jsd,
    on_policy_distill,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)

F64 = {"dtype": torch.float64}


def slow_gae(
    reward: Tensor, value: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Sums of discounted temporal differences, each from its definition: no recursion."""
    advantage, target = torch.zeros_like(reward), torch.zeros_like(reward)
    for i, row in enumerate(mask):
        steps = row.nonzero().squeeze(-1).tolist()
        after = [*[value[i, t].item() for t in steps[1:]], 0.0]
        deltas = [reward[i, t].item() + gamma * v - value[i, t].item() for t, v in zip(steps, after, strict=False)]
        for k, t in enumerate(steps):
            advantage[i, t] = sum((gamma * lam) ** n * d for n, d in enumerate(deltas[k:]))
            target[i, t] = advantage[i, t] + value[i, t]
    return advantage, target


def test_gae_by_hand_skips_tokens_outside_the_response() -> None:
    """gamma 0.5, lam 0.25; from the end: 4 - 2 = 2; 1 + 0.5 * 2 - 3 = -1, + 0.125 * 2 = -0.75; 0.5 * 3 - 1 + 0.125 * -0.75."""
    nan = float("nan")
    reward = torch.tensor([[nan, 0.0, nan, nan, 1.0, 4.0, nan]], **F64)
    value = torch.tensor([[nan, 1.0, nan, nan, 3.0, 2.0, 8.0]], **F64)
    mask = torch.tensor([[False, True, False, False, True, True, False]])
    advantage, target = gae(reward, value, mask, gamma=0.5, lam=0.25)
    assert_close(advantage, torch.tensor([[0, 0.40625, 0, 0, -0.75, 2, 0]], **F64))
    assert_close(target, torch.tensor([[0, 1.40625, 0, 0, 2.25, 4, 0]], **F64))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20), gamma=st.sampled_from([0.0, 0.7, 1.0]), lam=st.sampled_from([0.0, 0.4, 1.0]))
def test_gae_is_the_sum_of_its_definition(seed: int, gamma: float, lam: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    reward, value = torch.randn(2, 4, 6, generator=rng, **F64)
    mask = torch.rand(4, 6, generator=rng) < 0.6
    mask[3] = False
    got = gae(reward, value, mask, gamma=gamma, lam=lam)
    for ours, slow in zip(got, slow_gae(reward, value, mask, gamma, lam), strict=True):
        assert_close(ours, slow)


def test_gae_takes_any_batch_shape() -> None:
    reward, value = torch.randn(2, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 3, 4, dtype=torch.bool)
    whole = gae(reward, value, mask, gamma=0.9, lam=0.5)[0]
    for i in range(2):
        assert_close(whole[i], gae(reward[i], value[i], mask[i], gamma=0.9, lam=0.5)[0])


def test_gae_whitens_the_advantage_and_not_the_target() -> None:
    """Without discount and value, advantages 3, 2, 2 and 1: mean 2, variance 2/3."""
    reward = torch.tensor([[1.0, 9.0, 2.0], [1.0, 1.0, 9.0]], **F64)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    value = torch.zeros_like(reward)
    advantage, target = gae(reward, value, mask, whiten=True)
    unit = math.sqrt(1.5)
    assert_close(advantage, torch.tensor([[unit, 0, 0], [0, -unit, 0]], **F64), atol=1e-7, rtol=0)
    assert_close(target, torch.tensor([[3.0, 0, 2], [2, 1, 0]], **F64))


def test_reinforce_plus_plus_by_hand() -> None:
    """gamma 0.5: returns 1, 2 and 3."""
    reward = torch.tensor([[0.0, 9.0, 2.0], [3.0, 9.0, 9.0]], **F64)
    mask = torch.tensor([[True, False, True], [True, False, False]])
    got = reinforce_plus_plus(reward, mask, gamma=0.5)
    assert_close(got, torch.tensor([[-1.0, 0, 0], [1, 0, 0]], **F64), atol=1e-7, rtol=0)
    undiscounted = reinforce_plus_plus(reward, mask)  # returns 2, 2, 3
    third = 1 / math.sqrt(3)
    assert_close(undiscounted, torch.tensor([[-third, 0, -third], [2 * third, 0, 0]], **F64), atol=1e-7, rtol=0)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_equal_returns_are_exactly_0_after_whitening(count: int) -> None:
    reward, mask = torch.zeros(count, 3), torch.ones(count, 3, dtype=torch.bool)
    reward[:, -1] = 0.1
    assert torch.equal(reinforce_plus_plus(reward, mask), torch.zeros(count, 3))
    alone = torch.zeros(count, 3, dtype=torch.bool)
    alone[0, 1] = True
    assert torch.equal(reinforce_plus_plus(torch.full((count, 3), 5.0), alone), torch.zeros(count, 3))


def test_on_policy_distill_by_hand() -> None:
    student, teacher = torch.tensor([[-1.0, -2.0, -9.0]], **F64), torch.tensor([[-3.0, -0.5, -1.0]], **F64)
    mask = torch.tensor([[True, True, False]])
    got = on_policy_distill(student, teacher, mask, kl_coef=0.5)
    assert_close(got, torch.tensor([[-1.0, 0.75, 0.0]], **F64))


TOKEN: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "gae": lambda x, y, mask: gae(x, y, mask, gamma=0.9, lam=0.8),
    "gae-whiten": lambda x, y, mask: gae(x, y, mask, gamma=0.9, lam=0.8, whiten=True),
    "reinforce_plus_plus": lambda x, y, mask: reinforce_plus_plus(x, mask, gamma=0.9),
    "on_policy_distill": lambda x, y, mask: on_policy_distill(x, y, mask),
    "jsd": lambda x, y, mask: jsd(x, y, mask, beta=0.3),
    "reinforce_plus_plus_baseline": lambda x, y, mask: reinforce_plus_plus_baseline(
        *outcomes(x, y, mask, torch.arange(len(x)).double()), mask
    ),
    "optimal_token_baseline": lambda x, y, mask: optimal_token_baseline(x, outcomes(x, y, mask)[1], y, -x, mask),
    "clip_b": lambda x, y, mask: clip_b(*outcomes(x, y, mask), x, -y, mask),
    "clip_v": lambda x, y, mask: clip_v(*outcomes(x, y, mask), x, -y, x * y, mask, mu=0.1),
}


def outcomes(x: Tensor, y: Tensor, mask: Tensor, reward: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Different outcomes of sequences in one group; shapes and graph as those of the tokens."""
    if x.shape != y.shape or x.shape != mask.shape:  # tests of shapes
        return torch.zeros(len(mask)), torch.zeros(len(mask), dtype=torch.long)
    reward = torch.arange(len(x)) if reward is None else reward
    return reward.to(x.dtype), torch.zeros(len(x), dtype=torch.long)


def results(name: str, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    found = TOKEN[name](x, y, mask)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("name", TOKEN)
def test_masked_out_numbers_have_no_effect_and_get_0(name: str) -> None:
    rng = torch.Generator().manual_seed(2)
    x, y = -torch.rand(2, 5, 7, generator=rng)
    mask = torch.rand(5, 7, generator=rng) < 0.5
    clean = results(name, x, y, mask)
    for bad in (float("nan"), float("inf"), -float("inf"), 1e4):
        spoilt = results(name, torch.where(mask, x, bad), torch.where(mask, y, bad), mask)
        for got, want in zip(spoilt, clean, strict=True):
            assert torch.equal(got, want)
            assert (got[~mask] == 0).all()
            assert (got[mask] != 0).any()


@pytest.mark.parametrize("name", TOKEN)
def test_no_graph_and_float32_or_wider(name: str) -> None:
    x, y = -torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mask = torch.ones(3, 4, dtype=torch.bool)
    for got in results(name, x.clone().requires_grad_(), y.clone().requires_grad_(), mask):
        assert not got.requires_grad
        assert got.dtype == torch.float64
    for got, wide in zip(
        results(name, x.bfloat16(), y.bfloat16(), mask),
        results(name, x.bfloat16().float(), y.bfloat16().float(), mask),
        strict=True,
    ):
        assert got.dtype == torch.float32
        assert torch.equal(got, wide)


@pytest.mark.parametrize("name", TOKEN)
def test_no_tokens_give_0(name: str) -> None:
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    for got in results(name, torch.full((2, 3), -1.0), torch.full((2, 3), -2.0), nothing):
        assert torch.equal(got, torch.zeros(2, 3))


@pytest.mark.parametrize("name", sorted(set(TOKEN) - {"reinforce_plus_plus_baseline"}))  # no numbers per token
def test_bad_shapes_and_masks(name: str) -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"mask has shape \(2, 3\) but \w+ has shape \(2, 1\)"):
        TOKEN[name](x[:, :1], x, x == 0)
    with pytest.raises(TypeError, match=r"mask must be boolean, got torch\.float32"):
        TOKEN[name](x, x, x)


@pytest.mark.parametrize("hyper", [{"gamma": 1.5}, {"lam": -0.1}])
def test_discounts_out_of_range(hyper: dict[str, float]) -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=f"{next(iter(hyper))} must be at least 0 and at most 1, got"):
        gae(x, x, x == 0, **hyper)
    with pytest.raises(ValueError, match="gamma must be at least 0 and at most 1, got -1"):
        reinforce_plus_plus(x, x == 0, gamma=-1)
