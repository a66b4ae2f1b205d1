"""The demo: teach a language model to play Countdown, while a KL penalty keeps it near its initial weights.

Run it with ``make demo``. It takes a few minutes on two CPU cores and needs no network. It

1. builds a byte-level tokenizer and a small Qwen2, warms up the model on demonstrations, many of which are wrong, and
   writes it with the problems to ``runs/countdown``. This happens only once.
2. runs ``torchrl-llm-kl train tutorials/countdown.yaml`` with your changes, such as ``algorithm.name=dapo``. A frozen copy is
   the reference, and the reward is 1 for a right answer *minus a coefficient times the KL to the reference*. The coefficient
   adapts to hold the KL at a target.

``--prepare`` only makes the first step. ``make demo-fsdp`` then trains on two ranks with the same configuration.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from countdown.model import WARMUP_STEPS, make_policy, warm_up
from countdown.report import progress, silence_dependencies
from countdown.task import Problem, all_problems, split_problems
from torchrl_llm_kl.cli import main

ROOT = Path(__file__).resolve().parents[1]
#: How to go on after the demo.
NEXT = """
Your own prompts and reward, in the same way:
  .venv/bin/torchrl-llm-kl train --example > config.yaml    # every setting with its meaning; docs/start.md walks through it
  .venv/bin/torchrl-llm-kl train config.yaml"""


def prepare(folder: Path, *, steps: int = WARMUP_STEPS, seed: int = 0) -> None:
    """Warm up the model and write the files of ``countdown.yaml``, unless they exist."""
    if (folder / "held_out.jsonl").exists():
        return
    silence_dependencies()
    torch.manual_seed(seed)
    problems = all_problems()
    train, held_out = split_problems(problems)
    policy, tokenizer = make_policy(problems)
    with progress("warm-up", steps) as advance:
        for loss in warm_up(policy, tokenizer, train, steps=steps, seed=seed):
            advance(f"loss {loss:.2f}")
    write_files(folder, policy, tokenizer, train, held_out)


def write_files(
    folder: Path,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    held_out: Sequence[Problem],
) -> None:
    """Write ``model``, ``prompts.jsonl`` and, last, ``held_out.jsonl``."""
    policy.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name, some in (("prompts", problems), ("held_out", held_out)):
        rows = [{"question": each.query, "numbers": each.numbers, "target": each.target} for each in some]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    os.chdir(ROOT)  # the paths in countdown.yaml are relative to it
    if "--help" not in sys.argv:
        prepare(Path("runs/countdown"))
    if "--prepare" in sys.argv:
        sys.exit()
    code = main(["train", "tutorials/countdown.yaml", *sys.argv[1:]])
    if code == 0 and "--help" not in sys.argv:
        print(NEXT)
    sys.exit(code)
