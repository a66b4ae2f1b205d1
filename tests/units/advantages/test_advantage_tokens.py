"""Advantages of tokens: by hand, against slow loops, over a whole vocabulary, and with holes in the mask."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.testing import assert_close

from closeness import assert_near
from refused import refused
from torchrl_llm_kl import advantages
from torchrl_llm_kl.advantages import clip_b, clip_v, gae, iw_opd, jsd, optimal_token_baseline, reinforce_plus_plus
from torchrl_llm_kl.advantages._token import whitened

F64 = {"dtype": torch.float64}
NAN = float("nan")
ROOT_3 = math.sqrt(3)
TWO = torch.tensor([0, 0])


def f64(values: Any) -> Tensor:
    return torch.tensor(values, **F64)


def bools(values: Any) -> Tensor:
    return torch.tensor(values).bool()


ONES = bools([[1, 1, 1], [1, 1, 1]])
OUTCOME = f64([1.0, 0.0])


def slow_gae(reward: Tensor, value: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Sums of discounted temporal differences, each written out from its definition, without the recursion."""
    advantage, target = torch.zeros_like(reward), torch.zeros_like(reward)
    for i, row in enumerate(mask):
        steps = row.nonzero().squeeze(-1).tolist()
        after = [*[value[i, t].item() for t in steps[1:]], 0.0]
        deltas = [reward[i, t].item() + gamma * v - value[i, t].item() for t, v in zip(steps, after, strict=False)]
        for k, t in enumerate(steps):
            advantage[i, t] = sum((gamma * lam) ** n * d for n, d in enumerate(deltas[k:]))
            target[i, t] = advantage[i, t] + value[i, t]
    return advantage, target


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20), gamma=st.sampled_from([0.0, 0.7, 1.0]), lam=st.sampled_from([0.0, 0.4, 1.0]))
def test_gae_equals_the_sum_that_defines_it(seed: int, gamma: float, lam: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    reward, value = torch.randn(2, 4, 6, generator=rng, **F64)
    mask = torch.rand(4, 6, generator=rng) < 0.6
    mask[3] = False
    got = gae(reward, value, mask, gamma=gamma, lam=lam)
    stacked = gae(*(x.reshape(2, 2, 6) for x in (reward, value, mask)), gamma=gamma, lam=lam)
    for ours, of_any_shape, slow in zip(got, stacked, slow_gae(reward, value, mask, gamma, lam), strict=True):
        assert_close(ours, slow)
        assert torch.equal(of_any_shape.reshape(4, 6), ours)


def test_gae_by_hand_skips_tokens_outside_the_response() -> None:
    """gamma 0.5, lam 0.25; from the end: 4 - 2 = 2; 1 + 0.5 * 2 - 3 = -1, + 0.125 * 2 = -0.75; 0.5 * 3 - 1 + 0.125 * -0.75."""
    reward, value = f64([[NAN, 0.0, NAN, NAN, 1.0, 4.0, NAN]]), f64([[NAN, 1.0, NAN, NAN, 3.0, 2.0, 8.0]])
    advantage, target = gae(reward, value, bools([[0, 1, 0, 0, 1, 1, 0]]), gamma=0.5, lam=0.25)
    assert_close(advantage, f64([[0, 0.40625, 0, 0, -0.75, 2, 0]]))
    assert_close(target, f64([[0, 1.40625, 0, 0, 2.25, 4, 0]]))
    # Without discount and value, advantages 3, 2, 2 and 1: mean 2, variance 2/3.
    reward = f64([[1.0, 9.0, 2.0], [1.0, 1.0, 9.0]])
    advantage, target = gae(reward, torch.zeros_like(reward), bools([[1, 0, 1], [1, 1, 0]]), whiten=True)
    assert_close(advantage, f64([[1.0, 0, 0], [0, -1, 0]]) * math.sqrt(1.5), atol=2e-7, rtol=0)
    assert_close(target, f64([[3.0, 0, 2], [2, 1, 0]]))


def test_other_lambdas_of_the_targets_and_of_long_sequences() -> None:
    """Differences of 0.5, -0.5 and 2 in a sequence of 3, 0.25 and 1 in one of 2, and 3 in one of 1 token."""
    reward, value = (
        f64([[0.0, 0.0, 9.0, 2.5], [0.0, 1.5, 9.0, 9.0], [4.0, 9.0, 9.0, 9.0]]),
        f64([[0.5, 1.0, 9.0, 0.5]] * 3),
    )
    value[1], value[2, 0] = f64([0.25, 0.5, 9.0, 9.0]), 1.0
    mask = bools([[1, 1, 0, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    whole = f64([[2.5, 2.5, 0, 2.5], [1.5, 1.5, 0, 0], [4.0, 0, 0, 0]])
    half = f64([[0.75, 0.5, 0, 2.0], [0.75, 1.0, 0, 0], [3.0, 0, 0, 0]])
    advantage, target = gae(reward, value, mask, lam=0.5, lam_target=1.0)
    assert_close((advantage, target), (half, whole))
    # With alpha 1/2 the lambdas are 1 - 2 / 3, 0 and 0, as the last would be -1.
    adaptive = f64([[0.5 + (-0.5 + 2 / 3) / 3, -0.5 + 2 / 3, 0, 2.0], [0.25, 1.0, 0, 0], [3.0, 0, 0, 0]])
    advantage, target = gae(reward, value, mask, lam_alpha=0.5)
    assert_close((advantage, target), (adaptive, whole))
    advantage, target = gae(reward, value, mask, lam=0.25, lam_target=0.5, lam_alpha=0.5)
    assert_close((advantage, target), (adaptive, torch.where(mask, half + value, 0)))
    in_two = gae(*(torch.stack([x, x]) for x in (reward, value, mask)), lam_alpha=0.5)
    assert_close(in_two[0], torch.stack([adaptive, adaptive]))


def test_reinforce_plus_plus_by_hand() -> None:
    """gamma 0.5: returns 1, 2 and 3; without a discount 2, 2, 3."""
    reward, mask = f64([[0.0, 9.0, 2.0], [3.0, 9.0, 9.0]]), bools([[1, 0, 1], [1, 0, 0]])
    assert_close(reinforce_plus_plus(reward, mask, gamma=0.5), f64([[-1.0, 0, 0], [1, 0, 0]]), atol=2e-7, rtol=0)
    want = f64([[-1.0, 0, -1.0], [2, 0, 0]]) / ROOT_3
    assert_close(reinforce_plus_plus(reward, mask), want, atol=2e-7, rtol=0)


def test_whitening_of_nearly_equal_numbers_by_hand() -> None:
    """Two tokens with variance 2e-8, to which 1e-8 is added. Equal numbers give exactly 0; an empty mask is allowed."""
    assert_close(whitened(f64([[0.0, 2e-4, 0.0]]), bools([[1, 1, 0]])), f64([[-1.0, 1.0, 0.0]]) / ROOT_3)
    for tokens in range(50):
        value = torch.full((1, tokens + 1), 0.1)
        value[0, -1] = 0.0
        assert (whitened(value, torch.arange(tokens + 1).unsqueeze(0) < tokens) == 0).all()
    assert whitened(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)).shape == (0, 3)
    assert whitened(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)) == 0
    for n in (1, 3, 7):  # equal returns of equal outcomes
        reward = torch.zeros(n, 3)
        reward[:, -1] = 0.1
        assert torch.equal(reinforce_plus_plus(reward, reward > -1), torch.zeros(n, 3))


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    """Centred outcomes -1, 1 and 0, 0 on 1, 3, 1 and 1 tokens: mean 1/3, variance (16/9 + 3 * 4/9 + 2/9) / 5 = 2/3."""
    reward, group = f64([1.0, 3.0, 7.0, 7.0, 5.0]), torch.tensor([4, 4, -2, -2, 9])
    mask = bools([[1, 0, 0], [1, 1, 1], [0, 1, 0], [1, 0, 0], [1, 1, 1]])
    got = advantages.reinforce_plus_plus_baseline(reward, group, mask)
    low, zero, high = (x * math.sqrt(3 / 2) for x in (-4 / 3, -1 / 3, 2 / 3))
    want = f64([[low, 0, 0], [high, high, high], [0, zero, 0], [zero, 0, 0], [0, 0, 0]])
    assert_close(got, want, atol=2e-7, rtol=0)
    assert (got[4] == 0).all()  # a group of one, whose tokens are not in the statistics either
    assert_close(advantages.reinforce_plus_plus_baseline(reward[:4], group[:4], mask[:4]), got[:4])
    equal = advantages.reinforce_plus_plus_baseline(torch.full((5,), 0.1), torch.zeros_like(group), mask)
    assert torch.equal(equal, torch.zeros(5, 3))


# ------------------------------------------------------------------ all of them
REPEATED = advantages.reinforce_plus_plus_baseline
TOKEN: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "gae": lambda x, y, mask: gae(x, y, mask, gamma=0.9, lam=0.8),
    "gae-whiten": lambda x, y, mask: gae(x, y, mask, gamma=0.9, lam=0.8, whiten=True),
    "reinforce_plus_plus": lambda x, y, mask: reinforce_plus_plus(x, mask, gamma=0.9),
    "on_policy_distill": lambda x, y, mask: advantages.on_policy_distill(x, y, mask),
    "gae-lambdas": lambda x, y, mask: gae(x, y, mask, gamma=0.9, lam_target=0.8, lam_alpha=0.7),
    "ex_opd": lambda x, y, mask: advantages.ex_opd(x, y, 0.5 * y, mask, reward_scale=1.7),
    "rlsd": lambda x, y, mask: advantages.rlsd(*outcomes(x, y, mask), x, y, mask, clip=0.4),
    "jsd": lambda x, y, mask: jsd(x, y, mask, beta=0.3),
    "iw_opd": lambda x, y, mask: iw_opd(x, y, mask, amplification=0.7),
    "reinforce_plus_plus_baseline": lambda x, y, mask: REPEATED(*outcomes(x, y, mask), mask),
    "optimal_token_baseline": lambda x, y, mask: optimal_token_baseline(x, outcomes(x, y, mask)[1], y, -x, mask),
    "clip_b": lambda x, y, mask: clip_b(*outcomes(x, y, mask), x, -y, mask),
    "clip_v": lambda x, y, mask: clip_v(*outcomes(x, y, mask), x, -y, x * y, mask, mu=0.1),
}


def outcomes(x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences of one group with different outcomes, in shapes and graph like the tokens."""
    if x.shape != y.shape or x.shape != mask.shape:  # tests of shapes
        return torch.zeros(len(mask)), torch.zeros(len(mask), dtype=torch.long)
    rows = mask.shape[:-1]
    return torch.arange(rows.numel()).reshape(rows).to(x.dtype), torch.zeros(rows, dtype=torch.long)


def results(name: str, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    found = TOKEN[name](x, y, mask)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("name", TOKEN)
def test_masked_tokens_have_no_effect_and_get_0(name: str) -> None:
    rng = torch.Generator().manual_seed(2)
    x, y = -torch.rand(2, 6, 7, generator=rng)
    mask = torch.rand(6, 7, generator=rng) < 0.5
    clean = results(name, x, y, mask)
    for bad in (NAN, float("inf"), -float("inf"), 1e4):
        spoilt = results(name, torch.where(mask, x, bad), torch.where(mask, y, bad), mask)
        for got, want in zip(spoilt, clean, strict=True):
            assert torch.equal(got, want)
            assert (got[~mask] == 0).all()
            assert (got[mask] != 0).any()
    for got in results(name, x, y, torch.zeros_like(mask)):
        assert torch.equal(got, torch.zeros(6, 7))
    for got, want in zip(results(name, *(z.reshape(2, 3, 7) for z in (x, y, mask))), clean, strict=True):
        assert_close(got.flatten(0, 1), want)
    wide = results(name, x.bfloat16().float(), y.bfloat16().float(), mask)
    for got, same in zip(results(name, x.bfloat16(), y.bfloat16(), mask), wide, strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, same)
    for got in results(name, x.double().requires_grad_(), y.double().requires_grad_(), mask):
        assert not got.requires_grad
        assert got.dtype == torch.float64
    if name != "reinforce_plus_plus_baseline":  # its result is one number per sequence
        x = torch.zeros(2, 3)
        with pytest.raises(ValueError, match=r"mask has shape \(2, 3\) but \w+ has shape \(2, 1\)"):
            TOKEN[name](x[:, :1], x, x == 0)
        with pytest.raises(TypeError, match=r"mask must be boolean, got torch\.float32"):
            TOKEN[name](x, x, x)


test_hyper_parameters_out_of_range = refused(
    lambda call: call(torch.zeros(2, 3), TWO, torch.zeros(2, 3) == 0),
    (lambda x, g, m: gae(x, x, m, gamma=1.5), "gamma must be at least 0 and at most 1, got 1.5"),
    (lambda x, g, m: jsd(x, x, m, beta=1.0), "beta must be greater than 0 and less than 1"),
)


# ------------------------------------------------------------------ distillation
def divergence(name: str, log_pi: Tensor, log_teacher: Tensor, beta: float) -> Tensor:
    """The divergence from its definition; gradients also go through the mixture."""
    pi, teacher = log_pi.exp(), log_teacher.exp()
    if name == "on_policy_distill":
        return (pi * (log_pi - log_teacher)).sum()
    log_mixture = (beta * teacher + (1 - beta) * pi).log()
    return beta * (teacher * (log_teacher - log_mixture)).sum() + (1 - beta) * (pi * (log_pi - log_mixture)).sum()


def policy_gradient(name: str, logits: Tensor, log_teacher: Tensor, **hyper: float) -> Tensor:
    """The policy gradient (ascending): of the mean of ``A log pi`` over every token of the vocabulary."""
    log_pi = logits.log_softmax(-1)
    mask = torch.ones(1, len(logits), dtype=torch.bool)
    weight = advantages.get_advantage(name)(log_pi.detach()[None], log_teacher[None], mask, **hyper)[0]
    return torch.autograd.grad((log_pi.exp().detach() * weight * log_pi).sum(), logits)[0]


@pytest.mark.parametrize("name", ["jsd", "on_policy_distill"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**20), vocab=st.integers(2, 9), beta=st.sampled_from([0.05, 0.3, 0.5, 0.9]))
def test_the_policy_gradient_descends_the_divergence(name: str, seed: int, vocab: int, beta: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits, other = torch.randn(2, vocab, generator=rng, **F64).unbind()
    logits.requires_grad_()
    log_teacher = other.log_softmax(-1)
    (want,) = torch.autograd.grad(divergence(name, logits.log_softmax(-1), log_teacher, beta), logits)
    hyper = {"beta": beta} if name == "jsd" else {}
    assert_close(policy_gradient(name, logits, log_teacher, **hyper), -want)
    assert_close(policy_gradient(name, logits, log_teacher, kl_coef=2.5, **hyper), -2.5 * want)


def test_distillation_by_hand() -> None:
    mask = bools([[1, 1, 0]])
    got = advantages.on_policy_distill(f64([[-1.0, -2.0, -9.0]]), f64([[-3.0, -0.5, -1.0]]), mask, kl_coef=0.5)
    assert_close(got, f64([[-1.0, 0.75, 0.0]]))
    # Differences of -2, 1 and 1 among four sequences, one without tokens: weights 1.8, 1.4 and 1.2.
    holes = bools([[1, 0, 1, 1], [1, 1, 0, 0]])
    student, teacher = f64([[-1.0, -9.0, -2.0, -2.0], [-1.0] * 4]), f64([[-3.0, -1.0, -1.0, -1.0], [-1.0] * 4])
    assert_close(iw_opd(student, teacher, holes, amplification=0.8), f64([[-3.6, 0, 1.4, 1.2], [0.0] * 4]))
    assert_close(iw_opd(student, teacher, holes), f64([[-3.0, 0, 1.25, 1.125], [0.0] * 4]))
    # Student 1/2, 1/2 and teacher 9/10, 1/10; beta 1/4: mixture 0.6, 0.4.
    student, teacher = f64([[0.5, 0.5, 0.5]]).log(), f64([[0.9, 0.1, 0.2]]).log()
    want = 2.0 * 0.75 * f64([[1.2, 0.8, 1.0]]).log()
    assert_close(jsd(student, teacher, mask, beta=0.25, kl_coef=2.0), want)
    # A token that the teacher gives probability 0 has a finite advantage; a student that is its own teacher has 0.
    x = torch.tensor([[-1.0]])
    assert_close(jsd(x, -torch.inf * torch.ones(1, 1), x < 0, beta=0.25), 0.75 * torch.tensor([[0.75]]).log())
    # 2 * (3 - 1) - (0 - 1) and 2 * (1 - 2) - (1.5 - 2), halved.
    nats = f64([[-4.0, -2.5, 0]]), f64([[-1.0, -3.0, 0]]), f64([[-3.0, -2.0, 0]])
    assert_close(advantages.ex_opd(*nats, mask, reward_scale=2.0, kl_coef=0.5), f64([[2.5, -0.75, 0.0]]))
    assert_close(advantages.ex_opd(*nats, mask), f64([[1.25 * 2 + 1, 1.25 * -1 + 0.5, 0.0]]))
    x = -torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
    assert (advantages.on_policy_distill(x, x, x < 0) == 0).all()
    assert_near(jsd(x, x, x < 0, beta=0.3), torch.zeros(2, 3), size=1)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**20), scale=st.sampled_from([0.0, 0.5, 1.0, 1.7]))
def test_ex_opd_descends_the_kl_to_the_extrapolated_teacher(seed: int, scale: float) -> None:
    """The KL is to ``base ** (1 - scale) * teacher ** scale``, normalised, enumerated over the vocabulary."""
    logits, teacher, base = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed), **F64).unbind()
    teacher, base = teacher.log_softmax(-1), base.log_softmax(-1)
    log_pi = logits.requires_grad_().log_softmax(-1)
    target = ((1 - scale) * base + scale * teacher).log_softmax(-1)
    (want,) = torch.autograd.grad((log_pi.exp() * (log_pi - target)).sum(), logits, retain_graph=True)
    mask = torch.ones(1, 6, dtype=torch.bool)
    weight = advantages.ex_opd(log_pi.detach()[None], teacher[None], base[None], mask, reward_scale=scale)[0]
    (got,) = torch.autograd.grad((log_pi.exp().detach() * weight * log_pi).sum(), logits)
    assert_close(got, -want)


def test_rlsd_scales_the_advantage_of_grpo_by_the_teacher() -> None:
    """Outcomes 1 and 0 have the advantages +-1 / sqrt(2), divided by 1 + epsilon / deviation. Leads log 1.1, log 3, log 0.9."""
    student, mask = f64([[-1.0, -1.0, -1.0, 9.0]] * 2), bools([[1, 1, 1, 0]] * 2)
    teacher = student + f64([[1.1, 3.0, 0.9, NAN]] * 2).log()
    plain = advantages.grpo(OUTCOME, TWO).unsqueeze(-1)
    good, bad = f64([1.1, 1.2, 0.9, 0]), f64([1 / 1.1, 0.8, 1 / 0.9, 0])
    got = advantages.rlsd(OUTCOME, TWO, student, teacher, mask, mixture=1.0)
    assert_close(got, plain * torch.stack([good, bad]))
    got = advantages.rlsd(OUTCOME, TWO, student, teacher, mask, clip=0.05)
    half = f64([[1.025, 1.025, 0.975, 0], [0.975, 0.975, 1.025, 0]])
    half[1, 0] = (1 + max(1 / 1.1, 0.95)) / 2
    assert_close(got, plain * half)
    # Equal outcomes have an advantage of 0, even if the teacher rules a token out.
    teacher[0, 0] = -torch.inf
    assert (advantages.rlsd(torch.ones(2), TWO, student, teacher, mask) == 0).all()


# ------------------------------------------------------------------ optimal token baseline
def otb(group: list[int], rows: Any = slice(None), **hyper: Any) -> Tensor:
    """Answers of 3, 2 and 1 response tokens; holes hold NaN. Squared norms 0.5, 0.5, 1 and 1, 0.25 and 0.5."""
    probability = f64([[0.5, NAN, 0.5, 0.25], [NAN, 0.25, 0.75, NAN], [0.5, NAN, NAN, NAN]])
    collision = f64([[0.5, NAN, 0.5, 0.5], [NAN, 0.5, 0.75, NAN], [0.5, NAN, NAN, NAN]])
    reward = f64([[1.0, NAN, 0.0, 2.0], [NAN, 0.0, 4.0, NAN], [-1.0, NAN, NAN, NAN]])
    mask = hyper.pop("mask", bools([[1, 0, 1, 1], [0, 1, 1, 0], [1, 0, 0, 0]]))
    inputs = (x[rows] for x in (probability.log(), collision, mask))
    return optimal_token_baseline(reward[rows], torch.tensor(group), *inputs, **hyper)


def test_optimal_token_baseline_by_hand() -> None:
    """First tokens: returns 3, 4, -1 of weights 1/2, 1, 1/2; second: 2 and 4 of 1 and 5/4; third: 2 alone."""
    first, second = (1.5 + 4 - 0.5) / 2, (2 + 5) / 2.25
    want = [[3 - first, 0, 2 - second, 2], [0, 4 - first, 4 - second, 0], [-1 - first, 0, 0, 0]]
    assert_close(otb([0, 0, 0]), f64(want))
    want[0][3] = 0
    assert_close(otb([0, 0, 0], handle_zero_tail=False), f64(want))
    # Two groups, and a group of one.
    got, pair = otb([8, 3, 8]), otb([0, 0], [0, 2])
    assert (got[1] == 0).all()
    assert_close(got[[0, 2]], pair)
    first = (0.5 * 3 - 0.5) / 1
    assert_close(pair, f64([[3 - first, 0, 2, 2], [-1 - first, 0, 0, 0]]))
    # An answer without tokens is nothing to compare with.
    assert (otb([8, 3, 8], mask=bools([[1, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]])) == 0).all()


def test_optimal_token_baseline_for_equal_returns_and_certain_tokens() -> None:
    mask, ids = torch.ones(3, 2, dtype=torch.bool), torch.zeros(3, dtype=torch.long)
    log_prob, collision = torch.tensor([[0.3, 0.9], [0.2, 0.6], [0.7, 0.1]]).log(), torch.full((3, 2), 0.4)
    reward = torch.tensor([[0.0, 0.1]]).expand(3, 2)
    assert torch.equal(optimal_token_baseline(reward, ids, log_prob, collision, mask), torch.zeros(3, 2))
    outcome = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 6.0]])
    got = optimal_token_baseline(outcome, ids, torch.zeros(3, 2), torch.ones(3, 2), mask)
    assert_close(got, torch.tensor([[-2.0, -2], [-1, -1], [3, 3]]))
    # A squared norm that rounding makes negative is 0 too.
    rounded = torch.tensor([[1 - 6e-8, 1.0], [1.0, 1.0], [1.0, 1.0]])
    assert_close(optimal_token_baseline(outcome, ids, torch.zeros(3, 2), rounded, mask), got)


# ------------------------------------------------------------------ Clip_B, Clip_V
def plain_of(tokens: int, epsilon: float = 1e-6) -> Tensor:
    """The advantages of a success and a failure, unclipped."""
    return advantages.grpo(OUTCOME, TWO, epsilon=epsilon).unsqueeze(-1).expand(2, tokens)


def test_clipping_loses_less_entropy() -> None:
    """By the sum of first-order changes over all tokens. Clipped are tokens of a failure whose penalty lowers entropy."""
    log_p = (2 * torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1), **F64)).log_softmax(-1)
    sampled = log_p.gather(-1, torch.tensor([[0, 1, 2, 3], [4, 0, 1, 2]]).unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    mean = (log_p.exp().square() * (entropy.unsqueeze(-1) + log_p)).sum(-1)
    score = sampled.exp() * (entropy + sampled)
    got = clip_v(OUTCOME, TWO, sampled, entropy, mean, bools([[1] * 4] * 2), mu=2.0, max_frac=1.0)
    assert 0 < int((got == 0).sum()) < 4
    assert (got * (mean - score)).sum() > (plain_of(4) * (mean - score)).sum() + 1e-3


def test_clip_b_by_hand() -> None:
    """Scores of six tokens; mean and deviation are over all six, whatever their sign."""
    p, entropy = f64([[0.5, 0.9, 0.2], [0.4, 0.05, 0.3]]), f64([[0.6, 0.3, 1.1], [0.9, 0.5, 1.0]])
    scores = [x * (h + math.log(x)) for x, h in zip(p.flatten().tolist(), entropy.flatten().tolist(), strict=True)]
    below = [(s - sum(scores) / 6) / statistics.pstdev(scores) for s in scores]
    assert sorted(range(6), key=below.__getitem__)[:2] == [4, 2]  # one token of a failure and one of a success
    for mu, left_out in ((-below[4] + 0.01, False), (-below[4] - 0.01, True)):
        want = plain_of(3, 0.5).clone()
        want[1, 1] *= not left_out
        assert_close(clip_b(OUTCOME, TWO, p.log(), entropy, ONES, mu=mu, epsilon=0.5), want)


def test_clip_v_leaves_out_the_largest_losses_of_entropy() -> None:
    """A failure loses 5, 4, 3, ...; a success nothing. At most a share of all tokens is left out, and at least one."""
    one = torch.zeros(2, 5, **F64)  # tokens with probability 1 score 0
    loss = f64([[9.0, 0, 0, 0, 0], [3.0, 5.0, 0.0, 4.0, -6.0]])
    sigma = statistics.pstdev(loss.flatten().tolist())
    cases = {(3.5, 1.0): [1, 3], (4.5, 1.0): [1], (2.5, 0.2): [1, 3], (2.5, 0.19): [1], (2.5, 0.0): [1], (5.5, 1.0): []}
    hyper = [({"mu": deviations / sigma, "max_frac": share}, out) for (deviations, share), out in cases.items()]
    for given_ones, left_out in [*hyper, ({}, [])]:  # 8.5 deviations by default
        got = clip_v(OUTCOME, TWO, one, one, loss, bools([[1] * 5] * 2), **given_ones)
        assert_close(got[got != 0], plain_of(5)[got != 0])
        assert (got[0] != 0).all()
        assert (got[1] == 0).nonzero().squeeze(-1).tolist() == left_out


def test_equal_scores_are_never_left_out() -> None:
    same, reward = [torch.full((2, 3), value) for value in (-0.1, 0.7, 0.9)], OUTCOME.float()
    plain = advantages.grpo(reward, TWO).unsqueeze(-1).expand(2, 3)
    assert torch.equal(clip_b(reward, TWO, *same[:2], ONES, mu=0.0), plain)
    assert torch.equal(clip_v(reward, TWO, *same, ONES, mu=0.0), plain)
