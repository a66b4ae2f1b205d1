"""The results as a terminal table and as a Markdown page."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from benchmarks.measure import Measured
from benchmarks.results import Goal, Result, Run

_INTRO = """# Benchmark

Written by `{command}`; do not edit.

torchrl {torchrl} and this library do the same work on the same data, in turn in one process. Each figure is a median. The
range of a speed-up is its quartiles over the runs. Before timing, each comparison checks that both compute the same numbers.
"Differ by" is the largest difference. Memory is the peak minus the memory that the process held before. torchrl scores under
`no_grad` unless there is a loss, since it would keep the graphs of both models. "Products" is the share of the time here that
the matrix products and the attention of the distinct tokens take if nothing else is done, measured in the same run. It may
exceed 1, since they run in blocks of their own. The work on the state of a recurrent layer is left out.
"""


_TRL = """## Compared with TRL

The peers are the methods of TRL {trl}'s `GRPOTrainer`, and a plain padded forward whose head runs only at scored positions. On
a CPU, TRL as shipped runs its head at every position. The column "TRL" runs it only at scored positions, as on a GPU. The
columns on the right compare with that column. In its loss TRL also computes the entropy, for its log.
"""


_COUNTS = """### Work of a forward

TRL's asynchronous trainer packs shared prefixes, too. Its attention needs a kernel for CUDA, so its work is counted from its
own plan of the same batch, in one pack. It forwards the last token of each sequence, and one more token for each branch. Padded
rows attend to all pairs of a query and a key. Products are multiplications, of the linear layers, the attention and the head.
"""


def terminal_table(run: Run) -> Table:
    """The figures and targets as a table for the terminal."""
    table = Table(title=f"torchrl {run.versions['torchrl']} beside torchrl_llm_kl {run.versions['torchrl_llm_kl']}")
    for header in ("", "peer", "here", "faster", "less memory", "differ by", "products"):
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
    header = ["here", "faster", "less memory", "differ by", "products"]
    rows = [[f"**{r.name}**", r.title, *_figures(r)] for r in run.results if r.peer == "torchrl"]
    parts.append(markdown_table(["", "work", "torchrl", *header], rows))
    if beside_trl := [r for r in run.results if r.peer == "TRL"]:
        parts.append(_TRL.format(trl=run.versions["trl"]))
        others = list(beside_trl[0].outcome.others)
        rows = [
            [f"**{r.name}**", r.title, *map(_measured, r.outcome.others.values()), *_figures(r)] for r in beside_trl
        ]
        parts.append(markdown_table(["", "work", *others, "TRL", *header], rows))
        parts += _counts(beside_trl)
    alone = [r for r in run.results if r.peer not in ("torchrl", "TRL")]
    if alone:
        parts.append("## Compared with a plain forward, or with another setting\n")
        rows = [[f"**{r.name}**", r.title, r.peer, *_figures(r)] for r in alone]
        parts.append(markdown_table(["", "work", "peer", "the peer", *header], rows))
    parts += _pretrained()
    parts.append("## Targets\n")
    goals = [[f"**{r.name}**", g.what, f"{g.found:.3g}", _target(g), _verdict(g)] for r in run.results for g in r.goals]
    parts.append(markdown_table(["", "figure", "found", "target", ""], goals))
    parts += [_turns(result) for result in run.results if result.outcome.turns]
    if run.settings.get("quick") != "yes" and not all(goal.met for result in run.results for goal in result.goals):
        parts.append("[Why some targets are missed](profile.md) explains the limits from profiles.\n")
    parts.append("## Sizes\n")
    parts.append(_sizes(run))
    parts.append("## Machine and versions\n")
    where = {**run.machine, **run.settings, **run.versions}
    parts.append(markdown_table(["", ""], [[name, value] for name, value in where.items()]))
    return "\n".join(parts)


def _pretrained() -> list[str]:
    """The first table of the page of a real model, if ``benchmarks.real`` has written it."""
    page = Path(__file__).with_name("REAL.md")
    lines = page.read_text(encoding="utf-8").split("\n\n") if page.exists() else []
    tables = [part for part in lines if part.startswith("| work |")]
    return (
        [f"## With a pre-trained model\n\nGemma 3 270M on text of GSM8K ([more](REAL.md)).\n\n{tables[0]}\n"]
        if tables
        else []
    )


def _counts(results: list[Result]) -> list[str]:
    rows = []
    for result in results:
        least = min((each.products for each in result.outcome.counts.values()), default=0)
        for name, each in result.outcome.counts.items():
            counts = (f"{number:,}" for number in (each.tokens, each.pairs, each.positions))
            rows.append([f"**{result.name}**", name, *counts, f"{each.products:.3g}", f"{each.products / least:.2f}"])
    header = ["", "way", "tokens", "attention pairs", "positions of the head", "products", "of the least"]
    return [_COUNTS, markdown_table(header, rows)] if rows else []


def _turns(result: Result) -> str:
    turns = result.outcome.turns
    assert turns is not None
    rows = [
        [str(i + 1), str(new), _seconds(theirs), _seconds(ours), f"{theirs / ours:.1f}x"]
        for i, (new, theirs, ours) in enumerate(zip(turns.new_tokens, turns.theirs, turns.ours, strict=True))
    ]
    growth = (
        f"A new token of the last turn takes {turns.growth(turns.ours):.2f} times as long here as a new token of the first "
        f"turn, and {turns.growth(turns.theirs):.2f} times as long in torchrl.\n"
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
        "" if result.share is None else f"{result.share:.2f}",
    ]


def _measured(measured: Measured) -> str:
    memory = "" if measured.peak_mib is None else f", {measured.peak_mib:,.0f} MiB"
    return _seconds(measured.seconds) + memory


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _sizes(run: Run) -> str:
    """One row for each size, with the names of all comparisons of that size."""
    names: dict[tuple[str, str, str], list[str]] = {}
    for result in run.results:
        outcome = result.outcome
        size = outcome.work, "; ".join(outcome.notes), str(len(outcome.ours.all_seconds))
        names.setdefault(size, []).append(f"**{result.name}**")
    return markdown_table(
        ["", "data and model", "notes", "runs"], [[", ".join(each), *size] for size, each in names.items()]
    )


def _goal(goal: Goal) -> str:
    return f"{goal.short} {goal.found:.2g} {'≥' if goal.at_least else '≤'} {goal.target:g}"


def _target(goal: Goal) -> str:
    return f"{'≥' if goal.at_least else '≤'} {goal.target:g}"


def _verdict(goal: Goal) -> str:
    return "met" if goal.met else "missed"


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
