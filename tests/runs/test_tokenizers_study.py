"""Tests of the study of tokenizers: it resumes, its arms learn from their teachers, and its page shows its figures."""

import math

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import tokenizers_study as study
from cli_files import read_jsonl
from gsm8k.task import Question
from project import PROJECT

QUICK = study.Scale(
    vocab=280, teacher_vocab=300, hidden=16, teacher_hidden=16, teacher_epochs=1, rows=6, start_epochs=1, steps=6, batch=2,
    held_out=3, rounds=1,
)  # fmt: skip


@pytest.fixture
def quick(tmp_path, monkeypatch):
    questions = [
        Question(f"What is {i} plus 2?", f"{i} and two is {i + 2}, the sum of {i} and 2.", {}) for i in range(40)
    ]
    monkeypatch.setattr(study, "read_questions", lambda _: questions)
    monkeypatch.setattr(study, "gettempdir", lambda: tmp_path)
    (tmp_path / "TOKENIZERS.md").write_text("a\n<!-- study -->\nold\n<!-- end -->\nb <!-- tuning -->\n<!-- end -->\n")
    return tmp_path / "results.jsonl"


def test_a_study_of_tokenizers_resumes_and_writes_its_page(quick):
    study.main(0, quick, [0], scale=QUICK)
    rows = read_jsonl(quick)
    runs, (costs,) = rows[:-1], rows[-1:]
    assert [row["arm"] for row in runs] == list(study.ARMS) == list(costs["seconds"])
    assert all(len(row["curve"]) == 6 and math.isfinite(row["nats"]) for row in runs)
    assert len({row["start"] for row in runs}) == 1 < len({row["nats"] for row in runs})
    assert (quick.parent / "tokenizers.png").stat().st_size > 10_000
    page = (quick.parent / "TOKENIZERS.md").read_text()
    assert (
        page
        == f"a\n<!-- study -->\n{study.table(rows)}\n<!-- end -->\nb <!-- tuning -->\n{study.tuning(rows)}\n<!-- end -->\n"
    )
    assert f"| {study.FIRST} | {runs[0]['nats']:.3f} |  | " in page
    quick.write_text("".join(quick.read_text().splitlines(keepends=True)[1:]))  # without the first run
    study.main(0, quick, [0], scale=QUICK)
    assert read_jsonl(quick) == [*rows[1:], rows[0]], "a run depends only on its arm and seed"


def test_nats_per_byte_by_hand(quick):
    """A model without a preference: each token of the answer and its end costs the log of the vocabulary."""
    _, few, _ = study.data_of(0, QUICK)
    models = study.untrained(few, QUICK)
    for weight in models.student.parameters():
        weight.data.zero_()
    tokens = sum(len(models.tokenizer(question.solution).input_ids) + 1 for question in few)
    size = sum(len(question.solution) for question in few)
    want = tokens * math.log(len(models.tokenizer)) / size
    assert study.nats_per_byte(models.student, models.tokenizer, few) == pytest.approx(want, rel=1e-5)


def test_the_page_of_tokenizers_has_the_figures_of_the_results():
    page = (PROJECT / "benchmarks" / "TOKENIZERS.md").read_text(encoding="utf-8")
    results = study.read(PROJECT / "benchmarks" / "tokenizers_study.jsonl")
    assert study.table(results) in page
    assert study.tuning(results) in page
