"""Right-padded micro-batches of similar length: for models that cannot attend within a pack."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.scoring._model import Setup, body_and_head, call, frequency_switches, read_output, send
from torchrl_llm_kl.scoring._request import Request
from torchrl_llm_kl.scoring._scores import States, head_states


def plan_micro_batches(lengths: Tensor, tokens_per_batch: int) -> list[Tensor]:
    """Split sequences into micro-batches of similar length under a token budget.

    A micro-batch costs ``rows * longest``, padding included. The longest sequences come first, so that a run that does
    not fit into memory fails at once.

    Args:
        lengths: tokens to forward per sequence; ``[S]``, int64. A sequence of 0 tokens is in no micro-batch.
        tokens_per_batch: the budget. A longer sequence gets a micro-batch of its own.

    Returns:
        Sequence indices, int64 on the CPU, one tensor per micro-batch.

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
        sides = [torch.where(within, side, 0) for side in sides for within in (side <= switch, side > switch)]
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
        self.setup = setup
        self._batches = [request.padded(rows) for rows in batches]
        self.elements = [batch.elements for batch in self._batches]

    def run(self, index: int) -> States:
        """States at the positions that predict ``elements[index]``."""
        setup, batch = self.setup, self._batches[index]
        ids, slots = send(batch.ids, setup.device), send(batch.slots, setup.device)
        options = {}
        if setup.route.mask:
            options["attention_mask"] = send(batch.real, setup.device)
        if setup.route.positions:
            positions = torch.arange(ids.shape[1]).expand(ids.shape).contiguous()
            options["position_ids"] = send(positions, setup.device)
        with setup.active():
            if setup.route.path == "full":
                logits = read_output(call(setup.model, ids, use_cache=False, **options), "logits")
                # The last positions: prompt tuning puts virtual tokens before the sequence.
                logits = logits[:, -ids.shape[1] :].flatten(0, 1)
                return States(slots.to(logits.device), lambda some: logits[some], setup.temperature)
            output = call(body_and_head(setup.model)[0], ids, use_cache=False, **options)
            return head_states(setup, read_output(output, "last_hidden_state").flatten(0, 1)[slots])
