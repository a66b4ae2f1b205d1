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
        if use_ray_service and not cls.__name__.startswith("Ray"):
            cls = getattr(import_module("torchrl_llm_kl.service"), f"Ray{cls.__name__}")
        return super().__new__(cls)
