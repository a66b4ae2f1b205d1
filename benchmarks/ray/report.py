"""The run as tables in the terminal and as a Markdown page."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.ray.comparison import Calls
from benchmarks.ray.overhead import Overhead
from benchmarks.ray.processor import CALLER, MODEL, OTHERS
from benchmarks.ray.results import RayRun
from benchmarks.ray.scale import LARGER, TOP_K, Scale
from benchmarks.ray.sides import SEQUENCES, UNRELATED_BYTES
from benchmarks.report import _goal, _target, _verdict, markdown_table

_INTRO = """# Benchmark of the Ray service

Written by `{command}`; do not edit.

Client processes apply the Ray transforms of torchrl {torchrl} and of this library to TensorDicts of {sequences}
sequences, which also hold an unrelated entry of {unrelated} MiB. Runs are interleaved, so that load on the machine
affects both. All clients of a library share its actors. Model: {model}; one thread for each actor. On the same data
both compute the same numbers{difference}.

*Both models served*: `RayRetrieveKL`, with the policy and the reference in actors. torchrl's class requires None for
both models and a factory for each; other arguments fail at construction or at the first call. *Reference served*: only
the log-probs of the reference, for a policy whose log-probs came with the samples. torchrl has no working transform for
this: here its `RayTransform` wraps its `RetrieveLogProb`, as in its other Ray transforms.
"""

_FAULTS = """Eight callers in one process score 4 x 32 tokens without a pause, each row on a new service. Every answer is
compared with a local scorer's of the version that it names. `load` is the number of processes that wanted one of {cores} cores,
other programs among them; the actors have their niceness (0).
"""

_PROCESSOR = """### What they wait for

CPU time of a call in milliseconds, by kind of process, and how many of the {cores} cores the actors with a model keep busy.
A row with little idle time needs more cores, one whose actors are always busy more actors or a faster model.
"""

_LINES = (
    "served",
    "callers",
    "tokens",
    "torchrl calls/s",
    "here calls/s",
    "here tokens/s",
    "faster",
    "torchrl p50/p99 ms",
    "here p50/p99 ms",
)


def print_tables(run: RayRun, console: Console) -> None:
    """Print the measurements as tables."""
    if run.lines:
        title = f"torchrl {run.versions['torchrl']} beside torchrl_llm_kl {run.versions['torchrl_llm_kl']}"
        _print(console, title, _LINES, _lines(run))
    if run.bytes:
        _print(console, "Bytes of a call", *_bytes(run))
    if run.faults:
        _print(console, "Faults", *_faults(run))
    for goal in run.goals:
        console.print(f"[{'green' if goal.met else 'red'}]{_verdict(goal)}[/]: {_goal(goal)} ({goal.what})")


def markdown(run: RayRun) -> str:
    """The Markdown page."""
    parts = [
        _INTRO.format(
            command=run.command,
            torchrl=run.versions["torchrl"],
            sequences=SEQUENCES,
            unrelated=UNRELATED_BYTES // 2**20,
            model=run.model,
            difference="" if run.difference is None else f", to {run.difference:.0e} nats",
        )
    ]
    if run.settings.get("quick") == "yes":
        parts.append("**A quick run of the smallest sizes: these figures mean nothing.**\n")
    goals = [[g.what, f"{g.found:.3g}", _target(g), _verdict(g)] for g in run.goals]
    if goals:
        parts += ["## Targets\n", markdown_table(["figure", "found", "target", ""], goals)]
    if run.lines:
        parts.append("## Throughput and latency\n\n`faster` is the median over rounds of the ratio of both windows.\n")
        parts.append(markdown_table(list(_LINES), _lines(run)))
        parts += [_bound(run, o) for o in run.overheads]
    if run.processor:
        parts += [_PROCESSOR.format(cores=run.machine["cores"]), markdown_table(*_processor(run))]
    if run.overheads:
        rows = [
            [str(o.length), *(f"{1e3 * value:.2f}" for value in (o.local, o.bare, o.remote, o.seconds))]
            for o in run.overheads
        ]
        parts.append(
            f"## One call of one caller\n\nMedians, {SEQUENCES} sequences, interleaved. "
            "The bare actor holds only a scorer: it shows Ray's own share.\n"
        )
        columns = ["tokens of each", "local scorer, ms", "bare Ray actor, ms", "service, ms", "service over local, ms"]
        parts.append(markdown_table(columns, rows))
        names = list(run.overheads[0].stages)
        stages = [[name, *(f"{1e3 * o.stages[name]:.2f}" for o in run.overheads)] for name in names]
        parts.append("Where the time of a remote call goes; means, in ms:\n")
        parts.append(markdown_table(["", *(f"{o.length} tokens" for o in run.overheads)], stages))
    if run.scale is not None:
        parts += _scale(run.scale)
    if run.faults:
        parts += ["## Faults\n", _FAULTS.format(cores=run.machine["cores"]), markdown_table(*_faults(run))]
    if run.bytes:
        header, rows = _bytes(run)
        parts += ["## Bytes of a call\n\nPickled as Ray does.\n", markdown_table(list(header), rows)]
    where = {**run.machine, **run.settings, **run.versions}
    parts += ["## Where\n", markdown_table(["", ""], [[name, value] for name, value in where.items()])]
    return "\n".join(parts)


def _lines(run: RayRun) -> list[list[str]]:
    return [
        [
            line.case.served,
            str(line.case.callers),
            f"{SEQUENCES} x {line.case.length}",
            f"{line.theirs.throughput:.1f}",
            f"{line.ours.throughput:.1f}",
            f"{line.ours.throughput * line.case.tokens:,.0f}",
            f"{line.faster:.1f}x",
            _latency(line.theirs),
            _latency(line.ours),
        ]
        for line in run.lines
    ]


def _processor(run: RayRun) -> tuple[list[str], list[list[str]]]:
    kinds = (CALLER, MODEL, OTHERS)
    header = ["served", "callers", "tokens", "", "calls/s", *(f"{kind}, ms" for kind in kinds)]
    header += ["actors busy", "cores idle"]
    rows = [
        [
            x.case.served,
            str(x.case.callers),
            f"{SEQUENCES} x {x.case.length}",
            x.side,
            f"{x.throughput:.1f}",
            *(f"{1e3 * x.seconds[kind]:.1f}" for kind in kinds),
            f"{x.busy:.2f}",
            f"{x.idle:.0%}",
        ]
        for x in run.processor
    ]
    return header, rows


def _bound(run: RayRun, overhead: Overhead) -> str:
    most = 1 / overhead.local
    alone = [x for x in run.lines if x.case.served == "reference" and x.case.length == overhead.length]
    busiest = max(alone, key=lambda line: line.case.callers, default=None)
    limit = "" if busiest is None else f": {most / busiest.theirs.throughput:.1f} times torchrl's reference"
    return (
        f"Alone, in one thread, the model takes {1e3 * overhead.local:.1f} ms for {SEQUENCES} x {overhead.length} tokens: an "
        f"actor answers {most:.0f} such calls per second at most{limit}, unless scoring them together is cheaper.\n"
    )


def _latency(calls: Calls) -> str:
    return f"{1e3 * calls.latency_p50:.0f}/{1e3 * calls.latency_p99:.0f}"


def _scale(scale: Scale) -> list[str]:
    rows = [
        [
            size.name,
            str(size.callers),
            f"{size.sequences} x {size.length}",
            str(size.calls),
            f"{1e3 * size.latency_p50:.0f}",
            f"{1e3 * size.latency_p99:.0f}",
            f"{size.latency_p99 / scale.batch:.1f}",
        ]
        for size in scale.sizes
    ]
    spread = scale.spread
    return [
        "## Many callers at once\n\nAll of them call one replica without a pause. "
        f"A full batch takes {1e3 * scale.batch:.0f} ms; a larger call is scored in pieces.\n",
        markdown_table(["", "callers", "tokens of a call", "calls", "p50 ms", "p99 ms", "p99 in batches"], rows),
        f"One call for {spread.prompts} prompts x {spread.answers} answers over {spread.replicas} replicas becomes "
        f"{spread.requests:.0f} requests; they are sent after {1e3 * spread.client:.0f} ms, and answered after "
        f"{1e3 * spread.seconds:.0f} ms. The busiest replica has {spread.balance:.2f} times the mean number of tokens.\n",
        f"A call takes {1e3 * scale.plain:.0f} ms, with the top {TOP_K} of each token {1e3 * scale.top_k:.0f} ms: "
        f"{scale.plain / scale.top_k:.0%} of the plain throughput. That model is so small (hidden 64, {TOP_K} of 1,000 tokens) "
        f"that choosing them takes as long as its forward: `torch.topk` alone is a third of the time. With a {LARGER}, it is "
        f"{1e3 * scale.larger_plain:.0f} and {1e3 * scale.larger_top_k:.0f} ms: "
        f"{scale.larger_plain / scale.larger_top_k:.0%}.\n",
        f"Scores remembered on disk: the first epoch takes {1e3 * scale.first:.0f} ms, "
        f"the second {1e3 * scale.second:.1f} ms.\n",
    ]


def _bytes(run: RayRun) -> tuple[tuple[str, ...], list[list[str]]]:
    header = ("served", "tokens", "", "sent", "received", "sent with unrelated", "received with unrelated")
    rows = [
        [
            b.served,
            f"{SEQUENCES} x {b.length}",
            b.side,
            *(f"{value:,}" for value in (b.sent, b.received, b.sent_unrelated, b.received_unrelated)),
        ]
        for b in run.bytes
    ]
    return header, rows


def _faults(run: RayRun) -> tuple[list[str], list[list[str]]]:
    header = ["fault", "answers", "lost", "wrong", "slowest s", "load", ""]
    rows = [
        [f.what, f"{f.answers:,}", str(f.lost), str(f.wrong), f"{f.slowest:.1f}", f"{f.load:.0f}", f.note]
        for f in run.faults
    ]
    return header, rows


def _print(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    for i, name in enumerate(header):
        table.add_column(name.replace(" ", "\n"), justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
