"""The registry: names, required inputs, and hyper-parameters under every name."""

import copy
import pickle
from typing import get_args

import pytest
import torch

import torchrl_llm_kl.advantages as layer
from refused import refused
from torchrl_llm_kl._registry import UnknownNameError, _edits, nearest
from torchrl_llm_kl.advantages import Advantage, advantage_spec, clip_b, gae, gdpo, get_advantage, grpo, jsd, rloo
from torchrl_llm_kl.advantages._registry import _REGISTRY

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
    accepted = {key for spec in specs for key in spec.accepted if key not in spec.refused}
    assert set(layer.AdvantageArgs.__annotations__) == accepted


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


def test_names_of_trinity_and_verl() -> None:
    names = {"ppo": "gae", "reinforceplusplus": "reinforce_plus_plus", "multi_step_grpo": "step_wise_grpo"}
    names |= {"clipb": "clip_b", "clipv": "clip_v", "max_rl": "maxrl", "grpo_passk": "pass_at_k"}
    names["tir_optimal_token_baseline"] = "optimal_token_baseline"
    assert [get_advantage(name) for name in names] == [getattr(layer, own) for own in names.values()]
    assert set(names) == set(get_args(layer.PeerName)) == set(_REGISTRY.aliases)
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
    (lambda: grpo(R, G, std_cal_level="batch"), TypeError, r"no .*'std_cal_level': pass 'std'\. .*Advantage"),
    (lambda: gae(R, R, R > 0, lmbda=0.5), TypeError, r"gae has no hyper-parameter 'lmbda': pass 'lam'"),
    (lambda: grpo(R, G, duplicate_experiences=False), TypeError, "'duplicate_experiences': .* cannot add rows"),
    (lambda: jsd(R, R, R > 0, chunk_size=None), TypeError, "'chunk_size': .*nothing to split into chunks"),
    (lambda: Advantage("grpo", std="group", std_cal_level="batch"), TypeError, "'std' and 'std_cal_level' are the"),
    (lambda: Advantage("jsd", beta=0.3, lambda_coef=0.3), TypeError, "'beta' and 'lambda_coef' are the same"),
    (lambda: grpo(R, G, R), TypeError, "grpo takes 2 positional arguments, reward, group: got 3"),
    (lambda: grpo(R, reward=R), TypeError, "grpo got 'reward' twice"),
    (lambda: rloo(R[:, None], G[:, None]), ValueError, r"reward must be \[B\], one number .*got shape \(2, 1\)"),
    (lambda: rloo(R, G[:1]), ValueError, r"reward has shape \(2,\) but group has shape \(1,\)"),
    (lambda: gdpo(R, G), ValueError, r"rewards must be \[B, R\], R rewards per sequence, got shape \(2,\)"),
    (lambda: gdpo(R[:, None], G[:1]), ValueError, r"rewards has shape \(2,\) but group has shape \(1,\)"),
    (lambda: gdpo(R[:, None], G, norm_adv_by_std_in_grpo=False), TypeError, "'norm_adv_by_.*': .*use dr_grpo"),
    (lambda: rpp(R[:, None], G, R[:, None] > 0), ValueError, r"per sequence, \(2,\), got shape \(2, 1\)"),
    (lambda: rpp(R, R, R[:, None] > 0), TypeError, r"group must be of an integer dtype, got torch\.float32"),
    (lambda: rloo(R, R), TypeError, r"group must be of an integer dtype, got torch\.float32"),
    (lambda: rloo(R, R > 1), TypeError, r"group must be of an integer dtype, got torch\.bool"),
)
