"""Batches of a few tokens, given by their ratios, for tests with numbers that can be checked by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from torchrl_llm_kl.losses import LossTerm, spec_of

Rows = Sequence[Sequence[float]]
Objective = Callable[..., tuple[LossTerm, ...]]


def tensor(rows: Rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def own_names(function: Callable[..., Any], **hyper: Any) -> dict[str, Any]:
    """Hyper-parameters of other libraries under the function's own names, as PolicyLoss translates them."""
    return spec_of(function).translate(hyper)


def evaluate(
    function: Objective, *, ratio: Rows, advantage: Rows, log_prob: Rows | None = None, mask: Any = None, **inputs: Any
) -> tuple[LossTerm, Tensor]:
    """The only term, and the gradient of the sum of its values. Log-probs are -1 where none are given."""
    log_prob = tensor(log_prob) if log_prob is not None else torch.full_like(tensor(ratio), -1.0)
    old = log_prob - tensor(ratio).log()
    log_prob = log_prob.requires_grad_()
    mask = torch.ones_like(old, dtype=torch.bool) if mask is None else mask
    (term,) = function(log_prob, mask, old_log_prob=old, advantage=tensor(advantage), **inputs)
    (gradient,) = torch.autograd.grad(torch.where(term.mask, term.value, 0).sum(), log_prob)
    return term, gradient


def assert_result(result: tuple[LossTerm, Tensor], *, value: Rows, gradient: Rows, **metrics: float) -> None:
    """Values and gradients per token, and those metrics that are named."""
    term, found = result
    assert term.name == "objective"
    assert_close(term.value.detach(), tensor(value))
    assert_close(found, tensor(gradient))
    assert {name: term.metrics[name].item() for name in metrics} == pytest.approx(metrics, rel=1e-6, abs=1e-9)


#: An objective, its inputs and hyper-parameters, values, gradients, and metrics.
Case = tuple[Objective, dict[str, Any], Rows, Rows, dict[str, float]]


def case(
    function: Objective, inputs: dict, hyper: dict, value: Sequence, gradient: Sequence, metrics: dict | None = None
) -> Case:
    """A case in which one row of tokens may be written without its outer brackets."""
    given = {key: _rows(x) if key in ("ratio", "advantage", "log_prob") else x for key, x in inputs.items()}
    return function, {**given, **hyper}, _rows(value), _rows(gradient), metrics or {}


def _rows(values: Sequence[Any]) -> Rows:
    return values if isinstance(values[0], Sequence) else [values]


def assert_case(case: Case) -> LossTerm:
    """Values where the mask is True, gradients and metrics; the term has the inputs' mask."""
    function, inputs, value, gradient, metrics = case
    term, found = evaluate(function, **inputs)
    term = term.replace(value=torch.where(term.mask, term.value, 0))
    assert_result((term, found), value=value, gradient=gradient, **metrics)
    whole = inputs.get("mask", torch.ones_like(tensor(inputs["ratio"])).bool())
    assert torch.equal(term.mask, whole if term.mask.shape == whole.shape else whole.any(-1, keepdim=True))
    return term
