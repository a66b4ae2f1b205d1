"""Tests of the benchmark of the service: windows of calls, goals, the page and the commands."""

from dataclasses import replace
from pathlib import Path

import pytest

for name in ("ray", "typer"):
    pytest.importorskip(name)
from benchmarks.ray import __main__ as cli  # noqa: E402
from benchmarks.ray.callers import Window, quantile  # noqa: E402
from benchmarks.ray.figures import Figure, RayRun  # noqa: E402
from cli_files import invoked  # noqa: E402


def test_throughput_of_a_window_and_quantiles() -> None:
    """The window of two seconds holds three calls and a quarter of one. The last call began after it."""
    window = Window(2.0, [(0.0, 0.5), (0.5, 1.0), (1.0, 1.5), (1.5, 3.5), (2.5, 3.5)])
    assert window.throughput == pytest.approx(3.25 / 2)
    assert window.latencies == [0.5, 0.5, 0.5, 2.0, 1.0]
    assert (quantile([4.0, 1.0, 3.0, 2.0], 0.5), quantile([4.0, 1.0, 3.0, 2.0], 0.99)) == (3.0, 4.0)


def run() -> RayRun:
    call = Figure("a call of 4 x 32 tokens over the local score", 2.5, "ms", most=3.0)
    faster = Figure("8 callers", 5.0, "x", least=8.0, note="noisy")
    return RayRun({"cores": "2"}, (call, faster))


def test_goals_and_the_page(tmp_path: Path) -> None:
    """Without stored figures it asks for a run first. Newer figures replace those of the same name."""
    assert [figure.goal for figure in run().figures] == ["at most 3: met", "at least 8: missed"]
    assert "run first" in invoked(cli.app, "render", "--out", str(tmp_path), code=2)
    run().save(tmp_path)
    assert RayRun.load(tmp_path) == run()
    newer = RayRun({"cores": "3"}, (replace(run().figures[1], value=9.0), Figure("new", 1.0, "s")))
    assert [figure.value for figure in run().updated(newer).figures] == [2.5, 9.0, 1.0]
    invoked(cli.app, "render", "--out", str(tmp_path))
    page = (tmp_path / "RAY.md").read_text(encoding="utf-8")
    assert "| a call of 4 x 32 tokens over the local score | 4.32 | 2.5 | ms | at most 3: met |  |" in page
    assert "| 8 callers |  | 5 | x | at least 8: missed | noisy |" in page


@pytest.mark.slow
def test_the_smallest_run(tmp_path: Path) -> None:
    """Run all parts with both libraries in actors, then one part again."""
    invoked(cli.app, "run", "--quick", "--out", str(tmp_path))
    first = RayRun.load(tmp_path)
    assert all(figure.value == 0 for figure in first.figures if figure.what.endswith("lost or wrong"))
    assert {path.name for path in tmp_path.iterdir()} == {"ray.json", "RAY.md"}
    invoked(cli.app, "run", "--quick", "--only", "local", "--out", str(tmp_path))
    assert [figure.what for figure in RayRun.load(tmp_path).figures] == [figure.what for figure in first.figures]
