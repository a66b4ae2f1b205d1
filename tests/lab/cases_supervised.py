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
    "distill": ("distill", {"beta": 0.3}),
    "distill-forward": ("distill", {"beta": 0.0, "teacher_weights": [0.7]}),
    "distill-reverse": ("distill", {"beta": 1.0}),
    "distill-exact": ("distill", {"distribution": "exact"}),
    "dpo": ("dpo", {"beta": 0.3}),
    "dpo-smooth": ("dpo", {"beta": 0.7, "label_smoothing": 0.15, "length_normalised": True}),
    "ipo": ("ipo", {"beta": 0.4}),
    "ipo-normalised": ("ipo", {"beta": 0.4, "length_normalised": True}),
    "hinge": ("hinge", {"beta": 0.6}),
    "robust": ("robust", {"beta": 0.5, "label_smoothing": 0.2}),
    "apo_zero": ("apo_zero", {"beta": 0.45}),
    "sppo_hard": ("sppo_hard", {"beta": 0.25}),
    "dpo-f": ("dpo", {"beta": 0.35, "f_divergence": "js_divergence", "ld_alpha": 0.4}),
    "dpo-wpo": ("dpo", {"beta": 0.35, "weighting": "probability"}),
    "dpo-aligned": ("dpo", {"beta": 0.35, "weighting": "aligned"}),
    "hinge-f": ("hinge", {"beta": 0.6, "f_divergence": "alpha_divergence", "f_alpha": 0.7}),
    "ipo-f": ("ipo", {"beta": 0.4, "f_divergence": "forward_kl", "length_normalised": True}),
    "exo_pair": ("exo_pair", {"beta": 0.4, "label_smoothing": 0.05}),
    "discopop": ("discopop", {"beta": 0.3, "tau": 0.2}),
    "apo_down": ("apo_down", {"beta": 0.45, "ld_alpha": 0.3}),
    "nca_pair": ("nca_pair", {"beta": 0.55}),
    "bco_pair": ("bco_pair", {"beta": 0.65}),
    "aot": ("aot", {"beta": 0.75, "label_smoothing": 0.1}),
    "aot_unpaired": ("aot_unpaired", {"beta": 0.75, "label_smoothing": 0.15}),
    "kto": ("kto", {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.7}),
    "bco": ("bco", {"beta": 0.6}),
    "cpo": ("cpo", {"beta": 0.3, "label_smoothing": 0.1, "nll_coeff": 0.6}),
    "cpo-tokens": ("cpo", {"beta": 0.3, "nll_aggregation": "token-mean"}),
    "simpo": ("simpo", {"beta": 1.5, "margin": 0.7, "label_smoothing": 0.1}),
    "orpo": ("orpo", {"beta": 0.2}),
}
