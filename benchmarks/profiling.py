"""Where the time of each workload goes: ``python -m benchmarks.profiling``, ``make profile``.

Runs this library's side of the workloads under torch's profiler, and every matrix product of the profile alone: their sum is
the least time that the same products can take. Writes TIME.md and time.png. With one thread, times are the processor's.
"""

from __future__ import annotations

import math
import resource
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import environment
from benchmarks.measure import Contender, Measured
from benchmarks.results import RESULTS, Result, Run
from benchmarks.workloads import WORKLOADS, Settings
from benchmarks.workloads.base import OURS
from torchrl_llm_kl._private import onednn_linear
from torchrl_llm_kl.head import _functions, _operators
from torchrl_llm_kl.scoring import _attention, _passes

HERE = Path(__file__).parent

PRODUCTS, HEAD_PRODUCTS = "body products", "head products"
ATTENTION, BODY, HEAD = "attention", "body rest", "head rest"
LAYOUT, PYTHON = "layout", "Python"
PARTS = {
    PRODUCTS: "tab:blue",
    HEAD_PRODUCTS: "tab:cyan",
    ATTENTION: "tab:orange",
    BODY: "tab:green",
    HEAD: "tab:olive",
    LAYOUT: "tab:red",
    PYTHON: "tab:gray",
}
# Functions whose operators belong to a part.
_RANGES = {
    HEAD: [
        (_operators, "forward_sweep"),
        (_operators, "backward_sweep"),
        (_operators, "top_k_sweep"),
        (_functions, "find_kept"),
        (_functions, "kept_scores"),
    ],
    ATTENTION: [(_attention, "_attend")],
    BODY: [(_passes, "call")],
}
_ONEDNN = "mkldnn::_linear_pointwise"
_MATMULS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", _ONEDNN}

Shape = tuple[int, ...]  # batch, rows, inner, columns of a product


@dataclass
class Shares:
    """A profile of one run.

    Args:
        parts: seconds of each of ``PARTS``; their sum is ``wall``.
        wall: seconds of the run under the profiler.
        products: how often each matrix product ran.
        bare: seconds of all these products alone.
        cpu: seconds of all threads' processors, and of these in the kernel: mostly pages that are mapped.
        seconds: of a run without the profiler.
    """

    parts: dict[str, float]
    wall: float
    products: Counter[Shape]
    bare: float
    cpu: tuple[float, float]
    seconds: float

    @property
    def at_limit(self) -> float:
        """Time of the products alone, over their time in the run."""
        own = 1.0 if torch.get_num_threads() > 1 else self.cpu[0] / self.wall  # others' turns of the processor
        return self.bare / (self.parts[PRODUCTS] + self.parts[HEAD_PRODUCTS]) / own


@dataclass(frozen=True)
class Profiling(Settings):
    """Settings under which a workload is measured, and this library's side profiled."""

    products: torch.dtype = torch.float32  # of the matrix products
    found: list[Shares] = field(default_factory=list)

    def alternate(self, contenders: Mapping[str, Contender], **options: Any) -> dict[str, Measured]:
        """Run and profile ours alone; the others' times are NaN."""
        unknown = {name: Measured([math.nan], []) for name in contenders}
        if OURS not in contenders:
            return unknown
        ours = super().alternate({OURS: contenders[OURS]}, **{**options, "repeats": self.repeats})
        self.found.append(profiled(contenders[OURS], self.products, ours[OURS].seconds))
        return unknown | ours


def profiled(contender: Contender, dtype: torch.dtype, seconds: float) -> Shares:
    """Profile one run, and time its products alone; ``seconds`` are those of a run without the profiler."""
    given = contender.prepare()
    with _ranges():
        contender.run(given)  # the profiler's own start
        given = contender.prepare()
        before, start = _cpu(), time.perf_counter()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
            start = time.perf_counter()
            contender.run(given)
            wall = time.perf_counter() - start
        cpu = tuple(after - earlier for after, earlier in zip(_cpu(), before, strict=True))
    parts, products = dict.fromkeys(PARTS, 0.0), Counter[Shape]()
    for event in found.events():
        part, shape = _part_of(event)
        parts[part] += event.self_cpu_time_total / 1e6
        if shape is not None:
            products[shape] += 1
    parts[PYTHON] += wall - sum(parts.values())
    bare = sum(count * _bare(shape, dtype) for shape, count in products.items())
    return Shares(parts, wall, products, bare, (cpu[0], cpu[1]), seconds)


def _part_of(event: Any) -> tuple[str, Shape | None]:
    """The part that an operator's own time belongs to, and the shape of a product."""
    if not event.name.startswith(("aten::", "mkldnn::")):
        return PYTHON, None
    place, above = "", event
    while above is not None and not place:
        place = above.name if above.name in _RANGES else BODY if "Backward" in above.name else ""
        above = above.cpu_parent
    if "attention" in event.name or place == ATTENTION:
        return ATTENTION, None
    if event.name in _MATMULS:
        a, b = event.input_shapes[1:3] if "add" in event.name else event.input_shapes[:2]
        shape = (math.prod(a[:-1]), *reversed(b)) if event.name == _ONEDNN else (*a[:-2], a[-2], a[-1], b[-1])
        return HEAD_PRODUCTS if place == HEAD else PRODUCTS, shape
    return place or LAYOUT, None


@torch.no_grad()
def _bare(shape: Shape, dtype: torch.dtype) -> float:
    """Seconds of a product of this shape, by MKL into memory that is there or by oneDNN."""
    *batch, n, k, m = shape
    a, b = torch.rand(*batch, n, k).to(dtype), torch.rand(*batch, m, k).to(dtype)
    out = torch.empty(*batch, n, m, dtype=dtype)
    ways = [lambda: torch.matmul(a, b.mT, out=out)]
    if not batch and onednn_linear(a, b) is not None:
        ways.append(lambda: onednn_linear(a, b))
    clock, best = _clock(), math.inf
    for product in ways:
        product()
        taken = list[float]()
        while len(taken) < 3 or (sum(taken) < 0.03 and len(taken) < 100):
            start = clock()
            product()
            taken.append(clock() - start)
        best = min(best, *taken)
    return best


@contextmanager
def _ranges() -> Iterator[None]:
    """Context: names the time inside the functions of ``_RANGES``."""

    def named(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            with record_function(part):
                return function(*args, **options)

        return call

    with ExitStack() as stack:
        for part, places in _RANGES.items():
            for module, name in places:
                stack.enter_context(patch.object(module, name, named(getattr(module, name), part)))
        yield


def _clock() -> Callable[[], float]:
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def _cpu() -> tuple[float, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_stime


# ------------------------------------------------------------------ the report

_INTRO = """# Where the time goes

Written by `make profile`; do not edit.

One run of each workload of [RESULTS.md](RESULTS.md) under `torch.profiler`, on {processor} ({threads}), in shares of its time:
matrix products, attention over packs, other operators of body (norms, rotations, activations) and head (softmax, maxima),
operators outside of both (trees, layouts, indices, keys of TensorDicts), and Python with autograd's own time. "Kernel" is the
part of the processors' time that the system takes, mostly to map fresh pages; "busy" the processors' time over that of
the wall: the rest is waiting. "At limit" is the time of the same products alone, each of its shape and into memory that is
mapped, over their time in the run. "Faster" than the peer is the figure of RESULTS.md; "at most" is what it would be if nothing
but these products took time, and "reached" the share of it that is there. The goal is that of RESULTS.md, also as a share of
"at most": what is near 100% or over it, no code with these products can reach.

![The share of each part](time.png)
"""


def rows(found: Mapping[str, Shares], threads: int, results: Mapping[str, Result]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table; ``results`` are those of RESULTS.md."""
    header = ["", "run", *PARTS, "kernel", "busy", "at limit", "faster", "at most", "reached", "goal"]
    lines = []
    for name, each in found.items():
        reached, goal = each.bare / each.seconds, WORKLOADS[name].targets.faster
        faster = results[name].faster if name in results else math.nan
        figures = [f"{faster:.2f}x", *([f"{faster / reached:.1f}x", f"{reached:.0%}"] if reached else ["", ""])]
        if goal is not None:
            figures.append(f"{goal:g}x" + (f", {goal * reached / faster:.0%}" if reached else ""))
        lines.append(
            [
                name,
                f"{each.wall:.3g} s",
                *(f"{each.parts[part] / each.wall:.0%}" for part in PARTS),
                f"{each.cpu[1] / each.cpu[0]:.0%}",
                f"{each.cpu[0] / each.wall / threads:.0%}",
                f"{each.at_limit:.0%}" if each.bare else "",
                *(("" if "nan" in figure else figure) for figure in figures),
                *[""] * (4 - len(figures)),
            ]
        )
    return header, lines


def largest(found: Mapping[str, Shares], count: int = 12) -> list[list[str]]:
    """The products with the most operations of all workloads, and their speed alone."""
    total = Counter[Shape]()
    for each in found.values():
        total.update({shape: times * _flop(shape) for shape, times in each.products.items()})
    lines = []
    for shape, flop in total.most_common(count):
        speed = _flop(shape) / _bare(shape, torch.float32)
        lines.append([" x ".join(map(str, shape)), f"{flop / sum(total.values()):.0%}", f"{speed / 1e9:.0f}"])
    return lines


def _flop(shape: Shape) -> int:
    out = 2
    for size in shape:
        out *= size
    return out


def save_plot(found: Mapping[str, Shares], path: Path) -> None:
    """Shares of each part, one bar for each workload, and a mark where the products alone end."""
    figure, axis = plt.subplots(figsize=(12, 1.5 + 0.34 * len(found)), layout="constrained")
    left = [0.0] * len(found)
    for part, color in PARTS.items():
        width = [each.parts[part] / each.wall for each in found.values()]
        axis.barh(list(found), width, left=left, color=color, label=part)
        left = [a + b for a, b in zip(left, width, strict=True)]
    products = [each.parts[PRODUCTS] + each.parts[HEAD_PRODUCTS] for each in found.values()]
    limits = [
        each.at_limit * own / each.wall if own else 0.0 for each, own in zip(found.values(), products, strict=True)
    ]
    axis.scatter(limits, list(found), marker="|", s=160, color="black", zorder=3, label="the same products alone")
    axis.set(xlim=(0, 1), xlabel="share of a run's time", title="Where the time goes")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _markdown(header: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines]) + "\n"


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(WORKLOADS)}; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs without the profiler, of which the median counts.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="Number of torch threads. Default: torch's own.")] = None,
    quick: Annotated[bool, typer.Option(help="Use the smallest sizes, as a smoke test.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = HERE,
) -> None:
    """Profile; write TIME.md and time.png."""
    if threads is not None:
        torch.set_num_threads(threads)
    warnings.filterwarnings("ignore")
    threads, console, found = torch.get_num_threads(), Console(), dict[str, Shares]()
    settings = Profiling(repeats, quick, clock=_clock())
    for name in only or [name for name in WORKLOADS if name != "f"]:
        own = replace(settings, found=[], products=torch.bfloat16 if name == "bf16" else torch.float32)
        WORKLOADS[name].measure(own)
        found[name] = own.found[0]
        console.print(f"{name}: {own.found[0].wall:.3g} s")
    measured = Run.load(HERE).results if (HERE / RESULTS).exists() else ()
    header, lines = rows(found, threads, {result.name: result for result in measured})
    table = Table(*header)
    for line in lines:
        table.add_row(*line)
    console.print(table)
    processor = environment.machine(settings.device)["processor"]
    used = "one thread, whose processor time is counted" if threads == 1 else f"{threads} threads"
    page = [_INTRO.format(threads=used, processor=processor), _markdown(header, lines)]
    page += [
        "## The products with the most operations\n",
        _markdown(["shape", "of all", "alone, GFLOP/s"], largest(found)),
    ]
    out.mkdir(parents=True, exist_ok=True)
    (out / "TIME.md").write_text("\n".join(page), encoding="utf-8")
    save_plot(found, out / "time.png")


if __name__ == "__main__":
    typer.run(main)
