"""The output of a run: one line of metrics per step, a plot of the curves, and a table."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import transformers
from rich.console import Console
from rich.table import Table
from tensordict import TensorDictBase
from torch import nn

from torchrl_llm_kl import training
from torchrl_llm_kl.diagnostics import status_line
from torchrl_llm_kl.training import FiguresFile as MetricsFile, progress as progress, smooth as smooth

Metrics = dict[str, float]
LABEL_BOX = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
__all__ = ["LABEL_BOX", "Metrics", "MetricsFile", "progress", "smooth"]


def keep_earlier_run(folder: Path, names: Sequence[str]) -> None:
    """Move the files and folders ``names`` of an earlier run from ``folder`` to ``folder/earlier-1``, -2, ...; print where."""
    earlier = training.keep_earlier(folder, names)
    if earlier is not None:
        print(f"{folder} holds an earlier run: moved it to {earlier}", flush=True)


def plot_curves(
    rows: Sequence[Metrics],
    path: Path,
    *,
    kl_target: float | None,
    held_out: Sequence[float],
    algorithm: str = "grpo",
) -> None:
    """Plot reward and KL by step, and the accuracy on held-out problems.

    Args:
        rows: metrics of each step.
        path: of the image.
        kl_target: nats per answer; None for a run without a KL penalty, which has no coefficient either.
        held_out: accuracy before the first step, and after the last one if the run got there.
        algorithm: its name, for the title.
    """
    ends = (rows[0]["step"], rows[-1]["step"] + 1)
    training.plot_curves(
        rows,
        path,
        kl_target=kl_target,
        held_out=list(zip(ends, held_out, strict=False)),
        title=f"{algorithm} on Countdown" + ("" if kl_target is None else " with an adaptive KL penalty"),
        reward_label="reward of sampled answers (1 right, 0.1 wrong, 0 no answer)",
        held_out_label="share right, held-out problems, greedy",
        held_out_format="{:.1%}",
        reward_range=(0, 1),
    )


def totals(rows: Sequence[Metrics], kl_target: float | None) -> dict[str, str]:
    """A summary of a run: label -> figure."""
    target = {} if kl_target is None else {"its target": f"{kl_target:.2f} nats per answer"}
    seconds = rows[-1]["seconds"]
    last_half = [row["kl"] for row in rows[len(rows) // 2 :]]
    tokens, generated = sum(row["tokens"] for row in rows), sum(row["answer_tokens"] for row in rows)
    return {
        "KL to the reference, mean of the last half": f"{sum(last_half) / len(last_half):.2f} nats per answer",
        **target,
        "RL": f"{len(rows)} steps, {seconds:.0f} s",
        "tokens through RL": f"{tokens / seconds:.0f} /s ({generated / seconds:.0f} /s generated)",
    }


def print_table(title: str, rows: dict[str, str]) -> None:
    """Print a table of labels and figures."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for row in rows.items():
        table.add_row(*row)
    Console().print(table)


def summarise(
    batch: TensorDictBase, *, step: int, coefficient: nn.Module | None, seconds: float, charged: bool = True
) -> Metrics:
    """Means over the answers of a step; the KL is in nats per answer, summed over its tokens.

    With ``charged`` the rewards include the penalty, if there is a coefficient.
    """
    kl = batch["next", "kl_penalty"].sum(-1).mean().item()
    reward = {"reward": batch["next", "reward"].flatten(1).sum(-1).mean().item()}
    if coefficient is not None:
        value = coefficient().item()
        reward["penalised_reward"] = reward["reward"] - (0.0 if charged else value * kl)
        reward = {**reward, "reward": reward["penalised_reward"] + value * kl, "coefficient": value}
    prompt_width = batch["tokens", "prompt"].shape[-1]
    return {
        "step": step,
        "success": batch["next", "success"].float().mean().item(),
        **reward,
        "kl": kl,
        "answer_tokens": batch["masks", "all_attention_mask"][:, prompt_width:].sum().item(),
        "tokens": batch["masks", "all_attention_mask"].sum().item(),
        "seconds": seconds,
    }


def status(row: Metrics, kl_target: float | None = None) -> str:
    """One line about a step."""
    return f"right {row['success']:4.0%}  {status_line(row, kl_target=kl_target)}"


def silence_dependencies() -> None:
    """Show no warnings of torchrl, tensordict and transformers."""
    warnings.filterwarnings("ignore", module="torchrl|tensordict|transformers")
    warnings.filterwarnings("ignore", message="size_average and reduce")  # from torchrl's cross_entropy
    transformers.utils.logging.disable_progress_bar()  # for writing one small file
