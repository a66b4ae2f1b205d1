"""Tests of the benchmarks: each workload at its smallest size, the report, and verdicts from known numbers."""

import io
import json
from dataclasses import replace

import pytest
import torch

for name in ("matplotlib", "rich", "tokenizers", "typer"):
    pytest.importorskip(name)
from rich.console import Console  # noqa: E402

from benchmarks import __main__ as cli, images, sampling  # noqa: E402
from benchmarks.agreement import DisagreementError, largest_difference  # noqa: E402
from benchmarks.measure import Contender, HostMeter, Measured, alternate  # noqa: E402
from benchmarks.models import QUICK  # noqa: E402
from benchmarks.results import Outcome, Result, Run, Targets, Turns  # noqa: E402
from benchmarks.workloads import WORKLOADS, imports, kl_computation  # noqa: E402
from cli_files import invoked  # noqa: E402


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


SMALLEST = cli.Settings(repeats=1, quick=True)


@pytest.mark.slow
def test_imports_in_fresh_processes():
    """Importing only the package takes little time."""
    found = WORKLOADS["f"].measure(SMALLEST)
    assert found.ours.seconds < 0.05 < found.theirs.seconds


@pytest.mark.slow
def test_every_workload_runs_and_renders_again(tmp_path, monkeypatch):
    monkeypatch.setattr(imports, "BEFORE", "")  # each real import takes seconds
    monkeypatch.setattr(imports, "STATEMENTS", {"torchrl": ["import uuid"], "here": ["import cmath", "import uuid"]})
    place, again = ("--out", str(tmp_path)), ("run", "--only", "e", "--quick", "--threads", "1")
    invoked(cli.app, "run", "--quick", "--repeats", "1", "--threads", "1", *place)
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "RESULTS.md", "results.png"}
    run, page, data = Run.load(tmp_path), (tmp_path / "RESULTS.md").read_text(), (tmp_path / "results.json").read_text()
    assert [result.name for result in run.results] == list(WORKLOADS)
    for result in run.results:
        assert f"| **{result.name}** | {result.title} |" in page
        assert result.outcome.ours.seconds > 0
        largest = 1e-2 if result.name == "bf16" else 1e-4
        assert result.outcome.difference is None or result.outcome.difference < largest
    invoked(cli.app, "render", *place)
    assert (tmp_path / "RESULTS.md").read_text() == page
    # One workload again: the others stay, in their order.
    invoked(cli.app, *again, "--repeats", "2", *place)
    pairs = list(zip(run.results, Run.load(tmp_path).results, strict=True))
    assert [new.name for _, new in pairs] == list(WORKLOADS)
    assert {new.name for old, new in pairs if old != new} == {"e"}
    # Not beside figures of another place.
    moved = json.loads(data)
    moved["machine"]["cores"] = "1000"
    (tmp_path / "results.json").write_text(json.dumps(moved))
    assert "--out" in invoked(cli.app, *again, *place, code=2)


def test_missing_devices_and_disagreeing_libraries(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in invoked(cli.app, "run", "--device", "cuda", code=1)
    assert "'z'" in invoked(cli.app, "run", "--only", "z", code=2)
    # negative control: ours with another coefficient; too far, NaN, other shapes, nothing to compare
    ours = kl_computation.KLComputation
    monkeypatch.setattr(kl_computation, "KLComputation", lambda coeff: ours(coeff=2 * coeff))
    with pytest.raises(DisagreementError, match="reward"):
        WORKLOADS["e"].measure(SMALLEST)
    for found, expected in (([1.0, 2.2], [1, 2]), ([float("nan"), 2.0], [1, 2]), ([1.0], [1, 2]), ([], [])):
        with pytest.raises(DisagreementError, match="KL"):
            largest_difference(torch.tensor(found), torch.tensor(expected).float(), tolerance=0.1, what="KL")
    assert largest_difference(torch.tensor([1.0, 2.25]), torch.tensor([1.0, 2.0]), tolerance=0.5, what="KL") == 0.25


def test_alternation_and_peak():
    seen = []
    contenders = {
        "small": Contender(lambda given: seen.append(given), prepare=lambda: "fresh"),
        "large": Contender(lambda _: torch.ones(24 * 2**20)),  # 96 MiB: malloc keeps up to 32 MiB for the next
    }
    found = alternate(contenders, HostMeter(), repeats=2, warm_up=1, on_run=seen.append)
    assert seen == ["small", "fresh", "large"] * 3
    assert [len(measured.all_seconds) for measured in found.values()] == [2, 2]
    if found["large"].peak_mib is not None:
        assert 96 <= found["large"].peak_mib < 112
        assert found["small"].peak_mib < 8


def result(targets: Targets) -> Result:
    """A result 3 times faster with 16 times less memory. A token takes 1.5 times as long in the last turn as in the first."""
    theirs, ours = Measured([9.0, 6.0, 5.0], [160.0, 1.0, 170.0]), Measured([2.0, 1.0, 7.0], [10.0, 30.0, 5.0])
    turns = Turns([100, 200], theirs=[1.0, 8.0], ours=[1.0, 3.0])
    return Result("x", "title", targets, Outcome("work", theirs, ours, difference=0.0, turns=turns))


def test_verdicts_and_newer_results_replace_older_ones(tmp_path):
    near, far = Targets(faster=3, smaller=16, growth=1.5), Targets(faster=3.1, smaller=16.1, growth=1.4)
    for targets, met in ((near, [True] * 3), (far, [False] * 3), (Targets(), [])):
        goals = result(targets).goals
        assert [goal.met for goal in goals] == met
        assert [goal.found for goal in goals] == [3.0, 16.0, 1.5][: len(met)]
    assert result(Targets()).quartiles == pytest.approx((2.607, 5.25), abs=1e-3)  # of 4.5, 6 and 5 / 7
    run = Run("make bench", {}, {}, {}, (result(Targets()), replace(result(Targets()), name="y")))
    newer = replace(run, command="other", results=(replace(result(Targets(faster=9)), name="y"),))
    run.updated(newer).save(tmp_path)
    loaded = Run.load(tmp_path)
    assert loaded.command == "make bench"
    assert [(r.name, r.targets.faster) for r in loaded.results] == [("x", None), ("y", 9)]
    assert loaded.results[0] == run.results[0]


def test_the_images_benchmark_counts_encoded_images_and_agrees() -> None:
    found = images.measure(layers=1, hidden=64, groups=2, answers=3, length=4, repeats=1)
    assert [*found.encoded.values()] == [{images.OWN: 6, images.OURS: 2}] * 2
    assert found.difference < 1e-4
    assert images.table(found).row_count == 4


def test_the_sampling_benchmark_has_the_requested_entropy_and_a_row_for_each_kind() -> None:
    found = sampling.measure(QUICK, 32, 2.0, 2)
    assert found.entropy == pytest.approx(2.0, abs=0.05)
    shown = io.StringIO()
    Console(width=80, file=shown).print(sampling.table(found))
    for name in (sampling.PLAIN, *sampling.KINDS):
        ratio = found.times[name].seconds / found.times[sampling.PLAIN].seconds
        assert any(name in line and f"{ratio:.2f}" in line for line in shown.getvalue().splitlines())
