"""The contract of each estimator, rendered in the docs and verified by tests, and a warning for a misplaced estimator."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

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
    unbiased_off_policy: bool  #: whether the mean value over tokens from ``old`` is KL(p‖q)
    loss_gradient_off_policy: str  #: mean gradient of the value over tokens from ``old``
    reward: str  #: advice for use in the reward
    loss: str  #: advice for use in the loss
    condition: str = ""  #: when the contract holds; empty for always


_UNCLAMPED = "while no clamp is active"

# fmt: off
_BASES = (
    EstimatorContract("none", False, "zero", "zero", False, "zero", "switches it off", "switches it off"),
    EstimatorContract("k1", True, "zero", "reverse", False, "minus_sampler", "**yes**", "no: noise without pull"),
    EstimatorContract("k2", False, "reverse", "none", False, "none", "no", "**yes**"),
    EstimatorContract("k3", True, "forward", "reverse_minus_forward", False, "none", "no", "for the forward KL"),
    EstimatorContract("low_var_kl", True, "forward", "reverse_minus_forward", False, "none", "no",
                      "as k3; no pull when far", _UNCLAMPED),
    EstimatorContract("abs", False, "total_variation", "none", False, "none", "no", "for the total variation"),
    EstimatorContract("corrected_k3", True, "reverse", "reverse_minus_forward", True, "reverse", "no",
                      "**yes**, off-policy", _UNCLAMPED),
)
# fmt: on
_K2 = _BASES[2]


def _straight_through(base: EstimatorContract) -> EstimatorContract:
    """The value's contract from ``base``, the gradient's from k2."""
    return replace(
        base,
        name=f"{base.name}+",
        loss_gradient=_K2.loss_gradient,
        loss_gradient_off_policy=_K2.loss_gradient_off_policy,
        loss=_K2.loss,
        condition=base.condition and f"value: {base.condition}",
    )


#: The contract of every estimator, in the order of :func:`available_estimators`.
CONTRACTS: tuple[EstimatorContract, ...] = (
    *_BASES,
    *(_straight_through(base) for base in _BASES if base.name != "none"),
    EstimatorContract(
        "exact", True, "chosen", "zero", True, "chosen", "only beside the loss", "**yes**", "unbiased: `reverse`"
    ),
)
_BY_NAME = {contract.name: contract for contract in CONTRACTS}

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
    for c in CONTRACTS:
        value, off_policy = ("yes" if unbiased else "no" for unbiased in (c.unbiased, c.unbiased_off_policy))
        gradient, in_reward = QUANTITIES[c.loss_gradient], QUANTITIES[c.reward_gradient]
        row = (f"`{c.name}`", value, gradient, in_reward, off_policy, QUANTITIES[c.loss_gradient_off_policy])
        table += f"| {' | '.join((*row, c.reward, c.loss, c.condition or 'always'))} |\n"
    return table


# ------------------------------------------------------------------ placement

_IN_LOSS = {
    "zero": "its mean gradient is zero, so it adds noise and no pull. Use 'k2' in the loss, or put 'k1' in the reward "
    "(KLRewardTransform, RetrieveKL)",
    "forward": "its mean gradient is that of the forward KL(reference || policy), which covers the reference instead of "
    "staying near its mode. Use 'k2' for the reverse KL, or 'k3+' to log k3 and train with the gradient of k2",
    "total_variation": "its mean gradient is that of the total variation, not of a KL. Use 'k2'",
}
_IN_REWARD = (
    "detached, its policy gradient is not that of the reverse KL. Use 'k1' in the reward, or put 'k2' in the loss"
)


class KLPlacementWarning(UserWarning):
    """A KL estimator is used where its gradient is not that of the reverse KL; the message recommends another."""


def check_placement(estimator: Any, place: str, *, stacklevel: int = 2) -> None:
    """Warn if an estimator's gradient is not that of the reverse KL where it is used.

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
    contract = _BY_NAME.get(estimator) if isinstance(estimator, str) else None
    if contract is None or estimator == "none":
        return
    if place == "reward":
        reason = None if contract.reward_gradient == "reverse" else _IN_REWARD
    elif contract.condition == _UNCLAMPED and contract.loss_gradient not in _IN_LOSS:
        reason = (
            "it is clamped: where a clamp is active, nothing pulls back to the reference (it is right only "
            f"{contract.condition}). Use 'k2', whose gradient has no bound"
        )
    else:
        reason = _IN_LOSS.get(contract.loss_gradient)
    if reason is not None:
        message = f"KL estimator {estimator!r} in the {place}: {reason}."
        warnings.warn(message, KLPlacementWarning, stacklevel=stacklevel + 1)
