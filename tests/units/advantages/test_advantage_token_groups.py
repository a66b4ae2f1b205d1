"""Advantages of tokens that compare within groups: by hand, and by enumeration of what they are for."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from torchrl_llm_kl.advantages import clip_b, clip_v, grpo, optimal_token_baseline, reinforce_plus_plus_baseline

F64 = {"dtype": torch.float64}
NAN = float("nan")


# ------------------------------------------------------------------ REINFORCE++-baseline


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    """Centred outcomes -1, 1 and 0, 0 on 1, 3, 1 and 1 tokens: mean 1/3, variance (16/9 + 3 * 4/9 + 2/9) / 5 = 2/3."""
    reward, group = torch.tensor([1.0, 3.0, 7.0, 7.0, 5.0], **F64), torch.tensor([4, 4, -2, -2, 9])
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
    got = reinforce_plus_plus_baseline(reward, group, mask)
    low, zero, high = (x * math.sqrt(3 / 2) for x in (-4 / 3, -1 / 3, 2 / 3))
    want = torch.tensor([[low, 0, 0], [high, high, high], [0, zero, 0], [zero, 0, 0], [0, 0, 0]], **F64)
    assert_close(got, want, atol=2e-7, rtol=0)
    assert (got[4] == 0).all()  # a group of one; its tokens are in no statistic either
    assert_close(reinforce_plus_plus_baseline(reward[:4], group[:4], mask[:4]), got[:4])
    equal = reinforce_plus_plus_baseline(torch.full((5,), 0.1), torch.zeros_like(group), mask)
    assert torch.equal(equal, torch.zeros(5, 3))


def test_groups_in_a_batch_of_other_dimensions() -> None:
    rng = torch.Generator().manual_seed(0)
    reward, group = torch.randn(2, 3, generator=rng), torch.tensor([[0, 1, 0], [1, 1, 0]])
    log_prob, mask = -torch.rand(2, 3, 4, generator=rng), torch.rand(2, 3, 4, generator=rng) < 0.7
    per_token = torch.randn(2, 3, 4, generator=rng)
    for function, first, rest in (
        (reinforce_plus_plus_baseline, reward, ()),
        (optimal_token_baseline, per_token, (log_prob, log_prob.exp())),
        (clip_b, reward, (log_prob, 1 - log_prob)),
        (clip_v, reward, (log_prob, 1 - log_prob, log_prob)),
    ):
        got = function(first, group, *rest, mask)
        flat = function(first.flatten(0, 1), group.flatten(), *(x.flatten(0, 1) for x in rest), mask.flatten(0, 1))
        assert_close(got.flatten(0, 1), flat)
        assert (got != 0).any()


# ------------------------------------------------------------------ optimal token baseline


def otb_batch() -> dict[str, Tensor]:
    """Answers of 3, 2 and 1 response tokens; holes hold NaN. Squared norms 0.5, 0.5, 1 and 1, 0.25 and 0.5."""
    mask = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0], [1, 0, 0, 0]]).bool()
    probability = torch.tensor([[0.5, NAN, 0.5, 0.25], [NAN, 0.25, 0.75, NAN], [0.5, NAN, NAN, NAN]], **F64)
    collision = torch.tensor([[0.5, NAN, 0.5, 0.5], [NAN, 0.5, 0.75, NAN], [0.5, NAN, NAN, NAN]], **F64)
    reward = torch.tensor([[1.0, NAN, 0.0, 2.0], [NAN, 0.0, 4.0, NAN], [-1.0, NAN, NAN, NAN]], **F64)
    return {"reward": reward, "old_log_prob": probability.log(), "collision": collision, "mask": mask}


def test_optimal_token_baseline_by_hand() -> None:
    """First tokens: returns 3, 4, -1 of weights 1/2, 1, 1/2; second: 2 and 4 of 1 and 5/4; third: 2 alone."""
    batch = otb_batch()
    got = optimal_token_baseline(group=torch.zeros(3, dtype=torch.long), **batch)
    first, second = (1.5 + 4 - 0.5) / 2, (2 + 5) / 2.25
    want = [[3 - first, 0, 2 - second, 2], [0, 4 - first, 4 - second, 0], [-1 - first, 0, 0, 0]]
    assert_close(got, torch.tensor(want, **F64))
    without = optimal_token_baseline(group=torch.zeros(3, dtype=torch.long), handle_zero_tail=False, **batch)
    want[0][3] = 0
    assert_close(without, torch.tensor(want, **F64))


def test_optimal_token_baseline_keeps_groups_apart_and_gives_one_alone_0() -> None:
    batch = otb_batch()
    got = optimal_token_baseline(group=torch.tensor([8, 3, 8]), **batch)
    assert (got[1] == 0).all()
    rows = torch.tensor([0, 2])
    pair = optimal_token_baseline(group=torch.tensor([0, 0]), **{name: x[rows] for name, x in batch.items()})
    assert_close(got[rows], pair)
    first = (0.5 * 3 - 0.5) / 1
    assert_close(pair, torch.tensor([[3 - first, 0, 2, 2], [-1 - first, 0, 0, 0]], **F64))
    # Beside an answer without tokens there is nothing to compare with either.
    batch["mask"][2] = False
    assert (optimal_token_baseline(group=torch.tensor([8, 3, 8]), **batch) == 0).all()


def test_optimal_token_baseline_of_equal_returns_is_0_and_of_certain_tokens_the_mean() -> None:
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


def test_the_weight_of_a_token_is_the_squared_norm_of_its_gradient() -> None:
    """By autograd, of each token of a vocabulary: two answers of one token, whose baseline then is that of their weights."""
    logits = torch.tensor([0.4, -1.0, 1.5, 0.0], requires_grad=True, **F64)
    log_p = logits.log_softmax(0)
    norms = [torch.autograd.grad(x, logits, retain_graph=True)[0].square().sum() for x in log_p]
    collision = log_p.detach().exp().square().sum().expand(2, 1)
    reward, group = torch.tensor([[1.0], [0.0]], **F64), torch.zeros(2, dtype=torch.long)
    for a, b in itertools.product(range(4), repeat=2):
        log_prob = log_p.detach()[[a, b]].unsqueeze(1)
        got = optimal_token_baseline(reward, group, log_prob, collision, torch.ones(2, 1, dtype=torch.bool))
        baseline = norms[a] / (norms[a] + norms[b])
        assert_close(got.squeeze(1), torch.stack([1 - baseline, -baseline]))


# ------------------------------------------------------------------ Clip_B, Clip_V


def distributions() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of 2 answers of 4 tokens, log-probs of sampled tokens, entropies, mean discriminators."""
    rng = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(2, 4, 5, generator=rng, **F64)
    log_p = logits.log_softmax(-1)
    sampled = log_p.gather(-1, torch.tensor([[0, 1, 2, 3], [4, 0, 1, 2]]).unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    mean = (log_p.exp().square() * (entropy.unsqueeze(-1) + log_p)).sum(-1)
    return logits, sampled, entropy, mean


def test_the_difference_of_discriminators_is_the_change_of_the_entropy() -> None:
    """dH of a step along ``grad log p(y)`` in the logits is ``-(S_y - E[S])``, by autograd, for every token."""
    logits, _, entropy, mean = distributions()
    position = logits[0, 0].clone().requires_grad_()
    log_p = position.log_softmax(0)
    (slope,) = torch.autograd.grad(-(log_p.exp() * log_p).sum(), position, retain_graph=True)
    for y in range(5):
        (direction,) = torch.autograd.grad(log_p[y], position, retain_graph=True)
        score = log_p[y].exp() * (entropy[0, 0] + log_p[y])
        assert_close((slope * direction).sum(), mean[0, 0] - score)


def test_clip_b_by_hand() -> None:
    """Scores of six tokens; means and deviations over all of them, of both signs."""
    p = torch.tensor([[0.5, 0.9, 0.2], [0.4, 0.05, 0.3]], **F64)
    entropy = torch.tensor([[0.6, 0.3, 1.1], [0.9, 0.5, 1.0]], **F64)
    scores = [x * (h + math.log(x)) for x, h in zip(p.flatten().tolist(), entropy.flatten().tolist(), strict=True)]
    below = [(s - sum(scores) / 6) / statistics.pstdev(scores) for s in scores]
    assert sorted(range(6), key=below.__getitem__)[:2] == [4, 2]  # one of a failure, one of a success
    reward, group, mask = torch.tensor([1.0, 0.0], **F64), torch.tensor([3, 3]), torch.ones(2, 3, dtype=torch.bool)
    plain = grpo(reward, group, epsilon=0.5).unsqueeze(-1).expand(2, 3)
    for mu, left_out in ((-below[4] + 0.01, False), (-below[4] - 0.01, True)):
        got = clip_b(reward, group, p.log(), entropy, mask, mu=mu, epsilon=0.5)
        want = plain.clone()
        want[1, 1] = 0 if left_out else want[1, 1]
        assert_close(got, want)


def test_clip_v_leaves_out_the_largest_losses_of_entropy() -> None:
    """Losses 5, 4, 3, ... of a failure, none of a success; at most a share of all tokens, and one at least."""
    reward, group, mask = torch.tensor([1.0, 0.0], **F64), torch.tensor([3, 3]), torch.ones(2, 5, dtype=torch.bool)
    one = torch.zeros(2, 5, **F64)  # certain tokens have a discriminator of 0
    loss = torch.tensor([[9.0, 0, 0, 0, 0], [3.0, 5.0, 0.0, 4.0, -6.0]], **F64)
    sigma = statistics.pstdev(loss.flatten().tolist())
    plain = grpo(reward, group).unsqueeze(-1).expand(2, 5)

    def left_out(**hyper: float) -> list[int]:
        got = clip_v(reward, group, one, one, loss, mask, **hyper)
        assert_close(got[got != 0], plain[got != 0])
        assert (got[0] != 0).all()
        return (got[1] == 0).nonzero().squeeze(-1).tolist()

    cases = {(3.5, 1.0): [1, 3], (4.5, 1.0): [1], (2.5, 0.2): [1, 3], (2.5, 0.19): [1], (2.5, 0.0): [1], (5.5, 1.0): []}
    for (deviations, share), tokens in cases.items():
        assert left_out(mu=deviations / sigma, max_frac=share) == tokens
    assert left_out() == []  # 8.5 deviations


def test_equal_scores_are_never_left_out() -> None:
    reward, group, mask = torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.ones(2, 3, dtype=torch.bool)
    log_prob, entropy = torch.full((2, 3), -0.1), torch.full((2, 3), 0.7)
    plain = grpo(reward, group).unsqueeze(-1).expand(2, 3)
    assert torch.equal(clip_b(reward, group, log_prob, entropy, mask, mu=0.0), plain)
    assert torch.equal(clip_v(reward, group, log_prob, entropy, torch.full((2, 3), 0.9), mask, mu=0.0), plain)


def test_clipping_loses_less_entropy() -> None:
    """The sum of first-order changes over all tokens: left out are tokens of a failure whose penalty costs entropy."""
    _, sampled, entropy, mean = distributions()
    reward, group, mask = torch.tensor([1.0, 0.0], **F64), torch.tensor([0, 0]), torch.ones(2, 4, dtype=torch.bool)
    plain = grpo(reward, group).unsqueeze(-1).expand(2, 4)
    score = sampled.exp() * (entropy + sampled)
    got = clip_v(reward, group, sampled, entropy, mean, mask, mu=2.0, max_frac=1.0)
    assert 0 < int((got == 0).sum()) < 4
    change = [(a * (mean - score)).sum() for a in (plain, got)]
    assert change[1] > change[0] + 1e-3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, g, m: clip_b(x[:, 0], g, x, x, m, mu=-0.1), "mu must be at least 0, got -0.1"),
        (lambda x, g, m: clip_b(x[:, 0], g, x, x, m, epsilon=-0.1), "epsilon must be at least 0, got -0.1"),
        (lambda x, g, m: clip_v(x[:, 0], g, x, x, x, m, mu=-0.2), "mu must be at least 0, got -0.2"),
        (lambda x, g, m: clip_v(x[:, 0], g, x, x, x, m, max_frac=1.5), "max_frac must be .* at most 1, got 1.5"),
    ],
)
def test_hyper_parameters_out_of_range(call, message: str) -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=message):
        call(x, torch.zeros(2, dtype=torch.long), x == 0)
