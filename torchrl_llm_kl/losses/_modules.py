"""Terms and corrections as modules: what :class:`~torchrl_llm_kl.losses.PolicyLoss` adds to an objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_llm_kl.estimators import check_placement
from torchrl_llm_kl.losses._objective import PER_ROW, PER_TOKEN
from torchrl_llm_kl.losses._part import Part
from torchrl_llm_kl.losses.corrections import importance_weights, off_policy_sequence_mask, top_entropy_mask
from torchrl_llm_kl.losses.terms import entropy_bonus, kl_to_ref, kl_to_sampler

__all__ = [
    "INPUTS",
    "Correction",
    "EntropyBonus",
    "ImportanceWeights",
    "KLToReference",
    "KLToSampler",
    "OffPolicySequenceMask",
    "TermPart",
    "TopEntropyMask",
    "dummies",
    "try_out",
]

INPUTS = ("log_prob", "mask", *PER_TOKEN, *PER_ROW)


def dummies() -> dict[str, Tensor]:
    """One token in each of two sequences: what parts are tried on before there is data."""
    zeros = torch.zeros(2, 1)
    inputs: dict[str, Tensor] = {name: zeros for name in INPUTS}
    inputs |= {"mask": zeros == 0, "expert_mask": torch.tensor([[False], [True]]), "selected": zeros == 1}
    return inputs | {"pair_id": torch.zeros(2, dtype=torch.long), "chosen": torch.tensor([True, False])}


def try_out(part: Part, hyper: Mapping[str, Any]) -> None:
    """Let a function check its hyper-parameters, which it does for numbers, not for buffers."""
    values = {name: value() if isinstance(value, nn.Module) else value for name, value in hyper.items()}
    inputs = dummies()
    with torch.no_grad():
        part.function(**{name: inputs[name] for name in part.inputs}, **values)


class TermPart(Part):
    """A function that returns loss terms, with its hyper-parameters."""

    def __init__(self, function: Callable[..., Any], **hyper: Any) -> None:
        super().__init__(function, INPUTS, hyper)
        try_out(self, hyper)


class KLToReference(TermPart):
    """The KL to the reference, as a term of the loss.

    Args:
        coeff: its weight, dimensionless; a number, or a coefficient such as :class:`~torchrl_llm_kl.AdaptiveKLCoefficient`.
        estimator: a name of :func:`~torchrl_llm_kl.get_estimator`, ``"exact"`` (then the loss needs the reference model), or
            a function of the same signature. See ``docs/estimators.md`` for which to use.

    Keyword Args:
        leave_out_experts: leave out the sequences of experts.

    Warns:
        KLPlacementWarning: if the gradient of the estimator in a loss is not that of the reverse KL.
    """

    def __init__(self, coeff: Any = 1e-3, estimator: Any = "k2", *, leave_out_experts: bool = False) -> None:
        check_placement(estimator, "loss", stacklevel=2)
        super().__init__(kl_to_ref, coeff=coeff, estimator=estimator, leave_out_experts=leave_out_experts)


class KLToSampler(TermPart):
    """The KL to the policy that sampled: a soft trust region. Arguments as for :class:`KLToReference`, but not ``"exact"``."""

    def __init__(self, coeff: Any = 1e-3, estimator: Any = "k2", *, leave_out_experts: bool = False) -> None:
        check_placement(estimator, "loss", stacklevel=2)
        super().__init__(kl_to_sampler, coeff=coeff, estimator=estimator, leave_out_experts=leave_out_experts)


class EntropyBonus(TermPart):
    """Minus the entropy of the policy, over the whole vocabulary, times ``coeff``.

    Args:
        coeff: its weight, dimensionless.

    Keyword Args:
        leave_out_experts: leave out the sequences of experts, as Trinity's ``mix`` does.
    """

    def __init__(self, coeff: Any = 1e-3, *, leave_out_experts: bool = False) -> None:
        super().__init__(entropy_bonus, coeff=coeff, leave_out_experts=leave_out_experts)


class Correction(Part):
    """A function that returns one weight per token, by which the objective (not the other terms) is multiplied."""

    def __init__(self, function: Callable[..., tuple[Tensor, dict[str, Tensor]]], **hyper: Any) -> None:
        super().__init__(function, INPUTS, hyper)
        try_out(self, hyper)


class ImportanceWeights(Correction):
    """Truncated or masked importance weights for a sampler that computes other log-probs than the trainer.

    Needs ``sampler_log_prob`` beside ``old_log_prob``. Arguments: see
    :func:`~torchrl_llm_kl.losses.corrections.importance_weights`.
    """

    def __init__(
        self, *, level: str = "token", mode: str = "truncate", low: float | None = None, high: float | None = 2.0
    ) -> None:
        super().__init__(importance_weights, level=level, mode=mode, low=low, high=high)


class OffPolicySequenceMask(Correction):
    """Leave out tokens with a negative advantage of sequences that have become unlikely.

    Args:
        delta: nats per token; see :func:`~torchrl_llm_kl.losses.corrections.off_policy_sequence_mask`.
    """

    def __init__(self, delta: float = 0.1) -> None:
        super().__init__(off_policy_sequence_mask, delta=delta)


class TopEntropyMask(Correction):
    """Train only the tokens at which the policy is least sure.

    Args:
        fraction: of the tokens that count; see :func:`~torchrl_llm_kl.losses.corrections.top_entropy_mask`.

    Keyword Args:
        threshold: nats: the entropy from which on a token is trained, instead of a fraction of each batch. With it the
            parts of a batch add up to the whole.
    """

    def __init__(self, fraction: float = 0.2, *, threshold: float | None = None) -> None:
        super().__init__(top_entropy_mask, fraction=fraction, threshold=threshold)
