"""Draw ``docs/architecture.png`` and write the table of ``docs/architecture.md`` from the package's own imports.

Run ``make docs`` after a change to the layers. ``tests/site/test_layers.py`` checks the code against :data:`LAYERS`.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = "torchrl_llm_kl"
ROOT = Path(__file__).parents[1] / PACKAGE
PAGE = Path(__file__).with_name("architecture.md")
PICTURE = Path(__file__).with_name("architecture.png")

#: The layers from bottom to top. Those in one row do not import one another; each may import from every row before it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("_foreign", "_typing", "_private"),
    ("_registry", "_files"),
    ("_numerics", "_exports"),
    ("masks", "ragged", "head"),
    ("rollouts", "scoring", "estimators"),
    ("advantages", "transforms", "losses", "datasets"),
    ("algorithms", "service", "diagnostics", "tasks"),
    ("training",),
    ("cli", "configs"),
)

HOLDS = {
    "_typing": "types that several layers name",
    "_private": "private names of other libraries, with the releases in which they were read",
    "_foreign": "settings of TRL, Trinity-RFT and verl: their names there and here",
    "_registry": "one registry: names, aliases, did-you-mean; hyper-parameter names",
    "_files": "files that are there whole or not at all",
    "_exports": "names that load on first use, from each layer's stub",
    "_numerics": "checks of shapes, ranges and finiteness; float32 promotion; masked means",
    "ragged": "variable-length data in one form, and its conversions",
    "masks": "which tokens the assistant produced",
    "head": "the linear head in tiles: log-prob, entropy, KL, top-k",
    "estimators": "KL estimators, exact KL, coefficients",
    "scoring": "the engine: token ids in, log-probs out",
    "rollouts": "reading and writing a rollout's TensorDict",
    "transforms": "TorchRL transforms: retrieve log-probs, compute the KL",
    "advantages": "advantages of groups, tokens and trajectories",
    "losses": "objectives, terms, aggregation, PolicyLoss",
    "datasets": "rows of files and datasets; SFT and preference data as TensorDicts",
    "algorithms": "typed presets, make_algorithm, translations of other libraries' settings",
    "service": "one model for many processes, over Ray",
    "diagnostics": "what a batch shows: a doctor's findings, tokens to look at",
    "tasks": "your own task: prompts, rewards from functions, tools, as an env",
    "training": "a run from a configuration: loop, evaluation, checkpoints, a model card",
    "cli": "the command line",
    "configs": "Hydra's config groups",
}


def layer_of(module: str) -> str:
    """``"losses"`` for ``"torchrl_llm_kl.losses._policy_loss"``; empty for the package itself and its ``__main__``."""
    return module.split(".")[1] if "." in module and not module.endswith(".__main__") else ""


@cache
def modules() -> dict[str, Path]:
    """Every module of the package: dotted name -> file."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = [PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Modules of the package that a file imports, at the top or in a function; and whether by a string alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in modules() else node.module), False
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    yield alias.name, False
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module":
            for argument in node.args:
                if isinstance(argument, ast.Constant) and str(argument.value).startswith(f"{PACKAGE}."):
                    yield str(argument.value), True


@cache
def edges() -> dict[str, set[str]]:
    """Layer -> the layers it imports."""
    out: dict[str, set[str]] = defaultdict(set)
    for module, path in modules().items():
        for target, lazily in imports(path):
            if not lazily and layer_of(target) not in ("", layer_of(module)) and layer_of(module):
                out[layer_of(module)].add(layer_of(target))
    return out


def size(layer: str) -> tuple[int, int]:
    """Files and lines of a layer."""
    files = [path for module, path in modules().items() if layer_of(module) == layer]
    return len(files), sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def table() -> str:
    """The layers from top to bottom, as Markdown."""
    rows = ["| layer | holds | imports | files | lines |", "|---|---|---|---|---|"]
    order = [layer for row in LAYERS for layer in row]
    for layer in reversed(order):
        below = [f"`{other}`" for other in order if other in edges()[layer] and not other.startswith("_")]
        files, lines = size(layer)
        rows.append(f"| `{layer}` | {HOLDS[layer]} | {', '.join(below) or '—'} | {files} | {round(lines, -1)} |")
    return "\n".join(rows) + "\n"


def write_page() -> None:
    """Replace the table in the page."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        re.sub(r"(<!-- table -->\n).*?(<!-- end -->)", lambda m: m[1] + table() + m[2], text, flags=re.DOTALL),
        encoding="utf-8",
    )


def reduced() -> dict[str, set[str]]:
    """Layer -> the layers it imports that no other of its imports brings along; base modules left out."""
    direct = {layer: {other for other in targets if not other.startswith("_")} for layer, targets in edges().items()}

    def reachable(layer: str) -> set[str]:
        return direct.get(layer, set()).union(*(reachable(other) for other in direct.get(layer, ())))

    return {
        layer: {t for t in targets if not any(t in reachable(other) for other in targets - {t})}
        for layer, targets in direct.items()
    }


def draw() -> None:
    """Layers as boxes, imports as arrows from the importer to what it imports."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import FancyBboxPatch

    colours = ["#f8f8f8", "#f0f0f0", "#e8e8e8", "#dbe9f6", "#cfe3d4", "#e4d7ef", "#fbe3c4", "#d8e8f0", "#f6d5d5"]
    step, half = 1.7, 0.42
    figure, axes = plt.subplots(figsize=(14.5, 12))
    place: dict[str, tuple[float, float]] = {}
    for height, row in enumerate(LAYERS):
        for i, layer in enumerate(row):
            x, y = 6 + 4.1 * (i - (len(row) - 1) / 2), step * height
            place[layer] = (x, y)
            box = FancyBboxPatch(
                (x - 1.85, y - half), 3.7, 2 * half, boxstyle="round,pad=0.02,rounding_size=0.1",
                facecolor=colours[height], edgecolor="#555555", zorder=2,
            )  # fmt: skip
            axes.add_patch(box)
            axes.text(x, y + 0.18, layer, ha="center", va="center", weight="bold", size=11, zorder=3)
            lines = textwrap.fill(HOLDS[layer], 42)
            axes.text(x, y - 0.13, lines, ha="center", va="center", size=7.8, zorder=3)
    for layer, targets in reduced().items():
        for target in sorted(targets):
            (x0, y0), (x1, y1) = place[layer], place[target]
            lean = 0.12 * (x1 - x0)  # arrows leave and arrive apart from one another
            axes.annotate(
                "", xy=(x1 - lean, y1 + half + 0.02), xytext=(x0 + lean, y0 - half - 0.02), zorder=1,
                arrowprops={"arrowstyle": "-|>", "color": "#333333", "lw": 1.2, "shrinkA": 0, "shrinkB": 0},
            )  # fmt: skip
    note = "an arrow goes from the importer to what it imports; imports that another one brings along are left out"
    axes.text(6, -0.75, f"any layer may use the base modules; {note}", ha="center", size=8, color="#444444")
    axes.set_xlim(-2.3, 14.3)
    axes.set_ylim(-1.0, step * (len(LAYERS) - 1) + 0.6)
    axes.axis("off")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    write_page()
    draw()
