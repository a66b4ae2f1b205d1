"""Comparisons of floats that hold on every processor, since the bound follows from the operation.

Processors add in different orders, fuse products with sums, and compute ``exp`` with different polynomials. Two correct
results of one formula therefore differ by an amount that follows from the dtype, the values and the formula.
"""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

#: Roundings per value: a few elementwise steps on each side.
STEPS = 4


def assert_near(
    actual: Any,
    expected: Any,
    *,
    terms: int = 1,
    size: float | None = None,
    exponent: float = 0.0,
    dtype: torch.dtype | None = None,
    msg: str = "",
) -> None:
    """Assert that two results differ only by rounding.

    Each value must fulfil ``|actual - expected| <= 4 * eps(dtype) * sqrt(terms) * (1 + |exponent|) * size``. Integers,
    booleans, infinities and shapes must be equal. NaN equals nothing.

    Args:
        actual: a number, a tensor (padded or nested), or a list, tuple or mapping of them. A list of numbers is one tensor.
        expected: the same structure.
        terms: the number of summands of the longest sum in the computation.
        size: the largest magnitude of a rounded number in the computation, such as the logits of a log-prob. At least
            ``|expected|``. Default: the largest ``|expected|`` of the tensor. 0 compares each value by its own magnitude.
        exponent: for a result of ``exp``, the largest exponent ``x``. A relative error of ``eps`` in ``x`` is a relative error
            of ``eps * x`` in ``exp(x)``.
        dtype: precision of the computation, if it is not the dtype of the tensors: for a float32 result that became a Python
            number, or a float32 result and its float64 truth. Tensors of two dtypes require it. Python numbers count as
            float64.
        msg: a name for the error message.
    """
    options: dict[str, Any] = {"terms": terms, "size": size, "exponent": exponent, "dtype": dtype}
    if isinstance(expected, Tensor) and expected.is_nested:
        actual, expected = list(actual.unbind()), list(expected.unbind())
    if isinstance(expected, (list, tuple)) and not all(isinstance(value, (int, float)) for value in expected):
        actual, expected = dict(enumerate(actual)), dict(enumerate(expected))
    if isinstance(expected, Mapping):
        assert actual.keys() == expected.keys(), f"{msg} has {list(actual)}, not {list(expected)}."
        for key, value in expected.items():
            assert_near(actual[key], value, **options, msg=f"{msg}[{key!r}]")
        return

    dtypes = [value.dtype for value in (actual, expected) if isinstance(value, Tensor)]
    assert dtype is not None or len(set(dtypes)) < 2, f"{msg} has dtype {dtypes[0]}, not {dtypes[1]}."
    exact = bool(dtypes) and not dtypes[0].is_floating_point
    eps = 0.0 if exact else torch.finfo(dtype or next(iter(dtypes), torch.float64)).eps
    found, want = (torch.as_tensor(value, dtype=torch.float64, device="cpu").detach() for value in (actual, expected))
    assert found.shape == want.shape, f"{msg} has shape {tuple(found.shape)}, not {tuple(want.shape)}."
    magnitude = want.abs().nan_to_num(nan=0.0, posinf=0.0)
    largest = float(magnitude.max()) if size is None and want.numel() else size or 0.0
    bound = STEPS * eps * math.sqrt(terms) * (1 + abs(exponent)) * magnitude.clamp(min=largest)
    error = torch.where(found == want, 0.0, (found - want).abs()).nan_to_num(nan=torch.inf)
    if (error > bound).any():
        i = int((error - bound).argmax())
        values = tuple(values.flatten()[i].item() for values in (found, want, error, bound))
        raise AssertionError(
            f"{msg} {int((error > bound).sum())} of {want.numel()} values differ by more than rounding. The worst, number {i}: "
            "{!r}, not {!r}; difference {:.2g}, bound {:.2g}.".format(*values)
        )


def rows_keep_their_bits() -> bool:
    """Whether a row of a matrix product has the same bits at each position, which ``deterministic=True`` needs."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(n, 64, generator=generator) for n in (256, 32))
    return torch.equal((rows @ weight.T).flip(0), rows.flip(0) @ weight.T)


#: MKL with the instructions of AVX2 does not fulfil this, and ``deterministic=True`` is refused there.
needs_equal_rows = pytest.mark.skipif(
    not rows_keep_their_bits(), reason="on this machine the bits of a row of a matrix product depend on its position"
)
