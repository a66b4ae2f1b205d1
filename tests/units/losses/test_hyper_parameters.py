"""Hyper-parameters of objectives: names, defaults and ranges, each against its source."""

import inspect
import itertools
import re
import typing
from typing import Any

import torch

from objective_cases import PAIRS, refusal
from project import tables
from torchrl_llm_kl import losses
from torchrl_llm_kl.losses import (
    ObjectiveArgs,
    ObjectiveName,
    TermPart,
    available_objectives,
    get_objective,
    spec_of,
)


def test_names_and_arguments_are_typed_and_in_the_specs() -> None:
    names = available_objectives()
    assert typing.get_args(ObjectiveName) == names
    specs = [spec_of(get_objective(name)) for name in names]
    assert set(ObjectiveArgs.__annotations__) == {name for spec in specs for name in spec.hyper}
    assert not ObjectiveArgs.__required_keys__
    for spec in specs:
        parameters = inspect.signature(get_objective(spec.name)).parameters
        assert {key: parameters[key].default for key in spec.hyper} == spec.defaults, spec.name


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


def test_a_name_of_another_library_is_refused_with_ours() -> None:
    """The message suggests this package's name."""
    for name in ("ppo", "dapo", "dr_grpo", "gspo", "luspo", "gmpo", "cispo", "mix", "mix_chord", "clip_cov"):
        for theirs in ("clip_range", "clip_range_low", "clip_ratio_low", "clip_epsilon"):
            said = refusal(name, **{theirs: 0.3})
            assert re.match(rf"TypeError: {name} has no hyper-parameter '{theirs}'\. .*'clip_low'", said), said
    for name, table in NAMES.items():
        for theirs, own in table.items():
            said = refusal(name, **{theirs: 0.3})
            assert said.startswith(f"TypeError: {name} has no hyper-parameter '{theirs}'."), said
            assert f"'{own}'" in said, said


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
    ("robust", {"label_smoothing": 0.5}, "label_smoothing must be at least 0 and less than 0.5, got 0.5"),
    *((name, {"chosen": None}, f"{name} needs chosen: pass chosen=") for name in ("kto", "bco", "aot_unpaired")),
    ("kto", {"reference_point": None}, r"kto needs reference_point: .*, \[\*B\]\."),
    ("kto", {"reference_point": torch.zeros(6, 1)}, r"reference_point has shape \(6, 1\), expected \[\*B\] for a"),
    ("aot_unpaired", {"chosen": ALL, "match_id": None}, "as many chosen as rejected answers, got 6 and 0"),
    ("aot_unpaired", {"match_id": torch.arange(6)}, "match_id 0 has 1 chosen and 0 rejected rows, expected one of"),
    # What depends on the prompt cancels in the lead, and nowhere else: other divergences need the lead alone.
    *((name, {"f_divergence": "forward_kl"}, f"{name} has no hyper-parameter 'f_divergence'") for name in OF_PROMPTS),
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
