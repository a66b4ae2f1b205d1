"""Translation of verl's configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchrl_llm_kl._foreign import VERL
from torchrl_llm_kl._registry import flatten
from torchrl_llm_kl.algorithms.elsewhere._translation import (
    NOT_APART,
    Reader,
    Translation,
    read_mapping,
    read_yaml,
    resolved,
)

if TYPE_CHECKING:
    from torchrl_llm_kl.algorithms import AlgorithmName

_A, _R, _G = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "algorithm."
_C = f"{_G}rollout_correction."
_CLIP = (f"{_A}clip_ratio_low", f"{_A}clip_ratio_high")

#: Loss modes that read the clip range.
_CLIPPED = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "clip_cov", "geo_mean", "cispo")


def from_verl(config: str | os.PathLike[str] | Mapping[str, object] | Sequence[str]) -> Translation:
    """Translate a configuration of verl 0.9.

    Args:
        config: the path of a YAML file, YAML text, a mapping, or a list of Hydra's overrides
            (``"algorithm.adv_estimator=grpo"``). Missing settings have verl's defaults.

    Returns:
        A :class:`Translation` that reproduces verl's algorithm with its defaults: GAE and a critic, no KL, ``clip_ratio_low``
        and ``clip_ratio_high`` of 0.2 for any ``clip_ratio``, a dual clip at 3, and the mean over tokens.
        ``docs/differences.md`` lists the differences of the losses that no setting removes.

    Raises:
        ValueError: for an unknown advantage, loss or estimator, or a value that refers to another setting.

    Example:
        >>> translation = from_verl(["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8",
        ...     "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.clip_ratio_high=0.28"])
        >>> translation.algorithm, translation.overrides["kl_loss"], translation.overrides["objective_args"]["clip_high"]
        ('grpo', 'low_var_kl', 0.28)
        >>> print(from_verl(["actor_rollout_ref.actor.clip_ratio=0.3"]).outside[0].note)
        no effect in verl while clip_ratio_low and clip_ratio_high are numbers, as by default: set these
    """
    given = _settings_of(config)
    reader = Reader("verl", VERL, given)
    algorithm = _choose_advantage(reader)
    mode = reader[f"{_A}policy_loss.loss_mode"]
    if mode == "bypass_mode":
        reader.refuse(f"{_A}policy_loss.loss_mode", VERL[f"{_C}bypass_mode"].note)
        mode = "vanilla"
    reader.choose(f"{_A}policy_loss.loss_mode", mode)
    if mode == "dro" and not (reader[f"{_A}policy_loss.dro_beta"] or 0) > 0:
        raise ValueError("policy_loss.dro_beta must be a positive number with loss_mode='dro': verl has no default.")
    if mode in _CLIPPED:
        _set_clip(reader)
    _set_kl(reader)
    reader.copy(f"{_A}entropy_coeff")
    _set_aggregation(reader, mode)
    reader.verls_corrections(_C)
    # Settings of features that are switched off have no effect, so they need no counterpart.
    for section, switch in (("distillation.", "distillation.enabled"), (f"{_G}pf_ppo.", f"{_G}use_pf_ppo")):
        if not given.get(switch):
            for name in [name for name in given if name.startswith(section)]:
                reader.out(name, f"no effect in verl without {switch}")
    reader.group(algorithm, f"{_R}n")
    return reader.finish(algorithm, reader.sample(f"{_R}temperature", f"{_R}top_p", f"{_R}top_k"))


def _settings_of(config: str | os.PathLike[str] | Mapping[str, object] | Sequence[str]) -> dict[str, object]:
    """The settings by path. References to other settings are left out if verl's own files contain them."""
    if isinstance(config, (str, os.PathLike, Mapping)):
        given = flatten(read_mapping(config, "a configuration of verl"))
    else:
        given = {}
        for each in config:
            name, equals, text = each.partition("=")
            if not equals:
                raise ValueError(f"expected 'path=value', as in 'algorithm.adv_estimator=grpo', got {name!r}.")
            given |= flatten({name.strip().lstrip("+"): read_yaml(text)})
    # Hydra's class paths set nothing of the algorithm.
    given = {name: value for name, value in given.items() if not name.endswith("_target_")}
    # verl's own file sets response_length to a reference.
    return resolved(given, VERL, lambda name, _: name == f"{_R}response_length")


def _choose_advantage(reader: Reader) -> AlgorithmName:
    name = reader[f"{_G}adv_estimator"]
    if name == "gpg":
        reader.refuse(f"{_G}adv_estimator", "verl scales it by the share of nonzero rewards in the whole batch")
        name = "grpo"
    choice = reader.choose(f"{_G}adv_estimator", name)
    divides = f"{_G}norm_adv_by_std_in_grpo"
    if choice.overrides["advantage"] == "grpo" and not reader.take(divides):
        reader.overrides["advantage"] = "dr_grpo"
    if choice.here == "gdpo":
        if reader[f"{_G}gdpo_reward_weights"] is not None:
            reader.copy(f"{_G}gdpo_reward_weights")
        if not reader[divides]:
            reader.refuse(divides, NOT_APART)
    return choice.here  # type: ignore[return-value]


def _set_clip(reader: Reader) -> None:
    """Set the clip range. ``clip_ratio`` has no effect unless ``clip_ratio_low`` or ``clip_ratio_high`` is null."""
    both = f"{_A}clip_ratio"
    bounds = [reader.take(both) if reader.take(name) is None else reader[name] for name in _CLIP]
    reader.out(both, "no effect in verl while clip_ratio_low and clip_ratio_high are numbers, as by default: set these")
    reader.objective.update(zip(("clip_low", "clip_high"), bounds, strict=True))


def _estimator(reader: Reader, name: str) -> str:
    value = reader[name]
    plus = "+" if isinstance(value, str) and value.endswith("+") else ""
    own = reader.choose(name, value.removesuffix("+") if plus else value).here
    return own if own == "k2" else own + plus  # k2 already has the gradient that "+" adds


def _set_kl(reader: Reader) -> None:
    """Set the KL in the loss and in the reward."""
    reader.take(f"{_A}use_kl_loss")
    reader.overrides["kl_loss"] = "none"
    if reader[f"{_A}use_kl_loss"]:
        reader.overrides["kl_loss"] = _estimator(reader, f"{_A}kl_loss_type")
        reader.copy(f"{_A}kl_loss_coef")
    reader.take(f"{_G}use_kl_in_reward")
    reader.overrides["kl_reward"] = "none"
    if reader[f"{_G}use_kl_in_reward"]:
        # A reward carries no gradient, so "+" changes nothing here.
        reader.overrides["kl_reward"] = _estimator(reader, f"{_G}kl_penalty").removesuffix("+")
        kind, coeff = reader.take(f"{_G}kl_ctrl.type"), reader.take(f"{_G}kl_ctrl.kl_coef")
        reader.known("kl_ctrl.type", kind, ("fixed", "adaptive"))
        if kind == "adaptive":
            coeff = reader.adaptive(coeff, f"{_G}kl_ctrl.")
        reader.overrides["kl_reward_coeff"] = coeff


def _set_aggregation(reader: Reader, mode: str) -> None:
    name = f"{_A}loss_agg_mode"
    aggregation = reader.take(name)
    if aggregation == "token-sum":
        reader.refuse(name, "a sum over tokens grows with the batch, here only means are available")
        return
    known = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    reader.known("loss_agg_mode", aggregation, known)
    reader.overrides["aggregation"] = aggregation
    if aggregation == "seq-mean-token-sum-norm":
        lengths = (f"{_A}loss_scale_factor", f"{_R}response_length", "data.max_response_length")
        # verl divides by the first of these that is set.
        length = next(name for name in lengths if reader[name] is not None)
        reader.copy(length)
    # verl's sapo and geo_mean ignore loss_agg_mode. geo_mean has one number per sequence, so several modes are equal.
    own = {"sapo": ("seq-mean-token-mean",), "geo_mean": ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")}
    if aggregation not in own.get(mode, (aggregation,)):
        reader.one_aggregation(name, mode, own[mode][0], aggregation, f"set {own[mode][0]}")
        reader.overrides.pop("max_len", None)
