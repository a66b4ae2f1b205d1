"""A run that is killed at random moments ends with the bits of one that is not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchrl_llm_kl.training import train
from train_lab import assert_same_run, build_lab, settings


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_lab(tmp_path_factory.mktemp("lab"))


def start(lab: Path, out: Path, overrides: tuple[str, ...]) -> subprocess.Popen[bytes]:
    file = out.parent / f"{out.name}.yaml"
    file.write_text(settings(lab, out).to_yaml())
    command = [sys.executable, "-m", "torchrl_llm_kl", "train", str(file), *overrides]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def kill_at_random_moments(lab: Path, out: Path, rng: random.Random, *overrides: str, kills: int) -> list[int]:
    """Kill a run again and again, each time after it has made a step more; returns how many were done by then."""
    killed_at: list[int] = []
    metrics = out / "metrics.jsonl"

    def done() -> int:
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    for _ in range(kills):
        before, begun, delay = done(), time.time(), rng.uniform(0, 0.5)
        process = start(lab, out, overrides)
        while process.poll() is None and time.time() - begun < 600:
            if metrics.exists() and metrics.stat().st_mtime > begun and done() > before:
                break
            time.sleep(0.01)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed_at.append(done())
    process = start(lab, out, overrides)
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output.decode()
    return killed_at


def test_a_killed_run_ends_with_the_same_bits(lab: Path, tmp_path: Path) -> None:
    train(settings(lab, tmp_path / "whole"), say=lambda line: None)
    killed_at = kill_at_random_moments(lab, tmp_path / "out", random.Random(0), kills=1)
    assert killed_at[0] >= 1
    assert_same_run(tmp_path / "out", tmp_path / "whole")


@pytest.mark.slow
def test_a_run_killed_five_times_ends_with_the_same_bits(lab: Path, tmp_path: Path) -> None:
    overrides = ("run.steps=12", "checkpoints.keep=2", "optimizer.lr=1e-3", "kl.stop_above=100")
    train(settings(lab, tmp_path / "whole", *overrides), say=lambda line: None)
    seed = random.SystemRandom().randrange(2**32)
    killed_at = kill_at_random_moments(lab, tmp_path / "out", random.Random(seed), *overrides, kills=5)
    print(json.dumps({"seed": seed, "killed at": killed_at}))
    assert_same_run(tmp_path / "out", tmp_path / "whole")
