"""Images of conversations: taken out of the messages, and put through a processor of transformers with the rendered text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_llm_kl.masks._messages import AssistantMaskError, Message
from torchrl_llm_kl.masks._tokens import Span, encode_with_mask

_SOURCES = ("image", "url", "path", "base64", "data", "image_url")
# Entries of a processor's output that are of the tokens.
_OF_TOKENS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"}


def is_processor(tokenizer: object) -> bool:
    """Whether it is a processor of images and text, which holds a tokenizer."""
    return hasattr(tokenizer, "image_processor") and hasattr(tokenizer, "tokenizer")


def split_images(messages: Sequence[Message]) -> tuple[list[Message], list[object]]:
    """The messages, with parts ``{"type": "image"}`` in place of images, and the images in order: pixels, paths or URLs.

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
        raise ValueError(f"a message has a part of type {kind!r}: expected text and images.")
    if not isinstance(part, Mapping) or kind not in ("image", "image_url"):
        return part
    source = next((part[name] for name in _SOURCES if part.get(name) is not None), None)
    source = source.get("url") if isinstance(source, Mapping) else source
    if source is None:  # no pixels to lose: the text of a placeholder
        return part
    images.append(source)
    return {"type": "image"}


def encode_images(
    processor: Any, text: str, images: Sequence[object], *spans: Sequence[Span]
) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """The token ids of a rendered text with its images, and the mask of each list of character spans.

    Args:
        processor: of transformers.
        text: with one placeholder for each image, as a chat template writes it.
        images: in a form that the processor takes.
        spans: as :func:`encode_with_mask` takes them.

    Returns:
        ``(token_ids, mask)`` for each of the ``spans``, and the output of the processor for the images.

    Raises:
        AssistantMaskError: if the processor does not say where it writes the placeholders, or tokenises otherwise.
    """
    options = {"return_text_replacement_offsets": True, "add_special_tokens": False, "return_tensors": "pt"}
    inputs = processor(text=[text], images=[list(images)], **options)
    (moves,) = inputs.get("text_replacement_offsets") or [[]]
    if len(moves) != len(images):
        raise AssistantMaskError(
            f"{type(processor).__name__} reports the places of {len(moves)} of {len(images)} images: use transformers 5.23 or "
            "later, and a template with one placeholder for each."
        )
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
        raise AssistantMaskError(f"{type(processor).__name__} tokenises the text otherwise than its tokenizer.")
    return pairs, {name: value for name, value in inputs.items() if name not in _OF_TOKENS}
