"""The presets, and a table of them.

``presets.csv`` has a line for each value of an algorithm that is not the default, with its source. To add an algorithm, add its
lines there and a row to ``tests/units/algorithms/test_presets.py``, and run ``make docs``. Outside the package, call
``ALGORITHMS.add(name, Algorithm(...))``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from torchrl_llm_kl._foreign import read_table
from torchrl_llm_kl._registry import Registry, UnknownNameError
from torchrl_llm_kl.algorithms._algorithm import Algorithm

if TYPE_CHECKING:
    from torchrl_llm_kl.algorithms import AlgorithmName


class UnknownAlgorithmError(UnknownNameError):
    """Unknown algorithm. The message lists the registered names and suggests the nearest one."""


#: Every preset by name, a read-only mapping. ``dataclasses.replace`` makes a variant.
ALGORITHMS: Registry[Algorithm] = Registry("algorithm", error=UnknownAlgorithmError)


def get_algorithm(name: AlgorithmName) -> Algorithm:
    """Look a preset up by name.

    Raises:
        UnknownAlgorithmError: a ``ValueError`` that lists the names and suggests the nearest one.

    Example:
        >>> get_algorithm("dapo").objective
        'dapo'
    """
    return ALGORITHMS[name]


def _register_presets() -> None:
    """Register the presets of the table."""
    values: dict[str, dict[str, object]] = {}
    sources: dict[str, dict[str, str]] = {}
    for row in read_table("algorithms/presets.csv"):
        value: object
        name, field, value = row["algorithm"], row["field"], row["value"]
        with suppress(ValueError):  # a word without quotes is a string
            value = json.loads(value)
        values.setdefault(name, {})[field] = value
        if row["source"]:  # a value can share the source of the row above
            sources.setdefault(name, {})[field] = row["source"]
    for name, fields in values.items():
        ALGORITHMS.add(name, Algorithm(name, sources=sources.get(name, {}), **fields))  # type: ignore[arg-type]


_register_presets()

# ------------------------------------------------------------------ tables


def algorithm_table(learning_tests: dict[str, str] | None = None) -> str:
    """A Markdown table of objective, advantage, KL placement, aggregation and repeats of each algorithm.

    Args:
        learning_tests: algorithm -> result of its learning test, for one more column.

    Example:
        >>> print(algorithm_table().splitlines()[2])
        | `ppo` | `ppo` | `gae(whiten=True)` | loss: `k2`, 0.001 | `token-mean` | 1 | `experience` |
    """
    header = ["algorithm", "objective", "advantage", "KL to the reference", "sum over tokens", "answers", "data"]
    rows = [_table_row(preset) for preset in ALGORITHMS.values()]
    if learning_tests:
        header.append("learning test")
        for name, row in zip(ALGORITHMS, rows, strict=True):
            row.append(learning_tests.get(name, "—"))
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *rows]) + "\n"


def _table_row(preset: Algorithm) -> list[str]:
    advantage = "the best" if preset.keep_best else "—"
    if preset.advantage is not None:
        advantage = _shown_call(preset.advantage, preset.advantage_args)
    kl = []
    if preset.kl_loss != "none":
        kl.append(f"loss: `{preset.kl_loss}`, {preset.kl_loss_coeff:g}")
    if preset.kl_reward != "none":
        kl.append(f"reward: `{preset.kl_reward}`, {preset.kl_reward_coeff:g}")
    if "ref_log_prob" in preset.spec.needs:
        kl.append("in the objective")
    return [
        f"`{preset.name}`",
        _shown_call(preset.spec.name, preset.objective_args),
        advantage,
        "; ".join(kl) or "none",
        f"`{preset.summed}`",
        str(preset.repeat_times),
        f"`{preset.schema}`",
    ]


def _shown_call(name: str, args: Mapping[str, object]) -> str:
    shown = ", ".join(f"{key}={value}" for key, value in args.items())
    return f"`{name}({shown})`" if shown else f"`{name}`"
