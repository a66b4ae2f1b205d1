"""The same for objectives that learn from experts and from preferences."""

from __future__ import annotations

from typing import Any

CASES: dict[str, tuple[str, dict[str, Any]]] = {}
