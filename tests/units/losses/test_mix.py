"""Mixtures of own attempts and experts, by hand; the schedule of the weight between them."""

from __future__ import annotations

import inspect
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from by_hand import own_names
from objective_cases import random_batch
from torchrl_llm_kl.losses import aggregate, count, get_objective, mix, mix_chord, mu_schedule, ppo

NAN = float("nan")
HYPER = {"clip_low": 0.3, "clip_high": 0.2, "clip_ratio_c": 2.5}
SCHEDULE = {"mu_warmup_steps": 4, "mu_decay_steps": 8, "mu_peak": 0.8, "mu_valley": 0.2}


def batch(experts: tuple[bool, bool, bool] = (False, True, False)) -> dict[str, Tensor]:
    """Row 0: ratios 2, 1/2 and 1.1; row 1 of an expert: probabilities 1/2 and 1/5; row 2: ratio 4 with A < 0."""
    old = torch.full((3, 3), -5.0, dtype=torch.float64)
    log_prob = old + torch.tensor([[2.0, 0.5, 1.1], [1.0, 1.0, 1.0], [4.0, 1.0, 1.0]], dtype=torch.float64).log()
    log_prob[1] = torch.tensor([0.5, 0.2, 0.7], dtype=torch.float64).log()
    old[1] = NAN
    return {
        "log_prob": log_prob.requires_grad_(),
        "mask": torch.tensor([[True, True, True], [True, True, False], [True, False, False]]),
        "old_log_prob": old,
        "advantage": torch.tensor([[3.0, -3.0, 5.0], [NAN, NAN, NAN], [-1.0, 9.0, 9.0]], dtype=torch.float64),
        "expert_mask": torch.tensor(experts).unsqueeze(-1).expand(3, 3),
    }


def total(terms: Any, mode: str = "token-mean") -> Tensor:
    parts = [t.weight * aggregate(t.value, t.mask, t.aggregation or mode, denominator=count(t.mask)) for t in terms]
    return sum(parts[1:], parts[0])


def close(actual: Any, expected: Any) -> None:
    expected = torch.tensor(expected, dtype=torch.float64)
    assert_close(torch.as_tensor(actual, dtype=torch.float64), expected, rtol=1e-6, atol=1e-8)


def test_mix_by_hand() -> None:
    data = batch()
    usual, expert = mix(**data, mu=0.25, **HYPER)
    assert (usual.name, expert.name) == ("usual", "expert")
    assert (usual.weight, expert.weight) == (0.75, 0.25)
    close(usual.value[usual.mask].detach(), [-3.6, 2.1, -5.5, 2.5])
    close(expert.value[expert.mask].detach(), [0.6931472, 1.6094379])
    assert usual.mask.tolist() == [[True, True, True], [False] * 3, [True, False, False]]
    assert expert.mask.tolist() == [[False] * 3, [True, True, False], [False] * 3]
    loss = total((usual, expert))
    # 3/4 of -4.5 / 4 and 1/4 of ln(10) / 2
    close(loss.detach(), 0.75 * -1.125 + 0.25 * 1.1512925)
    (gradient,) = torch.autograd.grad(loss, data["log_prob"])
    # Of the usual tokens only ratio 1.1 is inside the bounds: -5.5 / 4 * 3/4. Each token of the expert: -1 / 2 * 1/4.
    close(gradient, [[0.0, 0.0, -1.03125], [-0.125, -0.125, 0.0], [0.0, 0.0, 0.0]])
    close(usual.metrics["clip_fraction"], 0.5)
    close(expert.metrics["expert_fraction"], 2 / 6)


def test_mix_chord_by_hand() -> None:
    data = batch()
    usual, expert = mix_chord(**data, step=8, **SCHEDULE, **HYPER)
    close([usual.weight, expert.weight, expert.metrics["mu"]], [0.5, 0.5, 0.5])
    close(usual.value[usual.mask].detach(), [-3.6, 2.1, -5.5, 2.5])
    close(expert.value[expert.mask].detach(), [0.1732868, 0.2575101])
    (gradient,) = torch.autograd.grad(total((usual, expert)), data["log_prob"])
    close(gradient, [[0.0, 0.0, -0.6875], [-0.0625, -0.04, 0.0], [0.0, 0.0, 0.0]])
    close(expert.metrics["weight_mean"], 0.205)


def test_chord_without_phi_is_mix() -> None:
    usual, expert = mix_chord(**batch(), mu_peak=0.9, mu_valley=0.25, enable_phi_function=False, **HYPER)
    other_usual, other_expert = mix(**batch(), mu=0.25, **HYPER)
    assert_close(usual.value, other_usual.value)
    assert_close(expert.value, other_expert.value)
    assert (usual.weight, expert.weight) == (0.75, 0.25)


@pytest.mark.parametrize("name", ["mix", "mix_chord"])
@pytest.mark.parametrize("all_experts", [True, False])
def test_a_part_without_rows_is_0(name: str, all_experts: bool) -> None:
    data = random_batch(3)
    data["log_prob"].requires_grad_()
    data["expert_mask"] = torch.full_like(data["mask"], all_experts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        usual, expert = get_objective(name)(**data)
        loss = total((usual, expert))
    empty, full = (usual, expert) if all_experts else (expert, usual)
    assert not empty.mask.any()
    assert torch.equal(full.mask, data["mask"])
    (gradient,) = torch.autograd.grad(loss, data["log_prob"])
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert (gradient != 0).any()
    assert all(metric.isfinite() for term in (usual, expert) for metric in term.metrics.values())


def test_without_experts_the_usual_part_is_ppo() -> None:
    data = random_batch(4)
    data["expert_mask"] = torch.zeros_like(data["mask"])
    usual, _ = mix(**data, **HYPER)
    (alone,) = ppo(**data, **HYPER)
    assert_close(usual.value, alone.value)


@pytest.mark.parametrize("name", ["mix", "mix_chord"])
def test_defaults_are_trinitys(name: str) -> None:
    expected = {"clip_low": 0.2, "clip_high": 0.2, "clip_ratio_c": 3.0, "mu": 0.1}
    expected |= {"step": 0, "mu_warmup_steps": 0, "mu_decay_steps": 0, "mu_peak": 0.1, "mu_valley": 0.1}
    expected |= {"enable_phi_function": True, "usual_aggregation": None, "expert_aggregation": None}
    parameters = inspect.signature(get_objective(name)).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
    assert defaults == {key: expected[key] for key in defaults}


@pytest.mark.parametrize("name", ["mix", "mix_chord"])
def test_trinitys_names(name: str) -> None:
    objective = get_objective(name)
    own = objective(**batch(), clip_low=0.3, clip_high=0.15, usual_aggregation="seq-mean-token-sum")
    trinitys = {"clip_range_low": 0.3, "clip_range": 0.15, "grpo_loss_agg_mode": "seq-mean-token-sum"}
    other = objective(**batch(), **own_names(objective, **trinitys))
    assert_close(own[0].value, other[0].value)
    assert [term.aggregation for term in other] == ["seq-mean-token-sum", None]
    modes = {"sft_loss_agg_mode": "seq-mean-token-mean", "grpo_loss_agg_mode": "none"}
    assert [term.aggregation for term in objective(**batch(), **own_names(objective, **modes))] == [
        "none",
        "seq-mean-token-mean",
    ]


@pytest.mark.parametrize(
    "key",
    [
        "use_dynamic_bsz",
        "ppo_mini_batch_size",
        "ppo_micro_batch_size_per_gpu",
        "ngpus_trainer",
        "train_batch_size_usual",
        "train_batch_size_expert",
    ],
)
@pytest.mark.parametrize("name", ["mix", "mix_chord"])
def test_batch_sizes_have_no_effect_and_a_warning_says_so(name: str, key: str) -> None:
    with pytest.warns(UserWarning, match=f"{name}: {key} has no effect here: each part is divided by its own count"):
        assert own_names(get_objective(name), **{key: 7}) == {}
    with pytest.raises(TypeError, match=f"{name} has no hyper-parameter '{key}': leave it out"):
        get_objective(name)(**batch(), **{key: 7})


def test_mu_may_be_a_tensor() -> None:
    mu = torch.tensor(0.3)
    usual, expert = mix(**batch(), mu=mu)
    close([usual.weight, expert.weight], [0.7, 0.3])
    usual, expert = mix_chord(**batch(), mu_valley=mu.requires_grad_())
    close([usual.weight.detach(), expert.weight.detach()], [0.7, 0.3])
    assert "mu" not in expert.metrics  # a constant
    usual, expert = mix_chord(**batch(), mu_valley=mu, mu_decay_steps=2, step=2)
    close([usual.weight.detach(), expert.weight.detach(), expert.metrics["mu"]], [0.7, 0.3, 0.3])
    assert not expert.metrics["mu"].requires_grad


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"mu": 1.5}, "mu must be at least 0 and at most 1, got 1.5"),
        ({"clip_low": 2.0}, "clip_low must be at least 0 and at most 1, got 2.0"),
        ({"expert_aggregation": "mean"}, "unknown aggregation 'mean'.*Known: token-mean, "),
        ({"usual_aggregation": "mean"}, "unknown aggregation 'mean'.*Known: token-mean, "),
        ({"expert_mask": None}, "mix needs expert_mask: pass expert_mask="),
        ({"old_log_prob": None}, "mix needs old_log_prob: pass old_log_prob="),
    ],
)
def test_bad_input(hyper: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mix(**{**batch(), **hyper})


@pytest.mark.parametrize(
    ("step", "mu"),
    [
        (0, 0.0),
        (1, 0.2),
        (3, 0.6),
        (4, 0.8),
        (6, 0.2 + 0.3 * (1 + math.sqrt(0.5))),
        (8, 0.5),
        (12, 0.2),
        (13, 0.2),
        (99, 0.2),
    ],
)
def test_the_schedule_by_hand(step: int, mu: float) -> None:
    arguments = tuple(SCHEDULE.values())
    number = mu_schedule(step, *arguments)
    assert isinstance(number, float)
    close(number, mu)
    on_device = mu_schedule(torch.tensor(step), *arguments)
    assert isinstance(on_device, Tensor)
    assert on_device.shape == ()
    assert_close(on_device, torch.tensor(mu))
    assert_close(mu_schedule(step, 4, 8, torch.tensor(0.8), torch.tensor(0.2)), torch.tensor(mu))


@pytest.mark.parametrize(
    ("warmup", "decay", "expected"), [(0, 0, [0.2] * 3), (2, 0, [0.0, 0.4, 0.2]), (0, 2, [0.8, 0.5, 0.2])]
)
def test_a_schedule_without_warm_up_or_decay(warmup: int, decay: int, expected: list[float]) -> None:
    close([mu_schedule(step, warmup, decay, 0.8, 0.2) for step in range(3)], expected)


def test_the_schedule_does_not_read_a_tensor() -> None:
    """Tensors without data raise when they are read."""
    data = {key: value.detach().to("meta") for key, value in batch().items()}
    usual, expert = mix_chord(**data, step=torch.tensor(3, device="meta"), **SCHEDULE)
    assert usual.weight.device.type == expert.metrics["mu"].device.type == "meta"


def test_a_step_that_is_counted_up_in_place() -> None:
    step = torch.tensor(0)
    weights = []
    for _ in range(3):
        weights.append(float(mix_chord(**batch(), step=step, **SCHEDULE)[1].weight))
        step += 1
    close(weights, [0.0, 0.2, 0.4])


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"mu_peak": 1.1}, "mu_peak must be at least 0 and at most 1, got 1.1"),
        ({"mu_valley": -0.1}, "mu_valley must be at least 0 and at most 1, got -0.1"),
        ({"mu_warmup_steps": -1}, "mu_warmup_steps must be at least 0, got -1"),
        ({"mu_decay_steps": -2}, "mu_decay_steps must be at least 0, got -2"),
        ({"step": -3}, "step must be at least 0, got -3"),
    ],
)
def test_bad_schedules(hyper: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mix_chord(**batch(), **hyper)
