"""The tokens that a call scores, checked and laid out on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_finite, check_is_mask
from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.ragged import Ragged

#: Token ids to score: sequences without padding; a list of them; or ``[*B, T]`` with an attention mask.
Sequences = Ragged | Tensor | Sequence[Tensor | Sequence[int]]
#: Tokens to score: one bool for each token, flat or in the form of the token ids.
TokenMask = Tensor | Sequence[Tensor | Sequence[bool]]
#: What the error of :func:`not_text` contains, also where it comes from another process.
NOT_TEXT = "stands for what is not text"


def read_sequences(
    sequences: Sequences, mask: TokenMask | None, attention_mask: Tensor | None
) -> tuple[Ragged, Tensor | None]:
    """Convert token ids of any accepted form, and the mask of those to score, to their flat form.

    Raises:
        TypeError: if ``sequences`` is none of the forms.
        ValueError: if the attention mask is missing, superfluous or no mask of the ids, or the mask selects padding.

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
        raise ValueError("attention_mask= belongs to a padded tensor of token ids; these sequences have no padding.")
    if isinstance(sequences, Ragged):
        tokens = sequences
    elif isinstance(sequences, Tensor):
        tokens = Ragged.from_nested(sequences)
    elif isinstance(sequences, (list, tuple)):
        tokens = Ragged.from_list([_row(i, row, torch.long) for i, row in enumerate(sequences)])
    else:
        raise TypeError(
            f"sequences must be a Ragged, a list of token id lists, or a padded tensor with attention_mask=, got "
            f"{type(sequences).__name__}."
        )
    return tokens, mask if mask is None or isinstance(mask, Tensor) else _mask_of_rows(mask, tokens)


def _read_padded(ids: Tensor, mask: TokenMask | None, attention_mask: Tensor | None) -> tuple[Ragged, Tensor | None]:
    if ids.ndim < 2:
        raise ValueError(f"token ids must be a tensor [*B, T], got shape {tuple(ids.shape)}: pass a list of such rows.")
    if attention_mask is None:
        raise ValueError(
            f"token ids of shape {tuple(ids.shape)} may be padded: pass attention_mask=, 1 at tokens and 0 at padding, or a "
            "list of unpadded rows."
        )
    if attention_mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask must have the shape {tuple(ids.shape)} of the token ids, got {tuple(attention_mask.shape)}."
        )
    if bool(((attention_mask != 0) & (attention_mask != 1)).any()):
        raise ValueError("attention_mask must hold 1 at tokens and 0 at padding, found other numbers.")
    real = attention_mask.to(ids.device).bool()
    tokens = Ragged.from_padded(ids, mask=real, batch_dims=ids.ndim - 1)
    if not isinstance(mask, Tensor):
        return tokens, None if mask is None else _mask_of_rows(mask, tokens)
    if mask.shape == ids.shape:
        check_is_mask(mask=mask)
        mask = mask.to(ids.device)
        padding = (mask & ~real).reshape(-1, ids.shape[-1]).nonzero().tolist()
        if padding:
            row, slot = padding[0]
            raise ValueError(
                f"the mask selects padding: sequence {row}, slot {slot}. Pass mask & attention_mask.bool()."
            )
        mask = mask[real]
    return tokens, mask


def _mask_of_rows(mask: Sequence[Any], tokens: Ragged) -> Tensor:
    flat = Ragged.from_list([_row(i, row, torch.bool) for i, row in enumerate(mask)])
    found, expected = flat.lengths.tolist(), tokens.lengths.tolist()
    if found != expected:
        raise ValueError(f"the mask must have one bool for each token, rows of {expected}, got rows of {found}.")
    return flat.values


def _row(i: int, row: Any, empty: torch.dtype) -> Tensor:
    """Row ``i`` as a tensor ``[T]``; ``empty`` is the dtype of a list without elements."""
    if isinstance(row, Tensor):
        return row
    try:
        return torch.tensor(row, dtype=None if len(row) else empty)
    except (TypeError, ValueError) as error:
        raise TypeError(f"expected a list of rows of numbers, found {row!r:.60} as row {i}.") from error


class PaddedBatch(NamedTuple):
    """Some sequences of a request, right-padded to ``[b, T]``; all int64 on the CPU."""

    ids: Tensor  # [b, T], 0 at padding
    real: Tensor  # [b, T], 1 at tokens and 0 at padding
    slots: Tensor  # the slots, of b * T, that predict a token to score; [K]
    elements: Tensor  # the flat indices of those tokens; [K]
    sources: Tensor  # the flat index of the token in each slot, -1 at padding; [b, T]


@dataclass(frozen=True, eq=False)
class Request:
    """Token ids of ``S`` sequences laid end to end, and the tokens among them to score. All on the CPU."""

    tokens: Ragged  # int64 ids
    mask: Tensor  # True at tokens to score; [N]
    # Leading tokens of each sequence to forward, [S]: those before its last scored token, since position t - 1 predicts
    # token t and a causal model needs no later one.
    forward_lengths: Tensor
    top_ids: Tensor | None = None  # ids whose log-probs are requested beside each token's; [N, *M, k]
    kept: Kept | None = None  # for each token, those that its sampler could have drawn

    @classmethod
    def build(cls, sequences: Ragged, mask: Tensor | None, *, may_be_empty: bool = False) -> Request:
        """Check ``sequences`` and ``mask``; a mask of None scores every token but the first of each sequence."""
        values = sequences.values
        if sequences.num_sequences == 0 and not may_be_empty:
            raise ValueError("expected at least one sequence, got a batch of 0: an empty batch has nothing to score.")
        if values.ndim != 1 or values.is_floating_point() or values.dtype == torch.bool:
            raise ValueError(
                f"token ids must be a flat integer tensor [N], got shape {tuple(values.shape)} of dtype {values.dtype}."
            )
        keep = None if sequences.keep is None else sequences.keep.cpu()
        tokens = Ragged(values.detach().cpu().long(), sequences.lengths.cpu(), sequences.container, keep)
        first = tokens.positions == 0
        mask = ~first if mask is None else _checked_mask(tokens, mask, first)
        last_scored = torch.where(mask, tokens.positions, 0)
        forward_lengths = torch.zeros_like(tokens.lengths).scatter_reduce(0, tokens.sequence_ids, last_scored, "amax")
        return cls(tokens, mask, forward_lengths)

    def with_top_ids(self, top_ids: Tensor | None) -> Request:
        """This request with ids of outcomes, whose shape is checked."""
        if top_ids is None:
            return self
        count = self.tokens.values.shape[0]
        if top_ids.ndim < 2 or top_ids.shape[0] != count or top_ids.shape[1:].numel() == 0:
            raise ValueError(
                f"top_ids has shape {tuple(top_ids.shape)}: expected ({count}, ..., k), ids for each token."
            )
        return replace(self, top_ids=top_ids.detach().cpu().long())

    def ids_at(self, elements: Tensor) -> Tensor | None:
        """The ids of outcomes at some tokens; None if none are requested."""
        return None if self.top_ids is None else self.top_ids[elements]

    def with_kept(self, kept: Kept | None) -> Request:
        """This request scored over recorded tokens; a ValueError if they are not those of its tokens."""
        return self if kept is None else replace(self, kept=check_kept(kept, self.tokens, self.mask))

    @property
    def longest(self) -> int:
        """Tokens to forward of the longest sequence."""
        return int(self.forward_lengths.max()) if self.forward_lengths.numel() else 0

    def uncut(self) -> Request:
        """This request with scored sequences forwarded whole: for models whose positions depend on the length."""
        return replace(self, forward_lengths=torch.where(self.forward_lengths > 0, self.tokens.lengths, 0))

    def before(self, element: Tensor) -> tuple[Tensor, Tensor]:
        """Sequence and position of the token that predicts each flat element; ``[K]`` each."""
        return self.tokens.sequence_ids[element], self.tokens.positions[element] - 1

    def padded(self, rows: Tensor) -> PaddedBatch:
        """The tokens to forward of sequences ``rows``, each with at least one."""
        lengths = self.forward_lengths[rows].unsqueeze(-1)
        column = torch.arange(int(lengths.max()))
        real = column < lengths
        index = self.tokens.offsets[rows].unsqueeze(-1) + torch.minimum(column, lengths - 1)
        # After a sequence comes the first token of the next, which is never scored, or nothing.
        predicts = real & torch.cat([self.mask, self.mask.new_zeros(1)])[index + 1]
        ids = torch.where(real, self.tokens.values[index], 0)
        slots = predicts.flatten().nonzero().squeeze(-1)
        return PaddedBatch(ids, real.long(), slots, index[predicts] + 1, torch.where(real, index, -1))

    def check_ids(self, vocab_size: int | None) -> None:
        """Raise a ValueError if the model cannot embed an id."""
        values = self.tokens.values
        bad = values < 0
        if vocab_size is not None:
            bad |= values >= vocab_size
            listed = values[:0] if self.top_ids is None else self.top_ids[self.mask]
            if bool((listed >= vocab_size).any()):
                raise ValueError(
                    f"top_ids holds the token id {int(listed.max())}, outside the vocabulary of {vocab_size}: a teacher needs "
                    "the tokens of the student."
                )
        if bool(bad.any()):
            element = int(bad.nonzero()[0])
            allowed = "ids must not be negative"
            if vocab_size is not None:
                allowed = f"ids must lie in [0, {vocab_size - 1}] (vocabulary of {vocab_size})"
            raise ValueError(
                f"token id {int(values[element])} at {self.locate(element)} is outside the vocabulary: {allowed}. Score "
                "with the tokenizer of this model, and leave padding and ignore markers out of the sequences."
            )

    def check_lengths(self, limit: int | None) -> None:
        """Raise a ValueError if a sequence to score exceeds the model's positions."""
        if limit is None:
            return
        too_long = (self.tokens.lengths > limit) & (self.forward_lengths > 0)
        if bool(too_long.any()):
            sequence = int(too_long.nonzero()[0])
            raise ValueError(
                f"sequence {sequence} has {int(self.tokens.lengths[sequence])} tokens but the model's configuration "
                f"allows {limit} positions: truncate the sequence, or use a model with a longer context."
            )

    def check_finite(self, elements: Tensor, log_probs: Tensor) -> None:
        """Raise a ValueError for the first log-prob that is not finite: it would turn a log-ratio into NaN."""

        def place(index: int) -> str:
            element = int(elements[index])
            return f"{self.locate(element)} (token {int(self.tokens.values[element])})"

        check_finite(
            {"the model's log-prob": log_probs},
            place=place,
            advice="Mask the token, or look for NaN weights or a token that the model forbids (logit -inf).",
        )

    def locate(self, element: int) -> str:
        """Sequence and position of a flat element, for errors."""
        return _place(self.tokens, element)


def not_text(tokens: Ragged, placeholders: Mapping[int, str]) -> str | None:
    """The error of the first token that stands for an image or the like, whose features no scorer gets; None without one."""
    if not placeholders:
        return None
    found = torch.isin(tokens.values, torch.tensor(list(placeholders), device=tokens.values.device))
    if not bool(found.any()):
        return None
    element = int(found.nonzero()[0])
    token = int(tokens.values[element])
    return (
        f"token id {token} at {_place(tokens, element)} is the model's {placeholders[token]}: it {NOT_TEXT}, such as an "
        "image, and scorers get token ids alone. Score with the model's own forward, or leave such sequences out."
    )


def _place(tokens: Ragged, element: int) -> str:
    return f"sequence {int(tokens.sequence_ids[element])}, position {int(tokens.positions[element])}"


def check_kept(kept: Kept, tokens: Ragged, mask: Tensor) -> Kept:
    """Recorded tokens on the CPU; a ValueError unless they are those of ``tokens`` where the boolean ``mask [N]`` is True.

    Example:
        >>> tokens, mask = Ragged.from_list([torch.tensor([3, 6])]), torch.tensor([False, True])
        >>> check_kept(Kept(torch.tensor([5, 6]), torch.tensor([0, 0, 2])), tokens, mask).ids.tolist()
        [5, 6]
    """
    kept = Kept(kept.ids.detach().cpu().long(), kept.offsets.cpu().long())
    values, count = tokens.values.detach().cpu(), tokens.values.shape[0]
    if kept.offsets.shape != (count + 1,) or int(kept.offsets[0]) != 0 or int(kept.offsets[-1]) > len(kept.ids):
        raise ValueError(
            f"kept.offsets must hold {count + 1} numbers from 0 to at most {len(kept.ids)}, one more than tokens, got "
            f"shape {tuple(kept.offsets.shape)}."
        )
    counts = kept.offsets.diff()
    if bool((counts < 0).any()):
        raise ValueError("kept.offsets must not descend.")
    kept = kept._replace(ids=kept.ids[: int(kept.offsets[-1])])
    rows = kept.rows
    found = torch.zeros(count, dtype=torch.bool)
    found[rows[kept.ids == values[rows]]] = True
    lost = (mask.cpu() & ~found).nonzero()
    if len(lost):
        element = int(lost[0])
        raise ValueError(
            f"token {int(values[element])} at {_place(tokens, element)} is not among the {int(counts[element])} that were "
            "recorded as kept there, so the record belongs to other tokens: check that its rows and positions are those of the "
            "token ids, or mask out tokens that were not sampled."
        )
    return kept


def _checked_mask(tokens: Ragged, mask: Tensor, first: Tensor) -> Tensor:
    check_is_mask(mask=mask)
    if mask.shape != tokens.values.shape:
        raise ValueError(
            f"the mask must have one entry for each token, {tuple(tokens.values.shape)}, got {tuple(mask.shape)}."
        )
    mask = mask.cpu()
    scored = (mask & first).nonzero()
    if scored.numel():
        raise ValueError(
            f"the mask selects the first token of sequence {int(tokens.sequence_ids[int(scored[0])])}: it has no prefix "
            "and so no log-prob. Set the mask to False at the first token of every sequence."
        )
    return mask
