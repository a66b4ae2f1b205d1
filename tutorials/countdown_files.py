"""Write what ``countdown.yaml`` trains on: the demo's model after its warm-up, its problems, and those held out.

Run ``python tutorials/countdown_files.py``, then ``torchrl-llm-kl train tutorials/countdown.yaml``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from countdown.model import warm_up
from countdown.report import progress
from countdown.task import Problem, all_problems, split_problems
from countdown_grpo import WARMUP_STEPS, make_policy


def write_files(
    folder: Path,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    held_out: Sequence[Problem],
) -> None:
    """Write ``model``, ``prompts.jsonl`` and ``held_out.jsonl``."""
    policy.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name, some in (("prompts", problems), ("held_out", held_out)):
        rows = [{"question": each.query, "numbers": each.numbers, "target": each.target} for each in some]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/countdown"))
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the warm-up")
    parser.add_argument("--warmup-steps", type=int, default=WARMUP_STEPS)
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(given.seed)
    problems = all_problems()
    train, held_out = split_problems(problems)
    policy, tokenizer = make_policy(problems)
    with progress("warm-up", given.warmup_steps) as advance:
        for loss in warm_up(policy, tokenizer, train, steps=given.warmup_steps, seed=given.seed):
            advance(f"loss {loss:.2f}")
    write_files(given.folder, policy, tokenizer, train, held_out)
    print(f"wrote {given.folder}: now torchrl-llm-kl train tutorials/countdown.yaml")


if __name__ == "__main__":
    main()
