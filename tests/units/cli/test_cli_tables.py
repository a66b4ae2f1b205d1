"""Tables for people and machines hold what the presets and contracts hold."""

from __future__ import annotations

import json
import platform

import pytest

from cli_files import Cli, error_of
from torchrl_llm_kl.algorithms import ALGORITHMS
from torchrl_llm_kl.cli._console import cells_of
from torchrl_llm_kl.estimators import CONTRACTS


def test_all_algorithms_are_listed(cli: Cli) -> None:
    lines = cli("algorithms").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(ALGORITHMS)
    models = {line.split()[0]: line.split("  ")[-1].strip() for line in lines[1:]}
    assert (models["ppo"], models["dapo"], models["grpo"]) == ("reference, critic", "none", "reference")
    assert models["gkd"] == "teacher"


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


def test_an_algorithm_by_hand(cli: Cli) -> None:
    settings = json.loads(cli("algorithms", "dapo", "--json").stdout)["settings"]
    assert (settings["objective.clip_low"]["value"], settings["objective.clip_high"]["value"]) == (0.2, 0.28)
    text = cli("algorithms", "ppo").stdout
    assert "advantage.whiten" in text
    assert "Schulman et al. 2016 (arXiv 1506.02438)" in text
    assert "reference, critic" in text


def test_an_unknown_algorithm(cli: Cli) -> None:
    assert error_of(cli("algorithms", "grpoo", code=2)).partition(". ")[2].startswith("Did you mean 'grpo'? Known: ")


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


def test_version_of_everything(cli: Cli) -> None:
    found = json.loads(cli("version", "--all", "--json").stdout)
    assert found["python"] == platform.python_version()
    assert set(
        ["torchrl-llm-kl", "torch", "tensordict", "torchrl", "transformers", "ray", "peft", "platform", "CUDA"]
    ) <= set(found)
    assert "torch " in cli("version", "--all").stdout


def test_a_package_that_is_missing(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchrl_llm_kl.cli import _tables

    monkeypatch.setattr(_tables, "_PACKAGES", ("no-such-package",))
    assert json.loads(cli("version", "--all", "--json").stdout)["no-such-package"] == "not installed"


def test_cells_of_a_markdown_table() -> None:
    assert cells_of("| a | b |\n|---|---|\n| `x` |  |\n| **y** | z |\n") == (["a", "b"], [["x", ""], ["y", "z"]])
