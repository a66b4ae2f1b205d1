"""Advantages of tokens: one number per response token.

The functions share their inputs, positional in the order of each signature:

Args:
    reward: reward of each token; ``[*B, T]``. An outcome is on the last response token.
    value: the critic's estimate of the sum of rewards from this token on; ``[*B, T]``.
    old_log_prob: nats, under the policy that sampled the tokens, which is the student; ``[*B, T]``.
    teacher_log_prob: of the same tokens under the teacher; ``[*B, T]``. Trinity: ``teacher_logprobs``.
    mask: True at response tokens; bool ``[*B, T]``. Values at other tokens (even NaN) have no effect, and discounting skips
        them.

Returns:
    ``[*B, T]``, float32 or wider, without graph, exactly 0 where the mask is False.

Raises:
    ValueError: if an input is missing, shapes differ, or a hyper-parameter is out of range.
    TypeError: if the mask is not boolean, or for an unknown hyper-parameter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchrl.objectives.value.functional import generalized_advantage_estimate

from torchrl_llm_kl._numerics import check_range, masked_mean
from torchrl_llm_kl.advantages._registry import advantage

# ------------------------------------------------------------------ returns


@advantage(
    "gae",
    "token",
    outputs=("advantage", "value_target"),
    aliases={"lmbda": "lam"},
    source="Schulman et al. 2015 (arXiv 1506.02438), eq. 16",
)
def gae(
    reward: Tensor, value: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = False
) -> tuple[Tensor, Tensor]:
    r"""``A_t = delta_t + gamma * lam * A_{t+1}`` with ``delta_t = r_t + gamma * V_{t+1} - V_t``, by torchrl's own function.

    The successor of a response token is the next response token, whatever prompt, tool or user tokens lie between. After the
    last one both ``V`` and ``A`` are 0. Trinity: ``ppo``.

    Hyper-parameters:
        gamma: discount per response token.
        lam: weight of later temporal differences: 1 for the whole return, 0 for one step. torchrl: ``lmbda``.
        whiten: normalise the advantages (not the targets) of the whole batch to mean 0 and variance 1, as Trinity-RFT and
            verl always do.

    Returns:
        ``advantage``, and the critic's ``value_target``: the advantage before whitening plus ``value``.

    Example:
        >>> reward, value = torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.25]])
        >>> gae(reward, value, torch.tensor([[True, False, True]]), gamma=0.5, lam=0.5)
        (tensor([[-0.1875,  0.0000,  0.7500]]), tensor([[0.3125, 0.0000, 1.0000]]))
    """
    check_range(0.0, 1.0, gamma=gamma, lam=lam)
    result, target = estimate(reward, value, mask, gamma, lam)
    return whitened(result, mask) if whiten else result, target


@advantage("reinforce_plus_plus", "token", source="Hu et al. 2025 (REINFORCE++, arXiv 2501.03262)")
def reinforce_plus_plus(reward: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    r"""The discounted sum of the rewards from each token on, whitened over the whole batch: no critic, no groups.

    Put the KL into the reward (``KLRewardTransform``): the return of each token then includes all later penalties. Trinity:
    ``reinforceplusplus``.

    Hyper-parameters:
        gamma: discount per response token.

    Returns:
        ``[*B, T]``; mean 0 and variance 1 over the response tokens. All 0 if the returns are equal.

    Example:
        >>> reinforce_plus_plus(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), torch.tensor([[True, True], [True, False]]))
        tensor([[ 0.5774,  0.5774],
                [-1.1547,  0.0000]])
    """
    check_range(0.0, 1.0, gamma=gamma)
    returns, _ = estimate(reward, torch.zeros_like(reward), mask, gamma, 1.0)
    return whitened(returns, mask)


def estimate(reward: Tensor, value: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """GAE and value targets of clean inputs. With ``value = 0`` and ``lam = 1``, the discounted return."""
    # Response tokens first, in order, so that successors are adjacent.
    order = (~mask).byte().argsort(dim=-1, stable=True)
    last = torch.arange(mask.shape[-1], device=mask.device) >= mask.sum(-1, keepdim=True) - 1
    dtype = torch.promote_types(reward.dtype, value.dtype)
    steps, states = (x.to(dtype).gather(-1, order) for x in (reward, value))
    after = torch.cat([states[..., 1:], torch.zeros_like(states[..., :1])], -1)
    columns = (x.unsqueeze(-1) for x in (states, after, steps, last))
    results = generalized_advantage_estimate(gamma, lam, *columns)
    result, target = (torch.empty_like(states).scatter(-1, order, x.squeeze(-1)) for x in results)
    return result, target


_EPSILON = 1e-8  # added to the variance, as in verl and TRL


def whitened(value: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and unbiased variance 1 over the masked-in tokens, 0 elsewhere; exactly 0 if they are equal or fewer than two."""
    if value.numel() == 0:
        return value
    # Subtract the minimum first: equal values then have no rounding error.
    above = value - torch.where(mask, value, torch.inf).amin()
    centred = torch.where(mask, above - masked_mean(above, mask), 0)
    variance = centred.square().sum() / (mask.sum() - 1).clamp(min=1)
    return centred * (variance + _EPSILON).rsqrt()


# ------------------------------------------------------------------ distillation


@advantage(
    "on_policy_distill",
    "token",
    source="Agarwal et al. 2023 (GKD, arXiv 2306.13649), section 3, with the reverse KL; Thinking Machines, "
    "'On-policy distillation' (2025)",
)
def on_policy_distill(old_log_prob: Tensor, teacher_log_prob: Tensor, mask: Tensor, *, kl_coef: float = 1.0) -> Tensor:
    r"""``kl_coef * (teacher_log_prob - old_log_prob)``.

    Its policy gradient is minus that of :math:`KL(\pi \| \pi_{teacher})` at each position with the prefix fixed: it ignores a
    token's effect on the KL of later positions.

    Hyper-parameters:
        kl_coef: factor.

    Returns:
        ``[*B, T]``.

    Example:
        >>> student, teacher = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -0.5]])
        >>> on_policy_distill(student, teacher, torch.tensor([[True, True]]))
        tensor([[-0.5000,  1.5000]])
    """
    return kl_coef * (teacher_log_prob - old_log_prob)


_TEMPERATURE = (
    1.0,
    "log-probs of the sampled tokens alone cannot be brought to another temperature. Pass log-probs that both models "
    "were scored with at that temperature (RetrieveLogProb(..., temperature=...))",
)


@advantage(
    "jsd",
    "token",
    aliases={"lambda_coef": "beta"},
    obsolete={"chunk_size": "there is one number per token, and nothing to split into chunks"},
    refused={"temperature": _TEMPERATURE},
    source="Agarwal et al. 2023 (GKD, arXiv 2306.13649), section 2; the advantage is its exact policy gradient",
)
def jsd(
    old_log_prob: Tensor, teacher_log_prob: Tensor, mask: Tensor, *, beta: float = 0.5, kl_coef: float = 1.0
) -> Tensor:
    r"""``kl_coef * (1 - beta) * (log M - log pi)`` with the mixture ``M = beta * teacher + (1 - beta) * pi``.

    The divergence of a position is ``J = beta * KL(teacher || M) + (1 - beta) * KL(pi || M)``. Its derivative with respect to
    ``pi(y)``, which ``M`` contains too, is

    ``-beta (1 - beta) teacher / M + (1 - beta) (log(pi / M) + 1 - (1 - beta) pi / M) = (1 - beta) log(pi / M)(y)``,

    since ``beta * teacher + (1 - beta) * pi`` is ``M`` again and cancels the 1. Hence ``E_pi[A grad log pi] = -grad J`` for
    this advantage, exactly, with the prefix fixed. It is bounded below by ``(1 - beta) log(1 - beta)``: a token of
    teacher probability 0 has -0.35 for ``beta = 0.5``, where ``on_policy_distill`` has minus infinity.

    Hyper-parameters:
        beta: weight of the teacher in the mixture, greater than 0 and less than 1: at both ends ``J`` is 0 whatever the
            student does. Trinity: ``lambda_coef``.
        kl_coef: factor.

    Returns:
        ``[*B, T]``.

    Example:
        >>> student, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
        >>> jsd(student, teacher, torch.tensor([[True, True]]))
        tensor([[ 0.1682, -0.2554]])
    """
    if not 0 < beta < 1:
        raise ValueError(
            f"beta must be greater than 0 and less than 1, got {beta}: at both ends the divergence is 0 whatever the "
            f"student does. For KL(student || teacher) use on_policy_distill."
        )
    mixture = torch.logaddexp(math.log(beta) + teacher_log_prob, math.log1p(-beta) + old_log_prob)
    return torch.where(mask, kl_coef * (1 - beta) * (mixture - old_log_prob), 0)
