"""The parts of the sharded recipe, and its command line. ``test_saving.py`` compares different numbers of ranks."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from contextlib import redirect_stdout
from functools import partial
from io import StringIO

import pytest
import torch

from project import PROJECT

pytest.importorskip("matplotlib")
pytest.importorskip("omegaconf")
pytest.importorskip("rich")
import countdown_fsdp
from countdown.algorithms import SUPPORTED
from countdown.ranks import Gumbel, Ranks, Stop, generator, problem_at
from countdown.task import all_problems, split_problems
from distributed.saving import other_algorithms
from train_lab import figures
from waits import LONG, until

SMALL = ("warmup_steps=15", "num_prompts=3", "group_size=4", "steps=3")


def test_gumbel_noise_samples_from_the_softmax():
    """Each frequency of 20000 draws is within 4.5 standard deviations."""
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draws = 20000
    noise = Gumbel(draws)
    noise.start([generator(0, "draws")])
    found = noise(torch.zeros(draws, 1), probabilities.log().expand(draws, -1)).argmax(-1)
    for token, p in enumerate(probabilities.tolist()):
        deviation = math.sqrt(draws * p * (1 - p))
        assert abs((found == token).sum().item() - draws * p) < 4.5 * deviation


def test_noise_of_a_problem_does_not_depend_on_the_problems_beside_it():
    scores = torch.randn(6, 5)

    def drawn(*problems):
        noise = Gumbel(2)
        noise.start([generator(3, "answers", problem) for problem in problems])
        rows = len(problems) * 2
        return [noise(torch.zeros(rows, 1), scores[:rows] * 0) for _ in range(3)]

    both, alone = drawn(7, 9, 8), drawn(9)
    for together, single in zip(both, alone, strict=True):
        assert torch.equal(together[2:4], single)
    assert not torch.equal(both[0], both[1]), "each token has its own"
    assert len({float(value) for value in both[0].flatten()}) == both[0].numel(), "each answer too"


def test_shares_of_all_ranks_are_the_whole_in_order():
    for count in (1, 2, 3, 5, 7):
        shares = [Ranks(number, count).share(range(10, 17)) for number in range(count)]
        assert [index for share in shares for index in share] == list(range(10, 17))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_each_problem_comes_once_in_each_round():
    problems = all_problems(4)
    count = len(problems)
    first, second = ([problem_at(problems, epoch * count + i, seed=5) for i in range(count)] for epoch in (0, 1))
    assert Counter(first) == Counter(second) == Counter(problems)
    assert first != second
    assert [problem_at(problems, i, seed=6) for i in range(count)] != first


def test_a_signal_is_kept_for_the_end_of_the_step():
    stop, before = Stop(), signal.getsignal(signal.SIGTERM)
    with stop.on_signals():
        assert not stop
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop
    assert signal.getsignal(signal.SIGTERM) == before


def run(*changes, code=0):
    with redirect_stdout(StringIO()) as output:
        assert countdown_fsdp.main(changes) == code, output.getvalue()
    return " ".join(output.getvalue().replace("│", " ").split())


def metrics(folder):
    return figures(folder / "metrics.jsonl")


@pytest.fixture(scope="module", autouse=True)
def few_are_held_out():
    """Hold out 24 problems instead of 200, which is faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(countdown_fsdp, "split_problems", partial(split_problems, num_held_out=24))
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that never stops."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    return folder, run(*SMALL, f"out={folder}")


def test_a_run_that_is_stopped_and_resumed_is_the_same(whole, tmp_path):
    folder, output = whole
    assert "greedy accuracy after RL" in output
    out = tmp_path / "out"
    stopped = run(*SMALL, f"out={out}", "stop_after=2")
    assert "2 of 3 RL steps are done: the same command continues" in stopped
    assert "greedy accuracy after RL" not in stopped
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(metrics(out)) == 2
    (out / "metrics.jsonl").open("a").write('{"step": 2, "lost": 1}\n')  # a step after the checkpoint, then a crash
    resumed = run(*SMALL, f"out={out}")
    for row, other in zip(metrics(out), metrics(folder), strict=True):
        assert row == pytest.approx(other, abs=1e-9)  # the reference's cache was lost: sums in another order
    assert [row["step"] for row in metrics(out)] == [0, 1, 2]
    table = re.compile(r"greedy accuracy \w+ RL ([\d.]+%)")
    assert table.findall(resumed) == table.findall(output)
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-3"]


def test_settings_that_cannot_run_are_refused(whole, tmp_path):
    """All algorithms that need no further data can be run."""
    assert sorted((*other_algorithms(), "grpo")) == sorted(SUPPORTED)
    folder, _ = whole
    for changes, message in [
        ((*SMALL, f"out={folder}", "lr=0.1"), "holds a run with other settings (lr was 0.0003, now 0.1)"),
        (("algorithm=mix",), "algorithm is mix: choose one of"),
        (("dtype=float16",), "dtype is float16: expected float32 or float64"),
        (("algorithm=dapo", "kl_target=1"), "dapo has no KL penalty"),
        (("lr=0",), "lr is 0: expected more than 0"),
        (("rate=1",), "Key 'rate' not in 'Settings'"),
    ]:
        assert message in run(f"out={tmp_path}", *changes, code=2)


def torchrun(ranks, *arguments, log):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(PROJECT / "tutorials" / "countdown_fsdp.py"), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as file:
        how = {"stdout": file, "stderr": subprocess.STDOUT, "env": environment, "text": True}
        return subprocess.Popen(command, start_new_session=True, **how)


@pytest.mark.slow
def test_ctrl_c_saves_a_run_that_other_ranks_continue(monkeypatch, tmp_path):
    """Ctrl-C in a terminal reaches torchrun and all ranks."""
    monkeypatch.setattr(countdown_fsdp, "split_problems", split_problems)  # other processes hold out 200
    folder = tmp_path / "whole"
    run(*SMALL, f"out={folder}")
    out, log = tmp_path / "out", tmp_path / "log"
    process = torchrun(2, *SMALL, f"out={out}", log=log)

    def moved():
        assert process.poll() is None, log.read_text()
        return (out / "metrics.jsonl").exists() and bool(metrics(out))

    until(moved, seconds=LONG)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=LONG) != 0
    text = log.read_text()
    saved = json.loads((out / "run.json").read_text())["step"]
    assert 0 < saved < 3, text
    assert text.count("the same command continues") == 1, "one rank speaks"
    last = torchrun(3, *SMALL, f"out={out}", log=log)
    assert last.wait(timeout=LONG) == 0, log.read_text()
    assert len(metrics(out)) == 3
    for row, other in zip(metrics(out), metrics(folder), strict=True):
        assert row == pytest.approx(other, abs=1e-6)
    assert "greedy accuracy after RL" in log.read_text()
