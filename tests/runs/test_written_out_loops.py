"""Loops that are written out and the command with the same settings give the same numbers, to the last bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("omegaconf")
import countdown_files
import countdown_grpo
import train_grpo
from countdown.algorithms import make_coefficient
from countdown.model import warm_up
from countdown.report import MetricsFile
from countdown.task import all_problems, split_problems
from project import PROJECT as ROOT
from torchrl_llm_kl.training import Checkpoints, load_function, read_config, train
from train_lab import same, weights

pytestmark = pytest.mark.usefixtures("_no_curves")

# ------------------------------------------------------------------ tutorials/train_grpo.py


@pytest.fixture(scope="module")
def written_out(lab: Path) -> dict[str, torch.Tensor]:
    """The weights after four steps of the tutorial."""
    policy = loop(lab, lab / "loop")
    return {name: value.detach().clone() for name, value in policy.state_dict().items()}


def loop(lab: Path, out: Path) -> torch.nn.Module:
    reward = load_function(f"{lab / 'rewards.py'}:vowels")
    files = {"prompts": str(lab / "prompts.jsonl"), "reward": reward}
    sizes = {"steps": 4, "num_prompts": 2, "group_size": 4, "max_new_tokens": 6}
    return train_grpo.train(str(lab / "model"), out, **files, **sizes, lr=3e-3, save_every=2, seed=3)


def test_the_same_settings_give_the_same_bits(lab: Path, written_out: dict[str, torch.Tensor]) -> None:
    assert len((ROOT / "tutorials" / "train_grpo.py").read_text().splitlines()) <= 150, "the tutorial is short"
    source = {
        "model": {"name": str(lab / "model")},
        "data": {"prompts": str(lab / "prompts.jsonl"), "num_prompts": 2, "group_size": 4, "held_out_share": 0.0},
        "reward": f"{lab / 'rewards.py'}:vowels",
        "sampler": {"max_new_tokens": 6},
        "algorithm": {"minibatches": 2},
        "kl": {"place": "reward", "target": 0.5},
        "optimizer": {"lr": 3e-3, "schedule": "linear"},
        "run": {"steps": 4, "seed": 3, "out": str(lab / "command"), "threads": 1},
    }
    train(read_config(source), say=lambda line: None)
    command = weights(lab / "command" / "final")
    assert not same(command, weights(lab / "model")), "it has learned"
    assert all(torch.equal(command[name], written_out[name]) for name in command)


def test_the_tutorial_resumes_with_the_same_bits(
    lab: Path, written_out: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    shutil.copytree(lab / "loop", tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step-000004")
    again = loop(lab, tmp_path / "out").state_dict()
    assert all(torch.equal(again[name], written_out[name]) for name in written_out)
    last = Checkpoints(tmp_path / "out" / "checkpoints").latest()
    assert last is not None
    assert last.step == 4


def test_the_reward_takes_the_last_number() -> None:
    for answer, value in (("3 * 4 is 12.", 1), ("12, or 13", 0), ("no idea", 0)):
        assert train_grpo.right("What is 3 * 4?", answer, {"answer": "12"}) == value
    assert all(int(row["answer"]) > 0 for row in train_grpo.PROMPTS)


# ------------------------------------------------------------------ tutorials/countdown.yaml


def test_three_steps_are_the_demo_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same weights and generator state, with problems in the same order."""
    steps, prompts, group = 3, 3, 4
    torch.manual_seed(0)
    problems = all_problems()
    policy, tokenizer = countdown_grpo.make_policy(problems)
    some, held_out = split_problems(problems)
    assert len(list(warm_up(policy, tokenizer, some, steps=25, seed=0))) == 25
    some = some[:40]
    generator = torch.Generator().manual_seed(0)
    # The demo's order; its collector resets the env once before the first batch, and so leaves out the first problems.
    order = list(DataLoader(range(len(some)), batch_size=None, shuffle=True, generator=generator))
    countdown_files.write_files(tmp_path, policy, tokenizer, [some[i] for i in order[prompts:]], held_out[:4])

    torch.manual_seed(0)
    metrics = MetricsFile(tmp_path / "demo.jsonl")
    coefficient = make_coefficient("pi", target=0.5, batch_size=256)
    sizes = {"num_prompts": prompts, "group_size": group, "max_new_tokens": 14, "steps": steps}
    how = {"lr": 3e-4, "coefficient": coefficient, "seed": 0, "metrics": metrics}
    countdown_grpo.train("grpo", policy, tokenizer, some, **sizes, **how)

    monkeypatch.chdir(ROOT)  # where the paths of the rewards begin
    changes = {
        "model.name": tmp_path / "model",
        "data.prompts": tmp_path / "prompts.jsonl",
        "data.held_out": tmp_path / "held_out.jsonl",
        "data.shuffle": "false",
        "data.num_prompts": prompts,
        "data.group_size": group,
        "evaluation.every": 2,
        "run.steps": steps,
        "run.out": tmp_path / "run",
    }
    config = read_config(ROOT / "tutorials" / "countdown.yaml", [f"{key}={value}" for key, value in changes.items()])
    rows = train(config, say=lambda line: None).rows
    assert len(rows) == len(metrics.rows) == steps
    for row, demo in zip(rows, metrics.rows, strict=True):
        names = ("reward", "penalised_reward", "kl", "coefficient", "answer_tokens", "tokens", "clip_fraction", "ESS")
        assert {name: row[name] for name in names} == {name: demo[name] for name in names}
        assert row["reward/solved"] == demo["success"]
    assert rows[-1]["kl"] != 0
