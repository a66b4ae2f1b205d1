"""Tests on the local Ray cluster, and a service that they share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from rollout_fixtures import (  # noqa: F401
    _lists_become_stacks,
    _tables_have_no_head,
    padded,
    policy_model,
    ref_model,
    tokenizer,
)
from waits import wait_for_replicas

if TYPE_CHECKING:
    from torchrl_llm_kl.service import ScoringService

pytest.importorskip("ray")


@pytest.fixture(scope="session", autouse=True)
def _cluster(ray_cluster: None) -> None:
    """Started before the first test."""
    wait_for_replicas()


@pytest.fixture(scope="session")
def shared(ray_cluster: None) -> Iterator[ScoringService]:
    """A service of one replica, for all tests that leave it with the weights of ``model()``."""
    from remote_models import model
    from torchrl_llm_kl.service import ScoringService

    with ScoringService(factory=model, name="shared", num_cpus=0.1) as found:
        yield found
        found.shutdown()
