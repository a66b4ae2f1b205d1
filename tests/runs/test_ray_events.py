"""The event model beside queues whose answers are known, and beside runs worked out by hand."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest

from benchmarks.ray.events import Draw, Observed, Replica, World, simulate

ALONE = 1e-9  # a limit of tokens that no two requests fit into


def constant(value: float) -> Draw:
    return lambda random: value


def exponential(mean: float) -> Draw:
    return lambda random: random.expovariate(1 / mean)


def in_turn(values: list[float]) -> Draw:
    left = iter(values)
    return lambda random: next(left)


def machine_repair(machines: int, think: float, service: float) -> tuple[float, float]:
    """Throughput and mean response of M/M/1//N: states 0..N broken machines, one repairer."""
    weights = [math.perm(machines, k) * (service / think) ** k for k in range(machines + 1)]
    idle = weights[0] / sum(weights)
    throughput = (1 - idle) / service
    return throughput, machines / throughput - think


@pytest.mark.parametrize(("collectors", "think"), [(4, 2.0), (20, 10.0)])
def test_closed_queue_with_exponential_times(collectors: int, think: float) -> None:
    """One request at a time, its size exponential: the machine repair model, which has a closed form."""
    replica = Replica(fixed=0.0, each=0.0, rate=1.0, max_tokens=ALONE)
    world = World(collectors, exponential(think), exponential(1.0), 1, replica)
    found = simulate(world, requests=20_000, warm_up=2000)
    throughput, response = machine_repair(collectors, think, 1.0)
    assert found.throughput == pytest.approx(throughput, rel=0.03)
    assert found.latency == pytest.approx(response, rel=0.04)
    assert found.busy == pytest.approx(throughput * 1.0, rel=0.03)
    assert found.lost == pytest.approx(response / (response + think), rel=0.03)


@pytest.mark.parametrize("arrivals", [0.5, 2.0])
def test_batches_without_a_limit_take_all_that_came_meanwhile(arrivals: float) -> None:
    """While a batch is served a Poisson number of requests arrive, and make the next; after none, the first to come does."""
    replica = Replica(fixed=1.0, each=0.0, rate=math.inf, max_tokens=math.inf)
    world = World(1000, exponential(1000 / arrivals), constant(1.0), 1, replica)
    found = simulate(world, requests=60_000, warm_up=5000)
    sizes = Counter(size for size, _ in found.batches)
    total = len(found.batches)
    assert sum(s * n for s, n in sizes.items()) / total == pytest.approx(arrivals + math.exp(-arrivals), rel=0.02)
    assert sizes[1] / total == pytest.approx((1 + arrivals) * math.exp(-arrivals), rel=0.03)
    assert sizes[2] / total == pytest.approx(arrivals**2 / 2 * math.exp(-arrivals), rel=0.05)


@pytest.mark.parametrize(("replicas", "rho"), [(1, 0.7), (3, 0.6)])
def test_many_collectors_ask_as_a_poisson_stream(replicas: int, rho: float) -> None:
    """M/D/1: the mean wait is rho / (2 (1 - rho)) services (Pollaczek and Khinchine); a hash divides the stream.

    Each replica is a queue of its own with its share of the requests, not one server of a common queue.
    """
    replica = Replica(fixed=1.0, each=0.0, rate=math.inf, max_tokens=ALONE)
    world = World(1000, exponential(1000 / (rho * replicas)), constant(1.0), replicas, replica)
    found = simulate(world, requests=60_000, warm_up=5000)
    assert found.throughput == pytest.approx(rho * replicas, rel=0.02)
    assert found.busy == pytest.approx(rho, rel=0.02)
    assert found.latency == pytest.approx(1 + rho / (2 * (1 - rho)), rel=0.05)


def test_one_collector_by_hand() -> None:
    """2 of fixed, 3 for the request, 8 tokens at 4 a second, 1 on the way: 8 seconds; nobody to wait for."""
    replica = Replica(fixed=2.0, each=3.0, rate=4.0, max_wait=100.0)
    world = World(1, constant(12.0), constant(8.0), 1, replica, link=constant(1.0))
    found = simulate(world, requests=10)
    assert found.latencies == pytest.approx([8.0] * 10)
    assert set(found.batches) == {(1, 8.0)}
    assert found.lost == pytest.approx(8 / 20)


@pytest.mark.parametrize(
    ("max_wait", "max_tokens", "batches"),
    [
        pytest.param(5.0, 100.0, [(2, 20.0)], id="both are there: no further wait"),
        pytest.param(5.0, 19.0, [(1, 10.0), (1, 10.0)], id="no room for two"),
        pytest.param(5.0, 20.0, [(2, 20.0)], id="room for exactly two"),
        pytest.param(5.0, 3.0, [(1, 10.0), (1, 10.0)], id="larger than the limit goes alone"),
    ],
)
def test_requests_that_come_together(max_wait: float, max_tokens: float, batches: list[tuple[int, float]]) -> None:
    replica = Replica(1.0, 0.0, math.inf, max_wait=max_wait, max_tokens=max_tokens)
    # Both think for no time at first: they ask at once. The first to arrive knows of nobody else, and starts alone, so
    # the second and a third request are what is looked at.
    world = World(3, in_turn([0.0, 0.0, 0.0, 1e6, 1e6, 1e6]), constant(10.0), 1, replica)
    found = simulate(world, requests=3)
    assert found.batches[0] == (1, 10.0)
    assert found.batches[1:] == batches


def late(second: float, *, lately: float = 10.0, max_tokens: float = 1000.0) -> Observed:
    """Two collectors of which one asks at 8, the other ``second`` seconds later; a batch takes 1 s, the window is 4 s.

    Both have asked at 0: one was alone and had its answer at 1, the other waited for it until 4 and had its answer at 5.
    """
    replica = Replica(1.0, 0.0, math.inf, max_wait=4.0, lately=lately, max_tokens=max_tokens)
    world = World(2, in_turn([0.0, 0.0, 7.0, 3.0 + second, 1e6, 1e6]), constant(10.0), 1, replica)
    return simulate(world, requests=2, warm_up=2)


@pytest.mark.parametrize(
    ("found", "latencies", "sizes"),
    [
        pytest.param(late(1.0), [2.0, 1.0], [2], id="the other comes in time: no wait beyond it"),
        pytest.param(late(6.0), [5.0, 5.0], [1, 1], id="each waits for the other in vain"),
        pytest.param(late(6.0, max_tokens=15.0), [5.0, 5.0], [1, 1], id="what is done counts no more"),
        pytest.param(late(1.5, lately=7.5), [1.0, 5.0], [1, 1], id="who asked long ago is not waited for"),
        pytest.param(late(1.5, lately=8.5), [2.5, 1.0], [2], id="who asked not so long ago is"),
        # With enough to do the second had its first answer at 2, and asks 3 s sooner.
        pytest.param(late(4.5, max_tokens=10.0), [1.0, 1.0], [1, 1], id="enough to do: no wait"),
    ],
)
def test_the_window_by_hand(found: Observed, latencies: list[float], sizes: list[int]) -> None:
    assert found.latencies == pytest.approx(latencies)
    assert [requests for requests, _ in found.batches] == sizes


def test_a_small_request_beside_a_large_one() -> None:
    """50 tokens in pieces of 10, two to a batch, at 10 a second; 5 tokens come after one second.

    They wait for the first batch, share the second with one piece, and have their answer 2.5 seconds after they came.
    """
    replica = Replica(0.0, 0.0, 10.0, max_tokens=20.0, piece=10.0)
    link = in_turn([0.0, 2.0])  # half of it there, half back
    world = World(2, in_turn([0.0, 0.0, 1e6, 1e6]), in_turn([50.0, 5.0]), 1, replica, link=link)
    found = simulate(world, requests=2)
    assert found.batches == [(1, 20.0), (2, 15.0), (1, 20.0)]
    assert found.latencies == pytest.approx([1.0 + 2.5 + 1.0, 5.5])


def test_the_oldest_goes_first() -> None:
    """Sizes 1, 2, 3, ... all wait behind the first: they are served in the order in which they came."""
    replica = Replica(0.0, 0.0, 1.0, max_tokens=ALONE)
    world = World(4, in_turn([0.0] * 4 + [1e6] * 4), in_turn([5.0, 2.0, 4.0, 3.0]), 1, replica)
    found = simulate(world, requests=4)
    assert [tokens for _, tokens in found.batches] == [5.0, 2.0, 4.0, 3.0]
    assert found.latencies == pytest.approx([5.0, 7.0, 11.0, 14.0])


@pytest.mark.parametrize(("prompts", "seed"), [(1, 0), (3, 1)])
def test_nothing_is_lost_or_made_up(prompts: int, seed: int) -> None:
    sizes = Random(seed)
    replica = Replica(0.1, 0.05, 50.0, max_wait=0.2, max_tokens=40.0)
    size = lambda random: 3.0 * sizes.randint(1, 30)  # noqa: E731
    world = World(12, exponential(2.0), size, 4, replica, constant(0.1), prompts=prompts)
    found = simulate(world, requests=5000, warm_up=100)
    assert len(found.latencies) == 5000
    assert found.answered == 5100
    assert 0 <= found.waiting <= 12
    assert found.asked == found.answered + found.waiting
    assert all(tokens <= 40.0 or requests == 1 for requests, tokens in found.batches)
    assert all(latency >= 0.1 + 0.1 + 0.05 for latency in found.latencies)
    # Little's law: collectors that wait, on average, are throughput times latency; the others think.
    assert found.throughput * (found.latency + found.thought / 5000) == pytest.approx(12, rel=0.03)


def test_prompts_go_their_own_ways() -> None:
    """Two prompts on two replicas: half of the time both on one, of double size, else side by side."""
    replica = Replica(0.0, 0.0, 1.0)
    world = World(1, constant(1.0), constant(10.0), 2, replica, prompts=2)
    found = simulate(world, requests=2000)
    assert Counter(found.batches).keys() == {(1, 10.0), (1, 5.0)}
    assert found.latency == pytest.approx(0.5 * 10 + 0.5 * 5, rel=0.05)


def test_the_same_seed_the_same_world() -> None:
    world = World(5, exponential(1.0), exponential(1.0), 2, Replica(0.1, 0.0, 10.0))
    assert simulate(world, requests=200, seed=1) == simulate(world, requests=200, seed=1)
    assert simulate(world, requests=200, seed=1) != simulate(world, requests=200, seed=2)


def test_collectors_begin_anywhere_in_their_thinking() -> None:
    """Half of them have asked after half of the time."""
    world = World(1000, constant(10.0), constant(1.0), 1, Replica(0.0, 0.0, math.inf))
    assert simulate(world, requests=500).seconds == pytest.approx(5.0, rel=0.15)
