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
    "losses/corrections/_*.py",
    "losses/terms/_*.py",
    "losses/_aggregate.py",
    "losses/_numerics.py",
    "losses/_value_loss.py",
    "advantages/_*.py",
)
#: They read and write TensorDicts, or names: no maths.
_KEYS = frozenset({"_registry.py", "_transform.py"})
#: Of a file with a module class, its pure function alone.
_FUNCTIONS = {"losses/_value_loss.py": frozenset({"value_error"})}
#: What is computed there has no gradient.
_WITHOUT_GRAPH = ("advantages/", "losses/corrections/", "losses/objectives/_covariance.py")

_MUTANTS_FOUND = ("losses/test_mutants_found.py", "losses/test_mutants_found_objectives.py")
_ALL_OBJECTIVES = "losses/test_every_objective.py"
_ENUMERATION = "losses/test_enumeration.py"
#: Tests whose file is not called as what they test.
_TESTS = {
    "objectives/_anchored_preference.py": ("test_dpo.py",),
    "objectives/_clip_cov.py": ("test_covariance.py",),
    "objectives/_dr_grpo.py": ("test_dapo.py",),
    "objectives/_gpg.py": ("test_plain_gradients.py",),
    "objectives/_importance_sampling.py": ("test_plain_gradients.py",),
    "objectives/_kl_cov.py": ("test_covariance.py",),
    "objectives/_margin.py": ("test_dpo.py",),
    "objectives/_mix_chord.py": ("test_mix.py",),
    "objectives/_opmd.py": ("test_plain_gradients.py",),
    "objectives/_preference.py": ("test_dpo.py",),
    "corrections/_apply.py": ("test_corrections.py",),
    "corrections/_importance.py": ("test_corrections.py",),
    "corrections/_sequence_mask.py": ("test_corrections.py", "test_ppo.py"),
    "corrections/_top_entropy.py": ("test_corrections.py",),
    "terms/_entropy.py": ("test_terms.py",),
    "terms/_experts.py": ("test_terms.py",),
    "terms/_kl.py": ("test_terms.py",),
    "_aggregate.py": ("test_gspo.py", "test_dpo.py", "test_corrections.py", "test_mix.py"),
    "_numerics.py": ("test_ppo.py", "test_gspo.py", "test_plain_gradients.py", "test_sft.py", "test_corrections.py"),
}
#: Objectives that are made with what a file holds, where it holds none itself.
_USERS = {
    "_covariance.py": ("clip_cov", "kl_cov"),
    "_preference.py": ("dpo", "ipo", "robust", "apo_zero"),
    "_aggregate.py": ("ppo", "gspo", "dpo", "mix"),
    "_numerics.py": ("ppo", "gspo", "sft", "dpo"),
}


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
    own = Stage((*(f"losses/{name}" for name in names), *_MUTANTS_FOUND))
    if not file.startswith("losses/objectives/") and Path(short).name not in _USERS:
        return [own]
    words = _USERS.get(Path(short).name) or _public(root / file)
    return [own, Stage((_ENUMERATION,), words), Stage((_ALL_OBJECTIVES,), words)]


def _advantage_stages(project: Path, file: str) -> list[Stage]:
    tests = sorted((project / "tests" / "advantages").glob("test_*.py"))
    # Transforms, and comparisons with packages that are not always there.
    names = [
        test.name for test in tests if not test.name.startswith(("test_advantage_transform", "test_advantage_peers"))
    ]
    return [Stage(tuple(f"advantages/{name}" for name in names))]


def _public(path: Path) -> tuple[str, ...]:
    """The names in ``__all__``, as they are in the names of parametrised tests."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return tuple(ast.literal_eval(node.value))
    return ()
