"""Context parallelism: the ranks of a group forward one batch together, each its share of every part of the sequences.

The packs of a batch are dealt to the ranks in turn. A stage is one pack on each rank, all at the same time. In each attention
call of a stage the ranks gather the keys and values that they attend to, from this stage and from earlier ones. A rank stores
only its own. In the backward the gradients of gathered numbers are added up on the rank that owns them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_llm_kl._numerics import widen
from torchrl_llm_kl.scoring._attention import KeysValues, PackLayout, PackPiece
from torchrl_llm_kl.scoring._model import Setup
from torchrl_llm_kl.scoring._packs import PackedPass
from torchrl_llm_kl.scoring._request import ScoreRequest
from torchrl_llm_kl.scoring._routing import Routing
from torchrl_llm_kl.scoring._scores import Columns, States
from torchrl_llm_kl.scoring._tree import PrefixTree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def group_of(ranks: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """The process group of a mesh with one dimension."""
    return ranks if ranks is None or isinstance(ranks, dist.ProcessGroup) else ranks.get_group()


def checksum(request: ScoreRequest) -> int:
    """A number that differs, almost surely, between requests with other tokens, sequences or masks."""
    parts = (request.tokens.values, request.tokens.lengths, request.mask)
    return zlib.crc32(b"".join(part.cpu().contiguous().numpy().tobytes() for part in parts))


@dataclass(frozen=True, eq=False)
class Exchange:
    """The keys and values that ranks give each other in the attention calls of one stage.

    Args:
        group: the ranks.
        given: the number of tokens that each rank gives.
        own: the parts that this rank gives, in order: a slice of its pack, or the keys and values of an earlier one.
        taken: for each part of another rank that this one attends to, the id of its list in the layout, and its places among
            the gathered tokens ``[ranks * max(given)]``.
    """

    group: dist.ProcessGroup
    given: Sequence[int]
    own: Sequence[slice | KeysValues]
    taken: Mapping[int, slice]

    def __call__(
        self, call: int, key: Tensor, value: Tensor, outside: Sequence[KeysValues]
    ) -> tuple[Tensor, Tensor, KeysValues]:
        """The keys and values of this pack ``[1, heads, N, size]``, and those of ``outside``, in one attention call."""
        pairs = [(key[:, :, x], value[:, :, x]) if isinstance(x, slice) else x[call] for x in self.own]
        rows = [torch.cat([part[0].transpose(0, 1).flatten(1) for part in pair], 1) for pair in pairs]
        width = key.shape[1] * key.shape[3]
        own = torch.cat(rows) if rows else key.new_empty(0, width + value.shape[1] * value.shape[3])
        # The pack's own keys and values pass through, so that the backward has a gather on every rank.
        gathered, key, value = _Gather.apply(self.group, max(self.given), own, key, value)

        def taken(kept: KeysValues) -> tuple[Tensor, Tensor]:
            if id(kept) not in self.taken:
                return kept[call]
            some = gathered.flatten(0, 1)[self.taken[id(kept)]]
            parts = zip((some[:, :width], some[:, width:]), (key, value), strict=True)
            k, v = (x.unflatten(1, (like.shape[1], -1)).transpose(0, 1)[None].to(like.dtype) for x, like in parts)
            return k, v

        return key, value, [taken(kept) for kept in outside]


class SharedPass(PackedPass):
    """Runs one model over the prefix tree of a request, a stage at a time. Attributes of packs are those of this rank."""

    def __init__(
        self,
        setup: Setup,
        request: ScoreRequest,
        tree: PrefixTree,
        tokens_per_batch: int,
        routing: Routing | None,
        group: dist.ProcessGroup,
    ) -> None:
        self._group, self._rank, self._count = group, group.rank(), group.size()
        stages = max(1, -(-tree.num_tokens // (self._count * tokens_per_batch)))
        size = max(1, -(-tree.num_tokens // (self._count * stages)))  # as many tokens on each rank
        super().__init__(setup, request, tree, size, None, routing)
        none, count = torch.zeros(0, dtype=torch.long), self._count
        self._shares = [torch.cat([none, *self.elements[rank::count]]) for rank in range(count)]
        stages = -(-len(self.elements) // count)
        own = self.elements[self._rank :: count]
        self.elements = own + [none] * (stages - len(own))
        self._rank_of = {piece: number % count for number, pack in enumerate(self.plan.packs) for piece in pack}
        self._last_use = [use // count for use in self._last_use]  # the stage, -1 as before

    def run(self, index: int) -> States:
        """Run this rank's pack of a stage, and return the states that predict ``elements[index]``."""
        number, layout = index * self._count + self._rank, self._layout(index)
        if number >= len(self.plan.packs):  # the last stage has fewer packs than ranks
            return self.run_dummy(layout)
        return self._run(number, index, layout)

    def gather(self, columns: Columns) -> tuple[Tensor, Columns]:
        """The flat elements of all ranks, and their scores."""
        counts = [len(share) for share in self._shares]

        def rows(own: Tensor) -> Tensor:
            (gathered,) = _Gather.apply(self._group, max(counts), own)
            return torch.cat([some[:count] for some, count in zip(gathered, counts, strict=True)])

        return torch.cat(self._shares), {name: rows(own) for name, own in columns.items()}

    def _layout(self, stage: int) -> PackLayout:
        numbers = range(stage * self._count, (stage + 1) * self._count)
        packs = [self.plan.packs[number] if number < len(self.plan.packs) else [] for number in numbers]
        needed = [self.plan.outside(pack) for pack in packs]
        pieces = [PackPiece(0, 1, -1, [])]  # a dummy token, if there is no pack for this rank
        for rank, pack in enumerate(packs):
            if rank == self._rank and pack:
                pieces = self._pieces(pack, stage)
            for i in pack if rank != self._rank else []:
                if self._last_use[i] > stage or i in needed[self._rank]:
                    # Stands for the keys and values on the other rank.
                    length, past = self.plan.pieces[i].length, self.plan.pieces[i].past
                    self._pasts[i] = [
                        *self._pasts[past],
                        [(torch.empty(1, 1, length, 0), torch.empty(1, 1, length, 0))],
                    ]
        here = dict(zip(packs[self._rank], pieces, strict=False))
        return PackLayout(pieces, exchange=self._exchange(needed, here))

    def _exchange(self, needed: list[set[int]], here: dict[int, PackPiece]) -> Exchange | None:
        """The keys and values that ranks give each other. None if no pack attends to another rank's."""
        parts, given = self.plan.pieces, [list[int]() for _ in needed]
        for i in sorted(set[int]().union(*needed)):
            owner = self._rank_of[i]
            if any(i in some for rank, some in enumerate(needed) if rank != owner):
                given[owner].append(i)
        counts = [sum(parts[i].length for i in some) for some in given]
        if not any(counts):
            return None
        taken: dict[int, slice] = {}
        for rank, some in enumerate(given):
            first = rank * max(counts)
            for i in some:
                if rank != self._rank and i in needed[self._rank]:
                    taken[id(self._pasts[i][-1])] = slice(first, first + parts[i].length)
                first += parts[i].length
        own = [slice(here[i].first, here[i].last) if i in here else self._pasts[i][-1] for i in given[self._rank]]
        return Exchange(self._group, counts, own, taken)


class _Gather(torch.autograd.Function):
    """Gathers the rows ``[n, ...]`` of all ranks as ``[ranks, most, ...]``, padded. ``through`` are returned as they are."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, most: int, own: Tensor, *through: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.count = group, len(own)
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: len(own)] = own
        gathered = own.new_empty(group.size(), most, *own.shape[1:])
        dist.all_gather([*gathered], padded, group=group)
        return gathered, *(each.view_as(each) for each in through)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *through: Tensor) -> tuple[Tensor | None, ...]:
        (wide,) = widen(gradient)
        total = wide.new_empty(wide.shape[1:])
        dist.reduce_scatter(total, [*wide.contiguous()], group=ctx.group)
        return None, None, total[: ctx.count].to(gradient.dtype), *through
