from __future__ import annotations

from built_site import site  # noqa: F401
