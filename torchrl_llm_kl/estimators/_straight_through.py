"""Estimators with the value of one and the gradient of another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from torchrl_llm_kl.estimators._per_token import k2


@dataclass(frozen=True)
class StraightThrough:
    r"""The value of ``base``, the gradient of :func:`k2`; registered under the name of ``base`` with a ``+``.

    For tokens sampled from the policy the mean *gradient* is that of the reverse :math:`KL(\pi \| \pi_{ref})`, whatever
    the base. Value, and whether it is unbiased, are the base's: ``"k3+"`` is unbiased and quiet and so the one to put
    in a **loss** whose value is also logged. The clamps of the base act on the value only. In a **reward**, where the
    gradient is not used, it equals its base. The gradient is not importance-weighted, also for ``"corrected_k3+"``.

    An object and not a closure, so that a transform that holds it can be pickled.

    Args:
        base: a per-token estimator.

    Example:
        >>> import torch
        >>> from torchrl_llm_kl.estimators import k3
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
        """Estimate per token.

        Args:
            log_prob: nats, under the current policy, which sampled the tokens; ``[*B, T]``.
            ref_log_prob: the same tokens under the reference; same shape.
            old_log_prob: handed to the base.
            **clamps: handed to the base.

        Returns:
            Per token, ``[*B, T]``, in the base's unit; NaN where the log-ratio is infinite.

        Raises:
            ValueError: as the base does.
        """
        value = self.base(log_prob, ref_log_prob, old_log_prob, **clamps).detach()
        surrogate = k2(log_prob, ref_log_prob)
        return value + (surrogate - surrogate.detach())
