"""Objectives, by family: pure functions of equal-shaped tensors. Importing this registers all of them."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):  # each registers its own
    import_module(f"{__name__}.{_module.name}")
