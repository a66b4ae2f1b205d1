"""How long tests wait for events in other processes. They wait longer on a busy machine.

Times that a test checks (a deadline that must pass, a pause that must stay short) are defined in the test.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

#: Seconds for events that end by themselves, such as the start of a replica or the end of a thread. Only a hang takes as long.
LONG = 240.0
#: Seconds of a thread for the steps of `pace` on a usual machine (2 cores of 3 GHz, both busy).
USUAL = 0.07


def slowdown() -> float:
    """The number of processes per core, now or on average over the last minute, at least 1."""
    running = os.getloadavg()[0]
    if (now := Path("/proc/loadavg")).exists():
        running = max(running, float(now.read_text().split()[3].partition("/")[0]))
    return max(1.0, running / len(os.sched_getaffinity(0)))


def pace() -> float:
    """The slowdown of small steps of Python and torch compared with a usual machine, at least 1."""
    begin, value = time.thread_time(), torch.zeros(8)
    for _ in range(20_000):
        value = value + 1
    return max(1.0, (time.thread_time() - begin) / USUAL)


def until(condition: Callable[[], object], *, seconds: float = 60.0) -> None:
    """Wait until a condition holds, at most so many seconds on an idle machine."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds * slowdown(), "it did not happen"
        time.sleep(0.02)


def wait_for_replicas() -> None:
    """Let services without a ``timeout`` wait as long as a replica's start takes on a busy machine."""
    from torchrl_llm_kl.service import ScoringService

    defaults = ScoringService.__init__.__kwdefaults__
    defaults["timeout"] = LONG
