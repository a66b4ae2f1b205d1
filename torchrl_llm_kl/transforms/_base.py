"""What all transforms here share: where they run, what they leave alone, and how outputs are declared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform

from torchrl_llm_kl.ragged import Container, Ragged, Rows, own_leaves, read_node, write_ragged

__all__ = ["Output", "StepPlaces", "StepTransform", "declare"]


class Output:
    """Values ready to be written: all of a transform's outputs are computed before the first is stored."""

    def __init__(self, key: NestedKey, slots: torch.Tensor, container: Container) -> None:
        self.key, self.slots, self.container = key, slots, container

    @classmethod
    def of(cls, key: NestedKey, data: Ragged) -> Output:
        """From per-token values; 0 at padding."""
        return cls(key, data.slots(), data.container)


class StepPlaces(ABC):
    """Runs :meth:`outputs` wherever TorchRL runs a transform; a mixin for transforms and compositions of them.

    Nothing is written before everything is computed, so that a bad input leaves the data as it was.
    """

    @abstractmethod
    def outputs(self, td: TensorDictBase, next_td: TensorDictBase) -> list[Output]:
        """Compute everything from the step ``td`` and its result ``next_td``, writing nothing."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        for output in self._ordered(tensordict, next_tensordict):
            next_tensordict = write_ragged(next_tensordict, output.key, output.slots, output.container)
        return next_tensordict

    def _ordered(self, td: TensorDictBase, next_td: TensorDictBase) -> list[Output]:
        # Nested keys last: they always fit, so that an entry which does not fit is refused before anything is written.
        return sorted(self.outputs(td, next_td), key=lambda output: isinstance(output.key, tuple))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply to data that was collected before: on a direct call, or when a replay buffer is sampled."""
        if tensordict.batch_size.numel() == 0:
            raise ValueError(
                f"the batch is empty: a TensorDict of batch size {tuple(tensordict.batch_size)} holds nothing to score, drop it"
            )
        if tensordict.is_locked:
            raise RuntimeError("Cannot modify locked TensorDict. Unlock it first: td.unlock_().")
        next_td = read_node(tensordict, "next")
        outputs = self._ordered(tensordict, tensordict if next_td is None else next_td)
        inside = () if next_td is None else ("next",)
        keys = [unravel_key((*inside, output.key)) for output in outputs]
        own_leaves(tensordict, *keys)
        for key, output in zip(keys, outputs, strict=True):
            tensordict = write_ragged(tensordict, key, output.slots, output.container)
        return tensordict

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        # A replay buffer calls this on ``extend`` when the transform was appended with ``invert=True``.
        return self.forward(next_tensordict)


class StepTransform(StepPlaces, Transform):
    """A transform of one step, that works the same in an env, in a replay buffer and called directly.

    Subclasses say what to compute (:meth:`outputs`) and which per-token entries that adds (:attr:`token_entries`).
    """

    @property
    def token_entries(self) -> dict[NestedKey, tuple[int, ...]]:
        """Per-token entries written beside the observations: key -> feature shape behind the token dimension."""
        return {}

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        # After a reset no token has been produced yet: the declared entries exist, with length 0.
        lengths = torch.zeros(tensordict_reset.batch_size.numel(), dtype=torch.long)
        for key, features in self.token_entries.items():
            empty = torch.zeros((0, *features), device=tensordict_reset.device)
            tensordict_reset = write_ragged(tensordict_reset, key, empty, Rows(lengths, tensordict_reset.batch_size))
        return tensordict_reset

    # ------------------------------------------------------------------ specs

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Declare the per-token entries: float32 of shape ``[*B, -1, *F]``, one number for each token."""
        for key, features in self.token_entries.items():
            declare(observation_spec, key, features)
        return observation_spec


def declare(spec: Composite, key: NestedKey, features: tuple[int, ...]) -> None:
    """Add an entry ``[*B, -1, *F]`` of float32 to a spec."""
    path: Any = unravel_key(key)
    path = (path,) if isinstance(path, str) else path
    for name in path[:-1]:
        if spec.get(name, None) is None:
            spec[name] = Composite(shape=spec.shape, device=spec.device)
        spec = spec[name]
    spec[path[-1]] = Unbounded(shape=(*spec.shape, -1, *features), device=spec.device, dtype=torch.float32)
