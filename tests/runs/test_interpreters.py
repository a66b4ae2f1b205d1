"""What takes an interpreter of its own: what imports load, streams of the command line, a writer that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torchrl_llm_kl
from torchrl_llm_kl import __version__
from torchrl_llm_kl.training import Checkpoints
from waits import LONG

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
training.evaluate
loaded("torchrl")
import torchrl.envs  # loads ray where it is installed
before = set(sys.modules)
{"; ".join(f"import torchrl_llm_kl.{layer}" for layer in LAYERS)}
print(sorted({{"ray", "transformers"}} & (set(sys.modules) - before)))
"""


def test_what_imports_load() -> None:
    """Neither the package nor an example nor a mistyped key loads torch, and no layer loads ray or transformers."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['torchrl_llm_kl']", "[]", "[]", "['torchrl']", "[]"]


# ------------------------------------------------------------------ the command line


def program(*words: str, **settings: Any) -> subprocess.CompletedProcess[Any]:
    command = [sys.executable, "-m", "torchrl_llm_kl", *words]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": LONG, **settings}
    return subprocess.run(command, check=False, **options)


def test_the_module_runs() -> None:
    found = program("version")
    assert (found.stdout, found.stderr, found.returncode) == (f"torchrl-llm-kl {__version__}\n", "", 0)


def test_a_reader_that_is_gone_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    done = program("version", stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_closed_stream() -> None:
    command = f"{sys.executable} -m torchrl_llm_kl version >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_completion_of_a_shell() -> None:
    words = {"_TORCHRL_LLM_KL_COMPLETE": "complete_bash", "COMP_WORDS": "torchrl-llm-kl est", "COMP_CWORD": "1"}
    assert program(env=os.environ | words).stdout.split() == ["estimators"]


def test_a_stream_without_unicode() -> None:
    for encoding, words in (("ascii", ()), ("latin-1", ()), ("ascii", ("--json",))):
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        found = program("estimators", *words, env=environment, text=False)
        assert found.returncode == 0
        assert "‖" in str(json.loads(found.stdout)) if words else b"\\u2016" in found.stdout


# ------------------------------------------------------------------ checkpoints

WRITER = """
import sys
from pathlib import Path
from torchrl_llm_kl.training import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=1)
print("ready", flush=True)
for step in range(1, 10**6):
    with checkpoints.writing(step, {"at": step}) as folder:
        for i in range(20):
            (folder / f"{i}.bin").write_bytes(bytes([step % 256]) * 5000)
"""


def test_a_process_killed_while_it_writes_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """The writer does nothing but write, and is killed as soon as there is half a checkpoint."""
    half_written = 0
    for _ in range(10):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        end = time.monotonic() + LONG
        while time.monotonic() < end and not (list(tmp_path.glob("step-*")) and list(tmp_path.glob(".new-*"))):
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        half_written += bool(list(tmp_path.glob(".new-*")))
        found = Checkpoints(tmp_path).latest()  # a warning would be an error of the test of damage
        assert found is not None
        assert (found.folder / "19.bin").read_bytes() == bytes([found.step % 256]) * 5000
        assert not list(tmp_path.glob(".*-*"))
        if half_written == 2:
            return
    raise AssertionError(f"{half_written} of 10 kills hit a checkpoint that was being written: the test shows nothing")
