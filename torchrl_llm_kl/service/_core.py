"""A replica's answers: batches of requests to an engine, replies from it. Independent of Ray."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.service._engine import Engine
from torchrl_llm_kl.service._errors import WeightVersionError
from torchrl_llm_kl.service._wire import Reply, Request, Settings


class ScoringCore:
    """Answers requests with one engine, those with equal settings in one call. Not thread-safe.

    Attributes:
        version: of the engine's weights; 0 before the first update.
        running: number of the call that runs; None between calls.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.version = engine, 0
        self.running: int | None = None
        self._calls = itertools.count()

    def score(self, requests: Sequence[Request]) -> list[Reply | Exception]:
        """One reply per request, in order; an exception for a request that failed."""
        answers: dict[int, Reply | Exception] = {}
        groups: dict[Settings, list[int]] = {}
        for i, request in enumerate(requests):
            if (error := _error_in(request.settings)) is not None:
                answers[i] = error
            elif request.version is not None and request.version != self.version:
                answers[i] = WeightVersionError(
                    f"version {request.version} of the weights was requested, this replica holds {self.version}: push it "
                    "with update_weights(), or request no version."
                )
            else:
                groups.setdefault(request.settings, []).append(i)
        with self._call():
            for settings, members in groups.items():
                together = self._score_alike([requests[i] for i in members], settings)
                answers.update(zip(members, together, strict=True))
        return [answers[i] for i in range(len(requests))]

    def _score_alike(self, requests: Sequence[Request], settings: Settings) -> list[Reply | Exception]:
        try:
            return [*self._score_together(requests, settings)]
        except Exception as error:
            if len(requests) == 1:
                return [error]
        # At least one request is bad: score each alone, so that only the bad ones fail.
        return [answer for request in requests for answer in self._score_alike([request], settings)]

    def _score_together(self, requests: Sequence[Request], settings: Settings) -> list[Reply]:
        masks = [request.flat_mask() for request in requests]
        rows = Ragged.from_list([row for request in requests for row in request.rows()])
        scores = self.engine.evaluate(rows, torch.cat(masks), settings)
        sizes = [request.num_tokens for request in requests]
        log_probs = scores.log_prob.values.split(sizes)
        entropies = [None] * len(sizes) if scores.entropy is None else scores.entropy.values.split(sizes)
        return [
            Reply(_masked_in(log_prob, mask), None if entropy is None else _masked_in(entropy, mask), self.version)
            for log_prob, entropy, mask in zip(log_probs, entropies, masks, strict=True)
        ]

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Pass ``weights`` to the engine under a new version. An error leaves the old ones."""
        if version < self.version:
            raise WeightVersionError(
                f"version {version} of the weights was pushed after version {self.version}: versions must increase."
            )
        with self._call():
            self.engine.update_weights(weights)
        self.version = int(version)

    @contextmanager
    def _call(self) -> Iterator[None]:
        self.running = next(self._calls)
        try:
            yield
        finally:
            self.running = None


def _error_in(settings: Settings) -> Exception | None:
    """The error of settings that no engine can take, and that could not be compared with those of other requests."""
    temperature: Any = settings.temperature
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        return TypeError(f"temperature must be a number, got {temperature!r}.")
    if not 0 < temperature < math.inf:
        return ValueError(f"temperature must be a positive number, got {temperature}: greedy sampling has no log-prob.")
    kinds: dict[str, Any] = {"adapters": (bool, str), "dtype": (str, type(None))} | dict.fromkeys(
        ("entropy", "remember", "deterministic"), bool
    )
    for name, kind in kinds.items():
        value = getattr(settings, name)
        if not isinstance(value, kind):
            return TypeError(
                f"{name} is {value!r}, of type {type(value).__name__}: a request cannot be scored with that."
            )
    return None


def _masked_in(values: Tensor, mask: Tensor) -> np.ndarray:
    """The values where ``mask`` is True, in float32 or float64."""
    chosen = values.detach()[mask.to(values.device)].cpu()
    found: np.ndarray = (chosen if chosen.dtype == torch.float64 else chosen.float()).numpy()
    return found
