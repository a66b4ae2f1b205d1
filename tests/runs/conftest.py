"""Ctrl-C reaches the processes of runs; one lab and one whole run for all tests of `train`."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_fixtures import _tables_have_no_head  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> Iterator[None]:
    """A job in the background of a script ignores SIGINT, and so would each process that it starts."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from train_lab import build_lab

    return build_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="session")
def whole(lab: Path) -> Path:
    """A run of four steps that nothing interrupts."""
    from torchrl_llm_kl.training import train
    from train_lab import settings

    out = lab / "whole"
    result = train(settings(lab, out), say=lambda line: None)
    assert (result.outcome, result.step, result.chosen, result.final) == ("finished", 4, 4, out / "final")
    return out


@pytest.fixture
def _no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture takes as long as a run; that of ``whole`` is drawn."""
    monkeypatch.setattr("torchrl_llm_kl.training._report.plot_curves", lambda *args, **kwargs: None)
