"""The changes themselves, which tests run against them, and the record of those that fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mutants import record
from mutants.__main__ import _few
from mutants.mutations import dropped, mutants_of
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
    text = "def f(a):\n    return g(\n        a\n        # ä\n        - 1\n    )\n"  # broken lines are shown as one
    assert (3, "a # ä - 1", "a # ä + 1") in [(m.line, m.before, m.after) for m in mutants_of(text)]


def test_a_gradient_is_cut_only_where_there_is_one() -> None:
    arguments = "log_prob, advantage"
    assert "x = (log_prob + advantage).detach()" in changes("x = log_prob + advantage", arguments=arguments, graph=True)
    assert changes("x = g(log_prob)", arguments=arguments) == set()
    for line in ("x = g(advantage)", "x = g(log_prob > 0.0)", "x = g(log_prob.shape)"):
        assert not any("detach" in after for after in changes(line, arguments=arguments, graph=True))
    line = "return (LossTerm('a', g(log_prob), mask),)"
    cut, _ = sorted(changes(line, arguments=arguments, graph=True))
    assert cut == "return (LossTerm('a', (g(log_prob)).detach(), mask),)"


def test_what_is_no_maths_stays_and_where_there_is_none_a_result_is_lost() -> None:
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
    assert [mutant.after for mutant in mutants_of(text)] == ["BOUND = 160.0"]
    text = "def f(a):\n    return g(a)\n\n\nclass A:\n    def g(self):\n        super().g()\n\n    def h(self): ...\n"
    found = dropped(text, {"k"})
    assert [(m.function, m.after) for m in found] == [("f", "return None"), ("A.g", "super()")]
    assert [m.function for m in dropped(text, {"f"})] == ["A.g"]


TOY = {
    "pyproject.toml": "",
    "toy/__init__.py": "",
    "toy/maths.py": """from functools import wraps
FACTOR = 3
def loud(function):
    @wraps(function)
    def call(*args):
        return function(*args)
    return call
def larger(a, b):
    return a if a > b else b
@loud
def double(n):
    return n + n
class Times:
    by: int = 2
    def scale(self, n):
        while n > 99:
            pass
        return n * FACTOR
def unused(n):
    return -n
""",
    "toy/use.py": "from toy.maths import FACTOR\n",
    "tests/units/toys/test_toy.py": """import pytest
from toy import use
from toy.maths import Times, double, larger
@pytest.fixture(scope="module")
def scaled():
    return Times().scale(2)
def test_larger():
    assert larger(1, 2) == 2
    assert larger(2, 1) == 2
@pytest.mark.parametrize("n", [3, 4])
def test_double(n):
    assert double(n) == 2 * n
def test_larger_of_double():
    assert larger(double(1), 1) == 2
def test_scale(scaled):
    assert scaled == 2 * use.FACTOR == 6
def test_by():
    assert larger(Times().by, 0) == 2
""",
}
SCRIPT = """
import json, sys
from pathlib import Path
from mutants.mutations import mutants_of
from mutants.runner import Job, with_tests
project, first = Path(sys.argv[1]), sys.argv[2]
text = (project / "toy/maths.py").read_text()
jobs = [Job("maths.py", m, "units/toys", first) for m in mutants_of(text)]
def then(tests):
    failed = list(tests.measure(2))
    found = {job.mutant.after: outcome for job, outcome in tests.run(jobs, 2)}
    return failed, {after: (outcome.killer, outcome.tests) for after, outcome in found.items() if outcome.known}
print(json.dumps(with_tests(project, "toy", ["units/toys"], ["maths.py"], then)))
"""


@pytest.mark.parametrize("first", ["", "units/toys/test_toy.py::test_larger_of_double"])
def test_tests_that_call_what_is_changed_run_and_the_project_stays_as_it_is(tmp_path: Path, first: str) -> None:
    for name, text in TOY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    paths = f"{tmp_path}{os.pathsep}{PROJECT / 'tests' / 'lab'}"
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), first]
    done = subprocess.run(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, check=True)
    failed, found = json.loads(done.stdout)
    assert failed == []
    expected = {  # the tests that may have failed, and how many ran
        "return a if a >= b else b": ("", 3),  # the same
        "return a if a < b else b": ("larger larger_of_double by", 3),
        "return n - n": ("double larger_of_double", 3),
        "return -(n + n)": ("double larger_of_double", 3),
        "FACTOR = 4": ("scale", 6),
        "by: int = 3": ("by", 6),
        "while n < 99:": ("scale", 1),
        "while n >= 99:": ("", 1),
        "while n > 100:": ("", 1),
        "return n / FACTOR": ("scale", 1),
        "return -(n * FACTOR)": ("scale", 1),
        "return n": ("", 0),
    }
    assert found.keys() == expected.keys()
    for after, (names, tests) in expected.items():
        killers = [f"units/toys/test_toy.py::test_{name}" for name in names.split()]
        killer, count = found[after]
        assert count == tests, after
        assert killer in killers if killers else not killer, after
        assert killer == first or first not in killers, after
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == set(TOY)
    assert all((tmp_path / name).read_text() == text for name, text in TOY.items())


def test_a_record_and_tests_of_each_file(tmp_path: Path) -> None:
    path = tmp_path / "killed.json"
    old, new, other, gone = (record.Key(file, "f", "a + b", "a - b") for file in ("old", "new", "other", "gone"))
    record.write(path, {old: "test_f.py::test_f", other: record.SURVIVED, gone: record.UNCALLED}, set())
    record.write(path, {new: "test_f.py::test_é", other: "test_f.py::test_f"}, {old, new, other})
    assert record.read(path) == {old: "test_f.py::test_f", new: "test_f.py::test_é", other: "test_f.py::test_f"}
    assert len(path.read_text().splitlines()) == 5
    noticed = [record.noticed(test) for test in (record.SURVIVED, record.UNCALLED, "test_f.py::test_f")]
    assert noticed == [False, False, True]
    keys, tried = [old, old._replace(after="a * b"), new], {("old", "f"): 1}
    assert _few(keys, 1, tried) == [new]
    assert len(_few(keys, 2, tried)) == 2
    found = {target.file: target for target in record.targets()}
    assert {"losses/objectives/_clipped.py", "advantages/_token.py", "service/_batcher.py"} <= set(found)
    for target in found.values():
        assert list((PROJECT / "tests").glob(target.tests)), target
