"""A training loop as a user would write it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm_kl.algorithms import ALGORITHMS, AlgorithmParts, make_algorithm
from toy_tasks import TabularCritic, Task, chain

#: Arguments of :func:`train` that learn quickly and steadily on all tasks.
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
    """Train with a learning rate that falls linearly to 0. Returns the ``kl_to_ref`` of each step, if there is one.

    Learning rates are far above 1, since a token of probability p is seen only in a share p of the tokens.
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
                pieces = list(parts.micro_batches(batch[torch.randperm(len(batch), generator=rng)], micro_batches))
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
    """Train a policy that begins as the reference. Returns its final log-probs of answers ``[P, R]``.

    It learns from its own answers, or from ``data`` at each step. ``how`` holds arguments of :func:`train`.
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
    """The probability of the best answer, for the prompt where it is lowest."""
    return float(log_probs.exp().gather(-1, task.reward.argmax(-1, keepdim=True)).min())


# ---------------------------------------------------------------------- a batch for any algorithm
_TASK = chain()
#: Name -> forwards of the policy and of the reference. These algorithms compute a number of the whole batch with the current
#: policy whenever a batch is prepared. kto does so for mismatched answers, which the reference scores too.
FORWARDS_OF_THE_BATCH = {"kto": (1, 1), "bco": (1, 0)}
#: Presets that read labels of single answers.
_LABELLED = {*FORWARDS_OF_THE_BATCH, "vapo"}


def rows_of_all(rows: int = 16, seed: int = 0, name: str = "") -> TensorDictBase:
    """Rollouts for any schema: groups, pairs, triples, experts, trajectories of one step."""
    rows *= 3 if name == "tpo" else 1
    found = _TASK.sample(_TASK.policy(), rows, torch.Generator().manual_seed(seed), 4)
    found["next", "reward"] += torch.rand(rows, 1, generator=torch.Generator().manual_seed(seed))
    found["expert_mask"] = torch.arange(rows) % 4 == seed % 4
    found["run"], found["step"] = torch.arange(rows), torch.zeros(rows, dtype=torch.long)
    found["state"] = found["query"].clone()
    found["role"], found["reward_baseline"] = torch.arange(rows) % 3, torch.linspace(-1, 1, rows)
    if name in _LABELLED:
        found["chosen"] = torch.arange(rows) % 3 == seed % 3
    return found


def made(name: str, actor: Any, reference: Any, **settings: Any) -> AlgorithmParts:
    """An algorithm with all arguments that these rows need."""
    preset = ALGORITHMS[name]
    given: dict[str, Any] = {"reference": reference} if preset.needs_reference else {}
    given |= {"critic": TabularCritic(_TASK)} if preset.use_critic else {}
    given |= {"max_len": 2} if name == "dr_grpo" else {}
    if preset.schema == "trajectory":
        given["advantage_args"] = {"keys": {"run": "run", "step": "step"}}
    return make_algorithm(name, actor, **given | settings)
