"""A training loop as a user would write it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm_kl.algorithms import AlgorithmParts
from toy_tasks import Task

__all__ = ["best_probability", "total", "train"]


def total(out: TensorDictBase) -> Tensor:
    return torch.stack([value for key, value in out.items() if key.startswith("loss_")]).sum()


def train(
    parts: AlgorithmParts,
    collect: Callable[[torch.Generator], TensorDictBase],
    *,
    steps: int = 50,
    optimiser: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    lr: float = 20.0,
    epochs: int = 1,
    micro_batches: int = 1,
    seed: int = 0,
) -> list[float]:
    """Learning rate down to 0 in a straight line. Returns ``kl_to_ref`` at each step, where there is one.

    A probability of p is seen in a share p of the tokens, hence learning rates far above 1.
    """
    rng = torch.Generator().manual_seed(seed)
    optimisers = [optimiser(parts.loss.parameters(), lr=lr)]
    if parts.critic_loss is not None:
        optimisers.append(torch.optim.Adam(parts.critic_loss.parameters(), lr=0.1))
    schedules = [torch.optim.lr_scheduler.LambdaLR(x, lambda i: 1 - i / (steps * epochs)) for x in optimisers]
    kl = []
    for _ in range(steps):
        batch = parts.prepare(collect(rng))
        for _ in range(epochs):
            for x in optimisers:
                x.zero_grad()
            shuffled = batch[torch.randperm(len(batch), generator=rng)]
            for part in parts.micro_batches(shuffled, micro_batches) if micro_batches > 1 else [batch]:
                for loss in parts.losses:
                    out = loss(part)
                    total(out).backward()
                    if "kl_to_ref" in out:
                        kl.append(float(out["kl_to_ref"]))
            for x in (*optimisers, *schedules):
                x.step()
    return kl


def best_probability(task: Task, model: torch.nn.Module) -> float:
    """Of the best answer, for the prompt where it is lowest."""
    return float(task.log_probs(model).exp().gather(-1, task.reward.argmax(-1, keepdim=True)).min())
