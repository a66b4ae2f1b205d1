"""Advantages of outcomes: one number per sequence, usually relative to the other answers to the same prompt.

The functions share their inputs, positional in the order of each signature:

Args:
    reward: outcome of each sequence, ``[B]``.
    group: integers ``[B]``, equal for sequences that answer the same prompt, in any order.
    baseline: outcome of the greedy answer to the same prompt, ``[B]``. The reward must be the same: with the KL penalty in both
        or in neither. Trinity: ``reward_baselines``. For ``rae``: the running mean of the role's rewards before this batch.
    role: integers ``[B]``, equal for sequences of one agent.
    rewards: several kinds of reward for each sequence, ``[B, R]``.
    length: number of response tokens of each sequence, ``[B]``.
    mean_log_prob: mean log-prob per response token under the policy that sampled the sequence, nats, ``[B]``.

Returns:
    ``[B]``, float32 or wider, without graph. NaN in one group does not affect other groups.

Raises:
    ValueError: if an input is not ``[B]`` (``rewards``: ``[B, R]``), shapes differ, or a hyper-parameter is out of
        range.
    TypeError: if an input is missing, ``group`` is not of an integer dtype, or for an unknown hyper-parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import Amount, Fraction, PositiveAmount, check_range, check_same_shape
from torchrl_llm_kl.advantages._registry import advantage, clean_rows

# ------------------------------------------------------------------ the mean of the group as the baseline


@advantage("grpo", "outcome", optional={"mean_log_prob": "rank_penalty"})
def grpo(
    reward: Tensor,
    group: Tensor,
    *,
    mean_log_prob: Tensor | None = None,
    epsilon: Amount = 1e-6,
    std: Literal["group", "batch"] = "group",
    std_threshold: Amount | None = None,
    rank_penalty: Fraction | None = None,
) -> Tensor:
    r"""``(r - mu) / (sigma + epsilon)``: mean ``mu`` of the group, unbiased standard deviation ``sigma`` of group or batch.

    Hyper-parameters:
        mean_log_prob: an input that ``rank_penalty`` requires.
        epsilon: added to ``sigma``.
        std: ``"group"`` or ``"batch"``. Trinity: ``std_cal_level``.
        std_threshold: groups whose standard deviation is at most this get 0. Their rows stay in the batch.
            :func:`~torchrl_llm_kl.advantages.informative_groups` selects the other groups.
        rank_penalty: first multiply each reward by ``1 - rank_penalty * k / n``, where ``k`` of the group's ``n`` sequences are
            less likely. This raises the weight of rare successes. Between 0 and 1, or None for no penalty.

    Returns:
        ``[B]``. Exactly 0 for a group of one, and for a group of equal rewards.

    Example:
        >>> grpo(torch.tensor([0.0, 0.0, 3.0, 5.0]), torch.tensor([0, 0, 0, 1]))
        tensor([-0.5773, -0.5773,  1.1547,  0.0000])

    Source: Shao et al. 2024 (DeepSeekMath, arXiv 2402.03300), section 4.1.2; ``std='batch'``: Liu et al. 2025 (arXiv
    2508.08221); ``rank_penalty``: He et al. 2025 (arXiv 2506.02355), with ranks as in the authors' code.
    """
    groups = Groups(group)
    if rank_penalty is not None:
        if mean_log_prob is None:
            raise ValueError("grpo with rank_penalty needs mean_log_prob: pass mean_log_prob=, [B].")
        reward = reward * (1 - rank_penalty * groups.rank(mean_log_prob) / groups.size)
    spread = groups.std(reward)
    scale = Groups(torch.zeros_like(group)).std(reward) if std == "batch" else spread
    result = normalised(groups.centred(reward), scale, epsilon)
    return result if std_threshold is None else result.masked_fill(spread <= std_threshold, 0)


@advantage("dr_grpo", "outcome")
def dr_grpo(reward: Tensor, group: Tensor) -> Tensor:
    r"""``r - mu``: GRPO without ``sigma``, which would overweight prompts that nearly always succeed or nearly always fail.

    The paper combines it with the aggregation ``seq-mean-token-sum-norm``.

    Returns:
        ``[B]``. Exactly 0 for a group of one, and for a group of equal rewards.

    Example:
        >>> dr_grpo(torch.tensor([0.0, 0.0, 3.0, 5.0]), torch.tensor([0, 0, 0, 1]))
        tensor([-1., -1.,  2.,  0.])

    Source: Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783), section 3.2.
    """
    return Groups(group).centred(reward)


@advantage("rloo", "outcome")
def rloo(reward: Tensor, group: Tensor) -> Tensor:
    r"""``r`` minus the mean reward of the *other* sequences of the group, which equals ``n / (n - 1) * (r - mu)``.

    The baseline does not depend on the sequence itself, so the policy gradient stays unbiased.

    Returns:
        ``[B]``. Exactly 0 for a group of one, and for a group of equal rewards.

    Example:
        >>> rloo(torch.tensor([0.0, 0.0, 3.0, 5.0]), torch.tensor([0, 0, 0, 1]))
        tensor([-1.5000, -1.5000,  3.0000,  0.0000])

    Source: Ahmadian et al. 2024 (arXiv 2402.14740); Kool et al. 2019 ('Buy 4 REINFORCE samples').
    """
    groups = Groups(group)
    return groups.centred(reward) * groups.size / (groups.size - 1).clamp(min=1)


@advantage("hierarchical_grpo", "outcome")
def hierarchical_grpo(reward: Tensor, group: Tensor, role: Tensor) -> Tensor:
    r"""``r - mu`` with the mean over the group's sequences of the same role, so that agents are compared only within roles.

    If solvers answer a proposer's problems, ``group`` is the problem for solvers and the task for proposers. To use another
    advantage within roles, write an entry that identifies both group and role, and pass it as ``group_key=``.

    Returns:
        ``[B]``. Exactly 0 for the only sequence of a group and role.

    Example:
        >>> reward, group = torch.tensor([1.0, 0.0, 5.0, 7.0]), torch.tensor([0, 0, 0, 0])
        >>> hierarchical_grpo(reward, group, torch.tensor([0, 0, 1, 1]))
        tensor([ 0.5000, -0.5000, -1.0000,  1.0000])

    Source: prime-rl: ``hierarchical_grpo``, for envs of a proposer and solvers.
    """
    return Groups(joined(group, role)).centred(reward)


@advantage("maxrl", "outcome")
def maxrl(reward: Tensor, group: Tensor) -> Tensor:
    r"""``(r - mu) / mu``: GRPO divided by the mean of the group in place of its deviation. prime-rl: ``max_rl``.

    For rewards of 0 and 1 the mean is the share of right answers, so rare successes weigh most. For groups of ``n`` it is an
    unbiased policy gradient of ``sum_k (-1 / k) (1 - p)^k`` up to ``k = n - 1``. This sum tends to the logarithm of the
    probability ``p`` of a right answer. Rewards must not be negative.

    Returns:
        ``[B]``. Exactly 0 where the mean is not positive, for a group of one, and for a group of equal rewards.

    Example:
        >>> maxrl(torch.tensor([0.0, 0.0, 3.0, 0.0]), torch.tensor([0, 0, 0, 1]))
        tensor([-1., -1.,  2.,  0.])

    Source: Tajwar et al. 2026 (MaxRL, arXiv 2602.02710), the estimator with the mean as the
    baseline; groups whose mean is not positive: prime-rl.
    """
    groups = Groups(group)
    mean = groups.mean(reward)
    return torch.where(mean <= 0, 0, groups.centred(reward) / mean)


@advantage("opo", "outcome")
def opo(reward: Tensor, group: Tensor, length: Tensor) -> Tensor:
    r"""``r - b`` with the mean reward ``b = sum(length * r) / sum(length)`` of the group's *tokens*.

    The baseline of least variance weighs each reward by :math:`\|\nabla \log \pi\|^2` of its response. ``length`` replaces
    this norm, which is exact if the gradients of tokens are orthogonal and of one size.

    Returns:
        ``[B]``. Exactly 0 for a group of one, and for a group of equal rewards. Sequences without tokens have no weight.

    Example:
        >>> opo(torch.tensor([0.0, 0.0, 4.0, 5.0]), torch.tensor([0, 0, 0, 1]), torch.tensor([10, 20, 10, 30]))
        tensor([-1., -1.,  3.,  0.])

    Source: Hao et al. 2025 (OPO, arXiv 2505.23585): the optimal reward baseline, with the length of a response for the
    squared norm of its gradient.
    """
    groups = Groups(group)
    above = reward - groups.min(reward)  # as in Groups.centred
    return above - groups.sum(length * above) / groups.sum(length).clamp(min=1)


@advantage("opmd", "outcome", only_with={"tau": ("opmd_baseline", ("logavgexp",))})
def opmd(
    reward: Tensor, group: Tensor, *, opmd_baseline: Literal["mean", "logavgexp"] = "mean", tau: PositiveAmount = 1.0
) -> Tensor:
    r"""``r - mu``, or ``r - tau * log(mean(exp(r / tau)))``.

    The second baseline is the group's estimate of the prompt's value under a KL penalty of weight ``tau``. It lies between
    the mean (large ``tau``) and the greatest reward (small ``tau``).

    Hyper-parameters:
        opmd_baseline: ``"mean"`` or ``"logavgexp"``.
        tau: weight of the KL penalty, in units of reward. Only for ``"logavgexp"``, otherwise an error.

    Returns:
        ``[B]``. Exactly 0 for a group of one, and for a group of equal rewards.

    Example:
        >>> reward, group = torch.tensor([0.0, 0.0, 3.0, 5.0]), torch.tensor([0, 0, 0, 1])
        >>> opmd(reward, group)
        tensor([-1., -1.,  2.,  0.])
        >>> opmd(reward, group, opmd_baseline="logavgexp", tau=0.5)
        tensor([-2.4532, -2.4532,  0.5468,  0.0000])

    Source: Pan et al. 2025 (Trinity-RFT, arXiv 2505.17826).
    """
    groups = Groups(group)
    if opmd_baseline == "mean":
        return groups.centred(reward)
    highest = groups.max(reward)
    return reward - highest - _above(groups, reward - highest, tau)


def _above(groups: Groups, below: Tensor, beta: float) -> Tensor:
    """``beta log(mean(exp(r / beta)))`` for differences to the greatest reward, so that no exponential overflows."""
    return beta * groups.mean((below / beta).exp()).log()


@advantage("asymre", "outcome")
def asymre(reward: Tensor, group: Tensor, *, baseline_shift: float = -0.1) -> Tensor:
    r"""``r - (mu + baseline_shift)``: off-policy REINFORCE that weights successes more than failures.

    On samples of an older policy, a baseline above the mean makes the policy collapse. A baseline slightly below is stable.

    Hyper-parameters:
        baseline_shift: in units of reward. Negative for a baseline below the mean.

    Returns:
        ``[B]``. ``-baseline_shift`` in a group of equal rewards, 0 for a group of one.

    Example:
        >>> asymre(torch.tensor([0.0, 0.0, 3.0, 5.0]), torch.tensor([0, 0, 0, 1]))
        tensor([-0.9000, -0.9000,  2.1000,  0.0000])

    Source: Arnal et al. 2025 (AsymRE, arXiv 2506.20520).
    """
    groups = Groups(group)
    return torch.where(groups.size > 1, groups.centred(reward) - baseline_shift, 0)


@advantage(
    "rec",
    "outcome",
    only_with={"epsilon": ("std_normalize", (True,)), "generator": ("drop", ("balance",))},
)
def rec(
    reward: Tensor,
    group: Tensor,
    *,
    epsilon: Amount = 1e-6,
    std_normalize: bool = False,
    drop: Literal["balance"] | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""``r - mu``, optionally over ``sigma + epsilon``, optionally after some failures are dropped at random.

    Hyper-parameters:
        epsilon: added to ``sigma``.
        std_normalize: divide by the group's biased standard deviation (over ``n``) of the rewards that are not dropped.
        drop: ``"balance"`` drops rows below the mean at random, in groups where these are the majority, until they are half of
            the group. Dropped rows get 0. Mean and ``sigma`` are computed without them. None keeps all rows.
        generator: random generator of the choice. Torch's own by default.

    Returns:
        ``[B]``. Exactly 0 for dropped rows, for a group of one, and for a group of equal rewards.

    Example:
        >>> reward, group = torch.tensor([0.0, 0.0, 3.0, 5.0]), torch.tensor([0, 0, 0, 1])
        >>> rec(reward, group)
        tensor([-1., -1.,  2.,  0.])
        >>> rec(reward, group, drop="balance").sort().values
        tensor([-1.5000,  0.0000,  0.0000,  1.5000])

    Source: Yao et al. 2025 ('Group-relative REINFORCE is secretly an off-policy algorithm', arXiv 2509.24203); dropping
    is its RED-Drop.
    """
    groups = Groups(group)
    dropped = torch.zeros_like(reward, dtype=torch.bool)
    if drop == "balance":
        dropped = _surplus(groups, groups.centred(reward) < 0, generator)
        groups = Groups(2 * groups.ids + dropped)  # kept and dropped rows become separate groups
    result = groups.centred(reward)
    if std_normalize:
        result = normalised(result, groups.std(reward, unbiased=False), epsilon)
    return torch.where(dropped, 0, result)


def _surplus(groups: Groups, negative: Tensor, generator: torch.Generator | None) -> Tensor:
    """Rows to drop so that no group has more negative rows than others."""
    rows = len(negative)
    device = negative.device if generator is None else generator.device
    order = torch.randperm(rows, generator=generator, device=device).to(negative.device)
    surplus = 2 * groups.sum(negative.long()) - groups.size
    # Negative rows rank before all others of the group, in random order.
    among_negative = groups.rank(torch.where(negative, order, order + rows))
    return negative & (among_negative < surplus)


# ------------------------------------------------------------------ the best of a group, several rewards


@advantage("pass_at_k", "outcome", only_with={"epsilon": ("std_normalize", (True,))})
def pass_at_k(reward: Tensor, group: Tensor, *, std_normalize: bool = False, epsilon: Amount = 1e-6) -> Tensor:
    r"""The amount by which a sequence raises the best reward of its group: ``max(r) - max(r of the others)``.

    It gives an unbiased policy gradient of the expected *best* of ``k`` answers, with ``k`` the size of the group. Only a
    single best answer has an advantage. A prompt that is solved twice therefore gives no gradient. verl: ``grpo_passk``.

    Hyper-parameters:
        std_normalize: divide by the standard deviation of the group's rewards plus ``epsilon``. The gradient is then biased.
            verl: ``norm_adv_by_std_in_grpo``.
        epsilon: only with ``std_normalize``.

    Returns:
        ``[B]``. Exactly 0 for all but a single best answer, and for a group of one.

    Example:
        >>> pass_at_k(torch.tensor([0.0, 1.0, 3.0, 5.0]), torch.tensor([0, 0, 0, 1]))
        tensor([0., 0., 2., 0.])

    Source: Tang et al. 2025 (arXiv 2503.19595): pass@k with the leave-one-out baseline; ``std_normalize``: the default
    of verl 0.9.1.
    """
    groups = Groups(group)
    best = groups.max(reward)
    is_best = reward == best
    others = groups.max(reward.masked_fill(is_best, -torch.inf))
    single = is_best & (groups.sum(is_best.long()) == 1) & (groups.size > 1)
    gain = best - torch.where(single, others, best)  # `others` is -inf in a group of one
    return normalised(gain, groups.std(reward), epsilon) if std_normalize else gain


@advantage("gdpo", "outcome")
def gdpo(
    rewards: Tensor, group: Tensor, *, reward_weights: Sequence[float] | None = None, epsilon: Amount = 1e-6
) -> Tensor:
    r"""GRPO's advantage of each kind of reward, added up and divided by the standard deviation of the batch.

    ``A = sum_k w_k (r_k - mu_k) / (sigma_k + epsilon)`` with mean and unbiased deviation of the group, then
    ``A / (std(A) + epsilon)`` over all sequences. The mean of ``A`` is 0 already. If instead the sum of the rewards were
    normalised once, different rewards could give the same advantage, and a reward of small scale would have no influence.

    Hyper-parameters:
        reward_weights: one weight for each of the ``R`` normalised rewards. 1 by default. verl: ``gdpo_reward_weights``.
        epsilon: added to the deviations.

    Returns:
        ``[B]``. Exactly 0 for a group of one, and for a group of equal rewards.

    Raises:
        ValueError: also if the number of weights is not ``R``.

    Example:
        >>> rewards = torch.tensor([[1.0, 10.0], [0.0, 20.0], [1.0, 20.0], [0.0, 10.0], [9.0, 9.0]])
        >>> gdpo(rewards, torch.tensor([0, 0, 0, 0, 1]), reward_weights=[1.0, 0.5])
        tensor([ 0.4472, -0.4472,  1.3416, -1.3416,  0.0000])

    Source: Liu et al. 2026 (GDPO, arXiv 2601.05242), eqs. 4-7.
    """
    weights = [1.0] * rewards.shape[1] if reward_weights is None else list(reward_weights)
    columns = (normalised(g.centred(r), g.std(r), epsilon) for g in [Groups(group)] for r in rewards.unbind(1))
    total = torch.stack([weight * column for weight, column in zip(weights, columns, strict=True)]).sum(0)
    return normalised(total, Groups(torch.zeros_like(group)).std(total), epsilon)


# ------------------------------------------------------------------ other baselines, or none


@advantage("reinforce", "outcome")
def reinforce(reward: Tensor) -> Tensor:
    """The reward itself. Without a baseline the gradient is unbiased but has a high variance.

    Returns:
        ``[B]``, a copy.

    Example:
        >>> reinforce(torch.tensor([1.0, -2.0]))
        tensor([ 1., -2.])

    Source: Williams 1992 ('Simple statistical gradient-following algorithms'), section 5.
    """
    return reward.clone()


@advantage("remax", "outcome")
def remax(reward: Tensor, baseline: Tensor) -> Tensor:
    """``r`` minus the reward of the greedy answer. The baseline costs one more rollout per prompt.

    Returns:
        ``[B]``.

    Example:
        >>> remax(torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.5]))
        tensor([ 0.5000, -2.5000])

    Source: Li et al. 2023 (ReMax, arXiv 2310.10505), algorithm 1.
    """
    return reward - baseline


@advantage("rae", "outcome", kept="baseline")
def rae(reward: Tensor, role: Tensor, baseline: Tensor, *, decay: Fraction = 0.95) -> tuple[Tensor, Tensor]:
    r"""``r - b`` with the exponential moving average ``b`` of the role's earlier rewards, for self-play between agents.

    The mean of a group is no baseline here, since it is always 0 in a zero-sum game. Rows are processed in order: each is
    compared with ``b``, and then ``b`` becomes ``decay * b + (1 - decay) * r``. The averages start at 0.
    :class:`~torchrl_llm_kl.advantages.Advantage` keeps them between batches and in its ``state_dict``.

    Hyper-parameters:
        decay: weight of the earlier average, 0 to 1.

    Returns:
        The advantage, and for each row the role's average after this batch, ``[B]`` each.

    Example:
        >>> reward, role = torch.tensor([1.0, -1.0, 3.0]), torch.tensor([0, 1, 0])
        >>> rae(reward, role, torch.zeros(3), decay=0.5)
        (tensor([ 1.0000, -1.0000,  2.5000]), tensor([ 1.7500, -0.5000,  1.7500]))

    Source: Liu et al. 2025 (SPIRAL, arXiv 2506.24119), role-conditioned advantage estimation; one reward after the
    other: prime-rl.
    """
    groups = Groups(role)
    # Solve the recursion b -> decay * b + (1 - decay) * r for all rows of a role at once.
    place = groups.rank(torch.arange(len(role), device=role.device))
    gap = (place[:, None] - place).to(reward.dtype)
    earlier = (groups.ids[:, None] == groups.ids) & (gap > 0)
    weight = (1 - decay) * decay ** (gap - 1).clamp(min=0)
    before = decay ** place.to(reward.dtype) * baseline + torch.where(earlier, weight * reward, 0).sum(1)
    after = decay * before + (1 - decay) * reward
    return reward - before, groups.sum(torch.where(place == groups.size - 1, after, 0))


# ------------------------------------------------------------------ selection of answers, and changes of rewards


@advantage("best_of_group", "outcome")
def best_of_group(reward: Tensor, group: Tensor) -> Tensor:
    """Rejection sampling: 1 for the best answers of each group, 0 for all others.

    Written to ``loss_mask``, it removes all other answers from a loss. As an advantage of the plain policy gradient, it gives
    the same direction, but the sum is divided by the tokens of all answers.

    Returns:
        ``[B]`` of 0 and 1. All tied best answers are 1, and a group of one is 1.

    Example:
        >>> best_of_group(torch.tensor([1.0, 2.0, 2.0, -1.0]), torch.tensor([5, 5, 5, 8]))
        tensor([0., 1., 1., 1.])

    Source: Dong et al. 2023 (RAFT, arXiv 2304.06767), algorithm 1.
    """
    return (reward == Groups(group).max(reward)).to(reward.dtype)


def informative_groups(reward: Tensor, group: Tensor) -> Tensor:
    """DAPO's dynamic sampling: True for rows whose group has unequal rewards.

    The advantages of other groups are 0. They add no gradient, but dilute the mean of the batch.

    Args:
        reward: outcome of each sequence, ``[B]``.
        group: integers ``[B]``, equal for sequences that answer the same prompt.

    Returns:
        Bool ``[B]``, to index the batch with. A group of one is never informative.

    Example:
        >>> informative_groups(torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]), torch.tensor([4, 4, 2, 2, 9]))
        tensor([False, False,  True,  True, False])

    Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), eq. 11.
    """
    clean = clean_rows({"reward": reward, "group": group})
    groups = Groups(clean["group"])
    return groups.max(clean["reward"]) > groups.min(clean["reward"])


def overlong_penalty(lengths: Tensor, max_len: int, cache_len: int) -> Tensor:
    r"""DAPO's soft penalty of long responses, to add to the reward.

    0 up to ``max_len - cache_len`` tokens. Each further token costs ``1 / cache_len``, down to -1 at ``max_len`` and beyond.

    Args:
        lengths: tokens of each response, in any shape.
        max_len: length at which the penalty reaches -1.
        cache_len: number of tokens over which it grows. DAPO: 20480 and 4096.

    Returns:
        Float32 in the shape of ``lengths``, between -1 and 0.

    Raises:
        ValueError: unless ``1 <= cache_len <= max_len``.

    Example:
        >>> overlong_penalty(torch.tensor([70, 80, 85, 100, 130]), max_len=100, cache_len=20)
        tensor([ 0.0000,  0.0000, -0.2500, -1.0000, -1.0000])

    Source: Yu et al. 2025 (DAPO, arXiv 2503.14476), eq. 13.
    """
    check_range(1, max_len, cache_len=cache_len)
    return ((max_len - cache_len - lengths.float()) / cache_len).clamp(-1, 0)


def length_penalty(
    reward: Tensor, group: Tensor, counts: Tensor, *, weights: Sequence[float] = (0.25, 0.1, 0.1)
) -> Tensor:
    r"""``-mu sum_k w_k n_k / max(n_k)``: a penalty of long answers, to add to the reward.

    ``mu`` is the mean reward of the group, and the maxima are taken over the group. Prompts that are rarely solved get hardly
    any penalty. Rewards must not be negative, since a negative mean would reward length.

    Args:
        reward: outcome of each sequence, ``[B]``.
        group: integers ``[B]``, equal for sequences that answer the same prompt.
        counts: non-negative costs, ``[B, K]``. By default response tokens, tokens that were read, and turns.

    Keyword Args:
        weights: one weight for each of the ``K`` counts.

    Returns:
        ``[B]``, float32 or wider.

    Raises:
        ValueError: for unequal shapes, or if the number of weights is not ``K``.

    Example:
        >>> reward, counts = torch.tensor([1.0, 1.0]), torch.tensor([[50, 10, 1], [100, 10, 2]])
        >>> length_penalty(reward, torch.tensor([0, 0]), counts)
        tensor([-0.2750, -0.4500])

    Source: prime-rl, the linear ``length_penalty`` of ``grpo``.
    """
    # Counts have the shape of several rewards.
    clean = clean_rows({"reward": reward, "group": group, "rewards": counts})
    groups = Groups(clean["group"])
    shares = [w * n / groups.max(n).clamp(min=1) for w, n in zip(weights, clean["rewards"].unbind(1), strict=True)]
    return -groups.mean(clean["reward"]) * torch.stack(shares).sum(0)


def truncation_penalty(reward: Tensor, truncated: Tensor, *, factor: float) -> Tensor:
    """``(factor - 1) r`` for truncated answers, to add to the reward, which is thereby multiplied by ``factor``.

    Args:
        reward: outcome of each sequence, of any shape.
        truncated: True for answers without an end token, bool of the same shape.

    Keyword Args:
        factor: 0 to 1.

    Example:
        >>> truncation_penalty(torch.tensor([2.0, 2.0]), torch.tensor([True, False]), factor=0.25)
        tensor([-1.5000,  0.0000])

    Source: NeMo-RL, ``reward_shaping.stop_properly_penalty_coef``.
    """
    check_range(0.0, 1.0, factor=factor)
    check_same_shape(reward=reward, truncated=truncated)
    return torch.where(truncated, (factor - 1) * reward, 0)


def soft_value(reward: Tensor, group: Tensor, *, beta: float = 0.5) -> Tensor:
    r"""``beta log(mean(exp(r / beta)))`` over the group: a prompt's value under the best policy with a KL of weight ``beta``.

    For answers of the reference it estimates :math:`V^* = \beta \log E_{ref} \exp(r / \beta)`. The algorithm ``a2po`` reads it
    from ``"reward_baseline"``, and :func:`remax` subtracts it.

    Args:
        reward: outcome of each sequence, ``[B]``.
        group: integers ``[B]``, equal for sequences that answer the same prompt.

    Keyword Args:
        beta: weight of the KL in units of reward, greater than 0.

    Returns:
        ``[B]``, equal within a group, float32 or wider.

    Example:
        >>> soft_value(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0, 0, 1]))
        tensor([0.7169, 0.7169, 2.0000])

    Source: Brantley et al. 2025 (A*-PO, arXiv 2505.20686), the estimate of V* in the first stage.
    """
    check_range(above=0.0, beta=beta)
    clean = clean_rows({"reward": reward, "group": group})
    groups = Groups(clean["group"])
    highest = groups.max(clean["reward"])
    return highest + _above(groups, clean["reward"] - highest, beta)


# ------------------------------------------------------------------ statistics of groups


class Groups:
    """Statistics of all groups at once, repeated on each row of the group, ``[B]``. ``group`` is int64 ``[B]``, in any order.

    ``sum`` and ``min`` also take ``[B, T]``, column by column.

    Example:
        >>> groups = Groups(torch.tensor([7, 3, 7]))
        >>> groups.size.tolist(), groups.mean(torch.tensor([1.0, 5.0, 2.0])).tolist()
        ([2, 1, 2], [1.5, 5.0, 1.5])
    """

    def __init__(self, group: Tensor) -> None:
        _, self.ids, self.sizes = torch.unique(group, return_inverse=True, return_counts=True)
        self.size = self.sizes[self.ids]

    def sum(self, x: Tensor) -> Tensor:
        return x.new_zeros(*self.sizes.shape, *x.shape[1:]).index_add(0, self.ids, x)[self.ids]

    def mean(self, x: Tensor) -> Tensor:
        return self.sum(x) / self.size

    def min(self, x: Tensor) -> Tensor:
        index = self.ids if x.ndim == 1 else self.ids.unsqueeze(1).expand_as(x)
        least = x.new_zeros(*self.sizes.shape, *x.shape[1:]).scatter_reduce(0, index, x, "amin", include_self=False)
        return least[self.ids]

    def max(self, x: Tensor) -> Tensor:
        return -self.min(-x)

    def centred(self, x: Tensor) -> Tensor:
        """The difference from the group's mean. Exactly 0 in a group of one or of equal numbers."""
        # After subtracting the minimum, equal values and their mean are exactly 0.
        above = x - self.min(x)
        return above - self.mean(above)

    def std(self, x: Tensor, *, unbiased: bool = True) -> Tensor:
        """The standard deviation of the row's group. 0 for a group of one."""
        count = self.size - 1 if unbiased else self.size
        return (self.sum(self.centred(x).square()) / count.clamp(min=1)).sqrt()

    def rank(self, x: Tensor) -> Tensor:
        """The number of smaller rows in the group, int64."""
        # Sort by value, then stably by group, so that rows of a group are adjacent and sorted.
        order = x.argsort(stable=True)
        order = order[self.ids[order].argsort(stable=True)]
        ids, values = self.ids[order], x[order]
        place = torch.arange(len(x), device=x.device)
        first = torch.ones_like(ids, dtype=torch.bool)
        first[1:] = (ids[1:] != ids[:-1]) | (values[1:] != values[:-1])
        # Equal values get the place of the first of them.
        start = self.sizes.cumsum(0) - self.sizes
        smaller = torch.where(first, place, 0).cummax(0).values - start[ids] if len(x) else place
        return torch.empty_like(order).index_put((order,), smaller)


def joined(a: Tensor, b: Tensor) -> Tensor:
    """A unique number for each distinct pair of numbers, int64 ``[B]``."""
    return torch.unique(torch.stack([a, b], 1), dim=0, return_inverse=True)[1]


def normalised(centred: Tensor, std: Tensor, epsilon: float) -> Tensor:
    """``centred / (std + epsilon)``, and 0 where the spread is 0, also for ``epsilon = 0``."""
    return centred / torch.where(std == 0, 1, std + epsilon)
