"""Large requests in pieces: nothing is lost, prefixes stay together, and the scores are those of the whole."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from load import assert_same
from remote_models import model
from torchrl_llm_kl import LogProbScorer, Ragged
from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.service._wire import Reply, Request, Settings
from torchrl_llm_kl.service.engines._engine import TransformersEngine
from torchrl_llm_kl.service.replica._batcher import Batcher
from torchrl_llm_kl.service.replica._core import ScoringCore
from torchrl_llm_kl.service.replica._pieces import Pieces

quick = settings(max_examples=40, deadline=None)


def request(
    rows: list[list[int]],
    mask: list[list[bool]] | None = None,
    *,
    caller: str = "a",
    kept: Kept | None = None,
    **settings: object,
) -> Request:
    tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
    flat = None if mask is None else torch.tensor([bit for row in mask for bit in row], dtype=torch.bool)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return Request.of(tokens, lengths, flat, Settings(**settings), version=None, caller=caller, kept=kept)  # type: ignore[arg-type]


def echo(part: Request) -> Reply:
    """Scores that name the token, and the one before it as an entropy."""
    mask = part.flat_mask().numpy()
    before = np.concatenate([[-1], part.tokens[:-1]])
    return Reply(part.tokens[mask].astype(np.float64), before[mask].astype(np.float64), 0)


# ------------------------------------------------------------------ cut and join

ROWS = st.lists(st.lists(st.integers(-3, 5), max_size=9), min_size=1, max_size=12)


@quick
@given(ROWS, st.integers(1, 20), st.data())
def test_parts_join_to_the_whole(rows: list[list[int]], limit: int, data: st.DataObject) -> None:
    mask = data.draw(st.one_of(st.none(), st.just([[data.draw(st.booleans()) for _ in row] for row in rows])))
    whole = request(rows, mask)
    pieces = Pieces(whole, limit)
    assert sum(pieces.sizes) == whole.num_tokens
    units = data.draw(st.permutations(range(len(pieces.sizes))))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(units) - 1, 1)))))
    groups = [group for a, b in zip([0, *cuts], [*cuts, len(units)], strict=True) if (group := units[a:b])]
    parts = [pieces.part(group) for group in groups]
    for group, part in zip(groups, parts, strict=True):
        assert part.num_tokens == sum(pieces.sizes[unit] for unit in group)
        assert part.num_tokens <= limit or len(group) > 1 or len(part.lengths) == 1 or len(pieces.sizes) == 1
        found = [row.tolist() for row in part.rows()]
        assert found == [rows[i] for i in pieces.rows(group)]
    joined, expected = pieces.join([(g, echo(p)) for g, p in zip(groups, parts, strict=True)]), echo(whole)
    np.testing.assert_array_equal(joined.log_prob, expected.log_prob)
    assert joined.entropy is not None
    assert len(joined.entropy) == len(joined.log_prob)


@quick
@given(ROWS, st.integers(1, 20), st.data())
def test_kept_tokens_stay_with_their_tokens(rows: list[list[int]], limit: int, data: st.DataObject) -> None:
    """Each token ``t`` keeps ``t % 3`` ids, ``100 t`` and so on: parts have those of their own scored tokens."""
    flat = [token for row in rows for token in row]
    mask = [[data.draw(st.booleans()) for _ in row] for row in rows]
    ids = [[1000 + 100 * token + i for i in range(token % 3)] for token in flat]
    kept = Kept(
        torch.tensor([i for some in ids for i in some], dtype=torch.long),
        torch.tensor([0, *itertools.accumulate(map(len, ids))]),
    )
    pieces = Pieces(request(rows, mask, kept=kept), limit)
    units = data.draw(st.permutations(range(len(pieces.sizes))))
    half = data.draw(st.integers(1, len(units)))
    for group in filter(None, (units[:half], units[half:])):
        part = pieces.part(group)
        assert part.replay is not None
        scored = part.tokens[part.flat_mask().numpy()].tolist()
        assert part.replay.counts.tolist() == [token % 3 for token in scored]
        assert part.replay.ids.tolist() == [1000 + 100 * token + i for token in scored for i in range(token % 3)]
        assert Request.unpack(part.pack()).replay is not None, "it is well formed"


def test_answers_to_one_prompt_stay_together() -> None:
    """Answers of all prompts in turn: each unit holds those of whole prompts, though all share a first token."""
    prompts = [[0, 10 * (i + 1), 3, 4, 5] for i in range(6)]
    rows = [[*prompt, 50 + j, i] for j in range(4) for i, prompt in enumerate(prompts)]
    pieces = Pieces(request(rows), 2 * 4 * 7 + 10)
    assert pieces.sizes == [56, 56, 56]
    for unit in range(3):
        assert len({rows[i][1] for i in pieces.rows([unit])}) == 2


@pytest.mark.parametrize("lengths", [[2, 2], [5, -1], [9, 9]])
def test_ill_formed_requests_are_not_cut(lengths: list[int]) -> None:
    """The core reports what is wrong with them."""
    whole = Request(np.arange(4), np.array(lengths), None, Settings())
    assert Pieces(whole, 2).part([0]) is whole or lengths == [2, 2]


# ------------------------------------------------------------------ in the batcher


def run(core: ScoringCore, requests: Sequence[Request], **options: int) -> tuple[list[object], list[list[int]]]:
    """Answers, and the tokens of each request in each batch."""
    batches: list[list[int]] = []

    def score(parts: Sequence[Request]) -> list[Reply | Exception]:
        batches.append([part.num_tokens for part in parts])
        return core.score(parts)

    async def main() -> list[object]:
        batcher = Batcher(score, max_wait=0.0, **options)
        answers = await asyncio.gather(*(batcher.submit(r, timeout=60.0) for r in requests), return_exceptions=True)
        await batcher.close()
        return answers

    return asyncio.run(main()), batches


def random_rows(count: int, seed: int = 0) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(97, (int(n),), generator=rng).tolist() for n in torch.randint(2, 30, (count,), generator=rng)]


@pytest.mark.parametrize("entropy", [False, True])
def test_scores_in_pieces_are_those_of_the_whole(entropy: bool) -> None:
    core = ScoringCore(TransformersEngine(model()))
    rows = random_rows(60)
    mask = [[i > 0 and (i + j) % 3 > 0 for i in range(len(row))] for j, row in enumerate(rows)]
    small = random_rows(2, seed=1)
    answers, batches = run(
        core, [request(rows, mask, entropy=entropy), request(small, caller="b", entropy=entropy)], max_tokens=160
    )
    assert len(batches) > 4
    assert len(batches[0]) == 2, "the small request shares the first batch"
    plain = LogProbScorer(model())
    for answer, sent, flat in zip(answers, (rows, small), (mask, None), strict=True):
        assert isinstance(answer, Reply)
        chosen = None if flat is None else torch.tensor([bit for row in flat for bit in row])
        scores = plain.evaluate(Ragged.from_list([torch.tensor(row) for row in sent]), chosen, entropy=entropy)
        where = Ragged.from_list([torch.tensor(row) for row in sent]).positions > 0 if chosen is None else chosen
        assert_same(torch.from_numpy(answer.log_prob), scores.log_prob.values[where])
        assert (answer.entropy is not None) == entropy
        if answer.entropy is not None and scores.entropy is not None:
            assert_same(torch.from_numpy(answer.entropy), scores.entropy.values[where])


def test_an_error_names_the_sequence_of_the_request() -> None:
    rows = random_rows(60)
    rows[41] = [5, 6, 1000]
    answers, _ = run(ScoringCore(TransformersEngine(model())), [request(rows), request([[1, 2]])], max_tokens=160)
    assert isinstance(answers[0], ValueError)
    assert "sequence 41" in str(answers[0])
    assert isinstance(answers[1], Reply)


def test_pieces_of_a_request_come_from_one_version() -> None:
    """Weights change after its second batch: the earlier pieces are scored again."""
    core = ScoringCore(TransformersEngine(model()))
    score, calls = core.score, 0

    def push_in_between(requests: Sequence[Request]) -> list[Reply | Exception]:
        nonlocal calls
        calls += 1
        if calls == 3:
            core.update_weights(model(seed=1).state_dict(), 1)
        return score(requests)

    core.score = push_in_between  # type: ignore[method-assign]
    rows = random_rows(60)
    (answer,), batches = run(core, [request(rows)], max_tokens=160)
    assert isinstance(answer, Reply)
    assert answer.version == 1
    assert sum(map(sum, batches)) > sum(map(len, rows)), "two batches were scored twice"
    expected = LogProbScorer(model(seed=1)).score(Ragged.from_list([torch.tensor(row) for row in rows]))
    assert_same(torch.from_numpy(answer.log_prob), expected.values[expected.positions > 0])


@pytest.mark.parametrize("callers", [1, 3])
def test_updates_that_come_faster_than_a_request_do_not_restart_it_for_ever(callers: int) -> None:
    """Weights change after each batch: a request of ten batches is scored at most three times, then they change again."""
    version, batches, updates = 0, 0, 0

    def score(requests: Sequence[Request]) -> list[Reply | Exception]:
        nonlocal batches
        batches += 1
        return [replace(echo(part), version=version) for part in requests]

    def change() -> None:
        nonlocal version, updates
        version, updates = version + 1, updates + 1

    async def main() -> list[Reply]:
        batcher = Batcher(score, max_wait=0.0, max_tokens=160)

        async def push() -> None:
            while True:
                before = batches
                await batcher.in_thread(change)
                while batches == before:
                    await asyncio.sleep(0)

        pushing = asyncio.ensure_future(push())
        large = [batcher.submit(request([[1] * 8] * 200, caller=f"{i}"), timeout=60.0) for i in range(callers)]
        answers = await asyncio.wait_for(asyncio.gather(*large), 20.0)
        end = updates
        await batcher.submit(request([[1, 2]]), timeout=60.0)
        await asyncio.wait_for(batcher.in_thread(change), 20.0)
        assert updates > end, "updates go on"
        pushing.cancel()
        await batcher.close()
        return answers

    answers = asyncio.run(main())
    assert all(isinstance(answer, Reply) and answer.log_prob.size == 200 * 7 for answer in answers)
    assert batches <= 3 * 10 * callers + 5


# ------------------------------------------------------------------ deadlines


class Slow:
    """Takes a time per batch, and records the tokens of each."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.batches = seconds, []  # type: ignore[var-annotated]
        self.running = threading.Event()

    def __call__(self, requests: Sequence[Request]) -> list[Reply | Exception]:
        self.running.set()
        time.sleep(self.seconds)
        self.batches.append([part.num_tokens for part in requests])
        return [echo(part) for part in requests]


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
def test_what_no_caller_waits_for_is_not_scored(how: str) -> None:
    """The first batch of a large request runs; then its caller is gone, and none of its other 99 pieces is scored."""
    slow = Slow(0.1)

    async def main() -> list[object]:
        batcher = Batcher(slow, max_wait=0.0, max_tokens=160)
        timeout = 0.05 if how == "deadline" else 60.0
        large = asyncio.ensure_future(batcher.submit(request([[1] * 40] * 400), timeout=timeout))
        while not slow.running.is_set():
            await asyncio.sleep(0.01)
        if how == "cancelled":
            large.cancel()
        small = await asyncio.gather(
            batcher.submit(request([[1, 2]], caller="b"), timeout=60.0), return_exceptions=True
        )
        gone = await asyncio.gather(large, return_exceptions=True)
        assert (len(batcher), batcher.tokens) == (0, 0)
        await batcher.close()
        return [*small, *gone]

    small, gone = asyncio.run(main())
    assert isinstance(small, Reply)
    assert slow.batches == [[160], [2]]
    if how == "deadline":
        assert "a request was not scored within 0.05 s" in str(gone)
    else:
        assert isinstance(gone, asyncio.CancelledError)
