"""Coefficients of the KL penalty: constant, or adapted to a target KL."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_ERROR_CLIP = 0.2


class _Coefficient(nn.Module):
    """A 0-dim buffer ``value``, and a call that reads it."""

    value: Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("value", torch.tensor(value, dtype=torch.float32))

    def forward(self) -> Tensor:
        """Return a 0-dim copy, so that a graph built with it survives an :meth:`update` between forward and backward."""
        return self.value.clone()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # `.to(torch.bfloat16)` on a whole loss module must not round 0.001 or swallow updates of 1e-5.
        before = self.value
        super()._apply(fn, recurse)
        if torch.finfo(self.value.dtype).bits < 32:
            self.value = before.to(self.value.device)
        return self

    def extra_repr(self) -> str:
        return f"value={float(self.value):g}"


class FixedKLCoefficient(_Coefficient):
    """A constant KL coefficient.

    Args:
        value: weight of the penalty, dimensionless and finite; a negative one rewards distance from the reference. The
            buffer ``value`` stays in float32, also under ``.half()`` and ``.bfloat16()``.

    Example:
        >>> coefficient = FixedKLCoefficient(0.25)
        >>> coefficient.update(3.0, n=64)
        >>> coefficient()
        tensor(0.2500)
    """

    def __init__(self, value: float) -> None:
        if not math.isfinite(value):
            raise ValueError(f"the KL coefficient must be finite, got {value}.")
        super().__init__(value)

    def update(self, current_kl: float | Tensor, n: int) -> None:
        """Do nothing, so that callers can treat both kinds of coefficient alike."""


class AdaptiveKLCoefficient(_Coefficient):
    r"""A KL coefficient that grows while the KL is above a target and shrinks while it is below.

    Each :meth:`update` multiplies by ``1 + clip(current_kl / target - 1, -0.2, 0.2) * n / horizon``.

    Args:
        init: initial coefficient, at least 0; 0 stays 0, since updates multiply.
        target: target KL, in the unit of ``current_kl`` (nats per token or per sequence); positive.
        horizon: samples over which a KL that is at least 20 % off changes the coefficient by about 20 %; same unit as
            ``n``; positive.

    Example:
        >>> coefficient = AdaptiveKLCoefficient(init=0.2, target=6.0, horizon=100)
        >>> coefficient.update(12.0, n=10)  # 0.2 * (1 + 0.2 * 10 / 100)
        >>> coefficient()
        tensor(0.2040)

    Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2.
    """

    def __init__(self, init: float, target: float, horizon: float) -> None:
        if not (math.isfinite(init) and init >= 0):
            raise ValueError(f"init must be finite and not negative, got {init}.")
        for name, bound in (("target", target), ("horizon", horizon)):
            if not (math.isfinite(bound) and bound > 0):
                raise ValueError(f"{name} must be finite and positive, got {bound}.")
        super().__init__(init)
        self.target, self.horizon = target, horizon

    @torch.no_grad()
    def update(self, current_kl: float | Tensor, n: int) -> None:
        """Update the coefficient in place.

        Args:
            current_kl: mean KL of the last batch; a number, or a tensor with one element, which is read without a host
                sync if it is on the module's device.
            n: samples over which ``current_kl`` is the mean; the unit of ``horizon``.

        Raises:
            ValueError: if a *number* is NaN or infinite (such a *tensor* leaves the coefficient unchanged, since raising
                would need a host sync), or ``n`` is negative or so large that the coefficient could drop to 0.
        """
        rate = n / self.horizon
        if not 0 <= _ERROR_CLIP * rate < 1:
            raise ValueError(
                f"n={n} with horizon={self.horizon}: expected 0 <= n < {1 / _ERROR_CLIP:g} * horizon, else one step "
                "could bring the coefficient to 0 or below. Use a longer horizon, or update on smaller batches."
            )
        if isinstance(current_kl, Tensor):
            if current_kl.numel() != 1:
                raise ValueError(f"current_kl must have one element, got shape {tuple(current_kl.shape)}: reduce it.")
            kl = current_kl.detach().reshape(()).to(self.value)
        elif math.isfinite(current_kl):
            kl = torch.full_like(self.value, current_kl)
        else:
            raise ValueError(f"current_kl is {current_kl}; expected a finite number. Look for a bad log-prob.")
        error = (kl / self.target - 1).clamp(-_ERROR_CLIP, _ERROR_CLIP)
        self.value.copy_(torch.where(kl.isfinite(), self.value * (1 + error * rate), self.value))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, target={self.target:g}, horizon={self.horizon:g}"


def as_coefficient(coeff: float | Tensor | nn.Module) -> nn.Module:
    """Convert a ``coeff`` argument to a module: ``module()`` is its 0-dim value, ``module.update(...)`` adapts it.

    Args:
        coeff: a number, a tensor with one element (its value is copied) and without grad, or a module with a method
            ``update``, which is returned unchanged.

    Example:
        >>> as_coefficient(0.1)()
        tensor(0.1000)
    """
    if isinstance(coeff, nn.Module):
        if not callable(getattr(coeff, "update", None)):
            raise TypeError(f"{type(coeff).__name__} has no method update(current_kl, n); a KL coefficient needs one.")
        return coeff
    if isinstance(coeff, Tensor):
        if coeff.numel() != 1:
            raise ValueError(f"coeff must have one element, got shape {tuple(coeff.shape)}.")
        if coeff.requires_grad:
            raise ValueError("coeff requires grad but would be copied; pass coeff.detach(), or a module that holds it.")
        return FixedKLCoefficient(float(coeff))
    if isinstance(coeff, (int, float)) and not isinstance(coeff, bool):
        return FixedKLCoefficient(float(coeff))
    raise TypeError(f"coeff must be a number, a tensor or a module, got {type(coeff).__name__}.")
