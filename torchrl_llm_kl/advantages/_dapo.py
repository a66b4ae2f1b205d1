"""What DAPO does to rewards and batches; its advantage is GRPO's."""

from __future__ import annotations

from torch import Tensor

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.advantages._groups import Groups
from torchrl_llm_kl.advantages._inputs import clean_rows

__all__ = ["informative_groups", "overlong_penalty"]


def overlong_penalty(lengths: Tensor, max_len: int, cache_len: int) -> Tensor:
    r"""DAPO's soft penalty of long responses, to be added to the reward.

    0 up to ``max_len - cache_len`` tokens, from there on down by ``1 / cache_len`` with each token to -1 at ``max_len``, and
    no lower beyond.

    Args:
        lengths: tokens of each response; any shape.
        max_len: from how many tokens on the penalty is whole.
        cache_len: over how many tokens it grows. DAPO: 20480 and 4096.

    Returns:
        Float32 of the shape of ``lengths``, between -1 and 0.

    Raises:
        ValueError: unless ``1 <= cache_len <= max_len``.

    Example:
        >>> import torch
        >>> overlong_penalty(torch.tensor([70, 80, 85, 100, 130]), max_len=100, cache_len=20)
        tensor([ 0.0000,  0.0000, -0.2500, -1.0000, -1.0000])

    Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), eq. 13.
    """
    check_range(1, max_len, cache_len=cache_len)
    return ((max_len - cache_len - lengths.float()) / cache_len).clamp(-1, 0)


def informative_groups(reward: Tensor, group: Tensor) -> Tensor:
    """DAPO's dynamic sampling: which rows are in a group whose rewards are not all equal.

    The others have advantage 0: they teach nothing, and only thin the batch out.

    Args:
        reward: the outcome of each sequence; ``[B]``.
        group: which sequences answer the same prompt; integers ``[B]``.

    Returns:
        Bool ``[B]``; index the batch with it. A group of one is never informative.

    Raises:
        ValueError: if the shapes differ.

    Example:
        >>> import torch
        >>> informative_groups(torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]), torch.tensor([4, 4, 2, 2, 9]))
        tensor([False, False,  True,  True, False])

    Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), eq. 11.
    """
    clean = clean_rows({"reward": reward, "group": group})
    groups = Groups(clean["group"])
    return groups.max(clean["reward"]) > groups.min(clean["reward"])
