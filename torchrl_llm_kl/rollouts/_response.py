"""Response tokens as dense tensors, the reward of each token, and denominators stored with each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl._numerics import check_finite, send, wide_dtype, widen
from torchrl_llm_kl.ragged import Ragged, read_column, read_node, segment_sum, write_ragged
from torchrl_llm_kl.rollouts._entries import row_numbers, sub_key


class ResponseTokens:
    """Masked-in tokens, packed per sequence, so that objectives and advantages need no prompts and no padding.

    Shapes: ``N`` tokens of all sequences, ``S`` sequences, ``T`` the most masked-in tokens of one sequence (at least 1).

    Args:
        tokens: the sequences. :meth:`restore` and :meth:`write` produce their layout.
        mask: True at masked-in tokens, bool ``[N]``.
        host_mask: the mask on the CPU, if it was read there.

    Attributes:
        tokens: the argument.
        flat_mask: the argument ``mask``, ``[N]``.
        mask: True where :meth:`gather` puts a token, bool ``[S, T]``.

    Example:
        >>> tokens = Ragged.from_list([torch.tensor([7, 8, 9]), torch.tensor([5, 6])])
        >>> response = ResponseTokens(tokens, torch.tensor([False, True, True, False, True]))
        >>> response.gather(tokens.values).tolist()
        [[8, 9], [6, 0]]
        >>> response.scatter(response.gather(tokens.values)).tolist()
        [0, 8, 9, 0, 6]
    """

    def __init__(self, tokens: Ragged, mask: Tensor, host_mask: Tensor | None = None) -> None:
        self.tokens, self.flat_mask, device = tokens, mask, mask.device
        # The sizes are known on the host without a synchronisation. Compute the indices there and send them.
        host, self.host_mask = tokens.to_host(mask) if host_mask is None else (tokens.host, host_mask)
        elements = self.host_mask.nonzero().squeeze(-1)
        rows, lengths = host.sequence_ids[elements], segment_sum(self.host_mask.long(), host.lengths)
        width = int(lengths.max().clamp(min=1))
        places = rows * width + torch.arange(elements.numel()) - (lengths.cumsum(0) - lengths)[rows]
        filled = torch.arange(width) < lengths.unsqueeze(-1)
        self._lengths = lengths
        self.columns = places - rows * width  # stays on the CPU
        self.elements, self._places, self.mask = (send(x, device) for x in (elements, places, filled))

    @property
    def counts(self) -> tuple[Tensor, Tensor]:
        """The numbers of masked-in tokens and of sequences with any, 0-dim on the device of :attr:`mask`."""
        tokens, sequences = send(torch.stack([self._lengths.sum(), self._lengths.count_nonzero()]), self.mask.device)
        return tokens, sequences

    @property
    def is_empty(self) -> bool:
        """Whether the mask is empty."""
        return self.elements.numel() == 0

    def gather(self, values: Tensor) -> Tensor:
        """Pack values per token ``[N, *F]`` to ``[S, T, *F]``, 0 elsewhere."""
        out = values.new_zeros(self.mask.numel(), *values.shape[1:])
        out = out.index_copy_(0, self._places, values.index_select(0, self.elements))
        return out.view(*self.mask.shape, *values.shape[1:])

    def gather_each(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """:meth:`gather` for several columns ``[N]``, with one pass for each dtype."""
        out: dict[str, Tensor] = {}
        for dtype in {x.dtype: None for x in named.values()}:
            columns = {name: x for name, x in named.items() if x.dtype == dtype}
            picked = torch.stack(list(columns.values()))[:, self.elements]
            dense = picked.new_zeros(len(columns), *self.mask.shape)
            dense.flatten(1)[:, self._places] = picked
            out |= dict(zip(columns, dense.unbind(), strict=True))
        return out

    def scatter(self, values: Tensor) -> Tensor:
        """The inverse of :meth:`gather`: ``[S, T]`` to ``[N]``, 0 at all other tokens."""
        flat = values.new_zeros(self.tokens.values.shape[0])
        return flat.index_copy_(0, self.elements, values.flatten().index_select(0, self._places))

    def broadcast(self, per_sequence: Tensor) -> Tensor:
        """Copy a number per sequence ``[S]`` to its masked-in tokens, ``[N]``, 0 at all others."""
        return torch.where(self.flat_mask, per_sequence[self.tokens.sequence_ids], 0)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of ``values [N]`` over the masked-in tokens of each sequence, ``[S]``. 0 for a sequence without any."""
        kept = torch.where(self.flat_mask, widen(values)[0], 0)
        return self.tokens.like(kept).sum() / self.tokens.like(self.flat_mask).sum().clamp(min=1)

    def restore(self, values: Tensor) -> Tensor | list[Tensor]:
        """Put ``[S, T]`` in the layout of the tokens, 0 elsewhere.

        One value per sequence ``[S, 1]`` gets the shape of the batch, and one per pair of sequences ``[P, 1]`` becomes ``[P]``.
        """
        if values.shape != self.mask.shape:
            shape = self.tokens.container.batch_shape
            return values.reshape(shape) if values.numel() == shape.numel() else values.squeeze(-1)
        return self.tokens.like(self.scatter(values)).restore()

    def write(self, td: TensorDictBase, key: NestedKey, values: Tensor) -> TensorDictBase:
        """Store ``values [N]`` as ``[*B, T, 1]`` in the layout of the tokens. Returns the TensorDict that replaces ``td``."""
        return write_ragged(td, key, self.tokens.like(values.unsqueeze(-1)).slots(), self.tokens.container)

    def check_finite(self, named: Mapping[str, Tensor]) -> None:
        """Raise a ValueError that names the first NaN or infinite masked-in number, its sequence and its position.

        Args:
            named: tensors ``[S, T]`` by their name in the message. Integers and other shapes are skipped.
        """
        floats = {name: x for name, x in named.items() if x.is_floating_point() and x.shape == self.mask.shape}
        check_finite(floats, read=self.mask, place=self.place, advice="Mask the token, or fix the entry.")

    def place(self, at: int) -> str:
        """Describe a flat index of :attr:`mask` in an error, by sequence and position."""
        row, column = divmod(at, self.mask.shape[1])
        host = self.tokens.host
        element = (self.host_mask & (host.sequence_ids == row)).nonzero()[column]
        return f"sequence {row}, position {int(host.positions[element])}"


def mismatch(tokens: Ragged, mask: Tensor) -> tuple[Ragged, Tensor]:
    """Pair the answers of a batch with prompts of other rows. Each prompt and each answer is used once.

    All answers move by the same number of rows. That is 1 or, if neighbours share a prompt, the first number that gives
    (nearly) all answers another prompt. An answer begins at the first masked-in token. A sequence without any is unchanged.

    Args:
        tokens: token ids of the sequences.
        mask: True at masked-in tokens, bool ``[N]``.

    Returns:
        The sequences and their mask.

    Example:
        >>> tokens = Ragged.from_list([torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6, 7])])
        >>> mixed, mask = mismatch(tokens, torch.tensor([False, True, True, False, False, True, True]))
        >>> [row.tolist() for row in mixed.to_list()], mask.tolist()
        ([[1, 6, 7], [4, 5, 2, 3]], [False, True, True, False, False, True, True])
    """
    rows, masks = tokens.to_list(), tokens.like(mask).to_list()
    cuts = [[*row.tolist(), True].index(True) for row in masks]
    answering = [i for i, row in enumerate(masks) if bool(row.any())]
    prompts = [tuple(rows[i][: cuts[i]].tolist()) for i in answering]
    number, shift, fewest = len(answering), 0, len(answering)
    # Take the first shift that gives every answer another prompt, or else the one with the fewest repeats.
    for candidate in range(1, number):
        same = sum(prompts[i] == prompts[i - candidate] for i in range(number))
        if same < fewest:
            shift, fewest = candidate, same
        if same == 0:
            break
    mixed, marks = list(rows), list(masks)
    for i, row in enumerate(answering):
        cut, other = cuts[row], answering[i - shift]
        answer = slice(cuts[other], None)
        mixed[row] = torch.cat([rows[row][:cut], rows[other][answer]])
        marks[row] = torch.cat([torch.zeros_like(masks[row][:cut]), masks[other][answer]])
    return Ragged.from_list(mixed, tokens.container.batch_shape), torch.cat(marks)


# ------------------------------------------------------------------ rewards

#: Where an outcome reward goes: to the last response token, or to every token.
RewardPlacement = Literal["last", "broadcast"]


def token_reward(reward: object, like: Ragged, mask: Tensor | None, placement: RewardPlacement) -> Ragged:
    """The reward of each token. An outcome is placed on tokens, and a reward per token is unchanged.

    Args:
        reward: None (0), an outcome per sequence (``[*B]``, ``[*B, 1]``, ``[*B, 1, 1]``), or a reward per token
            (``[*B, T, 1]``, dense or nested, or a list of rows).
        like: the sequences, with any value per token.
        mask: the response tokens, ``[N]``, or None for all tokens. A mask on the CPU avoids a host synchronisation.
        placement: ``"last"`` puts an outcome on the last response token of its sequence, so that token rewards sum to it. A
            sequence without a response has it on its last token. ``"broadcast"`` puts it on every token, as torchrl does.

    Returns:
        ``[N, 1]``, float32 or wider.

    Raises:
        ValueError: if the reward fits neither the sequences nor the tokens.

    Example:
        >>> like = Ragged.from_list([torch.zeros(2), torch.zeros(3)])
        >>> token_reward(torch.tensor([1.0, -1.0]), like, None, "last").values.squeeze(-1).tolist()
        [0.0, 1.0, 0.0, 0.0, -1.0]
    """
    if reward is None:
        return like.like(like.values.new_zeros(like.values.shape[0], 1))
    sizes = like.container.row_sizes
    flat, counts = row_numbers(reward, len(sizes), "the reward")
    flat = flat.to(like.values.device, wide_dtype(flat.dtype))
    if counts == [1] * len(sizes):
        values = _place(flat, like, mask, placement)
    elif counts == sizes:
        values = like.at_slots(flat)
    elif like.keep is not None and counts == like.sizes:  # unpadded rows beside padded tokens
        values = flat
    else:
        shape = tuple(reward.shape) if isinstance(reward, Tensor) and not reward.is_nested else counts
        raise ValueError(
            f"The rewards have shape {shape} but the kl has {sizes} tokens per sequence. Pass [*B], or [*B, T, 1]."
        )
    return like.like(values.unsqueeze(-1))


def _place(outcome: Tensor, like: Ragged, mask: Tensor | None, placement: RewardPlacement) -> Tensor:
    if placement == "broadcast":
        return outcome[like.sequence_ids]
    host = like.outline
    for row in [row for row, size in enumerate(host.sizes) if size == 0]:
        value = float(outcome[row])
        if value:
            raise ValueError(f"sequence {row} has no token for its reward of {value:g}. Drop empty sequences first.")
    last = host.offsets[1:] - 1
    if mask is not None:  # the last response token, if there is one
        # The last response token of each sequence, or -1 without a response.
        places = torch.where(mask.cpu(), host.positions, -1)
        places = torch.full_like(last, -1).scatter_reduce(0, host.sequence_ids, places, "amax")
        last = torch.where(places < 0, last, host.offsets[:-1] + places)
    placed = outcome.new_zeros(like.values.shape[0])
    # The index of an empty sequence points to another sequence, which is harmless because its outcome is 0.
    return placed.index_add_(0, send(last.clamp(min=0), outcome.device), outcome) if placed.numel() else placed


# ------------------------------------------------------------------ denominators


_BATCH = "batch"


def write_denominators(
    td: TensorDictBase, key: NestedKey, counts: Mapping[tuple[str, str], Tensor], batch_id: Tensor
) -> None:
    """Store the counts of a whole batch (0-dim, by name of the term and aggregation mode) with each of its rows.

    Every part of the batch then holds them below ``key`` as ``<name>/<mode>``. The entry ``batch`` beside them is unique to the
    batch. It distinguishes rows of separately counted batches even if their counts are equal.
    """
    for entry, value in [*((f"{name}/{mode}", x) for (name, mode), x in counts.items()), (_BATCH, batch_id)]:
        td.set(sub_key(key, entry), value.expand(td.batch_size).clone())


def read_denominators(td: TensorDictBase, key: NestedKey, terms: Sequence[tuple[str, str]]) -> dict[str, Tensor] | None:
    """Read the counts that :func:`write_denominators` stored for ``terms`` (name, aggregation mode) from any rows of the batch.

    Returns:
        The counts by name of the term, or None if nothing is stored. On an accelerator they are NaN for rows of separately
        counted batches, since an error would need a host synchronisation.

    Raises:
        ValueError: if the rows come from separately counted batches, or were counted for another loss.
    """
    node = read_node(td, key) if isinstance(key, str) else td.get(key, None)
    stored = set() if node is None else set(node.keys())
    if not stored:
        return None
    for name, mode in terms:
        if f"{name}/{mode}" not in stored:
            raise ValueError(
                f"the batch was counted for {', '.join(sorted(stored - {_BATCH}))}, not for {name}/{mode}."
            )
    columns = {name: _numbers(td, sub_key(key, f"{name}/{mode}")) for name, mode in terms}
    ids = _numbers(td, sub_key(key, _BATCH))
    apart = (ids != ids[:1]).any()
    # The host must not wait for an accelerator, so a mixture of batches makes the loss NaN instead of raising.
    if ids.device.type != "cpu":
        return {name: torch.where(apart, torch.nan, values[0]) for name, values in columns.items()}
    if bool(apart):
        counts = "; ".join(f"{values.unique().tolist()} of {name}" for name, values in columns.items())
        raise ValueError(
            f"rows of {len(ids.unique())} batches that were counted apart ({counts}). Count them together."
        )
    return {name: values[0] for name, values in columns.items()}


def _numbers(td: TensorDictBase, key: NestedKey) -> Tensor:
    column = read_column(td, key)
    assert column is not None
    return torch.stack(column).flatten() if isinstance(column, list) else column.flatten()
