"""Forwards of right-padded micro-batches: for models that attend in a way of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from torchrl_llm_kl.scoring._mode import Mode
from torchrl_llm_kl.scoring._model import call, find_body, frequency_switches, hidden_of, logits_of
from torchrl_llm_kl.scoring._plan import plan_micro_batches
from torchrl_llm_kl.scoring._request import MicroBatch, Request
from torchrl_llm_kl.scoring._states import States, head_states

__all__ = ["PaddedPass", "Route", "padded_batches"]


@dataclass(frozen=True)
class Route:
    """How to get logits out of a model.

    Args:
        path: ``"head"`` runs the body and then the head at scored positions only; ``"full"`` the model's own forward.
        mask: whether to pass ``attention_mask``. No token of a causal model attends to padding on its right; the mask
            spares flash attention the work.
        positions: whether to pass ``position_ids``.
        packed: whether the body can attend inside a pack of several sequences.
    """

    path: Literal["head", "full"]
    mask: bool = True
    positions: bool = True
    packed: bool = False


def padded_batches(lengths: Tensor, tokens_per_batch: int, *models: nn.Module) -> list[Tensor]:
    """Micro-batches under a token budget, none of which holds sequences on both sides of a model's frequency switch."""
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
        model: what to run.
        mode: how.
        route: by which way.
        request: what to score.
        batches: sequences of each micro-batch.
        temperature: of the states.
        device: where the model is.
    """

    def __init__(
        self,
        model: nn.Module,
        mode: Mode,
        route: Route,
        request: Request,
        batches: list[Tensor],
        *,
        temperature: float,
        device: torch.device,
    ) -> None:
        self.model, self.mode, self.route, self.request = model, mode, route, request
        self.batches, self.temperature, self.device = batches, temperature, device
        self.elements = [request.elements(rows) for rows in batches]

    def run(self, index: int) -> States:
        """States at the positions that predict ``elements[index]``."""
        batch = self.request.micro_batch(self.batches[index], self.device)
        with self.mode.of(self.model):
            if self.route.path == "full":
                return self._full_states(batch)
            body = find_body(self.model)
            if body is None:
                raise TypeError(f"{type(self.model).__name__} has no separate body and head")
            hidden = hidden_of(self._forward(body, batch)).flatten(0, 1)[batch.slots]
            return head_states(self.model, self.mode, hidden, self.temperature)

    def _full_states(self, batch: MicroBatch) -> States:
        # The last positions: prompt tuning puts virtual tokens before the sequence.
        logits = logits_of(self._forward(self.model, batch))[:, -batch.input_ids.shape[1] :].flatten(0, 1)
        return States(batch.slots.to(logits.device), lambda slots: logits[slots], self.temperature)

    def _forward(self, module: nn.Module, batch: MicroBatch) -> object:
        options = {}
        if self.route.mask:
            options["attention_mask"] = batch.attention_mask
        if self.route.positions:
            options["position_ids"] = batch.position_ids
        return call(module, batch.input_ids, use_cache=False, **options)
