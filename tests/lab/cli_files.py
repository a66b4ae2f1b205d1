"""Data files for the command line, and its output."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Cli = Callable[..., Any]

CHATS = [
    {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    for question, answer in (("hi", "hello"), ("why?", "because"), ("2 + 2", "4"), ("name a colour", "blue, or red"))
]


def invoked(app: Any, *words: str, code: int = 0) -> str:
    """The output of a command with single spaces. The command must end with this code."""
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, words)
    assert result.exit_code == code, result.output + repr(result.exception)
    return " ".join(result.output.split())


def error_of(result: Any) -> str:
    """The single line of an error message."""
    lines = [line for line in result.stderr.splitlines() if line and "warning:" not in line]
    assert len(lines) == 1, lines
    assert lines[0].startswith("torchrl-llm-kl: ")
    return lines[0].removeprefix("torchrl-llm-kl: ")


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Write rows as JSON lines, or text unchanged."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
