"""The package as a whole: what importing it costs, and what it exports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import torchrl_llm_kl

LAYERS = sorted(path.parent.name for path in Path(torchrl_llm_kl.__file__).parent.glob("*/__init__.py"))


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_loads_neither_ray_nor_transformers() -> None:
    loaded = python(
        "import sys, torchrl\nbefore = set(sys.modules)\nimport torchrl_llm_kl\n"
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    assert loaded.strip() == "['torchrl_llm_kl']"


def test_the_layers_load_neither_ray_nor_transformers() -> None:
    """``torchrl.envs`` itself loads ray where it is installed; the layers must add nothing."""
    imports = "; ".join(f"import torchrl_llm_kl.{layer}" for layer in LAYERS)
    code = "import sys, torchrl.envs; before = set(sys.modules); {}; print({{'ray', 'transformers'}} & ({} - before))"
    assert python(code.format(imports, "set(sys.modules)")).strip() == "set()"


def test_every_exported_name_exists() -> None:
    for name in torchrl_llm_kl.__all__:
        assert getattr(torchrl_llm_kl, name).__name__ == name
    assert set(torchrl_llm_kl.__all__) <= set(dir(torchrl_llm_kl))
    with pytest.raises(AttributeError, match="no attribute 'RetrieveKLL'"):
        _ = torchrl_llm_kl.RetrieveKLL


def test_the_objectives_are_exported_by_their_package_too() -> None:
    from torchrl_llm_kl import losses
    from torchrl_llm_kl.losses import objectives

    assert {"ppo", "select_kl_cov", "sppo_hard"} <= set(objectives.__all__) < set(losses.__all__)
    for name in objectives.__all__:
        assert getattr(objectives, name) is getattr(losses, name)
