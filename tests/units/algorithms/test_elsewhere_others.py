"""Configurations of prime-rl, NeMo-RL and slime: where each setting goes, and what was read of their formulas."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from by_hand import tensor
from torchrl_llm_kl import from_nemo_rl, from_prime_rl, from_slime
from torchrl_llm_kl._foreign import NEMO, PRIME, SLIME
from torchrl_llm_kl.algorithms.elsewhere._others import nemo_kl
from torchrl_llm_kl.losses import ImportanceWeights, OffPolicySequenceMask, RejectionMask
from toy_tasks import chain

MASK = {"objective": "mask_ipo", "clip_low": 0.2, "clip_high": 0.2, "one_sided": True, "kl_tau": 1e-3}
ALGO, LOSS, GRPO, LOSS_FN = "orchestrator.algo.", "trainer.loss.", "grpo.", "loss_fn."
TRUNCATED = f"{LOSS_FN}truncated_importance_sampling_"
LEFT_OUT = {f"{GRPO}use_leave_one_out_baseline": False}
PPO = {"objective": "ppo", "clip_low": 0.2, "clip_high": 0.2}

#: Function, settings, preset, some overrides, refused settings.
CASES: dict[str, tuple[Callable[[Any], Any], Any, str, dict[str, Any], set[str]]] = {
    "prime-rl by default": (from_prime_rl, {}, "dr_grpo", {**MASK, "advantage": "dr_grpo", "repeat_times": 1}, set()),
    "prime-rl, ipo and a group": (
        from_prime_rl,
        {f"{LOSS}type": "ipo", f"{LOSS}ipo_threshold": 0.3, "orchestrator.group_size": 4},
        "dr_grpo",
        {**MASK, "clip_low": 0.3, "clip_high": 0.3, "one_sided": False, "group_size": 4, "aggregation": "token-mean"},
        set(),
    ),
    "prime-rl, rae": (from_prime_rl, {f"{ALGO}type": "rae", f"{ALGO}decay": 0.9}, "rae", {**MASK, "decay": 0.9}, set()),
    "prime-rl, roles": (
        from_prime_rl,
        {f"{ALGO}type": "hierarchical_grpo"},
        "dr_grpo",
        {"advantage": "hierarchical_grpo"},
        set(),
    ),
    "prime-rl, a teacher": (
        from_prime_rl,
        {f"{ALGO}type": "opd"},
        "on_policy_distill",
        {"objective": "ref_kl", "advantage": None},
        set(),
    ),
    "prime-rl, echo": (
        from_prime_rl,
        {f"{ALGO}type": "echo", f"{ALGO}roles.tool.alpha": 0.2},
        "echo",
        {"advantage": "dr_grpo", "mu": 0.2},
        {f"{LOSS}type"},
    ),
    "prime-rl, echo of two roles": (
        from_prime_rl,
        {f"{ALGO}type": "echo", f"{ALGO}roles.tool.alpha": 0.2, f"{ALGO}roles.user.alpha": 0.1},
        "echo",
        {"mu": 0.2, "roles": {"tool": 1.0, "user": 0.5}},
        {f"{LOSS}type", f"{ALGO}roles.tool.alpha", f"{ALGO}roles.user.alpha"},
    ),
    "prime-rl, an advantage times 2": (from_prime_rl, {f"{LOSS}adv_tau": 2.0}, "dr_grpo", MASK, {f"{LOSS}adv_tau"}),
    "NeMo-RL by default": (
        from_nemo_rl,
        {},
        "grpo",
        {**PPO, "group_size": 16, "kl_loss_coeff": 0.01},
        {f"{GRPO}use_leave_one_out_baseline"},
    ),
    "NeMo-RL, no deviation": (from_nemo_rl, {f"{GRPO}normalize_rewards": False}, "grpo", {"advantage": "rloo"}, set()),
    "NeMo-RL, the mean of all": (from_nemo_rl, LEFT_OUT, "grpo", {**PPO, "advantage": "grpo"}, set()),
    "NeMo-RL, neither": (
        from_nemo_rl,
        {**LEFT_OUT, f"{GRPO}adv_estimator.normalize_rewards": False},
        "grpo",
        {"advantage": "dr_grpo"},
        set(),
    ),
    "NeMo-RL, a likelihood": (
        from_nemo_rl,
        {**LEFT_OUT, f"{LOSS_FN}positive_example_nll_weight": 0.3, f"{LOSS_FN}ratio_clip_c": 3.0},
        "grpo",
        {"objective": "vapo", "mu": 0.3, "clip_ratio_c": 3.0, "aggregation": "token-mean"},
        set(),
    ),
    "NeMo-RL, sequences": (
        from_nemo_rl,
        {**LEFT_OUT, f"{LOSS_FN}sequence_level_importance_ratios": True, f"{LOSS_FN}token_level_loss": False},
        "grpo",
        {"objective": "gspo", "aggregation": "seq-mean-token-mean"},
        set(),
    ),
    "NeMo-RL, on-policy": (
        from_nemo_rl,
        {**LEFT_OUT, f"{LOSS_FN}force_on_policy_ratio": True, f"{LOSS_FN}reference_policy_kl_penalty": 0.0},
        "grpo",
        {"objective": "gpg", "kl_loss": "none"},
        set(),
    ),
    "NeMo-RL, without a baseline": (
        from_nemo_rl,
        {f"{GRPO}adv_estimator.name": "reinforce_plus_plus", f"{GRPO}adv_estimator.minus_baseline": False},
        "reinforce_plus_plus_baseline",
        {"advantage": "reinforce_plus_plus"},
        set(),
    ),
    "slime by default": (
        from_slime,
        {},
        "grpo",
        {**PPO, "advantage": "dr_grpo", "aggregation": "seq-mean-token-mean", "kl_loss": "none"},
        set(),
    ),
    "slime, a KL": (
        from_slime,
        {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "low_var_kl", "n_samples_per_prompt": 8},
        "grpo",
        {"advantage": "grpo", "kl_loss": "low_var_kl", "kl_loss_coeff": 0.01, "group_size": 8},
        set(),
    ),
    "slime, cispo and tokens": (
        from_slime,
        {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0, "calculate_per_token_loss": True},
        "cispo",
        {"objective": "cispo", "clip_low": 1.0, "clip_high": 4.0, "aggregation": "token-mean"},
        set(),
    ),
    "slime, gae": (
        from_slime,
        {"advantage_estimator": "ppo", "lambd": 0.9, "normalize_advantages": True, "eps_clip_c": 3.0},
        "ppo",
        {"advantage": "gae", "lam": 0.9, "whiten": True, "clip_ratio_c": 3.0},
        set(),
    ),
    "slime, unwhitened": (
        from_slime,
        {"advantage_estimator": "reinforce_plus_plus"},
        "reinforce_plus_plus",
        {},
        {"normalize_advantages"},
    ),
    "slime, refused": (
        from_slime,
        {"kl_coef": 0.1, "use_opd": True, "advantage_estimator": "gspo", "eps_clip_c": 3.0},
        "gspo",
        {"objective": "gspo"},
        {"kl_coef", "use_opd", "eps_clip_c"},
    ),
    "slime, imitation": (from_slime, {"loss_type": "sft_loss"}, "sft", {}, set()),
}


@pytest.mark.parametrize("name", CASES)
def test_presets_overrides_and_what_is_refused(name: str) -> None:
    function, settings, algorithm, overrides, refused = CASES[name]
    found = function(settings)
    assert found.algorithm == algorithm
    assert {key: found.overrides[key] for key in overrides} == overrides
    assert {row.name for row in found.refused} == refused
    lists = (found.translated, found.sampled, found.outside, found.refused)
    placed = [row.name for rows in lists for row in rows if row.given]
    assert sorted(placed) == sorted(settings)
    assert all(row.note for row in (*found.outside, *found.refused))


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case[2] not in ("ppo", "sft") and not case[4]]
)
def test_they_make_losses(name: str) -> None:
    function, settings, *_ = CASES[name]
    task = chain()
    found = function(settings)
    needs = found.algorithm == "on_policy_distill" or found.overrides.get("kl_loss", "none") != "none"
    parts = found.make(task.policy(), **({"reference": task.policy()} if needs else {}))
    data = task.sample(task.policy(), 32, torch.Generator().manual_seed(0), found.overrides.get("group_size", 1))
    data["role"], data["chosen"] = torch.zeros(32, dtype=torch.long), torch.ones(32, dtype=torch.bool)
    if found.overrides.get("group_size", 1) > 1 or not parts.algorithm.compares_answers:
        assert parts.loss(parts.prepare(data)).total_loss.isfinite()


def test_corrections() -> None:
    correct = {**LEFT_OUT, f"{LOSS_FN}use_importance_sampling_correction": True}
    icepop = {f"{TRUNCATED}type": "icepop", f"{TRUNCATED}ratio": 5.0, f"{TRUNCATED}ratio_min": 0.5}
    sequences = {f"{TRUNCATED}type": "seq-mask-tis", f"{TRUNCATED}ratio": 1.25, f"{TRUNCATED}ratio_min": 0.5}
    weights: dict[str, Any] = {"level": "token", "mode": "truncate", "low": None, "high": None}
    mean = {"divergence": "seq_mean_k1", "low": -math.log(1.25), "high": math.log(2)}
    tis = {f"{TRUNCATED}type": "tis", f"{TRUNCATED}ratio": 2.0}
    cases: list[tuple[Any, Any, list[tuple[Any, dict[str, Any]]]]] = [
        (from_nemo_rl, correct, [(ImportanceWeights, weights)]),
        (from_nemo_rl, {**correct, **tis}, [(ImportanceWeights, {**weights, "high": 2.0})]),
        (
            from_nemo_rl,
            {**correct, **icepop},
            [(ImportanceWeights, {**weights, "mode": "mask", "low": 0.5, "high": 5.0})],
        ),
        (from_nemo_rl, {**correct, **sequences}, [(RejectionMask, mean), (ImportanceWeights, weights)]),
        (from_slime, {"use_tis": True, "tis_clip": 3.0}, [(ImportanceWeights, {**weights, "high": 3.0})]),
        (from_slime, {"use_opsm": True}, [(OffPolicySequenceMask, {"delta": 1e-4})]),
    ]
    for function, settings, expected in cases:
        found = function(settings).recipe["loss_args"]["corrections"]
        assert [(new.func, pytest.approx(new.keywords)) for new in found] == expected


def test_nemos_kl_by_hand() -> None:
    """Log-ratios of the reference log 2, 3 and 25: exp(d) - 1 - d, its gradient plus the value; both clamps end gradients."""
    log_prob = tensor([[-3.0, -4.0, -26.0]]).requires_grad_()
    ref = log_prob.detach() + tensor([[math.log(2.0), 3.0, 25.0]])
    cases: list[tuple[dict[str, Any], list[float], list[float]]] = [
        ({}, [1 - math.log(2), 10.0, 10.0], [-math.log(2), 0.0, 0.0]),
        (
            {"output_clamp": None, "input_clamp": 2.0},
            [1 - math.log(2), math.exp(2) - 3, math.exp(2) - 3],
            [-math.log(2), 0, 0],
        ),
        ({"kind": "k1"}, [-math.log(2), -3.0, -10.0], [1 - math.log(2), -2.0, 0.0]),
        ({"kind": "k2"}, [math.log(2) ** 2 / 2, 4.5, 10.0], [math.log(2) ** 2 / 2 - math.log(2), 1.5, 0.0]),
    ]
    for hyper, value, gradient in cases:
        found = nemo_kl(log_prob, ref, **hyper)
        assert_close(found.detach(), tensor([value]))
        assert_close(torch.autograd.grad(found.sum(), log_prob)[0], tensor([gradient]))


def test_files_and_values_that_they_do_not_know(tmp_path: Path) -> None:
    path = tmp_path / "rl.toml"
    path.write_text('[orchestrator]\ngroup_size = 4\n[orchestrator.algo]\ntype = "max_rl"\n')
    assert from_prime_rl(path).overrides["group_size"] == 4
    path = tmp_path / "grpo.yaml"
    path.write_text("grpo: {normalize_rewards: false, seed: '${seed}'}\n")
    assert from_nemo_rl(path).overrides["advantage"] == "rloo"
    assert from_slime({"tensor_model_parallel_size": 2}).outside[0].note == "of Megatron, SGLang or the run"
    for call, message in (
        (lambda: from_prime_rl({"orchestrator.algo.type": "grop"}), "prime-rl has no type 'grop'. Did you mean 'grpo'"),
        (
            lambda: from_nemo_rl({"loss_fn.reference_policy_kl_type": "k4"}),
            "NeMo-RL has no reference_policy_kl_type 'k4'",
        ),
        (lambda: from_slime({"advantage_estimator": "rloo"}), "slime has no advantage_estimator 'rloo'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert from_prime_rl({"orchestrator.algo.typo": 1}).outside  # below a path that stands for all
    for function, given in ((from_prime_rl, None), (from_nemo_rl, None), (from_slime, argparse.Namespace())):
        with pytest.raises(TypeError, match=f"expected .* a mapping.*, got {type(given).__name__}"):
            function(given)  # type: ignore[operator]


def test_references_of_nemo_are_not_left_out_silently() -> None:
    found = from_nemo_rl(
        {
            "grpo": {"adv_estimator": {"normalize_rewards": "${grpo.normalize_rewards}"}, "normalize_rewards": False},
            "loss_fn": {"ratio_clip_min": 0.3, "ratio_clip_max": "${loss_fn.ratio_clip_min}"},
            "policy": {"tokenizer": {"name": "${policy.model_name}"}},
        }
    )
    assert found.overrides["advantage"] == "rloo"
    assert {row.name for row in found.outside} >= {f"{GRPO}adv_estimator.normalize_rewards", "policy.tokenizer.name"}
    (refused,) = found.refused
    assert (refused.name, refused.value) == (f"{LOSS_FN}ratio_clip_max", "${loss_fn.ratio_clip_min}")
    assert "resolve it first" in refused.note


@pytest.mark.parametrize(("function", "table"), [(from_prime_rl, PRIME), (from_nemo_rl, NEMO)])
def test_all_defaults_given_change_nothing(function: Any, table: Any) -> None:
    given = {name: row.default for name, row in table.items() if not name.endswith("*") and row.default is not None}
    assert repr(function(given).recipe) == repr(function({}).recipe)
    assert SLIME["eps_clip"].default == 0.2
