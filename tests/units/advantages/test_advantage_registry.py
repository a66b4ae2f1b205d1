"""The registry: names, required inputs, and hyper-parameters under every name."""

import copy
import pickle
from typing import get_args

import pytest
import torch

import torchrl_llm_kl.advantages as layer
from refused import refused
from torchrl_llm_kl._registry import UnknownNameError, _edits, nearest
from torchrl_llm_kl.advantages import Advantage, advantage_spec, clip_b, gae, gdpo, get_advantage, grpo, rloo

# name -> (kind, required inputs)
TABLE = {
    name: (kind, needs)
    for kind, needs, names in (
        ("token", "reward value mask", "gae"),
        ("token", "reward mask", "reinforce_plus_plus"),
        ("token", "old_log_prob teacher_log_prob mask", "on_policy_distill iw_opd jsd"),
        ("token", "reward group mask", "reinforce_plus_plus_baseline"),
        ("token", "reward group old_log_prob collision mask", "optimal_token_baseline"),
        ("token", "reward group old_log_prob entropy mask", "clip_b"),
        ("token", "reward group old_log_prob entropy discriminator mask", "clip_v"),
        ("outcome", "reward group", "grpo dr_grpo rloo maxrl opmd asymre rec best_of_group pass_at_k"),
        ("outcome", "reward", "reinforce"),
        ("outcome", "reward baseline", "remax"),
        ("outcome", "reward group role", "hierarchical_grpo"),
        ("outcome", "reward role baseline", "rae"),
        ("outcome", "reward group length", "opo"),
        ("outcome", "rewards group", "gdpo"),
        ("trajectory", "reward group run step", "step_wise_grpo"),
        ("trajectory", "reward group run step state", "gigpo"),
    )
    for name in names.split()
}


def test_every_name_and_every_argument_is_typed() -> None:
    assert set(layer.available_advantages()) == set(TABLE)
    assert get_args(layer.AdvantageName) == layer.available_advantages()
    assert issubclass(layer.UnknownAdvantageError, UnknownNameError)
    specs = [advantage_spec(get_advantage(name)) for name in TABLE]
    assert set(layer.AdvantageArgs.__annotations__) == {key for spec in specs for key in spec.hyper}


@pytest.mark.parametrize("name", TABLE)
def test_spec_of_each(name: str) -> None:
    function = get_advantage(name)
    assert function is getattr(layer, name)
    assert pickle.loads(pickle.dumps(function)) is function
    spec = advantage_spec(function)
    assert (spec.name, spec.kind, " ".join(spec.needs)) == (name, *TABLE[name])
    assert len(spec.source) > 10
    assert spec.outputs == (("advantage", "value_target") if name == "gae" else ("advantage",))
    assert copy.deepcopy(spec) == spec
    with pytest.raises(TypeError, match=f"{name} has no hyper-parameter 'epsilom'"):
        function(epsilom=0.1)
    with pytest.raises(ValueError, match=f"{name} needs {spec.needs[0]}: pass {spec.needs[0]}="):
        function()


#: Names of advantages in other libraries.
ELSEWHERE = {"ppo": "gae", "reinforceplusplus": "reinforce_plus_plus", "multi_step_grpo": "step_wise_grpo"}
ELSEWHERE |= {"clipb": "clip_b", "clipv": "clip_v", "max_rl": "maxrl", "grpo_passk": "pass_at_k"}
ELSEWHERE["tir_optimal_token_baseline"] = "optimal_token_baseline"


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_name_of_another_library_is_explained(name: str) -> None:
    with pytest.raises(layer.UnknownAdvantageError, match=f"'s '{name}' is '{ELSEWHERE[name]}' here"):
        get_advantage(name)  # type: ignore[arg-type]


def test_inputs_are_positional_or_named() -> None:
    assert torch.equal(rloo(R, G), rloo(group=G.int(), reward=R))


def test_the_nearest_name_is_the_fewest_edits_away() -> None:
    pairs = {("", "abc"): 3, ("kitten", "sitting"): 3, ("ca", "abc"): 3, ("abcd", "abdc"): 1, ("grpo", "gspo"): 1}
    assert {pair: _edits(*pair) for pair in pairs} == pairs
    assert {pair: _edits(*reversed(pair)) for pair in pairs} == pairs
    for name, known, expected in (
        ("gpro", ("gspo", "grpo"), "grpo"),  # two neighbours swapped: one edit; gspo: two
        ("gpro", ("grpo", "gspo"), "grpo"),
        ("rloo_", ("rloo", "sloo"), "rloo"),
        ("token_mean", ("seq-mean-token-mean", "token-mean"), "token-mean"),
        ("PPO", ("dppo", "ppo"), "ppo"),
        ("reinforce", ("rloo", "reinforce_plus_plus"), "reinforce_plus_plus"),
        ("mean", (None, "median"), "median"),
        ("zzz", ("ppo",), None),
        ("x" * 10**6, ("ppo", "grpo"), None),
    ):
        assert nearest(name, known) == expected


R, G = torch.tensor([1.0, 2.0]), torch.tensor([0, 0])
rpp = layer.reinforce_plus_plus_baseline


test_bad_calls = refused(
    lambda call: call(),
    (lambda: get_advantage("gpro"), layer.UnknownAdvantageError, r"unknown .*Did you mean 'grpo'\? Known: .*asymre, "),
    (lambda: advantage_spec(len), TypeError, "expected an advantage of this package"),
    (lambda: layer.advantage("grpo", "outcome")(len), ValueError, "'grpo' is registered already"),
    (lambda: grpo(R, G, std="bacth"), ValueError, r"of 'group', 'batch', got 'bacth'\. Did you mean 'batch'\?$"),
    (lambda: Advantage("grpo", espilon=1.0), TypeError, r"^grpo has no .*mean 'epsilon'\? Known: epsilon, "),
    (lambda: get_advantage("gdpo")(group=G), ValueError, r"gdpo needs rewards: pass rewards=, \[B, R\]"),
    (lambda: clip_b(R), ValueError, r"clip_b needs group: pass group=, \[\*B\]"),
    (lambda: clip_b(R, G, R[:, None]), ValueError, r"clip_b needs entropy: pass entropy=, \[\*B, T\]"),
    (lambda: grpo(R, G, std_cal_level="batch"), TypeError, r"Trinity-RFT's 'std_cal_level' is 'std' here"),
    (
        lambda: gae(R, R, R > 0, lmbda=0.5),
        TypeError,
        r"gae has no hyper-parameter 'lmbda'.* torchrl's 'lmbda' is 'lam' here",
    ),
    (lambda: Advantage("jsd", lambda_coef=0.3), TypeError, "Trinity-RFT's 'lambda_coef' is 'beta' here"),
    (lambda: Advantage("iw_opd", iw_opd_gamma=0.3), TypeError, "TRL's 'iw_opd_gamma' is 'amplification' here"),
    (lambda: Advantage("grpo", duplicate_experiences=True), TypeError, "has no counterpart: .*informative_groups"),
    (
        lambda: Advantage("jsd", chunk_size=64),
        TypeError,
        "'chunk_size' belongs to the loop.*nothing to split into chunks",
    ),
    (lambda: Advantage("gae", gamma="x"), TypeError, "gamma must be a number, got 'x'"),
    (lambda: grpo(R, G, R), TypeError, "too many positional arguments"),
    (lambda: grpo(R, reward=R), TypeError, "multiple values for argument 'reward'"),
    (lambda: rloo(R[:, None], G[:, None]), ValueError, r"reward must be \[B\], one number .*got shape \(2, 1\)"),
    (lambda: rloo(R, G[:1]), ValueError, r"reward has shape \(2,\) but group has shape \(1,\)"),
    (lambda: gdpo(R, G), ValueError, r"rewards must be \[B, R\], R rewards per sequence, got shape \(2,\)"),
    (lambda: gdpo(R[:, None], G[:1]), ValueError, r"rewards has shape \(2,\) but group has shape \(1,\)"),
    (lambda: rpp(R[:, None], G, R[:, None] > 0), ValueError, r"per sequence, \(2,\), got shape \(2, 1\)"),
    (lambda: rpp(R, R, R[:, None] > 0), TypeError, r"group must be of an integer dtype, got torch\.float32"),
    (lambda: rloo(R, R), TypeError, r"group must be of an integer dtype, got torch\.float32"),
    (lambda: rloo(R, R > 1), TypeError, r"group must be of an integer dtype, got torch\.bool"),
)
