"""Each error reports what was found and what was expected."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ragged_cases import jagged
from torchrl_llm_kl.ragged import Ragged

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

PADDED = torch.zeros(2, 3)
FLAT = Ragged.from_list([torch.tensor([1, 2]), torch.tensor([3])])


def nested(layout: torch.layout = torch.strided) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(1, 2)], layout=layout)


def of(*rows: torch.Tensor, **options: Any) -> Callable[[], Ragged]:
    return lambda: Ragged.from_list(list(rows), **options)


def padded(values: torch.Tensor = PADDED, **options: Any) -> Callable[[], Ragged]:
    """Lists are tensors."""
    given = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in options.items()}
    return lambda: Ragged.from_padded(values, **given)


def read(source: torch.Tensor) -> Callable[[], Ragged]:
    return lambda: Ragged.from_nested(source)


ONE, SCALARS, OTHER = torch.ones(1), [torch.tensor(1.0), torch.tensor(2.0)], torch.tensor([1], dtype=torch.int32)

ERRORS = [
    # lists
    (of(), r"at least one row, got an empty list"),
    (of(ONE, SCALARS[0]), r"\[T_i, .*scalar at row 1"),
    (of(torch.ones(1, 2), torch.ones(1, 3)), r"expected .*\(2,\).*found \(1, 3\).*row 1"),
    (of(torch.ones(1, 2), torch.ones(0)), r"expected .*\(2,\).*found \(0,\).*row 1"),
    (of(ONE, ONE.long()), r"expected .*float32.*found .*int64 at row 1"),
    (of(ONE, batch_shape=torch.Size([2, 3])), r"\(2, 3\) has 6 rows, found 1"),
    # padded
    (padded(lengths=[1, 4]), r"\[0, 3\].*\[1, 4\]"),
    (padded(lengths=[-1, 2]), r"\[0, 3\].*\[-1, 2\]"),
    (padded(lengths=[1, 2, 3]), r"batch shape \(2,\).*got \(3,\)"),
    (padded(lengths=[1.0, 2.0]), r"integer dtype, found torch.float32"),
    (padded(lengths=[True, False]), r"integer dtype, found torch.bool"),
    (padded(mask=torch.ones(3, 2).bool()), r"\(2, 3\).*got \(3, 2\)"),
    (padded(torch.zeros(2, 3, 4), mask=torch.ones(2, 3, 4).bool()), r"\(2, 3\).*got \(2, 3, 4\)"),
    (padded(mask=PADDED == 0, lengths=[3, 3]), r"both mask and lengths"),
    (padded(lengths=[1, 2], side="middle"), r"'left' or 'right', found 'middle'"),
    (padded(batch_dims=2), r"\[0, 1\].*\(2, 3\), found 2"),
    (padded(batch_dims=-1), r"\[0, 1\].*found -1"),
    (padded(nested()), r"dense tensor, found a nested one"),
    # nested
    (read(PADDED), r"nested tensor, got a dense one of shape \(2, 3\)"),
    (read(nested(torch.jagged).transpose(1, 2)), r"must be dimension 1, found dimension 2: transpose"),
    (read(nested().transpose(1, 2)), r"first dimension .* may vary, got row shapes \[\[2, 3\], \[2, 1\]\]"),
    (read(torch.nested.nested_tensor([])), r"at least one row, found one of 0 rows"),
    (read(torch.nested.nested_tensor(SCALARS)), r"\[S, \(T_i\), \*F\].*found one of 2 rows and 1 dimensions"),
    (read(jagged(torch.ones(5), [0, 2, 5], [3, 2])), r"between 0 and \[2, 3\].*found \[3, 2\]"),  # rows overlap
    (read(jagged(torch.ones(6), [0, 2, 5])), r"add up to the number of values: found 5, expected 6"),
    # parts that do not fit
    (lambda: FLAT.to_padded(side="middle"), r"'left' or 'right', found 'middle'"),
    (lambda: FLAT.to_nested(torch.sparse_coo), r"strided or .*jagged, found torch.sparse_coo"),
    (lambda: FLAT.like(torch.ones(4)), r"expected 3 values.*got 4"),
    (
        lambda: Ragged.from_slots(torch.ones(3), FLAT.container, PADDED[0, :2] == 0),
        r"has 2 positions but the .* have 3",
    ),
    (lambda: Ragged(ONE, OTHER, FLAT.container), r"int64 tensor, got \(1,\) of torch.int32"),
    (lambda: Ragged(ONE, torch.tensor([[1]]), FLAT.container), r"1-d int64 tensor, got \(1, 1\)"),
    (lambda: Ragged(torch.ones(4), torch.tensor([2, 1]), FLAT.container), r"found 3, expected 4"),
    (lambda: padded(torch.tensor([[1, 2]]), lengths=[1])().restore(0.5), r"torch.int64 cannot hold the fill 0.5"),
    (lambda: FLAT.to_padded(value=math.nan), r"torch.int64 cannot hold the fill nan"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_errors_say_found_and_expected(call, message):
    is_type = "dense tensor, found" in message or "nested tensor, got" in message
    with pytest.raises(TypeError if is_type else ValueError, match=message):
        call()
