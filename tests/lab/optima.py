"""The optima that training must reach, by enumeration of all answers, without sampling or gradients."""

from collections.abc import Callable

import torch
from torch import Tensor

from toy_tasks import Task


def pi_star(task: Task, beta: float, reward: Tensor | None = None) -> Tensor:
    """The optimum of ``E r - beta KL(pi || ref)`` over whole answers, as log-probs ``[P, R]``."""
    return (task.reference + (task.reward if reward is None else reward) / beta).log_softmax(-1)


def token_kl_optimum(task: Task, beta: float, reward: Tensor | None = None) -> Tensor:
    """The fixed point of a KL per token in the loss, which ignores the effect of a token on the KL of later ones.

    ``pi(a | s)`` is proportional to ``ref(a | s) exp(Q(s, a) / beta)`` with the mean reward ``Q`` of the answers that continue
    from there. For whole answers :func:`pi_star` has the soft value ``beta log E_ref exp(r / beta)`` instead.
    """
    rows = zip(task.reference, task.reward if reward is None else reward, strict=True)
    return torch.stack([_descend(task, ref, r, beta, ())[1].log() for ref, r in rows])


def _descend(task: Task, ref: Tensor, reward: Tensor, beta: float, prefix: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The mean reward after a prefix, and the probabilities of answers given the prefix, ``[R]``, 0 for other answers."""
    if prefix in task.answers:
        here = task.answers.index(prefix)
        return reward[here], torch.eye(len(reward), dtype=torch.float64)[here]
    after = [(*prefix, token) for token in range(task.vocab)]
    q, below = map(torch.stack, zip(*(_descend(task, ref, reward, beta, x) for x in after), strict=True))
    inside = [[i for i, answer in enumerate(task.answers) if answer[: len(x)] == x] for x in after]
    mass = torch.stack([ref[i].exp().sum() for i in inside])
    policy = (mass.log() + q / beta).softmax(-1)
    return (policy * q).sum(), (policy.unsqueeze(-1) * below).sum(0)


def self_consistent(task: Task, beta: float, advantage: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The optimum for an advantage whose mean ``advantage(probabilities, rewards)``, both ``[P, R]``, depends on the policy."""
    found, change = task.reference, float("inf")
    for _ in range(2000):
        step = token_kl_optimum(task, beta, advantage(found.exp(), task.reward))
        change = float((step - found).abs().max())
        if change < 1e-8:
            return step
        found = 0.8 * found + 0.2 * step
    raise AssertionError(f"no fixed point: still moving by {change}")


def forward_kl_optimum(task: Task, beta: float) -> Tensor:
    """The optimum of ``E r - beta KL(ref || pi)`` for one-token answers, ``pi = beta ref / (lam - r)``, by bisection."""
    low, high = task.reward.amax(-1, keepdim=True), task.reward.amax(-1, keepdim=True) + beta
    for _ in range(100):
        lam = (low + high) / 2
        too_much = (beta * task.reference.exp() / (lam - task.reward)).sum(-1, keepdim=True) > 1
        low, high = torch.where(too_much, lam, low), torch.where(too_much, high, lam)
    return (beta * task.reference.exp() / (high - task.reward)).log()
