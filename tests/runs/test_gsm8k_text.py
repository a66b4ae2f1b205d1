"""Tests of the tutorial on real text: splits, guesses and figures by hand, and a run from text to saved models."""

import math
import random
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_files import read_jsonl, write_jsonl

pytest.importorskip("rich")
pytest.importorskip("omegaconf")

import gsm8k_text
from gsm8k import task
from gsm8k.measure import equal_writers, is_right, mean_with_error, pair_figures, run_command
from gsm8k.report import mean_of, summary
from gsm8k.task import FILE, WRITERS, Question, guess_by_writer, pairs


def question(number: int, right: str) -> Question:
    """A question about a sum. The writers with a 1 in ``right`` solve it."""
    total = 3 * number
    answers = {
        name: (f"{number} and {2 * number} is {total + 1 - int(bit)}\nA: {total + 1 - int(bit)}", bit == "1")
        for name, bit in zip(WRITERS, right, strict=True)
    }
    return Question(f"What is {number} plus {2 * number}?", f"{number} + {2 * number} = {total}\nA: {total}", answers)


def row(of: int, chosen_by: str, rejected_by: str, chosen: str = "a", rejected: str = "b") -> dict[str, Any]:
    said = [[{"role": "assistant", "content": text}] for text in (chosen, rejected)]
    return {"chosen": said[0], "rejected": said[1], "question": of, "chosen_by": chosen_by, "rejected_by": rejected_by}


def test_splits_are_disjoint_and_pairs_hold_a_right_and_a_wrong_answer() -> None:
    questions = [question(i, "1010") for i in range(41)]
    held = {}
    for seed in (0, 1, 2, 100):
        training, held_out = ([q.text for q in side] for side in task.split(questions, seed))
        assert sorted(training + held_out) == sorted(q.text for q in questions)
        assert len(held_out) in (10, 11)
        held[seed] = set(held_out)
    assert set().union(*held.values()) == {q.text for q in questions}  # so that the four are disjoint
    assert sum(map(len, held.values())) == 41
    assert task.split(questions, 3)[1] == task.split(questions, 0)[1]
    assert task.split(questions, 101)[1] == task.split(questions, 100)[1]
    rows = pairs([question(5, "0000"), question(7, "0110")])
    writers = [tuple(WRITERS.index(r[f"{which}_by"]) for which in ("chosen", "rejected")) for r in rows]
    assert writers == [(1, 0), (1, 3), (2, 0), (2, 3)]
    assert {r["question"] for r in rows} == {1}
    assert rows[0]["prompt"] == [{"role": "user", "content": "What is 7 plus 14?"}]
    assert [rows[0][which][0]["content"][-5:] for which in ("chosen", "rejected")] == ["A: 21", "A: 22"]
    ((asked, said),) = (solution["messages"] for solution in task.solutions([question(7, "0110")]))
    assert (asked["role"], said) == ("user", {"role": "assistant", "content": "7 + 14 = 21\nA: 21"})


def test_guesses_use_only_training_data_and_errors_are_by_question() -> None:
    train = [row(0, "a", "b", "long one", "short"), row(1, "a", "b", "longer", "short"), row(2, "b", "a", "no", "yes")]
    held_out = [row(0, "a", "b", "xx", "x"), row(1, "b", "a", "x", "xxx"), row(2, "c", "a", "x", "x")]
    assert task.guess_by_length(train, held_out) == [1, -2, 0]  # longer is right more often in training
    assert task.guess_by_length(train[2:], held_out) == [-1, 2, 0]
    assert guess_by_writer(train, held_out) == [1, -1, 0]  # a won twice against b, and lost once
    assert is_right([2.0, -1.0, 0.0]).tolist() == [1.0, 0.0, 0.5]
    held_out = [row(i, "a", "b") for i in range(3)] + [row(3, "b", "a"), row(4, "a", "c")]
    weights = equal_writers(held_out)  # at equal writers, the writer tells nothing
    assert weights.tolist() == pytest.approx([1 / 3] * 3 + [1.0, 0.0])
    right = is_right(guess_by_writer([row(0, "a", "b")], held_out))
    assert right.tolist() == [1, 1, 1, 0, 0.5]
    assert mean_with_error(right, torch.arange(5), weights)[0] == pytest.approx(0.5)
    values = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    usual = 0.5, float(values.std()) / 6**0.5
    assert mean_with_error(values, torch.arange(6)) == pytest.approx(usual)  # each by itself
    # By question: sums of values less the mean 1, 0 and -1; over 3 questions of 2 pairs.
    found = mean_with_error(values, torch.tensor([7, 7, 8, 8, 9, 9]))
    assert found == pytest.approx((0.5, math.sqrt(2 * 3 / 2) / 6))
    weighted, _ = mean_with_error(values, torch.arange(6), torch.tensor([3.0, 0, 0, 0, 0, 1.0], dtype=torch.float64))
    assert weighted == 0.75
    results = [{"x": 0.5, "x_error": 0.03}, {"x": 0.7, "x_error": 0.04}]  # of seeds
    assert mean_of(results, "x") == pytest.approx((0.6, 0.025))


def test_figures_of_pairs() -> None:
    held_out = [row(0, "a", "b", "xx", "x"), row(0, "a", "c", "x", "xx"), row(1, "b", "a", "xx", "x")]
    scores = {
        "log_prob": torch.tensor([[-3.0, -4.0], [-5.0, -2.0], [-6.0, -6.0]]).double(),
        "ref_log_prob": torch.tensor([[-4.0, -4.0], [-4.0, -3.0], [-6.0, -6.0]]).double(),
        "num_scored": torch.tensor([[2.0, 4.0], [4.0, 2.0], [1.0, 2.0]]).double(),
    }
    found = pair_figures(scores, [row(0, "a", "b", "xx", "x")], held_out, beta=0.5)
    assert found["margin"] == pytest.approx(0.5 * (1 - 2 + 0) / 3)  # of 1, -2 and 0 nats
    assert found["accuracy"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert found["accuracy_equal_writers"] == pytest.approx((1 + 0.5) / 2)  # the pair of a and c has no counterpart
    assert found["by_sft"] == pytest.approx((0.5 + 0 + 0.5) / 3)
    assert found["by_sft_per_token"] == pytest.approx((0 + 1 + 0) / 3)  # -2, -1; -1, -1.5; -6, -3
    assert found["by_length"] == pytest.approx(2 / 3)
    assert found["by_writer"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert (found["pairs"], found["questions"]) == (3, 2)


QUICK: dict[str, Any] = {"vocab_size": 300, "hidden": 16, "layers": 1, "questions": 80}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a quick run on sums."""
    folder, rng = tmp_path_factory.mktemp("text"), random.Random(0)
    rights = ("1010", "0110", "0001", "1000", "0111")
    questions = [question(rng.randrange(2, 99), rng.choice(rights)) for _ in range(48)]
    rows = [{"question": q.text, "ground_truth": q.solution} for q in questions]
    for row, q in zip(rows, questions, strict=True):
        row |= {name: {"is_correct": right, "solution": text} for name, (text, right) in q.answers.items()}
    write_jsonl(folder / FILE, rows)
    settings = gsm8k_text.Settings(**QUICK, jobs=0, seeds=[0, 2], data=str(folder), out=str(folder / "out"))
    with redirect_stdout(StringIO()) as output:
        assert gsm8k_text.main(settings) == 0
    return folder / "out", output.getvalue()


def test_a_run_writes_its_files(finished: tuple[Path, str]) -> None:
    out, printed = finished
    results = read_jsonl(out / "results.jsonl")
    assert [result["seed"] for result in results] == [0, 2]
    for result in results:
        assert result["perplexity_after"] < 0.9 * result["perplexity_before"]
        assert 0 <= result["accuracy"] <= 1
        assert all(math.isfinite(value) for value in result.values() if isinstance(value, float))
        folder = out / f"seed-{result['seed']}"
        assert {path.parent.name for path in folder.glob("*/model.safetensors")} >= {"untrained", "sft", "dpo"}
        assert "tokens of" in (folder / "diagnosis.txt").read_text()
        assert (folder / "rollouts.html").read_text().startswith("<!")
    rows = read_jsonl(out / "metrics.jsonl")
    assert {(row["seed"], row["stage"]) for row in rows} == {(s, stage) for s in (0, 2) for stage in ("SFT", "DPO")}
    losses = [row["loss"] for row in rows if row["stage"] == "DPO"]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)  # the policy is the reference
    assert (out / "summary.md").read_text() == summary(results)
    assert "torchrl-llm-kl score" in printed


def test_figures_equal_those_of_plain_forwards(finished: tuple[Path, str]) -> None:
    """The expected accuracy and margin are computed from only the saved models and the text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, _ = finished
    folder = out / "seed-0"
    result = read_jsonl(out / "results.jsonl")[0]
    models = [AutoModelForCausalLM.from_pretrained(folder / name) for name in ("dpo", "sft")]
    tokenizer = AutoTokenizer.from_pretrained(folder / "dpo")

    def log_prob(model: Any, prompt: str, answer: str) -> float:
        head, tail = (tokenizer(text, return_tensors="pt").input_ids for text in (prompt, answer))
        tokens = torch.cat([head, tail], -1)
        with torch.no_grad():
            each = model(input_ids=tokens).logits[0, :-1].double().log_softmax(-1).gather(-1, tokens[0, 1:, None])
        return float(each[head.shape[1] - 1 :].sum())

    margins = []
    for held in read_jsonl(folder / "held_out_pairs.jsonl"):
        prompt = f"<|im_start|>user\n{held['prompt'][0]['content']}<|im_end|>\n<|im_start|>assistant\n"
        answers = [held[part][0]["content"] + "<|im_end|>" for part in ("chosen", "rejected")]
        (a, b), (c, d) = ([log_prob(model, prompt, answer) for answer in answers] for model in models)
        margins.append(0.1 * ((a - c) - (b - d)))
    assert len(margins) == result["pairs"]
    assert result["margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-5)
    assert min(map(abs, margins)) > 1e-5
    assert result["accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / len(margins))


def test_invalid_settings_and_a_failing_command(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="beta is 0: expected more than 0"):
        gsm8k_text.main(gsm8k_text.Settings(beta=0.0))
    with pytest.raises(FileNotFoundError, match=f"{FILE}.*grade-school-math"):
        gsm8k_text.main(gsm8k_text.Settings(data=str(tmp_path)))
    with pytest.raises(RuntimeError, match=r"score .* ended with 2: torchrl-llm-kl: there is no"):
        run_command("score", tmp_path, tmp_path / "nothing.jsonl")
