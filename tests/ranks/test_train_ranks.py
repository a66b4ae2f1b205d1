"""A run on several ranks equals the run of one rank, also after it was ended and continued on other ranks."""

import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("omegaconf")
pytest.importorskip("rich")
from filelock import FileLock
from transformers import AutoModelForCausalLM

import rank_runs
from cli_files import read_jsonl
from fake_vllm import served
from project import PROJECT
from torchrl_llm_kl.algorithms import ALGORITHMS
from torchrl_llm_kl.training import ConfigError
from train_lab import build_lab, ended_after, figures, go, settings, steps_in, weights
from waits import LONG, until

#: Numbers that are not a mean over tokens: each rank's own, averaged.
OF_RANKS = ("ESS", "ratio_", "explained_variance")
TEN = ("run.steps=10", "evaluation.every=10", "evaluation.batch_size=4", "checkpoints.every=10")
MICRO = ("algorithm.micro_batch=3",)  # a rank has one to three rows of a minibatch of four
SHORT = ("run.steps=3", "evaluation.every=0")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """GPT-2's norms compute in float64, unlike those of later models."""
    return build_lab(tmp_path_factory.mktemp("lab"), "gpt2")


def start(pool, lab, out, *overrides, ranks=2, **how):
    results = pool.run("rank_runs:call", ranks=ranks, lab=str(lab), out=str(out), overrides=overrides, **how)
    outcomes = {outcome for outcome, _ in results}
    assert len(outcomes) == 1
    assert not any(said for _, said in results[1:]), "one rank speaks"
    return outcomes.pop(), results[0][1]


def check(out, other):
    """Compare the figures, the evaluations and the weights of two runs."""
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        for row, want in zip(figures(out / name), figures(other / name), strict=True):
            row, want = ({k: v for k, v in each.items() if not k.startswith(OF_RANKS)} for each in (row, want))
            assert row == pytest.approx(want, abs=1e-6), (name, row["step"])
    found, wanted = weights(out / "final"), weights(other / "final")
    assert found.keys() == wanted.keys()
    assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) < 1e-6


@pytest.mark.parametrize(
    "overrides",
    [
        ("logging.doctor_every=5", *MICRO),
        pytest.param(("lora.r=4",)),
        pytest.param(("lora.r=4", "model.shard=true"), marks=pytest.mark.slow),
        pytest.param(("model.shard=false", *MICRO), marks=pytest.mark.slow),
        pytest.param(("algorithm.name=ppo", "algorithm.epochs=2", *MICRO), marks=pytest.mark.slow),
        pytest.param(("algorithm.name=rloo", "evaluation.greedy=false"), marks=pytest.mark.slow),
        pytest.param(("reference.reset_every=5", *MICRO), marks=pytest.mark.slow),
    ],
    ids=["sharded", "lora", "sharded lora", "whole", "critic", "sampled evaluations", "reset"],
)
def test_ten_steps_equal_one_rank(pool, lab, tmp_path, overrides):
    if overrides[0].startswith("lora"):
        pytest.importorskip("peft")
    for ranks in (1, 2):
        # The critic forwards one row at a time, so ranks have different numbers of forwards.
        how = {"ranks": ranks, "critic_tokens": 8}
        assert start(pool, lab, tmp_path / str(ranks), *TEN, *overrides, **how)[0] == "finished"
    check(tmp_path / "2", tmp_path / "1")
    rows = figures(tmp_path / "2" / "metrics.jsonl")
    assert max(row["kl"] for row in rows) > 0.01, "the policy has moved"
    if "logging.doctor_every=5" in overrides:
        assert (tmp_path / "2" / "rollouts.html").exists()
        assert (tmp_path / "2" / "diagnosis.txt").read_text().startswith("step 5")


#: Algorithms that need more than answers and rewards: a baseline, masks, roles or chosen answers.
NEED_MORE = {"a2po", "echo", "rae", "vapo"}
ON_POLICY = sorted(
    name
    for name, preset in ALGORITHMS.items()
    if preset.on_policy and preset.schema not in ("mix", "distill", "rewards", "trajectory") and name not in NEED_MORE
)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ON_POLICY)
def test_other_algorithms(pool, lab, tmp_path, algorithm):
    changes = (
        f"algorithm.name={algorithm}",
        "kl.place=reward",
        "run.steps=2",
        "evaluation.every=0",
        "algorithm.micro_batch=2",
    )
    for ranks in (1, 2):
        start(pool, lab, tmp_path / str(ranks), *changes, ranks=ranks)
    check(tmp_path / "2", tmp_path / "1")


@pytest.mark.parametrize(
    "algorithm",
    ["grpo", pytest.param("gigpo", marks=pytest.mark.slow)],
    ids=["a row for each conversation", "for each turn"],
)
def test_conversations_of_different_lengths(pool, lab, tmp_path, algorithm):
    turns = ("turns.max=3", f"turns.reply={lab / 'replies.py'}:reply", f"algorithm.name={algorithm}")
    for ranks in (1, 2):
        start(pool, lab, tmp_path / str(ranks), *SHORT, *turns, ranks=ranks)
    check(tmp_path / "2", tmp_path / "1")


SLOW = """
import time
import torch.distributed as dist


def slow(question, answer, metadata):
    time.sleep(0.1 * dist.get_rank())
    return len(answer) % 3
"""


@pytest.mark.parametrize("ahead", [0, 2])
def test_ranks_share_a_server(pool, lab, tmp_path, ahead):
    """The first rank gives it the weights, while no rank samples. Sharded weights are gathered for it.

    The second rank is slower. At the end it has not begun the batch that the first one waits for.
    """
    (tmp_path / "slow.py").write_text(SLOW)
    with served(lab / "model") as (url, fake):
        changes = (f"sampler.engine={url}", f"algorithm.max_staleness={ahead}", "optimizer.warmup_steps=0")
        changes += (f"reward.function={tmp_path / 'slow.py'}:slow",)
        outcome, said = start(pool, lab, tmp_path, *SHORT, *changes)
        pool.close()  # a run ahead may leave a message that nobody answers, which ends with its processes
        state = fake._model.state_dict()
    rows = figures(tmp_path / "metrics.jsonl")
    assert (outcome, [line for line in said if "warning" in line]) == ("finished", [])
    assert fake.paths.count("/inference/v1/generate") >= 3 * 8
    assert [row["age_max"] <= ahead for row in rows] == [True] * 3
    assert rows[0]["sampler_gap"] < 1e-6
    assert rows[-1]["age_max"] == ahead
    assert not list((tmp_path / "engine").glob("weights-*")), "they go with the run"
    if ahead == 0:
        final = weights(tmp_path / "final")
        assert max(float((values - state[name]).abs().max()) for name, values in final.items() if name in state) < 1e-6
        assert fake.paths.count("/collective_rpc") == 4
        assert max(row["sampler_gap"] for row in rows) < 1e-6


@pytest.fixture(scope="module")
def whole(pool, lab, tmp_path_factory):
    """Four steps with a critic and a moving reference, whose states are sharded too."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert start(pool, lab, out, *FOLLOWING)[0] == "finished"
    return out


FOLLOWING = ("algorithm.name=ppo", "reference.decay=0.5", "evaluation.batch_size=3")


def test_a_checkpoint_of_two_ranks_continues_on_one_and_on_two_again(pool, lab, whole, tmp_path):
    folder = whole / "checkpoints" / "step-000004"
    assert len(list((folder / "shards").glob("*.distcp"))) == 2
    out = ended_after(2, whole, tmp_path)
    said = start(pool, lab, out, *FOLLOWING, "run.steps=3", ranks=1)[1]
    assert said[0].startswith("resuming after step 2 of 3")
    assert len(list((out / "checkpoints" / "step-000003" / "shards").glob("*.distcp"))) == 1
    start(pool, lab, out, *FOLLOWING)
    kept = [row for row in read_jsonl(out / "evaluations.jsonl") if row["step"] != 3]  # step 3 was the last one before
    (out / "evaluations.jsonl").write_text((whole / "evaluations.jsonl").read_text())
    assert len(kept) == 3
    check(out, whole)


def test_a_rank_that_is_killed_or_interrupted(pool, lab, whole, tmp_path):
    """SIGKILL on one rank ends the run. SIGTERM on one rank ends it after the step, with a checkpoint."""
    out = tmp_path / "killed"
    with pytest.raises(AssertionError, match=r"the process ended|[Cc]losed|reset"):
        start(pool, lab, out, *FOLLOWING, environment={"KILL_AT": "10"})
    assert 0 < len(steps_in(out)) < 5
    outcome, said = start(pool, lab, out, *FOLLOWING, environment={"INTERRUPT_AT": "2"})
    assert outcome == "interrupted"
    assert "interrupted after step " in said[-1]
    assert start(pool, lab, out, *FOLLOWING)[0] == "finished"
    check(out, whole)


# ------------------------------------------------------------------ errors, and the command under torchrun


def test_settings_that_ranks_cannot_share_are_refused_on_all(pool, lab, whole, tmp_path):
    def refusals(out, *overrides, ranks=2):
        return pool.run("rank_runs:refused", ranks=ranks, lab=str(lab), out=str(out), overrides=overrides)

    for overrides, message in [
        (("data.num_prompts=3",), "data.num_prompts is 3 for 2 ranks: choose a multiple"),
        (("model.device=cuda:1",), "model.device is cuda:1, but each rank takes a device of its own"),
        ((f"model.name={tmp_path}",), "cannot load the model"),
    ]:
        assert all(message in text for text in refusals(tmp_path / "new", *overrides)), overrides
    assert all("reference.decay: 0.5, now None" in text for text in refusals(whole))
    with FileLock(whole / ".lock"):
        assert all("another process trains in" in text for text in refusals(whole, *FOLLOWING))


def test_a_run_of_ranks_resumes_only_on_ranks(lab, whole, tmp_path):
    with pytest.raises(ConfigError, match="was started with torchrun, on any number of ranks"):
        go(lab, whole, *rank_runs.COMMON, *FOLLOWING)
    with pytest.raises(ConfigError, match=r"model\.shard=true needs ranks"):
        go(lab, tmp_path / "new", "model.shard=true")


def torchrun(lab, out, *overrides):
    (file := out.with_suffix(".yaml")).write_text(settings(lab, out, *rank_runs.COMMON, *overrides).to_yaml())
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    words += ["torchrl_llm_kl", "train", str(file)]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return subprocess.Popen(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, **how)


def test_the_command(lab, tmp_path):
    """One rank reports."""
    process = torchrun(lab, tmp_path / "out", "lora=null", *SHORT)
    text = process.communicate(timeout=LONG)[0]
    assert process.returncode == 0, text
    assert text.count(f"wrote {tmp_path / 'out' / 'final'}, the weights after step 3") == 1
    assert text.count("groups with equal rewards") == 1
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "final").config.architectures == ["GPT2LMHeadModel"]


@pytest.mark.slow
def test_ctrl_c_in_a_terminal(lab, whole, tmp_path):
    """It reaches torchrun and all ranks, and torchrun passes it on."""
    process = torchrun(lab, out := tmp_path / "out", *FOLLOWING)
    # Not `steps_in`, which removes half-written checkpoints.
    until(lambda: process.poll() is not None or list(out.glob("checkpoints/step-*")), seconds=LONG)
    os.killpg(process.pid, signal.SIGINT)
    text = process.communicate(timeout=LONG)[0]
    assert process.returncode != 0
    assert text.count("Run the same command to resume") == 1, text
    process = torchrun(lab, out, *FOLLOWING)
    assert process.wait(timeout=LONG) == 0, process.communicate()[0]
    check(out, whole)


@pytest.mark.slow
def test_ray_train_resumes_after_a_node_is_killed(pool, lab, tmp_path):
    """Ray Train starts the workers again on a new node, and the run resumes."""
    pytest.importorskip("ray.train")
    out = tmp_path / "out"
    (file := tmp_path / "c.yaml").write_text(settings(lab, out, *rank_runs.COMMON, "run.steps=8").to_yaml())
    script, environment = PROJECT / "tests" / "lab" / "ray_nodes.py", {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, str(script), str(file)]
    done = subprocess.run(
        words, env=os.environ | environment, capture_output=True, text=True, timeout=LONG, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "killed the second node" in done.stdout
    assert "resuming after step" in done.stdout + done.stderr
    start(pool, lab, tmp_path / "one", "run.steps=8", ranks=1)
    check(out, tmp_path / "one")
