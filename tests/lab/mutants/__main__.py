"""Change one thing at a time in objectives and advantages, and see whether a test fails: ``python -m mutants``."""

from __future__ import annotations

import gc
import os
import pkgutil
import random
import signal
import sys
import time
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from project import PROJECT

from .catalogue import PACKAGE, UNCHANGED, Target, targets
from .equivalent import EQUIVALENT
from .mutations import Mutant, mutants_of
from .runner import OUT_OF_TIME, Job, Outcome, Sandbox

#: What tests import beside the package: loaded once, and there in every process that is forked.
PRELOADED = (
    "torch.testing",
    "hypothesis",
    "tensordict",
    "torchrl.objectives.common",
    "torchrl.envs.llm",
    "torchrl.modules.llm",
    "transformers:PreTrainedTokenizerFast",
)


@dataclass(frozen=True)
class Case:
    """A mutant of a file."""

    target: Target
    mutant: Mutant

    @property
    def key(self) -> tuple[str, str, str]:
        """As in ``EQUIVALENT``."""
        return self.target.file, self.mutant.function, self.mutant.after


def main(
    only: Annotated[list[str] | None, typer.Option(help="Files with this in their path, or that match it.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="No more mutants than this, chosen at random.")] = None,
    share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Of all mutants, chosen at random.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of that choice.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="How many run at once.")] = os.cpu_count() or 1,
    equivalent: Annotated[bool, typer.Option(help="Run only those that are listed as equivalent.")] = False,
) -> None:
    """Exit code 1 if a mutant survives that is not listed in equivalent.py."""
    console = Console()
    chosen = [target for target in targets(PROJECT) if not only or any(_matches(target.file, x) for x in only)]
    if not chosen:
        console.print(
            f"--only {' '.join(only or ())}: no such file. There are {', '.join(t.file for t in targets(PROJECT))}"
        )
        raise typer.Exit(2)
    os.environ.pop("TORCHRL_LLM_KL_PEERS", None)  # the tests of this project alone
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the copies are removed then too
    for name in PRELOADED:
        pkgutil.resolve_name(name)
    started = time.monotonic()
    with Sandbox(PROJECT, PACKAGE, jobs, UNCHANGED) as sandbox:
        gc.freeze()
        limits = _unchanged(console, sandbox, chosen)
        cases = [case for target in chosen if target.file in limits for case in _cases(sandbox, target)]
        run = [case for case in cases if (case.key in EQUIVALENT) == equivalent]
        run = random.Random(seed).sample(run, min(round(share * len(run)), len(run) if limit is None else limit))
        run.sort(key=cases.index)
        outcomes = _tried(console, sandbox, run, limits)
    survivors = [case for case in run if not outcomes[case].caught_by]
    console.print(_table(cases, outcomes))
    known = {case.key for case in cases}
    stale = [key for key in EQUIVALENT if key[0] in limits and key not in known]
    stale += [case.key for case in run if equivalent and outcomes[case].caught_by]
    for key in stale:
        message = f"\nequivalent.py lists what is no mutant, or not equivalent: {key}"
        console.print(escape(message), highlight=False, soft_wrap=True)
    unlisted = [case for case in survivors if case.key not in EQUIVALENT]
    slow = sum(outcome.caught_by.startswith(OUT_OF_TIME) for outcome in outcomes.values())
    console.print(
        f"\n{len(run)} mutants, {len(run) - len(survivors)} caught ({slow} by the time limit), {len(survivors)} survived "
        f"({len(unlisted)} not listed) in {time.monotonic() - started:.0f} s"
    )
    raise typer.Exit(int(bool(unlisted or stale or len(limits) < len(chosen))))


def _matches(file: str, pattern: str) -> bool:
    return pattern in file or fnmatch(file, pattern)


def _cases(sandbox: Sandbox, target: Target) -> list[Case]:
    text = sandbox.read(f"{PACKAGE}/{target.file}")
    return [Case(target, mutant) for mutant in mutants_of(text, graph=target.graph, functions=target.functions)]


def _unchanged(console: Console, sandbox: Sandbox, chosen: list[Target]) -> dict[str, float]:
    """Time limits of those files whose tests pass as they are."""
    limits = {}
    jobs = {_job(target, None, 600.0): target for target in chosen}
    with _progress(console) as progress:
        task = progress.add_task("unchanged", total=len(jobs))
        progress.refresh()
        for job, outcome in sandbox.run(jobs):
            progress.update(task, advance=1, refresh=True)
            if outcome.caught_by:
                console.print(
                    f"[red]{jobs[job].file}[/]: its tests fail without any change: {escape(outcome.caught_by)}"
                )
                console.print(escape("\n".join(outcome.output.splitlines()[-15:])), highlight=False)
            else:
                limits[jobs[job].file] = 20.0 + 5 * outcome.seconds
    return limits


def _tried(console: Console, sandbox: Sandbox, run: list[Case], limits: dict[str, float]) -> dict[Case, Outcome]:
    outcomes: dict[Case, Outcome] = {}
    jobs = {_job(case.target, case.mutant.text, limits[case.target.file]): case for case in run}
    survived = 0
    with _progress(console) as progress:
        task = progress.add_task("mutants", total=len(jobs))
        for job, outcome in sandbox.run(jobs):
            case = jobs[job]
            outcomes[case] = outcome
            if not outcome.caught_by:
                survived += 1
                _show(console, case)
            progress.update(
                task, advance=1, description=f"{case.target.file}, {survived} survived so far", refresh=True
            )
    return outcomes


def _show(console: Console, case: Case) -> None:
    where, mutant = f"{case.target.file}:{case.mutant.line}", case.mutant
    console.print(f"[bold]{where}[/] {mutant.function} ({mutant.kind})", highlight=False)
    console.print(escape(f"  - {mutant.before}\n  + {mutant.after}\n"), highlight=False, soft_wrap=True)


def _job(target: Target, text: str | None, limit: float) -> Job:
    return Job(f"{PACKAGE}/{target.file}", text, target.stages, limit)


def _progress(console: Console) -> Progress:
    # No thread of its own: processes are forked meanwhile.
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    return Progress(*columns, console=console, auto_refresh=False)


def _table(cases: list[Case], outcomes: dict[Case, Outcome]) -> Table:
    table = Table("file", *(), title="Mutants")
    for column in ("caught", "survived", "equivalent", "not run"):
        table.add_column(column, justify="right")
    for file in dict.fromkeys(case.target.file for case in cases):
        own = [case for case in cases if case.target.file == file]
        tried = [outcomes[case] for case in own if case in outcomes]
        listed = sum(case.key in EQUIVALENT and case not in outcomes for case in own)
        survived = sum(not outcome.caught_by for outcome in tried)
        numbers = (len(tried) - survived, survived, listed, len(own) - len(tried) - listed)
        table.add_row(file, *(str(number) if number else "" for number in numbers))
    return table


if __name__ == "__main__":
    typer.run(main)
