"""Objectives, terms and corrections as modules: a function together with its hyper-parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_llm_kl.losses._objective import INPUTS, LossTerm, spec_of
from torchrl_llm_kl.losses._placement import check_placement
from torchrl_llm_kl.losses.corrections import importance_weights, off_policy_sequence_mask, top_entropy_mask
from torchrl_llm_kl.losses.terms import entropy_bonus, kl_to_ref, kl_to_sampler

#: Hyper-parameters that are whole numbers and change from step to step.
COUNTED = frozenset({"step"})


class Part(nn.Module):
    """Calls a function with the inputs that it names and its own hyper-parameters.

    Numbers among the hyper-parameters are buffers, so that they are saved, moved, and can be scheduled:
    ``part.clip_high = 0.3`` changes the buffer in place. Modules (an
    :class:`~torchrl_llm_kl.AdaptiveKLCoefficient`) are called for their value. Anything else stays as it is.

    Args:
        function: of keyword arguments.
        inputs: names of tensors that the function may take.
        hyper: its hyper-parameters; those left out have the function's defaults.
    """

    def __init__(self, function: Callable[..., Any], inputs: tuple[str, ...], hyper: Mapping[str, Any]) -> None:
        super().__init__()
        signature = inspect.signature(function).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.values())
        self.function = function
        self.inputs = tuple(name for name in inputs if name in signature or takes_any)
        defaults = {name: parameter.default for name, parameter in signature.items()}
        without = {name for name, default in defaults.items() if default is inspect.Parameter.empty}
        self._required = tuple(name for name in inputs if name in without and name not in ("log_prob", "mask"))
        self.settings: dict[str, Any] = {}
        own = {name: value for name, value in defaults.items() if name not in inputs and name not in without}
        self._floats = frozenset(name for name, value in own.items() if isinstance(value, float))
        for name, value in {**own, **hyper}.items():
            self._put(name, value)

    def _put(self, name: str, value: Any) -> None:
        if type(value) is int and name in self._floats:
            value = float(value)
        if isinstance(value, nn.Module):
            self.add_module(name, value)
        elif name in COUNTED:
            self.register_buffer(name, torch.as_tensor(value, dtype=torch.long))
        elif isinstance(value, Tensor) or type(value) is float:
            self.register_buffer(name, torch.as_tensor(value, dtype=torch.float32).clone())
        else:
            self.settings[name] = value

    @property
    def needs(self) -> tuple[str, ...]:
        """The inputs that the function requires under the current hyper-parameters, beside ``log_prob`` and ``mask``.

        A function without an :class:`~torchrl_llm_kl.losses.ObjectiveSpec` requires its inputs without a default.
        """
        spec = spec_of(self.function)
        return self._required if spec is None else spec.required(self.hyper)

    @property
    def hyper(self) -> dict[str, Any]:
        """Hyper-parameters as the function receives them: 0-dim tensors for numbers."""
        modules = {name: module() for name, module in self._modules.items() if module is not None}
        return {**self.settings, **modules, **self._buffers}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the hyper-parameters."""
        return (*self.settings, *self._buffers, *self._modules)

    def get(self, name: str) -> Any:
        """A hyper-parameter: a buffer for a number, a module for a coefficient, else the value itself."""
        return self.settings[name] if name in self.settings else getattr(self, name)

    def put(self, name: str, value: Any) -> None:
        """Set a hyper-parameter; a number that is a buffer already changes in place.

        Raises:
            TypeError: if the hyper-parameter is a module, which has its own way to change.
        """
        if name in self._modules:
            raise TypeError(f"{name} is a {type(self._modules[name]).__name__}: change that, not {name}.")
        buffer = self._buffers.get(name)
        if buffer is not None and isinstance(value, (int, float, Tensor)):
            buffer.copy_(torch.as_tensor(value))
            return
        self._buffers.pop(name, None)
        self.settings.pop(name, None)
        self._put(name, value)

    def forward(self, inputs: Mapping[str, Tensor]) -> Any:
        """The function of those of ``inputs`` that it takes."""
        taken = {name: inputs[name] for name in self.inputs if inputs.get(name) is not None}
        return self.function(**taken, **self.hyper)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_buffers", {}) or name in self.__dict__.get("settings", {}):
            self.put(name, value)
        else:
            super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # `.to(torch.bfloat16)` on a whole loss module must not round a clip bound of 3e-4.
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            old = before[name]
            if buffer is not None and old is not None and buffer.dtype != old.dtype:
                self._buffers[name] = old.to(buffer.device)
        return self

    def extra_repr(self) -> str:
        """Name and hyper-parameters."""
        numbers = {name: f"{float(value):g}" for name, value in self._buffers.items() if value is not None}
        shown = {**{name: repr(value) for name, value in self.settings.items()}, **numbers}
        return ", ".join([name_of(self.function), *(f"{key}={value}" for key, value in shown.items())])


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, also of a ``functools.partial`` or a callable object."""
    inner = getattr(function, "func", function)
    return getattr(inner, "__name__", type(inner).__name__)


def dummies() -> dict[str, Tensor]:
    """Inputs of one token in each of two sequences: parts are tried on them before there is data."""
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


# ------------------------------------------------------------------ terms


class TermPart(Part):
    """A function that returns loss terms, with its hyper-parameters, which it checks at construction."""

    def __init__(self, function: Callable[..., tuple[LossTerm, ...]], **hyper: Any) -> None:
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
    """Entropy bonus: minus the entropy of the policy over the whole vocabulary, times ``coeff``.

    Args:
        coeff: its weight, dimensionless.

    Keyword Args:
        leave_out_experts: leave out the sequences of experts, as Trinity's ``mix`` does.
    """

    def __init__(self, coeff: Any = 1e-3, *, leave_out_experts: bool = False) -> None:
        super().__init__(entropy_bonus, coeff=coeff, leave_out_experts=leave_out_experts)


# ------------------------------------------------------------------ corrections


class Correction(Part):
    """A function that returns one weight per token, by which the objective (not the other terms) is multiplied."""

    def __init__(self, function: Callable[..., tuple[Tensor, dict[str, Tensor]]], **hyper: Any) -> None:
        super().__init__(function, INPUTS, hyper)
        try_out(self, hyper)


class ImportanceWeights(Correction):
    """Truncated or masked importance weights for a sampler whose log-probs differ from the trainer's.

    Needs ``sampler_log_prob`` beside ``old_log_prob``. Arguments: see
    :func:`~torchrl_llm_kl.losses.corrections.importance_weights`.
    """

    def __init__(
        self, *, level: str = "token", mode: str = "truncate", low: float | None = None, high: float | None = 2.0
    ) -> None:
        super().__init__(importance_weights, level=level, mode=mode, low=low, high=high)


class OffPolicySequenceMask(Correction):
    """Drop the tokens with a negative advantage in sequences that have become unlikely.

    Args:
        delta: nats per token; see :func:`~torchrl_llm_kl.losses.corrections.off_policy_sequence_mask`.
    """

    def __init__(self, delta: float = 0.1) -> None:
        super().__init__(off_policy_sequence_mask, delta=delta)


class TopEntropyMask(Correction):
    """Train only the tokens at which the policy is least decided.

    Args:
        fraction: share of the masked-in tokens; see :func:`~torchrl_llm_kl.losses.corrections.top_entropy_mask`.

    Keyword Args:
        threshold: nats: train the tokens with at least this entropy, instead of a fraction of each batch. With it the parts
            of a batch add up to the whole.
    """

    def __init__(self, fraction: float = 0.2, *, threshold: float | None = None) -> None:
        super().__init__(top_entropy_mask, fraction=fraction, threshold=threshold)
