"""What tokens look like: the text of one id, and a form of any text that shows what is invisible."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torchrl_llm_kl.masks import Tokenizer

#: Control and format characters, other line separators, tags and lone surrogates: they change how their neighbours look.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class TokenText:
    r"""The text of a token.

    Args:
        text: what the token adds to the text; for a part of a character, its bytes as ``\xe2``.
        data: the bytes of a part of a character, else empty.
        special: True for a special token.
    """

    text: str
    data: bytes = b""
    special: bool = False


def escaped(text: str) -> str:
    r"""Escape what changes how its neighbours look: ``\u{202e}`` for a direction mark, ``\u{1b}`` for an escape."""
    return _INVISIBLE.sub(lambda found: f"\\u{{{ord(found[0]):x}}}", text)


def visible(text: str) -> str:
    r"""Escape what cannot be seen: ``\u{202e}`` for a direction mark; a sign before each newline and tab."""
    return escaped(text).replace("\n", "↵\n").replace("\t", "→\t")


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[TokenText]:
    """The texts of single tokens, with the space that a decoder strips from the start of a text.

    Args:
        tokenizer: has ``convert_ids_to_tokens`` and ``decode``, as transformers' tokenizers have.
        ids: any integers; one that the tokenizer does not know is shown as its number.
    """
    special = {int(i) for i in getattr(tokenizer, "all_special_ids", ())}
    return [_token_text(tokenizer, i, i in special) for i in ids]


def _token_text(tokenizer: Any, token: int, special: bool) -> TokenText:
    try:
        (piece,) = tokenizer.convert_ids_to_tokens([token])
        text = tokenizer.decode([token])
    except (IndexError, KeyError, OverflowError, TypeError, ValueError):
        piece, text = None, ""
    if not isinstance(piece, str):
        return TokenText(f"⟨id {token}⟩", special=special)
    if special:
        return TokenText(piece, special=True)
    if found := _BYTE_TOKEN.fullmatch(piece):  # SentencePiece's fallback
        return _of_bytes(bytes([int(found[1], 16)]))
    if "\ufffd" in text and (data := _bytes_of(piece)) is not None:
        return _of_bytes(data)
    if piece.startswith("▁") and not text.startswith(" "):
        return TokenText(" " + text)
    return TokenText(text or piece)


def _of_bytes(data: bytes) -> TokenText:
    try:
        return TokenText(data.decode())
    except UnicodeDecodeError:
        return TokenText(data.decode(errors="backslashreplace"), data)


def _bytes_of(piece: str) -> bytes | None:
    """The bytes that a token of a byte-level BPE stands for; None if it is none."""
    alphabet = _byte_alphabet()
    return bytes(alphabet[c] for c in piece) if all(c in alphabet for c in piece) else None


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet of bytes: printable Latin-1 stands for itself, the other bytes for what follows U+0100, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
