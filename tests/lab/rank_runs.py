"""Functions for each rank: whole runs, and the start of runs that end early."""

import warnings
from pathlib import Path

import torch.distributed as dist

from torchrl_llm_kl.training import Run
from torchrl_llm_kl.training._inputs import load_inputs
from train_lab import figures, go, settings, weights


def run(lab, out, *overrides, kl=None, **how):
    """Train on these ranks. Returns the outcome, the said lines, and the figures of the file."""
    how |= {} if kl is None else {"kl": kl}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result, said = go(Path(lab), Path(out), *overrides, **how)
    return result.outcome, said, result.rows


def call(lab, out, overrides=(), **how):
    return run(lab, out, *overrides, **how)
