"""Import time on top of torchrl, in fresh processes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from benchmarks.measure import Measured
from benchmarks.results import Outcome, Targets
from benchmarks.workloads.base import OURS, THEIRS, Settings, Workload

BEFORE = "import torchrl"
STATEMENTS = {
    THEIRS: ["import torchrl.envs.llm"],
    OURS: ["import torchrl_llm_kl", "from torchrl_llm_kl import RetrieveKL"],
}
_SCRIPT = """
import json, sys, time
exec(sys.argv[1])
start, seconds = time.perf_counter(), []
for statement in sys.argv[2:]:
    exec(statement)
    seconds.append(time.perf_counter() - start)
print(json.dumps(seconds))
"""


def measure(settings: Settings) -> Outcome:
    """Time the imports. torchrl's includes its transforms; ours loads them on first use, which the note reports."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in STATEMENTS}
    for _ in range(settings.at_least(5)):
        for name, statements in STATEMENTS.items():
            settings.on_run(name)
            seconds[name].append(_seconds_until(statements))
    theirs = Measured([run[0] for run in seconds[THEIRS]], [])
    ours = Measured([run[0] for run in seconds[OURS]], [])
    first_use = statistics.median(run[-1] for run in seconds[OURS])
    return Outcome(
        "`import torchrl_llm_kl` beside `import torchrl.envs.llm`",
        theirs,
        ours,
        notes=(f"with `from torchrl_llm_kl import RetrieveKL`, which loads it all: {first_use:.2g} s",),
    )


def _seconds_until(statements: list[str]) -> list[float]:
    """Seconds from the end of :data:`BEFORE` to the end of each statement."""
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT, BEFORE, *statements]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


WORKLOADS = (Workload("f", "Import, on top of torchrl", measure, Targets()),)
