"""Types that several layers use, and attributes that another library's object may lack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, overload

T = TypeVar("T")

#: A JSON object of a file, a template or another process.
Json: TypeAlias = dict[str, Any]
#: For each row, the processor's output for its images by name, or None without images.
ImageRows: TypeAlias = Sequence[Mapping[str, object] | None]


@overload
def asked(owner: object, name: str, kind: type[T]) -> T | None: ...
@overload
def asked(owner: object, name: str, kind: tuple[type, ...]) -> Any: ...
@overload
def asked(owner: object, name: str, kind: type[T], default: T) -> T: ...
def asked(owner: object, name: str, kind: type[T] | tuple[type, ...], default: object = None) -> object:
    """Read an attribute. Returns ``default`` if it is missing or has another type.

    Example:
        >>> import torch
        >>> asked(torch.nn.Linear(2, 3), "out_features", int), asked(None, "out_features", int)
        (3, None)
    """
    value = getattr(owner, name, default)
    return value if isinstance(value, kind) else default


def call_of(owner: object, name: str, default: object = None) -> object:
    """Call a method without arguments. Returns ``default`` if it is missing or not implemented."""
    method = getattr(owner, name, None)
    try:
        return method() if callable(method) else default
    except (AttributeError, NotImplementedError):
        return default


def has(owner: object, name: str) -> bool:
    """Whether an object has an attribute."""
    return hasattr(owner, name)
