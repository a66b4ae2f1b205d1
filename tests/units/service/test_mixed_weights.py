"""Replicas that hold different weights under one version, as after two pushes of it: an error, and nothing is remembered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from remote_models import model
from torchrl_llm_kl import RememberedModel, ScoreStore
from torchrl_llm_kl.scoring import fingerprint_of
from torchrl_llm_kl.service import RemoteModel, WeightVersionError
from torchrl_llm_kl.service._wire import Request
from torchrl_llm_kl.service.client._replicas import Replicas
from torchrl_llm_kl.service.control._spec import ServiceSpec
from torchrl_llm_kl.service.engines._engine import TransformersEngine
from torchrl_llm_kl.service.replica._core import ScoringCore

ROWS = [[i, 2, 3, 4] for i in range(12)]  # prompts for both replicas


class InProcess(Replicas):
    """Two cores in this process."""

    def __init__(self, spec: ServiceSpec, cores: list[ScoringCore]) -> None:
        super().__init__(spec)
        self.cores, self.first = cores, 0

    def usable(self) -> list[int]:
        return [0, 1]

    def choose(self, order: Any) -> int:
        return self.first

    def handle(self, replica: int, *, timeout: float) -> Any:
        def score(packed: bytes, timeout: float) -> Any:
            found = self.cores[replica].score([Request.unpack(packed)])[0]
            return found if isinstance(found, Exception) else found.pack()

        return SimpleNamespace(score=SimpleNamespace(remote=score))

    def call(self, replica: int, method: str, *args: Any, timeout: float) -> Any:
        if method == "interface":
            return self.cores[replica].engine.interface()
        assert method == "fingerprint"
        self.cores[replica].read_fingerprint()
        return self.cores[replica].fingerprint


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RemoteModel]:
    """A service whose replicas have taken a push each, of a model with a seed and under a digest."""
    monkeypatch.setattr(ray, "get", lambda value, timeout=None: value)

    def make(*pushes: tuple[int, int, str]) -> RemoteModel:
        cores = []
        for version, seed, digest in pushes:
            core = ScoringCore(TransformersEngine(model()))
            core.update_weights(model(seed).state_dict(), version, digest=digest)
            cores.append(core)
        remote = RemoteModel(ServiceSpec("name", model, "source", {"max_tokens": 64}, num_replicas=2))
        remote.replicas = InProcess(remote.spec, cores)
        return remote

    return make


def test_scores_of_two_sets_of_weights_are_an_error(pushed: Callable[..., RemoteModel]) -> None:
    mixed = pushed((3, 1, "one"), (3, 2, "other"))
    with pytest.raises(
        WeightVersionError, match=r"version 3 of the weights .* other ones: push all weights under a new"
    ):
        mixed.make_scorer().score(ROWS)
    same = pushed((3, 1, "one"), (3, 1, "one"))
    assert torch.count_nonzero(same.make_scorer().score(ROWS).values) == 36
    assert same.replicas.newest == 3


def test_a_client_remembers_the_weights_of_its_newest_version(pushed: Callable[..., RemoteModel]) -> None:
    remote = pushed((3, 1, "one"), (3, 1, "one"))
    scorer = remote.make_scorer()
    scorer.score(ROWS)
    for core in remote.replicas.cores:  # type: ignore[attr-defined]
        core.update_weights(model(2).state_dict(), 3, digest="other")
    with pytest.raises(WeightVersionError, match="version 3 of the weights"):
        scorer.score(ROWS)
    for core in remote.replicas.cores:  # type: ignore[attr-defined]
        core.update_weights(model(2).state_dict(), 4, digest="other")
    assert scorer.score(ROWS).values.shape == (48,)


@pytest.mark.parametrize("first", [0, 1])
def test_nothing_is_remembered_under_a_wrong_fingerprint(
    pushed: Callable[..., RemoteModel], first: int, tmp_path: Path
) -> None:
    """The fingerprint is of one replica, scores are of the other, or of both."""
    store = ScoreStore(tmp_path)
    for rows in (ROWS, ROWS[:1], ROWS[1:2], ROWS[2:3]):
        remote = pushed((3, 1, "one"), (3, 2, "other"))
        remote.replicas.first = first  # type: ignore[attr-defined]
        try:
            RememberedModel(remote, store).make_scorer().score(rows)
        except WeightVersionError:
            continue
    store.flush()
    # Whatever was stored is of the weights with that fingerprint.
    seed = 1 + first
    there, right = RememberedModel(model(seed), store), RememberedModel(model(seed), tmp_path / "empty")
    assert there.weights()[1].startswith(fingerprint_of(model(seed)))  # type: ignore[index]
    assert torch.allclose(there.make_scorer().score(ROWS).values, right.make_scorer().score(ROWS).values, atol=1e-6)
