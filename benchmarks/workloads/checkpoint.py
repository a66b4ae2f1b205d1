"""Checkpointed layers: log-probs of a group of answers with gradients, each layer computed again in the backward."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.data import Batch
from benchmarks.measure import Contender
from benchmarks.models import ModelSize, checkpoint_layers, qwen2
from benchmarks.results import Goal, Outcome, Targets
from benchmarks.workloads.base import OURS, Settings, Workload
from benchmarks.workloads.loss import compare, steps_of

SIZE = ModelSize(vocab=1000, hidden=256, layers=6)


def measure(prompt: int, settings: Settings) -> Outcome:
    """Both libraries with checkpointed layers, and this library without."""
    size = settings.size(SIZE)
    batch = group(20, 3, 8, size.vocab) if settings.quick else group(prompt, 16, 40, size.vocab)
    model = qwen2(size, device=settings.device, dtype=settings.dtype).train()
    without = copy.deepcopy(model)
    checkpoint_layers(model)
    outcome = compare(size, settings, batch, model, steps_of(model, batch, settings), forwards=2)
    found = settings.alternate({"with": _ours(model, batch, settings), "without": _ours(without, batch, settings)})
    checkpointed, plain = found["with"], found["without"]
    slower = Goal(
        "time beside packs without checkpoints",
        "beside packs",
        checkpointed.seconds / plain.seconds,
        1.45,
        at_least=False,
    )
    if checkpointed.peak_mib is not None and plain.peak_mib is not None:
        peaks = f"peak {checkpointed.peak_mib:.0f} MiB, in packs without checkpoints {plain.peak_mib:.0f} MiB"
        outcome = replace(outcome, notes=(*outcome.notes, peaks))
    return replace(outcome, further=(slower,))


def _ours(model: Any, batch: Batch, settings: Settings) -> Contender:
    step = steps_of(model, batch, settings)[OURS]
    return Contender(lambda _: step(), prepare=partial(model.zero_grad, set_to_none=True))


def group(prompt: int, answers: int, length: int, vocab: int) -> Batch:
    """Answers of one length to one prompt."""
    ids = torch.randint(vocab, (prompt + answers * length,), generator=torch.Generator().manual_seed(0))
    return Batch([ids[:prompt]] * answers, list(ids[prompt:].split(length)), "generated")


def _workload(name: str, prompt: int) -> Workload:
    title = f"Checkpointed layers, 16 answers to a prompt of {prompt:,}, forward and backward"
    return Workload(name, title, partial(measure, prompt), Targets(faster=2), cuda=True)


WORKLOADS = (_workload("h200", 200), _workload("h2000", 2000))
