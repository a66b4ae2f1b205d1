"""Hydra configurations whose ``_target_`` names classes of this package, also in torchrl's own nodes."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import nn
from torch.testing import assert_close
from torchrl.collectors.llm import LLMCollector
from torchrl.trainers.algorithms import GRPOTrainer

from project import PROJECT
from torchrl_llm_kl import PIKLCoefficient, PolicyLoss, RetrieveKL
from torchrl_llm_kl.losses import KLToReference
from toy_rollouts import collect, flat, make_env, make_policy, make_scoring_pair, steps

hydra = pytest.importorskip("hydra")


@pytest.fixture
def data(tokenizer: Any, policy_model: nn.Module) -> TensorDictBase:
    return flat(collect(tokenizer, make_policy(policy_model, tokenizer, pad_output=False)))


@pytest.fixture
def composed(tmp_path: Path) -> Any:
    """The YAML of ``docs/torchrl.md`` as the primary configuration, with command-line overrides."""
    page = (PROJECT / "docs" / "torchrl.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")

    def compose(*overrides: str) -> Any:
        with hydra.initialize_config_dir(version_base=None, config_dir=str(tmp_path)):
            return hydra.compose("config", overrides=list(overrides))

    return compose


def test_the_pages_configuration_makes_what_the_constructors_make(
    composed: Any, tokenizer: Any, policy_model: nn.Module, ref_model: nn.Module, data: TensorDictBase
) -> None:
    config = composed("kl.coeff.target=0.4", "+kl.estimator=k3")
    policy, reference = make_scoring_pair(policy_model, ref_model, tokenizer, pad_output=False)
    transform = hydra.utils.instantiate(config.kl, gen_model=policy, ref_model=reference)
    assert isinstance(transform.coeff, PIKLCoefficient)
    assert (transform.coeff.target, float(transform.coeff())) == (0.4, pytest.approx(0.02))
    expected = RetrieveKL(policy, reference, coeff=0.02, estimator="k3", kl_key=("kl", "here"))
    for one, other in zip(*(steps(each(data.clone())) for each in (transform, expected)), strict=True):
        for key in (("next", "kl", "here"), ("next", "reward")):
            assert torch.count_nonzero(other[key])
            assert_close(one[key], other[key], atol=0, rtol=0)
    loss = hydra.utils.instantiate(config.loss, actor=policy_model)
    assert (loss.objective.function.__name__, float(loss.clip_high)) == ("dapo", pytest.approx(0.28))
    assert [type(term) for term in loss.terms] == [KLToReference]
    assert loss.options.dtype == torch.float64
    parts = hydra.utils.instantiate(config.algorithm, actor=policy_model)
    assert (float(parts.loss.clip_high), parts.advantage.hyper) == (pytest.approx(0.3), {"std": "batch"})
    with pytest.raises(hydra.errors.InstantiationException, match="Did you mean 'clip_high'"):
        hydra.utils.instantiate(composed("+loss.clip_hihg=0.3").loss, actor=policy_model)


def test_torchrls_grpo_trainer_takes_the_loss(composed: Any, tokenizer: Any, policy_model: nn.Module) -> None:
    """torchrl's node ``trainer=grpo`` with the loss below ``trainer.loss_module``."""
    pytest.importorskip("torchrl.trainers.algorithms.configs")
    config = composed(
        "+trainer=grpo", "trainer.loss_module=${loss}", "trainer.total_frames=4", "trainer.progress_bar=false"
    )
    policy = make_policy(policy_model, tokenizer, pad_output=False)
    collector = LLMCollector(make_env(tokenizer), policy=policy, dialog_turns_per_batch=2, total_dialog_turns=4)
    optimizer = torch.optim.SGD(policy_model.parameters(), lr=0.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="GRPOTrainer is an experimental")
        parts = {"collector": collector, "loss_module": {"actor": policy_model}, "optimizer": optimizer}
        trainer = hydra.utils.instantiate(config.trainer, **parts)
    assert isinstance(trainer, GRPOTrainer)
    assert isinstance(trainer.loss_module, PolicyLoss)
    assert trainer.loss_module.actor_network is policy_model
    collector.shutdown()
