"""Which files are changed, and which tests should notice."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from .runner import Stage

PACKAGE = "torchrl_llm_kl"
#: The layers below all that is changed.
UNCHANGED = tuple(f"{PACKAGE}.{layer}" for layer in ("ragged", "estimators", "masks", "scoring", "transforms"))
_PATTERNS = (
    "losses/objectives/_*.py",
    "losses/corrections.py",
    "losses/terms.py",
    "losses/_arithmetic.py",
    "losses/_value_loss.py",
    "advantages/_*.py",
)
#: They read and write TensorDicts, or names: no maths.
_KEYS = frozenset({"_registry.py", "_transform.py"})
#: Of a file with a module class, its pure function alone.
_FUNCTIONS = {"losses/_value_loss.py": frozenset({"value_error"})}
#: What is computed there has no gradient.
_WITHOUT_GRAPH = ("advantages/", "losses/corrections.py")

_MUTANTS_FOUND = ("units/losses/test_mutants_found.py", "units/losses/test_mutants_found_objectives.py")
_ALL_OBJECTIVES = "units/losses/test_every_objective.py"
_ENUMERATION = "units/losses/test_enumeration.py"
#: Tests of each file of the losses.
_TESTS = {
    "objectives/_clipped.py": tuple(f"test_{name}.py" for name in ("ppo", "dapo", "gspo", "gmpo", "cispo", "sapo")),
    "objectives/_covariance.py": ("test_covariance.py",),
    "objectives/_distillation.py": ("test_distill.py",),
    "objectives/_off_policy.py": tuple(
        f"test_{name}.py" for name in ("plain_gradients", "topr", "sppo", "dro", "dppo", "vespo", "rec")
    ),
    "objectives/_preference.py": ("test_dpo.py", "test_preference.py"),
    "objectives/_relative.py": ("test_preference.py", "test_dpo.py", "test_batch_inputs.py"),
    "objectives/_supervised.py": ("test_sft.py", "test_mix.py"),
    "corrections.py": ("test_corrections.py", "test_rollout_correction.py", "test_wrong_inputs.py", "test_ppo.py"),
    "terms.py": ("test_terms.py", "test_needs.py"),
    "_arithmetic.py": tuple(
        f"test_{name}.py" for name in ("ppo", "gspo", "plain_gradients", "sft", "dpo", "corrections", "mix")
    ),
}
#: Objectives that are built with what a file holds, where it holds none itself.
_USERS = {"_arithmetic.py": ("ppo", "gspo", "sft", "dpo", "mix")}


@dataclass(frozen=True)
class Target:
    """A file that is changed.

    Args:
        file: below ``torchrl_llm_kl``.
        functions: the only ones to change; None for all.
        graph: whether gradients go through it.
        stages: tests, those that are most about it first.
    """

    file: str
    functions: frozenset[str] | None
    graph: bool
    stages: tuple[Stage, ...]


def targets(project: Path) -> list[Target]:
    """All files, as they are now."""
    root = project / PACKAGE
    found = sorted({path for pattern in _PATTERNS for path in root.glob(pattern) if path.name != "__init__.py"})
    files = [str(path.relative_to(root)) for path in found if path.name not in _KEYS]
    return [_target(project, root, file) for file in files]


def _target(project: Path, root: Path, file: str) -> Target:
    stages = _loss_stages(root, file) if file.startswith("losses/") else _advantage_stages(project, file)
    existing = (Stage(tuple(path for path in s.paths if (project / "tests" / path).is_file()), s.words) for s in stages)
    return Target(
        file,
        _FUNCTIONS.get(file),
        not file.startswith(_WITHOUT_GRAPH),
        tuple(stage for stage in existing if stage.paths),
    )


def _loss_stages(root: Path, file: str) -> list[Stage]:
    short = file.removeprefix("losses/")
    names = _TESTS.get(short, (f"test{Path(short).name}",))
    own = Stage((*(f"units/losses/{name}" for name in names), *_MUTANTS_FOUND))
    if not file.startswith("losses/objectives/") and Path(short).name not in _USERS:
        return [own]
    words = _USERS.get(Path(short).name) or _registered(root / file)
    return [own, Stage((_ENUMERATION,), words), Stage((_ALL_OBJECTIVES,), words)]


def _advantage_stages(project: Path, file: str) -> list[Stage]:
    tests = sorted((project / "tests" / "units" / "advantages").glob("test_*.py"))
    # Transforms, and comparisons with packages that are not always there.
    names = [
        test.name for test in tests if not test.name.startswith(("test_advantage_transform", "test_advantage_peers"))
    ]
    return [Stage(tuple(f"units/advantages/{name}" for name in names))]


def _registered(path: Path) -> tuple[str, ...]:
    """The names of the objectives in a file, as they are in the names of parametrised tests."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    named = {"objective": 0, "preference": 0, "variant": 1}  # call -> the position of the name
    found = ((call, call.func.id) for call in calls if isinstance(call.func, ast.Name) and call.func.id in named)
    names = (call.args[named[called]] for call, called in found)
    return tuple(sorted(name.value for name in names if isinstance(name, ast.Constant)))
