"""The page of other libraries' settings is up to date, and what its table calls things exists."""

from __future__ import annotations

import importlib.util
import re

import pytest

import torchrl_llm_kl
from project import PROJECT
from torchrl_llm_kl._foreign import FOREIGN, foreign_hint
from torchrl_llm_kl.algorithms import Algorithm, AlgorithmOverrides, make_algorithm

SCRIPT = PROJECT / "docs" / "build_elsewhere_table.py"


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("build_elsewhere_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text(encoding="utf-8") == script.render(), "run `make docs`"


def test_names_of_this_package_exist() -> None:
    """An identifier in small letters is an argument of make_algorithm."""
    accepted = {*AlgorithmOverrides.__annotations__, *make_algorithm.__annotations__}
    named = {row.here for row in FOREIGN if re.fullmatch("[a-z_]+", row.here)}
    assert named <= accepted, sorted(named - accepted)


def test_every_setting_outside_or_refused_says_what_to_do() -> None:
    assert not [row.name for row in FOREIGN if row.place in ("outside", "refused") and not row.note]
    assert not [row.name for row in FOREIGN if row.place in ("override", "sampling") and not row.here]


@pytest.mark.parametrize(("name", "start"), [("n", " verl's 'n' is 'group_size'"), ("nothing_at_all", "")])
def test_hint(name: str, start: str) -> None:
    assert foreign_hint(name).startswith(start)
    assert bool(foreign_hint(name)) == bool(start)


def test_names_of_trinitys_table_exist() -> None:
    """Whatever begins with a name of this package, with its attributes."""
    page = (SCRIPT.parent / "differences.md").read_text(encoding="utf-8")
    table = page.partition("## Trinity-RFT's classes and methods")[2]
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| `")]
    layers = [
        torchrl_llm_kl,
        *(getattr(torchrl_llm_kl, layer) for layer in ("advantages", "algorithms", "estimators", "losses")),
    ]
    checked = set()
    for _, here, *_ in rows:
        for name, attribute in re.findall(r"`([A-Za-z_]+)(?:\.([a-z_]+))?(?=[`(])", here):
            owners = [getattr(layer, name) for layer in layers if hasattr(layer, name)]
            if name in ("ReplayBuffer", "torchrl_llm_kl", "none") or name in {
                *dir(Algorithm),
                *Algorithm.__dataclass_fields__,
            }:
                continue
            assert owners, name
            if attribute:
                fields = {*dir(owners[0]), *getattr(owners[0], "__dataclass_fields__", ())}
                assert attribute in fields, (name, attribute)
            checked.add(name)
    methods = {
        "KLFn.apply_kl_penalty_to_reward",
        "KLFn.calculate_kl_loss",
        "KLFn.update_kl_coef",
        "PolicyLossFn.select_keys",
    }
    assert methods <= {name for row in rows for name in re.findall("`([^`]+)`", row[0])}
    assert len(rows) > 25
    assert {"KLComputation", "KLToReference", "EntropyBonus", "ObjectiveSpec", "informative_groups"} <= checked
