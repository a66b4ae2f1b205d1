"""GPG: the plain policy gradient."""

from __future__ import annotations

from torch import Tensor

from torchrl_llm_kl.losses._objective import objective
from torchrl_llm_kl.losses._term import LossTerm

__all__ = ["gpg"]


@objective("gpg", needs=("advantage",), source="Chu et al. 2025 (arXiv 2504.02546); Williams 1992 (REINFORCE)")
def gpg(log_prob: Tensor, mask: Tensor, *, advantage: Tensor) -> tuple[LossTerm, ...]:
    r"""``-A log_prob`` per token: no ratio, no clipping, nothing to choose.

    The mean gradient is the policy gradient if the current policy sampled the tokens.

    Args:
        log_prob: nats, under the current policy, which sampled the tokens; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        advantage: same shape.

    Returns:
        One term, ``objective``, without metrics.

    Raises:
        ValueError: if shapes differ.

    Example:
        >>> log_prob, advantage = torch.tensor([[-1.0, -2.0]]), torch.tensor([[1.0, -1.0]])
        >>> gpg(log_prob, torch.ones(1, 2, dtype=torch.bool), advantage=advantage)[0].value
        tensor([[ 1., -2.]])

    Source: Chu et al. 2025 (arXiv 2504.02546); Williams 1992 (REINFORCE).
    """
    return (LossTerm("objective", -advantage * log_prob, mask),)
