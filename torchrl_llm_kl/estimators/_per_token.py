r"""KL estimators from the log-probs of the sampled tokens: the registry with their contracts, and their formulas.

:math:`\pi` is the policy and ``d = log_prob - ref_log_prob``. A "mean" is over the next token given its prefix.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_range, check_same_shape, widen
from torchrl_llm_kl._registry import Registry, UnknownNameError
from torchrl_llm_kl.estimators._exact import exact_kl

if TYPE_CHECKING:
    from torchrl_llm_kl.estimators import EstimatorName

F = TypeVar("F", bound=Callable[..., Tensor])
#: Quantities whose gradient an estimator may have -> notation. ``p``: policy, ``q``: reference, ``old``: sampler.
QUANTITIES: dict[str, str] = {
    "zero": "0",
    "reverse": "KL(p‖q)",
    "forward": "KL(q‖p)",
    "total_variation": "Σ\u2009abs(p − q)",
    "reverse_minus_forward": "KL(p‖q) − KL(q‖p)",
    "minus_sampler": "−KL(old‖p)",
    "chosen": "the chosen one",
    "none": "no divergence",
}


@dataclass(frozen=True)
class EstimatorContract:
    """The contract of one estimator. Means are over one token given its prefix. Gradients are keys of :data:`QUANTITIES`."""

    name: str  #: as in :func:`get_estimator`
    unbiased: bool  #: whether the mean value over tokens from ``p`` is KL(p‖q)
    loss_gradient: str  #: mean gradient of the value over tokens from ``p``
    reward_gradient: str  #: mean policy gradient of the detached value over tokens from ``p``
    unbiased_off_policy: bool = False  #: whether the mean value over tokens from ``old`` is KL(p‖q)
    loss_gradient_off_policy: str = "none"  #: mean gradient of the value over tokens from ``old``
    reward: str = "no"  #: advice for use in the reward
    loss: str = "no"  #: advice for use in the loss
    condition: str = ""  #: when the contract holds, empty for always


UNCLAMPED = "while no clamp is active"


class UnknownEstimatorError(UnknownNameError):
    """The estimator is not registered. The message lists the known names and suggests the nearest one."""


_REGISTRY = Registry[Callable[..., Tensor]]("KL estimator", error=UnknownEstimatorError)
_CONTRACTS: dict[str, EstimatorContract] = {}


def register(contract: EstimatorContract, function: F) -> F:
    """Register an estimator with its contract, and return it."""
    _REGISTRY.add(contract.name, function)
    _CONTRACTS[contract.name] = contract
    return function


def available_estimators() -> tuple[EstimatorName, ...]:
    """The names that :func:`get_estimator` accepts.

    Example:
        >>> available_estimators()[:4]
        ('none', 'k1', 'k1+', 'k2')
    """
    return cast("tuple[EstimatorName, ...]", tuple(_REGISTRY))


def contracts() -> tuple[EstimatorContract, ...]:
    """The contracts of all estimators, in the order of :func:`available_estimators`.

    Example:
        >>> contracts()[1].name, contracts()[1].unbiased
        ('k1', True)
    """
    return tuple(_CONTRACTS.values())


def get_estimator(name: EstimatorName) -> Callable[..., Tensor]:
    """Look up an estimator. Every look-up returns the same object, which can be pickled.

    ``"exact"`` is :func:`exact_kl`, which takes hidden states and heads. All others are called as
    ``(log_prob, ref_log_prob, old_log_prob=None, *, <clamps>)`` on equal shapes ``[*B, T]``.

    Args:
        name: one of :func:`available_estimators`. A trailing ``+`` keeps the value and takes the gradient of ``k2``.

    Raises:
        UnknownEstimatorError: a ``ValueError``.

    Example:
        >>> from torchrl_llm_kl.estimators import k2
        >>> get_estimator("k2") is k2
        True
        >>> get_estimator("low_var")
        Traceback (most recent call last):
        ...
        torchrl_llm_kl.estimators._per_token.UnknownEstimatorError: unknown KL estimator 'low_var'. Did you mean ...
    """
    return _REGISTRY[name]


_HEADER = (
    "| name | value unbiased | gradient in a loss | gradient in a reward | off-policy: value unbiased "
    "| off-policy: gradient in a loss | use in a reward | use in a loss | holds |\n" + "| --- " * 9 + "|\n"
)


def estimator_table() -> str:
    """Render the contracts as a Markdown table, one row per estimator.

    Example:
        >>> print(estimator_table().splitlines()[3])
        | `k1` | yes | 0 | KL(p‖q) | no | −KL(old‖p) | **yes** | no: noise without pull | always |
    """
    table = _HEADER
    for c in contracts():
        value, off_policy = ("yes" if unbiased else "no" for unbiased in (c.unbiased, c.unbiased_off_policy))
        gradient, in_reward = QUANTITIES[c.loss_gradient], QUANTITIES[c.reward_gradient]
        row = (f"`{c.name}`", value, gradient, in_reward, off_policy, QUANTITIES[c.loss_gradient_off_policy])
        table += f"| {' | '.join((*row, c.reward, c.loss, c.condition or 'always'))} |\n"
    return table


# ------------------------------------------------------------------ formulas


def estimator(contract: EstimatorContract) -> Callable[[F], F]:
    """Register a per-token estimator ``(log_prob, ref_log_prob, old_log_prob=None) -> Tensor`` under its contract's name.

    The name works wherever an estimator's name is accepted. The same name with a ``+`` has the estimator's value and the
    gradient of :func:`k2`. :func:`check_placement` warns according to the contract.

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
        if contract.name != "none":  # "none+" would train with k2 but always log 0
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
    r"""The value of ``base`` with the gradient of :func:`k2`. It is registered under the name of ``base`` with a ``+``.

    For tokens sampled from the policy the mean *gradient* is the gradient of the reverse :math:`KL(\pi \| \pi_{ref})`, whatever
    the base. Value and bias are the base's. ``"k3+"`` is unbiased and has low variance, so it suits a **loss** whose value is
    also logged. Clamps of the base affect only the value. In a **reward**, where the gradient is not used, it equals its
    base. The gradient is never importance-weighted. The object can be pickled.

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
        """Estimate per token, in the base's unit. NaN where the log-ratio is infinite. ``clamps`` are passed to the base."""
        value = self.base(log_prob, ref_log_prob, old_log_prob, **clamps).detach()
        surrogate = k2(log_prob, ref_log_prob)
        return value + (surrogate - surrogate.detach())


@estimator(EstimatorContract("none", False, "zero", "zero", False, "zero", "switches it off", "switches it off"))
def none_(log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor | None = None) -> Tensor:
    """No penalty: zeros without a graph, in the dtype of the other estimators. It is registered as ``"none"``.

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

    For tokens sampled from the policy the value is unbiased but noisy, and about half of the values are negative. The mean
    *gradient* is zero, so in a loss it adds noise and no pull. Use it detached in the **reward**: the policy gradient of that
    reward is the gradient of the reverse KL. For tokens of another sampler the value is biased, and the mean gradient is the
    gradient of :math:`-KL(\pi_{old} \| \pi)`. Arguments and errors: :mod:`torchrl_llm_kl.estimators`.

    Example:
        >>> k1(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([ 0.5000, -1.0000])

    Source: J. Schulman, "Approximating KL Divergence" (2020). In the reward: arXiv 2512.21852.
    """
    check_same_shape(log_prob=log_prob, ref_log_prob=ref_log_prob, old_log_prob=old_log_prob)
    log_prob, ref_log_prob = widen(log_prob, ref_log_prob)
    return log_prob - ref_log_prob


@estimator(EstimatorContract("k2", False, "reverse", "none", loss="**yes**"))
def k2(log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor | None = None) -> Tensor:
    r"""Per-token k2 estimate of :math:`KL(\pi \| \pi_{ref})`: ``d**2 / 2``, nats squared, never negative.

    The value is biased, but only slightly if the models are close. For tokens sampled from the policy the mean *gradient* is
    exactly the gradient of the reverse :math:`KL(\pi \| \pi_{ref})`, so this is the estimator for a **loss**. In a reward its
    policy gradient belongs to no KL. Arguments and errors: :mod:`torchrl_llm_kl.estimators`.

    Example:
        >>> k2(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([0.1250, 0.5000])

    Source: J. Schulman, "Approximating KL Divergence" (2020).
    """
    return 0.5 * k1(log_prob, ref_log_prob, old_log_prob).square()


@estimator(EstimatorContract("k3", True, "forward", "reverse_minus_forward", loss="for the forward KL"))
def k3(log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor | None = None) -> Tensor:
    r"""Per-token k3 estimate of :math:`KL(\pi \| \pi_{ref})`: ``exp(-d) - 1 + d``, nats, never negative.

    For tokens sampled from the policy the value is unbiased and far less noisy than :func:`k1`, so this is the estimator to
    **log**. Its mean *gradient* belongs to the other direction, :math:`KL(\pi_{ref} \| \pi)`. In a **loss** it therefore pulls
    the policy to cover the reference. Use :func:`k2` or ``"k3+"`` for the reverse KL. In a reward its policy gradient is the
    gradient of the *difference* :math:`KL(\pi \| \pi_{ref}) - KL(\pi_{ref} \| \pi)`, so use :func:`k1` there. Use
    :func:`corrected_k3` for another sampler's tokens. It overflows in float32 where ``d < -88``. Arguments and errors:
    :mod:`torchrl_llm_kl.estimators`.

    Example:
        >>> k3(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0]))
        tensor([0.0000, 0.7183])

    Source: J. Schulman, "Approximating KL Divergence" (2020).
    """
    d = k1(log_prob, ref_log_prob, old_log_prob)
    return torch.expm1(-d) + d  # with exp(-d) - 1 rounding would make some small estimates negative


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
    r""":func:`k3` in nats, with ``|d|`` clamped to ``log_ratio_clamp`` and then the value to ``value_clamp``.

    For tokens sampled from the policy, and while no clamp is active, value and mean gradient are those of :func:`k3`: the
    value is unbiased, and the gradient belongs to :math:`KL(\pi_{ref} \| \pi)`. Where a clamp is active the **gradient is 0**.
    With the defaults this happens for ``d < -2.61`` (at ``d = -4``, k3 is 49.6 and this is 10) and for ``d > 11``. A **loss**
    then no longer pulls back a token whose probability fell below 1/13.6 of the reference's. The value is finite for any
    finite input, so it suits **logging**. Use :func:`k1` in a reward.

    A clamp is positive, and ``math.inf`` switches it off. Without ``log_ratio_clamp``, float32 overflows where ``d < -88``.
    Other arguments and errors: :mod:`torchrl_llm_kl.estimators`.

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
    r"""Per-token ``|d|`` in nats. Its gradient at ``d = 0`` is 0. It is registered as ``"abs"``.

    The mean value is at least the KL, and far above it if the models are close. For tokens sampled from the policy the mean
    *gradient* is the gradient of :math:`\sum_v |\pi(v) - \pi_{ref}(v)|`, which is twice the total variation distance. In a
    **loss** every token pulls equally hard, however small its log-ratio. In a reward its policy gradient belongs to no KL.
    Arguments and errors: :mod:`torchrl_llm_kl.estimators`.

    Example:
        >>> abs_(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([0.5000, 1.0000])

    Source: ``kl_fn="abs"`` of Trinity-RFT 0.6.0 and verl.
    """
    return k1(log_prob, ref_log_prob, old_log_prob).abs()


# For tokens of another policy, the importance ratio corrects value and gradient.
_CORRECTED = EstimatorContract("corrected_k3", True, "reverse", "reverse_minus_forward", True, "reverse")


@estimator(replace(_CORRECTED, loss="**yes**, off-policy", condition=UNCLAMPED))
def corrected_k3(
    log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor | None = None, *, ratio_max: float = 2.0
) -> Tensor:
    r""":func:`k3` for tokens that another policy sampled: ``min(r, ratio_max) * k3``, nats.

    The ratio ``r = exp(log_prob - old_log_prob)`` is differentiated too. While no ratio exceeds ``ratio_max``, the mean over
    the *sampler's* tokens is unbiased for :math:`KL(\pi \| \pi_{ref})`, and its mean *gradient* is the gradient of the same
    reverse KL. It therefore suits a **loss**, on-policy and off-policy. Where the clamp is active both claims fail: the value
    is too small, and only the gradient of :func:`k3` times ``ratio_max`` remains. In a reward its policy gradient is wrong in
    the same way as that of :func:`k3`.

    ``old_log_prob`` is required. (Trinity silently falls back to k3.) On-policy, pass ``log_prob.detach()``. ``ratio_max`` is
    positive, and ``math.inf`` switches the clamp off. Other arguments and errors: :mod:`torchrl_llm_kl.estimators`.

    Example:
        >>> corrected_k3(torch.tensor([-2.0, -2.0]), torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -4.0]))
        tensor([0.7183, 1.4366])

    Source: ``kl_fn="corrected_k3"`` of Trinity-RFT 0.6.0, whose clamp is ``[0, 2]``. The 0 is never reached.
    """
    check_range(above=0.0, ratio_max=ratio_max)
    if old_log_prob is None:
        raise ValueError("corrected_k3 needs old_log_prob, the sampler's. On-policy, pass log_prob.detach().")
    estimate = k3(log_prob, ref_log_prob, old_log_prob)
    log_prob, old_log_prob = widen(log_prob, old_log_prob)
    # Bounding the exponent first keeps exp finite. An inf here would turn the clamp's zero gradient into NaN.
    log_ratio = (log_prob - old_log_prob).clamp(max=math.log(ratio_max) + 1.0)
    return log_ratio.exp().clamp(max=ratio_max) * estimate


register(
    EstimatorContract(
        "exact", True, "chosen", "zero", True, "chosen", "only beside the loss", "**yes**", "unbiased: `reverse`"
    ),
    exact_kl,
)


# ------------------------------------------------------------------ placement

_IN_LOSS = {
    "zero": "its mean gradient is zero, so it adds noise and no pull. Use 'k2' in the loss, or put 'k1' in the reward "
    "(KLRewardTransform, RetrieveKL)",
    "forward": "its mean gradient belongs to the forward KL(reference || policy), which covers the reference instead of "
    "staying near its mode. Use 'k2' for the reverse KL, or 'k3+' to log k3 and train with the gradient of k2",
    "total_variation": "its mean gradient belongs to the total variation, not to a KL. Use 'k2'",
}
_IN_REWARD = "detached, its policy gradient is not the reverse KL's. Use 'k1' in the reward, or put 'k2' in the loss"


class KLPlacementWarning(UserWarning):
    """A KL estimator is used where its gradient is not the reverse KL's. The message recommends another estimator."""


def check_placement(estimator: object, place: str, *, stacklevel: int = 2) -> None:
    """Warn if an estimator's gradient is not the reverse KL's where it is used.

    Args:
        estimator: a name of :func:`get_estimator`. Other objects are not checked.
        place: ``"loss"`` or ``"reward"``.
        stacklevel: stack level of the :class:`KLPlacementWarning`.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     check_placement("k1", "loss")
        ...     check_placement("k1", "reward")
        >>> print(str(caught[0].message).split(",")[0], len(caught))
        KL estimator 'k1' in the loss: its mean gradient is zero 1
    """
    contract = _CONTRACTS.get(estimator) if isinstance(estimator, str) else None
    if contract is None or estimator == "none":
        return
    if place == "reward":
        reason = None if contract.reward_gradient == "reverse" else _IN_REWARD
    elif contract.condition == UNCLAMPED and contract.loss_gradient not in _IN_LOSS:
        reason = "it is clamped, and where a clamp is active nothing pulls back to the reference. Use 'k2'"
    else:
        reason = _IN_LOSS.get(contract.loss_gradient)
    if reason is not None:
        message = f"KL estimator {estimator!r} in the {place}: {reason}."
        warnings.warn(message, KLPlacementWarning, stacklevel=stacklevel + 1)
