"""KLs of whole distributions: exact over the vocabulary, a few positions at a time, or of a top k and "any other token"."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import Scalar, check_range, check_same_shape, widen
from torchrl_llm_kl.head import Direction, linear_pair, logits_kl

# exp underflows to 0 below this, in float64 too. An outcome without probability has this log-prob, and no gradient.
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
    :math:`m = \beta\pi_{ref} + (1-\beta)\pi`. So ``beta`` is the weight of the *reference*; 0.5 is symmetric and at
    most ``log 2``. Divided by ``beta`` it tends to the forward KL as ``beta`` tends to 0; divided by ``1 - beta``, to
    the reverse KL as ``beta`` tends to 1.

    Nothing is sampled at the position itself: value and *gradient* are the chosen divergence and its gradient given the
    prefix, whichever policy sampled it. Use it in a **loss** and for logging. In a **reward** its policy gradient at its own
    position is zero: it only reaches the earlier tokens that led to this prefix.

    Each head computes its logits in its own dtype, as the model does; softmax, sums and accumulated gradients are
    float32 or wider. Forward and backward, which recomputes the logits, work through tiles: besides inputs and
    gradients no tensor is larger than ``[chunk_size, V]``. Differentiable once.

    Args:
        hidden: last hidden state of the policy; ``[*B, T, H]``, in the dtype of ``weight``.
        ref_hidden: the reference's at the same positions; ``[*B, T, H_ref]``, without graph if the reference is frozen.
        weight: head of the policy; ``[V, H]``.
        ref_weight: head of the reference; ``[V, H_ref]``.
        bias: of the policy's head; ``[V]``.
        ref_bias: of the reference's head; ``[V]``.
        direction: which divergence.
        beta: weight of the reference in the mixture, inside (0, 1); only for ``"jensen_shannon"``.
        temperature: divides both models' logits, as at sampling.
        chunk_size: positions at a time; changes memory and speed only. Default: by device.

    Returns:
        Nats per position, ``[*B, T]``; not masked, not reduced. A token with a logit of ``-inf`` in both models
        adds 0; one that only the second distribution of a KL rules out makes that KL ``inf``.

    Raises:
        ValueError: if vocabularies, positions or head sizes disagree, or an option is out of range.

    Example:
        >>> hidden = ref_hidden = torch.ones(1, 2, 1)
        >>> weight, ref_weight = torch.zeros(2, 1), torch.tensor([[3.0], [1.0]]).log()
        >>> exact_kl(hidden, ref_hidden, weight, ref_weight)  # (1/2, 1/2) against (3/4, 1/4)
        tensor([[0.1438, 0.1438]])

    Source: the exact inner sum: Amini et al., arXiv 2504.10637 (Rao-Blackwell); ``beta``: Agarwal et al.,
    arXiv 2306.13649, generalized Jensen-Shannon with the teacher as first distribution.
    """
    check_range(1, chunk_size=chunk_size)
    check_same_shape(hidden=hidden[..., 0], ref_hidden=ref_hidden[..., 0])
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

    Meaning, gradient, placement, result and the other arguments are as in :func:`exact_kl`; float32 copies exist
    chunk by chunk only. ``logits`` and ``ref_logits`` are the policy's and the reference's, ``[*B, T, V]`` each; a
    constant added to a row changes nothing. Unequal shapes raise a ValueError.

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
