"""Remembered scores of a service: by the fingerprint that it reports, which follows its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from load import assert_same, clone, sequences
from remote_models import model
from torchrl_llm_kl import LogProbScorer, RememberedModel
from torchrl_llm_kl.scoring import fingerprint_of
from torchrl_llm_kl.service import ScoringService
from torchrl_llm_kl.service.engines._engine import TransformersEngine
from torchrl_llm_kl.service.replica._core import ScoringCore


@pytest.fixture
def service(shared: ScoringService) -> Iterator[ScoringService]:
    yield shared
    shared.update_weights(model().state_dict(), shared.version + 1)


def requests(service: ScoringService) -> int:
    return int(service.stats()[0]["requests"])


def test_the_second_epoch_sends_no_request_until_weights_are_pushed(service: ScoringService, tmp_path: Path) -> None:
    start, data, reference = service.version, sequences(), RememberedModel(service.model, tmp_path)
    scorer = reference.make_scorer()
    first = scorer.evaluate(data, entropy=True)
    assert_same(first.log_prob.values, LogProbScorer(model()).score(data).values)
    assert first.version == start
    reference.store.flush()
    sent = requests(service)
    for again in (scorer, RememberedModel(clone(service.model), tmp_path).make_scorer()):
        found = again.begin(data, entropy=True)()
        assert torch.equal(found.log_prob.values, first.log_prob.values)
        assert found.entropy is not None
        assert first.entropy is not None
        assert torch.equal(found.entropy.values, first.entropy.values)
    assert requests(service) == sent

    # Local scores of the same weights are found too, and those of a push are new.
    local = RememberedModel(model(), tmp_path).make_scorer()
    assert torch.equal(local.score(data).values, first.log_prob.values)
    service.update_weights(model(seed=1).state_dict(), start + 1)
    assert service.model.fingerprint() == (start + 1, fingerprint_of(model(seed=1)))
    found = scorer.evaluate(data)
    assert found.version == start + 1
    assert_same(found.log_prob.values, LogProbScorer(model(seed=1)).score(data).values)
    assert requests(service) == sent + 1
    service.model.version = start + 2  # not pushed yet: calls wait for it
    assert service.model.fingerprint() is None
    service.model.version = None


def test_weights_are_read_once_after_each_update() -> None:
    class Engine(TransformersEngine):
        reads = 0

        def fingerprint(self) -> str:
            self.reads += 1
            return super().fingerprint()

    engine = Engine(model())
    core = ScoringCore(engine)
    assert core.fingerprint is None
    for _ in range(2):
        core.read_fingerprint()
    assert core.fingerprint == (0, fingerprint_of(model()), "")
    assert engine.reads == 1
    core.update_weights(model(seed=1).state_dict(), 0)  # under the same number
    assert core.fingerprint is None
    core.read_fingerprint()
    assert core.fingerprint == (0, fingerprint_of(model(seed=1)), "")


def test_an_engine_that_reports_no_fingerprint_is_named() -> None:
    class Plain:
        pass

    with pytest.raises(TypeError, match="Plain reports no fingerprint of its weights: state it"):
        ScoringCore(Plain()).read_fingerprint()  # type: ignore[arg-type]
