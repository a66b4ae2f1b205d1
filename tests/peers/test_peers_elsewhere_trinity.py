"""The loss of a configuration of Trinity-RFT is that of Trinity's functions."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from torch import Tensor, nn

from elsewhere_batches import agree, ours, scored, with_gradients
from peers import folder, load
from torchrl_llm_kl import from_trinity
from torchrl_llm_kl.algorithms.elsewhere import _trinity

# ------------------------------------------------------------------ Trinity's own functions

LOSSES = {
    "ppo": ("ppo_policy_loss", "PPOPolicyLossFn"),
    "gspo": ("gspo_policy_loss", "GSPOLossFn"),
    "cispo": ("cispo_policy_loss", "CISPOPolicyLossFn"),
    "topr": ("topr_policy_loss", "TOPRPolicyLossFn"),
    "opmd": ("opmd_policy_loss", "OPMDPolicyLossFn"),
    "sppo": ("sppo_loss_fn", "sPPOPolicyLossFn"),
    "rec": ("rec_policy_loss", "RECPolicyLossFn"),
    "importance_sampling": ("importance_sampling_policy_loss", "ImportanceSamplingLossFn"),
}
KLS = {
    "k1": "K1Fn",
    "k2": "K2Fn",
    "k3": "K3Fn",
    "low_var_kl": "LowVarKLFn",
    "corrected_k3": "CorrectedK3Fn",
    "abs": "AbsFn",
}
#: algorithm_type -> policy_loss_fn and kl_loss_fn of Trinity's `default_config`, as read from its source.
DEFAULTS = {
    "grpo": ("ppo", "k2"), "dapo": ("ppo", "none"), "opmd": ("opmd", "k2"), "asymre": ("opmd", "none"), "topr": ("topr", "k2"),
    "cispo": ("cispo", "k2"), "gspo": ("gspo", "k2"), "sppo": ("sppo", "none"), "rec": ("rec", "k2"),
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    **{kind: {"algorithm_type": kind} for kind in DEFAULTS},
    "clip": {"algorithm_type": "grpo", "policy_loss_fn_args": {"clip_range_low": 0.1, "clip_range_high": 0.28}},
    "clip both": {"algorithm_type": "grpo", "policy_loss_fn_args": {"clip_range": 0.1, "clip_ratio_c": 1.4}},
    "mean of sequences": {"algorithm_type": "grpo", "loss_agg_mode": "seq-mean-token-mean"},
    "gspo, its own mean": {"algorithm_type": "gspo", "policy_loss_fn_args": {"clip_range": 0.05}, "kl_loss_fn": "none"},
    "rec, some arguments": {
        "algorithm_type": "rec",
        "policy_loss_fn_args": {"clip_mode": "ring", "weight": "importance_sampling", "epsilon_low": 0.1},
    },
    "importance sampling": {"algorithm_type": "grpo", "policy_loss_fn": "importance_sampling"},
    "entropy": {"algorithm_type": "grpo", "entropy_loss_fn_args": {"entropy_coef": 0.05}},
    **{
        f"KL {name}": {"algorithm_type": "grpo", "kl_loss_fn": name, "kl_loss_fn_args": {"kl_coef": 0.1}}
        for name in KLS
    },
}


def theirs(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, batch: dict[str, Tensor], settings: dict[str, Any]
) -> Tensor:
    """What Trinity's validator and its loss for verl's engine do: policy loss minus entropy plus KL."""
    loss_name, kl_name = DEFAULTS[settings["algorithm_type"]]
    loss_name, kl_name = settings.get("policy_loss_fn", loss_name), settings.get("kl_loss_fn", kl_name)
    module, cls = LOSSES[loss_name]
    function = getattr(load(monkeypatch, "trinity", f"trinity.algorithm.policy_loss_fn.{module}"), cls)
    mode = settings.get("loss_agg_mode", "token-mean")
    args = dict(settings.get("policy_loss_fn_args") or function.default_args())
    if "loss_agg_mode" in args:
        args["loss_agg_mode"] = mode
    log_prob, entropy = scored(model, batch)
    mask = batch["mask"]
    inputs = {"action_mask": mask, "advantages": batch["advantage"][:, None].expand_as(mask)}
    if loss_name != "opmd":
        inputs["old_logprob"] = batch["old"]
    loss, _ = function(**args)(log_prob, **inputs)
    aggregate = load(monkeypatch, "trinity", "trinity.algorithm.utils").aggregate_loss
    coeff = settings.get("entropy_loss_fn_args", {}).get("entropy_coef", 0.0)
    loss = loss - coeff * aggregate(entropy, mask, mode)
    if kl_name != "none":
        kl = getattr(load(monkeypatch, "trinity", "trinity.algorithm.kl_fn.kl_fn"), KLS[kl_name])(
            **settings.get("kl_loss_fn_args", {})
        )
        loss = loss + kl.calculate_kl_loss(log_prob, batch["ref"], mask, mode, old_logprob=batch["old"])[0]
    return loss


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_trinitys(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, batch: dict[str, Tensor], name: str
) -> None:
    found = from_trinity({"algorithm": CASES[name]})
    assert not found.refused
    expected = with_gradients(model, lambda: theirs(monkeypatch, model, batch, CASES[name]))
    agree(ours(model, batch, found), expected)


def test_trinitys_algorithms_and_their_functions() -> None:
    """Each of Trinity's algorithms translates to the functions of its default_config, read from the source."""
    tree = ast.parse((folder("trinity") / "algorithm" / "algorithm.py").read_text(encoding="utf-8"))
    configs = {}
    for cls in [node for node in tree.body if isinstance(node, ast.ClassDef)]:
        made = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "default_config"]
        returned = [node.value for node in ast.walk(made[0]) if isinstance(node, ast.Return)] if made else []
        if returned and returned[0] is not None:
            configs[cls.name.removesuffix("Algorithm").lower()] = ast.literal_eval(returned[0])
    spelled = {name.replace("_", ""): name for name in _trinity._KNOWN}
    names = {"reinforceplusplus": "reinforceplusplus", "onpolicydistill": "on_policy_distill", **spelled}
    assert {names[kind] for kind in configs} == set(_trinity._KNOWN)
    for kind, config in configs.items():
        recipe = from_trinity({"algorithm_type": names[kind]}).recipe
        assert recipe["objective"] == config["policy_loss_fn"], kind
        if kind != "dpo":
            assert recipe["kl_loss"] == config.get("kl_loss_fn", "k2"), kind
