r"""KL estimates from the log-probs of the sampled tokens, and the names of all estimators.

:math:`\pi` is the policy, ``d = log_prob - ref_log_prob``, and a "mean" is over the next token given its prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_range, check_same_shape, widen
from torchrl_llm_kl.estimators._exact import exact_kl
from torchrl_llm_kl.estimators._table import UNCLAMPED, EstimatorContract, register

F = TypeVar("F", bound=Callable[..., Tensor])


def estimator(contract: EstimatorContract) -> Callable[[F], F]:
    """Register a per-token estimator ``(log_prob, ref_log_prob, old_log_prob=None) -> Tensor`` under its contract's name.

    The name works wherever an estimator's name is taken, and with a ``+`` it has the estimator's value and the gradient of
    :func:`k2`. :func:`check_placement` warns by the contract.

    Raises:
        ValueError: if the name is taken.

    Example:
        >>> @estimator(EstimatorContract("k1", True, "zero", "reverse"))
        ... def mine(log_prob, ref_log_prob, old_log_prob=None):
        ...     return log_prob - ref_log_prob
        Traceback (most recent call last):
        ...
        ValueError: the KL estimator 'k1' is registered already: choose another name.
    """

    def add(function: F) -> F:
        register(contract, function)
        if contract.name != "none":  # a penalty that trains but always logs 0 would be a trap
            condition = contract.condition and f"value: {contract.condition}"
            plus = replace(
                contract,
                name=f"{contract.name}+",
                loss_gradient="reverse",
                loss_gradient_off_policy="none",
                loss="**yes**",
                condition=condition,
            )
            register(plus, StraightThrough(function))
        return function

    return add


@dataclass(frozen=True)
class StraightThrough:
    r"""The value of ``base``, the gradient of :func:`k2`; registered under the name of ``base`` with a ``+``.

    For tokens sampled from the policy the mean *gradient* is the gradient of the reverse :math:`KL(\pi \| \pi_{ref})`, whatever
    the base. Value and bias are the base's: ``"k3+"`` is unbiased with low variance, a good choice for a **loss** whose
    value is logged too. Clamps of the base affect only the value. In a **reward**, where the gradient is not used, it
    equals its base. The gradient is never importance-weighted. Can be pickled.

    Args:
        base: a per-token estimator.

    Example:
        >>> log_prob = torch.tensor([-2.0], requires_grad=True)
        >>> estimate = StraightThrough(k3)(log_prob, torch.tensor([-1.0]))
        >>> estimate.detach(), torch.autograd.grad(estimate.sum(), log_prob)[0]  # k3 alone has -1.7183
        (tensor([0.7183]), tensor([-1.]))

    Source: the ``+`` variants of ``kl_penalty`` in verl.
    """

    base: Callable[..., Tensor]

    def __call__(
        self, log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor | None = None, **clamps: float
    ) -> Tensor:
        """Estimate per token, in the base's unit; NaN where the log-ratio is infinite. ``clamps``: the base's."""
        value = self.base(log_prob, ref_log_prob, old_log_prob, **clamps).detach()
        surrogate = k2(log_prob, ref_log_prob)
        return value + (surrogate - surrogate.detach())


@estimator(EstimatorContract("none", False, "zero", "zero", False, "zero", "switches it off", "switches it off"))
def none_(log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor | None = None) -> Tensor:
    """No penalty: zeros without a graph, in the dtype of the other estimators. Registered as ``"none"``.

    Arguments and errors: :mod:`torchrl_llm_kl.estimators`.

    Example:
        >>> none_(torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -1.0]))
        tensor([0., 0.])

    Source: ``kl_fn="none"`` of Trinity-RFT 0.6.0.
    """
    return torch.zeros_like(k1(log_prob, ref_log_prob, old_log_prob))


@estimator(
    EstimatorContract("k1", True, "zero", "reverse", False, "minus_sampler", "**yes**", "no: noise without pull")
)
def k1(log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor | None = None) -> Tensor:
    r"""Per-token k1 estimate of :math:`KL(\pi \| \pi_{ref})`: the log-ratio ``d`` itself, nats.

    For tokens sampled from the policy the value is unbiased but noisy, and negative about half of the time. The mean
    *gradient* is zero, so in a loss it adds noise and no pull. Put it in the **reward**, detached: the policy gradient
    of that reward is the gradient of the reverse KL. For tokens of another sampler the value is biased and the mean
    gradient is the gradient of :math:`-KL(\pi_{old} \| \pi)`. Arguments and errors: :mod:`torchrl_llm_kl.estimators`.

    Example:
        >>> k1(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([ 0.5000, -1.0000])

    Source: J. Schulman, "Approximating KL Divergence" (2020); in the reward: arXiv 2512.21852.
    """
    check_same_shape(log_prob=log_prob, ref_log_prob=ref_log_prob, old_log_prob=old_log_prob)
    log_prob, ref_log_prob = widen(log_prob, ref_log_prob)
    return log_prob - ref_log_prob


@estimator(EstimatorContract("k2", False, "reverse", "none", loss="**yes**"))
def k2(log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor | None = None) -> Tensor:
    r"""Per-token k2 estimate of :math:`KL(\pi \| \pi_{ref})`: ``d**2 / 2``, nats squared, never negative.

    The value is biased, little when the models are close. For tokens sampled from the policy the mean *gradient* is
    exactly the gradient of the reverse :math:`KL(\pi \| \pi_{ref})`: the estimator to put in a **loss**. In a reward its policy
    gradient belongs to no KL. Arguments and errors: :mod:`torchrl_llm_kl.estimators`.

    Example:
        >>> k2(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([0.1250, 0.5000])

    Source: J. Schulman, "Approximating KL Divergence" (2020).
    """
    return 0.5 * k1(log_prob, ref_log_prob, old_log_prob).square()


@estimator(EstimatorContract("k3", True, "forward", "reverse_minus_forward", loss="for the forward KL"))
def k3(log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor | None = None) -> Tensor:
    r"""Per-token k3 estimate of :math:`KL(\pi \| \pi_{ref})`: ``exp(-d) - 1 + d``, nats, never negative.

    For tokens sampled from the policy the value is unbiased and far less noisy than :func:`k1`: the one to **log**. Its
    mean *gradient* belongs to the other direction, :math:`KL(\pi_{ref} \| \pi)`, so a **loss** pulls the policy to
    cover the reference; use :func:`k2` or ``"k3+"`` for the reverse. In a reward its policy gradient is the gradient of the
    *difference* :math:`KL(\pi \| \pi_{ref}) - KL(\pi_{ref} \| \pi)`: use :func:`k1` there, and :func:`corrected_k3` for
    another sampler's tokens. Overflows in float32 where ``d < -88``. Arguments and errors:
    :mod:`torchrl_llm_kl.estimators`.

    Example:
        >>> k3(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0]))
        tensor([0.0000, 0.7183])

    Source: J. Schulman, "Approximating KL Divergence" (2020).
    """
    d = k1(log_prob, ref_log_prob, old_log_prob)
    return torch.expm1(-d) + d


@estimator(
    EstimatorContract(
        "low_var_kl", True, "forward", "reverse_minus_forward", loss="as k3; no pull when far", condition=UNCLAMPED
    )
)
def low_var_kl(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    old_log_prob: Tensor | None = None,
    *,
    log_ratio_clamp: float = 20.0,
    value_clamp: float = 10.0,
) -> Tensor:
    r""":func:`k3` with ``|d|`` clamped to ``log_ratio_clamp``, then the value to ``value_clamp``; nats.

    For tokens sampled from the policy, where no clamp is active, value and mean gradient are :func:`k3`'s:
    unbiased, and the gradient of :math:`KL(\pi_{ref} \| \pi)`. Where one is active the **gradient is 0**. With the
    defaults that is where ``d < -2.61`` (at ``d = -4`` k3 is 49.6, this returns 10) and where ``d > 11``, so a **loss**
    no longer pulls back a token whose probability has dropped below 1/13.6 of the reference's. Finite for any finite
    input, so it suits **logging**; use :func:`k1` in a reward.

    ``math.inf`` switches a clamp off; without the log-ratio's float32 overflows where ``d < -88``. A clamp must
    be positive. Other arguments and errors: :mod:`torchrl_llm_kl.estimators`.

    Example:
        >>> low_var_kl(torch.tensor([-2.0, -5.0]), torch.tensor([-1.0, -1.0]))
        tensor([ 0.7183, 10.0000])

    Source: ``kl_fn="low_var_kl"`` of Trinity-RFT 0.6.0 and verl, whose constants are the defaults.
    """
    check_range(above=0.0, log_ratio_clamp=log_ratio_clamp, value_clamp=value_clamp)
    d = k1(log_prob, ref_log_prob, old_log_prob).clamp(-log_ratio_clamp, log_ratio_clamp)
    return (torch.expm1(-d) + d).clamp(max=value_clamp)


@estimator(EstimatorContract("abs", False, "total_variation", "none", loss="for the total variation"))
def abs_(log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor | None = None) -> Tensor:
    r"""Per-token ``|d|``, nats; its gradient at ``d = 0`` is 0. Registered as ``"abs"``.

    The mean value is at least the KL: biased upwards, and by much when the models are close. For tokens sampled from
    the policy the mean *gradient* is the gradient of :math:`\sum_v |\pi(v) - \pi_{ref}(v)|`, twice the total variation
    distance: in a **loss** every token pulls equally hard, however small its log-ratio. In a reward its policy gradient
    belongs to no KL. Arguments and errors: :mod:`torchrl_llm_kl.estimators`.

    Example:
        >>> abs_(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([0.5000, 1.0000])

    Source: ``kl_fn="abs"`` of Trinity-RFT 0.6.0 and verl.
    """
    return k1(log_prob, ref_log_prob, old_log_prob).abs()


# For tokens of another policy: the ratio corrects value and gradient.
_CORRECTED = EstimatorContract("corrected_k3", True, "reverse", "reverse_minus_forward", True, "reverse")


@estimator(replace(_CORRECTED, loss="**yes**, off-policy", condition=UNCLAMPED))
def corrected_k3(
    log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor | None = None, *, ratio_max: float = 2.0
) -> Tensor:
    r""":func:`k3` for tokens that another policy sampled: ``min(r, ratio_max) * k3``, nats.

    The ratio ``r = exp(log_prob - old_log_prob)`` is differentiated too. While no ratio exceeds ``ratio_max``, the mean over
    the *sampler's* tokens is unbiased for :math:`KL(\pi \| \pi_{ref})` and its mean *gradient* is the gradient of the same
    reverse KL: fit for a **loss**, on-policy and off-policy. Where the clamp is active both claims fail: the value is
    too small, and only :func:`k3`'s gradient is left, times ``ratio_max``. In a reward it has the fault of :func:`k3`.

    ``old_log_prob`` is required (Trinity falls back to k3 silently); on-policy, pass ``log_prob.detach()``.
    ``ratio_max`` is positive; ``math.inf`` switches the clamp off. Other arguments and errors:
    :mod:`torchrl_llm_kl.estimators`.

    Example:
        >>> corrected_k3(torch.tensor([-2.0, -2.0]), torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -4.0]))
        tensor([0.7183, 1.4366])

    Source: ``kl_fn="corrected_k3"`` of Trinity-RFT 0.6.0 (clamp to ``[0, 2]``; the 0 never binds).
    """
    check_range(above=0.0, ratio_max=ratio_max)
    if old_log_prob is None:
        raise ValueError(
            "corrected_k3 needs old_log_prob, the log-probs of the policy that sampled the tokens. "
            "Pass it, or log_prob.detach() when the current policy sampled them, or use the estimator 'k3'."
        )
    estimate = k3(log_prob, ref_log_prob, old_log_prob)
    log_prob, old_log_prob = widen(log_prob, old_log_prob)
    # Bounding the exponent first keeps exp finite; an inf here would turn the clamp's zero gradient into NaN.
    log_ratio = (log_prob - old_log_prob).clamp(max=math.log(ratio_max) + 1.0)
    return log_ratio.exp().clamp(max=ratio_max) * estimate


register(
    EstimatorContract(
        "exact", True, "chosen", "zero", True, "chosen", "only beside the loss", "**yes**", "unbiased: `reverse`"
    ),
    exact_kl,
)
