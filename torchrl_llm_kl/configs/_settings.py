"""From YAML's values to the arguments of a constructor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from hydra.utils import get_object

#: Fields that hold further keyword arguments of the constructor.
MORE = ("hyper", "service", "overrides")
#: Fields of several parts, which may also be a mapping: its names are the user's, for overrides and the groups of defaults.
PARTS = ("terms", "corrections", "extras")


def build(*, class_: str, set_keys: Mapping[str, object] | None = None, **settings: Any) -> Any:
    """Construct what a node describes; the ``_target_`` of all nodes.

    Keys are tuples in Python and lists in YAML; a dtype is the name of one. ``hyper``, ``service`` and ``overrides`` are
    further arguments of the constructor, by name.

    Keyword Args:
        class_: the dotted path of a class or function.
        set_keys: arguments of the loss's ``set_keys``.
        settings: the arguments of the constructor.

    Raises:
        TypeError: if an argument is given twice, or the constructor has none of that name.

    Example:
        >>> loss = build(class_="torchrl_llm_kl.KLComputation", gen_log_probs_full_key=["log_probs", "full"], coeff=0.5)
        >>> loss.gen_log_probs_full_key
        ('log_probs', 'full')
    """
    make: Callable[..., Any] = get_object(class_)
    more: dict[str, object] = {}
    for field in MORE:
        for name, value in (settings.pop(field, None) or {}).items():
            if name in settings or name in more:
                raise TypeError(f"{name} is an argument of {class_} and in {field}: give it once.")
            more[name] = _plain(name, value)
    made = make(**{name: _plain(name, value) for name, value in settings.items()}, **more)
    if set_keys:
        made.set_keys(**{name: as_key(value) for name, value in set_keys.items()})
    return made


def as_key(value: object) -> object:
    """A key of a TensorDict: a list of names as a tuple, a list of one name as the name."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return value
    if any(not isinstance(name, str) for name in value):
        return [as_key(key) for key in value]
    return value[0] if len(value) == 1 else tuple(value)


def _plain(name: str, value: Any) -> object:
    if name in ("in_keys", "out_keys"):
        return None if value is None else [as_key(key) for key in value]
    if name == "key" or name.endswith("_key"):
        return as_key(value)
    if name == "keys" and isinstance(value, Mapping):
        return {one: as_key(key) for one, key in value.items()}
    if name in PARTS:
        return list(value.values()) if isinstance(value, Mapping) else value or ()
    if name == "dtype" and isinstance(value, str):
        return _dtype(value)
    return value


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype={name!r} is not one of torch's, such as 'float32' or 'bfloat16'.")
    return found
