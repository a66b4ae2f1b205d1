"""Configurations of prime-rl, NeMo-RL and slime: where each setting goes, and their formulas as read from their sources."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from by_hand import tensor
from project import tables
from torchrl_llm_kl import from_nemo_rl, from_prime_rl, from_slime
from torchrl_llm_kl._foreign import NEMO, PRIME, SLIME
from torchrl_llm_kl.algorithms.elsewhere._others import nemo_kl
from torchrl_llm_kl.losses import ImportanceWeights, OffPolicySequenceMask, RejectionMask
from toy_tasks import chain

LN2 = math.log(2)
LOSS_FN = "loss_fn."
TRUNCATED = f"{LOSS_FN}truncated_importance_sampling_"
LEFT_OUT = {"grpo.use_leave_one_out_baseline": False}
FUNCTIONS: dict[str, Callable[[Any], Any]] = {"prime-rl": from_prime_rl, "NeMo-RL": from_nemo_rl, "slime": from_slime}
CASES = tables(__file__)
del CASES["bases"]


def at(overrides: Any, path: str) -> Any:
    """The override at a path such as ``objective_args.clip_low``."""
    part, _, own = path.rpartition(".")
    return (overrides[part] if part else overrides)[own]


def translated(name: str) -> Any:
    return FUNCTIONS[re.split(",| ", name)[0]](CASES[name][1])


@pytest.mark.parametrize("name", CASES)
def test_presets_overrides_and_what_is_refused(name: str) -> None:
    algorithm, settings, overrides, refused = CASES[name]
    found = translated(name)
    assert found.algorithm == algorithm
    assert {path: at(found.overrides, path) for path in overrides} == overrides
    assert {row.name for row in found.refused} == set(refused)
    lists = (found.translated, found.sampled, found.outside, found.refused)
    placed = [row.name for rows in lists for row in rows if row.given]
    assert sorted(placed) == sorted(settings)
    assert all(row.note for row in (*found.outside, *found.refused))


MADE = [name for name, (algorithm, *_, refused) in CASES.items() if algorithm not in ("ppo", "sft") and not refused]


@pytest.mark.parametrize("name", MADE)
def test_translated_configurations_make_losses(name: str) -> None:
    task, found = chain(), translated(name)
    needs = found.algorithm == "on_policy_distill" or found.overrides.get("kl_loss", "none") != "none"
    parts = found.make(task.policy(), **({"reference": task.policy()} if needs else {}))
    data = task.sample(task.policy(), 32, torch.Generator().manual_seed(0), found.overrides.get("group_size", 1))
    data["role"], data["chosen"] = torch.zeros(32, dtype=torch.long), torch.ones(32, dtype=torch.bool)
    if found.overrides.get("group_size", 1) > 1 or not parts.algorithm.compares_answers:
        assert parts.loss(parts.prepare(data)).total_loss.isfinite()


def test_importance_corrections() -> None:
    correct = {**LEFT_OUT, f"{LOSS_FN}use_importance_sampling_correction": True}
    icepop = {f"{TRUNCATED}type": "icepop", f"{TRUNCATED}ratio": 5.0, f"{TRUNCATED}ratio_min": 0.5}
    sequences = {f"{TRUNCATED}type": "seq-mask-tis", f"{TRUNCATED}ratio": 1.25, f"{TRUNCATED}ratio_min": 0.5}
    weights: dict[str, Any] = {"level": "token", "mode": "truncate", "low": None, "high": None}
    masked = {**weights, "mode": "mask", "low": 0.5, "high": 5.0}
    mean = {"divergence": "seq_mean_k1", "low": -math.log(1.25), "high": LN2}
    tis = {f"{TRUNCATED}type": "tis", f"{TRUNCATED}ratio": 2.0}
    for function, settings, expected in (
        (from_nemo_rl, correct, [(ImportanceWeights, weights)]),
        (from_nemo_rl, {**correct, **tis}, [(ImportanceWeights, {**weights, "high": 2.0})]),
        (from_nemo_rl, {**correct, **icepop}, [(ImportanceWeights, masked)]),
        (from_nemo_rl, {**correct, **sequences}, [(RejectionMask, mean), (ImportanceWeights, weights)]),
        (from_slime, {"use_tis": True, "tis_clip": 3.0}, [(ImportanceWeights, {**weights, "high": 3.0})]),
        (from_slime, {"use_opsm": True}, [(OffPolicySequenceMask, {"delta": 1e-4})]),
    ):
        found = function(settings).recipe["loss_args"]["corrections"]
        assert [(new.func, pytest.approx(new.keywords)) for new in found] == expected


def test_nemos_kl_by_hand() -> None:
    """Log-ratios to the reference of log 2, 3 and 25: exp(d) - 1 - d plus its gradient; none where a clamp binds."""
    log_prob = tensor([[-3.0, -4.0, -26.0]]).requires_grad_()
    ref = log_prob.detach() + tensor([[LN2, 3.0, 25.0]])
    for hyper, value, gradient in (
        ({}, [1 - LN2, 10.0, 10.0], [-LN2, 0.0, 0.0]),
        ({"output_clamp": None, "input_clamp": 2.0}, [1 - LN2, math.exp(2) - 3, math.exp(2) - 3], [-LN2, 0, 0]),
        ({"kind": "k1"}, [-LN2, -3.0, -10.0], [1 - LN2, -2.0, 0.0]),
        ({"kind": "k2"}, [LN2**2 / 2, 4.5, 10.0], [LN2**2 / 2 - LN2, 1.5, 0.0]),
    ):
        found = nemo_kl(log_prob, ref, **hyper)
        assert_close(found.detach(), tensor([value]))
        assert_close(torch.autograd.grad(found.sum(), log_prob)[0], tensor([gradient]))


def test_unknown_files_and_values_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "rl.toml"
    path.write_text('[orchestrator]\ngroup_size = 4\n[orchestrator.algo]\ntype = "max_rl"\n')
    assert from_prime_rl(path).overrides["group_size"] == 4
    path = tmp_path / "grpo.yaml"
    path.write_text("grpo: {normalize_rewards: false, seed: '${seed}'}\n")
    assert from_nemo_rl(path).overrides["advantage"] == "rloo"
    assert (
        from_slime({"tensor_model_parallel_size": 2}).outside[0].note
        == "set it in Megatron, SGLang or your training loop"
    )
    for call, message in (
        (lambda: from_prime_rl({"orchestrator.algo.type": "grop"}), "prime-rl has no type 'grop'. Did you mean 'grpo'"),
        (lambda: from_nemo_rl({"loss_fn.reference_policy_kl_type": "k4"}), "no reference_policy_kl_type 'k4'"),
        (lambda: from_slime({"advantage_estimator": "rloo"}), "slime has no advantage_estimator 'rloo'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert from_prime_rl({"orchestrator.algo.typo": 1}).outside  # though the table lists a path above it


def test_references_of_nemo_are_not_left_out_silently() -> None:
    grpo = {"adv_estimator": {"normalize_rewards": "${grpo.normalize_rewards}"}, "normalize_rewards": False}
    policy = {"tokenizer": {"name": "${policy.model_name}"}}
    found = from_nemo_rl({"grpo": grpo, "policy": policy})
    assert found.overrides["advantage"] == "rloo"
    assert "policy.tokenizer.name" in {row.name for row in found.outside}
    with pytest.raises(ValueError, match=r"loss_fn.ratio_clip_max='\$\{.*refers to another setting: resolve it first"):
        from_nemo_rl({"loss_fn": {"ratio_clip_max": "${loss_fn.ratio_clip_min}"}})


@pytest.mark.parametrize(("function", "table"), [(from_prime_rl, PRIME), (from_nemo_rl, NEMO)])
def test_giving_every_default_changes_nothing(function: Any, table: Any) -> None:
    given = {name: row.default for name, row in table.items() if not name.endswith("*") and row.default is not None}
    assert repr(function(given).recipe) == repr(function({}).recipe)
    assert SLIME["eps_clip"].default == 0.2
