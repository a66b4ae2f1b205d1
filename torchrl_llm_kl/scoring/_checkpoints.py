"""Checkpoints that a scorer follows: what is recomputed in the backward runs in the context of its forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchrl_llm_kl._private import saving_hook
from torchrl_llm_kl.scoring._asked import asked

ADVICE = "use transformers' checkpointing or torch's checkpoint_wrapper"
#: A module or configuration, the name of an attribute, its value, and the value that replaces it.
Swap = tuple[object, str, object, object]
ABSENT: Final = object()  # before: an instance without the attribute


Result = TypeVar("Result")


class CheckpointError(Exception):
    """Layers would be recomputed in the backward without the context of their forward."""

    def __init__(self) -> None:
        super().__init__(f"Layers run in a checkpoint in their own code or of another library: {ADVICE}.")


class Followed:
    """The state of a forward whose checkpoints are followed."""

    calls: int = 0  # of what a recomputation must find again, so far
    saving: tuple[bool, object] = (False, None)  # of :func:`saving`, where the forward or its checkpoint began
    refusal: Callable[[], Exception] = CheckpointError

    def check_saving(self) -> None:
        """Raise an error inside a checkpoint whose recomputation would not find this forward."""
        if saving() != self.saving:
            raise self.refusal()


def saving() -> tuple[bool, object]:
    """Whether a graph is recorded here, and the innermost checkpoint that drops the tensors it saves.

    A reentrant checkpoint records no graph; any other replaces saved tensors through a hook.
    """
    pack = saving_hook()
    return torch.is_grad_enabled(), pack if asked(pack, "__module__", str) == "torch.utils.checkpoint" else None


def follow(
    function: Callable[..., Result],
    forward: Followed,
    again: Callable[[int], AbstractContextManager[None]],
    run: Callable[..., Result],
    *args: object,
    **options: object,
) -> Result:
    """``function(run, ...)``, a checkpoint; its recomputation runs in ``again(calls)``, with the calls before ``run``."""
    calls = -1

    def bound(*inputs: object, **named: object) -> Result:
        nonlocal calls
        if calls >= 0:
            with again(calls):
                return run(*inputs, **named)
        calls, before = forward.calls, forward.saving
        if before[0] == torch.is_grad_enabled():  # not reentrant
            forward.saving = saving()
        try:
            return run(*inputs, **named)
        finally:
            forward.saving = before

    forward.check_saving()
    settings = settings_of(function)
    if settings is not None:  # reentrant or not: the values are the same, but only one finds keys of other packs
        function = partial(checkpoint, **{**settings, "use_reentrant": False})
    return function(bound, *args, **options)


def settings_of(function: Callable[..., object]) -> dict[str, Any] | None:
    """The settings of torch's checkpoint function; None if ``function`` is another."""
    if isinstance(function, partial) and not function.args:
        inner = settings_of(function.func)
        return None if inner is None else inner | function.keywords
    return {} if function is checkpoint else None


@contextmanager
def swapped(swaps: Sequence[Swap]) -> Iterator[None]:
    """Context: attributes replaced; restores them afterwards, also after an error."""
    try:
        for owner, name, _, value in swaps:
            _put(owner, name, value)
        yield
    finally:
        for owner, name, value, _ in swaps:
            if value is ABSENT:
                vars(owner).pop(name, None)
            else:
                _put(owner, name, value)


def _put(owner: object, name: str, value: object) -> None:
    if isinstance(owner, nn.Module):
        owner.__dict__[name] = value  # a compiled module passes attributes on to the one inside
    else:
        setattr(owner, name, value)
