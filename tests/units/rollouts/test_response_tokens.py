"""Response tokens as dense tensors and back, and zeros that are not scores, against values by hand."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts import ResponseTokens, mismatch, zeros_of_first_tokens

# Three sequences of 3, 2 and 1 tokens, of which 2, 1 and 0 are masked in; the first response has a gap.
MASK = torch.tensor([True, False, True, False, True, False])
VALUES = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
KEEP = torch.tensor([[True, True, True], [False, True, True], [True, False, False]])


def layout(name: str) -> Ragged:
    rows = [torch.zeros(3), torch.zeros(2), torch.zeros(1)]
    if name == "padded":
        return Ragged.from_padded(torch.zeros(3, 3), mask=KEEP)
    if name == "rows":
        return Ragged.from_list(rows)
    return Ragged.from_nested(torch.nested.as_nested_tensor(rows, layout=getattr(torch, name)))


@pytest.mark.parametrize("name", ["padded", "rows", "strided", "jagged"])
def test_gather_and_scatter(name: str) -> None:
    response = ResponseTokens(layout(name), MASK)
    assert response.mask.tolist() == [[True, True], [True, False], [False, False]]
    gathered = response.gather(VALUES)
    assert gathered.tolist() == [[1.0, 3.0], [5.0, 0.0], [0.0, 0.0]]
    assert response.scatter(gathered).tolist() == [1.0, 0.0, 3.0, 0.0, 5.0, 0.0]
    # Values at masked-out places of the dense form are ignored.
    assert response.scatter(torch.full((3, 2), 7.0)).tolist() == [7.0, 0.0, 7.0, 0.0, 7.0, 0.0]
    rows = [[1.0, 0.0, 3.0], [0.0, 5.0], [0.0]]
    if name == "padded":
        rows = [[1.0, 0.0, 3.0], [0.0, 0.0, 5.0], [0.0, 0.0, 0.0]]
    assert [row.tolist() for row in response.restore(gathered)] == rows
    data = lazy_stack([TensorDict() for _ in range(3)]) if name == "rows" else TensorDict(batch_size=[3])
    written = response.write(data, ("out", "x"), response.scatter(gathered))
    found = written.get(("out", "x"), as_list=True)
    assert [row.squeeze(-1).tolist() for row in (found if isinstance(found, list) else found.unbind())] == rows


def test_values_of_whole_sequences_and_of_pairs() -> None:
    tokens = Ragged.from_list([torch.zeros(2)] * 4, torch.Size([2, 2]))
    response = ResponseTokens(tokens, torch.ones(8, dtype=torch.bool))
    for values, expected in (([[1.0], [2.0], [3.0], [4.0]], [[1.0, 2.0], [3.0, 4.0]]), ([[1.0], [2.0]], [1.0, 2.0])):
        restored = response.restore(torch.tensor(values))
        assert isinstance(restored, torch.Tensor)
        assert restored.tolist() == expected


def test_numbers_per_sequence_and_the_gradient_of_masked_in_tokens() -> None:
    response = ResponseTokens(layout("padded"), MASK)
    assert response.broadcast(torch.tensor([2.0, 3.0, 4.0])).tolist() == [2.0, 0.0, 2.0, 0.0, 3.0, 0.0]
    assert response.mean(torch.tensor([1.0, torch.nan, 3.0, torch.inf, 5.0, 6.0])).tolist() == [2.0, 5.0, 0.0]
    values = VALUES.clone().requires_grad_()
    weights = torch.tensor([[1.0, 2.0], [3.0, 9.0], [9.0, 9.0]])
    (found,) = torch.autograd.grad((response.gather(values) * weights).sum(), values)
    assert found.tolist() == [1.0, 0.0, 2.0, 0.0, 3.0, 0.0]


def test_an_empty_mask() -> None:
    response = ResponseTokens(layout("rows"), torch.zeros(6, dtype=torch.bool))
    assert response.is_empty
    assert not ResponseTokens(layout("rows"), MASK).is_empty
    assert response.gather(VALUES).tolist() == [[0.0], [0.0], [0.0]]
    assert response.mean(VALUES).tolist() == [0.0, 0.0, 0.0]


def test_the_first_number_that_is_not_finite_is_named() -> None:
    response = ResponseTokens(layout("padded"), MASK)
    values = torch.tensor([[1.0, torch.nan], [2.0, torch.inf], [torch.nan, torch.nan]])
    response.check_finite(
        {"x": torch.where(response.mask & ~values.isfinite(), 0, values)}
    )  # only padding is not finite
    with pytest.raises(ValueError, match=r"x is nan at sequence 0, position 2: expected a finite number\. Mask"):
        response.check_finite({"x": values})
    response.check_finite({"ids": torch.ones(3, 2, dtype=torch.long), "per sequence": torch.tensor([[torch.nan]] * 3)})


def test_scatter_inverts_gather() -> None:
    """Uneven responses. The columns 0 1 2 0 0 1 are no palindrome, so a reversed order fails."""
    tokens = Ragged.from_list([torch.arange(4), torch.arange(2), torch.arange(3)])
    mask = torch.tensor([False, True, True, True, False, True, False, True, True])
    response = ResponseTokens(tokens, mask)
    values = torch.tensor([10.0, 11.0, 12.0, 13.0, 20.0, 21.0, 30.0, 31.0, 32.0])
    assert response.gather(values).tolist() == [[11.0, 12.0, 13.0], [21.0, 0.0, 0.0], [31.0, 32.0, 0.0]]
    assert response.scatter(response.gather(values)).tolist() == [0.0, 11.0, 12.0, 13.0, 0.0, 21.0, 0.0, 31.0, 32.0]


def test_mismatch_leaves_sequences_without_an_answer_unchanged() -> None:
    tokens = Ragged.from_list([torch.tensor(row) for row in ([1, 2, 3], [8, 9], [4, 5, 6, 7])])
    mask = torch.tensor([False, True, True, False, False, False, False, True, True])
    mixed, marks = mismatch(tokens, mask)
    assert [row.tolist() for row in mixed.to_list()] == [[1, 6, 7], [8, 9], [4, 5, 2, 3]]
    assert mixed.like(marks).to_list()[1].tolist() == [False, False]
    assert marks.sum() == 4


# ------------------------------------------------------------------ zeros of an engine's log-probs that were never computed
FIRST_ZEROS = {
    "torchrl's habit": ([0, -1], [True, False]),
    "the first token is scored": ([-2, 0], [False, False]),
    "a token of probability 1 after it": ([0, 0], [True, False]),
    "an answer of one token": ([0], [True]),
    "a scored answer of one token": ([-1], [False]),
    "no answer": ([], []),
}


def test_first_tokens_that_were_never_computed() -> None:
    """Each row has the same result alone, in a batch, and in a reversed batch."""
    cases = list(FIRST_ZEROS.values())
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
