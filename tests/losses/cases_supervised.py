"""Hyper-parameters for the shared tests of objectives that learn from experts and from preferences."""

from __future__ import annotations

from typing import Any

_MIX = {"clip_low": 0.15, "clip_high": 0.3, "clip_ratio_c": 2.5}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {}),
    "sft_is": ("sft_is", {}),
    "sft_phi": ("sft_phi", {}),
    "sft_phi-cutoff": ("sft_phi", {"cutoff_prob": 0.4}),
    "mix": ("mix", {"mu": 0.35, **_MIX}),
    "mix-aggregated": ("mix", {"usual_aggregation": "seq-mean-token-sum", "expert_aggregation": "seq-mean-token-mean"}),
    "mix_chord": (
        "mix_chord",
        {"step": 3, "mu_warmup_steps": 2, "mu_decay_steps": 7, "mu_peak": 0.8, "mu_valley": 0.15, **_MIX},
    ),
    "mix_chord-mu": ("mix_chord", {"mu_peak": 0.6, "mu_decay_steps": 4, "enable_phi_function": False}),
    "dpo": ("dpo", {"beta": 0.3}),
    "dpo-smooth": ("dpo", {"beta": 0.7, "label_smoothing": 0.15, "length_normalised": True}),
    "ipo": ("ipo", {"beta": 0.4}),
    "ipo-normalised": ("ipo", {"beta": 0.4, "length_normalised": True}),
    "hinge": ("hinge", {"beta": 0.6}),
    "robust": ("robust", {"beta": 0.5, "label_smoothing": 0.2}),
    "apo_zero": ("apo_zero", {"beta": 0.45}),
    "sppo_hard": ("sppo_hard", {"beta": 0.25}),
}
