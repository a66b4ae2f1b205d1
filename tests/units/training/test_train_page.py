"""Pages about runs: coordinates, tables and texts by hand."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("omegaconf")
from cli_files import write_jsonl
from torchrl_llm_kl.training import ConfigError, compare_runs
from torchrl_llm_kl.training._page import Chart, Line, RunFiles, charts_of, thinned, ticks
from torchrl_llm_kl.training._report import read_figures


def test_a_chart_is_scaled_to_its_picture() -> None:
    """By hand: the axes end at 52 and 410, and at 10 and 168. A twentieth of the range is free above and below."""
    placed = Chart("kl", lines=[Line([(0.0, 0.0), (10.0, 1.0), (20.0, 0.5)], "line")], marks=[(5, "a"), (99, "b")])
    values = placed.placed()
    (line,) = values["lines"]  # type: ignore[misc]
    one = 158 / 1.1
    assert [y for _, y in line.points] == pytest.approx([168 - 0.05 * one, 10 + 0.05 * one, 89])
    assert line.path == "52.0,160.8 231.0,17.2 410.0,89.0"
    assert values["marks"] == [(141.5, "a")]
    assert [text for _, text in values["y_ticks"]] == ["0", "0.5", "1"]  # type: ignore[attr-defined]
    assert [text for _, text in values["x_ticks"]] == ["0", "5", "10", "15", "20"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("values", [[0.0], [3.0, 3.0], [-2.0, -2.0]])
def test_a_constant_is_drawn_in_the_middle(values: list[float]) -> None:
    placed = Chart("x", lines=[Line(list(enumerate(values)), "line")]).placed()
    assert {round(y, 3) for _, y in placed["lines"][0].points} == {89.0}  # type: ignore[index]


def test_ticks_and_thinned_points() -> None:
    assert ticks(-1.0, 1.0) == pytest.approx([-1.0, -0.5, 0.0, 0.5, 1.0])
    assert ticks(1e-6, 3e-6) == pytest.approx([1e-6, 1.5e-6, 2e-6, 2.5e-6, 3e-6])
    points = [(float(i), 2.0 * i) for i in range(1000)]
    few = thinned(points)
    assert (len(few), few[0], few[-1]) == (334, (1.0, 2.0), (999.0, 1998.0))
    assert thinned(points[:400]) == points[:400]


def test_a_line_that_is_still_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert read_figures(path) == [{"step": 0}, {"step": 1}]
    path.write_text('{"st')
    assert read_figures(path) == []


def run_in(folder: Path, kls: list[float], lr: str, *, target: str = "null") -> Path:
    folder.mkdir()
    write_jsonl(
        folder / "metrics.jsonl", [{"step": i, "reward": i / 10, "kl": kl, "lr": 1.0} for i, kl in enumerate(kls)]
    )
    if target != "null":
        write_jsonl(folder / "evaluations.jsonl", [{"step": 0, "reward": 0.25}, {"step": 2, "reward": 0.75}])
    (folder / "config.yaml").write_text(
        f"optimizer: {{lr: {lr}, name: adamw}}\nkl: {{target: {target}}}\nrun: {{steps: 9, out: {folder}}}\n"
    )
    return folder


def test_runs_beside_each_other(tmp_path: Path) -> None:
    one = run_in(tmp_path / "one", [0.0, 0.4], "0.1", target="0.5")
    two = run_in(tmp_path / "two", [*[1.0] * 4, *[3.0] * 10], "0.2")
    figures, settings = compare_runs([one, two], tmp_path / "page.html")
    assert figures[1:] == [
        [str(one), "2/9", "0.05", "0.25", "0.75", "0.2", "—"],
        [str(two), "14/9", "0.85", "—", "—", "3", "—"],  # means of the last ten steps
    ]
    assert settings == [["setting", str(one), str(two)], ["optimizer.lr", "0.1", "0.2"], ["kl.target", "0.5", "null"]]
    page = (tmp_path / "page.html").read_text()
    kl = page[
        page.index("KL to the reference or the teacher") : page.index(
            "</figure>", page.index("KL to the reference or the teacher")
        )
    ]
    lines = re.findall(r'<polyline class="(\w+ s\d)" points="([^"]*)"><title>([^<]*)', kl)
    assert [(style, text.removeprefix(f"{tmp_path}/")) for style, _, text in lines] == [
        ("line s0", "one: 0.4, mean of the last 2 0.2"),
        ("target s0", "target: 0.5 nats"),
        ("line s1", "two: 3, mean of the last 10 3"),
    ]
    # Steps 0 to 13 are 358 units wide, so step 1 of the first run is at 52 + 358 / 13.
    assert lines[0][1].split()[1].split(",")[0] == f"{52 + 358 / 13:.1f}"
    assert len(lines[2][1].split()) == 14
    assert "held-out prompts, step 2: 0.75" in page
    assert 'http-equiv="refresh"' not in page
    assert "<script" not in page
    assert compare_runs([one, one])[1] == [["setting", str(one)]]
    with pytest.raises(ConfigError, match=r"checkpoints has no metrics\.jsonl and config\.yaml: expected the run\.out"):
        compare_runs([one, tmp_path / "checkpoints"])


def test_changes_are_marked_and_the_target_begins_with_its_change() -> None:
    rows = [{"step": step, "kl": 1.0} for step in range(3)]
    changes: Any = [
        {"step": step, "key": key} for step, key in ((1, "kl.target"), (2, "optimizer.lr"), (3, "kl.place"))
    ]
    ((chart,), _) = charts_of([RunFiles("one", {"kl.target": 0.5}, rows, [], changes)])
    assert chart["marks"] == [(231.0, "kl.target"), (410.0, "optimizer.lr")]
    lines: Any = chart["lines"]
    assert [[x for x, _ in line.points] for line in lines] == [
        [52.0, 231.0, 410.0],
        [52.0, 231.0, 410.0],
        [231.0, 410.0],
    ]


def test_figures_of_turns_and_tools_are_main_charts() -> None:
    rows = [
        {"step": n, "reward": 0.5, "ESS": 1.0, "turns": 1.5, "tools/add": 0.4, "tool_errors": 0.1} for n in range(2)
    ]
    main, rest = charts_of([RunFiles("one", {}, rows, [])])
    assert [chart["figure"] for chart in main] == ["reward", "turns", "tools/add", "tool_errors"]
    assert [chart["figure"] for chart in rest] == ["ESS"]


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "one", [0.5, float("nan"), float("inf"), 1.0], "0.1")
    assert "NaN" in (folder / "metrics.jsonl").read_text()
    assert RunFiles.read(folder).points("kl") == [(0, 0.5), (3, 1.0)]
    assert json.dumps(charts_of([RunFiles.read(folder)])[0][1]["last"]) == '"1"'
