from __future__ import annotations

from rollout_fixtures import _tables_have_no_head  # noqa: F401
