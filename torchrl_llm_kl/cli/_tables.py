"""Tables of algorithms, estimators and versions, as text and as JSON."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from torchrl_llm_kl.cli._console import CommandError, cells_of, print_json, print_table

if TYPE_CHECKING:
    from torchrl_llm_kl._registry import Spec
    from torchrl_llm_kl.algorithms import Algorithm

# ------------------------------------------------------------------ algorithms


def show_algorithms(as_json: bool) -> None:
    """Print all presets, one row each."""
    from torchrl_llm_kl.algorithms import ALGORITHMS, algorithm_table

    if as_json:
        print_json([_preset_facts(preset) for preset in ALGORITHMS.values()])
        return
    header, rows = cells_of(algorithm_table())
    shown = [i for i, name in enumerate(header) if name != "sum over tokens"]  # most presets use the objective's
    table = [[*(row[i] for i in shown), _other_models(ALGORITHMS[row[0]])] for row in rows]
    print_table([*(header[i] for i in shown), "models"], table)


def show_algorithm(name: str, as_json: bool) -> None:
    """Print one preset: its requirements, and each setting with its source."""
    from torchrl_llm_kl.algorithms import ALGORITHMS, UnknownAlgorithmError

    try:
        preset = ALGORITHMS[name]
    except UnknownAlgorithmError as error:
        raise CommandError(str(error)) from None
    if as_json:
        print_json(_preset_facts(preset))
        return
    print(f"{preset.name}\n")
    print_table(["needs", ""], list(_needs(preset).items()))
    print()
    rows = [[key, *map(str, row.values())] for key, row in _sources(preset).items()]
    print_table(["setting", "value", "source"], rows)


def _other_models(preset: Algorithm) -> str:
    """The models besides the policy."""
    teacher = "teacher" if preset.schema == "distill" else "reference"
    models = [teacher] if preset.needs_reference else []
    return ", ".join([*models, "critic"] if preset.use_critic else models) or "none"


def _preset_facts(preset: Algorithm) -> dict[str, object]:
    return {"name": preset.name, "needs": _needs(preset), "settings": _sources(preset)}


def _needs(preset: Algorithm) -> dict[str, str]:
    from torchrl_llm_kl.algorithms import SCHEMAS

    schema = SCHEMAS[preset.schema]
    group = preset.repeat_times > 1 and preset.schema not in ("dpo", "sft", "unpaired")
    keys = [entry.key for entry in schema.entries if entry.required]
    required = "; ".join(key if isinstance(key, str) else ", ".join(key) for key in keys)
    return {
        "models besides the policy": _other_models(preset),
        "answers of": "the policy" if preset.on_policy else "the data",
        "answers per prompt": f"{preset.repeat_times}{', compared as a group' * group}",
        "data": f"schema {preset.schema}: {required}{', in pairs of chosen and rejected' * schema.paired}",
        "advantages computed by": f"the trainer{' or the collector' * (not preset.compute_advantage_in_trainer)}",
    }


def _sources(preset: Algorithm) -> dict[str, dict[str, object]]:
    """Value and source of each setting, including hyper-parameters of objective and advantage."""
    from torchrl_llm_kl.advantages import advantage_spec, get_advantage

    objective = preset.spec
    parts: dict[str, tuple[Spec, Mapping[str, object]]] = {"objective": (objective, preset.objective_args)}
    if preset.advantage is not None:
        parts["advantage"] = (advantage_spec(get_advantage(preset.advantage)), preset.advantage_args)
    settings: dict[str, tuple[object, str]] = {}
    # The arguments of objective and advantage are listed one by one below their part.
    for name in (field.name for field in fields(preset)):
        if name in ("name", "sources", "objective_args", "advantage_args"):
            continue
        value, usual = getattr(preset, name), "follows from the others" if name in preset.derived else "default"
        if name == "aggregation" and value is None:
            value, usual = objective.aggregation, f"from {objective.name}"
        spec, given = parts.get(name, (None, {}))
        settings[name] = (value, preset.sources.get(name) or (spec and spec.source) or usual)
        for key, setting in {**(spec.defaults if spec else {}), **given}.items():
            source = preset.sources.get(name, "preset") if key in given else f"default of {value}"
            settings[f"{name}.{key}"] = (setting, source)
    return {key: {"value": value, "source": source.replace("``", "")} for key, (value, source) in settings.items()}


# ------------------------------------------------------------------ estimators


def show_estimators(as_json: bool) -> None:
    """Print the contract of each estimator."""
    from torchrl_llm_kl.estimators import QUANTITIES, contracts, estimator_table

    if as_json:
        gradients = ("loss_gradient", "reward_gradient", "loss_gradient_off_policy")
        known = [asdict(contract).items() for contract in contracts()]
        print_json([{key: QUANTITIES[v] if key in gradients else _without_marks(v) for key, v in row} for row in known])
        return
    header, rows = cells_of(estimator_table())
    off_policy = [i for i, name in enumerate(header) if i == 0 or name.startswith("off-policy")]
    on_policy = [i for i, name in enumerate(header) if i not in off_policy[1:] and name != "holds"]
    for title, columns in (
        ("Tokens that the policy p sampled (q is the reference):", on_policy),
        ("\nTokens that another policy, old, sampled:", off_policy),
    ):
        print(f"{title}\n")
        names = [header[i].removeprefix("off-policy: ") for i in columns]
        print_table(names, [[row[i] for i in columns] for row in rows])
    # Conditions follow the tables, where they would widen a column too much.
    print("\nThis holds")
    for name, *_, holds in rows:
        if holds != "always":
            when = holds.removeprefix("value: ").replace(" unbiased: ", ", unbiased with direction ")
            print(f"  for {name} {when}")


def _without_marks(value: object) -> object:
    return value.replace("*", "").replace("`", "") if isinstance(value, str) else value


# ------------------------------------------------------------------ versions

_PACKAGES = ("torch", "tensordict", "torchrl", "transformers", "tokenizers", "ray", "peft", "pyarrow", "typer", "rich")


def show_version(everything: bool, as_json: bool) -> None:
    """Print the version. ``everything`` adds all that a bug report needs."""
    from torchrl_llm_kl import __version__
    from torchrl_llm_kl.training import versions

    installed: dict[str, str] = {"torchrl-llm-kl": __version__}
    if everything:
        here = versions(_PACKAGES)
        installed |= {name: here.get(name, "not installed") for name in _PACKAGES}
        installed |= {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "accelerator": _accelerator(),
        }
    if as_json:
        print_json(installed)
    elif everything:
        print_table(["", "version"], [[name, text] for name, text in installed.items()])
    else:
        print(f"torchrl-llm-kl {__version__}")


def _accelerator() -> str:
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return "none (torch is built without)"
    # The build of torch decides which of these is set.
    versions = (getattr(torch.version, kind, None) for kind in ("cuda", "hip", "xpu"))
    kind = " ".join([accelerator.type, *filter(None, versions)])
    name = getattr(torch.get_device_module(accelerator), "get_device_name", lambda i: accelerator.type)
    return ", ".join([kind, *(name(i) for i in range(torch.accelerator.device_count()))])
