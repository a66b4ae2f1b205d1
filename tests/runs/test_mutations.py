"""The changes themselves, and that copies of a package are what is tested."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mutants.catalogue import targets
from mutants.mutations import mutants_of
from project import PROJECT


def changes(line: str, *, arguments: str = "", graph: bool = False, before: str = "") -> set[str]:
    """Of one line in a function, as lines."""
    text = f"{before}\n\ndef f({arguments}):\n    {line}\n"
    found = mutants_of(text, graph=graph)
    for mutant in found:
        assert (mutant.function, mutant.before) == ("f", line)
        compile(mutant.text, "f.py", "exec")
        assert mutant.text == text.replace(line, mutant.after)
    assert len(found) == len({mutant.after for mutant in found})
    return {mutant.after for mutant in found}


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("g(a + b)", {"g(a - b)"}),
        ("g(a - (b / c))", {"g(a + (b / c))", "g(a - (b * c))"}),
        ("return -a * b", {"return -a / b", "return a * b"}),
        ("x = a * b", {"x = a / b", "x = -(a * b)"}),
        ("g((-x).abs(), x.sum(-1))", {"g((x).abs(), x.sum(-1))", "g((-x), x.sum(-1))", "g((-x).abs(), x.mean(-1))"}),
        ("g(a < b)", {"g(a <= b)", "g(a > b)"}),
        ("g(a >= b)", {"g(a > b)", "g(a <= b)"}),
        ("g(a == b)", {"g(a != b)"}),
        ("g(a is None)", {"g(a is not None)"}),
        ("g(a and not b)", {"g(a or not b)", "g(a and b)"}),
        ("g(flag=True)", {"g(flag=False)"}),
        ("return a if c else b", {"return a if (not c) else b"}),
        ("g(torch.where(c, x, 0))", {"g(x)", "g(torch.where(c, x, 1))"}),
        ("g((a > b) & c)", {"g((a > b))", "g(c)", "g((a >= b) & c)", "g((a < b) & c)"}),
        ("g(~c)", {"g(c)"}),
        ("h(x, mask)", {"h(x, (mask | True))"}),
        ("g(x.clamp(a, b))", {"g(x)", "g(x.clamp(b, a))"}),
        ("g(clamp(x, a, b))", {"g(x)", "g(clamp(x, b, a))"}),
        ("g(x.clamp(min=a))", {"g(x)", "g(x.clamp(max=a))"}),
        ("g(torch.maximum(a, b))", {"g(torch.minimum(a, b))"}),
        ("g((a - b).detach())", {"g((a - b))", "g((a + b).detach())"}),
        ("g(3, 0.5, 0.0)", {"g(4, 0.5, 0.0)", "g(3, 1.0, 0.0)", "g(3, 0.5, 1.0)"}),
        ("g((a * b).exp())", {"g((a * b))", "g((a / b).exp())"}),
        ("g(torch.sigmoid(x))", {"g(x)"}),
        ("g(masked_mean(x, m))", {"g((masked_mean(x, m) * m.sum()))"}),
        # Names that are there only in another function, texts, checks, messages.
        ("g(clip_low)", set()),
        ("g('a', f'{1 + 2}')", set()),
        ("check_range(0.0, x=1 + a)", set()),
        ("raise ValueError(1 + a)", set()),
    ],
)
def test_each_kind(line: str, after: set[str]) -> None:
    assert changes(line) == after


def test_names_are_swapped_where_both_exist() -> None:
    assert changes("g(clip_low, pairs.chosen)", arguments="clip_low, clip_high") == {"g(clip_high, pairs.chosen)"}
    assert changes("g(p.chosen, p.rejected)") == {"g(p.rejected, p.rejected)", "g(p.chosen, p.chosen)"}
    assert changes("g(sequence_mean)", before="from a import sequence_mean, sequence_sum") == {"g(sequence_sum)"}
    assert changes("return max(a, b)") == {"return min(a, b)"}


def test_a_gradient_is_cut_only_where_there_is_one() -> None:
    arguments = "log_prob, advantage"
    assert "x = (log_prob + advantage).detach()" in changes("x = log_prob + advantage", arguments=arguments, graph=True)
    assert changes("x = g(log_prob)", arguments=arguments) == set()
    for line in ("x = g(advantage)", "x = g(log_prob > 0.0)", "x = g(log_prob.shape)"):
        assert not any("detach" in after for after in changes(line, arguments=arguments, graph=True))
    line = "return (LossTerm('a', g(log_prob), mask),)"
    cut, _ = sorted(changes(line, arguments=arguments, graph=True))
    assert cut == "return (LossTerm('a', (g(log_prob)).detach(), mask),)"


def test_what_is_no_maths_stays() -> None:
    text = '''"""1 + 1"""
import torch
from a import b
__all__ = ["f"]
BOUND = 80.0
Scalar = float | Tensor

@g(1 + 1)
def f(x: int | float = 1 + 1, *, y=2) -> 1 + 1:
    """1 + 1"""
    z: int | float = x
    return z
'''
    (mutant,) = mutants_of(text)
    assert mutant.after == "BOUND = 160.0"
    assert mutants_of(text, functions=frozenset({"f"})) == []


def test_only_the_functions_that_are_asked_for() -> None:
    text = "def f(a):\n    return a > 1\n\n\ndef g(a):\n    return a > 1\n"
    assert {mutant.function for mutant in mutants_of(text, functions=frozenset({"g"}))} == {"g"}


def test_lines_that_are_broken_are_shown_as_one() -> None:
    text = "def f(a):\n    return g(\n        a\n        # ä\n        - 1\n    )\n"
    mutant = next(m for m in mutants_of(text) if m.kind == "arithmetic")
    assert (mutant.line, mutant.before, mutant.after) == (3, "a # ä - 1", "a # ä + 1")


def test_each_file_has_tests() -> None:
    found = {target.file: target for target in targets(PROJECT)}
    assert {"losses/objectives/_clipped.py", "losses/_arithmetic.py", "losses/terms.py", "advantages/_token.py"} <= set(
        found
    )
    for target in found.values():
        assert target.stages, target.file
        own = [path for path in target.stages[0].paths if "mutants_found" not in path]
        assert own, f"{target.file}: which tests are about it? Name them in catalogue.py"


TOY = {
    "pyproject.toml": "",
    "toy/__init__.py": """def larger(a, b):
    return a if a > b else b


def double(n):
    return n + n
""",
    "tests/test_toy.py": """import toy


def test_larger():
    assert toy.larger(1, 2) == 2
    assert toy.larger(2, 1) == 2


def test_double():
    assert toy.double(3) == 6
""",
}
SCRIPT = """
import sys
from pathlib import Path
from mutants.mutations import mutants_of
from mutants.runner import Job, Sandbox, Stage

with Sandbox(Path(sys.argv[1]), "toy", jobs=2) as sandbox:
    file, stages = "toy/__init__.py", (Stage(("test_toy.py",)),)
    cases = {None: "unchanged"} | {m.text: m.after for m in mutants_of(sandbox.read(file))}
    cases["while True: pass"] = "endless"
    jobs = [Job(file, text, stages, 2.0 if case == "endless" else 60.0) for text, case in cases.items()]
    for job, outcome in sandbox.run(jobs):
        print(cases[job.text], "|", outcome.caught_by)
"""


def test_copies_are_tested_and_the_project_stays_as_it_is(tmp_path: Path) -> None:
    for name, text in TOY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    # The project comes first on the path, as if it were installed there.
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{PROJECT / 'tests'}"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    caught = dict(line.split(" | ") for line in done.stdout.splitlines())
    larger, double = "tests/test_toy.py::test_larger", "tests/test_toy.py::test_double"
    assert caught == {
        "unchanged": "",
        "return a if a >= b else b": "",  # the same
        "return a if a < b else b": larger,
        "return n - n": double,
        "return -(n + n)": double,
        "endless": "takes more than 2 s",
    }
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == set(TOY)
    assert all((tmp_path / name).read_text() == text for name, text in TOY.items())
