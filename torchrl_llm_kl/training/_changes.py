"""Settings that change in the middle of a run: ``train(config, changes=["optimizer.lr=1e-6"])``, or ``--change``."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict, cast

from torch import Tensor, nn

from torchrl_llm_kl.estimators import FixedKLCoefficient
from torchrl_llm_kl.training._checkpoints import Checkpoint, Checkpoints
from torchrl_llm_kl.training._config import (
    MAY_CHANGE,
    SETTINGS,
    ConfigError,
    TrainConfig,
    as_yaml,
    changed_keys,
    differences,
    read_config,
)

if TYPE_CHECKING:
    from torchrl_llm_kl.algorithms import AlgorithmParts

_WEIGHTS = "a checkpoint holds the weights of this model"
_PROMPTS = "the run would evaluate prompts on which it has trained"
#: Settings and sections that no run can change after its start -> the reason.
_FIXED = {
    **dict.fromkeys(("model.name", "model.tokenizer", "model.dtype"), _WEIGHTS),
    **dict.fromkeys(("lora", "lora.r", "lora.alpha", "lora.targets"), "a checkpoint holds adapters of this shape"),
    "reference": "the KLs before and after the change would have different references",
    **dict.fromkeys(("algorithm.name", "algorithm.teacher"), "a checkpoint holds the state of this algorithm"),
    "algorithm.args.use_critic": "a checkpoint holds a critic only if the run began with one",
    "optimizer.name": "a checkpoint holds the state of this optimiser",
    **dict.fromkeys(("data.prompts", "data.held_out", "data.held_out_share"), _PROMPTS),
    "run.seed": "a checkpoint holds the state of the random numbers",
}


class Change(TypedDict):
    """A setting that changed before the step with index ``step``."""

    step: int
    key: str
    before: object
    now: object


def changes_of(saved: Checkpoint | None) -> list[Change]:
    """The changes of a run up to its checkpoint."""
    return [] if saved is None else cast(list[Change], list(saved.numbers.get("changes", [])))


def resume_with(
    config: TrainConfig, changes: Sequence[str], checkpoints: Checkpoints
) -> tuple[TrainConfig, Checkpoint | None, list[str]]:
    """The configuration and the checkpoint with which a run resumes.

    Earlier changes of the run persist: they replace the values that ``config`` still has from before them.

    Args:
        config: the given settings.
        changes: settings to change from the next step on, such as ``"optimizer.lr=1e-6"``.
        checkpoints: the checkpoints of the run.

    Returns:
        The settings to use, the last checkpoint with all changes in its ``numbers``, and messages for the user. Without
        a checkpoint ``config``, None and no messages.

    Raises:
        ConfigError: if the settings differ in others than the changed ones, or a change is impossible.
    """
    out, saved = checkpoints.folder.parent, checkpoints.latest()
    if saved is None:
        if checkpoints.paths():
            raise ConfigError(f"no checkpoint in {checkpoints.folder} is whole: begin anew with --fresh.")
        if changes:
            raise ConfigError(f"{out} has no checkpoint to change: pass {' '.join(changes)} without --change.")
        return config, None, []
    recorded, old, said = changes_of(saved), cast(Mapping[str, object], saved.numbers.get("config", {})), []
    settings = config.to_dict()
    # The first command still has the old values of settings that were changed since.
    for key, (given, now) in differences(settings, old).items():
        change = next((each for each in reversed(recorded) if each["key"] == key), None)
        if change is not None and given in [each["before"] for each in recorded if each["key"] == key]:
            _put(settings, key, now)
            said.append(f"{key} is {now} since step {change['step']}, by --change. The configuration has {given}.")
    config = read_config(settings, changes)
    wanted = changed_keys(changes)
    if free := [key for key in wanted if not MAY_CHANGE.isdisjoint({key, key.split(".")[0]})]:
        raise ConfigError(f"{', '.join(free)} may differ in a resumed run: pass it as KEY=VALUE, without --change.")
    different = differences(old, config.to_dict())
    others = [key for key in different if not any(_covers(each, key) for each in wanted)]
    for key in [key for key in different if key not in others]:
        if reason := _reason(key):
            raise ConfigError(
                f"{key} cannot change in the middle of a run: {reason}. To begin a new run from these weights, pass "
                f"model.name={saved.folder / 'model'} and another run.out."
            )
    if others:
        listed = "; ".join(f"{key}: {different[key][0]}, now {different[key][1]}" for key in others)
        free = [key for key in others if not _reason(key)]
        advice = " ".join(f"--change {shlex.quote(f'{key}={as_yaml(different[key][1])}')}" for key in free)
        advice = f"change the run from step {saved.step} on with {advice}, " if advice else ""
        raise ConfigError(
            f"{out} has a run with other settings ({listed}): use those, {advice}or begin anew with --fresh."
        )
    # They count from the checkpoint on, where the run continues.
    new = [Change(step=saved.step, key=key, before=x, now=y) for key, (x, y) in different.items()]
    said += [f"from step {saved.step} on, {each['key']} is {each['now']} instead of {each['before']}." for each in new]
    numbers = {**saved.numbers, "config": config.to_dict(), "changes": [*recorded, *new]}
    return config, replace(saved, numbers=numbers) if new else saved, said


def _covers(change: str, key: str) -> bool:
    """Whether a change is of a setting, of the values in it, or of the section around it."""
    return f"{key}.".startswith(f"{change}.") or f"{change}.".startswith(f"{key}.")


def _reason(key: str) -> str:
    """The reason why a setting cannot change in the middle of a run. Empty if it can."""
    own = (text for each, text in _FIXED.items() if f"{key}.".startswith(f"{each}."))
    return "" if key == "lora.merge" else next(own, "")


def _put(settings: dict[str, object], key: str, value: object) -> None:
    """Set the value of a path such as ``algorithm.args.clip_high``. None removes a key inside of a setting."""
    *path, leaf = key.split(".")
    for name in path:
        settings = cast(dict[str, object], settings.setdefault(name, {}))
    if value is None and key not in SETTINGS:
        settings.pop(leaf, None)
    else:
        settings[leaf] = copy.deepcopy(value)


def prompts_used(step: int, num_prompts: int, changes: Sequence[Change]) -> int:
    """The number of prompts of the first ``step`` steps, if ``num_prompts`` is the number in a step now.

    Example:
        >>> prompts_used(5, 4, [Change(step=3, key="data.num_prompts", before=2, now=4)])
        14
    """
    used = 0
    # Backwards, since each change knows the number before it.
    for change in reversed([each for each in changes if each["key"] == "data.num_prompts"]):
        used += (step - change["step"]) * num_prompts
        step, num_prompts = change["step"], cast(int, change["before"])
    return used + step * num_prompts


def changed_state(
    saved: Mapping[str, object], parts: AlgorithmParts, coefficient: nn.Module | None, keys: set[str]
) -> dict[str, object]:
    """The state of an algorithm after a change of settings, for ``parts.load_state_dict``.

    Numbers of the settings, such as a clip range or a fixed coefficient, keep their new values. State that training changes
    continues: the value of an adaptive coefficient, its average KL, and the statistics of an advantage.

    Args:
        saved: the state in the checkpoint.
        parts: the algorithm, built with the new settings.
        coefficient: the coefficient of the KL.
        keys: the settings that change at this step.
    """
    owners: dict[str, nn.Module] = {}
    for prefix in ("loss", "critic_loss", "kl_transform", "advantage", "selection"):
        part = getattr(parts, prefix)
        owners |= {} if part is None else dict(part.named_modules(prefix=prefix))
    state = parts.state_dict()
    for key, fresh in state.items():
        owner, before = owners.get(key.rpartition(".")[0]), saved.get(key)
        adapts = not isinstance(owner, FixedKLCoefficient) and (hasattr(owner, "update") or "loss" not in key)
        if isinstance(before, Tensor) and isinstance(fresh, Tensor):
            # An adaptive coefficient cannot leave 0, so it does not continue from a fixed one of 0.
            given = keys & {"kl.coefficient", "kl.controller_args.init"} or not bool((before > 0).all())
            anew = owner is coefficient and key.endswith(".value") and given
            if adapts and not anew and before.shape == fresh.shape:
                state[key] = before
    return state


def at_step(changes: Sequence[Change], step: int) -> set[str]:
    """The settings that change at a step."""
    return {each["key"] for each in changes if each["step"] == step}
