"""The counts of a whole batch, kept beside its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl.losses._arithmetic import Aggregation, count
from torchrl_llm_kl.ragged import read_column, read_node
from torchrl_llm_kl.transforms._interface import sub_key

__all__ = ["read_denominators", "total_counts", "write_denominators"]


def total_counts(
    terms: Sequence[tuple[str, Tensor, Aggregation]],
    *,
    max_len: int | None,
    process_group: Any,
    all_ranks: bool | None,
    ranks_average: bool,
) -> dict[str, Tensor]:
    """By entry: what each term ``(name, mask, aggregation)`` divides by, over all ranks; float64, which is exact."""
    counts = torch.stack(
        [
            count(mask, mode, max_len=max_len if mode == "seq-mean-token-sum-norm" else None).double()
            for _, mask, mode in terms
        ]
    )
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if all_ranks and not distributed:
        raise RuntimeError("all_ranks=True, but torch.distributed is not initialised: call init_process_group first")
    if distributed if all_ranks is None else all_ranks:
        torch.distributed.all_reduce(counts, group=process_group)
        if ranks_average:  # each rank's loss is worth 1 / ranks of what it says
            counts = counts / torch.distributed.get_world_size(process_group)
    return {_entry(name, mode): value for (name, _, mode), value in zip(terms, counts.unbind(), strict=True)}


def _entry(name: str, mode: str) -> str:
    """A count belongs to a term and to a way of summing it."""
    return f"{name}/{mode}"


def write_denominators(td: TensorDictBase, key: NestedKey, counts: Mapping[str, Tensor], batch: torch.Size) -> None:
    """One number for each row."""
    for name, value in counts.items():
        td.set(sub_key(key, name), value.expand(batch).clone())


def read_denominators(td: TensorDictBase, key: NestedKey, terms: Sequence[tuple[str, str]]) -> dict[str, Tensor] | None:
    """The counts of the batch that these rows are from, by name of the term; None if they were not counted.

    Args:
        td: some rows of it.
        key: where the counts are.
        terms: name and aggregation of each.

    Raises:
        ValueError: if the rows are from batches that were counted apart, or were counted for another loss.
    """
    node = read_node(td, key) if isinstance(key, str) else td.get(key, None)
    there = set() if node is None else set(node.keys())
    if not there:
        return None
    missing = [(name, mode) for name, mode in terms if _entry(name, mode) not in there]
    if missing:
        raise ValueError(
            f"the batch was counted for {', '.join(sorted(there))} but not for {_entry(*missing[0])}: count it with this loss"
        )
    out: dict[str, Tensor] = {}
    for name, mode in terms:
        column = read_column(td, sub_key(key, _entry(name, mode)))
        assert column is not None
        values = torch.stack(column).flatten() if isinstance(column, list) else column.flatten()
        if values.device.type == "cpu" and values.numel() and bool((values != values[0]).any()):
            raise ValueError(
                f"rows of batches that were counted apart: found denominators {values.unique().tolist()} of {name}. Put the "
                f"batch of one optimiser step together first, then count it."
            )
        out[name] = values[0]
    return out
