"""Run the tests and the benchmarks that need a GPU, each within its own time, and write one report.

    python -m benchmarks.gpu FOLDER                      # on a CUDA device, ten minutes at most
    python -m benchmarks.gpu FOLDER --device sim --quick # try the script itself, without a GPU

A part that fails or takes too long is reported, and the next one runs. The report is written after every part, so it is there
even if the whole run is stopped. FOLDER holds report.json, report.md, the output of all parts (output.txt) and the results of
the benchmarks (bench/).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.environment import version_of

FIGURES = "figures.json"  # of the tests of one part, until they are in the report
ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "triton", "liger-kernel", "tensordict", "torchrl", "transformers", "trl", "pytest")
_RESULT = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)", re.MULTILINE)
_TAIL = 3000  # characters of a part's output in the report


@dataclass(frozen=True)
class Part:
    """A command and the most seconds that it may take."""

    name: str
    command: list[str]
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Done:
    """The outcome of a part. ``code`` is None if it took too long. ``failed`` names tests, ``figures`` are theirs."""

    name: str
    code: int | None
    seconds: float
    tests: dict[str, int]
    failed: list[str]
    figures: dict[str, object]
    tail: str


def parts_of(folder: Path, device: str, quick: bool) -> list[Part]:
    """All parts, the most important first: a run that is stopped has them."""
    python, on_gpu = sys.executable, device == "cuda"
    pytest = [python, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("pytest_timeout"):
        pytest += ["--timeout", "120"]
    place = {"TORCHRL_LLM_KL_DEVICE": device, "TORCHRL_LLM_KL_FIGURES": str(folder / FIGURES)}
    first = [f"tests/device/test_{name}.py" for name in ("fused_on_device", "scoring_on_device", "budgets")]
    sizes = ["--vocab", "2000", "--positions", "128"] if quick else ["--vocab", "151936", "--positions", "8192"]
    head = [python, "benchmarks/head.py", "--device", "cuda" if on_gpu else "cpu", "--repeats", "3", *sizes]
    bench = [
        python,
        "-m",
        "benchmarks",
        "run",
        "--device",
        "cuda" if on_gpu else "cpu",
        "--repeats",
        "1" if quick else "3",
    ]
    bench += ["--quick"] if quick else []
    parts = [
        Part("kernels", [*pytest, first[0]], 90, place),
        Part("head", [*head, "--dtype", "bfloat16", "--hidden", "64" if quick else "2048"], 45),
        Part("scoring", [*pytest, *first[1:]], 120, place),
    ]
    for name in ("a16", "d152k", "g"):
        own = ["--only", name, "--dtype", "bfloat16", "--out", str(folder / "bench")]
        parts.append(Part(f"bench_{name}", [*bench, *own], 75))
    others = [f"--ignore={path}" for path in first]
    return [*parts, Part("tests", [*pytest, "-m", "not slow", "tests/device", *others], 300, place)]


def run(part: Part, folder: Path, seconds: float) -> Done:
    """Run a part for at most so many seconds. Its output goes to a file, also if it is stopped."""
    log, start = folder / "output.txt", time.monotonic()
    before = log.stat().st_size if log.exists() else 0
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT), **part.environment}
    with log.open("a", encoding="utf-8") as out:
        process = subprocess.Popen(
            part.command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        code: int | None = None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None:  # out of time, or this script is stopped
                os.killpg(process.pid, signal.SIGKILL)  # the part and the processes that it started
    text = log.read_bytes()[before:].decode(errors="replace")
    results = _RESULT.findall(text)
    failed = [name for name, result in results if result in ("FAILED", "ERROR")]
    took, tests, path = round(time.monotonic() - start, 1), Counter(result for _, result in results), folder / FIGURES
    try:
        figures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError:  # the part was stopped while it wrote
        figures = {}
    path.unlink(missing_ok=True)
    return Done(part.name, code, took, dict(tests), failed, figures, text[-_TAIL:])


def surroundings(device: str) -> dict[str, str]:
    """The machine, the device and the versions."""
    found = {"python": platform.python_version(), "asked for": device}
    found |= {name: version_of(name) for name in PACKAGES}
    ask = (
        "import torch; p = torch.cuda.get_device_properties(0); print(p.name, torch.version.cuda, p.total_memory >> 30)"
    )
    try:
        asked = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=60, check=False)
        found["device, CUDA, GiB"] = asked.stdout.strip() or asked.stderr.strip().rsplit("\n", 1)[-1]
    except subprocess.TimeoutExpired:
        found["device, CUDA, GiB"] = "torch did not answer for a minute"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {**found, "commit": commit.stdout.strip()}


def write(folder: Path, about: dict[str, str], done: list[Done], left: list[Part]) -> None:
    """Write report.json and report.md."""
    report = {"about": about, "parts": [asdict(each) for each in done], "not run": [part.name for part in left]}
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    lines = ["# Run on a GPU", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += ["| part | outcome | seconds | tests |", "|---|---|---|---|"]
    for each in done:
        outcome = "stopped: out of time" if each.code is None else "passed" if each.code == 0 else f"code {each.code}"
        outcome = "nothing ran" if set(each.tests) == {"SKIPPED"} else outcome
        tests = ", ".join(f"{number} {result.lower()}" for result, number in each.tests.items())
        lines.append(f"| {each.name} | {outcome} | {each.seconds} | {tests} |")
    lines += [f"| {part.name} | not run: no time left | | |" for part in left]
    for each in done:
        lines += [
            "",
            f"## {each.name}",
            "",
            *(f"- failed: {name}" for name in each.failed),
            "",
            "```text",
            each.tail,
            "```",
        ]
    (folder / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Run all parts. Returns 0 if all passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(os.environ.get("OUT", "runs/gpu")))
    parser.add_argument("--device", choices=["cuda", "sim"], default="cuda")
    parser.add_argument("--minutes", type=float, default=9.5, help="for everything")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes")
    parser.add_argument("--only", action="append", help="the name of a part; may be repeated")
    args = parser.parse_args()
    end, folder = time.monotonic() + 60 * args.minutes, args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("output.txt", FIGURES):  # of an earlier run
        (folder / name).unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    about, done = surroundings(args.device), list[Done]()
    parts = parts_of(folder, args.device, args.quick)
    if unknown := {*(args.only or ())} - {part.name for part in parts}:
        parser.error(f"no part {sorted(unknown)}: expected some of {[part.name for part in parts]}.")
    parts = [part for part in parts if not args.only or part.name in args.only]
    write(folder, about, done, parts)
    for i, part in enumerate(parts):
        seconds = min(part.seconds, end - time.monotonic())
        if seconds < 5:
            break
        done.append(run(part, folder, seconds))
        write(folder, about, done, parts[i + 1 :])
        print(f"{part.name}: code {done[-1].code}, {done[-1].seconds} s, {done[-1].tests}", flush=True)
    print((folder / "report.md").read_text(encoding="utf-8")[:_TAIL])
    passed = [each.code == 0 and set(each.tests) != {"SKIPPED"} for each in done]
    return 0 if len(done) == len(parts) and all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
