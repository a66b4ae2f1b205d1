"""A sharded reference follows a sharded policy."""

from __future__ import annotations

import pytest

WRAPS = ["loss(DDP)", "fsdp2", "fsdp2, kept after forward", "fsdp1, original parameters", "fsdp1, flat parameters"]


@pytest.mark.parametrize(("wrap", "whole"), [*((wrap, False) for wrap in WRAPS), *((wrap, True) for wrap in WRAPS[:3])])
def test_a_reference_follows_the_policy(pool, wrap, whole):
    """The reference is sharded alike, or whole on each rank; its cached scores are of the new weights."""
    for weights, scores, after_reset in pool.run("distributed.following:follow", wrap=wrap, whole=whole):
        assert weights < 1e-12
        assert scores < 1e-12
        assert after_reset == 0 if not whole else after_reset < 1e-12


@pytest.mark.parametrize(
    ("wrap", "match"), [("fsdp1, original parameters", "has shape"), ("fsdp1, flat parameters", "no counterpart")]
)
def test_a_whole_reference_cannot_follow_fsdp1(pool, wrap, match):
    for message in pool.run("distributed.following:refuse", wrap=wrap):
        assert match in message


def test_an_adapter_follows_the_policy(pool):
    for weights, scores, after_reset in pool.run("distributed.following:follow", wrap="fsdp2", lora=True):
        assert weights < 1e-12
        assert scores < 1e-12
        assert after_reset == 0


def test_a_change_on_one_rank_clears_the_cache_of_all(pool):
    assert max(pool.run("distributed.following:change_one_shard")) < 1e-12
