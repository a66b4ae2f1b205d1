"""The number of replicas that N collectors need."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.ray.events import Draw, Observed, Replica, World, simulate

COLLECTORS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)
SPEEDS = (200.0, 1000.0, 5000.0)


@dataclass(frozen=True)
class Work:
    """Work of a collector: generates responses to one or more prompts, then requests their scores.

    Args:
        tokens_per_second: generated.
        sequences: per request.
        prompt: tokens per prompt.
        response: tokens per response.
        prompts: distinct ones per request.
    """

    tokens_per_second: float
    sequences: int = 8
    prompt: int = 128
    response: int = 256
    prompts: int = 1

    @property
    def tokens(self) -> int:
        """Tokens to score per request."""
        return self.sequences * (self.prompt + self.response)

    @property
    def seconds(self) -> float:
        """Seconds to generate the sequences of a request."""
        return self.sequences * self.response / self.tokens_per_second

    def world(self, collectors: int, replicas: int, replica: Replica, link: Draw) -> World:
        """The simulated world; times and sizes vary by half of their mean."""
        return World(
            collectors, around(self.seconds), around(self.tokens), replicas, replica, link, prompts=self.prompts
        )


@dataclass(frozen=True)
class Limits:
    """Limits that a large enough service keeps.

    Args:
        lost: maximal share of a collector's time spent waiting, beyond the wait with a dedicated service: replicas
            shorten the queue, not the work.
        p99: maximal seconds for 99 of 100 requests; None for no limit.
    """

    lost: float = 0.05
    p99: float | None = None


@dataclass(frozen=True)
class Answer:
    """The number of replicas, and their predicted behaviour.

    Args:
        collectors: their number.
        tokens_per_second: per collector.
        replicas: the fewest within the limits; None if no number is.
        lost: share of a collector's time spent waiting.
        lost_alone: that share with a dedicated service.
        latency_p50: seconds.
        latency_p99: seconds.
        busy: share of a replica's time in the model.
        requests_per_batch: on average.
    """

    collectors: int
    tokens_per_second: float
    replicas: int | None
    lost: float
    lost_alone: float
    latency_p50: float
    latency_p99: float
    busy: float
    requests_per_batch: float


def around(mean: float) -> Draw:
    """Uniform between 0.5 and 1.5 times the mean."""
    return lambda random: mean * (0.5 + random.random())


def drawn(values: list[float]) -> Draw:
    """Draws from the sample."""
    return lambda random: values[int(random.random() * len(values))]


def size_of_run(collectors: int) -> tuple[int, int]:
    """Requests to observe and to skip: every collector sends several."""
    return max(4000, 3 * collectors), max(1000, 2 * collectors)


def replicas_needed(
    work: Work, collectors: int, replica: Replica, link: Draw, limits: Limits, *, guess: int | None = None
) -> Answer:
    """The fewest replicas within the limits, to 2 % for large numbers; a good guess shortens the search."""
    requests, warm_up = size_of_run(collectors)

    def observe(number: int) -> Observed:
        return simulate(work.world(collectors, number, replica, link), requests=requests, warm_up=warm_up)

    alone = simulate(work.world(1, 1, replica, link), requests=3000)

    def enough(found: Observed) -> bool:
        return found.lost <= alone.lost + limits.lost and (limits.p99 is None or found.quantile(0.99) <= limits.p99)

    if guess is None:  # replicas that are busy most of the time
        cycle = work.seconds + alone.latency
        guess = round(1.5 * collectors * replica.seconds(1, work.tokens) / cycle)
    number, found = _search(observe, enough, max(1, guess), most=4 * collectors * work.prompts)
    return Answer(
        collectors,
        work.tokens_per_second,
        number,
        found.lost,
        alone.lost,
        found.quantile(0.5),
        found.quantile(0.99),
        found.busy,
        sum(requests for requests, _ in found.batches) / len(found.batches),
    )


def answers_for(
    speeds: Sequence[float],
    counts: Sequence[int],
    replica: Replica,
    link: Draw,
    limits: Limits,
    *,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> list[Answer]:
    """Answers for every number of collectors at every speed."""
    answers: list[Answer] = []
    for speed in speeds:
        guess: float | None = None
        for count in sorted(counts):
            whole = None if guess is None else round(guess * count)
            answers.append(replicas_needed(Work(speed), count, replica, link, limits, guess=whole))
            on_answer(answers[-1])
            needed = answers[-1].replicas
            guess = None if needed is None or needed < 3 else needed / count
    return answers


def _search(
    observe: Callable[[int], Observed], enough: Callable[[Observed], bool], guess: int, *, most: int
) -> tuple[int | None, Observed]:
    """The smallest sufficient number, searched on both sides of a guess; None if ``most`` is insufficient."""
    low, high = 0, min(guess, most)
    found = observe(high)
    if enough(found):
        while high > 1:
            tried = observe(lower := min(high - 1, math.floor(high / 1.1)))
            if not enough(tried):
                low = lower
                break
            high, found = lower, tried
    else:
        while not enough(found):
            if high >= most:
                return None, found
            low, high = high, min(max(high + 1, math.ceil(1.1 * high)), most)
            found = observe(high)
    while high - low > max(1, math.floor(0.02 * high)):
        middle = (low + high) // 2
        tried = observe(middle)
        low, high, found = (low, middle, tried) if enough(tried) else (middle, high, found)
    return high, found


def with_model(replica: Replica, *, fixed: float | None, rate: float | None) -> Replica:
    """The calibration with a model of another speed."""
    changes = {name: value for name, value in (("fixed", fixed), ("rate", rate)) if value is not None}
    return replace(replica, **changes)
