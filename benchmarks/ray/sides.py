"""Both libraries' transforms, with their models in named actors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.envs.llm.transforms.kl import (
    RayRetrieveKL as TorchRLRayRetrieveKL,
)

from benchmarks.models import QUICK, ModelSize, qwen2, wrapper
from benchmarks.workloads.base import OURS, THEIRS
from torchrl_llm_kl.service import RayRetrieveKL

FULL = ModelSize(vocab=1000, hidden=64, layers=2)
SEQUENCES = 4
UNRELATED_BYTES = 8 * 2**20

SIDES = (THEIRS, OURS)
REF = "ref_log_probs"


def policy(size: ModelSize) -> nn.Module:
    return _scoring(size, 0, "log_probs")


def reference(size: ModelSize) -> nn.Module:
    return _scoring(size, 1, REF)


def _scoring(size: ModelSize, seed: int, key: str) -> Any:
    # torchrl scores with gradients unless parameters are frozen: it would keep the graph and send it.
    return wrapper(qwen2(size, seed=seed).requires_grad_(False), key)


@dataclass(frozen=True)
class Sides:
    """Creates the transform of a library. The first process also creates the actors.

    Args:
        size: of both models.
    """

    size: ModelSize

    def make(self, side: str) -> Callable[[TensorDictBase], TensorDictBase]:
        """Make a transform that writes log-probs of policy and reference, both behind actors, and their KL."""
        # The only construction of torchrl's class that works: None for both models, and a factory for each.
        kind = TorchRLRayRetrieveKL if side == THEIRS else RayRetrieveKL
        return kind(
            None,
            None,
            gen_model_factory=partial(policy, self.size),
            ref_model_factory=partial(reference, self.size),
            actor_name=side,
            assistant_only=False,
            add_to_reward=False,
        )


def data(size: ModelSize, length: int, *, seed: int, unrelated: bool = True) -> TensorDictBase:
    """Make ``SEQUENCES`` rows of random tokens. Half of each row is a prompt. The large entry is read by no model."""
    rng = torch.Generator().manual_seed(seed)
    full = torch.randint(size.vocab, (SEQUENCES, length), generator=rng)
    found = TensorDict(
        {
            "tokens": {"full": full, "prompt": full[:, : length // 2].clone()},
            "masks": {"all_attention_mask": torch.ones_like(full, dtype=torch.bool)},
            "next": TensorDict({"reward": torch.zeros(SEQUENCES, 1)}, [SEQUENCES]),
        },
        [SEQUENCES],
    )
    if unrelated:
        found["pixels"] = torch.zeros(SEQUENCES, UNRELATED_BYTES // SEQUENCES, dtype=torch.uint8)
    return found


def numbers(found: TensorDictBase) -> Tensor:
    """Returns the KL that a transform wrote, padded to ``[SEQUENCES, T]``."""
    values = found["next", "kl_penalty"]
    return torch.nested.to_padded_tensor(values, 0.0) if values.is_nested else values


def size_of(quick: bool) -> ModelSize:
    return QUICK if quick else FULL
