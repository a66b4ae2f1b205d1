"""The command line ``torchrl-llm-kl``: tables, scores of a file, a doctor for batches."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from torchrl_llm_kl._registry import install_hint

__all__ = ["main"]

#: Packages of the extra ``cli`` that every command needs.
_NEEDED = ("typer", "rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, like ``torchrl-llm-kl`` and ``python -m torchrl_llm_kl``. ``docs/cli.md`` lists the commands.

    Args:
        arguments: the words after the program's name. Default: those of this process.

    Returns:
        The exit code: 0 success, 1 a check found something, 2 an option or an input is wrong, 3 an unexpected error, 130
        interrupted, 141 the reader of the output is gone.

    Example:
        >>> main(["version"])
        torchrl-llm-kl 0...
        0
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"torchrl-llm-kl: the command line needs {' and '.join(missing)}: {install_hint('cli')}.",
            file=sys.stderr,
        )
        return 2
    from torchrl_llm_kl.cli._commands import run

    return run(arguments)
