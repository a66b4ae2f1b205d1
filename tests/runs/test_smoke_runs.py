"""`train` from a configuration to a saved model, and on to the bit where it was killed."""

import shutil
from pathlib import Path

import pytest

from torchrl_llm_kl.training import train
from train_lab import ANSWERS, assert_same_run, figures, settings, steps_in


def test_the_figures_of_a_run(whole: Path) -> None:
    rows, evaluations = figures(whole / "metrics.jsonl"), figures(whole / "evaluations.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["step"] for row in evaluations] == [0, 2, 4]
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-4)
    assert any(abs(row["kl"]) > 1e-3 for row in rows[1:]), "the policy has moved"
    assert evaluations[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert evaluations[2]["kl"] > 1e-4
    # Warm-up of one step, then linearly to 0 in three.
    assert [row["lr"] for row in rows] == pytest.approx([3e-3, 3e-3, 2e-3, 1e-3])
    for row in rows:
        assert row["penalised_reward"] == pytest.approx(row["reward"] - row["coefficient"] * row["kl"], abs=1e-5)
        assert ANSWERS <= row["answer_tokens"] <= ANSWERS * 6
    assert len({row["coefficient"] for row in rows}) > 1
    assert steps_in(whole) == [f"step-00000{step}" for step in range(5) if step or evaluations[0]["reward"] >= 0][-5:]


@pytest.mark.usefixtures("_no_curves")
def test_a_resumed_run_ends_with_the_same_bits(lab: Path, whole: Path, tmp_path: Path) -> None:
    """Metrics of later steps are there too, as a kill leaves them."""
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "final")
    for step in (2, 3, 4):
        shutil.rmtree(out / "checkpoints" / f"step-00000{step}")
    said: list[str] = []
    train(settings(lab, out), say=said.append)
    assert said[0].startswith("going on after step 1 of 4")
    assert_same_run(out, whole)
