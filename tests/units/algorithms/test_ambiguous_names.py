"""A plain name that another library gives to another setting is refused, with both meanings; a prefix says which.

The hyper-parameters of all objectives and advantages are enumerated and compared with the settings of torchrl, TRL, verl and
Trinity-RFT. A name that one of them has too is in ``SHARED``; a new one fails a test here until somebody has looked at it.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torchrl.envs.llm.transforms
import torchrl.objectives.llm
from test_forwards import made
from torchrl.objectives.value import GAE

from torchrl_llm_kl.advantages import AdvantageName, advantage_spec, get_advantage
from torchrl_llm_kl.algorithms import ALGORITHMS, AlgorithmOverrides, make_algorithm
from torchrl_llm_kl.algorithms._algorithm import AMBIGUOUS
from torchrl_llm_kl.losses import available_objectives, get_objective, spec_of
from toy_tasks import chain

TASK = chain()
SAME, OTHER = True, False

#: (part, its hyper-parameter) -> the libraries that have a setting of this name; whether it is the same thing in all of them.
#: ``gamma`` and ``lam`` are discount and lambda everywhere, per step of the advantage: token or turn.
SHARED: dict[tuple[str, str], tuple[str, bool]] = {
    ("advantage", "beta"): ("trl, trinity", OTHER),
    ("advantage", "epsilon"): ("trl, verl, trinity", OTHER),
    ("advantage", "gamma"): ("torchrl, verl, trinity", SAME),
    ("advantage", "kl_coef"): ("verl, trinity", OTHER),
    ("advantage", "lam"): ("verl, trinity", SAME),
    ("advantage", "tau"): ("trinity", OTHER),  # and of DRO's paper
    ("advantage", "reward_weights"): ("trl", SAME),
    ("advantage", "lmbda"): ("torchrl, trl", SAME),  # TRL's, of distillation, is refused there: no such setting
    ("objective", "beta"): ("trl, trinity", SAME),  # the DPO family
    ("objective", "clip_epsilon"): ("torchrl", SAME),
    ("objective", "coeff"): ("torchrl", OTHER),
    ("objective", "epsilon"): ("trl, trinity", SAME),  # sppo: a clip range of the ratio in all
    ("objective", "epsilon_high"): ("trl, trinity", SAME),
    ("objective", "label_smoothing"): ("trl, trinity", SAME),
    **{
        ("objective", name): ("trl", SAME)  # of the preference losses
        for name in ("cpo_alpha", "desirable_weight", "discopop_tau", "f_divergence_type", "ld_alpha", "simpo_gamma")
    },
    ("objective", "undesirable_weight"): ("trl", SAME),
    ("objective", "temp"): ("trinity", OTHER),  # and read by everyone as the sampler's
}


def accepted(part: str) -> set[str]:
    """The plain names of every hyper-parameter of a part, under its own name or another library's."""
    if part == "advantage":
        specs = [advantage_spec(get_advantage(name)) for name in get_args(AdvantageName)]
    else:
        specs = [spec_of(get_objective(name)) for name in available_objectives()]  # type: ignore[misc]
    return {name for spec in specs for name in (*spec.hyperparameters.names, *spec.aliases)}


def torchrl_settings() -> set[str]:
    """Arguments of torchrl's LLM losses and transforms and of its GAE."""
    modules = (torchrl.objectives.llm, torchrl.envs.llm.transforms)
    classes = [x for module in modules for x in vars(module).values() if inspect.isclass(x)]
    return {name for x in [GAE, *classes] for name in inspect.signature(x.__init__).parameters}


def trl_settings() -> set[str]:
    trl = pytest.importorskip("trl")
    found = set()
    for path in Path(trl.__file__).parent.rglob("*_config.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        found |= {x.split(":")[0].strip() for x in lines if x.startswith("    ") and ": " in x and "field(" in x}
    return found


@pytest.mark.parametrize(
    ("library", "some", "same"),
    [
        (torchrl_settings, {"coeff", "clip_epsilon", "gamma", "lmbda"}, "generator"),
        # TRL's names of these objectives' own hyper-parameters, translated by us.
        (trl_settings, {"epsilon", "beta", "delta", "temperature"}, ("vespo_", "sapo_temperature_")),
    ],
)
def test_names_that_another_library_has_too_were_looked_at(library: Any, some: set[str], same: Any) -> None:
    theirs = library()
    assert some <= theirs
    for part in ("objective", "advantage"):
        shared = {name for name in accepted(part) & theirs if (part, name) not in SHARED and not name.startswith(same)}
        assert not shared, f"{library.__name__} has {shared} too: the same setting? Add it to SHARED."


def test_the_refused_names_are_those_with_another_meaning() -> None:
    for part, name in SHARED:
        assert name in accepted(part)
    assert set(AMBIGUOUS) == {key for key, (_, same) in SHARED.items() if same is OTHER}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_preset_accepts_an_ambiguous_name(name: str) -> None:
    """Every plain name of every preset: refused, or set where it belongs."""
    preset = ALGORITHMS[name]
    objective = set(spec_of(get_objective(preset.objective)).hyperparameters.names)  # type: ignore[union-attr]
    advantage = set()
    if preset.advantage is not None:
        advantage = set(advantage_spec(get_advantage(preset.advantage)).hyperparameters.names)
    for hyper in sorted(objective | advantage):
        owners = {part for part, names in (("objective", objective), ("advantage", advantage)) if hyper in names}
        ambiguous = len(owners) == 2 or any((part, hyper) in AMBIGUOUS for part in owners)
        value = 0.37
        if ambiguous:
            with pytest.raises(TypeError, match=rf"'{hyper}' (has two meanings|is a hyper-parameter of the objective)"):
                made(name, TASK.policy(), TASK.policy(), **{hyper: value})
            for part in owners:
                more = {"opmd_baseline": "logavgexp"} if (part, hyper) == ("advantage", "tau") else {}
                parts = made(name, TASK.policy(), TASK.policy(), **{f"{part}_{hyper}": value}, **more)
                assert dict(getattr(parts.algorithm, f"{part}_args"))[hyper] == value


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "grpo",
            {"epsilon": 0.2},
            r"added to the standard deviation of the advantage grpo pass advantage_epsilon=\.\.\.; ",
        ),
        ("grpo", {"epsilon": 0.2}, r"for the clip range of the ratio \(TRL\) pass clip_low= and clip_high="),
        ("jsd", {"beta": 0.1}, r"weight in the mixture .* advantage_beta=.* KL to the reference \(TRL\) pass kl_l"),
        ("on_policy_distill", {"kl_coef": 0.1}, r"advantage_kl_coef=.*weight of a KL penalty \(verl, Trinity-RFT\)"),
        ("rec", {"temp": 0.7}, r"exp\(A / temp\) .* pass objective_temp=.*sampler's temperature pass temp"),
        ("grpo", {"objective": "kl_cov", "coeff": 0.1}, r"pass objective_coeff=.*pass kl_reward_coeff="),
        ("dro", {"tau": 5.0}, r"soft-max baseline of the advantage opmd pass advantage_tau=.*\(DRO\) pass beta="),
    ],
)
def test_both_meanings_are_named(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        made(name, TASK.policy(), TASK.policy(), **settings)


def test_each_meaning_can_be_set() -> None:
    parts = made("grpo", TASK.policy(), TASK.policy(), advantage_epsilon=0.3, clip_low=0.1, clip_high=0.25)
    assert parts.advantage is not None
    assert parts.advantage.hyper == {"epsilon": 0.3}
    assert [round(float(x), 6) for x in (parts.loss.clip_low, parts.loss.clip_high)] == [0.1, 0.25]
    parts = made("sppo", TASK.policy(), None, epsilon=0.4)  # TRL's meaning and Trinity's: nothing to confuse
    assert round(float(parts.loss.epsilon), 6) == 0.4
    parts = made("sppo", TASK.policy(), None, advantage="grpo", objective_epsilon=0.4, advantage_epsilon=0.01)
    assert round(float(parts.loss.epsilon), 6) == 0.4
    assert parts.advantage is not None
    assert parts.advantage.hyper == {"epsilon": 0.01}


def test_a_prefix_of_the_wrong_part_is_unknown() -> None:
    with pytest.raises(TypeError, match="grpo has no setting 'objective_epsilon'"):
        made("grpo", TASK.policy(), TASK.policy(), objective_epsilon=0.1)
    threshold = make_algorithm("topr", TASK.policy(), reference=TASK.policy(), advantage_threshold=0.5).loss
    assert float(threshold.advantage_threshold) == 0.5  # the objective's own name, not a prefix


def test_prefixed_names_have_types() -> None:
    both = accepted("objective") & accepted("advantage")
    expected = {f"{part}_{name}" for name in both for part in ("objective", "advantage")}
    expected |= {f"{part}_{name}" for part, name in AMBIGUOUS}
    assert expected == {f"objective_{name}" for name in ("beta", "coeff", "epsilon", "mu", "tau", "temp")} | {
        f"advantage_{name}" for name in ("beta", "epsilon", "kl_coef", "mu", "tau")
    }
    assert expected <= set(get_type_hints(AlgorithmOverrides))
