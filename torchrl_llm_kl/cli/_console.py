"""What commands share: options, one-line errors, exit codes, tables and colours."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO, TypeVar, cast

import typer
from rich.console import Console
from typer.core import TyperGroup

if TYPE_CHECKING:
    from torchrl_llm_kl.scoring import Sampling

F = TypeVar("F", bound=Callable[..., None])

PROGRAM = "torchrl-llm-kl"

FOUND, WRONG_INPUT, CRASHED, INTERRUPTED, BROKEN_PIPE = 1, 2, 3, 130, 141
EXIT_CODES = (
    "Exit codes: 0 success, 1 a check found something (or nothing could be scored), 2 an option or an input is wrong, "
    "3 an unexpected error, 4 a check found nothing but could not compare sampler and policy, 130 interrupted, "
    "141 the reader of the output is gone."
)
#: The base class of typer's usage errors. It is click's class, or typer's own copy in newer releases.
OptionError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[2])
#: Errors that bad input causes. Their messages state the value, the expectation and the remedy, so a traceback adds nothing.
_OF_INPUT = (ValueError, KeyError, OSError, ImportError)


class CommandError(Exception):
    """An error in the user's input, whose message contains the remedy."""


def say(text: str) -> None:
    """Write one line to stderr."""
    with suppress(BrokenPipeError):  # the work continues if nobody reads its progress
        print(f"{PROGRAM}: {' '.join(text.split())}", file=sys.stderr, flush=True)


class Group(TyperGroup):
    """A group of commands with one-line errors on stderr and documented exit codes."""

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **options: Any
    ) -> int:
        """Run and exit. With ``standalone_mode=False`` return the exit code."""
        standalone_mode = options.pop("standalone_mode", True)
        try:
            code = super().main(args, prog_name or PROGRAM, standalone_mode=False, **options)
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

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command with this name. Its help shows flags without a type."""
        command = super().get_command(ctx, cmd_name)
        for option in () if command is None else command.get_params(ctx):
            if vars(option).get("is_flag"):
                option.metavar = ""  # newer releases of typer would show <bool>
        return command

    def invoke(self, ctx: Any) -> object:
        """Run a command, printing each warning and error as one line."""
        with warnings.catch_warnings():
            # These warnings of other libraries address developers, not users of the command line.
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", category=FutureWarning)
            for stream in (sys.stdout, sys.stderr):
                with suppress(AttributeError):  # a caller may have replaced the stream
                    stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
            warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
            try:
                result = super().invoke(ctx)
                if sys.stdout is not None:
                    sys.stdout.flush()  # a broken pipe must raise here, where it is handled, not at exit
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
    """Make the annotated fields of a dataclass the arguments and options of a command.

    The command receives them as keyword arguments.
    """

    def mark(command: F) -> F:
        signature = inspect.signature(options, eval_str=True)
        annotations = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        vars(command).update(__signature__=signature, __annotations__=annotations)
        return command

    return mark


def _report(error: Exception) -> int:
    """Print an error as one line and return the exit code."""
    from torchrl_llm_kl.ragged import EntryTypeError

    text = str(error.args[0]) if type(error) is KeyError and error.args else str(error)
    if text and isinstance(error, (CommandError, EntryTypeError, *_OF_INPUT)):
        say(text)
        return WRONG_INPUT
    say(f"{type(error).__name__}: {text or 'no message'} (unexpected, {PROGRAM} --debug ... shows the traceback).")
    return CRASHED


def _hush() -> None:
    """Redirect stdout to nowhere, so that Python's flush at exit does not raise again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ------------------------------------------------------------------ options of several commands, and of `score`

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Temperature = Annotated[float, typer.Option(help="The sampler's temperature: divides the logits.")]
TopK = Annotated[int, typer.Option(min=0, help="The sampler's top-k. 0 keeps all tokens.")]
TopP = Annotated[float, typer.Option(help="The sampler's top-p. 1 keeps all tokens.")]
MinP = Annotated[float, typer.Option(help="The sampler's min-p. 0 keeps all tokens.")]
ColumnNames = Annotated[
    list[str] | None,
    typer.Option(
        "--column", metavar="ROLE=NAME", help="The column of a role, such as response=answer_ids. Repeatable."
    ),
]


def column_names(given: Sequence[str] | None) -> dict[str, str]:
    """Read ``--column`` options.

    Example:
        >>> column_names(["response=answer_ids"])
        {'response': 'answer_ids'}
    """
    names = {}
    for item in given or ():
        role, equals, name = item.partition("=")
        if not equals or not role or not name:
            raise CommandError(f"--column takes ROLE=NAME, got {item!r}.")
        names[role] = name
    return names


@dataclass(frozen=True)
class ScoreArguments:
    """The arguments of ``score``, which ``docs/cli.md`` explains."""

    model: Annotated[str, typer.Argument(help="The model: a folder, or a name on the hub.")]
    data: Annotated[
        Path,
        typer.Argument(
            help="JSONL, JSON or Parquet: conversations, prompts and completions, preferences, or rollouts of any framework."
        ),
    ]
    reference: Annotated[str | None, typer.Option(help="The model to compare with.")] = None
    estimator: Annotated[
        list[str] | None,
        typer.Option(
            help="KL estimators: k1, k2, k3, low_var_kl, abs, exact. Repeat the option or use commas. Default: k1, k3, and "
            "exact if both vocabularies have the same size."
        ),
    ] = None
    temperature: Temperature = 1.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    out: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Write a JSON line for each answer. Replaces an earlier file."),
    ] = None
    store: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="Folder of stored scores, which are not computed again. Default: beside --out."
        ),
    ] = None
    html: Annotated[Path | None, typer.Option(help="Write a page with the tokens of the first answers.")] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Score the first rows only.")] = None
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Skip sequences with more tokens. Default: the limit of the models.")
    ] = None
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens in one forward. Default: 1024 on a CPU, 16384 on a GPU.")
    ] = None
    per_token: Annotated[bool, typer.Option("--per-token", help="Write token ids and scores of each token too.")] = (
        False
    )
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer to use instead of the model's.")] = None
    chat_template: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A file with the chat template of conversations. Default: the tokenizer's.",
        ),
    ] = None
    dtype: Annotated[str, typer.Option(help="Dtype of the weights: auto (as saved), float32, bfloat16 or float16.")] = (
        "auto"
    )
    device: Annotated[
        str | None, typer.Option(help="For example cuda:1. Default: the accelerator, if there is one.")
    ] = None
    as_json: AsJson = False

    @property
    def sampling(self) -> Sampling:
        """The sampler's settings."""
        from torchrl_llm_kl.scoring import Sampling  # imports torch, which takes seconds

        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    @property
    def estimators(self) -> tuple[str, ...]:
        """The names of the KL estimators, each once."""
        names = (name.strip() for item in self.estimator or () for name in item.split(","))
        return tuple(dict.fromkeys(name for name in names if name))

    @property
    def store_folder(self) -> Path | None:
        """The folder of stored scores. The default is beside the output."""
        return self.store or (self.out and self.out.with_name(f"{self.out.name}.store"))


# ------------------------------------------------------------------ output


def console(stream: TextIO | None = None) -> Console:
    """A console that follows ``NO_COLOR`` and ``FORCE_COLOR``. A new one each time, because tests replace the streams."""
    out = Console(file=stream or sys.stdout, highlight=False, emoji=False, markup=False)
    out.soft_wrap = not out.is_terminal
    return out


def shows_colour() -> bool:
    """Whether stdout shows colours."""
    out = console()
    return out.color_system is not None and not out.no_color


def print_json(value: object) -> None:
    """Write one JSON document. Numbers that are not finite become null."""
    # Escape non-ASCII text if the stream cannot encode it.
    unicode = str(getattr(sys.stdout, "encoding", "")).lower().startswith("utf")
    print(json.dumps(_finite(value), indent=2, ensure_ascii=not unicode, default=str))


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: int | None = None) -> None:
    """Write a table that fits the terminal. In a pipe each row is one line and is never cut.

    Args:
        header: the names of the columns.
        rows: the cells.
        right: the first column that is aligned to the right, if any.
    """
    out = console()
    if out.is_terminal:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        words = [[word for line in (header, *rows) for word in line[i].split()] for i in range(len(header))]
        longest = [max(map(len, each), default=1) for each in words]
        fits = sum(longest) + 3 * len(header) <= out.width  # if the longest words fit, no column needs to cut a word
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
