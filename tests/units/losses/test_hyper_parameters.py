"""Hyper-parameters of objectives: names, defaults and ranges, each against its source."""

import inspect
import itertools
import re
import typing
from typing import Any

import pytest
import torch

from by_hand import own_names
from objective_cases import PAIRS, refusal
from torchrl_llm_kl import losses
from torchrl_llm_kl.losses import ObjectiveArgs, ObjectiveName, available_objectives, get_objective, ppo, spec_of

NAN = float("nan")


def test_names_and_arguments_are_typed_and_in_the_specs() -> None:
    names = available_objectives()
    assert typing.get_args(ObjectiveName) == names
    specs = [spec_of(get_objective(name)) for name in names]
    assert set(ObjectiveArgs.__annotations__) == {name for spec in specs for name in spec.accepted}
    assert not ObjectiveArgs.__required_keys__
    for spec in specs:
        parameters = inspect.signature(get_objective(spec.name)).parameters
        assert {key: parameters[key].default for key in spec.hyper} == spec.defaults, spec.name
        assert all(parameters[key].default is inspect.Parameter.empty for key in spec.needs), spec.name
        assert {own for target in spec.aliases.values() for own in target} <= set(spec.hyper), spec.name


CLIP = {"clip_low": 0.2, "clip_high": 0.2}
GSPO = {"clip_low": 3e-4, "clip_high": 4e-4}
COVARIANCE = {"fraction": 2e-4, "cov_low": 1.0, "cov_high": 5.0, **CLIP}
CISPO = {"clip_low": 1.0, "clip_high": 0.28, "mask_clip_low": 1.0, "mask_clip_high": 0.28}
REC: dict[str, Any] = {"epsilon_low": 0.2, "epsilon_high": 0.2, "epsilon_low_prime": 0.6, "epsilon_high_prime": 2.0}
REC |= {"clip_mode": "none", "weight": "none", "regularizer": "none", "regularizer_coef": 0.0, "temp": 1.0}
BESIDE = {**CLIP, "clip_ratio_c": None, "nll_aggregation": "token-mean"}
# name -> (aggregation, defaults): the papers', and where they leave it open Trinity's or, for the last five, verl's and TRL's.
TABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "dapo": ("token-mean", {"clip_low": 0.2, "clip_high": 0.28, "clip_ratio_c": None}),
    "dr_grpo": ("seq-mean-token-sum-norm", {**CLIP, "clip_ratio_c": None}),
    "gspo": ("seq-mean-token-mean", {**GSPO, "level": "token"}),
    "luspo": ("seq-mean-token-sum", GSPO),
    "dro": ("token-mean", {"beta": 0.05, "level": "token"}),
    "gmpo": ("seq-mean-token-mean", {"clip_low": 0.4, "clip_high": 0.4}),
    "cispo": ("token-mean", {**CISPO, "enable_mask_clip": False}),
    "topr": ("token-mean", {"advantage_threshold": 0.0, "level": "token"}),
    "opmd": ("token-mean", {"tau": 1.0}),
    "sppo": ("token-mean", {"epsilon": 0.3}),
    "sapo": ("seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05}),
    "importance_sampling": ("token-mean", {}),
    "rec": ("token-mean", REC),
    "gpg": ("token-mean", {}),
    "clip_cov": ("token-mean", {"selected": None, **COVARIANCE}),
    "kl_cov": ("token-mean", {"selected": None, "fraction": 2e-4, "coeff": 1.0}),
    "dppo": ("token-mean", {"divergence": "tv", "clip_low": None, "clip_high": None, "clip_ratio_c": 20.0}),
    "vespo": ("token-mean", {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}),
    "mask_ipo": ("token-mean", {"clip_low": 0.1, "clip_high": 0.1, "one_sided": False, "kl_tau": 1e-3}),
    "ref_kl": ("token-mean", {"clip_low": 0.2, "kl_tau": 1e-3}),
    "a2po": ("seq-mean-token-sum", {"beta": 1e-3}),
    "vapo": ("token-mean", {"mu": 0.1, **BESIDE, "clip_high": 0.28}),
    "echo": ("token-mean", {"mu": 0.1, **BESIDE}),
}
#: Trinity's.
MIXTURES = {**CLIP, "clip_ratio_c": 3.0, "mu": 0.1, "enable_phi_function": True}
MIXTURES |= dict.fromkeys(("usual_aggregation", "expert_aggregation"))
#: Trinity's and TRL's; any other pair has the beta alone.
OF_PAIRS: dict[str, dict[str, Any]] = {name: {"beta": 0.1} for name in PAIRS}
for _name in ("dpo", "robust", "aot"):
    OF_PAIRS[_name]["label_smoothing"] = 0.0
OF_PAIRS["exo_pair"]["label_smoothing"], OF_PAIRS["discopop"]["tau"] = 1e-3, 0.05
for _name in ("dpo", "ipo"):
    OF_PAIRS[_name]["length_normalised"] = False


def defaults_of(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    hyper = [parameter for parameter in parameters if parameter.default is not parameter.empty]
    return {parameter.name: parameter.default for parameter in hyper if parameter.name != "old_log_prob"}


def test_defaults_and_aggregations_are_those_of_the_sources() -> None:
    for name, (aggregation, defaults) in TABLE.items():
        assert defaults_of(get_objective(name)) == defaults, name
        assert spec_of(get_objective(name)).aggregation == aggregation, name
    assert defaults_of(losses.select_clip_cov) == {**COVARIANCE, "generator": None}
    assert defaults_of(losses.select_kl_cov) == {"fraction": 2e-4}
    for name in PAIRS:
        spec, own = spec_of(get_objective(name)), ("reference_point",) if name in ("bco_pair", "aot") else ()
        assert OF_PAIRS[name].items() <= spec.defaults.items(), name
        assert (spec.needs, spec.per_row) == (("ref_log_prob",), ("pair_id", "chosen", *own)), name
        assert spec.aggregation == "seq-mean-token-sum", name
    for name in ("mix", "mix_chord"):
        defaults = spec_of(get_objective(name)).defaults
        assert defaults == {key: MIXTURES[key] for key in defaults}, name
    assert {"mu"} < set(spec_of(get_objective("mix")).defaults)


#: Of Trinity, torchrl, verl and TRL -> our own.
NAMES: dict[str, dict[str, str]] = {
    "cispo": {"mask_clip_range_low": "mask_clip_low", "mask_clip_range_high": "mask_clip_high"},
    "sapo": {"sapo_temperature_pos": "tau_pos", "sapo_temperature_neg": "tau_neg"},
    "dro": {"dro_beta": "beta"},
    "vespo": {f"vespo_{name}": name for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
    "clip_cov": {"clip_cov_ratio": "fraction", "clip_cov_lb": "cov_low", "clip_cov_ub": "cov_high"},
    "kl_cov": {"kl_cov_ratio": "fraction", "ppo_kl_coef": "coeff"},
    "mix": {"grpo_loss_agg_mode": "usual_aggregation", "sft_loss_agg_mode": "expert_aggregation"},
    "mix_chord": {"grpo_loss_agg_mode": "usual_aggregation", "sft_loss_agg_mode": "expert_aggregation"},
    "mask_ipo": {"dppo_mask_low": "clip_low", "dppo_mask_high": "clip_high"},
    "ref_kl": {"dppo_mask_low": "clip_low"},
    "a2po": {"beta2": "beta"},
    "cpo": {"cpo_alpha": "nll_coeff"},
    "simpo": {"simpo_gamma": "margin"},
    "tpo": {"tpo_alpha": "nll_coeff", "tpo_l_gamma": "margin"},
    "preference_sum": {"loss_weights": "weights", "discopop_tau": "tau"},
    "discopop": {"discopop_tau": "tau"},
}


def test_names_of_other_libraries() -> None:
    clip = {"clip_low": 0.3, "clip_high": 0.2}
    for name in ("ppo", "dapo", "dr_grpo", "gspo", "luspo", "gmpo", "cispo", "mix", "mix_chord", "clip_cov"):
        function = get_objective(name)
        for low, high in (("clip_range_low",) * 2, ("clip_ratio_low",) * 2, ("clip_range", "clip_range_low")):
            assert own_names(function, **{low: 0.3, high.replace("low", "high"): 0.2}) == clip, name
        assert own_names(function, clip_epsilon=0.25) == {"clip_low": 0.25, "clip_high": 0.25}, name
    for name, table in NAMES.items():
        values = {theirs: 0.1 * (i + 1) for i, theirs in enumerate(table)}
        assert own_names(get_objective(name), **values) == {table[key]: x for key, x in values.items()}, name
    with pytest.raises(TypeError, match="are the same hyper-parameter"):
        own_names(ppo, clip_low=0.3, clip_range_low=0.3)


def test_batch_sizes_have_no_effect_and_a_warning_says_so() -> None:
    sizes = ("use_dynamic_bsz", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ngpus_trainer")
    for name in ("mix", "mix_chord"):
        for key in (*sizes, "train_batch_size_usual", "train_batch_size_expert"):
            with pytest.warns(UserWarning, match=f"{name}: {key} has no effect here: each part is divided by its own"):
                assert own_names(get_objective(name), **{key: 7}) == {}
            assert f"{name} has no hyper-parameter '{key}': leave it out, each part" in refusal(name, **{key: 7})


SHARE, FRACTION = "greater than 0 and at most 1", "at least 0 and at most 1"
#: What hyper-parameters must be, values that are refused, and for each name the objectives that have it.
RANGES: list[tuple[str, tuple[Any, ...], dict[str, str]]] = [
    (FRACTION, (-0.1, 1.5, NAN), {"clip_low": "ppo dapo dr_grpo gspo cispo clip_cov mix", "mask_clip_low": "cispo"}),
    (FRACTION, (-0.1, 1.1), {"mu": "mix mix_chord", "ld_alpha": "dpo"}),
    ("at least 0", (-0.1,), {"clip_high": "ppo dapo dr_grpo gspo cispo gmpo mask_ipo", "mask_clip_high": "cispo"}),
    ("at least 0", (-0.1,), {"epsilon": "sppo", "clip_low": "dppo", "k_neg": "vespo", "regularizer_coef": "rec"}),
    ("at least 0", (-0.1,), {"tau": "opmd", "kl_tau": "mask_ipo ref_kl", "mu": "vapo echo"}),
    (
        "at least 0",
        (-0.1,),
        {"coeff": "kl_cov", "nll_coeff": "cpo tpo", "margin": "simpo tpo", "desirable_weight": "kto"},
    ),
    ("greater than 1", (1.0,), {"clip_ratio_c": "ppo dapo dr_grpo dppo"}),
    ("greater than 0", (0.0, -0.1), {"tau_pos": "sapo", "tau_neg": "sapo", "lambda_pos": "vespo", "tau": "discopop"}),
    ("greater than 0", (0.0, -1.0), dict.fromkeys(("epsilon_high", "epsilon_high_prime", "temp"), "rec")),
    ("greater than 0", (0.0, -0.1, NAN), {"beta": f"{' '.join(PAIRS)} dro kto bco a2po tpo preference_sum"}),
    (SHARE, (0.0, 1.5), {"epsilon_low": "rec", "epsilon_low_prime": "rec", "fraction": "clip_cov"}),
    (f".*{SHARE}", (0.0, 1.5, -0.1, NAN), {"cutoff_prob": "sft_phi"}),
    ("at least 0 and at most 0.5", (-0.1, 0.6), {"label_smoothing": "dpo robust aot"}),
    ("greater than 0 .* at most 0.5", (0.0, 0.6), {"label_smoothing": "exo_pair"}),
    ("one of 'token', 'sequence'", ("word",), {"level": "gspo topr dro"}),
    ("one of 'tv', 'kl'", ("js",), {"divergence": "dppo"}),
    ("one of 'none', 'one-side', .*", ("both",), {"clip_mode": "rec"}),
    ("one of 'none', .*", ("gspo",), {"weight": "rec"}),
    ("one of 'none', 'k2', 'forward-kl'", ("k3",), {"regularizer": "rec"}),
    ("one of 'reverse_kl', 'forward_kl', .*", ("kl",), {"f_divergence": "dpo"}),
    ("one of 'logistic', 'hinge', 'ipo'", ("dpo",), {"loss": "cpo tpo"}),
    (".*a finite number other than 0", (0.0, NAN), {"alpha": "cpo simpo"}),
    ("one of 'none', 'probability', 'aligned'", (True,), {"weighting": "dpo"}),
]
#: Other things that are refused.
ALL = torch.ones(6, dtype=torch.bool)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("luspo", {"level": "sequence"}, "luspo has no hyper-parameter 'level'"),
    ("mix", {"expert_aggregation": "mean"}, "expert_aggregation must be one of 'token-mean', .*, got 'mean'"),
    ("mix", {"usual_aggregation": "mean"}, "usual_aggregation must be one of 'token-mean', .*, got 'mean'"),
    *(
        (name, {"nll_aggregation": "mean"}, "nll_aggregation must be one of 'token-mean', .*'mean'")
        for name in ("cpo", "orpo")
    ),
    ("mix", {"expert_mask": None}, "mix needs expert_mask: pass expert_mask="),
    ("mix", {"old_log_prob": None}, "mix needs old_log_prob: pass old_log_prob="),
    ("dpo", {"f_divergence": "alpha_divergence", "f_alpha": 0.0}, "f_alpha must be greater than 0 .*, got 0.0"),
    ("dpo", {"weighting": "aligned", "sharp_log_prob": None}, "needs sharp_log_prob: .* or change weighting='al"),
    ("dpo", {"ref_log_prob": None}, "dpo needs ref_log_prob"),
    ("robust", {"label_smoothing": 0.5}, r"label_smoothing must be below 0\.5, got 0\.5"),
    *((name, {"chosen": None}, f"{name} needs chosen: pass chosen=") for name in ("kto", "bco", "aot_unpaired")),
    ("kto", {"reference_point": None}, r"needs reference_point: .* one value per sequence \(kto_reference_po"),
    ("kto", {"reference_point": torch.zeros(6, 1)}, r"reference_point has shape \(6, 1\), expected one .*, \(6,\)"),
    ("aot_unpaired", {"chosen": ALL, "match_id": None}, "as many chosen as rejected .* found 6 and 0 answers with"),
    ("aot_unpaired", {"match_id": torch.arange(6)}, "match_id 0 has 1 chosen and 0 rejected rows, expected one of"),
    # What depends on the prompt cancels in the lead, and nowhere else: other divergences need the lead alone.
    *(
        (name, {"f_divergence": "forward_kl"}, f"{name} has no hyper-parameter 'f_divergence'")
        for name in ("apo_zero", "apo_down", "sppo_hard", "nca_pair", "bco_pair", "aot", "kto", "bco")
    ),
    # A function knows its own names alone.
    ("ppo", {"clip_range_low": 0.3}, "has no hyper-parameter 'clip_range_low': pass 'clip_low'. PolicyLoss, Adv"),
    ("ppo", {"clip_epsilon": 0.3}, "'clip_epsilon': pass 'clip_low' and 'clip_high'. PolicyLoss, Advantage and make"),
    ("ppo", {"clip_lo": 0.3}, r"has no hyper-parameter 'clip_lo'\. Did you mean 'clip_low'\? Known: clip_low, "),
    ("ppo", {"pair_id": torch.tensor([1] * 6)}, "ppo has no input 'pair_id'"),
]


def test_values_out_of_range_are_refused() -> None:
    for must, values, table in RANGES:
        for key, names in table.items():
            for name, value in itertools.product(names.split(), values):
                said = refusal(name, **{key: value})
                assert re.match(f"ValueError: .*{key} must be {must},? got {value!r}", said), f"{name}: {said}"
    for name, given, message in REFUSED:
        said = refusal(name, **given)
        assert re.search(message, said), f"{given}: {said}"
        assert said.startswith("TypeError" if re.search("has no (hyper|input)", said) else "ValueError"), said
