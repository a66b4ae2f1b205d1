"""What a call costs its client, without Ray and models: ``python -m benchmarks.ray.requests``.

Replicas that answer at once with zeros; their own time is not counted. Also the router with many conversations.
"""

from __future__ import annotations

import time
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torchrl_llm_kl.service._wire import Reply, Request
from torchrl_llm_kl.service.client._router import Router

from torchrl_llm_kl import Ragged
from torchrl_llm_kl.scoring import ScoreOptions
from torchrl_llm_kl.service import RemoteScorer


class _Answer:
    """What stands for a reference."""

    def __init__(self, value: bytes) -> None:
        self.value = value


class _Connection:
    """Replicas in this process.

    Attributes:
        requests: since the last call of :meth:`reset`.
        seconds: spent in the replicas, likewise.
    """

    def __init__(self, count: int) -> None:
        self.spec, self.newest, self._count = SimpleNamespace(name="fakes"), 0, count
        self.reset()

    def reset(self) -> None:
        self.requests, self.seconds = 0, 0.0

    def usable(self) -> list[int]:
        return list(range(self._count))

    def saw(self, version: int) -> None:
        """All replies have one version."""

    def check_not_forked(self) -> None:
        """This process is not."""

    @property
    def handles(self) -> list[Any]:
        return [SimpleNamespace(score=SimpleNamespace(remote=self._answer))] * self._count

    def _answer(self, packed: bytes) -> Any:
        start = time.perf_counter()
        scored = int(Request.unpack(packed).scored.mask.sum())
        answer = Reply({"log_prob": torch.zeros(scored)}, 0).pack()
        self.requests += 1
        self.seconds += time.perf_counter() - start
        return _Answer(answer)


def call(replicas: int, *, prompts: int = 256, responses: int = 8, length: int = 500, repeats: int = 9) -> str:
    """Median seconds of a call in the client."""
    import ray

    rng = torch.Generator().manual_seed(0)
    prompt = 2 * length // 5
    rows = [
        torch.cat([start, torch.randint(50_000, (length - prompt,), generator=rng)])
        for start in torch.randint(50_000, (prompts, prompt), generator=rng)
        for _ in range(responses)
    ]
    data = Ragged.from_list(rows)
    fakes, seconds = _Connection(replicas), []
    there: Any = {
        "connection": fakes,
        "router": Router(),
        "version": None,
        "timeout": 10.0,
    }
    scorer = RemoteScorer(SimpleNamespace(**there), ScoreOptions())  # type: ignore[arg-type]
    get, ray.get = ray.get, lambda answer, timeout: answer.value
    try:
        for _ in range(repeats):
            fakes.reset()
            start = time.perf_counter()
            scorer.score(data, data.positions >= prompt)
            seconds.append(time.perf_counter() - start - fakes.seconds)
    finally:
        ray.get = get
    return (
        f"{prompts} prompts x {responses}, {length} tokens each, {replicas} replicas: {1e3 * median(seconds):.1f} ms, "
        f"{fakes.requests} requests"
    )


def routing(length: int, *, conversations: int = 8000, rows: int = 100) -> str:
    """Mean seconds of a call of one sequence beside conversations that all have another length."""
    rng, router = np.random.default_rng(0), Router()

    def assign(size: int) -> float:
        row = rng.integers(0, 50_000, size)
        start = time.perf_counter()
        router.assign(row, np.array([size]), np.array([100]), range(4), continues=True)
        return time.perf_counter() - start

    for size in range(500, 500 + conversations):
        assign(size)
    seconds = [assign(length) for _ in range(rows)]
    return f"routing a row of {length} tokens, {conversations} conversations known: {1e3 * median(seconds):.3f} ms"


if __name__ == "__main__":
    for count in (1, 4, 8):
        print(call(count))
    for size in (1000, 8000):
        print(routing(size))
