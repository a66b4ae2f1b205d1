"""Gradients of distillation, summed over a whole small vocabulary: no samples, so rounding is the only noise."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.testing import assert_close

from torchrl_llm_kl.advantages import advantage_spec, get_advantage, jsd, on_policy_distill


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
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20), vocab=st.integers(2, 9), beta=st.sampled_from([0.05, 0.3, 0.5, 0.9]))
def test_the_policy_gradient_is_minus_that_of_the_divergence(name: str, seed: int, vocab: int, beta: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits, other = torch.randn(2, vocab, generator=rng, dtype=torch.float64).unbind()
    logits.requires_grad_()
    log_teacher = other.log_softmax(-1)
    (want,) = torch.autograd.grad(divergence(name, logits.log_softmax(-1), log_teacher, beta), logits)
    hyper = {"beta": beta} if name == "jsd" else {}
    assert_close(policy_gradient(name, logits, log_teacher, **hyper), -want)
    assert_close(policy_gradient(name, logits, log_teacher, kl_coef=2.5, **hyper), -2.5 * want)


@pytest.mark.parametrize("name", ["jsd", "on_policy_distill"])
def test_steps_along_it_shrink_the_divergence(name: str) -> None:
    log_teacher = torch.tensor([0.7, 0.2, 0.05, 0.05], dtype=torch.float64).log()
    logits = torch.tensor([-1.0, 0.5, 1.5, 0.0], dtype=torch.float64, requires_grad=True)
    seen = []
    for _ in range(400):
        with torch.no_grad():
            seen.append(divergence(name, logits.log_softmax(-1), log_teacher, 0.3).item())
        logits = (
            logits + 0.5 * policy_gradient(name, logits, log_teacher, **({"beta": 0.3} if name == "jsd" else {}))
        ).detach()
        logits.requires_grad_()
    assert all(after < before for before, after in itertools.pairwise(seen))
    assert seen[-1] < 1e-3 * seen[0]


def test_jsd_by_hand() -> None:
    """Student 1/2, 1/2 and teacher 9/10, 1/10; beta 1/4: mixture 0.6, 0.4."""
    student = torch.tensor([[0.5, 0.5, 0.5]], dtype=torch.float64).log()
    teacher = torch.tensor([[0.9, 0.1, 0.2]], dtype=torch.float64).log()
    want = 2.0 * 0.75 * torch.tensor([[1.2, 0.8, 1.0]], dtype=torch.float64).log()
    mask = torch.tensor([[True, True, False]])
    assert_close(jsd(student, teacher, mask, beta=0.25, kl_coef=2.0), want)
    trinity = {"lambda_coef": 0.25, "kl_coef": 2.0, "temperature": 1.0, "chunk_size": None}
    assert_close(jsd(student, teacher, mask, **advantage_spec(jsd).hyperparameters.translate(trinity)), want)


def test_a_token_of_teacher_probability_0_has_a_finite_advantage() -> None:
    student, never = torch.tensor([[-1.0]]), torch.tensor([[-float("inf")]])
    got = jsd(student, never, torch.tensor([[True]]), beta=0.25)
    assert_close(got, 0.75 * torch.tensor([[0.75]]).log())


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.1, 1.1])
def test_at_the_ends_the_divergence_is_0(beta: float) -> None:
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"beta must be greater than 0 and less than 1, got .*use on_policy_distill"):
        jsd(x, x, x == 0, beta=beta)


def test_a_temperature_is_refused_and_a_chunk_size_warns() -> None:
    x = -torch.ones(1, 1)
    translate = advantage_spec(jsd).hyperparameters.translate
    with pytest.raises(ValueError, match=r"temperature=2.0 is not supported.*scored with at that temperature"):
        translate({"temperature": 2.0})
    with pytest.warns(UserWarning, match="chunk_size has no effect here"):
        assert jsd(x, x, x < 0, **translate({"chunk_size": 64})) == 0


def test_the_student_as_its_own_teacher_has_advantage_0() -> None:
    x = -torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
    assert (on_policy_distill(x, x, x < 0) == 0).all()
    assert_close(jsd(x, x, x < 0, beta=0.3), torch.zeros(2, 3), atol=1e-6, rtol=0)
