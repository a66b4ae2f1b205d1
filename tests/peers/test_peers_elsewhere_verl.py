"""The loss of a configuration of verl is that of verl's functions, and its table has verl's fields."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

from elsewhere_batches import agree, differ, evaluated, scored, with_gradients
from peers import folder, load
from torchrl_llm_kl import from_verl
from torchrl_llm_kl._foreign import VERL, find_row
from torchrl_llm_kl.algorithms.elsewhere._translation import flatten, read_mapping

A, R, G = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm"
#: An advantage that needs no critic.
GRPO = f"{G}.adv_estimator=grpo"
KL_REWARD = [GRPO, f"{G}.use_kl_in_reward=True", f"{G}.kl_penalty=low_var_kl"]
MEAN = f"{A}.loss_agg_mode=seq-mean-token-mean"


# ------------------------------------------------------------------ verl's own functions

CASES: dict[str, list[str]] = {
    "defaults": [],
    "clip": [f"{A}.clip_ratio_low=0.1", f"{A}.clip_ratio_high=0.28", f"{A}.clip_ratio_c=1.4"],
    "clip_ratio alone, which changes nothing": [f"{A}.clip_ratio=0.01"],
    "clip_ratio with null": [f"{A}.clip_ratio=0.1", f"{A}.clip_ratio_low=null", f"{A}.clip_ratio_high=null"],
    "KL in the loss": [f"{A}.use_kl_loss=True", f"{A}.kl_loss_coef=0.1"],
    "KL in the loss, k3+": [f"{A}.use_kl_loss=True", f"{A}.kl_loss_coef=0.1", f"{A}.kl_loss_type=k3+"],
    "KL in the loss, mse": [f"{A}.use_kl_loss=True", f"{A}.kl_loss_coef=0.1", f"{A}.kl_loss_type=mse"],
    "entropy": [f"{A}.entropy_coeff=0.05", MEAN],
    "sum": [f"{A}.loss_agg_mode=seq-mean-token-sum"],
    "Dr. GRPO": [f"{A}.loss_agg_mode=seq-mean-token-sum-norm", f"{A}.loss_scale_factor=17"],
    "gspo": [f"{A}.policy_loss.loss_mode=gspo", f"{A}.clip_ratio_low=0.05", f"{A}.clip_ratio_high=0.1", MEAN],
    "gspo by tokens": [f"{A}.policy_loss.loss_mode=gspo", f"{A}.use_kl_loss=true"],
    "sapo": [f"{A}.policy_loss.loss_mode=sapo", f"{A}.tau_pos=1.2", f"{A}.tau_neg=1.6"],
    "sapo, KL": [f"{A}.policy_loss.loss_mode=sapo", f"{A}.use_kl_loss=true", MEAN],
    "gpg": [f"{A}.policy_loss.loss_mode=gpg"],
    "dppo_tv": [f"{A}.policy_loss.loss_mode=dppo_tv", f"{A}.clip_ratio_low=0.01", f"{A}.clip_ratio_high=0.02"],
    "dppo_kl": [f"{A}.policy_loss.loss_mode=dppo_kl", f"{A}.clip_ratio_low=0.001", f"{A}.clip_ratio_high=0.002"],
    "kl_cov": [f"{A}.policy_loss.loss_mode=kl_cov", f"{A}.policy_loss.kl_cov_ratio=0.2", f"{A}.policy_loss.ppo_kl_coef=0.6"],
    "geo_mean": [f"{A}.policy_loss.loss_mode=geo_mean", f"{A}.clip_ratio_low=0.1", f"{A}.use_kl_loss=True"],
    "dro": [f"{A}.policy_loss.loss_mode=dro", f"{A}.policy_loss.dro_beta=0.6"],
    "cispo": [f"{A}.policy_loss.loss_mode=cispo", f"{A}.clip_ratio_high=0.3"],
}  # fmt: skip


def theirs(core: Any, model: Any, batch: dict[str, Tensor], settings: list[str]) -> Tensor:
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
    loss, _ = core.get_policy_loss_fn(inner["loss_mode"])(
        old_log_prob=batch["old"],
        log_prob=log_prob,
        advantages=batch["advantage"][:, None].expand_as(mask),
        response_mask=mask,
        loss_agg_mode=mode,
        config=made,
    )
    more = {"loss_mask": mask, "loss_agg_mode": mode, **made.global_batch_info}
    loss = loss - config["entropy_coeff"] * core.agg_loss(loss_mat=entropy, **more)
    if config["use_kl_loss"]:
        kl = core.kl_penalty(log_prob, batch["ref"], config["kl_loss_type"])
        loss = loss + config["kl_loss_coef"] * core.agg_loss(loss_mat=kl, **more)
    return loss


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_verls(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, batch: dict[str, Tensor], name: str
) -> None:
    core = load(monkeypatch, "verl", "verl.trainer.ppo.core_algos", stubs=("omegaconf",))
    found = from_verl([GRPO, *CASES[name]])
    agree(evaluated(model, batch, found), with_gradients(model, lambda: theirs(core, model, batch, CASES[name])))


@pytest.mark.parametrize("name", [name for name in CASES if "nothing" not in name and name != "dro"])
def test_the_batch_shows_each_setting(model: nn.Module, batch: dict[str, Tensor], name: str) -> None:
    """Without one of them the gradients above are others."""
    found = evaluated(model, batch, from_verl([GRPO, *CASES[name]]))
    for setting in CASES[name]:
        without = from_verl([GRPO, *(other for other in CASES[name] if other != setting)])
        if not without.refused:
            assert differ(found, evaluated(model, batch, without)), setting


def test_the_table_has_verls_fields_and_defaults() -> None:
    """Every path of its generated configuration has a row, and a translated one verl's default."""
    file = folder("verl") / "trainer/config/_generated_ppo_trainer.yaml"
    given = flatten(read_mapping(file, "verl's"))
    given = {name: value for name, value in given.items() if not name.endswith("_target_")}
    assert not [name for name in given if find_row(VERL, name) is None]
    rows = {name: row for name, row in VERL.items() if row.place in ("override", "sampling") and name in given}
    assert len(rows) > 35
    referring = {name for name in rows if "${" in str(given[name])}
    assert referring == {f"{R}.response_length"}
    different = {name: (row.default, given[name]) for name, row in rows.items() if row.default != given[name]}
    assert set(different) == {f"{R}.response_length"}
    # The file with all defaults is the translation of nothing, and everything in it has a place.
    found = from_verl(file)
    assert repr(found.recipe) == repr(from_verl([]).recipe)
    assert not found.refused
