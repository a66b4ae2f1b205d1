"""The bound of ``assert_near``: what passes, what does not, by hand."""

from typing import Any

import pytest
import torch

from closeness import assert_near

E32, E64 = 2.0**-23, 2.0**-52


@pytest.mark.parametrize(
    ("bound", "options"),
    [
        (4 * E64, {}),
        (4 * E32, {"dtype": torch.float32}),
        (12 * E64, {"terms": 9}),
        (40 * E64, {"size": 10.0}),
        (4 * E64, {"size": 0.5}),
        (64 * E64, {"exponent": -15.0}),
        (3 * 20 * 16 * 4 * E32, {"terms": 9, "size": 20.0, "exponent": 15.0, "dtype": torch.float32}),
    ],
)
def test_the_bound_of_a_number(bound: float, options: dict[str, Any]) -> None:
    for sign in (1, -1):
        assert_near(1 + sign * bound, 1.0, **options)
        with pytest.raises(AssertionError, match=r"1 of 1 values differ .* not 1\.0; difference .* bound"):
            assert_near(1 + sign * (bound + E64), 1.0, **options)


def test_the_bound_follows_the_dtype_of_a_tensor() -> None:
    for dtype, eps in ((torch.float32, E32), (torch.bfloat16, 2.0**-7)):
        assert_near(torch.tensor(1 + 4 * eps, dtype=dtype), 1.0)
        with pytest.raises(AssertionError, match="differ by more than rounding"):
            assert_near(torch.tensor(1 + 5 * eps, dtype=dtype), 1.0)
    with pytest.raises(AssertionError, match=r"dtype torch\.float32, not torch\.float64"):
        assert_near(torch.ones(2), torch.ones(2).double())


def test_the_bound_scales_with_the_largest_value_or_with_each() -> None:
    found, want = torch.tensor([100.0, 1 + 8 * E32]), torch.tensor([100.0, 1.0])
    assert_near(found, want)
    with pytest.raises(AssertionError, match=r"1 of 2 values .* number 1: "):
        assert_near(found, want, size=0)
    with pytest.raises(AssertionError, match="number 0: "):
        assert_near(torch.tensor([1.0, 100.0]), want)


@pytest.mark.parametrize(
    ("found", "want", "message"),
    [
        (torch.ones(1), torch.ones(()), r"has shape \(1,\), not \(\)"),
        (torch.tensor([1.0, torch.nan]), [1.0, 1.0], "1 of 2"),
        ([1.0, torch.nan], [1.0, torch.nan], "1 of 2"),
        ([1.0, torch.inf], [1.0, -torch.inf], "1 of 2"),
        (torch.tensor([1_000_000]), torch.tensor([1_000_001]), "bound 0"),
        ({"a": 1.0}, {"b": 1.0}, r"has \['a'\], not \['b'\]"),
        ([torch.ones(2)], [torch.ones(2), torch.ones(2)], r"has \[0\], not \[0, 1\]"),
    ],
)
def test_what_differs_is_named(found: Any, want: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_near(found, want)
