"""Properties that hold for every objective, whatever its formula."""

import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from by_hand import called
from objective_cases import CASES, inputs_of, raises_without, random_batch, rows_of
from torchrl_llm_kl import losses

NAN, INF = float("nan"), float("inf")
REDUCING = [mode for mode in losses.AGGREGATIONS if mode != "none"]
#: Their values are multiplied by weights that pass no gradient: the derivative of the value is another one.
WEIGHTED = {"ppo_on_policy", "gspo-token", "luspo", "cispo", "cispo-masked", "topr-token", "topr-sequence", "vespo"}
WEIGHTED |= {"dppo-tv", "dppo-kl", "rec-one-side", "rec-ring", "rec-gspo", "sft_is", "sft_phi", "sft_phi-cutoff"}
WEIGHTED |= {
    "a3po",
    "fipo",
    "fipo-free",
    "ctpo",
    "ctpo-free",
    "sdar",
    "mix_chord",
    "dpo-wpo",
    "dpo-aligned",
    "ref_kl",
    "distill-bounds",
}


def terms_of(case: str, batch: dict[str, Tensor], **changes: Any) -> tuple[losses.LossTerm, ...]:
    name, hyper = CASES[case]
    return called(losses.get_objective(name), **{**inputs_of(name, batch), **hyper, **changes})


def gradient_of(case: str, batch: Any, mode: str = "token-mean", denominators: Any = None) -> tuple[Tensor, Tensor]:
    """The loss, and its gradient with respect to the log-probs."""
    log_prob, total = batch["log_prob"].clone().requires_grad_(), torch.zeros(())
    for term in terms_of(case, {**batch, "log_prob": log_prob}):
        how = term.aggregation or mode
        denominator = None if denominators is None else denominators[term.name]
        total = total + term.weight * losses.aggregate(term.value, term.mask, how, denominator=denominator)
    (gradient,) = torch.autograd.grad(total, log_prob)
    return total.detach(), gradient


def values_of(terms: tuple[losses.LossTerm, ...]) -> Tensor:
    return torch.cat([torch.where(term.mask, term.value, 0).flatten() for term in terms])


def batch_of(case: str, seed: int, **shape: Any) -> dict[str, Tensor]:
    """A random batch, with selected tokens if the objective reads them."""
    batch, rng = random_batch(seed, **shape), torch.Generator().manual_seed(seed)
    if CASES[case][0] in ("clip_cov", "kl_cov"):
        batch["selected"] = torch.rand(batch["mask"].shape, generator=rng) < 0.3
    return batch


@pytest.mark.parametrize("case", CASES)
def test_any_split_gives_the_gradient_of_the_whole(case: str) -> None:
    """Each aggregation with splits into two to four uneven parts. Blocks of six rows, so pairs and triples, stay together."""
    for i, mode in enumerate(2 * REDUCING):
        seed = 100 * len(case) + i
        batch = batch_of(case, seed, rows=24)
        whole = gradient_of(case, batch, mode)
        denominators = {term.name: losses.count(term.mask, term.aggregation or mode) for term in terms_of(case, batch)}
        found = torch.zeros_like(whole[0]), torch.zeros_like(whole[1])
        owner = torch.randint(2 + i % 3, (4,), generator=torch.Generator().manual_seed(seed)).repeat_interleave(6)
        for rows in [(owner == part).nonzero().squeeze(-1) for part in owner.unique()]:
            loss, found[1][rows] = gradient_of(case, rows_of(batch, rows), mode, denominators)
            found[0].add_(loss)
        assert_close(found, whole, msg=lambda text, mode=mode: f"{mode}: {text}")


def masked_out_entries_do_not_matter(case: str) -> None:
    batch = random_batch(5)
    for bad in (NAN, INF, -INF, 1e4):
        spoilt = {key: torch.where(batch["mask"], x, bad) if x.is_floating_point() else x for key, x in batch.items()}
        assert_close(gradient_of(case, spoilt), gradient_of(case, batch))


def an_empty_batch_has_loss_and_gradient_0(case: str) -> None:
    batch = random_batch(7)
    batch["mask"] = torch.zeros_like(batch["mask"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss, gradient = gradient_of(case, batch)
    assert loss == 0
    assert (gradient == 0).all()


def rows_and_columns_without_tokens_change_nothing(case: str) -> None:
    """They change neither the loss, its gradient nor the metrics. Metrics are 0-dim and have no graph."""
    batch = random_batch(21)
    filling = {key: key != "mask" if x.dtype == torch.bool else NAN for key, x in batch.items()}
    wide = {key: nn.functional.pad(x, (0, 2, 0, 6), value=filling[key]) for key, x in batch.items()}
    loss, gradient = gradient_of(case, batch, "seq-mean-token-mean")
    assert_close(gradient_of(case, wide, "seq-mean-token-mean"), (loss, nn.functional.pad(gradient, (0, 2, 0, 6))))
    batch["log_prob"].requires_grad_()
    for term, same in zip(terms_of(case, batch), terms_of(case, wide), strict=True):
        assert_close(dict(same.metrics), dict(term.metrics))
        for name, metric in term.metrics.items():
            assert metric.ndim == 0, name
            assert not metric.requires_grad, name


def half_precision_is_calculated_in_float32(case: str) -> None:
    """The result equals that for inputs rounded to bfloat16 and then widened, so the objective adds no rounding."""
    batch = random_batch(11, dtype=torch.bfloat16)
    wide = {key: x.float() if x.is_floating_point() else x for key, x in batch.items()}
    for term, exact in zip(terms_of(case, batch), terms_of(case, wide), strict=True):
        assert term.value.dtype == torch.float32
        assert_close(term.value, exact.value, rtol=0, atol=0)


def extreme_ratios_leave_the_gradient_finite(case: str) -> None:
    batch = random_batch(13, dtype=torch.float32)
    for log_prob, old in ((-1e-3, -200.0), (-200.0, -1e-3)):
        values = {"log_prob": log_prob, "old_log_prob": old, "ref_log_prob": old}
        far = {**batch, **{key: torch.full_like(batch["log_prob"], x) for key, x in values.items()}}
        assert all(found.isfinite().all() for found in gradient_of(case, far))


def no_gradient_reaches_the_data(case: str) -> None:
    """Otherwise ``ppo(LossInputs(log_prob, old_log_prob=log_prob))`` would have a gradient of 0 on every token."""
    name, hyper = CASES[case]
    data, function = inputs_of(name, random_batch(3)), losses.get_objective(name)
    required = losses.TermPart(function, **hyper).needs
    trained = next((key for key in ("outcomes", "teacher_divergence") if key in required), "log_prob")
    leaf, plain = (data[trained].clone().requires_grad_() for _ in range(2))
    kinds = ("old_log_prob", "ref_log_prob", "advantage", "teacher_outcomes")
    graph = {key: data[key].clone().requires_grad_() for key in kinds if key in data}
    total = values_of(called(function, **{**data, **graph, trained: leaf}, **hyper)).sum()
    found = torch.autograd.grad(total, list(graph.values()), retain_graph=True, allow_unused=True)
    assert found == (None,) * len(graph)
    expected = values_of(called(function, **{**data, trained: plain}, **hyper)).sum()
    assert_close(torch.autograd.grad(total, leaf)[0], torch.autograd.grad(expected, plain)[0])


def finite_differences_agree_unless_a_weight_is_detached(case: str) -> None:
    batch, rng = batch_of(case, 21), torch.Generator().manual_seed(22)

    def value(log_prob: Tensor) -> Tensor:
        values = values_of(terms_of(case, {**batch, "log_prob": log_prob}))
        # A random sum of all values needs one backward pass, and the whole Jacobian one for each value.
        return values @ torch.randn(len(values), generator=rng.manual_seed(22), dtype=values.dtype)

    leaf = batch["log_prob"].requires_grad_()
    agree = torch.autograd.gradcheck(value, leaf, eps=1e-6, atol=1e-5, raise_exception=False)
    assert agree == (case not in WEIGHTED)


def wrong_inputs_are_refused(case: str) -> None:
    batch = random_batch(17)
    with pytest.raises(ValueError, match=r"mask has shape \(6, 5\) but advantage has shape \(6, 1\)"):
        terms_of(case, {**batch, "advantage": batch["advantage"][:, :1]})
    with pytest.raises(TypeError, match="mask must be boolean"):
        terms_of(case, {**batch, "mask": batch["mask"].float()})
    with pytest.raises(TypeError, match=f"{CASES[case][0]} has no hyper-parameter 'clipp_low'"):
        terms_of(case, batch, clipp_low=0.1)


def its_inputs_are_those_that_it_states(case: str) -> None:
    """It raises exactly if one of them is missing, with the settings of the case and with its defaults."""
    name, hyper = CASES[case]
    for settings in (hyper, {}):
        inputs_are_stated(name, settings)


def inputs_are_stated(name: str, hyper: dict[str, Any]) -> None:
    part, data = losses.TermPart(losses.get_objective(name), **hyper), inputs_of(name, random_batch(0))
    data |= {"sampler_log_prob": data["old_log_prob"], "selected": data["expert_mask"]}
    assert part.needs == raises_without(part, data), hyper


PROPERTIES: tuple[Callable[[str], None], ...] = (
    masked_out_entries_do_not_matter,
    an_empty_batch_has_loss_and_gradient_0,
    rows_and_columns_without_tokens_change_nothing,
    half_precision_is_calculated_in_float32,
    extreme_ratios_leave_the_gradient_finite,
    no_gradient_reaches_the_data,
    finite_differences_agree_unless_a_weight_is_detached,
    wrong_inputs_are_refused,
    its_inputs_are_those_that_it_states,
)


@pytest.mark.parametrize("case", CASES)
def test_properties_of_an_objective(case: str) -> None:
    torch.manual_seed(0)
    for holds in PROPERTIES:
        holds(case)


def test_there_is_a_case_for_each_with_its_source() -> None:
    assert {name for name, _ in CASES.values()} == set(losses.available_objectives())
    for name in losses.available_objectives():
        function = losses.get_objective(name)
        assert pickle.loads(pickle.dumps(function)) is function, name
        assert len(losses.spec_of(function).source) > 10, name


def test_inputs_are_stated_under_choices_without_a_case() -> None:
    inputs_are_stated("mix_chord", {"enable_phi_function": False, "mu": 0.3})
    modes = ("none", "one-side", "two-side", "ring", "gspo-one-side")
    weights = ("none", "importance_sampling", "gspo_importance_sampling", "advantage")
    for mode, weight, regularizer in itertools.product(modes, weights, ("none", "k2", "forward-kl")):
        choice = {"clip_mode": mode, "weight": weight, "regularizer": regularizer}
        inputs_are_stated("rec", {**choice, "regularizer_coef": 0.1})
        batch = inputs_of("rec", random_batch(0))
        given = [{**batch, "old_log_prob": x * batch["old_log_prob"]} for x in (1, 3)]
        old, other = (called(losses.rec, **each, **choice, regularizer_coef=0.1) for each in given)
        reads = "old_log_prob" in losses.TermPart(losses.rec, **choice).needs
        assert torch.equal(old[0].value, other[0].value) != reads, choice
