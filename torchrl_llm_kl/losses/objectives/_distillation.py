"""Distillation: the divergence to a teacher's distribution at each token, over its top k or the whole vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import NonPositive, Positive, Share, masked_mean
from torchrl_llm_kl.estimators import top_k_divergence
from torchrl_llm_kl.losses._arithmetic import bounded_exp, clamp
from torchrl_llm_kl.losses._inputs import LossInputs
from torchrl_llm_kl.losses._objective import LossTerm, Terms, objective

#: What a distillation compares: a teacher's top k and "any other token", or every token of a teacher in this process.
Distribution = Literal["top_k", "exact"]


@objective("distill", only_with=dict.fromkeys(("teacher_weights", "log_prob_min"), ("distribution", ("top_k",))))
def distill(
    inputs: LossInputs,
    *,
    beta: Share = 0.5,
    distribution: Distribution = "top_k",
    teacher_weights: Sequence[float] | None = None,
    ratio_max: Positive | None = None,
    value_max: Positive | None = None,
    log_prob_min: NonPositive | None = None,
) -> Terms:
    r"""Generalised Jensen-Shannon divergence to a teacher, at each token over ``k + 1`` outcomes or the whole vocabulary.

    With the student's distribution ``q``, the teacher's ``p`` and :math:`m = \beta p + (1 - \beta) q` the value is
    :math:`\beta KL(p \| m) + (1-\beta) KL(q \| m)`; at ``beta`` 0 the forward :math:`KL(p \| q)`, at 1 the reverse
    :math:`KL(q \| p)`: see :func:`~torchrl_llm_kl.estimators.top_k_divergence`. The gradient is the value's given the
    prefix, whoever wrote it: with the student's own answers this is on-policy distillation, with others' it is supervised.

    Several teachers have a weighted sum of divergences, each over its own top k. With weights that add up to 1 and every token
    listed, the sum of forward KLs has the gradient of the forward KL to the weighted mean of the teachers' distributions, the
    sum of reverse KLs the gradient of the reverse KL to their weighted geometric mean, normalised.

    Hyper-parameters:
        beta: the teacher's share of the mixture, 0 to 1. TRL's ``beta``.
        distribution: ``"top_k"`` reads ``outcomes`` and ``teacher_outcomes``; ``"exact"`` reads ``teacher_divergence``, which
            :class:`~torchrl_llm_kl.losses.PolicyLoss` computes from both models, with this ``beta``.
        teacher_weights: one number for each teacher, not negative, used as they are; None: equal ones that add up to 1.
        ratio_max: multiply by the ratio to the sampler, at most this, without gradient: for answers of an older student. None:
            1. TRL: ``distillation_is_clip``.
        value_max: largest value of a token, nats, above 0; no gradient beyond. None for no bound. verl: ``loss_max_clamp``.
        log_prob_min: smallest log-prob of an outcome, at most 0, of ``"top_k"``: no gradient below. None for no bound. verl:
            ``log_prob_min_clamp``.

    Metrics: ``captured_mass``, the teacher's probability of its top k (with ``"top_k"``); of several teachers the mean with
    their weights. Where it is far below 1 the value is far below the divergence over all tokens.

    Example:
        >>> teacher, student = torch.tensor([[[0.7, 0.2, 0.1]]]).log(), torch.tensor([[[0.4, 0.4, 0.2]]]).log()
        >>> log_prob, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
        >>> (term,) = distill(LossInputs(log_prob, mask, outcomes=student, teacher_outcomes=teacher), beta=0.0)
        >>> term.value, term.metrics["captured_mass"]
        (tensor([[0.1838]]), tensor(0.9000))

    Source: Agarwal et al. 2024 (GKD, arXiv 2306.13649), eq. 1 and algorithm 1; TRL 1.16:
    GKDTrainer.generalized_jsd_loss; ratio_max: Huebotter et al. 2026 (SDPO, arXiv 2601.20802), 2 in TRL; the other
    bounds: verl 0.9.1, 10 and -10.
    """
    mask, metrics = inputs.mask, dict[str, Tensor]()
    if distribution == "exact":
        value = inputs.teacher_divergence
    else:
        outcomes, teacher = (
            x.unsqueeze(-2) if x.ndim == mask.ndim + 1 else x for x in (inputs.outcomes, inputs.teacher_outcomes)
        )
        weight = _teacher_weights(teacher_weights, outcomes)
        captured = -(weight / weight.sum() * teacher[..., -1].expm1()).sum(-1)
        metrics["captured_mass"] = masked_mean(captured, mask)
        outcomes, teacher = clamp(outcomes, low=log_prob_min), clamp(teacher, low=log_prob_min)
        value = (weight * top_k_divergence(outcomes, teacher, beta=beta)).sum(-1)
    value = clamp(value, high=value_max)
    if ratio_max is not None:
        value = value * clamp(bounded_exp(inputs.log_ratio), high=ratio_max).detach()
    return (LossTerm("objective", value, mask, metrics=metrics),)


def _teacher_weights(given: Sequence[float] | None, outcomes: Tensor) -> Tensor:
    """The weight of each teacher; ``[M]``."""
    number = outcomes.shape[-2]
    if given is None:
        return outcomes.new_full((number,), 1 / number)
    if len(given) != number:
        raise ValueError(f"teacher_weights has {len(given)} numbers for {number} teachers: pass one for each.")
    return torch.tensor(list(given), dtype=outcomes.dtype, device=outcomes.device)
