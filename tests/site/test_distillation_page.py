"""The page on distillation: up to date, its example runs, and its table is what it says."""

from __future__ import annotations

import importlib.util
import math
import re
from types import ModuleType

import pytest
import torch

from project import PROJECT

SCRIPT = PROJECT / "docs" / "build_distillation_table.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_distillation_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    assert script.PAGE.read_text(encoding="utf-8") == script.render(), "run: python docs/build_distillation_table.py"


@pytest.mark.filterwarnings("ignore:the top k below")
def test_the_example_runs(script: ModuleType) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", script.INTRO, re.DOTALL)
    names: dict[str, object] = {}
    exec(example, names)
    assert 0.6 < float(names["out"]["captured_mass"]) < 1  # type: ignore[index]


@pytest.mark.parametrize("exponent", [2.0, 1.1])
@pytest.mark.parametrize("k", [1, 64])
def test_captured_mass_and_forward_kl_by_hand(script: ModuleType, exponent: float, k: int) -> None:
    """Sums over Python numbers."""
    p = [rank**-exponent for rank in range(1, script.VOCAB + 1)]
    q = [rank ** (-0.9 * exponent) * math.exp(0.7 * math.sin(1.7 * rank)) for rank in range(1, script.VOCAB + 1)]
    p_sum, q_sum = math.fsum(p), math.fsum(q)
    p, q = [x / p_sum for x in p], [x / q_sum for x in q]
    rest, other = math.fsum(p[k:]), math.fsum(q[k:])
    want = math.fsum(a * math.log(a / b) for a, b in zip(p[:k], q[:k], strict=True)) + rest * math.log(rest / other)
    value, gradient, captured = script.measure(exponent, k, 0.0)
    assert captured == pytest.approx(1 - rest, rel=1e-12)
    assert value == pytest.approx(want, rel=1e-9)
    assert float(gradient[0]) == pytest.approx(q[0] - p[0], rel=1e-9)  # of a listed token
    assert float(gradient[-1]) == pytest.approx(
        q[-1] - rest * q[-1] / other, rel=1e-9
    )  # shared among the others as now


def test_the_bias_falls_with_k(script: ModuleType) -> None:
    for exponent in script.TEACHERS.values():
        rows = [line.strip("| ").split(" | ") for line in script.table(exponent).splitlines()[2:]]
        columns = torch.tensor([[float(cell) for cell in row[1:]] for row in rows]).T
        captured, values, gradients = columns[0], columns[1:4], columns[4:]
        assert (captured.diff() >= 0).all()
        assert (values.diff() >= 0).all()
        assert (gradients.diff() <= 0).all()
        assert (columns[:4, -1] == 1).all()
        assert (gradients[:, -1] == 0).all()
