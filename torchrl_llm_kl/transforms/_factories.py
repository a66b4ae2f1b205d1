"""Models given by value or by a function that makes them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["RayVariant", "resolve_factory"]


def resolve_factory(name: str, model: Any, factory: Callable[[], Any] | None, *, default: Any) -> Any:
    """The model, made by the factory if there is one.

    Raises:
        ValueError: if both are given; a model that is still the argument's ``default`` was not given.
    """
    if factory is None:
        return model
    if model is not None and not (isinstance(model, str) and model == default):
        raise ValueError(f"Cannot provide both '{name}' and '{name}_factory'. Choose one.")
    return factory()


class RayVariant:
    """A mixin: ``use_ray_service=True`` makes the variant of the class whose models are behind a service."""

    def __new__(cls, *args: Any, use_ray_service: bool = False, **kwargs: Any) -> Any:
        """An object of this class, or of its variant, which is one of its subclasses."""
        if use_ray_service:
            service = import_module("torchrl_llm_kl.service")
            variants = (service.RayKLRewardTransform, service.RayRetrieveKL, service.RayRetrieveLogProb)
            if not issubclass(cls, variants):
                found = [variant for variant in variants if cls in variant.__bases__]
                if not found:
                    raise TypeError(
                        f"use_ray_service=True: {cls.__name__} has no variant for Ray. Derive it from one of "
                        f"{[variant.__name__ for variant in variants]}, or give it the model of a ScoringService"
                    )
                cls = found[0]
        return super().__new__(cls)
