"""The demo's configuration makes the demo's steps, to the last bit."""

# the tutorials are no package

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("omegaconf")
import countdown_files
import countdown_grpo
from countdown.algorithms import make_coefficient
from countdown.model import warm_up
from countdown.report import MetricsFile
from countdown.task import Problem, all_problems, reward, solved, split_problems
from project import PROJECT as ROOT
from torchrl_llm_kl.training import read_config, train

STEPS, NUM_PROMPTS, GROUP_SIZE = 3, 3, 4


def test_three_steps_are_the_demo_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same weights and generator state, with problems in the same order."""
    torch.manual_seed(0)
    problems = all_problems()
    policy, tokenizer = countdown_grpo.make_policy(problems)
    some, held_out = split_problems(problems)
    assert len(list(warm_up(policy, tokenizer, some, steps=25, seed=0))) == 25
    some = some[:40]
    generator = torch.Generator().manual_seed(0)
    # The demo's order; its collector resets the env once before the first batch, and so leaves out the first problems.
    order = list(DataLoader(range(len(some)), batch_size=None, shuffle=True, generator=generator))
    countdown_files.write_files(tmp_path, policy, tokenizer, [some[i] for i in order[NUM_PROMPTS:]], held_out[:4])

    torch.manual_seed(0)
    metrics = MetricsFile(tmp_path / "demo.jsonl")
    countdown_grpo.train(
        "grpo",
        policy,
        tokenizer,
        some,
        steps=STEPS,
        lr=3e-4,
        coefficient=make_coefficient("pi", target=0.5, batch_size=256),
        num_prompts=NUM_PROMPTS,
        group_size=GROUP_SIZE,
        max_new_tokens=14,
        seed=0,
        metrics=metrics,
    )

    monkeypatch.chdir(ROOT)  # where the paths of the rewards begin
    changes = {
        "model.name": tmp_path / "model",
        "data.prompts": tmp_path / "prompts.jsonl",
        "data.held_out": tmp_path / "held_out.jsonl",
        "data.shuffle": "false",
        "data.num_prompts": NUM_PROMPTS,
        "data.group_size": GROUP_SIZE,
        "evaluation.every": 2,
        "run.steps": STEPS,
        "run.out": tmp_path / "run",
    }
    config = read_config(ROOT / "tutorials" / "countdown.yaml", [f"{key}={value}" for key, value in changes.items()])
    rows = train(config, say=lambda line: None).rows
    assert len(rows) == len(metrics.rows) == STEPS
    for row, demo in zip(rows, metrics.rows, strict=True):
        names = ("reward", "penalised_reward", "kl", "coefficient", "answer_tokens", "tokens", "clip_fraction", "ESS")
        assert {name: row[name] for name in names} == {name: demo[name] for name in names}
        assert row["reward/solved"] == demo["success"]
    assert rows[-1]["kl"] != 0


def test_the_rewards_by_hand() -> None:
    metadata = {"numbers": [3, 5], "target": 15}
    for answer, value in (("<answer>3*5</answer>", 1.0), ("<answer>3+5</answer>", 0.1), ("3*5", 0.0)):
        assert reward("", answer, metadata) == value
        assert solved("", answer, metadata) == (value == 1.0)
    assert Problem((3, 5), 15, "*").is_solved_by("<answer>3*5</answer>")
