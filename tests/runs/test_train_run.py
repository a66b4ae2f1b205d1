"""Tests of a run: its figures and files, and bit-exact resuming."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from torchrl_llm_kl import FixedKLCoefficient, training
from torchrl_llm_kl.cli._commands import app
from torchrl_llm_kl.training import Checkpoints, CheckpointWarning, ConfigError, ModelError, read_config, train
from torchrl_llm_kl.training._inputs import load_prompts
from torchrl_llm_kl.training._report import summary
from torchrl_llm_kl.training._user_code import file_digests
from train_lab import (
    ANSWERS,
    HELD_OUT,
    assert_same_run,
    ended_after,
    figures,
    go,
    same,
    settings,
    steps_in,
    weights,
)
from waits import LONG, until

pytestmark = pytest.mark.usefixtures("_no_curves")
SHORT = ("optimizer.warmup_steps=0", "evaluation.every=0")


@pytest.mark.smoke
def test_the_figures_of_a_run(whole: Path) -> None:
    rows, evaluations = figures(whole / "metrics.jsonl"), figures(whole / "evaluations.jsonl")
    assert [[row["step"] for row in each] for each in (rows, evaluations)] == [[0, 1, 2, 3], [0, 2, 4]]
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-4)
    assert any(abs(row["kl"]) > 1e-3 for row in rows[1:]), "the policy has moved"
    assert evaluations[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert evaluations[2]["kl"] > 1e-4
    # Warm-up of one step, then linearly to 0 in three.
    assert [row["lr"] for row in rows] == pytest.approx([3e-3, 3e-3, 2e-3, 1e-3])
    for row in rows:
        assert row["penalised_reward"] == pytest.approx(row["reward"] - row["coefficient"] * row["kl"], abs=1e-5)
        assert ANSWERS <= row["answer_tokens"] <= ANSWERS * 6
    assert len({row["coefficient"] for row in rows}) > 1
    assert steps_in(whole) == [f"step-00000{step}" for step in range(5) if step or evaluations[0]["reward"] >= 0][-5:]


def test_the_evaluation_by_hand(lab: Path, whole: Path) -> None:
    """The expected values are greedy answers of the first model, one prompt at a time, with only transformers."""
    _, held_out = load_prompts(settings(lab, whole))
    tokenizer = AutoTokenizer.from_pretrained(lab / "model")
    model = AutoModelForCausalLM.from_pretrained(lab / "model")
    rewards = []
    for prompt in held_out or ():
        text = tokenizer.apply_chat_template(prompt.messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt").input_ids
        out = model.generate(ids, do_sample=False, max_new_tokens=6, pad_token_id=tokenizer.pad_token_id)
        answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        rewards.append(sum(letter in "aeiou" for letter in answer) / 6)
    assert len(rewards) == HELD_OUT
    row = figures(whole / "evaluations.jsonl")[0]
    expected = mean(rewards), stdev(rewards) / HELD_OUT**0.5
    assert (row["reward"], row["reward_error"]) == pytest.approx(expected, abs=1e-6)


def test_the_final_folder_opens_and_has_a_card(whole: Path) -> None:
    assert same(weights(whole / "final"), weights(whole / "checkpoints" / "step-000004" / "model"))
    tokenizer = AutoTokenizer.from_pretrained(whole / "final")
    assert tokenizer.chat_template
    model, said = AutoModelForCausalLM.from_pretrained(whole / "final"), tokenizer("say 3", return_tensors="pt")
    assert model.generate(said.input_ids, max_new_tokens=2).shape[0] == 1
    card = (whole / "final" / "README.md").read_text()
    last = figures(whole / "evaluations.jsonl")[-1]
    shares = [row["equal_rewards"] for row in figures(whole / "metrics.jsonl")]
    assert min(shares) < 1
    for text in (
        f"| 4 | {last['reward']:.4g} | {last['low/reward']:.2g} to {last['high/reward']:.2g} | {last['kl']:.3g} |",
        "trained for 4 steps with grpo",
        "\n# whole\n",
        f'AutoTokenizer.from_pretrained("{whole / "final"}")',
        "  target: 0.5\n",
        f"| groups with equal rewards | {100 * sum(shares) / 4:.3g} %, mean of all steps |",
    ):
        assert text in card
    assert (whole / "final" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert read_config(whole / "config.yaml") == settings(whole.parent, whole)


def test_the_card_and_the_messages_of_a_short_run(lab: Path, tmp_path: Path) -> None:
    """A single held-out prompt has no interval. A code block in a prompt does not end that of the settings."""
    changes = ("run.steps=1", SHORT[0], "evaluation.num_prompts=1", "data.system_prompt='```\\n# not a title'")
    result, said = go(lab, tmp_path / "mine", *changes)
    before = figures(tmp_path / "mine" / "evaluations.jsonl")[0]["reward"]
    assert f"step 0: reward on held-out prompts {before:.4g}" in said
    assert result.figures["reward on 1 held-out prompt, before"] == f"{before:.4g}"
    card = (tmp_path / "mine" / "final" / "README.md").read_text()
    for text in ("trained for 1 step with grpo", f"| 0 | {before:.4g} | — | 0 |", "````yaml\nimports: []\nmodel:\n"):
        assert text in card
    rows = [{"step": 0, "tokens": 38_811.0, "seconds": 7_500.0}, {"tokens": 1.0, "seconds": 7_500.0}]
    assert summary(settings(lab, tmp_path), rows, [])["training"] == "2 steps, 38,812 tokens, 2 h 5 min"


def test_equal_rewards_are_reported(lab: Path, tmp_path: Path) -> None:
    """Rewards are compared before the KL is charged."""
    (tmp_path / "r.py").write_text("same = lambda q, a, m: 0.25\n")
    result, said = go(lab, tmp_path / "equal", *SHORT, f"reward={tmp_path / 'r.py'}:same", "run.steps=2")
    (warning,) = [line for line in said if line.startswith("warning: ")]
    assert [row["equal_rewards"] for row in result.rows] == [1.0, 1.0]
    report = result.figures["groups with equal rewards"]
    assert "all answers of the first step have the same reward, 0.25, from which nothing is learnt" in warning
    assert report == "all: nothing was learnt from the rewards"
    assert f"| groups with equal rewards | {report} |" in (tmp_path / "equal" / "final" / "README.md").read_text()


def test_the_share_of_groups_with_equal_rewards() -> None:
    """The rows are in mixed order. Two groups have equal rewards before the KL is charged, one differs by 0.001."""
    earned = torch.tensor([0.7, 2.0, 0.5, 0.7, 2.0, 0.501])
    group = torch.tensor([4, 9, 1, 4, 9, 1])
    kl = torch.tensor([[0.1, -0.4, 3.0]] * 3 + [[0.2, 5.0, -0.7]] * 3)
    charged = torch.cat([torch.zeros(6, 2), earned[:, None]], 1) - 0.3 * kl

    def share(reward: torch.Tensor, rows: slice = slice(None), **how: Any) -> float:
        after = TensorDict(reward=reward[..., None], kl_penalty=kl, batch_size=[6])
        batch = TensorDict(next=after, group=group[:, None], batch_size=[6])
        return training.step_figures(batch[rows], **how)["equal_rewards"]

    assert share(earned[:, None]) == pytest.approx(2 / 3)
    assert share(charged, coefficient=FixedKLCoefficient(0.3), charged=True) == pytest.approx(2 / 3)
    assert share(charged) == 0.0, "the KL alone tells them apart"
    assert share(earned[:, None], slice(0, 1)) == 1.0
    assert share(earned[:, None], compares=False) == 0.0
    assert share(torch.full((6, 1), 0.7), compares=False) == 1.0
    without = TensorDict(next=TensorDict(reward=earned[:, None], batch_size=[6]), batch_size=[6])
    assert "equal_rewards" not in training.step_figures(without)


@pytest.mark.smoke
def test_a_damaged_checkpoint_is_skipped_and_a_finished_run_reports_again(
    lab: Path, whole: Path, tmp_path: Path
) -> None:
    """The run resumes bit-exactly from the previous checkpoint. A finished run, also with fewer steps, writes missing files."""
    out = ended_after(4, whole, tmp_path)
    for changes in (("run.steps=2",), ()):
        result, _ = go(lab, out, *changes)
        assert (result.outcome, result.step) == ("finished", 4)
    assert_same_run(out, whole)
    shutil.rmtree(out / "final")
    shutil.rmtree(out / "checkpoints" / "step-000004")
    state = out / "checkpoints" / "step-000003" / "state.pt"
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.warns(CheckpointWarning, match=r"state\.pt has another content"):
        _, said = go(lab, out)
    assert said[0].startswith("resuming after step 2 of 4")
    assert_same_run(out, whole)


def test_evaluations_and_the_doctor_do_not_affect_the_training(lab: Path, whole: Path, tmp_path: Path) -> None:
    often = "evaluation.every=1 evaluation.greedy=false logging.doctor_every=1 logging.loggers=[csv,tensorboard]"
    for name, changes in (("often", often), ("never", "evaluation.every=0 checkpoints.every=4")):
        go(lab, tmp_path / name, *changes.split())
        assert same(weights(tmp_path / name / "final"), weights(whole / "final")), name
    for written in ("rollouts.html", "logs/csv/**/kl.csv", "logs/tensorboard/**/events*"):
        assert list((tmp_path / "often").glob(written)), written


def test_a_resumed_run_logs_each_step_once_and_reports_changed_files(lab: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_bytes(Path(settings(lab, out).data.prompts).read_bytes())
    changes = (*SHORT, f"data.prompts={prompts}", "logging.loggers=[csv]", "optimizer.schedule=constant")

    def go_on(steps: int) -> list[str]:
        return [line for line in go(lab, out, *changes, f"run.steps={steps}")[1] if "has changed" in line]

    assert go_on(1) == go_on(2) == []
    prompts.write_text("\n".join(reversed(prompts.read_text().splitlines())))
    assert go_on(3) == [f"{prompts} has changed since the checkpoint: the run is not bit-equal to one without a stop."]
    assert go_on(4) == []  # the checkpoint knows the new one
    (file,) = (out / "logs" / "csv").rglob("scalars/kl.csv")
    assert [int(line.split(",")[0]) for line in file.read_text().splitlines()] == [0, 1, 2, 3]
    assert [row["step"] for row in figures(out / "metrics.jsonl")] == [0, 1, 2, 3]


def test_other_settings_are_refused_and_fresh_begins_anew(lab: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    with pytest.raises(ConfigError, match=r"optimizer\.lr: 0\.003, now 0\.001.*--fresh"):
        go(lab, out, "optimizer.lr=1e-3")
    result, said = go(lab, out, "optimizer.lr=1e-3", "run.steps=2", "evaluation.every=0", fresh=True)
    assert said[0] == f"{out} held an earlier run: moved it to {out / 'earlier-1'}."
    assert (result.step, len(figures(out / "metrics.jsonl"))) == (2, 2)
    assert same(weights(out / "earlier-1" / "final"), weights(whole / "final"))


def test_a_fresh_run_that_cannot_start_moves_nothing(lab: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """This includes a failure while the weights are loaded."""
    (tmp_path / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / name).write_text("of the earlier run")
    before = sorted(tmp_path.rglob("*"))
    load = Mock(side_effect=ModelError("weights cannot be read"))
    monkeypatch.setattr("torchrl_llm_kl.training._models.load_model", load)
    for change, message in [
        ("reward=nowhere.py:f", "the file nowhere.py does not exist"),
        ("", "weights cannot be read"),
    ] * 2:
        with pytest.raises((ValueError, OSError), match=message):
            train(settings(lab, tmp_path, *change.split()), fresh=True, say=pytest.fail)
    assert sorted(path for path in tmp_path.rglob("*") if path.name != ".lock") == before
    assert all((tmp_path / name).read_text() == "of the earlier run" for name in ("config.yaml", "metrics.jsonl"))


def test_a_fresh_run_does_not_move_its_inputs(lab: Path, tmp_path: Path) -> None:
    """This holds for each kind of input, and for any path to the folder."""
    out = tmp_path / "out"
    shutil.copytree(lab / "model", out / "final")
    (out / "logs").mkdir()
    (out / "logs" / "r.py").write_text("def f(q, a, m):\n    return 1.0\n")
    (tmp_path / "link").symlink_to(out)
    before = sorted(out.rglob("*"))
    for key, value in {
        "model.tokenizer": out / "logs" / ".." / "final",
        "reference.name": tmp_path / "link" / "final",
        "data.prompts": out / "logs" / "p.jsonl",
        "reward.function": f"{out / 'logs' / 'r.py'}:f",
    }.items():
        wrong = rf"^{re.escape(key)}.* which this run would move or replace: copy it"
        for fresh in (True, False):
            with pytest.raises(ConfigError, match=wrong):
                go(lab, out, f"{key}={value}", fresh=fresh)
    assert sorted(path for path in out.rglob("*") if path.name != ".lock") == before


def test_a_folder_of_another_program_or_process_is_refused(lab: Path, tmp_path: Path) -> None:
    from filelock import FileLock

    with Checkpoints(tmp_path / "out" / "checkpoints").writing(3, {"seconds": 1.0}):
        pass
    with pytest.raises(ConfigError, match=r"has a run with other settings .*--fresh"):
        go(lab, tmp_path / "out")
    with FileLock(tmp_path / ".lock"), pytest.raises(ConfigError, match="another process trains in"):
        go(lab, tmp_path)


def test_digests_of_the_files_that_a_resumed_run_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files have their paths in the configuration as names. Modules and other files of the folder are left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    for name, content in {"p.jsonl": "1", "h.jsonl": "2", "a.py": "3", "home/b.py": "4", "math": "5"}.items():
        (tmp_path / name).write_text(content)
    parts = {"a": "a.py:f", "b": {"function": "~/b.py:g", "weight": 0}, "c": "math:sqrt"}
    data = {"prompts": "p.jsonl", "held_out": "h.jsonl"}
    config = read_config({"model": {"name": "m"}, "data": data, "reward": {"functions": parts}})
    want = {"p.jsonl": b"1", "h.jsonl": b"2", "a.py": b"3", "~/b.py": b"4"}
    assert file_digests(config) == {name: sha256(content).hexdigest() for name, content in want.items()}


def test_a_resumed_run_continues_its_run_in_mlflow(lab: Path, tmp_path: Path, monkeypatch: Any) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    for steps in (2, 4):
        go(lab, tmp_path / "out", f"run.steps={steps}", "logging.loggers=[mlflow]", "logging.project=mine")
        mlflow.end_run()
    experiment = mlflow.get_experiment_by_name("mine")
    (run,) = mlflow.search_runs([experiment.experiment_id], output_format="list")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "kl")
    kls = {row["step"]: row["kl"] for row in figures(tmp_path / "out" / "metrics.jsonl")}
    assert {one.step: one.value for one in history} == pytest.approx(kls)
    assert (len(kls), run.info.run_name) == (4, "out")


def test_a_user_s_config_in_the_folder_of_the_run_is_kept(lab: Path, tmp_path: Path) -> None:
    """The run writes all settings to config.yaml. A second start replaces only a file that a run wrote."""
    own = "# my comments\n" + settings(lab, tmp_path, "run.steps=1", SHORT[0]).to_yaml()
    (tmp_path / "config.yaml").write_text(own)
    said: list[str] = []
    for _ in range(2):
        train(read_config(tmp_path / "config.yaml", ["evaluation.every=0"]), say=said.append)
    assert (tmp_path / "earlier-1" / "config.yaml").read_text() == own
    assert read_config(tmp_path / "config.yaml").evaluation.every == 0
    assert [line.startswith("moved ") for line in said] == [True, False]
    assert not (tmp_path / "earlier-2").exists()


def test_the_command_and_its_exit_codes(lab: Path, whole: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The command is interrupted, resumed, refused with other settings, and ended by its KL.

    SIGTERM comes while the answers of the second step are rewarded. The run finishes this step and ends.
    """
    file, out = tmp_path / "config.yaml", tmp_path / "out"
    file.write_text(settings(lab, out, "checkpoints.every=4").to_yaml())

    def ended(code: int, *words: str) -> tuple[str, str]:
        result = CliRunner().invoke(app, ["train", str(file), *words])
        assert result.exit_code == code
        return result.stdout, result.stderr

    monkeypatch.setenv("INTERRUPT_AT", str(HELD_OUT + ANSWERS + 3))
    before = signal.getsignal(signal.SIGTERM)  # Ray, in an earlier test, may have set its own
    _, said = ended(130)
    assert f"interrupted after step 2 of 4: saved {out / 'checkpoints' / 'step-000002'}" in " ".join(said.split())
    assert "Run the same command to resume" in " ".join(said.split())
    assert (steps_in(out)[-1], (out / "final").exists()) == ("step-000002", False)
    assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.delenv("INTERRUPT_AT")
    printed, said = ended(0)
    assert "resuming after step 2 of 4" in said
    assert f"wrote {out / 'final'}, the weights after step 4" in printed
    assert_same_run(out, whole)
    assert "other settings (optimizer.lr" in ended(2, "optimizer.lr=1")[1]
    changes = "kl.stop_above=0.001 kl.stop_after=1 optimizer.lr=0.3 optimizer.schedule=constant evaluation.every=0"
    assert "kl.stop_above" in ended(1, *changes.split(), "--fresh")[1]


def killed(lab: Path, out: Path, pause: float, *overrides: str) -> int:
    """Start the command and kill it ``pause`` seconds after its next step. Returns the number of finished steps."""
    metrics = out / "metrics.jsonl"

    def done() -> int:
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def moved() -> bool:
        return metrics.exists() and metrics.stat().st_mtime > begun and done() > before

    (file := out.with_suffix(".yaml")).write_text(settings(lab, out).to_yaml())
    words = [sys.executable, "-m", "torchrl_llm_kl", "train", str(file), *overrides]
    before, begun = done(), time.time()
    process = subprocess.Popen(words, env=os.environ | {"OMP_NUM_THREADS": "1"})
    until(lambda: process.poll() is not None or moved(), seconds=LONG)
    time.sleep(pause)
    process.kill()
    process.wait()
    assert done() > before
    return done()


def test_a_killed_run_resumes_bit_exactly(lab: Path, whole: Path, tmp_path: Path) -> None:
    """This process resumes from the files. A run that ended after an odd step repeats its evaluation."""
    assert killed(lab, tmp_path / "out", pause=0.1) >= 1
    assert not (tmp_path / "out" / "final").exists(), "killed before its end"
    assert "resuming after step " in go(lab, tmp_path / "out")[1][0]
    assert_same_run(tmp_path / "out", whole)
    out = ended_after(1, whole, tmp_path / "odd")
    assert go(lab, out)[1][0].startswith("resuming after step 1 of 4")
    assert_same_run(out, whole)
