"""Functions for each rank: whole runs of ``train_lab``."""

import os
import warnings
from pathlib import Path

import torch.distributed as dist

from torchrl_llm_kl.scoring import TokenCritic
from train_lab import go

#: The same figures on any number of ranks need float64, and a learning rate with which the KL stays small.
COMMON = ("model.dtype=float64", "optimizer.lr=1e-3", "optimizer.schedule=constant")


def run(lab, out, *overrides, environment=None, critic_tokens=None):
    """Train on these ranks. ``environment`` is set on the last rank. Returns the outcome and the said lines."""
    last = dist.get_rank() == dist.get_world_size() - 1
    given = (environment or {}) if last else {}
    os.environ.update(given)
    if critic_tokens is not None:
        TokenCritic.__init__.__kwdefaults__["tokens_per_batch"] = critic_tokens
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result, said = go(Path(lab), Path(out), *COMMON, *overrides)
    finally:
        for name in given:
            del os.environ[name]
    return result.outcome, said


def call(lab, out, overrides=(), **how):
    return run(lab, out, *overrides, **how)


def refused(lab, out, overrides=()):
    """The error of a run on this rank."""
    try:
        run(lab, out, *overrides)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
