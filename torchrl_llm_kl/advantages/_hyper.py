"""Hyper-parameters under the names of other libraries."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from typing import Any

from torchrl_llm_kl.advantages._spec import AdvantageSpec

__all__ = ["translate"]


def translate(spec: AdvantageSpec, hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters under the function's own names.

    Raises:
        TypeError: if there is no such hyper-parameter, or one is given under two names.
        ValueError: if one asks for what cannot be had.
    """
    given: dict[str, Any] = {}
    for key, value in hyper.items():
        if key in spec.refused:
            harmless, advice = spec.refused[key]
            if value != harmless:
                raise ValueError(f"{spec.name}: {key}={value!r} cannot be honoured: {advice}")
            continue
        if key in spec.obsolete:
            if value is not None:
                warnings.warn(f"{spec.name}: {key} has no effect here: {spec.obsolete[key]}", stacklevel=3)
            continue
        own = spec.aliases.get(key, key)
        if own not in spec.hyper:
            raise TypeError(_unknown(spec, key))
        if own in given:
            raise TypeError(f"{spec.name}: {key!r} is another name of {own!r}, which is given too: pass one of them")
        given[own] = value
    return given


def _unknown(spec: AdvantageSpec, key: str) -> str:
    near = difflib.get_close_matches(key, [*spec.hyper, *spec.aliases], n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    also = f" (or {', '.join(spec.aliases)})" if spec.aliases else ""
    return f"{spec.name} has no hyper-parameter {key!r}; it has {', '.join(spec.hyper) or 'none'}{also}.{hint}"
