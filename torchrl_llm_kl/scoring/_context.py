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
from torch.autograd.function import once_differentiable

from torchrl_llm_kl._numerics import widen
from torchrl_llm_kl._typing import call_of
from torchrl_llm_kl.scoring._request import ScoreRequest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Context:
    """The ranks that forward each sequence together."""

    group: dist.ProcessGroup

    @classmethod
    def of(cls, ranks: Context | dist.ProcessGroup | DeviceMesh | None) -> Context | None:
        """The context of a group, or of a mesh with one dimension."""
        if ranks is None or isinstance(ranks, Context):
            return ranks
        group = ranks if isinstance(ranks, dist.ProcessGroup) else call_of(ranks, "get_group")
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"context_parallel is a process group of this rank or a mesh of one dimension, got {ranks!r}."
            )
        return cls(group)

    def __deepcopy__(self, memo: object) -> Context:
        return self


def checksum(request: ScoreRequest, *settings: object) -> int:
    """A number that differs, almost surely, between ranks with other tokens, sequences, masks, records or settings."""
    parts = (request.tokens.values, request.tokens.lengths, request.mask)
    records = [each.cpu() for each in (request.routing, request.ref_routing, request.top_ids) if each is not None]
    text = repr((settings, sorted(request.recorded))).encode()
    return zlib.crc32(text + b"".join(x.cpu().contiguous().numpy().tobytes() for x in (*parts, *records)))


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
    own: Sequence[slice | list[Pair]]
    taken: Mapping[int, slice]

    def __call__(
        self, call: int, key: Tensor, value: Tensor, outside: Sequence[list[Pair]]
    ) -> tuple[Tensor, Tensor, list[Pair]]:
        """The keys and values of this pack ``[1, heads, N, size]`` and of ``outside``, in one attention call."""
        pairs = [(key[:, :, x], value[:, :, x]) if isinstance(x, slice) else x[call] for x in self.own]
        rows = [torch.cat([part[0].transpose(0, 1).flatten(1) for part in pair], 1) for pair in pairs]
        width = key.shape[1] * key.shape[3]
        dtype = torch.promote_types(key.dtype, value.dtype)
        own = torch.cat([*rows, key.new_empty(0, width + value.shape[1] * value.shape[3], dtype=dtype)])
        # The pack's own keys and values pass through, so that the backward has a gather on every rank.
        gathered, key, value = _Gather.apply(self.group, max(self.given), own, key, value)

        def taken(kept: list[Pair]) -> tuple[Tensor, Tensor]:
            if id(kept) not in self.taken:
                return kept[call]
            some = gathered.flatten(0, 1)[self.taken[id(kept)]]
            parts = zip((some[:, :width], some[:, width:]), (key, value), strict=True)
            k, v = (x.unflatten(1, (like.shape[1], -1)).transpose(0, 1)[None].to(like.dtype) for x, like in parts)
            return k, v

        return key, value, [taken(kept) for kept in outside]


def gather(group: dist.ProcessGroup, counts: Sequence[int], own: Tensor) -> Tensor:
    """The rows of all ranks, one rank after the other. This rank has ``own [counts[rank], ...]``."""
    (gathered,) = _Gather.apply(group, max(counts), own)
    return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])


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
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *through: Tensor) -> tuple[Tensor | None, ...]:
        (wide,) = widen(gradient)
        total = wide.new_empty(wide.shape[1:])
        dist.reduce_scatter(total, [*wide.contiguous()], group=ctx.group)
        return None, None, total[: ctx.count].to(gradient.dtype), *through
