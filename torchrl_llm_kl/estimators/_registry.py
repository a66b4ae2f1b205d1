"""Names of the estimators, as they stand in a configuration."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from torch import Tensor

from torchrl_llm_kl.estimators._exact import exact_kl
from torchrl_llm_kl.estimators._per_token import abs_, corrected_k3, k1, k2, k3, low_var_kl, none_
from torchrl_llm_kl.estimators._straight_through import StraightThrough

_BASES: dict[str, Callable[..., Tensor]] = {
    "none": none_,
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low_var_kl": low_var_kl,
    "abs": abs_,
    "corrected_k3": corrected_k3,
}
# No "none+": a penalty that trains and always reads 0 is a trap.
_ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    **_BASES,
    **{f"{name}+": StraightThrough(base) for name, base in _BASES.items() if name != "none"},
    "exact": exact_kl,
}


class UnknownEstimatorError(ValueError):
    """The name is not registered; the message lists those that are."""


def available_estimators() -> tuple[str, ...]:
    """Every name that :func:`get_estimator` accepts.

    Example:
        >>> available_estimators()[:4]
        ('none', 'k1', 'k2', 'k3')
    """
    return tuple(_ESTIMATORS)


def get_estimator(name: str) -> Callable[..., Tensor]:
    """Look an estimator up by name.

    All but ``"exact"`` are called as ``(log_prob, ref_log_prob, old_log_prob=None, *, <clamps>)`` on equal shapes
    ``[*B, T]``. ``"exact"`` is :func:`exact_kl`, which needs hidden states and heads instead of log-probs.

    Args:
        name: one of :func:`available_estimators`; a trailing ``+`` keeps the value and takes the gradient of ``k2``.

    Returns:
        The function itself: two look-ups give the same object, and it can be pickled.

    Raises:
        UnknownEstimatorError: a ``ValueError``; lists the names and the nearest one.

    Example:
        >>> get_estimator("k2") is k2
        True
        >>> get_estimator("low_var")
        Traceback (most recent call last):
        ...
        torchrl_llm_kl.estimators._registry.UnknownEstimatorError: unknown KL estimator 'low_var'; ...
    """
    if name in _ESTIMATORS:
        return _ESTIMATORS[name]
    near = difflib.get_close_matches(str(name), _ESTIMATORS, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UnknownEstimatorError(f"unknown KL estimator {name!r}; known: {', '.join(_ESTIMATORS)}.{hint}")
