"""Pure functions of tensors: objectives, terms, corrections, estimators, coefficients and advantages."""

import inspect
from functools import partial
from typing import Any

import pytest
import torch

from objective_cases import CASES, inputs_of, random_batch
from parity import same_on_both, to
from torchrl_llm_kl import AdaptiveEntropyCoefficient, AdaptiveKLCoefficient, estimators, get_estimator, losses
from torchrl_llm_kl.advantages import advantage_spec, available_advantages, get_advantage
from torchrl_llm_kl.estimators import available_estimators, exact_kl_from_logits, top_k_divergence

ROWS, WIDTH = 6, 5
BATCH = random_batch(0, ROWS, WIDTH)


def total(terms: Any, mode: str = "token-mean") -> torch.Tensor:
    parts = (t.weight * losses.aggregate(t.value, t.mask, t.aggregation or mode) for t in terms)
    return sum(parts, torch.zeros((), dtype=torch.float64, device=terms[0].value.device))


def values_and_gradients(function: Any, given: dict[str, Any]) -> Any:
    leaves = [x.requires_grad_() for x in given.values() if x.is_floating_point()]
    terms = function(**given)
    gradient = torch.autograd.grad(total(terms), leaves, allow_unused=True, materialize_grads=True)
    return [(t.value, t.mask, dict(t.metrics)) for t in terms], gradient


@pytest.mark.parametrize("case", CASES)
@same_on_both()
def test_objectives(model_at, at, case):
    name, hyper = CASES[case]
    function, given = losses.get_objective(name), inputs_of(name, BATCH)
    if "selected" in inspect.signature(function).parameters:
        given["selected"] = BATCH["expert_mask"]
    return values_and_gradients(partial(function, **hyper), {key: x.to(at, copy=True) for key, x in given.items()})


@pytest.mark.parametrize("mode", losses.AGGREGATIONS)
@same_on_both()
def test_aggregations(model_at, at, mode):
    value, mask = to((BATCH["log_prob"], BATCH["mask"]), at)
    options = {"max_len": 7} if mode.endswith("norm") else {}
    return losses.aggregate(value, mask, mode, **options), losses.count(mask, mode, **options)


ESTIMATORS = [name for name in available_estimators() if name != "exact"]


@same_on_both()
def test_estimators(model_at, at):
    given = to(BATCH, at)
    names = ("log_prob", "ref_log_prob", "old_log_prob")
    return {name: get_estimator(name)(*(given[key] for key in names)) for name in ESTIMATORS}


TERMS: dict[str, Any] = {
    **{f"ref-{name}": losses.KLToReference(0.3, name) for name in ("k1+", "k2", "k3", "corrected_k3+", "exact")},
    "ref-experts": losses.KLToReference(0.3, leave_out_experts=True),
    "sampler": losses.KLToSampler(0.2, "k3+"),
    "entropy": losses.EntropyBonus(0.1),
    "controlled": losses.KLToReference(AdaptiveKLCoefficient(0.2, 0.1, 100)),
}


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.filterwarnings("ignore:KL estimator")
@same_on_both()
def test_terms(model_at, at, name):
    term, given = to(TERMS[name], model_at), to({**BATCH, "sampler_log_prob": BATCH["old_log_prob"]}, at)
    log_prob = given["log_prob"].requires_grad_()
    (found,) = term(losses.LossInputs(**given, kl=log_prob**2, entropy=-log_prob))
    value = losses.aggregate(found.value, found.mask, "token-mean") * found.weight
    return value, torch.autograd.grad(value, log_prob)


CORRECTIONS: dict[str, Any] = {
    **{
        f"weights-{level}-{mode}": losses.ImportanceWeights(level=level, mode=mode, high=1.5)
        for level in ("token", "sequence", "geometric")
        for mode in ("truncate", "mask")
    },
    "rejection": losses.RejectionMask("seq_mean_k3", high=0.1),
    "sequence-mask": losses.OffPolicySequenceMask(),
    "top-entropy": losses.TopEntropyMask(0.4),
}


@pytest.mark.parametrize("name", CORRECTIONS)
@same_on_both()
def test_corrections(model_at, at, name):
    given = {**BATCH, "entropy": -BATCH["log_prob"], "sampler_log_prob": BATCH["ref_log_prob"]}
    return CORRECTIONS[name](losses.LossInputs(**to(given, at)))


@same_on_both()
def test_coefficients(model_at, at):
    found, of_target = (
        [],
        [kind(0.2, 0.5, warmup=0) for kind in (estimators.PIKLCoefficient, estimators.DualKLCoefficient)],
    )
    for coefficient in to(
        [AdaptiveKLCoefficient(0.2, 6.0, 100), estimators.FixedKLCoefficient(0.3), *of_target], model_at
    ):
        for kl in (12.0, 0.1):
            coefficient.update(torch.tensor(kl, device=at), 10)
            found.append(coefficient())
    entropy = AdaptiveEntropyCoefficient(0.18, 0.5, delta=0.02, high=0.6).to(model_at)
    entropy.update(torch.tensor(0.4, device=at))
    return [*found, entropy()]


@same_on_both()
def test_divergences_of_logits(model_at, at):
    student, teacher = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p, q = (x.to(at).log_softmax(-1) for x in (student, teacher))
    exact = [exact_kl_from_logits(*to((student, teacher), at), direction=d) for d in ("reverse", "forward")]
    return exact, [top_k_divergence(p, q, beta=beta) for beta in (0.0, 0.3, 1.0)]


GROUPS = torch.tensor([3, 5, 3, 5, 3, 3])
RUNS = torch.arange(ROWS)
INPUTS: dict[str, Any] = {
    "reward": torch.tensor([1.0, 4.0, 2.0, 5.0, 0.0, 6.0], dtype=torch.float64),
    "rewards": torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    "group": GROUPS,
    "run": RUNS,
    "step": torch.zeros(ROWS, dtype=torch.long),
    "state": RUNS % 2,
    "baseline": torch.full((ROWS,), 0.5, dtype=torch.float64),
    "length": BATCH["mask"].sum(-1),
    "mask": BATCH["mask"],
    "role": torch.arange(len(BATCH["mask"])) % 2,
    "value": BATCH["advantage"],
    "old_log_prob": BATCH["old_log_prob"],
    "teacher_log_prob": BATCH["ref_log_prob"],
    "entropy": -BATCH["log_prob"],
    "collision": BATCH["log_prob"].exp(),
    "discriminator": BATCH["log_prob"].exp() / 2,
}


@pytest.mark.parametrize("name", available_advantages())
@same_on_both()
def test_advantages(model_at, at, name):
    function = get_advantage(name)
    given = {key: INPUTS[key] for key in advantage_spec(function).needs}
    if name in ("gae", "reinforce_plus_plus", "optimal_token_baseline"):
        given["reward"] = BATCH["advantage"]
    return function(**to(given, at))
