"""Two tokenizers over one small alphabet, random teachers, and their probabilities by enumeration."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast


def merges_of(pieces: Sequence[str]) -> list[tuple[str, str]]:
    """Merges of a BPE with these pieces: each piece is merged from its longest known beginning and a known end."""
    return [
        next((piece[:n], piece[n:]) for n in range(len(piece) - 1, 0, -1) if {piece[:n], piece[n:]} <= {*pieces})
        for piece in pieces
        if len(piece) > 1
    ]


def small_tokenizer(*pieces: str, eos: str | None = "<eos>") -> Any:
    """A byte-level BPE of the pieces, which get the ids 0, 1, ... The end token comes last."""
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges_of(pieces)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)


class RandomTeacher(nn.Module):
    """Logits that depend on all tokens before them: a row of a random table, by a hash of the prefix.

    ``allowed`` maps a prefix to the tokens that may follow it. All other tokens have probability 0.
    """

    def __init__(self, vocab: int, *, seed: int = 0, allowed: Any = None) -> None:
        super().__init__()
        table = torch.randn(257, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.table, self.allowed = nn.Parameter(2 * table), allowed

    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        rows = []
        for ids in input_ids.tolist():
            state, places = 7, []
            for token in ids:
                state = (state * 31 + token + 1) % 257
                places.append(state)
            logits = self.table[places]
            if self.allowed is not None:
                allowed = [self.allowed(tuple(ids[: i + 1])) for i in range(len(ids))]
                out = torch.tensor([[t not in each for t in range(logits.shape[-1])] for each in allowed])
                logits = logits.masked_fill(out, -torch.inf)
            rows.append(logits)
        return (torch.stack(rows),)

    def next_probs(self, prefix: Sequence[int]) -> list[float]:
        with torch.no_grad():
            return self(torch.tensor([list(prefix)]))[0][0, -1].softmax(-1).tolist()


def starts_with(teacher: RandomTeacher, texts: Sequence[str], prefix: Sequence[int], text: str) -> float:
    """The probability that the tokens after ``prefix`` have a text that starts with ``text``, token by token.

    This is a plain recursion over all sequences of tokens. It uses neither ranges of a vocabulary nor alignments.
    """
    if not text:
        return 1.0
    total = 0.0
    for token, p in enumerate(teacher.next_probs(prefix)):
        piece = texts[token]
        if piece.startswith(text):
            total += p
        elif piece and text.startswith(piece):
            total += p * starts_with(teacher, texts, (*prefix, token), text[len(piece) :])
    return total


def tokenisations(texts: Sequence[str], text: str) -> Iterator[tuple[int, ...]]:
    """All sequences of tokens with this text."""
    if not text:
        yield ()
    for token, piece in enumerate(texts):
        if piece and text.startswith(piece):
            yield from ((token, *rest) for rest in tokenisations(texts, text[len(piece) :]))


def probability(teacher: RandomTeacher, prefix: Sequence[int], tokens: Sequence[int]) -> float:
    """The probability of some tokens after a prefix."""
    return math.prod(teacher.next_probs([*prefix, *tokens[:i]])[token] for i, token in enumerate(tokens))
