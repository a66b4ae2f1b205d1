"""How many replicas: the event model beside queues whose answers are known; the search, the fit and the commands."""

import inspect
import math
import os
from collections import Counter
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

for name in ("matplotlib", "rich", "ray", "typer"):
    pytest.importorskip(name)
from benchmarks.ray import __main__ as cli, processor as processor_module  # noqa: E402
from benchmarks.ray.calibration import Batches, Calibration, Check, fit  # noqa: E402
from benchmarks.ray.callers import Window  # noqa: E402
from benchmarks.ray.capacity import Answer, Limits, Work, answers_for, replicas_needed, with_model  # noqa: E402
from benchmarks.ray.comparison import Bytes, Calls, Case, Line  # noqa: E402
from benchmarks.ray.events import Draw, Observed, Replica, World, quantile, simulate  # noqa: E402
from benchmarks.ray.faults import Fault  # noqa: E402
from benchmarks.ray.overhead import Overhead  # noqa: E402
from benchmarks.ray.processor import CALLER, MODEL, OTHERS, Processor, processor_times  # noqa: E402
from benchmarks.ray.results import RayRun  # noqa: E402
from cli_files import invoked  # noqa: E402
from torchrl_llm_kl.service import ScoringService  # noqa: E402

ALONE = 1e-9  # a limit of tokens that no two requests fit into


def constant(value: float) -> Draw:
    return lambda random: value


def exponential(mean: float) -> Draw:
    return lambda random: random.expovariate(1 / mean)


def in_turn(*values: float) -> Draw:
    left = iter(values)
    return lambda random: next(left)


@pytest.mark.parametrize(("collectors", "think"), [(4, 2.0), (20, 10.0)])
def test_closed_queue_with_exponential_times(collectors: int, think: float) -> None:
    """One request at a time, its size exponential: the machine repair model M/M/1//N, which has a closed form.

    States are 0..N broken machines; the one repairer needs 1.
    """
    world = World(collectors, exponential(think), exponential(1.0), 1, Replica(0.0, 0.0, 1.0, max_tokens=ALONE))
    found = simulate(world, requests=20_000, warm_up=2000)
    weights = [math.perm(collectors, broken) / think**broken for broken in range(collectors + 1)]
    throughput = 1 - weights[0] / sum(weights)
    response = collectors / throughput - think
    assert (found.throughput, found.busy) == pytest.approx((throughput, throughput), rel=0.03)
    assert found.latency == pytest.approx(response, rel=0.04)
    assert found.lost == pytest.approx(response / (response + think), rel=0.03)


def many(arrivals: float, replicas: int, max_tokens: float) -> World:
    """So many collectors that they ask as a Poisson stream; a batch takes a second."""
    replica = Replica(fixed=1.0, each=0.0, rate=math.inf, max_tokens=max_tokens)
    return World(1000, exponential(1000 / arrivals), constant(1.0), replicas, replica)


@pytest.mark.parametrize("arrivals", [0.5, 2.0])
def test_batches_without_a_limit_take_all_that_came_meanwhile(arrivals: float) -> None:
    """While a batch is served a Poisson number of requests arrive, and make the next; after none, the first to come does."""
    found = simulate(many(arrivals, replicas=1, max_tokens=math.inf), requests=60_000, warm_up=5000)
    sizes, total = Counter(size for size, _ in found.batches), len(found.batches)
    assert sum(s * n for s, n in sizes.items()) / total == pytest.approx(arrivals + math.exp(-arrivals), rel=0.02)
    assert sizes[1] / total == pytest.approx((1 + arrivals) * math.exp(-arrivals), rel=0.03)
    assert sizes[2] / total == pytest.approx(arrivals**2 / 2 * math.exp(-arrivals), rel=0.05)


@pytest.mark.parametrize(("replicas", "rho"), [(1, 0.7), (3, 0.6)])
def test_many_collectors_ask_as_a_poisson_stream(replicas: int, rho: float) -> None:
    """M/D/1: the mean wait is rho / (2 (1 - rho)) services (Pollaczek and Khinchine); a hash divides the stream.

    Each replica is a queue of its own with its share of the requests, not one server of a common queue.
    """
    found = simulate(many(rho * replicas, replicas, ALONE), requests=60_000, warm_up=5000)
    assert (found.throughput, found.busy) == pytest.approx((rho * replicas, rho), rel=0.02)
    assert found.latency == pytest.approx(1 + rho / (2 * (1 - rho)), rel=0.05)


def test_a_world_of_one_and_of_the_same_seed_by_hand() -> None:
    """2 of fixed, 3 for the request, 8 tokens at 4 a second, 1 on the way: 8 seconds; nobody to wait for."""
    replica = Replica(fixed=2.0, each=3.0, rate=4.0, max_wait=100.0)
    found = simulate(World(1, constant(12.0), constant(8.0), 1, replica, link=constant(1.0)), requests=10)
    assert found.latencies == pytest.approx([8.0] * 10)
    assert set(found.batches) == {(1, 8.0)}
    assert found.lost == pytest.approx(8 / 20)
    # collectors begin anywhere in their thinking: half of them have asked after half of the time
    world = World(1000, constant(10.0), constant(1.0), 1, Replica(0.0, 0.0, math.inf))
    assert simulate(world, requests=500).seconds == pytest.approx(5.0, rel=0.15)
    world = World(5, exponential(1.0), exponential(1.0), 2, Replica(0.1, 0.0, 10.0))
    one, again, other = (simulate(world, requests=200, seed=seed) for seed in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize(
    ("max_tokens", "batches"),
    [
        (100.0, [(2, 20.0)]),  # both are there: no further wait
        (19.0, [(1, 10.0), (1, 10.0)]),  # no room for two
        (20.0, [(2, 20.0)]),  # room for exactly two
        (3.0, [(1, 10.0), (1, 10.0)]),  # larger than the limit goes alone
    ],
)
def test_requests_that_come_together(max_tokens: float, batches: list[tuple[int, float]]) -> None:
    """The first to arrive knows of nobody else, and starts alone: the second and a third are what is looked at."""
    replica = Replica(1.0, 0.0, math.inf, max_wait=5.0, max_tokens=max_tokens)
    world = World(3, in_turn(0.0, 0.0, 0.0, 1e6, 1e6, 1e6), constant(10.0), 1, replica)
    assert simulate(world, requests=3).batches == [(1, 10.0), *batches]


@pytest.mark.parametrize(
    ("second", "how", "latencies", "sizes"),
    [
        (1.0, {}, [2.0, 1.0], [2]),  # the other comes in time: no wait beyond it
        (6.0, {}, [5.0, 5.0], [1, 1]),  # each waits for the other in vain
        (6.0, {"max_tokens": 15.0}, [5.0, 5.0], [1, 1]),  # what is done counts no more
        (1.5, {"lately": 7.5}, [1.0, 5.0], [1, 1]),  # who asked long ago is not waited for
        (1.5, {"lately": 8.5}, [2.5, 1.0], [2]),  # who asked not so long ago is
        # Enough to do: no wait. The second had its first answer at 2, and asks 3 s sooner.
        (4.5, {"max_tokens": 10.0}, [1.0, 1.0], [1, 1]),
    ],
)
def test_the_window_by_hand(second: float, how: dict[str, float], latencies: list[float], sizes: list[int]) -> None:
    """Two collectors of which one asks at 8, the other ``second`` seconds later; a batch takes 1 s, the window is 4 s.

    Both have asked at 0: one was alone and had its answer at 1, the other waited for it until 4 and had its answer at 5.
    """
    replica = Replica(1.0, 0.0, math.inf, max_wait=4.0, **{"lately": 10.0, "max_tokens": 1000.0, **how})
    world = World(2, in_turn(0.0, 0.0, 7.0, 3.0 + second, 1e6, 1e6), constant(10.0), 1, replica)
    found = simulate(world, requests=2, warm_up=2)
    assert found.latencies == pytest.approx(latencies)
    assert [requests for requests, _ in found.batches] == sizes


def test_a_small_request_beside_a_large_one() -> None:
    """50 tokens in pieces of 10, two to a batch, at 10 a second; 5 tokens come after one second.

    They wait for the first batch, share the second with one piece, and have their answer 2.5 seconds after they came.
    """
    replica = Replica(0.0, 0.0, 10.0, max_tokens=20.0, piece=10.0)
    link = in_turn(0.0, 2.0)  # half of it there, half back
    world = World(2, in_turn(0.0, 0.0, 1e6, 1e6), in_turn(50.0, 5.0), 1, replica, link=link)
    found = simulate(world, requests=2)
    assert found.batches == [(1, 20.0), (2, 15.0), (1, 20.0)]
    assert found.latencies == pytest.approx([1.0 + 2.5 + 1.0, 5.5])
    # the oldest goes first: all wait behind the first, and are served in the order in which they came
    one_by_one = Replica(0.0, 0.0, 1.0, max_tokens=ALONE)
    world = World(4, in_turn(*[0.0] * 4, *[1e6] * 4), in_turn(5.0, 2.0, 4.0, 3.0), 1, one_by_one)
    found = simulate(world, requests=4)
    assert [tokens for _, tokens in found.batches] == [5.0, 2.0, 4.0, 3.0]
    assert found.latencies == pytest.approx([5.0, 7.0, 11.0, 14.0])


def test_nothing_is_lost_or_made_up() -> None:
    replica = Replica(0.1, 0.05, 50.0, max_wait=0.2, max_tokens=40.0)
    world = World(12, exponential(2.0), lambda rng: 3.0 * rng.randint(1, 30), 4, replica, constant(0.1), prompts=3)
    found = simulate(world, requests=5000, warm_up=100)
    assert (len(found.latencies), found.answered, found.asked) == (5000, 5100, 5100 + found.waiting)
    assert 0 <= found.waiting <= 12
    assert all(tokens <= 40.0 or requests == 1 for requests, tokens in found.batches)
    assert all(latency >= 0.1 + 0.1 + 0.05 for latency in found.latencies)
    # Little's law: collectors that wait, on average, are throughput times latency; the others think.
    assert found.throughput * (found.latency + found.thought / 5000) == pytest.approx(12, rel=0.03)
    # Two prompts on two replicas: half of the time both on one, of double size, else side by side.
    world = World(1, constant(1.0), constant(10.0), 2, Replica(0.0, 0.0, 1.0), prompts=2)
    found = simulate(world, requests=2000)
    assert Counter(found.batches).keys() == {(1, 10.0), (1, 5.0)}
    assert found.latency == pytest.approx(0.5 * 10 + 0.5 * 5, rel=0.05)


REPLICA = Replica(fixed=0.004, each=0.0005, rate=30_000, max_wait=0.003)
NO_LINK = constant(0.0)


def lost(work: Work, collectors: int, replicas: int) -> float:
    world = work.world(collectors, replicas, REPLICA, NO_LINK)
    return simulate(world, requests=20_000, warm_up=3000, seed=5).lost


@pytest.mark.parametrize(("collectors", "speed"), [(20, 1000.0), (60, 5000.0)])
def test_enough_and_no_more_than_needed(collectors: int, speed: float) -> None:
    """Seen with another seed, and more requests: within the limit, and over it with a tenth fewer."""
    work, limits = Work(speed), Limits(lost=0.04)
    answer = replicas_needed(work, collectors, REPLICA, NO_LINK, limits)
    replicas, allowed = int(answer.replicas), answer.lost_alone + 0.04  # type: ignore[arg-type]
    assert replicas > 1
    assert answer.lost <= allowed
    assert lost(work, collectors, replicas) < allowed + 0.004
    assert lost(work, collectors, replicas - max(1, replicas // 10)) > allowed - 0.004


def test_an_idle_service_of_its_own_and_a_limit_that_no_number_keeps() -> None:
    """One collector: 3072 tokens around 30,000 a second and 4.5 ms, beside 2.048 s of generation."""
    answer = replicas_needed(Work(1000.0), 1, REPLICA, NO_LINK, Limits())
    seconds = 3072 / 30_000 + 0.0045
    assert (answer.replicas, answer.requests_per_batch) == (1, 1)
    assert (answer.lost, answer.lost_alone) == pytest.approx([seconds / (seconds + 2.048)] * 2, rel=0.03)
    assert answer.latency_p50 == pytest.approx(seconds, rel=0.03)
    # the largest requests take half as long again as the mean one, whatever waits
    work, alone = Work(1000.0), 1.5 * 3072 / 30_000 + 0.0045
    assert replicas_needed(work, 3, REPLICA, NO_LINK, Limits(p99=0.9 * alone)).replicas is None
    found = replicas_needed(work, 3, REPLICA, NO_LINK, Limits(p99=3 * alone))
    assert found.replicas == 1
    assert found.latency_p99 <= 3 * alone


def test_more_collectors_and_faster_ones_need_more_whatever_the_guess() -> None:
    one, other = (replicas_needed(Work(1000.0), 20, REPLICA, NO_LINK, Limits(), guess=guess) for guess in (1, 40))
    assert one.replicas == other.replicas
    seen: list[Answer] = []
    answers = answers_for([200.0, 2000.0], [100, 10, 300], REPLICA, NO_LINK, Limits(), on_answer=seen.append)
    assert seen == answers
    asked = [(speed, count) for speed in (200.0, 2000.0) for count in (10, 100, 300)]
    assert [(a.tokens_per_second, a.collectors) for a in answers] == asked
    needed = [a.replicas for a in answers]
    assert needed == sorted(needed[:3]) + sorted(needed[3:])
    assert all(few < many for few, many in zip(needed[1:3], needed[4:], strict=True))
    assert with_model(REPLICA, fixed=None, rate=None) == REPLICA
    assert with_model(REPLICA, fixed=0.02, rate=1e6) == replace(REPLICA, fixed=0.02, rate=1e6)


def batches(each: float) -> list[Batches]:
    """Of 3 ms, so much for a request, and 50,000 tokens a second."""
    sizes = [(1.0, 100.0), (1.0, 1000.0), (3.0, 300.0), (3.5, 4000.0)]
    return [Batches(7, r, t, 3e-3 + each * r + t / 50_000) for r, t in sizes]


def test_the_fit_finds_what_is_there() -> None:
    """A call alone takes 3 + 0.5 + 200 / 50 ms in the model, and 1 to 2 ms beside it."""
    found = fit(batches(0.5e-3), [0.0085, 0.0095, 0.009], tokens=200)
    replica = found.model()[0]
    assert (replica.fixed, replica.each, replica.rate) == pytest.approx((3e-3, 0.5e-3, 50_000))
    assert found.largest_error == pytest.approx(0, abs=1e-9)
    assert [min(found.links), quantile(found.links, 0.5), max(found.links)] == pytest.approx([1e-3, 1.5e-3, 2e-3])
    defaults = inspect.signature(ScoringService).parameters
    assert (replica.max_wait, replica.max_tokens) == (defaults["max_wait"].default, defaults["max_tokens"].default)
    found = fit(batches(-0.5e-3), [0.1], tokens=200)  # nothing negative
    assert found.replica["each"] == 0 < found.replica["fixed"]
    assert found.largest_error > 0.01


def test_calls_of_a_window_and_quantiles() -> None:
    """Three calls and a quarter of one in two seconds; one that came too late."""
    window = Window(2.0, [(0.0, 0.5), (0.5, 1.0), (1.0, 1.5), (1.5, 3.5), (2.5, 3.5)])
    assert window.throughput == pytest.approx(3.25 / 2)
    assert window.latencies == [0.5, 0.5, 0.5, 2.0, 1.0]
    found = Observed(10.0, [1.0, 2.0, 3.0, 4.0], 30.0, [], 0.5, 0, 4, 4)
    assert (found.throughput, found.latency, found.lost) == (0.4, 2.5, 0.25)
    assert (found.quantile(0.5), found.quantile(0.99)) == (3.0, 4.0)


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
        calibration=Calibration(asdict(REPLICA), [0.001, 0.002], 0.1),
        checks=(Check(2, 0.02, 50.0, 60.0, 0.02, 0.015, 0.04, 0.03),),
        answers=tuple(answers_for([1000.0, 2000.0], [1, 10], REPLICA, NO_LINK, Limits())),
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
    assert before.checks[0].errors == pytest.approx((0.2, -0.25))
    before.save(tmp_path)
    assert RayRun.load(tmp_path) == before
    newer = replace(before, command="other", lines=(), bytes=(), calibration=None, overheads=before.overheads[:1])
    assert before.updated(newer) == replace(before, overheads=before.overheads[:1])
    assert before.same_place(newer)
    assert not before.same_place(replace(before, machine={"cores": "3"}))


def test_render_and_ask(tmp_path: Path) -> None:
    """Where nothing is stored, both ask for a run first."""
    question = ("capacity", "--collectors", "20", "--tokens-per-second", "1000", "--out", str(tmp_path))
    for command in (("render", "--out", str(tmp_path)), question):
        assert "run first" in invoked(cli.app, *command, code=2)
    run().save(tmp_path)
    invoked(cli.app, "render", "--out", str(tmp_path))
    page = (tmp_path / "RAY.md").read_text(encoding="utf-8")
    assert "| both | 8 | 4 x 32 | 4.0 | 14.0 | 1,792 | 5.0x | 500/900 | 100/200 |" in page
    assert "| ms of a call over a local scorer, 512 tokens | 4 | at most 3 | missed |" in page
    assert "| back | 1.50 | 2.00 |" in page
    assert "| both | 8 | 4 x 32 | here | 100.0 | 2.0 | 4.5 | 1.0 | 0.45 | 25% |" in page
    assert "| a kill | 1,200 | 1 | 0 | 2.3 | 3 | 2 restarts |" in page
    assert "| 2 | 20 | 50.0 | 60.0 | +20% | 20.0 | 15.0 | -25% | 40.0 | 30.0 |" in page
    assert (tmp_path / "ray_capacity.png").stat().st_size > 10_000
    links = run().calibration.model()[1]  # type: ignore[union-attr]
    needed = replicas_needed(Work(1000.0), 20, REPLICA, links, Limits()).replicas
    assert f" {needed} " in invoked(cli.app, *question)
    assert "too slow" in invoked(cli.app, *question, "--p99-ms", "1", code=1)
    invoked(cli.app, *question, "--model-tokens-per-second", "1000000", "--p99-ms", "100")


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
    assert [check.clients for check in found.checks] == [1, 2]
    assert [(fault.lost, fault.wrong) for fault in found.faults] == [(0, 0)] * 6
    assert {path.name for path in tmp_path.iterdir()} == {"ray.json", "RAY.md", "ray_capacity.png"}
    invoked(cli.app, "run", "--quick", "--only", "overhead", "--out", str(tmp_path))
    newer = RayRun.load(tmp_path)
    assert newer.overheads != found.overheads
    assert (newer.lines, newer.answers) == (found.lines, found.answers)
