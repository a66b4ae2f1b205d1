"""How many replicas: the search, the fit and the commands, on figures that are known."""

from __future__ import annotations

import inspect
from dataclasses import asdict, replace
from pathlib import Path

import pytest

for name in ("matplotlib", "rich", "ray"):
    pytest.importorskip(name)
typer_testing = pytest.importorskip("typer.testing")
from benchmarks.ray import __main__ as cli  # noqa: E402
from benchmarks.ray.calibration import Batches, Calibration, Check, fit  # noqa: E402
from benchmarks.ray.callers import Window  # noqa: E402
from benchmarks.ray.capacity import Answer, Limits, Work, answers_for, replicas_needed, with_model  # noqa: E402
from benchmarks.ray.comparison import Bytes, Calls, Case, Line  # noqa: E402
from benchmarks.ray.events import Observed, Replica, quantile, simulate  # noqa: E402
from benchmarks.ray.overhead import Overhead  # noqa: E402
from benchmarks.ray.results import RayRun  # noqa: E402
from torchrl_llm_kl.service import ScoringService  # noqa: E402

REPLICA = Replica(fixed=0.004, each=0.0005, rate=30_000, max_wait=0.003)


def no_link(random: object) -> float:
    return 0.0


def lost(work: Work, collectors: int, replicas: int) -> float:
    world = work.world(collectors, replicas, REPLICA, no_link)
    return simulate(world, requests=20_000, warm_up=3000, seed=5).lost


@pytest.mark.parametrize(("collectors", "speed"), [(20, 1000.0), (60, 5000.0)])
def test_enough_and_no_more_than_needed(collectors: int, speed: float) -> None:
    """Seen with another seed, and more requests: within the limit, and over it with a tenth fewer."""
    work, limits = Work(speed), Limits(lost=0.04)
    answer = replicas_needed(work, collectors, REPLICA, no_link, limits)
    assert answer.replicas is not None
    assert answer.replicas > 1
    allowed = answer.lost_alone + 0.04
    assert answer.lost <= allowed
    assert lost(work, collectors, answer.replicas) < allowed + 0.004
    assert lost(work, collectors, answer.replicas - max(1, answer.replicas // 10)) > allowed - 0.004


def test_an_idle_service_of_its_own() -> None:
    """One collector: 3072 tokens around 30,000 a second and 4.5 ms, beside 2.048 s of generation."""
    answer = replicas_needed(Work(1000.0), 1, REPLICA, no_link, Limits())
    seconds = 3072 / 30_000 + 0.0045
    assert answer.replicas == 1
    assert (answer.lost, answer.lost_alone) == pytest.approx([seconds / (seconds + 2.048)] * 2, rel=0.03)
    assert answer.latency_p50 == pytest.approx(seconds, rel=0.03)
    assert answer.requests_per_batch == 1


def test_a_limit_that_no_number_keeps() -> None:
    """The largest requests take half as long again as the mean one, whatever waits."""
    work, alone = Work(1000.0), 1.5 * 3072 / 30_000 + 0.0045
    assert replicas_needed(work, 3, REPLICA, no_link, Limits(p99=0.9 * alone)).replicas is None
    found = replicas_needed(work, 3, REPLICA, no_link, Limits(p99=3 * alone))
    assert found.replicas == 1
    assert found.latency_p99 <= 3 * alone


def test_the_guess_does_not_matter() -> None:
    one, other = (replicas_needed(Work(1000.0), 20, REPLICA, no_link, Limits(), guess=guess) for guess in (1, 40))
    assert one.replicas == other.replicas


def test_more_collectors_and_faster_ones_need_more() -> None:
    seen: list[Answer] = []
    answers = answers_for([200.0, 2000.0], [100, 10, 300], REPLICA, no_link, Limits(), on_answer=seen.append)
    assert seen == answers
    assert [(a.tokens_per_second, a.collectors) for a in answers] == [
        (speed, count) for speed in (200.0, 2000.0) for count in (10, 100, 300)
    ]
    needed = [a.replicas for a in answers]
    assert needed == sorted(needed[:3]) + sorted(needed[3:])
    assert all(few < many for few, many in zip(needed[1:3], needed[4:], strict=True))


def test_another_model() -> None:
    assert with_model(REPLICA, fixed=None, rate=None) == REPLICA
    assert with_model(REPLICA, fixed=0.02, rate=1e6) == replace(REPLICA, fixed=0.02, rate=1e6)


# ------------------------------------------------------------------ the fit


def batches(fixed: float, each: float, token: float) -> list[Batches]:
    sizes = [(1.0, 100.0), (1.0, 1000.0), (3.0, 300.0), (3.5, 4000.0)]
    return [Batches(7, r, t, fixed + each * r + token * t) for r, t in sizes]


def test_the_fit_finds_what_is_there() -> None:
    """A call alone takes 3 + 0.5 + 200 / 50 ms in the model, and 1 to 2 ms beside it."""
    alone = [0.0085, 0.0095, 0.009]
    found = fit(batches(3e-3, 0.5e-3, 1 / 50_000), alone, tokens=200)
    replica = found.model()[0]
    assert (replica.fixed, replica.each, replica.rate) == pytest.approx((3e-3, 0.5e-3, 50_000))
    assert found.largest_error == pytest.approx(0, abs=1e-9)
    assert (min(found.links), max(found.links)) == pytest.approx((1e-3, 2e-3))
    assert quantile(found.links, 0.5) == pytest.approx(1.5e-3)
    defaults = inspect.signature(ScoringService).parameters
    assert (replica.max_wait, replica.max_tokens) == (defaults["max_wait"].default, defaults["max_tokens"].default)


def test_the_fit_has_nothing_negative() -> None:
    found = fit(batches(3e-3, -0.5e-3, 1 / 50_000), [0.1], tokens=200)
    assert found.replica["each"] == 0
    assert found.replica["fixed"] > 0
    assert found.largest_error > 0.01


# ------------------------------------------------------------------ figures


def test_calls_of_a_window() -> None:
    """Three calls and a quarter of one in two seconds; one that came too late."""
    window = Window(2.0, [(0.0, 0.5), (0.5, 1.0), (1.0, 1.5), (1.5, 3.5), (2.5, 3.5)])
    assert window.throughput == pytest.approx(3.25 / 2)
    assert window.latencies == [0.5, 0.5, 0.5, 2.0, 1.0]


def test_quantiles_of_what_was_observed() -> None:
    found = Observed(10.0, [1.0, 2.0, 3.0, 4.0], 30.0, [], 0.5, 0, 4, 4)
    assert (found.throughput, found.latency, found.lost) == (0.4, 2.5, 0.25)
    assert (found.quantile(0.5), found.quantile(0.99)) == (3.0, 4.0)


def run() -> RayRun:
    case = Case("both", 8, 32)
    line = Line(case, Calls([2.0, 4.0, 5.0], 0.5, 0.9, 11), Calls([10.0, 14.0, 40.0], 0.1, 0.2, 60))
    one = replace(line, case=replace(case, callers=1))
    return RayRun(
        "make bench-ray",
        {"quick": "no"},
        {"cores": "2"},
        {"torchrl": "0.14.1", "torchrl_llm_kl": "0.1.0"},
        "a model",
        difference=1e-6,
        lines=(one, line),
        bytes=(Bytes("both", 32, "torchrl", 100, 200, 9_000_100, 9_000_200), Bytes("both", 32, "here", 10, 20, 10, 21)),
        overheads=(
            Overhead(32, local=0.005, remote=0.0075, stages={"there": 0.001, "back": 0.0015}, bare=0.006),
            Overhead(512, local=0.05, remote=0.054, stages={"there": 0.002, "back": 0.002}, bare=0.051),
        ),
        calibration=Calibration(asdict(REPLICA), [0.001, 0.002], 0.1),
        checks=(Check(2, 0.02, 50.0, 60.0, 0.02, 0.015, 0.04, 0.03),),
        answers=tuple(answers_for([1000.0, 2000.0], [1, 10], REPLICA, no_link, Limits())),
    )


def test_targets() -> None:
    """Ratios of rounds are 5, 3.5 and 8: the median, and that of eight callers only."""
    found = [(goal.short, goal.found, goal.target, goal.met) for goal in run().goals]
    assert found == [
        ("ms", pytest.approx(2.5), 3.0, True),
        ("ms", pytest.approx(4.0), 3.0, False),
        ("faster", 5.0, 4.0, True),
        ("bytes", 1.0, 0.0, False),
    ]
    assert run().checks[0].errors == pytest.approx((0.2, -0.25))


def test_saved_loaded_and_merged(tmp_path: Path) -> None:
    before = run()
    before.save(tmp_path)
    assert RayRun.load(tmp_path) == before
    newer = replace(before, command="other", lines=(), bytes=(), calibration=None, overheads=before.overheads[:1])
    merged = before.updated(newer)
    assert merged == replace(before, overheads=before.overheads[:1])
    assert before.same_place(newer)
    assert not before.same_place(replace(before, machine={"cores": "3"}))


# ------------------------------------------------------------------ the commands


def invoke(*arguments: str) -> typer_testing.Result:
    return typer_testing.CliRunner().invoke(cli.app, arguments)


def test_render_and_ask(tmp_path: Path) -> None:
    run().save(tmp_path)
    rendered = invoke("render", "--out", str(tmp_path))
    assert rendered.exit_code == 0, rendered.output + repr(rendered.exception)
    page = (tmp_path / "RAY.md").read_text(encoding="utf-8")
    assert "| both | 8 | 4 x 32 | 4.0 | 14.0 | 1,792 | 5.0x | 500/900 | 100/200 |" in page
    assert "| ms of a call over a local scorer, 512 tokens | 4 | at most 3 | missed |" in page
    assert "| back | 1.50 | 2.00 |" in page
    assert "| 2 | 20 | 50.0 | 60.0 | +20% | 20.0 | 15.0 | -25% | 40.0 | 30.0 |" in page
    assert (tmp_path / "ray_capacity.png").stat().st_size > 10_000

    question = ("capacity", "--collectors", "20", "--tokens-per-second", "1000", "--out", str(tmp_path))
    asked = invoke(*question)
    assert asked.exit_code == 0, asked.output
    links = run().calibration.model()[1]  # type: ignore[union-attr]
    assert f" {replicas_needed(Work(1000.0), 20, REPLICA, links, Limits()).replicas} " in asked.output
    refused = invoke(*question, "--p99-ms", "1")
    assert refused.exit_code == 1
    assert "too slow" in " ".join(refused.output.split())
    faster = invoke(*question, "--model-tokens-per-second", "1000000", "--p99-ms", "100")
    assert faster.exit_code == 0, faster.output


def test_nothing_stored(tmp_path: Path) -> None:
    for command in (["render"], ["capacity", "--collectors", "1", "--tokens-per-second", "1"]):
        result = invoke(*command, "--out", str(tmp_path))
        assert result.exit_code == 2
        assert "run first" in " ".join(result.output.split())


@pytest.mark.slow
def test_the_smallest_run(tmp_path: Path) -> None:
    """Both libraries in actors, agreeing; every part; then one part again."""
    result = invoke("run", "--quick", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output + repr(result.exception)
    found = RayRun.load(tmp_path)
    assert found.difference is not None
    assert found.difference < 1e-4
    assert {(line.case.served, line.case.callers) for line in found.lines} == {
        (served, callers) for served in ("both", "reference") for callers in (1, 2)
    }
    assert all(line.ours.count > 0 and line.theirs.count > 0 for line in found.lines)
    for row in found.bytes:
        more = row.sent_unrelated + row.received_unrelated - row.sent - row.received
        assert more == 0 if row.side == "here" else more > 2 * 8 * 2**20
    assert found.overheads[0].remote > 0
    assert len(found.overheads[0].stages) == 5
    assert all(seconds > 0 for seconds in found.overheads[0].stages.values())
    assert [check.clients for check in found.checks] == [1, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"ray.json", "RAY.md", "ray_capacity.png"}

    again = invoke("run", "--quick", "--only", "overhead", "--out", str(tmp_path))
    assert again.exit_code == 0, again.output
    newer = RayRun.load(tmp_path)
    assert newer.overheads != found.overheads
    assert newer.lines == found.lines
    assert newer.answers == found.answers
