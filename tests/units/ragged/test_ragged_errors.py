"""Each error reports what was found and what was expected."""

from __future__ import annotations

import math

import pytest
import torch

from ragged_cases import jagged
from torchrl_llm_kl.ragged import Ragged

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

PADDED = torch.zeros(2, 3)
FLAT = Ragged.from_list([torch.tensor([1, 2]), torch.tensor([3])])


def nested(layout: torch.layout = torch.strided) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(1, 2)], layout=layout)


ERRORS = {
    "empty list": (lambda: Ragged.from_list([]), ValueError, r"at least one row, got an empty list"),
    "scalar row": (
        lambda: Ragged.from_list([torch.ones(1), torch.tensor(1.0)]),
        ValueError,
        r"\[T_i, .*scalar at row 1",
    ),
    "rows of other features": (
        lambda: Ragged.from_list([torch.ones(1, 2), torch.ones(1, 3)]),
        ValueError,
        r"expected .*\(2,\).*found \(1, 3\).*row 1",
    ),
    "empty row without features": (
        lambda: Ragged.from_list([torch.ones(1, 2), torch.ones(0)]),
        ValueError,
        r"expected .*\(2,\).*found \(0,\).*row 1",
    ),
    "rows of other dtypes": (
        lambda: Ragged.from_list([torch.ones(1), torch.ones(1, dtype=torch.int64)]),
        ValueError,
        r"expected .*float32.*found .*int64 at row 1",
    ),
    "batch of another size": (
        lambda: Ragged.from_list([torch.ones(1)], torch.Size([2, 3])),
        ValueError,
        r"\(2, 3\) has 6 rows, found 1",
    ),
    "lengths too large": (
        lambda: Ragged.from_padded(PADDED, lengths=torch.tensor([1, 4])),
        ValueError,
        r"\[0, 3\].*\[1, 4\]",
    ),
    "negative lengths": (
        lambda: Ragged.from_padded(PADDED, lengths=torch.tensor([-1, 2])),
        ValueError,
        r"\[0, 3\].*\[-1, 2\]",
    ),
    "lengths of another shape": (
        lambda: Ragged.from_padded(PADDED, lengths=torch.tensor([1, 2, 3])),
        ValueError,
        r"batch shape \(2,\).*got \(3,\)",
    ),
    "float lengths": (
        lambda: Ragged.from_padded(PADDED, lengths=torch.tensor([1.0, 2.0])),
        ValueError,
        r"integer dtype, found torch.float32",
    ),
    "bool lengths": (
        lambda: Ragged.from_padded(PADDED, lengths=torch.tensor([True, False])),
        ValueError,
        r"integer dtype, found torch.bool",
    ),
    "mask of another shape": (
        lambda: Ragged.from_padded(PADDED, mask=torch.ones(3, 2, dtype=torch.bool)),
        ValueError,
        r"\(2, 3\).*got \(3, 2\)",
    ),
    "mask with features": (
        lambda: Ragged.from_padded(torch.zeros(2, 3, 4), mask=torch.ones(2, 3, 4, dtype=torch.bool)),
        ValueError,
        r"\(2, 3\).*got \(2, 3, 4\)",
    ),
    "mask and lengths": (
        lambda: Ragged.from_padded(PADDED, mask=PADDED == 0, lengths=torch.tensor([3, 3])),
        ValueError,
        r"both mask and lengths",
    ),
    "unknown side": (
        lambda: Ragged.from_padded(PADDED, lengths=torch.tensor([1, 2]), side="middle"),
        ValueError,
        r"'left' or 'right', found 'middle'",
    ),
    "unknown side out": (lambda: FLAT.to_padded(side="middle"), ValueError, r"'left' or 'right', found 'middle'"),
    "too many batch dims": (
        lambda: Ragged.from_padded(PADDED, batch_dims=2),
        ValueError,
        r"\[0, 1\].*\(2, 3\), found 2",
    ),
    "negative batch dims": (lambda: Ragged.from_padded(PADDED, batch_dims=-1), ValueError, r"\[0, 1\].*found -1"),
    "nested as padded": (lambda: Ragged.from_padded(nested()), TypeError, r"dense tensor, found a nested one"),
    "dense as nested": (
        lambda: Ragged.from_nested(PADDED),
        TypeError,
        r"nested tensor, got a dense one of shape \(2, 3\)",
    ),
    "transposed jagged": (
        lambda: Ragged.from_nested(nested(torch.jagged).transpose(1, 2)),
        ValueError,
        r"must be dimension 1, found dimension 2: transpose",
    ),
    "transposed strided": (
        lambda: Ragged.from_nested(nested().transpose(1, 2)),
        ValueError,
        r"first dimension .* may vary, got row shapes \[\[2, 3\], \[2, 1\]\]",
    ),
    "nested of no rows": (
        lambda: Ragged.from_nested(torch.nested.nested_tensor([])),
        ValueError,
        r"at least one row, found one of 0 rows",
    ),
    "nested of scalars": (
        lambda: Ragged.from_nested(torch.nested.nested_tensor([torch.tensor(1.0), torch.tensor(2.0)])),
        ValueError,
        r"\[S, \(T_i\), \*F\].*found one of 2 rows and 1 dimensions",
    ),
    "overlapping jagged rows": (
        lambda: Ragged.from_nested(jagged(torch.ones(5), [0, 2, 5], [3, 2])),
        ValueError,
        r"between 0 and \[2, 3\].*found \[3, 2\]",
    ),
    "offsets that miss a part": (
        lambda: Ragged.from_nested(jagged(torch.ones(6), [0, 2, 5])),
        ValueError,
        r"add up to the number of values: found 5, expected 6",
    ),
    "other layout": (
        lambda: FLAT.to_nested(torch.sparse_coo),
        ValueError,
        r"strided or .*jagged, found torch.sparse_coo",
    ),
    "like of another length": (lambda: FLAT.like(torch.ones(4)), ValueError, r"expected 3 values.*got 4"),
    "mask for other slots": (
        lambda: Ragged.from_slots(torch.ones(3), FLAT.container, torch.ones(2, dtype=torch.bool)),
        ValueError,
        r"mask has 2 positions but the values have 3",
    ),
    "lengths of another dtype": (
        lambda: Ragged(torch.ones(1), torch.tensor([1], dtype=torch.int32), FLAT.container),
        ValueError,
        r"int64 tensor, got \(1,\) of torch.int32",
    ),
    "lengths that are no vector": (
        lambda: Ragged(torch.ones(1), torch.tensor([[1]]), FLAT.container),
        ValueError,
        r"1-d int64 tensor, got \(1, 1\)",
    ),
    "lengths of another sum": (
        lambda: Ragged(torch.ones(4), torch.tensor([2, 1]), FLAT.container),
        ValueError,
        r"found 3, expected 4",
    ),
    "fraction in integers": (
        lambda: Ragged.from_padded(torch.tensor([[1, 2]]), lengths=torch.tensor([1])).restore(0.5),
        ValueError,
        r"torch.int64 cannot hold the fill 0.5",
    ),
    "nan in integers": (lambda: FLAT.to_padded(value=math.nan), ValueError, r"torch.int64 cannot hold the fill nan"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_found_and_expected(name):
    call, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        call()
