"""The prefix cache: keys, values and log-probs of growing conversations, looked up by their tokens."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import wide_dtype
from torchrl_llm_kl._private import tensor_leaves
from torchrl_llm_kl.scoring._attention import KeysValues
from torchrl_llm_kl.scoring._model import Setup, fingerprint, head_weight
from torchrl_llm_kl.scoring._request import ScoreRequest
from torchrl_llm_kl.scoring._tree import PrefixTree
from torchrl_llm_kl.scoring._wrapping import Ranks

if TYPE_CHECKING:
    from transformers import DynamicCache

# Log-probs are cached for this many samplers per segment. Keys and values do not depend on the sampler.
_SAMPLERS = 4

# ---------------------------------------------------------------------- the cache


@dataclass(eq=False)
class Segment:
    """Consecutive tokens of one or more conversations. They follow the first ``start`` tokens of the parent segment."""

    tokens: Tensor  # ids [n], on the CPU
    keys_values: KeysValues
    num_bytes: int  # bytes of the keys and values, or of the state
    # Sampler to log-probs [n] on the CPU: float32, or float64 for a float64 head. NaN where not computed.
    log_probs: dict[tuple[float, ...], Tensor] = field(default_factory=dict)
    parent: Segment | None = None  # None for the root
    start: int = 0
    children: dict[tuple[int, int], Segment] = field(default_factory=dict)  # by start and first token
    # Sampler to log-probs of tokens that follow the last one. A turn's last token is scored but not forwarded, so its
    # log-prob has no place in `log_probs`.
    followers: dict[tuple[float, ...], dict[int, float]] = field(default_factory=dict)
    state: DynamicCache | None = None  # recurrent models: transformers' cache after the last token


@dataclass(frozen=True, eq=False)
class Cursor:
    """A position in the cache: after the first ``offset`` tokens of ``segment``."""

    segment: Segment
    offset: int

    def spans(self) -> list[tuple[Segment, int]]:
        """The segments from the root to this position, with the number of tokens of each."""
        out = []
        segment, offset = self.segment, self.offset
        while segment.parent is not None:
            out.append((segment, offset))
            segment, offset = segment.parent, segment.start
        return out[::-1]


class PrefixKVCache:
    """A tree of segments of scored sequences. When it is full, the least recently used segments are evicted.

    Lookups use only the tokens, so environments may interleave in any order.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit  # upper bound of num_bytes
        self.tokens_seen = 0  # tokens of all requests so far, shared prefixes counted once
        self.tokens_recalled = 0  # how many of them were cached
        self.dtype = torch.float32  # of log-probs
        self.sampler: tuple[float, ...] = ()  # Setup.sampler of the current call
        self._owner: tuple[object, ...] = ()
        self.clear()

    def bind(self, setup: Setup, ranks: Ranks) -> None:
        """Clear the cache if weights or settings changed on any rank. With sharded weights each rank sees only a part."""
        self.sampler = setup.sampler
        owner = (fingerprint(setup.model), setup.options.adapters, setup.options.dtype, setup.options.deterministic)
        if not ranks.all(owner == self._owner):
            self.clear()
            self._owner = owner
            weight = head_weight(setup.model)
            self.dtype = torch.float32 if weight is None else wide_dtype(weight.dtype)

    def clear(self) -> None:
        """Drop all segments."""
        self.num_bytes = 0
        self.root = Cursor(Segment(torch.zeros(0).long(), [], 0), 0)  # where every conversation begins
        # From the least recently used. Segments are touched before their parents, so the first one has no children.
        self._by_use: OrderedDict[Segment, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_use)

    def walk(self, cursor: Cursor, tokens: Tensor) -> tuple[Cursor, list[tuple[Segment, int, int]]]:
        """Follow ``tokens`` from a cursor.

        Returns the cursor up to which they are cached, and the hits: a segment and the range of its tokens.
        """
        segment, offset, done = cursor.segment, cursor.offset, 0
        hits = []
        while done < tokens.numel():
            common = _common(segment.tokens[offset:], tokens[done:])
            if common:
                hits.append((segment, offset, offset + common))
                offset, done = offset + common, done + common
                continue
            child = segment.children.get((offset, int(tokens[done])))
            if child is None:
                break
            segment, offset = child, 0
        return Cursor(segment, offset), hits

    def shrink(self, size: int, in_use: set[Segment] | None = None) -> bool:
        """Evict the least recently used until at most ``size`` bytes remain. False if only segments ``in_use`` are left."""
        while self.num_bytes > size:
            oldest = next(iter(self._by_use), None)
            if oldest is None or oldest in (in_use or ()):
                return False
            assert oldest.parent is not None
            del oldest.parent.children[oldest.start, int(oldest.tokens[0])]
            del self._by_use[oldest]
            self.num_bytes -= oldest.num_bytes
        return True

    def touch(self, cursor: Cursor) -> None:
        """Mark the segments up to a cursor as the most recently used."""
        for segment, _ in reversed(cursor.spans()):
            self._by_use.move_to_end(segment)

    def add(
        self, cursor: Cursor, tokens: Tensor, keys_values: KeysValues, needed: int, in_use: set[Segment]
    ) -> Segment | None:
        """Insert ``tokens [n]`` where :meth:`walk` ended. Returns None if they fit only by evicting segments ``in_use``."""
        segment = Segment(tokens.clone(), keys_values, needed, parent=cursor.segment, start=cursor.offset)
        self.touch(cursor)
        before = {held for held, _ in cursor.spans()}
        if not self.shrink(self.limit - needed, in_use | before):
            return None
        cursor.segment.children[cursor.offset, int(tokens[0])] = segment
        self._by_use[segment] = None
        self.num_bytes += needed
        self.touch(cursor)
        return segment


def _common(a: Tensor, b: Tensor) -> int:
    """The number of equal leading tokens."""
    n = min(a.numel(), b.numel())
    different = (a[:n] != b[:n]).nonzero()
    return int(different[0]) if different.numel() else n


# ---------------------------------------------------------------------- a request against the cache


class CacheLookup:
    """The cached part of a request's prefix tree. It also takes the keys, values and log-probs of the rest.

    If ``values`` is False, no score is read from the cache, because more than log-probs is requested.

    Attributes:
        scored: the request's mask without the tokens whose log-prob is cached, ``[N]``.
        cached: number of leading tokens of each node that need no forward, ``[M]``. It can be less than the cache holds,
            where a requested log-prob needs the hidden state of a cached token.
        element: scored tokens whose log-prob is cached, ``[L]``.
        values: their log-probs, ``[L]``.
    """

    def __init__(self, cache: PrefixKVCache, request: ScoreRequest, tree: PrefixTree, *, values: bool = True) -> None:
        self.cache, self.request, self.tree = cache, request, tree
        self._log_probs = torch.full((tree.num_tokens,), torch.nan, dtype=cache.dtype)  # NaN where unknown
        self._hits: list[tuple[Segment, int, int, int]] = []  # segment, range of its tokens, place in the tree
        self._used: set[Segment] = set()
        self._end: list[Cursor | None] = []  # the cursor after each node, None if a part of it is not cached
        self._full = False
        held = [self._look_up(node) for node in range(tree.num_nodes)]

        element = request.mask.nonzero().squeeze(-1)
        known = torch.full((element.numel(),), torch.nan, dtype=cache.dtype)
        if values:
            inside, place = self._inside(element)
            known[inside] = self._log_probs[place]
            for i, segment in self._after_segments(element):
                followers, token = segment.followers.get(cache.sampler, {}), int(request.tokens.values[element[i]])
                if known[i].isnan() and token in followers:
                    known[i] = followers[token]
        self.element, self.values = element[~known.isnan()], known[~known.isnan()]
        self.scored = request.mask.clone()
        self.scored[self.element] = False
        node, offset = tree.locate(self.scored.nonzero().squeeze(-1) - 1)
        self.cached = torch.tensor(held).long().scatter_reduce(0, node, offset, "amin").tolist()
        cache.tokens_seen += tree.num_tokens
        cache.tokens_recalled += sum(self.cached)

    def past(self, node: int) -> list[KeysValues]:
        """Keys and values of all tokens before the first token of ``node`` that is forwarded."""
        begin = self._begin(node)
        assert begin is not None
        end, _ = self.cache.walk(begin, self._tokens(node)[: self.cached[node]])
        return [[(k[:, :, :n], v[:, :, :n]) for k, v in segment.keys_values] for segment, n in end.spans() if n > 0]

    def insert(
        self, node: int, first: int, length: int, keys_values: KeysValues, state: DynamicCache | None = None
    ) -> None:
        """Cache forwarded tokens of a node, or the ``state`` after them. Earlier tokens must be inserted first."""
        begin, tokens = self._begin(node), self._tokens(node)[: first + length]
        if begin is None:
            return
        end, hits = self.cache.walk(begin, tokens)
        held = sum(last - start for _, start, last in hits)
        if held < first:
            return  # earlier tokens did not fit
        new = first + length - held
        if new > 0:
            if held > first:
                keys_values = [(k[:, :, -new:].clone(), v[:, :, -new:].clone()) for k, v in keys_values]
            layers = [] if state is None else [vars(layer) for layer in state.layers]
            size = sum(t.nbytes for t in tensor_leaves([keys_values, layers]))
            segment = self.cache.add(end, tokens[held:], keys_values, size, self._used)
            if segment is None:
                self._warn(size // new)
                return
            segment.state = state
            self._hit(segment, 0, new, int(self.tree.first[node]) + held)
            end = Cursor(segment, new)
        if first + length == int(self.tree.length[node]):
            self._end[node] = end

    def finish(self, element: Tensor, log_probs: Tensor) -> None:
        """Cache the computed log-probs of some elements, ``[K]`` each, on the CPU."""
        inside, place = self._inside(element)
        self._log_probs[place] = log_probs[inside].to(self._log_probs.dtype)
        for segment, first, last, place_in_tree in self._hits:
            held = self._log_probs_of(segment)
            held[first:last] = self._log_probs[place_in_tree : place_in_tree + last - first]
        for i, segment in self._after_segments(element):
            of_sampler = segment.followers.setdefault(self.cache.sampler, {})
            of_sampler[int(self.request.tokens.values[element[i]])] = float(log_probs[i])

    def _look_up(self, node: int) -> int:
        """Look up a node after its parent. Returns how many of its leading tokens are cached."""
        begin = self._begin(node)
        if begin is None:
            self._end.append(None)
            return 0
        end, hits = self.cache.walk(begin, self._tokens(node))
        held = 0
        for segment, first, last in hits:
            self._hit(segment, first, last, int(self.tree.first[node]) + held)
            held += last - first
        self.cache.touch(end)
        self._end.append(end if held == int(self.tree.length[node]) else None)
        return held

    def _begin(self, node: int) -> Cursor | None:
        parent = int(self.tree.parent[node])
        return self._end[parent] if parent >= 0 else self.cache.root

    def _tokens(self, node: int) -> Tensor:
        element = int(self.tree.element[node])
        return self.request.tokens.values[element : element + int(self.tree.length[node])]

    def _hit(self, segment: Segment, first: int, last: int, place: int) -> None:
        """Read the log-probs of a hit into the tree, and record it for :meth:`finish`."""
        self._used.add(segment)
        self._hits.append((segment, first, last, place))
        if self.cache.sampler in segment.log_probs:
            self._log_probs[place : place + last - first] = segment.log_probs[self.cache.sampler][first:last]

    def _log_probs_of(self, segment: Segment) -> Tensor:
        """The log-probs of a segment under the current sampler, which becomes the segment's most recent sampler."""
        held = segment.log_probs.pop(self.cache.sampler, None)
        if held is None:
            held = torch.full((segment.tokens.numel(),), torch.nan, dtype=self.cache.dtype)
        segment.log_probs[self.cache.sampler] = held
        if len(segment.log_probs) > _SAMPLERS:  # dicts keep their order: the first was used least recently
            oldest = next(iter(segment.log_probs))
            del segment.log_probs[oldest]
            segment.followers.pop(oldest, None)
        return held

    def _after_segments(self, element: Tensor) -> list[tuple[int, Segment]]:
        """The elements that directly follow the last token of a segment, each as its index in ``element`` and the segment."""
        ends = {place + last - first - 1: x for x, first, last, place in self._hits if last == x.tokens.numel()}
        at_end = torch.zeros(self.tree.num_tokens, dtype=torch.bool)
        at_end[list(ends)] = True
        before = self.tree.place(element - 1)
        return [(i, ends[int(before[i])]) for i in at_end[before].nonzero().flatten().tolist()]

    def _inside(self, element: Tensor) -> tuple[Tensor, Tensor]:
        """Which elements are in the tree, and their places. The last token of a sequence is not forwarded, so not in it."""
        sequence, position = self.request.at(element)
        inside = position < self.tree.forward_lengths[sequence]
        return inside, self.tree.place(element[inside])

    def state(self, node: int, first: int) -> DynamicCache | None:
        """The state after the first ``first`` tokens of a node; None at the start of a sequence."""
        parent = int(self.tree.parent[node])
        if not first:
            return None if parent < 0 else self.state(parent, int(self.tree.length[parent]))
        return self._states(node)[first]

    def only_states(self) -> None:
        """Reduce ``cached`` to places that have a recurrent state. Only ends of segments have one."""
        before = sum(self.cached)
        for node, cached in enumerate(self.cached):
            self.cached[node] = max((n for n in self._states(node) if n <= cached), default=0)
        self.cache.tokens_recalled += sum(self.cached) - before

    def _states(self, node: int) -> dict[int, DynamicCache]:
        """The cached states inside a node or at its end, by the number of its tokens before them."""
        begin = self._begin(node)
        if begin is None:
            return {}
        out: dict[int, DynamicCache] = {}
        done = 0
        for segment, first, last in self.cache.walk(begin, self._tokens(node))[1]:
            done += last - first
            if segment.state is not None and last == segment.tokens.numel():
                out[done] = segment.state
        return out

    def _warn(self, token_bytes: int) -> None:
        if self._full:
            return
        self._full = True
        tokens, mib = self.tree.num_tokens, 2**20
        warnings.warn(
            f"the scorer's memory of {self.cache.limit / mib:.0f} MiB is too small for one call: its {tokens} tokens take "
            f"{tokens * token_bytes / mib:.0f} MiB. Tokens that do not fit are forwarded again at the next turn. Raise "
            "memory=, or score fewer conversations at a time.",
            stacklevel=2,
        )
