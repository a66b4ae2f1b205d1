"""Functions for each rank: train, save, and continue a run that another number of ranks saved."""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

from project import PROJECT
from torchrl_llm_kl import ReferenceUpdater

TUTORIALS = str(PROJECT / "tutorials")


def whole_tensors(model):
    """All weights, gathered by a collective."""
    state = get_model_state_dict(model)
    whole = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in state.items()}
    return {name: value.clone() for name, value in whole.items()}


def recipe(settings, out, *, until=None, resume=False):
    """Run the recipe, or a part of it. Returns the metrics of each step, the weights and the accuracies."""
    if TUTORIALS not in sys.path:
        sys.path.insert(0, TUTORIALS)
    import countdown_fsdp
    from countdown.task import split_problems

    countdown_fsdp.split_problems = partial(split_problems, num_held_out=24)  # faster
    run = countdown_fsdp.Run(countdown_fsdp.Settings(**settings), Path(out), resume=resume)
    assert run.train(until)
    rows = [{key: value for key, value in row.items() if key != "seconds"} for row in run.metrics.rows]
    weights = whole_tensors(run.models)
    held = [value for value in run.models.state_dict().values() if value.ndim > 1]
    local = sum((value.to_local() if hasattr(value, "to_local") else value).numel() for value in held)
    state = run.parts.state_dict()
    share, parts = local / sum(x.numel() for x in held), {key: x for key, x in state.items() if key != "algorithm"}
    return {"rows": rows, "weights": weights, "share": share, "parts": parts, "accuracy": run.accuracy()}


def other_algorithms():
    """The algorithms that the recipe runs, besides its default."""
    from torchrl_llm_kl.algorithms import ALGORITHMS

    left_out = ("mix", "distill", "rewards")  # as the recipe says; test_countdown_fsdp.py checks that it says so
    run = [name for name, preset in ALGORITHMS.items() if preset.on_policy and preset.schema not in left_out]
    return sorted({*run} - {"grpo"})


def follow(folder, *, first, last):
    """Run steps ``first`` to ``last`` of a reference that follows a policy, and save it in ``folder``."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)) for _ in range(2)]
    if dist.is_initialized():
        for model in models:
            fully_shard(model)
    policy, reference = models
    updater = ReferenceUpdater(reference, policy, decay=0.9)
    if first:
        dcp.load({"updater": updater}, checkpoint_id=f"{folder}/{first}", no_dist=not dist.is_initialized())
    for step in range(first, last):
        rng = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for value in policy.parameters():
                new = torch.randn(value.shape, generator=rng)
                if hasattr(value, "to_local"):
                    from torch.distributed.tensor import distribute_tensor

                    new = distribute_tensor(new, value.device_mesh, value.placements)
                value.copy_(new)
        updater.step()
    dcp.save({"updater": updater}, checkpoint_id=f"{folder}/{last}", no_dist=not dist.is_initialized())
    return whole_tensors(reference)
