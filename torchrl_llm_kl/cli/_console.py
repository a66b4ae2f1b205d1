"""The output for users: errors in one sentence, tables, colours, and the exit codes."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TextIO, TypeVar, cast

import typer
from rich.console import Console
from typer.core import TyperGroup

F = TypeVar("F", bound=Callable[..., None])

PROGRAM = "torchrl-llm-kl"

FOUND, WRONG_INPUT, CRASHED, INTERRUPTED, BROKEN_PIPE = 1, 2, 3, 130, 141
EXIT_CODES = (
    "Exit codes: 0 success, 1 a check found something (or nothing could be scored), 2 an option or an input is wrong, "
    "3 an unexpected error, 130 interrupted, 141 the reader of the output is gone."
)
#: The base of typer's errors of options and commands: click's class, which newer releases hold themselves.
OptionError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[2])
#: Errors of bad input; the library's messages state the value, the expectation and the remedy.
_OF_INPUT = (ValueError, KeyError, OSError, ImportError)


class CommandError(Exception):
    """An error of the user's input: one sentence with the remedy."""


def say(text: str) -> None:
    """Write one line to stderr."""
    with suppress(BrokenPipeError):  # the work continues without a reader of its progress
        print(f"{PROGRAM}: {' '.join(text.split())}", file=sys.stderr, flush=True)


class Group(TyperGroup):
    """Commands whose errors are one line on stderr, and a documented exit code."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> int:
        """Run and exit; without ``standalone_mode`` return the exit code."""
        try:
            code = super().main(args, prog_name or PROGRAM, complete_var, False, windows_expand_args, **extra)
        except typer.Abort:
            code = INTERRUPTED
        except OptionError as error:
            path = PROGRAM if error.ctx is None else error.ctx.command_path
            say(f"{error.format_message().rstrip('.')} (see {path} --help).")
            code = error.exit_code
        code = code if isinstance(code, int) else 0
        if standalone_mode:
            sys.exit(code)
        return code

    def invoke(self, ctx: Any) -> object:
        """Run a command with its warnings and errors in one line each."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", category=FutureWarning)
            for stream in (sys.stdout, sys.stderr):
                with suppress(AttributeError):  # a stream of a caller's own
                    stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
            warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
            try:
                result = super().invoke(ctx)
                if sys.stdout is not None:
                    sys.stdout.flush()  # a reader that is gone shows here, not at the end of the process
                return result
            except BrokenPipeError:
                _hush()
                code = BROKEN_PIPE
            except KeyboardInterrupt:
                say("interrupted.")
                code = INTERRUPTED
            except (typer.Exit, typer.Abort, OptionError):
                raise
            except Exception as error:
                if ctx.params.get("debug"):
                    raise
                code = _report(error)
        raise typer.Exit(code)


def takes(options: type) -> Callable[[F], F]:
    """The arguments and options of a command of keyword arguments: the annotated fields of a dataclass."""

    def mark(command: F) -> F:
        signature = inspect.signature(options, eval_str=True)
        annotations = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        vars(command).update(__signature__=signature, __annotations__=annotations)
        return command

    return mark


def _report(error: Exception) -> int:
    """Print an error as one line; returns the exit code."""
    from torchrl_llm_kl.ragged import EntryTypeError

    text = str(error.args[0]) if type(error) is KeyError and error.args else str(error)
    if text and isinstance(error, (CommandError, EntryTypeError, *_OF_INPUT)):
        say(text)
        return WRONG_INPUT
    say(f"{type(error).__name__}: {text or 'no message'} (unexpected; {PROGRAM} --debug ... shows the traceback).")
    return CRASHED


def _hush() -> None:
    """Let Python flush its streams into nothing at its end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ------------------------------------------------------------------ output


def console(stream: TextIO | None = None) -> Console:
    """A console that follows ``NO_COLOR`` and ``FORCE_COLOR``; made anew, since tests replace the streams."""
    out = Console(file=stream or sys.stdout, highlight=False, emoji=False, markup=False)
    out.soft_wrap = not out.is_terminal
    return out


def shows_colour() -> bool:
    """Whether stdout shows colours."""
    out = console()
    return out.color_system is not None and not out.no_color


def print_json(value: object) -> None:
    """Write one JSON document; numbers that are not finite as null."""
    unicode = str(getattr(sys.stdout, "encoding", "")).lower().startswith("utf")
    print(json.dumps(_finite(value), indent=2, ensure_ascii=not unicode, default=str))


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: int | None = None) -> None:
    """Write a table: fitted to a terminal; elsewhere one line for each row, never cut.

    Args:
        header: of the columns.
        rows: of cells.
        right: the first column that is aligned to the right, if any.
    """
    out = console()
    if out.is_terminal:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        words = [[word for line in (header, *rows) for word in line[i].split()] for i in range(len(header))]
        longest = [max(map(len, each), default=1) for each in words]
        fits = sum(longest) + 3 * len(header) <= out.width  # then no word is cut for another column's sake
        for i, name in enumerate(header):
            justify: Literal["left", "right"] = "right" if right is not None and i >= right else "left"
            table.add_column(name, justify=justify, overflow="fold", min_width=longest[i] if fits else None)
        for row in rows:
            table.add_row(*row)
        out.print(table)
        return
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    for line in (header, *rows):
        cells = [
            cell.rjust(width) if right is not None and i >= right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def cells_of(markdown: str) -> tuple[list[str], list[list[str]]]:
    r"""Header and rows of a Markdown table, as plain text.

    Example:
        >>> cells_of("| name | use |\n|---|---|\n| `k1` | **yes** |\n")
        (['name', 'use'], [['k1', 'yes']])
    """
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    header, _, *rows = [[re.sub(r"`|\*\*", "", cell).strip() for cell in line.strip("|").split("|")] for line in lines]
    return header, rows
