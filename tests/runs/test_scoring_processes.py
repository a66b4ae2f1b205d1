"""Scoring across processes: a store that several write at once and some are killed in; what an import loads."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stored_rows import ScoreStore, has, put, shards
from waits import LONG, until


def work(folder: str, seed: int, rounds: int) -> None:
    """Write and read random sequences, also those of others; an AssertionError for a wrong score."""
    from filelock import FileLock

    store = ScoreStore(folder, max_bytes=20_000, shard_bytes=3000)
    rng, hits = np.random.default_rng(seed), 0
    for _ in range(rounds):
        number = int(rng.integers(200))
        if has(store, number):
            hits += 1
        else:
            put(store, number)
        with FileLock(Path(folder) / "lock"):
            assert store.num_bytes <= 20_000
    store.flush()
    assert hits > rounds // 10


def write_for_ever(folder: str) -> None:
    store, number = ScoreStore(folder, max_bytes=10**6, shard_bytes=2000), 0
    while True:
        put(store, number % 1000)
        number += 1


def write_and_leave(folder: str) -> None:
    put(ScoreStore(folder), 7)


def start(target: Callable[..., None], *args: Any) -> Any:
    process = multiprocessing.get_context("spawn").Process(target=target, args=args)
    process.start()
    return process


def test_several_processes_write_and_read_at_once_and_their_ends_write_what_waits(tmp_path: Path) -> None:
    processes = [start(work, str(tmp_path / "shared"), seed, 400) for seed in range(3)]
    processes.append(start(write_and_leave, str(tmp_path / "left")))
    for process in processes:
        process.join(LONG)
    assert [process.exitcode for process in processes] == [0] * 4
    assert has(ScoreStore(tmp_path / "left"), 7)
    reader = ScoreStore(tmp_path / "shared")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sum(has(reader, number) for number in range(200)) > 50
    assert not list(tmp_path.glob("*/*.tmp"))


def test_a_process_killed_while_it_writes_harms_nothing(tmp_path: Path) -> None:
    for _ in range(3):
        before = len(shards(tmp_path))
        process = start(write_for_ever, str(tmp_path))
        until(lambda before=before: len(shards(tmp_path)) >= before + 20)
        os.kill(process.pid, signal.SIGKILL)
        process.join(LONG)
    reader = ScoreStore(tmp_path, max_bytes=10**6, shard_bytes=2000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sum(has(reader, number) for number in range(1000)) > 100
        put(reader, 5000)
        reader.flush()  # the lock is free, and drafts are gone
    assert has(reader, 5000)
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_does_not_write_the_records_of_its_parent(tmp_path: Path) -> None:
    store = ScoreStore(tmp_path)
    put(store, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            put(store, 2)
            store.flush()
            code = 0 if has(store, 2) and not has(store, 1) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert has(store, 2)
    store.flush()
    assert has(ScoreStore(tmp_path), 1)


def test_importing_the_scorer_imports_neither_transformers_nor_ray():
    program = (
        "import sys, torchrl_llm_kl.scoring; "
        "print([name for name in ('transformers', 'ray', 'torchrl') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
