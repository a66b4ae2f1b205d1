"""Two tiny checkpoints on disk, and the command line in this process."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cli_files import Cli
from torchrl_llm_kl import diagnostics
from torchrl_llm_kl.cli._commands import app
from toy_rollouts import make_model, make_tokenizer


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints ``model`` and ``reference`` of one tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tokenizer = make_tokenizer()
    for seed, name in enumerate(("model", "reference")):
        make_model(tokenizer, seed=seed).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def model(checkpoints: Path) -> str:
    return str(checkpoints / "model")


@pytest.fixture
def reference(checkpoints: Path) -> str:
    return str(checkpoints / "reference")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of a stand-in of ``inspect_tokens``."""
    found: dict[str, Any] = {}

    def inspect_tokens(batch: Any, tokenizer: Any, **given: Any) -> Any:
        found.update(given, batch=batch, tokenizer=tokenizer)
        return SimpleNamespace(print=lambda *, console: console.print("the tokens"))

    monkeypatch.setattr(diagnostics, "inspect_tokens", inspect_tokens, raising=False)
    return found


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command and compare its exit code; an error is one line on stderr and no traceback."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(*words: Any, code: int = 0, env: Mapping[str, str | None] | None = None) -> Result:
        result = CliRunner().invoke(app, [str(word) for word in words], env=env)
        assert result.exit_code == code, f"{result.exit_code}: {result.output}"
        assert "Traceback" not in result.output
        return result

    return run
