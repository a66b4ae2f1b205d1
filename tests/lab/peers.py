"""Single modules of other libraries for comparisons, loaded from files without importing their packages."""

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

VARIABLE = "TORCHRL_LLM_KL_PEERS"
#: package -> (the folder that holds it, what to download). Several wheels are unpacked into one folder.
FOLDERS = {"trinity": ("trinity_rft", "trinity-rft==0.6.0"), "verl": ("verl", "verl==0.9.1")}
FOLDERS |= {"trl": ("trl", "trl==1.16.0"), "genlm": ("genlm", "genlm-bytes==0.2.0 genlm-backend==0.3.1")}


class _Bare(ModuleType):
    """A package whose ``__init__`` did not run. Its modules exist, and every other attribute is an empty class."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        super().__init__(name)
        self.__path__ = [] if folder is None else [str(folder)]
        self.__version__ = "0"  # TRL's modules read it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for folder in self.__path__:
            if (Path(folder) / f"{name}.py").is_file() or (Path(folder) / name / "__init__.py").is_file():
                return importlib.import_module(f"{self.__name__}.{name}")
        return type(name, (), {})


def folder(package: str) -> Path:
    """The folder of a peer's package. Skips the test if there is none."""
    name, requirement = FOLDERS[package]
    top = Path(os.environ.get(VARIABLE) or "/nonexistent") / name / package
    if not top.is_dir():
        pytest.skip(f"{VARIABLE} names no folder with {requirement} in {name}: `make test-peers` fetches it")
    return top


def load(monkeypatch: pytest.MonkeyPatch, package: str, module: str, stubs: Sequence[str] = ()) -> ModuleType:
    """A module of a peer, such as ``load(monkeypatch, "trinity", "trinity.algorithm.policy_loss_fn.dpo_loss")``.

    No package's ``__init__`` runs, and modules named in ``stubs`` are empty. ``sys.modules`` is restored after the test. Skips
    the test if the peers are missing.
    """
    top = folder(package)
    before = set(sys.modules)
    sys.modules.setdefault(package, _Bare(package, top))  # a namespace has no __init__
    for init in top.rglob("__init__.py"):
        name = ".".join(init.parent.relative_to(top.parent).parts)
        sys.modules.setdefault(name, _Bare(name, init.parent))
    for name in stubs:
        sys.modules[name] = _Bare(name)
    try:
        return importlib.import_module(module)
    finally:
        for name in set(sys.modules) - before:
            if name in stubs or name.partition(".")[0] == package:
                # monkeypatch removes it after the test, since there was no such module before.
                monkeypatch.setitem(sys.modules, name, sys.modules.pop(name))


# ------------------------------------------------------------------ verl's corrections
def verl(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The peer's module of rollout corrections."""
    return load(monkeypatch, "verl", "verl.trainer.ppo.rollout_corr_helper", stubs=("omegaconf", "verl.protocol"))


def sampled(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of trainer and sampler, and a mask with holes but without empty rows."""
    rng = torch.Generator().manual_seed(seed)
    old = -torch.rand(7, 6, generator=rng, dtype=torch.float64) * 3
    mask = torch.rand(7, 6, generator=rng) < 0.7
    mask[torch.arange(7), torch.randint(6, (7,), generator=rng)] = True
    return old, old + 0.4 * torch.randn(7, 6, generator=rng, dtype=torch.float64), mask
