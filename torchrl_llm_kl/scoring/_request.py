"""What a score call asks for, checked and laid out on the CPU; and one padded micro-batch of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring._device import send

__all__ = ["MicroBatch", "Request"]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Right-padded sequences, and which of their positions predict a token to score.

    Args:
        input_ids: token ids, 0 at padding; ``[b, T]``.
        attention_mask: 1 at tokens, 0 at padding; ``[b, T]``, int64.
        position_ids: counted from each sequence's first token; ``[b, T]``.
        slots: positions of the flattened ``[b * T]`` whose output predicts a token to score; ``[n]``.
        targets: the tokens that they predict; ``[n]``.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    slots: Tensor
    targets: Tensor


@dataclass(frozen=True, eq=False)
class Request:
    """Token ids of ``S`` sequences laid end to end, and the tokens among them to score. All on the CPU.

    Args:
        tokens: int64 ids.
        mask: True at tokens to score; ``[N]``.
        forward_lengths: how many leading tokens of each sequence must be forwarded: those before its last token to
            score, since position ``t - 1`` predicts token ``t`` and no later one matters to a causal model; ``[S]``.
    """

    tokens: Ragged
    mask: Tensor
    forward_lengths: Tensor

    @classmethod
    def build(cls, sequences: Ragged, mask: Tensor | None) -> Request:
        """Check ``sequences`` and ``mask``; a mask of None asks for every token but the first of each sequence."""
        values = sequences.values
        if sequences.num_sequences == 0:
            raise ValueError("expected at least one sequence, got a batch of 0: an empty batch has nothing to score")
        if values.ndim != 1 or values.is_floating_point() or values.dtype == torch.bool:
            raise ValueError(
                f"token ids must be a flat integer tensor [N], got shape {tuple(values.shape)} of dtype {values.dtype}"
            )
        tokens = Ragged(values.detach().cpu().long(), sequences.lengths.cpu(), sequences.container)
        first = tokens.positions == 0
        mask = ~first if mask is None else _checked_mask(tokens, mask, first)
        last_scored = torch.where(mask, tokens.positions, 0)
        forward_lengths = torch.zeros_like(tokens.lengths).scatter_reduce(0, tokens.sequence_ids, last_scored, "amax")
        return cls(tokens, mask, forward_lengths)

    def uncut(self) -> Request:
        """The same with whole sequences forwarded: for models whose positions depend on the length of the sequence."""
        return replace(self, forward_lengths=torch.where(self.forward_lengths > 0, self.tokens.lengths, 0))

    def locate(self, element: int) -> str:
        """Name a flat element in an error message."""
        return f"sequence {int(self.tokens.sequence_ids[element])}, position {int(self.tokens.positions[element])}"

    def before(self, element: Tensor) -> tuple[Tensor, Tensor]:
        """Sequence and position of the token that predicts each flat element; ``[K]`` each."""
        return self.tokens.sequence_ids[element], self.tokens.positions[element] - 1

    def check_ids(self, vocab_size: int | None) -> None:
        """Every id is one that the model can embed."""
        values = self.tokens.values
        bad = values < 0
        if vocab_size is not None:
            bad |= values >= vocab_size
        if bool(bad.any()):
            element = int(bad.nonzero()[0])
            allowed = "must not be negative" if vocab_size is None else f"must lie in [0, {vocab_size - 1}]"
            raise ValueError(
                f"token id {int(values[element])} at {self.locate(element)} is outside the vocabulary: ids {allowed}"
                f"{'' if vocab_size is None else f' (vocabulary of {vocab_size})'}. Score with the tokenizer of this "
                "model, and leave padding and ignore markers out of the sequences"
            )

    def check_lengths(self, limit: int | None) -> None:
        """Every sequence to score fits into the model's positions."""
        if limit is None:
            return
        too_long = (self.tokens.lengths > limit) & (self.forward_lengths > 0)
        if bool(too_long.any()):
            sequence = int(too_long.nonzero()[0])
            raise ValueError(
                f"sequence {sequence} has {int(self.tokens.lengths[sequence])} tokens but the model's configuration "
                f"allows {limit} positions: truncate the sequence, or use a model with a longer context"
            )

    def check_finite(self, elements: Tensor, log_probs: Tensor) -> None:
        """Every log-prob is finite: an infinite one turns a log-ratio into NaN. One synchronisation."""
        log_probs = log_probs.detach()
        bad = ~torch.isfinite(log_probs)
        if bool(bad.any()):
            index = int(bad.nonzero()[0])
            element = int(elements[index])
            raise ValueError(
                f"the model gives token {int(self.tokens.values[element])} at {self.locate(element)} the log-prob "
                f"{float(log_probs[index])}: expected a finite number. Mask the token away, or look for a token that "
                "the model forbids (logit -inf), or for NaN weights"
            )

    def elements(self, rows: Tensor) -> Tensor:
        """The flat indices of the tokens to score of some sequences, in the order of :meth:`micro_batch`."""
        index, scored = self._window(rows)
        return index[scored] + 1

    def micro_batch(self, rows: Tensor, device: torch.device) -> MicroBatch:
        """Sequences ``rows``, cut to what must be forwarded, right-padded, on ``device``."""
        index, scored = self._window(rows)
        lengths = self.forward_lengths[rows].unsqueeze(-1)
        column = torch.arange(index.shape[1])
        real = column < lengths
        return MicroBatch(
            input_ids=send(torch.where(real, self.tokens.values[index], 0), device),
            attention_mask=send(real.long(), device),
            position_ids=send(column.expand(index.shape).contiguous(), device),
            slots=send(scored.flatten().nonzero().squeeze(-1), device),
            targets=send(self.tokens.values[index[scored] + 1], device),
        )

    def _window(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The flat index of each padded slot (any valid one at padding), and whether it predicts a token to score."""
        lengths = self.forward_lengths[rows].unsqueeze(-1)
        column = torch.arange(int(lengths.max()))
        index = self.tokens.offsets[rows].unsqueeze(-1) + torch.minimum(column, lengths - 1)
        # Behind a sequence comes the first token of the next, which is never asked for, or nothing.
        follows = torch.cat([self.mask, self.mask.new_zeros(1)])[index + 1]
        return index, (column < lengths) & follows


def _checked_mask(tokens: Ragged, mask: Tensor, first: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        raise TypeError(f"the mask must be a bool tensor, got {mask.dtype}: pass mask.bool()")
    if mask.shape != tokens.values.shape:
        raise ValueError(
            f"the mask must have one entry for each token, {tuple(tokens.values.shape)}, got {tuple(mask.shape)}"
        )
    mask = mask.cpu()
    asked = mask & first
    if bool(asked.any()):
        sequence = int(tokens.sequence_ids[int(asked.nonzero()[0])])
        raise ValueError(
            f"the mask asks for the first token of sequence {sequence}: it has no prefix and so no log-prob. Set the "
            "mask to False at the first token of every sequence"
        )
    return mask
