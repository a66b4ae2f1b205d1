"""``train`` prints and checks settings. tests/runs/test_train_run.py has whole runs and their exit codes."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from cli_files import Cli, error_of

pytest.importorskip("omegaconf")
from torchrl_llm_kl.training import read_config
from train_lab import build_lab, settings


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def file(lab: Path, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(settings(lab, tmp_path / "out", "evaluation.every=0", "run.steps=2").to_yaml())
    return path


def test_a_dry_run_prints_the_resolved_settings_and_writes_nothing(cli: Cli, file: Path, tmp_path: Path) -> None:
    out = cli("train", file, "optimizer.lr=1e-5", "run.seed=3", "--dry-run").stdout
    path = tmp_path / "again.yaml"
    path.write_text(out)
    assert read_config(path) == read_config(file, ["optimizer.lr=1e-5", "run.seed=3"])
    assert not (tmp_path / "out").exists()
    values = read_config(file)
    least = [f"model.name={values.model.name}", f"data.prompts={values.data.prompts}"]
    least.append(f"reward={values.reward.function}")
    assert f"name: {values.model.name}\n" in cli("train", *least, "--dry-run").stdout
    (tmp_path / "lr=1").mkdir()  # an equals sign in the path of the file is no change
    copy = Path(shutil.copy(file, tmp_path / "lr=1" / "config.yaml"))
    assert cli("train", copy, "--dry-run").stdout == cli("train", file, "--dry-run").stdout
    path.write_text(cli("train", "--example").stdout)
    assert read_config(path).data.prompts == "prompts.jsonl"
    # the output of a reward file goes to stderr, and its functions are not called
    (tmp_path / "talks.py").write_text("print('loading')\ndef f(q, a, m):\n    raise SystemExit(3)\n")
    result = cli("train", file, f"reward={tmp_path / 'talks.py'}:f", "--dry-run")
    assert result.stdout.startswith("imports: []\nmodel:\n")
    assert re.search(r"memory: at least .* GB .*Disk: up to .* GB", result.stderr)
    assert "loading" in result.stderr


INFINITE = "reward.functions.a={{function: {lab}/rewards.py:vowels, weight: 1e400}}"
#: A part of the error, and the changes of the settings. Each is found without loading weights.
NOT_THERE = [
    ("nowhere.jsonl", "data.prompts=nowhere.jsonl"),
    ("there is no file", "data.prompts={lab}"),
    ("line 1 of {tmp}/odd.jsonl has no prompt", "data.prompts={tmp}/odd.jsonl"),
    ("the file nowhere.py does not exist", "reward=nowhere.py:f"),
    ("has no function 'nothing'. Known: vowels, digits", "reward={lab}/rewards.py:nothing"),
    ("the module no.such.module cannot be imported", "reward=no.such.module:f"),
    ("names no function", "reward=math"),
    ("weight of 'a' must be at", "reward=null", INFINITE),
    ("cannot load the model './nowhere', which is not a folder here, from the hub", "model.name=./nowhere"),
    ("cannot load the model '{tmp}/empty'", "model.name={tmp}/empty"),
    ("cannot load the model '{tmp}/broken'", "model.name={tmp}/broken"),
    ("model.name is {tmp}/encoder, model.attention is None: Unrecognized config", "model.name={tmp}/encoder"),
    ("cannot load the tokenizer './nowhere'", "model.tokenizer=./nowhere"),
    ("the folder {tmp}/empty holds no tokenizer", "model.tokenizer={tmp}/empty"),
    ("model.attention is flash: ", "model.attention=flash"),
    ("model.device='gpu' is not a device of this process", "model.device=gpu"),
    ("model.device='cuda:99' is not a device of this process", "model.device=cuda:99"),
    ("Target modules {{'nope'}} not found", "lora={{r: 2, targets: [nope]}}"),
    ("learns from given answers", "algorithm.name=dpo"),
    ("final=best needs evaluations", "checkpoints.final=best", "evaluation.every=1", "data.held_out_share=0"),
    ("chat template refuses the first prompt (no system prompts)", "data.system_prompt=no", "model.name={tmp}/strict"),
]


@pytest.fixture
def odd(lab: Path, tmp_path: Path) -> Path:
    """A folder with files that no run can read."""
    (tmp_path / "odd.jsonl").write_text('{"text": "hi"}\n')
    (tmp_path / "empty").mkdir()
    for name in ("broken", "encoder"):
        shutil.copytree(lab / "model", tmp_path / name)
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "encoder" / "config.json").write_text('{"model_type": "t5"}')
    template = tmp_path / "strict" / "chat_template.jinja"
    shutil.copytree(lab / "model", template.parent)
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}"
    template.write_text(refuse + template.read_text())
    return tmp_path


@pytest.mark.parametrize("row", NOT_THERE, ids=lambda row: row[-1])
def test_missing_inputs_are_found_before_a_run(cli, file, lab, odd, row, monkeypatch):
    """A dry run finds them without loading weights. A run makes the same checks first."""

    def load(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr("torchrl_llm_kl.training._models.load_model", load)
    monkeypatch.chdir(odd)
    message, *changes = (text.format(tmp=odd, lab=lab) for text in row)
    assert message in error_of(cli("train", file, *changes, "--dry-run", code=2))
    assert not (odd / "out").exists()


def test_errors_are_one_line(cli: Cli, file: Path, tmp_path: Path) -> None:
    for words, message in (([tmp_path / "no.yaml"], "No such file"), ([], "train --example")):
        assert message in error_of(cli("train", *words, code=2)), message
    (tmp_path / "fails.py").write_text("def f(question, answer, metadata):\n    return answer.absent\n")
    last = cli("train", file, f"reward={tmp_path / 'fails.py'}:f", code=2).stderr.splitlines()[-1]
    assert "failed for all 8 answers of its first batch" in last
    assert "unexpected" not in last
