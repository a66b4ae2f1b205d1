"""Random batches for objectives, and the hyper-parameters of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchrl_llm_kl.losses import get_objective, spec_of

_REC = {"epsilon_low": 0.15, "epsilon_high": 0.25, "epsilon_low_prime": 0.35, "epsilon_high_prime": 0.45}
_REC |= {"temp": 1.5, "regularizer_coef": 0.3}
_MIX = {"clip_low": 0.15, "clip_high": 0.3, "clip_ratio_c": 2.5}
_CHORD = {"step": 3, "mu_warmup_steps": 2, "mu_decay_steps": 7, "mu_peak": 0.8, "mu_valley": 0.15}
#: Hyper-parameters, no two alike, under which each objective goes through the tests that all share; what follows the name
#: says what is special.
_CASES: dict[str, dict[str, Any]] = {
    "ppo": {"clip_low": 0.15, "clip_high": 0.3, "clip_ratio_c": 2.5},
    "ppo-masked": {"clip_low": 0.15, "clip_high": 0.3, "enable_sequence_masking": True, "delta_sequence_masking": 0.05},
    "ppo-pg": {"fallback_to_policy_gradient": True},
    "dapo": {"clip_low": 0.15, "clip_high": 0.3},
    "dr_grpo": {"clip_low": 0.25, "clip_high": 0.1, "clip_ratio_c": 2.5},
    "gspo-token": {"clip_low": 0.1, "clip_high": 0.15},
    "gspo-sequence": {"clip_low": 0.1, "clip_high": 0.15, "level": "sequence"},
    "luspo": {"clip_low": 0.1, "clip_high": 0.15},
    "gmpo": {"clip_low": 0.2, "clip_high": 0.3},
    "cispo": {"clip_low": 0.3, "clip_high": 0.2},
    "cispo-masked": {
        "clip_low": 0.3,
        "clip_high": 0.2,
        "enable_mask_clip": True,
        "mask_clip_low": 0.4,
        "mask_clip_high": 0.5,
    },
    "topr-token": {"advantage_threshold": 0.2},
    "topr-sequence": {"advantage_threshold": 0.2, "level": "sequence"},
    "dro": {"beta": 0.6},
    "dro-sequence": {"beta": 0.3, "level": "sequence"},
    "opmd": {"tau": 0.7},
    "sppo": {"epsilon": 0.4},
    "sapo": {"tau_pos": 1.2, "tau_neg": 1.7},
    "importance_sampling": {},
    "gpg": {},
    "vespo": {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 2.5, "lambda_neg": 1.5},
    "dppo-tv": {"clip_low": 0.05, "clip_high": 0.1, "clip_ratio_c": 1.5},
    "dppo-kl": {"divergence": "kl", "clip_low": 0.02, "clip_high": 0.03},
    # All candidates are chosen, so that the choice does not depend on random numbers.
    "clip_cov": {"clip_low": 0.15, "clip_high": 0.3, "fraction": 1.0, "cov_low": 0.1, "cov_high": 0.7},
    "kl_cov": {"coeff": 0.6, "fraction": 0.2},
    "rec": {},
    "rec-one-side": {**_REC, "clip_mode": "one-side", "weight": "importance_sampling", "regularizer": "k2"},
    "rec-two-side": {**_REC, "clip_mode": "two-side", "weight": "advantage", "regularizer": "forward-kl"},
    "rec-ring": {**_REC, "clip_mode": "ring", "weight": "gspo_importance_sampling"},
    "rec-gspo": {**_REC, "clip_mode": "gspo-one-side", "weight": "gspo_importance_sampling", "regularizer": "k2"},
    "sft": {},
    "sft_is": {},
    "sft_phi": {},
    "sft_phi-cutoff": {"cutoff_prob": 0.4},
    "mix": {"mu": 0.35, **_MIX},
    "mix-aggregated": {"usual_aggregation": "seq-mean-token-sum", "expert_aggregation": "seq-mean-token-mean"},
    "mix_chord": {**_CHORD, **_MIX},
    "mix_chord-mu": {"mu_peak": 0.6, "mu_decay_steps": 4, "enable_phi_function": False},
    "distill": {"beta": 0.3},
    "distill-forward": {"beta": 0.0, "teacher_weights": [0.7]},
    "distill-reverse": {"beta": 1.0},
    "distill-exact": {"distribution": "exact"},
    "dpo": {"beta": 0.3},
    "dpo-smooth": {"beta": 0.7, "label_smoothing": 0.15, "length_normalised": True},
    "ipo": {"beta": 0.4},
    "ipo-normalised": {"beta": 0.4, "length_normalised": True},
    "hinge": {"beta": 0.6},
    "robust": {"beta": 0.5, "label_smoothing": 0.2},
    "apo_zero": {"beta": 0.45},
    "sppo_hard": {"beta": 0.25},
    "dpo-f": {"beta": 0.35, "f_divergence": "js_divergence", "ld_alpha": 0.4},
    "dpo-wpo": {"beta": 0.35, "weighting": "probability"},
    "dpo-aligned": {"beta": 0.35, "weighting": "aligned"},
    "hinge-f": {"beta": 0.6, "f_divergence": "alpha_divergence", "f_alpha": 0.7},
    "ipo-f": {"beta": 0.4, "f_divergence": "forward_kl", "length_normalised": True},
    "exo_pair": {"beta": 0.4, "label_smoothing": 0.05},
    "discopop": {"beta": 0.3, "tau": 0.2},
    "apo_down": {"beta": 0.45, "ld_alpha": 0.3},
    "nca_pair": {"beta": 0.55},
    "bco_pair": {"beta": 0.65},
    "aot": {"beta": 0.75, "label_smoothing": 0.1},
    "aot_unpaired": {"beta": 0.75, "label_smoothing": 0.15},
    "kto": {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.7},
    "bco": {"beta": 0.6},
    "cpo": {"beta": 0.3, "label_smoothing": 0.1, "nll_coeff": 0.6},
    "cpo-tokens": {"beta": 0.3, "nll_aggregation": "token-mean"},
    "simpo": {"beta": 1.5, "margin": 0.7, "label_smoothing": 0.1},
    "orpo": {"beta": 0.2},
}
CASES = {case: (case.partition("-")[0], hyper) for case, hyper in _CASES.items()}
#: Objectives of pairs, which need a reference log-prob each.
PAIRS = (
    *("dpo", "robust", "hinge", "ipo", "exo_pair", "discopop", "apo_zero", "apo_down", "sppo_hard", "nca_pair"),
    *("bco_pair", "aot"),
)


def random_batch(seed: int, rows: int = 6, width: int = 5, *, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Every input of an objective; ``[rows, width]``. Rows are pairs: chosen, rejected, chosen, ...

    Ratios lie on both sides of all usual clip bounds, advantages are never 0, some rows have few masked-in tokens, and
    the mask leaves holes. ``expert_mask`` is True for every row of every other pair.
    """
    rng = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(rows, width, generator=rng, dtype=torch.float64) * scale

    log_prob = -normal(1.0).abs() - 0.05
    old = (log_prob + normal(0.4)).clamp(max=-1e-3)
    mask = torch.rand(rows, width, generator=rng) < 0.7
    mask[torch.arange(rows), torch.randint(width, (rows,), generator=rng)] = True
    advantage = normal(1.0)
    advantage = torch.where(advantage.abs() < 0.1, 0.5, advantage)
    return {
        "log_prob": log_prob.to(dtype),
        "mask": mask,
        "old_log_prob": old.to(dtype),
        "ref_log_prob": (log_prob + normal(0.3)).clamp(max=-1e-3).to(dtype),
        "advantage": advantage.to(dtype),
        "expert_mask": (torch.arange(rows) // 2 % 2 == 1).unsqueeze(-1).expand(rows, width).clone(),
    }


def inputs_of(name: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with the inputs that this objective takes beside the inputs of all: of a whole batch, whatever its rows."""
    spec, rows = spec_of(get_objective(name)), torch.arange(len(batch["mask"]))
    more = {
        "chosen": rows % 2 == 0,
        "reference_point": torch.where(batch["expert_mask"][:, 0], 0.5, -0.25).to(batch["log_prob"].dtype),
        "match_id": rows // 2,
        "sharp_log_prob": 0.5 * batch["log_prob"].detach(),
        # Multiples by powers of two are exact in half precision.
        "teacher_divergence": -batch["log_prob"],
        "outcomes": torch.stack([batch["log_prob"] * factor for factor in (1.0, 0.5, 2.0)], -1),
        "teacher_outcomes": torch.stack([batch["ref_log_prob"] * factor for factor in (2.0, 1.0, 0.5)], -1),
    }
    taken = {*spec.needs, *spec.needs_if, *(() if spec.once is None else (spec.once.name,))}
    return {**batch, **{key: value for key, value in more.items() if key in taken}}


def rows_of(batch: dict[str, Tensor], index: Any) -> dict[str, Tensor]:
    """Some rows of a batch."""
    return {key: value[index] for key, value in batch.items()}


def raises_without(part: Callable[[dict[str, Tensor]], Any], given: dict[str, Tensor]) -> set[str]:
    """The inputs without which a part of a loss raises: each left out by itself, all others there."""
    part(given)
    names = given.keys() - {"log_prob", "mask"}
    return {name for name in names if _said(part, {key: x for key, x in given.items() if key != name})}


def refusal(name: str, **changes: Any) -> str:
    """What an objective says to these inputs and hyper-parameters, all other inputs there; nothing if it takes them."""
    return _said(lambda given: get_objective(name)(**given), {**inputs_of(name, random_batch(0)), **changes})


def _said(function: Callable[[Any], Any], given: Any) -> str:
    try:
        function(given)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
