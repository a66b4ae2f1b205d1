"""Both libraries' transforms with their models in named actors, created from any process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.envs.llm.transforms.kl import (
    RayRetrieveKL as TorchRLRayRetrieveKL,
    RetrieveLogProb as TorchRLRetrieveLogProb,
)
from torchrl.envs.transforms.ray_service import RayTransform

from benchmarks.models import QUICK, ModelSize, qwen2, wrapper
from benchmarks.workloads.base import OURS, THEIRS
from torchrl_llm_kl.service import RayRetrieveKL, RayRetrieveLogProb

FULL = ModelSize(vocab=1000, hidden=64, layers=2)
SEQUENCES = 4
UNRELATED_BYTES = 8 * 2**20

Served = Literal["both", "reference"]
SERVED: tuple[Served, ...] = ("both", "reference")
SIDES = (THEIRS, OURS)
KL, REF = "kl_penalty", "ref_log_probs"


def policy(size: ModelSize) -> nn.Module:
    return _scoring(size, 0, "log_probs")


def reference(size: ModelSize) -> nn.Module:
    return _scoring(size, 1, REF)


def _scoring(size: ModelSize, seed: int, key: str) -> Any:
    # torchrl scores with gradients unless parameters are frozen: it would keep the graph and send it.
    return wrapper(qwen2(size, seed=seed).requires_grad_(False), key)


class TorchRLRayRetrieveLogProb(RayTransform):
    """torchrl's ``RetrieveLogProb`` in an actor, built like its other Ray transforms: torchrl has none for this class."""

    def __init__(self, factory: Callable[[], Any], actor_name: str) -> None:
        self._factory = factory
        super().__init__(num_cpus=1, num_gpus=0, actor_name=actor_name)

    def _create_actor(self, **kwargs: Any) -> Any:
        actor = self._ray.remote(num_cpus=1)(_MadeThere).options(name=self._actor_name, lifetime="detached")
        return actor.remote(self._factory)


class _MadeThere(TorchRLRetrieveLogProb):
    def __init__(self, factory: Callable[[], Any]) -> None:
        super().__init__(factory(), log_probs_full_key=(REF, "full"), assistant_only=False)


@dataclass(frozen=True)
class Sides:
    """Creates the transform of a library; the first process creates the actors too.

    Args:
        size: of both models.
    """

    size: ModelSize

    def make(self, side: str, served: Served) -> Callable[[TensorDictBase], TensorDictBase]:
        """The transform: log-probs of policy and reference and their KL, or the reference's log-probs alone.

        The latter is for a policy whose own log-probs came with the samples.
        """
        name, gen, ref = f"{side}-{served}", partial(policy, self.size), partial(reference, self.size)
        if side == THEIRS and served == "reference":
            return TorchRLRayRetrieveLogProb(ref, name)
        if side == THEIRS:  # the only construction that works: None for both models, and a factory for each
            return TorchRLRayRetrieveKL(
                None,
                None,
                gen_model_factory=gen,
                ref_model_factory=ref,
                actor_name=name,
                assistant_only=False,
                add_to_reward=False,
            )
        if served == "reference":
            return RayRetrieveLogProb(model_factory=ref, actor_name=name, assistant_only=False)
        return RayRetrieveKL(
            None,
            None,
            gen_model_factory=gen,
            ref_model_factory=ref,
            actor_name=name,
            assistant_only=False,
            add_to_reward=False,
        )


def data(size: ModelSize, length: int, *, seed: int, unrelated: bool = True) -> TensorDictBase:
    """``SEQUENCES`` rows of random tokens, half of them a prompt, and an entry that no model reads."""
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


def numbers(found: TensorDictBase, served: Served) -> Tensor:
    """Output of a transform, padded; ``[SEQUENCES, T]``."""
    values = found["next", KL] if served == "both" else found["next", REF, "full"]
    return torch.nested.to_padded_tensor(values, 0.0) if values.is_nested else values


def size_of(quick: bool) -> ModelSize:
    return QUICK if quick else FULL
