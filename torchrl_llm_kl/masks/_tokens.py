"""Token masks: from character spans of a text, from prompt lengths, or from a processor of images and text."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from torchrl_llm_kl.masks._messages import AssistantMaskError, Message, Tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding

Span = tuple[int, int]


def encode_with_mask(
    tokenizer: Tokenizer, texts: Sequence[str], spans: Sequence[Sequence[Span]], *, add_bos: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """Tokenise each text once and mask the tokens that contain a character of one of its spans.

    A token that straddles the border of a span is masked in: the model produced part of it, and without it the mask of a
    short turn could be empty. The exception is a special token that starts before the span and extends into it only by
    absorbing white space. Such a token is part of the role header.

    Args:
        tokenizer: a transformers tokenizer. With a slow one, cutting the text at the borders must not change the tokens.
        texts: rendered conversations, or plain texts.
        spans: for each text, disjoint character spans ``(start, end)``.

    Keyword Args:
        add_bos: begin each text with BOS if the tokenizer adds one to plain text. A chat template writes BOS itself.

    Returns:
        For each text ``(token_ids, mask)``, int64 and bool ``[T]``. The mask is False for the first token.
    """
    if tokenizer.is_fast:
        batch = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        columns = zip(texts, batch["input_ids"], batch.encodings, spans, strict=True)
        pairs = [_mask_by_offsets(tokenizer, *row) for row in columns]
    else:
        pairs = [_mask_by_pieces(tokenizer, *row) for row in zip(texts, spans, strict=True)]
    if add_bos and (bos := tokenizer.bos_token_id) is not None and bos in tokenizer("").input_ids[:1]:
        pairs = [
            (ids, mask)
            if ids[:1].tolist() == [bos]
            else (torch.cat([torch.tensor([bos]), ids]), torch.cat([torch.tensor([False]), mask]))
            for ids, mask in pairs
        ]
    for _, mask in pairs:
        mask[:1] = False
    return pairs


def mask_from_prompt_lengths(prompt_lengths: Tensor, lengths: Tensor) -> Tensor:
    """Mask of the response tokens of sequences laid end to end.

    Token ids are not used: a sampled end token stays in the mask even if it is also the padding token.

    Args:
        prompt_lengths: number of prompt tokens of each sequence, integer ``[S]``.
        lengths: number of tokens of each sequence, prompt and response together, integer ``[S]``.

    Returns:
        Bool ``[lengths.sum()]``, on the device of ``lengths``: True from the first response token on, except for the
        first token of a sequence, which has no prefix and no log-prob.

    Example:
        >>> mask_from_prompt_lengths(torch.tensor([2, 0]), torch.tensor([4, 3])).tolist()
        [False, False, True, True, False, True, True]
    """
    if prompt_lengths.ndim != 1 or prompt_lengths.shape != lengths.shape:
        shapes = f"{tuple(prompt_lengths.shape)} and {tuple(lengths.shape)}"
        raise ValueError(f"prompt_lengths and lengths have the shapes {shapes}, expected [S] for both.")
    prompt_lengths = prompt_lengths.to(lengths.device)
    wrong = ((prompt_lengths < 0) | (prompt_lengths > lengths)).nonzero().flatten().tolist()
    if wrong:
        found = f"{int(prompt_lengths[wrong[0]])} of {int(lengths[wrong[0]])} tokens"
        raise ValueError(f"the prompt of sequence {wrong[0]} has {found}, expected 0 <= prompt length <= length.")
    # At least 1: the first token of a sequence is never masked in.
    first_response = lengths.cumsum(0) - lengths + prompt_lengths.clamp(min=1)
    position = torch.arange(int(lengths.sum()), device=lengths.device)
    return position >= first_response.repeat_interleave(lengths)


def _mask_by_offsets(
    tokenizer: Tokenizer, text: str, ids: list[int], encoding: Encoding, spans: Sequence[Span]
) -> tuple[Tensor, Tensor]:
    """Find the tokens of each span by bisection over token ends, since a list of all offsets is slow to build.

    Some tokenizers trim white space from their offsets. A character without a token belongs to the next token.
    """
    tokens, mask = range(len(ids)), np.zeros(len(ids), bool)
    offsets = cast("Callable[[int], Span]", encoding.token_to_chars)  # None only for a token that does not exist
    ends = list(accumulate((end for _, end in encoding.offsets), max)) if _ends_may_decrease(tokenizer) else None

    def last(token: int) -> int:
        return offsets(token)[1] if ends is None else ends[token]

    def inside(character: int) -> bool:
        return any(start <= character < end for start, end in spans)

    for start, end in (span for span in spans if span[0] < span[1]):
        low = bisect_right(tokens, start, key=last)
        high = bisect_left(tokens, end, low, key=last) + 1
        while high < len(ids) and offsets(high)[0] < end:  # one character may have several byte tokens
            high += 1
        mask[low:high] = True
        for token in tokens[low:high]:
            begin = min(offsets(token)[0], last(token - 1) if token else 0)
            if begin >= start:
                break
            if not inside(begin) and all(text[c].isspace() or not inside(c) for c in range(begin, last(token))):
                mask[token] = ids[token] not in tokenizer.added_tokens_decoder
    return torch.from_numpy(np.array(ids, np.int64)), torch.from_numpy(mask)


def _ends_may_decrease(tokenizer: Tokenizer) -> bool:
    """Whether token ends may decrease: a normalizer inserts characters of zero width, and white space is trimmed."""
    backend = tokenizer.backend_tokenizer
    trims = backend.post_processor is not None and b'"trim_offsets":true' in backend.post_processor.__getstate__()
    return trims and backend.normalizer is not None


def _mask_by_pieces(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Tokenise the pieces between the borders, for a tokenizer without offsets.

    The tokens of the pieces must equal the tokens of the whole text.
    """
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
            f"{type(tokenizer).__name__} has no character offsets, and token {at} of {len(whole)} changes when the text is "
            "cut: use the fast tokenizer (use_fast=True)."
        )
    return torch.tensor(whole, dtype=torch.long), torch.tensor(mask, dtype=torch.bool)


# ------------------------------------------------------------------ images

_SOURCES = ("image", "url", "path", "base64", "data", "image_url")
# Entries of a processor's output that describe the tokens rather than the images.
_OF_TOKENS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"}


def is_processor(tokenizer: object) -> bool:
    """Whether this is a processor of images and text, which contains a tokenizer."""
    return hasattr(tokenizer, "image_processor") and hasattr(tokenizer, "tokenizer")


def split_images(messages: Sequence[Message]) -> tuple[list[Message], list[object]]:
    """Replace each image in the messages by a part ``{"type": "image"}``.

    Returns:
        The new messages, and the images in order: pixels, paths or URLs.

    Raises:
        ValueError: for a video or sound.

    Example:
        >>> split_images([{"role": "user", "content": [{"type": "image", "path": "cat.png"}, {"type": "text", "text": "?"}]}])
        ([{'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': '?'}]}], ['cat.png'])
    """
    images: list[object] = []
    out: list[Message] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            content = [_part(part, images) for part in content]
        out.append({**message, "content": content} if "content" in message else dict(message))
    return out, images


def _part(part: object, images: list[object]) -> object:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("video", "audio", "input_audio"):
        raise ValueError(f"a message has a part of type {kind!r}, expected only text and images.")
    if not isinstance(part, Mapping) or kind not in ("image", "image_url"):
        return part
    source = next((part[name] for name in _SOURCES if part.get(name) is not None), None)
    source = source.get("url") if isinstance(source, Mapping) else source
    if source is None:  # a placeholder without pixels is kept as text
        return part
    images.append(source)
    return {"type": "image"}


def encode_images(
    processor: Any, text: str, images: Sequence[object], *spans: Sequence[Span]
) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """Tokenise a rendered text with its images, and mask the tokens of each list of character spans.

    Args:
        processor: a transformers processor.
        text: the text, with one placeholder per image, as a chat template writes it.
        images: the images, in a form that the processor accepts.
        spans: lists of character spans, as in :func:`encode_with_mask`.

    Returns:
        ``(token_ids, mask)`` for each list of spans, and the processor's output for the images.

    Raises:
        AssistantMaskError: if the processor and its tokenizer produce different token ids. The mask would not fit them.
    """
    # The offsets show where the processor replaces placeholders, so that the spans can be moved.
    options = {"return_text_replacement_offsets": True, "add_special_tokens": False, "return_tensors": "pt"}
    inputs = processor(text=[text], images=[list(images)], **options)
    (moves,) = inputs.get("text_replacement_offsets") or [[]]
    # The processor expands each placeholder. `gained` is the shift of the text after each of them.
    ends, gained, pieces, last = [], [0], [], 0
    for move in moves:
        start, end = move["span"]
        pieces += [text[last:start], move["replacement"]]
        ends.append(end)
        gained.append(move["new_span"][1] - end)
        last = end
    whole = "".join([*pieces, text[last:]])
    moved = [[tuple(x + gained[bisect_right(ends, x)] for x in span) for span in some] for some in spans]
    pairs = encode_with_mask(processor.tokenizer, [whole] * len(spans), moved)  # type: ignore[arg-type]
    ids = torch.as_tensor(inputs["input_ids"]).reshape(-1)
    if any(not torch.equal(each, ids) for each, _ in pairs):
        raise AssistantMaskError(
            f"{type(processor).__name__} tokenises the text with its {len(images)} images differently from its tokenizer: use "
            "transformers 5.23 or later, and a template with one placeholder for each image."
        )
    return pairs, {name: value for name, value in inputs.items() if name not in _OF_TOKENS}
