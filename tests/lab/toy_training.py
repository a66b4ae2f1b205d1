"""A training loop as a user would write it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm_kl.algorithms import ALGORITHMS, AlgorithmParts, make_algorithm
from toy_tasks import Task

__all__ = ["ADAM", "GROUP", "best_probability", "learned", "total", "train"]

#: Of :func:`train`: quick and steady on all tasks.
ADAM: dict[str, Any] = {"optimiser": partial(torch.optim.Adam, betas=(0.8, 0.98)), "lr": 0.2}
#: Answers to each prompt.
GROUP = 4


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
            pieces = [batch]
            if micro_batches > 1:
                shuffled = batch[torch.randperm(len(batch), generator=rng)]
                pieces = list(parts.micro_batches(shuffled, micro_batches))
            for part in pieces:
                for loss in parts.losses:
                    out = loss(part)
                    total(out).backward()
                    if "kl_to_ref" in out:
                        kl.append(float(out["kl_to_ref"]))
            for x in (*optimisers, *schedules):
                x.step()
    return kl


def learned(
    task: Task,
    name: str,
    *,
    group: int = GROUP,
    rows: int = 128,
    data: TensorDictBase | None = None,
    how: dict[str, Any] = ADAM,
    **settings: Any,
) -> Tensor:
    """Log-probs of answers ``[P, R]`` that a policy ends with, which begins as the reference.

    It learns from its own answers, or from ``data`` at each step; ``how`` are arguments of :func:`train`.
    """
    actor = task.policy()
    if settings.get("use_reference", ALGORITHMS[name].needs_reference):
        settings = {"reference": task.policy(), **settings}
    if name == "dr_grpo":
        settings["max_len"] = 2
    parts = make_algorithm(name, actor, **settings)
    train(parts, lambda rng: task.sample(actor, rows, rng, group) if data is None else data.clone(), **how)
    return task.log_probs(actor)


def best_probability(task: Task, log_probs: Tensor) -> float:
    """Of the best answer, for the prompt where it is lowest."""
    return float(log_probs.exp().gather(-1, task.reward.argmax(-1, keepdim=True)).min())
