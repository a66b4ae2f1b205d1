"""Another driver of the cluster: a process that runs pieces of a script and returns their output."""

import contextlib
import io
import json
import pickle
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path

import ray

from load import sequences

LAB = str(Path(__file__).parent)
#: Each script may use these names, and `connect` and `total`.
HEAD = """
import os, pickle, ray, signal, sys, time
from functools import partial
from remote_models import delayed, model
from load import sequences
from torchrl_llm_kl.service import ScoringService, ServiceConfigError, ServiceError
from waits import wait_for_replicas
wait_for_replicas()
"""


class Driver:
    """A process that is connected to the cluster of this one.

    Args:
        finds_lab: whether its actors can import the modules of this folder.
    """

    def __init__(self, *, finds_lab=True):
        address = ray.get_runtime_context().gcs_address
        start = f"import sys; sys.path[:0] = [{LAB!r}]; import drivers; drivers.serve({address!r}, {finds_lab})"
        command = [sys.executable, "-c", start]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, body):
        """Run a script. ``result()`` waits for it."""
        self.process.stdin.write(json.dumps(textwrap.dedent(body)) + "\n")
        self.process.stdin.flush()

    def result(self):
        line = self.process.stdout.readline()
        assert line, f"the driver ended with exit code {self.process.wait()}"
        found = json.loads(line)
        assert not found["error"], found["error"]
        return str(found["printed"]).strip()

    def run(self, body):
        self.start(body)
        return self.result()

    def exit(self):
        """End normally, as a script that is finished."""
        self.process.stdin.close()
        self.process.wait()

    def kill(self):
        self.process.kill()
        self.process.wait()


def handle_of(remote):
    """The Python expression of a served model, for a driver's script."""
    return f"pickle.loads(bytes.fromhex({pickle.dumps(remote).hex()!r}))"


def total(remote):
    return float(remote.make_scorer().score(sequences()).values.sum())


def serve(address, finds_lab):
    """The main function of the process. It runs one script, in JSON, per line of the input."""

    def connect(**options):
        environment = {"env_vars": {"PYTHONPATH": LAB, "OMP_NUM_THREADS": "1"}}
        options = {"address": address, "runtime_env": environment, **options}
        ray.init(log_to_driver=False, **{name: value for name, value in options.items() if value is not None})

    out, sys.stdout = sys.stdout, sys.stderr
    connect(**{} if finds_lab else {"runtime_env": None})
    names = {"connect": connect, "total": total}
    exec(HEAD, names)
    for line in sys.stdin:
        printed, error = io.StringIO(), ""
        try:
            with contextlib.redirect_stdout(printed):
                exec(json.loads(line), names)
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"printed": printed.getvalue(), "error": error}), file=out, flush=True)
