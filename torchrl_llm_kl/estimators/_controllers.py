"""Coefficients that hold the KL at a target: PI control of its logarithm, and dual ascent on the constraint."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import softplus

from torchrl_llm_kl._numerics import check_choice
from torchrl_llm_kl._registry import Registry
from torchrl_llm_kl.estimators._coefficients import AdaptiveKLCoefficient, _Coefficient, check_positive

#: What :class:`DualKLCoefficient` adds its steps to: the logarithm of the multiplier, or the inverse of its softplus.
DualParametrisation = Literal["log", "softplus"]

_FAR_BELOW = 0.1  # of the target: a KL below this, or a negative estimate, counts as this
_RISEN = 0.5  # of the target: a KL that reaches it has risen from 0
_RUNS_AWAY = (2.0, 1.5)  # of the target: PI control answers a KL and an average above them with the step below at least
_BRAKE = math.log(1.5)


_CONTROLLERS: Registry[Callable[..., nn.Module]] = Registry("KL controller")
C = TypeVar("C", bound=Callable[..., nn.Module])


def controller(name: str) -> Callable[[C], C]:
    """Register a coefficient that adapts to a target KL: a class, or a function that makes a module.

    It is called as ``(init, target, **settings)``. The module returns the coefficient, 0-dim, and has a method
    ``update(current_kl, n)``, called once per step. The name works in ``kl.controller`` of a run's configuration.

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
        ValueError: for an unknown name; the message lists the known ones.

    Example:
        >>> get_controller("pi")(init=0.2, target=6.0)()
        tensor(0.2000)
    """
    return _CONTROLLERS[name]


_CONTROLLERS.add("ziegler", AdaptiveKLCoefficient)


class _KLController(_Coefficient):
    """A coefficient with a moving average of the KL, a warm-up, and steps of bounded size between bounds.

    The state is four buffers in float32: the coefficient, the average, the sum of the average's weights, and the number of
    updates that the warm-up still lasts. An update reads none of them on the host.
    """

    average: Tensor
    mass: Tensor
    warmup_left: Tensor

    def __init__(
        self, init: float, target: float, *, smoothing: float, max_step: float, warmup: int, low: float, high: float
    ) -> None:
        check_positive(target=target, max_step=max_step)
        if not 0 < low <= init <= high < math.inf:
            raise ValueError(
                f"expected 0 < low <= init <= high and finite, got low={low}, init={init} and high={high}: steps are relative "
                "to the coefficient, and one of 0 would stay 0."
            )
        if not 0 <= smoothing < 1:
            raise ValueError(
                f"smoothing must be at least 0 and below 1, got {smoothing}; 0 takes the last batch alone."
            )
        if not (warmup >= 0 and warmup == int(warmup)):
            raise ValueError(f"warmup must be a whole number of updates, 0 for none, got {warmup}.")
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

        With ``torch.distributed`` this is a collective: call it on every rank, each with its share's KL. All ranks
        then take the same step, from the mean over all samples.

        Args:
            current_kl: mean KL of the last batch, or of this rank's share of it, in the unit of ``target``; a number, or a
                tensor with one element, which is read without a host sync if it is on the module's device.
            n: samples or tokens over which ``current_kl`` is the mean: its weight among the ranks. The step does not depend on
                the sum. 0 for an empty share, whose ``current_kl`` is not read; if all are empty, nothing changes.

        Keyword Args:
            process_group: the ranks that share the coefficient.
            all_ranks: average over ranks; by default if ``torch.distributed`` is initialised. False for a KL that is already
                averaged over all ranks.

        Raises:
            ValueError: if a *number* is NaN or infinite (such a *tensor* changes nothing, since raising would need a host
                sync), if ``current_kl`` has several elements, or ``n`` is a negative number. With ranks, on each of them that
                passes numbers.
            RuntimeError: if ``all_ranks`` is True and ``torch.distributed`` is not initialised.
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
        """The step before it is clipped; ``self.average`` is still the previous average."""

    def _bounded(self, step: Tensor, kl: Tensor, average: Tensor) -> Tensor:
        """The step within its bounds; ``kl`` is that of the last batch, and ``self.average`` still the previous average."""
        return step.clamp(-self.max_step, self.max_step)

    def _moved(self, step: Tensor) -> Tensor:
        """The coefficient after a step in its logarithm."""
        return self.value * step.exp()

    def _over_ranks(
        self, current_kl: float | Tensor, n: float | Tensor, group: dist.ProcessGroup | None, all_ranks: bool | None
    ) -> Tensor:
        """The mean over all samples, 0-dim like ``value``; NaN if there are none."""
        distributed = dist.is_available() and dist.is_initialized()
        shared = distributed and all_ranks is not False
        if all_ranks and not distributed:
            raise RuntimeError("all_ranks=True, but torch.distributed is not initialised: call init_process_group.")
        problem, sums = None, self.value.new_full((2,), math.nan, dtype=torch.float64)
        try:
            sums = torch.stack(self._share(current_kl, n))
        except ValueError as error:  # raised after the collective, in which the other ranks wait
            problem = error
        if shared:
            dist.all_reduce(sums, group=group)
        if problem is not None:
            raise problem
        if shared and not isinstance(current_kl, Tensor) and not bool(sums.isfinite().all()):
            raise ValueError(
                "current_kl of another rank is not finite, or its n is negative: look for a bad log-prob there."
            )
        return (sums[0] / sums[1]).to(self.value)

    def _share(self, current_kl: float | Tensor, n: float | Tensor) -> tuple[Tensor, Tensor]:
        """This rank's sum of KLs and number of samples, float64."""
        if isinstance(n, Tensor):
            if n.numel() != 1:
                raise ValueError(f"n must have one element, got shape {tuple(n.shape)}: pass the number of samples.")
            weight = n.detach().reshape(()).to(self.value.device, torch.float64)
        else:
            if not 0 <= n < math.inf:
                raise ValueError(f"n is {n}; expected the number of samples, at least 0.")
            weight = torch.full_like(self.value, n, dtype=torch.float64)
            if n == 0:
                return weight, weight
        kl = self._measured("current_kl", current_kl).double()
        return torch.where(weight > 0, kl * weight, 0), weight


@controller("pi")
class PIKLCoefficient(_KLController):
    r"""A KL coefficient that holds the KL at a target: proportional-integral control of its logarithm.

    With ``e = log(average KL / target)`` each :meth:`update` multiplies the coefficient by
    ``exp(clip(proportional * (e - previous e) + integral * e, -max_step, max_step))``, within ``[low, high]``. The first term
    answers a KL that moves, before it passes the target; the second removes what error remains. The step starts from the
    coefficient in use, so that a clipped step, or time spent at a bound, does not wind the integral up.

    A KL runs away if it is above twice the target, its average is above 1.5 times the target, and it does not fall, as from a
    start that is far too small. The update then multiplies by at least 1.5, whatever ``max_step`` is.

    A KL starts at 0 and needs some steps to rise, whatever the coefficient. During the warm-up ``init`` is held: until the
    average has reached half the target, for ``warmup`` updates at most.

    :class:`~torchrl_llm_kl.AdaptiveKLCoefficient` integrates only, without averaging: it overshoots where the policy follows
    late. The gains are per update, and no step depends on ``n`` or a horizon. Their defaults are for noisy batches of about 100
    answers; with 256, ``proportional=2, integral=0.08, smoothing=0.9, max_step=0.2`` and a start near the
    coefficient that is needed hold the target more closely (``docs/kl_study.md``).

    Args:
        init: initial coefficient, positive, within ``[low, high]``.
        target: target KL, in the unit of ``current_kl`` (nats per token or per sequence); positive.

    Keyword Args:
        proportional: gain on the change of the error, dimensionless, at least 0.
        integral: gain on the error, per update, positive.
        smoothing: weight of the past in the moving average of the KL, at least 0 and below 1; 0.8 averages about 5 updates.
        max_step: largest change of the coefficient's logarithm in one update, unless the KL runs away; 0.1 is about 10 %.
        warmup: most updates during which ``init`` is held while the KL rises from 0.
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
    give a multiplier a proportional term; here the term is the logarithm's, since the KL falls as a power of the coefficient.
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
        if not 0 <= proportional < math.inf:
            raise ValueError(f"proportional must be finite and at least 0, got {proportional}.")
        check_positive(integral=integral)
        super().__init__(init, target, smoothing=smoothing, max_step=max_step, warmup=warmup, low=low, high=high)
        self.proportional, self.integral = proportional, integral

    def _step(self, average: Tensor) -> Tensor:
        error, before = self._error(average), self._error(self.average)
        moved = torch.where(self.mass > 0, error - before, 0)  # nothing came before the first
        return self.proportional * moved + self.integral * error

    def _bounded(self, step: Tensor, kl: Tensor, average: Tensor) -> Tensor:
        bounded = super()._bounded(step, kl, average)
        # One noisy batch is no reason, and a KL that falls already follows the coefficient late.
        above = (kl > _RUNS_AWAY[0] * self.target) & (average > _RUNS_AWAY[1] * self.target)
        runs_away = above & (kl >= self.average)
        return torch.where(runs_away, bounded.clamp(min=_BRAKE), bounded)

    def _error(self, average: Tensor) -> Tensor:
        return (average / self.target).clamp(min=_FAR_BELOW).log()


@controller("dual")
class DualKLCoefficient(_KLController):
    r"""A KL coefficient that is the Lagrange multiplier of ``KL <= target``, found by dual ascent.

    The dual's gradient, relative to the target, is ``g = average KL / target - 1``. Each :meth:`update` adds
    ``clip(rate * g, -max_step, max_step)`` to ``log coefficient``, or to ``softplus^-1(coefficient)``. The gradient of the map
    itself is left out, since it vanishes with the coefficient. The two are alike for a small coefficient, whose steps are
    relative; above 1 the steps of softplus become absolute.

    Dual ascent integrates only: where the policy follows late, it overshoots more than :class:`PIKLCoefficient`, unless its
    ``rate`` is small. For the warm-up and the other settings see there.

    Args:
        init: initial coefficient, positive, within ``[low, high]``.
        target: largest KL, in the unit of ``current_kl``; positive.

    Keyword Args:
        rate: step size of the ascent, positive.
        parametrisation: ``"log"`` or ``"softplus"``.
        smoothing: weight of the past in the moving average of the KL; 0, as in the source, takes the last batch alone.
        max_step: largest step.
        warmup: most updates during which ``init`` is held while the KL rises from 0.
        low: smallest coefficient.
        high: largest coefficient.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> coefficient = DualKLCoefficient(init=0.2, target=6.0, rate=0.05, warmup=0)
        >>> coefficient.update(9.0, n=10)  # 0.2 * exp(0.05 * 0.5)
        >>> coefficient()
        tensor(0.2051)

    Source: Abdolmaleki et al. 2018, "Maximum a Posteriori Policy Optimisation" (arXiv 1806.06920), whose KL bound has a
    multiplier that is trained along with the policy.
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
        check_positive(rate=rate)
        check_choice(get_args(DualParametrisation), parametrisation=parametrisation)
        super().__init__(init, target, smoothing=smoothing, max_step=max_step, warmup=warmup, low=low, high=high)
        self.rate, self.parametrisation = rate, parametrisation

    def _step(self, average: Tensor) -> Tensor:
        return self.rate * (average / self.target - 1)

    def _moved(self, step: Tensor) -> Tensor:
        if self.parametrisation == "log":
            return super()._moved(step)
        return softplus(self.value + (-(-self.value).expm1()).log() + step, threshold=80)
