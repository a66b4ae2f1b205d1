"""Divergences of a teacher's top k: sums over ``k + 1`` outcomes, the last of which is "any other token"."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import Scalar, check_range, check_same_shape, widen

# exp underflows to 0 below this, in float64 too. An outcome without probability has this log-prob, and no gradient.
_LOG_ZERO = -1000.0


def top_k_divergence(outcomes: Tensor, teacher_outcomes: Tensor, *, beta: Scalar = 0.5) -> Tensor:
    r"""Generalised Jensen-Shannon divergence of a student and a teacher over a teacher's top ``k`` and the rest.

    With the student's probabilities ``q``, the teacher's ``p`` and the mixture ``m = beta p + (1 - beta) q``, per position

    ======================= ==================================================== =====================
    ``beta``                value                                                meaning
    ======================= ==================================================== =====================
    0                       :math:`KL(p \| q)`                                   forward KL, mean-seeking
    between                 :math:`\beta KL(p \| m) + (1-\beta) KL(q \| m)`      ``log 2`` at most at 0.5
    1                       :math:`KL(q \| p)`                                   reverse KL, mode-seeking
    ======================= ==================================================== =====================

    This is the convention of GKD and of TRL: ``beta`` is the *teacher's* share of the mixture. It is not continuous: the mean
    of the two KLs tends to 0 at both ends, where the value jumps to the plain KL.

    For ``k`` below the vocabulary it is a lower bound of the divergence over all tokens, since one outcome stands for many;
    with ``k = V`` it is that divergence. The gradient is the value's.

    Args:
        outcomes: nats, the student's log-probs at the teacher's ids, and last of all other tokens; ``[*B, k + 1]``. See
            :func:`~torchrl_llm_kl.head.linear_outcomes`.
        teacher_outcomes: the teacher's, same shape; detached. Log-probs below -1000, ``-inf`` too, count as -1000, so that
            the value and the gradient are finite where only one of both has no probability.

    Keyword Args:
        beta: from 0 to 1.

    Returns:
        Nats, ``[*B]``; not masked, not reduced.

    Raises:
        ValueError: if the shapes differ, or ``beta`` is out of range.

    Example:
        >>> teacher, student = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.4, 0.4, 0.2]).log()
        >>> [round(float(top_k_divergence(student, teacher, beta=beta)), 4) for beta in (0.0, 0.5, 1.0)]
        [0.1838, 0.0462, 0.192]

    Source: Agarwal et al. 2024 (GKD, arXiv 2306.13649), eq. 1; TRL 1.16, ``GKDTrainer.generalized_jsd_loss``.
    """
    check_same_shape(outcomes=outcomes, teacher_outcomes=teacher_outcomes)
    check_range(0.0, 1.0, beta=beta)
    log_q, log_p = (x.clamp(min=_LOG_ZERO) for x in widen(outcomes, teacher_outcomes.detach()))
    p, q = log_p.exp(), log_q.exp()
    forward, reverse = (p * (log_p - log_q)).sum(-1), (q * (log_q - log_p)).sum(-1)
    share = torch.as_tensor(beta, dtype=log_q.dtype, device=log_q.device)
    log_m = torch.logaddexp(log_p + share.log(), log_q + torch.log1p(-share))
    mixed = (share * p * (log_p - log_m) + (1 - share) * q * (log_q - log_m)).sum(-1)
    # No branch on beta: a tensor is not read on the host. All three are finite, in value and in gradient.
    return torch.where(share == 0, forward, torch.where(share == 1, reverse, mixed))
