"""Whether a KL estimator does in a loss what one expects of it there."""

from __future__ import annotations

import warnings
from typing import Any

from torchrl_llm_kl.estimators import CONTRACTS

__all__ = ["KLPlacementWarning", "check_placement"]

_BY_NAME = {contract.name: contract for contract in CONTRACTS}

_IN_LOSS = {
    "zero": "its mean gradient is zero: it adds noise and no pull. Use 'k2' in the loss, or put 'k1' in the reward "
    "(KLRewardTransform, RetrieveKL)",
    "forward": "its mean gradient is that of the forward KL(reference || policy), which covers the reference instead of "
    "staying near its mode. Use 'k2' for the reverse KL, or 'k3+' to log k3 and train with the gradient of k2",
    "total_variation": "its mean gradient is that of the total variation, not of a KL. Use 'k2'",
}
_IN_REWARD = (
    "detached in a reward its policy gradient is not that of the reverse KL. Use 'k1' in the reward, or put 'k2' in the "
    "loss"
)


class KLPlacementWarning(UserWarning):
    """A KL estimator stands where its gradient is not that of the reverse KL; the message names the remedy."""


def check_placement(estimator: Any, place: str, *, stacklevel: int = 2) -> None:
    """Warn where an estimator's gradient is not that of the reverse KL.

    Args:
        estimator: a name of :func:`~torchrl_llm_kl.get_estimator`; nothing is known of others.
        place: ``"loss"`` or ``"reward"``.

    Keyword Args:
        stacklevel: of the warning.

    Warns:
        KLPlacementWarning: with what happens and what to use instead.

    Source: the table of ``docs/estimators.md``.
    """
    contract = _BY_NAME.get(estimator) if isinstance(estimator, str) else None
    if contract is None or estimator == "none":
        return
    if place == "reward":
        reason = None if contract.reward_gradient == "reverse" else _IN_REWARD
    else:
        reason = _IN_LOSS.get(contract.loss_gradient)
        if reason is None and "clamp" in contract.condition and not estimator.endswith("+"):
            reason = (
                f"it is clamped, and where a clamp is active nothing pulls back to the reference any more (it is right "
                f"{contract.condition}). Use 'k2', whose gradient has no bound"
            )
    if reason is not None:
        warnings.warn(
            f"KL estimator {estimator!r} in the {place}: {reason}.", KLPlacementWarning, stacklevel=stacklevel + 1
        )
