"""Fixtures of the tests on the local Ray cluster: a shared service, the models of transforms, other drivers."""

from contextlib import ExitStack
from functools import partial

import pytest

pytest.importorskip("ray.serve")
from drivers import Driver
from load import all_up
from remote_models import SHARED, model
from rollout_fixtures import _lists_become_stacks, _tables_have_no_head  # noqa: F401
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.service import RayRetrieveLogProb, ScoringService
from waits import wait_for_replicas


@pytest.fixture(scope="session", autouse=True)
def _cluster(ray_cluster):
    """Started before the first test."""
    wait_for_replicas()


@pytest.fixture(scope="session")
def shared(ray_cluster):
    """Two replicas with the numbers of ``model()`` and a slow forward, so that a kill hits a batch."""
    with ScoringService(**SHARED) as found:
        yield found
        found.shutdown()


@pytest.fixture
def pushed(shared):
    """``shared``, which gets its own weights back after a test."""
    all_up(shared)
    yield shared
    shared.model.version = None
    shared.update_weights(model())


@pytest.fixture
def serve(ray_cluster):
    """Starts services, which are shut down after the test."""
    with ExitStack() as ends:

        def start(*made, **settings):
            found = ends.enter_context(ScoringService(*made, **{"num_cpus": 0.1, **settings}))
            ends.callback(found.shutdown)
            return found

        yield start


@pytest.fixture(scope="session")
def local():
    """The numbers of ``shared``."""
    return LogProbScorer(model())


@pytest.fixture(scope="session")
def transform_services(ray_cluster):
    """The reference behind ``"lab"``, the policy behind ``"lab-gen"``, and a model by value behind ``"lab-value"``."""
    from ray_lab import BY_VALUE, GEN, REF, SERVED, SERVICE, VALUE, start_together

    *services, _ = start_together(
        partial(ScoringService, factory=REF, name=SERVICE, **SERVED),
        partial(ScoringService, factory=GEN, name=f"{SERVICE}-gen", **SERVED),
        partial(RayRetrieveLogProb, BY_VALUE(), **VALUE),
    )
    yield
    for service in services:
        service.shutdown()


@pytest.fixture
def drivers(ray_cluster):
    """Starts other drivers."""
    with ExitStack() as ends:

        def start(**options):
            driver = Driver(**options)
            ends.callback(driver.kill)
            return driver

        yield start
