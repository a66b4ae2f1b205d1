"""Configurations of verl and Trinity-RFT: the loss by hand, and what each setting becomes.

``tests/peers`` compares with the losses of these libraries themselves.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from elsewhere_batches import agree, each_in_one_list, one_prompt_each, ours, scored, with_gradients
from refused import refused
from torchrl_llm_kl import Sampling, ScoreOptions, from_trinity, from_verl
from torchrl_llm_kl._foreign import TRINITY, VERL
from torchrl_llm_kl._registry import flatten
from torchrl_llm_kl.algorithms import ALGORITHMS
from torchrl_llm_kl.algorithms.elsewhere._translation import CHOICES
from torchrl_llm_kl.losses import ImportanceWeights, RejectionMask

A, R, G = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm"
#: With an advantage that needs no critic.
GRPO = f"{G}.adv_estimator=grpo"
KL_REWARD = [GRPO, f"{G}.use_kl_in_reward=True", f"{G}.kl_penalty=low_var_kl"]
CORRECTED = [GRPO, f"{G}.rollout_correction.rollout_is=token", f"{G}.rollout_correction.rollout_is_threshold=0.5_5.0"]
CLIPPED = [GRPO, f"{A}.clip_ratio_low=0.1", f"{A}.clip_ratio_high=0.3", f"{A}.clip_ratio_c=1.5"]
CLIPPED += [f"{A}.use_kl_loss=True", f"{R}.temperature=0.8"]
NORM = [GRPO, f"{A}.loss_agg_mode=seq-mean-token-sum-norm", "data.max_response_length=2048"]

RETURNS = [f"{G}.adv_estimator=reinforce_plus_plus", f"{G}.gamma=0.9"]
GAE, STD = {"gamma": 0.9, "lam": 0.8}, {"std_cal_level": "batch", "epsilon": 1e-4}
DUPLICATES = "advantage_fn_args.duplicate_experiences"
PPO = {"clip_low": 0.2, "clip_high": 0.2, "clip_ratio_c": 3.0}  # Trinity's dapo has the same
OF_CLIPPED = {"clip_low": 0.1, "clip_high": 0.3, "clip_ratio_c": 1.5}
DEFAULT_GAE = {"gamma": 1.0, "lam": 1.0, "whiten": True}
TWO_MEANS = "by seq-mean-token-mean, the KL and entropy by token-mean"


def of_type(kind: str, **settings: Any) -> dict[str, Any]:
    return {"algorithm_type": kind, **settings}


TRINITYS = of_type("dapo", kl_loss_fn="k2", kl_loss_fn_args={"kl_coef": 0.1})


@pytest.mark.parametrize("library", ["verl", "trinity"])
def test_the_loss_by_hand(model: nn.Module, batch: dict[str, Tensor], library: str) -> None:
    """Token means with a dual clip and a temperature; verl adds a clamped k3, Trinity-RFT k2."""
    of_verl = library == "verl"
    temperature, low, high, dual = (0.8, 0.9, 1.3, 1.5) if of_verl else (1.0, 0.8, 1.2, 3.0)

    def by_hand() -> Tensor:
        log_prob, _ = scored(model, batch, temperature)
        ratio, advantage = (log_prob - batch["old"]).exp(), batch["advantage"][:, None]
        value = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))
        value = torch.where(advantage < 0, torch.minimum(value, -dual * advantage), value)
        d = batch["ref"] - log_prob
        kl = 0.001 * (d.exp() - d - 1).clamp(max=10) if of_verl else 0.05 * d.square()
        return (value + kl)[batch["mask"]].mean()

    found = from_verl([*CLIPPED, f"{R}.n=4"]) if of_verl else from_trinity(TRINITYS)
    agree(ours(model, batch, found), with_gradients(model, by_hand))


FALLBACK = {"fallback_to_policy_gradient": True}
ON_POLICY = {**FALLBACK, "clip_range": 0.2, "enable_sequence_masking": True}


def test_verls_defaults() -> None:
    found = from_verl({})
    assert found.algorithm == "ppo"
    objective = {"objective": "ppo", "objective_args": PPO, "aggregation": "token-mean"}
    advantage = {"advantage": "gae", "advantage_args": {"gamma": 1.0, "lam": 1.0, "whiten": True}}
    others = {"kl_loss": "none", "kl_reward": "none", "entropy_coeff": 0, "options": ScoreOptions()}
    assert found.overrides == objective | advantage | others


@pytest.mark.parametrize(
    ("settings", "algorithm", "expected"),
    [
        ([GRPO, f"{G}.norm_adv_by_std_in_grpo=False"], "grpo", {"advantage": "dr_grpo"}),
        ([f"{G}.adv_estimator=rloo", f"{R}.n=4"], "rloo", {"advantage": "rloo", "group_size": 4}),
        ([f"{G}.adv_estimator=grpo_passk"], "pass_at_k", {"advantage_args": {"std_normalize": True}}),
        (RETURNS, "reinforce_plus_plus", {"advantage_args": {"gamma": 0.9}}),
        ([f"{G}.adv_estimator=gae", f"{G}.lam=0.95"], "ppo", {"advantage_args": {**DEFAULT_GAE, "lam": 0.95}}),
        ([*KL_REWARD, f"{G}.kl_ctrl.kl_coef=0.01"], "grpo", {"kl_reward": "low_var_kl", "kl_reward_coeff": 0.01}),
        (NORM, "grpo", {"aggregation": "seq-mean-token-sum-norm", "max_len": 2048}),
        (CLIPPED, "grpo", {"objective_args": OF_CLIPPED, "aggregation": "token-mean"}),
        (CLIPPED, "grpo", {"kl_loss": "low_var_kl", "kl_loss_coeff": 0.001, "options": ScoreOptions(Sampling(0.8))}),
        (of_type("dapo"), "dapo", {"objective": "ppo", "objective_args": PPO, "aggregation": "token-mean"}),
        (TRINITYS, "dapo", {"kl_loss": "k2", "kl_loss_coeff": 0.1}),
        (of_type("ppo", advantage_fn_args=GAE), "ppo", {"advantage_args": {**GAE, "whiten": True}}),
        (of_type("grpo", repeat_times=8), "grpo", {"group_size": 8}),
        (of_type("grpo", advantage_fn_args=STD), "grpo", {"advantage_args": {"std": "batch", "epsilon": 1e-4}}),
        (of_type("reinforceplusplus", kl_penalty_fn="k1"), "reinforce_plus_plus", {"kl_reward_coeff": 1e-3}),
        (of_type("reinforceplusplus", kl_penalty_fn="k1"), "reinforce_plus_plus", {"kl_reward": "k1"}),
        (of_type("grpo", kl_penalty_fn="k1"), "grpo", {"kl_reward": "none"}),
        (of_type("grpo_verl", kl_penalty_fn="k1"), "grpo", {"kl_reward": "k1"}),
        (of_type("raft"), "raft", {"keep_best": False}),
        (of_type("ppo", policy_loss_fn_args=ON_POLICY), "ppo", {"objective": "ppo_on_policy"}),
        (of_type("asymre", entropy_loss_fn_args={"entropy_coef": 0.1}), "asymre", {"entropy_coeff": 0.0}),
    ],
)
def test_overrides(settings: Any, algorithm: str, expected: dict[str, Any]) -> None:
    found = from_verl(settings) if isinstance(settings, list) else from_trinity(settings)
    assert found.algorithm == algorithm
    assert expected.items() <= found.overrides.items()


def test_verls_corrections_of_the_sampler() -> None:
    both = {"rollout_is": "token", "rollout_rs": "seq_max_k3", "rollout_rs_threshold": 2}
    weights, mask = from_trinity(of_type("grpo", rollout_correction=both)).overrides["loss_args"]["corrections"]
    assert repr(weights) == repr(ImportanceWeights())
    assert repr(mask) == repr(RejectionMask("seq_max_k3", high=2.0))
    (weights,) = from_verl(CORRECTED).overrides["loss_args"]["corrections"]
    assert repr(weights) == repr(ImportanceWeights(mode="mask", low=0.5, high=5.0))


@pytest.mark.parametrize("kind", CHOICES["Trinity-RFT", "", "algorithm.algorithm_type"])
def test_every_algorithm_of_trinity(kind: str) -> None:
    found = from_trinity({"algorithm_type": kind})
    assert not found.refused
    assert found.overrides["aggregation"] == ("seq-mean-token-sum" if kind == "dpo" else "token-mean")
    assert found.overrides.get("advantage") == ALGORITHMS[found.algorithm].advantage


def test_adaptive_coefficients() -> None:
    control = [f"{G}.use_kl_in_reward=True", f"{G}.kl_ctrl.type=adaptive", f"{G}.kl_ctrl.target_kl=0.3"]
    args = {"adaptive": True, "kl_coef": 0.01, "target_kl": 0.2, "horizon": 100}
    verls, trinitys = from_verl([GRPO, *control]), from_trinity(of_type("grpo", kl_loss_fn_args=args))
    coefficients = verls.overrides["kl_reward_coeff"], trinitys.overrides["kl_loss_coeff"]
    found = [(pytest.approx(float(x())), x.target, x.horizon) for x in coefficients]
    assert found == [(1e-3, 0.3, 10000), (0.01, 0.2, 100)]


def test_verls_sampling_and_advantages_of_a_group(model: nn.Module) -> None:
    assert from_verl([f"{R}.temperature=null"]).sampling.temperature == 1.0
    found = from_verl([f"{R}.temperature=0.7", f"{R}.top_k=-1", f"{R}.top_p=0.9"])
    assert (found.sampling.temperature, found.sampling.top_k, found.sampling.top_p) == (0.7, 0, 0.9)
    assert [row.name for row in found.sampled] == [f"{R}.temperature", f"{R}.top_p", f"{R}.top_k"]
    parts = from_verl([GRPO, f"{R}.n=2"]).make(model)
    expected = torch.tensor([0.5, -0.5]) / (0.5**0.5 + 1e-6)
    assert_close(parts.prepare(one_prompt_each([1.0, 0.0], [1, 1]))["advantage"].squeeze(-1), expected)


def test_verl_is_read_from_a_file_yaml_a_mapping_or_overrides(tmp_path: Path) -> None:
    text = f"{G}: {{adv_estimator: grpo}}\nactor_rollout_ref:\n actor: {{optim: {{lr: 1e-6}}, clip_ratio_high: 0.28}}\n"
    file = tmp_path / "grpo.yaml"
    file.write_text(text)
    actor = {"optim": {"lr": 1e-6}, "clip_ratio_high": 0.28}
    nested = {"algorithm": {"adv_estimator": "grpo"}, "actor_rollout_ref": {"actor": actor}}
    listed = [GRPO, f"+{A}.optim.lr=1e-6", f"++{A}.clip_ratio_high=0.28"]
    for other in (text, file, str(file), nested, listed):
        found = from_verl(other)
        assert found.overrides["objective_args"]["clip_high"] == 0.28
        assert [(row.name, row.value) for row in found.outside] == [(f"{A}.optim.lr", 1e-6)]
        assert repr(found.recipe) == repr(from_verl(nested).recipe)


def test_the_schedule_of_trinitys_chord_is_a_coefficient() -> None:
    args = {"clip_range": 0.2, "mu_peak": 0.9, "mu_valley": 0.05, "mu_warmup_steps": 2, "mu_decay_steps": 4}
    found = from_trinity(of_type("mix_chord", policy_loss_fn_args=args))
    mu = found.make(nn.Linear(1, 1), reference="data").loss.mu
    assert (mu.peak, mu.valley, mu.warmup, mu.decay) == (0.9, 0.05, 2, 4)
    assert mu() == 0
    notes = [row.note for row in found.translated if row.name.startswith("algorithm.policy_loss_fn_args.mu_")]
    assert len(notes) == 4
    assert all("update" in note for note in notes)


FILE = """
mode: both
algorithm:
  algorithm_type: grpo
  repeat_times: 8
  policy_loss_fn_args: {clip_range_low: 0.2, clip_range_high: 0.28, loss_agg_mode: seq-mean-token-mean}
  kl_penalty_fn: k1
  advantage_fn: null
  optimizer: {lr: 1e-6}
model: {model_path: /models/small, temperature: 0.7, top_k: -1}
buffer: {batch_size: 96}
trainer: {trainer_type: verl}
"""


def test_a_whole_file_of_trinity(tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text(FILE)
    found = from_trinity(file)
    assert repr(found) == repr(from_trinity(FILE)) == repr(from_trinity(str(file)))
    assert found.overrides["objective_args"] == {"clip_low": 0.2, "clip_high": 0.28}
    assert found.overrides["aggregation"] == "token-mean"
    assert found.sampling.temperature == found.overrides["options"].temperature == 0.7
    notes = {row.name: row.note for row in found.outside}
    assert "replaces it" in notes["algorithm.policy_loss_fn_args.loss_agg_mode"]
    assert "skips it for this advantage" in notes["algorithm.kl_penalty_fn"]
    outside = "mode algorithm.optimizer.lr model.model_path buffer.batch_size trainer.trainer_type"
    assert set(outside.split()) <= {*notes}
    assert not found.refused
    preset = found.make(nn.Linear(1, 1), reference="data").algorithm
    assert (preset.objective, preset.repeat_times) == ("ppo", 8)
    # By default Trinity's old log-probs are the sampler's.
    (row,) = [row for row in from_trinity(of_type("grpo")).outside if not row.given]
    assert row.name == "algorithm.bypass_old_logprobs"
    assert "set_keys(old_log_prob=...)" in row.note
    anew = from_trinity(of_type("grpo", bypass_old_logprobs=False)).outside
    assert [row.note for row in anew] == ["nothing to do: old log-probs are scored here"]
    assert not from_trinity(of_type("dpo")).outside


def test_each_given_setting_of_verl_is_in_one_list() -> None:
    given = {name.replace("*", "x"): row.default for name, row in VERL.items()} | {f"{A}.clip_ratio_hihg": 0.3}
    given |= {"tranier.nnodes": 1, f"{R}.response_length": 5}
    found = from_verl(given)
    each_in_one_list(found, given)
    notes = {row.name: row.note for row in found.refused}
    assert f"Did you mean '{A}.clip_ratio_high'?" in notes[f"{A}.clip_ratio_hihg"]
    assert "no such setting" in notes["tranier.nnodes"]


@pytest.mark.parametrize("kind", ["grpo", "ppo", "mix", "dpo", "sft"])
def test_each_given_setting_of_trinity_is_in_one_list(kind: str) -> None:
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
    found = from_trinity(nested)
    each_in_one_list(found, flatten(nested))
    assert {"algorithm.advantage_fn_args.epsilonn", "algoritm.x"} <= {row.name for row in found.refused}


@pytest.mark.parametrize(
    ("settings", "name", "reason"),
    [
        ([f"{A}.loss_agg_mode=token-sum"], f"{A}.loss_agg_mode", ""),
        ([f"{G}.adv_estimator=gpg"], f"{G}.adv_estimator", ""),
        ([f"{G}.rollout_correction.bypass_mode=True"], f"{G}.rollout_correction.bypass_mode", ""),
        ([f"{G}.use_pf_ppo=True"], f"{G}.use_pf_ppo", ""),
        (["distillation.enabled=True"], "distillation.enabled", ""),
        ([f"{A}.policy_loss.loss_mode=sapo", f"{A}.entropy_coeff=0.1"], f"{A}.loss_agg_mode", ""),
        ({"clip_rang": 1}, "clip_rang", "no such setting"),
        ({"algorithm_type": "dpo", "kl_loss_fn": "k2"}, "kl_loss_fn", "KL-regularised already"),
        (of_type("gspo", policy_loss_fn_args={"clip_range": 0.1}), "loss_agg_mode", TWO_MEANS),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "loss_agg_mode", "padded length"),
        ({"advantage_fn_args": {"duplicate_experiences": True}}, DUPLICATES, "informative_groups"),
        ({"rollout_correction": {"bypass_mode": True}}, "rollout_correction.bypass_mode", "set_keys"),
    ],
)
def test_refused_settings_say_why(settings: Any, name: str, reason: str) -> None:
    of_verl = isinstance(settings, list)
    found = from_verl(settings) if of_verl else from_trinity({"algorithm": {"algorithm_type": "grpo", **settings}})
    assert [(row.name, reason in row.note) for row in found.refused] == [("algorithm." * (not of_verl) + name, True)]
    if of_verl:
        with pytest.raises(ValueError, match="without_refused=True"):
            found.make(nn.Linear(1, 1))


test_wrong_input = refused(
    lambda function, settings: function(settings),
    (from_verl, [f"{G}.adv_estimator=gpro"], "verl has no adv_estimator 'gpro'.*Did you mean 'grpo'"),
    (from_verl, [f"{A}.use_kl_loss=true", f"{A}.kl_loss_type=null"], "no kl_loss_type None.*Known: kl, k1"),
    (from_verl, [f"{A}.clip_ratio_low"], "expected 'path=value'"),
    (from_verl, {f"{A}.clip_ratio_low": "${other}"}, "refers to another setting: resolve it first"),
    (from_verl, "nothing here", "expected a configuration of verl: a file, YAML or a mapping, got 'nothing here'"),
    (from_verl, [f"{A}.policy_loss.loss_mode=dro"], "dro_beta must be a positive number"),
    (from_trinity, of_type("grpo", policy_loss_fn_args={"clip_ratio_c": 2.0}), "needs clip_range"),
    (from_trinity, of_type("grpo", policy_loss_fn_args={}), "needs clip_range"),
    (from_trinity, of_type("grpo", repeat_times=0), "algorithm.repeat_times must be at least 1, got 0"),
    (from_trinity, of_type("cpt"), "masking_strategy='generic'"),
    (from_trinity, of_type("grpo", policy_loss_fn="pppo"), "unknown objective 'pppo'"),
)
