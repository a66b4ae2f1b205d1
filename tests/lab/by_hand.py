"""Batches of a few tokens, given by their ratios, for tests with numbers that can be checked by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from torchrl_llm_kl.losses import LossInputs, LossTerm
from torchrl_llm_kl.losses._objective import INPUTS

Rows = Sequence[Sequence[float]]
Objective = Callable[..., tuple[LossTerm, ...]]


def tensor(rows: Rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


#: The inputs of corrections, in the order of positional arguments of :func:`called`.
_POSITIONAL = {name: ("old_log_prob", "sampler_log_prob", "mask") for name in ("importance_weights", "rejection_mask")}
_POSITIONAL |= dict.fromkeys(
    ("off_policy_sequence_mask", "total_variation_mask"), ("log_prob", "old_log_prob", "advantage", "mask")
)
_POSITIONAL |= {"top_entropy_mask": ("entropy", "mask")}


def called(function: Callable[..., Any], *tensors: Tensor, **given: Any) -> Any:
    """Call a function of ``LossInputs``. Tensors that are inputs go into the record, other arguments are hyper-parameters."""
    names = _POSITIONAL.get(getattr(function, "__name__", ""), ("log_prob", "mask"))
    given |= zip(names, tensors, strict=bool(tensors))
    inputs = {name: value for name, value in given.items() if name in INPUTS and value is not None}
    zeros = torch.zeros_like(inputs["mask"], dtype=torch.float32)
    return function(LossInputs(**{"log_prob": zeros, **inputs}), **{k: x for k, x in given.items() if k not in INPUTS})


def evaluate(
    function: Objective, *, ratio: Rows, advantage: Rows, log_prob: Rows | None = None, mask: Any = None, **inputs: Any
) -> tuple[LossTerm, Tensor]:
    """Return the only term, and the gradient of the sum of its values. Log-probs are -1 by default."""
    log_prob = tensor(log_prob) if log_prob is not None else torch.full_like(tensor(ratio), -1.0)
    old = log_prob - tensor(ratio).log()
    log_prob = log_prob.requires_grad_()
    mask = torch.ones_like(old, dtype=torch.bool) if mask is None else mask
    (term,) = called(function, log_prob, mask, old_log_prob=old, advantage=tensor(advantage), **inputs)
    (gradient,) = torch.autograd.grad(torch.where(term.mask, term.value, 0).sum(), log_prob)
    return term, gradient


def assert_result(result: tuple[LossTerm, Tensor], *, value: Rows, gradient: Rows, **metrics: float) -> None:
    """Check values and gradients per token, and the named metrics."""
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
    """A case. A single row of tokens may be written without outer brackets."""
    given = {key: _rows(x) if key in ("ratio", "advantage", "log_prob") else x for key, x in inputs.items()}
    return function, {**given, **hyper}, _rows(value), _rows(gradient), metrics or {}


def _rows(values: Sequence[Any]) -> Rows:
    return values if isinstance(values[0], Sequence) else [values]


def assert_case(case: Case) -> LossTerm:
    """Check values where the mask is True, gradients, metrics, and that the term has the inputs' mask."""
    function, inputs, value, gradient, metrics = case
    term, found = evaluate(function, **inputs)
    term = term.replace(value=torch.where(term.mask, term.value, 0))
    assert_result((term, found), value=value, gradient=gradient, **metrics)
    whole = inputs.get("mask", torch.ones_like(tensor(inputs["ratio"])).bool())
    assert torch.equal(term.mask, whole if term.mask.shape == whole.shape else whole.any(-1, keepdim=True))
    return term
