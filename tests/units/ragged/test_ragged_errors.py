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


ONE, SCALARS = torch.ones(1), [torch.tensor(1.0), torch.tensor(2.0)]


ERRORS = {
    "empty list": (of(), r"at least one row, got an empty list"),
    "scalar row": (of(ONE, SCALARS[0]), r"\[T_i, .*scalar at row 1"),
    "rows of other features": (of(torch.ones(1, 2), torch.ones(1, 3)), r"expected .*\(2,\).*found \(1, 3\).*row 1"),
    "empty row without features": (of(torch.ones(1, 2), torch.ones(0)), r"expected .*\(2,\).*found \(0,\).*row 1"),
    "rows of other dtypes": (of(ONE, ONE.long()), r"expected .*float32.*found .*int64 at row 1"),
    "batch of another size": (of(ONE, batch_shape=torch.Size([2, 3])), r"\(2, 3\) has 6 rows, found 1"),
    "lengths too large": (padded(lengths=[1, 4]), r"\[0, 3\].*\[1, 4\]"),
    "negative lengths": (padded(lengths=[-1, 2]), r"\[0, 3\].*\[-1, 2\]"),
    "lengths of another shape": (padded(lengths=[1, 2, 3]), r"batch shape \(2,\).*got \(3,\)"),
    "float lengths": (padded(lengths=[1.0, 2.0]), r"integer dtype, found torch.float32"),
    "bool lengths": (padded(lengths=[True, False]), r"integer dtype, found torch.bool"),
    "mask of another shape": (padded(mask=torch.ones(3, 2).bool()), r"\(2, 3\).*got \(3, 2\)"),
    "mask with features": (
        padded(torch.zeros(2, 3, 4), mask=torch.ones(2, 3, 4).bool()),
        r"\(2, 3\).*got \(2, 3, 4\)",
    ),
    "mask and lengths": (padded(mask=PADDED == 0, lengths=[3, 3]), r"both mask and lengths"),
    "unknown side": (padded(lengths=[1, 2], side="middle"), r"'left' or 'right', found 'middle'"),
    "unknown side out": (lambda: FLAT.to_padded(side="middle"), r"'left' or 'right', found 'middle'"),
    "too many batch dims": (padded(batch_dims=2), r"\[0, 1\].*\(2, 3\), found 2"),
    "negative batch dims": (padded(batch_dims=-1), r"\[0, 1\].*found -1"),
    "nested as padded": (padded(nested()), r"dense tensor, found a nested one"),
    "dense as nested": (read(PADDED), r"nested tensor, got a dense one of shape \(2, 3\)"),
    "transposed jagged": (
        read(nested(torch.jagged).transpose(1, 2)),
        r"must be dimension 1, found dimension 2: transpose",
    ),
    "transposed strided": (
        read(nested().transpose(1, 2)),
        r"first dimension .* may vary, got row shapes \[\[2, 3\], \[2, 1\]\]",
    ),
    "nested of no rows": (read(torch.nested.nested_tensor([])), r"at least one row, found one of 0 rows"),
    "nested of scalars": (
        read(torch.nested.nested_tensor(SCALARS)),
        r"\[S, \(T_i\), \*F\].*found one of 2 rows and 1 dimensions",
    ),
    "overlapping jagged rows": (
        read(jagged(torch.ones(5), [0, 2, 5], [3, 2])),
        r"between 0 and \[2, 3\].*found \[3, 2\]",
    ),
    "offsets that miss a part": (
        read(jagged(torch.ones(6), [0, 2, 5])),
        r"add up to the number of values: found 5, expected 6",
    ),
    "other layout": (lambda: FLAT.to_nested(torch.sparse_coo), r"strided or .*jagged, found torch.sparse_coo"),
    "like of another length": (lambda: FLAT.like(torch.ones(4)), r"expected 3 values.*got 4"),
    "mask for other slots": (
        lambda: Ragged.from_slots(torch.ones(3), FLAT.container, torch.ones(2, dtype=torch.bool)),
        r"mask has 2 positions but the values have 3",
    ),
    "lengths of another dtype": (
        lambda: Ragged(ONE, torch.tensor([1], dtype=torch.int32), FLAT.container),
        r"int64 tensor, got \(1,\) of torch.int32",
    ),
    "lengths that are no vector": (
        lambda: Ragged(ONE, torch.tensor([[1]]), FLAT.container),
        r"1-d int64 tensor, got \(1, 1\)",
    ),
    "lengths of another sum": (
        lambda: Ragged(torch.ones(4), torch.tensor([2, 1]), FLAT.container),
        r"found 3, expected 4",
    ),
    "fraction in integers": (
        lambda: Ragged.from_padded(torch.tensor([[1, 2]]), lengths=torch.tensor([1])).restore(0.5),
        r"torch.int64 cannot hold the fill 0.5",
    ),
    "nan in integers": (lambda: FLAT.to_padded(value=math.nan), r"torch.int64 cannot hold the fill nan"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_found_and_expected(name):
    call, message = ERRORS[name]
    with pytest.raises(TypeError if name in ("nested as padded", "dense as nested") else ValueError, match=message):
        call()
