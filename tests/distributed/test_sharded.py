"""Training on several ranks gives the parameters of one process with the whole batch."""

from __future__ import annotations

import pytest
import torch

from distributed.cases import WRAPS


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("wrap", WRAPS)
def test_three_steps_equal_one_process(pool, wrap, ranks):
    """Uneven tokens and numbers of packs; float64, so that nothing but the order of sums may differ."""
    worst = pool.run("distributed.cases:train", ranks=ranks, wrap=wrap)
    assert max(worst) < 1e-12


@pytest.mark.parametrize("split", ["no rows", "no response"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_rank_without_data_takes_part(pool, wrap, split):
    """Its share of the gradient is 0, and the others do not wait for it."""
    worst = pool.run("distributed.cases:train", wrap=wrap, split=split)
    assert max(worst) < 1e-12


@pytest.mark.parametrize("wrap", WRAPS)
def test_single_precision(pool, wrap):
    worst = pool.run("distributed.cases:train", wrap=wrap, dtype=torch.float32)
    assert max(worst) < 2e-6
