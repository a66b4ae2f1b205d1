"""The experiment of ``benchmarks/STALENESS.md``: stale answers, how the loss corrects for them, and the target of the KL.

``python tutorials/staleness_study.py`` trains on the demo's task with answers that weights of a fixed age have sampled. Each
run appends one line to ``benchmarks/staleness_study.jsonl``. The same command continues after an interruption, and ends with
the table and the picture of the page.
"""

from __future__ import annotations

import argparse
import copy
import json
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice, product, repeat
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from tempfile import gettempdir
from typing import Any

import torch
from torch import nn

from countdown.algorithms import EPOCHS, MINIBATCHES, label, make_coefficient
from countdown.model import as_policy, build_model, build_tokenizer, warm_up
from countdown.report import silence_dependencies
from countdown.task import Problem, all_problems, in_order, split_problems
from countdown_study import Scale, answered, shown, true_kl
from torchrl_llm_kl import RetrieveLogProb, make_algorithm
from torchrl_llm_kl._files import replacing
from torchrl_llm_kl.losses import ImportanceWeights
from torchrl_llm_kl.rollouts import drop_stale
from torchrl_llm_kl.scoring import WeightHistory
from torchrl_llm_kl.training import learn, loss_entries

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCALE = Scale(steps=48, num_prompts=8, lr=5e-4, held_out=100)  # chosen on seed 100
AGES, TARGETS, SEEDS = (0, 1, 2, 4, 8), (0.5, 1.5), range(30, 35)
BEHAVIOR = ("next", "behavior_log_probs", "full")
#: The corrections with their published settings. The others compare with the newest weights before the updates on a batch.
CORRECTIONS: dict[str, list[nn.Module]] = {
    "none": [],
    "TIS": [ImportanceWeights(ratio="staleness", high=2.0)],
    "sequence mask": [ImportanceWeights(ratio="staleness", level="sequence", mode="mask", high=3.0)],
    "decoupled": [ImportanceWeights(ratio="staleness", high=None)],
    "exact old": [],
}


@dataclass(frozen=True)
class Cell:
    """A setting of the study."""

    age: int
    correction: str
    target: float


CELLS = [Cell(0, "none", target) for target in TARGETS]
CELLS += [Cell(age, name, target) for age in AGES[1:] for name in CORRECTIONS for target in TARGETS]


def run(cell: Cell, seed: int, scale: Scale = SCALE) -> dict[str, Any]:
    """Train a policy in one cell, and measure it on the held-out problems. The result is the same in every process."""
    silence_dependencies()
    torch.set_num_threads(1)
    problems, held_out = split_problems(all_problems())
    tokenizer = build_tokenizer(all_problems())
    torch.manual_seed(seed)
    policy, file = build_model(tokenizer), Path(gettempdir(), f"staleness-{seed}-{scale.warmup_steps}.pt")
    if file.exists():  # all cells of a seed start from one model
        policy.load_state_dict(torch.load(file))
    else:
        for _ in warm_up(policy, tokenizer, problems, steps=scale.warmup_steps, seed=seed):
            pass
        with replacing(file) as part:
            torch.save(policy.state_dict(), part)
    torch.manual_seed(seed)
    reference = copy.deepcopy(policy)
    rows = train(cell, policy, reference, tokenizer, problems, scale, seed)
    measured = held_out[: scale.held_out]
    kl, right = true_kl(policy, reference, tokenizer, measured, samples=scale.samples, seed=seed)
    last = rows[len(rows) // 2 :]
    means = {name: fmean(row[name] for row in last) for name in ("success", "staleness", "ess")}
    place = {"cell": asdict(cell), "seed": seed, "processor": torch.backends.cpu.get_cpu_capability()}
    return {**place, "scale": asdict(scale), "right": right, "true_kl": kl, **means}


def train(
    cell: Cell, policy: Any, reference: Any, tokenizer: Any, problems: list[Problem], scale: Scale, seed: int
) -> list[dict[str, float]]:
    """Train the policy in place with answers of a fixed age. Returns the figures of each step."""
    coefficient = make_coefficient("pi", target=cell.target, batch_size=scale.num_prompts * scale.group_size)
    parts = make_algorithm(
        "grpo",
        policy,
        reference=reference,
        group_key="group",
        kl_loss="none",
        kl_reward="k1",
        kl_reward_coeff=coefficient,
        advantage_args={"std": "batch"},
        loss_args={"corrections": CORRECTIONS[cell.correction]},
    )
    if cell.correction == "exact old":
        parts.loss.set_keys(old_log_prob=BEHAVIOR)
    kl, newest = parts.kl_transform, RetrieveLogProb(policy)
    sampler, history = as_policy(policy, tokenizer), WeightHistory(policy, keep=cell.age + 1)
    optimizer = torch.optim.Adam(policy.parameters(), lr=scale.lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=scale.steps)
    order = chain.from_iterable(repeat(in_order(problems, seed, collate=lambda some: some[0])))
    rows: list[dict[str, float]] = []
    for step in range(scale.steps):
        history.record(step)
        asked = [problem for problem in islice(order, scale.num_prompts) for _ in range(scale.group_size)]
        version = max(step - cell.age, 0)
        with history.installed(version) if cell.age else nullcontext():
            batch = kl(answered(sampler, tokenizer, asked))  # the KL of the weights that sampled
        batch["policy_version"] = torch.full((len(batch), 1), version)
        batch = drop_stale(label(batch, scale.group_size), step)
        behavior = batch["next", "log_probs", "full"]
        batch["next", "sampler_log_probs", "full"] = batch[BEHAVIOR] = behavior
        batch["next", "log_probs"] = newest(batch.exclude("next"))["log_probs"]
        seen: list[dict[str, float]] = []
        monitor = _Seen(seen)
        learn(
            parts,
            loss_entries(parts.prepare(batch)),
            optimizer,
            epochs=EPOCHS,
            minibatches=MINIBATCHES,
            monitor=monitor,
        )  # type: ignore[arg-type]
        schedule.step()
        charged = batch["next", "kl_penalty"].flatten(1).sum(-1).mean().item()
        coefficient.update(charged, n=len(batch))  # type: ignore[operator]
        success = batch["next", "success"].float().mean().item()
        rows.append({"success": success, "kl": charged, "staleness": seen[0]["staleness_k3"], "ess": seen[-1]["ESS"]})
    return rows


class _Seen:
    """Collects the numbers of the losses."""

    def __init__(self, seen: list[dict[str, float]]) -> None:
        self.seen = seen

    def add(self, output: dict[str, Any]) -> None:
        """Called after each backward, and with the norm of the gradient."""
        if "ESS" in output:
            self.seen.append({name: float(value) for name, value in output.items() if value.numel() == 1})


# ------------------------------------------------------------------ results


def read(path: Path, scale: Scale = SCALE) -> dict[tuple[Cell, int], dict[str, Any]]:
    """The results of this processor by cell and seed."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    own = [row for row in rows if row["scale"] == asdict(scale)]
    return {(Cell(**row["cell"]), row["seed"]): row for row in own}


def table(results: dict[tuple[Cell, int], dict[str, Any]]) -> str:
    """A row for each age and correction, with both targets beside each other. 95 % intervals over seeds."""
    heads = [f"{name}, target {target:g}" for target in TARGETS for name in ("right", "true KL")]
    lines = [f"| age | correction | staleness, nats | {' | '.join(heads)} |", "|---" * (3 + len(heads)) + "|"]
    for age, name in dict.fromkeys((cell.age, cell.correction) for cell in CELLS):
        runs = {
            target: [row for (cell, _), row in results.items() if cell == Cell(age, name, target)] for target in TARGETS
        }
        cells = [shown([row["staleness"] for rows in runs.values() for row in rows], "{:.4f}").partition(" ")[0]]
        for rows in runs.values():
            cells += [
                shown([row["right"] for row in rows], "{:.1%}"),
                shown([row["true_kl"] for row in rows], "{:.2f}"),
            ]
        lines.append(f"| {age} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(results: dict[tuple[Cell, int], dict[str, Any]], path: Path) -> None:
    """Right answers and the true KL over the age, with the smallest and the largest value over seeds as bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(TARGETS), figsize=(10, 6.4), sharex=True, sharey="row", layout="constrained")
    quantities = {"right": "right answers", "true_kl": "KL, nats per answer"}
    for (row, (key, text)), (column, target) in product(enumerate(quantities.items()), enumerate(TARGETS)):
        own = axes[row, column]
        for shift, name in enumerate(CORRECTIONS):
            cells = [Cell(age, name if age else "none", target) for age in AGES]
            runs = [[result[key] for (cell, _), result in results.items() if cell == each] for each in cells]
            places = [i + 0.06 * (shift - 2) for i, values in enumerate(runs) if values]
            means = [fmean(values) for values in runs if values]
            spread = [[m - min(x), max(x) - m] for m, x in zip(means, filter(None, runs), strict=True)]
            own.errorbar(places, means, yerr=torch.tensor(spread).T.numpy(), marker="o", capsize=2, label=name)
        own.set_xticks(range(len(AGES)), [str(age) for age in AGES])
        own.set_ylabel(text if column == 0 else "")
        if row:
            own.axhline(target, color="grey", linestyle=":")
            own.set_xlabel("age of the answers, steps")
        else:
            own.set_title(f"target of the KL: {target:g}")
    axes[0, -1].legend(title="correction", fontsize="small")
    figure.savefig(path, dpi=110)


def main(jobs: int, results: Path, seeds: range = SEEDS, scale: Scale = SCALE) -> None:
    """Run what is missing in ``jobs`` processes, print the table, and draw the picture."""
    done = read(results, scale)
    todo = [(cell, seed) for seed in seeds for cell in CELLS if (cell, seed) not in done]
    print(f"{len(todo)} of {len(CELLS) * len(seeds)} runs are missing in {results}", flush=True)
    with ProcessPoolExecutor(max(jobs, 1), mp_context=get_context("spawn")) as pool:
        run_all = partial(pool.map if jobs else map, partial(run, scale=scale))
        for result in run_all(*zip(*todo, strict=True)) if todo else ():
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            figures = f"right {result['right']:.1%}, KL {result['true_kl']:.2f}"
            print(f"{result['cell']} seed {result['seed']}: {figures}", flush=True)
    print(table(read(results, scale)))
    draw(read(results, scale), results.with_name("staleness.png"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--results", type=Path, default=FOLDER / "staleness_study.jsonl")
    main(**vars(parser.parse_args()))
