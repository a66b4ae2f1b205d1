"""Hyper-parameters, no two alike, under which each policy objective goes through the tests that all objectives share."""

from __future__ import annotations

from typing import Any

REC = {
    "epsilon_low": 0.15,
    "epsilon_high": 0.25,
    "epsilon_low_prime": 0.35,
    "epsilon_high_prime": 0.45,
    "temp": 1.5,
    "regularizer_coef": 0.3,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", {"clip_low": 0.15, "clip_high": 0.3, "clip_ratio_c": 2.5}),
    "ppo-masked": (
        "ppo",
        {"clip_low": 0.15, "clip_high": 0.3, "enable_sequence_masking": True, "delta_sequence_masking": 0.05},
    ),
    "ppo-pg": ("ppo", {"fallback_to_policy_gradient": True}),
    "dapo": ("dapo", {"clip_low": 0.15, "clip_high": 0.3}),
    "dr_grpo": ("dr_grpo", {"clip_low": 0.25, "clip_high": 0.1, "clip_ratio_c": 2.5}),
    "gspo-token": ("gspo", {"clip_low": 0.1, "clip_high": 0.15}),
    "gspo-sequence": ("gspo", {"clip_low": 0.1, "clip_high": 0.15, "level": "sequence"}),
    "luspo": ("luspo", {"clip_low": 0.1, "clip_high": 0.15}),
    "gmpo": ("gmpo", {"clip_low": 0.2, "clip_high": 0.3}),
    "cispo": ("cispo", {"clip_low": 0.3, "clip_high": 0.2}),
    "cispo-masked": (
        "cispo",
        {"clip_low": 0.3, "clip_high": 0.2, "enable_mask_clip": True, "mask_clip_low": 0.4, "mask_clip_high": 0.5},
    ),
    "topr-token": ("topr", {"advantage_threshold": 0.2}),
    "topr-sequence": ("topr", {"advantage_threshold": 0.2, "level": "sequence"}),
    "dro": ("dro", {"beta": 0.6}),
    "dro-sequence": ("dro", {"beta": 0.3, "level": "sequence"}),
    "opmd": ("opmd", {"tau": 0.7}),
    "sppo": ("sppo", {"epsilon": 0.4}),
    "sapo": ("sapo", {"tau_pos": 1.2, "tau_neg": 1.7}),
    "importance_sampling": ("importance_sampling", {}),
    "gpg": ("gpg", {}),
    "vespo": ("vespo", {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 2.5, "lambda_neg": 1.5}),
    "dppo-tv": ("dppo", {"clip_low": 0.05, "clip_high": 0.1, "clip_ratio_c": 1.5}),
    "dppo-kl": ("dppo", {"divergence": "kl", "clip_low": 0.02, "clip_high": 0.03}),
    # All candidates are chosen, so that the choice does not depend on random numbers.
    "clip_cov": ("clip_cov", {"clip_low": 0.15, "clip_high": 0.3, "fraction": 1.0, "cov_low": 0.1, "cov_high": 0.7}),
    "kl_cov": ("kl_cov", {"coeff": 0.6, "fraction": 0.2}),
    "rec": ("rec", {}),
    "rec-one-side": ("rec", {**REC, "clip_mode": "one-side", "weight": "importance_sampling", "regularizer": "k2"}),
    "rec-two-side": ("rec", {**REC, "clip_mode": "two-side", "weight": "advantage", "regularizer": "forward-kl"}),
    "rec-ring": ("rec", {**REC, "clip_mode": "ring", "weight": "gspo_importance_sampling"}),
    "rec-gspo": (
        "rec",
        {**REC, "clip_mode": "gspo-one-side", "weight": "gspo_importance_sampling", "regularizer": "k2"},
    ),
}
