"""Scoring compared with a plain forward and with itself: one sequence, many answers, products in bfloat16."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.agreement import largest_difference, tolerance_of
from benchmarks.data import Batch, one_prompt
from benchmarks.measure import Contender, Measured
from benchmarks.models import ModelSize, qwen2
from benchmarks.products import products_of
from benchmarks.results import Goal, Outcome, Targets
from benchmarks.workloads.base import OURS, PRODUCTS, Settings, Workload
from torchrl_llm_kl import LogProbScorer

PLAIN, ONE, FLOAT32 = "plain forward", "one answer", "float32"
SIZE = ModelSize(vocab=32_000, hidden=512, layers=4)
WIDE = ModelSize(vocab=32_000, hidden=1024, layers=4)  # for the products in bfloat16


def last_tokens(settings: Settings) -> Outcome:
    """The last 64 tokens of one sequence, with nothing to share and no padding to leave out."""
    size = settings.size(SIZE)
    batch = one_prompt(1, 20, 8, size.vocab) if settings.quick else one_prompt(1, 1436, 64, size.vocab)
    model = qwen2(size, device=settings.device, dtype=settings.dtype)
    ours, theirs = _scores(model, batch, settings), partial(_plain, model, batch, settings)
    difference, products = _same(ours(), theirs(), settings), products_of(model, batch)
    found = settings.alternate(
        {
            PLAIN: Contender(lambda _: theirs()),
            OURS: Contender(lambda _: ours()),
            PRODUCTS: Contender(lambda _: products()),
        },
        repeats=settings.at_least(7),
        warm_up=1,
    )
    return Outcome(_work(batch, size), found[PLAIN], found[OURS], difference, products=found[PRODUCTS])


def many_answers(settings: Settings) -> Outcome:
    """32 answers of 64 tokens to a prompt of 1,500, compared with a plain forward of all, and of one of them."""
    size = settings.size(SIZE)
    most, prompt, answer = (4, 20, 8) if settings.quick else (32, 1500, 64)
    batch, single = (one_prompt(n, prompt, answer, size.vocab) for n in (most, 1))
    model = qwen2(size, device=settings.device, dtype=settings.dtype)
    ours, one = _scores(model, batch, settings), _scores(model, single, settings)
    theirs = partial(_plain, model, batch, settings)
    difference = _same(ours(), theirs(), settings)
    steps: dict[str, Any] = {PLAIN: theirs, OURS: ours, ONE: one, PRODUCTS: products_of(model, batch)}
    found = settings.alternate({name: Contender(lambda _, step=step: step()) for name, step in steps.items()})
    times = found[OURS].seconds / found[ONE].seconds
    goal = Goal("time of 32 answers beside one", "beside one", times, 3, at_least=False)
    outcome = Outcome(_work(batch, size), found[PLAIN], found[OURS], difference, further=(goal,))
    return replace(outcome, products=found[PRODUCTS])


def half_products(settings: Settings) -> Outcome:
    """``dtype=torch.bfloat16`` on float32 weights compared with float32, also for a single matrix product."""
    size = settings.size(WIDE)
    batch = one_prompt(2, 20, 8, size.vocab) if settings.quick else one_prompt(8, 256, 128, size.vocab)
    model = qwen2(size, device=settings.device)
    full, half = _scores(model, batch, settings), _scores(model, batch, settings, dtype=torch.bfloat16)
    difference = float((full() - half()).abs().max())
    width = 256 if settings.quick else 2048
    steps: dict[str, Any] = {FLOAT32: full, OURS: half}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.rand(width, width).to(settings.device, dtype) for _ in range(2))
        steps[f"product, {dtype}"] = partial(torch.mm, a, b)
    found = settings.alternate(
        {name: Contender(lambda _, step=step: step()) for name, step in steps.items()},
        repeats=settings.at_least(5),
        warm_up=1,
    )
    products = _ratio(found, torch.float32, torch.bfloat16)
    note = f"a product of two {width} x {width} matrices is {products:.1f} times faster in bfloat16"
    return Outcome(_work(batch, size), found[FLOAT32], found[OURS], difference, notes=(note,))


def _ratio(found: dict[str, Measured], slow: torch.dtype, fast: torch.dtype) -> float:
    return min(found[f"product, {slow}"].all_seconds) / min(found[f"product, {fast}"].all_seconds)


def _scores(model: Any, batch: Batch, settings: Settings, **options: Any) -> partial[Tensor]:
    scorer, (sequences, response) = LogProbScorer(model, **options), batch.ragged(settings.device)
    return partial(lambda: scorer.score(sequences, response).values[response])


@torch.no_grad()
def _plain(model: Any, batch: Batch, settings: Settings) -> Tensor:
    """Rows of one length through the model's body, and the head at the scored positions."""
    rows = torch.stack([torch.cat(row) for row in zip(batch.prompts, batch.responses, strict=True)]).to(settings.device)
    length = len(batch.responses[0])
    hidden = model.model(rows, use_cache=False).last_hidden_state[:, -length - 1 : -1]
    log_probs = model.lm_head(hidden).float().log_softmax(-1)
    return log_probs.gather(-1, rows[:, -length:].unsqueeze(-1)).flatten()


def _same(found: Tensor, expected: Tensor, settings: Settings) -> float:
    return largest_difference(found, expected, tolerance=tolerance_of(settings.dtype), what="log-probs")


def _work(batch: Batch, size: ModelSize) -> str:
    return f"{len(batch.prompts)} sequences, {batch.tokens:,} tokens ({batch.source}); {size}"


WORKLOADS = (
    Workload(
        "last64",
        "Log-probs, the last 64 of 1,500 tokens",
        last_tokens,
        Targets(faster=1, share=0.9),
        cuda=True,
        peer=PLAIN,
    ),
    Workload(
        "answers32",
        "Log-probs, 32 answers of 64 tokens to a prompt of 1,500",
        many_answers,
        Targets(share=0.9),
        cuda=True,
        peer=PLAIN,
    ),
    Workload(
        "bf16",
        "Log-probs with `dtype=torch.bfloat16`",
        half_products,
        Targets(faster=2.5),
        cuda=True,
        peer=FLOAT32,
        half=False,
    ),
)
