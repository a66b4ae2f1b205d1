"""Exit codes, one-line errors, tables, colours, and what a missing extra says; processes: tests/runs/test_interpreters.py."""

from __future__ import annotations

import importlib.util
import io
import json
import platform
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cli_files import Cli, error_of
from project import PROJECT
from torchrl_llm_kl import __version__
from torchrl_llm_kl.algorithms import ALGORITHMS
from torchrl_llm_kl.cli import _commands, _console, _tables, main
from torchrl_llm_kl.cli._commands import app
from torchrl_llm_kl.cli._console import cells_of
from torchrl_llm_kl.estimators import CONTRACTS

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
        (typer.Exit(7), 7, None),
    ],
)
def test_exit_codes(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, text: str | None
) -> None:
    monkeypatch.setattr("torchrl_llm_kl.cli._tables.show_version", raising(error))
    result = cli("version", code=code)
    assert text in error_of(result) if text else not result.stderr


def test_a_warning_is_one_line_and_debug_shows_the_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    show = "torchrl_llm_kl.cli._tables.show_version"
    monkeypatch.setattr(show, lambda *_: warnings.warn("take\ncare", stacklevel=1))
    assert cli("version").stderr == "torchrl-llm-kl: warning: take care\n"
    monkeypatch.setattr(show, raising(ValueError("wrong")))
    for words, env in ((["--debug", "version"], {}), (["version"], {"TORCHRL_LLM_KL_DEBUG": "1"})):
        assert isinstance(CliRunner().invoke(app, words, env=env).exception, ValueError)


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


def test_no_command_a_wrong_one_and_a_missing_extra(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error_of(cli(code=2)) == "name a command; torchrl-llm-kl --help lists them."
    assert "'scor'" in error_of(cli("scor", code=2))
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"torchrl-llm-kl {__version__}\n"
    assert main(["algorithms", "grpoo"]) == 2
    assert "Did you mean 'grpo'?" in capsys.readouterr().err
    own = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "typer" else own(name))
    assert main(["version"]) == 2
    said = "torchrl-llm-kl: the command line needs typer: pip install 'torchrl-llm-kl[cli]'.\n"
    assert capsys.readouterr().err == said


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_tables_and_numbers_in_a_pipe_and_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines are never cut in a pipe; what is not finite is null."""
    _console.print_table(["name", "number"], [["a", "1"], ["b" * 300, "23"]], right=1)
    lines = ["name" + " " * 296 + "  number", "a" + " " * 299 + "       1", "b" * 300 + "      23"]
    assert capsys.readouterr().out.splitlines() == lines
    _console.print_json({"a": [float("nan"), float("inf"), 1.5], "b": Path("x")})
    assert json.loads(capsys.readouterr().out) == {"a": [None, None, 1.5], "b": "x"}
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


def test_the_demo_passes_its_options_on(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a checkout it says where it is."""
    seen: list[list[str]] = []

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        seen.append(words)
        return subprocess.CompletedProcess(words, 130)

    monkeypatch.setattr(_commands.subprocess, "run", run)
    cli("demo", "--algorithm", "dapo", "--steps", "3", code=130)
    assert Path(seen[0][1]).resolve() == PROJECT / "tutorials" / "countdown_grpo.py"
    assert seen[0][2:] == ["--algorithm", "dapo", "--steps", "3"]
    monkeypatch.setattr(_commands, "__file__", str(tmp_path / "torchrl_llm_kl" / "cli" / "_commands.py"))
    monkeypatch.chdir(tmp_path)
    assert "in a checkout of the project's sources" in error_of(cli("demo", code=2))


def test_all_algorithms_are_listed(cli: Cli) -> None:
    lines = cli("algorithms").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(ALGORITHMS)
    models = {line.split()[0]: line.split("  ")[-1].strip() for line in lines[1:]}
    assert (models["ppo"], models["dapo"], models["grpo"]) == ("reference, critic", "none", "reference")
    assert models["gkd"] == "teacher"
    text = cli("algorithms", "ppo").stdout
    for part in ("advantage.whiten", "Schulman et al. 2016 (arXiv 1506.02438)", "reference, critic"):
        assert part in text
    assert error_of(cli("algorithms", "grpoo", code=2)).partition(". ")[2].startswith("Did you mean 'grpo'? Known: ")


def test_settings_of_every_algorithm(cli: Cli) -> None:
    for name, preset in ALGORITHMS.items():
        found = json.loads(cli("algorithms", name, "--json").stdout)
        settings = found["settings"]
        want = {field: getattr(preset, field) for field in ("objective", "kl_loss", "repeat_times")}
        for part in ("objective", "advantage"):
            want |= {f"{part}.{key}": value for key, value in getattr(preset, f"{part}_args").items()}
        assert {key: settings[key]["value"] for key in want} == want, name
        assert {field: settings[field]["source"] for field in preset.sources} == dict(preset.sources), name
        assert all(row["source"] for row in settings.values()), name
        assert ("critic" in found["needs"]["models besides the policy"]) == preset.use_critic, name
    settings = json.loads(cli("algorithms", "dapo", "--json").stdout)["settings"]
    assert (settings["objective.clip_low"]["value"], settings["objective.clip_high"]["value"]) == (0.2, 0.28)


def test_estimators(cli: Cli) -> None:
    lines = cli("estimators").stdout.splitlines()
    names = [contract.name for contract in CONTRACTS]
    assert [line.split()[0] for line in lines[3 : len(names) + 3]] == names
    start = lines.index("Tokens that another policy, old, sampled:") + 3
    assert [line.split()[0] for line in lines[start : start + len(names)]] == names
    assert lines[start + names.index("corrected_k3")].split() == ["corrected_k3", "yes", "KL(p‖q)"]
    assert "  for corrected_k3 while no clamp is active" in lines
    k1 = lines[4]
    assert "KL(p‖q)" in k1
    assert "*" not in k1
    found = {row["name"]: row for row in json.loads(cli("estimators", "--json").stdout)}
    assert found["k3"]["unbiased"] is True
    assert found["k3"]["loss_gradient"] == "KL(q‖p)"
    assert found["k1"]["reward"] == "yes"


def test_version_of_everything(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(cli("version", "--all", "--json").stdout)
    assert found["python"] == platform.python_version()
    packages = {"torchrl-llm-kl", "torch", "tensordict", "torchrl", "transformers", "ray", "peft"}
    assert {*packages, "platform", "CUDA"} <= set(found)
    assert "torch " in cli("version", "--all").stdout
    monkeypatch.setattr(_tables, "_PACKAGES", ("no-such-package",))
    assert json.loads(cli("version", "--all", "--json").stdout)["no-such-package"] == "not installed"


def test_cells_of_a_markdown_table() -> None:
    assert cells_of("| a | b |\n|---|---|\n| `x` |  |\n| **y** | z |\n") == (["a", "b"], [["x", ""], ["y", "z"]])
