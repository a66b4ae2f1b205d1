"""SFT and DPO on real text: worked solutions of GSM8K, and pairs of right and wrong solutions by four models.

``make demo-text`` runs it for three seeds. It takes a few minutes on two CPU cores and needs no network. Append changes of
:class:`Settings`, such as ``ARGS="seeds=[100] beta=0.05"``. For each seed it

1. writes the training and the held-out questions as JSONL files of conversations and pairs
2. builds a BPE tokenizer and a small Qwen2, and trains the model on the worked solutions with ``from_conversations`` and
   ``make_algorithm("sft")``
3. trains a copy on pairs of a right and a wrong solution, with the SFT model as the reference, with ``from_pairs`` and
   ``make_algorithm("dpo")``
4. measures perplexity and preference accuracy on the held-out files with the command ``torchrl-llm-kl score``, and writes a
   page with the tokens of some pairs (``rollouts.html``) and the doctor's findings (``diagnosis.txt``)

The seeds 0, 1 and 2 hold out different quarters of the questions. The settings were chosen on seed 100, which holds out the
last quarter. Start reading at :func:`run`.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import Manager, get_context
from pathlib import Path
from typing import Any

import tensordict
import torch

from countdown.report import MetricsFile, keep_earlier_run, silence_dependencies
from countdown.settings import check_positive, read_settings
from gsm8k.measure import answers_of, pair_figures, run_command
from gsm8k.model import build_model, build_tokenizer, train
from gsm8k.report import Event, Result, print_seed, progress, summary
from gsm8k.task import FOLDER, Question, pairs, read_questions, solutions, split, write_jsonl
from torchrl_llm_kl import diagnose, from_conversations, from_pairs, inspect_tokens, make_algorithm

# Required by torchrl's LLM components, which store lists of strings as stacks.
tensordict.set_list_to_stack(True).set()


@dataclass
class Settings:
    """Settings of the model and the training. The defaults were chosen on the questions that seed 100 holds out."""

    vocab_size: int = 1024
    hidden: int = 96
    layers: int = 2
    sft_epochs: int = 6
    sft_rows: int = 16  # per step
    sft_lr: float = 4e-3
    dpo_epochs: int = 1
    dpo_rows: int = 32  # per step, 16 pairs
    dpo_lr: float = 3e-4
    beta: float = 0.1
    questions: int | None = None  # None for all
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    data: str = str(FOLDER)  # the folder with gsm8k_model_solutions.jsonl
    jobs: int = 2  # the number of processes, each with one seed on one core. 0 runs the seeds in this process.
    out: str = "runs/text"


SHOWN = 24  # pairs on the page and for the doctor


def run(
    seed: int, questions: list[Question], settings: Settings, folder: Path, say: Callable[[Event], None]
) -> tuple[Result, list[dict[str, Any]]]:
    """Run SFT, DPO and the evaluation of one seed. Returns the figures, and one row of metrics for each step."""
    silence_dependencies()
    torch.set_num_threads(1)  # more threads only wait for each other on a model this small
    torch.manual_seed(seed)
    start, cpu = time.perf_counter(), time.process_time()
    training, held_out = split(questions, seed)
    train_pairs, held_out_pairs = pairs(training), pairs(held_out)
    files = {
        "train_solutions": solutions(training),
        "train_pairs": train_pairs,
        "held_out_solutions": solutions(held_out),
        "held_out_pairs": held_out_pairs,
    }
    paths = {name: write_jsonl(folder / f"{name}.jsonl", rows) for name, rows in files.items()}
    tokenizer = build_tokenizer(training, vocab_size=settings.vocab_size)
    model = build_model(tokenizer, hidden=settings.hidden, layers=settings.layers)
    rows: list[dict[str, Any]] = []

    def save(name: str) -> Path:
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        return folder / name

    def learn(stage: str, parts: Any, data: Any, epochs: int, size: int, lr: float) -> None:
        steps = epochs * -(-data.batch_size.numel() // size)
        for step, metrics in enumerate(train(parts, data, epochs=epochs, batch_size=size, lr=lr, seed=seed)):
            rows.append({"seed": seed, "stage": stage, "step": step, **metrics})
            status = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())
            say((seed, stage, step + 1, steps, status))

    # SFT: one line turns the file into unpadded token ids and masks. The loss trains only the assistant's tokens.
    untrained = save("untrained")
    data = from_conversations(paths["train_solutions"], tokenizer)
    learn("SFT", make_algorithm("sft", model), data, settings.sft_epochs, settings.sft_rows, settings.sft_lr)
    sft = save("sft")

    # DPO: one line turns the pairs into token ids and masks. `prepare` scores the reference once.
    say((seed, "pairs", 0, 1, "tokens and log-probs of the reference"))
    reference = copy.deepcopy(model).requires_grad_(False)
    dpo = make_algorithm("dpo", model, reference=reference, objective_args={"beta": settings.beta})
    data = from_pairs(paths["train_pairs"], tokenizer)
    learn("DPO", dpo, data, settings.dpo_epochs, settings.dpo_rows, settings.dpo_lr)
    policy = save("dpo")

    # The figures need only the files in the run's folder: text and saved models.
    say((seed, "figures", 0, 1, "scoring the held-out questions"))
    solved, found = run_command(
        "score", sft, paths["held_out_solutions"], "--reference", untrained, "--estimator", "k1"
    )
    scores = folder / "held_out_scores.jsonl"
    compared, _ = run_command("score", policy, paths["held_out_pairs"], "--reference", sft, "--out", scores)
    figures = pair_figures(answers_of(scores), train_pairs, held_out_pairs, beta=settings.beta)
    for name, key in (("before", "ref_perplexity"), ("after", "perplexity")):
        figures[f"perplexity_{name}"] = found["answers"]["all"][key]["value"]
        figures[f"perplexity_{name}_error"] = found["answers"]["all"][key]["error"]

    batch = dpo.prepare(from_pairs(held_out_pairs[:SHOWN], tokenizer)).reshape(-1)
    inspect_tokens(batch, tokenizer, html=folder / "rollouts.html", policy=model, reference=reference)
    diagnosis = diagnose(batch, tokenizer=tokenizer)  # policy= would report that the policy did not sample these
    (folder / "diagnosis.txt").write_text(f"{diagnosis}\n", encoding="utf-8")
    say((seed, "figures", 1, 1, ""))
    return {
        "seed": seed,
        "questions_held_out": len(held_out),
        **figures,
        "commands": [solved, compared],
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
    }, rows


def run_all(
    seeds: list[int],
    questions: list[Question],
    settings: Settings,
    folder: Path,
    *,
    jobs: int,
    done: Callable[..., None],
) -> None:
    """Run each seed in one of ``jobs`` processes, or with 0 in this process. Call ``done`` with figures and metrics."""
    if jobs == 0:
        with progress() as say:
            for seed in seeds:
                done(*run(seed, questions, settings, folder / f"seed-{seed}", say))
        return
    context = get_context("spawn")
    with Manager() as manager, ProcessPoolExecutor(jobs, mp_context=context) as pool, progress() as say:
        events = manager.Queue()
        waiting: list[Future[Any]] = [
            pool.submit(run_apart, seed, questions, settings, folder / f"seed-{seed}", events) for seed in seeds
        ]
        try:
            while waiting:
                while not events.empty():
                    say(events.get())
                for future in [future for future in waiting if future.done()]:
                    waiting.remove(future)
                    done(*future.result())
                time.sleep(0.2)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_apart(seed: int, questions: list[Question], settings: Settings, folder: Path, events: Any) -> Any:
    """Call :func:`run` in another process."""
    return run(seed, questions, settings, folder, events.put)


def main(settings: Settings) -> int:
    """Train on worked solutions (SFT) and on pairs of solutions (DPO), and evaluate both. Returns the exit code."""
    silence_dependencies()
    check_positive(**{name: getattr(settings, name) for name in ("sft_epochs", "dpo_epochs", "dpo_lr", "beta")})
    seeds, out = list(dict.fromkeys(settings.seeds)), Path(settings.out)
    questions = read_questions(Path(settings.data))[: settings.questions]
    written = ("metrics.jsonl", "results.jsonl", "summary.md")
    keep_earlier_run(out, (*written, *sorted(path.name for path in out.glob("seed-*"))))
    metrics, results = MetricsFile(out / "metrics.jsonl"), MetricsFile(out / "results.jsonl")
    start = time.perf_counter()

    def done(result: Result, rows: list[dict[str, Any]]) -> None:
        results.append(result)
        for row in rows:
            metrics.append(row)
        print_seed(result)
        for command in result["commands"]:
            print(f"  {command}")

    interrupted = False
    try:
        run_all(seeds, questions, settings, out, jobs=settings.jobs, done=done)
    except KeyboardInterrupt:
        interrupted = True
        print(f"\ninterrupted after {len(results.rows)} of {len(seeds)} seeds")
    if results.rows:
        ordered = sorted(results.rows, key=lambda result: seeds.index(int(result["seed"])))
        text = summary(ordered)
        (out / "summary.md").write_text(text, encoding="utf-8")
        print(f"\n{text}\neverything: {time.perf_counter() - start:.0f} s, {settings}")
        print(f"wrote {', '.join(str(out / name) for name in written)}, and in each seed's folder rollouts.html")
    return 130 if interrupted else 0


if __name__ == "__main__":
    try:
        sys.exit(main(read_settings(Settings, sys.argv[1:])))
    except (ValueError, FileNotFoundError) as error:
        sys.exit(str(error))
