"""Seconds of a step for given durations of sampling and training: ``python -m benchmarks.ahead``.

The durations of a step are drawn around their means, as lengths of answers vary. ``Answers`` runs for real, with pauses in the
place of work. Beside it stands the bound: the longer of both durations, as a mean over the steps.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import islice

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from torchrl_llm_kl.training._answers import Answers, CopiedWeights

STEPS, UNIT = 40, 0.1  # seconds of a mean duration of 1
CASES = ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0), (4.0, 1.0))


def durations(mean: float, seed: int) -> Iterator[float]:
    """Durations between half of the mean and three halves."""
    draw = random.Random(seed)
    while True:
        yield mean * draw.uniform(0.5, 1.5) * UNIT


def seconds(sample: float, train: float, ahead: int) -> float:
    """The measured duration of a step, in the unit of the means."""
    pauses = durations(sample, 0)

    def batch() -> TensorDictBase:
        time.sleep(next(pauses))
        return TensorDict(batch_size=[1])

    answers = Answers(batch, weights=CopiedWeights(nn.Linear(1, 1)), ahead=ahead)
    begin = time.perf_counter()
    for pause in islice(durations(train, 1), STEPS):
        answers.take()
        time.sleep(pause)
        answers.updated()
    taken = time.perf_counter() - begin
    answers.close()
    return taken / STEPS / UNIT


def bound(sample: float, train: float) -> float:
    """The mean duration of the longer part, in the unit of the means."""
    means = (sum(islice(durations(mean, seed), STEPS)) / STEPS / UNIT for seed, mean in enumerate((sample, train)))
    return max(means)


def main() -> None:
    """Print a table in Markdown."""
    torch.set_num_threads(1)
    print("| sampling | training | `max_staleness: 0` | 1 | 2 | 4 | bound |")
    print("|---|---|---|---|---|---|---|")
    for sample, train in CASES:
        measured = " | ".join(f"{seconds(sample, train, ahead):.2f}" for ahead in (0, 1, 2, 4))
        print(f"| {sample:g} | {train:g} | {measured} | {bound(sample, train):.2f} |")


if __name__ == "__main__":
    main()
