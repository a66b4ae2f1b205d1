"""Runs that go wrong: settings that change, conditions that end a run, and its page."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from torchrl_llm_kl.cli._commands import app
from torchrl_llm_kl.tasks import PromptOrder, RewardError, whole_episodes
from torchrl_llm_kl.training import Checkpoints, ConfigError, Run, _alarms, _page, read_config
from torchrl_llm_kl.training._answers import Answers
from torchrl_llm_kl.training._inputs import env_of
from train_lab import assert_same_run, ended_after, figures, go, same, settings, weights

CHANGES = (
    "optimizer.lr=1e-3",
    "optimizer.betas=[0.5, 0.9]",
    "kl.target=2.0",
    "algorithm.args.objective_args.clip_high=0.4",
)
CHANGES += ("algorithm.minibatches=1", "sampler.temperature=0.5", "data.num_prompts=1")


@pytest.fixture(scope="module")
def changed(lab: Path, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The run ``whole``, whose settings change after two of its four steps."""
    out = ended_after(2, whole, tmp_path_factory.mktemp("changed"))
    return out, go(lab, out, changes=CHANGES)[1]


def test_turns_that_begin_and_end_in_a_run(lab: Path, tmp_path: Path) -> None:
    """The first command resumes the run after each change."""
    (tmp_path / "mine.py").write_text("def again(messages, metadata):\n    return 'Sure?'\n")
    out, short = tmp_path / "out", ["evaluation.every=0", "optimizer.schedule=constant"]
    go(lab, out, *short, "run.steps=2")
    turns = ["turns.max=2", f"turns.reply={tmp_path / 'mine.py'}:again"]
    go(lab, out, *short, "run.steps=3", changes=turns)
    go(lab, out, *short, "run.steps=4")
    go(lab, out, *short, "run.steps=5", changes=["turns=null"])
    result, _ = go(lab, out, *short, "run.steps=6")
    assert [row.get("turns") for row in result.rows] == [None, None, 2, 2, None, None]


def test_a_change_equals_a_run_that_is_continued_by_hand(lab: Path, whole: Path, changed: Any, tmp_path: Path) -> None:
    """By hand: settings of the objects that the settings make, before each step. The rate falls linearly: 2/3, 1/3."""
    saved = Checkpoints(whole / "checkpoints").at(2)
    assert saved is not None
    # Sampling and the size of a step are arguments of many objects. The rest keeps its first settings.
    run = Run(
        settings(lab, tmp_path, "sampler.temperature=0.5", "data.num_prompts=1"), saved=saved, say=lambda line: None
    )
    # Two steps of two prompts come first.
    order = PromptOrder(run.config.run.seed, 4)
    env = env_of(run.config, run.inputs, run.inputs.prompts, order=order, group_size=4)
    sampler = run._sampler(run.tokenizer, run.policy, greedy=False)
    run.answers = Answers(lambda: whole_episodes(env, sampler), version=2)
    objective = run.parts.loss.get_submodule("objective")
    objective.clip_high.fill_(0.4)
    run.inputs.plan.coefficient.target = 2.0  # type: ignore[union-attr]
    run.config.algorithm.minibatches = 1
    for rate in (2 / 3, 1 / 3):
        for group in run.optimizer.param_groups:
            group.update(lr=1e-3 * rate, betas=(0.5, 0.9))
        run.take_step()
    out, said = changed
    rows = figures(out / "metrics.jsonl")
    assert rows[:2] == figures(whole / "metrics.jsonl")[:2]
    assert [row["lr"] for row in rows[2:]] == pytest.approx([2e-3 / 3, 1e-3 / 3])
    assert rows[2:] == [{**row, "lr": pytest.approx(row["lr"])} for row in figures(tmp_path / "metrics.jsonl")[2:]]
    final = {name: value for name, value in run.policy.state_dict().items() if name in weights(out / "final")}
    assert same(final, weights(out / "final"))
    assert "from step 2 on, optimizer.lr is 0.001 instead of 0.003." in said
    assert not same(weights(out / "final"), weights(whole / "final"))


def test_changes_are_in_the_card_and_on_the_page(changed: Any) -> None:
    out, _ = changed
    card = (out / "final" / "README.md").read_text()
    rows = [
        "`optimizer.lr` | 0.003 | 0.001",
        "`optimizer.betas` | [0.9, 0.999] | [0.5, 0.9]",
        "`kl.target` | 0.5 | 2.0",
    ]
    assert [f"\n| 2 | {row} |\n" in card for row in rows] == [True] * 3
    assert "  lr: 0.001\n" in card
    page = (out / "run.html").read_text()
    assert re.search(r"<code>kl.target</code></td><td>0.5</td><td>2.0</td>", page)
    assert page.count(">optimizer.lr</text>") > 5


@pytest.mark.parametrize("step", [2, 3])
def test_changes_persist_after_a_kill(lab: Path, changed: Any, step: int, tmp_path: Path) -> None:
    """After step 2 no checkpoint was written since the change. The command is the first one, or the changed file."""
    out, _ = changed
    for name, given in (("same", ()), ("file", CHANGES)):
        own = ended_after(step, out, tmp_path / name)
        _, said = go(lab, own, *given)
        assert_same_run(own, out)
        assert any("optimizer.lr is 0.001 since step 2, by --change" in line for line in said) == (name == "same")


def test_the_command_changes_a_run(lab: Path, whole: Path, tmp_path: Path) -> None:
    out = ended_after(3, whole, tmp_path)
    (file := tmp_path / "config.yaml").write_text(settings(lab, out).to_yaml())

    def ended(code: int, *words: str) -> str:
        result = CliRunner().invoke(app, ["train", str(file), *words])
        assert result.exit_code == code, result.stderr
        return " ".join(result.stderr.split())

    lr = ("--change", "optimizer.lr=1e-6")
    assert "optimizer.lr: 0.003, now 1e-06" in (said := ended(2, "optimizer.lr=1e-6"))
    assert "--change optimizer.lr=1.0e-06" in said
    assert "--fresh begins a new run: pass optimizer.lr=1e-6 without --change" in ended(2, "--fresh", *lr)
    assert "has no checkpoint to change" in ended(2, f"run.out={tmp_path / 'new'}", *lr)
    assert "lr: 1.0e-06" in CliRunner().invoke(app, ["train", str(file), *lr, "--dry-run"]).stdout
    assert "from step 3 on, optimizer.lr is 1e-06 instead of 0.003" in ended(0, *lr, "--change", "kl.target=1.5")
    assert figures(out / "metrics.jsonl")[3]["lr"] == pytest.approx(1e-6 / 3)
    assert (read_config(out / "config.yaml").kl.target, Checkpoints(out / "checkpoints").latest().step) == (1.5, 4)  # type: ignore[union-attr]
    page = tmp_path / "runs.html"
    result = CliRunner().invoke(app, ["runs", str(out), str(whole), "--html", str(page)])
    assert re.search(r"kl\.target +1\.5 +0\.5\n", result.stdout)
    assert f"wrote {page}" in result.stdout
    assert CliRunner().invoke(app, ["runs", str(tmp_path)]).exit_code == 2


SHORT = ("optimizer.warmup_steps=0", "evaluation.every=0")


def test_conditions_end_a_run_at_their_step(lab: Path, tmp_path: Path) -> None:
    """The rates are 3, 2.25, 1.5 and 0.75 thousandths. After a change the condition needs two further steps."""
    condition = "run.stop_when=['lr <= 0.0023 for 2', nothing < 1]"
    result, said = go(lab, tmp_path, *SHORT, condition)
    assert (result.outcome, result.step) == ("stopped", 3)
    assert result.why == "lr was <= 0.0023 in 2 steps in a row (0.00225, 0.0015): see run.stop_when."
    assert f"stopped after step 3 of 4: {result.why}" in said
    assert sum("run.stop_when has nothing, which step 0 did not log" in line for line in said) == 1
    page = (tmp_path / "run.html").read_text()
    assert "stopped</span>, step 3 of 4" in page
    assert '<td><code>lr &lt;= 0.0023 for 2</code></td><td>0.00225, 0.0015</td><td class="met">met</td>' in page
    assert go(lab, tmp_path, *SHORT, condition)[0].step == 3
    result, _ = go(lab, tmp_path, *SHORT, condition, changes=["optimizer.lr=1e-3"])
    assert (result.outcome, result.step) == ("finished", 4)


def test_a_kl_without_a_target_has_a_bound(lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a KL in the loss too. The bound of the test is small, since answers of six tokens reach no 50 nats."""
    monkeypatch.setattr(_alarms, "KL_PER_ANSWER", 0.05)
    monkeypatch.setattr(_alarms, "KL_PER_TOKEN", 0.05 / 6)
    changes = (*SHORT, "optimizer.lr=0.1", "optimizer.schedule=constant", "kl.stop_after=1")
    result, _ = go(lab, tmp_path, *changes, kl={"place": "none"})
    assert (result.outcome, result.step) == ("stopped", 2)
    assert result.rows[-1]["kl"] > 0.05
    assert "the KL was above kl.stop_above=0.05 nats per answer in 1 steps in a row" in result.why


def test_the_page_reloads_itself_while_the_run_goes_on(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_page, "_SECONDS", 1e-6)
    monkeypatch.setattr(_page, "_SHARE", 0.0)
    pages: list[str] = []

    class Reading(Run):
        def take_step(self) -> dict[str, float]:
            pages.append((self.out / "run.html").read_text())
            return super().take_step()

    changes = (*SHORT, "run.steps=2", "logging.doctor_every=1", "evaluation.every=2")
    result, _ = go(lab, tmp_path, *changes, build=Reading)
    pages.append((tmp_path / "run.html").read_text())
    assert ['http-equiv="refresh"' in page for page in pages] == [True, True, False]
    for page, state in zip(
        pages,
        ("running</span>, step 0 of 2", "running</span>, step 1 of 2", "finished</span>, step 2 of 2"),
        strict=True,
    ):
        assert state in page
    last, text = result.rows[-1], (tmp_path / "diagnosis.txt").read_text()
    for value in (
        f"<b>{last['kl']:.4g}</b>",
        f"<b>{last['reward']:.4g}</b>",
        f"held-out prompts, step 2: {result.evaluations[-1]['reward']:.4g}",
    ):
        assert value in pages[-1]
    assert text.splitlines()[1] in pages[-1]
    assert '<code>optimizer.lr</code></td><td>0.003</td><td class="soft">1.0e-06</td>' in pages[-1]
    for name in ("final/README.md", "rollouts.html"):
        assert [f'href="{name}"' in page for page in pages] == [False, name == "rollouts.html", True]


def test_the_page_of_a_failed_run_names_the_error(lab: Path, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def f(q, a, m):\n    raise ValueError('no <number>')\n")
    with pytest.raises(RewardError):
        go(lab, tmp_path / "out", *SHORT, f"reward={tmp_path / 'r.py'}:f")
    page = (tmp_path / "out" / "run.html").read_text()
    assert 'class="state failed">failed</span>' in page
    assert "RewardError: " in page
    assert 'http-equiv="refresh"' not in page


def test_a_change_that_a_run_cannot_make_leaves_it_unchanged(lab: Path, whole: Path, tmp_path: Path) -> None:
    out = ended_after(2, whole, tmp_path)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"optimizer\.name cannot change in the middle of a run"):
        go(lab, out, changes=["optimizer.name=sgd"])
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert torch.is_grad_enabled()
