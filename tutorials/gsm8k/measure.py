"""Figures on held-out questions, with standard errors over questions, from what ``torchrl-llm-kl score`` writes."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gsm8k.task import guess_by_length, guess_by_writer
from torchrl_llm_kl.cli import main as command_line


def run_command(*words: Any) -> tuple[str, dict[str, Any]]:
    """Run a command of ``torchrl-llm-kl`` in this process; returns it as text, and the JSON that it printed.

    Raises:
        RuntimeError: if it fails.
    """
    arguments = [str(word) for word in words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command_line([*arguments, "--json"])
    text = f"torchrl-llm-kl {shlex.join(arguments)}"
    if code:
        raise RuntimeError(f"{text} ended with {code}: {err.getvalue().strip()}")
    return text, json.loads(out.getvalue())


def answers_of(path: Path) -> dict[str, Tensor]:
    """The records of scored pairs, chosen beside rejected: log-probs in nats and numbers of tokens; ``[pairs, 2]``."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    skipped = [record for record in records if "skipped" in record]
    if skipped:
        raise RuntimeError(f"{len(skipped)} answers in {path} were skipped; the first: {skipped[0]}")
    parts = [[record for record in records if record["answer"] == part] for part in ("chosen", "rejected")]
    return {
        name: torch.tensor([[record[name] for record in part] for part in parts], dtype=torch.float64).T
        for name in ("log_prob", "ref_log_prob", "num_scored")
    }


def pair_figures(
    scores: dict[str, Tensor], train: Sequence[dict[str, Any]], held_out: Sequence[dict[str, Any]], *, beta: float
) -> dict[str, float]:
    """Accuracy and margin of the implicit reward, ``beta (log_prob - ref_log_prob)``, and accuracies of simple guesses.

    The policy before DPO is the reference: all its margins are 0, and its accuracy is one half. ``equal_writers``
    weights pairs so that each model wins as often as it loses against every other: a guess by the writer alone is then
    right half the time.
    """
    rewards = beta * (scores["log_prob"] - scores["ref_log_prob"])
    margin = rewards[:, 0] - rewards[:, 1]
    questions = torch.tensor([row["question"] for row in held_out])
    even = equal_writers(held_out)
    found: dict[str, float] = {}

    def keep(name: str, values: Tensor, weights: Tensor | None = None) -> None:
        found[name], found[f"{name}_error"] = mean_with_error(values, questions, weights)

    sums, means = scores["ref_log_prob"], scores["ref_log_prob"] / scores["num_scored"]
    keep("accuracy", is_right(margin))
    keep("accuracy_equal_writers", is_right(margin), even)
    keep("margin", margin)
    keep("margin_equal_writers", margin, even)
    keep("by_length", is_right(guess_by_length(train, held_out)))
    keep("by_length_equal_writers", is_right(guess_by_length(train, held_out)), even)
    keep("by_writer", is_right(guess_by_writer(train, held_out)))
    keep("by_writer_equal_writers", is_right(guess_by_writer(train, held_out)), even)
    keep("by_sft", is_right(sums[:, 0] - sums[:, 1]))
    keep("by_sft_equal_writers", is_right(sums[:, 0] - sums[:, 1]), even)
    keep("by_sft_per_token", is_right(means[:, 0] - means[:, 1]))
    keep("by_sft_per_token_equal_writers", is_right(means[:, 0] - means[:, 1]), even)
    return found | {"pairs": len(held_out), "questions": len(questions.unique())}


def is_right(lead: Tensor | Sequence[float]) -> Tensor:
    """1 where the chosen answer leads, 1/2 at a tie."""
    lead = torch.as_tensor(lead, dtype=torch.float64)
    return (lead > 0).double() + (lead == 0).double() / 2


def equal_writers(rows: Sequence[dict[str, Any]]) -> Tensor:
    """Weights with which each writer wins as often as it loses against each other one."""
    writers = [(row["chosen_by"], row["rejected_by"]) for row in rows]
    count = Counter(writers)
    return torch.tensor([min(count[a, b], count[b, a]) / count[a, b] for a, b in writers], dtype=torch.float64)


def mean_with_error(values: Tensor, clusters: Tensor, weights: Tensor | None = None) -> tuple[float, float]:
    """Weighted mean, and its standard error with dependent values in a cluster (Cochran 1977, eq. 6.13)."""
    weights = torch.ones_like(values) if weights is None else weights
    mean = (weights * values).sum() / weights.sum()
    ids = clusters.unique(return_inverse=True)[1]
    sums = torch.zeros(int(ids.max()) + 1, dtype=torch.float64).index_add(0, ids, weights * (values - mean))
    number = len(sums)
    error = (sums.square().sum() * number / max(1, number - 1)).sqrt() / weights.sum()
    return float(mean), float(error)
