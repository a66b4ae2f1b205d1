"""Trinity-RFT's configurations: the loss is that of Trinity's functions, and by hand where Trinity is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elsewhere_batches import agree, each_in_one_list, ours, scored, with_gradients
from torchrl_llm_kl import from_trinity
from torchrl_llm_kl._foreign import TRINITY
from torchrl_llm_kl.algorithms import ALGORITHMS
from torchrl_llm_kl.algorithms.elsewhere import _trinity

# ------------------------------------------------------------------ by hand


def test_the_loss_by_hand(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Clipped at 0.2 on both sides with a dual clip at 3 for dapo too; k2 in the loss; the mean over tokens."""

    def by_hand() -> Tensor:
        log_prob, _ = scored(model, batch)
        ratio, advantage = (log_prob - batch["old"]).exp(), batch["advantage"][:, None]
        value = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        value = torch.where(advantage < 0, torch.minimum(value, -3 * advantage), value)
        return (value + 0.05 * (batch["ref"] - log_prob).square())[batch["mask"]].mean()

    found = from_trinity({"algorithm_type": "dapo", "kl_loss_fn": "k2", "kl_loss_fn_args": {"kl_coef": 0.1}})
    agree(ours(model, batch, found), with_gradients(model, by_hand))


@pytest.mark.parametrize("kind", _trinity._KNOWN)
def test_every_algorithm(kind: str) -> None:
    found = from_trinity({"algorithm_type": kind})
    assert found.algorithm in ALGORITHMS
    assert not found.refused
    preset = ALGORITHMS[found.algorithm]
    assert found.overrides["aggregation"] == ("seq-mean-token-sum" if kind == "dpo" else "token-mean")
    assert found.overrides.get("advantage") == preset.advantage


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"algorithm_type": "ppo", "advantage_fn_args": {"gamma": 0.9, "lam": 0.8}},
            {"advantage_args": {"gamma": 0.9, "lam": 0.8, "whiten": True}},
        ),
        ({"algorithm_type": "grpo", "repeat_times": 8}, {"group_size": 8, "repeat_times": 8}),
        (
            {"algorithm_type": "grpo", "advantage_fn_args": {"std_cal_level": "batch", "epsilon": 1e-4}},
            {"advantage_args": {"std": "batch", "epsilon": 1e-4}},
        ),
        ({"algorithm_type": "reinforceplusplus", "kl_penalty_fn": "k1"}, {"kl_reward": "k1", "kl_reward_coeff": 1e-3}),
        ({"algorithm_type": "grpo", "kl_penalty_fn": "k1"}, {"kl_reward": "none"}),
        ({"algorithm_type": "grpo_verl", "kl_penalty_fn": "k1"}, {"kl_reward": "k1"}),
        ({"algorithm_type": "mix", "sample_strategy_args": {"expert_data_ratio": 0.3}}, {"expert_data_ratio": 0.3}),
        ({"algorithm_type": "raft"}, {"keep_best": False}),
        ({"algorithm_type": "asymre", "entropy_loss_fn_args": {"entropy_coef": 0.1}}, {"entropy_coeff": 0.0}),
        ({"algorithm_type": "grpo", "rollout_correction": {"rollout_is": "token"}}, {"loss_args": {"rollout_is": "token"}}),
    ],
)  # fmt: skip
def test_overrides(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    assert expected.items() <= from_trinity(settings).overrides.items()


def test_an_adaptive_coefficient() -> None:
    args = {"adaptive": True, "kl_coef": 0.01, "target_kl": 0.2, "horizon": 100}
    coefficient = from_trinity({"algorithm_type": "grpo", "kl_loss_fn_args": args}).overrides["kl_loss_coeff"]
    assert (float(coefficient()), coefficient.target, coefficient.horizon) == (pytest.approx(0.01), 0.2, 100)


FILE = """
mode: both
algorithm:
  algorithm_type: grpo
  repeat_times: 8
  policy_loss_fn_args:
    clip_range_low: 0.2
    clip_range_high: 0.28
    loss_agg_mode: seq-mean-token-mean
  kl_penalty_fn: k1
  advantage_fn: null
  optimizer:
    lr: 1e-6
model:
  model_path: /models/small
  temperature: 0.7
  top_k: -1
buffer:
  batch_size: 96
trainer:
  trainer_type: verl
"""


def test_a_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text(FILE)
    found = from_trinity(file)
    assert repr(found) == repr(from_trinity(FILE)) == repr(from_trinity(str(file)))
    assert found.overrides["objective_args"] == {"clip_low": 0.2, "clip_high": 0.28}
    assert found.overrides["aggregation"] == "token-mean"
    assert found.sampling.temperature == found.overrides["temperature"] == 0.7
    notes = {row.name: row.note for row in found.outside}
    assert "replaces it" in notes["algorithm.policy_loss_fn_args.loss_agg_mode"]
    assert "skips it for this advantage" in notes["algorithm.kl_penalty_fn"]
    assert {"mode", "algorithm.optimizer.lr", "model.model_path", "buffer.batch_size", "trainer.trainer_type"} <= {
        *notes
    }
    assert not found.refused
    preset = found.make(nn.Linear(1, 1), reference="data").algorithm
    assert (preset.objective, preset.repeat_times) == ("ppo", 8)


def test_old_log_probs_are_the_samplers_by_default() -> None:
    (row,) = [row for row in from_trinity({"algorithm_type": "grpo"}).outside if not row.given]
    assert row.name == "algorithm.bypass_old_logprobs"
    assert "set_keys(old_log_prob=...)" in row.note
    scored = from_trinity({"algorithm_type": "grpo", "bypass_old_logprobs": False}).outside
    assert [row.note for row in scored] == ["nothing: old log-probs are scored here"]
    assert not from_trinity({"algorithm_type": "dpo"}).outside


@pytest.mark.parametrize("kind", ["grpo", "ppo", "mix", "dpo", "sft"])
def test_each_given_setting_is_in_one_list(kind: str) -> None:
    given = {name.replace("*", "x"): row.default for name, row in TRINITY.items() if "_args" not in name}
    given |= {"algorithm.algorithm_type": kind, "algorithm.kl_loss_fn_args.kl_coef": 0.1, "algoritm.x": 1}
    given |= {"algorithm.advantage_fn_args.epsilonn": 1, "algorithm.policy_loss_fn_args.betaa": 1}
    if kind not in ("dpo", "sft"):
        given["algorithm.policy_loss_fn_args.clip_range"] = 0.2
    nested: dict[str, Any] = {}
    for name, value in given.items():
        *sections, last = name.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {}) if isinstance(place.get(section, {}), dict) else place
        place[last] = value
    given = _trinity.flatten(nested)
    found = from_trinity(nested)
    each_in_one_list(found, given)
    assert {"algorithm.advantage_fn_args.epsilonn", "algoritm.x"} <= {row.name for row in found.refused}


@pytest.mark.parametrize(
    ("settings", "name", "reason"),
    [
        ({"clip_rang": 1}, "clip_rang", "no such setting"),
        ({"algorithm_type": "dpo", "kl_loss_fn": "k2"}, "kl_loss_fn", "KL-regularised already"),
        (
            {"algorithm_type": "gspo", "policy_loss_fn_args": {"clip_range": 0.1}},
            "loss_agg_mode",
            "objective by seq-mean-token-mean and the KL and entropy by token-mean",
        ),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "loss_agg_mode", "padded length"),
        (
            {"advantage_fn_args": {"duplicate_experiences": True}},
            "advantage_fn_args.duplicate_experiences",
            "informative_groups",
        ),
        ({"rollout_correction": {"bypass_mode": True}}, "rollout_correction.bypass_mode", "set_keys"),
    ],
)
def test_refused(settings: dict[str, Any], name: str, reason: str) -> None:
    found = from_trinity({"algorithm": {"algorithm_type": "grpo", **settings}})
    assert [(row.name, reason in row.note) for row in found.refused] == [(f"algorithm.{name}", True)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm_type": "grpoo"}, "no algorithm_type 'grpoo'.*Did you mean 'grpo'"),
        ({"algorithm_type": "grpo", "repeat_times": 2.5}, "algorithm.repeat_times must be a whole number .* got 2.5"),
        ({"algorithm_type": "cpt"}, "masking_strategy='generic'"),
        ({"algorithm_type": "grpo", "policy_loss_fn_args": {"clip_ratio_c": 2.0}}, "needs clip_range"),
        ({"algorithm_type": "grpo", "policy_loss_fn_args": {}}, "needs clip_range"),
        ({"algorithm_type": "grpo", "policy_loss_fn": "pppo"}, "policy_loss_fn: unknown objective 'pppo'"),
        ({"algorithm_type": "grpo", "kl_loss_fn_args": {"adaptive": True}}, "needs target_kl and horizon"),
    ],
)
def test_wrong_input(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_trinity(settings)
