"""A tiny model, prompts and rewards on disk, and runs on them."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from cli_files import read_jsonl, write_jsonl
from torchrl_llm_kl.training import Checkpoints, TrainConfig, TrainResult, read_config, train
from toy_rollouts import make_model, make_tokenizer

REWARDS = """
import os
import signal
import threading

answered, lock = 0, threading.Lock()


def vowels(question, answer, metadata):
    global answered
    with lock:
        answered += 1
        for name, number in (("INTERRUPT_AT", signal.SIGTERM), ("KILL_AT", signal.SIGKILL)):
            if os.environ.get(name) == str(answered):
                os.kill(os.getpid(), number)
    return sum(letter in "aeiou" for letter in answer) / 6


def digits(question, answer, metadata):
    return float(any(letter.isdigit() for letter in answer))
"""

#: In a file of its own: functions of conversations are imported once in a process, with the counter of answers.
REPLIES = """
def reply(messages, metadata):
    return "more" if len(messages[-1]["content"]) % 2 else None  # conversations differ in length
"""

#: The number of rewarded answers in a step, and in an evaluation.
ANSWERS, HELD_OUT = 8, 4


def build_lab(folder: Path, family: str = "qwen2") -> Path:
    tokenizer = make_tokenizer()
    for part in (make_model(tokenizer, 0, family), tokenizer):
        part.save_pretrained(folder / "model")
    write_jsonl(folder / "prompts.jsonl", ({"question": f"say {i}", "answer": chr(97 + i)} for i in range(20)))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "replies.py").write_text(REPLIES)
    return folder


TARGET = {"place": "reward", "target": 0.5, "controller_args": {"warmup": 0}}


def settings(lab: Path, out: Path, *overrides: str, kl: dict[str, Any] = TARGET) -> TrainConfig:
    """Four steps, each with a checkpoint, and three evaluations. All state that a resumed run restores has an effect."""
    source: dict[str, Any] = {
        "model": {"name": str(lab / "model")},
        "data": {"prompts": str(lab / "prompts.jsonl"), "num_prompts": 2, "group_size": 4, "held_out_share": 0.2},
        "reward": f"{lab / 'rewards.py'}:vowels",
        "sampler": {"max_new_tokens": 6},
        "algorithm": {"minibatches": 2},
        "kl": kl,
        "optimizer": {"lr": 3e-3, "schedule": "linear", "warmup_steps": 1},
        "evaluation": {"every": 2, "batch_size": 3},  # of four held-out prompts
        "logging": {"doctor_every": 0},
        "checkpoints": {"every": 1, "keep": 10},
        "run": {"steps": 4, "out": str(out), "threads": 1},
    }
    return read_config(source, overrides)


def go(lab: Path, out: Path, *overrides: str, kl: dict[str, Any] = TARGET, **how: Any) -> tuple[TrainResult, list[str]]:
    """Run with these settings. Returns the result and the printed lines."""
    said: list[str] = []
    return train(settings(lab, out, *overrides, kl=kl), say=said.append, **how), said


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a saved model."""
    files = list(folder.glob("*.safetensors"))
    assert files
    return {name: values for file in files for name, values in load_file(file).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def figures(path: Path) -> list[dict[str, float]]:
    """The metrics of a run without times."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in read_jsonl(path)]


def steps_in(out: Path) -> list[str]:
    """The names of the checkpoints."""
    return [path.name for path in Checkpoints(out / "checkpoints").paths()]


def ended_after(step: int, whole: Path, folder: Path) -> Path:
    """Copy a run without its end to ``folder / "out"``. Metrics of later steps stay, as after a kill."""
    shutil.copytree(whole, out := folder / "out")
    shutil.rmtree(out / "final")
    for later in steps_in(out):
        if later > f"step-{step:06}":
            shutil.rmtree(out / "checkpoints" / later)
    return out


def assert_same_run(out: Path, whole: Path) -> None:
    """Check that weights, metrics and evaluations of two folders are equal to the last bit."""
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert figures(out / name) == figures(whole / name)
    assert same(weights(out / "final"), weights(whole / "final"))
