"""Types that several layers name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

#: A JSON object, from or for a file, a template or another process.
Json: TypeAlias = dict[str, Any]
#: What a processor returned for the images of each row, by name; None for a row without images.
ImageRows: TypeAlias = Sequence[Mapping[str, object] | None]
