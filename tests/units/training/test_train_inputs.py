"""What a run refuses is said before weights are loaded and before an earlier run is moved; a dry run says it too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("omegaconf")
from torchrl_llm_kl.training import Checkpoints, CheckpointWarning, ConfigError, load_inputs, read_config, train
from train_lab import build_lab, settings


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_lab(tmp_path_factory.mktemp("lab"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("algorithm.args={std: bacth}", "std must be one of 'group', 'batch', got 'bacth'"),
        ("algorithm.args={aggregation: token_mean}", "'token_mean'"),
        ("algorithm.args={clip_low: 1.5}", "clip_low must be"),
        ("algorithm.args={clip_low: x}", "clip_low"),
    ],
)
def test_hyper_parameters(lab: Path, tmp_path: Path, change: str, message: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "metrics.jsonl").write_text("{}\n")  # of an earlier run
    config = settings(lab, out, change)
    with pytest.raises(ConfigError, match=r"algorithm.args is .*" + message):
        load_inputs(config)
    with pytest.raises(ConfigError, match=message):
        train(config, fresh=True)
    assert [path.name for path in out.iterdir() if path.name != ".lock"] == ["metrics.jsonl"]


def test_a_reference_of_another_vocabulary(lab: Path, tmp_path: Path) -> None:
    model = json.loads((lab / "model" / "config.json").read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").touch()
    (tmp_path / "other" / "config.json").write_text(json.dumps({**model, "vocab_size": 777}))
    with pytest.raises(ConfigError, match=r"vocabulary of 777"):
        load_inputs(settings(lab, tmp_path / "out", f"reference.name={tmp_path / 'other'}"))


def test_a_folder_that_cannot_be(lab: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for run in (load_inputs, train):
        with pytest.raises(ConfigError, match=rf"run.out is .*, and {tmp_path}/file is a file"):
            run(settings(lab, tmp_path / "file" / "x"))
    with pytest.raises(ConfigError, match="which cannot be made"):
        train(settings(lab, Path("/proc/x")))


def test_aliases_are_refused_before_they_grow(lab: Path, tmp_path: Path) -> None:
    file = tmp_path / "bomb.yaml"
    file.write_text("a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]\nc: [*b, *b]\n")
    with pytest.raises(ConfigError, match=r"bomb.yaml has an alias \(\*name\)"):
        read_config(file)
    with pytest.raises(ConfigError, match=r"has an alias"):
        read_config(None, ["run.steps=[&a 1, *a]"])


def test_a_checkpoint_under_the_name_of_another_step_is_passed_over(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2):
        with checkpoints.writing(step, {}) as folder:
            (folder / "a.txt").write_text(str(step))
    (tmp_path / "step-000002" / "checkpoint.json").write_bytes(
        (tmp_path / "step-000001" / "checkpoint.json").read_bytes()
    )
    (tmp_path / "step-000002" / "a.txt").write_text("1")
    assert Checkpoints.read(tmp_path / "step-000002") == "checkpoint.json: it is of step 1"
    with pytest.warns(CheckpointWarning, match="it is of step 1"):
        found = checkpoints.latest()
    assert found is not None
    assert found.step == 1
