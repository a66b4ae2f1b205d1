"""Terms that are added to an objective: KL penalties, a divergence to a teacher and an entropy bonus.

They follow the protocol of objectives but are not registered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from torchrl_llm_kl._numerics import Number, Positive, Scalar
from torchrl_llm_kl.estimators import EstimatorName, StraightThrough, check_penalty, corrected_k3, get_estimator
from torchrl_llm_kl.losses._arithmetic import bounded_exp, clamp, clean, prefix_sum
from torchrl_llm_kl.losses._metrics import step_metrics
from torchrl_llm_kl.losses._objective import KLLevel, LossInputs, LossTerm, Terms, loss_part
from torchrl_llm_kl.losses.objectives._supervised import Distribution, distill

#: The name of a registered estimator, or a function of the same signature.
Estimator = EstimatorName | Callable[..., Tensor]
#: Estimators that may be weighted for whole sequences: value and gradient follow the reverse KL of each position.
_OF_SEQUENCES = ("exact", "k1", "k3")


def _sampler_of(inputs: LossInputs, formula: object) -> Tensor | None:
    """The sampler's log-probs, if the estimator may read them. Only ``corrected_k3`` and a user's function do."""
    # Reading old log-probs leaves unscored first tokens out of the loss, so an estimator that ignores them must not read them.
    while isinstance(formula, (StraightThrough, partial)):
        formula = formula.base if isinstance(formula, StraightThrough) else formula.func
    if formula is corrected_k3:
        return inputs.old_log_prob
    ours = str(getattr(formula, "__module__", "")).startswith("torchrl_llm_kl.estimators.")
    return None if ours else inputs.get("old_log_prob")


def _estimator(estimator: Estimator) -> Callable[..., Tensor]:
    return get_estimator(estimator) if isinstance(estimator, str) else estimator


@loss_part("kl_to_ref")
def kl_to_ref(
    inputs: LossInputs,
    *,
    estimator: Estimator = "k2",
    coeff: Scalar = 1e-3,
    leave_out_experts: bool = False,
    level: KLLevel = "token",
    ratio_max: Positive | None = None,
) -> Terms:
    r"""KL penalty to the reference, the term ``kl_to_ref``: an estimate at each token, or the exact KL of each position.

    The gradient is the estimator's, which need not be the gradient of the KL whose value it estimates. ``"k2"`` has the
    gradient of :math:`KL(\pi \| \pi_{ref})`, ``"k3"`` has the gradient of the other direction, and the gradient of ``"k1"`` is
    0 on average. See :mod:`torchrl_llm_kl.estimators`. ``"exact"`` reads ``kl`` (see
    :func:`~torchrl_llm_kl.estimators.exact_kl`) instead of ``ref_log_prob``. ``"corrected_k3"`` also reads ``old_log_prob``.

    With ``level="token"`` each position's KL is minimised at the prefixes that the sampler reached. The policy gets no
    gradient for reaching other prefixes. With ``level="sequence"`` each value is multiplied by the probability ratio of the
    policy to ``old_log_prob``, over the tokens before it (``"exact"``) or up to it (``"k1"``, ``"k3"``). The ratio has a
    gradient, also where it is 1. The sum over a sequence is then unbiased for the KL of whole sequences, in value and gradient,
    on-policy and off-policy. Use the aggregation ``seq-mean-token-sum`` for that sum. Only masked-in tokens are part of the
    ratio, so texts of tools are not. ``"exact"`` has the least variance: a standard deviation of 0.3 to 0.4 of ``"k1"``'s over
    three tokens, where ``"k3"`` has 0.9. Every variance grows with the length and with the distance to the sampler.

    Hyper-parameters:
        estimator: one of :func:`~torchrl_llm_kl.estimators.available_estimators`, or a function
            ``(log_prob, ref_log_prob, old_log_prob)``. Trinity: ``kl_loss_fn``.
        coeff: weight of the term, at least 0. Trinity: ``kl_coef``.
        leave_out_experts: penalise only tokens outside ``expert_mask``.
        level: ``"token"`` or ``"sequence"``. ``"sequence"`` also reads ``old_log_prob``, and its estimator is ``"exact"``,
            ``"k1"`` or ``"k3"``.
        ratio_max: upper bound of the ratio of ``level="sequence"``. Above it the ratio has no gradient, so value and gradient
            are biased: too small. None for no bound.

    Raises:
        ValueError: for another estimator with ``level="sequence"``, or for ``ratio_max`` without it.

    Example:
        >>> log_prob, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]])
        >>> (term,) = kl_to_ref(LossInputs(log_prob, torch.ones(1, 2, dtype=torch.bool), ref_log_prob=ref))
        >>> term.value, term.weight
        (tensor([[0.1250, 0.0000]]), 0.001)

    Source: Ziegler et al. 2019 (arXiv 1909.08593), eq. 2. In the loss: Shao et al. 2024 (GRPO, arXiv 2402.03300), eq.
    3. The default is Trinity-RFT 0.6.0's. The sequence level is the chain rule of the KL with importance sampling, and is
    checked by enumerating all sequences.
    """
    check_penalty(coeff=coeff)
    if level == "sequence" and estimator not in _OF_SEQUENCES:
        raise ValueError(f"level='sequence' takes estimator='exact', 'k1' or 'k3', got {estimator!r}: use 'exact'.")
    if ratio_max is not None and level == "token":
        raise ValueError(f"ratio_max={ratio_max} has no effect with level='token'. Leave it out.")
    if leave_out_experts:
        inputs = inputs.within(~inputs.expert_mask)
    if estimator == "exact":
        value = inputs.kl
    else:
        function = _estimator(estimator)
        value = function(inputs.log_prob, inputs.ref_log_prob, _sampler_of(inputs, function))
    if level == "sequence":
        log_ratio = prefix_sum(inputs.log_ratio, inputs.mask)
        if estimator == "exact":  # it is a mean over the next token, so only the tokens before it are weighted
            log_ratio = log_ratio - inputs.log_ratio
        value = value * clamp(bounded_exp(log_ratio), high=ratio_max)
    return (LossTerm("kl_to_ref", value, inputs.mask, weight=coeff),)


@loss_part("kl_to_sampler")
def kl_to_sampler(
    inputs: LossInputs, *, estimator: Estimator = "k2", coeff: Scalar = 1e-3, leave_out_experts: bool = False
) -> Terms:
    r"""KL penalty to the sampling policy, the term ``kl_to_sampler``: a soft trust region.

    It reads ``sampler_log_prob`` if it is given, else ``old_log_prob``. Tokens where this is NaN (not scored) are left out of
    the term. Unlike in :func:`kl_to_ref`, the tokens come from the second of the two policies. Most estimators therefore have
    their stated value and gradient only while the two policies are close. ``"corrected_k3"`` has them wherever its ratio is not
    clamped. The gradient of ``"k2"`` is the log-ratio times the gradient of ``log_prob``, which always pulls back to the
    sampler.

    ``"exact"`` reads ``kl``, so the ``reference`` of the loss must be a copy of the sampler from before the step, and the loss
    has no other exact KL. The value is the KL from the policy to the sampler over the vocabulary, at the sampler's prefixes.

    Metrics, with ``"exact"``: ``kl_to_sampler_max``, the largest of these KLs, and ``improvement_bound_sampled``, an estimate
    of the :func:`~torchrl_llm_kl.losses.improvement_bound` from the prefixes of this (micro-)batch.

    Hyper-parameters:
        estimator: as for :func:`kl_to_ref`.
        coeff: weight of the term, at least 0.
        leave_out_experts: penalise only tokens outside ``expert_mask``, because no policy sampled the experts' tokens.

    Example:
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]])
        >>> kl_to_sampler(LossInputs(log_prob, torch.ones(1, 2, dtype=torch.bool), old_log_prob=old))[0].value
        tensor([[0.1250, 0.0000]])

    Source: prime-rl adds twice ``k2``, the squared log-ratio, to its loss.
    """
    check_penalty(coeff=coeff)
    own = inputs.get("sampler_log_prob")
    sampler = inputs.old_log_prob if own is None else own
    # The mask is counted before any model runs. NaN is in the data, so this mask is the same then.
    left_out = sampler.isnan() | inputs.expert_mask if leave_out_experts else sampler.isnan()
    mask = inputs.mask & ~left_out
    log_prob, sampler = (clean(x, mask) for x in (inputs.log_prob, sampler))
    if estimator == "exact":
        metrics = step_metrics(inputs.kl, log_prob - sampler, mask)
        return (LossTerm("kl_to_sampler", inputs.kl, mask, weight=coeff, metrics=metrics),)
    return (LossTerm("kl_to_sampler", _estimator(estimator)(log_prob, sampler, sampler), mask, weight=coeff),)


@loss_part("divergence_to_teacher")
def divergence_to_teacher(
    inputs: LossInputs,
    *,
    coeff: Scalar = 1.0,
    beta: Scalar = 0.5,
    distribution: Distribution = "top_k",
    teacher_weights: Sequence[float] | None = None,
) -> Terms:
    """Divergence to a teacher beside another objective, the term ``divergence_to_teacher``.

    Hyper-parameters:
        coeff: weight of the term, at least 0.
        beta, distribution, teacher_weights: see :func:`~torchrl_llm_kl.losses.distill`.

    Metrics: ``captured_mass``, as in :func:`~torchrl_llm_kl.losses.distill`.

    Example:
        >>> teacher, student = torch.tensor([[[0.9, 0.1]]]).log(), torch.tensor([[[0.5, 0.5]]]).log()
        >>> one = torch.ones(1, 1)
        >>> inputs = LossInputs(one, one > 0, outcomes=student, teacher_outcomes=teacher)
        >>> (term,) = divergence_to_teacher(inputs, beta=1.0, coeff=0.1)
        >>> term.value, term.weight
        (tensor([[0.5108]]), 0.1)

    Source: Agarwal et al. 2024 (GKD, arXiv 2306.13649), section 3.1: distillation beside a reward.
    """
    check_penalty(coeff=coeff)
    (term,) = distill(inputs, beta=beta, distribution=distribution, teacher_weights=teacher_weights)
    return (term.replace(name="divergence_to_teacher", weight=coeff),)


@loss_part("entropy_bonus")
def entropy_bonus(inputs: LossInputs, *, coeff: Number, leave_out_experts: bool = False) -> Terms:
    """Entropy bonus, the term ``entropy``: minus the entropy of the policy at each token.

    It has the gradient of the input ``entropy``, which is over the whole vocabulary and spreads probability. Minus the log-prob
    of the sampled token would estimate the same value, but with a gradient of mean 0.

    Hyper-parameters:
        coeff: weight of the term. Above 0 for more entropy, below 0 for less. Trinity: ``entropy_coef``.
        leave_out_experts: take the mean only over tokens outside ``expert_mask``. Trinity: ``entropy_loss_fn: mix``.

    Example:
        >>> entropy = torch.tensor([[0.5, 2.0]])
        >>> (term,) = entropy_bonus(LossInputs(torch.zeros(1, 2), torch.tensor([[True, False]]), entropy=entropy), coeff=0.01)
        >>> term.value, term.weight
        (tensor([[-0.5000, -0.0000]]), 0.01)

    Source: Mnih et al. 2016 (A3C, arXiv 1602.01783), section 4.
    """
    mask = inputs.mask & ~inputs.expert_mask if leave_out_experts else inputs.mask
    return (LossTerm("entropy", -inputs.entropy, mask, weight=coeff),)
