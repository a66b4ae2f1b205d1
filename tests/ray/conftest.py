"""Tests on the local Ray cluster, and what they share: a service, the models of transforms, another driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
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
    from drivers import Driver
    from torchrl_llm_kl import LogProbScorer
    from torchrl_llm_kl.service import ScoringService

pytest.importorskip("ray")


@pytest.fixture(scope="session", autouse=True)
def _cluster(ray_cluster: None) -> None:
    """Started before the first test."""
    wait_for_replicas()


@pytest.fixture(scope="session")
def shared(ray_cluster: None) -> Iterator[ScoringService]:
    """Two replicas with the numbers of ``model()`` and a slow forward, so that a kill hits a batch."""
    from remote_models import SHARED
    from torchrl_llm_kl.service import ScoringService

    with ScoringService(**SHARED) as found:
        yield found
        found.shutdown()


@pytest.fixture
def pushed(shared: ScoringService) -> Iterator[ScoringService]:
    """``shared``, which gets its own weights back after a test."""
    from load import all_up
    from remote_models import model

    all_up(shared)
    yield shared
    shared.model.version = None
    shared.update_weights(model())


@pytest.fixture(scope="session")
def local() -> LogProbScorer:
    """The numbers of ``shared``."""
    from remote_models import model
    from torchrl_llm_kl import LogProbScorer

    return LogProbScorer(model())


@pytest.fixture(scope="session")
def transform_services(ray_cluster: None) -> Iterator[None]:
    """The reference behind ``"lab"``, the policy behind ``"lab-gen"``, and a model by value behind ``"lab-value"``."""
    from ray_lab import BY_VALUE, GEN, REF, SERVED, SERVICE, VALUE, start_together
    from torchrl_llm_kl.service import RayRetrieveLogProb, ScoringService

    *services, _ = start_together(
        partial(ScoringService, factory=REF, name=SERVICE, **SERVED),
        partial(ScoringService, factory=GEN, name=f"{SERVICE}-gen", **SERVED),
        partial(RayRetrieveLogProb, BY_VALUE(), **VALUE),
    )
    yield
    for service in services:
        service.shutdown()


@pytest.fixture
def drivers(ray_cluster: None) -> Iterator[Callable[[], Driver]]:
    """Starts other drivers."""
    from drivers import Driver

    started: list[Driver] = []

    def start() -> Driver:
        started.append(Driver())
        return started[-1]

    yield start
    for driver in started:
        driver.kill()


@pytest.fixture(scope="session")
def driver(ray_cluster: None) -> Iterator[Driver]:
    """Another driver, for all tests."""
    from drivers import Driver

    found = Driver()
    yield found
    found.kill()
