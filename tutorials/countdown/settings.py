"""Settings of a script: a dataclass, with changes ``key=value`` from the command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

T = TypeVar("T")


def read_settings(kind: type[T], changes: Iterable[str]) -> T:
    """The settings of a dataclass with changes such as ``"lr=1e-3"``.

    Raises:
        ValueError: for an unknown key, or a value of another type.
    """
    try:
        found = OmegaConf.merge(OmegaConf.structured(kind), OmegaConf.from_dotlist(list(changes)))
        return cast(T, OmegaConf.to_object(found))
    except OmegaConfBaseException as error:
        known = ", ".join(OmegaConf.structured(kind))
        raise ValueError(f"{str(error).splitlines()[0]}; settings are key=value, with {known}") from error


def check_positive(**values: float | None) -> None:
    """Raise for numbers that are not above 0; None passes."""
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value:g}: expected more than 0")
