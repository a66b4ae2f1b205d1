"""Collectors and replicas as a discrete-event simulation.

Collectors are closed-loop clients: each generates for a while, requests scores, and waits for the reply. Replicas collect
requests as the service's batcher does. A collector has one request at a time, so that fair turns over callers are oldest
first, but for the pieces of large requests, which go behind those that wait.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

Draw = Callable[[Random], float]


@dataclass(frozen=True)
class Replica:
    """Duration and composition of a batch.

    Args:
        fixed: seconds per batch.
        each: further seconds per request in it.
        rate: tokens per second on top.
        max_wait: seconds that the oldest request waits for all recent callers.
        lately: seconds for which a caller is recent.
        max_tokens: per batch; a larger piece gets a separate batch.
        piece: tokens of the pieces in which a larger request is scored.
    """

    fixed: float
    each: float
    rate: float
    max_wait: float = 0.0
    lately: float = 10.0
    max_tokens: float = 65536
    piece: float = math.inf

    def seconds(self, requests: int, tokens: float) -> float:
        """Seconds that a batch takes."""
        return self.fixed + self.each * requests + tokens / self.rate


@dataclass(frozen=True)
class World:
    """Collectors, replicas and requests.

    Args:
        collectors: their number.
        think: seconds between a reply and the next request.
        tokens: per request.
        replicas: their number.
        replica: parameters of each.
        link: total seconds that a request spends outside queue and model.
        prompts: distinct prompts per request; the sequences of each prompt go to one replica.
    """

    collectors: int
    think: Draw
    tokens: Draw
    replicas: int
    replica: Replica
    link: Draw = lambda random: 0.0
    prompts: int = 1


@dataclass(frozen=True)
class Observed:
    """Events after the warm-up.

    Args:
        seconds: simulated.
        latencies: of each answered request, in order of the replies.
        thought: seconds that collectors generated before these requests.
        batches: requests and tokens of each batch.
        busy: mean share of a replica's time in the model.
        waiting: requests without a reply at the end.
        asked: requests since the start.
        answered: replies since the start.
    """

    seconds: float
    latencies: list[float]
    thought: float
    batches: list[tuple[int, float]]
    busy: float
    waiting: int
    asked: int
    answered: int

    @property
    def throughput(self) -> float:
        """Requests per second."""
        return len(self.latencies) / self.seconds

    @property
    def latency(self) -> float:
        """Mean latency."""
        return sum(self.latencies) / len(self.latencies)

    def quantile(self, share: float) -> float:
        """A quantile of the latencies."""
        return quantile(self.latencies, share)

    @property
    def lost(self) -> float:
        """Share of a collector's time spent waiting for scores."""
        return sum(self.latencies) / (sum(self.latencies) + self.thought)


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile of the values: one of them, the next larger where it falls between two."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def simulate(world: World, *, requests: int, warm_up: int = 0, seed: int = 0) -> Observed:
    """Run until ``requests`` are answered after the first ``warm_up``."""
    return _Simulation(world, seed).run(requests, warm_up)


@dataclass
class _Request:
    collector: int
    asked: float
    thought: float
    way_back: float
    parts: int


@dataclass(slots=True)
class _Part:
    arrived: float
    left: float  # tokens in no batch yet
    request: _Request


class _State:
    """State of one replica."""

    __slots__ = ("busy", "seen", "tokens", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[_Part] = deque()
        self.seen: dict[int, float] = {}  # time of each caller's last request, latest last
        self.tokens = 0.0
        self.busy = False


class _Simulation:
    def __init__(self, world: World, seed: int) -> None:
        self.world, self.random = world, Random(seed)
        self.now, self.busy = 0.0, 0.0
        self.asked = 0
        self.batches: list[tuple[int, float]] = []
        self.answers: list[_Request] = []
        self.latencies: list[float] = []
        self._queue: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._number = itertools.count()
        self._states = [_State() for _ in range(world.replicas)]
        for collector in range(world.collectors):  # at a random point of generation, not all at its start
            thought = world.think(self.random)
            self._at(self.random.random() * thought, self._ask, collector, thought)

    def run(self, requests: int, warm_up: int) -> Observed:
        while len(self.answers) < warm_up:
            self._next()
        start, busy, batches = self.now, self.busy, len(self.batches)
        while len(self.answers) < warm_up + requests:
            self._next()
        return Observed(
            self.now - start,
            self.latencies[warm_up:],
            sum(request.thought for request in self.answers[warm_up:]),
            self.batches[batches:],
            (self.busy - busy) / (self.now - start) / self.world.replicas if self.now > start else 0.0,
            self.asked - len(self.answers),
            self.asked,
            len(self.answers),
        )

    def _at(self, when: float, act: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._queue, (when, next(self._number), act, args))

    def _next(self) -> None:
        self.now, _, act, args = heapq.heappop(self._queue)
        act(*args)

    # ------------------------------------------------------------------ events

    def _ask(self, collector: int, thought: float) -> None:
        world, random = self.world, self.random
        self.asked += 1
        link = world.link(random)
        tokens = world.tokens(random)
        shares: dict[int, int] = {}  # the hash of each prompt selects its replica
        for _ in range(world.prompts):
            replica = random.randrange(world.replicas)
            shares[replica] = shares.get(replica, 0) + 1
        request = _Request(collector, self.now, thought, link / 2, len(shares))
        for replica, prompts in shares.items():
            self._at(self.now + link / 2, self._arrive, replica, tokens * prompts / world.prompts, request)

    def _arrive(self, replica: int, tokens: float, request: _Request) -> None:
        state = self._states[replica]
        state.waiting.append(_Part(self.now, tokens, request))
        state.tokens += tokens
        state.seen.pop(request.collector, None)
        state.seen[request.collector] = self.now
        if len(state.waiting) == 1 or self._complete(state):  # otherwise checked before
            self._consider(state)

    def _complete(self, state: _State) -> bool:
        """Whether all recent callers are in, or the batch is full."""
        since, seen = self.now - self.world.replica.lately, state.seen
        while seen and next(iter(seen.values())) <= since:
            del seen[next(iter(seen))]
        return len(seen) <= len(state.waiting) or state.tokens >= self.world.replica.max_tokens

    def _consider(self, state: _State) -> None:
        """Start a batch if the oldest request has waited long enough or all recent callers are in."""
        if state.busy or not state.waiting:
            return
        due = state.waiting[0].arrived + self.world.replica.max_wait
        if self.now < due and not self._complete(state):
            self._at(due, self._consider, state)
            return
        limit = self.world.replica.max_tokens
        batch: dict[int, _Part] = {}
        tokens = 0.0
        while state.waiting:
            size = min(state.waiting[0].left, self.world.replica.piece)
            if batch and tokens + size > limit:
                break
            part = state.waiting.popleft()
            batch[id(part)] = part
            part.left -= size
            tokens += size
            if part.left > 0:
                state.waiting.append(part)
        state.tokens -= tokens
        state.busy = True
        seconds = self.world.replica.seconds(len(batch), tokens)
        self.batches.append((len(batch), tokens))
        done = [part for part in batch.values() if part.left <= 0]
        self._at(self.now + seconds, self._finish, state, done, seconds)

    def _finish(self, state: _State, done: list[_Part], seconds: float) -> None:
        self.busy += seconds
        state.busy = False
        for part in done:
            part.request.parts -= 1
            if part.request.parts == 0:
                self._at(self.now + part.request.way_back, self._answer, part.request)
        self._consider(state)

    def _answer(self, request: _Request) -> None:
        self.answers.append(request)
        self.latencies.append(self.now - request.asked)
        thought = self.world.think(self.random)
        self._at(self.now + thought, self._ask, request.collector, thought)
