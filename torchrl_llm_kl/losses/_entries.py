"""From the entries of a TensorDict to equal-shaped tensors of the tokens that count."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl.ragged import Dense, Ragged, read_column, read_ragged, same_rows, segment_sum
from torchrl_llm_kl.transforms._errors import MissingEntryError, entries

__all__ = ["Counted", "check_finite_inputs", "find_key", "per_sequence", "per_token", "require_key"]


class Counted:
    """The tokens that count, each sequence's moved together: objectives never see prompts or padding.

    Args:
        tokens: all tokens; ``[N]``.
        mask: True at those that count; ``[N]``.

    Attributes:
        mask: True where :meth:`gather` puts a token; ``[S, T]``, ``T`` the most tokens that count in one sequence (1 if
            there is none).
    """

    def __init__(self, tokens: Ragged, mask: Tensor) -> None:
        self.tokens = tokens
        self.elements = mask.nonzero().squeeze(-1)
        self.rows = tokens.sequence_ids[self.elements]
        lengths = segment_sum(mask.long(), tokens.lengths)
        first = lengths.cumsum(0) - lengths
        self.columns = torch.arange(self.elements.numel(), device=mask.device) - first[self.rows]
        width = int(lengths.max().clamp(min=1))
        self.mask = torch.arange(width, device=mask.device) < lengths.unsqueeze(-1)

    @property
    def is_empty(self) -> bool:
        """Whether no token counts at all."""
        return self.elements.numel() == 0

    def gather(self, values: Tensor) -> Tensor:
        """Of one value per token ``[N]`` those that count; ``[S, T]``, 0 elsewhere."""
        return values.new_zeros(self.mask.shape).index_put((self.rows, self.columns), values[self.elements])

    def spread(self, values: Tensor) -> Tensor | list[Tensor]:
        """``[S, T]`` back to where the tokens are, in the form that they were read in; 0 elsewhere.

        One value per sequence ``[S, 1]`` comes back in the shape of the batch, one per pair ``[P, 1]`` as ``[P]``.
        """
        if values.shape != self.mask.shape:
            shape = self.tokens.container.batch_shape
            return values.reshape(shape) if values.numel() == shape.numel() else values.squeeze(-1)
        flat = values.new_zeros(self.tokens.values.shape[0])
        flat = flat.index_put((self.elements,), values[self.rows, self.columns])
        return self.tokens.like(flat).restore()


def find_key(td: TensorDictBase, key: NestedKey) -> NestedKey | None:
    """``key``, or without its leading ``"next"`` if only that is there: data without ``"next"`` has results at the root."""
    if read_column(td, key) is not None:
        return key
    if isinstance(key, tuple) and len(key) > 1 and key[0] == "next":
        rest = key[1:] if len(key) > 2 else key[1]
        if read_column(td, rest) is not None:
            return rest
    return None


def require_key(td: TensorDictBase, key: NestedKey, name: str, who: str) -> NestedKey:
    """The same; a :class:`MissingEntryError` that says what to do if it is nowhere."""
    found = find_key(td, key)
    if found is None:
        within = td.get("next", None) if isinstance(key, tuple) and key[0] == "next" else None
        seen = entries(td) + ("" if within is None else f", next: {entries(within)}")
        raise MissingEntryError(
            f"{who} needs {name}: expected {key!r} in the TensorDict, found: {seen}. Add the entry, or say where it is with "
            f"set_keys({name}=...)."
        )
    return found


def per_sequence(td: TensorDictBase, key: NestedKey) -> Tensor | None:
    """An entry with one number for each sequence; ``[S]``, or None if it has another shape."""
    column = read_column(td, key)
    if isinstance(column, list):
        if not all(isinstance(leaf, Tensor) and leaf.numel() == 1 for leaf in column):
            return None
        return torch.stack([leaf.reshape(()) for leaf in column])
    if not isinstance(column, Tensor):
        raise TypeError(f"expected a tensor under {key!r}, got {type(column).__name__}")
    if column.is_nested or column.numel() != td.batch_size.numel():
        return None
    return column.reshape(-1)


def per_token(
    td: TensorDictBase, key: NestedKey, tokens: Ragged, mask: Tensor | None, *, fill: float = math.nan
) -> Tensor:
    """An entry at each token; ``[N]``.

    One number for a sequence goes to all of its tokens. Rows shorter than their tokens are those of the response: they begin
    with its first token.

    Args:
        td: the data.
        key: the entry.
        tokens: all tokens; ``[N]``.
        mask: True at those of responses; ``[N]``; None if nobody knows them.

    Keyword Args:
        fill: where such a row has nothing to say; 0 for masks.

    Raises:
        ValueError: if a row is longer than its tokens, holds more than one number for each, or cannot be placed.
        TypeError: if it is no tensor.
    """
    whole = per_sequence(td, key)
    if whole is not None:
        return whole.to(tokens.values.device)[tokens.sequence_ids]
    data = read_ragged(td, key)
    assert data is not None
    values = data.slots()
    if values.ndim > 1:
        if values[0].numel() != 1:
            raise ValueError(
                f"{key!r} must hold one number for each token, found rows of {tuple(values.shape[1:])} each"
            )
        values = values.reshape(values.shape[0])
    if data.num_sequences != tokens.num_sequences:
        raise ValueError(f"{key!r} has {data.num_sequences} sequences, the tokens {tokens.num_sequences}")
    if same_rows(data.container, tokens.container):
        return values if tokens.keep is None else values[tokens.keep]
    widths = data.container.row_lengths
    if torch.equal(widths, tokens.lengths):
        return values
    if not values.is_floating_point() and values.dtype != torch.bool:
        values = values.float()
    dense = isinstance(data.container, Dense) and isinstance(tokens.container, Dense)
    return _at_responses(values, widths, key, tokens, mask, fill, slots_first=dense)


def _at_responses(
    values: Tensor,
    widths: Tensor,
    key: NestedKey,
    tokens: Ragged,
    mask: Tensor | None,
    fill: float,
    *,
    slots_first: bool,
) -> Tensor:
    """Rows that end where their sequence ends: at its last token, or at the last slot of a padded block."""
    slots = Ragged(tokens.slots(), tokens.container.row_lengths, tokens.container)
    for every, keep in sorted(
        [(tokens, None), (slots, tokens.keep)], key=lambda pair: (pair[0] is tokens) == slots_first
    ):
        start = every.lengths - widths
        if bool((start < 0).any()):
            continue
        if mask is not None:
            where = mask if keep is None else torch.zeros_like(keep).index_put((keep,), mask)
            first = _first(every, where)
            shifted = bool((start == 1).all())  # log-probs of all tokens but the first
            if not shifted and not bool(((first == every.lengths) | (start == first)).all()):
                continue
        behind = ~every.first(start)
        out = values.new_full(behind.shape, fill).masked_scatter(behind, values)
        return out if keep is None else out[keep]
    too_long = widths > tokens.container.row_lengths
    row = int(too_long.nonzero()[0]) if bool(too_long.any()) else 0
    raise ValueError(
        f"{key!r} must have the length of the tokens: sequence {row} has {int(widths[row])} values and "
        f"{int(tokens.container.row_lengths[row])} tokens. Rows of the response alone must begin with its first token: give "
        "nested rows of exactly its length, or one value for each token of the sequence"
    )


def _first(tokens: Ragged, mask: Tensor) -> Tensor:
    """The position of the first True of each sequence, its length if there is none; ``[S]``."""
    position = torch.where(mask, tokens.positions, tokens.lengths[tokens.sequence_ids])
    return tokens.lengths.scatter_reduce(0, tokens.sequence_ids, position, "amin")


def check_finite_inputs(
    inputs: Mapping[str, Tensor], keys: Mapping[str, NestedKey], counted: Counted, *, unread: Tensor | None = None
) -> None:
    """Raise a ValueError that names the entry, the sequence and the token if a number that counts is not finite.

    One look at an accelerator, however many inputs there are.

    Args:
        inputs: by name; ``[S, T]`` each.
        keys: where they are from.
        counted: the tokens that count.
        unread: True at tokens of which nobody reads what the data says (those of experts).
    """
    floats = {name: x for name, x in inputs.items() if x.is_floating_point() and x.shape == counted.mask.shape}
    if not floats:
        return
    read = counted.mask if unread is None else counted.mask & ~unread
    bad = torch.stack([(~x.detach().isfinite() & read).any() for x in floats.values()]).tolist()
    for (name, value), is_bad in zip(floats.items(), bad, strict=True):
        if is_bad:
            row, column = (int(i) for i in (~value.isfinite() & read).nonzero()[0])
            at = int(counted.elements[(counted.rows == row) & (counted.columns == column)][0])
            position = int(counted.tokens.positions[at])
            raise ValueError(
                f"{name} ({keys.get(name, name)!r}) is {float(value[row, column])} at sequence {row}, position {position}, "
                f"a token that counts: expected a finite number. Mask the token, or mend what wrote the entry."
            )
