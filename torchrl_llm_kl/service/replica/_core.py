"""A replica's answers: batches of requests to an engine, replies from it. Independent of Ray."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.service._errors import EngineLost, ServiceTimeout, WeightVersionError
from torchrl_llm_kl.service._wire import Reply, Request, Settings
from torchrl_llm_kl.service.engines._engine import Engine


class ScoringCore:
    """Answers requests with one engine, those with equal settings in one call. Not thread-safe.

    Attributes:
        held: version of the engine's weights, 0 before the first update, and digest of the push that made it, if one did.
        updates: number of updates so far.
        running: number of the call that runs; None between calls.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.updates = engine, 0
        self.held = (0, "")
        self.running: int | None = None
        self._calls = itertools.count()
        self._fingerprint = (-1, "")  # after how many updates

    @property
    def version(self) -> int:
        """Of the engine's weights."""
        return self.held[0]

    def score(self, requests: Sequence[Request]) -> list[Reply | Exception]:
        """One reply per request, in order; an exception for a request that failed."""
        answers: dict[int, Reply | Exception] = {}
        groups: dict[tuple[Settings, bool], list[int]] = {}
        for i, request in enumerate(requests):
            try:
                settings = request.settings.checked()  # ill-typed ones could not be compared with those of others
            except ValueError as error:
                answers[i] = error
                continue
            if request.version is not None and request.version != self.version:
                answers[i] = WeightVersionError(
                    f"version {request.version} of the weights was requested, this replica holds {self.version}: push it "
                    "with update_weights(), or request no version."
                )
            else:
                groups.setdefault((settings, request.replay is not None), []).append(i)
        with self._call():
            for (settings, _), members in groups.items():
                together = self._score_alike([requests[i] for i in members], settings)
                answers.update(zip(members, together, strict=True))
        return [answers[i] for i in range(len(requests))]

    def _score_alike(self, requests: Sequence[Request], settings: Settings) -> list[Reply | Exception]:
        try:
            return [*self._score_together(requests, settings)]
        except EngineLost:
            raise
        except ServiceTimeout as error:  # the engine's server does not answer: do not wait again for each request
            return [error] * len(requests)
        except Exception as error:
            if len(requests) == 1:
                return [error]
        # At least one request is bad: score each alone, so that only the bad ones fail.
        return [answer for request in requests for answer in self._score_alike([request], settings)]

    def _score_together(self, requests: Sequence[Request], settings: Settings) -> list[Reply]:
        masks = [request.flat_mask() for request in requests]
        rows = Ragged.from_list([row for request in requests for row in request.rows()])
        mask = torch.cat(masks)
        replays = [request.replay.kept(part) for request, part in zip(requests, masks, strict=True) if request.replay]
        scores = self.engine.evaluate(rows, mask, settings, **self._replayed(replays))
        names = ["log_prob"] + ["entropy"] * settings.entropy + [*_TOP] * (settings.top_k > 0)
        missing = [name for name in names if getattr(scores, name) is None]
        if missing:
            raise ValueError(
                f"{type(self.engine).__name__} returns no {', '.join(missing)}: leave it out of the request."
            )
        ends = np.cumsum([int(part.sum()) for part in masks])[:-1]
        shares: dict[str, list[np.ndarray]] = {}
        for name in names:
            values = getattr(scores, name).values.detach()
            shares[_TOP.get(name, name)] = np.split(_array(name, values[mask.to(values.device)].cpu(), settings), ends)
        version, weights = self.held
        rest: dict[str, Any] = {"entropy": None, "version": version, "weights": weights}
        return [
            Reply(**{**rest, **dict(zip(shares, share, strict=True))}) for share in zip(*shares.values(), strict=True)
        ]

    def _replayed(self, replays: Sequence[Kept]) -> dict[str, Kept]:
        """What was kept at the tokens of all requests, as an argument of the engine; none without replays."""
        if not replays:
            return {}
        if "kept" not in inspect.signature(self.engine.evaluate).parameters:
            raise ValueError(
                f"{type(self.engine).__name__} cannot score over recorded tokens: its evaluate() takes no kept=. Leave the "
                "record out, or serve the transformers model."
            )
        counts = torch.cat([kept.offsets.diff() for kept in replays])
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        return {"kept": Kept(torch.cat([kept.ids for kept in replays]), offsets)}

    def update_weights(
        self, weights: Mapping[str, Tensor], version: int, *, checked: bool = False, digest: str = ""
    ) -> None:
        """Pass ``weights`` to the engine under a new version. An error leaves the old ones.

        ``checked`` weights are the engine's own result of ``check_weights``; ``digest`` identifies their push.
        """
        if version < self.version:
            raise WeightVersionError(
                f"version {version} of the weights was pushed after version {self.version}: versions must increase."
            )
        self.updates += 1
        with self._call():
            self.engine.update_weights(weights, checked=checked)
        self.held = (int(version), digest)

    @contextmanager
    def _call(self) -> Iterator[None]:
        self.running = next(self._calls)
        try:
            yield
        finally:
            self.running = None

    @property
    def fingerprint(self) -> tuple[int, str, str] | None:
        """Version and fingerprint of the weights, and the digest of their push.

        None until :meth:`read_fingerprint` after each update.
        """
        (version, digest), (updates, found) = self.held, self._fingerprint
        return (version, found, digest) if updates == self.updates else None

    def read_fingerprint(self) -> None:
        """Read all weights for the fingerprint, unless it is known; a TypeError for an engine that reports none."""
        if self.fingerprint is not None:
            return
        read = getattr(self.engine, "fingerprint", None)
        if read is None:
            raise TypeError(
                f"{type(self.engine).__name__} reports no fingerprint of its weights: state it, RememberedModel(model, store, "
                "fingerprint=), as a text that changes with them."
            )
        self._fingerprint = (self.updates, read())


# Fields of the scores -> fields of a reply.
_TOP = {"top_indices": "top_ids", "top_log_probs": "top_log_probs", "tail_log_prob": "rest_log_prob"}


def _array(name: str, values: Tensor, settings: Settings) -> np.ndarray:
    """Scores ``[K]`` or ``[K, k]`` in the type that a reply has for them."""
    if name == "top_indices":
        values = values.int()
    elif name == "top_log_probs" and settings.top_k_dtype == "float16":
        # Finite log-probs stay finite; -inf is a token that the model forbids.
        lowest = torch.finfo(torch.float16).min
        values = torch.where(values.isneginf(), values, values.clamp(min=lowest)).half()
    elif values.dtype != torch.float64 or name in _TOP:
        values = values.float()
    found: np.ndarray = values.numpy()
    return found
