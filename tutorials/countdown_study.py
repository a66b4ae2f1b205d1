"""Where should the KL go, and what holds it at a target? The study behind ``docs/kl_study.md``.

``make study`` runs each cell of :mod:`countdown.study` with its seeds on the demo's task: a placement of the KL (k1 in
the reward; k2, k3, or the exact KL in the loss; none), a constant or adaptive coefficient, a sampler whose settings the
scorer uses or ignores. ``make study-target`` runs the demo with PI control and with Ziegler's rule, on seeds on which
neither was tuned. All sample without an env, which gives the same tokens in half the time. Each run writes one line to
``docs/kl_study.jsonl``. Interrupt a study at any time: the same command continues with the missing runs. Both studies
end by writing the tables and pictures of the page from that file; ``countdown_study.py pages`` does only that. Changes
of :class:`Settings` follow the study's name.
"""

from __future__ import annotations

import copy
import os
import sys
import time
import warnings
import zlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import tensordict
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from countdown.algorithms import EPOCHS, MINIBATCHES, build, label, make_coefficient
from countdown.direct import direct_batches
from countdown.model import MAX_NEW_TOKENS, accuracy, as_policy, build_model, build_tokenizer, render_prompt, warm_up
from countdown.report import Metrics, silence_dependencies, summarise
from countdown.settings import read_settings
from countdown.study import (
    DEMO,
    PLACEMENT_SEEDS,
    QUICK,
    SHORT,
    TARGET,
    TARGET_SEEDS,
    Cell,
    Result,
    Results,
    Scale,
    claims_table,
    draw_placement,
    draw_target,
    placement_cells,
    placement_table,
    processor_table,
    target_cells,
    target_summary,
    target_table,
    write_blocks,
)
from countdown.task import Problem, all_problems, split_problems
from torchrl_llm_kl import FixedKLCoefficient, RetrieveKL, Sampling
from torchrl_llm_kl.estimators import KLPlacementWarning
from torchrl_llm_kl.scoring import ScoreOptions
from torchrl_llm_kl.training import learn, loss_entries

# Required by torchrl's LLM components, which store lists of strings as stacks.
tensordict.set_list_to_stack(True).set()

DOCS = Path(__file__).parents[1] / "docs"


def run(cell: Cell, seed: int, scale: Scale, folder: Path) -> Result:
    """Train a policy in one cell, and measure it on the held-out problems; the result is the same in every process."""
    silence_dependencies()
    warnings.simplefilter("ignore", KLPlacementWarning)  # some cells show what it warns of
    start = time.perf_counter()
    train_problems, held_out = split_problems(all_problems())
    held_out = held_out[: scale.held_out]
    policy, tokenizer = warm_policy(seed, scale, folder)
    reference = copy.deepcopy(policy)
    coefficient: nn.Module | None = None
    if isinstance(cell.coefficient, str):
        batch_size = scale.num_prompts * scale.group_size
        coefficient = make_coefficient(cell.coefficient, target=TARGET, batch_size=batch_size)
    elif cell.placement != "none":
        coefficient = FixedKLCoefficient(cell.coefficient)
    before = accuracy(policy, tokenizer, held_out, max_new_tokens=MAX_NEW_TOKENS)
    rows = train(cell, policy, reference, tokenizer, train_problems, coefficient, scale, seed)
    after = accuracy(policy, tokenizer, held_out, max_new_tokens=MAX_NEW_TOKENS)
    kl, sampled = true_kl(policy, reference, tokenizer, held_out, samples=scale.samples, seed=seed)
    last = [row["kl"] for row in rows[-max(1, scale.steps // 5) :]]
    result = {
        "cell": asdict(cell),
        "seed": seed,
        "processor": torch.backends.cpu.get_cpu_capability(),
        "scale": asdict(scale),
        "accuracy_before": before,
        "accuracy_after": after,
        "sampled_after": sampled,
        "true_kl": kl,
        "kl_estimated": sum(last) / len(last),
        "kl_highest": max(row["kl"] for row in rows),
        "seconds": round(time.perf_counter() - start, 1),
    }
    if isinstance(cell.coefficient, str):
        result["coefficient_end"] = rows[-1]["coefficient"]
    return result | (target_summary(rows) if cell.study == "target" else {})


def train(
    cell: Cell,
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    coefficient: nn.Module | None,
    scale: Scale,
    seed: int,
) -> list[Metrics]:
    """Train the policy in place like ``countdown.yaml``, but without an env; returns the figures of each step."""
    parts = build(
        "grpo",
        policy,
        reference,
        coefficient=coefficient,
        max_new_tokens=MAX_NEW_TOKENS,
        in_collector=False,
        kl_reward=cell.kl_reward,
        kl_loss=cell.kl_loss,
        temperature=cell.scored_at,
    )
    kl = parts.kl_transform
    if not isinstance(kl, RetrieveKL):  # no KL in the reward: only measure it
        kl = RetrieveKL(policy, reference, add_to_reward=False, options=ScoreOptions(Sampling(cell.scored_at)))
    sampler = as_policy(policy, tokenizer, temperature=cell.temperature, top_k=cell.top_k)
    task = {"num_prompts": scale.num_prompts, "group_size": scale.group_size, "seed": seed}
    optimizer = torch.optim.Adam(policy.parameters(), lr=scale.lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=scale.steps)
    rows: list[Metrics] = []
    start = time.perf_counter()
    for batch in direct_batches(kl, sampler, tokenizer, problems, steps=scale.steps, **task):
        batch = parts.prepare(label(batch, scale.group_size))
        learn(parts, loss_entries(batch), optimizer, epochs=EPOCHS, minibatches=MINIBATCHES)
        schedule.step()
        seconds = time.perf_counter() - start
        charged = kl.add_to_reward
        rows.append(summarise(batch, step=len(rows), coefficient=coefficient, charged=charged, seconds=seconds))
        if coefficient is not None:
            coefficient.update(rows[-1]["kl"], n=len(batch))
    return rows


def warm_policy(seed: int, scale: Scale, folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model after the demo's warm-up, stored in ``folder``, and torch's random state at that time."""
    torch.set_num_threads(1)
    problems = all_problems()
    tokenizer = build_tokenizer(problems)
    path = folder / f"warm-{seed}-{scale.warmup_steps}.pt"
    if not path.exists():
        torch.manual_seed(seed)
        model = build_model(tokenizer)
        for _ in warm_up(model, tokenizer, split_problems(problems)[0], steps=scale.warmup_steps, seed=seed):
            pass
        folder.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(f".{os.getpid()}")  # two processes may write it at once
        torch.save({"model": model.state_dict(), "random": torch.get_rng_state()}, whole)
        whole.replace(path)
    state = torch.load(path, weights_only=True)
    model = build_model(tokenizer)
    model.load_state_dict(state["model"])
    torch.set_rng_state(state["random"])
    return model, tokenizer


@torch.no_grad()
def true_kl(
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    samples: int,
    seed: int,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> tuple[float, float]:
    """The KL of policy and reference in nats per answer, and the share of right answers, sampled at temperature 1.

    At each token of an answer the KL is a sum over the whole vocabulary, so that only the prefixes are sampled.
    """
    torch.manual_seed(zlib.crc32(f"true KL {seed}".encode()))
    total, right, count = 0.0, 0, 0
    for start in range(0, len(problems), 50):
        batch = [problem for problem in problems[start : start + 50] for _ in range(samples)]
        inputs = tokenizer(
            [render_prompt(problem, tokenizer) for problem in batch],
            return_tensors="pt",
            padding=True,
            add_special_tokens=False,
            return_token_type_ids=False,
        )
        width = inputs["input_ids"].shape[1]
        tokens = policy.generate(  # type: ignore[operator]
            **inputs,
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
        )
        answers = tokens[:, width:]
        ended = (answers == tokenizer.eos_token_id).long().cumsum(-1)
        produced = (ended == 0) | ((ended == 1) & (answers == tokenizer.eos_token_id))
        attention = torch.cat([inputs["attention_mask"], produced.long()], -1)
        log_p, log_q = (
            model(input_ids=tokens, attention_mask=attention).logits[:, width - 1 : -1].log_softmax(-1)
            for model in (policy, reference)
        )
        per_token = (log_p.exp() * (log_p - log_q)).sum(-1)
        total += float(per_token[produced].double().sum())
        replies = tokenizer.batch_decode(answers, skip_special_tokens=True)
        right += sum(problem.is_solved_by(reply) for problem, reply in zip(batch, replies, strict=True))
        count += len(batch)
    return total / count, right / count


# ------------------------------------------------------------------ running missing runs


def run_missing(
    results: Results,
    cells: Sequence[Cell],
    seeds: Sequence[int],
    scale: Scale,
    *,
    folder: Path,
    jobs: int,
    minutes: float | None = None,
) -> None:
    """Run the cells that the file lacks; after ``minutes`` no further run starts. Without ``jobs``, in this process."""
    todo = results.missing(cells, seeds, scale)
    total, start = len(cells) * len(seeds), time.monotonic()
    print(f"{total - len(todo)} of {total} runs are in {results.path}")

    def keep(result: Result, cell: Cell, seed: int) -> None:
        results.append(result)
        nonlocal done
        done += 1
        print(f"{done}/{total}  seed {seed}, {cell}: right {result['accuracy_after']:.1%}, {result['seconds']:.0f} s")

    done = total - len(todo)
    late = lambda: minutes is not None and time.monotonic() - start > 60 * minutes  # noqa: E731
    if jobs == 0:
        for cell, seed in todo:
            if late():
                return
            keep(run(cell, seed, scale, folder), cell, seed)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting: dict[Any, tuple[Cell, int]] = {}
        while todo or waiting:
            while todo and len(waiting) < jobs and not late():
                cell, seed = todo.pop(0)
                waiting[pool.submit(run, cell, seed, scale, folder)] = (cell, seed)
            if not waiting:
                return
            ready = next(as_completed(waiting))
            keep(ready.result(), *waiting.pop(ready))


def write_pages(results: Results, folder: Path, *, target: Scale = DEMO, placement: Scale = SHORT) -> None:
    """Write the tables and pictures of the page from the results."""
    blocks = {
        "target": target_table(results, TARGET_SEEDS, target),
        "processors": processor_table(results, TARGET_SEEDS, target),
        "claims": claims_table(results, placement),
        "placement": placement_table(results, PLACEMENT_SEEDS, placement),
    }
    write_blocks(folder / "kl_study.md", blocks)
    draw_target(results, TARGET_SEEDS, target, folder / "kl_target.png")
    draw_placement(results, PLACEMENT_SEEDS, placement, folder / "kl_frontier.png")


@dataclass
class Settings:
    """How a study is run."""

    jobs: int = 2  # runs at a time, each on one core; 0: in this process
    minutes: float | None = None  # start no further run after this time
    seeds: list[int] | None = None  # instead of the study's
    quick: bool = False  # runs of seconds, for tests; their figures mean nothing
    results: str = str(DOCS / "kl_study.jsonl")
    folder: str = "runs/study"  # where warmed-up models are kept
    docs: str = str(DOCS)  # folder of the page and its pictures


def main(study: str, changes: Sequence[str] = ()) -> None:
    """Run the missing runs of ``target`` or ``placement``, and write the page; ``pages`` only writes it."""
    settings = read_settings(Settings, changes)
    studies = {
        "target": (target_cells, TARGET_SEEDS, DEMO),
        "placement": (placement_cells, PLACEMENT_SEEDS, SHORT),
    }
    if study not in (*studies, "pages"):
        raise ValueError(f"the study is {study}: choose target, placement or pages")
    results = Results(Path(settings.results))
    if study != "pages":
        cells, seeds, scale = studies[study]
        run_missing(
            results,
            cells(),
            settings.seeds or seeds,
            QUICK if settings.quick else scale,
            folder=Path(settings.folder),
            jobs=settings.jobs,
            minutes=settings.minutes,
        )
    write_pages(results, Path(settings.docs), **({"target": QUICK, "placement": QUICK} if settings.quick else {}))


if __name__ == "__main__":
    try:
        main(sys.argv[1] if sys.argv[1:] else "none", sys.argv[2:])
    except ValueError as error:
        sys.exit(str(error))
