"""The registry: names, required inputs, and hyper-parameters under every name."""

import copy
import pickle
from typing import get_args

import pytest
import torch

import torchrl_llm_kl.advantages as layer
from refused import refused
from torchrl_llm_kl._registry import UnknownNameError, nearest
from torchrl_llm_kl.advantages import Advantage, advantage_spec, gdpo, get_advantage, grpo, rloo

# name -> (kind, required inputs)
TABLE = {
    name: (kind, needs)
    for kind, needs, names in (
        ("token", "reward value mask", "gae"),
        ("token", "reward mask", "reinforce_plus_plus"),
        ("token", "old_log_prob teacher_log_prob mask", "on_policy_distill iw_opd jsd"),
        ("token", "old_log_prob teacher_log_prob base_log_prob mask", "ex_opd"),
        ("token", "reward group old_log_prob teacher_log_prob mask", "rlsd"),
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


def test_every_name_and_argument_has_a_type() -> None:
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
    with pytest.raises(TypeError, match=f"missing a required argument: '{spec.needs[0]}'"):
        function()


def test_a_name_of_another_library_is_explained() -> None:
    for theirs, ours in {"ppo": "gae", "clipb": "clip_b", "max_rl": "maxrl", "grpo_passk": "pass_at_k"}.items():
        with pytest.raises(layer.UnknownAdvantageError, match=f"'s '{theirs}' is '{ours}' here"):
            get_advantage(theirs)  # type: ignore[arg-type]


def test_inputs_are_positional_or_named() -> None:
    assert torch.equal(rloo(R, G), rloo(group=G.int(), reward=R))


def test_the_nearest_name_has_the_same_letters_or_most_of_them() -> None:
    for name, known, expected in (
        ("gpro", ("gspo", "grpo"), "grpo"),  # two neighbours swapped
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
    (lambda: advantage_spec(len), TypeError, "expected a registered advantage"),
    (lambda: layer.advantage("grpo", "outcome")(len), ValueError, "'grpo' is registered already"),
    (lambda: grpo(R, G, std="bacth"), ValueError, r"of 'group', 'batch', got 'bacth'\. Did you mean 'batch'\?$"),
    (lambda: Advantage("grpo", espilon=1.0), TypeError, r"^grpo has no .*mean 'epsilon'\? Known: epsilon, "),
    (lambda: grpo(R, G, std_cal_level="batch"), TypeError, r"Trinity-RFT's 'std_cal_level' is 'std' here"),
    (lambda: Advantage("grpo", duplicate_experiences=True), TypeError, "has no counterpart: .*informative_groups"),
    (lambda: Advantage("jsd", chunk_size=64), TypeError, "'chunk_size' belongs to the loop.*to split into chunks"),
    (lambda: Advantage("gae", gamma="x"), TypeError, "gamma must be a number, got 'x'"),
    (lambda: rloo(R[:, None], G[:, None]), ValueError, r"reward must be \[B\], one number .*got shape \(2, 1\)"),
    (lambda: rloo(R, G[:1]), ValueError, r"reward has shape \(2,\) but group has shape \(1,\)"),
    (lambda: gdpo(R, G), ValueError, r"rewards must be \[B, R\], several numbers per sequence, got shape \(2,\)"),
    (lambda: rpp(R[:, None], G, R[:, None] > 0), ValueError, r"reward must be \[\*B\] for a mask \[\*B, T\], got"),
    (lambda: rloo(R, R), TypeError, r"group must be of an integer dtype, got torch\.float32"),
)
