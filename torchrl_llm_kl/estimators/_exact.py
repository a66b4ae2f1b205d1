"""KLs of whole distributions: exact over the vocabulary in chunks of positions, or over a top k and "any other token"."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import Scalar, check_range, check_same_shape, widen
from torchrl_llm_kl.head import Direction, linear_pair, logits_kl

# exp underflows to 0 below this, also in float64. Outcomes without probability get this log-prob, and no gradient.
_LOG_ZERO = -1000.0


def exact_kl(
    hidden: Tensor,
    ref_hidden: Tensor,
    weight: Tensor,
    ref_weight: Tensor,
    *,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    direction: Direction = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> Tensor:
    r"""Full-vocabulary divergence at each position, from the hidden states and the two heads.

    ``"reverse"`` is :math:`KL(\pi \| \pi_{ref})`, ``"forward"`` is :math:`KL(\pi_{ref} \| \pi)`, and
    ``"jensen_shannon"`` is :math:`\beta KL(\pi_{ref} \| m) + (1-\beta) KL(\pi \| m)` with the mixture
    :math:`m = \beta\pi_{ref} + (1-\beta)\pi`. So ``beta`` is the weight of the *reference*. With 0.5 the divergence is
    symmetric and at most ``log 2``. Divided by ``beta``, it tends to the forward KL as ``beta`` tends to 0. Divided by
    ``1 - beta``, it tends to the reverse KL as ``beta`` tends to 1.

    The sum is over every token, so nothing is sampled at the position itself. Value and *gradient* are the divergence and its
    gradient given the prefix, whichever policy sampled the prefix. Use it in a **loss** and for logging. In a **reward** its
    policy gradient at its own position is zero. It then only reaches the earlier tokens that led to this prefix.

    Each head computes its logits in its own dtype, as the model does. Softmax, sums and accumulated gradients are in float32
    or wider. Forward and backward work in tiles, and backward recomputes the logits. Apart from inputs and gradients, no
    tensor is larger than ``[chunk_size, V]``. The result can be differentiated once.

    Args:
        hidden: last hidden state of the policy, ``[*B, T, H]``, in the dtype of ``weight``.
        ref_hidden: last hidden state of the reference at the same positions, ``[*B, T, H_ref]``, without graph if the
            reference is frozen.
        weight: head of the policy, ``[V, H]``.
        ref_weight: head of the reference, ``[V, H_ref]``.
        bias: bias of the policy's head, ``[V]``.
        ref_bias: bias of the reference's head, ``[V]``.
        direction: the divergence.
        beta: weight of the reference in the mixture, inside (0, 1). Only for ``"jensen_shannon"``.
        temperature: divides both models' logits, as at sampling.
        chunk_size: positions per tile. It changes only memory and speed. The default depends on the device.

    Returns:
        Nats per position, ``[*B, T]``, not masked and not reduced. A token with a logit of ``-inf`` in both models adds 0. A
        token that only the second distribution of a KL rules out makes that KL ``inf``.

    Raises:
        ValueError: if vocabularies or positions disagree, or an option is out of range.

    Example:
        >>> hidden = ref_hidden = torch.ones(1, 2, 1)
        >>> weight, ref_weight = torch.zeros(2, 1), torch.tensor([[3.0], [1.0]]).log()
        >>> exact_kl(hidden, ref_hidden, weight, ref_weight)  # (1/2, 1/2) against (3/4, 1/4)
        tensor([[0.1438, 0.1438]])

    Source: the exact inner sum: Amini et al., arXiv 2504.10637 (Rao-Blackwell). ``beta``: Agarwal et al.,
    arXiv 2306.13649, generalized Jensen-Shannon with the teacher as first distribution.
    """
    check_range(1, chunk_size=chunk_size)
    check_same_shape(hidden=hidden[..., 0], ref_hidden=ref_hidden[..., 0])
    # If only one model is in float64, the other product is computed in float64 too.
    double = [torch.float64 in (hidden.dtype, weight.dtype), torch.float64 in (ref_hidden.dtype, ref_weight.dtype)]
    product_dtype = torch.float64 if double[0] != double[1] else None
    pair = linear_pair(
        hidden.flatten(0, -2),
        weight,
        ref_hidden.flatten(0, -2),
        ref_weight,
        direction=direction,
        beta=beta,
        bias=bias,
        ref_bias=ref_bias,
        temperature=temperature,
        product_dtype=product_dtype,
        chunk=chunk_size,
    )
    return pair.kl.view(hidden.shape[:-1])


def exact_kl_from_logits(
    logits: Tensor,
    ref_logits: Tensor,
    *,
    direction: Direction = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> Tensor:
    r"""Full-vocabulary divergence at each position, from existing logits.

    Value, gradient, use and the other arguments are as in :func:`exact_kl`. ``logits`` are the policy's and ``ref_logits``
    the reference's, ``[*B, T, V]`` each. Adding a constant to a row changes nothing. Float32 copies exist for one chunk at a
    time. Unequal shapes raise a ValueError.

    Example:
        >>> exact_kl_from_logits(torch.tensor([[3.0, 1.0]]).log(), torch.zeros(1, 2), direction="forward")
        tensor([0.1438])
    """
    check_range(1, chunk_size=chunk_size)
    check_same_shape(logits=logits, ref_logits=ref_logits)
    rows = [t.flatten(0, -2) if t.ndim > 1 else t[None] for t in (logits, ref_logits)]
    flat = logits_kl(*rows, direction=direction, beta=beta, temperature=temperature, chunk=chunk_size)
    return flat.view(logits.shape[:-1])


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

    As in GKD and TRL, ``beta`` is the *teacher's* share of the mixture. The value is not continuous in ``beta``: the mixed
    divergence tends to 0 at both ends, where the value jumps to the plain KL.

    For ``k`` below the vocabulary size the value is a lower bound of the divergence over all tokens, because one outcome
    stands for many tokens. With ``k = V`` it is that divergence. The gradient is the gradient of the value.

    Args:
        outcomes: nats, ``[*B, k + 1]``. The student's log-probs of the teacher's ids, followed by the log-prob of all other
            tokens. See :func:`~torchrl_llm_kl.head.linear_outcomes`.
        teacher_outcomes: the teacher's log-probs, same shape, detached. Log-probs below -1000, also ``-inf``, are raised to
            -1000. Value and gradient are then finite even if only one of the two models has no probability.

    Keyword Args:
        beta: from 0 to 1.

    Returns:
        Nats, ``[*B]``, not masked and not reduced.

    Raises:
        ValueError: if the shapes differ, or ``beta`` is out of range.

    Example:
        >>> teacher, student = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.4, 0.4, 0.2]).log()
        >>> [round(float(top_k_divergence(student, teacher, beta=beta)), 4) for beta in (0.0, 0.5, 1.0)]
        [0.1838, 0.0462, 0.192]

    Source: Agarwal et al. 2024 (GKD, arXiv 2306.13649), eq. 1. TRL 1.16, ``GKDTrainer.generalized_jsd_loss``.
    """
    check_same_shape(outcomes=outcomes, teacher_outcomes=teacher_outcomes)
    check_range(0.0, 1.0, beta=beta)
    log_q, log_p = (x.clamp(min=_LOG_ZERO) for x in widen(outcomes, teacher_outcomes.detach()))
    p, q = log_p.exp(), log_q.exp()
    forward, reverse = (p * (log_p - log_q)).sum(-1), (q * (log_q - log_p)).sum(-1)
    share = torch.as_tensor(beta, dtype=log_q.dtype, device=log_q.device)
    log_m = torch.logaddexp(log_p + share.log(), log_q + torch.log1p(-share))
    mixed = (share * p * (log_p - log_m) + (1 - share) * q * (log_q - log_m)).sum(-1)
    # There is no branch on beta, because a tensor is not read on the host. All three have finite values and gradients, so the
    # unused ones do not turn the gradient into NaN.
    return torch.where(share == 0, forward, torch.where(share == 1, reverse, mixed))
