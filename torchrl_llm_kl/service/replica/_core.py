"""A replica's answers: batches of requests to an engine, replies from it. Independent of Ray."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from torchrl_llm_kl.scoring import ScoreRequest, check_offers
from torchrl_llm_kl.service._errors import EngineLost, ServiceTimeout, WeightVersionError
from torchrl_llm_kl.service._wire import Reply, Request
from torchrl_llm_kl.service.engines._engine import Engine


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
        self._fingerprint = ""  # of the weights, once it is read

    def score(self, requests: Sequence[Request]) -> list[Reply | Exception]:
        """One reply per request, in order; an exception for a request that failed."""
        answers: dict[int, Reply | Exception] = {}
        groups: dict[tuple[Any, ...], list[int]] = {}
        for i, request in enumerate(requests):
            if request.version is not None and request.version != self.version:
                answers[i] = WeightVersionError(
                    f"version {request.version} of the weights was requested, this replica holds {self.version}: push it "
                    "with update_weights(), or request no version."
                )
            else:
                groups.setdefault((request.options, request.scored.form), []).append(i)
        with self._call():
            for members in groups.values():
                answers.update(zip(members, self._score_alike([requests[i] for i in members]), strict=True))
        return [answers[i] for i in range(len(requests))]

    def _score_alike(self, requests: Sequence[Request]) -> list[Reply | Exception]:
        try:
            return [*self._score_together(requests)]
        except EngineLost:
            raise
        except ServiceTimeout as error:  # the engine's server does not answer: do not wait again for each request
            return [error] * len(requests)
        except Exception as error:
            if len(requests) == 1:
                return [error]
        # At least one request is bad: score each alone, so that only the bad ones fail.
        return [answer for request in requests for answer in self._score_alike([request])]

    def _score_together(self, requests: Sequence[Request]) -> list[Reply]:
        options, scored = requests[0].options, [request.scored for request in requests]
        whole = scored[0] if len(scored) == 1 else ScoreRequest.concat(scored)
        check_offers(self.engine, options, whole)
        reply = Reply.of(self.engine.run(whole, options), whole.mask, self.version)
        reply.check_answers(replace(requests[0], scored=whole))
        if len(requests) == 1:
            return [reply]
        counts = [int(request.scored.mask.sum()) for request in requests]
        parts = zip(*(values.split(counts) for values in reply.columns.values()), strict=True)
        return [replace(reply, columns=dict(zip(reply.columns, part, strict=True))) for part in parts]

    def update_weights(self, weights: Mapping[str, Tensor], version: int, *, checked: bool = False) -> None:
        """Pass ``weights`` to the engine under a new version. An error leaves the old ones.

        ``checked`` weights are the engine's own result of ``check_weights``.
        """
        if version < self.version:
            raise WeightVersionError(
                f"version {version} of the weights was pushed after version {self.version}: versions must increase."
            )
        self._fingerprint = ""
        with self._call():
            self.engine.update_weights(weights, checked=checked)
        self.version = int(version)

    @contextmanager
    def _call(self) -> Iterator[None]:
        self.running = next(self._calls)
        try:
            yield
        finally:
            self.running = None

    @property
    def fingerprint(self) -> tuple[int, str] | None:
        """Version and fingerprint of the weights; None until :meth:`read_fingerprint` after each update."""
        return (self.version, self._fingerprint) if self._fingerprint else None

    def read_fingerprint(self) -> str:
        """Read all weights for the fingerprint, unless it is known; a TypeError for an engine that reports none."""
        if self._fingerprint:
            return self._fingerprint
        read = getattr(self.engine, "fingerprint", None)
        if read is None:
            raise TypeError(
                f"{type(self.engine).__name__} reports no fingerprint of its weights: state it, RememberedModel(model, store, "
                "fingerprint=), as a text that changes with them."
            )
        self._fingerprint = str(read())
        return self._fingerprint
