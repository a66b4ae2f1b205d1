"""Tests of the precision study at its smallest size, against float64, and of its page."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

for name in ("rich", "tokenizers"):
    pytest.importorskip(name)
typer = pytest.importorskip("typer")
if not hasattr(torch.optim, "Muon"):
    pytest.skip("needs torch 2.9", allow_module_level=True)

from benchmarks import precision  # noqa: E402
from cli_files import invoked  # noqa: E402
from torchrl_llm_kl import LogProbScorer  # noqa: E402

NARROW = ("bf16 products", "bf16 model", ".bfloat16()")


@pytest.fixture(scope="module")
def measured() -> precision.Measured:
    """The study on the docstrings of Python's standard library, which every machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "REAL_ANSWERS", Path("nowhere"))
        return precision.measure(precision.SMALLEST)


def errors(found: precision.Measured, setting: str) -> torch.Tensor:
    return (found.last[setting].log_prob - found.last["float64"].log_prob).abs()


def test_errors_of_float32_and_bfloat16(measured):
    """Products in bfloat16 with float32 weights err no more than a bfloat16 model."""
    single = errors(measured, "float32")
    assert 0 < single.max() < 5e-6
    for kind, value in measured.last["float64"].kl.items():
        assert_close(measured.last["float32"].kl[kind], value, rtol=1e-4, atol=5e-6)
    products, model, _ = found = [errors(measured, setting) for setting in NARROW]
    for error in found:
        assert 100 * single.mean() < error.mean()
        assert error.max() < 0.1
    assert products.mean() < 1.1 * model.mean()


def test_the_policy_moves_away_from_the_reference_and_differs_between_dtypes(measured):
    """The KL must grow, since its error is what the study measures."""
    first, last = (readings["float64"].kl["exact"] for readings in measured.readings.values())
    assert 0 < first.mean() < last.mean() < 0.1
    assert first.min() > -1e-9
    against = measured.against_float32
    assert against["float32"].kl["exact"].abs().max() == 0
    for setting in NARROW:
        assert 0 < against[setting].kl["exact"].mean() < 1e-4
        assert_close(against[setting].ref_log_prob, measured.last["float32"].log_prob, rtol=0, atol=5e-6)


def test_only_answers_are_scored_and_copies_do_not_change_the_model(monkeypatch):
    """The mask holds all tokens of an answer and its end, and none of a question."""
    monkeypatch.setattr(precision, "documents", lambda: ([("ab", ["cd"], "efg")] * 8, "here"))
    text = precision.corpus(replace(precision.SMALLEST, model=replace(precision.MODEL, vocab=256), held_out=2))
    # A byte each: "ab", a line end; "efg", two line ends.
    assert text.held_out.lengths.tolist() == [8, 8]
    assert text.mask.tolist() == [False] * 3 + [True] * 5 + [False] * 3 + [True] * 5
    # Six questions are left: the first for tuning, "ab\nefg\n\n", five for training, "ab\ncd\n\n".
    assert (len(text.tuning), len(text.training)) == (8, 5 * 7)
    # two answers, of sums 3 and 5: the mean is 2; their tokens are -1 and +1 off in sum; sqrt((1 + 1) * 2 / 1) / 4
    values, rows = torch.tensor([1.0, 2.0, 5.0, 0.0]), torch.tensor([0, 0, 1, 1])
    assert precision.by_sequence(values, rows).tolist() == [3.0, 5.0]
    assert precision.mean_and_error(values, rows) == (2.0, pytest.approx(0.5))
    model = precision.qwen2(precision.QUICK)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    narrow, double = precision.in_bfloat16(model), precision.in_double(model)
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in narrow.buffers()} == {torch.float32}
    assert {p.dtype for p in double.parameters()} == {torch.float64}
    ids = torch.arange(9).unsqueeze(0)
    assert double(input_ids=ids).logits.dtype == torch.float64
    assert_close(double(input_ids=ids).logits.float(), model(input_ids=ids).logits, rtol=0, atol=1e-5)
    assert LogProbScorer(double).path == "head"
    assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_the_page_is_written_between_its_markers(measured, monkeypatch, tmp_path):
    monkeypatch.setattr(precision, "measure", lambda sizes: measured)
    page = tmp_path / precision.PAGE
    page.write_text(f"before\n\n{precision.START}\nold\n{precision.END}\n\nafter\n", encoding="utf-8")
    app = typer.Typer()
    app.command()(precision.main)
    arguments = ["--write", "--docs", str(tmp_path)]
    for _ in range(2):
        invoked(app, *arguments)
        text = page.read_text(encoding="utf-8")
        assert text == f"before\n\n{precision.START}\n\n{precision.markdown(measured)}\n\n{precision.END}\n\nafter\n"
    assert "docstrings" in text
    # a renamed row or setting leaves the page out of date
    page = (precision.DOCS / precision.PAGE).read_text(encoding="utf-8")
    assert all(f"| {label} |" in page for label, _ in precision.of_last_policy(measured))
    assert f"| {' | '.join(precision.SETTINGS)} |" in page
