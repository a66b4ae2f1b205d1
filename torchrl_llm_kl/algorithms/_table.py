"""The table of algorithms, rendered from the presets."""

from __future__ import annotations

from torchrl_llm_kl.algorithms._algorithm import Algorithm
from torchrl_llm_kl.algorithms.presets import ALGORITHMS
from torchrl_llm_kl.losses import get_objective, spec_of

__all__ = ["algorithm_table", "flag_table", "source_table"]

_FLAGS = ("use_critic", "use_reference", "use_rollout", "compute_advantage_in_trainer", "can_balance_batch")


def algorithm_table(learning_tests: dict[str, str] | None = None) -> str:
    """Objective, advantage, KL placement, aggregation and repeats of each algorithm; and what a test has shown it to learn."""
    learned = learning_tests or {}
    header = ["algorithm", "objective", "advantage", "KL to the reference", "sum over tokens", "answers", "data"]
    rows = [
        [
            f"`{name}`",
            _call(preset.objective, preset.objective_args),
            _call(preset.advantage, preset.advantage_args)
            if preset.advantage
            else ("the best" if preset.keep_best else "—"),
            _kl(preset),
            f"`{_aggregation(preset)}`",
            str(preset.repeat_times),
            f"`{preset.schema}`",
            *([learned.get(name, "—")] if learned else []),
        ]
        for name, preset in ALGORITHMS.items()
    ]
    return _markdown([*header, *(["learning test"] if learned else [])], rows)


def flag_table() -> str:
    """The flags of each algorithm."""
    rows = [
        [f"`{name}`", *("yes" if getattr(preset, flag) else "" for flag in _FLAGS)]
        for name, preset in ALGORITHMS.items()
    ]
    return _markdown(["algorithm", *(f"`{flag}`" for flag in _FLAGS)], rows)


def source_table() -> str:
    """Where each value is from."""
    rows = [
        [f"`{name}`", f"`{field}`", source]
        for name, preset in ALGORITHMS.items()
        for field, source in preset.sources.items()
    ]
    return _markdown(["algorithm", "value", "source"], rows)


def _call(name: str, args: object) -> str:
    shown = ", ".join(f"{key}={value}" for key, value in dict(args).items())  # type: ignore[call-overload]
    return f"`{name}({shown})`" if shown else f"`{name}`"


def _kl(preset: Algorithm) -> str:
    parts = []
    if preset.kl_loss != "none":
        parts.append(f"loss: `{preset.kl_loss}`, {preset.kl_loss_coeff:g}")
    if preset.kl_reward != "none":
        parts.append(f"reward: `{preset.kl_reward}`, {preset.kl_reward_coeff:g}")
    if preset.objective == "dpo":
        parts.append("in the objective")
    return "; ".join(parts) or "none"


def _aggregation(preset: Algorithm) -> str:
    spec = spec_of(get_objective(preset.objective))
    assert spec is not None
    return preset.aggregation or spec.aggregation


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
