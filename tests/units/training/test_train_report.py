"""Tests of the output of a run: intervals of small evaluations, the progress, the axes of the curves."""

import io
import re
from pathlib import Path
from typing import Any

import pytest

from torchrl_llm_kl.training import plot_curves, progress
from torchrl_llm_kl.training._report import with_interval
from torchrl_llm_kl.training._steps import interval


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([1.0, 1.0], 0.342, 1.0),  # Wilson: n / (n + 1.96 ** 2) = 2 / 5.84
        ([0.0, 0.0, 0.0], 0.0, 0.562),  # 3.84 / 6.84
        ([0.0, 1.0], 0.095, 0.905),
        ([1.0] * 81 + [0.0] * 182, 0.255, 0.366),  # 81 of 263: Newcombe 1998, table I, method 3
        ([0.2, 0.4, 0.6], 0.4 - 4.303 * 0.2 / 3**0.5, 0.4 + 4.303 * 0.2 / 3**0.5),
        ([0.1, 0.3] * 8, 0.145, 0.255),  # t of 15 degrees is 2.131; the standard error 0.1 / 15 ** 0.5
    ],
)
def test_intervals_of_a_mean(values: list[float], low: float, high: float) -> None:
    assert interval(values) == pytest.approx((low, high), abs=6e-4)


def test_single_and_constant_values_have_no_interval() -> None:
    assert interval([0.25]) is interval([1.0]) is interval([0.25, 0.25]) is None
    assert with_interval({"reward": 0.25}) == "0.25"


def test_the_progress_shows_the_time_of_the_clock() -> None:
    """A resumed run shows the time of its earlier processes, here an hour. The last step is always shown."""
    out, seconds = io.StringIO(), [3600.0]
    with progress("grpo", 3, done=1, stream=out, clock=lambda: seconds[-1]) as advance:
        for now in (3605.0, 3607.0):
            seconds.append(now)
            advance("KL 0.1")
    assert out.getvalue() == "grpo: 3 of 3, 1 h 0 min  KL 0.1\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_narrow_terminal_cuts_the_status_not_the_step_or_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COLUMNS": "80", "LINES": "24", "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    out, seconds = Terminal(), [0.0]
    status = "reward 0.25  KL 0.617/0.5  coefficient 0.093  clipped 6.2%  ESS 0.99"
    with progress("on_policy_distill", 100, stream=out, clock=lambda: seconds[-1]) as advance:
        for now in (60.0, 120.0, 180.0):
            seconds.append(now)
            advance(status)
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).replace("\r", "\n").strip().splitlines()[-1]
    assert re.search(r"on_policy_distill .* 3/100 1:37:00 reward 0\.25  KL 0\.6", last), last
    assert len(last.rstrip()) <= 80


def test_the_curves_label_the_place_of_the_coefficient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    drawn: list[Any] = []
    monkeypatch.setattr(plt, "close", drawn.append)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)
    rows = [{"step": i, "reward": 0.5, "kl": 0.1, "coefficient": 0.2} for i in range(3)]
    plot_curves(rows, tmp_path / "x.png", held_out=[(0, 0.5, 0.1, 0.9), (3, 0.75)])
    plot_curves([row | {"penalised_reward": 0.4} for row in rows], tmp_path / "x.png")
    plot_curves(rows[:1], tmp_path / "x.png")
    labels = [figure.axes[-1].get_ylabel().replace("\n", " ") for figure in drawn]
    loss, reward = "KL coefficient in the loss (weight)", "KL coefficient in the reward (reward per nat)"
    assert labels == [loss, reward, loss]
    for figure in drawn:
        figure.canvas.draw()
        ticks = [text.get_text() for text in figure.axes[-1].get_xticklabels()]
        assert {text.replace("\N{MINUS SIGN}", "").isdigit() for text in ticks} == {True}, ticks
    (bars,) = drawn[0].axes[0].collections
    assert bars.get_segments()[0].tolist() == [[0.0, 0.1], [0.0, 0.9]]
    assert drawn[2].axes[0].lines[-1].get_marker() == "o"
