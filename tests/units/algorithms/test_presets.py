"""The values of each preset: a change of a default is a change here; and names that mean something else elsewhere.

A plain name that another library gives to another setting is refused, with both meanings; a prefix says which. A name that
another library has too is in ``SAME`` or ``OTHER``; a new one fails a test here until somebody has looked at it.
"""

import dataclasses
import inspect
from typing import Any, get_args

import pytest
import torchrl.envs.llm.transforms
import torchrl.objectives.llm
from test_prepare import made
from torchrl.objectives.value import GAE

from learned import LEARNED
from project import script
from refused import refused
from torchrl_llm_kl import algorithms
from torchrl_llm_kl._foreign import TRL
from torchrl_llm_kl.advantages import AdvantageArgs, AdvantageName, advantage_spec, available_advantages, get_advantage
from torchrl_llm_kl.algorithms import ALGORITHMS, SCHEMAS, Algorithm, AlgorithmOverrides, algorithm_table
from torchrl_llm_kl.algorithms._algorithm import AMBIGUOUS
from torchrl_llm_kl.algorithms._schema import SchemaName
from torchrl_llm_kl.losses import ObjectiveArgs, available_objectives, get_objective, spec_of
from toy_tasks import chain

#: name, objective, advantage, KL in the loss, answers to each prompt, schema, flags: C critic, R reference, X rollouts beside
#: experts, T advantages in the trainer, B rows may be balanced. The flags are Trinity-RFT 0.6.0's, from ``algorithm.py``,
#: which has no dr_grpo, luspo, dro and none of verl's.
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
#: Whatever else is not the default.
OTHERS: dict[str, dict[str, Any]] = {
    "ppo": {"advantage_args": {"whiten": True}},
    "vapo": {"advantage_args": {"whiten": True}},
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
DEFAULTS |= {"entropy_coeff": 0.0, "leave_out_experts": False, "keep_best": False}


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
    assert {"kl_loss", "repeat_times"} & set(preset.changed) <= set(preset.sources)


def test_flags_follow_from_the_other_fields() -> None:
    assert ALGORITHMS["asymre"].changed == {"advantage": "asymre", "repeat_times": 2}
    assert Algorithm("mine", "ppo").changed == {}
    assert Algorithm("mine", "ppo", kl_loss="k2").use_reference
    assert Algorithm("mine", "ppo", kl_reward="k1").use_reference
    assert Algorithm("mine", "dpo").use_reference  # the objective reads ref_log_prob
    assert not Algorithm("mine", "ppo", advantage="grpo").use_reference
    assert Algorithm("mine", "ppo", advantage="grpo", use_reference=True).use_reference  # to log the KL alone
    assert Algorithm("mine", "ppo", advantage="gae").use_critic
    assert not Algorithm("mine", "ppo", advantage="rloo").use_critic
    facts = {name: (preset.use_rollout, preset.on_policy) for name, preset in ALGORITHMS.items()}
    assert (facts["mix"], facts["grpo"]) == ((True, True), (False, True))
    assert {facts[name] for name in ("dpo", "sft", "simpo", "kto")} == {(False, False)}


def test_names_fields_and_hyper_parameters_are_typed_and_presets_are_read_only() -> None:
    assert set(ALGORITHMS) == set(PRESETS) == set(LEARNED)
    assert set(get_args(algorithms.AlgorithmName)) == set(ALGORITHMS)
    assert set(get_args(SchemaName)) == set(SCHEMAS)
    known = {name for each in (ObjectiveArgs, AdvantageArgs) for name in each.__annotations__}
    of_loop = {"repeat_times", "expert_data_ratio", "compute_advantage_in_trainer"}
    known |= {field.name for field in dataclasses.fields(Algorithm)} - {"name", "sources"} - of_loop
    assert known <= set(AlgorithmOverrides.__annotations__)
    assert of_loop.isdisjoint(AlgorithmOverrides.__annotations__)
    with pytest.raises(TypeError):
        ALGORITHMS["mine"] = ALGORITHMS["ppo"]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        ALGORITHMS["ppo"].objective = "gspo"  # type: ignore[misc]


test_contradictory_presets = refused(
    lambda settings: Algorithm("mine", "ppo", **settings),
    ({"top_k": -1}, "top_k must be a whole number of at least 0, got -1"),
    ({"top_k": 2.0}, "top_k must be a whole number of at least 0, got 2.0"),
    ({"top_k": 8}, r"top_k=8 has no effect on objective='ppo': choose 'distill', or pass top_k= to make_algorithm"),
    ({"repeat_times": 0}, "repeat_times must be at least 1, got 0"),
    ({"expert_data_ratio": 1.5}, "expert_data_ratio must be at least 0 and at most 1, got 1.5"),
    ({"kl_loss": "k2", "use_reference": False}, r"mine compares .*kl_loss='k2', .*but use_reference=False"),
    ({"kl_reward": "k1", "use_reference": False}, r"mine compares .*kl_reward='k1', .*but use_reference=False"),
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
    page = script("docs/build_pages.py")
    assert "| `ppo` | yes | yes |  | yes | yes |" in page.flag_table()
    assert "| `dpo` |  | yes |  |  |  |" in page.flag_table()
    assert "| `sft` | `objective` |" in page.source_table()


TASK = chain()
#: Names of hyper-parameters that torchrl, TRL, verl or Trinity-RFT have too, for the same thing. ``gamma`` and ``lam`` are
#: discount and lambda everywhere, per step of the advantage: token or turn. TRL's ``lmbda``, of distillation, is refused there.
SAME = {
    "advantage": "gamma iw_opd_gamma lam lmbda reward_weights",
    "objective": "alpha beta beta2 clip_epsilon cpo_alpha desirable_weight discopop_tau epsilon epsilon_high f_divergence_type"
    " label_smoothing ld_alpha loss_weights simpo_gamma tpo_alpha tpo_l_gamma undesirable_weight",
}
#: Names that mean something else in one of them: all read ``temp`` as the sampler's, DRO's paper has another ``tau``.
OTHER = {"advantage": "beta epsilon kl_coef tau", "objective": "coeff temp"}
SAME_KEYS, OTHER_KEYS = ({(part, name) for part in x for name in x[part].split()} for x in (SAME, OTHER))


def accepted(part: str) -> set[str]:
    """The plain names of every hyper-parameter of a part, under its own name or another library's."""
    if part == "advantage":
        specs = [advantage_spec(get_advantage(name)) for name in get_args(AdvantageName)]
    else:
        specs = [spec_of(get_objective(name)) for name in available_objectives()]  # type: ignore[misc]
    return {name for spec in specs for name in (*spec.hyper, *spec.aliases)}


def torchrl_settings() -> set[str]:
    """Arguments of torchrl's LLM losses and transforms and of its GAE."""
    modules = (torchrl.objectives.llm, torchrl.envs.llm.transforms)
    classes = [x for module in modules for x in vars(module).values() if inspect.isclass(x)]
    return {name for x in [GAE, *classes] for name in inspect.signature(x.__init__).parameters}


def test_names_that_another_library_has_too_were_looked_at() -> None:
    for library, theirs, some, same in (
        ("torchrl", torchrl_settings(), {"coeff", "clip_epsilon", "gamma", "lmbda"}, "generator"),
        # TRL's names of these objectives' own hyper-parameters, translated by us.
        ("TRL", {x for rows in TRL.values() for x in rows}, {"epsilon", "beta"}, ("vespo_", "sapo_temperature_")),
    ):
        assert some <= theirs
        for part in ("objective", "advantage"):
            looked_at = {name for own, name in SAME_KEYS | OTHER_KEYS if own == part}
            shared = {name for name in (accepted(part) & theirs) - looked_at if not name.startswith(same)}
            assert not shared, f"{library} has {shared} too: the same setting? Add it to SAME or OTHER."


def test_the_refused_names_are_those_with_another_meaning_and_prefixed_names_have_types() -> None:
    assert all(name in accepted(part) for part, name in SAME_KEYS | OTHER_KEYS)
    assert set(AMBIGUOUS) == OTHER_KEYS
    both = accepted("objective") & accepted("advantage")
    expected = {f"{part}_{name}" for name in both for part in ("objective", "advantage")}
    expected |= {f"{part}_{name}" for part, name in AMBIGUOUS}
    own = {"objective": "beta coeff epsilon mu tau temp", "advantage": "beta epsilon kl_coef mu tau"}
    assert expected == {f"{part}_{name}" for part, names in own.items() for name in names.split()}
    assert expected <= set(AlgorithmOverrides.__annotations__)


#: Objective or advantage and its hyper-parameter -> the setting without which it has no effect.
DECIDED_BY: dict[Any, dict[str, Any]] = {
    ("opmd", "tau"): {"opmd_baseline": "logavgexp"},
    ("gigpo", "epsilon"): {"fnorm": "std"},
}
DECIDED_BY |= {("rec", "temp"): {"weight": "advantage"}}
DECIDED_BY |= {(name, "epsilon"): {"std_normalize": True} for name in ("rec", "pass_at_k")}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_preset_accepts_an_ambiguous_name(name: str) -> None:
    """Every plain name of every preset: refused, or set where it belongs."""
    preset = ALGORITHMS[name]
    objective = set(spec_of(get_objective(preset.objective)).hyper)  # type: ignore[union-attr]
    advantage = set(advantage_spec(get_advantage(preset.advantage)).hyper) if preset.advantage else set()
    for hyper in sorted(objective | advantage):
        owners = {part for part, names in (("objective", objective), ("advantage", advantage)) if hyper in names}
        if len(owners) == 1 and not any((part, hyper) in AMBIGUOUS for part in owners):
            continue
        with pytest.raises(TypeError, match=rf"'{hyper}' (has two meanings|is a hyper-parameter of the objective)"):
            made(name, TASK.policy(), TASK.policy(), **{hyper: 0.37})
        for part in owners:
            more = DECIDED_BY.get((getattr(preset, part), hyper), {})
            parts = made(name, TASK.policy(), TASK.policy(), **{f"{part}_{hyper}": 0.37}, **more)
            assert dict(getattr(parts.algorithm, f"{part}_args"))[hyper] == 0.37


test_both_meanings_are_named = refused(
    lambda name, settings: made(name, TASK.policy(), TASK.policy(), **settings),
    ("grpo", {"epsilon": 0.2}, r"to the standard deviation of the advantage grpo pass advantage_epsilon=\.+; "),
    ("grpo", {"epsilon": 0.2}, r"for the clip range of the ratio \(TRL\) pass clip_low= and clip_high="),
    ("jsd", {"beta": 0.1}, r"weight in the mixture .* advantage_beta=.* KL to the reference \(TRL\) pass kl_l"),
    ("on_policy_distill", {"kl_coef": 0.1}, r"advantage_kl_coef=.*weight of a KL penalty \(verl, Trinity-RFT\)"),
    ("rec", {"temp": 0.7}, r"exp\(A / temp\) .* pass objective_temp=.*sampler's temperature pass options="),
    ("grpo", {"objective": "kl_cov", "coeff": 0.1}, r"pass objective_coeff=.*pass kl_reward_coeff="),
    ("dro", {"tau": 5.0}, r"soft-max baseline of the advantage opmd pass advantage_tau=.*\(DRO\) pass beta="),
    error=TypeError,
)


def test_each_meaning_can_be_set() -> None:
    both = {"advantage": "grpo", "objective_epsilon": 0.4, "advantage_epsilon": 0.01}
    for name, settings, loss, advantage in (
        ("grpo", {"advantage_epsilon": 0.3, "clip_low": 0.1}, {"clip_low": 0.1}, {"epsilon": 0.3}),
        ("sppo", {"epsilon": 0.4}, {"epsilon": 0.4}, {}),  # TRL's meaning and Trinity's: nothing to confuse
        ("sppo", both, {"epsilon": 0.4}, {"epsilon": 0.01}),
    ):
        parts = made(name, TASK.policy(), TASK.policy() if name == "grpo" else None, **settings)
        assert parts.advantage.hyper == advantage
        assert {key: round(float(getattr(parts.loss, key)), 6) for key in loss} == loss
    # A prefix of the wrong part is unknown.
    with pytest.raises(TypeError, match="grpo has no setting 'objective_epsilon'"):
        made("grpo", TASK.policy(), TASK.policy(), objective_epsilon=0.1)
    threshold = algorithms.make_algorithm("topr", TASK.policy(), reference=TASK.policy(), advantage_threshold=0.5).loss
    assert float(threshold.advantage_threshold) == 0.5  # the objective's own name, not a prefix
