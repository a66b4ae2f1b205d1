"""What is known of an advantage beside its function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["INPUTS", "AdvantageSpec", "Kind"]

Kind = Literal["outcome", "token", "trajectory"]

#: Parameters that are data. Everything else is a hyper-parameter.
INPUTS = (
    "reward",
    "group",
    "run",
    "step",
    "state",
    "baseline",
    "mean_log_prob",
    "value",
    "old_log_prob",
    "teacher_log_prob",
    "mask",
)


@dataclass(frozen=True)
class AdvantageSpec:
    """What is known of an advantage beside its function.

    Args:
        name: in the registry.
        kind: ``"outcome"``: one number for each sequence, ``[B]``; ``"token"``: one for each token, ``[*B, T]`` with a mask;
            ``"trajectory"``: one for each step of trajectories of several sequences, ``[B]``.
        needs: inputs without which it cannot be calculated.
        optional: inputs that only a hyper-parameter asks for: input -> hyper-parameter.
        outputs: what the function returns; a tuple if there are several.
        hyper: names of its hyper-parameters.
        aliases: other names of them.
        obsolete: hyper-parameters of other libraries that nothing needs here, with the reason.
        refused: those that cannot be honoured: the one value under which they ask for nothing, and what to do instead.
        source: where the formula comes from.
    """

    name: str
    kind: Kind
    needs: tuple[str, ...]
    optional: Mapping[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("advantage",)
    hyper: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    obsolete: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    source: str = ""
