"""The model of a replica: batches of requests in, replies out. Independent of Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring import DEFAULT_MEMORY, LogProbScorer
from torchrl_llm_kl.service._errors import WeightVersionError
from torchrl_llm_kl.service._wire import Reply, Request, Settings, state_dict_of


class ScoringCore:
    """Scores requests with one model, those with equal settings in one forward. Not thread-safe.

    It creates one :class:`~torchrl_llm_kl.LogProbScorer`, whose arguments it takes, for each combination of temperature,
    dtype, adapters and ``deterministic``.
    """

    def __init__(self, model: Any, *, tokens_per_batch: int | None = None, memory: int = DEFAULT_MEMORY) -> None:
        self.model, self.version = model, 0
        self._tokens_per_batch, self._memory = tokens_per_batch, memory
        self._scorers: dict[Settings, LogProbScorer] = {}
        self._scorer(Settings())  # refuses a model that cannot be scored

    def _scorer(self, settings: Settings) -> LogProbScorer:
        key = replace(settings, entropy=False, remember=False)
        if key not in self._scorers:
            self._scorers[key] = LogProbScorer(
                self.model,
                temperature=settings.temperature,
                adapters=settings.adapters,
                dtype=settings.torch_dtype,
                deterministic=settings.deterministic,
                tokens_per_batch=self._tokens_per_batch,
                memory=self._memory,
            )
        return self._scorers[key]

    # ------------------------------------------------------------------ scores

    def score(self, requests: Sequence[Request]) -> list[Reply | Exception]:
        """One reply per request, in order; an exception for a request that failed."""
        answers: dict[int, Reply | Exception] = {}
        groups: dict[Settings, list[int]] = {}
        for i, request in enumerate(requests):
            if request.version is not None and request.version != self.version:
                answers[i] = WeightVersionError(
                    f"version {request.version} of the weights was requested, this replica holds {self.version}: push it "
                    "with update_weights(), or request no version."
                )
            else:
                groups.setdefault(request.settings, []).append(i)
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
        scores = self._scorer(settings).evaluate(
            Ragged.from_list([row for request in requests for row in request.rows()]),
            torch.cat(masks),
            entropy=settings.entropy,
            remember=settings.remember,
        )
        sizes = [request.num_tokens for request in requests]
        log_probs = scores.log_prob.values.split(sizes)
        entropies = [None] * len(sizes) if scores.entropy is None else scores.entropy.values.split(sizes)
        return [
            Reply(_masked_in(log_prob, mask), None if entropy is None else _masked_in(entropy, mask), self.version)
            for log_prob, entropy, mask in zip(log_probs, entropies, masks, strict=True)
        ]

    def cached_tokens(self) -> tuple[int, int]:
        """Number of tokens of continued conversations so far, and how many of them were found in the cache."""
        caches = [scorer.memory for scorer in tuple(self._scorers.values())]
        return sum(cache.tokens_seen for cache in caches), sum(cache.tokens_recalled for cache in caches)

    # ------------------------------------------------------------------ weights

    def check_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights under the model's own names; an error if one does not fit or is not finite.

        ``weights`` holds some or all of them, under their ``state_dict()`` names in the model or in its TorchRL wrapper.
        """
        if not weights:
            raise ValueError("there are no weights in the update: pass at least one.")
        model = self._module()
        own, weights = model.state_dict(keep_vars=True), state_dict_of(weights)
        known = own.keys() | {name for name, _ in model.named_buffers()}
        inside = {name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")}
        if len(inside) == len(weights) and inside.keys() <= known and not weights.keys() <= known:
            weights = inside  # those of a TorchRL wrapper
        # TensorDicts also hold non-persistent buffers, such as the frequencies of rotary embeddings.
        weights = {name: value for name, value in weights.items() if name in own or name not in known}
        for name, value in weights.items():
            if name not in own:
                raise KeyError(f"the model has no weight {name!r}; it has {', '.join(list(own)[:3])}, ...")
            if own[name].shape != value.shape:
                raise ValueError(f"{name}: the model has shape {tuple(own[name].shape)}, got {tuple(value.shape)}.")
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise ValueError(
                    f"{name} holds values that are not finite: scores would be NaN. The model keeps version {self.version}."
                )
        return weights

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy ``weights`` into the model, in place, under a new version. An error leaves the model unchanged."""
        if version < self.version:
            raise WeightVersionError(
                f"version {version} of the weights was pushed after version {self.version}: versions must increase."
            )
        own, checked = self._module().state_dict(keep_vars=True), self.check_weights(weights)
        with torch.no_grad():
            for name, value in checked.items():
                own[name].copy_(value)
        for scorer in self._scorers.values():
            scorer.forget()
        self.version = int(version)

    def _module(self) -> nn.Module:
        inner = next(iter(self._scorers.values())).model
        if not isinstance(inner, nn.Module):
            raise TypeError(f"{type(inner).__name__} holds no weights in this process: update them in its backend.")
        return inner


def _masked_in(values: Tensor, mask: Tensor) -> np.ndarray:
    """The values where ``mask`` is True, in float32 or float64."""
    chosen = values.detach()[mask.to(values.device)].cpu()
    found: np.ndarray = (chosen if chosen.dtype == torch.float64 else chosen.float()).numpy()
    return found
