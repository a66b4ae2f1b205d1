"""The queue of a replica: which requests share a batch, who waits for whom, and errors that end one batch."""

import asyncio
import threading

import numpy as np
import pytest

from load import job_of
from torchrl_llm_kl.service import ServiceError
from torchrl_llm_kl.service._core import Batcher
from torchrl_llm_kl.service._messages import Reply
from waits import LONG


def job(tag, tokens=2, caller="a"):
    return job_of([[tag, *[0] * (tokens - 1)]], caller=caller)


def tag_of(one):
    return int(one.request.tokens.values[0])


class Recorder:
    """A scorer that answers each request with its first token, or with an error if it is among ``fails``."""

    def __init__(self, fails=()):
        self.fails, self.batches = fails, []

    def __call__(self, jobs):
        self.batches.append([tag_of(one) for one in jobs])
        replies = [Reply(columns={"log_prob": np.array([float(tag)])}, version=0) for tag in self.batches[-1]]
        pairs = zip(self.batches[-1], replies, strict=True)
        return [ValueError(f"bad {tag}") if tag in self.fails else reply for tag, reply in pairs]


def queue(score, **settings):
    return Batcher(score, **{"max_tokens": 1000, "max_wait": 0.05, **settings})


async def ask(batcher, *jobs, by_itself=()):
    calls = [batcher.submit(one, by_itself=tag_of(one) in by_itself) for one in jobs]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    return [answer if isinstance(answer, Exception) else int(answer["columns"]["log_prob"][0]) for answer in answers]


@pytest.mark.parametrize(
    ("tokens", "most", "batches"),
    [([10, 10, 10, 10], "20", [[0, 1], [2, 3]]), ([50, 2, 2], 10, [[0], [1, 2]]), ([6, 6, 3, 3], 12, [[0, 1], [2, 3]])],
)
async def test_batches_are_taken_in_the_order_of_arrival(tokens, most, batches):
    """A request above ``max_tokens`` is a batch of its own. A configuration file may hold the number as text."""
    recorder = Recorder()
    jobs = [job(tag, tokens=count) for tag, count in enumerate(tokens)]
    assert await ask(queue(recorder, max_tokens=most), *jobs) == list(range(len(jobs)))
    assert recorder.batches == batches


def test_a_setting_that_is_no_number_is_refused_at_the_start():
    """It would end the loop of the queue at the first request, which nobody would answer then."""
    for wrong in ({"max_wait": "soon"}, {"max_tokens": "many"}):
        with pytest.raises(ValueError, match=r"soon|many"):
            queue(Recorder(), **wrong)


async def test_recent_callers_are_waited_for_and_nobody_else():
    recorder = Recorder()
    batcher = queue(recorder, max_wait=2 * LONG)
    await asyncio.wait_for(ask(batcher, job(0, caller="a")), LONG)  # the only caller so far
    batcher.max_wait = 0.2
    await ask(batcher, job(1, caller="b"))  # "a" does not come
    batcher.max_wait = 2 * LONG

    async def late():
        await asyncio.sleep(0.05)
        return await ask(batcher, job(3, caller="b"))

    both = asyncio.gather(ask(batcher, job(2, caller="a")), late())
    assert await asyncio.wait_for(both, LONG) == [[2], [3]]
    assert recorder.batches == [[0], [1], [2, 3]]


async def test_requests_that_share_no_batch():
    recorder = Recorder()
    assert await ask(queue(recorder), *(job(tag) for tag in range(4)), by_itself=(1, 3)) == [0, 1, 2, 3]
    assert recorder.batches == [[0, 2], [1], [3]]


async def test_a_request_whose_client_gave_up_is_not_scored():
    recorder, running, go_on = Recorder(), threading.Event(), threading.Event()

    def score(jobs):
        running.set()
        go_on.wait(LONG)
        return recorder(jobs)

    batcher = queue(score)
    first = asyncio.ensure_future(ask(batcher, job(0)))
    while not running.is_set():
        await asyncio.sleep(0.01)
    given_up, last = (asyncio.ensure_future(batcher.submit(job(tag))) for tag in (1, 2))
    await asyncio.sleep(0)
    given_up.cancel()
    go_on.set()
    assert await first == [0]
    assert (await last)["columns"]["log_prob"] == 2
    assert recorder.batches == [[0], [2]]


async def test_errors_do_not_count_as_answers():
    """A model that only fails is probed. Python takes no ``StopIteration`` as the exception of a future."""
    fails = {"all": True}
    recorder = Recorder(fails=[1])
    batcher = queue(lambda jobs: [StopIteration("over")] * len(jobs) if fails["all"] else recorder(jobs))
    before = batcher.last_answer
    (error,) = await ask(batcher, job(0))
    assert (type(error), str(error.__cause__)) == (RuntimeError, "over")
    assert (batcher.last_answer, batcher.answered) == (before, 1)
    fails["all"] = False
    bad, good = await ask(batcher, job(1), job(2))
    assert (type(bad), str(bad), good) == (ValueError, "bad 1", 2)
    assert batcher.last_answer > before


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (SystemExit("enough"), ServiceError, "the model raised SystemExit: enough."),
        (MemoryError("no room"), MemoryError, "no room"),
    ],
    ids=["exit", "memory"],
)
async def test_an_error_of_the_model_reaches_all_callers_of_its_batch_and_ends_there(error, kind, text):
    def score(jobs):
        if any(tag_of(one) == 0 for one in jobs):
            raise error
        return Recorder()(jobs)

    batcher = queue(score)
    errors = await ask(batcher, job(0, caller="a"), job(1, caller="b"))
    assert [(type(each), str(each)) for each in errors] == [(kind, text)] * 2
    assert await ask(batcher, job(2)) == [2]
