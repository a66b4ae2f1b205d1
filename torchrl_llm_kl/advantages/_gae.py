"""Generalised advantage estimation over the tokens of a response."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrl.objectives.value.functional import generalized_advantage_estimate

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.advantages._registry import advantage
from torchrl_llm_kl.advantages._whiten import whitened

__all__ = ["estimate", "gae"]


@advantage(
    "gae",
    "token",
    outputs=("advantage", "value_target"),
    aliases={"lmbda": "lam"},
    source="Schulman et al. 2015 (arXiv 1506.02438), eq. 16",
)
def gae(
    reward: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""``A_t = delta_t + gamma * lam * A_{t+1}`` with ``delta_t = r_t + gamma * V_{t+1} - V_t``, by torchrl's own function.

    Only response tokens are steps: after one comes the next token of the mask, however many prompt, tool or user tokens lie
    between, so that discounts and values do not cross what the policy did not write. Behind the last one both ``V`` and
    ``A`` are 0.

    Args:
        reward: of each token; ``[*B, T]``. An outcome sits on the last response token.
        value: the critic's estimate of the rewards from this token on; same shape.
        mask: response tokens; bool, same shape.

    Keyword Args:
        gamma: discount per response token.
        lam: weight of later temporal differences: 1 for the whole return, 0 for one step. torchrl: ``lmbda``.
        whiten: bring the advantages (not the targets) of all tokens in the batch to mean 0 and variance 1, as Trinity-RFT
            and verl always do.

    Returns:
        ``advantage`` and ``value_target``, what the critic should have said: the advantage before whitening plus ``value``.
        Both ``[*B, T]``, without graph, 0 where the mask is False.

    Raises:
        ValueError: if shapes differ, an input is missing or a hyper-parameter is out of range.
        TypeError: if the mask is not boolean.

    Example:
        >>> reward, value = torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.25]])
        >>> gae(reward, value, torch.tensor([[True, False, True]]), gamma=0.5, lam=0.5)
        (tensor([[-0.1875,  0.0000,  0.7500]]), tensor([[0.3125, 0.0000, 1.0000]]))

    Source: Schulman et al. 2015 (arXiv 1506.02438), eq. 16; Trinity's name is ``ppo``.
    """
    check_range(0.0, 1.0, gamma=gamma, lam=lam)
    result, target = estimate(reward, value, mask, gamma, lam)
    return whitened(result, mask) if whiten else result, target


def estimate(reward: Tensor, value: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """GAE without whitening, on clean inputs. With ``value = 0`` and ``lam = 1``, the discounted return."""
    # Response tokens to the front, in their order: then the successor of each is its neighbour.
    order = (~mask).byte().argsort(dim=-1, stable=True)
    last = torch.arange(mask.shape[-1], device=mask.device) >= mask.sum(-1, keepdim=True) - 1
    dtype = torch.promote_types(reward.dtype, value.dtype)
    steps, states = (x.to(dtype).gather(-1, order) for x in (reward, value))
    after = torch.cat([states[..., 1:], torch.zeros_like(states[..., :1])], -1)
    columns = (x.unsqueeze(-1) for x in (states, after, steps, last))
    results = generalized_advantage_estimate(gamma, lam, *columns)
    result, target = (torch.empty_like(states).scatter(-1, order, x.squeeze(-1)) for x in results)
    return result, target
