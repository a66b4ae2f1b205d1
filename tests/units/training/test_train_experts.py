"""Answers of experts beside the policy's own, and the curves of a distillation without rewards."""

from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch
from tensordict import TensorDict, TensorDictBase
from torch.testing import assert_close

pytest.importorskip("omegaconf")
from cli_files import write_jsonl
from torchrl_llm_kl import training
from torchrl_llm_kl.datasets import DataError
from torchrl_llm_kl.training import ConfigError, Run
from torchrl_llm_kl.training._experts import ExpertRows
from toy_rollouts import make_tokenizer
from train_lab import assert_same_run, build_lab, ended_after, go, settings

MIX = ("algorithm.name=mix", "evaluation.every=0")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_lab(tmp_path_factory.mktemp("experts"))
    write_jsonl(folder / "solutions.jsonl", ({"question": f"say {i}", "answer": "abc"[: 1 + i % 3]} for i in range(5)))
    return folder


@pytest.fixture(autouse=True)
def stacked() -> Any:
    with tensordict.set_list_to_stack(True):
        yield


def answer_of(tokenizer: Any, row: TensorDictBase) -> str:
    return str(tokenizer.decode(row["tokens", "full"][row["masks", "all_assistant_mask"]]))


# ------------------------------------------------------------------ the rows


def test_each_pass_has_every_row_once_in_another_order(lab: Path) -> None:
    """Five rows in steps of two. The rows of a step depend only on its number."""
    tokenizer = make_tokenizer()
    experts = ExpertRows(str(lab / "solutions.jsonl"), tokenizer, count=2, seed=1)
    prompts = [tokenizer.decode(row["tokens", "prompt"]) for step in range(10) for row in experts.of_step(step)]
    passes = [prompts[i : i + 5] for i in range(0, 20, 5)]
    assert all(sorted(each) == sorted(passes[0]) and len(set(each)) == 5 for each in passes)
    assert len(set(map(tuple, passes))) > 1
    again = ExpertRows(str(lab / "solutions.jsonl"), tokenizer, count=2, seed=1)
    assert [tokenizer.decode(row["tokens", "prompt"]) for row in again.of_step(7)] == prompts[14:16]


def test_messages_and_columns_give_the_same_rows(tmp_path: Path, lab: Path) -> None:
    tokenizer = make_tokenizer()
    chats = [
        [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "abc"[: 1 + i % 3]}]
        for i in range(5)
    ]
    write_jsonl(tmp_path / "chats.jsonl", ({"messages": chat} for chat in chats))
    one, other = (
        ExpertRows(str(path), tokenizer, count=5) for path in (tmp_path / "chats.jsonl", lab / "solutions.jsonl")
    )
    for mine, theirs in zip(one.of_step(0), other.of_step(0), strict=True):
        assert torch.equal(mine["tokens", "full"], theirs["tokens", "full"])
        assert answer_of(tokenizer, mine).rstrip("\n") == answer_of(tokenizer, theirs).rstrip("\n")
    write_jsonl(tmp_path / "empty.jsonl", [{"question": "say 1"}])
    with pytest.raises(DataError, match="completion"):
        ExpertRows(str(tmp_path / "empty.jsonl"), tokenizer, count=1)


def test_rows_beside_the_policys_own_by_hand(lab: Path) -> None:
    tokenizer = make_tokenizer()
    experts = ExpertRows(str(lab / "solutions.jsonl"), tokenizer, count=2)
    full = torch.tensor([[0, 7, 8, 9, 0], [5, 6, 7, 8, 9]])
    own = TensorDict(advantage=torch.tensor([[1.0], [-1.0]]), batch_size=[2])
    own["tokens", "full"], own["tokens", "prompt"] = full, full[:, :2]
    own["masks", "all_attention_mask"] = torch.tensor([[False, True, True, True, False], [True] * 5])
    own["next", "log_probs", "full"] = -full.float()
    own["loss_mask"] = torch.tensor([True, False])
    both = experts.beside(own, step=3)
    rows = experts.of_step(3)
    width = max(len(row["tokens", "prompt"]) for row in rows)
    assert both["tokens", "prompt"].shape[-1] == width
    mask = both["masks", "all_attention_mask"]
    assert both["tokens", "full"][0][mask[0]].tolist() == [7, 8, 9]
    assert both["masks", "all_assistant_mask"][0].nonzero().flatten().tolist() == [width, width + 1]
    assert both["next", "log_probs", "full"][1][mask[1]].tolist() == [-5, -6, -7, -8, -9]
    for place, row in enumerate(rows, 2):
        assert torch.equal(both["tokens", "full"][place][mask[place]], row["tokens", "full"])
        assert answer_of(tokenizer, both[place]) == answer_of(tokenizer, row)
        before = both["masks", "all_assistant_mask"][place][:width]
        assert not before.any(), "the prompt is on the left"
    assert both["expert_mask"].tolist() == [False, False, True, True]
    assert both["loss_mask"].tolist() == [True, False, True, True]
    assert both["advantage"].tolist() == [[1.0], [-1.0], [0.0], [0.0]]
    assert both["next", "log_probs", "full"][2:].count_nonzero() == 0


# ------------------------------------------------------------------ runs


def test_the_experts_term_is_the_likelihood_of_their_answers(lab: Path, tmp_path: Path) -> None:
    """The mean over their tokens under the weights before the step. The usual part is that of the policy's own answers."""
    own = [f"data.experts={lab / 'solutions.jsonl'}", "data.num_experts=3", "algorithm.minibatches=1"]
    run = Run(settings(lab, tmp_path, *MIX, *own), say=lambda line: None)
    rows = run.inputs.experts.of_step(0)  # type: ignore[union-attr]
    total, count = 0.0, 0
    for row in rows:
        ids, trained = row["tokens", "full"].unsqueeze(0), row["masks", "all_assistant_mask"][1:]
        with torch.no_grad():
            log_probs = run.policy(ids).logits.double().log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None]).squeeze(-1)
        total, count = total - log_probs[trained].sum().item(), count + int(trained.sum())
    figures = run.take_step()
    assert_close(figures["loss_expert"], 0.1 * total / count, atol=1e-5, rtol=0)
    assert figures["answer_tokens"] > 0
    assert 0 < figures["expert_fraction"] == pytest.approx(count / (count + figures["answer_tokens"]))


def test_a_resumed_run_with_experts_equals_one_without_a_stop(lab: Path, tmp_path: Path) -> None:
    changes = [*MIX, f"data.experts={lab / 'solutions.jsonl'}", "algorithm.micro_batch=4"]
    whole, _ = go(lab, tmp_path / "whole", *changes, "run.steps=3")
    assert all("loss_expert" in row and "loss_usual" in row for row in whole.rows)
    (tmp_path / "cut").mkdir()
    out = ended_after(1, tmp_path / "whole", tmp_path / "cut")
    go(lab, out, *changes, "run.steps=3")
    assert_same_run(out, tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["algorithm.name=mix"], r"mix, which trains on answers of experts .*: set data\.experts"),
        (["data.experts={lab}/solutions.jsonl"], r"grpo trains on no answers of experts: choose mix"),
    ],
)
def test_experts_without_an_algorithm_for_them_are_refused(
    lab: Path, tmp_path: Path, changes: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Run(settings(lab, tmp_path, *(each.format(lab=lab) for each in changes)))


def test_a_distillation_without_rewards_has_curves_of_the_kl_to_the_teacher(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[dict[str, Any]] = []
    plot = training._report.plot_curves

    def record(rows: Any, path: Path, **how: Any) -> None:
        drawn.append({"names": set(rows[0]), **how})
        plot(rows, path, **how)

    monkeypatch.setattr(training._report, "plot_curves", record)
    changes = ["algorithm.name=on_policy_distill", f"algorithm.teacher={lab / 'model'}", "algorithm.args={top_k: 5}"]
    changes += ["reward={}", "reward.function=null", "evaluation.every=0", "run.steps=2", "optimizer.warmup_steps=0"]
    result, _ = go(lab, tmp_path, *changes, kl={})
    (how,) = drawn
    assert ("reward" in how["names"], "kl_to_ref" in how["names"], how["kl_to"]) == (False, True, "teacher")
    assert (result.folder / "curves.png").stat().st_size > 1000
