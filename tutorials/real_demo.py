"""GRPO of a real pre-trained model: Gemma 3 270M learns sums that it half knows, with the KL held at a target.

Run it with ``make demo-real``. It takes 25 minutes on two CPU cores. The model comes through pip. For each of three seeds it

1. writes prompts: three sums with their results, and a fourth one to complete. The held-out sums are in no training prompt.
2. trains with ``tutorials/real_demo.yaml``, these prompts, and your changes, such as ``ARGS="run.steps=60"``. LoRA adapters
   are trained, and the model without them is the reference. ``ARGS=--fresh`` begins anew.

It ends with the accuracy on held-out sums before and after, and one picture of all seeds.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from countdown.report import silence_dependencies
from torchrl_llm_kl.training import TrainResult, plot_curves, read_config, train

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "tutorials/real_demo.yaml"
SEEDS = (0, 1, 2)
SHOTS, HELD_OUT = 3, 200


def right(question: str, answer: str, metadata: dict[str, Any]) -> float:
    """1 if the answer is the sum."""
    return float(answer.strip() == metadata["answer"])


def write_prompts(folder: Path, seed: int) -> dict[str, Path]:
    """Write the prompts of a seed. Every prompt begins with the same three sums, so their tokens are forwarded once."""
    sums = [(a, b) for a in range(10, 100) for b in range(2, 10)]
    random.Random(seed).shuffle(sums)
    shots, held_out, rest = sums[:SHOTS], sums[SHOTS : SHOTS + HELD_OUT], sums[SHOTS + HELD_OUT :]
    begin = "".join(f"{a} + {b} = {a + b}\n" for a, b in shots)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.jsonl" for name in ("prompts", "held_out")}
    for path, some in zip(paths.values(), (rest, held_out), strict=True):
        rows = ({"prompt": f"{begin}{a} + {b} = ", "answer": str(a + b)} for a, b in some)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return paths


def run(seed: int, out: Path, changes: Sequence[str], *, fresh: bool) -> TrainResult:
    """Train one seed, or resume its run."""
    folder = out / f"seed-{seed}"
    paths = write_prompts(folder / "data", seed)
    files = [f"data.{name}={path}" for name, path in paths.items()]
    config = read_config(CONFIG, [*files, f"run.seed={seed}", *changes, f"run.out={folder}"])
    print(f"seed {seed}: {folder}", flush=True)
    return train(config, fresh=fresh)


def report(results: dict[int, TrainResult], out: Path, target: float | None) -> None:
    """Print a table of the seeds, and draw the means over them."""
    table = Table(title="GRPO of Gemma 3 270M: right held-out sums, and KL in nats", title_justify="left")
    names = ("seed", "before (95 %)", "after (95 %)", "KL, last 10", "largest KL")
    for name in names:
        table.add_column(name, justify="right")
    for seed, result in results.items():
        first, last = result.evaluations[0], result.evaluations[-1]
        shares = [f"{row['reward']:.1%} ({row['low/reward']:.0%}-{row['high/reward']:.0%})" for row in (first, last)]
        kl = [row["kl"] for row in result.rows]
        ended = "" if result.outcome == "finished" else f" ({result.outcome} after step {result.step})"
        table.add_row(f"{seed}{ended}", *shares, f"{fmean(kl[-10:]):.2f}", f"{max(kl):.2f}")
    ends = [[result.evaluations[at]["reward"] for result in results.values()] for at in (0, -1)]
    spread = [f"{fmean(each):.1%}" + (f" ± {stdev(each):.1%}" if len(each) > 1 else "") for each in ends]
    table.add_row("mean", *spread, "", "")
    Console().print(table)
    every = [result.rows for result in results.values()]
    rows = [
        {name: fmean(row[name] for row in step) for name in ("step", "reward", "kl", "coefficient")}
        for step in zip(*every, strict=False)
    ]
    held_out = [
        (results[min(results)].evaluations[at]["step"], fmean(each)) for at, each in zip((0, -1), ends, strict=True)
    ]
    title = f"Gemma 3 270M on sums, mean of {len(results)} seeds"
    labels = {"reward_label": "share right, sampled", "held_out_label": "share right, held-out sums, greedy"}
    plot_curves(
        rows, out / "curves.png", kl_target=target, held_out=held_out, title=title, held_out_format="{:.1%}", **labels
    )
    print(f"wrote {out / 'curves.png'}. Look at rollouts.html and final/README.md in the folder of a seed.")


def main(changes: Sequence[str]) -> int:
    """Run all seeds. Returns the exit code."""
    silence_dependencies()
    fresh, changes = "--fresh" in changes, [change for change in changes if change != "--fresh"]
    config = read_config(CONFIG, changes)
    if not config.evaluation.every or config.evaluation.every > config.run.steps:
        raise ValueError("the report needs evaluations: set evaluation.every to at least 1 and at most run.steps.")
    out, begin, results = Path(config.run.out), time.perf_counter(), dict[int, TrainResult]()
    for seed in SEEDS:
        results[seed] = run(seed, out, changes, fresh=fresh)
        if results[seed].outcome == "interrupted":
            return 130
    report(results, out, config.kl.target)
    print(f"{time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)  # the paths in the configuration are relative to it
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(str(error))
