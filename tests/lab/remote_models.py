"""Factories that actors can import."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toy_models import tiny_model


def broken() -> nn.Module:
    raise OSError("no such checkpoint: /nowhere")


class Slow(nn.Module):
    """Sleeps, then returns uniform logits."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
        time.sleep(self.seconds)
        return (torch.zeros(*input_ids.shape, 97) + self.weight,)


def slow(seconds: float) -> nn.Module:
    return Slow(seconds)


def model(seed: int = 0) -> nn.Module:
    return tiny_model(seed=seed).double()


def _pause(module: nn.Module, args: Any, *, seconds: float) -> None:
    time.sleep(seconds)


def delayed(seconds: float, seed: int = 0) -> nn.Module:
    """:func:`model` with a slower forward."""
    made = tiny_model(seed=seed).double()
    made.model.layers[0].register_forward_pre_hook(partial(_pause, seconds=seconds))
    return made


#: The service that the tests on a cluster share: whoever gives it other weights gives these back.
SHARED: dict[str, Any] = {"factory": partial(delayed, 0.02), "name": "shared", "num_replicas": 2, "num_cpus": 0.1}

POISON, ENDLESS, SLOW = [13] * 6, [17] * 6, [19] * 6


def _die_or_hang(module: nn.Module, args: Any) -> None:
    ids = args[0].flatten().tolist()
    runs = [ids[i : i + 4] for i in range(len(ids))]
    if POISON[:4] in runs:
        os._exit(7)
    if ENDLESS[:4] in runs:
        threading.Event().wait()


def deadly(folder: str) -> nn.Module:
    """:func:`model`; its process ends at the sequence ``POISON``, and the forward never returns at ``ENDLESS``.

    Leaves a file in the folder each time.
    """
    made = delayed(0.01)
    (Path(folder) / str(os.getpid())).touch()
    made.model.embed_tokens.register_forward_pre_hook(_die_or_hang)
    return made


def _report(module: nn.Module, args: Any, *, folder: str, seconds: float) -> None:
    if args[0].flatten().tolist()[:4] == SLOW[:4]:
        (Path(folder) / f"scores-{os.getpid()}").touch()
        time.sleep(seconds)


def reporting(folder: str, seconds: float) -> nn.Module:
    """:func:`model`, which leaves a file named after its process in ``folder`` and sleeps when it scores ``SLOW``."""
    made = tiny_model(seed=0).double()
    made.model.embed_tokens.register_forward_pre_hook(partial(_report, folder=folder, seconds=seconds))
    return made


def late(seconds: float) -> nn.Module:
    """:func:`model`, slow to make."""
    time.sleep(seconds)
    return tiny_model(seed=0).double()


def only_once(folder: str) -> nn.Module:
    """:func:`model` the first time; afterwards an error until ``folder / 'broken'`` is removed."""
    marks = Path(folder)
    if (marks / "broken").exists():
        raise OSError("the disk is not there")
    (marks / "broken").touch()
    return tiny_model(seed=0).double()


def quits(folder: str) -> nn.Module:
    """Ends the process, after leaving a file in ``folder``."""
    (Path(folder) / str(os.getpid())).touch()
    os._exit(7)


def _pause_while(module: nn.Module, args: Any, *, path: str, seconds: float) -> None:
    if Path(path).exists():
        time.sleep(seconds)


def delayed_while(path: str, seconds: float) -> nn.Module:
    """:func:`model` with a slower forward while a file exists."""
    made = tiny_model(seed=0).double()
    made.model.layers[0].register_forward_pre_hook(partial(_pause_while, path=path, seconds=seconds))
    return made
