"""The tutorial trains the same model with a shared reference, with a killed one and with a local one."""

import json
import math
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close

from project import PROJECT
from waits import LONG, until

for package in ("ray", "rich", "typer"):
    pytest.importorskip(package)

TUTORIALS = PROJECT / "tutorials"
from countdown.sharing import join  # noqa: E402
from ray_shared_reference import largest_difference  # noqa: E402

STEPS, KILLED, COLLECTORS, ANSWERS = 4, 2, 4, 12  # answers: of each collector in a step


def tutorial(out, options, **where):
    command = [sys.executable, str(TUTORIALS / "ray_shared_reference.py"), *options.split(), f"out={out}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.Popen(command, env=environment, text=True, start_new_session=True, **where)


@pytest.mark.slow
def test_an_interrupted_run_keeps_its_model_and_the_files_before(tmp_path):
    """Ctrl-C in a folder that holds an earlier run."""
    out, log = tmp_path / "out", tmp_path / "log"
    out.mkdir()
    earlier = ("undisturbed.jsonl", "killed.jsonl")
    for name in earlier:
        (out / name).write_text(f"{name} of the earlier run")
    options = "steps=300 collectors=1 num_prompts=2 group_size=2 warmup_steps=2"
    with log.open("w") as file:
        process = tutorial(out, options, stdout=file, stderr=subprocess.STDOUT)

    def trains():
        assert process.poll() is None, log.read_text()
        return (out / "earlier-1").exists() and len(rows_of(out / "undisturbed.jsonl")) >= 2

    until(trains, seconds=LONG)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=LONG) == 130, log.read_text()
    output, done = log.read_text(), len(rows_of(out / "undisturbed.jsonl"))
    assert f"moved it to {out / 'earlier-1'}" in output
    assert f"interrupted after {done} of 300 RL steps: wrote {out / 'model'}" in output
    assert (out / "model" / "model.safetensors").exists()
    for name in earlier:
        assert (out / "earlier-1" / name).read_text() == f"{name} of the earlier run"


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def cells(output, what):
    """The numbers in one row of the table."""
    (line,) = [line for line in output.splitlines() if what in line]
    return [[float(number) for number in re.findall(r"[\d.]+", cell)] for cell in line.split("│")[2:-1]]


@pytest.mark.slow
def test_a_run_whose_reference_was_killed_equals_the_undisturbed_one(tmp_path):
    """The tutorial, small, in a process of its own: in this one the service's tests may have started Ray."""
    options = f"steps={STEPS} collectors={COLLECTORS} num_prompts=3 group_size=4 warmup_steps=15 seed=3"
    process = tutorial(tmp_path, options, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = process.communicate(timeout=LONG)
    assert process.returncode == 0, output[-3000:]
    undisturbed, killed = rows_of(tmp_path / "undisturbed.jsonl"), rows_of(tmp_path / "killed.jsonl")
    assert [row["step"] for row in killed] == list(range(STEPS))
    for one, other in zip(undisturbed, killed, strict=True):
        for name in one.keys() - {"seconds", "collecting"}:
            assert math.isfinite(one[name])
            assert other[name] == pytest.approx(one[name], rel=0, abs=1e-6), (one["step"], name)
    assert "The two runs agree" in output
    assert "The two runs differ" not in output
    # The runs train, and the reference counts.
    assert killed[0]["kl"] == pytest.approx(0, abs=1e-4)  # the policy starts as its reference
    assert all(row["kl"] != 0 for row in killed[1:]), "the policy moves, the reference stays"
    assert any(row["kl"] > 1e-3 for row in killed[KILLED:]), "also after it was started again"
    for row in killed:
        assert row["penalised_reward"] == pytest.approx(row["reward"] - row["coefficient"] * row["kl"], abs=1e-5)
        assert COLLECTORS * ANSWERS <= row["answer_tokens"] <= COLLECTORS * ANSWERS * 14
    # The table says that it was killed, and that no request was lost.
    assert cells(output, "restarts of the reference") == [[0], [1]]
    (before,), (first, second) = cells(output, "requests answered")
    assert before == STEPS * COLLECTORS
    # Those of the step of the kill may have been answered, and killed before the answer left: then they were asked twice.
    assert KILLED * COLLECTORS <= first <= (KILLED + 1) * COLLECTORS
    assert (STEPS - KILLED - 1) * COLLECTORS <= second <= (STEPS - KILLED) * COLLECTORS
    assert first + second >= STEPS * COLLECTORS
    assert cells(output, "seconds lost")[1][0] > 0.5, "a process does not start in less"


def share(prompt, full):
    """A collector's answer."""
    tokens, success = torch.tensor([full]), torch.tensor([[[True]]])
    after = {"log_probs": {"full": -tokens.float()}, "kl_penalty": tokens / 2, "reward": tokens.float()[..., None]}
    found = {"tokens": {"prompt": torch.tensor([prompt]), "full": tokens}, "masks": {"all_attention_mask": tokens > 0}}
    return TensorDict({**found, "next": {**after, "success": success}}, [1])


def test_shares_are_joined_where_answers_begin():
    shares = [share([1], [1, 2, 3]), share([4, 5], [4, 5, 6])]
    batch, want = join(shares), torch.tensor([[0, 1, 2, 3], [4, 5, 6, 0]])
    assert batch["tokens", "prompt"].tolist() == [[0, 1], [4, 5]]
    assert batch["tokens", "full"].tolist() == want.tolist()
    assert batch["masks", "all_attention_mask"].tolist() == (want > 0).tolist()
    assert_close(batch["next", "log_probs", "full"], -want.float())
    assert_close(batch["next", "kl_penalty"], want / 2)
    assert_close(batch["next", "reward"], want.float()[..., None])
    assert batch["next", "success"].shape == (2, 1, 1)
    assert shares[0]["tokens", "full"].shape == (1, 3), "the shares stay as they are"


def test_difference_of_runs_leaves_out_the_clocks():
    run = [{"step": 0, "kl": 0.25, "seconds": 1.0, "collecting": 0.5}, {"step": 1, "kl": 0.5, "seconds": 2.0}]
    late = [row | {"seconds": 9.0} for row in run]
    assert largest_difference(run, late) == 0
    late[1]["kl"] = 0.375
    assert largest_difference(run, late) == 0.125
    assert largest_difference(run, run[:1]) == math.inf
