"""Adapters, critics, moving references, several rewards: each kind of run, how it ends early, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from torchrl_llm_kl.training import ConfigError, ModelError, Run, check_algorithm, load_policy, load_reward, train
from train_lab import build_lab, figures, same, settings, steps_in, weights


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_lab(tmp_path_factory.mktemp("lab"))


# ------------------------------------------------------------------ kinds of runs


@pytest.mark.parametrize(
    "overrides",
    [
        ("lora.r=4", "lora.alpha=32"),
        ("algorithm.name=ppo", "optimizer.critic_lr=1e-2"),
        ("reference.decay=0.5", "algorithm.name=dapo", "kl.coefficient=0.1", "algorithm.micro_batch=3"),
        ("model.gradient_checkpointing=true", "algorithm.micro_batch=3"),
        ("model.gradient_checkpointing=true", "lora.r=4", "lora.alpha=32"),
    ],
    ids=["lora", "critic", "moving reference", "checkpointed layers", "checkpointed layers and lora"],
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


def test_checkpointed_layers_change_no_figure(lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer runs again in the backward, in training mode, and the model is in evaluation mode outside of it."""
    common = ("run.steps=2", "evaluation.every=0")
    plain = train(settings(lab, tmp_path / "plain", *common), say=lambda line: None)
    calls = []
    own = torch.utils.checkpoint.checkpoint

    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    monkeypatch.setattr("transformers.modeling_utils.checkpoint", checkpoint)
    runs: list[Run] = []

    def build(*args: Any, **kwargs: Any) -> Run:
        runs.append(Run(*args, **kwargs))
        return runs[-1]

    config = settings(lab, tmp_path / "out", *common, "model.gradient_checkpointing=true")
    result = train(config, say=lambda line: None, build=build)
    layers = runs[0].policy.config.num_hidden_layers
    assert len(calls) == 2 * 2 * layers, "of 2 steps and 2 minibatches; none to sample or to score"
    assert not runs[0].policy.training
    for row, want in zip(result.rows, plain.rows, strict=True):
        assert row == pytest.approx({**want, "seconds": row["seconds"]}, abs=1e-4, rel=1e-3)


@pytest.mark.parametrize("setting", ["attention_dropout", "attn_pdrop"])
def test_checkpointed_layers_need_a_model_without_dropout(lab: Path, tmp_path: Path, setting: str) -> None:
    """Dropout of attention is no module: in training mode it would change the log-probs that the loss compares."""
    shutil.copytree(lab / "model", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {setting: 0.1}))
    config = settings(lab, tmp_path / "out", f"model.name={tmp_path / 'model'}", "model.gradient_checkpointing=true")
    with pytest.raises(ModelError, match=rf"drops activations \({setting}\): set its dropout to 0"):
        load_policy(config)


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
    config = settings(lab, tmp_path, "algorithm.minibatches=1", kl={"coefficient": 0.01})
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


@pytest.mark.parametrize("name", ["on_policy_distill", "gkd"])
def test_a_teacher(lab: Path, tmp_path: Path, name: str) -> None:
    """The student starts as its teacher: nothing pulls it away, and noise alone moves it."""
    changes = (f"algorithm.name={name}", f"algorithm.teacher={lab / 'model'}", "algorithm.minibatches=1", "run.steps=1")
    result = train(settings(lab, tmp_path, *changes, "optimizer.warmup_steps=0", kl={}), say=lambda line: None)
    assert result.outcome == "finished"
    if name == "gkd":
        assert abs(result.rows[0]["loss_objective"]) < 1e-4
    else:
        assert result.rows[0]["kl"] == pytest.approx(0, abs=1e-4)


def test_without_a_reference_no_kl_is_measured(lab: Path, tmp_path: Path) -> None:
    overrides = (
        "reference.name=none",
        "algorithm.name=dapo",
        "kl.place=preset",
        "kl.target=null",
        "kl.controller_args={}",
    )
    result = train(settings(lab, tmp_path, *overrides, kl={}), say=lambda line: None)
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
        (["algorithm.name=gkd"], "set algorithm.teacher"),
        (["algorithm.teacher=t"], "grpo has no teacher"),
        (["data.group_size=1"], "take at least 2"),
        (["algorithm.name=dapo", "kl.place=preset"], "dapo has no KL penalty"),
        (["algorithm.args.kl_loss=k3"], "set kl.place and kl.estimator instead"),
        (["algorithm.args.clip_hihg=0.3"], "grpo has no setting 'clip_hihg'"),
        (["kl.estimator=k9"], "unknown KL estimator 'k9'.*Did you mean 'k3'"),
        (["kl.controller_args.warmupp=0"], "kl.controller_args .*warmupp"),
        (
            ["kl.coefficient=0"],
            r"^kl.coefficient is 0 and kl.target is .*leave it out for 0.1, or leave kl.target out.$",
        ),
        (["kl.coefficient=0", "kl.controller=ziegler"], "^kl.coefficient is 0 and kl.target is"),
        (
            ["kl.controller_args.low=0.2"],
            r"0 < kl.controller_args.low <= kl.coefficient <= .*, got kl.controller_args.low=0.2, kl.coefficient=0.1",
        ),
        (
            ["kl.controller_args={}", "kl.controller_args.horizon=0", "kl.controller=ziegler"],
            "kl.controller_args.horizon must be finite",
        ),
    ],
)
def test_algorithms_that_a_configuration_cannot_describe(lab: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_algorithm(settings(lab, lab / "none", *overrides))


@pytest.mark.parametrize("override", ["reference.decay=0.9", "reference.reset_every=2", "reference.service=shared"])
def test_a_teacher_takes_the_place_of_the_reference(lab: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="takes the place of the reference"):
        check_algorithm(settings(lab, lab / "none", "algorithm.name=gkd", "algorithm.teacher=t", override, kl={}))


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


def test_a_file_of_rewards_runs_once_and_imports_what_is_beside_it(lab: Path, tmp_path: Path) -> None:
    """Also in a call, when the file was run long ago."""
    (tmp_path / "beside_it.py").write_text("def length(answer):\n    return float(len(answer))\n")
    (tmp_path / "mine.py").write_text(
        "runs = []\nruns.append(1)\ndef f(q, a, m):\n    import beside_it\n    return beside_it.length(a)\n"
        "def g(q, a, m):\n    return f(q, a, m) * len(runs)\n"
    )
    functions = f"{{f: {tmp_path / 'mine.py'}:f, g: {tmp_path / '.' / 'mine.py'}:g}}"
    before = list(sys.path)
    try:
        parts = load_reward(settings(lab, lab / "none", f"reward.functions={functions}"))
        (_, f), (_, g) = parts["f"], parts["g"]
        assert f.__globals__ is g.__globals__
        assert (f("", "abc", {}), g("", "abc", {})) == (3.0, 3.0)
    finally:
        sys.path[:] = before


@pytest.mark.parametrize(("text", "message"), [("def f(q, a, m: return 1", "SyntaxError"), ("x = absent", "NameError")])
def test_a_file_of_rewards_that_fails_is_named(lab: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ConfigError, match=rf"bad\.py cannot be loaded: {message}: "):
        load_reward(settings(lab, lab / "none", f"reward={tmp_path / 'bad.py'}:f"))
