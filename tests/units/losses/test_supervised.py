"""Imitation, and mixtures of own answers and experts' answers, by hand. Gradients show which weights are detached."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from by_hand import called, tensor as f64
from objective_cases import random_batch
from torchrl_llm_kl.estimators import ScheduledCoefficient
from torchrl_llm_kl.losses import LossInputs, aggregate, count, echo, get_objective, mix, mix_chord, ppo, spec_of
from torchrl_llm_kl.losses._parts import TermPart

NAN = float("nan")
HYPER = {"clip_low": 0.3, "clip_high": 0.2, "clip_ratio_c": 2.5}
SCHEDULE = {"warmup": 4, "decay": 8, "peak": 0.8, "valley": 0.2}
#: Of the tokens of ``mixture`` under HYPER: of the policy's own, and of the expert's.
ATTEMPTS, IMITATED = [-3.6, 2.1, -5.5, 2.5], [0.6931472, 1.6094379]


def scheduled(step: int, **given: Any) -> Tensor:
    """The weight after this many steps."""
    coefficient = ScheduledCoefficient(**given)
    for _ in range(step):
        coefficient.update()
    value: Tensor = coefficient()
    return value


def close(actual: Any, expected: Any) -> None:
    assert_close(torch.as_tensor(actual, dtype=torch.float64).detach(), f64(expected), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "probability", "hyper", "value", "gradient", "weight"),
    [
        ("sft", [0.5, 0.1], {}, [0.6931472, 2.3025851], [-1.0, -1.0], None),
        ("sft_is", [0.5, 0.1], {}, [0.3465736, 0.2302585], [-0.5, -0.1], 0.3),  # weighs by the probability
        ("sft_phi", [0.9, 0.5, 0.2], {}, [0.00948245, 0.1732868, 0.2575101], [-0.09, -0.25, -0.16], 0.5 / 3),
        # Above the cut-off nothing is trained: 0.09 and 0.25 times -log(0.4); 0.21 times -log(0.3).
        ("sft_phi", [0.9, 0.5, 0.3], {"cutoff_prob": f64(0.4)}, [0.0824662, 0.2290727, 0.2528343], [0, 0, -0.21], None),
        ("sft_phi", [0.9, 0.5, 0.3], {"cutoff_prob": 0.4}, [0.0824662, 0.2290727, 0.2528343], [0, 0, -0.21], None),
        ("sft_phi", [0.999, 0.5], {}, [9.995e-07, 0.1732868], [-0.000999, -0.25], None),  # without it all are
    ],
)
def test_imitation_by_hand(name: str, probability: Any, hyper: Any, value: Any, gradient: Any, weight: Any) -> None:
    log_prob = f64([[*probability, 0.01]]).log().requires_grad_()
    mask = torch.tensor([[True] * len(probability) + [False]])
    (term,) = called(get_objective(name), log_prob, mask, **hyper)
    assert term.name == "objective"
    close(term.value[mask], value)
    close(torch.autograd.grad(term.value[mask].sum(), log_prob)[0], [[*gradient, 0.0]])
    if weight is not None:
        close(term.metrics["weight_mean"], weight)


def test_the_weight_near_certainty_is_not_rounded_away() -> None:
    log_prob = torch.tensor([[-1e-9]], requires_grad=True)
    (term,) = called(get_objective("sft_phi"), log_prob, torch.tensor([[True]]))
    (gradient,) = torch.autograd.grad(term.value.sum(), log_prob)
    assert math.isclose(gradient.item(), -1e-9, rel_tol=1e-5)


def mixture() -> dict[str, Tensor]:
    """Row 0 has the ratios 2, 1/2 and 1.1. Row 1 is an expert's, with probabilities 1/2 and 1/5. Row 2 has the ratio 4."""
    old = f64([[-5.0] * 3, [NAN] * 3, [-5.0] * 3])
    log_prob = old + f64([[2.0, 0.5, 1.1], [1.0, 1.0, 1.0], [4.0, 1.0, 1.0]]).log()
    log_prob[1] = f64([0.5, 0.2, 0.7]).log()
    return {
        "log_prob": log_prob.requires_grad_(),
        "mask": torch.tensor([[True, True, True], [True, True, False], [True, False, False]]),
        "old_log_prob": old,
        "advantage": f64([[3.0, -3.0, 5.0], [NAN, NAN, NAN], [-1.0, 9.0, 9.0]]),
        "expert_mask": torch.tensor([False, True, False]).unsqueeze(-1).expand(3, 3),
    }


def total(terms: Any) -> Tensor:
    how = [(t, t.aggregation or "token-mean") for t in terms]
    return sum(t.weight * aggregate(t.value, t.mask, mode, denominator=count(t.mask)) for t, mode in how)


def assert_terms(terms: Any, data: dict[str, Tensor], gradient: list[list[float]], **parts: tuple[Any, ...]) -> None:
    """Check weight, values and aggregation of each term, and the gradient of the weighted sum."""
    found = {term.name: (term.weight, term.aggregation) for term in terms}
    assert found == {name: (weight, how[0] if how else None) for name, (weight, _, *how) in parts.items()}
    for term in terms:
        close(term.value[term.mask], parts[term.name][1])
    close(torch.autograd.grad(total(terms), data["log_prob"])[0], gradient)


def test_mix_by_hand() -> None:
    data = mixture()
    usual, expert = called(mix, **data, mu=0.25, **HYPER)
    assert usual.mask.tolist() == [[True, True, True], [False] * 3, [True, False, False]]
    assert expert.mask.tolist() == [[False] * 3, [True, True, False], [False] * 3]
    # 3/4 of -4.5 / 4 and 1/4 of ln(10) / 2
    close(total((usual, expert)), 0.75 * -1.125 + 0.25 * 1.1512925)
    # Of the usual tokens only ratio 1.1 is inside the bounds: -5.5 / 4 * 3/4. Each token of the expert: -1 / 2 * 1/4.
    slopes = [[0.0, 0.0, -1.03125], [-0.125, -0.125, 0.0], [0.0, 0.0, 0.0]]
    assert_terms((usual, expert), data, slopes, usual=(0.75, ATTEMPTS), expert=(0.25, IMITATED))
    close([usual.metrics["clip_fraction"], expert.metrics["expert_fraction"]], [0.5, 2 / 6])


def test_vapo_imitates_right_answers_beside_ppo() -> None:
    """The values of rows 0 and 2 are those of test_mix_by_hand. Row 1, with probabilities 1/2 and 1/5, is right."""
    data = mixture()
    data["old_log_prob"], data["advantage"] = (data[key].nan_to_num(-1.0) for key in ("old_log_prob", "advantage"))
    data["old_log_prob"][1] = data["log_prob"].detach()[1]
    del data["expert_mask"]
    policy, nll = called(get_objective("vapo"), **data, chosen=torch.tensor([False, True, False]), mu=0.25, **HYPER)
    assert torch.equal(policy.mask, data["mask"])
    # Over six tokens, and over the two right ones: 1 / 6 for A = -1, and -1 / 2 * 1/4.
    slopes = [[0.0, 0.0, -5.5 / 6], [1 / 6 - 0.125, 1 / 6 - 0.125, 0.0], [0.0, 0.0, 0.0]]
    values = [-3.6, 2.1, -5.5, 1.0, 1.0, 2.5]
    assert_terms((policy, nll), data, slopes, objective=(1.0, values), nll=(0.25, IMITATED, "token-mean"))


def test_echo_predicts_what_others_said_over_their_own_tokens() -> None:
    data = mixture()
    terms = called(echo, **data, mu=0.25, **HYPER)
    slopes = [[0.0, 0.0, -5.5 / 4], [-0.125, -0.125, 0.0], [0.0, 0.0, 0.0]]
    assert_terms(terms, data, slopes, objective=(1.0, ATTEMPTS), observation=(0.25, IMITATED, "token-mean"))
    assert called(echo, **mixture(), nll_aggregation=None)[1].aggregation is None


def test_echo_weighs_each_role_over_its_own_tokens() -> None:
    data = mixture()
    role = torch.where(data["expert_mask"], 3, 2)  # tools; the policy is the assistant
    role[1, 1] = 1  # a user
    terms = called(echo, **data, message_role=role, mu=0.5, roles={"tool": 0.5, "user": 0.2}, **HYPER)
    slopes = [[0.0, 0.0, -5.5 / 4], [-0.25, -0.1, 0.0], [0.0, 0.0, 0.0]]
    tool, user = (0.25, IMITATED[:1], "token-mean"), (0.1, IMITATED[1:], "token-mean")
    assert_terms(terms, data, slopes, objective=(1.0, ATTEMPTS), observation_tool=tool, observation_user=user)
    assert len(called(echo, **data, message_role=role, roles={"tool": 1.0}, **HYPER)) == 2  # users are left out
    with pytest.raises(ValueError, match="user must be at least 0"):
        called(echo, **data, message_role=role, roles={"user": -1.0})
    # The loss reads roles only if they are weighed.
    assert "message_role" not in spec_of(echo).needs
    assert "message_role" in TermPart(echo, roles={"tool": 1.0}).needs


def test_sdar_gates_the_teachers_lead_beside_ppo() -> None:
    """With beta 2 the leads log 2, -log 2 and log 3 have the gates 4/5, 1/5 and 9/10."""
    log_prob, ratio = f64([[-1.0, -2.0, -3.0, -4.0]]), f64([[1.1, 1.1, 4.0, 9.0]])
    data = {"log_prob": log_prob.requires_grad_(), "mask": torch.tensor([[True, True, True, False]])}
    data |= {"old_log_prob": log_prob.detach() - ratio.log(), "advantage": f64([[1.0, -1.0, 1.0, 9.0]])}
    data["ref_log_prob"] = log_prob.detach() + f64([[2.0, 0.5, 3.0, 9.0]]).log()
    terms = called(get_objective("sdar"), **data, mu=0.25, beta=2.0, **HYPER)
    values = [0.8 * math.log(2), -0.2 * math.log(2), 0.9 * math.log(3)]
    slopes = [[(-1.1 - 0.2) / 3, (1.1 - 0.05) / 3, -0.225 / 3, 0.0]]
    assert_terms(terms, data, slopes, objective=(1.0, [-1.1, 1.1, -1.2]), distillation=(0.25, values))
    close([terms[1].metrics[name] for name in ("gate_mean", "reverse_kl")], [1.9 / 3, -math.log(3) / 3])


def test_mix_chord_by_hand() -> None:
    data = mixture()
    usual, expert = called(mix_chord, **data, mu=scheduled(8, **SCHEDULE), **HYPER)
    slopes = [[0.0, 0.0, -0.6875], [-0.0625, -0.04, 0.0], [0.0, 0.0, 0.0]]
    assert_terms((usual, expert), data, slopes, usual=(0.5, ATTEMPTS), expert=(0.5, [0.1732868, 0.2575101]))
    close(expert.metrics["weight_mean"], 0.205)
    assert expert.metrics.keys() == {"weight_mean", "expert_fraction"}
    mu = scheduled(0, peak=0.9, valley=0.25)
    without_phi = called(mix_chord, **mixture(), mu=mu, enable_phi_function=False, **HYPER)
    for term, same in zip(without_phi, called(mix, **mixture(), mu=0.25, **HYPER), strict=True):
        assert_close(term.value, same.value)
        assert term.weight == same.weight


@pytest.mark.parametrize(("name", "all_experts"), [("mix", True), ("mix_chord", True), ("mix", False)])
def test_a_part_without_tokens_is_0(name: str, all_experts: bool) -> None:
    data = random_batch(3)
    data["log_prob"].requires_grad_()
    data["expert_mask"] = torch.full_like(data["mask"], all_experts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        usual, expert = called(get_objective(name), **data, **HYPER)
        loss = total((usual, expert))
    empty, full = (usual, expert) if all_experts else (expert, usual)
    assert not empty.mask.any()
    assert torch.equal(full.mask, data["mask"])
    (gradient,) = torch.autograd.grad(loss, data["log_prob"])
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert (gradient != 0).any()
    assert all(metric.isfinite() for term in (usual, expert) for metric in term.metrics.values())
    if not all_experts:
        assert_close(usual.value, called(ppo, **data, **HYPER)[0].value)


def test_mu_may_be_a_tensor() -> None:
    """It is not read on the host. Reading a tensor on the device "meta" would raise."""
    close([term.weight for term in called(mix, **mixture(), mu=torch.tensor(0.3))], [0.7, 0.3])
    data = {key: value.detach().to("meta") for key, value in mixture().items()}
    coefficient = ScheduledCoefficient(**SCHEDULE).to("meta")
    coefficient.update()
    usual, expert = called(mix_chord, **data, mu=coefficient())
    assert usual.weight.device.type == expert.weight.device.type == "meta"


def test_the_schedule_by_hand() -> None:
    """Step by step and several steps at once. A loss calls the schedule and saves its state."""
    middle = 0.2 + 0.3 * (1 + math.sqrt(0.5))
    table = {0: 0.0, 1: 0.2, 3: 0.6, 4: 0.8, 6: middle, 8: 0.5, 12: 0.2, 13: 0.2, 99: 0.2}
    for step, mu in table.items():
        at_once = ScheduledCoefficient(**SCHEDULE)
        at_once.update(steps=step)
        for found in (scheduled(step, **SCHEDULE), at_once()):
            assert isinstance(found, Tensor), step
            assert_close(found, torch.tensor(mu))
    assert list(at_once.state_dict()) == ["value", "step"]
    given, coefficient = mixture(), ScheduledCoefficient(**SCHEDULE)
    inputs, part = LossInputs(given.pop("log_prob"), given.pop("mask"), **given), TermPart(mix_chord, mu=coefficient)
    for expected in (0.0, 0.2):
        expert = part(inputs)[1]
        close([expert.weight, expert.metrics["mu"]], [expected] * 2)
        coefficient.update()
    for warmup, decay, expected in ((0, 0, [0.2] * 3), (2, 0, [0.0, 0.4, 0.2]), (0, 2, [0.8, 0.5, 0.2])):
        close([scheduled(step, peak=0.8, valley=0.2, warmup=warmup, decay=decay) for step in range(3)], expected)
    for given in ({"warmup": -1}, {"decay": -1}, {"peak": -0.1}, {"valley": 1.1}, {"peak": NAN}):
        with pytest.raises(ValueError, match=f"{next(iter(given))} must be at least 0"):
            ScheduledCoefficient(**given)
