"""Properties that hold for every objective, whatever its formula."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.testing import assert_close

from objective_cases import CASES, inputs_of, random_batch, rows_of
from torchrl_llm_kl.losses import AGGREGATIONS, LossTerm, aggregate, available_objectives, count, get_objective, spec_of

REDUCING = [mode for mode in AGGREGATIONS if mode != "none"]


def terms_of(case: str, batch: dict[str, Tensor], **changes: Any) -> tuple[LossTerm, ...]:
    name, hyper = CASES[case]
    return get_objective(name)(**{**inputs_of(name, batch), **hyper, **changes})


def loss_of(case: str, batch: dict[str, Tensor], mode: str, denominators: dict[str, Tensor] | None = None) -> Tensor:
    total: Any = 0
    for term in terms_of(case, batch):
        how = term.aggregation or mode
        denominator = None if denominators is None else denominators[term.name]
        total = total + term.weight * aggregate(term.value, term.mask, how, denominator=denominator)
    return total


def gradient_of(case: str, batch: dict[str, Tensor], mode: str, denominators: Any = None) -> tuple[Tensor, Tensor]:
    log_prob = batch["log_prob"].clone().requires_grad_()
    loss = loss_of(case, {**batch, "log_prob": log_prob}, mode, denominators)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return loss.detach(), gradient


def pairs_of(rows: int, parts: int, seed: int) -> list[Tensor]:
    """A random uneven split that leaves neighbours 2i and 2i+1 together."""
    rng = torch.Generator().manual_seed(seed)
    owner = torch.randint(parts, (rows // 2,), generator=rng).repeat_interleave(2)
    return [part for part in ((owner == k).nonzero().squeeze(-1) for k in range(parts)) if len(part)]


def test_there_is_a_case_for_each() -> None:
    assert {name for name, _ in CASES.values()} == set(available_objectives())


@pytest.mark.parametrize("name", available_objectives())
def test_pickling_and_source(name: str) -> None:
    function = get_objective(name)
    assert pickle.loads(pickle.dumps(function)) is function
    assert len(spec_of(function).source) > 10


@pytest.mark.parametrize("mode", REDUCING)
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**20), parts=st.integers(2, 4))
def test_any_split_gives_the_gradient_of_the_whole(case: str, mode: str, seed: int, parts: int) -> None:
    batch = random_batch(seed, rows=8)
    torch.manual_seed(0)
    if spec_of(get_objective(CASES[case][0])) is not None and "selected" in _inputs(case):
        batch["selected"] = torch.rand(8, 5, generator=torch.Generator().manual_seed(seed)) < 0.3
    whole_loss, whole = gradient_of(case, batch, mode)
    denominators = {term.name: count(term.mask, term.aggregation or mode) for term in terms_of(case, batch)}
    total, assembled = torch.zeros_like(whole_loss), torch.zeros_like(whole)
    for rows in pairs_of(8, parts, seed):
        part_loss, part = gradient_of(case, rows_of(batch, rows), mode, denominators)
        total += part_loss
        assembled[rows] = part
    assert_close(total, whole_loss)
    assert_close(assembled, whole)


@pytest.mark.parametrize("mode", REDUCING)
def test_without_the_common_denominator_a_split_is_another_loss(mode: str) -> None:
    """Negative control of the test above."""
    batch = random_batch(3, rows=8)
    _, whole = gradient_of("ppo", batch, mode)
    parts = [gradient_of("ppo", rows_of(batch, rows), mode)[1] for rows in (torch.arange(2), torch.arange(2, 8))]
    assert not torch.allclose(torch.cat(parts) / 2, whole)


def _inputs(case: str) -> tuple[str, ...]:
    import inspect

    return tuple(inspect.signature(get_objective(CASES[case][0])).parameters)


@pytest.mark.parametrize("case", CASES)
def test_masked_out_entries_do_not_matter(case: str) -> None:
    batch = random_batch(5)
    loss, gradient = gradient_of(case, batch, "token-mean")
    for bad in (float("nan"), float("inf"), -float("inf"), 1e4):
        spoilt = {key: torch.where(batch["mask"], x, bad) if x.is_floating_point() else x for key, x in batch.items()}
        spoilt_loss, spoilt_gradient = gradient_of(case, spoilt, "token-mean")
        assert_close(spoilt_loss, loss)
        assert_close(spoilt_gradient, gradient)


@pytest.mark.parametrize("case", CASES)
def test_an_empty_batch_has_loss_and_gradient_0(case: str) -> None:
    batch = random_batch(7)
    batch["mask"] = torch.zeros_like(batch["mask"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss, gradient = gradient_of(case, batch, "token-mean")
    assert loss == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize("case", CASES)
def test_rows_without_tokens_change_nothing(case: str) -> None:
    batch = random_batch(9)
    loss, gradient = gradient_of(case, batch, "seq-mean-token-mean")
    more = {key: torch.cat([x, x[:2]]) for key, x in batch.items()}
    more["mask"][-2:] = False
    more_loss, more_gradient = gradient_of(case, more, "seq-mean-token-mean")
    assert_close(more_loss, loss)
    assert_close(more_gradient, torch.cat([gradient, torch.zeros_like(gradient[:2])]))


@pytest.mark.parametrize("case", CASES)
def test_half_precision_is_calculated_in_float32(case: str) -> None:
    """Equal to the result on inputs rounded to bfloat16 and then widened: the objective adds no rounding."""
    batch = random_batch(11, dtype=torch.bfloat16)
    wide = {key: x.float() if x.is_floating_point() else x for key, x in batch.items()}
    for term, exact in zip(terms_of(case, batch), terms_of(case, wide), strict=True):
        assert term.value.dtype == torch.float32
        assert_close(term.value, exact.value, rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_extreme_ratios_leave_the_gradient_finite(case: str) -> None:
    batch = random_batch(13, dtype=torch.float32)
    for log_prob, old in ((-1e-3, -200.0), (-200.0, -1e-3)):
        far = {**batch, "log_prob": torch.full_like(batch["log_prob"], log_prob)}
        far["old_log_prob"] = far["ref_log_prob"] = torch.full_like(batch["log_prob"], old)
        loss, gradient = gradient_of(case, far, "token-mean")
        assert loss.isfinite()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("case", CASES)
def test_metrics_are_numbers_without_graph(case: str) -> None:
    batch = random_batch(15)
    batch["log_prob"].requires_grad_()
    for term in terms_of(case, batch):
        for name, metric in term.metrics.items():
            assert metric.ndim == 0, name
            assert not metric.requires_grad, name


@pytest.mark.parametrize("case", CASES)
def test_unequal_shapes_raise_with_both(case: str) -> None:
    batch = random_batch(17)
    with pytest.raises(ValueError, match=r"mask has shape \(6, 5\) but advantage has shape \(6, 1\)"):
        terms_of(case, {**batch, "advantage": batch["advantage"][:, :1]})
    with pytest.raises(TypeError, match="mask must be boolean"):
        terms_of(case, {**batch, "mask": batch["mask"].float()})


@pytest.mark.parametrize("name", available_objectives())
def test_unknown_hyper_parameters_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} has no hyper-parameter 'clipp_low'"):
        get_objective(name)(**random_batch(19), clipp_low=0.1)


def derivative_is_the_gradient(case: str) -> bool:
    """Whether finite differences of the values, in float64, agree with autograd."""
    batch = random_batch(21)
    if "selected" in _inputs(case):
        batch["selected"] = torch.rand(6, 5, generator=torch.Generator().manual_seed(0)) < 0.3

    def value(log_prob: Tensor) -> Tensor:
        terms = terms_of(case, {**batch, "log_prob": log_prob})
        return torch.cat([torch.where(term.mask, term.value, 0).flatten() for term in terms])

    return torch.autograd.gradcheck(
        value, batch["log_prob"].requires_grad_(), eps=1e-6, atol=1e-5, raise_exception=False
    )


#: Their values are multiplied by weights that pass no gradient: the derivative of the value is another one.
WEIGHTED = {
    *(
        "ppo-pg",
        "gspo-token",
        "luspo",
        "cispo",
        "cispo-masked",
        "topr-token",
        "topr-sequence",
        "vespo",
        "dppo-tv",
        "dppo-kl",
    ),
    *("rec-one-side", "rec-ring", "rec-gspo", "sft_is", "sft_phi", "sft_phi-cutoff", "mix_chord"),
    *("dpo-wpo", "dpo-aligned"),
}


@pytest.mark.parametrize("case", CASES)
def test_gradcheck(case: str) -> None:
    """Finite differences agree, except where a weight is detached."""
    assert derivative_is_the_gradient(case) == (case not in WEIGHTED)
