"""Coefficients of the KL penalty and of the entropy bonus: constant, or adapted to a target."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torchrl_llm_kl._numerics import check_range

_ERROR_CLIP = 0.2


class WideBuffers(nn.Module):
    """A module whose numbers stay float32 or wider."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `.to(torch.bfloat16)` on a whole loss module must not round 0.001 or swallow updates of 1e-5.
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            old = before[name]
            if buffer is not None and old is not None and buffer.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = old.to(buffer.device)
        return self


class _Coefficient(WideBuffers):
    """A 0-dim buffer ``value``, and a call that reads it."""

    value: Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("value", torch.tensor(value, dtype=torch.float32))

    def forward(self) -> Tensor:
        """Return a 0-dim copy, so that a graph built with it survives an :meth:`update` between forward and backward."""
        return self.value.clone()

    def _measured(self, name: str, current: float | Tensor) -> Tensor:
        """A measured mean as 0-dim tensor like ``value``: a tensor is not read on the host, a number must be finite."""
        if isinstance(current, Tensor):
            if current.numel() != 1:
                raise ValueError(f"{name} must have one element, got shape {tuple(current.shape)}: reduce it.")
            return current.detach().reshape(()).to(self.value)
        if not math.isfinite(current):
            raise ValueError(f"{name} is {current}; expected a finite number. Look for a bad log-prob.")
        return torch.full_like(self.value, current)

    def extra_repr(self) -> str:
        given = {name: x for name, x in vars(self).items() if not name.startswith("_") and name != "training"}
        shown = {name: repr(x) if isinstance(x, str) else f"{x:g}" for name, x in given.items()}
        return ", ".join(f"{name}={x}" for name, x in {"value": f"{float(self.value):g}", **shown}.items())


class FixedKLCoefficient(_Coefficient):
    """A constant KL coefficient.

    Args:
        value: weight of the penalty, dimensionless and finite; a negative one, which a plain ``coeff=`` may not be, rewards
            distance from the reference. The buffer ``value`` stays in float32, also under ``.half()`` and ``.bfloat16()``.

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
        check_positive(target=target, horizon=horizon)
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
        kl = self._measured("current_kl", current_kl)
        error = (kl / self.target - 1).clamp(-_ERROR_CLIP, _ERROR_CLIP)
        self.value.copy_(torch.where(kl.isfinite(), self.value * (1 + error * rate), self.value))


class AdaptiveEntropyCoefficient(_Coefficient):
    r"""A coefficient of the entropy bonus that grows while the entropy is below a target, and is 0 while it is above.

    Each :meth:`update` adds ``delta`` to ``value`` if the entropy is below the target, and subtracts it if above, within
    ``[low, high]``. A call returns ``value`` if the last entropy was at most the target, else 0; it is 0 before the first
    update. Pass it as ``coeff`` of :class:`~torchrl_llm_kl.losses.EntropyBonus`, and update it once for each optimiser step.
    Both numbers are saved.

    Args:
        init: initial value, dimensionless. TRL: ``entropy_coef``.
        target: entropy in nats per token, positive. TRL: ``entropy_target``.
        delta: step of an update, positive. TRL: ``entropy_coef_delta``.
        low: smallest value, at least 0. TRL: ``entropy_coef_min``.
        high: largest value. TRL: ``entropy_coef_max``.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> coefficient = AdaptiveEntropyCoefficient(target=0.3, delta=0.01)
        >>> coefficient.update(0.25)
        >>> coefficient(), coefficient.value
        (tensor(0.0100), tensor(0.0100))
        >>> coefficient.update(0.28)
        >>> coefficient.update(0.35)
        >>> coefficient(), coefficient.value
        (tensor(0.), tensor(0.0100))

    Source: He et al. 2025 (Skywork-OR1, arXiv 2505.22312), adaptive entropy control of MAGIC, which starts at 0 with a target
    of 0.2 and steps of 0.005; bounds: TRL 1.16.
    """

    entropy: Tensor

    def __init__(
        self, init: float = 0.0, target: float = 0.2, delta: float = 0.005, low: float = 0.0, high: float = 1.0
    ) -> None:
        check_positive(target=target, delta=delta)
        if not 0 <= low <= init <= high < math.inf:
            raise ValueError(
                f"expected 0 <= low <= init <= high and finite, got low={low}, init={init} and high={high}."
            )
        super().__init__(init)
        self.register_buffer("entropy", torch.tensor(math.inf, dtype=torch.float32))
        self.target, self.delta, self.low, self.high = target, delta, low, high

    def forward(self) -> Tensor:
        """Return ``value``, or 0 if the last entropy was above the target; 0-dim, a copy."""
        return torch.where(self.entropy <= self.target, self.value, 0)

    @torch.no_grad()
    def update(self, current_entropy: float | Tensor) -> None:
        """Update value and entropy in place.

        Args:
            current_entropy: mean entropy per token of the last optimiser step, nats: the metric ``entropy`` of
                :class:`~torchrl_llm_kl.PolicyLoss`. A number, or a tensor with one element, which is read without a host
                sync if it is on the module's device.

        Raises:
            ValueError: if a *number* is NaN or infinite; such a *tensor* changes nothing.
        """
        entropy = self._measured("current_entropy", current_entropy)
        moved = (self.value + self.delta * torch.sign(self.target - entropy)).clamp(self.low, self.high)
        self.value.copy_(torch.where(entropy.isfinite(), moved, self.value))
        self.entropy.copy_(torch.where(entropy.isfinite(), entropy, self.entropy))


class ScheduledCoefficient(_Coefficient):
    r"""A weight that rises linearly from 0 to a peak, then falls along half a cosine to a valley: ``mu`` of ``mix_chord``.

    Call :meth:`update` once for each optimiser step. ``value`` and ``step`` are saved.

    Args:
        peak: 0 to 1. Trinity: ``mu_peak``.
        valley: 0 to 1. Trinity: ``mu_valley``.
        warmup: steps until the peak; with 0 training starts there. Trinity: ``mu_warmup_steps``.
        decay: steps from the peak to the valley; with 0 the value drops to the valley right after the warm-up. Trinity:
            ``mu_decay_steps``.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> coefficient = ScheduledCoefficient(0.9, 0.1, warmup=10, decay=20)
        >>> coefficient.update(steps=20)
        >>> coefficient()
        tensor(0.5000)

    Source: Zhang et al. 2025 (arXiv 2508.11408), CHORD-mu; Trinity-RFT 0.6.0.
    """

    step: Tensor

    def __init__(self, peak: float = 0.1, valley: float = 0.1, *, warmup: int = 0, decay: int = 0) -> None:
        check_range(low=0.0, high=1.0, peak=peak, valley=valley)
        check_range(low=0, warmup=warmup, decay=decay)
        super().__init__(0.0)
        self.register_buffer("step", torch.tensor(0))
        self.peak, self.valley, self.warmup, self.decay = peak, valley, warmup, decay
        self.update(steps=0)

    @torch.no_grad()
    def update(self, steps: int = 1) -> None:
        """Go on by so many steps, in place."""
        self.step += steps
        beyond = self.step - self.warmup
        falling = self.valley + (self.peak - self.valley) * 0.5 * (1 + torch.cos(math.pi * beyond / max(self.decay, 1)))
        later = torch.where(beyond < self.decay, falling, self.valley)
        self.value.copy_(torch.where(beyond < 0, self.peak * (self.step / max(self.warmup, 1)), later))


def check_positive(**named: float) -> None:
    """Raise a ValueError unless each named number is finite and above 0."""
    for name, value in named.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be finite and positive, got {value}.")


def check_penalty(**named: object) -> None:
    """Raise a ValueError unless each named number is a weight of a penalty: finite, at least 0. Tensors and modules pass."""
    for name, value in named.items():
        if isinstance(value, (int, float)) and not 0 <= value < math.inf:
            away = f": a negative weight pushes the policy away. Pass FixedKLCoefficient({value}) if that is meant"
            raise ValueError(f"{name} must be a finite number of at least 0, got {value}{away if value < 0 else ''}.")


def as_coefficient(coeff: float | Tensor | nn.Module) -> nn.Module:
    """Convert a ``coeff`` argument to a module: ``module()`` is its 0-dim value, ``module.update(...)`` adapts it.

    Args:
        coeff: a number of at least 0, a tensor with one such element (its value is copied) and without grad, or a module with
            a method ``update``, which is returned unchanged.

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
        coeff = float(coeff)
    if isinstance(coeff, (int, float)) and not isinstance(coeff, bool):
        check_penalty(coeff=coeff)
        return FixedKLCoefficient(float(coeff))
    raise TypeError(f"coeff must be a number, a tensor or a module, got {type(coeff).__name__}.")
