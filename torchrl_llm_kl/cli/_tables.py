"""Tables of algorithms, estimators and versions, for people and as JSON."""

from __future__ import annotations

import platform
from dataclasses import asdict, fields
from typing import Any

from torchrl_llm_kl.cli._console import CommandError, cells_of, print_json, print_table

# ------------------------------------------------------------------ algorithms


def show_algorithms(as_json: bool) -> None:
    """All presets, a row each."""
    from torchrl_llm_kl.algorithms import ALGORITHMS, algorithm_table

    if as_json:
        print_json([_preset(preset) for preset in ALGORITHMS.values()])
        return
    header, rows = cells_of(algorithm_table())
    shown = [i for i, name in enumerate(header) if name != "sum over tokens"]  # that of the objective, mostly
    table = [[*(row[i] for i in shown), _models(ALGORITHMS[row[0]])] for row in rows]
    print_table([*(header[i] for i in shown), "models"], table)


def show_algorithm(name: str, as_json: bool) -> None:
    """One preset: what it needs, and each setting with its source."""
    from torchrl_llm_kl.algorithms import ALGORITHMS, UnknownAlgorithmError

    try:
        preset = ALGORITHMS[name]
    except UnknownAlgorithmError as error:
        raise CommandError(str(error)) from None
    found = _preset(preset)
    if as_json:
        print_json(found)
        return
    print(f"{preset.name}\n")
    print_table(["needs", ""], [[need, text] for need, text in found["needs"].items()])
    print()
    rows = [[key, str(row["value"]), row["source"]] for key, row in found["settings"].items()]
    print_table(["setting", "value", "source"], rows)


def _models(preset: Any) -> str:
    """The models besides the policy."""
    teacher = "teacher" if preset.schema == "distill" else "reference"
    found = [teacher] if preset.needs_reference else []
    return ", ".join([*found, "critic"] if preset.use_critic else found) or "none"


def _preset(preset: Any) -> dict[str, Any]:
    return {"name": preset.name, "needs": _needs(preset), "settings": _settings(preset)}


def _needs(preset: Any) -> dict[str, str]:
    from torchrl_llm_kl.algorithms import SCHEMAS

    group = preset.repeat_times > 1 and preset.schema not in ("dpo", "sft", "unpaired")
    required = [
        entry.key if isinstance(entry.key, str) else ", ".join(entry.key)
        for entry in SCHEMAS[preset.schema].entries
        if entry.required
    ]
    pairs = ", in pairs of chosen and rejected" if SCHEMAS[preset.schema].paired else ""
    return {
        "models besides the policy": _models(preset),
        "answers of": "the policy" if preset.on_policy else "the data",
        "answers per prompt": f"{preset.repeat_times}" + (", compared as a group" if group else ""),
        "data": f"schema {preset.schema}: {'; '.join(required)}{pairs}",
        "advantages computed by": "the trainer"
        if preset.compute_advantage_in_trainer
        else "the trainer or the collector",
    }


def _settings(preset: Any) -> dict[str, dict[str, Any]]:
    """Setting -> value and source, hyper-parameters of objective and advantage included."""
    from torchrl_llm_kl.advantages import advantage_spec, get_advantage
    from torchrl_llm_kl.losses import get_objective, spec_of

    objective = spec_of(get_objective(preset.objective))
    assert objective is not None
    parts: list[tuple[str, dict[str, Any], str]] = []
    own = {**objective.defaults, **preset.objective_args}
    parts += [("objective", own, objective.source)]
    if preset.advantage is not None:
        advantage = get_advantage(preset.advantage)
        spec = advantage_spec(advantage)
        parts += [("advantage", {**_defaults(advantage, spec.hyper), **preset.advantage_args}, spec.source)]
    of_part = {part: source for part, _, source in parts}
    out: dict[str, dict[str, Any]] = {}
    for field in fields(preset):
        name = field.name
        if name in ("name", "sources", "objective_args", "advantage_args"):
            continue
        value = getattr(preset, name)
        if name == "aggregation" and value is None:
            value, source = objective.aggregation, preset.sources.get(name, f"that of {preset.objective}")
        else:
            source = preset.sources.get(name) or of_part.get(name) or ""
            source = source or ("follows from the others" if name in preset.derived else "default")
        out[name] = {"value": value, "source": source}
        for part, hyper, _ in parts:
            if part == name:
                given = preset.objective_args if part == "objective" else preset.advantage_args
                for key, setting in hyper.items():
                    where = preset.sources.get(part, "preset") if key in given else f"default of {value}"
                    out[f"{part}.{key}"] = {"value": setting, "source": where}
    for row in out.values():
        row["source"] = row["source"].replace("``", "")
    return out


def _defaults(function: Any, names: tuple[str, ...]) -> dict[str, Any]:
    import inspect

    parameters = inspect.signature(function).parameters
    return {
        name: parameters[name].default
        for name in names
        if name in parameters and parameters[name].default is not inspect.Parameter.empty
    }


# ------------------------------------------------------------------ estimators


def show_estimators(as_json: bool) -> None:
    """The contract of each estimator."""
    from torchrl_llm_kl.estimators import QUANTITIES, contracts, estimator_table

    if as_json:
        gradients = ("loss_gradient", "reward_gradient", "loss_gradient_off_policy")
        known = [asdict(contract) for contract in contracts()]
        print_json(
            [
                {key: QUANTITIES[value] if key in gradients else _plain(value) for key, value in row.items()}
                for row in known
            ]
        )
        return
    header, rows = cells_of(estimator_table())
    off_policy = [i for i, name in enumerate(header) if i == 0 or name.startswith("off-policy")]
    on_policy = [i for i, name in enumerate(header) if i not in off_policy[1:] and name != "holds"]
    for title, columns in (
        ("Tokens that the policy p sampled; q is the reference:", on_policy),
        ("\nTokens that another policy, old, sampled:", off_policy),
    ):
        print(f"{title}\n")
        print_table(
            [header[i].removeprefix("off-policy: ") for i in columns], [[row[i] for i in columns] for row in rows]
        )
    print("\nThis holds")
    for row in rows:
        if row[-1] != "always":
            print(
                f"  for {row[0]} {row[-1].removeprefix('value: ')}".replace(" unbiased: ", ", unbiased with direction ")
            )


def _plain(value: Any) -> Any:
    return value.replace("*", "").replace("`", "") if isinstance(value, str) else value


# ------------------------------------------------------------------ versions

_PACKAGES = ("torch", "tensordict", "torchrl", "transformers", "tokenizers", "ray", "peft", "pyarrow", "typer", "rich")


def show_version(everything: bool, as_json: bool) -> None:
    """The version; with ``everything``, all that a bug report needs."""
    from torchrl_llm_kl import __version__
    from torchrl_llm_kl.training import versions

    found: dict[str, str] = {"torchrl-llm-kl": __version__}
    if everything:
        here = versions(_PACKAGES)
        found |= {name: here.get(name, "not installed") for name in _PACKAGES}
        found |= {"python": platform.python_version(), "platform": platform.platform(), "CUDA": _cuda()}
    if as_json:
        print_json(found)
    elif everything:
        print_table(["", "version"], [[name, text] for name, text in found.items()])
    else:
        print(f"torchrl-llm-kl {__version__}")


def _cuda() -> str:
    import torch

    if torch.version.cuda is None:
        return "none (torch is built without)"
    if not torch.cuda.is_available():
        return f"{torch.version.cuda}, no device"
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{torch.version.cuda}, {', '.join(devices)}"
