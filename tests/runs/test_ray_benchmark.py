"""The benchmark of the service: seconds of processes, targets, the page and the commands."""

import os
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

for name in ("rich", "ray", "typer"):
    pytest.importorskip(name)
from benchmarks.ray import __main__ as cli, processor as processor_module  # noqa: E402
from benchmarks.ray.callers import Window, quantile  # noqa: E402
from benchmarks.ray.comparison import Bytes, Calls, Case, Line  # noqa: E402
from benchmarks.ray.faults import Fault  # noqa: E402
from benchmarks.ray.overhead import Overhead  # noqa: E402
from benchmarks.ray.processor import CALLER, MODEL, OTHERS, Processor, processor_times  # noqa: E402
from benchmarks.ray.results import RayRun  # noqa: E402
from cli_files import invoked  # noqa: E402


def test_calls_of_a_window_and_quantiles() -> None:
    """Three calls and a quarter of one in two seconds; one that came too late."""
    window = Window(2.0, [(0.0, 0.5), (0.5, 1.0), (1.0, 1.5), (1.5, 3.5), (2.5, 3.5)])
    assert window.throughput == pytest.approx(3.25 / 2)
    assert window.latencies == [0.5, 0.5, 0.5, 2.0, 1.0]
    assert (quantile([4.0, 1.0, 3.0, 2.0], 0.5), quantile([4.0, 1.0, 3.0, 2.0], 0.99)) == (3.0, 4.0)


def test_seconds_of_processes_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten ticks of a clock are taken between the two looks by each process, one more by each that has a higher id."""
    tick, windows = os.sysconf("SC_CLK_TCK"), count(1)
    names = ["ray::Caller.transform", "ray::Replica", "/bin/raylet/raylet\0--ray", "ray::IDLE", "other\0ray", "gone"]

    def window(*_: object, callers: int, seconds: float) -> Window:
        assert (callers, seconds) == (8, 5.0)
        write(10 * next(windows))
        return Window(5.0, [(0.0, 1.0)] * 4)

    def write(ticks: int) -> None:
        (tmp_path / "stat").write_text(f"cpu  9 9 9 {100 + ticks} 9 9\n")
        for i, name in enumerate(names[:-1]):
            (tmp_path / str(i)).mkdir(exist_ok=True)
            (tmp_path / str(i) / "cmdline").write_text(f"{name}\0")
            numbers = f"S {'1 ' * 10}{7 + ticks * (i + 1)} {3 + ticks} 0"
            (tmp_path / str(i) / "stat").write_text(f"{i} (a ) name) {numbers}")
        (tmp_path / str(len(names))).mkdir(exist_ok=True)  # ended since it was listed

    write(0)
    monkeypatch.setattr(processor_module, "_PROC", tmp_path)
    monkeypatch.setattr(processor_module, "time", SimpleNamespace(monotonic=count(0.0, 5.0).__next__))
    callers: Any = SimpleNamespace(window=window)
    _, ours = processor_times(callers, [Case("both", 8, 32)], seconds=5.0, on_window=lambda _: None)
    per_call = {CALLER: 20 / tick / 4, MODEL: 30 / tick / 4, OTHERS: (40 + 50) / tick / 4}
    assert ours.seconds == pytest.approx(per_call)
    assert ours.idle == pytest.approx(10 / tick / 5 / os.cpu_count())  # type: ignore[operator]
    assert ours.busy == pytest.approx(30 / tick / 4 * 4 / 5)


def run() -> RayRun:
    case = Case("both", 8, 32)
    line = Line(case, Calls([2.0, 4.0, 5.0], 0.5, 0.9, 11), Calls([10.0, 14.0, 40.0], 0.1, 0.2, 60))
    one = replace(line, case=replace(case, callers=1))
    versions = {"torchrl": "0.14.1", "torchrl_llm_kl": "0.1.0"}
    place = ("make bench-ray", {"quick": "no"}, {"cores": "2"}, versions, "a model")
    return RayRun(
        *place,
        difference=1e-6,
        lines=(one, line),
        processor=(Processor(case, "here", 100.0, {CALLER: 0.002, MODEL: 0.0045, OTHERS: 0.001}, 0.25),),
        bytes=(Bytes("both", 32, "torchrl", 100, 200, 9_000_100, 9_000_200), Bytes("both", 32, "here", 10, 20, 10, 21)),
        overheads=(
            Overhead(32, local=0.005, remote=0.0075, stages={"there": 0.001, "back": 0.0015}, bare=0.006),
            Overhead(512, local=0.05, remote=0.054, stages={"there": 0.002, "back": 0.002}, bare=0.051),
        ),
        faults=(Fault("a kill", 1200, 1, 0, 2.34, "2 restarts", 3.2),),
    )


def test_targets_saved_loaded_and_merged(tmp_path: Path) -> None:
    """Ratios of rounds are 5, 3.5 and 8: the median, and that of eight callers only."""
    before = run()
    assert [(goal.short, goal.found, goal.target, goal.met) for goal in before.goals] == [
        ("ms", pytest.approx(2.5), 3.0, True),
        ("ms", pytest.approx(4.0), 3.0, False),
        ("faster", 5.0, 8.0, False),
        ("bytes", 1.0, 0.0, False),
        ("lost", 1.0, 0.0, False),
        ("wrong", 0.0, 0.0, True),
    ]
    before.save(tmp_path)
    assert RayRun.load(tmp_path) == before
    newer = replace(before, command="other", lines=(), bytes=(), overheads=before.overheads[:1])
    assert before.updated(newer) == replace(before, overheads=before.overheads[:1])
    assert before.same_place(newer)
    assert not before.same_place(replace(before, machine={"cores": "3"}))


def test_render(tmp_path: Path) -> None:
    """Where nothing is stored, it asks for a run first."""
    assert "run first" in invoked(cli.app, "render", "--out", str(tmp_path), code=2)
    run().save(tmp_path)
    invoked(cli.app, "render", "--out", str(tmp_path))
    page = (tmp_path / "RAY.md").read_text(encoding="utf-8")
    assert "| both | 8 | 4 x 32 | 4.0 | 14.0 | 1,792 | 5.0x | 500/900 | 100/200 |" in page
    assert "| ms of a call over a local scorer, 512 tokens | 4 | at most 3 | missed |" in page
    assert "| back | 1.50 | 2.00 |" in page
    assert "| both | 8 | 4 x 32 | here | 100.0 | 2.0 | 4.5 | 1.0 | 0.45 | 25% |" in page
    assert "| a kill | 1,200 | 1 | 0 | 2.3 | 3 | 2 restarts |" in page


@pytest.mark.slow
def test_the_smallest_run(tmp_path: Path) -> None:
    """Both libraries in actors, agreeing; every part; then one part again."""
    invoked(cli.app, "run", "--quick", "--out", str(tmp_path))
    found = RayRun.load(tmp_path)
    assert found.difference < 1e-4  # type: ignore[operator]
    cases = {(line.case.served, line.case.callers) for line in found.lines}
    assert cases == {(served, callers) for served in ("both", "reference") for callers in (1, 2)}
    assert all(line.ours.count > 0 and line.theirs.count > 0 for line in found.lines)
    for row in found.bytes:
        more = row.sent_unrelated + row.received_unrelated - row.sent - row.received
        assert more == 0 if row.side == "here" else more > 2 * 8 * 2**20
    assert found.overheads[0].remote > 0
    assert [seconds > 0 for seconds in found.overheads[0].stages.values()] == [True] * 5
    assert [(fault.lost, fault.wrong) for fault in found.faults] == [(0, 0)] * 6
    assert {path.name for path in tmp_path.iterdir()} == {"ray.json", "RAY.md"}
    invoked(cli.app, "run", "--quick", "--only", "overhead", "--out", str(tmp_path))
    newer = RayRun.load(tmp_path)
    assert newer.overheads != found.overheads
    assert newer.lines == found.lines
