"""Images of conversations: extraction from messages, and encoding together with the rendered text by a processor."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_llm_kl.masks._messages import AssistantMaskError, Message
from torchrl_llm_kl.masks._tokens import Span, encode_with_mask

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
