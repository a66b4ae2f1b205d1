"""A conversation scored at every turn under two models, as in an env with several turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.agreement import largest_difference, tolerance_of
from benchmarks.data import Batch, conversation
from benchmarks.measure import MIB, Contender
from benchmarks.models import ModelSize, qwen2, wrapper
from benchmarks.results import Outcome, Targets, Turns
from benchmarks.workloads.base import OURS, THEIRS, Settings, Workload
from torchrl_llm_kl import LogProbScorer, Ragged

SIZE = ModelSize(vocab=32_000, hidden=512, layers=6)
MEMORY = 256 * MIB  # per model, enough for all turns

Number = TypeVar("Number", int, float)
Score = Callable[[Ragged, Tensor], Ragged]


def new_scorer(model: Any) -> Score:
    """A scorer with an empty cache."""
    return partial(LogProbScorer(model, memory=MEMORY).score, remember=True)


class Clock:
    """Records the seconds of each turn in each run."""

    def __init__(self) -> None:
        self.runs: list[list[float]] = []

    def time(self, turns: list[Callable[[], object]]) -> None:
        """Run and time all turns."""
        marks = [time.perf_counter()]
        for turn in turns:
            turn()
            marks.append(time.perf_counter())
        self.runs.append(_steps(marks))

    @property
    def medians(self) -> list[float]:
        """Median time of each turn over the runs."""
        return [statistics.median(seconds) for seconds in zip(*self.runs, strict=True)]


def measure(settings: Settings) -> Outcome:
    """Score all turns of one conversation, each with all tokens so far."""
    size = settings.size(SIZE)
    batches = conversation(3 if settings.quick else 8, size.vocab)
    models = [qwen2(size, seed=seed, dtype=settings.dtype) for seed in (0, 1)]
    wrappers = [wrapper(model, key) for model, key in zip(models, ("log_probs", "ref_log_probs"), strict=True)]
    padded, ragged = [batch.padded() for batch in batches], [batch.ragged() for batch in batches]

    def their_turn(turn: int) -> list[Tensor]:
        with torch.no_grad():
            return [wrap(padded[turn].copy())[wrap.log_probs_key, "full"] for wrap in wrappers]

    def our_turn(scorers: list[Score], turn: int) -> list[Tensor]:
        return [score(*ragged[turn]).values for score in scorers]

    scorers = [new_scorer(model) for model in models]
    difference = max(
        _difference(our_turn(scorers, turn), their_turn(turn), batch, ragged[turn][1], tolerance_of(settings.dtype))
        for turn, batch in enumerate(batches)
    )
    clocks = {THEIRS: Clock(), OURS: Clock()}
    turns = range(len(batches))
    found = settings.alternate(
        {
            THEIRS: Contender(lambda _: clocks[THEIRS].time([partial(their_turn, turn) for turn in turns])),
            OURS: Contender(
                lambda scorers: clocks[OURS].time([partial(our_turn, scorers, turn) for turn in turns]),
                prepare=lambda: [new_scorer(model) for model in models],
            ),
        }
    )
    totals = [0, *(batch.tokens for batch in batches)]
    return Outcome(
        f"{len(batches)} turns, {totals[-1]:,} tokens at the end ({batches[0].source}); {size}",
        found[THEIRS],
        found[OURS],
        difference,
        turns=Turns(
            _steps(totals),
            clocks[THEIRS].medians,
            clocks[OURS].medians,
        ),
    )


def _steps(marks: list[Number]) -> list[Number]:
    return [after - before for before, after in pairwise(marks)]


def _difference(ours: list[Tensor], theirs: list[Tensor], batch: Batch, mask: Tensor, tolerance: float) -> float:
    response = batch.padded_response()
    return max(
        largest_difference(our[mask], their[response], tolerance=tolerance, what="log-probs of a turn")
        for our, their in zip(ours, theirs, strict=True)
    )


WORKLOADS = (Workload("c", "A conversation of 8 turns, scored at every turn", measure, Targets(faster=8, growth=1.5)),)
