"""A moving reference that is saved on some ranks and continued on others ends like one process that never stopped."""

import torch

from distributed import saving


def test_a_reference_that_follows_is_continued_on_other_ranks(pool, tmp_path):
    """It continues bit for bit. The rounding remainder of the average is saved, sharded like the weights."""
    whole = saving.follow(str(tmp_path / "whole"), first=0, last=6)
    pool.run("distributed.saving:follow", folder=str(tmp_path), first=0, last=3)
    rest = {"folder": str(tmp_path), "first": 3, "last": 6}
    others = [each for ranks in (3, 2) for each in pool.run("distributed.saving:follow", ranks=ranks, **rest)]
    for found in (*others, saving.follow(**rest)):
        assert all(torch.equal(found[name], value) for name, value in whole.items())
