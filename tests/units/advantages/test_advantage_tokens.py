"""Advantages of tokens: by hand, against a slow loop, with holes in the mask; distillation summed over a vocabulary."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.testing import assert_close

from closeness import assert_near
from torchrl_llm_kl.advantages import (
    advantage_spec,
    clip_b,
    clip_v,
    gae,
    get_advantage,
    jsd,
    on_policy_distill,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from torchrl_llm_kl.advantages._token import whitened

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
    stacked = gae(*(x.reshape(2, 2, 6) for x in (reward, value, mask)), gamma=gamma, lam=lam)
    for ours, of_any_shape, slow in zip(got, stacked, slow_gae(reward, value, mask, gamma, lam), strict=True):
        assert_close(ours, slow)
        assert torch.equal(of_any_shape.reshape(4, 6), ours)


def test_gae_whitens_the_advantage_and_not_the_target() -> None:
    """Without discount and value, advantages 3, 2, 2 and 1: mean 2, variance 2/3."""
    reward = torch.tensor([[1.0, 9.0, 2.0], [1.0, 1.0, 9.0]], **F64)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    value = torch.zeros_like(reward)
    advantage, target = gae(reward, value, mask, whiten=True)
    unit = math.sqrt(1.5)
    assert_close(advantage, torch.tensor([[unit, 0, 0], [0, -unit, 0]], **F64), atol=2e-7, rtol=0)
    assert_close(target, torch.tensor([[3.0, 0, 2], [2, 1, 0]], **F64))


def test_reinforce_plus_plus_by_hand() -> None:
    """gamma 0.5: returns 1, 2 and 3."""
    reward = torch.tensor([[0.0, 9.0, 2.0], [3.0, 9.0, 9.0]], **F64)
    mask = torch.tensor([[True, False, True], [True, False, False]])
    got = reinforce_plus_plus(reward, mask, gamma=0.5)
    assert_close(got, torch.tensor([[-1.0, 0, 0], [1, 0, 0]], **F64), atol=2e-7, rtol=0)
    undiscounted = reinforce_plus_plus(reward, mask)  # returns 2, 2, 3
    third = 1 / math.sqrt(3)
    assert_close(undiscounted, torch.tensor([[-third, 0, -third], [2 * third, 0, 0]], **F64), atol=2e-7, rtol=0)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_equal_returns_are_exactly_0_after_whitening(count: int) -> None:
    reward, mask = torch.zeros(count, 3), torch.ones(count, 3, dtype=torch.bool)
    reward[:, -1] = 0.1
    assert torch.equal(reinforce_plus_plus(reward, mask), torch.zeros(count, 3))
    alone = torch.zeros(count, 3, dtype=torch.bool)
    alone[0, 1] = True
    assert torch.equal(reinforce_plus_plus(torch.full((count, 3), 5.0), alone), torch.zeros(count, 3))


def test_whitening_by_hand_where_little_or_nothing_varies() -> None:
    """Variance 2e-8 of two tokens, and 1e-8 added. Of equal numbers, nothing is left to round; nothing at all is possible."""
    mask = torch.tensor([[True, True, False]])
    result = whitened(torch.tensor([[0.0, 2e-4, 0.0]], **F64), mask)
    assert_close(result, torch.tensor([[-1.0, 1.0, 0.0]], **F64) / math.sqrt(3))
    for tokens in range(50):
        value = torch.full((1, tokens + 1), 0.1)
        value[0, -1] = 0.0
        assert (whitened(value, torch.arange(tokens + 1).unsqueeze(0) < tokens) == 0).all()
    assert whitened(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)).shape == (0, 3)
    assert whitened(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)) == 0


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


each = pytest.mark.parametrize("name", TOKEN)


@each
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
    for got in results(name, x, y, torch.zeros_like(mask)):
        assert torch.equal(got, torch.zeros(5, 7))


@each
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


# ------------------------------------------------------------------ distillation


def divergence(name: str, log_pi: Tensor, log_teacher: Tensor, beta: float) -> Tensor:
    """From its definition, with the graph through the mixture."""
    pi, teacher = log_pi.exp(), log_teacher.exp()
    if name == "on_policy_distill":
        return (pi * (log_pi - log_teacher)).sum()
    log_mixture = (beta * teacher + (1 - beta) * pi).log()
    return beta * (teacher * (log_teacher - log_mixture)).sum() + (1 - beta) * (pi * (log_pi - log_mixture)).sum()


def policy_gradient(name: str, logits: Tensor, log_teacher: Tensor, **hyper: float) -> Tensor:
    """The gradient of the mean of ``A log pi`` over every token, which ascends."""
    log_pi = logits.log_softmax(-1)
    mask = torch.ones(1, len(logits), dtype=torch.bool)
    weight = get_advantage(name)(log_pi.detach()[None], log_teacher[None], mask, **hyper)[0]
    return torch.autograd.grad((log_pi.exp().detach() * weight * log_pi).sum(), logits)[0]


@pytest.mark.parametrize("name", ["jsd", "on_policy_distill"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**20), vocab=st.integers(2, 9), beta=st.sampled_from([0.05, 0.3, 0.5, 0.9]))
def test_the_policy_gradient_is_minus_that_of_the_divergence(name: str, seed: int, vocab: int, beta: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits, other = torch.randn(2, vocab, generator=rng, **F64).unbind()
    logits.requires_grad_()
    log_teacher = other.log_softmax(-1)
    (want,) = torch.autograd.grad(divergence(name, logits.log_softmax(-1), log_teacher, beta), logits)
    hyper = {"beta": beta} if name == "jsd" else {}
    assert_close(policy_gradient(name, logits, log_teacher, **hyper), -want)
    assert_close(policy_gradient(name, logits, log_teacher, kl_coef=2.5, **hyper), -2.5 * want)


@pytest.mark.parametrize("name", ["jsd", "on_policy_distill"])
def test_steps_along_it_shrink_the_divergence(name: str) -> None:
    log_teacher = torch.tensor([0.7, 0.2, 0.05, 0.05], **F64).log()
    logits = torch.tensor([-1.0, 0.5, 1.5, 0.0], dtype=torch.float64, requires_grad=True)
    seen = []
    for _ in range(200):
        with torch.no_grad():
            seen.append(divergence(name, logits.log_softmax(-1), log_teacher, 0.3).item())
        step = policy_gradient(name, logits, log_teacher, **({"beta": 0.3} if name == "jsd" else {}))
        logits = (logits + 1.0 * step).detach().requires_grad_()
    assert all(after < before for before, after in itertools.pairwise(seen))
    assert seen[-1] < 1e-3 * seen[0]


def test_jsd_by_hand() -> None:
    """Student 1/2, 1/2 and teacher 9/10, 1/10; beta 1/4: mixture 0.6, 0.4."""
    student = torch.tensor([[0.5, 0.5, 0.5]], **F64).log()
    teacher = torch.tensor([[0.9, 0.1, 0.2]], **F64).log()
    want = 2.0 * 0.75 * torch.tensor([[1.2, 0.8, 1.0]], **F64).log()
    mask = torch.tensor([[True, True, False]])
    assert_close(jsd(student, teacher, mask, beta=0.25, kl_coef=2.0), want)
    trinity = {"lambda_coef": 0.25, "kl_coef": 2.0, "temperature": 1.0, "chunk_size": None}
    assert_close(jsd(student, teacher, mask, **advantage_spec(jsd).hyperparameters.translate(trinity)), want)


def test_a_token_of_teacher_probability_0_has_a_finite_advantage() -> None:
    student, never = torch.tensor([[-1.0]]), torch.tensor([[-float("inf")]])
    got = jsd(student, never, torch.tensor([[True]]), beta=0.25)
    assert_close(got, 0.75 * torch.tensor([[0.75]]).log())


def test_settings_of_jsd_that_are_refused_and_a_chunk_size_that_warns() -> None:
    x = -torch.ones(1, 1)
    for beta in (0.0, 1.0, -0.1, 1.1):  # at the ends the divergence is 0
        with pytest.raises(ValueError, match=r"beta must be greater than 0 and less than 1, got .*on_policy_distill"):
            jsd(x, x, x == 0, beta=beta)
    translate = advantage_spec(jsd).hyperparameters.translate
    with pytest.raises(ValueError, match=r"temperature=2.0 is not supported.*scored with at that temperature"):
        translate({"temperature": 2.0})
    with pytest.warns(UserWarning, match="chunk_size has no effect here"):
        assert jsd(x, x, x < 0, **translate({"chunk_size": 64})) == 0


def test_the_student_as_its_own_teacher_has_advantage_0() -> None:
    x = -torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
    assert (on_policy_distill(x, x, x < 0) == 0).all()
    assert_near(jsd(x, x, x < 0, beta=0.3), torch.zeros(2, 3), size=1)
