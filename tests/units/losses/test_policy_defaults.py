"""Defaults of the policy objectives and of what chooses their tokens, and how their sources sum over tokens."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from torchrl_llm_kl import losses
from torchrl_llm_kl.losses import get_objective, spec_of

SURROGATE = {"clip_ratio_c": None}
COVARIANCE = {"fraction": 2e-4, "cov_low": 1.0, "cov_high": 5.0, "clip_low": 0.2, "clip_high": 0.2}

# name -> (aggregation, defaults): the papers', and where they leave it open Trinity's or, for the last five, verl's and TRL's.
TABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "dapo": ("token-mean", {"clip_low": 0.2, "clip_high": 0.28, **SURROGATE}),
    "dr_grpo": ("seq-mean-token-sum-norm", {"clip_low": 0.2, "clip_high": 0.2, **SURROGATE}),
    "gspo": ("seq-mean-token-mean", {"clip_low": 3e-4, "clip_high": 4e-4, "level": "token"}),
    "luspo": ("seq-mean-token-sum", {"clip_low": 3e-4, "clip_high": 4e-4}),
    "dro": ("token-mean", {"beta": 0.05, "level": "token"}),
    "gmpo": ("seq-mean-token-mean", {"clip_low": 0.4, "clip_high": 0.4}),
    "cispo": (
        "token-mean",
        {"clip_low": 1.0, "clip_high": 0.28, "enable_mask_clip": False, "mask_clip_low": 1.0, "mask_clip_high": 0.28},
    ),
    "topr": ("token-mean", {"advantage_threshold": 0.0, "level": "token"}),
    "opmd": ("token-mean", {"tau": 1.0}),
    "sppo": ("token-mean", {"epsilon": 0.3}),
    "sapo": ("seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05}),
    "importance_sampling": ("token-mean", {}),
    "rec": (
        "token-mean",
        {
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "epsilon_low_prime": 0.6,
            "epsilon_high_prime": 2.0,
            "clip_mode": "none",
            "weight": "none",
            "regularizer": "none",
            "regularizer_coef": 0.0,
            "temp": 1.0,
        },
    ),
    "gpg": ("token-mean", {}),
    "clip_cov": ("token-mean", {"selected": None, **COVARIANCE}),
    "kl_cov": ("token-mean", {"selected": None, "fraction": 2e-4, "coeff": 1.0}),
    "dppo": ("token-mean", {"divergence": "tv", "clip_low": None, "clip_high": None, "clip_ratio_c": 20.0}),
    "vespo": ("token-mean", {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}),
}


def defaults_of(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    hyper = [parameter for parameter in parameters if parameter.default is not parameter.empty]
    return {parameter.name: parameter.default for parameter in hyper if parameter.name != "old_log_prob"}


@pytest.mark.parametrize("name", TABLE)
def test_defaults_and_aggregation(name: str) -> None:
    aggregation, defaults = TABLE[name]
    assert defaults_of(get_objective(name)) == defaults
    assert spec_of(get_objective(name)).aggregation == aggregation


def test_selections_have_the_defaults_of_their_objectives() -> None:
    assert defaults_of(losses.select_clip_cov) == {**COVARIANCE, "generator": None}
    assert defaults_of(losses.select_kl_cov) == {"fraction": 2e-4}
