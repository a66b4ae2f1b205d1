"""What a pack consists of, as attention sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["KeysValues", "PackLayout", "PackPiece"]

# Keys and values of some tokens, one pair for each time the model attends: [1, heads, tokens, size].
KeysValues = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class PackPiece:
    """One piece of a pack.

    Args:
        first: its first place in the pack.
        last: the place after its last one.
        past: the piece of the same pack that it follows, -1 if there is none.
        outside: keys and values of all tokens before it, in order, if it follows a piece that is in no earlier place
            of the pack.
        keep: whether its keys and values are wanted afterwards.
    """

    first: int
    last: int
    past: int
    outside: list[KeysValues]
    keep: bool


@dataclass(eq=False)
class PackLayout:
    """The pieces of a pack, and what a forward finds out about them.

    Args:
        pieces: in the order of the pack, without gaps.
        kept: keys and values of each piece to keep, after the forward.
        calls: how often the model has attended in this forward.
        has_window: whether any layer was told of a sliding window.
        cache: what is the same each time it does.
    """

    pieces: list[PackPiece]
    kept: dict[int, KeysValues] = field(default_factory=dict)
    calls: int = 0
    has_window: bool = False
    cache: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kept = {i: [] for i, piece in enumerate(self.pieces) if piece.keep}
        self.followed = {piece.past for piece in self.pieces}
