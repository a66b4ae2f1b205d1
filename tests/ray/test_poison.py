"""Requests that kill or hang the replicas that score them, beside other callers."""

from contextlib import contextmanager
from functools import partial

import pytest

from load import callers, clone, pids
from remote_models import ENDLESS, POISON, deadly, model
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.service import PoisonedRequest, ScoringService, ServiceTimeout
from waits import until

pytestmark = pytest.mark.slow
HANG_AFTER = 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def service(folder):
    settings = {"num_replicas": 2, "num_cpus": 0.1, "hang_after": HANG_AFTER, "timeout": 300.0}
    with ScoringService(factory=partial(deadly, str(folder)), **settings) as made:
        yield made
        made.shutdown()


@contextmanager
def neighbours(remote):
    """Six callers, who go on for a while afterwards."""
    with callers(remote, count=6) as load:
        until(lambda: len(load.answers) > 20)
        yield load
        after = len(load.answers)
        until(lambda: len(load.answers) > after + 20, seconds=240)


def all_up(service, folder, lives):
    """Wait until so many processes have been started in all, and the last two are up."""
    until(lambda: len(list(folder.iterdir())) >= lives and all(pids(service)), seconds=240)


def test_a_request_that_kills_its_replica_is_refused_after_three_trials(service, folder):
    scorer = clone(service.model).make_scorer()
    before = len(list(folder.iterdir()))
    with neighbours(service.model) as load:
        message = "3 processes died while they scored a request of 1 sequences and 6 tokens"
        with pytest.raises(PoisonedRequest, match=message):
            scorer.score([POISON])
        all_up(service, folder, before + 4)
    load.assert_all_right(LogProbScorer(model()))
    assert len(list(folder.iterdir())) == before + 4
    assert load.slowest < 120

    with pytest.raises(PoisonedRequest, match="replicas died of this request before"):  # nobody tries it again
        clone(service.model).make_scorer().score([POISON])


def test_a_replica_that_hangs_is_replaced(service, folder):
    """Requests that wait there go to the other replica at once; the one that hangs is tried alone."""
    before = len(list(folder.iterdir()))
    with neighbours(service.model) as load:
        impatient = clone(service.model, timeout=HANG_AFTER + 3).make_scorer()
        with pytest.raises(ServiceTimeout):
            impatient.score([ENDLESS])
        all_up(service, folder, before + 1)
    load.assert_all_right(LogProbScorer(model()))
