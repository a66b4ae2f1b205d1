"""Changes to a preset: its fields, hyper-parameters of its parts, or the section of a Trinity-RFT configuration."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from torchrl_llm_kl.advantages import advantage_spec, get_advantage
from torchrl_llm_kl.algorithms._algorithm import Algorithm
from torchrl_llm_kl.estimators import AdaptiveKLCoefficient
from torchrl_llm_kl.losses import get_objective, spec_of
from torchrl_llm_kl.losses._objective import PER_ROW, PER_TOKEN

__all__ = ["apply_overrides"]

_FIELDS = tuple(f.name for f in fields(Algorithm) if f.name not in ("name", "sources"))
# Trinity's name -> ours, where the value is the same.
_RENAMED = {
    "policy_loss_fn": "objective",
    "advantage_fn": "advantage",
    "kl_loss_fn": "kl_loss",
    "kl_penalty_fn": "kl_reward",
    "loss_agg_mode": "aggregation",
}
_ARGS = {"policy_loss_fn_args": "objective_args", "advantage_fn_args": "advantage_args"}
_KL_ARGS = {"kl_loss_fn_args": "kl_loss_coeff", "kl_penalty_fn_args": "kl_reward_coeff"}


def apply_overrides(algorithm: Algorithm, overrides: Mapping[str, Any]) -> Algorithm:
    """A preset with some values changed.

    Args:
        algorithm: the preset.
        overrides: fields of :class:`Algorithm`; hyper-parameters of its objective or its advantage; or the keys of
            Trinity-RFT's ``algorithm`` section. ``objective_args`` and ``advantage_args`` add to those of the preset.

    Raises:
        TypeError: if there is no such name, or objective and advantage both have it.
        ValueError: if a value of Trinity's cannot be honoured.
    """
    _check_said_once(overrides)
    changes: dict[str, Any] = {}
    args: dict[str, dict[str, Any]] = {"objective_args": {}, "advantage_args": {}}
    loose: dict[str, Any] = {}
    for name, value in overrides.items():
        if name == "algorithm_type":
            if str(value).replace("_", "") != algorithm.name.replace("_", ""):  # Trinity: reinforceplusplus
                raise ValueError(f"algorithm_type={value!r} is another algorithm than {algorithm.name!r}")
        elif name in _RENAMED:
            changes[_RENAMED[name]] = value
        elif name in args or name in _ARGS:
            given = dict(value or {})
            if "loss_agg_mode" in given and _ARGS.get(name, name) == "objective_args":
                changes["aggregation"] = given.pop("loss_agg_mode")  # Trinity has it among the objective's
            args[_ARGS.get(name, name)] |= given
        elif name in _KL_ARGS:
            changes[_KL_ARGS[name]] = _coefficient(value or {})
        elif name in ("entropy_loss_fn", "entropy_loss_fn_args"):
            continue  # together below: whichever comes first
        elif name == "sample_strategy_args":
            sampling = _known(name, value, "expert_data_ratio", "sft_dataset_name")
            if "sft_dataset_name" in sampling:
                warnings.warn(
                    "sft_dataset_name has no effect here: mix_buffers takes the experts' buffer", stacklevel=3
                )
            changes["expert_data_ratio"] = sampling.get("expert_data_ratio", algorithm.expert_data_ratio)
        elif name in _FIELDS:
            changes[name] = value
        else:
            loose[name] = value
    changes = _with_entropy(changes, overrides)
    if changes.get("objective") not in (None, algorithm.objective):
        changes.setdefault("objective_args", {})
    if "advantage" in changes and changes["advantage"] != algorithm.advantage:
        changes["advantage_args"] = {}
    changed = replace(algorithm, **changes)
    for name, value in loose.items():
        args[_home(changed, name)][name] = value
    merged: dict[str, Any] = {name: {**getattr(changed, name), **more} for name, more in args.items()}
    return replace(changed, **merged)


def _coefficient(args: Mapping[str, Any]) -> Any:
    """Trinity's ``{adaptive, kl_coef, target_kl, horizon}``."""
    unknown = set(args) - {"adaptive", "kl_coef", "target_kl", "horizon"}
    if unknown:
        raise TypeError(f"a KL has no argument {unknown.pop()!r}; it has adaptive, kl_coef, target_kl, horizon")
    value = args.get("kl_coef", 1e-3)
    if not args.get("adaptive"):
        return value
    if args.get("target_kl") is None or args.get("horizon") is None:
        raise ValueError("an adaptive KL coefficient needs target_kl and horizon")
    return AdaptiveKLCoefficient(value, target=args["target_kl"], horizon=args["horizon"])


def _with_entropy(changes: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Trinity's two keys for the entropy; ``"none"`` is none, whatever the coefficient."""
    changes = dict(changes)
    if "entropy_loss_fn_args" in overrides:
        given = _known("entropy_loss_fn_args", overrides["entropy_loss_fn_args"], "entropy_coef")
        changes["entropy_coeff"] = given.get("entropy_coef", 0.0)
    if "entropy_loss_fn" not in overrides:
        return changes
    name = overrides["entropy_loss_fn"]
    if name not in ("none", "default", "mix"):
        raise ValueError(f"unknown entropy_loss_fn {name!r}; known: none, default, mix")
    if name == "none":
        changes["entropy_coeff"] = 0.0
    if name == "mix":
        changes.setdefault("leave_out_experts", True)
    return changes


def _known(name: str, given: Mapping[str, Any] | None, *known: str) -> Mapping[str, Any]:
    unknown = sorted(set(given or {}) - set(known))
    if unknown:
        raise TypeError(f"{name} has no key {unknown[0]!r}; it has {', '.join(known)}")
    return given or {}


def _check_said_once(overrides: Mapping[str, Any]) -> None:
    """Of two names of one setting the last would win."""
    same = {
        **_RENAMED,
        **_KL_ARGS,
        "entropy_loss_fn_args": "entropy_coeff",
        "sample_strategy_args": "expert_data_ratio",
    }
    for other, own in same.items():
        if other in overrides and own in overrides:
            raise TypeError(f"{other!r} and {own!r} are the same setting: pass one of them")


def _home(algorithm: Algorithm, name: str) -> str:
    """Whether a hyper-parameter is the objective's or the advantage's."""
    objective = get_objective(algorithm.objective)
    spec = spec_of(objective)
    assert spec is not None
    inputs = ("log_prob", "mask", *PER_TOKEN, *PER_ROW)
    own = [key for key in inspect.signature(objective).parameters if key not in inputs]
    own += [*spec.aliases, *spec.obsolete]
    advantage: list[str] = []
    if algorithm.advantage is not None:
        found = advantage_spec(get_advantage(algorithm.advantage))
        advantage = [*found.hyper, *found.aliases, *found.obsolete, *found.refused]
    if name in own and name in advantage:
        raise TypeError(
            f"{name!r} is a hyper-parameter of the objective {algorithm.objective} and of the advantage "
            f"{algorithm.advantage}: say objective_args={{{name!r}: ...}} or advantage_args={{{name!r}: ...}}"
        )
    if name in own:
        return "objective_args"
    if name in advantage:
        return "advantage_args"
    known = [*_FIELDS, *own, *advantage]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise TypeError(
        f"{algorithm.name} has no setting {name!r}. Settings: {', '.join(_FIELDS)}; of the objective: "
        f"{', '.join(own) or 'none'}; of the advantage: {', '.join(advantage) or 'none'}.{hint}"
    )
