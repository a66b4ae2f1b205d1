"""Distillation by the generalised Jensen-Shannon divergence."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_llm_kl.advantages._registry import advantage

__all__ = ["jsd"]

_TEMPERATURE = (
    1.0,
    "log-probs of the sampled tokens alone cannot be brought to another temperature. Pass log-probs that both models "
    "were scored with at that temperature (RetrieveLogProb(..., temperature=...))",
)


@advantage(
    "jsd",
    "token",
    aliases={"lambda_coef": "beta"},
    obsolete={"chunk_size": "there is one number for each token, and nothing to cut into pieces"},
    refused={"temperature": _TEMPERATURE},
    source="Agarwal et al. 2023 (GKD, arXiv 2306.13649), section 2; the advantage is its exact policy gradient",
)
def jsd(
    old_log_prob: Tensor,
    teacher_log_prob: Tensor,
    mask: Tensor,
    *,
    beta: float = 0.5,
    kl_coef: float = 1.0,
) -> Tensor:
    r"""``kl_coef * (1 - beta) * (log M - log pi)`` with the mixture ``M = beta * teacher + (1 - beta) * pi``.

    The divergence of a position is ``J = beta * KL(teacher || M) + (1 - beta) * KL(pi || M)``. Differentiated by ``pi(y)``,
    which ``M`` contains too, it gives

    ``-beta (1 - beta) teacher / M + (1 - beta) (log(pi / M) + 1 - (1 - beta) pi / M) = (1 - beta) log(pi / M)(y)``,

    since ``beta * teacher + (1 - beta) * pi`` is ``M`` again and takes the 1 away. Hence ``E_pi[A grad log pi] = -grad J``
    for this advantage, exactly, prefixes taken as given. It is bounded below by ``(1 - beta) log(1 - beta)``: a token that the
    teacher finds impossible has -0.35 for ``beta = 0.5``, where ``on_policy_distill`` has minus infinity.

    Args:
        old_log_prob: nats, of the student, which sampled the tokens; ``[*B, T]``.
        teacher_log_prob: the same tokens under the teacher; same shape. Trinity: ``teacher_logprobs``.
        mask: response tokens; bool, same shape.

    Keyword Args:
        beta: weight of the teacher in the mixture, between 0 and 1. Trinity: ``lambda_coef``.
        kl_coef: factor.

    Returns:
        ``[*B, T]``, without graph, 0 where the mask is False.

    Raises:
        ValueError: if shapes differ, an input is missing, ``beta`` is 0 or 1 (``M`` is then one of the two and ``J`` is 0
            whatever the student does), or for Trinity's ``temperature`` other than 1.
        TypeError: if the mask is not boolean.

    Example:
        >>> student, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
        >>> jsd(student, teacher, torch.tensor([[True, True]]))
        tensor([[ 0.1682, -0.2554]])

    Source: Agarwal et al. 2023 (GKD, arXiv 2306.13649), section 2; the advantage is its exact policy gradient.
    """
    if not 0 < beta < 1:
        raise ValueError(
            f"beta must be greater than 0 and less than 1, got {beta}: at both ends the divergence is 0 whatever the "
            f"student does. For KL(student || teacher) use on_policy_distill"
        )
    mixture = torch.logaddexp(math.log(beta) + teacher_log_prob, math.log1p(-beta) + old_log_prob)
    return torch.where(mask, kl_coef * (1 - beta) * (mixture - old_log_prob), 0)
