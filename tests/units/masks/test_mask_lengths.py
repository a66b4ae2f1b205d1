"""Response masks of flat data."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from torchrl_llm_kl.masks import mask_from_prompt_lengths


@pytest.mark.parametrize(
    ("prompt_lengths", "lengths", "expected"),
    [
        ([2, 1], [3, 4], [0, 0, 1, 0, 1, 1, 1]),
        ([0], [3], [0, 1, 1]),  # no prefix, no log-prob
        ([3], [3], [0, 0, 0]),  # no answer
        ([0, 0, 2], [0, 1, 3], [0, 0, 0, 1]),  # empty sequences
        ([], [], []),
    ],
)
def test_hand_made(prompt_lengths, lengths, expected):
    mask = mask_from_prompt_lengths(
        torch.tensor(prompt_lengths, dtype=torch.long), torch.tensor(lengths, dtype=torch.long)
    )
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == expected


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6), st.sampled_from([torch.int32, torch.long])
)
def test_counts(sizes, dtype):
    prompts = torch.tensor([p for p, _ in sizes], dtype=dtype)
    lengths = torch.tensor([p + r for p, r in sizes], dtype=dtype)
    per_sequence = [part.sum().item() for part in mask_from_prompt_lengths(prompts, lengths).split(lengths.tolist())]
    assert per_sequence == [r - (p == 0 and r > 0) for p, r in sizes]


@pytest.mark.parametrize(
    ("prompt_lengths", "lengths", "message"),
    [
        ([1, 4], [2, 3], "sequence 1 has prompt length 4 and length 3"),
        ([-1], [2], "sequence 0 has prompt length -1"),
        ([1], [2, 3], r"shape \(1,\) and lengths \(2,\)"),
        ([[1]], [[2]], "Flatten batch dimensions"),
    ],
)
def test_impossible_lengths(prompt_lengths, lengths, message):
    with pytest.raises(ValueError, match=message):
        mask_from_prompt_lengths(torch.tensor(prompt_lengths), torch.tensor(lengths))


def test_not_integers():
    with pytest.raises(TypeError, match=r"lengths has dtype torch.float32"):
        mask_from_prompt_lengths(torch.tensor([1]), torch.tensor([2.0]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_stays_on_the_device():
    mask = mask_from_prompt_lengths(torch.tensor([1]), torch.tensor([2], device="cuda"))
    assert mask.device.type == "cuda"
    assert mask.tolist() == [False, True]
