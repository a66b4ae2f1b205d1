"""Training on several ranks gives the parameters of one process with the whole batch."""

from __future__ import annotations

import pytest
import torch

from distributed.cases import WRAPS

#: One of each kind is quick enough for every run of the tests.
QUICK = ("loss(DDP)", "fsdp2", "fsdp1, flat parameters")


def cases(value, quick):
    """Each wrap with a value; those that are not quick are slow tests."""
    return [pytest.param(wrap, value, marks=[] if wrap in quick else pytest.mark.slow) for wrap in WRAPS]


@pytest.mark.parametrize(("wrap", "ranks"), cases(2, WRAPS) + cases(4, QUICK))
def test_three_steps_equal_one_process(pool, wrap, ranks):
    """Uneven tokens and numbers of packs; float64, so that nothing but the order of sums may differ."""
    worst = pool.run("distributed.cases:train", ranks=ranks, wrap=wrap)
    assert max(worst) < 1e-12


@pytest.mark.parametrize(("wrap", "split"), cases("no rows", WRAPS) + cases("no response", QUICK[:2]))
def test_a_rank_without_data_takes_part(pool, wrap, split):
    """Its share of the gradient is 0, and the others do not wait for it."""
    worst = pool.run("distributed.cases:train", wrap=wrap, split=split)
    assert max(worst) < 1e-12


@pytest.mark.parametrize(("wrap", "dtype"), cases(torch.float32, QUICK[1:]))
def test_single_precision(pool, wrap, dtype):
    worst = pool.run("distributed.cases:train", wrap=wrap, dtype=dtype)
    assert max(worst) < 2e-6
