"""Learning from preferences: losses that ask for a certain lead of the chosen answer of a pair, and no more."""

from __future__ import annotations

from torch import Tensor

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.losses._numerics import Scalar
from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm
from torchrl_llm_kl.losses.objectives._preference import pair_up, preference

__all__ = ["hinge", "ipo"]

_PER_PAIR = "seq-mean-token-sum"


@objective(
    "hinge",
    needs=("ref_log_prob",),
    aggregation=_PER_PAIR,
    source="Zhao et al. 2023 (SLiC-HF, arXiv 2305.10425) relative to a reference: Liu et al. 2023 (RSO, arXiv 2309.06657)",
)
def hinge(
    log_prob: Tensor,
    mask: Tensor,
    *,
    ref_log_prob: Tensor,
    pair_id: Tensor | None = None,
    chosen: Tensor | None = None,
    beta: Scalar = 0.1,
) -> tuple[LossTerm, ...]:
    r"""SLiC's hinge: ``max(0, 1 - beta * delta)`` for each pair, ``delta`` as in :func:`~torchrl_llm_kl.losses.dpo`.

    The gradient is ``-beta`` times that of ``delta`` until the chosen answer leads by ``1 / beta`` nats, then 0.

    Args:
        log_prob: see :func:`~torchrl_llm_kl.losses.dpo`.
        mask: see :func:`~torchrl_llm_kl.losses.dpo`.

    Keyword Args:
        ref_log_prob: see :func:`~torchrl_llm_kl.losses.dpo`.
        pair_id: see :func:`~torchrl_llm_kl.losses.dpo`.
        chosen: see :func:`~torchrl_llm_kl.losses.dpo`.
        beta: one over the margin, per nat.

    Returns:
        As :func:`~torchrl_llm_kl.losses.dpo`.

    Raises:
        ValueError: as :func:`~torchrl_llm_kl.losses.dpo`.

    Example:
        >>> import torch
        >>> log_prob = torch.tensor([[-1.0], [-3.0]])
        >>> ref_log_prob = torch.tensor([[-2.0], [-2.0]])
        >>> hinge(log_prob, torch.ones(2, 1, dtype=torch.bool), ref_log_prob=ref_log_prob, beta=0.2)[0].value
        tensor([[0.6000]])

    Source: Zhao et al. 2023 (SLiC-HF, arXiv 2305.10425); relative to a reference: Liu et al. 2023 (RSO, arXiv 2309.06657).
    """
    check_range(above=0.0, beta=beta)
    pairs = pair_up(log_prob, mask, ref_log_prob, pair_id, chosen)
    return preference((1 - beta * pairs.delta).relu(), pairs, beta)


@objective(
    "ipo",
    needs=("ref_log_prob",),
    aggregation=_PER_PAIR,
    source="Azar et al. 2023 (arXiv 2310.12036), eq. 17",
)
def ipo(
    log_prob: Tensor,
    mask: Tensor,
    *,
    ref_log_prob: Tensor,
    pair_id: Tensor | None = None,
    chosen: Tensor | None = None,
    beta: Scalar = 0.1,
    length_normalised: bool = False,
) -> tuple[LossTerm, ...]:
    r"""IPO: ``(delta - 1 / (2 beta))**2`` for each pair, ``delta`` as in :func:`~torchrl_llm_kl.losses.dpo`.

    The gradient pulls the lead of the chosen answer to ``1 / (2 beta)`` nats, from both sides: it does not grow for ever.

    Args:
        log_prob: see :func:`~torchrl_llm_kl.losses.dpo`.
        mask: see :func:`~torchrl_llm_kl.losses.dpo`.

    Keyword Args:
        ref_log_prob: see :func:`~torchrl_llm_kl.losses.dpo`.
        pair_id: see :func:`~torchrl_llm_kl.losses.dpo`.
        chosen: see :func:`~torchrl_llm_kl.losses.dpo`.
        beta: the paper's tau, per nat.
        length_normalised: average log-ratios over tokens instead of summing them: TRL does, so that long answers do not
            reach the target at once. The paper's formula sums.

    Returns:
        As :func:`~torchrl_llm_kl.losses.dpo`; nats squared.

    Raises:
        ValueError: as :func:`~torchrl_llm_kl.losses.dpo`.

    Example:
        >>> import torch
        >>> log_prob = torch.tensor([[-1.0], [-3.0]])
        >>> ref_log_prob = torch.tensor([[-2.0], [-2.0]])
        >>> ipo(log_prob, torch.ones(2, 1, dtype=torch.bool), ref_log_prob=ref_log_prob, beta=0.1)[0].value
        tensor([[9.]])

    Source: Azar et al. 2023 (arXiv 2310.12036), eq. 17.
    """
    check_range(above=0.0, beta=beta)
    pairs = pair_up(log_prob, mask, ref_log_prob, pair_id, chosen, length_normalised=length_normalised)
    return preference((pairs.delta - 1 / (2 * beta)).square(), pairs, beta)
