"""Models given by value or by a function that makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["refuse_ray", "resolve_factory"]


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


def refuse_ray(use_ray_service: bool) -> None:
    """Say so, instead of ignoring the argument."""
    if use_ray_service:
        raise ValueError(
            "use_ray_service=True: this version has no Ray service yet. Leave it out to score in the process of the env."
        )
