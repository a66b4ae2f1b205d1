"""The registry of estimators: the contract of each, rendered in the docs and verified by tests; warnings of a misplaced one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from torch import Tensor

from torchrl_llm_kl._registry import Registry, UnknownNameError

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
    """The contract of one estimator; means are over one token given its prefix, gradients are keys of :data:`QUANTITIES`."""

    name: str  #: as in :func:`get_estimator`
    unbiased: bool  #: whether the mean value over tokens from ``p`` is KL(p‖q)
    loss_gradient: str  #: mean gradient of the value over tokens from ``p``
    reward_gradient: str  #: mean policy gradient of the detached value over tokens from ``p``
    unbiased_off_policy: bool = False  #: whether the mean value over tokens from ``old`` is KL(p‖q)
    loss_gradient_off_policy: str = "none"  #: mean gradient of the value over tokens from ``old``
    reward: str = "no"  #: advice for use in the reward
    loss: str = "no"  #: advice for use in the loss
    condition: str = ""  #: when the contract holds; empty for always


UNCLAMPED = "while no clamp is active"


class UnknownEstimatorError(UnknownNameError):
    """Unknown estimator; the message lists the names and suggests the nearest one."""


_REGISTRY = Registry[Callable[..., Tensor]]("KL estimator", error=UnknownEstimatorError)
_CONTRACTS: dict[str, EstimatorContract] = {}


def register(contract: EstimatorContract, function: F) -> F:
    """Register an estimator with its contract, and return it."""
    _REGISTRY.add(contract.name, function)
    _CONTRACTS[contract.name] = contract
    return function


def available_estimators() -> tuple[EstimatorName, ...]:
    """Every name that :func:`get_estimator` accepts.

    Example:
        >>> available_estimators()[:4]
        ('none', 'k1', 'k1+', 'k2')
    """
    return cast("tuple[EstimatorName, ...]", tuple(_REGISTRY))


def contracts() -> tuple[EstimatorContract, ...]:
    """The contract of every estimator, in the order of :func:`available_estimators`.

    Example:
        >>> contracts()[1].name, contracts()[1].unbiased
        ('k1', True)
    """
    return tuple(_CONTRACTS.values())


def get_estimator(name: EstimatorName) -> Callable[..., Tensor]:
    """Look up an estimator; every look-up returns the same object, which can be pickled.

    All but ``"exact"`` are called as ``(log_prob, ref_log_prob, old_log_prob=None, *, <clamps>)`` on equal shapes
    ``[*B, T]``. ``"exact"`` is :func:`exact_kl`, which needs hidden states and heads instead of log-probs.

    Args:
        name: one of :func:`available_estimators`; a trailing ``+`` keeps the value and takes the gradient of ``k2``.

    Raises:
        UnknownEstimatorError: a ``ValueError``.

    Example:
        >>> from torchrl_llm_kl.estimators import k2
        >>> get_estimator("k2") is k2
        True
        >>> get_estimator("low_var")
        Traceback (most recent call last):
        ...
        torchrl_llm_kl.estimators._table.UnknownEstimatorError: unknown KL estimator 'low_var'. Did you mean ...
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
    """A KL estimator is used where its gradient is not the reverse KL's; the message recommends another."""


def check_placement(estimator: object, place: str, *, stacklevel: int = 2) -> None:
    """Warn if an estimator's gradient is not the reverse KL's where it is used.

    Args:
        estimator: a name of :func:`get_estimator`; anything else passes.
        place: ``"loss"`` or ``"reward"``.
        stacklevel: of the :class:`KLPlacementWarning`.

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
        reason = (
            "it is clamped: where a clamp is active, nothing pulls back to the reference (it is right only "
            f"{contract.condition}). Use 'k2', whose gradient has no bound"
        )
    else:
        reason = _IN_LOSS.get(contract.loss_gradient)
    if reason is not None:
        message = f"KL estimator {estimator!r} in the {place}: {reason}."
        warnings.warn(message, KLPlacementWarning, stacklevel=stacklevel + 1)
