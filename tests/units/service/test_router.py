"""Which replica scores a sequence: pure functions of the call and of earlier calls. Without Ray."""

import numpy as np
import pytest

from torchrl_llm_kl.service.client._router import BALANCE, Router, _Earlier, _Home, _prefix_sums


def rows(count, *, prefix=0, length=40, seed=0):
    rng = np.random.default_rng(seed)
    start = np.arange(prefix)
    return [np.concatenate([start, rng.integers(0, 1000, length)]) for _ in range(count)]


def assign(router, call, scored, replicas, *, continues=False):
    numbers = range(replicas) if isinstance(replicas, int) else replicas
    lengths = np.array([len(row) for row in call], np.int64)
    first = np.minimum(scored, lengths)
    return router.assign(np.concatenate(call), lengths, first, list(numbers), continues=continues).tolist()


def groups(prompts, responses, *, seed=0, spread=0):
    """Responses to prompts of 60 tokens; their lengths differ by up to ``spread``."""
    rng = np.random.default_rng(seed)
    return [
        np.concatenate([prompt, rng.integers(0, 1000, 30 + rng.integers(spread + 1))])
        for prompt in rng.integers(0, 1000, (prompts, 60))
        for _ in range(responses)
    ]


@pytest.mark.parametrize(("prompts", "responses"), [(16, 8), (64, 8), (256, 8), (24, 4)])
@pytest.mark.parametrize("seed", range(4))
def test_a_call_is_balanced_and_responses_to_one_prompt_stay_together(prompts, responses, seed):
    """By tokens, too. Plain rendezvous hashing gives 16 prompts on four replicas a largest share of 1.75 times the mean."""
    call = groups(prompts, responses, seed=seed, spread=200 if responses == 4 else 0)
    chosen = assign(Router(), call, 60, 4)
    tokens = np.bincount(chosen, weights=[len(row) for row in call], minlength=4)
    assert tokens.max() / tokens.mean() <= BALANCE == 1.25
    together = np.array(chosen).reshape(prompts, responses)
    assert responses == 4 or (together == together[:, :1]).all()


def test_the_choice_is_the_same_in_every_process_and_in_any_order():
    call = groups(16, 8, spread=50)
    chosen = assign(Router(), call, 60, 4)
    assert chosen == assign(Router(), call, 60, 4)
    order = np.random.default_rng(1).permutation(len(call))
    assert [chosen[i] for i in order] == assign(Router(), [call[i] for i in order], 60, 4)
    assert chosen[:16] == [3] * 8 + [0] * 8, "in every release too"


def test_prompts_alone_and_long_ones():
    """One alone goes to one replica in every call; a long one does not crowd the others."""
    for prompt in rows(20, length=60):
        found = {assign(Router(), [np.concatenate([prompt, tail])], 60, 4)[0] for tail in rows(8, length=25)}
        assert len(found) == 1
    first, *others = assign(Router(), [np.arange(10_000), *rows(30)], 20_000, 3)
    assert first not in others


@pytest.mark.parametrize("prefixes", [(0,), (100,), (30, 60), (10, 20, 30, 40)])
@pytest.mark.parametrize("scored", [1, 120], ids=["everything is scored", "the answer is scored"])
def test_calls_of_one_sequence_spread_for_any_system_prompts(prefixes, scored):
    talks = [row for prefix in prefixes for row in rows(400 // len(prefixes), prefix=prefix, seed=prefix)]
    shares = np.bincount([assign(Router(), [talk], scored, 4)[0] for talk in talks], minlength=4)
    assert shares.min() > 60, shares  # 100 on average, with a standard deviation of 8.7


def test_the_work_of_a_lost_replica_spreads_and_the_rest_stays():
    talks = rows(400)
    before = [assign(Router(), [talk], 1, 4)[0] for talk in talks]
    after = [assign(Router(), [talk], 1, [0, 1, 3])[0] for talk in talks]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != 2)
    moved = np.bincount([new for old, new in zip(before, after, strict=True) if old == 2], minlength=4)
    assert moved[[0, 1, 3]].min() > 15, "they spread over all others"


def test_empty_sequences_and_calls():
    empty = np.zeros(0, np.int64)
    assert Router().assign(empty, empty, empty, [0, 1]).tolist() == []
    router = Router()
    found = assign(router, [empty, *rows(3), empty], 0, 4, continues=True)
    assert found[0] == found[-1]
    assert len(router._earlier) == 3


def test_a_growing_conversation_keeps_its_replica():
    """Each turn scores its own tokens, so that the prompt before them differs each time."""
    router, talks = Router(), rows(50)
    first = assign(router, [talk[:20] for talk in talks], 12, 5, continues=True)
    for end, scored in ((30, 25), (40, 33)):
        assert assign(router, [talk[:end] for talk in talks], scored, 5, continues=True) == first
        again = [assign(router, [talk[:end]], scored, 5, continues=True)[0] for talk in talks]
        assert again == first, "alone as together"
    assert set(first) == set(range(5))
    talks = rows(20, length=200)  # turns of one conversation in one call
    call = [talk[:end] for end in (150, 70, 200, 20) for talk in talks]
    chosen = np.array(assign(Router(), call, 1, 5, continues=True)).reshape(4, 20)
    assert (chosen == chosen[:1]).all()


def test_a_conversation_moves_when_its_replica_is_lost_and_stays_there():
    router, talks = Router(), rows(40)
    first = assign(router, [talk[:20] for talk in talks], 12, 4, continues=True)
    moved = assign(router, [talk[:30] for talk in talks], 25, [0, 1, 3], continues=True)
    assert all(new == old for old, new in zip(first, moved, strict=True) if old != 2)
    assert assign(router, talks, 33, 4, continues=True) == moved, "its keys and values are at the new one"


def test_the_longest_earlier_sequence_counts():
    """Two conversations with the same first turn, which other replicas continued."""
    router, start, ends = Router(), np.arange(37), rows(2, length=70)
    longer = [np.concatenate([start, end]) for end in ends]
    for row, replica in zip([start, *longer], [3, 1, 2], strict=True):
        home = _Home(0)
        home.replica = replica
        router._earlier.add(_prefix_sums(row, np.array([len(row)])), home)
    later = [np.concatenate([row, np.zeros(30, np.int64)]) for row in [start, *longer]]
    assert assign(router, later, 200, 4, continues=True) == [3, 1, 2]


def test_every_prefix_is_found_and_nothing_else():
    """Against a search by comparison, around the borders of blocks."""
    rng, earlier, kept = np.random.default_rng(0), _Earlier(1000), {}
    for n in rng.integers(1, 130, 300):
        row = rng.integers(0, 2, n)  # many sequences start with others
        kept[tuple(row)] = home = _Home(len(kept))
        earlier.add(_prefix_sums(row, np.array([n])), home)
    for _ in range(500):
        start = list(kept)[rng.integers(len(kept))]
        row = np.concatenate([start, rng.integers(0, 2, rng.integers(40))]).astype(np.int64)
        starts = [known for known in kept if tuple(row[: len(known)]) == known]
        assert earlier.find(_prefix_sums(row, np.array([len(row)]))) is kept[max(starts, key=len)]


def test_no_more_sequences_are_remembered_than_allowed(monkeypatch):
    monkeypatch.setattr("torchrl_llm_kl.service.client._router._REMEMBERED", 3)
    router = Router()
    for n in range(1, 200):
        assign(router, [np.arange(n)], n, 64, continues=True)
        assert 0 < len(router._earlier) <= 3
        assert len(router._earlier._lengths) <= 3


def test_prefix_sums_tell_order_position_and_number_apart():
    lengths = np.array([3, 3, 3, 2, 0, 3])
    sums = _prefix_sums(np.array([1, 2, 3, 3, 2, 1, 1, 2, 4, 1, 2, -1, 2, 3]), lengths)
    ends = lengths.cumsum()
    whole = (sums[ends] - sums[ends - lengths]).tolist()
    assert len(set(whole)) == 6
    assert len(set((sums[[2, 8, 11]] - sums[[0, 6, 9]]).tolist())) == 1, "the same two tokens"
    many = np.arange(100_000)
    wide, narrow = (_prefix_sums(many.astype(dtype), np.array([60_000, 40_000])) for dtype in (np.int64, np.int32))
    assert (wide == narrow).all()
    assert len(set(wide.tolist())) == len(wide)
