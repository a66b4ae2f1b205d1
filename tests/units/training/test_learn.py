"""Updates on a prepared batch."""

import copy

import pytest
import torch

from torchrl_llm_kl import make_algorithm, tiny_chat_model
from torchrl_llm_kl.datasets import from_conversations
from torchrl_llm_kl.training import learn, loss_entries


@pytest.mark.parametrize("answers", [["yes", "no no no"], ["yes", "yes"]], ids=["ragged", "equal lengths"])
def test_entries_of_a_loss_give_the_update_of_the_whole_batch(answers):
    """Conversations of unequal lengths stay a stack of rows. Others become dense."""
    model, tokenizer = tiny_chat_model()
    turns = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}] for answer in answers]
    batch, weights = from_conversations(turns, tokenizer), []
    for choose in (lambda rows: rows, loss_entries):
        own = copy.deepcopy(model)
        parts = make_algorithm("sft", own)
        rows = choose(parts.prepare(batch.clone()))
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        learn(parts, rows, optimizer, micro_batch=1)
        weights.append(torch.cat([p.detach().flatten() for p in own.parameters()]))
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (weights[0] - start).abs().max() > 1e-4
    assert weights[0].equal(weights[1])
