"""From character spans to a token mask."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torchrl_llm_kl.masks._errors import AssistantMaskError

__all__: list[str] = []

Span = tuple[int, int]


def encode_with_mask(
    tokenizer: Any, texts: Sequence[str], spans: Sequence[Sequence[Span]]
) -> list[tuple[Tensor, Tensor]]:
    """Tokenises each text once and masks the tokens that hold a character of one of its spans.

    A token that straddles the border of a span counts: some of what the model had to produce is in it, and leaving it
    out could leave a short turn without any token. The exception is a special token that begins before the span and
    reaches into it only because it swallows the white space behind it: a role header stays a role header.

    Args:
        tokenizer: a transformers tokenizer. A slow one is served when cutting the text at the borders leaves its tokens
            unchanged.
        texts: rendered conversations; no special tokens are added.
        spans: for each text, disjoint character spans ``(start, end)``.

    Returns:
        For each text ``(token_ids, mask)``, int64 and bool of shape ``[T]``; the first token is never True.
    """
    if getattr(tokenizer, "is_fast", False):
        batch = tokenizer(
            list(texts),
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        pairs = [
            _mask_by_offsets(tokenizer, text, ids, offsets, text_spans)
            for text, ids, offsets, text_spans in zip(
                texts, batch["input_ids"], batch["offset_mapping"], spans, strict=True
            )
        ]
    else:
        pairs = [_mask_by_pieces(tokenizer, text, text_spans) for text, text_spans in zip(texts, spans, strict=True)]
    for _, mask in pairs:
        mask[:1] = False
    return pairs


def _mask_by_offsets(
    tokenizer: Any, text: str, ids: list[int], offsets: list[Span], spans: Sequence[Span]
) -> tuple[Tensor, Tensor]:
    token_ids = torch.tensor(ids, dtype=torch.long)
    inside = torch.zeros(len(text), dtype=torch.bool)
    for start, end in spans:
        inside[start:end] = True
    if not ids or not spans:
        return token_ids, torch.zeros(len(ids), dtype=torch.bool)

    first, last = torch.tensor(offsets, dtype=torch.long).unbind(-1)
    last = last.cummax(0).values
    # Some tokenizers trim white space off their offsets: characters that no token claims belong to the next token.
    begin = torch.minimum(first, torch.cat([last.new_zeros(1), last[:-1]]))
    begin = torch.where(first > begin, begin, first)
    mask = _count(inside, begin, last) > 0

    reaches_in = mask & ~inside[begin.clamp(max=len(text) - 1)]
    if reaches_in.any():
        visible = inside & torch.tensor([not c.isspace() for c in text], dtype=torch.bool)
        only_space = _count(visible, begin, last) == 0
        added = tokenizer.added_tokens_decoder
        special = torch.tensor([i in added for i in ids], dtype=torch.bool)
        mask &= ~(reaches_in & only_space & special)
    return token_ids, mask


def _count(flags: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """How many of ``flags[begin:end]`` are True, for each pair."""
    total = torch.cat([flags.new_zeros(1, dtype=torch.long), flags.long().cumsum(0)])
    return total[end] - total[begin]


def _mask_by_pieces(tokenizer: Any, text: str, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Without offsets: tokenise between the borders, and accept only what equals the tokens of the whole text."""
    whole = list(tokenizer.encode(text, add_special_tokens=False))
    ids: list[int] = []
    mask: list[bool] = []
    borders = [0, *(border for span in spans for border in span), len(text)]
    for k, (start, end) in enumerate(pairwise(borders)):
        piece = list(tokenizer.encode(text[start:end], add_special_tokens=False)) if end > start else []
        ids += piece
        mask += [k % 2 == 1] * len(piece)
    if ids != whole:
        at = next((k for k, (a, b) in enumerate(zip(ids, whole, strict=False)) if a != b), min(len(ids), len(whole)))
        raise AssistantMaskError(
            f"{type(tokenizer).__name__} gives no character offsets, and tokenising the conversation in pieces changes "
            f"token {at} of {len(whole)}, so characters can't be mapped to tokens. Use the fast version of the "
            "tokenizer (AutoTokenizer.from_pretrained(..., use_fast=True))."
        )
    return torch.tensor(whole, dtype=torch.long), torch.tensor(mask, dtype=torch.bool)
