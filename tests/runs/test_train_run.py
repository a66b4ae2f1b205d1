"""A run does what its configuration says, and goes on to the bit where it was ended."""

from __future__ import annotations

import json
import shutil
import signal
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_llm_kl.training import (
    Checkpoints,
    CheckpointWarning,
    ConfigError,
    ModelError,
    TrainConfig,
    load_model,
    load_prompts,
    read_config,
    step_figures,
    summary,
    train,
)
from torchrl_llm_kl.training._build import file_digests
from train_lab import ANSWERS, HELD_OUT, assert_same_run, build_lab, figures, same, settings, steps_in, weights


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def whole(lab: Path) -> Path:
    """A run that nothing interrupts."""
    out = lab / "whole"
    result = train(settings(lab, out), say=lambda line: None)
    assert (result.outcome, result.step, result.chosen, result.final) == ("finished", 4, 4, out / "final")
    return out


# ------------------------------------------------------------------ what a run leaves


def test_the_figures_of_a_run(whole: Path) -> None:
    rows, evaluations = figures(whole / "metrics.jsonl"), figures(whole / "evaluations.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["step"] for row in evaluations] == [0, 2, 4]
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
    """Greedy answers of the first model, one prompt at a time, through transformers alone."""
    config = settings(lab, whole)
    _, held_out = load_prompts(config)
    assert held_out is not None
    assert len(held_out) == HELD_OUT
    tokenizer = AutoTokenizer.from_pretrained(config.model.name)
    model = AutoModelForCausalLM.from_pretrained(config.model.name)
    rewards = []
    for prompt in held_out:
        text = tokenizer.apply_chat_template(prompt.messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt").input_ids
        out = model.generate(ids, do_sample=False, max_new_tokens=6, pad_token_id=tokenizer.pad_token_id)
        answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        rewards.append(sum(letter in "aeiou" for letter in answer) / 6)
    row = figures(whole / "evaluations.jsonl")[0]
    mean = sum(rewards) / len(rewards)
    variance = sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    assert row["reward"] == pytest.approx(mean, abs=1e-6)
    assert row["reward_error"] == pytest.approx((variance / len(rewards)) ** 0.5, abs=1e-6)


def test_the_final_folder_opens_and_has_a_card(whole: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(whole / "final")
    assert same(weights(whole / "final"), weights(whole / "checkpoints" / "step-000004" / "model"))
    tokenizer = AutoTokenizer.from_pretrained(whole / "final")
    assert tokenizer.chat_template
    assert model.generate(tokenizer("say 3", return_tensors="pt").input_ids, max_new_tokens=2).shape[0] == 1
    card = (whole / "final" / "README.md").read_text()
    last = figures(whole / "evaluations.jsonl")[-1]
    assert f"| 4 | {last['reward']:.4g} | {last['reward_error']:.2g} | {last['kl']:.3g} |" in card
    assert "trained for 4 steps with grpo" in card
    assert "\n# whole\n" in card
    assert f'AutoTokenizer.from_pretrained("{whole / "final"}")' in card
    assert "  target: 0.5\n" in card
    assert (whole / "final" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert read_config(whole / "config.yaml") == settings(whole.parent, whole)


def test_figures_for_people(lab: Path, tmp_path: Path) -> None:
    """One held-out prompt has no standard error; a prompt with a code block does not end that of the settings."""
    config = settings(
        lab, tmp_path / "mine", "run.steps=1", "optimizer.warmup_steps=0", "evaluation.num_prompts=1",
        "data.system_prompt='```\\n# not a title'",
    )  # fmt: skip
    said: list[str] = []
    result = train(config, say=said.append)
    before = json.loads(
        (tmp_path / "mine" / "evaluations.jsonl").read_text().splitlines()[0], parse_constant=pytest.fail
    )
    assert "reward_error" not in before
    assert f"step 0: reward on held-out prompts {before['reward']:.4g}" in said
    assert result.figures["reward on 1 held-out prompt, before"] == f"{before['reward']:.4g}"
    card = (tmp_path / "mine" / "final" / "README.md").read_text()
    assert "trained for 1 step with grpo" in card
    assert f"| 0 | {before['reward']:.4g} | — | 0 |" in card
    assert "````yaml\nmodel:\n" in card
    long = summary(
        config, [{"step": 0, "tokens": 38_811.0, "seconds": 7_500.0}, {"tokens": 1.0, "seconds": 7_500.0}], []
    )
    assert long["training"] == "2 steps, 38,812 tokens, 2 h 5 min"


def test_equal_rewards_are_said_in_the_first_step_and_in_the_report(lab: Path, whole: Path, tmp_path: Path) -> None:
    """Constant rewards, those of the prompt alone for algorithms with and without groups, and those of the answer."""
    (tmp_path / "r.py").write_text(
        "def same(q, a, m):\n    return 0.25\ndef of_prompt(q, a, m):\n    return float(len(m['answer'] + q) + ord(q[-1]))\n"
    )

    def run(name: str, *changes: str) -> tuple[list[float], list[str], str, str]:
        said: list[str] = []
        config = settings(lab, tmp_path / name, "optimizer.warmup_steps=0", "evaluation.every=0", *changes)
        result = train(config, say=said.append)
        warned = [line for line in said if line.startswith("warning: ")]
        card = (tmp_path / name / "final" / "README.md").read_text()
        return [row["equal_rewards"] for row in result.rows], warned, result.figures["groups with equal rewards"], card

    shares, warned, report, card = run("equal", f"reward={tmp_path / 'r.py'}:same", "run.steps=2")
    assert shares == [1.0, 1.0], "also when the KL that is charged differs"
    assert len(warned) == 1
    assert "all answers that are compared have the same reward (mean 0.25), so that nothing is learnt" in warned[0]
    assert report == "all: nothing was learnt from the rewards"
    assert f"| groups with equal rewards | {report} |" in card
    of_prompt = f"reward={tmp_path / 'r.py'}:of_prompt"
    shares, warned, report, _ = run("of the prompt", of_prompt, "run.steps=1")
    assert (shares, len(warned)) == ([1.0], 1)
    shares, warned, report, _ = run("whole step", of_prompt, "run.steps=1", "algorithm.name=reinforce_plus_plus")
    assert (shares, warned, report) == ([0.0], [], "0 %, mean of all steps")
    shares = [row["equal_rewards"] for row in figures(whole / "metrics.jsonl")]
    assert min(shares) < 1
    report = f"{100 * sum(shares) / 4:.3g} %, mean of all steps"
    assert f"| groups with equal rewards | {report} |" in (whole / "final" / "README.md").read_text()


def test_the_share_of_groups_with_equal_rewards() -> None:
    """Three groups in any order: equal, equal but for the KL that was charged, and unequal by a little."""

    class Coefficient(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.tensor(0.3)

    earned = torch.tensor([0.7, 2.0, 0.5, 0.7, 2.0, 0.501])
    group = torch.tensor([4, 9, 1, 4, 9, 1])
    kl = torch.tensor([[0.1, -0.4, 3.0]] * 3 + [[0.2, 5.0, -0.7]] * 3)
    charged = torch.cat([torch.zeros(6, 2), earned[:, None]], 1) - 0.3 * kl

    def share(reward: torch.Tensor, rows: slice = slice(None), **how: Any) -> float:
        after = TensorDict(reward=reward[..., None], kl_penalty=kl, batch_size=[6])
        batch = TensorDict(next=after, group=group[:, None], batch_size=[6])
        return step_figures(batch[rows], **how)["equal_rewards"]

    assert share(earned[:, None]) == pytest.approx(2 / 3)
    assert share(charged, coefficient=Coefficient(), charged=True) == pytest.approx(2 / 3)
    assert share(charged) == 0.0, "the KL alone tells them apart"
    assert share(earned[:, None], slice(0, 1)) == 1.0
    assert share(earned[:, None], compares=False) == 0.0
    assert share(torch.full((6, 1), 0.7), compares=False) == 1.0
    assert "equal_rewards" not in step_figures(
        TensorDict(next=TensorDict(reward=earned[:, None], batch_size=[6]), batch_size=[6])
    )


# ------------------------------------------------------------------ resuming


@pytest.mark.parametrize(("from_step", "damaged"), [(1, False), (2, True), (3, False)])
def test_a_resumed_run_ends_with_the_same_bits(
    lab: Path, whole: Path, tmp_path: Path, from_step: int, damaged: bool
) -> None:
    """Metrics of later steps are there too, as a kill leaves them; with ``damaged`` a later checkpoint is cut."""
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "final")
    for step in range(from_step + 1, 5):
        shutil.rmtree(out / "checkpoints" / f"step-00000{step}")
    if damaged:
        folder = out / "checkpoints" / f"step-00000{from_step}"
        state = folder / "state.pt"
        state.write_bytes(state.read_bytes()[:1000])
    said: list[str] = []
    if damaged:
        with pytest.warns(CheckpointWarning, match=r"state\.pt has 1000 bytes"):
            train(settings(lab, out), say=said.append)
    else:
        train(settings(lab, out), say=said.append)
    assert said[0].startswith(f"going on after step {from_step - damaged} of 4")
    assert_same_run(out, whole)


def test_a_signal_saves_and_the_run_goes_on(
    lab: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM while the answers of the second step are rewarded: the step is finished, and nothing else."""
    config = settings(lab, tmp_path / "out", "checkpoints.every=4")
    said: list[str] = []
    monkeypatch.setenv("INTERRUPT_AT", str(HELD_OUT + ANSWERS + 3))
    before = signal.getsignal(signal.SIGTERM)  # Ray, in an earlier test, may have set its own
    result = train(config, say=said.append)
    assert (result.outcome, result.step, result.final) == ("interrupted", 2, None)
    assert f"saved {tmp_path / 'out' / 'checkpoints' / 'step-000002'}" in said[-1]
    assert "Run the same command to go on" in said[-1]
    assert not (tmp_path / "out" / "final").exists()
    assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.delenv("INTERRUPT_AT")
    assert train(config, say=said.append).outcome == "finished"
    assert_same_run(tmp_path / "out", whole)


def test_how_often_it_is_evaluated_and_looked_at_changes_nothing(lab: Path, whole: Path, tmp_path: Path) -> None:
    config = settings(
        lab, tmp_path / "out", "evaluation.every=1", "evaluation.greedy=false", "logging.doctor_every=1",
        "logging.loggers=[csv,tensorboard]",
    )  # fmt: skip
    train(config, say=lambda line: None)
    assert same(weights(tmp_path / "out" / "final"), weights(whole / "final"))
    assert (tmp_path / "out" / "rollouts.html").exists()
    assert list((tmp_path / "out" / "logs" / "csv").rglob("kl.csv"))
    assert list((tmp_path / "out" / "logs" / "tensorboard").rglob("events*"))
    never = settings(lab, tmp_path / "never", "evaluation.every=0")
    train(never, say=lambda line: None)
    assert same(weights(tmp_path / "never" / "final"), weights(whole / "final"))


def test_logs_in_files_hold_each_step_once_after_resuming(lab: Path, tmp_path: Path) -> None:
    def config(steps: int) -> TrainConfig:
        return settings(
            lab, tmp_path / "out", f"run.steps={steps}", "logging.loggers=[csv]", "optimizer.schedule=constant"
        )

    train(config(2), say=lambda line: None)
    train(config(3), say=lambda line: None)
    (file,) = (tmp_path / "out" / "logs" / "csv").rglob("scalars/kl.csv")
    assert [int(line.split(",")[0]) for line in file.read_text().splitlines()] == [0, 1, 2]
    assert [row["step"] for row in figures(tmp_path / "out" / "metrics.jsonl")] == [0, 1, 2]


def test_other_settings_are_refused_and_fresh_begins_anew(lab: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    with pytest.raises(ConfigError, match=r"optimizer\.lr: 0\.003, now 0\.001.*--fresh"):
        train(settings(lab, out, "optimizer.lr=1e-3"))
    said: list[str] = []
    result = train(
        settings(lab, out, "optimizer.lr=1e-3", "run.steps=2", "evaluation.every=0"), fresh=True, say=said.append
    )
    assert said[0] == f"{out} held an earlier run: moved it to {out / 'earlier-1'}."
    assert (result.step, len(figures(out / "metrics.jsonl"))) == (2, 2)
    assert same(weights(out / "earlier-1" / "final"), weights(whole / "final"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.prompts=nowhere.jsonl", "nowhere.jsonl"),
        ("reward=nowhere.py:f", "there is no file nowhere.py"),
        ("model.name=./nowhere", "there is no folder ./nowhere"),
        ("algorithm.name=dpo", "learns from given answers"),
        ("model.dtype=bfloat16", "weights cannot be read"),
    ],
)
def test_nothing_is_moved_for_a_fresh_run_that_cannot_begin(
    lab: Path, tmp_path: Path, change: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it fails while it loads the weights."""
    out = tmp_path / "out"
    (out / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl"):
        (out / name).write_text("of the earlier run")
    before = sorted(out.rglob("*"))

    def load(*args: Any, **kwargs: Any) -> None:
        raise ModelError("weights cannot be read")

    monkeypatch.setattr("torchrl_llm_kl.training._models.load_model", load)
    said: list[str] = []
    for _ in range(2):
        with pytest.raises((ValueError, OSError), match=message):
            train(settings(lab, out, change), fresh=True, say=said.append)
    assert sorted(path for path in out.rglob("*") if path.name != ".lock") == before
    assert (out / "metrics.jsonl").read_text() == (out / "config.yaml").read_text() == "of the earlier run"
    assert said == []


def test_what_a_fresh_run_reads_is_not_moved(lab: Path, tmp_path: Path) -> None:
    """The weights of the earlier run to go on from, a tokenizer, prompts: by any name of the folder."""
    out = tmp_path / "out"
    shutil.copytree(lab / "model", out / "final")
    (out / "logs").mkdir()
    (out / "logs" / "r.py").write_text("def f(q, a, m):\n    return 1.0\n")
    (tmp_path / "link").symlink_to(out)
    before = sorted(out.rglob("*"))
    for change, key in (
        (f"model.name={out / 'final'}", r"model\.name"),
        (f"model.tokenizer={out / 'logs' / '..' / 'final'}", r"model\.tokenizer"),
        (f"reference.name={tmp_path / 'link' / 'final'}", r"reference\.name"),
        (f"data.prompts={out / 'logs' / 'p.jsonl'}", r"data\.prompts"),
        (f"reward={out / 'logs' / 'r.py'}:f", "reward.functions"),
    ):
        for fresh in (True, False):
            with pytest.raises(ConfigError, match=rf"^{key}.* which this run would move or replace: copy it"):
                train(settings(lab, out, change), fresh=fresh)
    assert sorted(path for path in out.rglob("*") if path.name != ".lock") == before


def test_a_device_that_is_not_there_is_said_before_a_model_is_loaded(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", load)
    absent = f"cuda:{torch.cuda.device_count()}"
    for device in (absent, "meta", "gpu"):
        with pytest.raises(ModelError, match=rf"^model\.device='{device}' is no device .* which has cpu"):
            train(settings(lab, tmp_path / "out", f"model.device={device}"))
        with pytest.raises(ModelError, match=rf"^device='{device}' is no device"):
            load_model(str(lab / "model"), device=device)


def test_a_file_that_changed_before_a_run_goes_on_is_named(lab: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(Path(settings(lab, tmp_path / "out").data.prompts).read_bytes())

    def go_on(steps: int) -> list[str]:
        said: list[str] = []
        train(
            settings(
                lab, tmp_path / "out", f"data.prompts={prompts}", f"run.steps={steps}", "optimizer.schedule=constant"
            ),
            say=said.append,
        )
        return [line for line in said if "has changed" in line]

    assert go_on(2) == go_on(3) == []
    prompts.write_text("\n".join(reversed(prompts.read_text().splitlines())))
    assert go_on(4) == [f"{prompts} has changed since: what follows is not what it would have been without a stop."]
    assert go_on(5) == []  # the checkpoint knows the new one


def test_files_that_a_resumed_run_reads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by its path in the configuration; modules and the folder's other files are left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    held = {"p.jsonl": b"1", "h.jsonl": b"2", "a.py": b"3", "home/b.py": b"4", "math": b"5"}
    for name, content in held.items():
        (tmp_path / name).write_bytes(content)
    parts = {"a": "a.py:f", "b": {"function": "~/b.py:g", "weight": 0}, "c": "math:sqrt"}
    config = read_config(
        {"model": {"name": "m"}, "data": {"prompts": "p.jsonl", "held_out": "h.jsonl"}, "reward": {"functions": parts}}
    )
    digest = {content: sha256(content).hexdigest() for content in held.values()}
    assert file_digests(config) == {
        "p.jsonl": digest[b"1"], "h.jsonl": digest[b"2"], "a.py": digest[b"3"], "~/b.py": digest[b"4"],
    }  # fmt: skip


def test_a_checkpoint_of_another_program_is_refused(lab: Path, tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "out" / "checkpoints").writing(3, {"seconds": 1.0}):
        pass
    with pytest.raises(ConfigError, match=r"step-000003 is of another program: .*--fresh"):
        train(settings(lab, tmp_path / "out"))


def test_mlflow_has_one_run_of_the_project_whose_process_changes(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    for steps in (2, 4):
        train(
            settings(lab, tmp_path / "out", f"run.steps={steps}", "logging.loggers=[mlflow]", "logging.project=mine"),
            say=lambda line: None,
        )
        mlflow.end_run()
    experiment = mlflow.get_experiment_by_name("mine")
    (run,) = mlflow.search_runs([experiment.experiment_id], output_format="list")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "kl")
    kls = {row["step"]: row["kl"] for row in figures(tmp_path / "out" / "metrics.jsonl")}
    assert {one.step: one.value for one in history} == pytest.approx(kls)
    assert len(kls) == 4
    assert run.info.run_name == "out"


def test_a_finished_run_with_fewer_steps_does_not_go_on(lab: Path, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "out")
    result = train(settings(lab, tmp_path / "out", "run.steps=2"), say=lambda line: None)
    assert (result.outcome, result.step) == ("finished", 4)


def test_a_finished_run_only_reports(lab: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "final")
    result = train(settings(lab, out), say=lambda line: None)
    assert (result.outcome, result.step) == ("finished", 4)
    assert_same_run(out, whole)


def test_a_configuration_of_the_user_s_in_the_folder_of_the_run_is_kept(lab: Path, tmp_path: Path) -> None:
    """The run writes all settings under this name; a second start only replaces its own file."""
    own = "# my comments\n" + settings(lab, tmp_path, "run.steps=1", "optimizer.warmup_steps=0").to_yaml()
    (tmp_path / "config.yaml").write_text(own)
    said: list[str] = []
    for _ in range(2):
        train(read_config(tmp_path / "config.yaml", ["evaluation.every=0"]), say=said.append)
    assert (tmp_path / "earlier-1" / "config.yaml").read_text() == own
    assert read_config(tmp_path / "config.yaml").evaluation.every == 0
    assert [line.startswith("moved ") for line in said] == [True, False]
    assert not (tmp_path / "earlier-2").exists()
