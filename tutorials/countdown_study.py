"""The experiments of ``benchmarks/KL_STUDY.md``: where to place the KL, and how to hold it at a target.

``python tutorials/countdown_study.py placement`` (``make study``) trains on the demo's task with each combination of placement,
coefficient and sampler. ``... target`` (``make study-target``) runs the demo with two controllers. Each run appends one line to
``benchmarks/kl_study.jsonl``. The same command continues after an interruption. Both commands end with the tables of the page.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import warnings
import zlib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice, repeat
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, mode, stdev
from typing import Any

import tensordict
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torch import nn
from torchrl.envs.llm.reward.countdown import CountdownRewardParser

from countdown.algorithms import EPOCHS, MINIBATCHES, build, label, make_coefficient
from countdown.model import MAX_NEW_TOKENS, accuracy, as_policy, build_model, build_tokenizer, render_prompt, warm_up
from countdown.report import silence_dependencies, summarise
from countdown.task import Problem, all_problems, in_order, split_problems
from torchrl_llm_kl import FixedKLCoefficient, RetrieveKL, Sampling
from torchrl_llm_kl.estimators import KLPlacementWarning
from torchrl_llm_kl.scoring import ScoreOptions
from torchrl_llm_kl.training import learn, loss_entries

tensordict.set_list_to_stack(True).set()  # required by torchrl's LLM components

RESULTS = Path(__file__).parents[1] / "benchmarks" / "kl_study.jsonl"
TARGET = 0.5  # nats per answer


@dataclass(frozen=True)
class Scale:
    """The size of a run."""

    steps: int = 100
    warmup_steps: int = 300
    num_prompts: int = 32
    group_size: int = 8
    lr: float = 3e-4
    held_out: int = 200
    samples: int = 4  # answers to each held-out problem, for the true KL


@dataclass(frozen=True)
class Cell:
    """A setting of the study: the estimator in each place, the coefficient, and the distributions of sampling and scoring."""

    study: str
    kl_reward: str = "none"
    kl_loss: str = "none"
    coefficient: float | str = "pi"  # a constant, or the controller that holds the KL at the target
    temperature: float = 1.0
    top_k: int | None = None
    scored_at: float = 1.0


_PLACES = [{"kl_reward": "k1"}, {"kl_loss": "k2"}, {"kl_loss": "k3"}, {"kl_loss": "exact"}]
_SAMPLERS = [{"temperature": 0.7}, {"temperature": 0.7, "scored_at": 0.7}, {"top_k": 3}]
_PLACED = [{"coefficient": 0.0}, *({**place, "coefficient": c} for c in ("pi", 0.1, 0.3, 0.03) for place in _PLACES)]
_PLACED += [{"kl_reward": "k3", "coefficient": 0.1}, {"kl_loss": "k1", "coefficient": 0.1}]
_PLACED += [{**place, **sampler} for place in _PLACES[:2] for sampler in _SAMPLERS]
#: Cells, seeds and scale of each study. The settings were chosen on seeds 0 to 9.
STUDIES: dict[str, tuple[list[Cell], range, Scale]] = {
    "target": ([Cell("target", "k1", coefficient=name) for name in ("pi", "ziegler")], range(10, 20), Scale()),
    "placement": ([Cell("placement", **cell) for cell in _PLACED], range(20, 25), Scale(steps=80, num_prompts=12)),  # type: ignore[arg-type]
}


def run(cell: Cell, seed: int, scale: Scale) -> dict[str, Any]:
    """Train a policy in one cell, and measure it on the held-out problems. The result is the same in every process."""
    silence_dependencies()
    warnings.simplefilter("ignore", KLPlacementWarning)  # some cells demonstrate the warning
    torch.set_num_threads(1)
    problems, held_out = split_problems(all_problems())
    held_out = held_out[: scale.held_out]
    tokenizer = build_tokenizer(all_problems())
    torch.manual_seed(seed)
    policy = build_model(tokenizer)
    for _ in warm_up(policy, tokenizer, problems, steps=scale.warmup_steps, seed=seed):
        pass
    reference = copy.deepcopy(policy)
    before = accuracy(policy, tokenizer, held_out, max_new_tokens=MAX_NEW_TOKENS)
    rows = train(cell, policy, reference, tokenizer, problems, scale, seed)
    after = accuracy(policy, tokenizer, held_out, max_new_tokens=MAX_NEW_TOKENS)
    kl, sampled = true_kl(policy, reference, tokenizer, held_out, samples=scale.samples, seed=seed)
    kls, processor = [row["kl"] for row in rows], torch.backends.cpu.get_cpu_capability()
    place = {"cell": asdict(cell), "seed": seed, "processor": processor, "scale": asdict(scale)}
    right = {"accuracy_before": before, "accuracy_after": after, "sampled_after": sampled, "true_kl": kl}
    estimated = {"kl_estimated": fmean(kls[-max(1, len(kls) // 5) :]), "kl_last_half": fmean(kls[len(kls) // 2 :])}
    return {**place, **right, **estimated, "coefficient_end": rows[-1].get("coefficient", 0.0)}


def train(
    cell: Cell, policy: Any, reference: Any, tokenizer: Any, problems: list[Problem], scale: Scale, seed: int
) -> list[dict[str, float]]:
    """Train the policy in place like ``countdown.yaml``, but without an env. Returns the figures of each step."""
    coefficient: nn.Module | None = None
    if isinstance(cell.coefficient, str):
        answers = scale.num_prompts * scale.group_size
        coefficient = make_coefficient(cell.coefficient, target=TARGET, batch_size=answers)
    elif cell.coefficient:
        coefficient = FixedKLCoefficient(cell.coefficient)
    places = {"kl_reward": cell.kl_reward, "kl_loss": cell.kl_loss}
    sizes = {"max_new_tokens": MAX_NEW_TOKENS, "in_collector": False, "temperature": cell.scored_at}
    parts = build("grpo", policy, reference, coefficient=coefficient, **sizes, **places)  # type: ignore[arg-type]
    kl = parts.kl_transform
    if not isinstance(kl, RetrieveKL):  # the KL is only measured
        kl = RetrieveKL(policy, reference, add_to_reward=False, options=ScoreOptions(Sampling(cell.scored_at)))
    sampler = as_policy(policy, tokenizer, temperature=cell.temperature, top_k=cell.top_k)
    optimizer = torch.optim.Adam(policy.parameters(), lr=scale.lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=scale.steps)
    rows: list[dict[str, float]] = []
    order = chain.from_iterable(repeat(in_order(problems, seed, collate=lambda some: some[0])))
    list(islice(order, scale.num_prompts))  # the problems that torchrl's collector loses, since it resets its env twice
    for step in range(scale.steps):
        asked = [problem for problem in islice(order, scale.num_prompts) for _ in range(scale.group_size)]
        batch = parts.prepare(label(kl(answered(sampler, tokenizer, asked)), scale.group_size))
        learn(parts, loss_entries(batch), optimizer, epochs=EPOCHS, minibatches=MINIBATCHES)
        schedule.step()
        rows.append(summarise(batch, step=step, coefficient=coefficient, charged=kl.add_to_reward, seconds=0.0))
        if coefficient is not None:
            coefficient.update(rows[-1]["kl"], n=len(batch))
    return rows


def answered(sampler: Any, tokenizer: Any, problems: list[Problem]) -> TensorDictBase:
    """Sample answers and compute their rewards, as torchrl's env and collector do, but in half the time."""
    texts = NonTensorStack(*(render_prompt(problem, tokenizer) for problem in problems))
    batch = sampler(TensorDict({"text": {"prompt": texts}}, batch_size=[len(problems)]))
    replies = [reply.removesuffix(tokenizer.eos_token) for reply in batch["text", "response"]]
    rewards = CountdownRewardParser(tokenizer=tokenizer)
    success = torch.tensor([problem.is_solved_by(x) for problem, x in zip(problems, replies, strict=True)])
    form = torch.tensor([bool(rewards.extract_tags(reply)[1]) for reply in replies]) * rewards.format_reward
    entries = {"success": success, "reward": torch.where(success, rewards.correct_reward, form)}
    batch["next"] = TensorDict({key: x.view(-1, 1, 1) for key, x in entries.items()}, batch.batch_size)
    return batch


@torch.no_grad()
def true_kl(
    policy: Any,
    reference: Any,
    tokenizer: Any,
    problems: list[Problem],
    *,
    samples: int,
    seed: int,
    length: int = MAX_NEW_TOKENS,
) -> tuple[float, float]:
    """The KL in nats per answer, and the share of right answers, sampled at temperature 1.

    At each token of an answer the KL is a sum over the whole vocabulary, so only the prefixes are sampled.
    """
    torch.manual_seed(zlib.crc32(f"true KL {seed}".encode()))
    sampler = as_policy(policy, tokenizer, max_new_tokens=length)
    kl = RetrieveKL(policy, reference, estimator="exact", add_to_reward=False)
    total = right = 0.0
    for start in range(0, len(problems), 50):
        asked = [problem for problem in problems[start : start + 50] for _ in range(samples)]
        batch = kl(answered(sampler, tokenizer, asked))["next"]
        total, right = total + batch["kl_penalty"].double().sum().item(), right + batch["success"].sum().item()
    return total / (len(problems) * samples), right / (len(problems) * samples)


# ------------------------------------------------------------------ results

_T = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t, by degrees of freedom


def read(path: Path, cell: Cell, scale: Scale, processor: str | None = None) -> dict[int, dict[str, Any]]:
    """The results of a cell by seed, from one processor. By default it is the processor with the most runs."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    processor = processor or (mode(row["processor"] for row in rows) if rows else None)
    setting = (asdict(cell), asdict(scale), processor)
    return {row["seed"]: row for row in rows if (row["cell"], row["scale"], row["processor"]) == setting}


def shown(values: list[float], form: str) -> str:
    """The mean and half the width of its 95 % interval (Student's t)."""
    if len(values) < 2:
        return form.format(*values) if values else "not run"
    half = _T[len(values) - 1] * stdev(values) / math.sqrt(len(values))
    return f"{form.format(fmean(values))} ± {form.format(half)}"


#: The entries of a result and their format in a table.
COLUMNS = dict.fromkeys(("true_kl", "kl_estimated", "kl_last_half", "coefficient_end"), "{:.2f}")
COLUMNS |= dict.fromkeys(("accuracy_before", "accuracy_after", "sampled_after"), "{:.1%}")


def table(path: Path, study: str, scale: Scale) -> str:
    """The table of a study, with a row for each cell."""
    lines = [f"| cell | runs | {' | '.join(COLUMNS)} |", "|---" * (2 + len(COLUMNS)) + "|"]
    for cell in STUDIES[study][0]:
        runs = [run for seed, run in read(path, cell, scale).items() if seed in STUDIES[study][1]]
        name = " ".join(
            f"{key}={value}" for key, value in asdict(cell).items() if value not in ("none", None, 1.0, study)
        )
        cells = [shown([run[key] for run in runs if key in run], form) for key, form in COLUMNS.items()]
        lines.append(f"| {name} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    study: str, jobs: int = 2, results: Path = RESULTS, scale: Scale | None = None, seeds: range | None = None
) -> None:
    """Run the missing runs of a study in ``jobs`` processes, or with 0 in this process, and print its table."""
    cells, scale, seeds = STUDIES[study][0], scale or STUDIES[study][2], seeds or STUDIES[study][1]
    if results.exists():  # drop a last line that was cut off, so that its run is repeated
        results.write_text(results.read_text(encoding="utf-8").rpartition("\n")[0].strip() + "\n", encoding="utf-8")
    done = {cell: read(results, cell, scale, torch.backends.cpu.get_cpu_capability()) for cell in cells}
    todo = [(cell, seed) for seed in seeds for cell in cells if seed not in done[cell]]
    print(f"{len(todo)} of {len(cells) * len(seeds)} runs are missing in {results}")
    with ProcessPoolExecutor(max(jobs, 1), mp_context=get_context("spawn")) as pool:
        run_all = partial(pool.map if jobs else map, partial(run, scale=scale))
        for result in run_all(*zip(*todo, strict=True)) if todo else ():
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            print(f"seed {result['seed']}: right {result['accuracy_after']:.1%}, true KL {result['true_kl']:.2f}")
    print(table(results, study, scale))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=[*STUDIES])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    main(**vars(parser.parse_args()))
