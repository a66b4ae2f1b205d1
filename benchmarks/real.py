"""Speed, memory and accuracy with Gemma 3 270M: ``python -m benchmarks.real``, after ``make real``. Writes REAL.md."""

from __future__ import annotations

import copy
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from tensordict import TensorDict, set_list_to_stack
from torch import Tensor
from torchrl.envs.llm.transforms.kl import RetrieveKL as TorchRLRetrieveKL
from torchrl.modules.llm.policies import Text
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import environment
from benchmarks.data import REAL_ANSWERS, Batch
from benchmarks.measure import Contender, HostMeter, Measured, alternate
from benchmarks.models import wrapper
from benchmarks.products import products_of
from benchmarks.report import markdown_table
from benchmarks.workloads.base import OURS, PRODUCTS, THEIRS, Settings
from benchmarks.workloads.trl import (
    COMPACT,
    PLAIN,
    backward_of,
    clipped_loss,
    compacted,
    make_trainer,
    plain_log_probs,
    trl_inputs,
)
from torchrl_llm_kl import LogProbScorer, PolicyLoss, RetrieveKL, Sampling
from torchrl_llm_kl.training import Checkpoints, Run, make_sampler, read_config

COLUMNS = (THEIRS, PLAIN, COMPACT, OURS)
PAGE = Path(__file__).with_name("REAL.md")
_INTRO = """# A real model: Gemma 3 270M

Written by `python -m benchmarks.real`; do not edit. {threads} threads of {processor}, torch {torch}, torchrl {torchrl},
TRL {trl}.

The prompts and answers are of GSM8K. All work is float32, with the whole vocabulary of 262,144 tokens. Memory is the peak minus
the memory held before. TRL's head runs only at scored positions, as on a GPU. The columns "faster" and "less memory" compare
with the rightmost filled column of a peer. "Products" is the share of the time here that the matrix products and the attention
of the distinct tokens take if nothing else is done, measured in the same run.
"""


def answers(folder: Path, prompts: int, each: int) -> Batch:
    """Questions of GSM8K with solutions of four models."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = REAL_ANSWERS.read_text(encoding="utf-8").splitlines()[:prompts]
    asked, said = [], []
    for row in map(json.loads, lines):
        solutions = [value["solution"] for value in row.values() if isinstance(value, dict)][:each]
        asked += [torch.tensor(tokenizer(f"Question: {row['question']}\nAnswer:")["input_ids"])] * each
        said += [torch.tensor(tokenizer(f" {text}", add_special_tokens=False)["input_ids"]) for text in solutions]
    return Batch(asked, said, "GSM8K")


def measured(
    contenders: dict[str, Callable[[], object]], repeats: int, clear: Callable[[], object]
) -> dict[str, Measured]:
    """Measure the contenders, interleaved."""
    meter, say = HostMeter(), lambda name: print(f"  {name}", flush=True)
    return alternate(
        {name: Contender(lambda _, step=step: step(), prepare=clear) for name, step in contenders.items()},
        meter,
        repeats=repeats,
        on_run=say,
    )


def row(work: str, found: dict[str, Measured], columns: tuple[str, ...]) -> list[str]:
    """A row of the table: each contender, and the last but one beside the last."""
    cells = [
        f"{found[name].seconds:.1f} s, {found[name].peak_mib:,.0f} MiB" if name in found else "" for name in columns
    ]
    peer = [name for name in columns[:-1] if name in found][-1]
    theirs, ours = found[peer], found[columns[-1]]
    assert theirs.peak_mib is not None
    assert ours.peak_mib is not None
    share = f"{found[PRODUCTS].seconds / ours.seconds:.2f}" if PRODUCTS in found else ""
    return [work, *cells, f"{theirs.seconds / ours.seconds:.1f}x", f"{theirs.peak_mib / ours.peak_mib:.1f}x", share]


# ------------------------------------------------------------------ scores and gradients


def compare_transforms(load: Callable[[], Any], batch: Batch) -> list[str]:
    """``RetrieveKL`` of both libraries."""
    models = [load().eval().requires_grad_(False) for _ in range(2)]
    gen, ref = wrapper(models[0], "log_probs"), wrapper(models[1], "ref_log_probs")
    theirs = torch.no_grad()(TorchRLRetrieveKL(gen, ref, assistant_only=False, add_to_reward=False))
    ours, data = RetrieveKL(gen, ref, add_to_reward=False), batch.padded()
    steps = {THEIRS: lambda: theirs(data.copy()), OURS: lambda: ours(data.copy())}
    return row(f"RetrieveKL, 1 prompt x 2 answers, {batch.tokens:,} tokens", measured(steps, 3, lambda: None), COLUMNS)


def compare(folder: Path) -> str:
    """Scores, the KL transform, and a loss with its gradient."""
    load = partial(AutoModelForCausalLM.from_pretrained, folder, dtype=torch.float32)
    rows = [compare_transforms(load, answers(folder, 1, 2))]
    policy = load().eval().requires_grad_(True)
    clear = partial(policy.zero_grad, set_to_none=True)
    batch = answers(folder, 4, 4)
    inputs, (sequences, response) = trl_inputs(batch, Settings()), batch.ragged()
    trainer, scorer = make_trainer(copy.deepcopy(policy)), LogProbScorer(policy)
    ids, real = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask"))

    def trl_scores() -> Tensor:
        with torch.no_grad():
            return trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, real, inputs["completion_mask"].shape[1]
            )[0]

    steps = {
        PLAIN: torch.no_grad()(lambda: plain_log_probs(policy, inputs)),
        COMPACT: lambda: compacted(trl_scores),
        OURS: lambda: scorer.score(sequences, response).values,
        PRODUCTS: products_of(policy, batch),
    }
    what = f"4 prompts x 4 answers, {batch.tokens:,} tokens"
    rows.append(row(f"Log-probs, {what}", measured(steps, 2, clear), COLUMNS))

    loss, rollouts = PolicyLoss(policy, "ppo", clip_ratio_c=None), batch.padded()
    old = torch.zeros(ids.shape)
    old[:, -inputs["old_per_token_logps"].shape[1] :] = inputs["old_per_token_logps"]
    rollouts["next", "log_probs"] = {"full": torch.where(batch.padded_response(), old, 0)}
    rollouts["advantage"] = inputs["advantages"]

    def plain_loss() -> Tensor:
        policy.train()
        try:
            return backward_of(clipped_loss(plain_log_probs(policy, inputs), inputs))
        finally:
            policy.eval()

    def clear_all() -> None:
        clear()
        trainer.model.zero_grad(set_to_none=True)

    steps = {
        PLAIN: plain_loss,
        COMPACT: lambda: compacted(lambda: backward_of(trainer._compute_loss(trainer.model, inputs))),
        OURS: lambda: backward_of(loss(rollouts.copy()).total_loss),
        PRODUCTS: products_of(policy, batch, train=True),
    }
    rows.append(row(f"GRPO's loss and all gradients, {what}", measured(steps, 1, clear_all), COLUMNS))
    expected = step_mib(policy, sum(map(len, batch.prompts[::4])) + sum(map(len, batch.responses)))
    formula = f"[The formula](../docs/scoring.md#memory-on-the-device) for this loss gives {expected:,.0f} MiB.\n"
    return markdown_table(["work", *COLUMNS, "faster", "less memory", "products"], rows) + "\n" + formula


def step_mib(model: Any, tokens: int) -> float:
    """Memory of a training step by the formula of docs/scoring.md, in MiB."""
    config, pack = model.config, min(tokens, 1024)
    activations = 4 * config.num_hidden_layers * tokens * 6 * (config.intermediate_size + config.hidden_size)
    gradients = 4 * sum(parameter.numel() for parameter in model.parameters())
    return (activations + gradients + 4 * pack * tokens) / 2**20 + 5 * 20 + 64


# ------------------------------------------------------------------ sampling and a step


def sampling(folder: Path) -> str:
    """Time of 16 answers of 24 tokens by transformers, and by the sampler of a run."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    texts = [f"Question: {json.loads(line)['question']}\nAnswer:" for line in REAL_ANSWERS.read_text().splitlines()[:4]]
    texts = [text for text in texts for _ in range(4)]
    given = tokenizer(texts, return_tensors="pt", padding=True)
    drawn = {**Sampling().generate_kwargs(), "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
    model.generation_config.eos_token_id = None
    sampler = make_sampler(model, tokenizer, max_new_tokens=24, sampling=Sampling())
    vocabulary = model.config.vocab_size
    set_list_to_stack(True).set()
    prompts = Text(prompt=texts, batch_size=[len(texts)])
    data = TensorDict(text=prompts, batch_size=[len(texts)])
    names = (f"`generate`, top-k {vocabulary:,}", "`generate`, top-k 0", "the sampler of a run")
    steps = (
        lambda: model.generate(**given, **drawn | {"top_k": vocabulary}),
        lambda: model.generate(**given, **drawn | {"top_k": 0}),
        lambda: sampler(data.copy()),
    )
    found = measured(dict(zip(names, steps, strict=True)), 3, lambda: None)
    rows = [
        [name, f"{found[name].seconds:.1f} s", f"{found[name].seconds / found[names[1]].seconds:.2f}"] for name in names
    ]
    return markdown_table(["16 answers of 24 tokens to 4 prompts", "time", "beside top-k 0"], rows)


@contextmanager
def timed(times: dict[str, float], owner: Any, name: str, label: str) -> Iterator[None]:
    """Add the seconds of each call of a method to ``times[label]``."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            times[label] = times.get(label, 0.0) + time.perf_counter() - begin

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, method)


def step(folder: Path, changes: list[str]) -> tuple[dict[str, float], float]:
    """Seconds of the parts of the demo's second step and of a checkpoint, and the process's peak in MiB."""
    with tempfile.TemporaryDirectory() as out:
        prompts = Path(out, "prompts.jsonl")
        rows = (
            {"prompt": f"12 + 5 = 17\n40 + 7 = 47\n63 + 9 = 72\n{a} + 4 = ", "answer": str(a + 4)}
            for a in range(10, 90)
        )
        prompts.write_text("".join(json.dumps(each) + "\n" for each in rows))
        files = [f"model.name={folder}", f"data.prompts={prompts}", "data.held_out=null", f"run.out={out}/run"]
        run = Run(
            read_config("tutorials/real_demo.yaml", [*files, "logging.doctor_every=0", "evaluation.every=0", *changes])
        )
        run.take_step()
        times: dict[str, float] = {}
        meter = HostMeter()
        meter.reset()
        with ExitStack() as stack:
            for owner, name, label in (
                (run.sampler, "forward", "sampling"),
                (run.kl, "_step", "log-probs of policy and reference"),
                (Tensor, "backward", "backward of the loss"),
            ):
                stack.enter_context(timed(times, owner, name, label))
            begin = time.perf_counter()
            run.take_step()
        whole = time.perf_counter() - begin
        times["the rest: the forward of the loss, and the optimiser"] = whole - sum(times.values())
        peak = meter.peak_mib() or 0.0
        begin = time.perf_counter()
        run.save(Checkpoints(Path(out, "checkpoints")))
        times["a checkpoint, every 10 steps"] = time.perf_counter() - begin
    return times, peak


def main(model: Path = Path(".real/model"), out: Path = PAGE) -> None:
    """Measure, and write the page."""
    warnings.filterwarnings("ignore")
    versions = environment.versions()
    machine = environment.machine(torch.device("cpu"))
    heads = {"threads": torch.get_num_threads(), "processor": next(iter(machine.values())), **versions}
    parts = [_INTRO.format(**heads)]
    print("scores and losses")
    parts += [compare(model)]
    print("sampling")
    parts += ["## Sampling\n", sampling(model)]
    print("steps")
    adapters, full = step(model, []), step(model, ["lora=null", "optimizer.lr=1e-6"])
    labels = list(adapters[0])
    rows = [[label, f"{adapters[0][label]:.1f} s", f"{full[0].get(label, 0.0):.1f} s"] for label in labels]
    rows.append(["memory above the model's own, peak", f"{adapters[1]:,.0f} MiB", f"{full[1]:,.0f} MiB"])
    parts += [
        "## A step of `make demo-real`\n",
        markdown_table(["96 answers of up to 4 tokens", "LoRA", "all weights"], rows),
    ]
    out.write_text("\n".join(parts), encoding="utf-8")
    print(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
