"""Preference losses without a reference: they compare log-probs of answers, and some also train the likelihood of good ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchrl_llm_kl._numerics import NonNegative, Positive, Scalar
from torchrl_llm_kl.losses._arithmetic import Aggregation
from torchrl_llm_kl.losses._objective import LossInputs, LossTerm, Smoothing, Terms, objective
from torchrl_llm_kl.losses.objectives._preference import SUM, OfLead, nll_of_chosen, of_lead, pair_up


@objective("cpo", aggregation=SUM)
def cpo(
    inputs: LossInputs,
    *,
    beta: Positive = 0.1,
    length_normalised: bool = False,
    loss: OfLead = "logistic",
    alpha: Scalar | None = None,
    label_smoothing: Smoothing = 0.0,
    nll_coeff: NonNegative = 1.0,
    nll_aggregation: Aggregation | None = None,
) -> Terms:
    r"""Contrastive preference optimisation: :func:`dpo` without a reference, plus the likelihood of chosen answers.

    The first term is ``-logsigmoid(beta * (c - l))`` with the log-probs ``c`` and ``l`` of the two answers. The second term is
    ``-log_prob`` of the chosen answers of the same pairs, which keeps them likely. Pairs and metrics are as in :func:`dpo`.

    Hyper-parameters:
        beta: per nat, above 0. The paper uses 0.1.
        loss: ``"logistic"``, or the function of the lead in :func:`hinge` or :func:`ipo`, without a reference.
        alpha: replaces each log-prob ``x`` by ``(1 - exp(-alpha x)) / alpha`` (AlphaPO). Not 0. None for ``x``.
        length_normalised: average log-probs over tokens instead of summing them, as TRL does for ``"ipo"``.
        label_smoothing: for ``"logistic"``, see :func:`dpo`.
        nll_coeff: weight of the second term. TRL: ``cpo_alpha``.
        nll_aggregation: aggregation of the second term over tokens. By default it is the loss's, which is the paper's sum over
            the answer. The authors' code and TRL use ``"token-mean"``, a far smaller weight.

    Returns:
        Two terms: ``objective`` with one value per pair, and ``nll`` with one value per token, ``[*B, T]``.

    Example:
        >>> log_prob, mask = torch.tensor([[-1.0], [-3.0]]), torch.ones(2, 1, dtype=torch.bool)
        >>> pair, nll = cpo(LossInputs(log_prob, mask), beta=0.5)
        >>> pair.value, nll.value[nll.mask]
        (tensor([[0.3133]]), tensor([1.]))

    Source: Xu et al. 2024 (arXiv 2401.08417), eq. 3 plus the negative log-likelihood. loss: TRL 1.16. alpha: Gupta et
    al. 2025 (AlphaPO, arXiv 2501.03884).
    """
    pairs = pair_up(inputs, beta, reference=False, length_normalised=length_normalised)
    value = of_lead(pairs.bent(alpha), loss, label_smoothing)
    return pairs.terms(value, nll_of_chosen(inputs, pairs, nll_coeff, nll_aggregation))


@objective("simpo", aggregation=SUM)
def simpo(
    inputs: LossInputs,
    *,
    beta: Positive = 2.0,
    margin: NonNegative = 1.0,
    alpha: Scalar | None = None,
    label_smoothing: Smoothing = 0.0,
) -> Terms:
    r"""SimPO: ``-logsigmoid(beta * (c - l) - margin)`` with the mean log-probs ``c`` and ``l`` per token of the two answers.

    It needs no reference. It rewards the likelihood per token, as in sampling, whatever the length. Pairs and metrics are as
    in :func:`dpo`.

    Hyper-parameters:
        beta: per nat, above 0. It is far greater than :func:`dpo`'s, because means are far smaller than sums.
        margin: reward by which the chosen answer should lead, at least 0. It is the paper's gamma. TRL: ``simpo_gamma``.
        alpha: AlphaPO, see :func:`cpo`.
        label_smoothing: see :func:`dpo`.

    Example:
        >>> log_prob = torch.tensor([[-1.0, -1.0], [-2.0, 0.0]])  # the rejected answer has one token
        >>> simpo(LossInputs(log_prob, torch.tensor([[True, True], [True, False]])))[0].value
        tensor([[0.3133]])

    Source: Meng et al. 2024 (arXiv 2405.14734), eq. 6. beta 2.0 and margin 1.0: the authors' for Llama-3-Base-8B.
    alpha: Gupta et al. 2025 (AlphaPO, arXiv 2501.03884).
    """
    pairs = pair_up(inputs, beta, reference=False, length_normalised=True)
    return pairs.terms(of_lead(pairs.bent(alpha), "logistic", label_smoothing, margin))


@objective("orpo", aggregation=SUM)
def orpo(
    inputs: LossInputs, *, beta: Positive = 0.1, nll_aggregation: Aggregation | None = "seq-mean-token-mean"
) -> Terms:
    r"""ORPO: the chosen answer's negative log-likelihood, plus ``-beta logsigmoid(log(odds_chosen / odds_rejected))``.

    The odds of an answer are ``exp(x) / (1 - exp(x))`` with its mean log-prob ``x`` per token. The loss needs no reference and
    combines SFT on the chosen answers and preference learning in one stage. Mean log-probs are capped at -1e-7, without
    gradient above. Pairs and metrics are as in :func:`dpo`, with mean log-probs in place of ``c`` and ``l``.

    Hyper-parameters:
        beta: weight of the odds ratio, above 0. It is the paper's lambda.
        nll_aggregation: aggregation of the likelihood over tokens. The paper averages over each answer (eq. 3). None: the
            aggregation of the loss.

    Returns:
        Two terms: ``objective`` with one value per pair, and ``nll`` with one value per token, ``[*B, T]``.

    Example:
        >>> log_prob, mask = torch.tensor([[0.5], [0.25]]).log(), torch.ones(2, 1, dtype=torch.bool)
        >>> odds, nll = orpo(LossInputs(log_prob, mask), beta=0.5)  # odds of 1 and 1/3
        >>> odds.value, nll.value[nll.mask]
        (tensor([[0.1438]]), tensor([0.6931]))

    Source: Hong et al. 2024 (arXiv 2403.07691), eqs. 3 to 7. The weight 0.1: TRL 1.16, the paper's for Mistral-7B.
    """
    pairs = pair_up(inputs, beta, reference=False, length_normalised=True)
    log_odds = _log_odds(pairs.chosen) - _log_odds(pairs.rejected)
    return pairs.terms(-beta * logsigmoid(log_odds), nll_of_chosen(inputs, pairs, 1.0, nll_aggregation))


@objective("tpo", aggregation=SUM, together=3)
def tpo(
    inputs: LossInputs,
    *,
    beta: Positive = 0.01,
    loss: OfLead = "logistic",
    label_smoothing: Smoothing = 0.0,
    margin: NonNegative = 0.0,
    length_normalised: bool = False,
    nll_coeff: NonNegative = 1.0,
    nll_aggregation: Aggregation | None = "token-mean",
) -> Terms:
    r"""Triple preference optimisation: :func:`cpo` with a third answer, the best one, whose likelihood is trained.

    Rows are chosen, rejected, third, chosen, and so on. Leading batch dimensions are flattened into rows. The first term
    compares the first two answers without a reference. The second term is ``-log_prob`` of the third answer.

    Hyper-parameters:
        beta: per nat, above 0.
        loss, label_smoothing: see :func:`cpo`.
        margin: reward by which the chosen answer should lead, for ``"logistic"``, at least 0. TRL: ``tpo_l_gamma``.
        length_normalised: average log-probs over tokens. With a margin this is TPO-L.
        nll_coeff: weight of the second term. TRL: ``tpo_alpha``.
        nll_aggregation: aggregation of the second term over tokens. None: the aggregation of the loss.

    Returns:
        Two terms: ``objective`` with one value per triple, ``[P, 1]``, and the metrics of :func:`dpo`, and ``nll`` with one
        value per token.

    Example:
        >>> log_prob, mask = torch.tensor([[-1.0], [-3.0], [-0.5]]), torch.ones(3, 1, dtype=torch.bool)
        >>> pair, nll = tpo(LossInputs(log_prob, mask), beta=0.5)
        >>> pair.value, nll.value[nll.mask]
        (tensor([[0.3133]]), tensor([0.5000]))

    Source: Saeidi et al. 2024 (TPO, arXiv 2405.16681), with TPO-L. beta 0.01, weight 1 and the other losses: TRL 1.16.
    """
    log_prob, mask = inputs.log_prob, inputs.mask
    place = torch.arange(mask.shape[:-1].numel(), device=mask.device)
    if len(place) % 3:
        raise ValueError(f"expected rows chosen, rejected, third, chosen, ..., got {len(place)} rows: leave some out.")
    compared = place.view(-1, 3)[:, :2].reshape(-1)
    # The first two rows of each triple, as a batch of neighbouring pairs.
    two = LossInputs.of_clean(log_prob=log_prob.flatten(0, -2)[compared], mask=mask.flatten(0, -2)[compared])
    pairs = pair_up(two, beta, reference=False, length_normalised=length_normalised)
    third = mask & (place % 3 == 2).view(*mask.shape[:-1], 1)
    nll = LossTerm("nll", -log_prob, third, weight=nll_coeff, aggregation=nll_aggregation)
    return pairs.terms(of_lead(pairs, loss, label_smoothing, margin), nll)


def _log_odds(log_prob: Tensor) -> Tensor:
    """``log(p / (1 - p))`` for ``p = exp(log_prob)``, accurate near 0 and near 1."""
    x = log_prob.clamp(max=-1e-7)  # the odds of a certain answer are infinite
    return x - torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-x.exp()))
