"""The results as a terminal table and as a Markdown page."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from benchmarks.measure import Measured
from benchmarks.results import Goal, Result, Run

# Written by hand from profiles. It explains why some targets are missed.
PROFILE = Path(__file__).with_name("profile.md")

_INTRO = """# Benchmark

Written by `{command}`; do not edit.

torchrl {torchrl} and this library do the same work on the same data, interleaved in one process; figures are medians, with the
quartiles of the speed-up over the runs. Each comparison first checks that both compute the same numbers, up to the difference
in the table. Memory is the peak above the memory that the process held before. Scoring without a loss runs under `no_grad` in
torchrl, which otherwise keeps the graphs of both models.
"""


_TRL = """## Beside TRL

The methods of TRL {trl}'s `GRPOTrainer`, and a plain padded forward that projects scored positions only. On a CPU TRL as
shipped projects every position; "TRL" does so at scored positions only, as it does on a GPU: the columns on the right compare
with that.
"""


def terminal_table(run: Run) -> Table:
    """The figures and targets as a table for the terminal."""
    table = Table(title=f"torchrl {run.versions['torchrl']} beside torchrl_llm_kl {run.versions['torchrl_llm_kl']}")
    for header in ("", "peer", "here", "faster", "less memory", "differ by"):
        table.add_column(header, justify="right" if header else "left", no_wrap=True, min_width=0 if header else 5)
    table.add_column("targets", no_wrap=True)
    for result in run.results:
        goals = "\n".join(f"[{'green' if goal.met else 'red'}]{_goal(goal)}[/]" for goal in result.goals)
        table.add_row(result.name, *_figures(result), goals)
    return table


def markdown(run: Run) -> str:
    """The page RESULTS.md."""
    parts = [_INTRO.format(command=run.command, torchrl=run.versions["torchrl"])]
    if run.settings.get("quick") == "yes":
        parts.append("**A quick run of the smallest sizes: these figures mean nothing.**\n")
    parts.append("![Time and memory beside torchrl, and the cost of each turn of a conversation](results.png)\n")
    header = ["here", "faster", "less memory", "differ by"]
    rows = [[f"**{r.name}**", r.title, *_figures(r)] for r in run.results if r.peer == "torchrl"]
    parts.append(markdown_table(["", "work", "torchrl", *header], rows))
    if beside_trl := [r for r in run.results if r.peer == "TRL"]:
        parts.append(_TRL.format(trl=run.versions["trl"]))
        others = list(beside_trl[0].outcome.others)
        rows = [
            [f"**{r.name}**", r.title, *map(_measured, r.outcome.others.values()), *_figures(r)] for r in beside_trl
        ]
        parts.append(markdown_table(["", "work", *others, "TRL", *header], rows))
    alone = [r for r in run.results if r.peer not in ("torchrl", "TRL")]
    if alone:
        parts.append("## Beside a plain forward, and beside itself\n")
        rows = [[f"**{r.name}**", r.title, r.peer, *_figures(r)] for r in alone]
        parts.append(markdown_table(["", "work", "compared with", "that", *header], rows))
    parts.append("## Targets\n")
    goals = [[f"**{r.name}**", g.what, f"{g.found:.3g}", _target(g), _verdict(g)] for r in run.results for g in r.goals]
    parts.append(markdown_table(["", "figure", "found", "target", ""], goals))
    parts += [_turns(result) for result in run.results if result.outcome.turns]
    if run.settings.get("quick") != "yes" and not all(goal.met for result in run.results for goal in result.goals):
        parts.append(PROFILE.read_text(encoding="utf-8"))
    parts.append("## Sizes\n")
    parts.append("".join(f"- **{r.name}**: {_size(r)}.\n" for r in run.results))
    parts.append("## Where\n")
    where = {**run.machine, **run.settings, **run.versions}
    parts.append(markdown_table(["", ""], [[name, value] for name, value in where.items()]))
    return "\n".join(parts)


def _turns(result: Result) -> str:
    turns = result.outcome.turns
    assert turns is not None
    rows = [
        [str(i + 1), str(new), _seconds(theirs), _seconds(ours), f"{theirs / ours:.1f}x"]
        for i, (new, theirs, ours) in enumerate(zip(turns.new_tokens, turns.theirs, turns.ours, strict=True))
    ]
    growth = (
        f"A new token of the last turn takes {turns.growth(turns.ours):.2f} times as long as one of the first here, "
        f"{turns.growth(turns.theirs):.2f} times in torchrl.\n"
    )
    heading = f"## {result.name}: cost of each turn\n\n{growth}\n"
    return heading + markdown_table(["turn", "new tokens", "torchrl", "here", "faster"], rows)


def _figures(result: Result) -> list[str]:
    outcome = result.outcome
    return [
        _measured(outcome.theirs),
        _measured(outcome.ours),
        f"{result.faster:.1f}x" + ("" if result.quartiles is None else " ({:.1f} to {:.1f})".format(*result.quartiles)),
        "" if result.smaller is None else f"{result.smaller:.1f}x",
        "" if outcome.difference is None else f"{outcome.difference:.0e}",
    ]


def _measured(measured: Measured) -> str:
    memory = "" if measured.peak_mib is None else f", {measured.peak_mib:,.0f} MiB"
    return _seconds(measured.seconds) + memory


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _size(result: Result) -> str:
    repeats = f"medians of {len(result.outcome.ours.all_seconds)}"
    return "; ".join((result.outcome.work, *result.outcome.notes, repeats))


def _goal(goal: Goal) -> str:
    return f"{goal.short} {goal.found:.2g} {'≥' if goal.at_least else '≤'} {goal.target:g}"


def _target(goal: Goal) -> str:
    return f"at {'least' if goal.at_least else 'most'} {goal.target:g}"


def _verdict(goal: Goal) -> str:
    return "met" if goal.met else "missed"


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
