"""Batches on disk as torch and tensordict write them, and a pickle that runs code."""

import os
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

FULL = torch.tensor([[3, 4, 5, 6, 7], [3, 4, 8, 9, 1]])


def batch(**more: Any) -> TensorDict:
    td = TensorDict(tokens=TensorDict(prompt=FULL[:, :2], full=FULL, batch_size=[2]), batch_size=[2])
    td["next", "log_probs", "full"] = -FULL.float()
    return td.update(more)


def save(kind: str, path: Path, td: TensorDictBase) -> Path:
    """Save a batch with torch or tensordict."""
    if kind in ("memmap", "archive"):
        td.save(str(path), **({"archive": True} if kind == "archive" else {}))
    else:
        content = {"dict": td.to_dict, "state": td.state_dict, "tensordict": lambda: td}[kind]()
        torch.save(content, path)
    return path


class Mischief:
    """Runs code when it is unpickled, which makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)
