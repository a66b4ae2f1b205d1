"""The page of a run has the settings of today, and names what exists."""

from __future__ import annotations

import importlib.util
import re

import pytest

pytest.importorskip("omegaconf")
from project import PROJECT
from torchrl_llm_kl.training import example_config, read_config
from torchrl_llm_kl.training._run import WRITTEN

DOCS = PROJECT / "docs"
PAGE = (DOCS / "train.md").read_text(encoding="utf-8")


def test_the_page_has_the_settings_of_today() -> None:
    spec = importlib.util.spec_from_file_location("build_train_table", DOCS / "build_train_table.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.render() == PAGE, "run `make docs`"
    assert PAGE.count("\n| `") > 60


def test_every_key_of_the_page_exists() -> None:
    """Keys in the text, such as `kl.place`, whose section is one of the configuration's."""
    known = {match[1] for match in re.finditer(r"^\| `([a-z_]+\.[a-z_]+)` \|", PAGE, flags=re.MULTILINE)}
    sections = {key.split(".")[0] for key in known}
    named = set(re.findall(rf"`((?:{'|'.join(sorted(sections))})\.[a-z_]+)[:`=]", PAGE))
    assert len(named) > 15
    assert named <= known


def test_everything_that_a_run_writes_is_on_the_page() -> None:
    assert all(f"`{name}" in PAGE for name in WRITTEN)


def test_the_least_configuration_of_the_page_is_enough() -> None:
    least = re.search(r"The least that a configuration needs:\n\n```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    assert least is not None
    import yaml

    config = read_config(yaml.safe_load(least[1]))
    assert config.model.name == read_config(yaml.safe_load(example_config())).model.name
