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
from project import tables
from torchrl_llm_kl import losses
from torchrl_llm_kl.losses import (
    ObjectiveArgs,
    ObjectiveName,
    TermPart,
    available_objectives,
    get_objective,
    ppo,
    spec_of,
)


def test_names_and_arguments_are_typed_and_in_the_specs() -> None:
    names = available_objectives()
    assert typing.get_args(ObjectiveName) == names
    specs = [spec_of(get_objective(name)) for name in names]
    assert set(ObjectiveArgs.__annotations__) == {name for spec in specs for name in spec.accepted}
    assert not ObjectiveArgs.__required_keys__
    for spec in specs:
        parameters = inspect.signature(get_objective(spec.name)).parameters
        assert {key: parameters[key].default for key in spec.hyper} == spec.defaults, spec.name
        assert {own for target in spec.aliases.values() for own in target} <= set(spec.hyper), spec.name


DEFAULTS, NAMES, RANGES = tables(__file__).values()
#: Trinity's.
MIXTURES = {"clip_low": 0.2, "clip_high": 0.2, "clip_ratio_c": 3.0, "mu": 0.1, "enable_phi_function": True}
MIXTURES |= dict.fromkeys(("usual_aggregation", "expert_aggregation"))
#: Trinity's and TRL's; any other pair has the beta alone.
OF_PAIRS: dict[str, dict[str, Any]] = {name: {"label_smoothing": 0.0} for name in ("robust", "aot")}
OF_PAIRS |= {"dpo": {"label_smoothing": 0.0, "length_normalised": False}, "ipo": {"length_normalised": False}}
OF_PAIRS |= {"exo_pair": {"label_smoothing": 1e-3}, "discopop": {"tau": 0.05}}


def defaults_of(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    hyper = [parameter for parameter in parameters if parameter.default is not parameter.empty]
    return {parameter.name: parameter.default for parameter in hyper}


def test_defaults_and_aggregations_are_those_of_the_sources() -> None:
    for name, (aggregation, defaults) in DEFAULTS.items():
        assert defaults_of(get_objective(name)) == defaults, name
        assert spec_of(get_objective(name)).aggregation == aggregation, name
    assert defaults_of(losses.select_clip_cov) == {**DEFAULTS["clip_cov"][1], "generator": None}
    assert defaults_of(losses.select_kl_cov) == {"fraction": 2e-4}
    for name in PAIRS:
        spec = spec_of(get_objective(name))
        own = {"reference_point"} if name in ("bco_pair", "aot") else set()
        assert {"beta": 0.1, **OF_PAIRS.get(name, {})}.items() <= spec.defaults.items(), name
        assert TermPart(get_objective(name)).reads() == ({"ref_log_prob"}, {"pair_id", "chosen", *own}), name
        assert spec.aggregation == "seq-mean-token-sum", name
    for name in ("mix", "mix_chord"):
        defaults = spec_of(get_objective(name)).defaults
        assert defaults == {key: MIXTURES[key] for key in defaults}, name
    assert {"mu"} < set(spec_of(get_objective("mix")).defaults)


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


#: Other things that are refused.
ALL = torch.ones(6, dtype=torch.bool)
ONE_OF = "_aggregation must be one of 'token-mean', .*, got 'mean'"
OF_PROMPTS = ("apo_zero", "apo_down", "sppo_hard", "nca_pair", "bco_pair", "aot", "kto", "bco")
HOW = [("mix", "expert"), ("mix", "usual"), ("cpo", "nll"), ("orpo", "nll")]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("luspo", {"level": "sequence"}, "luspo has no hyper-parameter 'level'"),
    *((name, {f"{x}_aggregation": "mean"}, f"{x}{ONE_OF}") for name, x in HOW),
    ("mix", {"expert_mask": None}, "mix needs expert_mask: pass expert_mask="),
    ("mix", {"old_log_prob": None}, "mix needs old_log_prob: pass old_log_prob="),
    ("dpo", {"f_divergence": "alpha_divergence", "f_alpha": 0.0}, "f_alpha must be greater than 0 .*, got 0.0"),
    ("dpo", {"weighting": "aligned", "sharp_log_prob": None}, "dpo needs sharp_log_prob: pass sharp_log_prob="),
    ("dpo", {"ref_log_prob": None}, "dpo needs ref_log_prob"),
    ("robust", {"label_smoothing": 0.5}, r"label_smoothing must be below 0\.5, got 0\.5"),
    *((name, {"chosen": None}, f"{name} needs chosen: pass chosen=") for name in ("kto", "bco", "aot_unpaired")),
    ("kto", {"reference_point": None}, r"kto needs reference_point: .*, \[\*B\]\."),
    ("kto", {"reference_point": torch.zeros(6, 1)}, r"reference_point has shape \(6, 1\), expected one .*, \(6,\)"),
    ("aot_unpaired", {"chosen": ALL, "match_id": None}, "as many chosen as rejected .* found 6 and 0 answers with"),
    ("aot_unpaired", {"match_id": torch.arange(6)}, "match_id 0 has 1 chosen and 0 rejected rows, expected one of"),
    # What depends on the prompt cancels in the lead, and nowhere else: other divergences need the lead alone.
    *((name, {"f_divergence": "forward_kl"}, f"{name} has no hyper-parameter 'f_divergence'") for name in OF_PROMPTS),
    # A function knows its own names alone.
    ("ppo", {"clip_range_low": 0.3}, "has no hyper-parameter 'clip_range_low': pass 'clip_low'. PolicyLoss, Adv"),
    ("ppo", {"clip_epsilon": 0.3}, "'clip_epsilon': pass 'clip_low' and 'clip_high'. PolicyLoss, Advantage and make"),
    ("ppo", {"clip_lo": 0.3}, r"has no hyper-parameter 'clip_lo'\. Did you mean 'clip_low'\? Known: clip_low, "),
]


def test_values_out_of_range_are_refused() -> None:
    for must, values, table in RANGES:
        for key, names in table.items():
            for name, value in itertools.product(names.replace("PAIRS", " ".join(PAIRS)).split(), values):
                said = refusal(name, **{key: value})
                assert re.match(f"ValueError: .*{key} must be {must},? got {value!r}", said), f"{name}: {said}"
    for name, given, message in REFUSED:
        said = refusal(name, **given)
        assert re.search(message, said), f"{given}: {said}"
        assert said.startswith("TypeError" if "has no hyper" in said else ("ValueError", "MissingInput")), said
