"""Hyper-parameters, no two alike, under which each policy objective goes through the tests that all objectives share."""

from __future__ import annotations

from typing import Any

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", {"clip_low": 0.15, "clip_high": 0.3, "clip_ratio_c": 2.5}),
    "ppo-masked": (
        "ppo",
        {"clip_low": 0.15, "clip_high": 0.3, "enable_sequence_masking": True, "delta_sequence_masking": 0.05},
    ),
    "ppo-pg": ("ppo", {"fallback_to_policy_gradient": True}),
}
