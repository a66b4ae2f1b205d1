"""Hyper-parameters and tokens on two devices: a loss around a model that was moved before, or data that was not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchrl_llm_kl import AdaptiveKLCoefficient
from torchrl_llm_kl.losses import (
    EntropyBonus,
    ImportanceWeights,
    KLToReference,
    KLToSampler,
    LossTerm,
    OffPolicySequenceMask,
    RejectionMask,
    TopEntropyMask,
    get_objective,
    value_error,
)
from torchrl_llm_kl.losses._parts import Part, TermPart, dummy_inputs

aten = torch.ops.aten
# Arithmetic and comparisons take a 0-dim tensor of the CPU beside one of an accelerator; these do not.
STRICT = (aten.clamp.Tensor, aten.lerp.Tensor, aten.addcmul.default, aten.addcdiv.default)


class Accelerator(TorchDispatchMode):
    """Tensors of the device "meta" stand for those of an accelerator: they cannot be read, but can be copied back."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._to_copy.default:
            source, device = args[0], torch.device(kwargs.get("device") or args[0].device).type
            if source.device.type == "meta" and device == "cpu":
                return next(value for there, value in self.copied if there is source).clone()
            out = func(*args, **kwargs)
            self.copied.append((out, source))
            return out
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = any(x.device.type == "meta" for x in given)
        here = [x for x in given if x.device.type == "cpu"]
        if there and here and (func in STRICT or any(x.ndim for x in here)):
            raise RuntimeError(f"Expected all tensors to be on the same device, found two in {func}.")
        return func(*args, **kwargs)


OBJECTIVES = (
    *("ppo", "dapo", "dr_grpo", "gspo", "luspo", "gmpo", "cispo", "sapo", "clip_cov", "kl_cov", "dppo", "vespo"),
    *("topr", "sppo", "dro", "rec", "mix", "distill"),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"clip_ratio_c": 3.0, "enable_sequence_masking": True},
    "rec": {"clip_mode": "ring", "weight": "importance_sampling", "regularizer": "k2", "regularizer_coef": 0.1},
}
OTHERS: dict[str, Any] = {
    "value_error": lambda: Part(value_error, ("value", "mask", "value_target", "old_value"), clip_value=0.2),
    "adaptive": lambda: KLToReference(AdaptiveKLCoefficient(0.1, target=1.0, horizon=10)),
    "kl_to_sampler": lambda: KLToSampler(0.1, "corrected_k3"),
    "entropy": lambda: EntropyBonus(0.1),
    "weights": lambda: ImportanceWeights(low=0.5, high=2.0, mode="mask"),
    "geometric": lambda: ImportanceWeights(level="geometric", high=2.0),
    "rejection": lambda: RejectionMask("seq_max_k1", low=-0.1, high=0.1),
    "sequences": lambda: OffPolicySequenceMask(0.1),
    "top_entropy": lambda: TopEntropyMask(0.5),
    "threshold": lambda: TopEntropyMask(threshold=0.5),
}


def leaves(result: Any) -> list[Tensor]:
    """Values, weights and metrics of terms; weights and metrics of a correction."""
    terms = [[x.value, x.weight, dict(x.metrics)] if isinstance(x, LossTerm) else x for x in result]
    return [x for x in tree_leaves(terms) if isinstance(x, Tensor)]


@pytest.mark.parametrize("name", [*OBJECTIVES, *OTHERS])
@pytest.mark.filterwarnings("ignore:KL estimator")
def test_tokens_and_numbers_on_two_devices(name: str) -> None:
    """A loss keeps its numbers on the CPU unless it is moved: no copy for each call; or it was moved, and a batch was not."""
    part = OTHERS[name]() if name in OTHERS else TermPart(get_objective(name), **SETTINGS.get(name, {}))
    rng = torch.Generator().manual_seed(0)
    given = {
        key: x - torch.rand(x.shape, generator=rng) if x.dtype.is_floating_point else x
        for key, x in dummy_inputs(part).items()
    }
    expected = leaves(part(given))
    with Accelerator():
        found = leaves(part({key: x.to("meta") for key, x in given.items()}))
    assert [x.shape for x in found] == [x.shape for x in expected]
    assert all(x.device.type == "meta" for x in found if x.ndim)
    if name != "adaptive":
        with Accelerator():
            part.to("meta")
            found = leaves(part(given))
        torch.testing.assert_close(found, expected)
