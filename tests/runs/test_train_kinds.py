"""Tests of the kinds of runs: how they resume and end early, invalid settings, and equal results of the tutorials."""

import copy
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from torchrl_llm_kl.masks import PromptTranslator
from torchrl_llm_kl.training import ConfigError, ModelError, Run
from torchrl_llm_kl.training._build import plan_algorithm
from torchrl_llm_kl.training._inputs import load_inputs, load_reward
from torchrl_llm_kl.training._models import load_policy, load_tokenizer
from torchrl_llm_kl.training._user_code import load_function
from toy_rollouts import make_model
from toy_tokenizer import build_tokenizer
from train_lab import ended_after, figures, go, same, settings, steps_in, weights

pytest.importorskip("omegaconf")

import countdown_demo
import countdown_study
import train_grpo
from countdown.model import make_policy, warm_up
from countdown.task import all_problems, split_problems
from project import PROJECT as ROOT
from torchrl_llm_kl.training import Checkpoints, read_config, train

pytestmark = pytest.mark.usefixtures("_no_curves")
LORA = ("lora.r=4", "lora.alpha=32")
CHECKPOINTED = "model.gradient_checkpointing=true"


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.name=ppo", "optimizer.critic_lr=1e-2"),
        ("reference.decay=0.5", "algorithm.name=dapo", "kl.coefficient=0.1", "algorithm.micro_batch=3"),
        (CHECKPOINTED, *LORA),
    ],
    ids=["critic", "moving reference", "checkpointed layers and lora"],
)
def test_other_kinds_of_runs_resume_bit_exactly(lab: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    common = (*overrides, "run.steps=3", "evaluation.every=0", "checkpoints.final=last")
    go(lab, tmp_path / "whole", *common)
    go(lab, ended_after(1, tmp_path / "whole", tmp_path), *common)
    last = [tmp_path / name / "checkpoints" / "step-000003" for name in ("whole", "out")]
    assert figures(last[0] / "metrics.jsonl") == figures(last[1] / "metrics.jsonl")
    assert same(weights(last[0] / "model"), weights(last[1] / "model"))
    assert same(weights(tmp_path / "whole" / "final"), weights(tmp_path / "out" / "final"))
    if "algorithm.name=ppo" in overrides:
        critics = [weights(folder) for folder in last]
        assert same(*critics)
        assert any(bool(value.any()) for name, value in critics[0].items() if name.startswith("head")), "it has learned"
    elif "reference.decay=0.5" in overrides:
        one, other = (torch.load(folder / "state.pt", weights_only=True)["reference"] for folder in last)
        assert one["steps"] == other["steps"] == 6
        assert same(one["weights"], other["weights"])
        assert not same(one["weights"], weights(lab / "model"))
    else:
        adapted = load_policy(settings(lab, tmp_path, *common), last[0] / "model")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "final")
        base = AutoModelForCausalLM.from_pretrained(lab / "model")
        ids = torch.arange(12)[None]
        with torch.no_grad():
            got, want, before = (model(input_ids=ids).logits for model in (merged, adapted, base))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        assert (want - before).abs().max() > 1e-2, "the adapters do something"


def test_activation_checkpointing_changes_no_figure(lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer runs again in the backward in training mode. Outside of the update the model is in evaluation mode."""
    common = ("run.steps=2", "evaluation.every=0", "algorithm.micro_batch=3")
    plain, _ = go(lab, tmp_path / "plain", *common)
    checkpoint = Mock(side_effect=torch.utils.checkpoint.checkpoint)
    runs: list[Run] = []

    def build(*args: Any, **kwargs: Any) -> Run:
        runs.append(Run(*args, **kwargs))
        return runs[-1]

    monkeypatch.setattr("transformers.modeling_utils.checkpoint", checkpoint)
    result, _ = go(lab, tmp_path / "out", *common, CHECKPOINTED, build=build)
    calls = 2 * 2 * 2 * runs[0].policy.config.num_hidden_layers
    assert checkpoint.call_count == calls, "of 2 steps, 2 minibatches and 2 parts of each; none to sample or to score"
    assert not runs[0].policy.training
    for row, want in zip(result.rows, plain.rows, strict=True):
        assert row == pytest.approx({**want, "seconds": row["seconds"]}, abs=1e-4, rel=1e-3)


def test_activation_checkpointing_needs_a_model_without_dropout(lab: Path, tmp_path: Path) -> None:
    """Dropout of attention has no module. In training mode it would change the log-probs that the loss compares."""
    shutil.copytree(lab / "model", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attn_pdrop": 0.1}))
    config = settings(lab, tmp_path / "out", f"model.name={tmp_path / 'model'}", CHECKPOINTED)
    with pytest.raises(ModelError, match=r"trains with dropout \(attn_pdrop\): set it to 0"):
        load_policy(config)


def test_a_final_folder_with_only_adapters(lab: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    short = ("run.steps=1", "optimizer.warmup_steps=0", "evaluation.every=0")
    final = Path(go(lab, tmp_path, "lora.r=2", "lora.merge=false", *short)[0].final or "")
    assert (final / "adapter_config.json").exists()
    assert AutoModelForCausalLM.from_pretrained(final).config.vocab_size
    assert "LoRA adapters of it" in (final / "README.md").read_text()


def test_the_best_weights_are_kept_and_exported(lab: Path, tmp_path: Path) -> None:
    """The reward falls with each call, so the first evaluation is the best."""
    (tmp_path / "falls.py").write_text("n = [1]\ndef f(q, a, m):\n n.append(1)\n return 1 / len(n) + len(a) % 2\n")
    changes = ("checkpoints.keep=1", "checkpoints.final=best", "evaluation.every=1", "run.steps=2", "optimizer.lr=1e-9")
    result, _ = go(lab, tmp_path / "out", f"reward={tmp_path / 'falls.py'}:f", *changes)
    assert result.chosen == 0
    assert steps_in(tmp_path / "out") == ["step-000000", "step-000002"]
    assert same(weights(tmp_path / "out" / "final"), weights(lab / "model"))
    assert "trained for 0 steps" in (tmp_path / "out" / "final" / "README.md").read_text()


def test_a_kl_that_blows_up_ends_the_run(lab: Path, tmp_path: Path) -> None:
    changes = ("optimizer.lr=0.3", "kl.stop_above=0.1", "kl.stop_after=1", "optimizer.schedule=constant")
    result, said = go(lab, tmp_path, *changes)
    assert (result.outcome, result.step < 4) == ("stopped", True)
    assert result.rows[-1]["kl"] > 0.1
    assert "above kl.stop_above=0.1 nats per answer" in result.why
    assert f"stopped after step {result.step} of 4: {result.why}" in said
    assert steps_in(tmp_path)[-1] == f"step-00000{result.step}"


def test_a_gradient_that_is_not_finite_ends_the_run(lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, factors = torch.nn.utils.clip_grad_norm_, iter([1, float("nan")])

    def clip(*args: Any, **kwargs: Any) -> torch.Tensor:
        return own(*args, **kwargs) * next(factors)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    result, _ = go(lab, tmp_path, "algorithm.minibatches=1", kl={"coefficient": 0.01})
    assert (result.outcome, result.step, result.chosen) == ("stopped", 1, 1)
    assert "the gradient's norm is nan" in result.why


def test_two_rewards_with_weights_and_no_reference(lab: Path, tmp_path: Path) -> None:
    """Without a reference no KL is measured."""
    functions = f"{{vowels: {lab}/rewards.py:vowels, digits: {{function: {lab}/rewards.py:digits, weight: 0.5}}}}"
    changes = ("reference.name=none", "algorithm.name=dapo", "kl.place=preset", "run.steps=2", "evaluation.every=2")
    result, _ = go(lab, tmp_path, "reward=null", f"reward.functions={functions}", *changes, kl={})
    for row in result.rows:
        assert row["reward"] == pytest.approx(row["reward/vowels"] + 0.5 * row["reward/digits"], abs=1e-5)
    assert {"reward/vowels", "reward/digits"} <= figures(tmp_path / "evaluations.jsonl")[0].keys()
    assert all("kl" not in row for row in (*result.rows, *result.evaluations))
    assert "near" not in (tmp_path / "final" / "README.md").read_text().split("```")[0]


def test_a_teacher_with_a_reward(lab: Path, tmp_path: Path) -> None:
    """The student starts as its teacher, so the first KL is 0."""
    changes = ("algorithm.name=on_policy_distill", f"algorithm.teacher={lab / 'model'}", "algorithm.minibatches=1")
    result, _ = go(lab, tmp_path, *changes, "run.steps=1", "optimizer.warmup_steps=0", kl={})
    assert abs(result.rows[0]["kl"]) < 1e-4


def another_tokenizer(folder: Path) -> Path:
    """A teacher with the weights of another seed, and tokens of several letters."""
    letters = [chr(i) for i in range(97, 123)]
    other = build_tokenizer(merges=[(a, b) for a in letters[:12] for b in letters[:12]])
    for part in (make_model(other, 3), other):
        part.save_pretrained(folder)
    return folder


def test_a_teacher_with_another_tokenizer(lab: Path, tmp_path: Path) -> None:
    teacher = another_tokenizer(tmp_path / "teacher")
    changes = ("algorithm.name=on_policy_distill", f"algorithm.teacher={teacher}", "algorithm.minibatches=1")
    result, _ = go(lab, tmp_path / "run", *changes, "run.steps=2", "optimizer.warmup_steps=0", kl={})
    assert result.outcome == "finished"
    assert all(row["kl"] > 0 for row in result.rows)


@pytest.mark.parametrize("top_k", [0, 16])
def test_gkd_from_a_teacher_with_another_tokenizer_and_template(lab: Path, tmp_path: Path, top_k: int) -> None:
    """The teacher's prompts have its own template: the first tokens of its first request are its rendering."""
    teacher = another_tokenizer(tmp_path / "teacher")
    template = teacher / "chat_template.jinja"
    template.write_text("{% for m in messages %}({{ m.role }}) {{ m.content }}\n{% endfor %}(assistant) ")
    prompts: list[str] = []
    translate = PromptTranslator.__call__

    def record(self: PromptTranslator, ids: list[int]) -> list[int]:
        out = translate(self, ids)
        prompts.append(load_tokenizer(str(teacher)).decode(out))
        return out

    changes = ("algorithm.name=gkd", f"algorithm.teacher={teacher}", f"algorithm.args={{top_k: {top_k}}}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptTranslator, "__call__", record)
        result, _ = go(lab, tmp_path / "run", *changes, "algorithm.minibatches=1", "run.steps=2", "reward=null", kl={})
    assert result.outcome == "finished"
    assert all(row["loss_objective"] > 0 for row in result.rows)
    assert prompts
    assert all(re.fullmatch(r"\(user\) [^\n]+\n\(assistant\) ", prompt) for prompt in prompts)


def test_a_teacher_of_top_tokens_without_a_reward(lab: Path, tmp_path: Path) -> None:
    """Nothing is evaluated, and no figure is a reward. The student equals its teacher until the first update."""
    changes = ("algorithm.name=gkd", f"algorithm.teacher={lab / 'model'}", "algorithm.args={top_k: 16}")
    quiet = ("algorithm.minibatches=1", "logging.doctor_every=1", "run.steps=2", "optimizer.warmup_steps=0")
    result, said = go(lab, tmp_path, *changes, *quiet, "reward=null", kl={})
    assert (result.outcome, result.step, result.evaluations) == ("finished", 2, [])
    first = result.rows[0]
    assert abs(first["loss_objective"]) < 1e-4
    assert 0 < first["captured_mass"] < 1
    assert not [key for key in first if "reward" in key]
    assert "reward" not in "".join(said)
    assert (tmp_path / "final" / "README.md").exists()
    assert (tmp_path / "diagnosis.txt").exists()


MINE = """
from torchrl_llm_kl.advantages import advantage
from torchrl_llm_kl.algorithms import ALGORITHMS, Algorithm
from torchrl_llm_kl.losses import LossTerm, objective


def clipped(inputs, *, clip=0.2):
    ratio = inputs.log_ratio.exp().clamp(1 - clip, 1 + clip)
    return (LossTerm("objective", -(ratio * inputs.advantage), inputs.mask),)


objective("clipped_mine")(clipped)


@advantage("centred_mine", "outcome")
def centred_mine(reward):
    return reward - reward.mean()


def squared(log_prob, ref_log_prob, old_log_prob=None):
    return (log_prob - ref_log_prob) ** 2 / 2


ALGORITHMS.add("mine", Algorithm("mine", objective="clipped_mine", advantage="centred_mine", kl_loss="k2"))


def vowels(question, answer, metadata):
    return sum(letter in "aeiou" for letter in answer) / 6
"""


def test_a_run_imports_user_code_first(lab: Path, tmp_path: Path) -> None:
    """Registered names are known. A file that functions are named by runs once for all functions and runs."""
    mine, other = tmp_path / "mine.py", tmp_path / "other.py"
    mine.write_text(MINE)
    other.write_text(MINE.replace('mine"', 'other"'))  # names of its own
    short = ("optimizer.warmup_steps=0", "evaluation.every=0", "kl.coefficient=0.1", "run.steps=1")
    named = (*short, f"imports=[{mine}]", "algorithm.name=mine", f"reward={mine}:vowels")
    first = go(lab, tmp_path / "named", *named, kl={})[0].rows[0]
    places = (f"algorithm.args.objective={other}:clipped", f"algorithm.args.advantage={other}:centred_mine")
    places += (f"kl.estimator={other}:squared", "kl.place=loss", f"reward={other}:vowels")
    for _ in range(2):
        plan = plan_algorithm(settings(lab, lab / "none", *short, *places, kl={}))
    assert (plan.algorithm.objective, plan.algorithm.advantage) == (f"{other}:clipped", "centred_other")
    second = go(lab, tmp_path / "placed", *short, *places, kl={})[0].rows[0]
    for key in ("loss_objective", "loss_kl_to_ref", "reward", "coefficient"):
        assert first[key] == second[key], key
    assert first["loss_objective"] != 0 != first["reward"]
    mine.write_text(MINE + "# changed")
    _, said = go(lab, tmp_path / "named", *named, "run.steps=2", kl={})
    assert any(line.startswith(f"{mine} has changed since") for line in said)
    with pytest.raises(TypeError, match="expected a registered advantage"):
        plan_algorithm(settings(lab, lab / "none", f"algorithm.args.advantage={mine}:vowels"))
    with pytest.raises(ConfigError, match="the file nowhere"):
        load_inputs(settings(lab, lab / "none", "imports=[nowhere.py]"))


TEACHER = ["algorithm.name=gkd", "algorithm.teacher=t", "kl.place=preset", "kl.target=null", "kl.controller_args={}"]
NO_HORIZON = ["kl.controller_args={}", "kl.controller_args.horizon=0"]
LOW = r"'low': 0.2}: .* low <= init <= .*, got low=0.2, init=0.1"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.name=mix"], "trains on answers of experts"),
        (["algorithm.name=grpoo"], "Did you mean 'grpo'"),
        (["algorithm.name=gkd"], "set algorithm.teacher"),
        (["algorithm.teacher=t"], "grpo has no teacher"),
        (["data.group_size=1"], "use at least 2"),
        (["algorithm.name=dapo", "kl.place=preset"], "dapo has no KL penalty"),
        (["algorithm.args.kl_loss=k3"], "set kl.place and kl.estimator instead"),
        (["algorithm.args.clip_hihg=0.3"], "grpo has no setting 'clip_hihg'"),
        (["kl.estimator=k9"], "unknown KL estimator 'k9'.*Did you mean 'k3'"),
        (["kl.controller_args.warmupp=0"], "kl.controller_args .*warmupp"),
        (["kl.coefficient=0"], r"^kl.coefficient is 0, from which it cannot adapt"),
        (["kl.controller_args.low=0.2"], LOW),
        ([*NO_HORIZON, "kl.controller=ziegler"], r"kl.controller_args {'horizon': 0}: horizon must be"),
        ([*TEACHER, "reference.decay=0.9"], "has a teacher as its reference"),
        ([*TEACHER, "reference.service=shared"], "has a teacher as its reference"),
    ],
)
def test_invalid_settings_of_the_algorithm_and_the_kl(lab: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_algorithm(settings(lab, lab / "none", *overrides))


def test_a_file_of_rewards_runs_once_and_imports_its_neighbours(lab: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Imports inside a call work too, after the file has run."""
    (tmp_path / "beside_it.py").write_text("def length(answer):\n    return float(len(answer))\n")
    text = "runs = []\nruns.append(1)\ndef f(q, a, m):\n    import beside_it\n    return beside_it.length(a)\n"
    (tmp_path / "mine.py").write_text(text + "def g(q, a, m):\n    return f(q, a, m) * len(runs)\n")
    functions = f"{{f: {tmp_path / 'mine.py'}:f, g: {tmp_path / '.' / 'mine.py'}:g}}"
    monkeypatch.setattr(sys, "path", list(sys.path))
    parts = load_reward(settings(lab, lab / "none", "reward=null", f"reward.functions={functions}"))
    (_, f), (_, g) = parts["f"], parts["g"]
    assert f.__globals__ is g.__globals__
    assert (f("", "abc", {}), g("", "abc", {})) == (3.0, 3.0)
    (tmp_path / "bad.py").write_text("x = absent")
    with pytest.raises(ConfigError, match=r"bad\.py cannot be loaded: NameError: "):
        load_reward(settings(lab, lab / "none", f"reward={tmp_path / 'bad.py'}:f"))


def test_the_first_coefficient_follows_from_the_target(lab: Path, tmp_path: Path) -> None:
    """A quarter of the target doubles it. In the reward it starts after the first step, which was charged already."""
    found: dict[Any, list[float]] = {}
    for place, target, given in (
        ("loss", 0.5, {}),
        ("loss", 2.0, {}),
        ("reward", 0.5, {}),
        ("reward", 2.0, {}),
        ("loss", 0.5, {"coefficient": 0.3}),
    ):
        out = tmp_path / f"{len(found)}"
        kl = {"place": place, "target": target, "controller_args": {"warmup": 9}, **given}
        go(lab, out, "run.steps=2", "evaluation.every=0", kl=kl)
        found[place, target, bool(given)] = [row["coefficient"] for row in figures(out / "metrics.jsonl")]
    assert found["loss", 0.5, True] == pytest.approx([0.3, 0.3])
    assert found["reward", 0.5, False][0] == pytest.approx(0.1)
    for place in ("loss", "reward"):
        near, far = (found[place, target, False] for target in (0.5, 2.0))
        assert near[1] == pytest.approx(2 * far[1])
    assert found["loss", 0.5, False][0] == found["loss", 0.5, False][1]


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_the_first_coefficient_waits_for_different_rewards_and_stays_in_its_bounds(
    lab: Path, tmp_path: Path, place: str
) -> None:
    """The answers of the first step all have the reward 0. Later rewards are large, so the upper bound applies."""
    code = "number = 0\n\ndef late(question, answer, metadata):\n    global number\n    number += 1\n"
    (tmp_path / "late.py").write_text(f"{code}    return 0.0 if number <= 8 else 100.0 * len(answer) + number\n")
    kl = {"place": place, "target": 0.5, "controller_args": {"warmup": 9, "high": 0.2}}
    changes = (f"reward.function={tmp_path / 'late.py'}:late", "run.steps=3", "evaluation.every=0")
    go(lab, tmp_path / "out", *changes, "data.held_out_share=0", kl=kl)
    rows = figures(tmp_path / "out" / "metrics.jsonl")
    assert [row["equal_rewards"] for row in rows] == [1, 0, 0]
    assert rows[0]["coefficient"] == pytest.approx(0.1)
    assert rows[2]["coefficient"] == pytest.approx(0.2)
    assert rows[1]["coefficient"] == pytest.approx(0.2 if place == "loss" else 0.1)


def test_the_tutorial_and_the_command_are_bit_equal(lab: Path, tmp_path: Path) -> None:
    assert len((ROOT / "tutorials" / "train_grpo.py").read_text().splitlines()) <= 150, "the tutorial is short"
    changes = ("data.held_out_share=0", "evaluation.every=0", "optimizer.warmup_steps=0", "run.seed=3")
    go(lab, tmp_path / "command", *changes, kl={"place": "reward", "target": 0.5})
    command = weights(tmp_path / "command" / "final")
    assert not same(command, weights(lab / "model")), "it has learned"
    checkpoints = Checkpoints(tmp_path / "loop" / "checkpoints")
    files = {"prompts": str(lab / "prompts.jsonl"), "reward": load_function(f"{lab / 'rewards.py'}:vowels")}
    sizes = {"steps": 4, "num_prompts": 2, "group_size": 4, "max_new_tokens": 6, "save_every": 2}
    for _ in range(2):
        policy = train_grpo.train(str(lab / "model"), tmp_path / "loop", **files, **sizes, lr=3e-3, seed=3)
        found = policy.state_dict()
        assert all(torch.equal(command[name], found[name]) for name in command)
        last: Any = checkpoints.latest()
        assert last.step == 4
        shutil.rmtree(last.folder)
    for answer, value in (("3 * 4 is 12.", 1), ("12, or 13", 0), ("no idea", 0)):
        assert train_grpo.right("What is 3 * 4?", answer, {"answer": "12"}) == value
    assert all(int(row["answer"]) > 0 for row in train_grpo.PROMPTS)


def test_three_steps_of_the_demo_equal_those_of_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both start from the same weights and generator state, with problems in the same order. The study uses no env."""
    scale = countdown_study.Scale(steps=3, num_prompts=3, group_size=4, lr=3e-4)
    torch.manual_seed(0)
    problems = all_problems()
    policy, tokenizer = make_policy(problems)
    some, held_out = split_problems(problems)
    assert len(list(warm_up(policy, tokenizer, some, steps=25, seed=0))) == 25
    some, generator = some[:40], torch.Generator().manual_seed(0)
    # The study's order; it leaves out the first problems, as torchrl's collector does.
    order = list(DataLoader(some, batch_size=None, shuffle=True, generator=generator))
    countdown_demo.write_files(tmp_path, policy, tokenizer, order[scale.num_prompts :], held_out[:4])
    torch.manual_seed(0)
    own = countdown_study.make_coefficient  # with the gains of the demo's large batch
    monkeypatch.setattr(
        countdown_study, "make_coefficient", lambda *args, **how: own(*args, **how | {"batch_size": 256})
    )
    (cell, _), *_ = countdown_study.STUDIES["target"]
    reference = copy.deepcopy(policy).requires_grad_(False)
    expected = countdown_study.train(cell, policy, reference, tokenizer, some, scale, seed=0)
    monkeypatch.chdir(ROOT)  # where the paths of the rewards begin
    changes = f"model.name={tmp_path}/model run.out={tmp_path}/run data.prompts={tmp_path}/prompts.jsonl"
    changes += f" data.held_out={tmp_path}/held_out.jsonl data.shuffle=false data.num_prompts=3 data.group_size=4"
    changes += " evaluation.every=2 logging.loggers=[] run.steps=3"
    config = read_config(ROOT / "tutorials" / "countdown.yaml", changes.split())
    result = train(config, say=lambda line: None)
    assert len(result.rows) == len(expected) == scale.steps
    for row, other in zip(result.rows, expected, strict=True):
        for name in ("reward", "penalised_reward", "kl", "coefficient", "answer_tokens", "tokens"):
            assert row[name] == pytest.approx(other[name], abs=1e-5), name
        assert row["reward/solved"] == pytest.approx(other["success"])
    assert result.rows[-1]["kl"] != 0
    assert "solved on 4 held-out prompts, after" in result.figures
