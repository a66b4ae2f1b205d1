"""Where a batch cannot be saved, the error says why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from torchrl_llm_kl.datasets import save_batch


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*/missing: make it first"):
        save_batch(TensorDict(a=torch.ones(1)), tmp_path / "missing" / "x.pt")


def test_lists_that_are_nested_too_deeply(tmp_path: Path) -> None:
    value: list = []
    for _ in range(3000):
        value = [value]
    batch = TensorDict(a=torch.ones(1))
    batch.set_non_tensor("deep", value)
    with pytest.raises(TypeError, match="nested too deeply"):
        save_batch(batch, tmp_path / "x.pt")
