"""The teacher's probability that its text goes on with some bytes, as sums over sequences of its tokens."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from torchrl_llm_kl.masks import TokenBytes
from torchrl_llm_kl.scoring._options import ScoreOptions
from torchrl_llm_kl.scoring._request import ScoreRequest
from torchrl_llm_kl.scoring._scorer import LogProbScorer
from torchrl_llm_kl.scoring._scores import TokenStates

# The most probabilities of whole distributions that are held at once, in at least 16 places.
_HELD = 2**25


Item = TypeVar("Item")


class Place(NamedTuple):
    """The place after the first ``own`` tokens of a row and the tokens of ``path``."""

    row: int
    own: int
    path: tuple[int, ...] = ()


class Distributions:
    """The teacher's distributions at places. Those of the rows' own tokens are there from the start.

    Args:
        scorer: the teacher's scorer.
        vocab: the size of the teacher's vocabulary.
        rows: the teacher's tokens of each sequence.
        mask: True at scored tokens, for all rows in a line.
        options: how to score.

    Attributes:
        log_prob: the log-probs of the scored tokens, ``[N]``.
    """

    def __init__(
        self, scorer: LogProbScorer, vocab: int, rows: Sequence[list[int]], mask: Sequence[bool], options: ScoreOptions
    ) -> None:
        self._scorer, self._vocab, self._rows, self._options = scorer, vocab, rows, options
        self._kept: dict[Place, tuple[TokenStates, int]] = {}
        self._known: dict[Place, list[int]] = defaultdict(list)
        places = [Place(row, own) for row, ids in enumerate(rows) for own in range(len(ids))]
        self.log_prob = self._run(rows, mask, places)

    def __contains__(self, place: Place) -> bool:
        return place in self._kept

    def after(self, place: Place, token: int) -> Place:
        """The place after one more token."""
        ids = self._rows[place.row]
        if not place.path and ids[place.own : place.own + 1] == [token]:
            return Place(place.row, place.own + 1)
        return place._replace(path=(*place.path, token))

    def tiles(self, items: Sequence[Item]) -> Iterator[Sequence[Item]]:
        """Split places, or other items with one distribution each, so that few enough are held at once."""
        size = max(16, _HELD // self._vocab)
        return (items[first : first + size] for first in range(0, len(items), size))

    def known(self, place: Place) -> list[int]:
        """The tokens after a place whose own distributions were there before any lookahead."""
        return self._known.get(place, [])

    def forward(self, places: Sequence[Place], *, ahead: bool = False) -> None:
        """Forward the tokens before some places. A lookahead (``ahead``) is the same each time, so it makes none known."""
        before = [[*self._rows[place.row][: place.own], *place.path] for place in places]
        # The last token is repeated, so that the distribution after it is scored.
        rows = [[*ids, ids[-1]] for ids in before]
        mask = [i == len(row) - 1 for row in rows for i in range(len(row))]
        self._run(rows, mask, [place for place, row in zip(places, rows, strict=True) for _ in row], known=not ahead)

    def log_probs(self, places: Sequence[Place]) -> Tensor:
        """The log-probs of all tokens at some places, ``[n, V]``. A token that the head lacks has ``-inf``."""
        kept = [self._kept[place] for place in places]
        calls = dict.fromkeys(states for states, _ in kept)
        order = [i for states in calls for i, (own, _) in enumerate(kept) if own is states]
        parts = [states.log_probs([element for own, element in kept if own is states]) for states in calls]
        log_probs = torch.cat(parts)[torch.tensor(order).argsort().to(parts[0].device)]
        return F.pad(log_probs, (0, max(0, self._vocab - log_probs.shape[1])), value=-torch.inf)

    def _run(
        self, rows: Sequence[list[int]], mask: Sequence[bool], places: Sequence[Place], *, known: bool = True
    ) -> Tensor:
        if not rows:  # no sequence has scored tokens
            return torch.zeros(0)
        scores, states = self._scorer.run_with_states(ScoreRequest.of(rows, torch.tensor(mask)), self._options)
        scored = [(element, place) for element, place in enumerate(places) if mask[element]]
        self._kept.update((place, (states, element)) for element, place in scored)
        for _, place in scored if known else ():
            before = place._replace(path=place.path[:-1]) if place.path else Place(place.row, place.own - 1)
            self._known[before].append(place.path[-1] if place.path else self._rows[place.row][before.own])
        return scores.log_prob.values


# ------------------------------------------------------------------ chunks


class Node(NamedTuple):
    """The beginning of a cover: tokens that end before the last inner boundary of a chunk."""

    chunk: Chunk
    place: Place
    log_p: float
    at: int  # the byte where the last token ends


@dataclass(eq=False)
class Chunk:
    """Tokens with the same bytes, and the probabilities of the student's boundaries among them, in nats."""

    number: int  # in its sequence
    elements: list[int]  # of the student's tokens, in the student's request
    start: Place  # of the teacher's own tokens
    ids: list[int]  # these tokens
    element: int  # of the first of them, in the teacher's request
    ends: list[int]  # the student's boundaries inside the chunk, in bytes
    text: str  # up to the last of them
    room: int  # how many more nodes may be forwarded
    nodes: list[Node] = field(default_factory=list)  # that were forwarded
    lower: np.ndarray = field(init=False)
    omitted: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.omitted = np.full(len(self.ends), -np.inf)
        # Tokens without bytes at the start of an answer are certain.
        self.lower = np.where(np.array(self.ends) > 0, -np.inf, 0.0)

    def scores(self, log_probs: Tensor) -> list[tuple[float, float, float]]:
        """The log-prob of each student's token with its bounds, given the teacher's log-probs of its own tokens."""
        own = math.fsum(log_probs[self.element : self.element + len(self.ids)].tolist())
        # Usually one token ends at the end of the chunk. Tokens without bytes after it end there too.
        rest = [own] * (len(self.elements) - len(self.ends))
        lower = [0.0, *self.lower.tolist(), *rest]
        upper = [0.0, *np.logaddexp(self.lower, self.omitted).tolist(), *rest]
        # A difference is smallest from the upper bound before to the lower bound after.
        pairs = zip(pairwise(lower), pairwise(upper), strict=True)
        return [(after - before, after - most, top - before) for (before, after), (most, top) in pairs]

    def add(self, node: Node, sums: Sequence[float]) -> None:
        """Add the tokens that reach a boundary from a node."""
        self.nodes.append(node)
        later = self.after(node.at)
        self.lower[later] = np.logaddexp(self.lower[later], node.log_p + np.array(sums))

    def after(self, at: int) -> slice:
        """The boundaries after a byte."""
        return slice(int(np.searchsorted(self.ends, at, side="right")), None)


# ------------------------------------------------------------------ covers


@dataclass(frozen=True)
class Covers:
    """Sums over the teacher's tokens that agree with the text of a chunk.

    Args:
        distributions: the teacher's distributions.
        tokens: the bytes of the teacher's tokens.
        tolerance: see :class:`~torchrl_llm_kl.ByteTeacher`.
    """

    distributions: Distributions
    tokens: TokenBytes
    tolerance: float

    def fill(self, pieces: Sequence[Chunk]) -> None:
        """Compute the probabilities of all inner boundaries."""
        # The teacher's own tokens are forwarded anyway, so each of them that begins before a boundary is a node.
        nodes = [node for chunk in pieces for node in self._own(chunk)]
        longer = [each for each in self._add(nodes) if each.place.path]
        while chosen := self._chosen(longer):
            self.distributions.forward([node.place for node in chosen])
            longer = self._add(chosen)

    def _own(self, chunk: Chunk) -> Iterator[Node]:
        """The nodes before the teacher's own tokens that begin before the last boundary."""
        log_probs = self.distributions.log_prob[chunk.element : chunk.element + len(chunk.ids)].tolist()
        before = accumulate(log_probs, initial=0.0)
        for i, ((at, _), log_p) in enumerate(zip(self.tokens.spans(chunk.ids), before, strict=False)):
            if at < len(chunk.text):
                yield Node(chunk, chunk.start._replace(own=chunk.start.own + i), log_p, at)

    def _add(self, nodes: Sequence[Node]) -> list[Node]:
        """Add nodes to their chunks, and return the nodes after one more token."""
        longer = []
        for some in self.distributions.tiles(nodes):
            # On the host, since each sum has another size: an accelerator would start many small kernels.
            log_probs = self.distributions.log_probs([node.place for node in some]).double().cpu()
            for node, row in zip(some, log_probs, strict=True):
                chunk, at = node.chunk, node.at
                texts = [chunk.text[at:end] for end in chunk.ends[chunk.after(at)]]
                chunk.add(node, [float(row[self.tokens.starting_with(text)].logsumexp(0)) for text in texts])
                # A token that ends exactly at the last boundary reaches it, so only shorter ones are continued.
                for index, length in self.tokens.inside(chunk.text[at:]):
                    place = self.distributions.after(node.place, index)
                    longer.append(Node(chunk, place, node.log_p + float(row[index]), at + length))
        return longer

    def _chosen(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes to forward. The probability of each other node bounds the sum over its covers."""
        chosen = []
        least = math.log(self.tolerance) if self.tolerance else -math.inf
        for node in sorted(nodes, key=lambda node: -node.log_p):
            chunk, later = node.chunk, node.chunk.after(node.at)
            # The teacher's own tokens reach every boundary, so `lower` is finite here.
            if chunk.room > 0 and node.log_p > least + chunk.lower[-1]:
                chunk.room -= 1
                chosen.append(node)
            else:
                chunk.omitted[later] = np.logaddexp(chunk.omitted[later], node.log_p)
        return chosen
