"""``check`` and ``inspect``: what they refuse to load, what they pass on, and their exit codes."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack

from cli_files import Cli, error_of
from torchrl_llm_kl import diagnostics, save_batch

FULL = torch.tensor([[3, 4, 5, 6, 7], [3, 4, 8, 9, 1]])


def batch(**more: Any) -> TensorDict:
    td = TensorDict(tokens=TensorDict(prompt=FULL[:, :2], full=FULL, batch_size=[2]), batch_size=[2])
    td["next", "log_probs", "full"] = -FULL.float()
    return td.update(more)


def save(kind: str, path: Path, td: TensorDictBase) -> Path:
    if kind == "memmap":
        td.save(str(path))
        return path
    content = {"dict": td.to_dict, "state": td.state_dict, "tensordict": lambda: td}[kind]()
    torch.save(content, path)
    return path


# ------------------------------------------------------------------ loading


class Mischief:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_no_code_of_a_file_runs(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch)
    torch.save({"tokens": Mischief(tmp_path / "hacked")}, tmp_path / "batch.pt")
    assert "can run any code" in error_of(cli("check", tmp_path / "batch.pt", code=2))
    folder = save("memmap", tmp_path / "folder", batch(env=NonTensorData("a", batch_size=[2])))
    (folder / "env").rename(tmp_path / "env")
    (tmp_path / "env" / "other.pickle").write_bytes(pickle.dumps({"data": Mischief(tmp_path / "hacked")}))
    (folder / "env").symlink_to(tmp_path / "env", target_is_directory=True)
    assert "is a link" in error_of(cli("check", folder, code=2))
    assert "there is no" in error_of(cli("check", tmp_path / "absent.pt", code=2))
    assert not (tmp_path / "hacked").exists()


def test_a_saved_batch_of_rows_is_checked(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stub(monkeypatch)
    rows = [TensorDict(tokens=TensorDict(prompt=FULL[0, :2], full=FULL[0, :n]), query="why?") for n in (4, 5)]
    save_batch(lazy_stack(rows), tmp_path / "batch.pt")
    assert cli("check", tmp_path / "batch.pt").stdout == "nothing found\n"
    assert [row["tokens", "full"].tolist() for row in seen["td"].unbind(0)] == [[3, 4, 5, 6], [3, 4, 5, 6, 7]]


# ------------------------------------------------------------------ check


@dataclass
class Finding:
    name: str = "length bias"
    confidence: float = 0.9
    evidence: str = "short answers"
    remedy: str = "aggregate by sequence"


@dataclass
class Diagnosis:
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(f"{f.name}: {f.remedy}" for f in self.findings) or "nothing found"

    def to_dict(self) -> dict[str, Any]:
        return {"findings": [vars(f) for f in self.findings]}


def stub(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> dict[str, Any]:
    """A doctor with these findings; returns what it is given."""
    seen: dict[str, Any] = {}

    def diagnose(td: TensorDictBase, **given: Any) -> Diagnosis:
        seen.update(given, td=td)
        return Diagnosis(list(findings))

    monkeypatch.setattr(diagnostics, "diagnose", diagnose, raising=False)
    return seen


def test_exit_codes_of_findings(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 for a clean batch and for notes alone, 1 for faults."""
    path = save("dict", tmp_path / "batch.pt", batch())
    seen = stub(monkeypatch)
    assert cli("check", path).stdout == "nothing found\n"
    assert torch.equal(seen["td"]["tokens", "full"], FULL)
    defaults = {"policy": None, "reference": None, "tokenizer": None, "temperature": 1.0}
    assert {key: seen[key] for key in defaults} == defaults
    stub(monkeypatch, Finding())
    assert cli("check", path, code=1).stdout == "length bias: aggregate by sequence\n"
    assert json.loads(cli("check", path, "--json", code=1).stdout)["findings"][0]["confidence"] == 0.9
    monkeypatch.setattr(Diagnosis, "exit_code", 0, raising=False)
    assert "length bias" in cli("check", path).stdout


def test_the_doctor_gets_models_and_tokenizer(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, reference: str
) -> None:
    seen = stub(monkeypatch)
    path = save("dict", tmp_path / "batch.pt", batch())
    cli("check", path, "--policy", model, "--reference", reference, "--tokenizer", model, "--temperature", 0.5)
    assert not torch.equal(seen["policy"].lm_head.weight, seen["reference"].lm_head.weight)
    assert seen["tokenizer"].chat_template
    assert seen["temperature"] == 0.5


def test_tokens_of_another_type_are_a_wrong_input(cli: Cli, tmp_path: Path) -> None:
    for content, message in (
        ({"unrelated": FULL}, "tokens"),
        ({"tokens": {"full": FULL.float(), "prompt": FULL[:, :2]}}, "expected integer token ids"),
        ({"tokens": FULL}, "expected a nested TensorDict"),
    ):
        torch.save(content, tmp_path / "batch.pt")
        assert message in error_of(cli("check", tmp_path / "batch.pt", code=2))


@pytest.mark.parametrize("name", ["diagnose", "inspect_tokens"])
def test_a_version_without_the_doctor_says_so(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, name: str
) -> None:
    monkeypatch.delattr(diagnostics, name, raising=False)
    path = save("dict", tmp_path / "batch.pt", batch())
    words = ["check", path] if name == "diagnose" else ["inspect", path, "--tokenizer", model]
    assert f"has no diagnostics.{name}" in error_of(cli(*words, code=2))


@pytest.mark.skipif(not hasattr(diagnostics, "diagnose"), reason="the doctor is not there yet")
def test_the_real_doctor(cli: Cli, tmp_path: Path, model: str, reference: str) -> None:
    path = save("dict", tmp_path / "batch.pt", batch())
    result = cli("check", path, "--policy", model, "--reference", reference, "--json", code=1)
    assert json.loads(result.stdout)["findings"]  # the log-probs in the batch are made up


# ------------------------------------------------------------------ inspect


def test_the_inspector_gets_both_batches(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    seen: dict[str, Any] = {}

    class Inspection:
        def print(self, *, console: Any) -> None:
            console.print("the tokens")

    def inspect_tokens(td: TensorDictBase, tokenizer: Any, **given: Any) -> Inspection:
        seen.update(given, td=td, tokenizer=tokenizer)
        return Inspection()

    monkeypatch.setattr(diagnostics, "inspect_tokens", inspect_tokens, raising=False)
    one = save("dict", tmp_path / "one.pt", batch())
    two = save("memmap", tmp_path / "two", batch(advantage=torch.tensor([1.0, -1.0])))
    assert cli("inspect", one, "--tokenizer", model).stdout == "the tokens\n"
    assert (seen["html"], seen["other"], seen["temperature"]) == (None, None, 1.0)
    assert not {"policy", "reference"} & set(seen)
    cli("inspect", one, "--tokenizer", model, "--policy", model, "--reference", model, "--temperature", 0.5)
    assert (seen["policy"].config.vocab_size, seen["temperature"]) == (seen["reference"].config.vocab_size, 0.5)
    page = tmp_path / "page.html"
    assert cli("inspect", one, "--tokenizer", model, "--html", page, "--other", two).stdout == f"wrote {page}\n"
    assert seen["html"] == page
    assert torch.equal(seen["other"]["advantage"], torch.tensor([1.0, -1.0]))
    assert "create it first" in error_of(
        cli("inspect", one, "--tokenizer", model, "--html", tmp_path / "no" / "page.html", code=2)
    )
    assert "Missing option" in error_of(cli("inspect", one, code=2))


@pytest.mark.skipif(not hasattr(diagnostics, "inspect_tokens"), reason="the inspector is not there yet")
def test_the_real_inspector(cli: Cli, tmp_path: Path, model: str) -> None:
    path = save("dict", tmp_path / "batch.pt", batch())
    assert cli("inspect", path, "--tokenizer", model).stdout.strip()
    cli("inspect", path, "--tokenizer", model, "--html", tmp_path / "page.html")
    assert "<html" in (tmp_path / "page.html").read_text(encoding="utf-8").lower()
