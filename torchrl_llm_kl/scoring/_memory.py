"""What a model has scored before: keys, values and log-probs of conversations that go on."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchrl_llm_kl.scoring._pack_layout import KeysValues

__all__ = ["ConversationMemory", "Cursor", "Segment"]


@dataclass(eq=False)
class Segment:
    """Consecutive tokens of one or more conversations. Those before it are its parents', up to where it begins.

    Args:
        tokens: ids; ``[n]``, on the CPU.
        keys_values: of these tokens; ``[1, heads, n, size]`` a pair for each layer.
        log_probs: of these tokens, NaN where nobody asked; ``[n]`` float32, on the CPU.
        parent: whose tokens it follows; None for the root.
        start: how many tokens of the parent come before it.
        children: the segments that follow this one, by their start and first token.
    """

    tokens: Tensor
    keys_values: KeysValues
    log_probs: Tensor
    parent: Segment | None = None
    start: int = 0
    children: dict[tuple[int, int], Segment] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Of its keys and values."""
        return sum(t.numel() * t.element_size() for pair in self.keys_values for t in pair)


@dataclass(frozen=True, eq=False)
class Cursor:
    """A place in the memory: behind the first ``offset`` tokens of ``segment``."""

    segment: Segment
    offset: int

    def spans(self) -> list[tuple[Segment, int]]:
        """The segments on the way from the beginning to here, and how many tokens of each."""
        out = []
        segment, offset = self.segment, self.offset
        while segment.parent is not None:
            out.append((segment, offset))
            segment, offset = segment.parent, segment.start
        return out[::-1]

    def keys_values(self) -> list[KeysValues]:
        """Of all tokens before this place, span after span."""
        return [[(k[:, :, :n], v[:, :, :n]) for k, v in segment.keys_values] for segment, n in self.spans() if n > 0]


class ConversationMemory:
    """Token sequences as a tree of segments, the least recently used of which goes first when the memory is full.

    A conversation is found by its tokens alone: it does not matter in which order environments take turns.

    Args:
        limit: bytes of keys and values that are held at most.

    Attributes:
        num_bytes: held now.
        tokens_seen: of all conversations that came with it, so far.
        tokens_recalled: those of them that did not have to be forwarded.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tokens_seen = self.tokens_recalled = 0
        self._owner: tuple[object, ...] = ()
        self.clear()

    def be(self, *owner: object) -> None:
        """Forget everything if it is another's: other weights, or the same ones seen in another way."""
        if owner != self._owner:
            self.clear()
            self._owner = owner

    def clear(self) -> None:
        """Forget everything."""
        empty = torch.zeros(0)
        self.num_bytes = 0
        self._root = Segment(empty.long(), [], empty)
        # Touching a segment touches its parents after it: the first one here has no children.
        self._by_use: OrderedDict[int, Segment] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_use)

    def start(self) -> Cursor:
        """The beginning of every conversation."""
        return Cursor(self._root, 0)

    def walk(self, cursor: Cursor, tokens: Tensor) -> tuple[Cursor, list[tuple[Segment, int, int]]]:
        """Follow ``tokens`` from a place as far as they are known.

        Returns:
            The place behind the last known one, and where the known ones are: segment, first and last place in it.
        """
        segment, offset, done = cursor.segment, cursor.offset, 0
        found = []
        while done < tokens.numel():
            common = _common(segment.tokens[offset:], tokens[done:])
            if common:
                found.append((segment, offset, offset + common))
                offset, done = offset + common, done + common
                continue
            child = segment.children.get((offset, int(tokens[done])))
            if child is None:
                break
            segment, offset = child, 0
        return Cursor(segment, offset), found

    def touch(self, cursor: Cursor) -> None:
        """Make the way to a place the most recently used."""
        for segment, _ in reversed(cursor.spans()):
            self._by_use.move_to_end(id(segment))

    def add(self, cursor: Cursor, tokens: Tensor, keys_values: KeysValues, in_use: set[int]) -> Segment | None:
        """Remember tokens that follow a place.

        Args:
            cursor: where :meth:`walk` ended, so that no child begins with the first token.
            tokens: ``[n]``, at least one.
            keys_values: theirs.
            in_use: ids of segments that must not be forgotten now.

        Returns:
            The new segment; None if there is no room for it.
        """
        segment = Segment(
            tokens.clone(), keys_values, torch.full((tokens.numel(),), torch.nan), cursor.segment, cursor.offset
        )
        needed = segment.num_bytes
        self.touch(cursor)
        held = {id(s) for s, _ in cursor.spans()} | in_use
        while self.num_bytes + needed > self.limit:
            oldest = next(iter(self._by_use.values()), None)
            if oldest is None or id(oldest) in held:
                return None
            self._forget(oldest)
        cursor.segment.children[cursor.offset, int(tokens[0])] = segment
        self._by_use[id(segment)] = segment
        self.num_bytes += needed
        self.touch(cursor)
        return segment

    def _forget(self, segment: Segment) -> None:
        assert segment.parent is not None
        assert not segment.children, "a child was used later than its parent"
        del segment.parent.children[segment.start, int(segment.tokens[0])]
        del self._by_use[id(segment)]
        self.num_bytes -= segment.num_bytes


def _common(a: Tensor, b: Tensor) -> int:
    """How many leading tokens are equal."""
    n = min(a.numel(), b.numel())
    different = (a[:n] != b[:n]).nonzero()
    return int(different[0]) if different.numel() else n
