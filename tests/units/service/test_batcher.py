"""The request queue: shares of callers, composition and order of batches, large requests in pieces, and a full queue."""

import asyncio
import heapq
import itertools
import threading
import time
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close

from load import assert_same, record_of, request_of
from remote_models import model
from torchrl_llm_kl import LogProbScorer, Ragged, ScoreRequest
from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.service import PoisonedRequest, ServiceClosedError
from torchrl_llm_kl.service._errors import ReplicaGone, ServiceTimeout
from torchrl_llm_kl.service._wire import Reply, Request
from torchrl_llm_kl.service.engines._engine import TransformersEngine
from torchrl_llm_kl.service.replica._batcher import Batcher
from torchrl_llm_kl.service.replica._core import ScoringCore
from torchrl_llm_kl.service.replica._fair import FairQueue, Job
from torchrl_llm_kl.service.replica._pieces import Pieces
from waits import LONG

quick = settings(max_examples=40, deadline=None)
sent = partial(request_of, caller="a")


def request(tag, *, tokens=3, caller="a"):
    return sent([[tag] * tokens], caller=caller)


def first_token(asked):
    return int(asked.scored.tokens.values[0])


class Recorder:
    """Answers each request with its tag, and records the batches."""

    def __init__(self, seconds=0.0, fails=()):
        self.seconds, self.fails, self.batches, self.threads = seconds, set(fails), [], set()

    def __call__(self, requests):
        time.sleep(self.seconds)
        self.threads.add(threading.current_thread().name)
        tags = [first_token(each) for each in requests]
        self.batches.append(tags)
        return [
            ValueError(f"bad {tag}")
            if tag in self.fails
            else Reply({"log_prob": torch.full((int(each.scored.mask.sum()),), float(tag))}, 0)
            for tag, each in zip(tags, requests, strict=True)
        ]


async def ask(batcher, *requests, timeout=LONG, trials=()):
    """``trials`` belong to the first requests."""
    asked = itertools.zip_longest(requests, trials)
    calls = (batcher.submit(one, timeout=timeout, trial=trial) for one, trial in asked)
    return await asyncio.gather(*calls, return_exceptions=True)


async def run(score, *requests, trials=(), **settings):
    batcher = Batcher(score, **{"max_wait": 0.05, **settings})
    answers = await ask(batcher, *requests, trials=trials)
    await batcher.close()
    return answers


def tags_of(answers):
    return [float(answer.columns["log_prob"][0]) for answer in answers]


async def test_composition_of_batches():
    """Round-robin over callers, the oldest first; a request above ``max_tokens`` is a batch of its own."""
    greedy = [request(i, tokens=10, caller="greedy") for i in range(4)]
    for requests, most, batches in (
        ([*greedy, request(9, tokens=10, caller="modest")], 20, [[0, 9], [1, 2], [3]]),
        ([request(0, tokens=50), request(1), request(2)], 10, [[0], [1, 2]]),
    ):
        recorder = Recorder()
        assert tags_of(await run(recorder, *requests, max_tokens=most)) == [first_token(each) for each in requests]
        assert recorder.batches == batches


async def test_concurrent_requests_share_one_batch_and_a_bad_one_fails_alone():
    """Two ill-formed requests come first, and one in the batch fails: each has its own error, others their answers."""
    recorder, ill = Recorder(fails=[1]), [replace(request(9), **each) for each in ({"caller": ["a"]}, {"scored": None})]
    one, other, bad, *answers = await run(recorder, *ill, *(request(i, caller=str(i)) for i in (1, 0, *range(2, 8))))
    assert tags_of(answers) == [0, *range(2, 8)]
    assert [type(each) for each in (bad, one, other)] == [ValueError, TypeError, AttributeError]
    assert str(bad) == "bad 1"
    assert [sorted(batch) for batch in recorder.batches] == [list(range(8))]
    assert recorder.threads == {"scoring_0"}


async def test_recent_callers_are_waited_for_and_nobody_else():
    first, then = Recorder(), Recorder()
    batcher = Batcher(first, max_wait=0.2)
    await ask(batcher, request(0, caller="a"))  # the only caller so far
    await ask(batcher, request(1, caller="b"))
    batcher._max_wait = 2 * LONG
    await asyncio.wait_for(ask(batcher, request(2, caller="a"), request(3, caller="b")), LONG)
    await batcher.close()
    batcher = Batcher(then, max_wait=0.3)

    async def late(i, caller):
        await asyncio.sleep(0.05 * i)
        await ask(batcher, request(i, caller=caller))

    for caller in "abc":
        batcher.expect(caller)
    await asyncio.gather(*itertools.starmap(late, enumerate("abc")))
    await batcher.close()
    assert (first.batches, then.batches) == ([[0], [1], [2, 3]], [[0, 1, 2]])


@pytest.mark.parametrize(
    ("error", "text"),
    [(SystemExit("enough"), "the model raised SystemExit: enough."), (MemoryError("no room"), "no room")],
    ids=["exit", "memory"],
)
async def test_an_error_of_the_model_reaches_all_callers_of_its_batch(error, text):
    def score(requests):
        if first_token(requests[0]) == 0:
            raise error
        return Recorder()(requests)

    batcher = Batcher(score)
    assert [str(answer) for answer in await ask(batcher, request(0), request(0, caller="b"))] == [text, text]
    assert tags_of(await ask(batcher, request(1))) == [1]


async def test_a_replica_that_hangs_passes_its_queue_on():
    """Rejected from the watchdog's thread: what waits gets the error at once, and so do later requests; the batch goes on."""
    hangs, enough = threading.Event(), threading.Event()

    def hang(requests):
        hangs.set()
        enough.wait()
        return Recorder()(requests)

    batcher = Batcher(hang, max_wait=0.0, max_tokens=3)
    first, *waiting = [asyncio.ensure_future(batcher.submit(request(i), timeout=60)) for i in range(5)]
    await asyncio.to_thread(hangs.wait)
    await asyncio.to_thread(batcher.reject_soon, ReplicaGone("it hangs"))
    gone = [*await asyncio.gather(*waiting, return_exceptions=True), *await ask(batcher, request(7))]
    assert [(type(answer), str(answer)) for answer in gone] == [(ReplicaGone, "it hangs")] * 5
    assert not first.done()
    enough.set()
    assert isinstance(await first, Reply)


@pytest.mark.parametrize("what", ["trial", "on_batch", "replies"])
async def test_a_fault_of_the_batcher_ends_one_batch(what):
    def fail(*_):
        raise RuntimeError("a fault")

    recorder = (lambda requests: Recorder()(requests)[1:]) if what == "replies" else Recorder()
    batcher = Batcher(recorder, **({"on_batch": fail} if what == "on_batch" else {}))
    (first,) = await ask(batcher, request(0), trials=[fail] if what == "trial" else [])
    assert isinstance(first, Reply if what == "on_batch" else (RuntimeError, ValueError))
    batcher._score = Recorder()
    assert tags_of(await ask(batcher, request(1), request(2))) == [1, 2]


class Trials:
    """Notes what was scored before each call; refuses requests by tag."""

    def __init__(self, recorder, refuses=()):
        self.calls, self.batches, self.refuses = [], recorder.batches, refuses

    def of(self, tag):
        async def trial(over):
            self.calls.append((tag, over, len(self.batches)))
            if tag in self.refuses:
                raise PoisonedRequest("refused")

        return trial


async def test_a_request_on_trial_is_scored_alone_between_two_calls():
    """Those of other callers come first. One that is refused is not scored, and fails alone."""
    recorder = Recorder()
    trials = Trials(recorder, refuses=[8])
    requests = [request(tag, caller=caller) for tag, caller in ((7, "b"), (8, "b"), (9, "b"), (0, "a"), (2, "b"))]
    first, refused, *others = await run(recorder, *requests, trials=[trials.of(tag) for tag in (7, 8, 9)])
    assert tags_of([first, *others]) == [7, 9, 0, 2]
    assert isinstance(refused, PoisonedRequest)
    assert recorder.batches == [[0, 2], [7], [9]]
    assert trials.calls == [(7, False, 1), (7, True, 2), (8, False, 2), (9, False, 2), (9, True, 3)]


async def test_a_trial_ends_with_the_last_piece_of_a_request():
    """Whether it is scored or fails: its process survived it."""
    for fails, expected in (((), Reply), ([7], ValueError)):
        recorder = Recorder(fails=fails)
        trials = Trials(recorder)
        answers = await run(recorder, sent([[7] * 8] * 40), trials=[trials.of(7)], max_tokens=160)
        assert [type(answer) for answer in answers] == [expected]
        assert trials.calls[-1] == (7, True, len(recorder.batches))
        assert [over for _, over, _ in trials.calls] == [False] * len(recorder.batches) + [True]
        assert len(recorder.batches) == (1 if fails else 2)


async def test_close_refuses_waiting_and_later_requests():
    batcher = Batcher(Recorder(seconds=0.2), max_wait=0.0, max_tokens=3)
    waiting = asyncio.ensure_future(ask(batcher, *(request(i) for i in range(3)), timeout=5))
    await asyncio.sleep(0.1)
    await batcher.close()
    late = await ask(batcher, request(7))
    first, *others = [*await waiting, *late]
    assert isinstance(first, Reply)
    assert all(isinstance(answer, ServiceClosedError) for answer in others)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        Batcher(Recorder(), max_tokens=0)


# ------------------------------------------------------------------ large requests in pieces


def echo(part):
    """Scores that name the token, and the one before it as an entropy."""
    mask, tokens = part.scored.mask, part.scored.tokens.values.double()
    before = torch.cat([torch.tensor([-1.0]), tokens])[:-1]
    return Reply({"log_prob": tokens[mask], "entropy": before[mask]}, 0)


ROWS = st.lists(st.lists(st.integers(0, 8), max_size=9), min_size=1, max_size=12)


@quick
@given(ROWS, st.integers(1, 20), st.booleans(), st.data())
def test_parts_join_to_the_whole(rows, limit, masked, data):
    """Each token ``t`` keeps itself and ``t % 3`` more, and has an id ``7 t``: parts have the records of their own tokens."""
    flat = [token for row in rows for token in row]
    mask = [[i > 0 and data.draw(st.booleans()) for i in range(len(row))] for row in rows] if masked else None
    ids = [[token, *(1000 + 100 * token + i for i in range(token % 3))] for token in flat]
    offsets = torch.tensor([0, *itertools.accumulate(map(len, ids))])
    kept = Kept(torch.tensor([i for some in ids for i in some], dtype=torch.long), offsets)
    records = {"kept": kept, "top_ids": 7 * torch.tensor(flat, dtype=torch.long).reshape(-1, 1)} if masked else {}
    whole = sent(rows, mask, records=records)
    pieces = Pieces(whole, limit)
    assert sum(pieces.sizes) == whole.num_tokens
    units = data.draw(st.permutations(range(len(pieces.sizes))))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(units) - 1, 1)))))
    groups = [group for a, b in zip([0, *cuts], [*cuts, len(units)], strict=True) if (group := units[a:b])]
    parts = [pieces.part(group) for group in groups]
    for group, part in zip(groups, parts, strict=True):
        assert part.num_tokens == sum(pieces.sizes[unit] for unit in group)
        assert part.num_tokens <= limit or len(group) > 1 or part.num_sequences == 1 or len(pieces.sizes) == 1
        assert [row.tolist() for row in part.scored.tokens.to_list()] == [rows[i] for i in pieces.rows(group)]
        if masked:
            own, found = part.scored.tokens.values.tolist(), Request.unpack(part.pack()).scored
            kept = [ids[flat.index(t)] if scored else [] for t, scored in zip(own, found.mask.tolist(), strict=True)]
            assert [row.tolist() for row in found.kept.ids.split(found.kept.offsets.diff().tolist())] == kept
            assert found.top_ids.tolist() == [[7 * token] for token in own]
    joined, expected = pieces.join([(g, echo(p)) for g, p in zip(groups, parts, strict=True)]), echo(whole)
    assert_close(joined.columns["log_prob"], expected.columns["log_prob"], atol=0, rtol=0)
    assert len(joined.columns["entropy"]) == len(joined.columns["log_prob"])


def test_answers_to_one_prompt_stay_together():
    """Answers of all prompts in turn: those of one prompt are in one unit, or in two where the limit cuts them."""
    prompts = [[0, 10 * (i + 1), 3, 4, 5] for i in range(6)]
    rows = [[*prompt, 50 + j, i] for j in range(4) for i, prompt in enumerate(prompts)]
    pieces = Pieces(sent(rows), 9 * 7)
    assert pieces.sizes == [63, 63, 42]
    assert [len({rows[i][1] for i in pieces.rows([unit])}) for unit in range(3)] == [3, 3, 2]


async def in_pieces(core, *requests):
    """Answers, and the tokens of each request in each batch."""
    batches = []

    def score(parts):
        batches.append([part.num_tokens for part in parts])
        return core.score(parts)

    return await run(score, *requests, max_wait=0.0, max_tokens=160), batches


def random_rows(count, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(97, (int(n),), generator=rng).tolist() for n in torch.randint(2, 30, (count,), generator=rng)]


def scores_of(made, rows, mask=None, records=None, **options):
    """Values at the scored tokens."""
    data = Ragged.from_list([torch.tensor(row) for row in rows])
    chosen = data.positions > 0 if mask is None else torch.tensor([bit for row in mask for bit in row])
    found = LogProbScorer(made).evaluate(ScoreRequest.of(data, chosen, **records or {}), **options)
    return {name: value.values[chosen] for name, value in found.per_token.items()}


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("kept", [False, True])
async def test_scores_in_pieces_are_those_of_the_whole(entropy, kept):
    """Of a large request, with a record of kept tokens or without, beside a small one without."""
    rows, small = random_rows(60), random_rows(2, seed=1)
    mask = [[i > 0 and (i + j) % 3 > 0 for i in range(len(row))] for j, row in enumerate(rows)]
    core = ScoringCore(TransformersEngine(model()))
    records = {"kept": record_of(rows)} if kept else {}
    asked = sent(rows, mask, records=records, entropy=entropy), sent(small, caller="b", entropy=entropy)
    answers, batches = await in_pieces(core, *asked)
    assert len(batches) > 4
    assert len(batches[0]) == 2, "the small request shares the first batch"
    for answer, *given_rows, record in zip(answers, (rows, small), (mask, None), (records, {}), strict=True):
        assert_same(answer.columns, scores_of(model(), *given_rows, records=record, entropy=entropy))
    rows[41] = [5, 6, 1000]
    (bad, good), _ = await in_pieces(core, sent(rows), sent([[1, 2]]))
    assert isinstance(bad, ValueError)
    assert "sequence 41" in str(bad)
    assert isinstance(good, Reply)


async def test_pieces_of_a_request_come_from_one_version():
    """Weights change after its second batch: the earlier pieces are scored again."""
    core, rows = ScoringCore(TransformersEngine(model())), random_rows(60)
    score, calls = core.score, itertools.count(1)

    def push_in_between(requests):
        if next(calls) == 3:
            core.update_weights(model(seed=1).state_dict(), 1)
        return score(requests)

    core.score = push_in_between
    (answer,), batches = await in_pieces(core, sent(rows))
    assert answer.version == 1
    assert sum(map(sum, batches)) > sum(map(len, rows)), "two batches were scored twice"
    assert_same(answer.columns, scores_of(model(seed=1), rows))


@pytest.mark.parametrize("callers", [1, 3])
async def test_updates_that_come_faster_than_a_request_do_not_restart_it_for_ever(callers):
    """Weights change after each batch: a request of ten batches is scored at most three times, then they change again."""
    version, batches = 0, 0

    def score(requests):
        nonlocal batches
        batches += 1
        return [replace(echo(part), version=version) for part in requests]

    def change():
        nonlocal version
        version += 1

    batcher = Batcher(score, max_wait=0.0, max_tokens=160)

    async def push():
        while True:
            before = batches
            await batcher.in_thread(change)
            while batches == before:
                await asyncio.sleep(0)

    pushing = asyncio.ensure_future(push())
    large = [batcher.submit(sent([[1] * 8] * 200, caller=f"{i}"), timeout=60.0) for i in range(callers)]
    answers = await asyncio.wait_for(asyncio.gather(*large), 20.0)
    end = version
    await batcher.submit(sent([[1, 2]]), timeout=60.0)
    await asyncio.wait_for(batcher.in_thread(change), 20.0)
    assert version > end, "updates go on"
    pushing.cancel()
    await batcher.close()
    assert all(len(answer.columns["log_prob"]) == 200 * 7 for answer in answers)
    assert batches <= 3 * 10 * callers + 5


@pytest.mark.parametrize("error", [ServiceTimeout, asyncio.CancelledError], ids=["deadline", "cancelled"])
async def test_what_no_caller_waits_for_is_not_scored(error):
    """The first batch of a large request runs; then its caller is gone, and none of its other 99 pieces is scored."""
    running, batches, trials = threading.Event(), [], []
    late = error is ServiceTimeout

    async def trial(over):
        trials.append(over)

    def slow(requests):
        running.set()
        time.sleep(0.1)
        batches.append([part.num_tokens for part in requests])
        return [echo(part) for part in requests]

    batcher = Batcher(slow, max_wait=0.0, max_tokens=160)
    asked = batcher.submit(sent([[1] * 40] * 400), timeout=0.05 if late else 60.0, trial=trial)
    large = asyncio.ensure_future(asked)
    await asyncio.to_thread(running.wait)
    if not late:
        large.cancel()
    (small,) = await ask(batcher, sent([[1, 2]], caller="b"), timeout=60.0)
    assert isinstance(small, Reply)
    with pytest.raises(error, match=r"a request was not scored within 0\.05 s" if late else None):
        await large
    assert (len(batcher), batcher.tokens) == (0, 0)
    await batcher.close()
    assert batches == [[160], [2]]
    assert trials == ([False, None] if late else [False, True])


# ------------------------------------------------------------------ the fair queue

BUDGET, QUANTUM, UNIT = 6400, 100, 400


def job(caller, *sizes, alone=False):
    return Job(caller, sizes, alone=alone)


def queue_of(*jobs, quantum=QUANTUM):
    queue = FairQueue(quantum)
    for each in jobs:
        queue.add(each)
    return queue


def taken(batch):
    """Tokens of each caller."""
    found = Counter()
    for each, units in batch.items():
        found[each.caller] += sum(each.sizes[unit] for unit in units)
    return dict(found)


CALLERS = st.lists(st.lists(st.integers(1, UNIT), min_size=1, max_size=12), min_size=1, max_size=12)


@quick
@given(CALLERS, st.integers(1, 2 * BUDGET), st.integers(1, 2 * UNIT), st.sets(st.integers(0, 11)))
def test_everything_is_taken_once_in_order_and_in_full_batches(sizes, budget, quantum, alone):
    jobs = [job(str(i % 5), *units, alone=i in alone) for i, units in enumerate(sizes)]
    queue, order, finished = queue_of(*jobs, quantum=quantum), defaultdict(list), []
    for _ in range(sum(map(len, sizes))):  # each batch takes at least one unit
        before = queue.tokens
        batch = queue.take(budget)
        size = sum(taken(batch).values())
        assert queue.tokens == before - size
        assert size <= budget or sum(map(len, batch.values())) == 1
        assert len(batch) <= 1 or not any(each.alone for each in batch)
        for each, units in batch.items():
            order[each] += units
            finished += [each] * (not each.todo)
    assert (len(queue), queue.tokens, len(queue.callers)) == (0, 0, 0)
    assert all(order[each] == list(range(len(each.sizes))) for each in jobs)
    for caller, some in itertools.product(map(str, range(5)), (False, True)):  # first come, first served
        mine = [[j for j in of if (j.caller, j.alone) == (caller, some)] for of in (finished, jobs)]
        assert mine[0] == mine[1]


@quick
@given(CALLERS, st.integers(1, BUDGET))
def test_callers_that_always_wait_differ_by_a_quantum_and_a_unit(sizes, budget):
    """Each repeats its sizes for ever. The bound holds after every batch."""
    queue = queue_of(*(job(str(i), *(units * (40 * UNIT // sum(units) + 1))) for i, units in enumerate(sizes)))
    done = Counter({str(i): 0 for i in range(len(sizes))})
    for _ in range(200):
        done.update(taken(queue.take(budget)))
        if len(queue) < len(sizes):
            break
        assert max(done.values()) - min(done.values()) <= QUANTUM + max(map(max, sizes))


@quick
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, UNIT)), max_size=60), st.integers(1, UNIT))
def test_nobody_starves(arrivals, size):
    """Others come between all batches, and greedy ones always wait: a request is taken after its share of turns."""
    queue = queue_of(*(job(f"greedy{greedy}", *[UNIT] * 10_000) for greedy in range(3)))
    queue.take(BUDGET)
    mine = job("mine", size)
    queue.add(mine)
    # Per turn: a quantum of each of the others, once more for a caller that had none; and a unit that waits for its credit.
    bound = (-(-size // QUANTUM) + 1) * 7 * 2 * QUANTUM + 7 * UNIT
    waited = 0
    for caller, tokens in [*arrivals, *[(0, 1)] * 1000]:
        queue.add(job(f"other{caller}", *[tokens] * 3))
        waited += sum(taken(queue.take(UNIT)).values())
        if not mine.todo:
            break
    assert waited <= bound


def test_a_new_caller_is_first_once():
    queue = queue_of(*(job(f"old{i}", *[100] * 100) for i in range(64)))
    assert len(taken(queue.take(BUDGET))) == 64
    queue.add(job("new", 50))
    assert next(iter(taken(queue.take(300)))) == "new"
    queue.add(job("new", 50))  # at once again: after the others' turns
    batches = [taken(queue.take(600)) for _ in range(11)]
    assert ["new" in batch for batch in batches] == [False] * 10 + [True]


def test_requests_alone_come_after_those_that_wait_and_removed_ones_never():
    first, second = job("a", 30, 30, alone=True), job("a", 30, alone=True)
    queue = queue_of(first, second, job("a", 40), job("b", 40), job("c", 40))
    assert taken(queue.take(BUDGET)) == {"a": 40, "b": 40, "c": 40}
    queue.add(job("d", 40))
    batches = [queue.take(BUDGET) for _ in range(3)]
    assert [list(map(id, batch)) for batch in batches[1:]] == [[id(first)], [id(second)]]
    assert taken(batches[0]) == {"d": 40}
    assert not len(queue)
    large = job("large", *[UNIT] * 50)
    queue = queue_of(large, job("small", 10))
    queue.take(BUDGET)
    assert queue.remove(lambda each: each is large) == [large]
    assert (len(queue), queue.tokens, queue.take(BUDGET)) == (0, 0, {})


@pytest.mark.parametrize(("large", "small", "tokens"), [(1, 31, 180), (16, 16, 60), (1, 1, 3000)])
def test_small_callers_wait_at_most_three_batches(large, small, tokens):
    """Beside callers that always have a large request; small ones ask again 0.1 to 2 s after each answer.

    A batch of ``BUDGET`` tokens takes one second.
    """
    queue = queue_of(*(job(f"large{i}", *[UNIT] * 10**5) for i in range(large)))
    pauses = itertools.cycle([0.1, 0.7, 2.0, 0.3, 1.3])
    due = [(next(pauses), i) for i in range(small)]
    heapq.heapify(due)
    asked, found, now = {}, [], 0.0
    while now < 400.0:
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
    assert len(found) > 100
    assert sorted(found)[int(0.99 * len(found))] <= 3.0
