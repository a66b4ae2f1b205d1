"""Packs: every token of a tree once, after its predecessor, without padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from test_tree import ANSWERS, batches, build

from torchrl_llm_kl.scoring._passes import plan_packs


def as_tuples(plan):
    return [[(p.node, p.first, p.length, p.past) for p in map(plan.pieces.__getitem__, pack)] for pack in plan.packs]


def test_three_answers_to_each_of_two_prompts():
    # Nodes, parents first: A (4 tokens), B (2); of A: 0 and 4's "1", then 2's "3"; of B: 1's, 3's "4 5 6", 5's; ...
    tree = build(ANSWERS)
    assert tree.length.tolist() == [4, 2, 1, 1, 1, 3, 1, 1, 2]
    assert tree.parent.tolist() == [-1, -1, 0, 1, 0, 1, 1, 2, 2]
    # Depth first: A, its first answers and their continuations, then B.
    assert as_tuples(plan_packs(tree, 5)) == [
        [(0, 0, 4, -1), (2, 0, 1, 0)],
        [(7, 0, 1, 1), (8, 0, 2, 1), (4, 0, 1, 0), (1, 0, 1, -1)],
        [(1, 1, 1, 5), (3, 0, 1, 6), (5, 0, 3, 6)],
        [(6, 0, 1, 6)],
    ]
    assert plan_packs(tree, 5).last_use() == [1, 1, -1, -1, -1, 3, 3, -1, -1, -1]


def test_a_cached_token_is_in_no_pack():
    tree = build([[1] * 6 + [2] * 3, [1] * 6 + [3] * 4])
    plan = plan_packs(tree, 100, [5, 3, 0])
    assert [p.cached for p in plan.pieces] == [True, False, True, False]
    assert as_tuples(plan) == [[(0, 5, 1, 0), (2, 0, 4, 1)]]


@given(batch=batches(), min_shared=st.integers(0, 12), budget=st.integers(1, 60), data=st.data())
def test_every_token_once_after_its_predecessor_in_full_packs(batch, min_shared, budget, data):
    tree = build(*batch, min_shared)
    cached: list[int] = []
    for parent, length in zip(tree.parent.tolist(), tree.length.tolist(), strict=True):
        whole = parent < 0 or cached[parent] == int(tree.length[parent])
        cached.append(data.draw(st.integers(0, length)) if whole else 0)
    plan = plan_packs(tree, budget, cached)

    forwarded = [i for pack in plan.packs for i in pack]
    assert forwarded == sorted(i for i, piece in enumerate(plan.pieces) if not piece.cached)
    sizes = [sum(plan.pieces[i].length for i in pack) for pack in plan.packs]
    assert all(size == budget for size in sizes[:-1])
    assert all(0 < size <= budget for size in sizes)
    assert sum(sizes) == tree.num_tokens - sum(cached)

    seen = [[False] * length for length in tree.length.tolist()]
    for i, piece in enumerate(plan.pieces):
        assert piece.past < i
        own = range(piece.first, piece.first + piece.length)
        assert not any(seen[piece.node][t] for t in own)
        for t in own:
            seen[piece.node][t] = True
        if piece.cached:
            assert (piece.first, piece.past) == (0, -1)
            continue
        before = None if piece.past < 0 else plan.pieces[piece.past]
        if piece.first > 0:
            assert (before.node, before.first + before.length) == (piece.node, piece.first)
        else:
            parent = int(tree.parent[piece.node])
            assert (before is None) == (parent < 0)
            assert before is None or (before.node, before.first + before.length) == (parent, int(tree.length[parent]))
    assert all(all(row) for row in seen)

    # Keys and values are held until the last pack that attends to them, directly or through later pieces.
    for i, last in enumerate(plan.last_use()):
        following = {i}
        packs = []
        for number, pack in enumerate(plan.packs):
            for j in pack:
                if plan.pieces[j].past in following:
                    following.add(j)
                    packs.append(number)
        assert last == max(packs, default=-1)


@pytest.mark.parametrize("sequences", [[[]], [[], []]])
def test_nothing_to_forward(sequences):
    plan = plan_packs(build(sequences), 5)
    assert plan.pieces == plan.packs == plan.last_use() == []


def test_bad_budget():
    with pytest.raises(ValueError, match="tokens_per_batch must be at least 1, got 0"):
        plan_packs(build(ANSWERS), 0)
    assert torch.equal(build(ANSWERS).first, torch.tensor([0, 4, 6, 7, 8, 9, 12, 13, 14]))
