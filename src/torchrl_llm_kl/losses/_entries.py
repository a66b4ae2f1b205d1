"""From the entries of a TensorDict to equal-shaped tensors of the tokens that count."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl.ragged import Ragged, read_column, read_ragged, same_rows, segment_sum
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

        One value per sequence ``[S, 1]`` comes back in the shape of the batch.
        """
        if values.shape != self.mask.shape:
            return values.reshape(self.tokens.container.batch_shape)
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


def per_token(td: TensorDictBase, key: NestedKey, tokens: Ragged) -> Tensor:
    """An entry at each token; ``[N]``.

    One number for a sequence goes to all of its tokens. Rows shorter than their tokens are those of the response: they
    end where the tokens end, and what comes before is NaN (False).

    Raises:
        ValueError: if a row is longer than its tokens, or holds more than one number for each.
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
    room = tokens.container.row_lengths - widths
    if bool((room < 0).any()):
        row = int((room < 0).nonzero()[0])
        raise ValueError(
            f"{key!r} must have the length of the tokens: sequence {row} has {int(widths[row])} values and "
            f"{int(tokens.container.row_lengths[row])} tokens"
        )
    slots = Ragged(tokens.slots(), tokens.container.row_lengths, tokens.container)
    behind = ~slots.first(room)
    out = values.new_full(behind.shape, False if values.dtype == torch.bool else float("nan"))
    out[behind] = values
    return out if tokens.keep is None else out[tokens.keep]


def check_finite_inputs(inputs: Mapping[str, Tensor], keys: Mapping[str, NestedKey], counted: Counted) -> None:
    """Raise a ValueError that names the entry, the sequence and the token if a number that counts is not finite.

    One look at an accelerator, however many inputs there are.
    """
    floats = {name: x for name, x in inputs.items() if x.is_floating_point() and x.shape == counted.mask.shape}
    if not floats:
        return
    bad = torch.stack([(~x.detach().isfinite() & counted.mask).any() for x in floats.values()]).tolist()
    for (name, value), is_bad in zip(floats.items(), bad, strict=True):
        if is_bad:
            row, column = (int(i) for i in (~value.isfinite() & counted.mask).nonzero()[0])
            at = int(counted.elements[(counted.rows == row) & (counted.columns == column)][0])
            position = int(counted.tokens.positions[at])
            raise ValueError(
                f"{name} ({keys.get(name, name)!r}) is {float(value[row, column])} at sequence {row}, position {position}, "
                f"a token that counts: expected a finite number. Mask the token, or mend what wrote the entry."
            )
