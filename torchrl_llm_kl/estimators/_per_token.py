r"""KL estimates that need only the log-probs of the tokens that were sampled.

Shared by every function here. Write :math:`\pi` for the policy, ``d = log_prob - ref_log_prob``. All log-probs are in
nats and already those of the sampled token, shape ``[*B, T]``. "Mean" is over the next token given its prefix. Half
precision is calculated, and returned, in float32. A position where both log-probs are ``-inf`` gives NaN
(``-inf - -inf``): mask such positions *before* calling. Nothing is detached: pass ``ref_log_prob`` and
``old_log_prob`` without history.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_same_shape, widen


def _log_ratio(log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor | None) -> Tensor:
    check_same_shape(log_prob=log_prob, ref_log_prob=ref_log_prob, old_log_prob=old_log_prob)
    log_prob, ref_log_prob = widen(log_prob, ref_log_prob)
    return log_prob - ref_log_prob


def none_(log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor | None = None) -> Tensor:
    r"""No penalty: zeros, cut off from the graph. Registered as ``"none"``.

    The value is not an estimate of any KL and there is no gradient. Place it anywhere to switch the penalty off
    without changing shapes or dtypes.

    Args:
        log_prob: nats, under the current policy, whoever sampled the tokens; ``[*B, T]``.
        ref_log_prob: the same tokens under the reference; same shape.
        old_log_prob: unused, but its shape is checked.

    Returns:
        Zeros, ``[*B, T]``, in the dtype that the other estimators would return.

    Raises:
        ValueError: if the shapes differ.

    Example:
        >>> none_(torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -1.0]))
        tensor([0., 0.])

    Source: ``kl_fn="none"`` of Trinity-RFT 0.6.0.
    """
    return torch.zeros_like(_log_ratio(log_prob, ref_log_prob, old_log_prob))


def k1(log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor | None = None) -> Tensor:
    r"""Per-token k1 estimate of :math:`KL(\pi \| \pi_{ref})`: the log-ratio ``d`` itself.

    For tokens sampled from the policy the value is unbiased but noisy, and negative about half of the time. The mean
    *gradient* is zero, so in a loss it adds noise and no pull. Put it in the **reward**, detached: the policy gradient
    of that reward is the gradient of the reverse KL. For tokens of another sampler the value is biased and the mean
    gradient is that of :math:`-KL(\pi_{old} \| \pi)`.

    Args:
        log_prob: nats, under the current policy, which sampled the tokens; ``[*B, T]``.
        ref_log_prob: the same tokens under the reference; same shape.
        old_log_prob: unused, but its shape is checked.

    Returns:
        Nats per token, ``[*B, T]``; not masked, not clamped, not reduced.

    Raises:
        ValueError: if the shapes differ.

    Example:
        >>> k1(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([ 0.5000, -1.0000])

    Source: J. Schulman, "Approximating KL Divergence" (2020); in the reward: arXiv 2512.21852.
    """
    return _log_ratio(log_prob, ref_log_prob, old_log_prob)


def k2(log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor | None = None) -> Tensor:
    r"""Per-token k2 estimate of :math:`KL(\pi \| \pi_{ref})`: ``d**2 / 2``, never negative.

    The value is biased, little when the models are near each other. For tokens sampled from the policy the mean
    *gradient* is exactly that of the reverse :math:`KL(\pi \| \pi_{ref})`: the estimator to put in a **loss**. As a
    reward it gives no KL's policy gradient.

    Args:
        log_prob: nats, under the current policy, which sampled the tokens; ``[*B, T]``.
        ref_log_prob: the same tokens under the reference; same shape.
        old_log_prob: unused, but its shape is checked.

    Returns:
        Nats squared per token, ``[*B, T]``; not masked, not clamped, not reduced.

    Raises:
        ValueError: if the shapes differ.

    Example:
        >>> k2(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([0.1250, 0.5000])

    Source: J. Schulman, "Approximating KL Divergence" (2020).
    """
    return 0.5 * _log_ratio(log_prob, ref_log_prob, old_log_prob).square()


def k3(log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor | None = None) -> Tensor:
    r"""Per-token k3 estimate of :math:`KL(\pi \| \pi_{ref})`: ``exp(-d) - 1 + d``, never negative.

    For tokens sampled from the policy the value is unbiased and far less noisy than :func:`k1`: the one to **log**. Its
    mean *gradient* is that of the other direction, :math:`KL(\pi_{ref} \| \pi)`, so a **loss** pulls the policy to
    cover the reference; use :func:`k2` or ``"k3+"`` for the reverse. As a reward its policy gradient is that of the
    *difference* :math:`KL(\pi \| \pi_{ref}) - KL(\pi_{ref} \| \pi)`: use :func:`k1` there. Overflows in float32 where
    ``d < -88``.

    Args:
        log_prob: nats, under the current policy, which sampled the tokens; ``[*B, T]``.
        ref_log_prob: the same tokens under the reference; same shape.
        old_log_prob: unused, but its shape is checked; :func:`corrected_k3` is the one for another sampler.

    Returns:
        Nats per token, ``[*B, T]``; not masked, not clamped, not reduced.

    Raises:
        ValueError: if the shapes differ.

    Example:
        >>> k3(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0]))
        tensor([0.0000, 0.7183])

    Source: J. Schulman, "Approximating KL Divergence" (2020).
    """
    return _k3_of(-_log_ratio(log_prob, ref_log_prob, old_log_prob))


def _k3_of(minus_d: Tensor) -> Tensor:
    return torch.expm1(minus_d) - minus_d


def abs_(log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor | None = None) -> Tensor:
    r"""Per-token ``|d|``. Registered as ``"abs"``.

    The mean value is at least the KL: biased upwards, and by much when the models are close. For tokens sampled from
    the policy the mean *gradient* is that of :math:`\sum_v |\pi(v) - \pi_{ref}(v)|`, twice the total variation
    distance: in a **loss** every token pulls equally hard however small its log-ratio. As a reward it gives no KL's
    policy gradient.

    Args:
        log_prob: nats, under the current policy, which sampled the tokens; ``[*B, T]``.
        ref_log_prob: the same tokens under the reference; same shape.
        old_log_prob: unused, but its shape is checked.

    Returns:
        Nats per token, ``[*B, T]``; not masked, not clamped, not reduced. The gradient at ``d = 0`` is 0.

    Raises:
        ValueError: if the shapes differ.

    Example:
        >>> abs_(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([0.5000, 1.0000])

    Source: ``kl_fn="abs"`` of Trinity-RFT 0.6.0 and verl.
    """
    return _log_ratio(log_prob, ref_log_prob, old_log_prob).abs()


def low_var_kl(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    old_log_prob: Tensor | None = None,
    *,
    log_ratio_clamp: float = 20.0,
    value_clamp: float = 10.0,
) -> Tensor:
    r""":func:`k3` with the log-ratio, then the value, clamped.

    For tokens sampled from the policy, where no clamp is active, value and mean gradient are those of :func:`k3`:
    unbiased, and the gradient of :math:`KL(\pi_{ref} \| \pi)`. Where one is active the **gradient is 0**. With the
    defaults that is where ``d < -2.61`` (at ``d = -4`` k3 is 49.6, this returns 10) and where ``d > 11``, so a **loss**
    no longer pulls back a token to which the policy has come to give less than 1/13.6 of the reference's probability.
    Finite for any finite input, so it suits **logging**; :func:`k1` belongs in a reward.

    Args:
        log_prob: nats, under the current policy, which sampled the tokens; ``[*B, T]``.
        ref_log_prob: the same tokens under the reference; same shape.
        old_log_prob: unused, but its shape is checked.
        log_ratio_clamp: bound on ``|d|``, nats; ``math.inf`` switches it off; float32 then overflows where ``d < -88``.
        value_clamp: bound on the value, nats; ``math.inf`` switches it off.

    Returns:
        Nats per token, ``[*B, T]``, in ``[0, value_clamp]``; not masked, not reduced.

    Raises:
        ValueError: if the shapes differ or a clamp is not positive.

    Example:
        >>> low_var_kl(torch.tensor([-2.0, -5.0]), torch.tensor([-1.0, -1.0]))
        tensor([ 0.7183, 10.0000])

    Source: ``kl_fn="low_var_kl"`` of Trinity-RFT 0.6.0 and verl, whose constants are the defaults.
    """
    _check_positive(log_ratio_clamp=log_ratio_clamp, value_clamp=value_clamp)
    minus_d = -_log_ratio(log_prob, ref_log_prob, old_log_prob)
    return _k3_of(minus_d.clamp(-log_ratio_clamp, log_ratio_clamp)).clamp(max=value_clamp)


def corrected_k3(
    log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor | None = None, *, ratio_max: float = 2.0
) -> Tensor:
    r""":func:`k3` for tokens that another policy sampled: ``min(r, ratio_max) * k3``.

    The ratio ``r = exp(log_prob - old_log_prob)`` carries gradient. While no ratio exceeds ``ratio_max``, the mean over
    the *sampler's* tokens is unbiased for :math:`KL(\pi \| \pi_{ref})` and its mean *gradient* is that of the same
    reverse KL: fit for a **loss**, on-policy and off-policy. Where the clamp is active both claims fail: the value is
    too small, and only :func:`k3`'s gradient is left, times ``ratio_max``. In a reward it has the fault of :func:`k3`.

    Args:
        log_prob: nats, under the current policy; ``[*B, T]``.
        ref_log_prob: the same tokens under the reference; same shape.
        old_log_prob: the same tokens under the policy that sampled them; same shape, without history. On-policy, pass
            ``log_prob.detach()``.
        ratio_max: upper clamp of the ratio; ``math.inf`` switches it off.

    Returns:
        Nats per token, ``[*B, T]``; not masked, not reduced.

    Raises:
        ValueError: if ``old_log_prob`` is missing (Trinity falls back to k3 in silence), the shapes differ, or
            ``ratio_max`` is not positive.

    Example:
        >>> corrected_k3(torch.tensor([-2.0, -2.0]), torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -4.0]))
        tensor([0.7183, 1.4366])

    Source: ``kl_fn="corrected_k3"`` of Trinity-RFT 0.6.0 (clamp to ``[0, 2]``; the 0 never binds).
    """
    _check_positive(ratio_max=ratio_max)
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


def _check_positive(**bounds: float) -> None:
    for name, bound in bounds.items():
        if not bound > 0:
            raise ValueError(f"{name} must be positive, got {bound}; pass math.inf to switch this clamp off.")
