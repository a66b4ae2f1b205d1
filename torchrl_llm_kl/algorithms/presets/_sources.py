"""Sources that several presets share."""

from __future__ import annotations

__all__ = ["KL_K2", "REPEATS"]

KL_K2 = "Trinity-RFT 0.6.0: k2, 1e-3; k2 is the estimator whose gradient is that of the reverse KL"
REPEATS = "Trinity-RFT 0.6.0, default_config"
