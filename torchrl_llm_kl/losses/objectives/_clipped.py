"""Surrogates whose gradient is clipped or fades out when the probability ratio leaves a trust region."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchrl_llm_kl._numerics import AboveOne, NonNegative, Number, Positive, Scalar, Share, check_range, masked_mean
from torchrl_llm_kl.losses._arithmetic import bounded_exp, clamp, clip_fractions, prefix_sum, sequence_mean
from torchrl_llm_kl.losses._objective import LossInputs, LossTerm, Terms, objective
from torchrl_llm_kl.losses.corrections import off_policy_sequence_mask


def clipped_surrogate(
    ratio: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_low: Scalar,
    clip_high: Scalar,
    clip_ratio_c: Scalar | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's value per token, and the fractions of tokens whose gradient each bound removes. See :func:`ppo`."""
    loss, bad = -advantage, advantage < 0
    free, bound = loss * ratio, loss * clamp(ratio, 1 - clip_low, 1 + clip_high)
    value = torch.maximum(free, bound)
    clipped, dual = bound > free, dict[str, Tensor]()
    if clip_ratio_c is not None:
        ceiling = loss.abs() * clip_ratio_c  # it can only be reached where the advantage is negative
        dual["clip_fraction_dual"] = value > ceiling
        value = torch.minimum(value, ceiling)
    low = clipped & bad  # with A < 0 the gradient lowers the ratio, so the lower bound clips
    return value, clip_fractions(low, clipped ^ low, mask, **dual)


@objective("ppo", only_with={"delta_sequence_masking": ("enable_sequence_masking", (True,))})
def ppo(
    inputs: LossInputs,
    *,
    clip_low: Share = 0.2,
    clip_high: NonNegative = 0.2,
    clip_ratio_c: AboveOne | None = 3.0,
    enable_sequence_masking: bool = False,
    delta_sequence_masking: Scalar = 0.1,
) -> Terms:
    r"""PPO's clipped surrogate: ``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`` per token.

    It has the gradient of ``-A r`` where the ratio is inside the bounds or the gradient moves it back towards them. Elsewhere
    the gradient is 0.

    Hyper-parameters:
        clip_low, clip_high: the ratio's bounds are ``1 - clip_low`` and ``1 + clip_high``. ``clip_low`` is 0 to 1. Trinity:
            ``clip_range_low`` and ``clip_range_high``, or ``clip_range`` for both.
        clip_ratio_c: dual clip, above 1. Where ``A < 0`` the value is at most ``-A clip_ratio_c``. None for no such bound.
        enable_sequence_masking: drop the tokens with ``A < 0`` of sequences that have become unlikely, which means that their
            mean of ``old_log_prob - log_prob`` is above ``delta_sequence_masking``. Dropped tokens stay in the denominator.
        delta_sequence_masking: nats per token.

    Metrics: ``clip_fraction`` (``_low``: A < 0, ``_high``: A > 0, ``_dual``) and ``sequence_masked_fraction``.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
        >>> ppo(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage))[0].value
        tensor([[-1.2000,  0.8000]])

    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7. Dual clip: Ye et al. 2020 (arXiv 1912.09729), eq. 5.
    Sequence masking: DeepSeek-V3.2 (arXiv 2512.02556), section 3.1.
    """
    ratio = bounded_exp(inputs.log_ratio)
    value, metrics = clipped_surrogate(ratio, inputs.advantage, inputs.mask, clip_low, clip_high, clip_ratio_c)
    if enable_sequence_masking:
        kept, dropped = off_policy_sequence_mask(inputs, delta=delta_sequence_masking)
        metrics |= dropped
        value = torch.where(kept == 0, 0, value)  # the mask stays, so that denominators do not depend on log-probs
    return (LossTerm("objective", value, inputs.mask, metrics=metrics),)


@objective("ppo_on_policy")
def ppo_on_policy(inputs: LossInputs) -> Terms:
    r""":func:`ppo` for answers of the current policy, whose ratio is 1: ``-A exp(log_prob - sg(log_prob))`` per token.

    The value is ``-A``, and the gradient is the plain policy gradient, as in :func:`gpg`. It reads no ``old_log_prob`` and
    clips nothing. Trinity: ``fallback_to_policy_gradient`` of ``ppo``.

    Example:
        >>> log_prob, advantage = torch.tensor([[-1.0, -2.0]]), torch.tensor([[1.0, -1.0]])
        >>> ppo_on_policy(LossInputs(log_prob, torch.ones(1, 2, dtype=torch.bool), advantage=advantage))[0].value
        tensor([[-1.,  1.]])

    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 1 at the old policy. Trinity-RFT 0.6.0.
    """
    ratio = (inputs.log_prob - inputs.log_prob.detach()).exp()  # 1, with the gradient of log_prob
    return (LossTerm("objective", -inputs.advantage * ratio, inputs.mask),)


@objective("dapo")
def dapo(
    inputs: LossInputs, *, clip_low: Share = 0.2, clip_high: NonNegative = 0.28, clip_ratio_c: AboveOne | None = None
) -> Terms:
    r"""PPO's clipped surrogate with ``clip_high`` above ``clip_low``, averaged over the tokens of the whole batch.

    The looser upper bound lets unlikely tokens become likely. Hyper-parameters, gradient and metrics are as in
    :func:`ppo`. The paper has no dual clip and divides the advantage by its group's standard deviation. Its overlong reward
    shaping and dynamic sampling are not part of the objective.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
        >>> dapo(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage))[0].value
        tensor([[-1.2800,  0.8000]])

    Source: Yu et al. 2025 (arXiv 2503.14476), eq. 8.
    """
    return ppo(inputs, clip_low=clip_low, clip_high=clip_high, clip_ratio_c=clip_ratio_c)


@objective("dr_grpo", aggregation="seq-mean-token-sum-norm")
def dr_grpo(
    inputs: LossInputs, *, clip_low: Share = 0.2, clip_high: NonNegative = 0.2, clip_ratio_c: AboveOne | None = None
) -> Terms:
    r"""PPO's clipped surrogate, summed over tokens and divided by a length that does not depend on the sequence.

    It differs from :func:`ppo` outside the objective: the aggregation is ``seq-mean-token-sum-norm``, and the advantage is
    centred but not divided by its group's standard deviation. Hyper-parameters, gradient and metrics are as in :func:`ppo`.
    The paper has no dual clip.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
        >>> dr_grpo(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage))[0].value
        tensor([[-1.2000,  0.8000]])

    Source: Liu et al. 2025 (arXiv 2503.20783), section 3.2.
    """
    return ppo(inputs, clip_low=clip_low, clip_high=clip_high, clip_ratio_c=clip_ratio_c)


@objective("a3po")
def a3po(
    inputs: LossInputs,
    *,
    clip_low: Share = 0.4,
    clip_high: NonNegative = 0.4,
    clip_ratio_c: AboveOne | None = None,
    weight_max: Positive | None = 5.0,
) -> Terms:
    r"""Decoupled PPO for old samples: :func:`ppo` around an estimate of the last policy, times a bounded importance weight.

    The policy before this update, ``p``, is not scored. Its log-prob is interpolated: ``log p = log_prob + (old_log_prob -
    log_prob) / max(age, 1)``. With ``w = min(p / old, weight_max)`` and ``r = exp(log_prob) / p`` the value is
    ``w max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``. The clipping thus restricts one step of the policy, however old
    the token is. ``p`` and ``w`` pass no gradient. Where ``age`` is 0 or 1, this is :func:`ppo`.

    Hyper-parameters:
        clip_low, clip_high, clip_ratio_c: see :func:`ppo`. AReaL: ``eps_clip`` for the first two.
        weight_max: upper bound of ``w``, above 0. None for no bound.

    Metrics: ``clip_fraction`` as in :func:`ppo`, and ``weight_mean``.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-2.0, -2.0]])
        >>> mask, advantage, age = torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 2), torch.tensor([[4, 1]])
        >>> a3po(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage, age=age))[0].value  # -exp(3/4 + 1/4)
        tensor([[-2.7183, -1.0000]])

    Source: Li et al. 2025 (A-3PO, arXiv 2512.06547). AReaL: ``prox_logp_method: loglinear``, also for an age of 0, and
    ``eps_clip`` 0.4 in its example. Decoupled loss: Hilton et al. 2022 (arXiv 2110.00641). ``weight_max``: the former
    ``behave_imp_weight_cap``, above which AReaL dropped tokens.
    """
    now, old = inputs.log_prob.detach(), inputs.old_log_prob
    proximal = now + (old - now) / inputs.age.clamp(min=1)
    weight = clamp(bounded_exp(proximal - old), high=weight_max)
    ratio = bounded_exp(inputs.log_prob - proximal)
    value, metrics = clipped_surrogate(ratio, inputs.advantage, inputs.mask, clip_low, clip_high, clip_ratio_c)
    metrics["weight_mean"] = masked_mean(weight, inputs.mask)
    return (LossTerm("objective", weight * value, inputs.mask, metrics=metrics),)


@objective("fipo")
def fipo(
    inputs: LossInputs,
    *,
    clip_low: Share = 0.2,
    clip_high: NonNegative = 0.28,
    clip_ratio_c: AboveOne | None = 10.0,
    half_life: Positive = 32.0,
    weight_low: Share = 0.0,
    weight_high: NonNegative = 0.2,
    safe_ratio: Positive | None = 4.0,
) -> Terms:
    r""":func:`ppo` times a weight that grows with the log-ratios of the later tokens: ``exp(F)``, bounded, without gradient.

    ``F`` is the sum of ``0.5 ** ((k - t) / half_life) * log r`` over this token ``t`` and all later tokens ``k`` of the
    sequence, the "future KL". Tokens after which the policy has become likelier weigh more. ``k - t`` counts all tokens, also
    masked-out ones, but only masked-in tokens are summed.

    Hyper-parameters:
        clip_low, clip_high: see :func:`ppo`.
        clip_ratio_c: see :func:`ppo`. Tokens with a ratio above it are also left out of ``F``. ms-swift: ``delta``.
        half_life: number of tokens after which the weight of a log-ratio is halved. ms-swift: ``fipo_decay_rate``.
        weight_low, weight_high: the bounds of the weight are ``1 - weight_low`` and ``1 + weight_high``. ms-swift:
            ``fipo_clip_range`` for both, and ``fipo_clip_high_only`` for ``weight_low=0``.
        safe_ratio: the weight is at most 1 where ``A < 0`` and the ratio is above this. None for no such bound. ms-swift:
            ``fipo_safety_threshold``.

    Metrics: ``clip_fraction`` as in :func:`ppo`, ``weight_mean``, and ``future_kl``, the mean of ``F``.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -1.1]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 2)
        >>> fipo(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage), half_life=1.0)[0].value
        tensor([[-1.0513, -1.2214]])

    Source: Ma et al. 2026 (FIPO, arXiv 2603.19835). ``half_life``, the bounds and ``safe_ratio``: ms-swift 4.4, ``loss_type``
    ``fipo``. Ratio clipping: DAPO (arXiv 2503.14476).
    """
    advantage, mask, log_ratio = inputs.advantage, inputs.mask, inputs.log_ratio
    ratio = bounded_exp(log_ratio)
    value, metrics = clipped_surrogate(ratio, advantage, mask, clip_low, clip_high, clip_ratio_c)
    future = log_ratio.detach()  # it is 0 outside the mask
    if clip_ratio_c is not None:
        future = torch.where(ratio > clip_ratio_c, 0, future)
    reach = 1
    while reach < mask.shape[-1]:  # each round doubles the number of tokens in a sum
        future = future + 0.5 ** (reach / half_life) * pad(future[..., reach:], (0, reach))
        reach *= 2
    weight = clamp(bounded_exp(future), 1 - weight_low, 1 + weight_high)
    if safe_ratio is not None:
        weight = torch.where((advantage < 0) & (ratio > safe_ratio), weight.clamp(max=1), weight)
    metrics |= {"weight_mean": masked_mean(weight, mask), "future_kl": masked_mean(future, mask)}
    return (LossTerm("objective", weight * value, mask, metrics=metrics),)


@objective("ctpo")
def ctpo(
    inputs: LossInputs,
    *,
    clip_low: NonNegative = 0.025,
    clip_high: NonNegative = 0.05,
    clip_c: NonNegative | None = 0.05,
    power: Number = 0.5,
) -> Terms:
    r"""PPO's surrogate with the ratio of each prefix, the product of the ratios up to a token, and bounds that widen with it.

    Token ``t`` of the masked-in tokens has the ratio ``r = exp(log_prob - sg(log_prob) + sg(sum of log-ratios up to t))``: the
    value of the prefix's ratio with the gradient of the token's own log-prob. Its bounds are ``exp(-clip_low t**power)`` and
    ``exp(clip_high t**power)``, because a sum of ``t`` log-ratios varies like ``sqrt(t)``. Without bounds, summed over the
    tokens, it has the mean gradient of the policy gradient, whichever policy sampled the tokens, if ``A`` is the current
    policy's advantage of the prefix. (:func:`importance_sampling` corrects each token but not the tokens before it.)

    Hyper-parameters:
        clip_low, clip_high: bounds of the first token's log-ratio, in nats. CTPO's code: ``la_clip_low``, ``la_clip_high``.
        clip_c: dual clip. Where ``A < 0`` the value is at most ``-A exp(clip_c t**power)``. None for no such bound.
        power: exponent of the position.

    Metrics: ``clip_fraction`` (``_low``: A < 0, ``_high``: A > 0, ``_dual``).

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.7]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, 1.0]])
        >>> ctpo(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage), clip_high=1.0)[0].value  # exp(0.5 - 0.3)
        tensor([[-1.6487, -1.2214]])

    Source: Zhang et al. 2026 (CTPO, arXiv 2605.07331). The numbers and the dual clip: its authors' code, horizon-llm/CTPO.
    """
    mask, log_ratio = inputs.mask, inputs.log_prob - inputs.log_prob.detach()
    scale = mask.to(log_ratio.dtype).cumsum(-1).clamp(min=1) ** power
    ratio = bounded_exp(log_ratio + prefix_sum(inputs.log_ratio.detach(), mask))
    low, high = 1 - (-clip_low * scale).exp(), bounded_exp(clip_high * scale) - 1
    dual = None if clip_c is None else bounded_exp(clip_c * scale)
    value, metrics = clipped_surrogate(ratio, inputs.advantage, mask, low, high, dual)
    return (LossTerm("objective", value, mask, metrics=metrics),)


@objective("gspo", aggregation="seq-mean-token-mean")
def gspo(
    inputs: LossInputs,
    *,
    clip_low: Share = 3e-4,
    clip_high: NonNegative = 4e-4,
    level: Literal["token", "sequence"] = "token",
) -> Terms:
    r"""PPO's surrogate with the geometric mean of a sequence's ratios, ``s = exp(mean(log_prob - old_log_prob))``.

    ``level="sequence"`` is ``max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))`` once per sequence, ``[*B, 1]``, with the
    sequence's mean advantage. With ``level="token"`` each token has the ratio
    ``r = exp(log_prob - sg(log_prob) + sg(log s))``: the value of ``s`` with the gradient of the token's own log-prob. The
    advantages may then differ within a sequence. If they do not, and tokens are averaged per sequence, both levels have the
    same value and gradient. All tokens of a clipped sequence have a gradient of 0.

    Hyper-parameters:
        clip_low, clip_high: bounds of ``s``, as in :func:`ppo`.
        level: ``"token"`` (as in Trinity and verl) or ``"sequence"``.

    Metrics: ``clip_fraction`` (``_low``: A < 0, ``_high``: A > 0) of tokens or of sequences.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[3.0, 3.0]])
        >>> gspo(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage))[0].value
        tensor([[-3., -3.]])
        >>> gspo(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage), level="sequence")[0].value
        tensor([[-3.]])

    Source: Zheng et al. 2025 (arXiv 2507.18071), eq. 5-7 (sequence) and 13-14 (token).
    """
    advantage, mask = inputs.advantage, inputs.mask
    log_ratio = sequence_mean(inputs.log_ratio, mask)
    if level == "sequence":
        advantage, mask = sequence_mean(advantage, mask), mask.any(-1, keepdim=True)
    else:
        log_ratio = inputs.log_prob - inputs.log_prob.detach() + log_ratio.detach()
    value, metrics = clipped_surrogate(bounded_exp(log_ratio), advantage, mask, clip_low, clip_high)
    return (LossTerm("objective", value, mask, metrics=metrics),)


@objective("luspo", aggregation="seq-mean-token-sum")
def luspo(inputs: LossInputs, *, clip_low: Share = 3e-4, clip_high: NonNegative = 4e-4) -> Terms:
    r"""GSPO's surrogate times the length of its sequence, so that tokens of long answers do not weigh less.

    A sequence of ``n`` tokens adds ``n max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))``. Each token has the value of the
    sequence and the gradient of its own log-prob, as in :func:`gspo`, and ``seq-mean-token-sum`` adds them up. If nothing is
    clipped, the gradient is ``-A s`` times the gradient of the whole answer's log-prob. Hyper-parameters and metrics are as
    in :func:`gspo`.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[3.0, 3.0]])
        >>> luspo(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage))[0].value.sum()
        tensor(-6.)

    Source: Liu et al. 2026 (arXiv 2602.05261), the LUSPO objective. Bounds: GSPO (arXiv 2507.18071), section 5.1.
    """
    return gspo(inputs, clip_low=clip_low, clip_high=clip_high)


@objective("gmpo", aggregation="seq-mean-token-mean")
def gmpo(inputs: LossInputs, *, clip_low: NonNegative = 0.4, clip_high: NonNegative = 0.4) -> Terms:
    r"""``-A exp(mean(c))`` per sequence, ``[*B, 1]``. ``c`` are its tokens' log-ratios after PPO's clipping in log space.

    With ``d = log_prob - old_log_prob`` and ``k = clip(d, -clip_low, clip_high)``, a token's ``c`` is ``min(d, k)`` where
    ``A > 0`` and ``max(d, k)`` elsewhere. ``A`` is the sequence's mean advantage. The gradient reaches all unclipped tokens
    with the same weight. verl calls it ``geo_mean``.

    Hyper-parameters:
        clip_low, clip_high: the bounds of a log-ratio are ``-clip_low`` and ``clip_high`` nats. Other libraries' names are as
            for :func:`ppo`.

    Metrics: ``clip_fraction`` (``_low``: A <= 0, ``_high``: A > 0).

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, 1.0]])
        >>> gmpo(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage))[0].value  # exp((0.4 - 0.5) / 2)
        tensor([[-0.9512]])

    Source: Zhao et al. 2025 (arXiv 2507.20673), eq. 4 and algorithm 1.
    """
    mask, free = inputs.mask, inputs.log_ratio
    advantage = sequence_mean(inputs.advantage, mask)
    bound = clamp(free, -clip_low, clip_high)
    up = advantage > 0
    clipped = torch.where(up, bound < free, bound > free)
    value = -advantage * bounded_exp(sequence_mean(torch.where(clipped, bound, free), mask))
    metrics = clip_fractions(clipped & ~up, clipped & up, mask)
    return (LossTerm("objective", value, mask.any(-1, keepdim=True), metrics=metrics),)


@objective("cispo", only_with=dict.fromkeys(("mask_clip_low", "mask_clip_high"), ("enable_mask_clip", (True,))))
def cispo(
    inputs: LossInputs,
    *,
    clip_low: Share = 1.0,
    clip_high: NonNegative = 0.28,
    enable_mask_clip: bool = False,
    mask_clip_low: Share = 1.0,
    mask_clip_high: NonNegative = 0.28,
) -> Terms:
    r"""REINFORCE with a bounded importance weight: ``-A sg(clip(r, 1 - clip_low, 1 + clip_high)) log_prob`` per token.

    The gradient is the off-policy policy gradient with a clipped weight, so a clipped token keeps a gradient.

    Hyper-parameters:
        clip_low, clip_high: the bounds of the weight are ``1 - clip_low`` and ``1 + clip_high``. ``clip_low=1`` sets no lower
            bound. (TRL's ``epsilon_high`` is the bound itself, ``1 + clip_high``.)
        enable_mask_clip: drop tokens that PPO would clip: ``A > 0`` and ``r > 1 + mask_clip_high``, or ``A < 0`` and
            ``r < 1 - mask_clip_low``. Dropped tokens stay in the denominator.
        mask_clip_low, mask_clip_high: bounds for ``enable_mask_clip``. Trinity: ``mask_clip_range_low``,
            ``mask_clip_range_high``.

    Metrics: ``clip_fraction`` (``_low``: weights raised, ``_high``: weights lowered) and ``token_masked_fraction``.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
        >>> cispo(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage))[0].value
        tensor([[ 1.2800, -1.2131]])

    Source: MiniMax-M1 2025 (arXiv 2506.13585), eq. 4-5. Token mask: eq. 6-7.
    """
    advantage, mask = inputs.advantage, inputs.mask
    ratio = bounded_exp(inputs.log_ratio).detach()  # the gradient flows only through log_prob
    value = -advantage * clamp(ratio, 1 - clip_low, 1 + clip_high) * inputs.log_prob
    metrics = clip_fractions(ratio < 1 - clip_low, ratio > 1 + clip_high, mask)
    if enable_mask_clip:
        too_likely = (ratio > 1 + mask_clip_high) & (advantage > 0)
        dropped = too_likely | ((ratio < 1 - mask_clip_low) & (advantage < 0))
        metrics["token_masked_fraction"] = masked_mean(dropped.float(), mask)
        value = torch.where(dropped, 0, value)
    return (LossTerm("objective", value, mask, metrics=metrics),)


@objective("sapo", aggregation="seq-mean-token-mean")
def sapo(inputs: LossInputs, *, tau_pos: Positive = 1.0, tau_neg: Positive = 1.05) -> Terms:
    r"""A smooth gate instead of a hard clip: ``-A f(r)`` per token with ``f(r) = 4 sigmoid(tau (r - 1)) / tau``.

    The gradient goes through ``r``: a token's weight is ``A r 4 p (1 - p)`` with ``p = sigmoid(tau (r - 1))``. At ``r = 1``
    this is the policy gradient. The weight falls off smoothly on both sides, faster for a larger ``tau``. The value at
    ``r = 1`` is ``-2 A / tau``.

    Hyper-parameters:
        tau_pos: temperature where ``A > 0``. TRL: ``sapo_temperature_pos``.
        tau_neg: temperature elsewhere. The paper's is larger than ``tau_pos``. TRL: ``sapo_temperature_neg``.

    Metrics: ``gate_mean``, the mean of ``4 p (1 - p)``, which is 1 on-policy.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -1.0]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, 1.0]])
        >>> sapo(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage))[0].value
        tensor([[-2.0000, -1.3881]])

    Source: Gao et al. 2025 (arXiv 2511.20347), eq. 5-6.
    """
    advantage, mask = inputs.advantage, inputs.mask
    one = torch.ones_like(advantage)  # torch.where of two numbers would be float32 whatever the dtype of the inputs
    tau = torch.where(advantage > 0, tau_pos * one, tau_neg * one)
    p = torch.sigmoid(tau * (bounded_exp(inputs.log_ratio) - 1))
    slope = 4 * p.detach() * (1 - p.detach())
    return (LossTerm("objective", -advantage * 4 * p / tau, mask, metrics={"gate_mean": masked_mean(slope, mask)}),)


# ------------------------------------------------------------------ tokens of high covariance

# The covariance of a token is ``(log_prob - mean) (A - mean)``, with the means over all masked-in tokens. A selection concerns
# a whole batch. It is computed once, before the batch is split, and each micro-batch gets its part of ``selected``.


@objective("clip_cov")
def clip_cov(
    inputs: LossInputs,
    *,
    clip_low: Share = 0.2,
    clip_high: NonNegative = 0.2,
    fraction: float = 2e-4,
    cov_low: Scalar = 1.0,
    cov_high: Scalar = 5.0,
) -> Terms:
    r"""PPO's clipped surrogate (:func:`ppo` without dual clip), but a constant 0 for the tokens in the entry ``selected``.

    Selected tokens stay in the denominator. If the input ``selected`` is missing, the objective selects among the tokens at
    hand, with the device's global generator.

    Hyper-parameters:
        clip_low, clip_high: see :func:`ppo`.
        fraction, cov_low, cov_high: see :func:`select_clip_cov`. verl: ``clip_cov_ratio``, ``clip_cov_lb``, ``clip_cov_ub``.

    Metrics: ``clip_fraction`` as in :func:`ppo`, and ``selected_fraction``.

    Example:
        >>> log_prob = old = torch.tensor([[-1.0, -2.0]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
        >>> selected = torch.tensor([[True, False]])
        >>> clip_cov(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage, selected=selected))[0].value
        tensor([[0., 1.]])

    Source: Cui et al. 2025 (arXiv 2505.22617), section 4.2 (Clip-Cov).
    """
    selected = inputs.get("selected")
    if selected is None:
        selected = select_clip_cov(
            inputs, fraction=fraction, cov_low=cov_low, cov_high=cov_high, clip_low=clip_low, clip_high=clip_high
        )
    ratio = bounded_exp(inputs.log_ratio)
    value, metrics = clipped_surrogate(ratio, inputs.advantage, inputs.mask, clip_low, clip_high)
    metrics["selected_fraction"] = masked_mean(selected.float(), inputs.mask)
    return (LossTerm("objective", torch.where(selected, 0, value), inputs.mask, metrics=metrics),)


@objective("kl_cov")
def kl_cov(inputs: LossInputs, *, coeff: NonNegative = 1.0, fraction: float = 2e-4) -> Terms:
    r"""``-A r`` per token without clipping, plus ``coeff |log r|`` for the tokens marked in the entry ``selected``.

    The penalty pulls a selected token's log-prob back with the constant force ``coeff``. At ``r = 1`` there is no force.

    Hyper-parameters:
        coeff: weight of the penalty, per nat, at least 0. verl: ``ppo_kl_coef``.
        fraction: see :func:`select_kl_cov`. verl: ``kl_cov_ratio``.

    Metrics: ``selected_fraction`` and ``ratio_mean``.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]])
        >>> mask, advantage = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -1.0]])
        >>> selected = torch.tensor([[True, False]])
        >>> kl_cov(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage, selected=selected))[0].value
        tensor([[-1.1487,  0.6065]])

    Source: Cui et al. 2025 (arXiv 2505.22617), section 4.2 (KL-Cov).
    """
    selected, mask, log_ratio = inputs.get("selected"), inputs.mask, inputs.log_ratio
    if selected is None:
        selected = select_kl_cov(inputs, fraction=fraction)
    ratio = bounded_exp(log_ratio)
    penalty = torch.where(selected, coeff * log_ratio.abs(), 0)
    metrics = {
        "selected_fraction": masked_mean(selected.float(), mask),
        "ratio_mean": masked_mean(ratio.detach(), mask),
    }
    return (LossTerm("objective", -inputs.advantage * ratio + penalty, mask, metrics=metrics),)


@torch.no_grad()
def select_clip_cov(
    inputs: LossInputs,
    *,
    fraction: float = 2e-4,
    cov_low: Scalar = 1.0,
    cov_high: Scalar = 5.0,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Select tokens for :func:`clip_cov` at random among those whose covariance lies between two bounds.

    Inputs and errors are as in :func:`clip_cov`, for a whole batch. Tokens that :func:`ppo` clips are not selected, because
    they have no gradient anyway. The result is bool ``[*B, T]``, True for the selected tokens.

    Hyper-parameters:
        fraction: share of the masked-in tokens to select, in ``(0, 1]``. The number is rounded down, but at least 1, as in the
            authors' code.
        cov_low, cov_high: only tokens with a covariance strictly between these bounds are selected.
        clip_low, clip_high: see :func:`ppo`.
        generator: a random number generator on the device of the mask.

    Example:
        >>> log_prob = old = torch.tensor([[-1.0, -9.0, -5.0, -5.0]])
        >>> mask, advantage = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[1.0, -1.0, 2.0, -2.0]])
        >>> select_clip_cov(LossInputs(log_prob, mask, old_log_prob=old, advantage=advantage), fraction=0.5)
        tensor([[ True,  True, False, False]])

    Source: Cui et al. 2025 (arXiv 2505.22617), section 4.2 (Clip-Cov).
    """
    check_range(above=0.0, high=1.0, fraction=fraction)
    advantage, mask, ratio = inputs.advantage, inputs.mask, bounded_exp(inputs.log_ratio)
    surrogate, _ = clipped_surrogate(ratio, advantage, mask, clip_low, clip_high)
    covariance = _covariance(inputs.log_prob, advantage, mask)
    # Where the surrogate differs from its unclipped value, PPO clips the token.
    candidates = mask & (covariance > cov_low) & (covariance < cov_high) & (surrogate == -advantage * ratio)
    chance = torch.rand(mask.shape, generator=generator, device=mask.device)
    return _highest(chance, candidates, mask, fraction)


@torch.no_grad()
def select_kl_cov(inputs: LossInputs, *, fraction: float = 2e-4) -> Tensor:
    r"""Select the tokens with the highest covariance of log-prob and advantage, for :func:`kl_cov`.

    Inputs and errors are as in :func:`kl_cov`, for a whole batch. ``fraction`` and the result are as in
    :func:`select_clip_cov`.

    Example:
        >>> log_prob, advantage = torch.tensor([[-1.0, -9.0, -4.0, -6.0]]), torch.tensor([[1.0, -2.0, -1.0, 2.0]])
        >>> select_kl_cov(LossInputs(log_prob, torch.ones(1, 4, dtype=torch.bool), advantage=advantage), fraction=0.5)
        tensor([[ True,  True, False, False]])

    Source: Cui et al. 2025 (arXiv 2505.22617), section 4.2 (KL-Cov).
    """
    check_range(above=0.0, high=1.0, fraction=fraction)
    mask = inputs.mask
    return _highest(_covariance(inputs.log_prob, inputs.advantage, mask), mask, mask, fraction)


def _covariance(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return (x - masked_mean(x, mask)) * (y - masked_mean(y, mask))


def _highest(score: Tensor, candidates: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """The candidates with the highest scores. Their number is a fraction of the masked-in tokens. No host sync."""
    number = (mask.sum().double() * fraction).floor().clamp(min=1)
    # The rank of each score, from two sorts. topk would need the number on the host.
    order = torch.where(candidates, score, -torch.inf).flatten().argsort(descending=True, stable=True)
    return candidates & (order.argsort() < number).view_as(mask)
