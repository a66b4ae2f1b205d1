"""The prefix tree, packs and micro-batches, against loops over tuples of tokens."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given, strategies as st

from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring import plan_micro_batches
from torchrl_llm_kl.scoring._plans import plan_packs
from torchrl_llm_kl.scoring._tree import PrefixTree

# Few distinct tokens, so that sequences often share prefixes; ids whose bytes and values sort differently.
TOKENS = st.sampled_from([1, 256, 2**40 + 3])


@st.composite
def batches(draw, most=9, longest=7):
    """Sequences, many of them continuations or copies of earlier ones, and their forward lengths."""
    sequences: list[list[int]] = []
    for _ in range(draw(st.integers(1, most))):
        prefix = draw(st.sampled_from([[], *sequences]))
        prefix = prefix[: draw(st.integers(0, len(prefix)))]
        sequences.append(prefix + draw(st.lists(TOKENS, max_size=longest - len(prefix))))
    whole = draw(st.booleans())
    lengths = [len(s) if whole else draw(st.integers(0, len(s))) for s in sequences]
    return sequences, lengths


def ragged(sequences):
    return Ragged.from_list([torch.tensor(s, dtype=torch.long) for s in sequences])


def build(sequences, lengths=None, min_shared=0):
    lengths = [len(s) for s in sequences] if lengths is None else lengths
    return PrefixTree.build(ragged(sequences), torch.tensor(lengths, dtype=torch.long), min_shared=min_shared)


def heads(sequences, lengths):
    return [tuple(s[:n]) for s, n in zip(sequences, lengths, strict=True)]


def maximal(prefixes):
    """The distinct prefixes that no other prefix continues."""
    return {p for p in prefixes if p and not any(q[: len(p)] == p and q != p for q in prefixes)}


def branch_points(prefixes):
    """Every non-empty prefix after which sequences part."""
    tops = maximal(prefixes)
    return {a[:i] for a in tops for b in tops for i in range(1, len(a)) if a[:i] == b[:i] and a[i] != b[i]}


def spelled(tree, sequences, node):
    """All tokens from the root to the end of a node."""
    if node < 0:
        return ()
    length, element = int(tree.length[node]), int(tree.element[node])
    own = [token for sequence in sequences for token in sequence][element : element + length]
    return spelled(tree, sequences, int(tree.parent[node])) + tuple(own)


def parents(tree):
    """The nodes that have children."""
    return sorted({node for node in tree.parent.tolist() if node >= 0})


def arrays(instance):
    return {f.name: getattr(instance, f.name).tolist() for f in fields(instance)}


A, B = [10, 11, 12, 13], [20, 21]
ANSWERS = [[*A, 1, 2], [*B, 1], [*A, 3], [*B, 4, 5, 6], [*A, 1, 7, 8], [*B, 9]]  # the fifth begins as the first does


def test_three_answers_to_each_of_two_prompts():
    tree = build(ANSWERS)
    assert {(x.dtype, x.device.type) for x in (getattr(tree, f.name) for f in fields(tree))} == {(torch.long, "cpu")}
    assert arrays(tree) == {
        #          A  0+4 0  B   1  2  3  4  5
        "parent": [-1, 0, 1, -1, 3, 0, 3, 1, 3],
        "start": [0, 4, 5, 0, 2, 4, 2, 5, 2],
        "length": [4, 1, 1, 2, 1, 1, 3, 2, 1],
        "element": [0, 4, 5, 6, 8, 13, 16, 24, 28],
        "offset": [0, 6, 9, 14, 19, 26],
        "leaf": [2, 4, 5, 6, 7, 8],
        "forward_lengths": [6, 3, 5, 5, 7, 3],
    }


def test_a_short_branch_is_not_shared():
    """Prompt A has 4 tokens. Two answers to it share one more token."""
    for min_length, lengths in [(1, [4, 1, 2]), (2, [4, 2]), (4, [4]), (5, [5]), (6, [])]:
        tree = PrefixTree.build(ragged(ANSWERS), ragged(ANSWERS).lengths, min_shared=0, min_length=min_length)
        assert tree.length[parents(tree)].tolist() == lengths


@given(batch=batches(), min_shared=st.integers(0, 12))
def test_nodes_are_well_formed_and_every_token_is_found_with_its_whole_prefix(batch, min_shared):
    sequences, lengths = batch
    flat, limits = ragged(sequences), torch.tensor(lengths)
    tree, again = (PrefixTree.build(flat, limits, min_shared=min_shared) for _ in range(2))
    assert arrays(tree) == arrays(again)
    assert ([row.tolist() for row in flat.to_list()], limits.tolist()) == (sequences, lengths), "nothing is mutated"
    prefixes = heads(sequences, lengths)
    tops = maximal(prefixes)
    for node in range(tree.num_nodes):
        parent, start, length = (int(x[node]) for x in (tree.parent, tree.start, tree.length))
        assert length > 0
        assert parent < node
        assert start == (int(tree.start[parent] + tree.length[parent]) if parent >= 0 else 0)
        stretch = spelled(tree, sequences, node)
        source = min(s for s, p in enumerate(prefixes) if p in tops and p[: len(stretch)] == stretch)
        assert int(tree.element[node]) == sum(map(len, sequences[:source])) + start
    for s, length in enumerate(lengths):
        assert (int(tree.leaf[s]) == -1) == (length == 0)
        for t in range(length):
            node, offset = (int(x) for x in tree.locate(flat.offsets[s : s + 1] + t))
            assert int(tree.start[node]) + offset == t
            assert 0 <= offset < int(tree.length[node])
            assert spelled(tree, sequences, node)[: t + 1] == tuple(sequences[s][: t + 1])
            assert int(flat.values[tree.element[node] + offset]) == sequences[s][t]
            assert t < length - 1 or node == int(tree.leaf[s])
    twice = build(sequences * 2, lengths * 2, min_shared)
    assert twice.leaf.tolist() == tree.leaf.tolist() * 2
    for name in ("parent", "start", "length", "element"):
        assert getattr(twice, name).tolist() == getattr(tree, name).tolist(), "copies share everything"


@given(batch=batches(), min_shared=st.sampled_from([*range(13), 10**6]))
def test_a_common_prefix_is_a_node_if_that_saves_enough(batch, min_shared):
    """The saving is its length after the last node times the number of different next tokens minus one."""
    sequences, lengths = batch
    prefixes = heads(sequences, lengths)
    tops, chosen = maximal(prefixes), []
    for point in sorted(branch_points(prefixes), key=len):
        start = max((len(p) for p in chosen if p == point[: len(p)]), default=0)
        continuations = {top[len(point)] for top in tops if top[: len(point)] == point}
        if (len(point) - start) * (len(continuations) - 1) >= min_shared:
            chosen.append(point)
    tree = build(sequences, lengths, min_shared)
    assert sorted(spelled(tree, sequences, node) for node in parents(tree)) == sorted(chosen)


@pytest.mark.parametrize("sequences", [[[]], [[1], []]])
def test_nothing_to_forward(sequences):
    tree = build(sequences, [0] * len(sequences))
    assert (tree.num_nodes, tree.num_tokens, tree.leaf.tolist()) == (0, 0, [-1] * len(sequences))
    plan = plan_packs(tree, 5)
    assert plan.pieces == plan.packs == plan.last_use() == []


def test_a_chain_of_branches_deeper_than_the_recursion_limit():
    sequences = [[0] * i + [1] for i in range(1100)]
    tree = build(sequences, min_shared=0)
    assert tree.num_tokens == 1100 + 1099  # the first sequence shares nothing


def as_tuples(plan):
    return [[(p.node, p.first, p.length, p.past) for p in map(plan.pieces.__getitem__, pack)] for pack in plan.packs]


def test_packs_by_hand():
    # Depth first: A, its first answers and their continuations, then B.
    plan = plan_packs(build(ANSWERS), 5)
    assert as_tuples(plan) == [
        [(0, 0, 4, -1), (1, 0, 1, 0)],
        [(2, 0, 1, 1), (7, 0, 2, 1), (5, 0, 1, 0), (3, 0, 1, -1)],
        [(3, 1, 1, 5), (4, 0, 1, 6), (6, 0, 3, 6)],
        [(8, 0, 1, 6)],
    ]
    assert plan.last_use() == [1, 1, -1, -1, -1, 3, 3, -1, -1, -1]
    with pytest.raises(ValueError, match="tokens_per_batch must be at least 1, got 0"):
        plan_packs(build(ANSWERS), 0)
    # A cached token is in no pack.
    plan = plan_packs(build([[1] * 6 + [2] * 3, [1] * 6 + [3] * 4]), 100, [5, 3, 0])
    assert [p.length for p in plan.pieces] == [5, 1, 3, 4]
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
    assert forwarded == sorted(forwarded)
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
        if i not in forwarded:  # cached
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
        following, packs = {i}, [-1]
        own = next((number for number, pack in enumerate(plan.packs) if i in pack), None)
        for number, j in ((number, j) for number, pack in enumerate(plan.packs) for j in pack):
            if plan.pieces[j].past in following:
                following.add(j)
                packs += [number] if number != own else []
        assert last == max(packs)


@given(lengths=st.lists(st.integers(0, 50), max_size=40), budget=st.integers(1, 300))
def test_micro_batches_hold_every_sequence_once_and_as_many_as_fit(lengths, budget):
    """Empty sequences are in none. Padding counts. Only a single sequence may exceed the budget."""
    given_lengths = torch.tensor(lengths, dtype=torch.long)
    planned = [batch.tolist() for batch in plan_micro_batches(given_lengths, budget)]
    assert given_lengths.tolist() == lengths, "nothing is mutated"
    assert sorted(i for batch in planned for i in batch) == [i for i, length in enumerate(lengths) if length > 0]
    for number, batch in enumerate(planned):
        longest = max(lengths[index] for index in batch)
        assert len(batch) * longest <= budget or len(batch) == 1
        # The next sequence is shorter: it would be in the batch if it fitted.
        assert number == len(planned) - 1 or (len(batch) + 1) * longest > budget


def test_micro_batches_by_hand():
    """Sequences of similar lengths share one. The longest come first."""
    batches = plan_micro_batches(torch.tensor([3, 100, 4, 99, 0]), 200)
    assert [batch.tolist() for batch in batches] == [[1, 3], [2, 0]]
    with pytest.raises(ValueError, match="tokens_per_batch must be at least 1, got 0"):
        plan_micro_batches(torch.tensor([1]), 0)
