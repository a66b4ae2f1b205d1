"""Right-padded micro-batches of similar length: for models that cannot attend within a pack."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.scoring._model import body_and_head, call, frequency_switches, hidden_of, logits_of
from torchrl_llm_kl.scoring._request import Request
from torchrl_llm_kl.scoring._scores import States, head_states
from torchrl_llm_kl.scoring._setup import Setup, send


def plan_micro_batches(lengths: Tensor, tokens_per_batch: int) -> list[Tensor]:
    """Split sequences into micro-batches of similar length under a token budget.

    A micro-batch costs ``rows * longest``: padding counts. The longest sequences come first, so that a run that does
    not fit into memory fails at once.

    Args:
        lengths: tokens to forward per sequence; ``[S]``, int64. A sequence of 0 tokens is in no micro-batch.
        tokens_per_batch: the budget. A longer sequence gets a micro-batch of its own.

    Returns:
        Sequence indices, int64 on the CPU, one tensor per micro-batch; together every sequence of at least one token
        exactly once.

    Raises:
        ValueError: if the budget is below 1 or a length is negative.

    Example:
        >>> import torch
        >>> [batch.tolist() for batch in plan_micro_batches(torch.tensor([2, 9, 0, 3, 4]), 10)]
        [[1], [4, 3], [0]]
    """
    check_range(1, tokens_per_batch=tokens_per_batch)
    longest_first, order = lengths.cpu().sort(descending=True, stable=True)
    if len(order) and int(longest_first[-1]) < 0:
        raise ValueError(f"lengths must not be negative, got {int(longest_first[-1])} for sequence {int(order[-1])}.")
    batches = []
    start, stop = 0, int((longest_first > 0).sum())
    while start < stop:
        rows = max(1, tokens_per_batch // int(longest_first[start]))
        batches.append(order[start : min(start + rows, stop)])
        start += rows
    return batches


def padded_batches(lengths: Tensor, tokens_per_batch: int, *models: nn.Module) -> list[Tensor]:
    """:func:`plan_micro_batches`, with no batch on both sides of a model's frequency switch."""
    sides = [lengths]
    for switch in set().union(*map(frequency_switches, models)):
        sides = [
            part
            for side in sides
            for part in (torch.where(side <= switch, side, 0), torch.where(side > switch, side, 0))
        ]
    return [rows for side in sides for rows in plan_micro_batches(side, tokens_per_batch)]


class PaddedPass:
    """One model over a request, a micro-batch at a time.

    Args:
        setup: the model.
        request: the tokens to score.
        batches: the sequences of each micro-batch, each with at least one token to forward.

    Attributes:
        elements: flat indices of the tokens that each micro-batch predicts.
    """

    def __init__(self, setup: Setup, request: Request, batches: list[Tensor]) -> None:
        self.setup, self.request, self.batches = setup, request, batches
        self.elements = [index[scored] + 1 for index, scored in map(self._window, batches)]

    def run(self, index: int) -> States:
        """States at the positions that predict ``elements[index]``."""
        setup, rows = self.setup, self.batches[index]
        element, scored = self._window(rows)
        column = torch.arange(element.shape[1])
        real = column < self.request.forward_lengths[rows].unsqueeze(-1)
        input_ids = send(torch.where(real, self.request.tokens.values[element], 0), setup.device)
        slots = send(scored.flatten().nonzero().squeeze(-1), setup.device)
        options = {}
        if setup.route.mask:
            options["attention_mask"] = send(real.long(), setup.device)
        if setup.route.positions:
            options["position_ids"] = send(column.expand(element.shape).contiguous(), setup.device)
        with setup.active():
            if setup.route.path == "full":
                output = call(setup.model, input_ids, use_cache=False, **options)
                # The last positions: prompt tuning puts virtual tokens before the sequence.
                logits = logits_of(output)[:, -input_ids.shape[1] :].flatten(0, 1)
                return States(slots.to(logits.device), lambda some: logits[some], setup.temperature)
            output = call(body_and_head(setup.model)[0], input_ids, use_cache=False, **options)
            return head_states(setup, hidden_of(output).flatten(0, 1)[slots])

    def _window(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The flat index of each padded slot (any valid one at padding), and whether it predicts a token to score."""
        request = self.request
        lengths = request.forward_lengths[rows].unsqueeze(-1)
        column = torch.arange(int(lengths.max()))
        index = request.tokens.offsets[rows].unsqueeze(-1) + torch.minimum(column, lengths - 1)
        # After a sequence comes the first token of the next, which is never scored, or nothing.
        follows = torch.cat([request.mask, request.mask.new_zeros(1)])[index + 1]
        return index, (column < lengths) & follows
