"""The reference for the scorer, one sequence at a time through the plain model without padding; and sample data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from closeness import assert_near
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring import LogProbScorer
from toy_models import FORWARD, VOCAB_SIZE


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


def assert_scores(scorer: LogProbScorer, model: nn.Module, rows: list[Tensor], **options: bool) -> None:
    """The log-probs of each row equal those of the plain model, one row at a time."""
    found = scorer.score(Ragged.from_list(rows), **options).to_list()
    for row, log_probs in zip(rows, found, strict=True):
        with torch.no_grad():
            want = plain_log_probs(model, Ragged.from_list([row]))
        assert_near(log_probs, want, **FORWARD)


def ids(length: int, seed: int) -> Tensor:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))


#: Tokens of ``conversation()`` through the body, by hand.
SHARED = 37 + 16 + 18 + 12 + 10


def conversation() -> list[Tensor]:
    """Two groups of answers, one of which goes on for a second turn with two answers, and a stranger."""
    prompt, other = ids(20, 0), ids(18, 1)
    second = torch.cat([prompt, ids(17, 2)])
    return [
        torch.cat([prompt, ids(6, 3)]),
        torch.cat([prompt, ids(3, 4)]),
        torch.cat([second, ids(4, 5)]),
        torch.cat([second, ids(7, 6)]),
        torch.cat([other, ids(5, 7)]),
        torch.cat([other, ids(9, 8)]),
        ids(11, 9),
        ids(1, 10),
    ]


def body_tokens(model: Any, run: Any) -> int:
    """Real tokens that go through the first layer while ``run`` runs."""
    seen = 0

    def count(_: Any, args: Any, kwargs: Any) -> None:
        nonlocal seen
        mask = kwargs.get("attention_mask")
        seen += kwargs["input_ids"].numel() if mask is None else int(mask.sum())

    handle = model.get_decoder().register_forward_pre_hook(count, with_kwargs=True)
    run()
    handle.remove()
    return seen
