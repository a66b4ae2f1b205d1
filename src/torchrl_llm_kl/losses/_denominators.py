"""The counts of a whole batch, kept beside its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl.losses._aggregate import count
from torchrl_llm_kl.ragged import read_column
from torchrl_llm_kl.transforms._interface import sub_key

__all__ = ["read_denominators", "total_counts", "write_denominators"]


def total_counts(
    terms: Sequence[tuple[str, Tensor, str]],
    *,
    max_len: int | None,
    process_group: Any,
    all_ranks: bool | None,
    ranks_average: bool,
) -> dict[str, Tensor]:
    """What each term ``(name, mask, aggregation)`` divides by, over all ranks; float64, which holds any count exactly."""
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
    return {name: value for (name, _, _), value in zip(terms, counts.unbind(), strict=True)}


def write_denominators(td: TensorDictBase, key: NestedKey, counts: Mapping[str, Tensor], batch: torch.Size) -> None:
    """One number for each row."""
    for name, value in counts.items():
        td.set(sub_key(key, name), value.expand(batch).clone())


def read_denominators(td: TensorDictBase, key: NestedKey, names: Sequence[str]) -> dict[str, Tensor] | None:
    """The counts of the batch that these rows are from; None if they were not counted.

    Raises:
        ValueError: if the rows are from batches that were counted apart, or a term was not counted.
    """
    out: dict[str, Tensor] = {}
    for name in names:
        column = read_column(td, sub_key(key, name))
        if column is None:
            if out:
                raise ValueError(
                    f"the batch was counted for {', '.join(out)} but not for {name}: count it with this loss"
                )
            continue
        values = torch.stack(column).flatten() if isinstance(column, list) else column.flatten()
        if values.device.type == "cpu" and values.numel() and bool((values != values[0]).any()):
            raise ValueError(
                f"rows of batches that were counted apart: found denominators {values.unique().tolist()} of {name}. Put the "
                f"batch of one optimiser step together first, then count it."
            )
        out[name] = values[0]
    if out and len(out) < len(names):
        missing = next(name for name in names if name not in out)
        raise ValueError(f"the batch was counted for {', '.join(out)} but not for {missing}: count it with this loss")
    return out or None
