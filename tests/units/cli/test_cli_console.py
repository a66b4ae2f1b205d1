"""Exit codes, one-line errors, colours, and what a missing extra says; processes: tests/runs/test_interpreters.py."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cli_files import Cli, error_of
from project import PROJECT
from torchrl_llm_kl import __version__
from torchrl_llm_kl.cli import _commands, _console, main
from torchrl_llm_kl.cli._commands import app

COMMANDS = ("algorithms", "estimators", "version", "score", "check", "inspect", "train", "templates", "demo")


def raising(error: BaseException) -> Any:
    def show(*_: Any) -> None:
        raise error

    return show


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (_console.CommandError("no such\n thing: make one."), 2, "no such thing: make one."),
        (ValueError("found 1, expected 2."), 2, "found 1, expected 2."),
        (KeyError("no entry 'x'."), 2, "no entry 'x'."),
        (OSError(28, "No space left on device"), 2, "[Errno 28] No space left on device"),
        (AttributeError("no attribute"), 3, "AttributeError: no attribute (unexpected; "),
        (ValueError(), 3, "ValueError: no message (unexpected; "),
        (KeyboardInterrupt(), 130, "interrupted."),
    ],
)
def test_exit_codes(cli: Cli, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, text: str) -> None:
    monkeypatch.setattr("torchrl_llm_kl.cli._tables.show_version", raising(error))
    assert text in error_of(cli("version", code=code))


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrl_llm_kl.cli._tables.show_version", raising(ValueError("wrong")))
    for words, env in ((["--debug", "version"], {}), (["version"], {"TORCHRL_LLM_KL_DEBUG": "1"})):
        result = CliRunner().invoke(app, words, env=env)
        assert isinstance(result.exception, ValueError)


def test_a_warning_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    monkeypatch.setattr("torchrl_llm_kl.cli._tables.show_version", lambda *_: warnings.warn("take\ncare", stacklevel=1))
    assert cli("version").stderr == "torchrl-llm-kl: warning: take care\n"


def test_help_and_page_name_commands_and_options_that_exist(cli: Cli) -> None:
    whole = cli("--help", env={"COLUMNS": "300"}).stdout
    text = " ".join(whole.split())
    assert all(f" {name} " in text for name in COMMANDS)
    assert "0 success, 1 a check found something" in text
    assert "--install-completion" in text
    page = (PROJECT / "docs" / "cli.md").read_text(encoding="utf-8")
    helps = {name: cli(name, "--help", env={"COLUMNS": "300"}).stdout for name in COMMANDS}
    assert all("Usage: torchrl-llm-kl" in text for text in helps.values())
    options = {name: set(re.findall(r"--[a-z][\w-]*", text)) for name, text in {**helps, "": whole}.items()}
    # `--algorithm` is the tutorial's
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page)) - {"--algorithm"} <= set().union(*options.values())
    assert all(f"`{name} " in page or f"`{name}`" in page for name in COMMANDS)
    documented = page[page.index("## score") : page.index("## check")]
    of_score = options["score"] - {"--help", "--json"}
    assert {option for option in of_score if option not in documented} == {"--tokenizer"}


def test_no_command_and_a_wrong_one_are_errors(cli: Cli) -> None:
    assert error_of(cli(code=2)) == "name a command; torchrl-llm-kl --help lists them."
    assert "'scor'" in error_of(cli("scor", code=2))


def test_main_returns_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"torchrl-llm-kl {__version__}\n"
    assert main(["algorithms", "grpoo"]) == 2
    assert "Did you mean 'grpo'?" in capsys.readouterr().err


def test_a_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    own = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "typer" else own(name))
    assert main(["version"]) == 2
    assert capsys.readouterr().err == (
        "torchrl-llm-kl: the command line needs typer: pip install 'torchrl-llm-kl[cli]'.\n"
    )


# ------------------------------------------------------------------ output


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_lines_are_never_cut_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    _console.print_table(["name", "number"], [["a", "1"], ["b" * 300, "23"]], right=1)
    assert capsys.readouterr().out.splitlines() == [
        "name" + " " * 296 + "  number",
        "a" + " " * 299 + "       1",
        "b" * 300 + "      23",
    ]


def test_tables_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    _console.print_table(["name", "text"], [["a", "word " * 30]])
    text = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert max(map(len, text.splitlines())) <= 40
    assert text.count("word") == 30


def test_colours_follow_the_stream_and_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert not _console.shows_colour()
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert _console.shows_colour()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not _console.shows_colour()


def test_progress_is_lines_in_a_pipe_and_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_console, "_SECONDS_BETWEEN_LINES", 0.0)
    with _console.progress("score", 2000) as advance:
        advance(1000, "5 tokens scored")
    line = r"torchrl-llm-kl: score: 1,000 of 2,000 rows, \d+ s, 5 tokens scored\n"
    assert re.fullmatch(line, capsys.readouterr().err)
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("TERM", "xterm")
    with _console.progress("score", 20) as advance:
        advance(20, "5 tokens scored")
    assert "20/20" in out.getvalue()


def test_numbers_that_are_not_finite_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    _console.print_json({"a": [float("nan"), float("inf"), 1.5], "b": Path("x")})
    assert json.loads(capsys.readouterr().out) == {"a": [None, None, 1.5], "b": "x"}


# ------------------------------------------------------------------ demo


def test_the_demo_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    seen: list[list[str]] = []

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        seen.append(words)
        return subprocess.CompletedProcess(words, 130)

    monkeypatch.setattr(_commands.subprocess, "run", run)
    cli("demo", "--algorithm", "dapo", "--steps", "3", code=130)
    script = PROJECT / "tutorials" / "countdown_grpo.py"
    assert Path(seen[0][1]).resolve() == script
    assert seen[0][2:] == ["--algorithm", "dapo", "--steps", "3"]


def test_without_a_checkout_the_demo_says_where_it_is(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_commands, "__file__", str(tmp_path / "torchrl_llm_kl" / "cli" / "_commands.py"))
    monkeypatch.chdir(tmp_path)
    assert "in a checkout of the project's sources" in error_of(cli("demo", code=2))


def test_typer_s_exit_and_abort_pass(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrl_llm_kl.cli._tables.show_version", raising(typer.Exit(7)))
    assert not cli("version", code=7).stderr
