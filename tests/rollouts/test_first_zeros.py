"""Which zeros of an engine's log-probs were never computed."""

from __future__ import annotations

import pytest
import torch

from torchrl_llm_kl import Ragged
from torchrl_llm_kl.rollouts import zeros_of_first_tokens

ROWS = [torch.arange(3), torch.arange(2)]
MASK = torch.tensor([False, True, True, False, True])


@pytest.mark.parametrize(
    ("log_prob", "expected"),
    [
        (
            [0, 0, -1, 0, 0],
            [False, True, False, False, True],
        ),  # an answer of one token, beside one that shows the habit
        (
            [0, -2, -1, 0, 0],
            [False, False, False, False, False],
        ),  # the engine scores first tokens: 0 is a probability of 1
        ([0, 0, 0, 0, 0], [False, False, False, False, False]),  # nothing is known
        ([0, 0, -1, 0, -1], [False, True, False, False, False]),
    ],
)
def test_first_tokens_that_were_never_computed(log_prob: list[int], expected: list[bool]) -> None:
    found = zeros_of_first_tokens(torch.tensor(log_prob).float(), MASK, Ragged.from_list(ROWS))
    assert found.tolist() == expected


def test_each_run_of_the_mask_has_a_first_token() -> None:
    tokens = Ragged.from_list([torch.arange(6)])
    mask = torch.tensor([False, True, True, False, True, True])
    found = zeros_of_first_tokens(torch.tensor([0.0, 0.0, -1.0, 0.0, 0.0, 0.0]), mask, tokens)
    assert found.tolist() == [False, True, False, False, True, False]
