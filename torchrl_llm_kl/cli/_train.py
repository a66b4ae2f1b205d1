"""``train``: a run from a YAML file and changes of its settings."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import typer

from torchrl_llm_kl.cli._console import FOUND, INTERRUPTED, CommandError, print_table, say


def print_example() -> None:
    """Print a configuration to start from."""
    _check_installed()
    from torchrl_llm_kl.training import example_config

    print(example_config(), end="")


def run_training(config: str, changes: Sequence[str], *, dry_run: bool, fresh: bool) -> None:
    """Train, or print the settings.

    Args:
        config: a YAML file, or the first of the changes.
        changes: ``key=value``.

    Keyword Args:
        dry_run: check the settings and what they name, and print them.
        fresh: begin anew.

    Raises:
        typer.Exit: with 1 if the KL blew up, and 130 if a signal ended the run.
    """
    _check_installed()
    from torchrl_llm_kl.tasks import RewardError
    from torchrl_llm_kl.training import load_inputs, read_config, train

    source = config if "=" not in config or Path(config).is_file() else None  # such as runs/lr=1e-5/config.yaml
    settings = read_config(source, changes if source else [config, *changes])
    if dry_run:
        with redirect_stdout(sys.stderr):  # of reward files
            load_inputs(settings)
        print(settings.to_yaml(), end="")
        return
    try:
        result = train(settings, fresh=fresh, say=say)
    except RewardError as error:
        raise CommandError(str(error)) from error
    if result.final is not None:
        print_table(["", ""], [[label, figure] for label, figure in result.figures.items()])
        print(f"wrote {result.final}, the weights after step {result.chosen}")
    if result.outcome != "finished":
        raise typer.Exit(INTERRUPTED if result.outcome == "interrupted" else FOUND)


def _check_installed() -> None:
    if importlib.util.find_spec("omegaconf") is None:
        raise CommandError("this command needs omegaconf: pip install 'torchrl-llm-kl[train]'.")
