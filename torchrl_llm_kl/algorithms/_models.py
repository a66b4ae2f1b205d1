"""One temperature and one precision for all that an algorithm scores."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torchrl_llm_kl.losses import PolicyLoss
from torchrl_llm_kl.scoring import LogProbScorer, is_wrapper, unwrap
from torchrl_llm_kl.transforms._interface import ModelInterface

__all__ = ["WrappedModel", "check_loss_args", "exact_reference", "reference_to_score", "scoring_settings", "to_score"]

# Arguments of PolicyLoss that come from elsewhere, and from where.
_SET_HERE = {
    "actor": "it is the second argument of make_algorithm",
    "objective": "pass objective= to make_algorithm",
    "temperature": "pass temperature= to make_algorithm, for old and current log-probs and the reference's",
    "aggregation": "pass aggregation= to make_algorithm",
    "loss_agg_mode": "pass aggregation= to make_algorithm",
    "terms": "say kl_loss= and entropy_coeff= to make_algorithm, or build a PolicyLoss with terms of your own",
    "reference": "pass reference= to make_algorithm",
    "masking_strategy": "pass masking_strategy= to make_algorithm",
    "max_len": "pass max_len= to make_algorithm",
}


class WrappedModel:
    """The model inside a TorchRL wrapper, to be scored with the wrapper's keys and template even if the wrapper generates."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper

    @property
    def interface(self) -> ModelInterface:
        """The wrapper's keys and tokenisation."""
        return ModelInterface.of(self.wrapper)

    @property
    def model(self) -> nn.Module | None:
        """The module whose weights count."""
        return unwrap(self.wrapper)

    def make_scorer(self, **settings: Any) -> LogProbScorer:
        """The engine, as transforms ask for it."""
        return LogProbScorer(self.wrapper, **settings)


def check_loss_args(loss_args: Mapping[str, Any]) -> None:
    """Only what is the loss's own business.

    Raises:
        TypeError: for what :func:`make_algorithm` sets itself, and for what is no argument of the loss.
    """
    keywords = inspect.signature(PolicyLoss.__init__).parameters.values()
    known = [p.name for p in keywords if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in _SET_HERE]
    for name in loss_args:
        if name in _SET_HERE:
            raise TypeError(f"loss_args must not hold {name!r}: {_SET_HERE[name]}")
        if name not in known:
            raise TypeError(
                f"loss_args must not hold {name!r}, it may hold {', '.join(known)}: hyper-parameters of the objective go to "
                "make_algorithm itself"
            )


def scoring_settings(actor: Any, temperature: float, loss_args: Mapping[str, Any]) -> dict[str, Any]:
    """``temperature`` and ``dtype``: those of an actor that is a scorer, else what was asked for.

    Raises:
        ValueError: if a temperature is asked for that the scorer does not have.
    """
    if not isinstance(actor, LogProbScorer):
        return {"temperature": temperature, "dtype": loss_args.get("dtype")}
    if temperature not in (1.0, actor.temperature):
        raise ValueError(
            f"temperature={temperature:g}, but actor is a scorer with temperature {actor.temperature:g}: set it there"
        )
    return {"temperature": actor.temperature, "dtype": actor.dtype}


def to_score(model: Any, settings: Mapping[str, Any], name: str) -> Any:
    """What the transforms take for a model, a scorer or a wrapper.

    Raises:
        ValueError: if it is a scorer with other settings than the actor's.
    """
    if isinstance(model, LogProbScorer):
        _check_alike(model, settings, name)
        if not model.adapters:
            raise ValueError(
                f"{name} is a scorer with adapters=False of a model that is not the actor's: pass the base model itself"
            )
        return model.model
    return WrappedModel(model) if is_wrapper(model) and unwrap(model) is not None else model


def reference_to_score(actor: Any, reference: Any, settings: Mapping[str, Any]) -> Any:
    """The same for the reference; the actor's own model without adapters is ``"base"``."""
    own = isinstance(reference, LogProbScorer) and not reference.adapters and _inner(reference) is _inner(actor)
    if own:
        _check_alike(reference, settings, "reference")
        return "base"
    return to_score(reference, settings, "reference")


def exact_reference(actor: Any, reference: Any, settings: Mapping[str, Any]) -> Any:
    """What the loss takes for an exact KL; None if there is no model."""
    if not isinstance(reference, str):
        return reference
    return LogProbScorer(_inner(actor), adapters=False, **settings) if reference == "base" else None


def _check_alike(scorer: LogProbScorer, settings: Mapping[str, Any], name: str) -> None:
    temperature, dtype = settings["temperature"], settings["dtype"]
    if scorer.temperature != temperature:
        raise ValueError(
            f"{name} is a scorer with temperature {scorer.temperature:g}, and the actor is scored at {temperature:g}: a KL "
            "compares the two at one temperature, that of the sampler"
        )
    if scorer.dtype != dtype:
        raise ValueError(
            f"{name} is a scorer with dtype={_shown(scorer.dtype)}, and the actor has dtype={_shown(dtype)}: their "
            "difference in rounding would count as KL. Give both the same (loss_args={'dtype': ...} for the actor)"
        )


def _shown(dtype: torch.dtype | None) -> str:
    return "None" if dtype is None else str(dtype)


def _inner(model: Any) -> Any:
    if isinstance(model, LogProbScorer):
        return model.model
    inner = unwrap(model) if is_wrapper(model) else None
    return model if inner is None else inner
