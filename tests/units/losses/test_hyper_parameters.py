"""Hyper-parameters of objectives: names, defaults and ranges, each against its source."""

from __future__ import annotations

import inspect
import re
import typing
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from by_hand import own_names
from objective_cases import inputs_of, random_batch, refusal
from torchrl_llm_kl import losses
from torchrl_llm_kl.losses import ObjectiveArgs, ObjectiveName, available_objectives, get_objective, ppo, spec_of

NAN = float("nan")
#: Of pairs, which accept a reference log-prob each.
PAIRS = (
    *("dpo", "robust", "hinge", "ipo", "exo_pair", "discopop", "apo_zero", "apo_down", "sppo_hard", "nca_pair"),
    *("bco_pair", "aot"),
)


def test_names_and_arguments_are_typed_and_in_the_specs() -> None:
    names = available_objectives()
    assert typing.get_args(ObjectiveName) == names
    specs = [spec_of(get_objective(name)) for name in names]
    assert set(ObjectiveArgs.__annotations__) == {name for spec in specs for name in spec.hyperparameters.accepted}
    assert not ObjectiveArgs.__required_keys__
    for spec in specs:
        parameters = inspect.signature(get_objective(spec.name)).parameters
        assert {key: parameters[key].default for key in spec.hyper} == spec.defaults, spec.name
        assert all(parameters[key].default is inspect.Parameter.empty for key in spec.needs), spec.name
        assert {own for target in spec.aliases.values() for own in target} <= set(spec.hyper), spec.name


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


def test_defaults_and_aggregations_of_policy_objectives() -> None:
    for name, (aggregation, defaults) in TABLE.items():
        assert defaults_of(get_objective(name)) == defaults, name
        assert spec_of(get_objective(name)).aggregation == aggregation, name
    assert defaults_of(losses.select_clip_cov) == {**COVARIANCE, "generator": None}
    assert defaults_of(losses.select_kl_cov) == {"fraction": 2e-4}


@pytest.mark.parametrize("name", PAIRS)
def test_defaults_of_losses_of_pairs_are_trinitys_and_trls(name: str) -> None:
    explicit = {"beta": 0.1} | ({"label_smoothing": 0.0} if name in ("dpo", "robust", "aot") else {})
    explicit |= {"label_smoothing": 1e-3} if name == "exo_pair" else {}
    explicit |= {"tau": 0.05} if name == "discopop" else {}
    explicit |= {"length_normalised": False} if name in ("dpo", "ipo") else {}
    defaults = spec_of(get_objective(name)).defaults
    assert {key: defaults[key] for key in explicit} == explicit
    assert spec_of(get_objective(name)).needs == ("ref_log_prob",)
    own = ("reference_point",) if name in ("bco_pair", "aot") else ()
    assert spec_of(get_objective(name)).per_row == ("pair_id", "chosen", *own)
    assert spec_of(get_objective(name)).aggregation == "seq-mean-token-sum"


def test_defaults_of_mixtures_are_trinitys() -> None:
    expected = {"clip_low": 0.2, "clip_high": 0.2, "clip_ratio_c": 3.0, "mu": 0.1}
    expected |= {"step": 0, "mu_warmup_steps": 0, "mu_decay_steps": 0, "mu_peak": 0.1, "mu_valley": 0.1}
    expected |= {"enable_phi_function": True, "usual_aggregation": None, "expert_aggregation": None}
    for name in ("mix", "mix_chord"):
        defaults = spec_of(get_objective(name)).defaults
        assert defaults == {key: expected[key] for key in defaults}, name
    assert {"mu"} < set(spec_of(get_objective("mix")).defaults)


def test_names_of_other_libraries() -> None:
    """Trinity's, torchrl's, verl's and TRL's."""
    clip = {"clip_low": 0.3, "clip_high": 0.2}
    for name in ("ppo", "dapo", "dr_grpo", "gspo", "luspo", "gmpo", "cispo", "mix", "mix_chord", "clip_cov"):
        function = get_objective(name)
        assert own_names(function, clip_range_low=0.3, clip_range_high=0.2) == clip, name
        assert own_names(function, clip_ratio_low=0.3, clip_ratio_high=0.2) == clip, name
        assert own_names(function, clip_range=0.3, clip_range_high=0.2) == clip, name
        assert own_names(function, clip_epsilon=0.25) == {"clip_low": 0.25, "clip_high": 0.25}, name
    table: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "cispo": (
            {"mask_clip_range_low": 0.4, "mask_clip_range_high": 0.5},
            {"mask_clip_low": 0.4, "mask_clip_high": 0.5},
        ),
        "sapo": ({"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 2.0}, {"tau_pos": 1.0, "tau_neg": 2.0}),
        "dro": ({"dro_beta": 0.2}, {"beta": 0.2}),
        "vespo": (
            {"vespo_k_pos": 1, "vespo_lambda_pos": 2, "vespo_k_neg": 3, "vespo_lambda_neg": 4},
            {"k_pos": 1, "lambda_pos": 2, "k_neg": 3, "lambda_neg": 4},
        ),
        "clip_cov": (
            {"clip_cov_ratio": 0.5, "clip_cov_lb": 0.3, "clip_cov_ub": 2.0},
            {"fraction": 0.5, "cov_low": 0.3, "cov_high": 2.0},
        ),
        "kl_cov": ({"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.25}, {"fraction": 0.2, "coeff": 0.25}),
        "mix": (
            {"grpo_loss_agg_mode": "none", "sft_loss_agg_mode": "seq-mean-token-mean"},
            {"usual_aggregation": "none", "expert_aggregation": "seq-mean-token-mean"},
        ),
        "cpo": ({"cpo_alpha": 0.25}, {"nll_coeff": 0.25}),
        "simpo": ({"simpo_gamma": 0.25}, {"margin": 0.25}),
        "discopop": ({"discopop_tau": 0.25}, {"tau": 0.25}),
    }
    for name, (theirs, own) in table.items():
        assert own_names(get_objective(name), **theirs) == own, name
    assert own_names(get_objective("mix_chord"), **table["mix"][0]) == table["mix"][1]
    with pytest.raises(TypeError, match="are the same hyper-parameter"):
        own_names(ppo, clip_low=0.3, clip_range_low=0.3)


def test_batch_sizes_have_no_effect_and_a_warning_says_so() -> None:
    sizes = ("use_dynamic_bsz", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ngpus_trainer")
    for name in ("mix", "mix_chord"):
        for key in (*sizes, "train_batch_size_usual", "train_batch_size_expert"):
            with pytest.warns(UserWarning, match=f"{name}: {key} has no effect here: each part is divided by its own"):
                assert own_names(get_objective(name), **{key: 7}) == {}
            assert f"{name} has no hyper-parameter '{key}': leave it out" in refusal(name, **{key: 7})


def test_a_number_may_be_a_tensor() -> None:
    for name in PAIRS:
        given = inputs_of(name, random_batch(0))
        found, want = (get_objective(name)(**given, beta=beta)[0].value for beta in (torch.tensor(0.3).double(), 0.3))
        assert_close(found, want, msg=name)


POSITIVE, HALF = "must be greater than 0, got", "must be at least 0 and at most 0.5, got"
FRACTION, AT_LEAST_0 = "must be at least 0 and at most 1, got", "must be at least 0, got"
#: objective -> hyper-parameters that it refuses, and what it says
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    **{
        name: [
            ({"clip_low": 1.5}, f"clip_low {FRACTION} 1.5"),
            ({"clip_high": -0.1}, f"clip_high {AT_LEAST_0} -0.1"),
            ({"clip_ratio_c": 1.0}, "clip_ratio_c must be greater than 1, got 1.0"),
        ]
        for name in ("ppo", "dapo", "dr_grpo")
    },
    "gspo": [
        ({"level": "word"}, "level must be one of 'token', 'sequence', got 'word'"),
        ({"clip_low": 1.1}, f"clip_low {FRACTION} 1.1"),
        ({"clip_high": -1.0}, f"clip_high {AT_LEAST_0} -1.0"),
    ],
    "luspo": [({"level": "sequence"}, "luspo has no hyper-parameter 'level'")],
    "gmpo": [({"clip_high": -0.1}, f"clip_high {AT_LEAST_0} -0.1")],
    "cispo": [
        ({"clip_low": 1.5}, f"clip_low {FRACTION} 1.5"),
        ({"clip_high": -0.5}, f"clip_high {AT_LEAST_0} -0.5"),
        ({"mask_clip_low": 2.0}, f"mask_clip_low {FRACTION} 2.0"),
        ({"mask_clip_high": -2.0}, f"mask_clip_high {AT_LEAST_0} -2.0"),
    ],
    "sapo": [({name: 0.0}, f"{name} {POSITIVE} 0.0") for name in ("tau_pos", "tau_neg")],
    "topr": [({"level": "batch"}, "level must be one of 'token', 'sequence', got 'batch'")],
    "opmd": [({"tau": -0.5}, f"tau {AT_LEAST_0} -0.5")],
    "sppo": [({"epsilon": -0.3}, f"epsilon {AT_LEAST_0} -0.3")],
    "dro": [
        *(({"beta": beta}, f"beta {POSITIVE} {beta}") for beta in (0.0, -1.0, NAN)),
        ({"level": "answer"}, "level must be one of 'token', 'sequence', got 'answer'"),
    ],
    "dppo": [
        ({"divergence": "js"}, "divergence must be one of 'tv', 'kl', got 'js'"),
        ({"clip_low": -0.1}, f"clip_low {AT_LEAST_0} -0.1"),
        ({"clip_ratio_c": 1.0}, "clip_ratio_c must be greater than 1, got 1.0"),
    ],
    "vespo": [({"k_neg": -1.0}, f"k_neg {AT_LEAST_0} -1.0"), ({"lambda_pos": 0.0}, f"lambda_pos {POSITIVE} 0.0")],
    "rec": [
        ({"clip_mode": "both"}, "clip_mode must be one of 'none', 'one-side', .* got 'both'"),
        ({"weight": "gspo"}, "weight must be one of .* got 'gspo'"),
        ({"regularizer": "k3"}, "regularizer must be one of 'none', 'k2', 'forward-kl', got 'k3'"),
        ({"epsilon_low": 0.0}, "epsilon_low must be greater than 0 and at most 1, got 0.0"),
        ({"epsilon_low_prime": 1.5}, "epsilon_low_prime must be greater than 0 and at most 1, got 1.5"),
        ({"epsilon_high": -1.0}, f"epsilon_high {POSITIVE} -1.0"),
        ({"epsilon_high_prime": 0.0}, f"epsilon_high_prime {POSITIVE} 0.0"),
        ({"temp": 0.0}, f"temp {POSITIVE} 0.0"),
        ({"regularizer_coef": -0.1}, f"regularizer_coef {AT_LEAST_0} -0.1"),
    ],
    "clip_cov": [
        ({"clip_low": 2.0}, f"clip_low {FRACTION} 2.0"),
        ({"fraction": 0.0}, "fraction must be greater than 0 and at most 1, got 0.0"),
    ],
    "kl_cov": [({"coeff": -1.0}, f"coeff {AT_LEAST_0} -1.0")],
    "sft_phi": [
        ({"cutoff_prob": cutoff}, f"cutoff_prob must be .*greater than 0 and at most 1, got {cutoff}")
        for cutoff in (0.0, 1.5, -0.1, NAN)
    ],
    "mix": [
        ({"mu": 1.5}, f"mu {FRACTION} 1.5"),
        ({"clip_low": 2.0}, f"clip_low {FRACTION} 2.0"),
        ({"expert_aggregation": "mean"}, "unknown aggregation 'mean'.*Known: token-mean, "),
        ({"usual_aggregation": "mean"}, "unknown aggregation 'mean'.*Known: token-mean, "),
        ({"expert_mask": None}, "mix needs expert_mask: pass expert_mask="),
        ({"old_log_prob": None}, "mix needs old_log_prob: pass old_log_prob="),
    ],
    "mix_chord": [
        ({"mu_peak": 1.1}, f"mu_peak {FRACTION} 1.1"),
        ({"mu_valley": -0.1}, f"mu_valley {FRACTION} -0.1"),
        ({"mu_warmup_steps": -1}, f"mu_warmup_steps {AT_LEAST_0} -1"),
        ({"mu_decay_steps": -2}, f"mu_decay_steps {AT_LEAST_0} -2"),
        ({"step": -3}, f"step {AT_LEAST_0} -3"),
    ],
    "exo_pair": [
        ({"label_smoothing": 0.0}, "label_smoothing must be greater than 0 .*, got 0.0"),
        ({"label_smoothing": 0.6}, "label_smoothing must be .* at most 0.5, got 0.6"),
    ],
    "dpo": [
        ({"ld_alpha": 1.5}, f"ld_alpha {FRACTION} 1.5"),
        ({"f_divergence": "kl"}, "f_divergence must be one of 'reverse_kl', 'forward_kl', .* got 'kl'"),
        ({"f_divergence": "alpha_divergence", "f_alpha": 0.0}, "f_alpha must be greater than 0 .*, got 0.0"),
        ({"weighting": True}, "weighting must be one of 'none', 'probability', 'aligned', got True"),
        ({"weighting": "aligned", "sharp_log_prob": None}, "dpo needs sharp_log_prob: pass .* or change weighting='al"),
        ({"ref_log_prob": None}, "dpo needs ref_log_prob"),
    ],
    "robust": [({"label_smoothing": 0.5}, r"label_smoothing must be below 0\.5, got 0\.5")],
    "discopop": [({"tau": 0.0}, f"tau {POSITIVE} 0.0")],
    "cpo": [
        ({"nll_coeff": -0.1}, f"nll_coeff {AT_LEAST_0} -0.1"),
        ({"nll_aggregation": "mean"}, "unknown aggregation 'mean'"),
    ],
    "simpo": [({"margin": -0.1}, f"margin {AT_LEAST_0} -0.1")],
    "orpo": [({"nll_aggregation": "mean"}, "unknown aggregation 'mean'")],
    "kto": [
        ({"chosen": None}, "kto needs chosen: pass chosen=, one value per sequence"),
        ({"reference_point": None}, r"needs reference_point: .* one value per sequence \(kto_reference_point computes"),
        ({"desirable_weight": -1.0}, f"desirable_weight {AT_LEAST_0} -1.0"),
        ({"beta": 0.0}, f"beta {POSITIVE} 0.0"),
        (
            {"reference_point": torch.zeros(6, 1)},
            r"kto: reference_point has shape \(6, 1\), expected one value per sequence, \(6,\)",
        ),
    ],
    "bco": [({"chosen": None}, "bco needs chosen"), ({"beta": 0.0}, f"beta {POSITIVE} 0.0")],
    "aot_unpaired": [
        ({"chosen": None}, "aot_unpaired needs chosen"),
        (
            {"chosen": torch.ones(6).bool(), "match_id": None},
            "as many chosen as rejected .* found 6 and 0 answers with",
        ),
        ({"match_id": torch.arange(6)}, "match_id 0 has 1 chosen and 0 rejected rows, expected one of each"),
    ],
}
for _name in PAIRS:
    REFUSED.setdefault(_name, []).extend(({"beta": beta}, f"beta {POSITIVE} {beta}") for beta in (0.0, -0.1, NAN))
for _name in ("dpo", "robust", "aot"):
    REFUSED[_name].extend(({"label_smoothing": x}, f"label_smoothing {HALF} {x}") for x in (-0.1, 0.6))
# What depends on the prompt cancels in the lead, and nowhere else: other divergences need the lead alone.
for _name in ("apo_zero", "apo_down", "sppo_hard", "nca_pair", "bco_pair", "aot", "kto", "bco"):
    REFUSED.setdefault(_name, []).append(
        ({"f_divergence": "forward_kl"}, f"{_name} has no hyper-parameter 'f_divergence'")
    )


@pytest.mark.parametrize("name", REFUSED)
def test_values_out_of_range_are_refused(name: str) -> None:
    for given, message in REFUSED[name]:
        said = refusal(name, **given)
        assert re.search(message, said), f"{given}: {said}"
        assert said.startswith("TypeError" if "has no hyper-parameter" in message else "ValueError"), said


def test_a_function_knows_its_own_names_alone() -> None:
    for name, message in {
        "clip_range_low": "ppo has no hyper-parameter 'clip_range_low': pass 'clip_low'. PolicyLoss and make",
        "clip_epsilon": "'clip_epsilon': pass 'clip_low' and 'clip_high'. PolicyLoss and make_algorithm translate",
        "clip_lo": r"has no hyper-parameter 'clip_lo'\. Did you mean 'clip_low'\? Known: clip_low, ",
    }.items():
        assert re.search(message, refusal("ppo", **{name: 0.3})), name
    assert "ppo has no input 'pair_id'" in refusal("ppo", pair_id=torch.tensor([1] * 6))
