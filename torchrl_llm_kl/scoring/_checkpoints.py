"""Activation checkpoints: a layer that is recomputed in the backward runs in the context of its forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from torchrl_llm_kl._private import saving_hook

ADVICE = "use transformers' checkpointing or torch's checkpoint_wrapper"
#: A module or configuration, the name of an attribute, its current value and its replacement.
Swap = tuple[object, str, object, object]
ABSENT: Final = object()  # the current value of an attribute that the instance does not have


Result = TypeVar("Result")


class CheckpointError(Exception):
    """A checkpoint would recompute layers without the context of their forward."""

    def __init__(self) -> None:
        super().__init__(f"Layers run in a checkpoint in their own code or of another library: {ADVICE}.")


class Followed:
    """The state of a forward that its checkpoints restore."""

    calls: int = 0  # such as attention calls: a recomputation continues at its first one
    saving: tuple[bool, object] = (False, None)  # the result of saving() where the forward, or its checkpoint, began
    refusal: Callable[[], Exception] = CheckpointError

    def check_saving(self) -> None:
        """Raise an error inside a checkpoint that :func:`follow` does not know: its recomputation would lack this forward."""
        if saving() != self.saving:
            raise self.refusal()


def saving() -> tuple[bool, object]:
    """Whether a graph is recorded, and the hook of the innermost checkpoint.

    A reentrant checkpoint records no graph. A non-reentrant one replaces saved tensors through a hook. So a changed result
    shows that a checkpoint was entered.
    """
    pack = saving_hook()
    return torch.is_grad_enabled(), pack if getattr(pack, "__module__", None) == "torch.utils.checkpoint" else None


def follow(
    function: Callable[..., Result],
    forward: Followed,
    again: Callable[[int], AbstractContextManager[None]],
    run: Callable[..., Result],
    *args: object,
    **options: object,
) -> Result:
    """Call the checkpoint ``function(run, ...)`` so that its recomputation runs inside ``again(calls)``.

    ``calls`` is the number of calls of the forward before ``run``.
    """
    calls = -1

    def bound(*inputs: object, **named: object) -> Result:
        nonlocal calls
        if calls >= 0:
            with again(calls):
                return run(*inputs, **named)
        calls, before = forward.calls, forward.saving
        if before[0] == torch.is_grad_enabled():  # a reentrant checkpoint disables gradients
            forward.saving = saving()
        try:
            return run(*inputs, **named)
        finally:
            forward.saving = before

    forward.check_saving()
    settings = settings_of(function)
    if settings is not None:  # always non-reentrant: gradients must reach keys and values of other packs
        function = partial(checkpoint, **{**settings, "use_reentrant": False})
    return function(bound, *args, **options)


def settings_of(function: Callable[..., object]) -> dict[str, Any] | None:
    """The settings bound to torch's checkpoint function, or None if ``function`` is another one."""
    if isinstance(function, partial) and not function.args:
        inner = settings_of(function.func)
        return None if inner is None else inner | function.keywords
    return {} if function is checkpoint else None


@contextmanager
def swapped(swaps: Sequence[Swap]) -> Iterator[None]:
    """Context in which attributes are replaced. They are restored at the end, also after an error."""
    try:
        for owner, name, _, value in swaps:
            vars(owner)[name] = value  # setattr on a compiled module would set the inner module's attribute
        yield
    finally:
        for owner, name, value, _ in swaps:
            if value is ABSENT:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = value
