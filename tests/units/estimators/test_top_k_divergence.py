"""Divergences over a teacher's top k and "any other token", compared with enumeration and with TRL."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close

from closeness import assert_near
from head_reference import collapse, gkd_of
from torchrl_llm_kl.estimators import exact_kl_from_logits, top_k_divergence

F64 = {"dtype": torch.float64}
BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


def agree(got, want, logits, *, rtol=1e-11):
    """Check that values and the gradients of their sums are equal."""
    assert_close(got, want, atol=1e-12, rtol=rtol)
    pair = (torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (got, want))
    assert_close(*pair, atol=1e-12, rtol=10 * rtol)


def drawn(*shape, seed):
    """Logits of a student, with gradient, and of a teacher, with the log-probs of both."""
    logits, other = 2 * torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed), **F64)
    logits.requires_grad_()
    return logits, other, logits.log_softmax(-1), other.log_softmax(-1)


def listed(log_p):
    """Outcomes that list every token, so "any other token" has no probability."""
    return torch.cat([log_p, torch.full_like(log_p[..., :1], -torch.inf)], -1)


def test_by_hand():
    """The teacher is 3/4, 1/4, the student 1/2, 1/2, and the mixture for beta 1/4 is 9/16, 7/16. Beta may be a tensor."""
    student, teacher = torch.tensor([0.5, 0.5], **F64).log(), torch.tensor([0.75, 0.25], **F64).log()
    log = math.log
    forward = 0.75 * log(1.5) + 0.25 * log(0.5)
    reverse = 0.5 * log(2 / 3) + 0.5 * log(2)
    of_teacher = 0.75 * log(12 / 9) + 0.25 * log(4 / 7)
    of_student = 0.5 * log(8 / 9) + 0.5 * log(8 / 7)
    for beta, want in ((0.0, forward), (1.0, reverse), (0.25, 0.25 * of_teacher + 0.75 * of_student)):
        for given_beta in (beta, torch.tensor(beta, **F64)):
            assert float(top_k_divergence(student, teacher, beta=given_beta)) == pytest.approx(want, abs=1e-15)


@pytest.mark.parametrize("beta", BETAS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**20), v=st.integers(2, 10), data=st.data())
def test_value_and_gradient_by_enumeration(beta, seed, v, data):
    logits, _, log_q, log_p = drawn(4, v, seed=seed)
    ids = log_p.topk(data.draw(st.integers(1, v - 1)), -1).indices
    student, teacher = collapse(log_q, ids), collapse(log_p, ids)
    got = top_k_divergence(student, teacher, beta=beta)
    assert got.shape == (4,)
    agree(got, gkd_of(student, teacher, beta), logits)
    assert torch.equal(got, top_k_divergence(student, teacher, beta=torch.tensor(beta, **F64)))


@pytest.mark.parametrize("beta", BETAS)
def test_it_grows_with_k_up_to_the_exact_divergence(beta):
    """Joining outcomes never adds divergence. With every token listed, value and gradient are exact."""
    logits, other, log_q, log_p = drawn(6, 9, seed=5)
    direction = {0.0: "forward", 1.0: "reverse"}.get(beta, "jensen_shannon")
    share = {"beta": beta} if direction == "jensen_shannon" else {}
    exact = exact_kl_from_logits(logits, other, direction=direction, **share)
    ids = log_p.argsort(-1, descending=True)
    pairs = [[collapse(log, ids[..., :k]) for log in (log_q, log_p)] for k in range(1, 9)]
    found = [top_k_divergence(*pair, beta=beta) for pair in [*pairs, (listed(log_q), listed(log_p))]]
    assert all((a <= b + 1e-12).all() for a, b in pairwise(found))
    assert (found[0] >= 0).all()
    assert (found[-2] < exact + 1e-12).all()
    agree(found[-1], exact, logits)
    # Float32: the exact divergence in float64 is the truth.
    narrow = logits.detach().float().requires_grad_()
    value = top_k_divergence(listed(narrow.log_softmax(-1)), listed(log_p.float()), beta=beta)
    assert_near(value.double(), exact, terms=7, dtype=torch.float32)
    want = torch.autograd.grad(exact.sum(), logits)[0]
    assert_near(torch.autograd.grad(value.sum(), narrow)[0].double(), want, terms=7, dtype=torch.float32)


@pytest.mark.parametrize(("k", "beta"), [*zip([1, 4, 1, 4, 1], BETAS, strict=True)])
def test_trl_with_a_tail(k, beta):
    """TRL's distillation from a server has a tail of one minus the top k."""
    server = pytest.importorskip("trl.experimental.server_distillation.server_distillation_trainer")
    logits, _, log_q, log_p = drawn(5, 11, seed=8)
    ids = log_p.topk(k, -1).indices
    some = torch.ones_like(ids, dtype=torch.bool)
    (student, mask), (teacher, _) = (server._add_tail_bucket(log.gather(-1, ids), some) for log in (log_q, log_p))
    theirs = server._jsd_divergence(student, teacher, beta, mask).sum(-1)
    ours = top_k_divergence(collapse(log_q, ids), collapse(log_p, ids), beta=beta)
    agree(ours, theirs, logits, rtol=1e-10)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(
    ("student_rest", "teacher_rest"),
    [(-torch.inf, -torch.inf), (-400, -5), (-5, -torch.inf), (-torch.inf, -5), (-5, -400), (-2000, -torch.inf)],
)
def test_tails_without_probability(student_rest, teacher_rest, beta):
    """Values and gradients are finite. An outcome without probability under both models adds nothing."""
    for dtype in (torch.float32, torch.float64):
        student = torch.tensor([math.log(0.6), math.log(0.4), student_rest], dtype=dtype, requires_grad=True)
        teacher = torch.tensor([math.log(0.3), math.log(0.7), teacher_rest], dtype=dtype)
        value = top_k_divergence(student, teacher, beta=beta)
        (gradient,) = torch.autograd.grad(value, student)
        assert value.isfinite()
        assert gradient.isfinite().all()
        if max(student_rest, teacher_rest) < -1000:
            without = student.detach()[:2].requires_grad_()
            want = top_k_divergence(without, teacher[:2], beta=beta)
            assert_close(value, want)
            assert_close(gradient[:2], torch.autograd.grad(want, without)[0])
            assert gradient[2] == 0
        if student_rest == -400 and beta == 0:  # p (log p - log q) of the rest; its probability under the student is 0
            known = 0.3 * math.log(0.3 / 0.6) + 0.7 * math.log(0.7 / 0.4)
            assert value.item() == pytest.approx(known + math.exp(-5) * 395, rel=1e-6)
            assert float(gradient[2]) == pytest.approx(-math.exp(-5), rel=1e-6)


def test_half_precision_and_the_teacher():
    """Half precision is computed in float32. The teacher has no gradient."""
    student, teacher = (x.detach().bfloat16() for x in drawn(4, seed=0)[2:])
    got = top_k_divergence(student, teacher)
    assert got.dtype == torch.float32
    assert torch.equal(got, top_k_divergence(student.float(), teacher.float()))
    student, teacher = (torch.zeros(2).log_softmax(-1).requires_grad_() for _ in range(2))
    top_k_divergence(student, teacher).backward()
    assert teacher.grad is None


def test_wrong_inputs():
    with pytest.raises(ValueError, match=r"outcomes has shape \(3,\) but teacher_outcomes has shape \(2,\)"):
        top_k_divergence(torch.zeros(3), torch.zeros(2))
    for beta in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="beta must be at least 0 and at most 1"):
            top_k_divergence(torch.zeros(2), torch.zeros(2), beta=beta)
