"""A run does what its configuration says, and goes on to the bit where it was ended."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from train_lab import ANSWERS, HELD_OUT, assert_same_run, build_lab, figures, same, settings, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_llm_kl.training import (
    Checkpoints,
    CheckpointWarning,
    ConfigError,
    TrainConfig,
    check_algorithm,
    load_policy,
    load_prompts,
    load_reward,
    read_config,
    train,
)


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


def steps_in(out: Path) -> list[str]:
    return [path.name for path in Checkpoints(out / "checkpoints").paths()]


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
    assert "  target: 0.5\n" in card
    assert (whole / "final" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert read_config(whole / "config.yaml") == settings(whole.parent, whole)


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
    result = train(config, say=said.append)
    assert (result.outcome, result.step, result.final) == ("interrupted", 2, None)
    assert f"saved {tmp_path / 'out' / 'checkpoints' / 'step-000002'}" in said[-1]
    assert "Run the same command to go on" in said[-1]
    assert not (tmp_path / "out" / "final").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
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


def test_a_finished_run_only_reports(lab: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "final")
    result = train(settings(lab, out), say=lambda line: None)
    assert (result.outcome, result.step) == ("finished", 4)
    assert_same_run(out, whole)


# ------------------------------------------------------------------ kinds of runs


@pytest.mark.parametrize(
    "overrides",
    [
        ("lora.r=4", "lora.alpha=32"),
        ("algorithm.name=ppo", "optimizer.critic_lr=1e-2"),
        ("reference.decay=0.5", "algorithm.name=dapo", "kl.coefficient=0.1", "algorithm.micro_batch=3"),
    ],
    ids=["lora", "critic", "moving reference"],
)
def test_other_runs_resume_with_the_same_bits(lab: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    common = (*overrides, "run.steps=3", "evaluation.every=0", "checkpoints.final=last")
    config = settings(lab, tmp_path / "whole", *common)
    train(config, say=lambda line: None)
    shutil.copytree(tmp_path / "whole", tmp_path / "out")
    for step in (2, 3):
        shutil.rmtree(tmp_path / "out" / "checkpoints" / f"step-00000{step}")
    shutil.rmtree(tmp_path / "out" / "final")
    train(settings(lab, tmp_path / "out", *common), say=lambda line: None)
    last = [tmp_path / name / "checkpoints" / "step-000003" for name in ("whole", "out")]
    assert figures(last[0] / "metrics.jsonl") == figures(last[1] / "metrics.jsonl")
    assert same(weights(last[0] / "model"), weights(last[1] / "model"))
    assert same(weights(tmp_path / "whole" / "final"), weights(tmp_path / "out" / "final"))
    if "algorithm.name=ppo" in overrides:
        critics = [weights(folder) for folder in last]
        assert same(*critics)
        assert any(bool(value.any()) for name, value in critics[0].items() if name.startswith("head")), "it has learned"
    if "reference.decay=0.5" in overrides:
        one, other = (torch.load(folder / "state.pt", weights_only=True)["reference"] for folder in last)
        assert one["steps"] == other["steps"] == 6
        assert same(one["weights"], other["weights"])
        assert not same(one["weights"], weights(lab / "model"))
    if "lora.r=4" in overrides:
        adapted = load_policy(config, last[0] / "model")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "final")
        base = AutoModelForCausalLM.from_pretrained(lab / "model")
        ids = torch.arange(12)[None]
        with torch.no_grad():
            got, want, before = (model(input_ids=ids).logits for model in (merged, adapted, base))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        assert (want - before).abs().max() > 1e-2, "the adapters do something"


def test_adapters_alone_in_the_final_folder(lab: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    config = settings(
        lab, tmp_path, "lora.r=2", "lora.merge=false", "run.steps=1", "optimizer.warmup_steps=0", "evaluation.every=0"
    )
    result = train(config, say=lambda line: None)
    assert result.final is not None
    assert (result.final / "adapter_config.json").exists()
    assert AutoModelForCausalLM.from_pretrained(result.final).config.vocab_size
    assert "LoRA adapters of it" in (result.final / "README.md").read_text()


def test_the_best_weights_are_kept_and_exported(lab: Path, tmp_path: Path) -> None:
    """Answers are worth most before training: every step makes them worse."""
    (tmp_path / "falls.py").write_text(
        "n = 0\ndef f(q, a, m):\n    global n\n    n += 1\n    return 1 / (1 + n) + len(a) % 2\n"
    )
    config = settings(
        lab, tmp_path / "out", f"reward={tmp_path / 'falls.py'}:f", "checkpoints.every=1", "checkpoints.keep=1",
        "checkpoints.final=best", "evaluation.every=1", "run.steps=2", "optimizer.lr=1e-9",
    )  # fmt: skip
    result = train(config, say=lambda line: None)
    assert result.chosen == 0
    assert steps_in(tmp_path / "out") == ["step-000000", "step-000002"]
    assert same(weights(tmp_path / "out" / "final"), weights(lab / "model"))
    assert "trained for 0 steps" in (tmp_path / "out" / "final" / "README.md").read_text()


def test_a_kl_that_blows_up_ends_the_run(lab: Path, tmp_path: Path) -> None:
    config = settings(
        lab, tmp_path, "optimizer.lr=0.3", "kl.stop_above=0.1", "kl.stop_after=1", "optimizer.schedule=constant"
    )
    said: list[str] = []
    result = train(config, say=said.append)
    assert result.outcome == "stopped"
    assert result.step < 4
    assert result.rows[-1]["kl"] > 0.1
    assert "above kl.stop_above=0.1 nats per answer" in result.why
    assert f"stopped after step {result.step} of 4: {result.why}" in said
    assert steps_in(tmp_path)[-1] == f"step-00000{result.step}"


def test_a_gradient_that_is_not_finite_ends_the_run(lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(lab, tmp_path, "kl.target=null", "kl.controller_args={}", "algorithm.minibatches=1")
    own = torch.nn.utils.clip_grad_norm_
    calls = []

    def clip(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append(1)
        return own(*args, **kwargs) * (float("nan") if len(calls) == 2 else 1)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    result = train(config, say=lambda line: None)
    assert (result.outcome, result.step, result.chosen) == ("stopped", 1, 1)
    assert "the gradient's norm is nan" in result.why


def test_two_rewards_with_weights(lab: Path, tmp_path: Path) -> None:
    functions = (
        f"{{vowels: {lab / 'rewards.py'}:vowels, digits: {{function: {lab / 'rewards.py'}:digits, weight: 0.5}}}}"
    )
    config = settings(lab, tmp_path, f"reward.functions={functions}", "run.steps=2", "evaluation.every=2")
    rows = train(config, say=lambda line: None).rows
    for row in rows:
        assert row["reward"] == pytest.approx(row["reward/vowels"] + 0.5 * row["reward/digits"], abs=1e-5)
    assert {"reward/vowels", "reward/digits"} <= figures(tmp_path / "evaluations.jsonl")[0].keys()


def test_without_a_reference_no_kl_is_measured(lab: Path, tmp_path: Path) -> None:
    overrides = (
        "reference.name=none",
        "algorithm.name=dapo",
        "kl.place=preset",
        "kl.target=null",
        "kl.controller_args={}",
    )
    result = train(settings(lab, tmp_path, *overrides, "run.steps=2"), say=lambda line: None)
    assert all("kl" not in row for row in (*result.rows, *result.evaluations))
    assert "near" not in (tmp_path / "final" / "README.md").read_text().split("```")[0]


# ------------------------------------------------------------------ what cannot be trained


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.name=dpo"], "learns from given answers"),
        (["algorithm.name=mix"], "needs answers of experts"),
        (["algorithm.name=gigpo"], "compares the steps of an env"),
        (["algorithm.name=gdpo"], "scales several rewards apart"),
        (["algorithm.name=grpoo"], "Did you mean 'grpo'"),
        (["algorithm.name=gkd", "kl.place=preset", "kl.target=null", "kl.controller_args={}"], "set algorithm.teacher"),
        (["algorithm.teacher=t"], "grpo has no teacher"),
        (["data.group_size=1"], "take at least 2"),
        (["algorithm.name=dapo", "kl.place=preset"], "dapo has no KL penalty"),
        (["algorithm.args.kl_loss=k3"], "set kl.place and kl.estimator instead"),
    ],
)
def test_algorithms_that_a_configuration_cannot_describe(lab: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_algorithm(settings(lab, lab / "none", *overrides))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("no.such.module:f", "there is no module no.such.module"),
        ("math:nothing", "has no function 'nothing'"),
        ("math", "names no function"),
    ],
)
def test_rewards_that_are_not_there(lab: Path, reward: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_reward(settings(lab, lab / "none", f"reward={reward}"))
    with pytest.raises(ConfigError, match=message):
        load_reward(settings(lab, lab / "none", f"reward.functions.a.function={reward}"))


def test_a_second_process_in_one_folder_is_refused(lab: Path, tmp_path: Path) -> None:
    from filelock import FileLock

    with FileLock(tmp_path / ".lock"), pytest.raises(ConfigError, match="another process trains in"):
        train(settings(lab, tmp_path))


# ------------------------------------------------------------------ kills


def start(lab: Path, out: Path, overrides: tuple[str, ...]) -> subprocess.Popen[bytes]:
    file = out.parent / f"{out.name}.yaml"
    file.write_text(settings(lab, out).to_yaml())
    command = [sys.executable, "-m", "torchrl_llm_kl", "train", str(file), *overrides]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def kill_at_random_moments(lab: Path, out: Path, rng: random.Random, *overrides: str, kills: int) -> list[int]:
    """Kill a run again and again, each time after it has made a step more; returns how many were done by then."""
    killed_at: list[int] = []
    metrics = out / "metrics.jsonl"

    def done() -> int:
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    for _ in range(kills):
        before, begun, delay = done(), time.time(), rng.uniform(0, 0.5)
        process = start(lab, out, overrides)
        while process.poll() is None and time.time() - begun < 600:
            if metrics.exists() and metrics.stat().st_mtime > begun and done() > before:
                break
            time.sleep(0.01)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed_at.append(done())
    process = start(lab, out, overrides)
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output.decode()
    return killed_at


def test_a_killed_run_ends_with_the_same_bits(lab: Path, whole: Path, tmp_path: Path) -> None:
    killed_at = kill_at_random_moments(lab, tmp_path / "out", random.Random(0), kills=1)
    assert killed_at[0] >= 1
    assert_same_run(tmp_path / "out", whole)


@pytest.mark.slow
def test_a_run_killed_five_times_ends_with_the_same_bits(lab: Path, tmp_path: Path) -> None:
    overrides = ("run.steps=12", "checkpoints.every=1", "checkpoints.keep=2")
    train(settings(lab, tmp_path / "whole", *overrides), say=lambda line: None)
    seed = random.SystemRandom().randrange(2**32)
    killed_at = kill_at_random_moments(lab, tmp_path / "out", random.Random(seed), *overrides, kills=5)
    print(json.dumps({"seed": seed, "killed at": killed_at}))
    assert_same_run(tmp_path / "out", tmp_path / "whole")
