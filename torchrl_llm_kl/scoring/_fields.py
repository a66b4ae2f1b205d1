"""The kinds of optional fields of a request: how their values are checked, cut, joined and sent.

Shapes: ``N`` tokens of ``S`` sequences. ``F`` are the dimensions of a field after the token dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.ragged import Ragged

T = TypeVar("T")
#: The experts of each token, layer and slot: ``[N, L, k]``, ``[*B, T, L, k]``, or a tensor ``[T, L, k]`` for each sequence.
RoutedExperts: TypeAlias = Ragged | Tensor | Sequence[Tensor]
#: The arrays of one field. Their full names begin with the field's name.
Arrays: TypeAlias = Mapping[str, np.ndarray]


class FieldKind(Protocol[T]):
    """The operations on a field of one kind. A :class:`ScoreRequest` loops over its fields and calls only these."""

    def read(self, name: str, given: object, tokens: Ragged, mask: Tensor) -> T | None:
        """Convert any accepted form to the field's value on the CPU, and check that it matches the tokens and the mask."""

    def select(self, value: T, elements: Tensor, rows: Tensor) -> T | None:
        """The values of the sequences ``rows``, whose tokens are at the flat ``elements``."""

    def concat(self, values: Sequence[T]) -> T:
        """Join the values of several requests that have the same :meth:`form`."""

    def form(self, value: T) -> tuple[object, ...]:
        """The sizes or names that values must share to be joined."""
        return ()

    def sizes(self, value: T, tokens: Ragged) -> Tensor:
        """About how many numbers are sent for each sequence, ``[S]``."""

    def pack(self, value: T, mask: Tensor) -> dict[str, np.ndarray]:
        """The arrays to send. ``mask [N]`` is True at scored tokens."""

    def unpack(self, arrays: Arrays, tokens: Ragged, mask: Tensor) -> object:
        """Read the arrays of :meth:`pack` into a form that :meth:`read` takes."""

    def moved(self, name: str, value: T, source: Tensor, target: Tensor) -> T:
        """Move the value to a request with other prompts.

        The scored tokens move from ``source [N]`` to ``target [M]``, both boolean masks.
        """
        raise ValueError(f"{name} was recorded for the sampled prompt: leave out {name} or AfterPrompt.")


def narrow(values: Tensor) -> Tensor:
    """Convert int64 to int32 if all values fit."""
    fits = values.numel() == 0 or (int(values.max()) < 2**31 and int(values.min()) >= -(2**31))
    return values.int() if values.dtype == torch.long and fits else values


def longs(array: np.ndarray) -> Tensor:
    """Read an array of integers as an int64 tensor."""
    return torch.from_numpy(array.astype(np.int64))


# ------------------------------------------------------------------ integers of each token


class TokenIntegers(FieldKind[Tensor]):
    """Integers ``[N, *F]``, with at least one dimension ``F``."""

    def read(self, name: str, given: object, tokens: Ragged, mask: Tensor) -> Tensor | None:
        """See :class:`FieldKind`."""
        values, count = cast(Tensor, given).detach().cpu(), tokens.values.shape[0]
        if values.ndim < 2 or values.shape[0] != count or not _holds_integers(values):
            raise ValueError(f"{name} must be integers ({count}, ..., k), got {tuple(values.shape)} of {values.dtype}.")
        return values.long()

    def select(self, value: Tensor, elements: Tensor, rows: Tensor) -> Tensor:
        """See :class:`FieldKind`."""
        return value[elements]

    def concat(self, values: Sequence[Tensor]) -> Tensor:
        """See :class:`FieldKind`."""
        return torch.cat(list(values))

    def form(self, value: Tensor) -> tuple[object, ...]:
        """The sizes ``F``."""
        return tuple(value.shape[1:])

    def sizes(self, value: Tensor, tokens: Ragged) -> Tensor:
        """See :class:`FieldKind`."""
        return tokens.lengths * value.shape[1:].numel()

    def pack(self, value: Tensor, mask: Tensor) -> dict[str, np.ndarray]:
        """See :class:`FieldKind`."""
        return {"": narrow(value).numpy()}

    def unpack(self, arrays: Arrays, tokens: Ragged, mask: Tensor) -> Tensor:
        """See :class:`FieldKind`."""
        return torch.from_numpy(arrays[""].copy())


class ExpertIds(TokenIntegers):
    """The experts of each token, layer and slot: ``[N, L, k]`` in the dtype of the record. -1 lets the router choose."""

    def read(self, name: str, given: object, tokens: Ragged, mask: Tensor) -> Tensor:
        """See :class:`FieldKind`. Accepts any form of :data:`RoutedExperts`."""
        count = tokens.values.shape[0]
        if isinstance(given, Tensor) and not given.is_nested:
            values = given.detach().cpu()
            slots = tokens.container.batch_shape.numel(), sum(tokens.container.row_sizes)
            # A padded record has the batch dimensions and the width of the padded token ids.
            if values.ndim > 3 and (values.shape[:-3].numel(), values.shape[:-2].numel()) == slots:
                values = values.flatten(0, -3) if tokens.keep is None else values.flatten(0, -3)[tokens.keep]
            return _signed_experts(name, values, count)
        given = Ragged.from_nested(given) if isinstance(given, Tensor) else given
        given = given.to_list() if isinstance(given, Ragged) else cast(Sequence[Tensor], given)
        lengths = tokens.lengths.tolist()
        if len(given) != len(lengths):
            raise ValueError(f"{name} has {len(given)} sequences, the tokens have {len(lengths)}.")
        # An engine does not forward the last token of a sequence, and may leave it out of its record.
        rows = [
            _signed_experts(f"{name} of sequence {i}", torch.as_tensor(row).detach().cpu(), length, length - 1)
            for i, (row, length) in enumerate(zip(given, lengths, strict=True))
        ]
        joined = Ragged.from_list(rows)
        out = joined.values.new_full((count, *joined.values.shape[1:]), -1)
        out[tokens.first(joined.lengths)] = joined.values
        return out


class WeightVersions(TokenIntegers):
    """The version of the weights for each token, ``[N]``, or one for each sequence, ``[S]``. -1 for the present weights."""

    def read(self, name: str, given: object, tokens: Ragged, mask: Tensor) -> Tensor:
        """See :class:`FieldKind`."""
        values = torch.as_tensor(given).detach().cpu()
        if values.shape == tokens.lengths.shape != tokens.values.shape:
            values = values[tokens.sequence_ids]
        if values.shape != tokens.values.shape or not _holds_integers(values):
            both = f"({len(tokens.values)},) or ({tokens.num_sequences},)"
            raise ValueError(f"{name} must be integers {both}, got {tuple(values.shape)} of {values.dtype}.")
        return values.long()

    def moved(self, name: str, value: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """See :class:`FieldKind`."""
        out = value.new_full(target.shape, -1)
        out[target.cpu()] = value.cpu()[source.cpu()]
        return out


def _holds_integers(values: Tensor) -> bool:
    return not values.is_floating_point() and values.dtype != torch.bool


def _signed_experts(name: str, values: Tensor, *counts: int) -> Tensor:
    """Expert ids ``[count, L, k]`` in a signed dtype. The number of tokens must be one of ``counts``."""
    if values.ndim != 3 or values.shape[0] not in counts or not _holds_integers(values):
        raise ValueError(
            f"{name} has shape {tuple(values.shape)} of {values.dtype}: expected integers "
            f"({' or '.join(map(str, counts))}, layers, experts)."
        )
    # -1 needs a sign, and torch has few operators for unsigned types.
    wider = {torch.uint8: torch.int16, torch.uint16: torch.int32, torch.uint32: torch.int64}
    return values.to(wider.get(values.dtype, values.dtype))


# ------------------------------------------------------------------ tokens that a sampler kept


class KeptIds(FieldKind[Kept]):
    """The tokens that the sampler could have drawn at each position."""

    def read(self, name: str, given: object, tokens: Ragged, mask: Tensor) -> Kept:
        """See :class:`FieldKind`. Each scored token must be among the tokens kept at its position."""
        ids, offsets = (x.detach().cpu().long() for x in cast(Kept, given)[:2])
        values, count, counts = tokens.values, tokens.values.shape[0], offsets.diff()
        ascends = offsets.shape == (count + 1,) and int(offsets[0]) == 0 and not bool((counts < 0).any())
        if not ascends or int(offsets[-1]) > len(ids) or bool((ids < 0).any()):
            raise ValueError(f"{name} needs ids of at least 0 and {count + 1} ascending offsets up to {len(ids)}.")
        # A record may have spare room after its last id.
        kept = Kept(ids[: int(offsets[-1])], offsets)
        rows = kept.rows
        # Compare every kept id with the token of its position, instead of a search for each token.
        is_kept = torch.zeros(count, dtype=torch.bool)
        is_kept[rows[kept.ids == values[rows]]] = True
        missing = (mask & ~is_kept).nonzero()
        if len(missing):
            element = int(missing[0])
            raise ValueError(f"{name} at {place_of(tokens, element)} lacks the scored token {int(values[element])}.")
        return kept

    def select(self, value: Kept, elements: Tensor, rows: Tensor) -> Kept:
        """See :class:`FieldKind`."""
        return value.take(elements)

    def concat(self, values: Sequence[Kept]) -> Kept:
        """See :class:`FieldKind`."""
        return Kept.of(torch.cat([x.ids for x in values]), torch.cat([x.offsets.diff() for x in values]))

    def sizes(self, value: Kept, tokens: Ragged) -> Tensor:
        """See :class:`FieldKind`."""
        return value.offsets[tokens.offsets].diff()

    def pack(self, value: Kept, mask: Tensor) -> dict[str, np.ndarray]:
        """See :class:`FieldKind`. Only the records of scored tokens are sent."""
        scored = value.take(mask.nonzero().squeeze(-1))
        return {"counts": scored.offsets.diff().int().numpy(), "ids": narrow(scored.ids).numpy()}

    def unpack(self, arrays: Arrays, tokens: Ragged, mask: Tensor) -> Kept:
        """See :class:`FieldKind`."""
        return spread_kept(longs(arrays["ids"]), longs(arrays["counts"]), mask)

    def moved(self, name: str, value: Kept, source: Tensor, target: Tensor) -> Kept:
        """See :class:`FieldKind`."""
        device = value.offsets.device
        scored = value.take(source.to(device).nonzero().squeeze(-1))
        return spread_kept(scored.ids, scored.offsets.diff(), target.to(device))


def spread_kept(ids: Tensor, counts: Tensor, mask: Tensor) -> Kept:
    """Spread the records of masked-in tokens over all ``N`` tokens. The other tokens get an empty record."""
    every = torch.zeros(len(mask), dtype=torch.long, device=mask.device)
    every[mask] = counts
    return Kept.of(ids, every)


def place_of(tokens: Ragged, element: int) -> str:
    """The sequence and the position of a flat element, for errors."""
    return f"sequence {int(tokens.sequence_ids[element])}, position {int(tokens.positions[element])}"
