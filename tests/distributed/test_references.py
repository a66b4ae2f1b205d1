"""A sharded reference follows a sharded policy."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("whole", [False, True], ids=["sharded alike", "whole reference"])
@pytest.mark.parametrize(
    "wrap", ["loss(DDP)", "fsdp2", "fsdp2, kept after forward", "fsdp1, original parameters", "fsdp1, flat parameters"]
)
def test_a_reference_follows_the_policy(pool, wrap, whole):
    if whole and wrap.startswith("fsdp1"):
        with pytest.raises(Exception, match=r"no counterpart|has shape"):
            pool.run("distributed.following:follow", wrap=wrap, whole=whole)
        return
    for weights, scores, after_reset in pool.run("distributed.following:follow", wrap=wrap, whole=whole):
        assert weights < 1e-12
        assert scores < 1e-12
        assert after_reset == 0 if not whole else after_reset < 1e-12


def test_an_adapter_follows_the_policy(pool):
    for weights, scores, after_reset in pool.run("distributed.following:follow", wrap="fsdp2", lora=True):
        assert weights < 1e-12
        assert scores < 1e-12
        assert after_reset == 0
