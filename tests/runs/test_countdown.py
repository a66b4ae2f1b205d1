"""The tutorial runs, writes what it promises, and its parts say the truth."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close

pyplot = pytest.importorskip("matplotlib.pyplot")
pytest.importorskip("rich")
typer = pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

import countdown_grpo  # noqa: E402
from countdown.algorithms import ON_POLICY, build, label  # noqa: E402
from countdown.model import build_model, build_tokenizer, render_prompt, warm_up  # noqa: E402
from countdown.report import MetricsFile, progress, smooth  # noqa: E402
from countdown.task import Problem, all_problems, make_env, reward, solved, split_problems  # noqa: E402
from torchrl_llm_kl import FixedKLCoefficient, RetrieveKL  # noqa: E402
from waits import LONG, until  # noqa: E402

PROBLEMS = all_problems(max_number=9)


@pytest.fixture(scope="module", autouse=True)
def few_are_held_out():
    """Faster than 200."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(countdown_grpo, "split_problems", partial(split_problems, num_held_out=24))
        yield


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(PROBLEMS)


@pytest.fixture(scope="module")
def warm_weights(tokenizer):
    torch.manual_seed(0)
    model = build_model(tokenizer)
    losses = list(warm_up(model, tokenizer, PROBLEMS[:40], steps=30, seed=0))
    assert losses[-1] < losses[0]
    return model.state_dict()


@pytest.fixture
def model(tokenizer, warm_weights):
    model = build_model(tokenizer)
    model.load_state_dict(warm_weights)
    return model


TINY = ("--steps", "2", "--warmup-steps", "2", "--num-prompts", "2", "--group-size", "2")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(countdown_grpo.app, arguments)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output


def rows_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def words(output: str) -> str:
    return " ".join(output.replace("│", " ").split())


def test_the_task(tokenizer) -> None:
    """Which answers solve a problem, their rewards by hand, problems without a twin on the other side, and their tokens."""
    for problem in PROBLEMS:
        assert problem.is_solved_by(problem.answer(problem.operation)), problem
    for answer in ("<answer>3*5</answer>", "<answer>4+4</answer>", "3+5"):  # wrong, or without its tags
        assert not Problem((3, 5), 8, "+").is_solved_by(answer)
    metadata = {"numbers": [3, 5], "target": 15}
    for answer, value in (("<answer>3*5</answer>", 1.0), ("<answer>3+5</answer>", 0.1), ("3*5", 0.0)):
        assert reward("", answer, metadata) == value
        assert solved("", answer, metadata) == (value == 1.0)
    train, held_out = split_problems(all_problems(20), 200)
    assert len(held_out) == len(set(held_out)) == 200
    keys, others = ({(frozenset(p.numbers), p.target) for p in side} for side in (train, held_out))
    assert not keys & others
    assert len(train) + len(held_out) == len(all_problems(20))
    problem = Problem((3, 5), 15, "*")
    assert tokenizer.tokenize("<answer>3*5</answer>") == ["<answer>", "3", "*", "5", "</answer>"]
    assert len(tokenizer(render_prompt(problem, tokenizer))["input_ids"]) < 24
    text = "anything at all: é 数 12\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


@pytest.mark.parametrize(("name", "generation"), [("", False), ("qwen", True), ("llama", False)])
def test_policy_sees_the_prompts_of_the_warm_up(model, name, generation):
    """Also under names and templates for which torchrl has a template of its own."""
    tokenizer = build_tokenizer(PROBLEMS)
    tokenizer.name_or_path = name
    if not generation:
        marks = ("{% generation %}", "{% endgeneration %}")
        tokenizer.chat_template = tokenizer.chat_template.replace(marks[0], "").replace(marks[1], "")
    env = make_env(PROBLEMS[:40], tokenizer, num_prompts=3, group_size=2, seed=0)
    batch = env.rollout(1, countdown_grpo.as_policy(model, tokenizer))
    by_query = {p.query: p for p in PROBLEMS}
    for row in batch.reshape(-1).unbind(0):
        tokens = row["tokens", "prompt"]
        want = tokenizer(render_prompt(by_query[row["query"]], tokenizer))["input_ids"]
        assert tokens[tokens != tokenizer.pad_token_id].tolist() == want


def make_parts(model, reference):
    return build("grpo", model, reference, coefficient=FixedKLCoefficient(0.1), max_new_tokens=14)


def test_group_advantage_by_hand(model):
    """Centred in the group, scaled over the batch."""
    reward = torch.zeros(4, 3, 1)
    reward[:, 2, 0] = torch.tensor([1.0, 0.0, 1.0, 1.0])
    reward[3, 1, 0] = -0.5  # a penalty on an earlier token counts in the answer's sum
    # Sums 1, 0 | 1, 0.5; centred 0.5, -0.5 | 0.25, -0.25; the sums' own deviation is sqrt(0.6875 / 3).
    want = torch.tensor([0.5, -0.5, 0.25, -0.25]) / math.sqrt(0.6875 / 3)
    data = TensorDict(next=TensorDict(reward=reward, batch_size=[4]), batch_size=[4])
    got = make_parts(model, copy.deepcopy(model)).advantage(label(data, 2))["advantage"]
    assert_close(got.flatten(), want, atol=1e-4, rtol=0)


@pytest.fixture
def parts(tokenizer, model):
    return make_parts(model, build_model(tokenizer))


@pytest.fixture
def batch(tokenizer, model, parts):
    """Answers of a policy that has moved away from its reference, as the collector delivers them, prepared."""
    env = make_env(PROBLEMS[:40], tokenizer, num_prompts=4, group_size=4, seed=0)
    env = env.append_transform(RetrieveKL(model, parts.kl_transform[1].model, coeff=0.1, charged_key="kl_charged"))
    torch.manual_seed(1)
    batch = env.rollout(1, countdown_grpo.as_policy(model, tokenizer)).reshape(-1)
    return parts.prepare(label(batch, 4))


def log_probs(model, batch):
    tokens, attention = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    logits = model(input_ids=tokens, attention_mask=attention.long()).logits[:, :-1]
    mask = attention[:, 1:].clone()
    mask[:, : batch["tokens", "prompt"].shape[-1] - 1] = False
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1), mask


def test_log_probs_of_a_batch_and_the_gradient_of_its_loss_by_hand(batch, model, parts):
    """The policy gradient: with one update per batch the ratio is 1, and clipping plays no part."""
    for start in range(0, 16, 4):
        assert len(set(batch[start : start + 4]["query"])) == 1
    log_prob, mask = log_probs(model, batch)
    assert mask.any(-1).all()
    assert_close(batch["next", "log_probs", "full"][:, 1:], torch.where(mask, log_prob, 0.0), atol=1e-4, rtol=0)
    (-(log_prob * batch["advantage"])[mask].mean()).backward()
    want = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert want.norm() > 0
    model.zero_grad()
    parts.loss(countdown_grpo.loss_entries(batch))["loss_objective"].backward()
    assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]), want, atol=1e-5, rtol=1e-3)


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    output = run(
        *("--steps", "3", "--warmup-steps", "25", "--num-prompts", "3", "--group-size", "4"),
        *("--kl-target", "0.3", "--out", str(folder / "out"), "--save-model", str(folder / "model")),
    )
    return folder, output


def test_a_run_writes_consistent_metrics_and_a_picture(tiny_run):
    folder, output = tiny_run
    rows = rows_of(folder / "out")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-4)  # the policy starts as its reference
    for row in rows:
        assert 0 <= row["success"] <= row["reward"] + 1e-6 <= 1 + 2e-6
        assert row["penalised_reward"] == pytest.approx(row["reward"] - row["coefficient"] * row["kl"], abs=1e-5)
        assert 12 <= row["answer_tokens"] <= 12 * countdown_grpo.MAX_NEW_TOKENS
    assert rows[1]["coefficient"] == rows[0]["coefficient"]  # held while the KL rises from 0
    assert (folder / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "greedy accuracy after RL" in output


def test_a_saved_checkpoint_goes_through_the_same_loop(tiny_run, tmp_path):
    """And its tokenizer splits text as before."""
    folder, _ = tiny_run
    run("--model", str(folder / "model"), *TINY, "--out", str(tmp_path))
    assert len(rows_of(tmp_path)) == 2
    problems = all_problems()
    before, (_, after) = build_tokenizer(problems), countdown_grpo.open_policy(str(folder / "model"))
    prompt = render_prompt(problems[0], before)
    assert after(prompt)["input_ids"] == before(prompt)["input_ids"]
    assert after.pad_token_id == before.pad_token_id


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kl-target", "0"], "not greater than 0"),
        (["--lr", "-1"], "not greater than 0"),
        (["--controller", "pid"], "'pid' is none of pi, dual, ziegler"),
        (["--group-size", "1"], "group-size"),
        (["--model", "/nowhere/at/all"], "cannot use"),
        (["--out", __file__], "is a file"),
        (["--algorithm", "dapo", "--kl-target", "0.5"], "dapo has no KL penalty"),
        (["--algorithm", "dpo"], "'dpo' is none of"),
    ],
)
def test_bad_options_say_what_is_wrong(arguments, message, tmp_path):
    out = () if "--out" in arguments else ("--out", str(tmp_path / "out"))
    result = CliRunner().invoke(countdown_grpo.app, [*arguments, *out])
    assert result.exit_code == 2
    assert message in words(result.output)


def texts(figure) -> str:
    found = [text for axis in figure.axes for text in (axis.title, axis.yaxis.label)]
    labels = [label for axis in figure.axes for label in axis.get_legend_handles_labels()[1]]
    return " ".join([*(text.get_text() for text in found), *labels])


#: One of each kind: groups with a penalty and without, a critic, experts, a teacher. The others take as long.
KINDS = ("grpo", "dapo", "ppo", "mix", "on_policy_distill")


@pytest.mark.parametrize(
    "algorithm", [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in ON_POLICY]
)
def test_every_on_policy_algorithm_runs(tmp_path, monkeypatch, algorithm):
    """Only a run with a penalty speaks of one."""
    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    monkeypatch.setattr(countdown_grpo, "TEACHER_STEPS", 5)
    sizes = ("--steps", "2", "--warmup-steps", "25", "--num-prompts", "2", "--group-size", "4")
    output = run("--algorithm", algorithm, *sizes, "--out", str(tmp_path))
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [0, 1]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[1]["kl"] != 0.0, "the first step has moved the policy"
    if algorithm not in ("grpo", "dapo", "on_policy_distill"):
        return
    (figure,) = drawn
    penalised = algorithm == "grpo"
    for word in ("target", "coefficient", "adaptive KL penalty"):
        assert (word in texts(figure)) == penalised, word
        assert word.startswith("adaptive") or (word in output) == penalised, word
    assert len(figure.axes) == (3 if penalised else 2)
    assert "KL (nats per answer)" in texts(figure)
    assert "KL to the reference" in output
    assert all(("coefficient" in row) == ("penalised_reward" in row) == penalised for row in rows)


@pytest.mark.parametrize(
    ("controller", "first", "second"),
    # A KL of 0 at the first step: clipped at 20 % below the target, by half of that; or in the warm-up.
    [("ziegler", 0.2, 0.18), ("dual", 0.2, 0.2)],
)
def test_other_controllers(tmp_path, controller, first, second):
    run("--controller", controller, *TINY, "--out", str(tmp_path))
    assert [row["coefficient"] for row in rows_of(tmp_path)] == pytest.approx([first, second])


def test_earlier_runs_are_moved_aside(tiny_run):
    folder, _ = tiny_run
    out = folder / "out"
    before = [(out / name).read_bytes() for name in ("metrics.jsonl", "curves.png")]
    said = run("--steps", "1", *TINY[2:], "--out", str(out)).replace("\n", "")
    assert f"{out} holds an earlier run: moved it to {out / 'earlier-1'}" in said
    assert [(out / "earlier-1" / name).read_bytes() for name in ("metrics.jsonl", "curves.png")] == before
    assert len(rows_of(out)) == 1
    result = CliRunner().invoke(countdown_grpo.app, ["--save-model", str(folder / "model"), "--out", str(out)])
    assert result.exit_code == 2
    assert "exists already, and saving would overwrite it" in words(result.output)


def test_lines_come_at_once_where_there_is_no_terminal(capsys, monkeypatch, tmp_path):
    metrics = MetricsFile(tmp_path / "a" / "metrics.jsonl")
    metrics.append({"step": 0, "kl": random.Random(0).random()})
    assert json.loads(metrics.path.read_text()) == metrics.rows[0]
    assert smooth([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]
    clock = [0.0]
    monkeypatch.setattr("torchrl_llm_kl.training._report.time.perf_counter", lambda: clock[0])
    with progress("warm-up", 6) as advance:
        assert capsys.readouterr().out == "warm-up: 6 steps\n"
        said = []
        for seconds in (2.0, 4.9, 5.1, 9.0, 10.5, 10.6):
            clock[0] = seconds
            advance(f"at {seconds}")
            said.append(capsys.readouterr().out)
    lines = "warm-up: 3/6, 5 s  at 5.1\n", "warm-up: 5/6, 10 s  at 10.5\n", "warm-up: 6/6, 11 s  at 10.6\n"
    assert said == ["", "", lines[0], "", *lines[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["warm-up", "RL"])
def test_an_interrupted_run_keeps_its_model_and_plot(tmp_path, where):
    """Ctrl-C in a process of its own, as a user presses it."""
    command = [
        *(sys.executable, "-u", str(Path(countdown_grpo.__file__)), "--out", str(tmp_path / "out")),
        *("--steps", "500", "--num-prompts", "2", "--group-size", "2"),
        *(() if where == "warm-up" else ("--warmup-steps", "2")),
    ]
    log = tmp_path / "log"
    with log.open("w") as file:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    metrics = tmp_path / "out" / "metrics.jsonl"

    def started() -> bool:
        assert process.poll() is None, log.read_text()
        if where == "warm-up":
            return "/300, " in log.read_text()
        return metrics.exists() and metrics.read_text().count("\n") > 1

    until(started, seconds=LONG)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=LONG) == 130, log.read_text()
    output = log.read_text()
    rows = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert f"interrupted after {len(rows)} of 500 RL steps" in output
    assert str(tmp_path / "out" / "model") in output.split("wrote ")[1].replace("\n", "")
    assert (tmp_path / "out" / "model" / "tokenizer.json").exists()
    saved, _ = countdown_grpo.open_policy(str(tmp_path / "out" / "model"))
    torch.manual_seed(0)
    fresh, _ = countdown_grpo.make_policy(all_problems())
    assert not torch.equal(saved.lm_head.weight, fresh.lm_head.weight), "trained"
    assert (tmp_path / "out" / "curves.png").exists() == (where == "RL")
