"""Types that several layers use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

#: A JSON object of a file, a template or another process.
Json: TypeAlias = dict[str, Any]
#: For each row, the processor's output for its images by name, or None without images.
ImageRows: TypeAlias = Sequence[Mapping[str, object] | None]
