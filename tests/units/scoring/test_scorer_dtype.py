"""Products in half precision on float32 weights: log-probs are as close as those of a model in half precision."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing import assert_close

from scoring_reference import conversation
from torchrl_llm_kl import LogProbScorer, Ragged
from toy_models import FAMILIES, tiny_model
from toy_rollouts import plain_log_probs


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_plain_model_under_autocast(family: str) -> None:
    model, rows = tiny_model(family, initializer_range=0.1), conversation()
    scorer = LogProbScorer(model, dtype=torch.bfloat16)
    assert scorer.path == "head"
    assert scorer.shares_prefixes
    found = scorer.score(Ragged.from_list(rows))
    assert found.values.dtype == torch.float32
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    for row, log_probs in zip(rows, found.to_list(), strict=True):
        assert_close(log_probs, plain_log_probs(model, row), atol=0.08, rtol=0)
    exact = LogProbScorer(model).score(Ragged.from_list(rows)).values
    assert not torch.equal(found.values, exact), "no part ran in bfloat16"


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_the_error_is_at_most_that_of_a_model_in_half_precision(family: str) -> None:
    model, rows = tiny_model(family, initializer_range=0.3), conversation()
    batch = Ragged.from_list(rows)
    truth = torch.cat([plain_log_probs(model, row) for row in rows])
    found = LogProbScorer(model, dtype=torch.bfloat16).score(batch).values - truth
    narrow = torch.cat([plain_log_probs(copy.deepcopy(model).bfloat16(), row) for row in rows]) - truth
    assert found.norm() < 1.1 * narrow.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_exact_kl_to_a_reference_in_another_precision(dtype: torch.dtype | None) -> None:
    """The products of both heads are then in float32, so the KL of a model to itself has the body's rounding alone."""
    model, batch = tiny_model("llama", initializer_range=0.1), Ragged.from_list(conversation())
    scorer, reference = LogProbScorer(model, dtype=dtype), LogProbScorer(model)
    kl = scorer.evaluate(batch, reference=reference).kl
    assert kl is not None
    assert kl.values.abs().max() < 1e-3
    assert bool(kl.values.any()) == (dtype is not None)


def test_a_head_that_is_more_than_linear_stays_in_float32() -> None:
    model, batch = tiny_model("llama"), Ragged.from_list(conversation())
    seen = []
    model.lm_head.register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
    LogProbScorer(model, dtype=torch.bfloat16, probe=False).score(batch)
    assert set(seen) == {(torch.float32, torch.float32)}


def test_gradients_flow_through_half_precision() -> None:
    model, rows = tiny_model("llama", initializer_range=0.1), conversation()[:4]
    batch, parameters = Ragged.from_list(rows), list(model.parameters())
    half = torch.autograd.grad(
        LogProbScorer(model, dtype=torch.bfloat16).score(batch, grad=True).values.sum(), parameters
    )
    full = torch.autograd.grad(LogProbScorer(model).score(batch, grad=True).values.sum(), parameters)
    a, b = (torch.cat([g.flatten() for g in grads]) for grads in (half, full))
    assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.999
    assert a.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_a_dtype_that_is_not_floating_point(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"dtype must be a floating-point type such as torch\.bfloat16, got"):
        LogProbScorer(tiny_model(), dtype=dtype)
