"""Factories that actors can import."""

import os
import threading
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

from toy_models import tiny_model


def broken():
    raise OSError("no such checkpoint: /nowhere")


class Slow(nn.Module):
    """Sleeps, then returns uniform logits."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, **_):
        time.sleep(self.seconds)
        return (torch.zeros(*input_ids.shape, 97) + self.weight,)


def model(seed=0):
    return tiny_model(seed=seed).double()


def delayed(seconds):
    """:func:`model` with a slower forward."""
    return slowed(model(), seconds)


def slowed(made, seconds):
    made.model.layers[0].register_forward_pre_hook(lambda *_: time.sleep(seconds))
    return made


#: The service that the tests on a cluster share. A test that changes its weights must restore them.
SHARED = {"factory": partial(delayed, 0.02), "name": "shared", "num_replicas": 2, "num_cpus": 0.1}

POISON, ENDLESS = [13] * 6, [17] * 6


def _die_or_hang(module, args):
    ids = args[0].flatten().tolist()
    runs = [ids[i : i + 4] for i in range(len(ids))]
    if POISON[:4] in runs:
        os._exit(7)
    if ENDLESS[:4] in runs:
        threading.Event().wait()


def deadly(folder):
    """:func:`model` whose process ends at the sequence ``POISON``, and whose forward never returns at ``ENDLESS``.

    Leaves a file in the folder each time.
    """
    made = delayed(0.01)
    (Path(folder) / str(os.getpid())).touch()
    made.model.embed_tokens.register_forward_pre_hook(_die_or_hang)
    return made


def from_file(path):
    """:func:`model` with the weights of a file."""
    found = model()
    found.load_state_dict(torch.load(path, weights_only=True))
    return found
