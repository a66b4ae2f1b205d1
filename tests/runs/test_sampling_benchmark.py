"""The benchmark of truncated sampling scales its head to the entropy that was asked for."""

from __future__ import annotations

import io

import pytest

for name in ("rich", "tokenizers", "typer"):
    pytest.importorskip(name)
from rich.console import Console  # noqa: E402

from benchmarks.models import QUICK  # noqa: E402
from benchmarks.sampling import KINDS, PLAIN, Found, measure, table  # noqa: E402


@pytest.fixture(scope="module")
def found() -> Found:
    return measure(QUICK, 32, 2.0, 2)


def test_the_entropy_is_the_one_asked_for(found: Found) -> None:
    assert found.entropy == pytest.approx(2.0, abs=0.05)


def test_the_table_has_a_row_for_each_kind(found: Found) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(found))
    shown = console.export_text()
    for name in (PLAIN, *KINDS):
        ratio = found.times[name].seconds / found.times[PLAIN].seconds
        assert any(name in line and f"{ratio:.2f}" in line for line in shown.splitlines())
