"""Run torchrl's own tests of its LLM transforms against this package's: ``python tests/lab/upstream_run.py CHECKOUT``.

CHECKOUT is a folder with torchrl's repository (its ``test/llm``), at the version that is installed. The tests are copied
and only their import of the transforms is changed; hub names load tiny models (``tiny_hub.py``).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

HERE = Path(__file__).resolve().parent
SELECTED = ("test_wrapper.py::TestKLTransforms", "test_llm_objectives.py")
_IMPORT = "from torchrl.envs.llm.transforms.kl import"


def copy_with_swapped_import(checkout: Path, folder: Path, *, swap: bool = True) -> None:
    """Copy the tests and their conftests into ``folder``, with the transforms imported from this package."""
    tests = checkout / "test"
    if not (tests / "llm" / "test_wrapper.py").is_file():
        raise FileNotFoundError(
            f"{checkout} holds no test/llm/test_wrapper.py: pass the folder of torchrl's repository."
        )
    (folder / "llm").mkdir()
    for name in ("conftest.py", "llm/conftest.py", "llm/test_wrapper.py", "llm/test_llm_objectives.py"):
        text = (tests / name).read_text()
        if "test_" in name and swap:
            if _IMPORT not in text:
                raise ValueError(
                    f"{name} imports no transform of torchrl.envs.llm.transforms.kl: is this torchrl 0.14?"
                )
            text = text.replace(_IMPORT, "from torchrl_llm_kl import")
        (folder / name).write_text(text)


def run(checkout: Path, *, swap: bool = True) -> dict[str, tuple[str, str]]:
    """Each test's id (``Class.test[parameters]``), outcome (passed, failed, skipped) and last line of error.

    ``swap=False`` runs them on torchrl's own transforms, to compare.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_with_swapped_import(checkout, folder, swap=swap)
        report = folder / "report.xml"
        (folder / "pytest.ini").write_text("[pytest]\n")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tiny_hub",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
        ]
        paths = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [*command, *(f"llm/{test}" for test in SELECTED)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
        if not report.is_file():
            raise RuntimeError(f"torchrl's tests did not run:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return dict(_outcome(case) for case in ElementTree.parse(report).iter("testcase"))


def _outcome(case: ElementTree.Element) -> tuple[str, tuple[str, str]]:
    name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
    for tag, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            return name, (outcome, (found.get("message") or "").strip().partition("\n")[0])
    return name, ("passed", "")


def main() -> None:
    """Print a table of what failed, and of the numbers."""
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    outcomes = run(Path(sys.argv[1]), swap="--torchrl" not in sys.argv)
    for name, (outcome, message) in outcomes.items():
        if outcome != "passed":
            print(f"{outcome:8} {name}: {message}")
    counts = {outcome: sum(o == outcome for o, _ in outcomes.values()) for outcome in ("passed", "failed", "skipped")}
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.items()))


if __name__ == "__main__":
    main()
