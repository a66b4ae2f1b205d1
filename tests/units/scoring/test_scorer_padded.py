"""Micro-batches of similar length under a token budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from torchrl_llm_kl.scoring import plan_micro_batches

LENGTHS = st.lists(st.integers(0, 50), max_size=40)


@given(lengths=LENGTHS, budget=st.integers(1, 300))
def test_every_sequence_exactly_once_and_empty_ones_never(lengths, budget):
    batches = plan_micro_batches(torch.tensor(lengths, dtype=torch.long), budget)
    planned = sorted(index for batch in batches for index in batch.tolist())
    assert planned == [index for index, length in enumerate(lengths) if length > 0]


@given(lengths=LENGTHS, budget=st.integers(1, 300))
def test_budget_counts_padding_and_yields_only_to_a_single_sequence(lengths, budget):
    for batch in plan_micro_batches(torch.tensor(lengths, dtype=torch.long), budget):
        rows, longest = len(batch), max(lengths[index] for index in batch.tolist())
        assert rows * longest <= budget or rows == 1


@given(lengths=LENGTHS, budget=st.integers(1, 300))
def test_no_micro_batch_is_smaller_than_it_needs_to_be(lengths, budget):
    """The next sequence is shorter: it would be in the batch if it fitted."""
    batches = plan_micro_batches(torch.tensor(lengths, dtype=torch.long), budget)
    for batch in batches[:-1]:
        assert (len(batch) + 1) * max(lengths[index] for index in batch.tolist()) > budget


def test_similar_lengths_share_a_micro_batch_longest_first():
    batches = plan_micro_batches(torch.tensor([3, 100, 4, 99, 0]), 200)
    assert [batch.tolist() for batch in batches] == [[1, 3], [2, 0]]


def test_lengths_are_not_mutated():
    lengths = torch.tensor([3, 1, 2])
    plan_micro_batches(lengths, 4)
    assert lengths.tolist() == [3, 1, 2]


def test_no_sequences():
    assert plan_micro_batches(torch.zeros(0, dtype=torch.long), 10) == []


@pytest.mark.parametrize(
    ("lengths", "budget", "message"),
    [([1], 0, "tokens_per_batch must be at least 1, got 0"), ([2, -3], 5, "got -3 for sequence 1")],
)
def test_bad_input(lengths, budget, message):
    with pytest.raises(ValueError, match=message):
        plan_micro_batches(torch.tensor(lengths), budget)
