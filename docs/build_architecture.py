"""The layers of the package and their imports, which are read from the code, for the table of ``architecture.md``.

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

#: The layers from bottom to top. A layer may import from earlier rows, but not from its own row.
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
    "_typing": "types that several layers use, and attributes that another library's object may lack",
    "_private": "all uses of private names of other libraries",
    "_foreign": "settings of other libraries and their counterparts here",
    "_registry": "registries with suggestions for unknown names, specs of hyper-parameters",
    "_files": "writing files atomically",
    "_exports": "names that load on first use, listed in each layer's stub",
    "_numerics": "checks of shapes, ranges and finiteness, float32 promotion, masked means",
    "ragged": "variable-length data in one form, and its conversions",
    "masks": "which tokens the assistant produced",
    "head": "the linear head in tiles: log-prob, entropy, KL, top-k",
    "estimators": "KL estimators, exact KL, coefficients",
    "scoring": "scorers: token ids in, log-probs out",
    "rollouts": "reading and writing a rollout's TensorDict",
    "transforms": "TorchRL transforms: retrieve log-probs, compute the KL",
    "advantages": "advantages of groups, tokens and trajectories",
    "losses": "objectives, terms, aggregation, PolicyLoss",
    "datasets": "rows of files and datasets, SFT and preference data as TensorDicts",
    "algorithms": "typed presets, make_algorithm, translations of other libraries' settings",
    "service": "one model for many processes, over Ray",
    "diagnostics": "faults in a batch, and tools to look at its tokens",
    "tasks": "envs for your own task: prompts, reward functions, tools",
    "training": "training from a configuration: loop, evaluation, checkpoints, model card",
    "cli": "the command line",
}


def layer_of(module: str) -> str:
    """``"losses"`` for ``"torchrl_llm_kl.losses._policy_loss"``. Empty for the package itself and its ``__main__``."""
    return module.split(".")[1] if "." in module and not module.endswith(".__main__") else ""


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file for every module of the package."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = [PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """The package's modules that a file imports, at the top or in a function, and whether only a string names them."""
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
    """Layer -> the layers that it imports."""
    out: dict[str, set[str]] = defaultdict(set)
    for module, path in modules().items():
        for target, lazily in imports(path):
            if not lazily and layer_of(target) not in ("", layer_of(module)) and layer_of(module):
                out[layer_of(module)].add(layer_of(target))
    return out


def table() -> str:
    """A Markdown table of the layers from top to bottom."""
    rows = ["| layer | holds | imports |", "|---|---|---|"]
    order = [layer for row in LAYERS for layer in row]
    for layer in reversed(order):
        below = [f"`{other}`" for other in order if other in edges()[layer] and not other.startswith("_")]
        rows.append(f"| `{layer}` | {HOLDS[layer]} | {', '.join(below) or '—'} |")
    return "\n".join(rows) + "\n"
