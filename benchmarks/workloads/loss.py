"""A policy-gradient loss, forward and backward: log-probs of a batch, with gradients of all parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.agreement import largest_difference, tolerance_of
from benchmarks.data import Batch, grouped
from benchmarks.measure import Contender
from benchmarks.models import ModelSize, qwen2, wrapper
from benchmarks.products import products_of
from benchmarks.results import Outcome, Targets
from benchmarks.workloads.base import OURS, PRODUCTS, THEIRS, Settings, Workload
from torchrl_llm_kl import LogProbScorer

Step = Callable[[], Tensor]
GRADIENT_TOLERANCE = {
    torch.float32: 1e-3,
    torch.bfloat16: 0.25,
}  # relative to the largest entry of a parameter's gradient


def measure(full: ModelSize, settings: Settings) -> Outcome:
    """Both libraries compute the log-probs of the response tokens and the gradients of the model."""
    size = settings.size(full)
    batch = grouped(2, 2, size.vocab) if settings.quick else grouped(4, 4, size.vocab)
    model = qwen2(size, device=settings.device, dtype=settings.dtype)
    return compare(size, settings, batch, model, steps_of(model, batch, settings))


def steps_of(model: Any, batch: Batch, settings: Settings) -> dict[str, Step]:
    """A forward and backward of each library."""
    advantage = torch.randn(len(batch.prompts), generator=torch.Generator().manual_seed(0)).to(settings.device)
    return {
        THEIRS: _their_step(model, batch, advantage, settings.device),
        OURS: _our_step(model, batch, advantage, settings.device),
    }


def compare(
    size: ModelSize, settings: Settings, batch: Batch, model: Any, steps: dict[str, Step], *, forwards: int = 1
) -> Outcome:
    """Check that both compute the same numbers and gradients, then measure them, interleaved.

    ``forwards`` is the number of forwards of each layer: 2 with checkpoints.
    """
    difference, of_gradients = _check_agreement(model, steps, settings.dtype)
    contenders = {
        name: Contender(lambda _, step=step: step(), prepare=partial(model.zero_grad, set_to_none=True))
        for name, step in steps.items()
    }
    products = products_of(model, batch, train=True, forwards=forwards)
    found = settings.alternate({**contenders, PRODUCTS: Contender(lambda _: products())})
    return Outcome(
        f"{len(batch.prompts)} sequences, {batch.tokens:,} tokens ({batch.source}); {size}",
        found[THEIRS],
        found[OURS],
        difference,
        notes=(
            f"gradients differ by {of_gradients:.1e} of the largest",
            f"{mib_of(model):.0f} MiB of each peak are gradients",
        ),
        products=found[PRODUCTS],
    )


def _their_step(model: Any, batch: Batch, advantage: Tensor, device: torch.device) -> Step:
    wrap, data = wrapper(model, "log_probs"), batch.padded(device)
    response = batch.padded_response().to(device)

    def step() -> Tensor:
        log_prob = wrap(data.copy())["log_probs", "full"]
        _backward(log_prob, advantage.unsqueeze(-1), response)
        return log_prob.detach()[response]

    return step


def _our_step(model: Any, batch: Batch, advantage: Tensor, device: torch.device) -> Step:
    scorer, (sequences, response) = LogProbScorer(model), batch.ragged(device)

    def step() -> Tensor:
        log_prob = scorer.score(sequences, response, grad=True).values
        _backward(log_prob, advantage[sequences.sequence_ids], response)
        return log_prob.detach()[response]

    return step


def _backward(log_prob: Tensor, advantage: Tensor, response: Tensor) -> None:
    """Backward of the mean over response tokens."""
    surrogate = -(log_prob.float() * advantage)
    (torch.where(response, surrogate, 0).sum() / response.sum()).backward()


def _check_agreement(model: Any, steps: dict[str, Step], dtype: torch.dtype) -> tuple[float, float]:
    """The largest difference of log-probs, and that of gradients relative to the largest entry of each."""
    log_probs, gradients = {}, {}
    for name, step in steps.items():
        model.zero_grad(set_to_none=True)
        log_probs[name] = step()
        gradients[name] = {key: value.grad for key, value in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    difference = largest_difference(log_probs[OURS], log_probs[THEIRS], tolerance=tolerance_of(dtype), what="log-probs")
    return difference, check_gradients(gradients[OURS], gradients[THEIRS], dtype)


def check_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor], dtype: torch.dtype) -> float:
    """The largest difference of the gradients of any parameter, relative to the largest entry of each."""
    largest = 0.0
    for key, expected in wanted.items():
        scale = expected.abs().max().clamp(min=1e-12)
        parts, tolerance = (found[key] / scale, expected / scale), GRADIENT_TOLERANCE[dtype]
        largest = max(largest, largest_difference(*parts, tolerance=tolerance, what=f"gradient of {key}"))
    return largest


def mib_of(model: Any) -> float:
    return sum(value.numel() * value.element_size() for value in model.parameters()) / 2**20


def _workload(name: str, size: ModelSize) -> Workload:
    title = f"Loss forward and backward, 4 prompts x 4 answers, vocabulary {size.vocab:,}"
    return Workload(name, title, partial(measure, size), Targets(faster=2, smaller=8, share=0.85), cuda=True)


# Small bodies: torchrl's peak comes from its logits, more than three times [16, 310, V]: 10 GiB for the second size.
WORKLOADS = (
    _workload("d32k", ModelSize(vocab=32_000, hidden=512, layers=2)),
    _workload("d152k", ModelSize(vocab=151_936, hidden=256, layers=2)),
)
