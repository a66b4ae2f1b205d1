"""``train``: settings are printed, checked and followed; the exit code says how it ended."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from cli_files import Cli, error_of

pytest.importorskip("omegaconf")
sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from train_lab import ANSWERS, build_lab, settings, weights

from torchrl_llm_kl.training import read_config


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def file(lab: Path, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(settings(lab, tmp_path / "out", "evaluation.every=0", "run.steps=2").to_yaml())
    return path


def test_the_example_is_a_configuration(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(cli("train", "--example").stdout)
    assert read_config(path).data.prompts == "prompts.jsonl"


def test_a_dry_run_prints_the_resolved_settings_and_writes_nothing(cli: Cli, file: Path, tmp_path: Path) -> None:
    out = cli("train", file, "optimizer.lr=1e-5", "run.seed=3", "--dry-run").stdout
    path = tmp_path / "again.yaml"
    path.write_text(out)
    assert read_config(path) == read_config(file, ["optimizer.lr=1e-5", "run.seed=3"])
    assert not (tmp_path / "out").exists()
    words = ["model.name=m", "data.prompts=p.jsonl", "reward=r.py:f", "--dry-run"]
    assert "name: m\n" in cli("train", *words).stdout


def test_a_file_with_an_equals_sign_in_its_path_is_no_change(cli: Cli, file: Path, tmp_path: Path) -> None:
    (tmp_path / "lr=1").mkdir()
    copy = Path(shutil.copy(file, tmp_path / "lr=1" / "config.yaml"))
    assert cli("train", copy, "--dry-run").stdout == cli("train", file, "--dry-run").stdout


def test_a_reward_that_always_fails_is_the_user_s(cli: Cli, file: Path, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("def f(question, answer, metadata):\n    return answer.absent\n")
    last = cli("train", file, f"reward={tmp_path / 'fails.py'}:f", code=2).stderr.splitlines()[-1]
    assert "failed for all 8 answers of its first batch" in last
    assert "unexpected" not in last


def test_errors_are_one_line(cli: Cli, file: Path, tmp_path: Path) -> None:
    for words, message in (
        ([file, "optimizer.learning_rate=1"], "unknown key optimizer.learning_rate: did you mean optimizer.lr?"),
        ([file, "model.name=./nowhere"], "there is no folder ./nowhere"),
        ([file, "reward=nowhere.py:f"], "there is no file nowhere.py"),
        ([file, "algorithm.name=dpo", "--dry-run"], "learns from given answers"),
        ([tmp_path / "no.yaml"], "there is no file"),
        ([], "train --example"),
    ):
        assert message in error_of(cli("train", *words, code=2)), message


def test_a_run_and_its_exit_codes(cli: Cli, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted, finished by the same command, and ended by its KL."""
    monkeypatch.setenv("INTERRUPT_AT", str(ANSWERS))
    interrupted = cli("train", file, code=130)
    assert "interrupted after step 1 of 2: saved" in interrupted.stderr
    monkeypatch.delenv("INTERRUPT_AT")
    finished = cli("train", file)
    assert "going on after step 1 of 2" in finished.stderr
    assert f"wrote {tmp_path / 'out' / 'final'}, the weights after step 2" in finished.stdout
    assert weights(tmp_path / "out" / "final")
    assert "other settings (optimizer.lr" in error_of(cli("train", file, "optimizer.lr=1", code=2))
    changes = [
        "kl.stop_above=0.001",
        "kl.stop_after=1",
        "optimizer.lr=0.3",
        "run.steps=4",
        "optimizer.schedule=constant",
    ]
    assert "kl.stop_above" in cli("train", file, *changes, "--fresh", code=1).stderr
