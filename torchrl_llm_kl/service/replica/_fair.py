"""A fair queue: deficit round-robin over callers, by tokens. Independent of requests, Ray and clocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torchrl_llm_kl._numerics import check_range


@dataclass(eq=False)
class Job:
    """Work of one caller, in units that are done as a whole; units of one job may be in different batches."""

    caller: str
    sizes: Sequence[int]  # tokens of each unit
    alone: bool = False  # whether its batches hold nothing else
    todo: deque[int] = field(default_factory=deque)  # units that are in no batch yet, by default all

    def __post_init__(self) -> None:
        self.todo = self.todo or deque(range(len(self.sizes)))

    @property
    def tokens(self) -> int:
        """Of the units in no batch yet."""
        return sum(self.sizes[unit] for unit in self.todo)


J = TypeVar("J", bound=Job)


@dataclass(eq=False)
class _Flow(Generic[J]):
    """What one caller waits for: jobs that share batches, or those that do not."""

    alone: bool
    jobs: deque[J] = field(default_factory=deque)
    credit: int = 0  # tokens that it may take in this turn
    in_turn: bool = False  # whether this turn's quantum is part of the credit


class FairQueue(Generic[J]):
    """Jobs of many callers, taken in batches of limited size.

    Callers have turns. A turn adds ``quantum`` tokens to a caller's credit and takes units, oldest job first, while the
    credit lasts; the rest is kept until the next turn, and lost when the caller has no more jobs. A turn continues in the
    next batch where a batch is full. So between two callers that always have jobs, the tokens taken differ by at most
    one quantum and one unit, counted from the start, however large a job is.

    A caller without earlier jobs has its first turn before the others; it must wait for its next one until all others had
    theirs (as in fq_codel, RFC 8290, section 4.2). Jobs that are ``alone`` get no such first turn.

    Args:
        quantum: tokens per turn.

    Example:
        >>> queue: FairQueue[Job] = FairQueue(quantum=10)
        >>> large, small = Job("a", sizes=[10] * 5), Job("b", sizes=[4])
        >>> queue.add(large), queue.add(small)
        (None, None)
        >>> [[(job.caller, units) for job, units in queue.take(30).items()] for _ in range(2)]
        [[('a', [0, 1]), ('b', [0])], [('a', [2, 3, 4])]]
    """

    def __init__(self, quantum: int) -> None:
        check_range(1, quantum=quantum)
        self.quantum = quantum
        self._flows: dict[tuple[str, bool], _Flow[J]] = {}
        self._new: deque[tuple[str, bool]] = deque()  # flows before their first turn, then the others
        self._old: deque[tuple[str, bool]] = deque()
        self._tokens = 0

    def __len__(self) -> int:
        """Number of jobs with units in no batch yet."""
        return sum(len(flow.jobs) for flow in self._flows.values())

    def __iter__(self) -> Iterator[J]:
        return (job for flow in self._flows.values() for job in flow.jobs)

    @property
    def tokens(self) -> int:
        """Of all units in no batch yet."""
        return self._tokens

    @property
    def callers(self) -> set[str]:
        """Callers with jobs."""
        return {caller for (caller, _), flow in self._flows.items() if flow.jobs}

    def add(self, job: J) -> None:
        """Append a job to those of its caller. It may be one whose units were taken before, and must be done again."""
        key = (job.caller, job.alone)
        if key not in self._flows:
            self._flows[key] = _Flow(job.alone)
            (self._old if job.alone else self._new).append(key)
        self._flows[key].jobs.append(job)
        self._tokens += job.tokens

    def remove(self, unwanted: Callable[[J], bool]) -> list[J]:
        """Remove jobs and return them."""
        found = [job for job in self if unwanted(job)]
        gone = set(found)
        for flow in self._flows.values():
            flow.jobs = deque(job for job in flow.jobs if job not in gone)
        self._tokens -= sum(job.tokens for job in found)
        return found

    def take(self, budget: int) -> dict[J, list[int]]:
        """The jobs of the next batch, and the units that it takes of each: of ``budget`` tokens, or of one larger unit."""
        batch: dict[J, list[int]] = {}
        room, lonely = budget, False
        while self._new or self._old:
            ring = self._new or self._old
            flow = self._flows[ring[0]]
            if not flow.jobs:
                self._end_turn(ring, flow)
                continue
            job = flow.jobs[0]
            size = job.sizes[job.todo[0]]
            if batch and (size > room or ((lonely or flow.alone) and job not in batch)):
                break
            if not flow.in_turn:
                flow.credit, flow.in_turn = flow.credit + self.quantum, True
            if size > flow.credit:
                self._end_turn(ring, flow)
                continue
            batch.setdefault(job, []).append(job.todo.popleft())
            room, flow.credit, lonely = room - size, flow.credit - size, flow.alone
            if not job.todo:
                flow.jobs.popleft()
        self._tokens -= sum(job.sizes[unit] for job, units in batch.items() for unit in units)
        return batch

    def _end_turn(self, ring: deque[tuple[str, bool]], flow: _Flow[J]) -> None:
        """Move the flow in front to the end. One without jobs leaves: after a first turn, only when its next one comes."""
        key = ring.popleft()
        flow.in_turn = False
        if not flow.jobs:
            flow.credit = 0
        if flow.jobs or ring is self._new:
            self._old.append(key)
        else:
            del self._flows[key]
