"""Which zeros of an engine's log-probs were never computed."""

from __future__ import annotations

import torch

from torchrl_llm_kl import Ragged
from torchrl_llm_kl.rollouts import zeros_of_first_tokens

CASES = {
    "torchrl's habit": ([0, -1], [True, False]),
    "the first token is scored": ([-2, 0], [False, False]),
    "a token of probability 1 after it": ([0, 0], [True, False]),
    "an answer of one token": ([0], [True]),
    "a scored answer of one token": ([-1], [False]),
    "no answer": ([], []),
}


def test_first_tokens_that_were_never_computed() -> None:
    """Alone and in a batch: the parts of a batch have the tokens of the whole, whatever the other rows show."""
    cases = list(CASES.values())
    for rows in (*([case] for case in cases), cases, cases[::-1]):
        tokens = Ragged.from_list([torch.arange(1 + len(row)) for row, _ in rows])
        log_prob = torch.tensor([x for row, _ in rows for x in (0, *row)]).float()
        found = zeros_of_first_tokens(log_prob, tokens.positions > 0, tokens)
        assert found.tolist() == [x for _, expected in rows for x in (False, *expected)], rows


def test_each_run_of_the_mask_has_a_first_token() -> None:
    tokens = Ragged.from_list([torch.arange(6)])
    mask = torch.tensor([False, True, True, False, True, True])
    found = zeros_of_first_tokens(torch.tensor([0.0, 0.0, -1.0, 0.0, 0.0, 0.0]), mask, tokens)
    assert found.tolist() == [False, True, False, False, True, False]
    rows = Ragged.from_list([torch.arange(2), torch.arange(2)])  # a run ends with its sequence
    assert zeros_of_first_tokens(torch.zeros(4), torch.ones(4).bool(), rows).tolist() == [True, False, True, False]
