"""Entries of a rollout: lookup, and values per token and per sequence."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data.llm import History

import layouts
from closeness import assert_near
from template_pairs import assistant, user
from torchrl_llm_kl import rollouts
from torchrl_llm_kl.masks import history_to_messages
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts import (
    batch_mean,
    describe_entries,
    drop_stale,
    find_key,
    per_sequence,
    per_token,
    require_key,
    with_a_row,
)
from torchrl_llm_kl.rollouts._rendered import row_histories


def holding(*keys: Any, lazy: bool = False) -> TensorDictBase:
    entries = {key: torch.ones(1) if lazy else torch.ones(2, 1) for key in keys}
    return lazy_stack([TensorDict(entries), TensorDict(entries)]) if lazy else TensorDict(entries, batch_size=[2])


FOUND = [
    (["reward"], "reward", "reward"),
    (["reward"], ("next", "reward"), "reward"),
    ([("next", "reward")], "reward", ("next", "reward")),
    ([("next", "reward")], ("next", "reward"), ("next", "reward")),
    (["reward", ("next", "reward")], "reward", "reward"),
    (["reward", ("next", "reward")], ("next", "reward"), ("next", "reward")),
    ([("log_probs", "full")], ("next", "log_probs", "full"), ("log_probs", "full")),
    ([("next", "log_probs", "full")], ("log_probs", "full"), ("next", "log_probs", "full")),
    (["reward"], "advantage", None),
    ([("next", "reward")], ("next", "advantage"), None),
]


@pytest.mark.parametrize("lazy", [False, True])
def test_a_key_falls_back_to_the_other_side_of_next(lazy: bool) -> None:
    for held, key, found in FOUND:
        assert find_key(holding(*held, lazy=lazy), key) == found, (held, key)


def test_a_missing_entry_error_lists_the_entries() -> None:
    data = lazy_stack([TensorDict(reward=torch.ones(1), query=torch.ones(1)), TensorDict(reward=torch.ones(1))])
    assert find_key(data, ("next", "query")) is None
    assert find_key(data, ("next", "reward")) == "reward"
    data = holding(("tokens", "full"), ("next", "reward"))
    assert require_key(data, "reward", "no reward", "Add one.") == ("next", "reward")
    with pytest.raises(rollouts.MissingEntryError) as error:
        require_key(data, "value", "no value", "Add one.")
    want = "no value: expected 'value' in the TensorDict, found: tokens.full; in 'next': reward. Add one."
    assert str(error.value) == want
    step, result = holding(("tokens", "full")), holding("reward")
    assert describe_entries(step) == "tokens.full"
    assert describe_entries(step, step) == "tokens.full"
    assert describe_entries(step, result) == "tokens.full; in 'next': reward"
    assert describe_entries(TensorDict(batch_size=[2])) == "nothing"


# Two sequences, prompts of 1 and 2 tokens, responses of 2 and 1; padded on both sides to 4 slots.
ROWS = [[10.0, 11.0, 12.0], [20.0, 21.0, 22.0]]
RESPONSES = torch.tensor([False, True, True, False, False, True])
UNPADDED = Ragged.from_list([torch.zeros(3), torch.zeros(3)])
PADDED = Ragged.from_padded(torch.zeros(2, 4), mask=torch.tensor([[True] * 3 + [False], [False] + [True] * 3]))


def under_x(value: Any) -> TensorDictBase:
    if isinstance(value, list):
        return lazy_stack([TensorDict(x=torch.tensor(row)) for row in value])
    return TensorDict(x=value, batch_size=[2])


VALUES = {
    "outcome": (torch.tensor([3.0, 4.0]), [3, 3, 3, 4, 4, 4]),
    "outcome [S, 1]": (torch.tensor([[3.0], [4.0]]), [3, 3, 3, 4, 4, 4]),
    "rows": (ROWS, [10, 11, 12, 20, 21, 22]),
    "dense": (torch.tensor(ROWS), [10, 11, 12, 20, 21, 22]),
    "dense with feature": (torch.tensor(ROWS).unsqueeze(-1), [10, 11, 12, 20, 21, 22]),
    "responses": ([[1.0, 2.0], [5.0]], [-9, 1, 2, -9, -9, 5]),
    "all but the first": ([[11.0, 12.0], [21.0, 22.0]], [-9, 11, 12, -9, 21, 22]),
}
VALUES_OF_PADDED = {
    "padding included": ([[1.0, 2.0, 3.0, -1.0], [-1.0, 4.0, 5.0, 6.0]], [1, 2, 3, 4, 5, 6]),
    "tokens": ([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [1, 2, 3, 4, 5, 6]),
    "responses": ([[1.0, 2.0], [5.0]], [-9, 1, 2, -9, -9, 5]),
    "response and padding after it": ([[1.0, 2.0, -1.0], [5.0]], [-9, 1, 2, -9, -9, 5]),
}


def test_values_at_each_token() -> None:
    for tokens, cases in ((UNPADDED, VALUES), (PADDED, VALUES_OF_PADDED)):
        for name, (value, expected) in cases.items():
            assert per_token(under_x(value), "x", tokens, RESPONSES, fill=-9).tolist() == expected, name


@pytest.mark.parametrize("layout", ["dense", "lazy"])
def test_one_number_for_each_response_of_one_token(layout: str) -> None:
    """The number belongs to that token, for log-probs and for counts of kept tokens."""
    full = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    tokens, responses = Ragged.from_padded(full), torch.tensor([False, False, False, True] * 2)
    counts, ids, log_probs = (
        torch.tensor([[3], [2]]),
        torch.tensor([[4, 9, 11], [8, 12, -1]]),
        torch.tensor([[-1.0], [-2.0]]),
    )
    entries = {("kept", "counts"): counts, ("kept", "ids"): ids, "x": log_probs}
    data = TensorDict(entries, batch_size=[2])
    if layout == "lazy":
        data = lazy_stack([TensorDict({key: value[i] for key, value in entries.items()}) for i in range(2)])
    found = per_token(data, "x", tokens, responses, fill=-9.0, repeats=False)
    assert found.tolist() == [-9, -9, -9, -1, -9, -9, -9, -2]
    ids_found, offsets = rollouts.read_kept(data, "kept", tokens, responses)[:2]
    assert ids_found.tolist() == [4, 9, 11, 8, 12]
    assert offsets.tolist() == [0, 0, 0, 0, 3, 3, 3, 3, 5]


def test_a_pad_token_that_was_sampled_first_leaves_the_response_where_it_is() -> None:
    """Padding is left of prompts and right of responses. The first response begins with a pad token."""
    keep = torch.tensor([[False, True, False, True, True], [True] * 5])
    tokens = Ragged.from_padded(torch.zeros(2, 5), mask=keep)
    responses = torch.tensor([False, True, True, False, False, True, True, True])
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert per_token(under_x(values), "x", tokens, responses, fill=-9).tolist() == [-9, 2, 3, -9, -9, 4, 5, 6]


def test_rows_of_other_lengths_are_refused() -> None:
    # With padding on the right, rows that lack the beginning of the response have no common alignment.
    tokens = Ragged.from_padded(torch.zeros(2, 6), mask=torch.tensor([[True] * 6, [True] * 5 + [False]]))
    responses = torch.tensor([False, False, True, True, True, True, False, False, False, True, True])
    with pytest.raises(ValueError, match="Pass one value per token"):
        per_token(under_x(torch.zeros(2, 4)), "x", tokens, responses)
    for value, message in (
        ([[1.0] * 4, [1.0] * 3], "sequence 0 has 4 values and 3 tokens"),
        ([[1.0], [1.0, 2.0, 3.0]], "must have the length of the tokens"),
        (torch.zeros(2, 3, 2), r"one number per token, found rows of \(2,\) each"),
    ):
        with pytest.raises(ValueError, match=message):
            per_token(under_x(value), "x", UNPADDED, RESPONSES)
    with pytest.raises(ValueError, match="'x' has 2 sequences, the tokens have 1"):
        per_token(under_x(torch.zeros(2, 3)), "x", Ragged.from_list([torch.zeros(3)]), None)


def test_one_number_per_sequence() -> None:
    for shape in ((2,), (2, 1), (2, 1, 1)):
        found = per_sequence(TensorDict(x=torch.tensor([3.0, 4.0]).reshape(shape), batch_size=[2]), "x")
        assert isinstance(found, Tensor)
        assert found.tolist() == [3.0, 4.0], shape
    assert per_sequence(under_x(torch.zeros(2, 3)), "x") is None  # several numbers
    assert per_sequence(under_x([[1.0], [1.0, 2.0]]), "x") is None
    assert per_sequence(under_x([[1.0], [2.0]]), "x").tolist() == [1.0, 2.0]  # type: ignore[union-attr]


def test_integers_and_booleans_are_filled_outside_the_response() -> None:
    numbers, flags = [[1, 2], [5]], [[True, True], [True]]
    for values, fill, want in ((numbers, -9.5, [-9.5, 1, 2, -9.5, -9.5, 5]), (flags, 0, [0, 1, 1, 0, 0, 1])):
        assert per_token(under_x(values), "x", UNPADDED, RESPONSES, fill=fill).tolist() == want
    top = per_token(under_x([[[1, 2], [3, 4]], [[5, 6]]]), "x", UNPADDED, RESPONSES, fill=0, features=1)
    assert top.tolist() == [[0, 0], [1, 2], [3, 4], [0, 0], [0, 0], [5, 6]]


def test_sums_of_rows_have_no_graph() -> None:
    dense = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    for value, want in ((dense, [3.0, 7.0]), ([dense[0], dense[1, :1]], [3.0, 3.0])):
        sums = rollouts.sequence_sums(value, 2, "the reward")
        assert (sums.tolist(), sums.requires_grad) == (want, False)


def test_a_rank_without_rows_has_one_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    data = TensorDict({"ids": torch.ones(0, 3, 2).long(), ("next", "reward"): torch.ones(0, 1)}, batch_size=[0])
    assert with_a_row(data) is data  # one process
    monkeypatch.setattr(rollouts._entries, "is_distributed", lambda: True)
    row = with_a_row(data)
    assert (row.batch_size, row["ids"].dtype, row["ids"].tolist()) == ((1,), torch.long, [[[0, 0]] * 3])
    assert row["next", "reward"].tolist() == [[0.0]]
    assert with_a_row(row) is row


def test_the_token_dimension_is_excluded_from_the_batch_size() -> None:
    reader = rollouts.TokenReader.of(None, ("tokens", "full"), "sft")
    full = TensorDict({("tokens", "full"): torch.ones(2, 3)}, batch_size=[2])
    assert reader.with_batch_dims(full) is full
    wide = TensorDict({("tokens", "full"): torch.ones(2, 3)}, batch_size=[2, 3])
    assert (reader.with_batch_dims(wide).batch_size, wide.batch_size) == ((2,), (2, 3))


def test_placeholders_are_removed_from_histories() -> None:
    chats = [[user("a"), assistant("b")], [user("c")]]
    padded = [chats[0], [*chats[1], {"role": "<none>", "content": ""}]]
    found = row_histories(TensorDict(history=History.from_chats(padded), batch_size=[2]), "history")
    assert [history_to_messages(row) for row in found] == chats
    assert [row.batch_size for row in found] == [(2,), (1,)]


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_means_of_answers_of_unequal_length(layout: str) -> None:
    """Answers of 2, 4 and 1 tokens have sums of 0.3, 1.0 and 0.8. Padding holds numbers that must not count."""
    kl = [[0.0, 0.0, 0.0, 0.1, 0.2], [0.0, 0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.8]]
    batch = layouts.tokens(layout, fill=9.0, kl_penalty=kl)
    assert_near(batch_mean(batch, ("next", "kl_penalty")), torch.tensor(2.1 / 3), terms=7)
    assert_near(batch_mean(batch, "kl_penalty", per="token"), torch.tensor(2.1 / 7), terms=7)
    batch = batch.set("outcome", torch.tensor([[1.0], [0.0], [0.5]]))  # a number for each sequence
    assert_near(batch_mean(batch, "outcome"), torch.tensor(0.5))


def test_a_mean_over_no_rows() -> None:
    td = layouts.tokens("padded")
    td = td.set("r", torch.ones(td.batch_size))[:0]
    assert batch_mean(td, "r").isnan()
    assert batch_mean(td, "r", per="token") == 0


def test_a_mean_of_a_missing_entry_is_refused() -> None:
    with pytest.raises(KeyError, match="the entry is missing: expected 'kl' in the TensorDict"):
        batch_mean(layouts.tokens("lazy"), "kl")
    with pytest.raises(ValueError, match="per must be one of 'sequence', 'token', got 'row'"):
        batch_mean(layouts.tokens("lazy"), "kl", per="row")  # type: ignore[arg-type]


# ------------------------------------------------------------------ ages


def test_old_tokens_and_an_earlier_mask_are_combined() -> None:
    versions, earlier = torch.tensor([[5, 5, 1], [1, 1, 1], [5, 4, 3]]), torch.tensor([True, True, False])
    batch = TensorDict(policy_version=versions, loss_mask=earlier, batch_size=[3])
    dropped = drop_stale(batch, 6, max_age=2)
    assert dropped["age"].tolist() == [[1, 1, 5], [5, 5, 5], [1, 2, 3]]
    assert dropped["loss_mask"].tolist() == [[True, True, False], [False] * 3, [False] * 3]
    assert dropped["left_out"].tolist() == [False, True, True]
    assert batch["loss_mask"] is earlier
    again = drop_stale(dropped, 9, max_age=5)
    assert again["left_out"].tolist() == [False, True, True], "rows that were left out before stay so"
    assert again["age"][0].tolist() == [4, 4, 8]


def test_ages_of_fresh_rows_change_no_mask() -> None:
    batch = drop_stale(TensorDict(policy_version=torch.tensor([4, 6]), batch_size=[2]), 6)
    assert batch["age"].tolist() == [2, 0]
    assert "loss_mask" not in list(batch.keys())


def test_versions_that_are_missing_or_in_the_future() -> None:
    with pytest.raises(ValueError, match="'policy_version' has version 7, later than the present one, 6"):
        drop_stale(TensorDict(policy_version=torch.tensor([4, 7]), batch_size=[2]), 6)
    with pytest.raises(KeyError, match="Collect with track_policy_version=True"):
        drop_stale(TensorDict(batch_size=[2]), 6)


def test_negative_versions_are_the_present_one_and_other_types_are_refused() -> None:
    batch = drop_stale(TensorDict(policy_version=torch.tensor([-1, 4]), batch_size=[2]), 6, max_age=1)
    assert batch["age"].tolist() == [0, 2]
    assert batch["loss_mask"].tolist() == [True, False]
    for versions in (torch.tensor([1.0, torch.nan]), ["a", "b"]):
        data = TensorDict(batch_size=[2])
        data["policy_version"] = versions
        with pytest.raises(TypeError, match="must hold dense integers"):
            drop_stale(data, 6)


def test_ages_of_lazily_stacked_rows() -> None:
    rows = [TensorDict(policy_version=torch.tensor([v]), x=torch.ones(v), batch_size=[]) for v in (2, 5)]
    dropped = drop_stale(lazy_stack(rows), 5, max_age=2)
    assert dropped["age"].tolist() == [[3], [0]]
    assert dropped["loss_mask"].tolist() == [[False], [True]]
    ragged = [TensorDict(policy_version=torch.ones(n, dtype=torch.long), batch_size=[]) for n in (2, 3)]
    with pytest.raises(TypeError, match="must hold dense integers"):
        drop_stale(lazy_stack(ragged), 5)
