"""The gradient of a body, one branch of the prefix tree after the other.

The scores are computed from hidden states without a graph. In the backward each branch is forwarded again, and its activations
are freed before the next branch. The keys, values and states of a prefix stay, and collect their gradients from all branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchrl_llm_kl.scoring._model import locked
from torchrl_llm_kl.scoring._scores import States

#: A tensor that later forwards read, and its copy without a graph, whose gradient they add to.
Cut = tuple[Tensor, Tensor]


class Branches(Protocol):
    """The forwards of a body, where later ones read keys, values or states of earlier ones."""

    elements: list[Tensor]

    def run(self, index: int) -> States:
        """Forward, in order, and return the states that predict ``elements[index]``."""

    def cut(self, index: int) -> list[Cut]:
        """Detach everything that later forwards read of this one, right after its run."""

    def readers(self, index: int) -> set[int]:
        """The later forwards that read it."""


def recomputed(make: Callable[[], Branches], hidden: Tensor, model: nn.Module) -> Tensor:
    """Hidden states ``[n, H]`` with a backward that forwards again.

    Args:
        make: returns the forwards that computed ``hidden``, to run them again.
        hidden: their states, in order, without a graph.
        model: the model, whose parameters get gradients. Other tensors get none.
    """
    return _Hidden.apply(make, model, hidden, *(each for each in model.parameters() if each.requires_grad))


class _Hidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, make: Callable[[], Branches], model: nn.Module, hidden: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.make, ctx.model, ctx.parameters, ctx.state = make, model, parameters, _state_of(model)
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if _state_of(ctx.model) != ctx.state:
            raise RuntimeError(
                "recompute=True forwards again in the backward, and the model's weights, mode, trained parameters or adapters "
                "have changed since: call backward() before you change them."
            )
        hooks = [(each, each._backward_hooks) for each in ctx.parameters]
        try:
            for each in ctx.parameters:  # a hook must see the whole gradient, and not one of each forward
                each._backward_hooks = None
            # The options hold the autocast of the forward.
            with locked(ctx.model), torch.autocast(gradient.device.type, enabled=False):
                gradients = branch_gradients(ctx.make(), gradient, ctx.parameters)
        finally:
            for each, own in hooks:
                each._backward_hooks = own
        return None, None, None, *gradients


def _state_of(model: nn.Module) -> list[object]:
    """Everything that must not change between a forward and its repetition."""
    weights = [(each._version, each.requires_grad) for each in (*model.parameters(), *model.buffers())]
    names = ("training", "_disable_adapters", "_active_adapter")
    return [weights, [[vars(module).get(name) for name in names] for module in model.modules()]]


def branch_gradients(forwards: Branches, gradient: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient of each parameter, given the gradient of all hidden states ``[n, H]``.

    A forward has its backward as soon as no later one reads it.
    """
    totals: list[Tensor | None] = [None] * len(parameters)
    gradients = gradient.split([len(each) for each in forwards.elements])
    alive: dict[int, tuple[Tensor, list[Cut]]] = {}
    done: set[int] = set()
    for index in range(len(forwards.elements)):
        with torch.enable_grad():
            source = forwards.run(index).source
        alive[index] = source, forwards.cut(index)
        for last in sorted(alive, reverse=True):
            if not forwards.readers(last) <= done:
                continue
            _backward(
                *alive.pop(last),
                gradients[last],
                parameters,
                totals,
                [leaf for i, (_, cuts) in alive.items() if last in forwards.readers(i) for _, leaf in cuts],
            )
            done.add(last)
    return totals


def _backward(
    source: Tensor,
    cuts: list[Cut],
    gradient: Tensor,
    parameters: Sequence[Tensor],
    totals: list[Tensor | None],
    read: list[Tensor],
) -> None:
    """The backward of one forward: adds to the gradients of the parameters, and of everything that it ``read``."""
    ends = [(source, gradient), *((own, leaf.grad) for own, leaf in cuts if leaf.grad is not None)]
    ends = [(own, grad) for own, grad in ends if own.requires_grad and own.numel()]
    if not ends:
        return
    outputs, given = zip(*ends, strict=True)
    read = [leaf for leaf in read if leaf.requires_grad]
    results = torch.autograd.grad(outputs, [*parameters, *read], given, allow_unused=True)
    for i, result in enumerate(results[: len(parameters)]):
        before = totals[i]
        if result is not None:  # a copy, since autograd may return one tensor for two parameters
            totals[i] = result.clone() if before is None else before.add_(result)
    for leaf, result in zip(read, results[len(parameters) :], strict=True):
        leaf.grad = leaf.grad if result is None else result if leaf.grad is None else leaf.grad + result
