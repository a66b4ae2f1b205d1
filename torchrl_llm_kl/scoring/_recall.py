"""What a memory knows of a request's prefix tree, and what it learns from scoring the rest."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from torchrl_llm_kl.scoring._memory import ConversationMemory, Cursor, Segment
from torchrl_llm_kl.scoring._pack_layout import KeysValues
from torchrl_llm_kl.scoring._request import Request
from torchrl_llm_kl.scoring._tree import PrefixTree

__all__ = ["Recall"]


class Recall:
    """A request seen from the memory.

    Attributes:
        asked: the request's mask without the tokens whose log-prob is known; ``[N]``.
        known: how many leading tokens of each node need not be forwarded; ``[M]``. Less than the memory holds where a
            log-prob is asked for that needs a hidden state behind them.
        element: tokens that are asked for and known; ``[L]``.
        values: their log-probs; ``[L]``.

    Args:
        memory: of the model.
        request: what to score.
        tree: of the request's tokens and forward lengths.
        values: False if more is wanted than log-probs, so that none is known.
    """

    def __init__(self, memory: ConversationMemory, request: Request, tree: PrefixTree, *, values: bool = True) -> None:
        self.memory, self.tree = memory, tree
        self._ids = request.tokens.values
        # Log-probs of the tokens of the tree, node after node, NaN where unknown.
        self._log_probs = torch.full((int(tree.length.sum()),), torch.nan)
        self._places: list[tuple[Segment, int, int, int]] = []  # segment, its first and last place, place in the tree
        self._used: set[int] = set()
        self._end: list[Cursor | None] = []  # where each node ends, if all of it is held
        self._full = False
        held = [self._walk(node) for node in range(tree.num_nodes)]

        element = request.mask.nonzero().squeeze(-1)
        found = self._values(request, element) if values else torch.full((element.numel(),), torch.nan)
        self.element, self.values = element[~found.isnan()], found[~found.isnan()]
        self.asked = request.mask.clone()
        self.asked[self.element] = False
        node, offset = tree.locate(*request.before(self.asked.nonzero().squeeze(-1)))
        self.known = torch.tensor(held).long().scatter_reduce(0, node, offset, "amin").tolist()
        memory.tokens_seen += int(tree.length.sum())
        memory.tokens_recalled += sum(self.known)

    def _begin(self, node: int) -> Cursor | None:
        parent = int(self.tree.parent[node])
        return self._end[parent] if parent >= 0 else self.memory.start()

    def _walk(self, node: int) -> int:
        cursor = self._begin(node)
        if cursor is None:
            self._end.append(None)
            return 0
        end, found = self.memory.walk(cursor, self._tokens(node))
        held = 0
        for segment, first, last in found:
            self._note(segment, first, last, int(self.tree.first[node]) + held)
            held += last - first
        self.memory.touch(end)
        self._end.append(end if held == int(self.tree.length[node]) else None)
        return held

    def _tokens(self, node: int) -> Tensor:
        element = int(self.tree.element[node])
        return self._ids[element : element + int(self.tree.length[node])]

    def _note(self, segment: Segment, first: int, last: int, place: int) -> None:
        self._used.add(id(segment))
        self._places.append((segment, first, last, place))
        self._log_probs[place : place + last - first] = segment.log_probs[first:last]

    def _values(self, request: Request, element: Tensor) -> Tensor:
        """Known log-probs; ``[K]``. The last token of a sequence is not in the tree, nor is its log-prob."""
        sequence, position = request.tokens.sequence_ids[element], request.tokens.positions[element]
        out = torch.full((element.numel(),), torch.nan)
        inside = position < self.tree.forward_lengths[sequence]
        out[inside] = self._log_probs[self.tree.place(sequence[inside], position[inside])]
        return out

    def past(self, node: int) -> list[KeysValues]:
        """Keys and values of all tokens before the first one of ``node`` to forward."""
        cursor = self._begin(node)
        assert cursor is not None
        end, _ = self.memory.walk(cursor, self._tokens(node)[: self.known[node]])
        return end.keys_values()

    def learn(self, node: int, first: int, length: int, keys_values: KeysValues) -> None:
        """Remember tokens of a node that were forwarded, those before them first."""
        cursor = self._begin(node)
        if cursor is None:
            return
        tokens = self._tokens(node)[: first + length]
        end, found = self.memory.walk(cursor, tokens)
        held = sum(last - start for _, start, last in found)
        if held < first:
            return  # what comes before did not fit
        if held < first + length:
            new = [(k[:, :, held - first :].clone(), v[:, :, held - first :].clone()) for k, v in keys_values]
            segment = self.memory.add(end, tokens[held:], new if held > first else keys_values, self._used)
            if segment is None:
                self._warn(keys_values, length)
                return
            self._note(segment, 0, tokens.numel() - held, int(self.tree.first[node]) + held)
            end = Cursor(segment, tokens.numel() - held)
        if first + length == int(self.tree.length[node]):
            self._end[node] = end

    def finish(self, request: Request, element: Tensor, log_probs: Tensor) -> None:
        """Remember log-probs that were computed; ``[K]`` each, on the CPU."""
        sequence, position = request.tokens.sequence_ids[element], request.tokens.positions[element]
        inside = position < self.tree.forward_lengths[sequence]
        self._log_probs[self.tree.place(sequence[inside], position[inside])] = log_probs[inside]
        for segment, first, last, place in self._places:
            segment.log_probs[first:last] = self._log_probs[place : place + last - first]

    def _warn(self, keys_values: KeysValues, length: int) -> None:
        if not self._full:
            self._full = True
            each = sum(t.numel() * t.element_size() for pair in keys_values for t in pair) // length
            warnings.warn(
                f"the scorer's memory of {self.memory.limit / 2**20:.0f} MiB is too small for the conversations of one call: "
                f"a token takes {each / 2**10:.0f} KiB, the {int(self.tree.length.sum())} tokens here "
                f"{int(self.tree.length.sum()) * each / 2**20:.0f} MiB. The scores are right, but what does not fit is scored "
                "again at the next turn: raise memory=, or score fewer conversations at a time.",
                stacklevel=2,
            )
