"""One scorer for a transform, made when it is first needed and again when what it was made from has changed."""

from __future__ import annotations

from typing import Any

from torchrl_llm_kl.scoring._scorer import LogProbScorer

__all__ = ["ScorerSlot"]


class ScorerSlot:
    """Holds the scorer of a model; copies and pickles start empty, so that they never score the original's model."""

    def __init__(self) -> None:
        self._sources: tuple[Any, Any] | None = None
        self._settings: dict[str, Any] = {}
        self._scorer: LogProbScorer | None = None

    def get(self, model: Any, **settings: Any) -> LogProbScorer:
        """The scorer for these settings; a new one if the model, the weights behind a wrapper or a setting is another."""
        sources = (model, getattr(model, "model", None))
        same = self._sources is not None and all(a is b for a, b in zip(self._sources, sources, strict=True))
        if self._scorer is None or not same or settings != self._settings:
            make = getattr(model, "make_scorer", None)  # a model in another process
            self._scorer = LogProbScorer(model, **settings) if make is None else make(**settings)
            self._sources, self._settings = sources, settings
        return self._scorer

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()
