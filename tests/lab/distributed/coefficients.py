"""What each rank measures and does with a coefficient that holds a target."""

import math

import torch
import torch.distributed as dist

from torchrl_llm_kl.estimators import DualKLCoefficient, PIKLCoefficient

KINDS = {
    "pi": lambda: PIKLCoefficient(0.2, 0.5, smoothing=0.5, warmup=1),
    "dual": lambda: DualKLCoefficient(0.2, 0.5, warmup=1),
}


def updated(kind, measured, *, tensors=True, all_ranks=None):
    """The state after updates with each rank's (KL, number of samples)."""
    coefficient = KINDS[kind]()
    for step in measured:
        kl, n = step[dist.get_rank()]
        coefficient.update(torch.tensor(kl) if tensors else kl, torch.tensor(n) if tensors else n, all_ranks=all_ranks)
    return {name: float(buffer) for name, buffer in coefficient.state_dict().items()}


def refused(kind, kls, n):
    """What an update of numbers raises, and the state after it."""
    coefficient, rank = KINDS[kind](), dist.get_rank()
    try:
        coefficient.update(kls[rank], n[rank])
    except ValueError as error:
        return str(error), {name: float(buffer) for name, buffer in coefficient.state_dict().items()}
    return "", {}


def of_a_group(kind):
    """The average after an update of the first two ranks alone: 0.2 and 0.4, weights 1 and 3."""
    group = dist.new_group([0, 1])
    coefficient = KINDS[kind]()
    if dist.get_rank() > 1:
        return math.nan
    coefficient.update([0.2, 0.4][dist.get_rank()], [1, 3][dist.get_rank()], process_group=group)
    return float(coefficient.average)
