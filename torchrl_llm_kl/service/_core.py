"""The model behind the service: batches of requests in, replies out. Knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring import DEFAULT_MEMORY, LogProbScorer
from torchrl_llm_kl.service._errors import WeightVersionError
from torchrl_llm_kl.service._state_dict import state_dict_of
from torchrl_llm_kl.service._wire import Reply, Request, Settings

__all__ = ["ScoringCore"]


class ScoringCore:
    """Scores requests of one model, those with the same settings together. Not safe for several threads at once.

    Args:
        model: what a :class:`~torchrl_llm_kl.LogProbScorer` takes.
        tokens_per_batch: see there.
        memory: see there; of each set of settings that remembers.
    """

    def __init__(self, model: Any, *, tokens_per_batch: int | None = None, memory: int = DEFAULT_MEMORY) -> None:
        self.model = model
        self.version = 0
        self._tokens_per_batch, self._memory = tokens_per_batch, memory
        self._scorers: dict[Settings, LogProbScorer] = {}
        self._scorer(Settings())  # a model that cannot be scored is refused here

    def _scorer(self, settings: Settings) -> LogProbScorer:
        key = Settings(settings.temperature, settings.adapters, settings.dtype)
        if key not in self._scorers:
            self._scorers[key] = LogProbScorer(
                self.model,
                temperature=settings.temperature,
                adapters=settings.adapters,
                dtype=settings.torch_dtype,
                tokens_per_batch=self._tokens_per_batch,
                memory=self._memory,
            )
        return self._scorers[key]

    def score(self, requests: Sequence[Request]) -> list[Reply | Exception]:
        """One answer for each request, in their order; an exception for one that cannot be answered."""
        answers: list[Reply | Exception | None] = [None] * len(requests)
        groups: dict[Settings, list[int]] = {}
        for i, request in enumerate(requests):
            if request.version is not None and request.version != self.version:
                answers[i] = WeightVersionError(
                    f"version {request.version} of the weights was asked for, this replica holds {self.version}: push it with "
                    "update_weights(), or ask for no version"
                )
            else:
                groups.setdefault(request.settings, []).append(i)
        for settings, members in groups.items():
            for i, answer in zip(members, self._score_alike([requests[i] for i in members], settings), strict=True):
                answers[i] = answer
        assert all(answer is not None for answer in answers)
        return [answer for answer in answers if answer is not None]

    def _score_alike(self, requests: Sequence[Request], settings: Settings) -> list[Reply | Exception]:
        try:
            return list(self._together(requests, settings))
        except Exception as error:
            if len(requests) == 1:
                return [error]
        # One of them is bad: it fails alone.
        return [answer for request in requests for answer in self._score_alike([request], settings)]

    def _together(self, requests: Sequence[Request], settings: Settings) -> list[Reply]:
        rows = [row for request in requests for row in request.rows()]
        masks = [request.flat_mask() for request in requests]
        scores = self._scorer(settings).evaluate(
            Ragged.from_list(rows), torch.cat(masks), entropy=settings.entropy, remember=settings.remember
        )
        sizes = [request.num_tokens for request in requests]
        log_probs = scores.log_prob.values.split(sizes)
        entropies = [None] * len(sizes) if scores.entropy is None else scores.entropy.values.split(sizes)
        return [
            Reply(_picked(log_prob, mask), None if entropy is None else _picked(entropy, mask), self.version)
            for log_prob, entropy, mask in zip(log_probs, entropies, masks, strict=True)
        ]

    # ------------------------------------------------------------------ weights

    def check_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Whether :meth:`update_weights` would take them.

        Args:
            weights: as ``state_dict()`` or a TorchRL wrapper names them; all of them or some.

        Raises:
            TypeError: if something is no tensor.
            KeyError: if the model has no weight of a name.
            ValueError: if a shape differs, or a value is not finite.
        """
        self._named(weights)

    def _named(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not weights:
            raise ValueError("there are no weights in what was pushed")
        model = self._module()
        own, weights = model.state_dict(keep_vars=True), state_dict_of(weights)
        known = own.keys() | {name for name, _ in model.named_buffers()}
        inside = {name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")}
        if len(inside) == len(weights) and inside.keys() <= known and not weights.keys() <= known:
            weights = inside  # a TorchRL wrapper's
        # TensorDicts hold buffers that are no part of a state_dict, such as frequencies of rotary embeddings.
        weights = {name: value for name, value in weights.items() if name in own or name not in known}
        for name, value in weights.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"weights travel as tensors, got {type(value).__name__} for {name!r}")
            if name not in own:
                raise KeyError(f"the model has no weight {name!r}; it has {', '.join(list(own)[:3])}, ...")
            if own[name].shape != value.shape:
                raise ValueError(f"{name}: the model has shape {tuple(own[name].shape)}, got {tuple(value.shape)}")
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise ValueError(
                    f"{name} holds values that are not finite: every score would be NaN. The model keeps version {self.version}"
                )
        return weights

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy tensors into the model, in place.

        Args:
            weights: as for :meth:`check_weights`, whose errors it raises; nothing is changed then.
            version: a number that the weights are known by from now on; not below the one it holds.

        Raises:
            WeightVersionError: if it holds a later version.
        """
        if version < self.version:
            raise WeightVersionError(
                f"version {version} of the weights came after version {self.version}: versions grow"
            )
        own, named = self._module().state_dict(keep_vars=True), self._named(weights)
        with torch.no_grad():
            for name, value in named.items():
                own[name].copy_(value)
        for scorer in self._scorers.values():
            scorer.forget()
        self.version = int(version)

    def _module(self) -> nn.Module:
        inner = next(iter(self._scorers.values())).model
        if not isinstance(inner, nn.Module):
            raise TypeError(f"{type(inner).__name__} holds no weights in this process: update them in its backend")
        return inner

    # ------------------------------------------------------------------ memory

    @property
    def tokens_seen(self) -> int:
        """Tokens of conversations that go on, so far."""
        return sum(scorer.memory.tokens_seen for scorer in tuple(self._scorers.values()))

    @property
    def tokens_recalled(self) -> int:
        """Those of them that were remembered, and not forwarded again."""
        return sum(scorer.memory.tokens_recalled for scorer in tuple(self._scorers.values()))


def _picked(values: Tensor, mask: Tensor) -> np.ndarray:
    """The values that were asked for, in float32 or wider."""
    chosen = values.detach()[mask.to(values.device)].cpu()
    found: np.ndarray = (chosen if chosen.dtype == torch.float64 else chosen.float()).numpy()
    return found
