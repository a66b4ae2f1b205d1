"""Tests that need their own process: imports, streams of the command line, killed and concurrent writers."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import torchrl_llm_kl
from stored_rows import ScoreStore, has, put
from torchrl_llm_kl import __version__
from torchrl_llm_kl.training import Checkpoints
from waits import LONG, until

LAYERS = sorted(path.parent.name for path in Path(torchrl_llm_kl.__file__).parent.glob("*/__init__.py"))

#: Each line of the output is what a step of a program loaded: of its own packages, or of those that it must not load.
IMPORTS = f"""
import sys

def loaded(*names):
    print(sorted(set(names) & set(sys.modules)))

before = set(sys.modules)
import torchrl_llm_kl, torchrl_llm_kl.cli
print(sorted({{name.split(".")[0] for name in set(sys.modules) - before}} - sys.stdlib_module_names))
import torchrl_llm_kl.cli._commands
loaded("torch", "transformers", "pyarrow")
from torchrl_llm_kl import training
training.example_config(); training.load_model
loaded("torch", "torchrl", "transformers")
import torchrl_llm_kl.masks, torchrl_llm_kl.scoring
loaded("torchrl", "transformers", "ray")
training.evaluate
loaded("torchrl")
import torchrl.envs  # loads ray where it is installed
before = set(sys.modules)
{"; ".join(f"import torchrl_llm_kl.{layer}" for layer in LAYERS)}
print(sorted({{"ray", "transformers"}} & (set(sys.modules) - before)))
"""


def test_modules_that_imports_load() -> None:
    """The package, the example and errors about keys do not load torch, and no layer loads ray or transformers."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['torchrl_llm_kl']", "[]", "[]", "[]", "['torchrl']", "[]"]


def program(*words: str, **settings: Any) -> subprocess.CompletedProcess[Any]:
    command = [sys.executable, "-m", "torchrl_llm_kl", *words]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": LONG, **settings}
    return subprocess.run(command, check=False, **options)


def test_streams_of_the_module() -> None:
    """The output may be read, closed, or gone, or go to the completion of a shell."""
    found = program("version")
    assert (found.stdout, found.stderr, found.returncode) == (f"torchrl-llm-kl {__version__}\n", "", 0)
    read, write = os.pipe()
    os.close(read)
    done = program("version", stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
    command = f"{sys.executable} -m torchrl_llm_kl version >&-"
    done = subprocess.run(command, shell=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    words = {"_TORCHRL_LLM_KL_COMPLETE": "complete_bash", "COMP_WORDS": "torchrl-llm-kl est", "COMP_CWORD": "1"}
    assert program(env=os.environ | words).stdout.split() == ["estimators"]


@pytest.mark.parametrize(("encoding", "words"), [("ascii", ()), ("latin-1", ()), ("ascii", ("--json",))])
def test_a_stream_without_unicode(encoding: str, words: tuple[str, ...]) -> None:
    found = program("estimators", *words, env=os.environ | {"PYTHONIOENCODING": encoding}, text=False)
    assert found.returncode == 0
    assert "‖" in str(json.loads(found.stdout)) if words else b"\\u2016" in found.stdout


WRITER = """
import sys
from pathlib import Path
from torchrl_llm_kl.training import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=1)
for step in range(1, 10**6):
    with checkpoints.writing(step, {"at": step}) as folder:
        for i in range(20):
            (folder / f"{i}.bin").write_bytes(bytes([step % 256]) * 5000)
"""


def test_a_process_killed_while_writing_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    """The writer only writes, and is killed as soon as a checkpoint is half written."""
    half_written = 0
    for _ in range(10):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
        end = time.monotonic() + LONG
        while time.monotonic() < end and not (list(tmp_path.glob("step-*")) and list(tmp_path.glob(".new-*"))):
            time.sleep(0.001)
        process.kill()
        process.wait()
        half_written += bool(list(tmp_path.glob(".new-*")))
        found: Any = Checkpoints(tmp_path).latest()  # a warning would be an error of the test of damage
        assert (found.folder / "19.bin").read_bytes() == bytes([found.step % 256]) * 5000
        assert not list(tmp_path.glob(".*-*"))
        if half_written == 2:
            return
    raise AssertionError(f"{half_written} of 10 kills hit a checkpoint that was being written: the test shows nothing")


SMALL = 2**16


def work(folder: str, seed: int) -> None:
    """Write and read random sequences, including those of other processes, and assert that the scores are right."""
    store, hits = ScoreStore(folder, max_bytes=SMALL), 0
    for number in np.random.default_rng(seed).integers(400, size=400).tolist():
        if has(store, number):
            hits += 1
        else:
            put(store, number)
        assert store.num_bytes <= SMALL
    assert hits > 20


def write_for_ever(folder: str, first: int) -> None:
    store = ScoreStore(folder)
    for number in range(first, 10**9):
        put(store, number)


def start(target: Callable[..., None], *args: Any) -> Any:
    process = multiprocessing.get_context("spawn").Process(target=target, args=args)
    process.start()
    return process


def test_several_processes_write_and_read_at_once(tmp_path: Path) -> None:
    processes = [start(work, str(tmp_path), seed) for seed in range(3)]
    for process in processes:
        process.join(LONG)
    assert [process.exitcode for process in processes] == [0] * 3
    reader = ScoreStore(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sum(has(reader, number) for number in range(400)) > 50


def test_a_process_killed_while_writing_scores_damages_nothing(tmp_path: Path) -> None:
    reader = ScoreStore(tmp_path)
    for first in (0, 10_000, 20_000):
        process = start(write_for_ever, str(tmp_path), first)
        until(lambda first=first: has(reader, first + 20))
        os.kill(process.pid, signal.SIGKILL)
        process.join(LONG)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(has(reader, first + number) for first in (0, 10_000, 20_000) for number in range(20))
        put(reader, 5000)  # nothing holds the file
    assert has(reader, 5000)
