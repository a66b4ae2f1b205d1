"""The layers of the package and their imports, read from the code; ``build_pages.py`` writes the table of the page.

``tests/site/test_layers.py`` checks the code against :data:`LAYERS`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = "torchrl_llm_kl"
ROOT = Path(__file__).parents[1] / PACKAGE

#: The layers from bottom to top. Those in one row do not import one another; each may import from every row before it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("_foreign", "_typing", "_private"),
    ("_registry", "_files"),
    ("_numerics", "_exports"),
    ("masks", "ragged", "head"),
    ("rollouts", "estimators"),
    ("scoring",),
    ("advantages", "transforms", "losses", "datasets"),
    ("algorithms", "service", "diagnostics", "tasks"),
    ("training",),
    ("cli",),
)

HOLDS = {
    "_typing": "types that several layers name",
    "_private": "private names of other libraries, with the releases in which they were read",
    "_foreign": "settings of TRL, Trinity-RFT and verl: their names there and here",
    "_registry": "one registry: names, did-you-mean; hyper-parameter names",
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


def table() -> str:
    """The layers from top to bottom, as Markdown."""
    rows = ["| layer | holds | imports |", "|---|---|---|"]
    order = [layer for row in LAYERS for layer in row]
    for layer in reversed(order):
        below = [f"`{other}`" for other in order if other in edges()[layer] and not other.startswith("_")]
        rows.append(f"| `{layer}` | {HOLDS[layer]} | {', '.join(below) or '—'} |")
    return "\n".join(rows) + "\n"
