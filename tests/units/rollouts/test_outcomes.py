"""The outcome of a sequence does not depend on the layout of its token rewards, not even in the last bit."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from torchrl_llm_kl.rollouts import outcomes

LENGTHS = (61, 37, 61, 5)


def test_padded_and_listed_rewards_have_the_same_outcome_to_the_last_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(length, generator=generator) for length in LENGTHS]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=torch.nan)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)
    tokens = TensorDict(full=torch.ones_like(mask, dtype=torch.long), batch_size=[4])
    masks = TensorDict(all_attention_mask=mask, batch_size=[4])
    found = outcomes(TensorDict(tokens=tokens, masks=masks, batch_size=[4]), padded.unsqueeze(-1), "the reward")
    listed = outcomes(TensorDict(batch_size=[4]), rows, "the reward")
    exact = torch.stack([row.double().sum() for row in rows])
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=0)
    assert torch.equal(found, listed)
