"""Gradients reach the values through every conversion, and none comes from the padding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from ragged_cases import Case, elements, make
from torchrl_llm_kl.ragged import Ragged

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def rows_of(data: Any) -> list[torch.Tensor]:
    if isinstance(data, list):
        return data
    return list(data.unbind()) if data.is_nested else list(data.flatten(0, -2).unbind())


YES, NO = True, False
SOURCES: dict[str, tuple[list[list[bool]], dict[str, Any]]] = {
    "padded-mask": ([[NO, YES, YES, NO], [YES, NO, YES, YES], [NO, NO, NO, NO]], {}),
    "padded-lengths": ([[NO, NO, YES], [NO, YES, YES], [NO, NO, NO]], {"side": "left"}),
    "list": ([[YES, YES], [], [YES]], {}),
    "strided": ([[YES, YES], [], [YES]], {}),
    "jagged": ([[YES, YES], [], [YES]], {}),
    "jagged-gaps": ([[YES, YES, NO], [NO], [YES, NO, NO]], {"head": 2, "tail": 1}),
}


def differentiable(kind: str) -> Case:
    table, options = SOURCES[kind]
    return make(kind, table, dtype=torch.float64, leaf=True, **options)


OUT = {
    "restore": lambda x: x.restore(),
    "padded-left": lambda x: x.to_padded(side="left"),
    "padded-right": lambda x: x.to_padded(side="right"),
    "strided": lambda x: x.to_nested(torch.strided),
    "jagged": lambda x: x.to_nested(torch.jagged),
    "list": lambda x: x.to_list(),
    "sum": lambda x: [x.sum()],
}


@pytest.mark.parametrize("kind", SOURCES)
def test_gradient_reaches_the_values_and_only_them(kind):
    """Sum of squares: d/dx = 2x at a value. The NaN in the padding reaches neither the loss nor the gradient."""
    for name, out in OUT.items():
        case = differentiable(kind)
        x = case.read()
        loss = torch.stack([row.sum() for row in rows_of(out(x.like(x.values**2)))]).sum()
        loss.backward()
        value = case.slots.detach().nan_to_num(0.0)
        assert_close(loss.detach(), (value**2).sum(), msg=name)
        assert_close(case.slots.grad, 2 * value, msg=name)


@pytest.mark.parametrize("kind", SOURCES)
def test_gradcheck_of_the_conversions(kind):
    x = differentiable(kind).read()
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
