"""The truth that the scorer is held to: one sequence at a time through the plain model, nothing padded or trimmed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrl_llm_kl.ragged import Ragged
from toy_models import VOCAB_SIZE


def random_sequences(*lengths: int, seed: int = 0, vocab: int = VOCAB_SIZE) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    return Ragged.from_list([torch.randint(vocab, (length,), generator=generator) for length in lengths])


def random_mask(sequences: Ragged, *, keep: float = 0.5, seed: int = 0) -> Tensor:
    """A mask with holes, False at first tokens."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(sequences.values.shape, generator=generator) < keep) & (sequences.positions > 0)


def plain_log_probs(
    model: nn.Module, sequences: Ragged, mask: Tensor | None = None, *, temperature: float = 1.0
) -> Tensor:
    """``[N]``, 0 where nothing is scored."""
    rows = []
    for ids in sequences.to_list():
        row = torch.zeros(len(ids))
        if len(ids) > 1:
            output = model(input_ids=ids[None])
            logits = (output.logits if hasattr(output, "logits") else output[0])[0].float() / temperature
            row = torch.cat([row[:1], logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None]).squeeze(-1)])
        rows.append(row)
    flat = torch.cat(rows)
    return flat if mask is None else torch.where(mask, flat, 0.0)
