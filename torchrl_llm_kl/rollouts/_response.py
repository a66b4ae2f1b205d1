"""The masked-in tokens of a batch as dense tensors, and the inverse conversion to the layout of the data."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl._numerics import check_finite, send, widen
from torchrl_llm_kl.ragged import Ragged, segment_sum, write_ragged


class ResponseTokens:
    """Masked-in tokens, packed per sequence: objectives and advantages see neither prompts nor padding.

    Shapes: ``N`` tokens of all sequences, ``S`` sequences, ``T`` the most masked-in tokens of one sequence (at least 1).

    Args:
        tokens: the sequences; their layout is the one that :meth:`restore` and :meth:`write` produce.
        mask: True at masked-in tokens, bool ``[N]``.
        host_mask: the mask on the CPU, if it was read there.

    Attributes:
        tokens: as given.
        flat_mask: as given, ``[N]``.
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
        host, self.host_mask = tokens.to_host(mask) if host_mask is None else (tokens.host, host_mask)
        elements = self.host_mask.nonzero().squeeze(-1)
        rows, lengths = host.sequence_ids[elements], segment_sum(self.host_mask.long(), host.lengths)
        width = int(lengths.max().clamp(min=1))
        places = rows * width + torch.arange(elements.numel()) - (lengths.cumsum(0) - lengths)[rows]
        filled = torch.arange(width) < lengths.unsqueeze(-1)
        self._lengths = lengths
        self.columns = places - rows * width  # on the CPU
        self.elements, self._places, self.mask = (send(x, device) for x in (elements, places, filled))

    @property
    def counts(self) -> tuple[Tensor, Tensor]:
        """Masked-in tokens, and sequences with any: counted on the CPU, 0-dim on the device of :attr:`mask`."""
        tokens, sequences = send(torch.stack([self._lengths.sum(), self._lengths.count_nonzero()]), self.mask.device)
        return tokens, sequences

    @property
    def is_empty(self) -> bool:
        """Whether the mask is empty."""
        return self.elements.numel() == 0

    def gather(self, values: Tensor) -> Tensor:
        """Values per token ``[N, *F]`` at the masked-in tokens, ``[S, T, *F]``, 0 elsewhere."""
        out = values.new_zeros(self.mask.numel(), *values.shape[1:])
        out = out.index_copy_(0, self._places, values.index_select(0, self.elements))
        return out.view(*self.mask.shape, *values.shape[1:])

    def gather_each(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """:meth:`gather` of several columns ``[N]``, those of one dtype in one pass."""
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
        """A number per sequence ``[S]`` at each of its masked-in tokens, ``[N]``, 0 at all others."""
        return torch.where(self.flat_mask, per_sequence[self.tokens.sequence_ids], 0)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of ``values [N]`` over the masked-in tokens of each sequence, ``[S]``, 0 for a sequence without any."""
        kept = torch.where(self.flat_mask, widen(values)[0], 0)
        return self.tokens.like(kept).sum() / self.tokens.like(self.flat_mask).sum().clamp(min=1)

    def restore(self, values: Tensor) -> Tensor | list[Tensor]:
        """``[S, T]`` in the layout of the tokens, 0 elsewhere.

        One value per sequence ``[S, 1]`` returns in the shape of the batch, one per pair of sequences ``[P, 1]`` as ``[P]``.
        """
        if values.shape != self.mask.shape:
            shape = self.tokens.container.batch_shape
            return values.reshape(shape) if values.numel() == shape.numel() else values.squeeze(-1)
        return self.tokens.like(self.scatter(values)).restore()

    def write(self, td: TensorDictBase, key: NestedKey, values: Tensor) -> TensorDictBase:
        """Store ``values [N]`` as ``[*B, T, 1]`` in the layout of the tokens; returns the TensorDict that replaces ``td``."""
        return write_ragged(td, key, self.tokens.like(values.unsqueeze(-1)).slots(), self.tokens.container)

    def check_finite(self, named: Mapping[str, Tensor]) -> None:
        """Raise a ValueError that names the first NaN or infinite masked-in number, its sequence and its position.

        Args:
            named: ``[S, T]`` each; the keys name them in the message. Integers and other shapes pass.
        """
        floats = {name: x for name, x in named.items() if x.is_floating_point() and x.shape == self.mask.shape}
        check_finite(floats, read=self.mask, place=self.place, advice="Mask the token, or fix the entry.")

    def place(self, at: int) -> str:
        """Sequence and position of a flat index of :attr:`mask`, for errors."""
        row, column = divmod(at, self.mask.shape[1])
        host = self.tokens.host
        element = (self.host_mask & (host.sequence_ids == row)).nonzero()[column]
        return f"sequence {row}, position {int(host.positions[element])}"


def mismatch(tokens: Ragged, mask: Tensor) -> tuple[Ragged, Tensor]:
    """The answers of a batch after prompts that are not their own, each prompt and each answer once.

    All answers move on by the same number of rows: 1 or, if neighbours share a prompt, the first number by which (nearly) all
    leave their own. An answer begins at the first masked-in token; a sequence without any stays as it is.

    Args:
        tokens: token ids of the sequences.
        mask: True at masked-in tokens, bool ``[N]``.

    Returns:
        The sequences, and their mask.

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
