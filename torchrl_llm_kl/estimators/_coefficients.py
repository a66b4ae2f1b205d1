"""Coefficients of the KL penalty and of the entropy bonus: constant, scheduled, or adapted to a target."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import softplus
from typing_extensions import Self

from torchrl_llm_kl._numerics import check_choice, check_range
from torchrl_llm_kl._registry import Range, Registry

_ERROR_CLIP = 0.2


class WideBuffers(nn.Module):
    """A module whose numbers stay float32 or wider."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `.to(torch.bfloat16)` on a whole loss module must not round 0.001, nor lose updates of 1e-5.
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            old = before[name]
            if buffer is not None and old is not None and buffer.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = old.to(buffer.device)
        return self


class _Coefficient(WideBuffers):
    """Base of the coefficients: a 0-dim buffer ``value``. Calling the module returns its value."""

    value: Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("value", torch.tensor(value, dtype=torch.float32))

    def forward(self) -> Tensor:
        """Return a 0-dim copy, so that a graph built with it survives an :meth:`update` between forward and backward."""
        return self.value.clone()

    def _measured(self, name: str, current: float | Tensor) -> Tensor:
        """Convert a measured mean to a 0-dim tensor like ``value``. Only numbers are checked: no host sync."""
        if isinstance(current, Tensor):
            return current.detach().reshape(()).to(self.value)
        if not math.isfinite(current):
            raise ValueError(f"{name} is {current}, expected a finite number. Look for a bad log-prob.")
        return torch.full_like(self.value, current)

    def extra_repr(self) -> str:
        given = {name: x for name, x in vars(self).items() if not name.startswith("_") and name != "training"}
        shown = {name: repr(x) if isinstance(x, str) else f"{x:g}" for name, x in given.items()}
        return ", ".join(f"{name}={x}" for name, x in {"value": f"{float(self.value):g}", **shown}.items())


class FixedKLCoefficient(_Coefficient):
    """A constant KL coefficient.

    Args:
        value: weight of the penalty, dimensionless. A negative value rewards distance from the reference, and is allowed only
            here, not as a plain ``coeff=``. The buffer ``value`` stays in float32 under ``.half()`` and ``.bfloat16()``.

    Example:
        >>> coefficient = FixedKLCoefficient(0.25)
        >>> coefficient.update(3.0, n=64)
        >>> coefficient()
        tensor(0.2500)
    """

    def update(self, current_kl: float | Tensor, n: int) -> None:
        """Do nothing, so that callers can treat both kinds of coefficient alike."""


class AdaptiveKLCoefficient(_Coefficient):
    r"""A KL coefficient that grows while the KL is above a target and shrinks while it is below.

    Each :meth:`update` multiplies by ``1 + clip(current_kl / target - 1, -0.2, 0.2) * n / horizon``.

    Args:
        init: initial coefficient, at least 0. A coefficient of 0 stays 0, because updates multiply.
        target: target KL in the unit of ``current_kl`` (nats per token or per sequence), positive.
        horizon: samples over which a KL that is off by at least 20 % changes the coefficient by about 20 %. Positive, in the
            unit of ``n``.

    Example:
        >>> coefficient = AdaptiveKLCoefficient(init=0.2, target=6.0, horizon=100)
        >>> coefficient.update(12.0, n=10)  # 0.2 * (1 + 0.2 * 10 / 100)
        >>> coefficient()
        tensor(0.2040)

    Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2.
    """

    def __init__(self, init: float, target: float, horizon: float) -> None:
        check_range(low=0.0, init=init)
        check_range(above=0.0, below=math.inf, target=target, horizon=horizon)
        super().__init__(init)
        self.target, self.horizon = target, horizon

    @torch.no_grad()
    def update(self, current_kl: float | Tensor, n: int) -> None:
        """Update the coefficient in place.

        Args:
            current_kl: mean KL of the last batch, a number or a tensor with one element. A tensor on the module's device
                needs no host sync.
            n: samples over which ``current_kl`` is the mean, in the unit of ``horizon``.

        Raises:
            ValueError: if a *number* is NaN or infinite, or if ``n`` is negative or so large that the coefficient could drop
                to 0. A *tensor* that is not finite leaves the coefficient unchanged, because raising would need a host sync.
        """
        rate = n / self.horizon
        if not 0 <= _ERROR_CLIP * rate < 1:
            limit = f"expected 0 <= n < {1 / _ERROR_CLIP:g} * horizon"
            raise ValueError(
                f"n={n} with horizon={self.horizon}: {limit}, or one step could end at a coefficient of 0."
            )
        kl = self._measured("current_kl", current_kl)
        error = (kl / self.target - 1).clamp(-_ERROR_CLIP, _ERROR_CLIP)
        self.value.copy_(torch.where(kl.isfinite(), self.value * (1 + error * rate), self.value))


class AdaptiveEntropyCoefficient(_Coefficient):
    r"""A coefficient of the entropy bonus that grows while the entropy is below a target, and is 0 while it is above.

    Each :meth:`update` adds ``delta`` to ``value`` if the entropy is below the target and subtracts ``delta`` if it is above.
    ``value`` stays within ``[low, high]``. Calling the module returns ``value`` if the last entropy was at most the target,
    else 0. Before the first update it returns 0. Pass the module as ``coeff`` of
    :class:`~torchrl_llm_kl.losses.EntropyBonus`, and update it once per optimiser step. The ``state_dict`` holds ``value`` and
    the last entropy.

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
    of 0.2 and steps of 0.005. Bounds: TRL 1.16.
    """

    entropy: Tensor

    def __init__(
        self, init: float = 0.0, target: float = 0.2, delta: float = 0.005, low: float = 0.0, high: float = 1.0
    ) -> None:
        check_range(above=0.0, below=math.inf, target=target, delta=delta)
        _check_bounds(low, init, high)
        super().__init__(init)
        self.register_buffer("entropy", torch.tensor(math.inf, dtype=torch.float32))
        self.target, self.delta, self.low, self.high = target, delta, low, high

    def forward(self) -> Tensor:
        """Return a 0-dim copy of ``value``, or 0 if the last entropy was above the target."""
        return torch.where(self.entropy <= self.target, self.value, 0)

    @torch.no_grad()
    def update(self, current_entropy: float | Tensor) -> None:
        """Update value and entropy in place.

        Args:
            current_entropy: mean entropy per token of the last optimiser step in nats, the metric ``entropy`` of
                :class:`~torchrl_llm_kl.PolicyLoss`. A number or a tensor with one element. A tensor on the module's device
                needs no host sync.

        Raises:
            ValueError: if a *number* is NaN or infinite. A *tensor* that is not finite changes nothing.
        """
        entropy = self._measured("current_entropy", current_entropy)
        moved = (self.value + self.delta * torch.sign(self.target - entropy)).clamp(self.low, self.high)
        self.value.copy_(torch.where(entropy.isfinite(), moved, self.value))
        self.entropy.copy_(torch.where(entropy.isfinite(), entropy, self.entropy))


class ScheduledCoefficient(_Coefficient):
    r"""A weight that rises linearly from 0 to a peak, then falls along half a cosine to a valley.

    It is the schedule of ``mu`` in ``mix_chord``. Call :meth:`update` once per optimiser step. The ``state_dict`` holds
    ``value`` and ``step``.

    Args:
        peak: 0 to 1. Trinity: ``mu_peak``.
        valley: 0 to 1. Trinity: ``mu_valley``.
        warmup: steps until the peak. With 0, training starts at the peak. Trinity: ``mu_warmup_steps``.
        decay: steps from the peak to the valley. With 0, the value drops to the valley right after the warm-up. Trinity:
            ``mu_decay_steps``.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> coefficient = ScheduledCoefficient(0.9, 0.1, warmup=10, decay=20)
        >>> coefficient.update(steps=20)
        >>> coefficient()
        tensor(0.5000)

    Source: Zhang et al. 2025 (arXiv 2508.11408), CHORD-mu. Trinity-RFT 0.6.0.
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
        """Advance the schedule by this many steps, in place."""
        self.step += steps
        beyond = self.step - self.warmup
        falling = self.valley + (self.peak - self.valley) * 0.5 * (1 + torch.cos(math.pi * beyond / max(self.decay, 1)))
        later = torch.where(beyond < self.decay, falling, self.valley)
        self.value.copy_(torch.where(beyond < 0, self.peak * (self.step / max(self.warmup, 1)), later))


def _check_bounds(low: float, init: float, high: float) -> None:
    """Raise a ValueError for bounds in the wrong order, which clamping would not notice."""
    if not 0 <= low <= init <= high:
        raise ValueError(f"expected 0 <= low <= init <= high, got low={low}, init={init} and high={high}.")


def check_penalty(**named: object) -> None:
    """Raise a ValueError unless each named number is finite and at least 0. Tensors and modules are not checked."""
    for name, value in named.items():
        if isinstance(value, (int, float)) and not 0 <= value < math.inf:
            away = f": a negative weight pushes the policy away. Pass FixedKLCoefficient({value}) if that is meant"
            raise ValueError(f"{name} must be a finite number of at least 0, got {value}{away if value < 0 else ''}.")


def as_coefficient(coeff: float | Tensor | nn.Module) -> nn.Module:
    """Convert a ``coeff`` argument to a module: ``module()`` returns its 0-dim value, ``module.update(...)`` adapts it.

    Args:
        coeff: a number of at least 0, a tensor with one such element and without grad, or a module. A tensor is copied. A
            module is returned unchanged.

    Example:
        >>> as_coefficient(0.1)()
        tensor(0.1000)
    """
    if isinstance(coeff, nn.Module):
        return coeff
    if isinstance(coeff, Tensor) and coeff.requires_grad:
        raise ValueError("coeff requires grad but would be copied. Pass coeff.detach(), or a module that holds it.")
    if isinstance(coeff, bool):
        raise TypeError(f"coeff must be a number, a tensor or a module, got {coeff}.")
    number = float(coeff)
    check_penalty(coeff=number)
    return FixedKLCoefficient(number)


# ------------------------------------------------------------------ controllers

#: The quantity that :class:`DualKLCoefficient` steps: the logarithm of the multiplier, or the inverse of its softplus.
DualParametrisation = Literal["log", "softplus"]

# Shares of the target. A KL below the first is raised to it: the logarithm of 0 or of a negative estimate does not exist.
_FAR_BELOW = 0.1
# The warm-up ends when the average KL reaches this share.
_RISEN = 0.5
# If the KL exceeds the first and its average the second, PI control takes a step of at least _BRAKE.
_RUNS_AWAY = (2.0, 1.5)
_BRAKE = math.log(1.5)


_CONTROLLERS: Registry[Callable[..., nn.Module]] = Registry("KL controller")
C = TypeVar("C", bound=Callable[..., nn.Module])


def controller(name: str) -> Callable[[C], C]:
    """Register a coefficient that adapts to a target KL: a class, or a function that makes a module.

    It is called as ``(init, target, **settings)``. The module returns the 0-dim coefficient and has a method
    ``update(current_kl, n)``, which is called once per step. The name works in ``kl.controller`` of a run's configuration.

    Raises:
        ValueError: if the name is taken.

    Example:
        >>> @controller("pi")
        ... class Mine(torch.nn.Module): ...
        Traceback (most recent call last):
        ...
        ValueError: the KL controller 'pi' is registered already: choose another name.
    """

    def add(kind: C) -> C:
        _CONTROLLERS.add(name, kind)
        return kind

    return add


def get_controller(name: str) -> Callable[..., nn.Module]:
    """The controller of a name: ``"pi"``, ``"dual"``, ``"ziegler"``, or one of your own.

    Raises:
        ValueError: for an unknown name. The message lists the known names.

    Example:
        >>> get_controller("pi")(init=0.2, target=6.0)()
        tensor(0.2000)
    """
    return _CONTROLLERS[name]


_CONTROLLERS.add("ziegler", AdaptiveKLCoefficient)


class _KLController(_Coefficient):
    """A coefficient with a moving average of the KL, a warm-up, and steps of bounded size between bounds.

    The state is four float32 buffers: the coefficient, the average, the sum of the average's weights, and the number of
    updates left in the warm-up. An update reads none of them on the host.
    """

    average: Tensor
    mass: Tensor
    warmup_left: Tensor

    def __init__(
        self, init: float, target: float, *, smoothing: float, max_step: float, warmup: int, low: float, high: float
    ) -> None:
        # Steps are relative to the coefficient: one that starts at 0 would stay there.
        check_range(above=0.0, below=math.inf, init=init, target=target, max_step=max_step)
        _check_bounds(low, init, high)
        Range(0.0, below=1.0).check("smoothing", smoothing)
        check_range(low=0, warmup=warmup)
        super().__init__(init)
        for name, number in (("average", 0.0), ("mass", 0.0), ("warmup_left", float(warmup))):
            self.register_buffer(name, torch.tensor(number, dtype=torch.float32))
        self.target, self.smoothing, self.max_step, self.low, self.high = target, smoothing, max_step, low, high

    @torch.no_grad()
    def update(
        self,
        current_kl: float | Tensor,
        n: float | Tensor,
        *,
        process_group: dist.ProcessGroup | None = None,
        all_ranks: bool | None = None,
    ) -> None:
        """Update the coefficient in place.

        With ``torch.distributed`` this is a collective. Call it on every rank with the KL of that rank's share. All ranks
        then take the same step, from the mean over all samples.

        Args:
            current_kl: mean KL of the last batch, or of this rank's share of it, in the unit of ``target``. A number or a
                tensor with one element. A tensor on the module's device needs no host sync.
            n: samples or tokens over which ``current_kl`` is the mean. It is the weight among the ranks, and the step does not
                depend on the sum. Pass 0 for an empty share: its ``current_kl`` is not read. If all shares are empty, nothing
                changes.

        Keyword Args:
            process_group: the ranks that share the coefficient.
            all_ranks: average over ranks. By default True if ``torch.distributed`` is initialised. Pass False for a KL that
                is already averaged over all ranks.

        Raises:
            ValueError: if a *number* is NaN or infinite, or if ``n`` is a negative number. With several ranks, every rank that
                passes numbers raises. A *tensor* that is not finite changes nothing, because raising would need a host sync.
                Also raised if ``all_ranks`` is True and ``torch.distributed`` is not initialised.
        """
        kl = self._over_ranks(current_kl, n, process_group, all_ranks)
        ok = kl.isfinite()
        mass = self.smoothing * self.mass + (1 - self.smoothing)
        average = self.average + (kl - self.average) * ((1 - self.smoothing) / mass)
        warming = (self.warmup_left > 0) & (average < _RISEN * self.target)
        step = self._bounded(self._step(average), kl, average)
        value = torch.where(warming, self.value, self._moved(step).clamp(self.low, self.high))
        left = torch.where(warming, self.warmup_left - 1, 0)
        state = {"value": value, "average": average, "mass": mass, "warmup_left": left}
        for name, buffer in self.named_buffers():
            buffer.copy_(torch.where(ok, state[name], buffer))

    @abstractmethod
    def _step(self, average: Tensor) -> Tensor:
        """The step before clipping. ``self.average`` still holds the previous average."""

    def _bounded(self, step: Tensor, kl: Tensor, average: Tensor) -> Tensor:
        """Clip the step. ``kl`` is the last batch's, and ``self.average`` still holds the previous average."""
        return step.clamp(-self.max_step, self.max_step)

    def _moved(self, step: Tensor) -> Tensor:
        """The coefficient after a step in its logarithm."""
        return self.value * step.exp()

    def _over_ranks(
        self, current_kl: float | Tensor, n: float | Tensor, group: dist.ProcessGroup | None, all_ranks: bool | None
    ) -> Tensor:
        """The mean over all samples of all ranks, 0-dim like ``value``, NaN without samples."""
        shared = (dist.is_available() and dist.is_initialized()) if all_ranks is None else all_ranks
        problem, sums = None, self.value.new_full((2,), math.nan, dtype=torch.float64)
        try:
            sums = torch.stack(self._share(current_kl, n))
        except ValueError as error:  # raised after the collective: the other ranks already wait in it
            problem = error
        if shared:
            dist.all_reduce(sums, group=group)
        if problem is not None:
            raise problem
        if shared and not isinstance(current_kl, Tensor) and not bool(sums.isfinite().all()):
            raise ValueError("current_kl of another rank is not finite, or its n is negative. Look at its log-probs.")
        return (sums[0] / sums[1]).to(self.value)

    def _share(self, current_kl: float | Tensor, n: float | Tensor) -> tuple[Tensor, Tensor]:
        """This rank's sum of KLs and number of samples, float64."""
        if isinstance(n, Tensor):
            weight = n.detach().reshape(()).to(self.value.device, torch.float64)
        else:
            if not 0 <= n < math.inf:
                raise ValueError(f"n is {n}, expected the number of samples, at least 0.")
            weight = torch.full_like(self.value, n, dtype=torch.float64)
            if n == 0:
                return weight, weight
        kl = self._measured("current_kl", current_kl).double()
        return torch.where(weight > 0, kl * weight, 0), weight


@controller("pi")
class PIKLCoefficient(_KLController):
    r"""A KL coefficient that holds the KL at a target: proportional-integral control of its logarithm.

    With ``e = log(average KL / target)`` each :meth:`update` multiplies the coefficient by
    ``exp(clip(proportional * (e - previous e) + integral * e, -max_step, max_step))`` and keeps it within ``[low, high]``. The
    proportional term reacts to a moving KL before it passes the target. The integral term removes the remaining error. Each
    step starts from the coefficient in use, so the integral does not wind up while steps are clipped or a bound is active.

    A KL runs away if it is above twice the target, its average is above 1.5 times the target, and it is not falling. This
    happens when ``init`` is far too small. The update then multiplies by at least 1.5, even if ``max_step`` is smaller.

    The KL starts at 0 and needs some steps to rise, whatever the coefficient. During the warm-up the coefficient stays at
    ``init``. The warm-up ends when the average reaches half the target, or after ``warmup`` updates.

    :class:`~torchrl_llm_kl.AdaptiveKLCoefficient` has only an integral term and no averaging, so it overshoots if the policy
    responds late. The gains are per update, and no step depends on ``n`` or a horizon. The defaults are for noisy batches of
    about 100 answers. With 256 answers, ``proportional=2, integral=0.08, smoothing=0.9, max_step=0.2`` and a start near the
    final coefficient hold the target more closely (``benchmarks/KL_STUDY.md``).

    Args:
        init: initial coefficient, positive, within ``[low, high]``.
        target: target KL in the unit of ``current_kl`` (nats per token or per sequence), positive.

    Keyword Args:
        proportional: gain on the change of the error, dimensionless, at least 0.
        integral: gain on the error, per update, positive.
        smoothing: weight of the past in the moving average of the KL, at least 0 and below 1. 0.8 averages about 5 updates.
        max_step: largest change of the coefficient's logarithm in one update, unless the KL runs away. 0.1 is about 10 %.
        warmup: largest number of updates that keep ``init`` while the KL rises from 0.
        low: smallest coefficient.
        high: largest coefficient.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> coefficient = PIKLCoefficient(init=0.2, target=6.0, proportional=0.5, integral=0.1, smoothing=0.0, warmup=0)
        >>> coefficient.update(12.0, n=10)  # 0.2 * exp(0.1 * log 2)
        >>> coefficient.update(6.0, n=10)  # 0.5 * (0 - log 2), clipped to -0.1
        >>> coefficient()
        tensor(0.1940)

    Source: Stooke et al. 2020, "Responsive Safety in Reinforcement Learning by PID Lagrangian Methods" (arXiv 2007.03964), who
    give a multiplier a proportional term. Here it acts on the logarithm, because the KL falls as a power of the coefficient.
    """

    def __init__(
        self,
        init: float,
        target: float,
        *,
        proportional: float = 0.5,
        integral: float = 0.03,
        smoothing: float = 0.8,
        max_step: float = 0.1,
        warmup: int = 20,
        low: float = 1e-4,
        high: float = 100.0,
    ) -> None:
        check_range(low=0.0, below=math.inf, proportional=proportional)
        check_range(above=0.0, below=math.inf, integral=integral)
        super().__init__(init, target, smoothing=smoothing, max_step=max_step, warmup=warmup, low=low, high=high)
        self.proportional, self.integral = proportional, integral

    def _step(self, average: Tensor) -> Tensor:
        error, before = self._error(average), self._error(self.average)
        moved = torch.where(self.mass > 0, error - before, 0)  # the first update has no previous error
        return self.proportional * moved + self.integral * error

    def _bounded(self, step: Tensor, kl: Tensor, average: Tensor) -> Tensor:
        bounded = super()._bounded(step, kl, average)
        # One noisy batch must not trigger this. A falling KL already responds to the coefficient, only late.
        above = (kl > _RUNS_AWAY[0] * self.target) & (average > _RUNS_AWAY[1] * self.target)
        runs_away = above & (kl >= self.average)
        return torch.where(runs_away, bounded.clamp(min=_BRAKE), bounded)

    def _error(self, average: Tensor) -> Tensor:
        return (average / self.target).clamp(min=_FAR_BELOW).log()


@controller("dual")
class DualKLCoefficient(_KLController):
    r"""A KL coefficient that is the Lagrange multiplier of ``KL <= target``, found by dual ascent.

    The dual's gradient, relative to the target, is ``g = average KL / target - 1``. Each :meth:`update` adds
    ``clip(rate * g, -max_step, max_step)`` to ``log coefficient`` or to ``softplus^-1(coefficient)``. The step omits the
    derivative of this map, because it vanishes with the coefficient. For a small coefficient both parametrisations take
    relative steps. Above 1 the steps of softplus become absolute.

    Dual ascent has only an integral term. If the policy responds late, it overshoots more than :class:`PIKLCoefficient`,
    unless ``rate`` is small. The warm-up works as in :class:`PIKLCoefficient`.

    Args:
        init: initial coefficient, positive, within ``[low, high]``.
        target: largest KL in the unit of ``current_kl``, positive.

    Keyword Args:
        rate: step size of the ascent, positive.
        parametrisation: ``"log"`` or ``"softplus"``.
        smoothing: weight of the past in the moving average of the KL. With 0, as in the source, only the last batch counts.
        max_step: largest step.
        warmup: largest number of updates that keep ``init`` while the KL rises from 0.
        low: smallest coefficient.
        high: largest coefficient.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> coefficient = DualKLCoefficient(init=0.2, target=6.0, rate=0.05, warmup=0)
        >>> coefficient.update(9.0, n=10)  # 0.2 * exp(0.05 * 0.5)
        >>> coefficient()
        tensor(0.2051)

    Source: Abdolmaleki et al. 2018, "Maximum a Posteriori Policy Optimisation" (arXiv 1806.06920): the multiplier of its KL
    bound is trained along with the policy.
    """

    def __init__(
        self,
        init: float,
        target: float,
        *,
        rate: float = 0.03,
        parametrisation: DualParametrisation = "log",
        smoothing: float = 0.0,
        max_step: float = 0.1,
        warmup: int = 20,
        low: float = 1e-4,
        high: float = 100.0,
    ) -> None:
        check_range(above=0.0, below=math.inf, rate=rate)
        check_choice(get_args(DualParametrisation), parametrisation=parametrisation)
        super().__init__(init, target, smoothing=smoothing, max_step=max_step, warmup=warmup, low=low, high=high)
        self.rate, self.parametrisation = rate, parametrisation

    def _step(self, average: Tensor) -> Tensor:
        return self.rate * (average / self.target - 1)

    def _moved(self, step: Tensor) -> Tensor:
        if self.parametrisation == "log":
            return super()._moved(step)
        # softplus^-1(x) = x + log(1 - exp(-x)), which is exact for small and for large x.
        return softplus(self.value + (-(-self.value).expm1()).log() + step, threshold=80)
