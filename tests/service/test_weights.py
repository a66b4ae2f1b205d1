"""Weights that change: by hand, through torchrl, while callers ask for versions."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import ray
import torch
from load import assert_same, callers, clone, sequences, until
from remote_models import model
from torch import nn

from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.service import (
    ScoringService,
    ServiceWeightSyncScheme,
    ServiceWeightUpdater,
    WeightVersionError,
)


@pytest.fixture(scope="module")
def service() -> Iterator[ScoringService]:
    with ScoringService(factory=model, num_replicas=2, num_cpus=0.1) as found:
        yield found
        found.shutdown()


def assert_holds(service: ScoringService, expected: nn.Module, version: int) -> None:
    data = sequences(count=24)  # enough for both replicas
    remote = clone(service.model)
    for wanted in (None, version):
        remote.version = wanted
        assert_same(remote.make_scorer().score(data).values, LogProbScorer(expected).score(data).values)
    assert [stats["version"] for stats in service.stats()] == [version, version]


def test_weights_reach_every_replica_under_their_version(service: ScoringService) -> None:
    start = service.version
    service.update_weights(model(seed=1).state_dict(), start + 1)
    assert_holds(service, model(seed=1), start + 1)
    service.update_weights(ray.put(model(seed=2).state_dict()), start + 5)
    assert_holds(service, model(seed=2), start + 5)
    service.update_weights(model(seed=2), start + 5)  # again, as after a time-out
    half = {name: value for name, value in model(seed=3).state_dict().items() if "layers.0" in name}
    service.update_weights(half, start + 6)
    mixed = model(seed=2)
    mixed.load_state_dict(half, strict=False)
    assert_holds(service, mixed, start + 6)
    with pytest.raises(WeightVersionError, match=rf"version {start + 2} of the weights came after version {start + 6}"):
        service.update_weights(model(), start + 2)
    with pytest.raises(TypeError, match="version must be a whole number, got '7'"):
        service.update_weights(model(), "7")  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="no weight 'nowhere'"):
        service.update_weights({"nowhere": torch.zeros(1)}, start + 7)
    assert_holds(service, mixed, start + 6)


def test_a_version_that_is_past_and_one_that_never_comes(service: ScoringService) -> None:
    service.update_weights(model(), service.version + 1)
    remote = clone(service.model, timeout=1.0)
    remote.version = service.version - 1
    with pytest.raises(
        WeightVersionError, match=rf"version {remote.version} of the weights was asked for, this replica holds"
    ):
        remote.make_scorer().score(sequences())
    remote.version = service.version + 1
    start = time.monotonic()
    with pytest.raises((WeightVersionError, TimeoutError)):
        remote.make_scorer().score(sequences())
    assert time.monotonic() - start < 10


def test_a_version_that_is_still_to_come_is_waited_for(service: ScoringService) -> None:
    early = clone(service.model)
    early.version = service.version + 1
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(early.make_scorer().score(sequences()).values))
    with callers(service.model, count=2) as load:  # who asks for no version is served meanwhile
        thread.start()
        until(lambda: len(load.answers) > 10)
        assert not found
        service.update_weights(model(seed=4), early.version)
        thread.join(timeout=30)
    assert_same(found[0], LogProbScorer(model(seed=4)).score(sequences()).values)
    load.assert_all_right(LogProbScorer(model()), LogProbScorer(model(seed=4)))


def test_through_a_weight_sync_scheme_of_torchrl(service: ScoringService) -> None:
    scheme = ServiceWeightSyncScheme(service)
    scheme.init_on_sender(model_id="policy")
    scheme.connect()
    version = service.version
    scheme.send(model(seed=5))
    assert_holds(service, model(seed=5), version + 1)
    scheme.send(model(seed=6).state_dict())
    assert_holds(service, model(seed=6), version + 2)


def test_through_the_weight_updater_of_a_collector(service: ScoringService) -> None:
    policy = model(seed=7)
    updater = ServiceWeightUpdater(service, policy)
    version = service.version
    updater()  # as collector.update_policy_weights_() does
    assert_holds(service, model(seed=7), version + 1)
    updater(model(seed=8).state_dict())
    assert_holds(service, model(seed=8), version + 2)
    with pytest.raises(ValueError, match="no weights were given"):
        ServiceWeightUpdater(service)()
