"""The state that a model is in while it is scored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchrl_llm_kl.scoring._adapters import adapters_off
from torchrl_llm_kl.scoring._model import evaluating

__all__ = ["Mode"]


@dataclass(frozen=True)
class Mode:
    """How a model is run.

    Args:
        grad: keep the graph, in the mode that the model is in; otherwise evaluation mode and no graph.
        adapters: False switches PEFT adapters off.
        dtype: of autocast; None for none of ours.
    """

    grad: bool = False
    adapters: bool = True
    dtype: torch.dtype | None = None

    @contextmanager
    def of(self, model: Any) -> Iterator[None]:
        """``model`` in this mode inside, and in its own afterwards, also after an error."""
        with ExitStack() as stack:
            if not self.adapters:
                stack.enter_context(adapters_off(model))
            if not self.grad:
                stack.enter_context(torch.no_grad())
                if isinstance(model, nn.Module):
                    stack.enter_context(evaluating(model))
            if self.dtype is not None:
                device = next(model.parameters()).device.type
                stack.enter_context(torch.autocast(device, self.dtype))
            yield
