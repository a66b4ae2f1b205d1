"""``check`` and ``inspect``: what they refuse to load, what they pass on, and their exit codes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack

from cli_files import CHATS, Cli, error_of, write_jsonl
from stored_batches import FULL, Mischief, batch, save
from torchrl_llm_kl import diagnostics, save_batch


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


class Diagnosis:
    def __init__(self, findings: Sequence[str]) -> None:
        self.findings = findings

    def __str__(self) -> str:
        return "\n".join(self.findings) or "nothing found"

    def to_dict(self) -> dict[str, Any]:
        return {"findings": list(self.findings)}


def stub(monkeypatch: pytest.MonkeyPatch, *findings: str) -> dict[str, Any]:
    """A doctor with these findings; returns what it is given."""
    seen: dict[str, Any] = {}

    def diagnose(td: TensorDictBase, **given: Any) -> Diagnosis:
        seen.update(given, td=td)
        return Diagnosis(findings)

    monkeypatch.setattr(diagnostics, "diagnose", diagnose, raising=False)
    return seen


def test_exit_codes_of_findings_and_what_the_doctor_gets(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, reference: str
) -> None:
    """0 for a clean batch and for notes alone, 1 for faults."""
    path = save("dict", tmp_path / "batch.pt", batch())
    seen = stub(monkeypatch)
    assert cli("check", path).stdout == "nothing found\n"
    assert torch.equal(seen["td"]["tokens", "full"], FULL)
    defaults = {"policy": None, "reference": None, "tokenizer": None, "temperature": 1.0}
    assert {key: seen[key] for key in defaults} == defaults
    cli("check", path, "--policy", model, "--reference", reference, "--tokenizer", model, "--temperature", 0.5)
    assert not torch.equal(seen["policy"].lm_head.weight, seen["reference"].lm_head.weight)
    assert (bool(seen["tokenizer"].chat_template), seen["temperature"]) == (True, 0.5)
    rows = [TensorDict(tokens=TensorDict(prompt=FULL[0, :2], full=FULL[0, :n]), query="why?") for n in (4, 5)]
    save_batch(lazy_stack(rows), tmp_path / "rows.pt")
    assert cli("check", tmp_path / "rows.pt").stdout == "nothing found\n"
    assert [row["tokens", "full"].tolist() for row in seen["td"].unbind(0)] == [[3, 4, 5, 6], [3, 4, 5, 6, 7]]
    stub(monkeypatch, "length bias")
    assert cli("check", path, code=1).stdout == "length bias\n"
    assert json.loads(cli("check", path, "--json", code=1).stdout)["findings"] == ["length bias"]
    monkeypatch.setattr(Diagnosis, "exit_code", 0, raising=False)
    assert "length bias" in cli("check", path).stdout


def test_tokens_of_another_type_are_a_wrong_input(cli: Cli, tmp_path: Path) -> None:
    for content, message in (
        ({"unrelated": FULL}, "tokens"),
        ({"tokens": {"full": FULL.float(), "prompt": FULL[:, :2]}}, "expected integer token ids"),
        ({"tokens": FULL}, "expected a nested TensorDict"),
    ):
        torch.save(content, tmp_path / "batch.pt")
        assert message in error_of(cli("check", tmp_path / "batch.pt", code=2))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("diagnose", "check {path}"),
        ("inspect_tokens", "inspect {path} --tokenizer {model}"),
        ("inspect_tokens", "score {model} {path} --html x.html"),
    ],
)
def test_a_version_without_the_doctor_says_so(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, name: str, words: str
) -> None:
    monkeypatch.delattr(diagnostics, name, raising=False)
    path = save("dict", tmp_path / "batch.pt", batch())
    if words.startswith("score"):
        path = write_jsonl(tmp_path / "chats.jsonl", CHATS)
    said = "leave the option out" if words.startswith("score") else f"has no diagnostics.{name}"
    assert said in error_of(cli(*words.format(path=path, model=model).split(), code=2))


def test_the_real_doctor_and_inspector(cli: Cli, tmp_path: Path, model: str, reference: str) -> None:
    path = save("dict", tmp_path / "batch.pt", batch())
    result = cli("check", path, "--policy", model, "--reference", reference, "--json", code=1)
    assert json.loads(result.stdout)["findings"]  # the log-probs in the batch are made up
    assert cli("inspect", path, "--tokenizer", model).stdout.strip()
    cli("inspect", path, "--tokenizer", model, "--html", tmp_path / "page.html")
    assert "<html" in (tmp_path / "page.html").read_text(encoding="utf-8").lower()


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
