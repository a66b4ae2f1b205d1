"""The effects of faults on callers: eight callers score without a pause, and each answer is compared with a local scorer's."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import ModelSize
from benchmarks.ray.callers import quantile
from benchmarks.ray.calls import TOLERANCE
from benchmarks.ray.figures import Figure
from benchmarks.ray.sides import SEQUENCES, reference
from torchrl_llm_kl import LogProbScorer, Ragged
from torchrl_llm_kl.service import ScoringService

CALLERS, BUSY, KILLS, PUSHES, STOPPED = 8, 8, 30, 20, 20.0
_LENGTH, _TIMEOUT = 32, 240.0
_OUTLIVES = 15.0  # seconds after which the service has noticed the end of a driver
_DRIVER = "import sys; from benchmarks.ray.faults import driver; driver(*sys.argv[1:])"


@dataclass
class Load:
    """Callers in threads of this process, until the end of the block that :func:`load` opens."""

    seconds: list[float] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    wrong: int = 0

    def wait(self, answers: int) -> None:
        """Wait for so many more answers."""
        goal, end = len(self.seconds) + answers, time.monotonic() + _TIMEOUT
        while len(self.seconds) < goal and time.monotonic() < end:
            time.sleep(0.05)

    def figures(self, what: str, note: str = "") -> list[Figure]:
        """Returns the number of lost or wrong answers, and the slowest answer."""
        note = "; ".join(filter(None, (f"{len(self.seconds):,} answers", note, *sorted(set(self.errors))[:2])))
        bad = len(self.errors) + self.wrong
        return [
            Figure(f"{what}: lost or wrong", bad, "answers", most=0, note=note),
            Figure(f"{what}: slowest answer", max(self.seconds, default=0.0), "s"),
        ]


def faults(size: ModelSize, *, quick: bool, on_step: Callable[[str], None]) -> list[Figure]:
    """Measure everything, each on a separate service."""
    kills, pushes, stopped = (2, 2, 2.0) if quick else (KILLS, PUSHES, STOPPED)
    cases: list[Callable[[], list[Figure]]] = [
        partial(_start, size),
        *([] if quick else [partial(_start, size, BUSY)]),
        partial(_kills, size, kills),
        partial(_controller, size),
        partial(_stop, size, stopped),
        partial(_pushes, size, pushes),
        partial(_killer, size),
        partial(_drivers, size, 1.0 if quick else _OUTLIVES),
    ]
    figures = []
    for case in cases:
        figures += case()
        on_step(f"{figures[-1].what}: {figures[-1].value:.3g} {figures[-1].unit}")
    return figures


def many_callers(size: ModelSize, *, count: int, answers: int) -> list[Figure]:
    """Measure callers of one replica, in threads of this process, which call without a pause."""
    with _service(size) as service, load(service, size, callers=count) as calls:
        calls.wait(answers // 4)
        warm, begin = len(calls.seconds), time.monotonic()
        calls.wait(answers)
        seconds, took = calls.seconds[warm:], time.monotonic() - begin
    what = f"{count} callers of {SEQUENCES} x {_LENGTH} tokens"
    return [
        Figure(f"{what}: calls", len(seconds) / took, "calls/s"),
        Figure(f"{what}: p50", 1e3 * quantile(seconds, 0.5), "ms"),
        Figure(f"{what}: p99", 1e3 * quantile(seconds, 0.99), "ms"),
    ]


def _start(size: ModelSize, busy: int = 0) -> list[Figure]:
    """Measure the time to the first answer."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        begin = time.monotonic()
        with _service(size) as service, load(service, size, callers=1) as calls:
            calls.wait(1)
            took = time.monotonic() - begin
    finally:
        for other in others:
            other.kill()
            other.wait()
    beside = f", {busy} busy processes" if busy else ""
    return [Figure(f"start{beside}: first answer", took, "s")]


def _kills(size: ModelSize, count: int) -> list[Figure]:
    chance = random.Random(0)
    with _service(size, num_replicas=2) as service, load(service, size) as calls:
        calls.wait(20)
        for _ in range(count):
            time.sleep(chance.uniform(0.2, 2.0))
            _signal(_pid(service), signal.SIGKILL)
        calls.wait(200)
    return calls.figures(f"{count} SIGKILLs of one of two replicas")


def _controller(size: ModelSize) -> list[Figure]:
    """Kill Serve's controller, and then a replica, which the next controller replaces."""
    import ray

    with _service(size, num_replicas=2) as service, load(service, size) as calls:
        calls.wait(20)
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        _signal(ray.get(controller.get_pid.remote()), signal.SIGKILL)
        time.sleep(1.0)
        _signal(_pid(service), signal.SIGKILL)
        calls.wait(400)
    return calls.figures("SIGKILL of Serve's controller, then of a replica")


def _stop(size: ModelSize, seconds: float) -> list[Figure]:
    with _service(size, num_replicas=2) as service, load(service, size) as calls:
        calls.wait(20)
        pid = _pid(service)
        _signal(pid, signal.SIGSTOP)
        time.sleep(seconds)
        meanwhile = len(calls.seconds)
        _signal(pid, signal.SIGCONT)
        calls.wait(200)
    return calls.figures(f"one of two replicas stopped for {seconds:g} s", f"{meanwhile} answers until it goes on")


def _pushes(size: ModelSize, count: int) -> list[Figure]:
    """Push weights. Each answer must come from the version of the weights that it states."""
    expected, weights = [_answers(reference(size), size)], []
    for version in range(1, count + 1):
        model = reference(size)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.02 * version)
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
        expected.append(_answers(model, size))
    took = []
    with _service(size, num_replicas=2) as service, load(service, size, expected) as calls:
        calls.wait(20)
        for each in weights:
            begin = time.monotonic()
            service.update_weights(each)
            took.append(time.monotonic() - begin)
            calls.wait(10)
    first, *later = took
    note = f"the first took {first:.1f} s, later ones {1e3 * median(later):.0f} ms; answers of {len(calls.versions)} versions"
    return calls.figures(f"{count} pushes of all weights to two replicas", note)


def _killer(size: ModelSize) -> list[Figure]:
    """Send a request that ends the process that scores it."""
    with _service(size, factory=deadly, num_replicas=2) as service:
        scorer, outcome = service.model.make_scorer(), "answered"
        with load(service, size) as calls:
            calls.wait(20)
            begin = time.monotonic()
            try:
                scorer.score([[1, 2, *_killing(size), 3]])  # the last token is not forwarded
            except Exception as error:
                outcome = type(error).__name__
            took = time.monotonic() - begin
            calls.wait(200)
    return calls.figures("a request that crashes its replica", f"{outcome} after {took:.0f} s")


def _drivers(size: ModelSize, seconds: float) -> list[Figure]:
    """End the driver that made the service, and go on in this one."""
    import ray

    address = ray.get_runtime_context().gcs_address
    first = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, address, *map(str, (size.vocab, size.hidden, size.layers))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert first.stdin is not None
    assert first.stdout is not None
    while "up" not in (line := first.stdout.readline()):
        if not line:
            raise RuntimeError("the first driver did not start the service.")
    with _service(size, name="two-drivers") as service:
        with load(service, size) as calls:
            calls.wait(20)
            before = _pid(service)
            first.stdin.close()
            first.wait()
            time.sleep(seconds)
            calls.wait(20)
        same = "the same process" if _pid(service) == before else "another process"
    return calls.figures("two drivers, the creator of the service exits", f"{same} {seconds:g} s later")


def driver(address: str, *numbers: str) -> None:
    """Create the service, and end when the standard input ends."""
    import ray

    ray.init(address=address, log_to_driver=False)
    size = ModelSize(*map(int, numbers))
    service = ScoringService(factory=partial(reference, size), name="two-drivers", timeout=_TIMEOUT, memory=0)
    service.model.make_scorer().score([[1, 2, 3]])
    print("up", flush=True)
    sys.stdin.read()


# ------------------------------------------------------------------ services and callers


def deadly(size: ModelSize) -> Any:
    """Make a model whose process ends when it scores the two tokens of :func:`_killing` in a row."""
    made, (first, second) = reference(size), _killing(size)

    def look(_: Any, inputs: tuple[Tensor, ...]) -> None:
        ids = inputs[0].flatten()
        if bool(((ids[:-1] == first) & (ids[1:] == second)).any()):
            os._exit(1)

    inner: Any = made.model
    inner.get_input_embeddings().register_forward_pre_hook(look)
    return made


def _killing(size: ModelSize) -> tuple[int, int]:
    return size.vocab - 2, size.vocab - 1


@contextmanager
def _service(
    size: ModelSize, *, factory: Callable[[ModelSize], Any] = reference, **options: Any
) -> Iterator[ScoringService]:
    service = ScoringService(factory=partial(factory, size), memory=0, timeout=_TIMEOUT, **options)
    try:
        yield service
    finally:
        service.shutdown()


@contextmanager
def load(
    service: ScoringService, size: ModelSize, expected: Sequence[list[Tensor]] = (), callers: int = CALLERS
) -> Iterator[Load]:
    """Let callers score all the time. ``expected`` holds the answer to each caller, for each version of the weights."""
    found, over, lock = Load(), threading.Event(), threading.Lock()
    right = [*expected] or [_answers(reference(size), size, callers)]

    def call(index: int) -> None:
        scorer, rows = service.model.make_scorer(), _tokens(size, index)
        while not over.is_set():
            begin, error, version, values = time.monotonic(), "", 0, torch.zeros(0)
            try:
                scores = scorer.evaluate(rows)
                version, values = scores.version or 0, scores.log_prob.values
            except Exception as raised:
                error = f"{type(raised).__name__}: {str(raised)[:100]}"
            wrong = not error and not (
                version < len(right) and torch.allclose(values, right[version][index], rtol=0, atol=TOLERANCE)
            )
            with lock:
                found.seconds.append(time.monotonic() - begin)
                found.versions.add(version)
                found.errors += [error] if error else []
                found.wrong += wrong

    threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(callers)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _tokens(size: ModelSize, index: int) -> Ragged:
    generator = torch.Generator().manual_seed(index)
    return Ragged.from_list(list(torch.randint(size.vocab - 2, (SEQUENCES, _LENGTH), generator=generator)))


def _answers(model: Any, size: ModelSize, callers: int = CALLERS) -> list[Tensor]:
    scorer = LogProbScorer(model)
    return [scorer.score(_tokens(size, index)).values for index in range(callers)]


def _pid(service: ScoringService) -> int:
    """Returns the process of a replica that answers."""
    return int(service.model.call("state").pid)


def _signal(pid: int, what: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it ended by itself
        os.kill(pid, what)
