"""The values of each preset. Whoever changes a default must change it here too."""

import dataclasses
from typing import Any, get_args

import pytest

from learned import LEARNED
from refused import refused
from torchrl_llm_kl import algorithms
from torchrl_llm_kl.advantages import available_advantages
from torchrl_llm_kl.algorithms import ALGORITHMS, SCHEMAS, Algorithm, AlgorithmOverrides, algorithm_table
from torchrl_llm_kl.algorithms._schema import SchemaName
from torchrl_llm_kl.losses import available_objectives

#: name, objective, advantage, KL in the loss, answers to each prompt, schema, flags: C critic, R reference, X rollouts beside
#: experts, T advantages in the trainer, B rows may be balanced. The flags are Trinity-RFT 0.6.0's, from ``algorithm.py``,
#: which has no dr_grpo, fipo, ctpo, ctpo_kl, luspo, dro and none of verl's.
TABLE = """
ppo                           ppo        gae                           k2    1   experience  CRTB
grpo                          ppo        grpo                          k2    2   experience  RB
dr_grpo                       dr_grpo    dr_grpo                       none  8   experience  B
dapo                          dapo       grpo                          none  16  experience  B
vapo                          vapo       gae                           none  1   experience  CTB
maxrl                         ppo        maxrl                         none  8   experience  B
rae                           ppo        rae                           none  1   experience  TB
echo                          echo       grpo                          none  8   experience  B
a2po                          a2po       remax                         none  1   experience  RB
tpo                           tpo        -                             none  3   sft         -
iw_opd                        gpg        iw_opd                        none  1   distill     TB
rloo                          ppo        rloo                          k2    2   experience  RTB
reinforce_plus_plus           ppo        reinforce_plus_plus           k2    2   experience  RTB
topr                          topr       reinforce                     k2    2   experience  RB
cispo                         cispo      grpo                          k2    2   experience  RB
gspo                          gspo       grpo                          k2    2   experience  RB
fipo                          fipo       grpo                          none  16  experience  B
ctpo                          ctpo       grpo                          none  8   experience  B
ctpo_kl                       ctpo       rloo                          exact 8   experience  RB
luspo                         luspo      grpo                          none  8   experience  B
dro                           dro        opmd                          none  8   experience  B
sapo                          sapo       grpo                          k2    2   experience  RB
opmd                          opmd       opmd                          k2    2   experience  RB
asymre                        opmd       asymre                        none  2   experience  B
sppo                          sppo       opmd                          none  2   experience  B
rec                           rec        rec                           k2    2   experience  RB
opo                           gpg        opo                           none  8   experience  B
reinforce_plus_plus_baseline  ppo        reinforce_plus_plus_baseline  k2    2   experience  RTB
optimal_token_baseline        ppo        optimal_token_baseline        none  4   experience  TB
pass_at_k                     ppo        pass_at_k                     k2    8   experience  RB
gdpo                          ppo        gdpo                          k2    8   rewards     RTB
clip_b                        ppo        clip_b                        none  16  experience  TB
clip_v                        ppo        clip_v                        none  8   experience  TB
sft                           sft        -                             none  1   sft         B
raft                          sft        -                             none  8   experience  B
dpo                           dpo        -                             none  2   dpo         R
simpo                         simpo      -                             none  2   dpo         -
cpo                           cpo        -                             none  2   dpo         -
orpo                          orpo       -                             none  2   dpo         -
kto                           kto        -                             none  1   unpaired    RB
bco                           bco        -                             none  1   unpaired    RB
mix                           mix        grpo                          k2    8   mix         RXB
mix_chord                     mix_chord  grpo                          k2    8   mix         RXB
multi_step_grpo               ppo        step_wise_grpo                k2    8   trajectory  RB
gigpo                         ppo        gigpo                         k2    8   trajectory  RB
on_policy_distill             ppo        on_policy_distill             none  8   distill     TB
jsd                           ppo        jsd                           none  8   distill     TB
gkd                           distill    -                             none  1   distill     B
"""
PRESETS = {name: rest for name, *rest in (line.split() for line in TABLE.strip().splitlines())}
FLAGS = {"C": "use_critic", "R": "use_reference", "X": "use_rollout"}
FLAGS |= {"T": "compute_advantage_in_trainer", "B": "can_balance_batch"}
#: All other fields that differ from the default.
OTHERS: dict[str, dict[str, Any]] = {
    "ppo": {"advantage_args": {"whiten": True}},
    "vapo": {"advantage_args": {"whiten": True, "lam_alpha": 0.05}},
    "ctpo_kl": {"kl_level": "sequence"},
    "echo": {"leave_out_experts": True},
    "dro": {"objective_args": {"level": "sequence"}, "aggregation": "seq-mean-token-sum"},
    "raft": {"keep_best": True},
    "dpo": {"aggregation": "seq-mean-token-sum"},
    "mix": {"leave_out_experts": True},
    "mix_chord": {"leave_out_experts": True},
    "gigpo": {"aggregation": "token-mean"},
}
DEFAULTS = {"objective_args": {}, "advantage_args": {}, "aggregation": None, "max_len": None, "top_k": 0}
DEFAULTS |= {"expert_data_ratio": 0.5, "kl_loss_coeff": 1e-3, "kl_reward": "none", "kl_reward_coeff": 1e-3}
DEFAULTS |= {"kl_level": "token", "entropy_coeff": 0.0, "leave_out_experts": False, "keep_best": False}


@pytest.mark.parametrize("name", PRESETS)
def test_every_field(name: str) -> None:
    objective, advantage, kl_loss, repeat_times, schema, flags = PRESETS[name]
    expected = {"name": name, "objective": objective, "advantage": None if advantage == "-" else advantage}
    expected |= {"kl_loss": kl_loss, "repeat_times": int(repeat_times), "schema": schema}
    expected |= {field: letter in flags for letter, field in FLAGS.items()} | DEFAULTS | OTHERS.get(name, {})
    preset = ALGORITHMS[name]
    assert {field.name for field in dataclasses.fields(Algorithm)} - {"sources"} <= set(expected)
    assert {key: getattr(preset, key) for key in expected} == expected
    assert preset.objective in available_objectives()
    assert preset.advantage is None or preset.advantage in available_advantages()
    assert preset.schema in SCHEMAS
    assert preset.sources
    assert set(preset.sources) <= {field.name for field in dataclasses.fields(Algorithm)}


def test_flags_follow_from_the_other_fields() -> None:
    assert Algorithm("mine", "ppo", kl_loss="k2").use_reference
    assert Algorithm("mine", "ppo", kl_reward="k1").use_reference
    assert Algorithm("mine", "dpo").use_reference  # because the objective reads ref_log_prob
    assert not Algorithm("mine", "ppo", advantage="grpo").use_reference
    assert Algorithm("mine", "ppo", advantage="grpo", use_reference=True).use_reference  # only to log the KL
    assert Algorithm("mine", "ppo", advantage="gae").use_critic
    assert not Algorithm("mine", "ppo", advantage="rloo").use_critic
    facts = {name: (preset.use_rollout, preset.on_policy) for name, preset in ALGORITHMS.items()}
    assert (facts["mix"], facts["grpo"]) == ((True, True), (False, True))
    assert {facts[name] for name in ("dpo", "sft", "simpo", "kto")} == {(False, False)}


def test_names_fields_and_hyper_parameters_are_typed_and_presets_are_read_only() -> None:
    assert set(ALGORITHMS) == set(PRESETS) == set(LEARNED)
    assert set(get_args(algorithms.AlgorithmName)) == set(ALGORITHMS)
    assert set(get_args(SchemaName)) == set(SCHEMAS)
    of_loop = {"repeat_times", "expert_data_ratio", "compute_advantage_in_trainer"}
    known = {field.name for field in dataclasses.fields(Algorithm)} - {"name", "sources"} - of_loop
    assert set(AlgorithmOverrides.__annotations__) == known
    with pytest.raises(TypeError):
        ALGORITHMS["mine"] = ALGORITHMS["ppo"]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        ALGORITHMS["ppo"].objective = "gspo"  # type: ignore[misc]


test_contradictory_presets = refused(
    lambda settings: Algorithm("mine", "ppo", **settings),
    ({"top_k": -1}, "top_k must be at least 0, got -1"),
    ({"kl_loss": "k2", "use_reference": False}, "use_reference=False contradicts its KL"),
    ({"kl_level": "sequence"}, "kl_level='sequence' has no effect without kl_loss"),
)


def test_tables() -> None:
    table = algorithm_table(LEARNED)
    rows = table.splitlines()
    assert len(rows) == 2 + len(ALGORITHMS)
    assert len({row.count("|") for row in rows}) == 1
    assert rows[0].endswith("| learning test |")
    assert "learning test" not in algorithm_table()
    for part in (
        "| `sft` | `sft` | — | none | `token-mean` | 1 | `sft` |",
        "| `ppo` | `ppo` | `gae(whiten=True)` | loss: `k2`, 0.001 | `token-mean` | 1 | `experience` |",
        "| `kto` | `kto` | — | in the objective | `seq-mean-token-sum` | 1 | `unpaired` |",
        "| `simpo` | `simpo` | — | none | `seq-mean-token-sum` | 2 | `dpo` |",
        *LEARNED.values(),
    ):
        assert part in table
