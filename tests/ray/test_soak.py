"""Minutes of work with kills, hangs, poison and pushes at random: no answer is lost or wrong, and memory stays flat.

The figures of ten minutes (`TORCHRL_LLM_KL_SOAK_SECONDS`, 600 by default) are in docs/ray.md; with
`TORCHRL_LLM_KL_SOAK_REPORT` they are written to a file.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import ray
import torch

from load import actor, clone, sequences
from remote_models import ENDLESS, POISON, deadly, model
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.service import PoisonedRequest, ServiceClosedError, ServiceTimeout, WeightVersionError
from waits import LONG, until

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("TORCHRL_LLM_KL_SOAK_SECONDS", "600"))
CALLERS = 64
SIZES = (1, 4, 8, 40)  # sequences of a request
SEEDS = 125  # requests of each size with known answers
ODD = {  # requests that fail by themselves
    "token id 500 at sequence 0": [[1, 500]],
    "sequence 0 has 70 tokens": [[0] * 70],
    "token id -3 at sequence 0": [[1, -3]],
}
BEGAN = time.monotonic()


def note(*what):
    """A line of the log at once: a process that ends in Ray's shutdown prints no failure."""
    print(f"{time.monotonic() - BEGAN:8.1f}", *what, flush=True)


def resident(pid):
    """Resident MiB of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Faults:
    """What goes wrong during the soak. Replica 0 is left alone in the end, to watch its memory."""

    def __init__(self, service):
        self.service, self.done = service, Counter[str]()
        self.odd = []  # ends of poisoned requests that are not as promised
        self.requests = []

    def happen(self, rng, *, calm):
        """One fault, or a push of the same weights under the next version; ``calm`` if replica 0 must live."""
        kinds = ["killed", "killed", "stopped", "controller killed", "weights pushed", "bad weights", "odd requests"]
        kind = rng.choice(kinds if calm else [*kinds, "poison", "poison", "endless"])
        note("fault:", kind)
        try:
            if kind in ("poison", "endless"):
                row = [*(POISON if kind == "poison" else ENDLESS), rng.randrange(97), rng.randrange(97)]
                call = partial(self._scores, [row])
                self.requests.append(threading.Thread(target=self._fails, args=(call, PoisonedRequest), daemon=True))
                self.requests[-1].start()
            elif kind == "controller killed":
                ray.kill(actor(self.service, "control"), no_restart=False)
            elif kind == "weights pushed":
                self.service.update_weights(model().state_dict())
            elif kind == "bad weights":
                self._refused(rng)
            elif kind == "odd requests":
                for message, rows in ODD.items():
                    self._fails(partial(self._scores, rows), ValueError, message=message)
            else:
                pid = self.service.model.connection.gather("stats", replicas=[1], timeout=1.0)[1]["pid"]
                os.kill(pid, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
            self.done[kind] += 1
        except Exception as error:  # the replica may be down already
            note("no fault:", kind, repr(error)[:300])

    def _fails(self, call, *errors, message=""):
        """Note what a call does that should end with an error."""
        try:
            odd = call()
        except Exception as error:
            if isinstance(error, errors) and message in str(error):
                return
            odd = error
        note("not as promised:", repr(odd))
        self.odd.append(odd)

    def _scores(self, rows):
        return clone(self.service.model, timeout=LONG).make_scorer().score(rows)

    def _refused(self, rng):
        """A push of NaN, or of other weights under a version that is over: nothing may change."""
        version, weights = self.service.version, model(seed=1).state_dict()
        if rng.random() < 0.5:
            weights["lm_head.weight"][0, 0] = torch.nan
            version = None
        elif version == 0:
            return
        else:
            version -= 1
        update = partial(self.service.update_weights, weights, version)
        self._fails(update, ValueError, WeightVersionError, ServiceTimeout)


def work(remote, expected, end, seed, outcomes):
    """Until the end; whether each answer is right, or the error."""
    rng, scorer = random.Random(seed), clone(remote, timeout=LONG).make_scorer()
    while time.monotonic() < end:
        question, begin = (rng.randrange(SEEDS), rng.choice(SIZES)), time.monotonic()
        try:
            answer = scorer.score(sequences(question[0], count=question[1])).values
            found = torch.allclose(answer, expected[question], rtol=1e-6, atol=1e-6)
        except Exception as error:
            found = error
        if found is not True:
            note("wrong or lost:", question, repr(found), f"after {time.monotonic() - begin:.1f} s")
        outcomes.append((found, time.monotonic() - begin))


def shut_down(service, remotes):
    """During calls: what their callers get."""
    found = []

    def call(remote):
        try:
            while True:
                remote.make_scorer().score(sequences(count=40))
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=call, args=(remote,), daemon=True) for remote in remotes]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    service.shutdown()
    for thread in threads:
        thread.join(timeout=60)
    return found


def test_nothing_is_lost_and_memory_stays_flat(serve, tmp_path):
    try:
        soak(serve, tmp_path)
    except BaseException:
        note(traceback.format_exc())
        raise


def soak(serve, tmp_path):
    local, outcomes = LogProbScorer(model()), []
    questions = [(seed, size) for size in SIZES for seed in range(SEEDS)]
    expected = {question: local.score(sequences(question[0], count=question[1])).values for question in questions}
    rng = random.Random(0)
    service = serve(factory=partial(deadly, str(tmp_path)), num_replicas=2, hang_after=5.0)
    end = (begin := time.monotonic()) + SECONDS
    common = service.model, expected, end
    threads = [threading.Thread(target=work, args=(*common, i, outcomes), daemon=True) for i in range(CALLERS)]
    for thread in threads:
        thread.start()
    steady, faults, memory = 0, Faults(service), []
    next_kill, next_line = time.monotonic() + 5, time.monotonic() + 30
    while time.monotonic() < end:
        time.sleep(min(2.0, SECONDS / 60))
        free = ray.available_resources().get("object_store_memory", 0.0)
        used = ray.cluster_resources()["object_store_memory"] - free
        passed = (time.monotonic() - begin) / SECONDS
        if passed > 1 / 3 and not steady and not any(thread.is_alive() for thread in faults.requests):
            until(lambda: "pid" in service.stats()[0], seconds=LONG)
            steady = service.stats()[0]["pid"]
        if steady:
            try:
                memory.append((resident(steady), resident(os.getpid()), used / 2**20))
            except OSError:  # a slow machine: it did not answer in time, and was replaced
                note("replica 0 was replaced")
                steady = 0
                memory.clear()
        if time.monotonic() > next_line:
            note(len(outcomes), "answers", dict(faults.done), [round(x) for x in memory[-1]] if memory else "")
            next_line = time.monotonic() + 30
        if time.monotonic() > next_kill:
            faults.happen(rng, calm=passed > 1 / 4)
            next_kill = time.monotonic() + rng.uniform(10, 30)
    note("the callers end")
    for thread in threads:
        thread.join(timeout=LONG)
    hanging = sum(thread.is_alive() for thread in threads)
    until(lambda: "restarts" in service.stats()[1], seconds=LONG)  # not while it is stopped
    stats = service.stats()
    note("shutdown during calls")
    ends = shut_down(service, [clone(service.model) for _ in range(8)])
    half = max(len(memory) // 2, 10)  # of a replica that was left alone for a while
    early, late = ([max(column) for column in zip(*part, strict=True)] for part in (memory[:half], memory[half:]))
    growth = [b - a for a, b in zip(early, late, strict=False)]
    times = sorted(seconds for _, seconds in outcomes)
    report = {
        "seconds": SECONDS,
        "callers": CALLERS,
        "answers": len(outcomes),
        "wrong or lost": [str(found) for found, _ in outcomes if found is not True],
        "p50, p99 and slowest, seconds": [round(times[int(share * (len(times) - 1))], 2) for share in (0.5, 0.99, 1.0)],
        "faults": dict(faults.done),
        "restarts": stats[1]["restarts"],
        "memory grows, MiB": dict(zip(("replica", "client", "store"), (round(x, 1) for x in growth), strict=False)),
    }
    note(report)
    if path := os.environ.get("TORCHRL_LLM_KL_SOAK_REPORT"):
        Path(path).write_text(json.dumps(report, indent=1))
    assert hanging == 0
    assert not faults.odd
    assert report["wrong or lost"] == []
    assert [type(error) for error in ends] == [ServiceClosedError] * 8
    assert len(outcomes) > 5 * SECONDS
    assert sum(faults.done.values()) >= SECONDS / 60
    assert growth or SECONDS < 600, "no replica was left alone long enough to watch its memory"
    assert all(grown < most for grown, most in zip(growth, (20, 20, 10), strict=False)), report["memory grows, MiB"]
