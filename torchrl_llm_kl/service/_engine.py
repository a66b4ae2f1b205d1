"""Engines: where the scores of a replica come from. Independent of Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.scoring import DEFAULT_MEMORY, LogProbScorer, Scores, fingerprint_of
from torchrl_llm_kl.service._wire import Settings, state_dict_of


@runtime_checkable
class Engine(Protocol):
    """Scores sequences for a replica. It calls ``progress`` and ``check_weights`` from any thread, the rest from one."""

    def score(self, sequences: Ragged, mask: Tensor, settings: Settings) -> Ragged:
        """Log-probs of the tokens where the boolean ``mask [N]`` is True, 0 elsewhere, in nats."""

    def evaluate(self, sequences: Ragged, mask: Tensor, settings: Settings) -> Scores:
        """Log-probs and what else the settings ask for; an error for what the engine cannot give."""

    def check_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights under the model's own names; an error if one does not fit. Changes nothing."""

    def update_weights(self, weights: Mapping[str, Tensor], *, checked: bool = False) -> None:
        """Take the weights; an error leaves the old ones. ``checked`` ones come from :meth:`check_weights`."""

    def progress(self) -> int:
        """A number that grows while a call does its work: one that stands still during a call hangs."""

    def interface(self) -> tuple[ModelInterface, bool]:
        """Keys and tokenizer of the model, for clients that tokenise; and whether it is a TorchRL wrapper."""

    def cached_tokens(self) -> tuple[int, int]:
        """Number of tokens of continued conversations so far, and how many of them were found in a cache."""

    def close(self) -> None:
        """Free what the engine holds; it is not called again."""


class TransformersEngine:
    """An engine for a model in this process: whatever :class:`~torchrl_llm_kl.LogProbScorer` scores.

    It creates one scorer, whose arguments it takes, for each combination of temperature, dtype, adapters and
    ``deterministic``.
    """

    def __init__(self, model: Any, *, tokens_per_batch: int | None = None, memory: int = DEFAULT_MEMORY) -> None:
        self.model = model
        self._tokens_per_batch, self._memory = tokens_per_batch, memory
        self._scorers: dict[Settings, LogProbScorer] = {}
        self._calls = 0
        self._scorer(Settings())  # refuses a model that cannot be scored

    def _scorer(self, settings: Settings) -> LogProbScorer:
        key = replace(settings, entropy=False, remember=False, top_k=0, top_k_dtype="float32")
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

    def score(self, sequences: Ragged, mask: Tensor, settings: Settings) -> Ragged:
        """Log-probs of the tokens where the boolean ``mask [N]`` is True, 0 elsewhere, in nats."""
        return self.evaluate(sequences, mask, replace(settings, entropy=False, top_k=0)).log_prob

    def evaluate(self, sequences: Ragged, mask: Tensor, settings: Settings) -> Scores:
        """Log-probs, and entropies and the top k if the settings ask for them."""
        self._calls += 1
        wanted: dict[str, Any] = {name: getattr(settings, name) for name in ("entropy", "top_k", "remember")}
        return self._scorer(settings).evaluate(sequences, mask, **wanted)

    def progress(self) -> int:
        """Number of calls."""
        return self._calls

    def interface(self) -> tuple[ModelInterface, bool]:
        """Keys and tokenizer of the model, for clients that tokenise; and whether it is a TorchRL wrapper."""
        return ModelInterface.of(self.model), hasattr(self.model, "input_mode")

    def cached_tokens(self) -> tuple[int, int]:
        """Number of tokens of continued conversations so far, and how many of them were found in the cache."""
        caches = [scorer.memory for scorer in tuple(self._scorers.values())]
        return sum(cache.tokens_seen for cache in caches), sum(cache.tokens_recalled for cache in caches)

    def close(self) -> None:
        """Drop the model."""
        self._scorers.clear()
        self.model = None

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
                raise ValueError(f"{name} holds values that are not finite: scores would be NaN.")
        return weights

    def update_weights(self, weights: Mapping[str, Tensor], *, checked: bool = False) -> None:
        """Copy ``weights`` into the model, in place. An error leaves the model unchanged.

        ``checked`` weights are the result of :meth:`check_weights`, which is then not repeated.
        """
        own, fitting = self._module().state_dict(keep_vars=True), weights if checked else self.check_weights(weights)
        with torch.no_grad():
            for name, value in fitting.items():
                own[name].copy_(value)
        for scorer in self._scorers.values():
            scorer.forget()

    def fingerprint(self) -> str:
        """A digest of all weights; see :func:`~torchrl_llm_kl.scoring.fingerprint_of`."""
        return fingerprint_of(self.model)

    def _module(self) -> nn.Module:
        inner = next(iter(self._scorers.values())).model
        if not isinstance(inner, nn.Module):
            raise TypeError(f"{type(inner).__name__} holds no weights in this process: update them in its backend.")
        return inner


def engine_of(made: Any, *, tokens_per_batch: int | None = None, memory: int = DEFAULT_MEMORY) -> Engine:
    """``made`` if it is an engine, else one for the model ``made``; the settings are those of :class:`TransformersEngine`."""
    if isinstance(made, Engine) and not isinstance(made, nn.Module):
        return made
    return TransformersEngine(made, tokens_per_batch=tokens_per_batch, memory=memory)
