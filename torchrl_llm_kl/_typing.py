"""Types that several layers name."""

from __future__ import annotations

from typing import Any, TypeAlias

#: A JSON object, from or for a file, a template or another process.
Json: TypeAlias = dict[str, Any]
