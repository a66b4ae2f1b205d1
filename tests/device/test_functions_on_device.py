"""Pure functions of tensors: objectives, terms, corrections, estimators, coefficients and advantages."""

from typing import Any

import pytest
import torch

from by_hand import called
from objective_cases import CASES, inputs_of, random_batch
from parity import same_on_both, to
from torchrl_llm_kl import AdaptiveEntropyCoefficient, AdaptiveKLCoefficient, estimators, get_estimator, losses
from torchrl_llm_kl.advantages import advantage_spec, available_advantages, get_advantage
from torchrl_llm_kl.estimators import available_estimators, exact_kl_from_logits, top_k_divergence

ROWS, WIDTH = 6, 5
BATCH = random_batch(0, ROWS, WIDTH)


@pytest.mark.parametrize("case", CASES)
@same_on_both()
def test_objectives(model_at, at, case):
    """Compares the values and the gradient of their weighted sum."""
    name, hyper = CASES[case]
    function, given = losses.get_objective(name), inputs_of(name, BATCH)
    if name in ("clip_cov", "kl_cov"):
        given["selected"] = BATCH["expert_mask"]
    given = {key: x.to(at, copy=True).requires_grad_(x.is_floating_point()) for key, x in given.items()}
    terms = called(function, **given, **hyper)
    parts = [t.weight * losses.aggregate(t.value, t.mask, t.aggregation or "token-mean") for t in terms]
    leaves = [x for x in given.values() if x.requires_grad]
    gradient = torch.autograd.grad(sum(parts), leaves, allow_unused=True, materialize_grads=True)
    return [(t.value, t.mask, dict(t.metrics)) for t in terms], gradient


@pytest.mark.parametrize("mode", losses.AGGREGATIONS)
@same_on_both()
def test_aggregations(model_at, at, mode):
    value, mask = to((BATCH["log_prob"], BATCH["mask"]), at)
    options = {"max_len": 7} if mode.endswith("norm") else {}
    return losses.aggregate(value, mask, mode, **options), losses.count(mask, mode, **options)


@same_on_both()
def test_estimators(model_at, at):
    given = [to(BATCH[key], at) for key in ("log_prob", "ref_log_prob", "old_log_prob")]
    return {name: get_estimator(name)(*given) for name in available_estimators() if name != "exact"}


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
    **{f"weights-{x}": losses.ImportanceWeights(level=x, high=1.5) for x in ("token", "sequence", "geometric")},
    **{
        f"mask-{x}": losses.ImportanceWeights(level=x, mode="mask", high=1.5)
        for x in ("token", "sequence", "geometric")
    },
    "rejection": losses.RejectionMask("seq_mean_k3", high=0.1),
    "sequence-mask": losses.OffPolicySequenceMask(),
    "total-variation": losses.TotalVariationMask(0.1),
    "top-entropy": losses.TopEntropyMask(0.4),
}


@pytest.mark.parametrize("name", CORRECTIONS)
@same_on_both()
def test_corrections(model_at, at, name):
    given = {**BATCH, "entropy": -BATCH["log_prob"], "sampler_log_prob": BATCH["ref_log_prob"]}
    return CORRECTIONS[name](losses.LossInputs(**to(given, at)))


@same_on_both()
def test_coefficients(model_at, at):
    given = [AdaptiveKLCoefficient(0.2, 6.0, 100), estimators.FixedKLCoefficient(0.3)]
    given += [kind(0.2, 0.5, warmup=0) for kind in (estimators.PIKLCoefficient, estimators.DualKLCoefficient)]
    found = []
    for coefficient in to(given, model_at):
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


INPUTS: dict[str, Any] = {
    "reward": torch.tensor([1.0, 4.0, 2.0, 5.0, 0.0, 6.0], dtype=torch.float64),
    "rewards": torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    "group": torch.tensor([3, 5, 3, 5, 3, 3]),
    "run": torch.arange(ROWS),
    "step": torch.zeros(ROWS, dtype=torch.long),
    "state": torch.arange(ROWS) % 2,
    "baseline": torch.full((ROWS,), 0.5, dtype=torch.float64),
    "length": BATCH["mask"].sum(-1),
    "mask": BATCH["mask"],
    "role": torch.arange(ROWS) % 2,
    "value": BATCH["advantage"],
    "old_log_prob": BATCH["old_log_prob"],
    "teacher_log_prob": BATCH["ref_log_prob"],
    "base_log_prob": BATCH["log_prob"] / 2,
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
