"""The bytes of tokens, and the alignment of two tokenisations of one text.

A text is a string with one character for each byte (U+0000 to U+00FF). A special token of a role, such as the end of a turn,
has no bytes. It is one character from U+0100 on, so that two tokenizers can share it.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

from torchrl_llm_kl.masks._messages import Tokenizer
from torchrl_llm_kl.masks._tokens import Span

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
#: The first character that is not a byte.
_ROLES = 0x100
_LAST = chr(0x10FFFF)
# Tokenizers that put a space before a text do not put one after these characters.
_ANCHORS = ("\n", ".", "x")


class TextMismatchError(ValueError):
    """Two tokenizers do not represent the same bytes, for instance since one of them normalizes its text."""


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet of bytes. Printable Latin-1 characters stand for themselves, U+0100 and up for the other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def pair_specials(student: Tokenizer, teacher: Tokenizer, given: Mapping[int, int] | None = None) -> dict[int, int]:
    """The teacher's token for each of the student's special tokens.

    Two special tokens correspond if they have the same name. Otherwise the ends of a turn (EOS) correspond, and so do the
    starts of a text (BOS). Other special tokens have no counterpart.

    Args:
        student: a fast tokenizer of transformers.
        teacher: another one.
        given: the teacher's id for some of the student's ids. These pairs take precedence.
    """
    names = {text: index for index, text in _specials(teacher).items()}
    pairs = {index: names[text] for index, text in _specials(student).items() if text in names}
    for role in ("eos_token_id", "bos_token_id"):
        own, other = getattr(student, role), getattr(teacher, role)
        if own is not None and other is not None:
            pairs.setdefault(own, other)
    return pairs | dict(given or {})


def _specials(tokenizer: Tokenizer) -> dict[int, str]:
    return {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}


class TokenBytes:
    r"""The bytes of each token of a tokenizer, as they stand inside a text.

    Byte-level BPE, SentencePiece (``▁`` and ``<0xE2>``) and WordPiece (``##``) are known by the tokenizer's decoder. A
    special token is one character, ``chr(256 + i)``, where ``i`` is its counterpart in ``roles``. Without a counterpart its
    bytes are its name, except that a BOS token has none.

    Args:
        tokenizer: a fast tokenizer of transformers.
        roles: the number of each special token that has a counterpart. By default every special token has its own id.

    Raises:
        TypeError: if the tokenizer is not a fast one.

    Example:
        >>> from tokenizers import Tokenizer, decoders, models
        >>> from transformers import PreTrainedTokenizerFast
        >>> backend = Tokenizer(models.BPE({"a": 0, "b": 1, "Ġ": 2, "Ġa": 3}, [("Ġ", "a")]))
        >>> backend.decoder = decoders.ByteLevel()
        >>> tokens = TokenBytes(PreTrainedTokenizerFast(tokenizer_object=backend))
        >>> tokens.text([0, 3, 1]), tokens.spans([0, 3, 1])
        ('a ab', [(0, 1), (1, 3), (3, 4)])
    """

    def __init__(self, tokenizer: Tokenizer, roles: Mapping[int, int] | None = None) -> None:
        if not tokenizer.is_fast:
            raise TypeError(
                f"{type(tokenizer).__name__} does not show the bytes of its tokens: use the fast tokenizer."
            )
        self.tokenizer = tokenizer
        self.specials = _specials(tokenizer)
        roles = {index: index for index in self.specials} if roles is None else roles
        vocabulary, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
        decoder = tokenizer.backend_tokenizer.decoder
        kind = b"" if decoder is None else decoder.__getstate__()
        self.texts = [""] * (max(vocabulary.values(), default=-1) + 1)
        self._rare = {index for piece, index in vocabulary.items() if BYTE_TOKEN.fullmatch(piece)}
        for piece, index in vocabulary.items():
            # Added tokens are matched as plain text, before the pieces are converted to bytes.
            data = piece.encode() if index in added else _bytes_of(piece, kind)
            self.texts[index] = chr(_ROLES + roles[index]) if index in roles else data.decode("latin-1")
        # A tokenizer without BOS begins its text without one: the letters of its name would be wrong.
        bos = tokenizer.bos_token_id
        if bos is not None and bos not in roles:
            self.texts[bos] = ""

    @cached_property
    def ids_of(self) -> dict[str, list[int]]:
        """The tokens of each text. The token that the tokenizer uses comes first: EOS and BOS, and not a token of a byte."""
        first, ids = (self.tokenizer.eos_token_id, self.tokenizer.bos_token_id), defaultdict(list)
        for index in sorted(range(len(self.texts)), key=lambda index: (index not in first, index in self._rare, index)):
            if self.texts[index]:
                ids[self.texts[index]].append(index)
        return dict(ids)

    @cached_property
    def adds_space(self) -> bool:
        """Whether the tokenizer puts a space before a text, as SentencePiece does."""
        return self.text(self.tokenizer("x", add_special_tokens=False).input_ids) == " x"

    @cached_property
    def order(self) -> list[int]:
        """The tokens that have a text, sorted by it."""
        return sorted((index for index, text in enumerate(self.texts) if text), key=self.texts.__getitem__)

    @cached_property
    def sorted_texts(self) -> list[str]:
        """The texts of :attr:`order`."""
        return [self.texts[index] for index in self.order]

    def text(self, ids: Sequence[int]) -> str:
        """The text of some tokens. An id without a token, such as padding of the model's head, has no text."""
        return "".join(self.texts[index] if index < len(self.texts) else "" for index in ids)

    def spans(self, ids: Sequence[int]) -> list[Span]:
        """The first byte of each token, and the byte after its last."""
        ends = list(accumulate(len(self.text([index])) for index in ids))
        return list(zip([0, *ends], ends, strict=False))

    def columns(self, text: str) -> slice:
        """The range of :attr:`order` whose tokens start with ``text``."""
        texts = self.sorted_texts
        return slice(bisect_left(texts, text), bisect_left(texts, text + _LAST))

    def starting_with(self, text: str) -> list[int]:
        """The tokens whose text starts with ``text``."""
        return self.order[self.columns(text)]

    def inside(self, text: str) -> list[tuple[int, int]]:
        """The tokens with which ``text`` starts and that end before it does, and their lengths."""
        return [(index, n) for n in range(1, len(text)) for index in self.ids_of.get(text[:n], ())]

    # ------------------------------------------------------------------ from texts to tokens

    def encode(self, text: str, *, exact: bool = True, start: bool = False) -> list[int]:
        """The tokenizer's own tokens of a text. Special tokens in it are those of their roles.

        With ``start`` the text begins a sequence, and gets the space that the tokenizer puts before it.

        Raises:
            TextMismatchError: if ``exact`` and the tokens have other bytes than the text.
        """
        ids: list[int] = []
        for part in re.findall(r"[\x00-\xff]+|[^\x00-\xff]", text):
            if part > "\xff":
                ids.append(ord(part) - _ROLES)
                continue
            # Bytes that are not UTF-8, such as the first half of a character, are tokens of one byte.
            for piece in re.findall("[\udc80-\udcff]|[^\udc80-\udcff]+", _decoded(part)):
                data = piece.encode("utf-8", "surrogateescape").decode("latin-1")
                broken = "\udc80" <= piece <= "\udcff"
                begins = start and all(index in self.specials for index in ids)
                ids += self.ids_of.get(data, [])[:1] if broken else self._tokens(piece, data, begins=begins)
        if exact and (got := self.text(ids)) != text:
            raise _mismatch(text, got)
        return ids

    def _tokens(self, piece: str, data: str, *, begins: bool) -> list[int]:
        ids: list[int] = self.tokenizer(piece, add_special_tokens=False, split_special_tokens=True).input_ids
        # Inside a sequence there is no such space: drop the tokens of a character before the text.
        for anchor in _ANCHORS if not begins and self.text(ids) == " " + data else ():
            both = self.tokenizer(anchor + piece, add_special_tokens=False, split_special_tokens=True).input_ids
            spans = self.spans(both)
            start = spans[-1][1] - len(data)
            after = [index for index, (first, _) in zip(both, spans, strict=True) if first >= start]
            if self.text(after) == data:
                return after
        return ids


def _bytes_of(piece: str, kind: bytes) -> bytes:
    """The bytes of a token, given the tokenizer's decoder as JSON."""
    alphabet, fallback = byte_alphabet(), BYTE_TOKEN.fullmatch(piece)
    if b'"ByteLevel"' in kind and all(sign in alphabet for sign in piece):
        return bytes(alphabet[sign] for sign in piece)
    if b'"WordPiece"' in kind:
        return (piece[2:] if piece.startswith("##") else " " + piece).encode()
    if fallback and b'"ByteFallback"' in kind:
        return bytes([int(fallback[1], 16)])
    return piece.replace("▁", " ").encode() if "▁".encode() in kind else piece.encode()


def _decoded(text: str) -> str:
    return text.encode("latin-1").decode("utf-8", "surrogateescape")


def _mismatch(text: str, got: str) -> TextMismatchError:
    # The space that some tokenizers put before a text would hide the byte that differs.
    if got.startswith(" ") and not text.startswith(" ") and got[1:] != text:
        got = got[1:]
    # Without a different byte, one text is the beginning of the other.
    at = next((i for i, (a, b) in enumerate(zip(text, got, strict=False)) if a != b), min(len(text), len(got)))
    here, there = (ascii(each[max(0, at - 10) : at + 10]) for each in (text, got))
    return TextMismatchError(
        f"the tokenizer does not keep the text: byte {at} differs, {here} becomes {there}. A tokenizer that normalizes (NFC, "
        "lower case, white space) or has no token for a character cannot score this text byte by byte: use one that keeps "
        "every byte, or leave this answer out."
    )


# ------------------------------------------------------------------ alignment


class Chunk(NamedTuple):
    """Consecutive tokens of two tokenisations with the same bytes, as ranges of tokens."""

    student: Span
    teacher: Span


def chunks(student: Sequence[Span], teacher: Sequence[Span]) -> list[Chunk]:
    """Cut two tokenisations of one text wherever both have a boundary.

    A token without bytes belongs to the chunk before it.

    Args:
        student: the spans of one tokenisation, as :meth:`TokenBytes.spans` returns them.
        teacher: the spans of the other.

    Example:
        >>> chunks([(0, 2), (2, 3), (3, 5)], [(0, 3), (3, 4), (4, 5)])
        [Chunk(student=(0, 2), teacher=(0, 1)), Chunk(student=(2, 3), teacher=(1, 3))]
    """
    ends = [[end for _, end in spans] for spans in (student, teacher)]
    cuts, out = [0, 0], []
    for border in sorted(set(ends[0]) & set(ends[1]) - {0}):
        stops = [bisect_right(each, border) for each in ends]
        out.append(Chunk((cuts[0], stops[0]), (cuts[1], stops[1])))
        cuts = stops
    return out
