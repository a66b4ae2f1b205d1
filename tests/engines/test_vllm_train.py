"""Runs whose answers come from a real vLLM server: rewards, KLs and log-probs as in runs that sample here."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

pytest.importorskip("omegaconf")
from cli_files import write_jsonl
from torchrl_llm_kl.training import TrainResult, read_config, train
from vllm_server import CONTEXT, ENGINES, ENVIRONMENT, VllmServer, make, save, serving

REWARD = """
def vowels(question, answer, metadata):
    return sum(letter in "aeiou" for letter in answer) / 8
"""
STEPS, SEEDS = 20, (0, 1, 2)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lab")
    save(make("dense"), folder / "model")
    write_jsonl(folder / "prompts.jsonl", ({"question": f"say {i}"} for i in range(40)))
    (folder / "mine.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def server(lab: Path) -> Iterator[VllmServer]:
    with serving(lab / "model", "--logprobs-mode", "processed_logprobs") as found:
        yield found


def run(lab: Path, out: Path, *changes: str) -> tuple[TrainResult, list[str]]:
    source: dict[str, Any] = {
        "model": {"name": str(lab / "model")},
        "data": {"prompts": str(lab / "prompts.jsonl"), "num_prompts": 4, "group_size": 8, "held_out_share": 0.2},
        "reward": f"{lab / 'mine.py'}:vowels",
        "sampler": {"max_new_tokens": 8, "temperature": 0.8},
        "kl": {"target": 3.0},
        "optimizer": {"lr": 5e-4},
        "evaluation": {"every": 10},
        "logging": {"doctor_every": 5},
        "run": {"steps": STEPS, "out": str(out), "threads": 1},
    }
    said: list[str] = []
    return train(read_config(source, changes), say=said.append), said


def last(result: TrainResult, name: str) -> float:
    """The mean of the last ten steps."""
    return mean(row[name] for row in result.rows[-10:])


def test_rewards_and_kls_are_those_of_runs_that_sample_here(
    lab: Path, server: VllmServer, tmp_path: Path, measured: Any
) -> None:
    """The means of three seeds differ by less than three standard errors of their difference."""
    served, here = [], []
    for seed in SEEDS:
        result, said = run(lab, tmp_path / f"served-{seed}", f"sampler.engine={server.url}", f"run.seed={seed}")
        assert [line for line in said if line.startswith("warning")] == []
        assert max(row["sampler_gap"] for row in result.rows) < 1e-4
        assert not [name for row in result.rows for name in row if name.startswith("doctor/fault/")]
        served.append(result)
        here.append(run(lab, tmp_path / f"here-{seed}", f"run.seed={seed}")[0])
    for name in ("reward", "kl"):
        theirs, own = ([last(result, name) for result in results] for results in (served, here))
        error = math.sqrt((stdev(theirs) ** 2 + stdev(own) ** 2) / len(SEEDS))
        measured[f"train, 20 steps, {name}"] = (
            f"vLLM {mean(theirs):.3f}, here {mean(own):.3f}, standard error {error:.3f}"
        )
        assert abs(mean(theirs) - mean(own)) < 3 * error + 0.02
    gap = max(row["sampler_gap"] for result in served for row in result.rows)
    measured["train, largest gap of the log-probs to the trainer's"] = f"{gap:.2g} nats per token"
    first = mean(row["reward"] for result in served for row in result.rows[:5])
    assert mean(last(result, "reward") for result in served) > first


def test_a_run_starts_and_ends_its_own_server(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Any
) -> None:
    """With adapters, and with batches sampled ahead, whose weights are at most one step old."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", "")
    python = Path(os.environ[ENGINES]) / "vllm" / "bin" / "python"
    command = f"{python} -m vllm.entrypoints.openai.api_server --model {{model}}"
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(CONTEXT)]
    changes = ["sampler.engine=vllm", f"sampler.command='{command}'", f"sampler.engine_args={options}"]
    changes += ["lora.r=4", "algorithm.max_staleness=1", "run.steps=6", "evaluation.every=0"]
    result, said = run(lab, tmp_path, *changes)
    assert result.outcome == "finished", said
    assert all(row["age_max"] <= 1 for row in result.rows)
    assert result.rows[0]["sampler_gap"] < 1e-4
    measured["train with a server of its own, seconds of waiting per step"] = (
        f"{mean(row['wait_seconds'] for row in result.rows[1:]):.1f}"
    )
    assert (tmp_path / "engine" / "log").read_text()
