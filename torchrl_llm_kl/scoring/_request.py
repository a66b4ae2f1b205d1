"""The request: token ids, the mask of the tokens to score, and the records of each token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, TypedDict

import numpy as np
import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_finite, check_is_mask, to_host
from torchrl_llm_kl._typing import ImageRows
from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.ragged import Dense, Ragged, Rows
from torchrl_llm_kl.scoring._fields import (
    ExpertIds,
    FieldKind,
    KeptIds,
    RoutedExperts,
    TokenIntegers,
    WeightVersions,
    narrow,
    place_of,
)
from torchrl_llm_kl.scoring._images import ImageField, RowImages

#: Token ids: sequences without padding, or a padded tensor ``[*B, T]`` with an attention mask.
Sequences = Ragged | Tensor | Sequence[Tensor | Sequence[int]]
#: The mask of the tokens to score, one bool for each token. It is flat or has the form of the token ids.
TokenMask = Ragged | Tensor | Sequence[Tensor | Sequence[bool]]


#: The optional fields of a request, by name. Each value has the type of its field's kind.
FieldValues: TypeAlias = dict[str, Any]


class RequestFields(TypedDict, total=False):
    """The optional fields of a request, as :meth:`ScoreRequest.of` takes them."""

    kept: Kept | None
    top_ids: Tensor | None
    routing: RoutedExperts | None
    ref_routing: RoutedExperts | None
    images: ImageRows | RowImages | None
    versions: Tensor | None


class NotTextError(ValueError):
    """A token is a placeholder for an image, a video or a sound whose data is missing."""


def read_sequences(
    sequences: Sequences, mask: TokenMask | None, attention_mask: Tensor | None
) -> tuple[Ragged, Tensor | None]:
    """Convert token ids and their mask from any accepted form to the flat form.

    Padded ids on an accelerator are copied to the host for this, and the returned mask is on the host.

    Raises:
        TypeError: if ``sequences`` has another type.
        ValueError: if the attention mask is missing, superfluous or does not match the ids, or the mask selects padding.

    Example:
        >>> ids, real = torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
        >>> tokens, mask = read_sequences(ids, real == 1, real)
        >>> tokens.to_list(), mask
        ([tensor([3, 4, 5]), tensor([6, 7])], tensor([True, True, True, True, True]))
    """
    if isinstance(mask, Tensor) and mask.is_nested:
        mask = mask.unbind()
    if isinstance(sequences, Tensor) and not sequences.is_nested:
        return _read_padded(sequences, mask, attention_mask)
    if attention_mask is not None:
        raise ValueError("attention_mask= belongs to a padded tensor of token ids. These sequences have no padding.")
    if isinstance(sequences, Ragged):
        tokens = sequences
    elif isinstance(sequences, Tensor):
        tokens = Ragged.from_nested(sequences)
    elif isinstance(sequences, (list, tuple)):
        tokens = Ragged.from_list([_row_tensor(row, torch.long) for row in sequences])
    else:
        raise TypeError(f"expected a Ragged, token id lists, or a padded tensor, got {type(sequences).__name__}.")
    return tokens, _flat_mask(mask, tokens)


def _read_padded(ids: Tensor, mask: TokenMask | None, attention_mask: Tensor | None) -> tuple[Ragged, Tensor | None]:
    if attention_mask is None:
        raise ValueError(f"token ids {tuple(ids.shape)} may be padded: pass attention_mask=, or a list of rows.")
    # Ids and masks are copied in one transfer. Otherwise each check below would wait for the device.
    if ids.device.type != "cpu":
        dense = [mask] if isinstance(mask, Tensor) else []
        host, attention_mask, *dense = to_host(ids, attention_mask, *dense)
        tokens, mask = _read_padded(host, dense[0] if dense else mask, attention_mask)
        container = Dense(ids.shape[:-1], ids.shape[-1], ids.device)
        return Ragged.on_device_of(tokens, ids.reshape(-1), container), mask
    # Packed batches write sequence numbers (1, 2, 3, ...) into the attention mask. They would silently count as tokens.
    if bool(((attention_mask != 0) & (attention_mask != 1)).any()):
        raise ValueError("attention_mask must hold 1 at tokens and 0 at padding, found other numbers.")
    real = attention_mask.to(ids.device).bool()
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        mask = mask.to(ids.device)
        if bool(mask[~real].any()):
            raise ValueError("the mask selects padding: pass mask & attention_mask.bool().")
        mask = mask[real]
    tokens = Ragged.from_padded(ids, mask=real, batch_dims=ids.ndim - 1)
    return tokens, _flat_mask(mask, tokens)


def _flat_mask(mask: TokenMask | None, tokens: Ragged) -> Tensor | None:
    """Lay the rows of a mask end to end."""
    if mask is None or isinstance(mask, Tensor):
        return mask
    flat = mask if isinstance(mask, Ragged) else Ragged.from_list([_row_tensor(row, torch.bool) for row in mask])
    if flat.sizes != tokens.sizes:
        raise ValueError(f"the mask has rows of {flat.sizes} tokens: expected {tokens.sizes}, one bool for each token.")
    return flat.values


def _row_tensor(row: Tensor | Sequence[int] | Sequence[bool], empty: torch.dtype) -> Tensor:
    """A row as a tensor ``[T]``. A list without elements gets the dtype ``empty``."""
    return row if isinstance(row, Tensor) else torch.tensor(row, dtype=None if len(row) else empty)


class PaddedBatch(NamedTuple):
    """Some sequences of a request, right-padded to ``[b, T]``. All tensors are int64 on the CPU."""

    ids: Tensor  # [b, T], 0 at padding
    real: Tensor  # [b, T], 1 at tokens and 0 at padding
    slots: Tensor  # [K], the slots among b * T that predict a token to score
    elements: Tensor  # [K], the flat indices of the predicted tokens
    sources: Tensor  # [b, T], the flat index of the token in each slot, -1 at padding


# ------------------------------------------------------------------ the request


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    """The ``N`` token ids of ``S`` sequences, laid end to end, and the mask of the tokens to score. Both are on the CPU.

    Build a request with :meth:`of`, which takes every form of token ids. Each optional field has a
    :class:`~torchrl_llm_kl.scoring._fields.FieldKind`, which checks, cuts, joins and sends the values of the field.

    Attributes:
        tokens: int64 ids, ``values [N]``.
        mask: bool ``[N]``, True at tokens to score.
        layout: the token ids as they were passed. The scores get their layout and device.
        kept: the tokens that the sampler could have drawn at each position, as the sampler recorded them. Scores are
            restricted to these tokens.
        top_ids: int64 ids ``[N, *M, k]``. Their log-probs are computed too.
        routing: the experts that a mixture of experts used for each token, ``[N, L, k]``. -1 lets the router choose.
        ref_routing: the same for the reference model.
        images: the images of each sequence.
        versions: the version of the weights to score each token with, ``[N]``. -1 for the present weights.

    Example:
        >>> request = ScoreRequest.of([[3, 4, 5], [6, 7]])
        >>> request.mask.tolist(), request.select(torch.tensor([1])).tokens.to_list()
        ([False, True, True, False, True], [tensor([6, 7])])
    """

    tokens: Ragged
    mask: Tensor
    layout: Ragged
    kept: Kept | None = field(default=None, metadata={"kind": KeptIds()})
    top_ids: Tensor | None = field(default=None, metadata={"kind": TokenIntegers()})
    routing: Tensor | None = field(default=None, metadata={"kind": ExpertIds()})
    ref_routing: Tensor | None = field(default=None, metadata={"kind": ExpertIds()})
    images: RowImages | None = field(default=None, metadata={"kind": ImageField()})
    versions: Tensor | None = field(default=None, metadata={"kind": WeightVersions()})
    whole: bool = False  # forward whole sequences, for models whose positions depend on the length

    @classmethod
    def of(
        cls,
        sequences: Sequences,
        mask: TokenMask | None = None,
        *,
        attention_mask: Tensor | None = None,
        kept: Kept | None = None,
        top_ids: Tensor | None = None,
        routing: RoutedExperts | None = None,
        ref_routing: RoutedExperts | None = None,
        images: ImageRows | RowImages | None = None,
        versions: Tensor | None = None,
    ) -> ScoreRequest:
        """Build a request from any form of token ids, and check it.

        Args:
            sequences: token ids of an integer dtype: a :class:`~torchrl_llm_kl.Ragged` (``values [N]``), a list of rows
                (lists or tensors), a nested tensor, or a padded tensor ``[*B, T]`` with ``attention_mask``. Rows may be empty.
            mask: bool, True at tokens to score. Either ``[N]``, in the order of the tokens without padding, or a list of rows,
                a nested tensor, or ``[*B, T]`` for padded token ids. None scores every token except the first of each
                sequence, which has no prefix.

        Keyword Args:
            attention_mask: ``[*B, T]``, 1 or True at tokens and 0 or False at padding, on either side. A padded tensor
                requires it. Other forms do not accept it.
            kept: the tokens that the sampler could have drawn at each of the ``N`` positions. Positions outside the mask may
                have none.
            top_ids: ids at each position, ``[N, *M, k]``. Negative ids are padding. Ids of masked-out tokens are ignored.
            routing: the experts of each token, layer and slot. Either integers ``[N, L, k]``, in the order of the tokens
                without padding, or ``[*B, T, L, k]`` for padded token ids, or one array ``[T, L, k]`` for each sequence. The
                array of a sequence may lack the last token if the engine did not forward it (vLLM's ``routed_experts``). ``L``
                counts the layers with a router, or all layers. -1 leaves a token or a layer to the router.
            ref_routing: the same for the reference model.
            images: for each sequence, None or the processor's output for its images (``pixel_values``, ``image_grid_thw``,
                ...). The whole output is accepted. Image tokens are never scored. See ``docs/images.md``.
            versions: the version of the weights to score each token with, ``[N]``, or each sequence, ``[S]``. -1 for the
                present weights. Only for a :class:`~torchrl_llm_kl.scoring.VersionedScorer`, and services that keep versions.

        Raises:
            TypeError: if ``sequences`` has another type.
            ValueError: if the mask selects padding or a first token, the attention mask is missing or does not match the
                token ids, or a record does not match the tokens.
        """
        layout, flat = read_sequences(sequences, mask, attention_mask)
        values = layout.values
        if values.ndim != 1 or values.is_floating_point() or values.dtype == torch.bool:
            raise ValueError(f"token ids must be flat integers, got shape {tuple(values.shape)} of {values.dtype}.")
        # Packs are planned and ids are checked on the CPU, where reading a value does not wait for an accelerator.
        host, *masks = layout.to_host(*([] if flat is None else [flat]))
        tokens = Ragged(host.values.detach().long(), host.lengths, layout.container, host.keep)
        scored = _checked_mask(tokens, masks[0]) if masks else _all_but_first(tokens)
        every = {"kept": kept, "top_ids": top_ids, "routing": routing, "ref_routing": ref_routing, "images": images}
        every["versions"] = versions
        given = {name: value for name, value in every.items() if value is not None}
        checked: FieldValues = {name: FIELDS[name].read(name, x, tokens, scored) for name, x in given.items()}
        return cls(tokens, scored, layout, **checked)

    # ------------------------------------------------------------------ optional fields

    @property
    def recorded(self) -> FieldValues:
        """The optional fields that are set, by name."""
        return {name: vars(self)[name] for name in FIELDS if vars(self)[name] is not None}

    @property
    def form(self) -> tuple[tuple[str, tuple[object, ...]], ...]:
        """The names and sizes of the optional fields. Only requests of one form can be joined."""
        return tuple((name, FIELDS[name].form(value)) for name, value in self.recorded.items())

    def elements(self, rows: Tensor) -> Tensor:
        """Flat indices of the tokens of the sequences ``rows``, in that order."""
        lengths, starts = self.tokens.lengths[rows], self.tokens.offsets[:-1][rows]
        before = lengths.cumsum(0) - lengths
        # Each sequence moves as a whole: shift its elements by the difference of its old and new start.
        return torch.arange(int(lengths.sum())) + (starts - before).repeat_interleave(lengths)

    def select(self, rows: Tensor) -> ScoreRequest:
        """A request with only the sequences ``rows``, in that order."""
        elements = self.elements(rows)
        tokens = _laid_out(self.tokens.values[elements], self.tokens.lengths[rows])
        chosen: FieldValues = {
            name: FIELDS[name].select(value, elements, rows) for name, value in self.recorded.items()
        }
        return replace(self, tokens=tokens, mask=self.mask[elements], layout=tokens, **chosen)

    @staticmethod
    def concat(requests: Sequence[ScoreRequest]) -> ScoreRequest:
        """Join several requests in one. They must have the same :attr:`form`."""
        every = [(request.tokens.values, request.tokens.lengths, request.mask) for request in requests]
        values, lengths, mask = map(torch.cat, zip(*every, strict=True))
        tokens, first = _laid_out(values, lengths), requests[0]
        joined: FieldValues = {
            name: FIELDS[name].concat([vars(each)[name] for each in requests]) for name in first.recorded
        }
        return replace(first, tokens=tokens, mask=mask, layout=tokens, **joined)

    def sizes(self) -> Tensor:
        """The approximate number of values that are sent for each sequence, ``[S]``."""
        sizes = self.tokens.lengths
        for name, value in self.recorded.items():
            sizes = sizes + FIELDS[name].sizes(value, self.tokens)
        return sizes

    def to_arrays(self) -> dict[str, np.ndarray]:
        """The request as arrays, to send it to another process.

        Token ids take 4 or 8 bytes each, a sequence 8 bytes, and the mask one bit per token. Each id of ``kept`` and of
        ``top_ids`` takes 4 bytes.
        """
        arrays = {
            "lengths": self.tokens.lengths.numpy(),
            "tokens": narrow(self.tokens.values).numpy(),
            "mask": np.packbits(self.mask.numpy()),
        }
        for name, value in self.recorded.items():
            packed = FIELDS[name].pack(value, self.mask)
            arrays |= {f"{name}.{part}".rstrip("."): array for part, array in packed.items()}
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> ScoreRequest:
        """Read a request from the arrays of :meth:`to_arrays`. :meth:`of` checks it."""
        lengths, values, bits = (arrays[name] for name in ("lengths", "tokens", "mask"))
        if (lengths < 0).any() or lengths.sum() != len(values) or len(bits) != (len(values) + 7) // 8:
            # torch does not check the lengths, and would write outside of its memory.
            raise ValueError(
                f"{len(values)} tokens, {len(bits)} mask bytes, lengths {lengths.tolist()!s:.60}: expected lengths from 0 "
                "that add up to the tokens, and one bit for each token. Send the arrays of ScoreRequest.to_arrays()."
            )
        parts = {name: dict[str, np.ndarray]() for name in FIELDS}
        for name in arrays.keys() - {"lengths", "tokens", "mask"}:
            owner, _, part = name.partition(".")
            parts[owner][part] = arrays[name]
        mask = torch.from_numpy(np.unpackbits(bits, count=len(values)).astype(bool))
        # Arrays from Ray are read-only views of shared memory, so the ids are copied.
        tokens = _laid_out(torch.from_numpy(values.copy()), torch.from_numpy(lengths.astype(np.int64)))
        given: FieldValues = {name: FIELDS[name].unpack(own, tokens, mask) for name, own in parts.items() if own}
        return cls.of(tokens, mask, **given)

    # ------------------------------------------------------------------ the tokens to forward

    @cached_property
    def forward_lengths(self) -> Tensor:
        """The number of leading tokens of each sequence to forward, ``[S]``: all tokens before the last scored one.

        Position t - 1 predicts token t, and a causal model needs no later position.
        """
        lengths, scored = self.tokens.lengths.numpy(), np.flatnonzero(self.mask.numpy())
        ends = lengths.cumsum()
        # The last scored token before the end of a sequence may belong to an earlier one.
        needed = (np.append(0, scored)[scored.searchsorted(ends)] - ends + lengths).clip(0)
        return torch.from_numpy(np.where(needed > 0, lengths, 0) if self.whole else needed)

    def at(self, element: Tensor) -> tuple[Tensor, Tensor]:
        """The sequence and the position of each flat element, ``[K]`` each."""
        return self.tokens.sequence_ids[element], self.tokens.positions[element]

    def padded(self, rows: Tensor) -> PaddedBatch:
        """The tokens to forward of the sequences ``rows``. Each sequence must have at least one token to forward."""
        lengths = self.forward_lengths[rows].unsqueeze(-1)
        column = torch.arange(int(lengths.max()))
        real = column < lengths
        # At padding, repeat the last forwarded token, so that the index stays within the sequence.
        index = self.tokens.offsets[rows].unsqueeze(-1) + torch.minimum(column, lengths - 1)
        # The element after a sequence is the first token of the next one, which is never scored.
        predicts = real & torch.cat([self.mask, self.mask.new_zeros(1)])[index + 1]
        ids = torch.where(real, self.tokens.values[index], 0)
        slots = predicts.flatten().nonzero().squeeze(-1)
        return PaddedBatch(ids, real.long(), slots, index[predicts] + 1, torch.where(real, index, -1))

    def check_ids(self, vocab_size: int | None) -> None:
        """Raise a ValueError for an id outside the vocabulary. None checks only for negative ids."""
        values = self.tokens.values.numpy()
        size = math.inf if vocab_size is None else vocab_size
        bad = np.flatnonzero((values < 0) | (values >= size))
        if len(bad):
            element, token = int(bad[0]), int(values[bad[0]])
            raise ValueError(f"token id {token} at {self.locate(element)} is outside the vocabulary of {size} tokens.")
        if self.top_ids is not None and bool((self.top_ids[self.mask] >= size).any()):
            raise ValueError(f"top_ids holds token ids outside the student's vocabulary of {size} tokens.")

    def check_lengths(self, limit: int | None) -> None:
        """Raise a ValueError if a sequence to score exceeds the model's positions."""
        for row, size in enumerate(self.tokens.sizes):
            if size > (limit or math.inf) and self.forward_lengths[row] > 0:
                raise ValueError(f"sequence {row} has {size} tokens, the model allows {limit}: truncate it.")

    def check_finite(self, elements: Tensor, log_probs: Tensor) -> None:
        """Raise a ValueError for the first log-prob that is not finite. It would turn a log-ratio into NaN."""
        tokens = self.tokens.values[elements]
        check_finite(
            {"the model's log-prob": log_probs},
            place=lambda index: f"{self.locate(int(elements[index]))} (token {int(tokens[index])})",
            advice="Mask the token, or look for NaN weights or a token that the model forbids (logit -inf).",
        )

    def locate(self, element: int) -> str:
        """The sequence and the position of a flat element, for errors."""
        return place_of(self.tokens, element)


def not_text(tokens: Ragged, placeholders: Mapping[int, str]) -> NotTextError | None:
    """The error for the first placeholder of an image, a video or a sound whose data is missing, else None."""
    if not placeholders:
        return None
    at = torch.isin(tokens.values, torch.tensor(list(placeholders), device=tokens.values.device)).nonzero()
    if not len(at):
        return None
    element, token = int(at[0]), int(tokens.values[at[0]])
    return NotTextError(
        f"token id {token} at {place_of(tokens, element)} is the model's {placeholders[token]}: it is a placeholder, and its "
        'pixels are missing. Pass images= (the entry "images" of data) for an image, and leave out sequences with video or '
        "sound."
    )


#: The optional fields and their kinds, by name.
FIELDS: Mapping[str, FieldKind[object]] = {
    each.name: each.metadata["kind"] for each in fields(ScoreRequest) if "kind" in each.metadata
}


def _laid_out(values: Tensor, lengths: Tensor) -> Ragged:
    return Ragged(values, None, Rows(lengths.tolist(), torch.Size([len(lengths)]), values.device))


def _all_but_first(tokens: Ragged) -> Tensor:
    """A mask of all tokens but the first of each sequence."""
    sizes, mask = tokens.sizes, np.ones(tokens.values.shape[0], dtype=bool)
    mask[[end - size for end, size in zip(accumulate(sizes), sizes, strict=True) if size]] = False
    return torch.from_numpy(mask)


def _checked_mask(tokens: Ragged, mask: Tensor) -> Tensor:
    check_is_mask(mask=mask)
    if mask.shape != tokens.values.shape:
        raise ValueError(f"the mask has shape {tuple(mask.shape)}, expected {tuple(tokens.values.shape)}.")
    first = (mask & (tokens.positions == 0)).nonzero()
    if len(first):
        row = int(tokens.sequence_ids[first[0]])
        raise ValueError(f"the mask selects the first token of sequence {row}, which has no prefix: set it to False.")
    return mask


def read_request(
    sequences: Sequences | ScoreRequest, mask: TokenMask | None, attention_mask: Tensor | None
) -> ScoreRequest:
    """Return a request as it is, or build one from token ids and masks."""
    if not isinstance(sequences, ScoreRequest):
        return ScoreRequest.of(sequences, mask, attention_mask=attention_mask)
    if mask is not None or attention_mask is not None:
        raise TypeError("a ScoreRequest holds its own mask: leave mask and attention_mask out.")
    return sequences
