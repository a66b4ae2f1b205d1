"""The fair queue: shares of callers, waiting times, and requests that share no batch."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings, strategies as st

from torchrl_llm_kl.service.replica._fair import FairQueue, Job

quick = settings(max_examples=40, deadline=None)
BUDGET, QUANTUM, UNIT = 6400, 100, 400


def job(caller: str, *sizes: int, alone: bool = False) -> Job:
    return Job(caller, sizes, alone=alone)


def taken(batch: dict[Job, list[int]]) -> dict[str, int]:
    """Tokens of each caller."""
    found: Counter[str] = Counter()
    for each, units in batch.items():
        found[each.caller] += sum(each.sizes[unit] for unit in units)
    return dict(found)


# ------------------------------------------------------------------ shares

CALLERS = st.lists(st.lists(st.integers(1, UNIT), min_size=1, max_size=12), min_size=1, max_size=12)


@quick
@given(CALLERS, st.integers(1, 2 * BUDGET), st.integers(1, 2 * UNIT))
def test_everything_is_taken_once_in_order_and_in_full_batches(
    sizes: list[list[int]], budget: int, quantum: int
) -> None:
    queue: FairQueue[Job] = FairQueue(quantum)
    jobs = [job(str(i % 5), *units) for i, units in enumerate(sizes)]
    for each in jobs:
        queue.add(each)
    order: dict[Job, list[int]] = defaultdict(list)
    finished: list[Job] = []
    for _ in range(sum(map(len, sizes))):  # each batch takes at least one unit
        before = queue.tokens
        batch = queue.take(budget)
        size = sum(taken(batch).values())
        assert queue.tokens == before - size
        assert size <= budget or sum(map(len, batch.values())) == 1
        for each, units in batch.items():
            order[each] += units
            finished += [each] * (not each.todo)
    assert not len(queue)
    assert queue.tokens == 0
    assert not queue.callers
    assert all(order[each] == list(range(len(each.sizes))) for each in jobs)
    for caller in map(str, range(5)):  # first come, first served
        assert [j for j in finished if j.caller == caller] == [j for j in jobs if j.caller == caller]


@quick
@given(CALLERS, st.integers(1, BUDGET))
def test_callers_that_always_wait_differ_by_a_quantum_and_a_unit(sizes: list[list[int]], budget: int) -> None:
    """Each repeats its sizes for ever. The bound holds after every batch."""
    queue: FairQueue[Job] = FairQueue(QUANTUM)
    for i, units in enumerate(sizes):
        queue.add(job(str(i), *(units * (40 * UNIT // sum(units) + 1))))
    done: Counter[str] = Counter({str(i): 0 for i in range(len(sizes))})
    for _ in range(200):
        done.update(taken(queue.take(budget)))
        if len(queue) < len(sizes):
            break
        assert max(done.values()) - min(done.values()) <= QUANTUM + max(map(max, sizes))


@quick
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, UNIT)), max_size=60), st.integers(1, UNIT))
def test_nobody_starves(arrivals: list[tuple[int, int]], size: int) -> None:
    """Others come between all batches, and greedy ones always wait: a request is taken after its share of turns."""
    queue: FairQueue[Job] = FairQueue(QUANTUM)
    for greedy in range(3):
        queue.add(job(f"greedy{greedy}", *[UNIT] * 10_000))
    queue.take(BUDGET)
    mine = job("mine", size)
    queue.add(mine)
    turns = -(-size // QUANTUM)
    # Per turn: a quantum of each of the others, once more for a caller that had none; and a unit that waits for its credit.
    bound = (turns + 1) * 7 * 2 * QUANTUM + 7 * UNIT
    waited = 0
    for caller, tokens in [*arrivals, *[(0, 1)] * 1000]:
        queue.add(job(f"other{caller}", *[tokens] * 3))
        waited += sum(taken(queue.take(UNIT)).values())
        if not mine.todo:
            break
    assert waited <= bound


def test_a_new_caller_is_first_once() -> None:
    queue: FairQueue[Job] = FairQueue(QUANTUM)
    for i in range(64):
        queue.add(job(f"old{i}", *[100] * 100))
    assert len(taken(queue.take(BUDGET))) == 64
    queue.add(job("new", 50))
    assert next(iter(taken(queue.take(300)))) == "new"
    queue.add(job("new", 50))  # at once again: after the others' turns
    batches = [taken(queue.take(600)) for _ in range(11)]
    assert ["new" in batch for batch in batches] == [False] * 10 + [True]


def test_requests_alone_come_after_those_that_wait() -> None:
    queue: FairQueue[Job] = FairQueue(QUANTUM)
    first, second = job("a", 30, 30, alone=True), job("a", 30, alone=True)
    for each in (first, second, job("a", 40), job("b", 40), job("c", 40)):
        queue.add(each)
    assert taken(queue.take(BUDGET)) == {"a": 40, "b": 40, "c": 40}
    queue.add(job("d", 40))
    batches = [queue.take(BUDGET) for _ in range(3)]
    assert [list(map(id, batch)) for batch in batches[1:]] == [[id(first)], [id(second)]]
    assert taken(batches[0]) == {"d": 40}
    assert not len(queue)


@quick
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(1, 300)), min_size=1, max_size=30))
def test_a_batch_is_shared_or_of_one_job(jobs: list[tuple[int, bool, int]]) -> None:
    queue: FairQueue[Job] = FairQueue(QUANTUM)
    for caller, alone, size in jobs:
        queue.add(job(str(caller), size, size, alone=alone))
    for _ in range(2 * len(jobs)):
        batch = queue.take(BUDGET)
        assert len(batch) == 1 or not any(each.alone for each in batch)
    assert not len(queue)


def test_removed_jobs_are_not_taken() -> None:
    queue: FairQueue[Job] = FairQueue(QUANTUM)
    large = job("large", *[UNIT] * 50)
    queue.add(large)
    queue.add(job("small", 10))
    queue.take(BUDGET)
    assert queue.remove(lambda each: each is large) == [large]
    assert (len(queue), queue.tokens, queue.take(BUDGET)) == (0, 0, {})


# ------------------------------------------------------------------ waiting times


def waits(large: int, small: int, *, seconds: float = 400.0, tokens: int = 60) -> list[float]:
    """Seconds from request to answer of small callers, beside callers that always have a large request.

    A batch of ``BUDGET`` tokens takes one second. Small callers ask again 0.1 to 2 s after each answer.
    """
    queue: FairQueue[Job] = FairQueue(QUANTUM)
    for i in range(large):
        queue.add(job(f"large{i}", *[UNIT] * 10**5))
    pauses = itertools.cycle([0.1, 0.7, 2.0, 0.3, 1.3])
    due = [(next(pauses), i) for i in range(small)]
    heapq.heapify(due)
    asked: dict[Job, float] = {}
    found, now = [], 0.0
    while now < seconds:
        while due and due[0][0] <= now:
            at, i = heapq.heappop(due)
            each = job(f"small{i}", tokens)
            asked[each] = at
            queue.add(each)
        batch = queue.take(BUDGET)
        now = now + sum(taken(batch).values()) / BUDGET if batch else due[0][0]
        for each in batch:
            if each in asked:
                found.append(now - asked.pop(each))
                heapq.heappush(due, (now + next(pauses), int(each.caller.removeprefix("small"))))
    return sorted(found)


@pytest.mark.parametrize(("large", "small", "tokens"), [(1, 31, 180), (16, 16, 60), (1, 1, 3000)])
def test_small_callers_wait_at_most_three_batches(large: int, small: int, tokens: int) -> None:
    found = waits(large, small, tokens=tokens)
    p50, p99 = (found[int(share * len(found))] for share in (0.5, 0.99))
    print(
        f"{large} large and {small} small callers of {tokens} tokens: p50 {p50:.2f}, p99 {p99:.2f}, max {found[-1]:.2f}"
    )
    assert len(found) > 100
    assert p99 <= 3.0
