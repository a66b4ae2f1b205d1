"""A function of per-token tensors together with its hyper-parameters, as a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["COUNTED", "Part", "name_of"]

#: Hyper-parameters that are whole numbers and change from step to step.
COUNTED = frozenset({"step"})


class Part(nn.Module):
    """Calls a function with the inputs that it names and its own hyper-parameters.

    Numbers among the hyper-parameters are buffers, so that they are saved, moved, and can be scheduled:
    ``part.clip_high = 0.3`` changes the buffer in place. Modules (an
    :class:`~torchrl_llm_kl.AdaptiveKLCoefficient`) are called for their value. All else stays as it is.

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
        self.settings: dict[str, Any] = {}
        defaults = {
            name: parameter.default
            for name, parameter in signature.items()
            if name not in inputs and parameter.default is not parameter.empty
        }
        self._floats = frozenset(name for name, value in defaults.items() if isinstance(value, float))
        for name, value in {**defaults, **hyper}.items():
            self._put(name, value)

    def _put(self, name: str, value: Any) -> None:
        """Where a hyper-parameter of this kind is kept."""
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
    def hyper(self) -> dict[str, Any]:
        """Hyper-parameters as the function gets them: 0-dim tensors for numbers."""
        modules = {name: module() for name, module in self._modules.items() if module is not None}
        return {**self.settings, **modules, **self._buffers}

    @property
    def names(self) -> tuple[str, ...]:
        """Of the hyper-parameters."""
        return (*self.settings, *self._buffers, *self._modules)

    def get(self, name: str) -> Any:
        """A hyper-parameter: a buffer for a number, a module for a coefficient, else the value itself."""
        return self.settings[name] if name in self.settings else getattr(self, name)

    def put(self, name: str, value: Any) -> None:
        """Set a hyper-parameter; a number that is a buffer already changes in place.

        Raises:
            TypeError: if a module stands there, which has its own way to change.
        """
        if name in self._modules:
            raise TypeError(f"{name} is a {type(self._modules[name]).__name__}: change that, not {name}")
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
    """What a function is called, also if it is a ``functools.partial`` or an object."""
    inner = getattr(function, "func", function)
    return getattr(inner, "__name__", type(inner).__name__)
