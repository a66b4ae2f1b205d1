"""Minutes of load with random kills, stops, poison and pushes. No answer is lost or wrong, and memory stays flat.

``TORCHRL_LLM_KL_SOAK_SECONDS`` sets the time, 600 by default.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import ray
import torch

from load import clone, pid_of, pids, sequences
from remote_models import POISON, deadly, model
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.service import PoisonedRequest, ServiceClosedError, WeightVersionError
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
KINDS = ["killed", "killed", "stopped", "controller killed", "weights pushed", "bad weights", "odd requests", "poison"]


def resident(pid: int) -> float:
    """Resident MiB of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Faults:
    """The faults of the soak."""

    def __init__(self, service):
        self.service, self.done, self.odd, self.threads = service, Counter[str](), [], []

    def happen(self, rng):
        """Causes one fault, or pushes the same weights under the next version."""
        kind = rng.choice(KINDS)
        print(f"{time.monotonic():.1f} fault: {kind}", flush=True)
        if kind == "poison":
            row = [*POISON, rng.randrange(97), rng.randrange(97)]
            call = partial(self._fails, partial(self._scores, [row]), PoisonedRequest)
            self.threads.append(threading.Thread(target=call, daemon=True))
            self.threads[-1].start()
        elif kind == "controller killed":
            os.kill(pid_of(ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")), signal.SIGKILL)
        elif kind == "weights pushed":
            self.service.update_weights(model().state_dict())
        elif kind == "bad weights":
            weights = model(seed=1).state_dict()
            weights["lm_head.weight"][0, 0] = torch.nan
            self._fails(partial(self.service.update_weights, weights), ValueError)
            if version := self.service.version:
                self._fails(partial(self.service.update_weights, model(seed=1), version), WeightVersionError)
        elif kind == "odd requests":
            for message, rows in ODD.items():
                self._fails(partial(self._scores, rows), ValueError, message)
        else:
            victim = rng.choice(pids(self.service) or [0])
            if victim:
                os.kill(victim, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
                if kind == "stopped":
                    time.sleep(5.0)
                    os.kill(victim, signal.SIGCONT)
        self.done[kind] += 1

    def _fails(self, call, error, message=""):
        """Notes a call that does not end with the expected error."""
        try:
            self.odd.append(call())
        except error as found:
            if message not in str(found):
                self.odd.append(found)
        except Exception as found:
            self.odd.append(found)

    def _scores(self, rows):
        return clone(self.service.model, timeout=LONG).make_scorer().score(rows)


def work(remote, expected, end, seed, outcomes):
    """Calls until the end. Notes whether each answer is right, or the error."""
    rng, scorer = random.Random(seed), clone(remote, timeout=LONG).make_scorer()
    while time.monotonic() < end:
        question, begin = (rng.randrange(SEEDS), rng.choice(SIZES)), time.monotonic()
        try:
            answer = scorer.score(sequences(question[0], count=question[1])).values
            outcome = torch.allclose(answer, expected[question], rtol=1e-6, atol=1e-6)
        except Exception as error:
            outcome = error
        outcomes.append((outcome, time.monotonic() - begin))


def test_nothing_is_lost_or_wrong_and_memory_stays_flat(serve, tmp_path):
    local, outcomes, rng = LogProbScorer(model()), [], random.Random(0)
    questions = [(seed, size) for size in SIZES for seed in range(SEEDS)]
    expected = {question: local.score(sequences(question[0], count=question[1])).values for question in questions}
    service = serve(factory=partial(deadly, str(tmp_path)), num_replicas=2, health_check_timeout_s=10.0)
    end, faults, memory = time.monotonic() + SECONDS, Faults(service), []
    common = service.model, expected, end
    threads = [threading.Thread(target=work, args=(*common, i, outcomes), daemon=True) for i in range(CALLERS)]
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        time.sleep(rng.uniform(5, 20))
        memory.append(resident(os.getpid()))
        faults.happen(rng)
    for thread in [*threads, *faults.threads]:
        thread.join(timeout=LONG)
    assert not any(thread.is_alive() for thread in threads)
    until(lambda: len(pids(service)) == 2, seconds=LONG)
    times = sorted(seconds for _, seconds in outcomes)
    quantiles = [round(times[int(share * (len(times) - 1))], 2) for share in (0.5, 0.99, 1.0)]
    print(len(outcomes), "answers; p50, p99 and slowest, seconds:", quantiles, dict(faults.done), flush=True)
    service.shutdown()
    with pytest.raises(ServiceClosedError):
        clone(service.model).make_scorer().score(sequences())
    assert [str(outcome) for outcome, _ in outcomes if outcome is not True] == []
    assert not faults.odd
    assert len(outcomes) > 5 * SECONDS
    half = len(memory) // 2
    assert max(memory[half:]) - max(memory[:half]) < 30
