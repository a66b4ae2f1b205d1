"""PPO's surrogate by hand, with different bounds on the two sides."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from by_hand import own_names
from torchrl_llm_kl.losses import ppo

LOG_2 = math.log(2.0)
MASK = torch.ones(1, 6, dtype=torch.bool)
# Ratios 2, 2, 1/2, 1/2, 1.1, 4 with advantages of both signs; bounds 0.7 and 1.2.
RATIO = torch.tensor([[2.0, 2.0, 0.5, 0.5, 1.1, 4.0]], dtype=torch.float64)
ADVANTAGE = torch.tensor([[3.0, -3.0, 3.0, -3.0, 5.0, -1.0]], dtype=torch.float64)
BOUNDS = {"clip_low": 0.3, "clip_high": 0.2, "clip_ratio_c": 3.0}


def values_and_gradient(**hyper: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    old = torch.full_like(RATIO, -5.0)
    log_prob = (old + RATIO.log()).requires_grad_()
    (term,) = ppo(log_prob, MASK, old_log_prob=old, advantage=ADVANTAGE, **hyper)
    (gradient,) = torch.autograd.grad(term.value.sum(), log_prob)
    return term.value.detach(), gradient, dict(term.metrics)


def test_values_and_gradients_by_hand() -> None:
    value, gradient, metrics = values_and_gradient(**BOUNDS)
    #                  clipped  free   free   clipped  free  dual bound
    assert_close(value, torch.tensor([[-3.6, 6.0, -1.5, 2.1, -5.5, 3.0]], dtype=torch.float64))
    assert_close(gradient, torch.tensor([[0.0, 6.0, -1.5, 0.0, -5.5, 0.0]], dtype=torch.float64))
    assert_close(metrics["clip_fraction"].item(), 2 / 6)
    assert_close(metrics["clip_fraction_low"].item(), 1 / 6)
    assert_close(metrics["clip_fraction_high"].item(), 1 / 6)
    assert_close(metrics["clip_fraction_dual"].item(), 1 / 6)


def test_without_the_dual_bound_a_large_ratio_is_free() -> None:
    value, gradient, _ = values_and_gradient(clip_low=0.3, clip_high=0.2, clip_ratio_c=None)
    assert_close(value[0, 5].item(), 4.0)
    assert_close(gradient[0, 5].item(), 4.0)


def test_trinitys_and_torchrls_names() -> None:
    expected = values_and_gradient(**BOUNDS)[0]

    def translated(**hyper: float) -> Tensor:
        return values_and_gradient(**own_names(ppo, **hyper))[0]

    assert_close(translated(clip_range_low=0.3, clip_range_high=0.2), expected)
    assert_close(translated(clip_range=0.3, clip_range_high=0.2), expected)
    assert_close(translated(clip_epsilon=0.25), values_and_gradient(clip_low=0.25, clip_high=0.25)[0])
    assert_close(translated(clip_ratio_low=0.3, clip_ratio_high=0.2), expected)  # verl's
    with pytest.raises(TypeError, match="are the same hyper-parameter"):
        translated(clip_low=0.3, clip_range_low=0.3)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"clip_range_low": 0.3}, "ppo has no hyper-parameter 'clip_range_low': pass 'clip_low'. PolicyLoss and make"),
        (
            {"clip_epsilon": 0.3},
            "'clip_epsilon': pass 'clip_low' and 'clip_high'. PolicyLoss and make_algorithm translate",
        ),
        ({"clip_lo": 0.3}, r"has no hyper-parameter 'clip_lo'\. Did you mean 'clip_low'\? Known: clip_low, "),
    ],
)
def test_the_function_knows_its_own_names_alone(hyper: dict[str, float], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        values_and_gradient(**hyper)


def test_sequence_masking_drops_negative_advantages_of_unlikely_sequences() -> None:
    old = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]])
    log_prob = torch.tensor([[-1.3, -1.1], [-1.2, -0.9]], requires_grad=True)  # 0.2 and 0.05 nats below
    advantage = torch.tensor([[-1.0, 2.0], [-1.0, -1.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    (term,) = ppo(
        log_prob,
        mask,
        old_log_prob=old,
        advantage=advantage,
        enable_sequence_masking=True,
        delta_sequence_masking=0.1,
        clip_low=0.5,
        clip_high=0.4,
    )
    ratio = (log_prob.detach() - old).exp()
    expected = torch.tensor([[0.0, -2.0 * ratio[0, 1]], [ratio[1, 0], ratio[1, 1]]])
    assert_close(term.value.detach(), expected)
    (gradient,) = torch.autograd.grad(term.value.sum(), log_prob)
    assert_close(gradient, expected)
    assert_close(term.metrics["sequence_masked_fraction"].item(), 0.25)
    assert term.mask.all()


def test_fallback_is_the_plain_policy_gradient() -> None:
    log_prob = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    advantage = torch.tensor([[1.5, -0.5]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    (term,) = ppo(log_prob, mask, advantage=advantage, fallback_to_policy_gradient=True)
    (gradient,) = torch.autograd.grad(term.value.sum(), log_prob)
    assert_close(gradient, -advantage)
    with pytest.raises(ValueError, match="ppo needs old_log_prob"):
        ppo(log_prob, mask, advantage=advantage)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"clip_low": 1.5}, "clip_low must be at least 0 and at most 1, got 1.5"),
        ({"clip_high": -0.1}, "clip_high must be at least 0, got -0.1"),
        ({"clip_ratio_c": 1.0}, "clip_ratio_c must be greater than 1, got 1.0"),
    ],
)
def test_bounds_out_of_range(hyper: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        values_and_gradient(**hyper)
