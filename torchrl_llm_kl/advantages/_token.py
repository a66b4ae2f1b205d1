"""Advantages of tokens: one number per response token.

The functions share their inputs, positional in the order of each signature:

Args:
    reward: reward of each token, ``[*B, T]``. An outcome is on the last response token. For ``reinforce_plus_plus_baseline``,
        ``clip_b`` and ``clip_v`` the outcome of each sequence, ``[*B]``.
    value: the critic's estimate of the sum of rewards from this token on, ``[*B, T]``.
    old_log_prob: nats, under the policy that sampled the tokens, ``[*B, T]``. In a distillation this is the student.
    group: integers ``[*B]``, equal for answers to the same prompt.
    teacher_log_prob: nats, of the same tokens under the teacher, ``[*B, T]``. Trinity: ``teacher_logprobs``.
    base_log_prob: nats, of the same tokens under the model that the teacher was trained from, ``[*B, T]``.
    entropy: nats, of the distribution that each token was drawn from, ``[*B, T]``. verl, Trinity: ``entropys``.
    collision: ``sum p ** 2`` of that distribution, ``[*B, T]``. verl: ``sum_pi_squared``.
    discriminator: ``sum p ** 2 (H + log p)`` of that distribution, ``[*B, T]``. Trinity: ``necs``.
    mask: True at response tokens, bool ``[*B, T]``. Values at other tokens (even NaN) have no effect, and discounting skips
        them.

Returns:
    ``[*B, T]``, float32 or wider, without graph, exactly 0 where the mask is False.

Raises:
    ValueError: if shapes differ, or a hyper-parameter is out of range.
    TypeError: if an input is missing, the mask is not boolean, ``group`` is not of an integer dtype, or for an unknown
        hyper-parameter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchrl.objectives.value.functional import generalized_advantage_estimate

from torchrl_llm_kl._numerics import Amount, Fraction, InnerShare, NonNegative, PositiveAmount, masked_mean
from torchrl_llm_kl.advantages._group import Groups, grpo
from torchrl_llm_kl.advantages._registry import advantage

# ------------------------------------------------------------------ returns


@advantage("gae", "token", outputs=("advantage", "value_target"))
def gae(
    reward: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    gamma: Fraction = 1.0,
    lam: Fraction = 1.0,
    lam_target: Fraction | None = None,
    lam_alpha: PositiveAmount | None = None,
    whiten: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""``A_t = delta_t + gamma * lam * A_{t+1}`` with ``delta_t = r_t + gamma * V_{t+1} - V_t``, computed by torchrl.

    The successor of a response token is the next response token, even if prompt, tool or user tokens lie between them. After
    the last response token ``V`` and ``A`` are 0. Trinity: ``ppo``.

    Hyper-parameters:
        gamma: discount per response token.
        lam: weight of later temporal differences. 1 gives the whole return, 0 one step. torchrl: ``lmbda``.
        lam_target: the ``lam`` of the critic's targets (decoupled GAE). None: ``lam``. VC-PPO has 1 here and 0.95 in ``lam``.
        lam_alpha: the advantages have ``1 - 1 / (lam_alpha n)`` in place of ``lam`` for a sequence of ``n`` response tokens,
            and at least 0. Long sequences thus have less bias. None for the same ``lam`` everywhere. VAPO: 0.05.
        whiten: normalise the advantages of the whole batch, but not the targets, to mean 0 and variance 1. Trinity-RFT and
            verl always do so.

    Returns:
        ``advantage``, and the critic's ``value_target``: the advantage with the target's ``lam``, before whitening, plus
        ``value``.

    Example:
        >>> reward, value = torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.25]])
        >>> gae(reward, value, torch.tensor([[True, False, True]]), gamma=0.5, lam=0.5)
        (tensor([[-0.1875,  0.0000,  0.7500]]), tensor([[0.3125, 0.0000, 1.0000]]))

    Source: Schulman et al. 2015 (arXiv 1506.02438), eq. 16. lam_target: Yuan et al. 2025 (VC-PPO, arXiv 2503.01491).
    lam_alpha: Yue et al. 2025 (VAPO, arXiv 2504.05118).
    """
    result, target = estimate(reward, value, mask, gamma, lam)
    if lam_target is not None:
        _, target = estimate(reward, value, mask, gamma, lam_target)
    if lam_alpha is not None:
        adaptive = (1 - 1 / (lam_alpha * mask.sum(-1).clamp(min=1))).clamp(min=0)
        result, _ = estimate(reward, value, mask, gamma, adaptive.to(result.dtype)[..., None, None])
    return whitened(result, mask) if whiten else result, target


@advantage("reinforce_plus_plus", "token")
def reinforce_plus_plus(reward: Tensor, mask: Tensor, *, gamma: Fraction = 1.0) -> Tensor:
    r"""The discounted sum of the rewards from each token on, whitened over the whole batch. Needs no critic and no groups.

    Put the KL into the reward (``KLRewardTransform``), so that the return of each token includes all later penalties. Trinity:
    ``reinforceplusplus``.

    Hyper-parameters:
        gamma: discount per response token.

    Returns:
        ``[*B, T]``, with mean 0 and variance 1 over the response tokens. All 0 if the returns are equal.

    Example:
        >>> reinforce_plus_plus(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), torch.tensor([[True, True], [True, False]]))
        tensor([[ 0.5774,  0.5774],
                [-1.1547,  0.0000]])

    Source: Hu et al. 2025 (REINFORCE++, arXiv 2501.03262).
    """
    returns, _ = estimate(reward, torch.zeros_like(reward), mask, gamma, 1.0)
    return whitened(returns, mask)


@advantage("reinforce_plus_plus_baseline", "token", per_sequence=("reward", "group"))
def reinforce_plus_plus_baseline(reward: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    r"""``r - mu`` with the mean ``mu`` of the group, on each token, then whitened over all tokens of the batch.

    The deviation is taken over the batch. Unlike GRPO's, it does not overweight groups of nearly equal rewards.

    Returns:
        ``[*B, T]``, with mean 0 and variance 1 over the response tokens of groups of several. Exactly 0 for a group of one.

    Example:
        >>> mask = torch.tensor([[True, True], [True, False], [True, True]])
        >>> reinforce_plus_plus_baseline(torch.tensor([0.0, 3.0, 7.0]), torch.tensor([0, 0, 1]), mask)
        tensor([[-0.5774, -0.5774],
                [ 1.1547,  0.0000],
                [ 0.0000,  0.0000]])

    Source: Hu et al. 2025 (REINFORCE++, arXiv 2501.03262): REINFORCE++-baseline.
    """
    groups = Groups(group.flatten())
    several = mask & (groups.size > 1).reshape(group.shape).unsqueeze(-1)
    centred = groups.centred(reward.flatten()).reshape(group.shape).unsqueeze(-1)
    return whitened(torch.where(several, centred, 0), several)


@advantage("optimal_token_baseline", "token", per_sequence=("group",))
def optimal_token_baseline(
    reward: Tensor,
    group: Tensor,
    old_log_prob: Tensor,
    collision: Tensor,
    mask: Tensor,
    *,
    handle_zero_tail: bool = True,
) -> Tensor:
    r"""``G_t - B_t``: the sum of rewards from each token on, minus the baseline of least variance at its position.

    ``B_t = sum_i W_it G_it / sum_i W_it`` over the answers of the group that have a ``t``-th response token. ``W_t`` adds up
    ``1 - 2 p + sum p ** 2`` over the response tokens until ``t``. That is the squared norm of the gradient of each token's
    log-prob with respect to the logits, so answers with a large gradient so far weigh more.

    Hyper-parameters:
        handle_zero_tail: the result at positions that only the longest answer of a group has. True gives ``G_t``. False gives
            0, since there is nothing to compare with.

    Returns:
        ``[*B, T]``. Exactly 0 for a group of one, and where all returns are equal.

    Example:
        >>> reward, log_prob = torch.tensor([[0.0, 1.0], [3.0, 0.0]]), torch.tensor([[0.5, 0.5], [0.2, 0.5]]).log()
        >>> mask, collision = torch.tensor([[True, True], [True, False]]), torch.full((2, 2), 0.5)
        >>> optimal_token_baseline(reward, torch.tensor([0, 0]), log_prob, collision, mask)
        tensor([[-1.3750,  1.0000],
                [ 0.6250,  0.0000]])

    Source: Li et al. 2026, 'The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL' (ICML), with its
    logit-gradient proxy; ``handle_zero_tail``: verl 0.9.1.
    """
    (returns, _), groups = estimate(reward, torch.zeros_like(reward), mask, 1.0, 1.0), Groups(group.flatten())
    # Rounding can make the squared norm slightly negative.
    norm = (1 - 2 * old_log_prob.exp() + collision).clamp(min=0)  # it is 0 outside the mask
    order = (~mask).byte().argsort(dim=-1, stable=True)  # response tokens first, as in `estimate`
    total, weight = (x.gather(-1, order).flatten(0, -2) for x in (returns, norm.cumsum(-1)))
    present = torch.arange(mask.shape[-1], device=mask.device) < mask.sum(-1).flatten().unsqueeze(-1)
    weight = torch.where(present, weight, 0)
    # If all tokens are certain, the baseline is the plain mean.
    weight = torch.where(groups.sum(weight) == 0, present.to(weight.dtype), weight)
    # After subtracting the minimum, equal returns and their mean are exactly 0.
    above = torch.where(present, total - groups.min(total.masked_fill(~present, torch.inf)), 0)
    result = above - groups.sum(weight * above) / groups.sum(weight)
    if handle_zero_tail:
        alone = (groups.sum(present.long()) == 1) & (groups.sum(present.any(-1).long()) > 1).unsqueeze(-1)
        result = torch.where(alone, total, result)
    result = torch.where(present, result, 0).reshape(mask.shape)
    return torch.zeros_like(result).scatter(-1, order, result)


def estimate(reward: Tensor, value: Tensor, mask: Tensor, gamma: float, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """GAE and value targets of clean inputs. With ``value = 0`` and ``lam = 1`` this is the discounted return.

    ``lam`` is a number, or one for each sequence, ``[*B, 1, 1]``.
    """
    # Move response tokens to the front, in order, so that successors are adjacent.
    order = (~mask).byte().argsort(dim=-1, stable=True)
    # Positions after the last response token count as done, so that nothing flows back from them.
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
    """Mean 0 and unbiased variance 1 over masked-in tokens, 0 elsewhere. Exactly 0 for equal values or a single one."""
    centred = _centred(value, mask)
    variance = centred.square().sum() / (mask.sum() - 1).clamp(min=1)
    return centred * (variance + _EPSILON).rsqrt()


def _centred(value: Tensor, mask: Tensor) -> Tensor:
    """The difference from the mean over the masked-in tokens, 0 elsewhere. Exactly 0 if the values are equal."""
    if value.numel() == 0:
        return value
    # After subtracting the minimum, equal values have no rounding error.
    above = value - torch.where(mask, value, torch.inf).amin()
    return torch.where(mask, above - masked_mean(above, mask), 0)


# ------------------------------------------------------------------ control of the entropy


@advantage("clip_b", "token", per_sequence=("reward", "group"))
def clip_b(
    reward: Tensor,
    group: Tensor,
    old_log_prob: Tensor,
    entropy: Tensor,
    mask: Tensor,
    *,
    mu: NonNegative = 2.5,
    epsilon: Amount = 1e-6,
) -> Tensor:
    r"""GRPO's advantage on each token, but 0 where it is negative and would lower the entropy far more than at other tokens.

    A small step along ``A grad log p`` at one position changes the entropy there by ``-A (S - E[S])`` to first order, with the
    discriminator ``S = p (H + log p)`` of the sampled token. Tokens with ``A < 0`` are left out if ``S`` is more than ``mu``
    standard deviations below the mean ``S`` of all response tokens of the batch. This mean approximates ``E[S]``.

    Hyper-parameters:
        mu: number of standard deviations, at least 0.
        epsilon: see :func:`~torchrl_llm_kl.advantages.grpo`.

    Returns:
        ``[*B, T]``. Tokens that are left out still count in the mean of a loss.

    Example:
        >>> log_prob, mask = torch.tensor([[0.5, 0.5], [0.5, 0.1]]).log(), torch.ones(2, 2, dtype=torch.bool)
        >>> clip_b(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), log_prob, torch.full((2, 2), 0.7), mask, mu=1.0)
        tensor([[ 0.7071,  0.7071],
                [-0.7071,  0.0000]])

    Source: Wang et al. 2026, 'On the Entropy Dynamics in Reinforcement Fine-Tuning' (arXiv 2602.03392), Clip_B;
    one-sided and ``mu``: its authors' code in Trinity-RFT 0.6.0.
    """
    result, score = _grpo_per_token(reward, group, mask, epsilon), _centred(_discriminator(old_log_prob, entropy), mask)
    return torch.where((result < 0) & (score < -mu * _deviation(score, mask)), 0, result)


@advantage("clip_v", "token", per_sequence=("reward", "group"))
def clip_v(
    reward: Tensor,
    group: Tensor,
    old_log_prob: Tensor,
    entropy: Tensor,
    discriminator: Tensor,
    mask: Tensor,
    *,
    mu: NonNegative = 8.5,
    max_frac: Fraction = 1e-4,
    epsilon: Amount = 1e-6,
) -> Tensor:
    r"""``clip_b``, but with the exact expected ``discriminator`` at each position instead of the mean over the batch.

    ``S`` and ``E[S]`` are as in :func:`clip_b`, and ``discriminator`` is ``E[S]``. Tokens with ``A < 0`` are left out if
    ``E[S] - S`` exceeds ``mu`` of its standard deviations over the batch. If these are more than ``max_frac`` of all response
    tokens, only those with the largest ``E[S] - S`` are left out.

    Hyper-parameters:
        mu: number of standard deviations, at least 0.
        max_frac: the largest share of response tokens to leave out, 0 to 1. At least one token can always be left out.
        epsilon: see :func:`~torchrl_llm_kl.advantages.grpo`.

    Returns:
        ``[*B, T]``. Tokens that are left out still count in the mean of a loss.

    Example:
        >>> log_prob, mask = torch.tensor([[0.5, 0.5], [0.5, 0.1]]).log(), torch.ones(2, 2, dtype=torch.bool)
        >>> entropy, mean = torch.full((2, 2), 0.7), torch.zeros(2, 2)
        >>> clip_v(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), log_prob, entropy, mean, mask, mu=1.0)
        tensor([[ 0.7071,  0.7071],
                [-0.7071,  0.0000]])

    Source: Wang et al. 2026, 'On the Entropy Dynamics in Reinforcement Fine-Tuning' (arXiv 2602.03392), Clip_V;
    one-sided, ``mu`` and ``max_frac``: its authors' code in Trinity-RFT 0.6.0.
    """
    result, loss = _grpo_per_token(reward, group, mask, epsilon), discriminator - _discriminator(old_log_prob, entropy)
    deviation = _deviation(_centred(loss, mask), mask)
    beyond = (result < 0) & (loss > mu * deviation) & (deviation > 0)
    # Keep only the largest losses. A stable sort makes ties deterministic.
    order = loss.masked_fill(~beyond, -torch.inf).flatten().argsort(descending=True, stable=True)
    rank = torch.empty_like(order).index_put((order,), torch.arange(len(order), device=order.device))
    most = (mask.sum().double() * max_frac).floor().clamp(min=1)
    return torch.where(beyond & (rank.reshape(mask.shape) < most), 0, result)


def _grpo_per_token(reward: Tensor, group: Tensor, mask: Tensor, epsilon: float) -> Tensor:
    """GRPO's advantage of outcomes ``[*B]`` on each response token."""
    result = grpo(reward.flatten(), group.flatten(), epsilon=epsilon).reshape(group.shape)
    return torch.where(mask, result.unsqueeze(-1), 0)


def _discriminator(old_log_prob: Tensor, entropy: Tensor) -> Tensor:
    """The entropy discriminator of the sampled token."""
    return old_log_prob.exp() * (entropy + old_log_prob)


def _deviation(centred: Tensor, mask: Tensor) -> Tensor:
    """The biased standard deviation over the response tokens, 0-dim."""
    return masked_mean(centred.square(), mask).sqrt()


# ------------------------------------------------------------------ distillation


@advantage("on_policy_distill", "token")
def on_policy_distill(old_log_prob: Tensor, teacher_log_prob: Tensor, mask: Tensor, *, kl_coef: float = 1.0) -> Tensor:
    r"""``kl_coef * (teacher_log_prob - old_log_prob)``.

    Its policy gradient is minus the gradient of :math:`KL(\pi \| \pi_{teacher})` at each position given its prefix. It
    ignores the effect of a token on the KL at later positions.

    Hyper-parameters:
        kl_coef: factor.

    Returns:
        ``[*B, T]``.

    Example:
        >>> student, teacher = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -0.5]])
        >>> on_policy_distill(student, teacher, torch.tensor([[True, True]]))
        tensor([[-0.5000,  1.5000]])

    Source: Agarwal et al. 2023 (GKD, arXiv 2306.13649), section 3, with the reverse KL; Thinking Machines, 'On-policy
    distillation' (2025).
    """
    return kl_coef * (teacher_log_prob - old_log_prob)


@advantage("ex_opd", "token")
def ex_opd(
    old_log_prob: Tensor,
    teacher_log_prob: Tensor,
    base_log_prob: Tensor,
    mask: Tensor,
    *,
    reward_scale: Amount = 1.25,
    kl_coef: float = 1.0,
) -> Tensor:
    r"""``kl_coef * (reward_scale * (teacher - base) - (old - base))`` of log-probs: distillation beyond the teacher.

    ``teacher - base`` is the reward that the teacher implies relative to the model that it was trained from, and ``old - base``
    penalises the student's KL to that model. Given the prefix, the optimum is ``base ** (1 - reward_scale) * teacher **
    reward_scale``, normalised. With 1 this is :func:`on_policy_distill`. Above 1 the student goes further than the teacher in
    the direction from base to teacher (ExOPD), and below 1 it stays between the two.

    Hyper-parameters:
        reward_scale: weight of the implied reward, at least 0. G-OPD: ``lambda_vals``.
        kl_coef: factor.

    Returns:
        ``[*B, T]``.

    Example:
        >>> student, teacher, base = torch.tensor([[-1.0]]), torch.tensor([[-0.5]]), torch.tensor([[-2.0]])
        >>> ex_opd(student, teacher, base, torch.tensor([[True]]), reward_scale=2.0)  # 2 * 1.5 - 1
        tensor([[2.]])

    Source: Yang et al. 2026 (G-OPD and ExOPD, arXiv 2602.12125). 1.25: its authors' code, RUCBM/G-OPD.
    """
    return kl_coef * (reward_scale * (teacher_log_prob - base_log_prob) - (old_log_prob - base_log_prob))


@advantage("rlsd", "token", per_sequence=("reward", "group"))
def rlsd(
    reward: Tensor,
    group: Tensor,
    old_log_prob: Tensor,
    teacher_log_prob: Tensor,
    mask: Tensor,
    *,
    mixture: Fraction = 0.5,
    clip: Fraction = 0.2,
    epsilon: Amount = 1e-6,
) -> Tensor:
    r"""GRPO's ``A`` times ``1 - mixture + mixture * w`` with ``w = clip((teacher / old) ** sign(A), 1 - clip, 1 + clip)``.

    The reward decides the direction of each token, and the teacher only its size: good answers gain more at tokens that the
    teacher finds likelier than the student, and bad answers lose less there. The teacher is usually the policy itself with more
    context, such as a reference answer (RLVR with self-distillation).

    Hyper-parameters:
        mixture: share of the teacher's weights, 0 to 1. 0 gives GRPO. The paper changes it during the training. ms-swift:
            ``rlsd_lambda``.
        clip: largest deviation of ``w`` from 1. ms-swift: ``rlsd_reweight_clip_range``.
        epsilon: see :func:`~torchrl_llm_kl.advantages.grpo`.

    Returns:
        ``[*B, T]``.

    Example:
        >>> student, teacher = torch.tensor([[-1.0], [-1.0]]), torch.tensor([[-0.9], [-0.9]])
        >>> reward, group, mask = torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([[True], [True]])
        >>> rlsd(reward, group, student, teacher, mask, mixture=1.0)  # 0.7071 times exp(0.1) and exp(-0.1)
        tensor([[ 0.7815],
                [-0.6398]])

    Source: Yang et al. 2026 (RLSD, arXiv 2604.03128), eqs. 13 to 15. 0.5 and 0.2: ms-swift.
    """
    result, lead = _grpo_per_token(reward, group, mask, epsilon), teacher_log_prob - old_log_prob
    weight = torch.where(result > 0, lead, -lead).exp().clamp(1 - clip, 1 + clip)
    return result * (1 - mixture + mixture * weight)


@advantage("iw_opd", "token")
def iw_opd(old_log_prob: Tensor, teacher_log_prob: Tensor, mask: Tensor, *, amplification: Amount = 0.5) -> Tensor:
    r"""``(1 + amplification (1 - s)) d``, ``d = teacher_log_prob - old_log_prob``. ``s``: share of ``|d|`` before a token.

    ``s`` is the sum of ``|d|`` over the earlier tokens, divided by the sequence's sum, so it is 0 at the first token. Early
    tokens weigh more. The less likely a prefix is for the teacher, the less reliable are its log-probs of the tokens after it.

    Hyper-parameters:
        amplification: at least 0. 0 gives :func:`on_policy_distill`. TRL: ``iw_opd_gamma``.

    Returns:
        ``[*B, T]``.

    Example:
        >>> student, teacher = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -0.5]])
        >>> iw_opd(student, teacher, torch.tensor([[True, True]]), amplification=1.0)
        tensor([[-1.0000,  2.6250]])

    Source: Xie et al. 2026, 'On the Position Bias of On-Policy Distillation' (arXiv 2606.22600); 0.5: TRL 1.16.
    """
    difference = teacher_log_prob - old_log_prob
    size = difference.abs()
    total = size.sum(-1, keepdim=True)
    before = (size.cumsum(-1) - size) / torch.where(total == 0, 1, total)
    return (1 + amplification * (1 - before)) * difference


@advantage("jsd", "token")
def jsd(
    old_log_prob: Tensor, teacher_log_prob: Tensor, mask: Tensor, *, beta: InnerShare = 0.5, kl_coef: float = 1.0
) -> Tensor:
    r"""``kl_coef * (1 - beta) * (log M - log pi)`` with the mixture ``M = beta * teacher + (1 - beta) * pi``.

    The divergence of a position is ``J = beta * KL(teacher || M) + (1 - beta) * KL(pi || M)``. Its derivative with respect to
    ``pi(y)``, which ``M`` contains too, is

    ``-beta (1 - beta) teacher / M + (1 - beta) (log(pi / M) + 1 - (1 - beta) pi / M) = (1 - beta) log(pi / M)(y)``,

    since ``beta * teacher + (1 - beta) * pi`` is ``M`` and cancels the 1. Hence ``E_pi[A grad log pi] = -grad J`` holds exactly
    for this advantage, with the prefix fixed. It is bounded below by ``(1 - beta) log(1 - beta)``: for ``beta = 0.5`` a token
    with teacher probability 0 has -0.35, while ``on_policy_distill`` has minus infinity.

    Hyper-parameters:
        beta: weight of the teacher in the mixture, greater than 0 and less than 1, since ``J`` is 0 for any student at both
            ends. ``on_policy_distill`` has KL(student || teacher). Trinity: ``lambda_coef``.
        kl_coef: factor.

    Returns:
        ``[*B, T]``.

    Example:
        >>> student, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
        >>> jsd(student, teacher, torch.tensor([[True, True]]))
        tensor([[ 0.1682, -0.2554]])

    Source: Agarwal et al. 2023 (GKD, arXiv 2306.13649), section 2; the advantage is its exact policy gradient.
    """
    # In log space, so that a probability of 0 gives no NaN.
    mixture = torch.logaddexp(math.log(beta) + teacher_log_prob, math.log1p(-beta) + old_log_prob)
    return torch.where(mask, kl_coef * (1 - beta) * (mixture - old_log_prob), 0)
