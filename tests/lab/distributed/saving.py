"""Functions for each rank: a moving reference that other ranks continue."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

from torchrl_llm_kl import ReferenceUpdater


def whole_tensors(model):
    """All weights, gathered by a collective."""
    state = get_model_state_dict(model)
    whole = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in state.items()}
    return {name: value.clone() for name, value in whole.items()}


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
