"""Hydra's nodes: composed with overrides, instantiated and run, they are what the constructors make."""

import importlib
import inspect
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
import tensordict
import torch
import torchrl.trainers.algorithms.configs as theirs
from hydra.errors import ConfigCompositionException, InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, ListConfig, MissingMandatoryValue, OmegaConf
from tensordict import TensorDictBase
from torch import nn
from torch.testing import assert_close
from torchrl.collectors.llm import LLMCollector
from torchrl.trainers.algorithms import GRPOTrainer

from project import PROJECT
from refused import refused
from torchrl_llm_kl import Advantage, Entropy, PIKLCoefficient, PolicyLoss, Sampling, ScoreOptions
from torchrl_llm_kl.configs import NODES
from torchrl_llm_kl.losses import EntropyBonus, KLToReference
from torchrl_llm_kl.transforms import KLRewardTransform, RetrieveKL, RetrieveLogProb
from toy_rollouts import collect, flat, make_env, make_policy, make_scoring_wrapper, steps

EVERY = [(group, name) for group, nodes in NODES.items() for name in nodes]


def compose(*overrides: str) -> DictConfig:
    """As ``@hydra.main`` composes: from the registered nodes, with overrides of the command line."""
    with hydra.initialize(version_base=None, config_path=None):
        return hydra.compose(overrides=list(overrides))


@pytest.fixture(scope="module")
def every() -> DictConfig:
    return compose(*(f"+{group}@{group}_{name}={name}" for group, name in EVERY))


@pytest.mark.parametrize(("group", "name"), EVERY)
def test_a_node_has_the_arguments_of_its_constructor(every: DictConfig, group: str, name: str) -> None:
    node = every[f"{group}_{name}"]
    parameters = inspect.signature(get_object(node.class_)).parameters
    own = {"_target_", "_convert_", "_partial_", "class_", "service", "hyper", "overrides", "set_keys"}
    named = {key for key, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD}
    assert set(node) - own == named
    for key in named:
        default = parameters[key].default
        if default is inspect.Parameter.empty:
            assert OmegaConf.is_missing(node, key)
        elif key in ("terms", "corrections", "extras"):  # either a mapping or a list can be merged into nothing
            assert (node[key], default) == (None, ())
        elif repr(default) == "<factory>":
            assert node[key] is None
        else:
            found = node[key]
            assert (tuple(found) if isinstance(found, ListConfig) else found) == default, key
    takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    assert bool({"hyper", "overrides"} & set(node)) == takes_more


def test_torchrls_groups_are_joined_and_no_node_of_its_own_is_replaced() -> None:
    assert compose("+transform@it=kl_reward").it["_target_"] == "torchrl.envs.llm.transforms.kl.KLRewardTransform"
    assert issubclass(NODES["transform"]["retrieve_kl"], theirs.TransformConfig)
    assert issubclass(NODES["loss"]["policy"], theirs.LossConfig)


@pytest.fixture(scope="module")
def lab(tokenizer: Any, policy_model: Any, ref_model: Any) -> SimpleNamespace:
    with tensordict.set_list_to_stack(True):
        data = flat(collect(tokenizer, make_policy(policy_model, tokenizer, pad_output=False)))
    gen = make_scoring_wrapper(policy_model, tokenizer, pad_output=False, log_probs_key="log_probs")
    ref = make_scoring_wrapper(ref_model, tokenizer, pad_output=False, log_probs_key="ref_log_probs")
    return SimpleNamespace(policy_model=policy_model, gen=gen, ref=ref, data=data)


def same(found: TensorDictBase, expected: TensorDictBase, *keys: Any) -> None:
    for one, other in zip(steps(found), steps(expected), strict=True):
        for key in keys:
            assert torch.count_nonzero(other[key])
            assert_close(one[key], other[key], atol=0, rtol=0)


WRITTEN = [("next", "log_probs", "full"), ("next", "ref_log_probs", "full"), ("next", "kl_penalty"), ("next", "reward")]


def test_retrieve_kl(lab: Any) -> None:
    numbers = "kl.coeff.init=0.25", "kl.coeff.target=0.5", "kl.estimator=k3"
    parts = "+options@kl.options=base", "+sampling@kl.options.sampling=base", "kl.options.sampling.temperature=0.5"
    extras = "+extra@kl.extras.e=entropy", "kl.extras.e.key=[my, entropy]"
    keys = "kl.kl_key=[kl, here]", "kl.gen_log_probs_full_key=[mine, full]"
    cfg = compose("+transform@kl=retrieve_kl", "+coefficient@kl.coeff=pi", *numbers, *parts, *extras, *keys)
    transform = instantiate(cfg.kl, gen_model=lab.gen, ref_model=lab.ref)
    assert isinstance(transform, RetrieveKL)
    assert isinstance(transform.coeff, PIKLCoefficient)
    assert (transform.coeff.target, float(transform.coeff())) == (0.5, 0.25)
    keys = {"kl_key": ("kl", "here"), "gen_log_probs_full_key": ("mine", "full")}
    expected = RetrieveKL(lab.gen, lab.ref, coeff=0.25, estimator="k3", options=ScoreOptions(Sampling(0.5)), **keys)
    assert transform.extras == (Entropy(("my", "entropy")),)
    written = [("next", "mine", "full"), ("next", "ref_log_probs", "full"), ("next", "kl", "here"), ("next", "reward")]
    same(transform(lab.data.clone()), expected(lab.data.clone()), *written)


def test_separate_transforms_and_a_kl_reward_with_the_models_that_were_passed(lab: Any) -> None:
    """Two scorers, a KL and a reward, from one configuration: a list of transforms as torchrl's ``transform=compose`` has."""
    scorers = "+transform@policy=retrieve_log_prob", "+transform@reference=retrieve_log_prob"
    key = "reference.log_probs_full_key=[ref_log_probs, full]"
    reward = "+transform@reward=llm_kl_reward", "reward.coef=0.3", "reward.out_keys=[reward, my_kl, my_ref]"
    plain = "+transform@plain=llm_kl_reward", "+transform@theirs=kl_reward"
    cfg = compose(*scorers, key, "+transform@kl=kl_computation", "kl.coeff=0.3", *reward, *plain)
    transform = instantiate(cfg.policy, model=lab.gen)
    assert transform.model is lab.gen, "a copy would be scored in its place"
    found = instantiate(cfg.kl)(instantiate(cfg.reference, model=lab.ref)(transform(lab.data.clone())))
    same(found, RetrieveKL(lab.gen, lab.ref, coeff=0.3)(lab.data.clone()), *WRITTEN)
    scored = RetrieveLogProb(lab.gen)(lab.data.clone())
    found = instantiate(cfg.reward, ref_model=lab.ref)(scored.clone())
    expected = KLRewardTransform(lab.ref, coef=0.3, out_keys=["reward", "my_kl", "my_ref"])(scored.clone())
    same(found, expected, ("next", "reward"), ("next", "my_kl"), ("next", "my_ref"))
    assert instantiate(cfg.plain, ref_model=lab.ref).log_prob_full_key == WRITTEN[0][1:]
    # torchrl's transform takes keys as lists, and then finds no entry: the reason for `build` as the target here
    assert isinstance(instantiate(cfg.theirs, ref_model=lab.ref).log_prob_full_key, ListConfig)


_NODES = "KLToReference, coeff: 0.2", "EntropyBonus, coeff: 0.01"
NODES_OF_TERMS = [f"{{_target_: torchrl_llm_kl.losses.{node}}}" for node in _NODES]
TERMS = {
    "group": [
        *("+term@loss.terms.kl=kl_to_reference", "loss.terms.kl.coeff=0.2"),
        *("+term@loss.terms.entropy=entropy_bonus", "loss.terms.entropy.coeff=0.01"),
    ],
    "mapping": ["loss.terms={{kl: {}, e: {}}}".format(*NODES_OF_TERMS)],
    "list": ["loss.terms=[{}, {}]".format(*NODES_OF_TERMS)],
}


@pytest.mark.parametrize("given", TERMS)
def test_policy_loss(lab: Any, given: str) -> None:
    settings = "loss.objective=dapo", "loss.hyper={clip_high: 0.35, clip_low: 0.1}", "loss.options.dtype=float64"
    cfg = compose(
        "+loss=policy",
        "+options@loss.options=base",
        *settings,
        "loss.set_keys={advantage: [my, advantage]}",
        *TERMS[given],
    )
    loss = instantiate(cfg.loss, actor=lab.policy_model)
    assert float(loss.clip_high) == pytest.approx(0.35)
    assert loss.tensor_keys.advantage == ("my", "advantage")
    data = RetrieveKL(lab.gen, lab.ref, add_to_reward=False)(lab.data.clone())
    data["my", "advantage"] = data["advantage"] = torch.tensor([1.0, -0.5]).reshape(2, 1)
    terms = [KLToReference(0.2), EntropyBonus(0.01)]
    options = ScoreOptions(dtype=torch.float64)
    expected = PolicyLoss(lab.policy_model, "dapo", terms=terms, clip_high=0.35, clip_low=0.1, options=options)
    found, want = loss(data), expected(data)
    losses = {"loss_objective", "loss_kl_to_ref", "loss_entropy"}
    assert {key for key in found.keys(True) if key.startswith("loss_")} == losses
    for key, value in want.items():
        assert_close(found[key], value, atol=0, rtol=0)


def test_sampling_is_shared_and_partial_nodes_advantages_and_algorithms(lab: Any) -> None:
    cfg = compose(
        *("+sampling=base", "sampling.temperature=0.7", "sampling.top_p=0.9"),
        *("+loss=policy", "+options@loss.options=base", "loss.options.sampling=${sampling}"),
        # as torchrl's trainers take losses
        *("+loss@partial=policy", "partial._partial_=true", "partial.objective=gpg"),
        *("+transform@advantage=advantage", "advantage.name=grpo", "advantage.group_size=2"),
        *("advantage.hyper={std: batch}", "+algorithm=base", "algorithm.algorithm=dapo", "algorithm.group_size=2"),
        "algorithm.overrides={clip_high: 0.3}",
    )
    assert instantiate(cfg.sampling) == Sampling(0.7, top_p=0.9)
    assert instantiate(cfg.loss, actor=nn.Linear(1, 1)).sampling == Sampling(0.7, top_p=0.9)
    assert instantiate(cfg.partial)(actor=nn.Linear(1, 1)).objective.function.__name__ == "gpg"
    assert repr(instantiate(cfg.advantage)) == repr(Advantage("grpo", group_size=2, std="batch"))
    parts = instantiate(cfg.algorithm, actor=lab.policy_model)
    assert parts.loss.actor_network is lab.policy_model
    assert float(parts.loss.clip_high) == pytest.approx(0.3)


def test_the_pages_configuration(lab: Any, tmp_path: Path) -> None:
    """The YAML of ``docs/torchrl.md`` as the primary configuration."""
    page = (PROJECT / "docs" / "torchrl.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    with hydra.initialize_config_dir(version_base=None, config_dir=str(tmp_path)):
        cfg = hydra.compose("config", overrides=["kl.coeff.target=0.4"])
    transform = instantiate(cfg.kl, gen_model=lab.gen, ref_model=lab.ref)
    assert (transform.coeff.target, float(transform.coeff())) == (0.4, pytest.approx(0.02))
    assert transform.gen_log_probs_full_key == ("log_probs", "full")
    loss = instantiate(cfg.loss, actor=lab.policy_model)
    assert (loss.objective.function.__name__, float(loss.clip_high)) == ("dapo", pytest.approx(0.28))
    assert [type(term) for term in loss.terms] == [KLToReference]


def test_torchrls_grpo_trainer_takes_the_loss(tokenizer: Any, policy_model: nn.Module) -> None:
    """Its node ``trainer=grpo`` with the loss below ``trainer.loss_module``."""
    loss = "+loss@trainer.loss_module=policy", "trainer.loss_module.objective=dapo"
    cfg = compose("+trainer=grpo", *loss, "trainer.total_frames=4", "trainer.progress_bar=false")
    policy = make_policy(policy_model, tokenizer, pad_output=False)
    collector = LLMCollector(make_env(tokenizer), policy=policy, dialog_turns_per_batch=2, total_dialog_turns=4)
    optimizer = torch.optim.SGD(policy_model.parameters(), lr=0.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="GRPOTrainer is an experimental")
        parts = {"collector": collector, "loss_module": {"actor": policy_model}, "optimizer": optimizer}
        trainer = instantiate(cfg.trainer, **parts)
    assert isinstance(trainer, GRPOTrainer)
    assert isinstance(trainer.loss_module, PolicyLoss)
    assert trainer.loss_module.actor_network is policy_model
    assert float(trainer.loss_module.clip_high) == pytest.approx(0.28)
    collector.shutdown()


TWICE = r"max_len is an argument of torchrl_llm_kl\.losses\.PolicyLoss and in hyper: give it once"


def built(overrides: str) -> None:
    try:
        cfg = compose("+loss=policy", "+options@loss.options=base", "+transform@kl=retrieve_kl", overrides)
    except ConfigCompositionException as error:  # the reason is in its cause
        raise ConfigCompositionException(f"{error} {error.__cause__}") from error
    instantiate(cfg.loss, actor=nn.Linear(1, 1))
    instantiate(cfg.kl)


test_what_is_refused = refused(
    built,
    ("kl.coef=0.1", ConfigCompositionException, "Could not override 'kl.coef'"),
    ("kl.detach=warm", ConfigCompositionException, "not a valid bool"),
    ("kl.add_to_reward=7.5", ConfigCompositionException, "is not a valid bool"),
    ("loss.hyper={clip_hihg: 0.3}", InstantiationException, "Did you mean 'clip_high'"),
    ("loss.hyper={max_len: 3}", InstantiationException, TWICE),
    ("loss.options.dtype=float31", InstantiationException, "dtype='float31' is not one of torch's"),
    ("+coefficient@kl.coeff=adaptive", MissingMandatoryValue, r"Missing mandatory value: .*coeff\.init"),
)


def test_without_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torchrl_llm_kl.configs")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hydra", None)
    message = r"^config groups need hydra-core: run pip install '\.\[hydra\]' in the checkout of torchrl-llm-kl\.$"
    with pytest.raises(ImportError, match=message):
        importlib.import_module("torchrl_llm_kl.configs")
