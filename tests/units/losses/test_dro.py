"""DRO by hand, where its gradient vanishes, and what it learns from the data of a fixed policy."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from by_hand import assert_result, evaluate, own_names, tensor
from torchrl_llm_kl.losses import aggregate, dro

# Log-ratios ln 2, -ln 2 and 0.
TOKENS = {
    "ratio": [[2.0, 0.5, 1.0]],
    "advantage": [[3.0, -1.0, 2.0]],
    "log_prob": [[-2.0, -1.0, -0.5]],
}
LN2 = math.log(2)


def test_tokens_by_hand() -> None:
    penalty = 0.2 * LN2**2
    assert_result(
        evaluate(dro, **TOKENS, beta=0.4),
        value=[[6.0 + penalty, -1.0 + penalty, 1.0]],
        gradient=[[-3.0 + 0.4 * LN2, 1.0 - 0.4 * LN2, -2.0]],
    )


def test_a_sequence_by_hand() -> None:
    """Log-probs of whole answers, -3 and -0.5; log-ratios ln 4 and ln 3; mean advantages 2 and -1. The last is masked out."""
    ratio, advantage = [[2.0, 2.0, 7.0], [3.0, 5.0, 5.0]], [[3.0, 1.0, 50.0], [-1.0, 9.0, 9.0]]
    log_prob = [[-2.0, -1.0, -9.0], [-0.5, -1.0, -1.0]]
    mask = torch.tensor([[True, True, False], [True, False, False]])
    result = evaluate(dro, ratio=ratio, advantage=advantage, log_prob=log_prob, mask=mask, beta=0.3, level="sequence")
    log4, log3 = math.log(4), math.log(3)
    assert_result(
        result,
        value=[[6.0 + 0.15 * log4**2], [-0.5 + 0.15 * log3**2]],
        gradient=[[-2.0 + 0.3 * log4] * 2 + [0.0], [1.0 + 0.3 * log3, 0.0, 0.0]],
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_gradient_vanishes_where_the_log_ratio_is_the_advantage_over_beta(level: str) -> None:
    advantage = tensor([[0.6, 0.6, 0.6], [-0.9, -0.9, -0.9]])
    share = 3.0 if level == "sequence" else 1.0  # the log-ratio of the whole answer is the sum
    log_prob = tensor([[-1.0, -0.2, -2.0], [-0.4, -3.0, -1.0]]).requires_grad_()
    old = log_prob.detach() - advantage / 0.3 / share
    (term,) = dro(log_prob, torch.ones(2, 3) == 1, old_log_prob=old, advantage=advantage, beta=0.3, level=level)
    (gradient,) = torch.autograd.grad(term.value.sum(), log_prob)
    assert_close(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("tempered", [1.0, 2.0])
def test_offline_it_learns_the_optimum_of_the_regularised_reward(tempered: float) -> None:
    """Answers of two tokens, all nine weighted by a fixed policy that is trained on but never sampled again."""
    rng = torch.Generator().manual_seed(0)
    beta, reward = 0.4, torch.rand(9, generator=rng, dtype=torch.float64)
    first, second = torch.randn(3, generator=rng).double(), torch.randn(3, 3, generator=rng).double()
    old_token = torch.stack(
        [first.log_softmax(-1).repeat_interleave(3), second.log_softmax(-1).flatten()], -1
    )  # [answers, tokens]
    old = old_token.sum(-1)
    soft_value = beta * (old + reward / beta).logsumexp(-1)
    data = (old * tempered).softmax(-1)  # whichever policy wrote the data
    logits = [first.clone().requires_grad_(), second.clone().requires_grad_()]
    optimiser = torch.optim.LBFGS(logits, max_iter=300, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

    def log_probs() -> Tensor:
        return torch.stack([logits[0].log_softmax(-1).repeat_interleave(3), logits[1].log_softmax(-1).flatten()], -1)

    def closure() -> Tensor:
        optimiser.zero_grad()
        mask, advantage = torch.ones(9, 2, dtype=torch.bool), (reward - soft_value).unsqueeze(-1).expand(9, 2)
        (term,) = dro(log_probs(), mask, old_log_prob=old_token, advantage=advantage, beta=beta, level="sequence")
        loss = (data.unsqueeze(-1) * term.value).sum()
        loss.backward()
        return loss

    for _ in range(5):
        optimiser.step(closure)
    optimum = (old + reward / beta).softmax(-1)
    assert (optimum - old.exp()).abs().sum() > 0.2
    assert_close(log_probs().sum(-1).exp(), optimum, rtol=1e-4, atol=1e-5)


def test_names_and_bounds() -> None:
    assert own_names(dro, dro_beta=0.2) == {"beta": 0.2}
    for beta in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"beta must be greater than 0, got {beta}"):
            evaluate(dro, **TOKENS, beta=beta)
    with pytest.raises(ValueError, match="level must be one of 'token', 'sequence', got 'answer'"):
        evaluate(dro, **TOKENS, level="answer")
    assert aggregate(evaluate(dro, **TOKENS)[0].value, torch.ones(1, 3) == 1).isfinite()
