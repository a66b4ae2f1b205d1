"""The experiment of ``benchmarks/TOKENIZERS.md``: distillation from teachers with the student's and with another tokenizer.

``python tutorials/tokenizers_study.py`` trains small students on a few of GSM8K's worked solutions, with and without teachers
that have learned from all of them. Each run appends one line to ``benchmarks/tokenizers_study.jsonl``. The same command
continues after an interruption, and ends with the table and the picture of the page. ``--seeds 100 101 --lrs 1e-3 2e-3`` tries
learning rates on other rows. To add a method, add it to :data:`ARMS`.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from tempfile import gettempdir
from typing import Any

import torch
from rich.progress import track
from tensordict import TensorDictBase, lazy_stack

from countdown.report import silence_dependencies
from countdown_study import shown
from gsm8k.model import build_model, build_tokenizer, train
from gsm8k.task import FOLDER, TUNING_SEEDS, Question, read_questions, split
from torchrl_llm_kl import ByteTeacher, LogProbScorer, from_conversations, make_algorithm
from torchrl_llm_kl._files import replacing
from torchrl_llm_kl.algorithms import AlgorithmParts
from torchrl_llm_kl.training import learn

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@dataclass(frozen=True)
class Scale:
    """The size of a run. The student has ``rows`` of the worked solutions, the teachers have all of the training questions."""

    vocab: int = 800
    teacher_vocab: int = 2000
    hidden: int = 64
    teacher_hidden: int = 96
    teacher_epochs: int = 5
    teacher_lr: float = 5e-3
    rows: int = 100
    start_epochs: int = 8
    start_lr: float = 5e-3
    steps: int = 120
    batch: int = 16
    held_out: int = 200  # of the held-out solutions, for the curves
    rounds: int = 12  # of the timing


SCALE = Scale()
SEEDS = range(5)


@dataclass
class Models:
    """The student of one seed and its two teachers."""

    student: Any
    tokenizer: Any
    same: Any  # a teacher with the student's tokenizer
    other: Any
    other_tokenizer: Any

    def by_bytes(self, **settings: Any) -> ByteTeacher:
        """The teacher with the other tokenizer, for the student's tokens."""
        return ByteTeacher(self.other, self.other_tokenizer, self.tokenizer, **settings)


# ------------------------------------------------------------------ the methods


@dataclass(frozen=True)
class Arm:
    """A method and its learning rate, which was chosen on the rows of other seeds."""

    build: Callable[[Models], AlgorithmParts]
    lr: float


def ratio_of_tokens(student: Any, teacher: Any) -> AlgorithmParts:
    """The log-ratio of each given token is its advantage. Here this is the gradient of half of its square."""
    parts = make_algorithm("on_policy_distill", student, reference=teacher)
    # The student has not sampled these answers. The log-probs before the update are its own.
    parts.loss.set_keys(old_log_prob=("log_probs", "full"))
    return parts


def whole(student: Any, teacher: Any, *, top_k: int = 0) -> AlgorithmParts:
    """The forward KL from the teacher's distribution at each token, or GOLD's or P-KL's at each chunk."""
    return make_algorithm("gkd", student, reference=teacher, top_k=top_k, objective_args={"beta": 0.0})


ARMS: dict[str, Arm] = {
    "same tokenizer, token": Arm(lambda models: ratio_of_tokens(models.student, models.same), 8e-3),
    "other tokenizer, token": Arm(lambda models: ratio_of_tokens(models.student, models.by_bytes()), 8e-3),
    "same tokenizer, distribution": Arm(lambda models: whole(models.student, models.same), 8e-3),
    "other tokenizer, distribution": Arm(lambda models: whole(models.student, models.by_bytes()), 8e-3),
    "other tokenizer, top 64": Arm(lambda models: whole(models.student, models.by_bytes(), top_k=64), 8e-3),
    "other tokenizer, GOLD": Arm(lambda models: whole(models.student, models.by_bytes(method="gold")), 8e-3),
    "other tokenizer, P-KL": Arm(lambda models: whole(models.student, models.by_bytes(method="projected")), 8e-3),
    "no teacher (SFT)": Arm(lambda models: make_algorithm("sft", models.student), 8e-3),
}
FIRST = next(iter(ARMS))  # costs are relative to this arm


# ------------------------------------------------------------------ text


def rows_of(questions: Sequence[Question], tokenizer: Any) -> list[TensorDictBase]:
    """Each worked solution as an answer to the same few words. The questions would double the cost of each forward."""
    said = [
        {"messages": [{"role": "user", "content": "Solve."}, {"role": "assistant", "content": question.solution}]}
        for question in questions
    ]
    return list(from_conversations(said, tokenizer).unbind(0))


def nats_per_byte(model: Any, tokenizer: Any, questions: Sequence[Question]) -> float:
    """The negative log-prob of the solutions with their end tokens, over their bytes."""
    rows = rows_of(questions, tokenizer)
    ids, masks = [row["tokens", "full"] for row in rows], [row["masks", "all_assistant_mask"] for row in rows]
    total = LogProbScorer(model).score(ids, masks).values.double().sum().item()
    return -total / sum(len(question.solution.encode()) for question in questions)


def data_of(seed: int, scale: Scale) -> tuple[list[Question], list[Question], list[Question]]:
    """The teachers' questions, the student's, and the held-out ones."""
    training, held_out = split(read_questions(FOLDER), seed)
    return training, random.Random(seed).sample(training, scale.rows), held_out


# ------------------------------------------------------------------ a run


def prepare(seed: int, scale: Scale) -> Path:
    """Train the teachers and the first steps of the student, unless an earlier run did. Returns the file of their weights."""
    file = Path(gettempdir(), f"tokenizers-{seed}-{zlib.crc32(str(scale).encode())}.pt")
    if file.exists():
        return file
    silence_dependencies()
    torch.set_num_threads(1)
    training, few, _ = data_of(seed, scale)
    torch.manual_seed(seed)
    models = untrained(training, scale)
    for model, tokenizer, questions, epochs, lr in (
        (models.same, models.tokenizer, training, scale.teacher_epochs, scale.teacher_lr),
        (models.other, models.other_tokenizer, training, scale.teacher_epochs, scale.teacher_lr),
        (models.student, models.tokenizer, few, scale.start_epochs, scale.start_lr),
    ):
        data, sft = lazy_stack(rows_of(questions, tokenizer)), make_algorithm("sft", model)
        for _ in train(sft, data, epochs=epochs, batch_size=scale.batch, lr=lr, seed=seed):
            pass
    weights = {name: getattr(models, name).state_dict() for name in ("student", "same", "other")}
    with replacing(file) as part:
        torch.save(weights, part)
    return file


def untrained(training: Sequence[Question], scale: Scale) -> Models:
    """The tokenizers, and models with random weights."""
    own, other = (build_tokenizer(training, vocab_size=size) for size in (scale.vocab, scale.teacher_vocab))
    student = build_model(own, hidden=scale.hidden, layers=2)
    same, last = (build_model(each, hidden=scale.teacher_hidden, layers=2) for each in (own, other))
    return Models(student, own, same, last, other)


def load(seed: int, scale: Scale) -> Models:
    """The models of a seed after :func:`prepare`."""
    models = untrained(data_of(seed, scale)[0], scale)
    for name, weights in torch.load(prepare(seed, scale)).items():
        getattr(models, name).load_state_dict(weights)
    models.same.requires_grad_(False)
    models.other.requires_grad_(False)
    return models


def run(name: str, seed: int, lr: float, scale: Scale) -> dict[str, Any]:
    """Train the student of one seed with one method. The result is the same in every process."""
    silence_dependencies()
    torch.set_num_threads(1)
    models, (_, few, held_out) = load(seed, scale), data_of(seed, scale)
    torch.manual_seed(seed)
    teachers = {"same": (models.same, models.tokenizer), "other": (models.other, models.other_tokenizer)}
    figures = {each: nats_per_byte(*pair, held_out) for each, pair in teachers.items()}
    start = nats_per_byte(models.student, models.tokenizer, held_out)
    updates = steps(ARMS[name].build(models), rows_of(few, models.tokenizer), seed, lr, scale)
    curve = [  # measured between the updates
        nats_per_byte(models.student, models.tokenizer, held_out[: scale.held_out])
        for step in updates
        if (step + 1) % (scale.steps // 6) == 0
    ]
    end = nats_per_byte(models.student, models.tokenizer, held_out)
    place = {"arm": name, "seed": seed, "lr": lr, "processor": torch.backends.cpu.get_cpu_capability()}
    return {**place, "scale": asdict(scale), "teachers": figures, "start": start, "curve": curve, "nats": end}


def steps(parts: AlgorithmParts, rows: list[TensorDictBase], seed: int, lr: float, scale: Scale) -> Iterator[int]:
    """Make the updates, each on some of the rows."""
    optimizer = torch.optim.AdamW(parts.loss.parameters(), lr=lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=max(scale.steps, 20), pct_start=0.1)
    order = random.Random(seed)
    for step in range(scale.steps):
        batch = lazy_stack([row.clone() for row in order.sample(rows, scale.batch)])
        learn(parts, parts.prepare(batch), optimizer)
        schedule.step()
        yield step


def time_steps(seed: int, scale: Scale) -> dict[str, Any]:
    """The seconds of a step of each method. The methods take turns, so that all of them see the same load of the machine."""
    silence_dependencies()
    torch.set_num_threads(1)
    models, few = load(seed, scale), data_of(seed, scale)[1]
    rows, runs = rows_of(few, models.tokenizer), dict[str, Iterator[int]]()
    for name, arm in ARMS.items():
        own = copy.copy(models)
        own.student = copy.deepcopy(models.student)
        runs[name] = steps(arm.build(own), rows, seed, arm.lr, scale)
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    for turn, (name, steps_of) in product(range(scale.rounds + 2), runs.items()):
        start = time.perf_counter()
        next(steps_of)
        if turn > 1:  # the first steps are slower
            seconds[name].append(time.perf_counter() - start)
    return {"seconds": {name: median(each) for name, each in seconds.items()}, "seed": seed, "scale": asdict(scale)}


# ------------------------------------------------------------------ results


def read(path: Path, scale: Scale = SCALE) -> list[dict[str, Any]]:
    """The results of this scale."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if row["scale"] == asdict(scale)]


def of_arm(results: list[dict[str, Any]], name: str) -> dict[int, dict[str, Any]]:
    """The runs of the study by seed."""
    own = (row for row in results if row.get("arm") == name and row["lr"] == ARMS[name].lr)
    return {row["seed"]: row for row in own if row["seed"] < TUNING_SEEDS}


def timings(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The timings in which all methods took turns."""
    return [row for row in results if list(row.get("seconds", ())) == list(ARMS)]


def table(results: list[dict[str, Any]]) -> str:
    """A row for each method, with 95 % intervals over seeds. Differences are of the same seed."""
    first, times = of_arm(results, FIRST), [row["seconds"] for row in timings(results)]
    lines = ["| method | nats per byte | difference to the first | learning rate | cost of a step |", "|---" * 5 + "|"]
    for title, key in (
        ("student at the start", "start"),
        ("teacher, same tokenizer", "same"),
        ("teacher, other", "other"),
    ):
        values = [row[key] if key == "start" else row["teachers"][key] for row in first.values()]
        lines.append(f"| {title} | {shown(values, '{:.3f}')} | | | |")
    for name, arm in ARMS.items():
        runs = of_arm(results, name)
        values = [row["nats"] for row in runs.values()]
        more = [row["nats"] - first[seed]["nats"] for seed, row in runs.items() if seed in first and name != FIRST]
        costs = [row[name] / row[FIRST] for row in times]
        cost = f"{fmean(costs):.2f}" if costs else "not run"
        lines.append(
            f"| {name} | {shown(values, '{:.3f}')} | {shown(more, '{:.3f}') if name != FIRST else ''} | {arm.lr:g} | {cost} |"
        )
    return "\n".join(lines)


def tuning(results: list[dict[str, Any]]) -> str:
    """The mean nats per byte of each method by learning rate, on the seeds that were only used for this choice."""
    runs = [row for row in results if "arm" in row and row["seed"] >= TUNING_SEEDS]
    lrs = sorted({row["lr"] for row in runs})
    lines = [f"| method | {' | '.join(f'{lr:g}' for lr in lrs)} |", "|---" * (1 + len(lrs)) + "|"]
    for name in ARMS:
        each = [[row["nats"] for row in runs if (row["arm"], row["lr"]) == (name, lr)] for lr in lrs]
        lines.append(f"| {name} | {' | '.join(f'{fmean(x):.3f}' if x else '' for x in each)} |")
    return "\n".join(lines)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """The held-out nats per byte by step, as means over seeds with the smallest and the largest value."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, own = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name in ARMS:
        curves = torch.tensor([row["curve"] for row in of_arm(results, name).values()])
        if not len(curves):
            continue
        places = [(i + 1) * SCALE.steps // 6 for i in range(curves.shape[1])]
        (line,) = own.plot(places, curves.mean(0), marker="o", label=name)
        own.fill_between(places, curves.min(0).values, curves.max(0).values, alpha=0.15, color=line.get_color())
    own.set_xlabel("step")
    own.set_ylabel("held-out nats per byte")
    own.legend()
    figure.savefig(path, dpi=110)


def write_page(page: Path, name: str, text: str) -> None:
    """Replace a table of the page, between two comments."""
    if page.exists():
        old = page.read_text(encoding="utf-8")
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        page.write_text(
            re.sub(pattern, lambda found: f"{found[1]}{text}\n{found[2]}", old, flags=re.S), encoding="utf-8"
        )


def main(
    jobs: int, results: Path, seeds: Sequence[int] = SEEDS, lrs: Sequence[float] = (), scale: Scale = SCALE
) -> None:
    """Run what is missing in ``jobs`` processes, and write the tables and the picture."""
    done = {(row["arm"], row["seed"], row["lr"]) for row in read(results, scale) if "arm" in row}
    asked = [(name, seed, lr) for seed in seeds for name, arm in ARMS.items() for lr in lrs or [arm.lr]]
    todo = [each for each in asked if each not in done]
    timed = [seed for seed in seeds if not lrs and seed not in {row["seed"] for row in timings(read(results, scale))}]

    def append(result: dict[str, Any]) -> None:
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")

    with ProcessPoolExecutor(max(jobs, 1), mp_context=get_context("spawn")) as pool:
        apply: Any = pool.map if jobs else map
        missing = list(dict.fromkeys([*(seed for _, seed, _ in todo), *timed]))
        for _ in track(apply(prepare, missing, [scale] * len(missing)), "teachers", total=len(missing)):
            pass
        runs = apply(run, *zip(*todo, strict=True), [scale] * len(todo)) if todo else ()
        for result in track(runs, "students", total=len(todo)):
            append(result)
            print(f"{result['arm']}, seed {result['seed']}, lr {result['lr']:g}: {result['nats']:.3f}", flush=True)
    for seed in track(timed, "costs"):  # in this process, with no other beside it
        append(time_steps(seed, scale))
    page, rows = results.with_name("TOKENIZERS.md"), read(results, scale)
    for name, text in (("study", table(rows)), ("tuning", tuning(rows))):
        print(text)
        write_page(page, name, text)
    draw(rows, results.with_name("tokenizers.png"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--results", type=Path, default=BENCHMARKS / "tokenizers_study.jsonl")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--lrs", type=float, nargs="+", default=[])
    main(**vars(parser.parse_args()))
