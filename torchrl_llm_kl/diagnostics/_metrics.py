"""What each metric means: formula, unit, what is normal, what a deviation says, and what to do.

Symbols: ``lp`` the current policy's log-prob of a token, ``old`` the one at sampling by the trainer, ``s`` the sampler's own,
``ref`` the reference's, ``A`` the advantage, ``r = exp(lp - old)``, ``d = old - s``. "mean" is over masked-in tokens.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from configparser import ConfigParser
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal, TypeVar

#: Where a metric comes from.
Origin = Literal[
    "every loss", "sampler", "objective", "correction", "distillation", "preferences", "critic", "task", "service"
]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Args:
        formula: how it is computed.
        unit: ``nats``, ``share`` (0 to 1), ``1`` (a ratio or another pure number), ``tokens``, ``seconds``, ...
        normal: its value in a healthy run.
        deviation: what another value says.
        remedy: what to do about it.
        origin: what reports it.
    """

    formula: str
    unit: str
    normal: str
    deviation: str
    remedy: str
    origin: Origin


T = TypeVar("T")


def read_rows(name: str) -> list[dict[str, str]]:
    """The rows of one of this package's ``.csv`` files."""
    text = files("torchrl_llm_kl.diagnostics").joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def read_texts(name: str, kind: Callable[..., T]) -> dict[str, T]:
    """A record of texts for each section of one of this package's ``.ini`` files."""
    texts = ConfigParser(interpolation=None, delimiters=["="])
    texts.read_string(files("torchrl_llm_kl.diagnostics").joinpath(name).read_text(encoding="utf-8"))
    return {section: kind(**texts[section]) for section in texts.sections()}


#: All metrics, by name. A name in angle brackets stands for any word.
METRICS: Mapping[str, Metric] = read_texts("metrics.ini", Metric)


def describe_metric(name: str) -> Metric | None:
    """What a metric means; None for one that is not of this package. ``_2`` for a second correction is understood.

    Example:
        >>> describe_metric("mismatch_k3").unit
        'nats per token'
        >>> describe_metric("token_k1_masked_fraction").origin, describe_metric("speed")
        ('correction', None)
    """
    base = re.sub(r"_[2-9]$", "", name)
    if base in METRICS:
        return METRICS[base]
    for known, metric in METRICS.items():
        pattern = re.sub(r"<\w+>", r"(?:token|seq_sum|seq_mean|seq_max)_k[1-3]", known)
        if pattern != known and re.fullmatch(pattern, base):
            return metric
    return None
