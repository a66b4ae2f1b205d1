"""verl's configurations: the loss is that of verl's functions, and by hand where verl is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from elsewhere_batches import agree, each_in_one_list, one_prompt_each, ours, scored, with_gradients
from torchrl_llm_kl import from_verl
from torchrl_llm_kl._foreign import VERL

A, R, G = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm"
#: An advantage that needs no critic.
GRPO = f"{G}.adv_estimator=grpo"
KL_REWARD = [GRPO, f"{G}.use_kl_in_reward=True", f"{G}.kl_penalty=low_var_kl"]
MEAN = f"{A}.loss_agg_mode=seq-mean-token-mean"


# ------------------------------------------------------------------ by hand


def test_the_defaults() -> None:
    assert from_verl({}).algorithm == "ppo"
    assert from_verl({}).overrides == {
        **{"objective": "ppo", "clip_low": 0.2, "clip_high": 0.2, "clip_ratio_c": 3.0, "aggregation": "token-mean"},
        **{"advantage": "gae", "gamma": 1.0, "lam": 1.0, "whiten": True},
        **{"kl_loss": "none", "kl_reward": "none", "entropy_coeff": 0, "repeat_times": 1, "temperature": 1.0},
    }


def test_the_loss_by_hand(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Dual clip, a clamped k3, and the temperature in both; the mean over tokens."""
    settings = {
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {
            "actor": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 1.5, "use_kl_loss": True},
            "rollout": {"temperature": 0.8, "n": 4},
        },
    }

    def by_hand() -> Tensor:
        log_prob, _ = scored(model, batch, 0.8)
        ratio, advantage = (log_prob - batch["old"]).exp(), batch["advantage"][:, None]
        value = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.9, 1.3))
        value = torch.where(advantage < 0, torch.minimum(value, -1.5 * advantage), value)
        d = batch["ref"] - log_prob
        return (value + 0.001 * (d.exp() - d - 1).clamp(max=10))[batch["mask"]].mean()

    agree(ours(model, batch, from_verl(settings)), with_gradients(model, by_hand))


@pytest.mark.parametrize(
    ("settings", "algorithm", "expected"),
    [
        ([GRPO, f"{G}.norm_adv_by_std_in_grpo=False"], "grpo", {"advantage": "dr_grpo"}),
        ([f"{G}.adv_estimator=rloo", f"{R}.n=4"], "rloo", {"advantage": "rloo", "group_size": 4}),
        ([f"{G}.adv_estimator=grpo_passk"], "pass_at_k", {"std_normalize": True}),
        ([f"{G}.adv_estimator=reinforce_plus_plus", f"{G}.gamma=0.9"], "reinforce_plus_plus", {"gamma": 0.9}),
        ([f"{G}.adv_estimator=gae", f"{G}.lam=0.95"], "ppo", {"lam": 0.95, "whiten": True}),
        ([*KL_REWARD, f"{G}.kl_ctrl.kl_coef=0.01"], "grpo", {"kl_reward": "low_var_kl", "kl_reward_coeff": 0.01}),
        (
            [GRPO, f"{A}.loss_agg_mode=seq-mean-token-sum-norm", "data.max_response_length=2048"],
            "grpo",
            {"aggregation": "seq-mean-token-sum-norm", "max_len": 2048},
        ),
        (
            [GRPO, f"{G}.rollout_correction.rollout_is=token", f"{G}.rollout_correction.rollout_is_threshold=0.5_5.0"],
            "grpo",
            {"loss_args": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}},
        ),
    ],
)
def test_overrides(settings: list[str], algorithm: str, expected: dict[str, Any]) -> None:
    found = from_verl(settings)
    assert found.algorithm == algorithm
    assert expected.items() <= found.overrides.items()


def test_an_adaptive_coefficient() -> None:
    settings = [GRPO, f"{G}.use_kl_in_reward=True", f"{G}.kl_ctrl.type=adaptive", f"{G}.kl_ctrl.target_kl=0.3"]
    coefficient = from_verl(settings).overrides["kl_reward_coeff"]
    assert (float(coefficient()), coefficient.target, coefficient.horizon) == (pytest.approx(1e-3), 0.3, 10000)


def test_sampling() -> None:
    assert from_verl([f"{R}.temperature=null"]).sampling.temperature == 1.0
    found = from_verl([f"{R}.temperature=0.7", f"{R}.top_k=-1", f"{R}.top_p=0.9"])
    assert (found.sampling.temperature, found.sampling.top_k, found.sampling.top_p) == (0.7, 0, 0.9)
    assert [row.name for row in found.sampled] == [f"{R}.temperature", f"{R}.top_p", f"{R}.top_k"]


def test_the_same_from_a_file_yaml_a_mapping_and_overrides(tmp_path: Path) -> None:
    text = f"""
        {G}: {{adv_estimator: grpo}}
        actor_rollout_ref:
          actor: {{optim: {{lr: 1e-6}}, clip_ratio_high: 0.28}}
        """
    file = tmp_path / "grpo.yaml"
    file.write_text(text)
    nested = {"algorithm": {"adv_estimator": "grpo"}}
    nested["actor_rollout_ref"] = {"actor": {"optim": {"lr": 1e-6}, "clip_ratio_high": 0.28}}  # type: ignore[dict-item]
    listed = [GRPO, f"+{A}.optim.lr=1e-6", f"++{A}.clip_ratio_high=0.28"]
    for other in (text, file, str(file), nested, listed):
        found = from_verl(other)
        assert found.overrides["clip_high"] == 0.28
        assert [(row.name, row.value) for row in found.outside] == [(f"{A}.optim.lr", 1e-6)]
        assert repr(found.recipe) == repr(from_verl(nested).recipe)


def test_each_given_setting_is_in_one_list() -> None:
    given = {name.replace("*", "x"): row.default for name, row in VERL.items()} | {f"{A}.clip_ratio_hihg": 0.3}
    given |= {"tranier.nnodes": 1, f"{R}.response_length": 5}
    found = from_verl(given)
    each_in_one_list(found, given)
    notes = {row.name: row.note for row in found.refused}
    assert f"Did you mean '{A}.clip_ratio_high'?" in notes[f"{A}.clip_ratio_hihg"]
    assert "no such setting" in notes["tranier.nnodes"]


@pytest.mark.parametrize(
    "settings",
    [
        [f"{A}.loss_agg_mode=token-sum"],
        [f"{G}.adv_estimator=gpg"],
        [f"{G}.rollout_correction.bypass_mode=True"],
        [f"{G}.use_pf_ppo=True"],
        ["distillation.enabled=True"],
        [f"{A}.policy_loss.loss_mode=sapo", f"{A}.entropy_coeff=0.1"],
    ],
)
def test_refused(settings: list[str]) -> None:
    name = f"{A}.loss_agg_mode" if len(settings) > 1 else settings[0].partition("=")[0]
    found = from_verl(settings)
    assert [row.name for row in found.refused] == [name]
    with pytest.raises(ValueError, match="without_refused=True"):
        found.make(nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([f"{G}.adv_estimator=gpro"], "verl has no adv_estimator 'gpro'.*Did you mean 'grpo'"),
        ([f"{A}.policy_loss.loss_mode=vanila"], "Did you mean 'vanilla'"),
        ([f"{A}.policy_loss.loss_mode=dro"], "dro_beta must be a positive number"),
        ([f"{A}.use_kl_loss=true", f"{A}.kl_loss_type=null"], "verl has no kl_loss_type None.*Known: kl, k1"),
        ([f"{A}.clip_ratio_low"], "expected 'path=value'"),
        ({f"{A}.clip_ratio_low": "${other}"}, "refers to another setting: resolve it first"),
        ("nothing here", "expected a configuration of verl: a mapping of settings, got str"),
    ],
)
def test_wrong_input(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_verl(settings)


def test_a_missing_file() -> None:
    with pytest.raises(FileNotFoundError, match=r"no file 'nowhere\.yaml'"):
        from_verl("nowhere.yaml")


def test_advantages_of_a_group(model: nn.Module) -> None:
    parts = from_verl([GRPO, f"{R}.n=2"]).make(model)
    expected = torch.tensor([0.5, -0.5]) / (0.5**0.5 + 1e-6)
    assert_close(parts.prepare(one_prompt_each([1.0, 0.0], [1, 1]))["advantage"].squeeze(-1), expected)
