"""Data files and batches on disk, a pickle that runs code, and the output of the command line."""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

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


FULL = torch.tensor([[3, 4, 5, 6, 7], [3, 4, 8, 9, 1]])


def batch(**more: Any) -> TensorDict:
    entries = {"tokens": {"prompt": FULL[:, :2], "full": FULL}, "next": {"log_probs": {"full": -FULL.float()}}}
    return TensorDict(entries, batch_size=[2]).update(more)


def save(kind: str, path: Path, td: TensorDictBase) -> Path:
    """Save a batch with torch or tensordict."""
    if kind in ("memmap", "archive"):
        td.save(str(path), **({"archive": True} if kind == "archive" else {}))
    else:
        content = {"dict": td.to_dict, "state": td.state_dict, "tensordict": lambda: td}[kind]()
        torch.save(content, path)
    return path


class Mischief:
    """Runs code when it is unpickled, which makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)
