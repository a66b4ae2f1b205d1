from __future__ import annotations

import pytest

from rollout_fixtures import _lists_become_stacks  # noqa: F401

pytest.importorskip("ray")
