"""Does the package work with the oldest and the newest releases it allows? ``make matrix`` asks its tests.

Each column is a set of releases in a virtual environment of its own, under ``.matrix/``:

- ``oldest``: the lower bounds of pyproject.toml;
- ``newest``: what pip chooses within the bounds;
- ``beyond``: today's releases without upper bounds, and torchrl's nightly build (``make nightly``).

In each, the package is installed and the core of the tests runs; then, but for ``beyond``, ``make test-numeric``'s tests once
for each of :data:`PROCESSORS`. ``docs/versions.md`` holds the table, with dates, and a row for each run of ``beyond``; failures
are in ``.matrix/COLUMN.log``. The tests never import the packages of another column: only this file and pip know of both.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import time
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
PAGE, RECORD = ROOT / "docs" / "versions.md", ROOT / "docs" / "versions.json"
COLUMNS = ("oldest", "newest", "beyond")
PACKAGES = ("torch", "tensordict", "torchrl", "transformers", "ray", "peft", "trl")
#: The distribution of a package in the column ``beyond``, if another one than its releases.
NIGHTLY = {"torchrl": "torchrl-nightly"}
EXTRAS = ("ray", "lora")
TOOLS = ("pytest>=8", "pytest-xdist>=3.5", "hypothesis>=6.100", "rich>=13", "typer>=0.12", "pyarrow>=15", "pillow")
#: What the package is for, from token ids to losses, without the tutorials, the tools around it and other libraries.
CORE = (
    *(
        f"tests/units/{layer}"
        for layer in ("ragged", "masks", "head", "estimators", "rollouts", "scoring", "transforms")
    ),
    *(f"tests/units/{layer}" for layer in ("advantages", "losses")),
    "tests/units/algorithms/test_make_algorithm.py",
    "tests/units/algorithms/test_prepare.py",
    "tests/ray/test_service.py",
    "tests/units/service/test_service_transforms.py",
)

#: Instructions of older processors, as PyTorch and MKL let one choose them on a newer one.
PROCESSORS = {
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}


def numeric() -> list[str]:
    """Pytest's arguments for the tests of numbers: those of ``make test-numeric``."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return re.search(r"^NUMERIC := (.+)$", makefile, re.M)[1].split()


# ------------------------------------------------------------------ what to install


def bounds() -> dict[str, str]:
    """The requirements of pyproject.toml on :data:`PACKAGES`: name -> ``">=2.7,<3"``."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.findall(r'"([a-z]+)(?:\[\w+\])?(>=[^"]+)"', text)
    return {name: specifier for name, specifier in found if name in PACKAGES}


def requirements(column: str, only: tuple[str, ...] = PACKAGES) -> list[str]:
    """What pip installs first for a column.

    Example:
        >>> requirements("oldest", only=("torchrl",))
        ['torchrl==0.14']
    """
    chosen = []
    for name, specifier in bounds().items():
        lower = re.match(r">=([\d.]+)", specifier)
        if name in only:
            assert lower is not None, f"{name}{specifier} has no lower bound"
            chosen.append(f"{name}=={lower[1]}" if column == "oldest" else f"{name}{specifier}")
            if column == "beyond":
                chosen[-1] = NIGHTLY.get(name, f"{name}>={lower[1]}")
    return chosen


def install(column: str, folder: Path, pins: list[str], torch_index: str | None) -> Path:
    """Make the environment of a column, torch first; returns its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    chosen = [pin for pin in requirements(column) if re.split("[=<>]", pin)[0] not in {p.split("==")[0] for p in pins}]
    chosen += pins
    torch = [pin for pin in chosen if re.match("torch[=<>]", pin)]
    run([*pip, *torch, *(("--index-url", torch_index) if torch_index else ())])
    if column == "beyond":  # the package's own upper bounds would win
        others = ("setuptools>=77", "safetensors", "filelock", "jinja2", "httpcore")
        run([*pip, "--upgrade", *chosen, *TOOLS, *others])
        run([*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)])
    else:
        run([*pip, *chosen, *TOOLS, "--editable", f"{ROOT}[{','.join(EXTRAS)}]"])
    return python


def run(command: list[str]) -> None:
    """Run a command; its output is shown if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nfailed:\n{done.stdout}{done.stderr}")


def versions(python: Path) -> dict[str, str]:
    """The installed releases of Python and :data:`PACKAGES`."""
    code = (
        "import json, platform; from importlib.metadata import packages_distributions as of, version; "
        f"print(json.dumps({{'python': platform.python_version()}} | {{n: version(of()[n][0]) for n in {PACKAGES!r}}}))"
    )
    return json.loads(subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout)


# ------------------------------------------------------------------ what it says


def test(
    column: str, python: Path, folder: Path, tests: list[str], workers: int, processor: Mapping[str, str]
) -> dict[str, Any]:
    """Run the tests with the environment of a processor; returns counts, seconds and the names of what failed."""
    report, log = (
        folder.with_name("-".join([folder.name, *processor.values()]) + suffix) for suffix in (".xml", ".log")
    )
    report.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-q", "-n", str(workers), "--dist", "loadfile", "-p", "no:cacheprovider"]
    command += ["-m", "not slow and not device", f"--junit-xml={report}", *tests]
    start = time.perf_counter()
    with log.open("w") as file:
        environment = os.environ | {"OMP_NUM_THREADS": "1", **processor}
        subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, check=False)
    if not report.exists():
        raise SystemExit(f"{column}: the tests did not run, see {log}:\n{log.read_text()[-2000:]}")
    cases = list(ElementTree.parse(report).iter("testcase"))
    broken = [f"{case.get('classname')}.{case.get('name')}" for case in cases if case.find("failure") is not None]
    broken += [f"{case.get('classname')}.{case.get('name')}" for case in cases if case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(broken) - skipped,
        "failed": sorted(broken),
        "skipped": skipped,
        "seconds": round(time.perf_counter() - start),
    }


def outcome(result: dict[str, Any] | None) -> str:
    """A cell: the tests of numbers on one processor."""
    return f"{result['passed']:,} passed, {len(result['failed'])} failed" if result else "not run yet"


def nightly_page(runs: list[dict[str, Any]]) -> str:
    """The table of the runs of ``beyond`` in ``docs/versions.md``, the newest first, and the cause of each failure."""
    lines = ["| date | " + " | ".join(PACKAGES) + " | passed | failed |", "|---" * (len(PACKAGES) + 3) + "|"]
    for run_ in reversed(runs):
        releases = " | ".join(run_["versions"].get(name, "") for name in PACKAGES)
        lines.append(f"| {run_['date']} | {releases} | {run_['passed']:,} | {len(run_['failed'])} |")
    causes = {name: cause for run_ in runs for name, cause in run_["failed"].items()}
    lines += ["", *(f"- `{name}`: {cause}" for name, cause in causes.items())] if causes else []
    return "\n".join(lines)


def page(record: dict[str, Any]) -> str:
    """The table of ``docs/versions.md``."""
    record = {column: each for column, each in record.items() if column != "nightly"}
    lines = [
        "| | " + " | ".join(record) + " |",
        "|---" * (len(record) + 1) + "|",
    ]
    rows: list[tuple[str, Any]] = [("tested on", lambda column: column["date"])]
    rows += [(name, lambda column, name=name: column["versions"].get(name, "")) for name in ("python", *PACKAGES)]
    rows.append(("tests passed", lambda column: f"{column['passed']:,}"))
    rows.append(("failed", lambda column: str(len(column["failed"]))))
    rows.append(("skipped", lambda column: str(column["skipped"])))
    for name, processor in PROCESSORS.items():
        title = "with " + ", ".join(f"`{key}={value}`" for key, value in processor.items())
        rows.append((title, lambda column, name=name: outcome(column.get("processors", {}).get(name))))
    lines += [f"| {name} | " + " | ".join(value(column) for column in record.values()) + " |" for name, value in rows]
    return "\n".join(lines)


def written(text: str, record: dict[str, Any]) -> str:
    """``docs/versions.md`` with the tables of a record."""
    for name, table in (("table", page(record)), ("nightly", nightly_page(record.get("nightly", [])))):
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{before}<!-- {name} -->\n{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


def main(
    columns: Annotated[list[str] | None, typer.Argument(help="oldest, newest or beyond.")] = None,
    torch_index: Annotated[
        str | None, typer.Option(help="Index of torch's wheels, such as PyTorch's for CPUs. Default: pip's own.")
    ] = None,
    pin: Annotated[list[str] | None, typer.Option(help="Such as torch==2.13.0; may be repeated.")] = None,
    tests: Annotated[list[str] | None, typer.Option(help="Instead of the core; may be repeated.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Of pytest.")] = 2,
    write: Annotated[bool, typer.Option(help="Write the result to docs/versions.md.")] = True,
) -> None:
    """Run the core of the tests with other releases; exit code 1 if something fails."""
    chosen = tuple(columns or COLUMNS[:2])
    if unknown := sorted(set(chosen) - set(COLUMNS)):
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(COLUMNS)}.")
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    console, broken = Console(), False
    for column in chosen:
        folder = ROOT / ".matrix" / column
        folder.parent.mkdir(exist_ok=True)
        console.print(f"{column}: installing")
        python = install(column, folder, pin or [], torch_index)
        found = versions(python)
        console.print(f"{column}: testing with " + ", ".join(f"{name} {version}" for name, version in found.items()))
        result = test(column, python, folder, list(tests or CORE), workers, {})
        numbers = list(tests or numeric())
        processors = {} if column == "beyond" else PROCESSORS
        on = {name: test(column, python, folder, numbers, workers, each) for name, each in processors.items()}
        today = datetime.date.today().isoformat()
        if column == "beyond":
            known = {name: cause for each in record.get("nightly", []) for name, cause in each["failed"].items()}
            failed = {name: known.get(name, "not explained yet") for name in result["failed"]}
            row = {"date": today, "versions": found, "passed": result["passed"], "failed": failed}
            record["nightly"] = [each for each in record.get("nightly", []) if each["date"] != today] + [row]
        else:
            record[column] = {"date": today, "versions": found, **result, "processors": on}
        broken = broken or bool(result["failed"]) or any(each["failed"] for each in on.values())
        table = Table(title=column, show_header=False, title_justify="left")
        for name in ("passed", "skipped", "seconds"):
            table.add_row(name, f"{result[name]:,}")
        table.add_row("failed", "\n".join(result["failed"][:40]) or "0")
        for name, each in on.items():
            table.add_row(name, "\n".join([outcome(each), *each["failed"][:40]]))
        console.print(table)
    record = {column: record[column] for column in (*COLUMNS, "nightly") if column in record}
    if write:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
    if broken:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
