"""The request queue: composition and order of batches, and a full queue."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from torchrl_llm_kl.service import ServiceClosedError, ServiceOverloaded, ServiceTimeout
from torchrl_llm_kl.service._errors import ReplicaGone
from torchrl_llm_kl.service._wire import Reply, Request, Settings
from torchrl_llm_kl.service.replica._batcher import Batcher
from waits import LONG


def request(tag: int, *, tokens: int = 3, caller: str = "a", deaths: int = 0) -> Request:
    ids = torch.full((tokens,), tag)
    made = Request.of(ids, torch.tensor([tokens]), None, Settings(), version=None, caller=caller)
    return replace(made, deaths=deaths)


class Recorder:
    """Answers each request with its tag, and records the batches."""

    def __init__(self, seconds: float = 0.0, fails: Sequence[int] = ()) -> None:
        self.seconds, self.fails, self.batches = seconds, set(fails), []
        self.threads: set[str] = set()

    def __call__(self, requests: Sequence[Request]) -> list[Reply | Exception]:
        time.sleep(self.seconds)
        self.threads.add(threading.current_thread().name)
        tags = [int(r.tokens[0]) for r in requests]
        self.batches.append(tags)
        return [
            ValueError(f"bad {tag}") if tag in self.fails else Reply(np.full(2, float(tag), np.float32), None, 0)
            for tag in tags
        ]


async def ask(batcher: Batcher, *requests: Request, timeout: float = LONG) -> list[object]:
    return await asyncio.gather(*(batcher.submit(r, timeout=timeout) for r in requests), return_exceptions=True)


def run(recorder: Recorder, *requests: Request, **settings: float) -> list[object]:
    async def main() -> list[object]:
        batcher = Batcher(recorder, **{"max_wait": 0.05, **settings})
        answers = await ask(batcher, *requests)
        await batcher.close()
        return answers

    return asyncio.run(main())


def tags_of(answers: list[object]) -> list[float]:
    return [float(answer.log_prob[0]) for answer in answers]


def test_concurrent_requests_share_one_batch_and_a_bad_one_fails_alone() -> None:
    recorder = Recorder(fails=[1])
    bad, *answers = run(recorder, *(request(i, caller=str(i)) for i in (1, 0, *range(2, 8))))
    assert tags_of(answers) == [0, *range(2, 8)]
    assert (type(bad), str(bad)) == (ValueError, "bad 1")
    assert [sorted(batch) for batch in recorder.batches] == [list(range(8))]
    assert recorder.threads == {"scoring_0"}


def test_round_robin_over_callers_oldest_first() -> None:
    recorder = Recorder()
    greedy = [request(i, tokens=10, caller="greedy") for i in range(4)]
    run(recorder, *greedy, request(9, tokens=10, caller="modest"), max_tokens=20)
    assert recorder.batches == [[0, 9], [1, 2], [3]]


def test_no_wait_when_all_recent_callers_are_in() -> None:
    async def main() -> list[list[int]]:
        recorder = Recorder()
        batcher = Batcher(recorder, max_wait=0.2)
        await ask(batcher, request(0, caller="a"))  # the only caller so far
        await ask(batcher, request(1, caller="b"))
        batcher._max_wait = 2 * LONG
        await asyncio.wait_for(ask(batcher, request(2, caller="a"), request(3, caller="b")), LONG)
        await batcher.close()
        return recorder.batches

    assert asyncio.run(main()) == [[0], [1], [2, 3]]


def test_recent_callers_are_waited_for() -> None:
    async def main() -> list[list[int]]:
        recorder = Recorder()
        batcher = Batcher(recorder, max_wait=0.3)
        for caller in "abc":
            batcher.expect(caller)
        late = asyncio.get_running_loop().call_later
        tasks: list[asyncio.Task[object]] = []
        for i, caller in enumerate("abc"):
            late(
                0.05 * i,
                lambda i=i, caller=caller: tasks.append(asyncio.ensure_future(ask(batcher, request(i, caller=caller)))),
            )
        await asyncio.sleep(0.25)
        await asyncio.gather(*tasks)
        await batcher.close()
        return recorder.batches

    assert asyncio.run(main()) == [[0, 1, 2]]


def test_a_request_above_max_tokens_is_a_batch_of_its_own() -> None:
    recorder = Recorder()
    answers = run(recorder, request(0, tokens=50), request(1), request(2), max_tokens=10)
    assert tags_of(answers) == [0, 1, 2]
    assert recorder.batches == [[0], [1, 2]]


def test_a_full_queue_makes_callers_wait_until_their_timeout() -> None:
    async def main() -> tuple[list[object], list[object]]:
        batcher = Batcher(Recorder(seconds=0.3), max_wait=0.0, max_queue=2, max_tokens=3)
        impatient = asyncio.gather(*(batcher.submit(request(i), timeout=0.1) for i in range(6)), return_exceptions=True)
        first = await impatient
        patient = await ask(batcher, *(request(i) for i in range(4)))
        await batcher.close()
        return first, patient

    first, patient = asyncio.run(main())
    refused = [answer for answer in first if isinstance(answer, ServiceOverloaded)]
    assert 1 <= len(refused) < 6
    assert "2 requests are waiting, as many as max_queue allows" in str(refused[0])
    assert all(isinstance(answer, (Reply, ServiceOverloaded, ServiceTimeout)) for answer in first)
    assert tags_of(patient) == [0, 1, 2, 3]


def test_a_full_queue_admits_callers_with_nothing_in_it_first() -> None:
    async def main() -> int:
        recorder = Recorder(seconds=0.02)
        batcher = Batcher(recorder, max_wait=0.0, max_queue=4, max_tokens=6)
        greedy = asyncio.gather(*(batcher.submit(request(i, caller="greedy"), timeout=30) for i in range(60)))
        await asyncio.sleep(0.01)
        start = len(recorder.batches)
        await batcher.submit(request(99, caller="modest"), timeout=30)
        waited = len(recorder.batches) - start
        await greedy
        await batcher.close()
        return waited

    assert asyncio.run(main()) <= 3


def test_a_request_after_a_death_is_announced_and_shares_no_batch() -> None:
    recorder, announced = Recorder(), []

    async def main() -> list[object]:
        batcher = Batcher(recorder, on_trial=lambda r: announced.append((int(r.tokens[0]), list(recorder.batches))))
        requests = [request(0, caller="a"), request(7, caller="b", deaths=1), request(8, caller="c", deaths=2)]
        return await ask(batcher, *requests, request(1, caller="d"), request(2, caller="b"))

    assert tags_of(asyncio.run(main())) == [0, 7, 8, 1, 2]
    assert recorder.batches == [[0, 1, 2], [7], [8]]
    assert announced == [(7, [[0, 1, 2]]), (8, [[0, 1, 2], [7]])]


@pytest.mark.parametrize(
    ("error", "text"),
    [(SystemExit("enough"), "the model raised SystemExit: enough."), (MemoryError("no room"), "no room")],
    ids=["exit", "memory"],
)
def test_an_error_of_the_model_reaches_all_callers_of_its_batch(error: BaseException, text: str) -> None:
    def score(requests: Sequence[Request]) -> list[Reply | Exception]:
        if requests[0].tokens[0] == 0:
            raise error
        return Recorder()(requests)

    async def main() -> list[object]:
        batcher = Batcher(score)
        return [*await ask(batcher, request(0), request(0, caller="b")), *await ask(batcher, request(1))]

    *failed, after = asyncio.run(main())
    assert [str(answer) for answer in failed] == [text, text]
    assert isinstance(after, Reply)


def test_a_replica_that_hangs_passes_its_queue_on() -> None:
    """Rejected from the watchdog's thread: what waits gets the error at once, and so do later requests; the batch goes on."""
    hangs, enough = threading.Event(), threading.Event()

    def hang(requests: Sequence[Request]) -> list[Reply | Exception]:
        hangs.set()
        enough.wait()
        return Recorder()(requests)

    async def main() -> list[object]:
        batcher = Batcher(hang, max_wait=0.0, max_tokens=3, max_queue=2)
        asked = [asyncio.ensure_future(batcher.submit(request(i), timeout=60)) for i in range(5)]
        await asyncio.to_thread(hangs.wait)
        await asyncio.to_thread(batcher.reject_soon, ReplicaGone("it hangs"))
        waiting = await asyncio.gather(*asked[1:], return_exceptions=True)
        late = await ask(batcher, request(7))
        assert not asked[0].done()
        enough.set()
        return [*waiting, *late, await asked[0]]

    *gone, first = asyncio.run(main())
    assert [(type(answer), str(answer)) for answer in gone] == [(ReplicaGone, "it hangs")] * 5
    assert isinstance(first, Reply)


@pytest.mark.parametrize("what", ["on_trial", "on_batch", "replies"])
def test_a_fault_of_the_batcher_ends_one_batch(what: str) -> None:
    def fail(*_: object) -> list[Reply | Exception]:
        raise RuntimeError("a fault")

    async def main() -> list[object]:
        options = {} if what == "replies" else {what: fail}
        recorder = (lambda requests: Recorder()(requests)[1:]) if what == "replies" else Recorder()
        batcher = Batcher(recorder, **options)
        first = await ask(batcher, request(0, deaths=1))
        batcher._score, batcher._on_trial = Recorder(), lambda request: None
        return [*first, *await ask(batcher, request(1), request(2))]

    first, *others = asyncio.run(main())
    assert isinstance(first, Reply if what == "on_batch" else (RuntimeError, ValueError))
    assert tags_of(others) == [1, 2]


def test_an_ill_formed_request_fails_alone() -> None:
    bad = [replace(request(1), caller=["a"]), replace(request(1), deaths="2"), replace(request(1), lengths=None)]
    recorder = Recorder()
    answers = run(recorder, request(0), *bad, request(2))
    assert tags_of([answers[0], answers[-1]]) == [0, 2]
    assert all(isinstance(answer, (TypeError, AttributeError)) for answer in answers[1:-1])
    assert [sorted(batch) for batch in recorder.batches] == [[0, 2]]


def test_close_refuses_waiting_and_later_requests() -> None:
    async def main() -> list[object]:
        batcher = Batcher(Recorder(seconds=0.2), max_wait=0.0, max_tokens=3)
        waiting = asyncio.gather(*(batcher.submit(request(i), timeout=5) for i in range(3)), return_exceptions=True)
        await asyncio.sleep(0.1)
        await batcher.close()
        late = await ask(batcher, request(7))
        return [*await waiting, *late]

    answers = asyncio.run(main())
    assert isinstance(answers[0], Reply)
    assert all(isinstance(answer, ServiceClosedError) for answer in answers[1:])


@pytest.mark.parametrize("name", ["max_tokens", "max_queue"])
def test_limits_out_of_range(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Batcher(Recorder(), **{name: 0})
