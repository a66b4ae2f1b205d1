"""Tests of the mutations of code and of the record of the tests that find them."""

from pathlib import Path

import pytest

from mutants import record
from mutants.__main__ import _few
from mutants.mutations import mutants_of
from project import PROJECT


def changes(line: str, *, arguments: str = "", graph: bool = False, before: str = "") -> set[str]:
    """The mutations of one line in a function, as lines."""
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
        ("return -a * b", {"return -a / b", "return a * b"}),
        ("x = a * b", {"x = a / b", "x = -(a * b)"}),
        ("g((-x).abs(), x.sum(-1))", {"g((x).abs(), x.sum(-1))", "g((-x), x.sum(-1))", "g((-x).abs(), x.mean(-1))"}),
        ("g(a < b)", {"g(a <= b)", "g(a > b)"}),
        ("g(a is None)", {"g(a is not None)"}),
        ("g(a and not b)", {"g(a or not b)", "g(a and b)"}),
        ("return a if c else b", {"return a if (not c) else b"}),
        ("g(torch.where(c, x, 0))", {"g(x)", "g(torch.where(c, x, 1))"}),
        ("g((a > b) & c)", {"g((a > b))", "g(c)", "g((a >= b) & c)", "g((a < b) & c)"}),
        ("h(x, mask)", {"h(x, (mask | True))"}),
        ("g(x.clamp(a, b))", {"g(x)", "g(x.clamp(b, a))"}),
        ("g(torch.maximum(a, b))", {"g(torch.minimum(a, b))"}),
        ("g((a - b).detach())", {"g((a - b))", "g((a + b).detach())"}),
        ("g(3, 0.5, 0.0)", {"g(4, 0.5, 0.0)", "g(3, 1.0, 0.0)", "g(3, 0.5, 1.0)"}),
        ("g((a * b).exp())", {"g((a * b))", "g((a / b).exp())"}),
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
    assert {"losses/objectives/_clipped.py", "advantages/_token.py", "service/_core.py"} <= set(found)
    for target in found.values():
        assert list((PROJECT / "tests").glob(target.tests)), target
