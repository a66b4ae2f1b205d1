"""Tests of torchrl's ``AsyncEnvPool`` with ``RetrieveKL``: each child env gives the KL of a single env."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.collectors.llm import LLMCollector
from torchrl.envs import AsyncEnvPool
from torchrl.modules.llm import TransformersWrapper

from closeness import assert_near
from ray_parts import child_env, scoring_models
from toy_models import FORWARD
from toy_rollouts import QUERIES, make_model, make_policy, make_tokenizer, steps

CHILDREN = 3
KEYS = [("next", "log_probs", "full"), ("next", "ref_log_probs", "full"), ("next", "kl_penalty"), ("next", "reward")]


def greedy_policy() -> TransformersWrapper:
    """A greedy policy, whose tokens do not depend on the order of the envs."""
    tokenizer = make_tokenizer()
    policy = make_policy(make_model(tokenizer, 0), tokenizer, pad_output=False)
    policy.generate_kwargs["do_sample"] = False
    return policy


@contextmanager
def pool_of(**settings: Any) -> Iterator[AsyncEnvPool]:
    """A pool with an env for each of the first queries."""
    makers = [partial(child_env, query, **settings) for query in QUERIES[:CHILDREN]]
    pool = AsyncEnvPool(makers, backend="threading", stack="lazy")
    try:
        yield pool
    finally:
        pool.close(raise_if_closed=False)


def collected(pool: AsyncEnvPool, turns: int) -> list[TensorDictBase]:
    sizes = {"dialog_turns_per_batch": 1, "total_dialog_turns": turns}
    collector = LLMCollector(pool, policy=greedy_policy(), yield_completed_trajectories=True, **sizes)
    batches = [batch.clone() for batch in collector]
    collector.shutdown()
    return batches


def check(batches: list[TensorDictBase], turns: int) -> None:
    """The tokens and scores of each conversation equal those of a single env."""
    rollouts = {x: child_env(x, turns=turns).rollout(turns, greedy_policy()) for x in QUERIES[:CHILDREN]}
    seen = set()
    for batch in batches:
        rows = list(steps(batch))
        query = rows[0]["query"]
        assert len(rows) == turns
        for row, expected in zip(rows, steps(rollouts[query]), strict=True):
            assert torch.equal(row["tokens", "full"], expected["tokens", "full"])
            for key in KEYS:
                assert torch.count_nonzero(expected[key]) > 1
                assert_near(row[key], expected[key], **FORWARD)
        seen.add(query)
    assert seen == set(QUERIES[:CHILDREN])


@pytest.mark.parametrize("turns", [1, 2])
def test_threads_share_the_models(turns: int) -> None:
    """With several turns ``min_get`` keeps conversations of equal length together, since torchrl cannot batch others."""
    with pool_of(turns=turns, models=scoring_models()) as pool:
        pool.min_get = CHILDREN
        check(collected(pool, 2 * turns * CHILDREN), turns)
