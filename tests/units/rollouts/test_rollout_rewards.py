"""The reward of each token, and denominators that are stored with the rows of a batch."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from refused import refused
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts import outcomes, read_denominators, token_reward, write_denominators

KEEP = torch.tensor([[True, True, True, False], [False, True, True, True]])
PADDED = Ragged.from_padded(torch.zeros(2, 4), mask=KEEP)
MASK = torch.tensor([False, True, False, False, False, False])  # the second sequence has no response


def test_token_reward() -> None:
    two = torch.tensor([2.0, 3.0])
    for reward, mask, placement, expected in (
        (None, None, "last", [0, 0, 0, 0, 0, 0]),
        (two, None, "last", [0, 0, 2, 0, 0, 3]),
        (two, MASK, "last", [0, 2, 0, 0, 0, 3]),
        (two.unsqueeze(1), MASK, "broadcast", [2, 2, 2, 3, 3, 3]),
        (two.long(), None, "last", [0, 0, 2, 0, 0, 3]),
        (torch.arange(8.0).reshape(2, 4, 1), MASK, "last", [0, 1, 2, 5, 6, 7]),
        ([torch.arange(4.0), torch.arange(4.0)], None, "broadcast", [0, 1, 2, 1, 2, 3]),
        ([two[0], two[1]], None, "last", [0, 0, 2, 0, 0, 3]),
    ):
        found = token_reward(reward, PADDED, mask, placement).values  # type: ignore[arg-type]
        assert found.shape == (6, 1)
        assert found.dtype == torch.float32
        assert found.squeeze(-1).tolist() == expected, (reward, placement)


test_a_reward_that_fits_nothing = refused(
    lambda reward: token_reward(reward, PADDED, None, "last"),
    (torch.zeros(2, 2), ValueError, r"shape \(2, 2\) but the kl has \[4, 4\] tokens per sequence"),
    (torch.zeros(3), ValueError, r"the reward has shape \(3,\): expected as many numbers for each of 2 rows"),
)


def test_an_empty_sequence_cannot_hold_its_outcome() -> None:
    like = Ragged.from_list([torch.zeros(2), torch.zeros(0)])
    assert token_reward(torch.tensor([1.0, 0.0]), like, None, "last").values.flatten().tolist() == [0.0, 1.0]
    none = Ragged.from_list([torch.zeros(0), torch.zeros(0)])
    assert token_reward(torch.zeros(2), none, torch.zeros(0, dtype=torch.bool), "last").values.shape == (0, 1)
    middle = Ragged.from_list([torch.zeros(1), torch.zeros(0), torch.zeros(2)])
    placed = token_reward(torch.tensor([1.0, 0.0, 2.0]), middle, torch.tensor([False, True, False]), "last")
    assert placed.values.flatten().tolist() == [1.0, 2.0, 0.0]
    with pytest.raises(ValueError, match="sequence 1 has no token for its reward of 3"):
        token_reward(torch.tensor([1.0, 3.0]), like, None, "last")


def test_padded_and_listed_rewards_have_the_same_outcome_to_the_last_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(length, generator=generator) for length in (61, 37, 61, 5)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=torch.nan)
    data = TensorDict({("tokens", "full"): torch.ones(4, 61), ("masks", "all_attention_mask"): ~padded.isnan()}, [4])
    found = outcomes(data, padded.unsqueeze(-1), "the reward")
    exact = torch.stack([row.double().sum() for row in rows])
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=0)
    assert torch.equal(found, outcomes(TensorDict(batch_size=[4]), rows, "the reward"))


COUNTS = {("policy", "token-mean"): torch.tensor(7), ("kl", "seq-mean-token-sum"): torch.tensor(3)}
TERMS = list(COUNTS)
ID = torch.tensor(5.0)


def test_denominators_come_back_from_any_rows() -> None:
    for lazy, key in ((False, "denominators"), (True, ("loss", "denominators"))):
        data: Any = TensorDict(x=torch.zeros(4), batch_size=[4])
        data = lazy_stack(list(data.unbind(0))) if lazy else data
        assert read_denominators(data, key, TERMS) is None
        write_denominators(data, key, COUNTS, ID)
        for part in (data, data[1:3], data[:1]):
            found = read_denominators(part, key, TERMS)
            assert found is not None
            assert {name: int(value) for name, value in found.items()} == {"policy": 7, "kl": 3}


def test_rows_that_were_counted_apart() -> None:
    data = TensorDict(batch_size=[2])
    write_denominators(data, "n", COUNTS, ID)
    data["n", "batch"] = torch.tensor([5.0, 6.0])
    equal = r"rows of 2 batches that were counted apart \(\[7\] of policy; \[3\] of kl"
    with pytest.raises(ValueError, match=equal):
        read_denominators(data, "n", TERMS)
    assert read_denominators(data[1:], "n", TERMS) == {"policy": 7, "kl": 3}
    data["n", "kl/seq-mean-token-sum"] = torch.tensor([3, 4])
    with pytest.raises(ValueError, match=r"counted apart \(\[7\] of policy; \[3, 4\] of kl"):
        read_denominators(data, "n", TERMS)


def test_denominators_of_another_loss() -> None:
    data = TensorDict(batch_size=[2])
    write_denominators(data, "n", COUNTS, ID)
    with pytest.raises(ValueError, match="was counted for kl/seq-mean-token-sum, policy/token-mean, not for x/none"):
        read_denominators(data, "n", [("x", "none")])
