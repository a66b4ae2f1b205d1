"""The values of each preset: a change of a default is a change here."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_type_hints

import pytest

from learned import LEARNED
from torchrl_llm_kl.advantages import AdvantageArgs, available_advantages
from torchrl_llm_kl.algorithms import (
    ALGORITHMS,
    SCHEMAS,
    Algorithm,
    AlgorithmName,
    AlgorithmOverrides,
    UnknownAlgorithmError,
    algorithm_table,
    flag_table,
    get_algorithm,
    source_table,
)
from torchrl_llm_kl.algorithms._schema import SchemaName
from torchrl_llm_kl.losses import ObjectiveArgs, available_objectives

#: Critic, reference, rollouts beside experts, advantages in the trainer, rows may be balanced: Trinity-RFT 0.6.0's
#: ``algorithm.py``, which has no dr_grpo, luspo, dro and none of verl's.
FLAGS: dict[str, tuple[int, int, int, int, int]] = {
    "sft": (0, 0, 0, 0, 1),
    "ppo": (1, 1, 0, 1, 1),
    "grpo": (0, 1, 0, 0, 1),
    "reinforce_plus_plus": (0, 1, 0, 1, 1),
    "rloo": (0, 1, 0, 1, 1),
    "opmd": (0, 1, 0, 0, 1),
    "asymre": (0, 0, 0, 0, 1),
    "dpo": (0, 1, 0, 0, 0),
    "simpo": (0, 0, 0, 0, 0),
    "cpo": (0, 0, 0, 0, 0),
    "orpo": (0, 0, 0, 0, 0),
    "kto": (0, 1, 0, 0, 1),
    "bco": (0, 1, 0, 0, 1),
    "topr": (0, 1, 0, 0, 1),
    "cispo": (0, 1, 0, 0, 1),
    "gspo": (0, 1, 0, 0, 1),
    "luspo": (0, 0, 0, 0, 1),
    "dro": (0, 0, 0, 0, 1),
    "sapo": (0, 1, 0, 0, 1),
    "mix": (0, 1, 1, 0, 1),
    "mix_chord": (0, 1, 1, 0, 1),
    "raft": (0, 0, 0, 0, 1),
    "sppo": (0, 0, 0, 0, 1),
    "rec": (0, 1, 0, 0, 1),
    "multi_step_grpo": (0, 1, 0, 0, 1),
    "on_policy_distill": (0, 0, 0, 1, 1),
    "dapo": (0, 0, 0, 0, 1),
    "dr_grpo": (0, 0, 0, 0, 1),
    "gigpo": (0, 1, 0, 0, 1),
    "opo": (0, 0, 0, 0, 1),
    "reinforce_plus_plus_baseline": (0, 1, 0, 1, 1),
    "optimal_token_baseline": (0, 0, 0, 1, 1),
    "pass_at_k": (0, 1, 0, 0, 1),
    "gdpo": (0, 1, 0, 1, 1),
    "clip_b": (0, 0, 0, 1, 1),
    "clip_v": (0, 0, 0, 1, 1),
    "jsd": (0, 0, 0, 1, 1),
    "gkd": (0, 0, 0, 0, 1),
}
FLAG_NAMES = ("use_critic", "use_reference", "use_rollout", "compute_advantage_in_trainer", "can_balance_batch")

#: objective, advantage, KL in the loss, answers to each prompt, schema; and whatever else is not the default.
PRESETS: dict[str, tuple[str, str | None, str, int, str, dict[str, Any]]] = {
    "ppo": ("ppo", "gae", "k2", 1, "experience", {"advantage_args": {"whiten": True}}),
    "grpo": ("ppo", "grpo", "k2", 2, "experience", {}),
    "dr_grpo": ("dr_grpo", "dr_grpo", "none", 8, "experience", {}),
    "dapo": ("dapo", "grpo", "none", 16, "experience", {}),
    "rloo": ("ppo", "rloo", "k2", 2, "experience", {}),
    "reinforce_plus_plus": ("ppo", "reinforce_plus_plus", "k2", 2, "experience", {}),
    "topr": ("topr", "reinforce", "k2", 2, "experience", {}),
    "cispo": ("cispo", "grpo", "k2", 2, "experience", {}),
    "gspo": ("gspo", "grpo", "k2", 2, "experience", {}),
    "luspo": ("luspo", "grpo", "none", 8, "experience", {}),
    "dro": (
        "dro",
        "opmd",
        "none",
        8,
        "experience",
        {"objective_args": {"level": "sequence"}, "aggregation": "seq-mean-token-sum"},
    ),
    "sapo": ("sapo", "grpo", "k2", 2, "experience", {}),
    "opmd": ("opmd", "opmd", "k2", 2, "experience", {}),
    "asymre": ("opmd", "asymre", "none", 2, "experience", {}),
    "sppo": ("sppo", "opmd", "none", 2, "experience", {}),
    "rec": ("rec", "rec", "k2", 2, "experience", {}),
    "opo": ("gpg", "opo", "none", 8, "experience", {}),
    "reinforce_plus_plus_baseline": ("ppo", "reinforce_plus_plus_baseline", "k2", 2, "experience", {}),
    "optimal_token_baseline": ("ppo", "optimal_token_baseline", "none", 4, "experience", {}),
    "pass_at_k": ("ppo", "pass_at_k", "k2", 8, "experience", {}),
    "gdpo": ("ppo", "gdpo", "k2", 8, "rewards", {}),
    "clip_b": ("ppo", "clip_b", "none", 16, "experience", {}),
    "clip_v": ("ppo", "clip_v", "none", 8, "experience", {}),
    "sft": ("sft", None, "none", 1, "sft", {}),
    "raft": ("sft", None, "none", 8, "experience", {"keep_best": True}),
    "dpo": ("dpo", None, "none", 2, "dpo", {"aggregation": "seq-mean-token-sum"}),
    "simpo": ("simpo", None, "none", 2, "dpo", {}),
    "cpo": ("cpo", None, "none", 2, "dpo", {}),
    "orpo": ("orpo", None, "none", 2, "dpo", {}),
    "kto": ("kto", None, "none", 1, "unpaired", {}),
    "bco": ("bco", None, "none", 1, "unpaired", {}),
    "mix": ("mix", "grpo", "k2", 8, "mix", {"leave_out_experts": True}),
    "mix_chord": ("mix_chord", "grpo", "k2", 8, "mix", {"leave_out_experts": True}),
    "multi_step_grpo": ("ppo", "step_wise_grpo", "k2", 8, "trajectory", {}),
    "gigpo": ("ppo", "gigpo", "k2", 8, "trajectory", {"aggregation": "token-mean"}),
    "on_policy_distill": ("ppo", "on_policy_distill", "none", 8, "distill", {}),
    "jsd": ("ppo", "jsd", "none", 8, "distill", {}),
    "gkd": ("distill", None, "none", 1, "distill", {}),
}
DEFAULTS = {
    "objective_args": {},
    "advantage_args": {},
    "aggregation": None,
    "kl_loss_coeff": 1e-3,
    "kl_reward": "none",
    "kl_reward_coeff": 1e-3,
    "entropy_coeff": 0.0,
    "leave_out_experts": False,
    "keep_best": False,
    "top_k": 0,
    "expert_data_ratio": 0.5,
}


def test_there_are_no_others() -> None:
    assert set(ALGORITHMS) == set(FLAGS) == set(PRESETS) == set(LEARNED)


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name: str) -> None:
    assert tuple(int(getattr(ALGORITHMS[name], flag)) for flag in FLAG_NAMES) == FLAGS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_every_other_field(name: str) -> None:
    objective, advantage, kl_loss, repeat_times, schema, others = PRESETS[name]
    expected = {
        "name": name,
        "objective": objective,
        "advantage": advantage,
        "kl_loss": kl_loss,
        "repeat_times": repeat_times,
        "schema": schema,
        **DEFAULTS,
        **others,
    }
    found = dataclasses.asdict(ALGORITHMS[name])
    assert {key: value for key, value in found.items() if key not in (*FLAG_NAMES, "sources")} == expected


@pytest.mark.parametrize("name", PRESETS)
def test_names_are_registered_and_values_have_sources(name: str) -> None:
    preset = ALGORITHMS[name]
    assert preset.objective in available_objectives()
    assert preset.advantage is None or preset.advantage in available_advantages()
    assert preset.schema in SCHEMAS
    known = {field.name for field in dataclasses.fields(Algorithm)}
    assert preset.sources
    assert set(preset.sources) <= known
    assert {"kl_loss", "repeat_times"} & set(preset.changed) <= set(preset.sources)


def test_changed_lists_the_fields_that_are_not_the_default() -> None:
    assert ALGORITHMS["asymre"].changed == {"advantage": "asymre", "repeat_times": 2}
    assert Algorithm("mine", "ppo").changed == {}


def test_flags_follow_from_the_other_fields() -> None:
    assert Algorithm("mine", "ppo", kl_loss="k2").use_reference
    assert Algorithm("mine", "ppo", kl_reward="k1").use_reference
    assert Algorithm("mine", "dpo").use_reference  # the objective reads ref_log_prob
    assert not Algorithm("mine", "ppo", advantage="grpo").use_reference
    assert Algorithm("mine", "ppo", advantage="grpo", use_reference=True).use_reference  # to log the KL alone
    assert Algorithm("mine", "ppo", advantage="gae").use_critic
    assert not Algorithm("mine", "ppo", advantage="rloo").use_critic
    facts = {
        name: (a.sample_strategy, a.use_rollout, a.can_balance_batch, a.on_policy) for name, a in ALGORITHMS.items()
    }
    assert facts["mix"] == ("mix", True, True, True)
    assert facts["dpo"] == ("default", False, False, False)
    assert facts["sft"] == ("default", False, True, False)
    assert facts["simpo"] == ("default", False, False, False)
    assert facts["kto"] == ("default", False, True, False)
    assert facts["grpo"] == ("default", False, True, True)


def test_every_name_is_in_its_literal() -> None:
    assert set(get_args(AlgorithmName)) == set(ALGORITHMS)
    assert set(get_args(SchemaName)) == set(SCHEMAS)


def test_overrides_name_every_field_and_every_hyper_parameter() -> None:
    known = (
        set(AlgorithmOverrides.__annotations__)
        | set(ObjectiveArgs.__annotations__)
        | set(AdvantageArgs.__annotations__)
    )
    assert {field.name for field in dataclasses.fields(Algorithm)} - {"name", "sources"} <= known
    assert set(get_type_hints(AlgorithmOverrides)) == known


def test_presets_are_read_only() -> None:
    with pytest.raises(TypeError):
        ALGORITHMS["mine"] = ALGORITHMS["ppo"]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        ALGORITHMS["ppo"].objective = "gspo"  # type: ignore[misc]


def test_unknown_names() -> None:
    with pytest.raises(
        UnknownAlgorithmError, match=r"unknown algorithm 'grop'\. Did you mean 'grpo'\? Known: ppo, grpo, "
    ):
        get_algorithm("grop")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": -1}, "top_k must be a whole number of at least 0, got -1"),
        ({"top_k": 2.0}, "top_k must be a whole number of at least 0, got 2.0"),
        ({"top_k": 8}, r"top_k=8 has no effect on objective='ppo': choose 'distill', or pass top_k= to make_algorithm"),
        ({"repeat_times": 0}, "repeat_times must be at least 1, got 0"),
        ({"expert_data_ratio": 1.5}, "expert_data_ratio must be at least 0 and at most 1, got 1.5"),
        ({"kl_loss": "k2", "use_reference": False}, r"mine compares .*kl_loss='k2', .*but use_reference=False"),
        ({"kl_reward": "k1", "use_reference": False}, r"mine compares .*kl_reward='k1', .*but use_reference=False"),
    ],
)
def test_contradictory_presets(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Algorithm("mine", "ppo", **settings)


def test_tables() -> None:
    table, flags = algorithm_table(LEARNED), flag_table()
    rows = table.splitlines()
    assert len(rows) == 2 + len(ALGORITHMS)
    assert len({row.count("|") for row in rows}) == 1
    assert rows[0].endswith("| learning test |")
    assert "| `sft` | `sft` | — | none | `token-mean` | 1 | `sft` |" in table
    assert "| `ppo` | `ppo` | `gae(whiten=True)` | loss: `k2`, 0.001 | `token-mean` | 1 | `experience` |" in table
    assert all(phrase in table for phrase in LEARNED.values())
    assert "learning test" not in algorithm_table()
    assert "| `ppo` | yes | yes |  | yes | yes |" in flags
    assert "| `dpo` |  | yes |  |  |  |" in flags
    assert "| `kto` | `kto` | — | in the objective | `seq-mean-token-sum` | 1 | `unpaired` |" in table
    assert "| `simpo` | `simpo` | — | none | `seq-mean-token-sum` | 2 | `dpo` |" in table
    assert "| `sft` | `objective` |" in source_table()
