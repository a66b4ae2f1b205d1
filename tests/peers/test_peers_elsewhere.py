"""Losses of translated configurations equal those of Trinity-RFT and verl, and the tables have all of their fields."""

import ast
from types import SimpleNamespace
from typing import Any

import pytest
from test_peers_losses import TRINITY, trinity
from torch import Tensor, nn

from elsewhere_batches import agree, differ, evaluated, ours, scored, with_gradients
from peers import folder, load
from project import tables
from torchrl_llm_kl import from_trinity, from_verl
from torchrl_llm_kl._foreign import VERL, find_row
from torchrl_llm_kl._registry import flatten
from torchrl_llm_kl.algorithms.elsewhere._translation import CHOICES, read_mapping

KLS = dict(k1="K1Fn", k2="K2Fn", k3="K3Fn", low_var_kl="LowVarKLFn", corrected_k3="CorrectedK3Fn", abs="AbsFn")
#: Of ``elsewhere.yaml``. That each of Trinity's algorithms has its functions is shown below, and what these compute with in
#: ``test_peers_losses.py``.
OF_TRINITY, OF_VERL = tables(__file__, "elsewhere").values()


def trinitys(monkeypatch: pytest.MonkeyPatch, model: nn.Module, batch: dict[str, Tensor], **settings: Any) -> Tensor:
    """The loss of Trinity's validator and of its loss for verl's engine: policy loss minus entropy plus KL."""
    loss_name, kl_name = settings.get("policy_loss_fn", "ppo"), settings.get("kl_loss_fn", "k2")
    function, mode = trinity(monkeypatch, loss_name), settings.get("loss_agg_mode", "token-mean")
    args = dict(settings.get("policy_loss_fn_args") or function.default_args())
    if "loss_agg_mode" in args:
        args["loss_agg_mode"] = mode
    (log_prob, entropy), mask = scored(model, batch), batch["mask"]
    inputs = {"action_mask": mask, "advantages": batch["advantage"][:, None].expand_as(mask)}
    inputs |= {} if loss_name == "opmd" else {"old_logprob": batch["old"]}
    loss, _ = function(**args)(log_prob, **inputs)
    coeff = settings.get("entropy_loss_fn_args", {}).get("entropy_coef", 0.0)
    loss = loss - coeff * load(monkeypatch, "trinity", "trinity.algorithm.utils").aggregate_loss(entropy, mask, mode)
    if kl_name == "none":
        return loss
    kl = getattr(load(monkeypatch, "trinity", "trinity.algorithm.kl_fn.kl_fn"), KLS[kl_name])
    made = kl(**settings.get("kl_loss_fn_args", {}))
    return loss + made.calculate_kl_loss(log_prob, batch["ref"], mask, mode, old_logprob=batch["old"])[0]


@pytest.mark.parametrize("name", OF_TRINITY)
def test_the_loss_is_trinitys(monkeypatch: Any, model: nn.Module, batch: Any, name: str) -> None:
    settings = OF_TRINITY[name]
    found = from_trinity({"algorithm": {"algorithm_type": "grpo", **settings}})
    assert not found.refused
    agree(ours(model, batch, found), with_gradients(model, lambda: trinitys(monkeypatch, model, batch, **settings)))


def test_trinitys_algorithms_and_their_functions() -> None:
    """Each of Trinity's algorithms translates to the functions of its default_config, read from the source."""
    tree = ast.parse((folder("trinity") / "algorithm" / "algorithm.py").read_text(encoding="utf-8"))
    configs = {}
    for cls in [node for node in tree.body if isinstance(node, ast.ClassDef)]:
        made = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "default_config"]
        returned = [node.value for node in ast.walk(made[0]) if isinstance(node, ast.Return)] if made else []
        if returned and returned[0] is not None:
            configs[cls.name.removesuffix("Algorithm").lower()] = ast.literal_eval(returned[0])
    spelled = {name.replace("_", ""): name for name in CHOICES["Trinity-RFT", "", "algorithm.algorithm_type"]}
    names = {"reinforceplusplus": "reinforceplusplus", "onpolicydistill": "on_policy_distill", **spelled}
    assert {names[kind] for kind in configs} == set(CHOICES["Trinity-RFT", "", "algorithm.algorithm_type"])
    for kind, config in configs.items():
        recipe = from_trinity({"algorithm_type": names[kind]}).recipe
        assert recipe["objective"] == config["policy_loss_fn"], kind
        assert recipe["objective"] in TRINITY, kind
        if kind != "dpo":
            assert recipe["kl_loss"] == config.get("kl_loss_fn", "k2"), kind


A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
#: An advantage that needs no critic.
GRPO = "algorithm.adv_estimator=grpo"
INNER = ("loss_mode", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")


def settings_of(name: str) -> list[str]:
    each = OF_VERL[name].split()
    return [f"{A}.{'policy_loss.' * x.startswith(INNER)}{x}" for x in each]


def verls(core: Any, model: Any, batch: dict[str, Tensor], settings: list[str]) -> Tensor:
    """verl's ``ppo_loss``: the policy loss, minus the entropy, plus the KL."""
    config = {name.removeprefix(f"{A}."): row.default for name, row in VERL.items() if name.startswith(f"{A}.")}
    for each in settings:
        name, _, text = each.partition("=")
        number = text.replace(".", "", 1).isdigit()
        value = {"true": True, "null": None}.get(text.lower(), float(text) if number else text)
        config[name.removeprefix(f"{A}.")] = value
    inner = {key.removeprefix("policy_loss."): config.pop(key) for key in [*config] if key.startswith("policy_loss.")}
    values = {**config, "global_batch_info": {"loss_scale_factor": config["loss_scale_factor"]}}
    values |= {"policy_loss": SimpleNamespace(**inner), "get": lambda self, key, default: getattr(self, key, default)}
    made = type("Settings", (core.ActorConfig,), values)()
    log_prob, entropy = scored(model, batch)
    mask, mode = batch["mask"].double(), config["loss_agg_mode"]
    inputs = {"old_log_prob": batch["old"], "log_prob": log_prob, "response_mask": mask, "loss_agg_mode": mode}
    inputs["advantages"] = batch["advantage"][:, None].expand_as(mask)
    loss, _ = core.get_policy_loss_fn(inner["loss_mode"])(**inputs, config=made)
    more = {"loss_mask": mask, "loss_agg_mode": mode, **made.global_batch_info}
    loss = loss - config["entropy_coeff"] * core.agg_loss(loss_mat=entropy, **more)
    if config["use_kl_loss"]:
        kl = core.kl_penalty(log_prob, batch["ref"], config["kl_loss_type"])
        loss = loss + config["kl_loss_coef"] * core.agg_loss(loss_mat=kl, **more)
    return loss


@pytest.mark.parametrize("name", OF_VERL)
def test_the_loss_is_verls(monkeypatch: Any, model: nn.Module, batch: Any, name: str) -> None:
    """Leaving out any setting changes the gradients."""
    core = load(monkeypatch, "verl", "verl.trainer.ppo.core_algos", stubs=("omegaconf",))
    settings = settings_of(name)
    found = evaluated(model, batch, from_verl([GRPO, *settings]))
    agree(found, with_gradients(model, lambda: verls(core, model, batch, settings)))
    for setting in settings if "nothing" not in name and name != "dro" else ():
        without = from_verl([GRPO, *(other for other in settings if other != setting)])
        assert without.refused or differ(found, evaluated(model, batch, without)), setting


def test_the_table_has_verls_fields_and_defaults() -> None:
    """Every path of verl's generated configuration has a row. Translated rows have verl's default."""
    file = folder("verl") / "trainer/config/_generated_ppo_trainer.yaml"
    given = flatten(read_mapping(file, "verl's"))
    given = {name: value for name, value in given.items() if not name.endswith("_target_")}
    assert not [name for name in given if find_row(VERL, name) is None]
    rows = {name: row for name, row in VERL.items() if row.place in ("override", "sampling") and name in given}
    assert len(rows) > 35
    different = {name for name, row in rows.items() if row.default != given[name]}
    assert different == {name for name in rows if "${" in str(given[name])} == {f"{R}.response_length"}
    # The file with all defaults is the translation of nothing, and everything in it has a place.
    found = from_verl(file)
    assert repr(found.recipe) == repr(from_verl([]).recipe)
    assert not found.refused
