"""Models with compiled parts, and the training of one step of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchrl_llm_kl import LogProbScorer, Ragged
from toy_models import tiny_model

EXACT = {"atol": 1e-10, "rtol": 1e-10}


def compile_layers(model: Any, backend: str) -> None:
    for layer in model.get_decoder().layers:
        layer.compile(backend=backend)


def compile_body(model: Any, backend: str) -> None:
    model.model.compile(backend=backend)


def pair(
    way: Callable[[Any, str], None], family: str = "llama", backend: str = "aot_eager", **config: Any
) -> list[Any]:
    """A model in float64, and the same one compiled."""
    plain, compiled = (tiny_model(family, **config).double().train() for _ in range(2))
    way(compiled, backend)
    return [plain, compiled]


def train(scorer: LogProbScorer, rows: list[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    """Log-probs, and the gradients of a weighted sum of them."""
    scorer.model.zero_grad()
    found = scorer.score(Ragged.from_list(rows), grad=True).values
    (found * torch.linspace(-1, 2, len(found), dtype=found.dtype)).sum().backward()
    return found.detach(), [p.grad for p in scorer.model.parameters()]
