"""Gradients reach the values through every conversion, and none comes from the padding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from ragged_cases import elements, jagged
from torchrl_llm_kl.ragged import Ragged

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def rows_of(data: Any) -> list[torch.Tensor]:
    if isinstance(data, list):
        return data
    return list(data.unbind()) if data.is_nested else list(data.flatten(0, -2).unbind())


@dataclass
class Differentiable:
    """A table of slots per kind: ``NaN`` in every slot without a value, and a source that torch builds from ``leaf``."""

    kind: str
    table: list[list[bool]]
    head: int = 0
    tail: int = 0

    def leaf(self) -> tuple[torch.Tensor, torch.Tensor]:
        flat = [keep for row in self.table for keep in row]
        real = torch.tensor([False] * self.head + flat + [False] * self.tail)
        leaf = elements(len(real), dtype=torch.float64).masked_fill(~real, math.nan).requires_grad_()
        return leaf, real

    def read(self, leaf: torch.Tensor, real: torch.Tensor) -> Ragged:
        spans = [len(row) for row in self.table]
        lengths = [sum(row) for row in self.table]
        if self.kind == "padded-mask":
            return Ragged.from_padded(leaf.reshape(len(spans), -1), mask=real.reshape(len(spans), -1))
        if self.kind == "padded-lengths":
            return Ragged.from_padded(leaf.reshape(len(spans), -1), lengths=torch.tensor(lengths), side="left")
        if self.kind == "list":
            return Ragged.from_list(list(leaf.split(spans)))
        if self.kind == "strided":
            return Ragged.from_nested(torch.nested.as_nested_tensor(list(leaf.split(spans)), layout=torch.strided))
        offsets = list(accumulate(spans, initial=self.head))
        return Ragged.from_nested(jagged(leaf, offsets, None if self.kind == "jagged" else lengths))


YES, NO = True, False
DIFFERENTIABLE = [
    Differentiable("padded-mask", [[NO, YES, YES, NO], [YES, NO, YES, YES], [NO, NO, NO, NO]]),
    Differentiable("padded-lengths", [[NO, NO, YES], [NO, YES, YES], [NO, NO, NO]]),
    Differentiable("list", [[YES, YES], [], [YES]]),
    Differentiable("strided", [[YES, YES], [], [YES]]),
    Differentiable("jagged", [[YES, YES], [], [YES]]),
    Differentiable("jagged-gaps", [[YES, YES, NO], [NO], [YES, NO, NO]], head=2, tail=1),
]
OUT = {
    "restore": lambda x: x.restore(),
    "padded-left": lambda x: x.to_padded(side="left"),
    "padded-right": lambda x: x.to_padded(side="right"),
    "strided": lambda x: x.to_nested(torch.strided),
    "jagged": lambda x: x.to_nested(torch.jagged),
    "list": lambda x: x.to_list(),
    "sum": lambda x: [x.sum()],
}


@pytest.mark.parametrize("form", DIFFERENTIABLE, ids=lambda form: form.kind)
def test_gradient_reaches_the_values_and_only_them(form):
    """Sum of squares: d/dx = 2x at a value. The NaN in the padding reaches neither the loss nor the gradient."""
    for name, out in OUT.items():
        leaf, real = form.leaf()
        x = form.read(leaf, real)
        loss = torch.stack([row.sum() for row in rows_of(out(x.like(x.values**2)))]).sum()
        loss.backward()
        value = torch.where(real, leaf.detach(), 0.0)
        assert_close(loss.detach(), (value**2).sum(), msg=name)
        assert_close(leaf.grad, 2 * value, msg=name)


@pytest.mark.parametrize("form", DIFFERENTIABLE, ids=lambda form: form.kind)
def test_gradcheck_of_the_conversions(form):
    x = form.read(*form.leaf())
    values = elements(x.values.shape[0], (2,), torch.float64).requires_grad_()
    for out in OUT.values():

        def flat(values, out=out):
            return torch.cat([row.reshape(-1) for row in rows_of(out(x.like(values)))])

        assert torch.autograd.gradcheck(flat, values)


def test_nested_leaf():
    for layout in (torch.strided, torch.jagged):
        rows = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
        source = torch.nested.nested_tensor(rows, layout=layout, requires_grad=True)
        (Ragged.from_nested(source).values ** 2).sum().backward()
        assert [row.tolist() for row in source.grad.unbind()] == [[2, 4], [6]], layout


def test_no_gradient_to_a_fill_and_no_argument_is_modified():
    values = torch.tensor([2.0], requires_grad=True)
    padded, mask = torch.tensor([[0.0, 1.0, math.nan]]), torch.tensor([[False, True, False]])
    x = Ragged.from_padded(padded, mask=mask)
    x.like(values).restore(math.inf)[0, 1].backward()
    assert values.grad.tolist() == [1]
    x.restore(3)
    assert padded[0, :2].tolist() == [0, 1]
    assert math.isnan(padded[0, 2])
    assert mask.tolist() == [[False, True, False]]
