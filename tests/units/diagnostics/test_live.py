"""The monitor of a run: its logs in torchrl's loggers, and the steps at which it looks at a batch."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.record import CSVLogger, TensorboardLogger

from torchrl_llm_kl.diagnostics import RunMonitor, status_line
from toy_models import tiny_model
from toy_tokenizer import build_tokenizer


class Lines:
    """A logger that stores its input."""

    def __init__(self) -> None:
        self.scalars: dict[int, dict[str, float]] = {}
        self.texts: dict[int, str] = {}

    def log_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.setdefault(step, {})[name] = value

    def log_str(self, name: str, value: str, step: int) -> None:
        self.texts[step] = value


def batch(shift: int = 0) -> TensorDict:
    """Eight answers of six tokens. A shift moves the sampler's log-probs to other tokens."""
    generator = torch.Generator().manual_seed(0)
    full = torch.randint(3, 30, (8, 8), generator=generator)
    td = TensorDict(tokens=TensorDict(prompt=full[:, :2], full=full, batch_size=[8]), batch_size=[8])
    log_probs = -3 * torch.rand(8, 8, generator=generator)
    td["next", "log_probs", "full"], td["next", "sampler_log_probs", "full"] = log_probs, log_probs.roll(shift, -1)
    return td


def watching(folder: Path, logger: Any = None, every: int = 1, **models: Any) -> RunMonitor:
    return RunMonitor(logger, every=every, folder=folder, tokenizer=build_tokenizer(), **models)


def test_outputs_of_a_step_are_averaged_and_numbers_are_logged_unchanged() -> None:
    lines = Lines()
    monitor = RunMonitor(lines, every=0)
    monitor.add(TensorDict(ESS=torch.tensor(0.5), loss_objective=torch.tensor(1.0), per_token=torch.zeros(3)))
    monitor.add({"ESS": torch.tensor(1.0), "clip_fraction": 0.25})
    logged = monitor.step(7, kl=0.125)
    assert logged == {"ESS": 0.75, "loss_objective": 1.0, "clip_fraction": 0.25, "kl": 0.125}
    assert lines.scalars == {7: logged}
    assert monitor.step(8, kl=0.5) == {"kl": 0.5}, "a step starts without the numbers of the one before"
    monitor.add({"loss": torch.ones(1, requires_grad=True) * 2})
    assert not monitor._sums["loss"][0].requires_grad, "a graph is not kept"
    assert monitor.step(9) == {"loss": 2.0}


def test_the_line_of_a_progress_bar() -> None:
    metrics = {"reward": 0.5, "kl_to_ref": 0.1234, "clip_fraction": 0.0312, "ESS": 0.987, "entropy": 1.0}
    assert status_line(metrics) == "reward 0.50  KL 0.123  clipped 3.1%  ESS 0.99"
    assert status_line({"kl": 0.4, "kl_to_ref": 9.0}, kl_target=0.5) == "KL 0.400/0.5"
    assert status_line({}) == ""


def test_a_batch_is_looked_at_every_so_many_steps(tmp_path: Path) -> None:
    lines = Lines()
    monitor = watching(tmp_path, lines, every=3)
    for step in range(7):
        assert (monitor.look(step, batch()) is not None) == (step in (0, 3, 6))
        assert ("doctor/mask/tokens" in monitor.step(step)) == (step in (0, 3, 6))
    assert lines.scalars[3]["doctor/mask/tokens"] == 48
    assert lines.texts == {}, "nothing is wrong"
    assert (tmp_path / "diagnosis.txt").read_text().startswith("step 6\n48 tokens of 8 sequences: no fault")
    assert "Rollouts of step 6" in (tmp_path / "rollouts.html").read_text()
    assert monitor.look(9, batch()[:0]) is None, "it is empty"
    # A fault is logged with its confidence and its report.
    monitor.look(12, batch(shift=1))
    monitor.step(12)
    assert monitor.diagnosis.worst.cause == "off_by_one"
    assert lines.scalars[12]["doctor/fault/off_by_one"] == monitor.diagnosis.worst.confidence
    assert lines.texts == {12: f"step 12\n{monitor.diagnosis}\n"}


def test_models_are_run_once_for_doctor_and_page(tmp_path: Path) -> None:
    policy, reference = tiny_model(seed=0), tiny_model(seed=1)
    calls: list[Any] = []
    for model in (policy, reference):
        model.register_forward_pre_hook(lambda model, _: calls.append(model))
    td = batch().exclude(("next", "log_probs"), ("next", "sampler_log_probs"))
    monitor = watching(tmp_path, policy=policy, reference=reference)
    monitor.look(0, td)
    assert monitor.step(0)["doctor/kl/exact"] > 0
    once = list(calls)
    RunMonitor(every=1, policy=policy, reference=reference).look(0, td)
    assert calls == 2 * once, "the page needs no forward of its own"


@pytest.mark.parametrize("fault", ["entry", "entry beside a policy", "policy"])
def test_a_bad_entry_or_policy_is_a_finding_and_does_not_stop_the_run(fault: str, tmp_path: Path) -> None:
    """The entry does not fit the tokens, or the policy has NaN weights."""
    td, policy = batch(), None if fault == "entry" else tiny_model()
    if fault == "policy":
        next(policy.parameters()).data.fill_(math.nan)
        with pytest.warns(UserWarning, match="nan"):
            found = watching(tmp_path, policy=policy).look(0, td)
    else:
        td["next", "sampler_log_probs", "full"] = torch.zeros(8, 11)
        found = watching(tmp_path, policy=policy).look(0, td)
        assert (tmp_path / "rollouts.html").is_file()
    assert found.worst.cause == ("nan" if fault == "policy" else "lengths")
    assert fault != "policy" or "NaN weights" in found.worst.evidence["error"]


def logged(logger: Any, tmp_path: Path) -> dict[str, str]:
    """Look at a batch with a fault and log a number. Returns the files of the run."""
    monitor = watching(tmp_path / "out", logger)
    monitor.look(4, batch(shift=1))
    monitor.step(4, kl=0.5)
    return {name: (tmp_path / "out" / name).read_text() for name in ("diagnosis.txt", "rollouts.html")}


def test_torchrls_csv_logger(tmp_path: Path) -> None:
    kept = logged(CSVLogger("run", log_dir=str(tmp_path)), tmp_path)
    rows = list(csv.reader((tmp_path / "run" / "scalars" / "kl.csv").open()))
    assert [[float(x) for x in row] for row in rows] == [[4.0, 0.5]]
    assert "off_by_one" in next((tmp_path / "run" / "scalars" / "doctor" / "fault").iterdir()).name
    assert (tmp_path / "run" / "texts" / "diagnosis4.txt").read_text() == kept["diagnosis.txt"]
    assert (tmp_path / "run" / "rollouts" / "4.html").read_text() == kept["rollouts.html"]


def test_torchrls_tensorboard_logger(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorboardLogger("run", log_dir=str(tmp_path))
    kept = logged(logger, tmp_path)
    logger.experiment.flush()
    found = accumulator.EventAccumulator(str(tmp_path / "run")).Reload()
    (event,) = found.Scalars("kl")
    assert (event.step, event.value) == (4, 0.5)
    (text,) = found.Tensors("diagnosis/text_summary")
    assert text.tensor_proto.string_val[0].decode() == kept["diagnosis.txt"]
    assert (tmp_path / "run" / "rollouts" / "4.html").is_file()


def test_torchrls_wandb_logger_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from torchrl.record import WandbLogger

    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger("run", offline=True, save_dir=str(tmp_path), project="test", log_env_packages=False)
    kept = logged(logger, tmp_path)
    assert logger.experiment.summary["kl"] == 0.5
    logger.experiment.finish()
    assert [path.read_text() for path in tmp_path.rglob("media/html/*.html")] == [kept["rollouts.html"]]


def test_torchrls_mlflow_logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # databases need the whole of MLflow
    mlflow = pytest.importorskip("mlflow")
    from torchrl.record.loggers.mlflow import MLFlowLogger

    logger = MLFlowLogger("run", f"file:{tmp_path}/runs", artifact_location=f"file:{tmp_path}/artifacts")
    try:
        kept = logged(logger, tmp_path)
        run = mlflow.get_run(logger.experiment.info.run_id)
    finally:
        mlflow.end_run()
    assert run.data.metrics["kl"] == 0.5
    (page,) = (tmp_path / "artifacts").rglob("rollouts/4.html")
    assert page.read_text() == kept["rollouts.html"]
    (text,) = (tmp_path / "artifacts").rglob("diagnosis/4.txt")
    assert text.read_text() == kept["diagnosis.txt"]


def test_a_logger_of_only_numbers_and_wrong_settings(tmp_path: Path) -> None:
    seen: list[Any] = []
    logged(SimpleNamespace(log_scalar=lambda name, value, step=None: seen.append((name, value, step))), tmp_path)
    assert ("kl", 0.5, 4) in seen
    for settings, message in (({"folder": tmp_path}, "tokenizer"), ({"every": -1}, "every")):
        with pytest.raises(ValueError, match=message):
            RunMonitor(**settings)
