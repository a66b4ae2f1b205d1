"""Rewards relative to the group's mean, with and without the standard deviation."""

from __future__ import annotations

from torch import Tensor

from torchrl_llm_kl._numerics import check_choice, check_range
from torchrl_llm_kl.advantages._groups import Groups, normalised
from torchrl_llm_kl.advantages._registry import advantage

__all__ = ["dr_grpo", "grpo"]

_DUPLICATES = (
    False,
    "a function of the batch cannot add rows to it. Keep the rows of informative_groups(reward, group), "
    "and fill the batch with a sampler or with more rollouts",
)


@advantage(
    "grpo",
    "outcome",
    optional={"mean_log_prob": "rank_penalty"},
    aliases={"std_cal_level": "std"},
    refused={"duplicate_experiences": _DUPLICATES},
    source="Shao et al. 2024 (DeepSeekMath, arXiv 2402.03300), section 4.1.2; std='batch': Liu et al. 2025 (arXiv 2508.08221); "
    "rank_penalty: He et al. 2025 (arXiv 2506.02355)",
)
def grpo(
    reward: Tensor,
    group: Tensor,
    *,
    mean_log_prob: Tensor | None = None,
    epsilon: float = 1e-6,
    std: str = "group",
    std_threshold: float | None = None,
    rank_penalty: float | None = None,
) -> Tensor:
    r"""``(r - mu) / (sigma + epsilon)``: mean ``mu`` of the group, standard deviation ``sigma`` of the group or the batch.

    ``sigma`` is the unbiased one (``n - 1``). A group of one, and a group whose rewards are all equal, has exactly 0.

    Args:
        reward: the outcome of each sequence; ``[B]``.
        group: which sequences answer the same prompt; integers ``[B]``.

    Keyword Args:
        mean_log_prob: mean log-prob per token of each sequence under the policy that sampled, nats; ``[B]``. Only with
            ``rank_penalty``.
        epsilon: added to ``sigma``.
        std: ``"group"`` or ``"batch"``. Trinity: ``std_cal_level``.
        std_threshold: groups with a standard deviation of this or less get 0. The rows stay in the batch:
            :func:`~torchrl_llm_kl.advantages.informative_groups` says which to leave out.
        rank_penalty: multiply each reward by ``1 - rank_penalty * k / n`` first, if ``k`` of the ``n`` in the group are less
            likely: rare successes count more. Between 0 and 1; None for no penalty.

    Returns:
        ``[B]``, without graph.

    Raises:
        ValueError: if shapes differ, ``mean_log_prob`` is missing or a hyper-parameter is out of range; for Trinity's
            ``duplicate_experiences=True``.

    Example:
        >>> import torch
        >>> grpo(torch.tensor([0.0, 0.0, 3.0, 5.0]), torch.tensor([0, 0, 0, 1]))
        tensor([-0.5773, -0.5773,  1.1547,  0.0000])

    Source: Shao et al. 2024 (DeepSeekMath, arXiv 2402.03300), section 4.1.2; ``std="batch"``: Liu et al. 2025 (arXiv
    2508.08221); ``rank_penalty``: He et al. 2025 (arXiv 2506.02355), with ranks as in the authors' code.
    """
    check_choice(("group", "batch"), std=std)
    check_range(0.0, epsilon=epsilon, std_threshold=std_threshold)
    check_range(0.0, 1.0, rank_penalty=rank_penalty)
    groups = Groups(group)
    if rank_penalty is not None:
        if mean_log_prob is None:
            raise ValueError("grpo with rank_penalty needs mean_log_prob: pass mean_log_prob=, [B]")
        reward = reward * (1 - rank_penalty * groups.rank(mean_log_prob) / groups.size)
    spread = groups.std(reward)
    scale = Groups.everything(reward).std(reward) if std == "batch" else spread
    result = normalised(groups.centred(reward), scale, epsilon)
    return result if std_threshold is None else result.masked_fill(spread <= std_threshold, 0)


@advantage("dr_grpo", "outcome", source="Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783), section 3.2")
def dr_grpo(reward: Tensor, group: Tensor) -> Tensor:
    r"""``r - mu``: GRPO without ``sigma``, which gives prompts that are nearly always solved, or failed, more weight.

    Args:
        reward: the outcome of each sequence; ``[B]``.
        group: which sequences answer the same prompt; integers ``[B]``.

    Returns:
        ``[B]``, without graph; exactly 0 for a group of one, and for one whose rewards are all equal.

    Raises:
        ValueError: if the shapes differ.

    Example:
        >>> import torch
        >>> dr_grpo(torch.tensor([0.0, 0.0, 3.0, 5.0]), torch.tensor([0, 0, 0, 1]))
        tensor([-1., -1.,  2.,  0.])

    Source: Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783), section 3.2. Its other half is the aggregation
    ``seq-mean-token-sum-norm``.
    """
    return Groups(group).centred(reward)
