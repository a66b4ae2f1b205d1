"""The loop written out and the command with the same settings give the same weights, to the last bit."""

# the tutorials are no package

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("omegaconf")
import train_grpo
from project import PROJECT as ROOT
from torchrl_llm_kl.training import Checkpoints, load_function, read_config, train
from train_lab import build_lab, same, weights

STEPS = 4


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def written_out(lab: Path) -> dict[str, torch.Tensor]:
    """The weights after four steps of the tutorial."""
    policy = loop(lab, lab / "loop")
    return {name: value.detach().clone() for name, value in policy.state_dict().items()}


def loop(lab: Path, out: Path) -> torch.nn.Module:
    return train_grpo.train(
        str(lab / "model"),
        out,
        prompts=str(lab / "prompts.jsonl"),
        reward=load_function(f"{lab / 'rewards.py'}:vowels"),
        steps=STEPS,
        num_prompts=2,
        group_size=4,
        max_new_tokens=6,
        lr=3e-3,
        save_every=2,
        seed=3,
    )


def test_the_tutorial_is_short() -> None:
    assert len((ROOT / "tutorials" / "train_grpo.py").read_text().splitlines()) <= 150


def test_the_same_settings_give_the_same_bits(lab: Path, written_out: dict[str, torch.Tensor]) -> None:
    source = {
        "model": {"name": str(lab / "model")},
        "data": {"prompts": str(lab / "prompts.jsonl"), "num_prompts": 2, "group_size": 4, "held_out_share": 0.0},
        "reward": f"{lab / 'rewards.py'}:vowels",
        "sampler": {"max_new_tokens": 6},
        "algorithm": {"minibatches": 2},
        "kl": {"place": "reward", "target": 0.5},
        "optimizer": {"lr": 3e-3, "schedule": "linear"},
        "run": {"steps": STEPS, "seed": 3, "out": str(lab / "command"), "threads": 1},
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
    assert last.step == STEPS


def test_the_reward_takes_the_last_number() -> None:
    metadata = {"answer": "12"}
    assert train_grpo.right("What is 3 * 4?", "3 * 4 is 12.", metadata) == 1
    assert train_grpo.right("What is 3 * 4?", "12, or 13", metadata) == 0
    assert train_grpo.right("What is 3 * 4?", "no idea", metadata) == 0
    assert all(int(row["answer"]) > 0 for row in train_grpo.PROMPTS)
