"""Preference losses on pairs of a chosen and a rejected answer, relative to a reference.

:func:`pair_up` turns the inputs of a loss into :class:`Pairs`, with one value per answer. Each objective computes a value from
each pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypedDict

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from typing_extensions import Unpack

from torchrl_llm_kl._numerics import Positive, PositiveShare, Scalar, Share, masked_mean
from torchrl_llm_kl._registry import Range, no_such
from torchrl_llm_kl.losses._arithmetic import LARGEST_LOG_RATIO, Aggregation, bounded_exp, sequence_mean, sequence_sum
from torchrl_llm_kl.losses._objective import (
    FDivergence,
    LossInputs,
    LossTerm,
    Smoothing,
    Terms,
    Weighting,
    get_objective,
    objective,
)

# ------------------------------------------------------------------ pairs


class AnswerOptions(TypedDict, total=False):
    """Options of :func:`pair_up` for losses of both answers, as described in :func:`dpo`."""

    ld_alpha: Share | None
    weighting: Weighting


class PairOptions(AnswerOptions, total=False):
    """Options of :func:`pair_up` for losses of the lead."""

    f_divergence: FDivergence
    f_alpha: PositiveShare


@dataclass(frozen=True, eq=False)
class Pairing:
    """The rows that form pairs. ``order`` sorts them into adjacent rows, chosen first. None if they are sorted already."""

    order: Tensor | None

    def pairs(self, rows: Tensor) -> Tensor:
        """Arrange one value per row, ``[*B]`` or ``[*B, 1]``, as ``[P, 2]``."""
        rows = rows.reshape(-1)
        return (rows if self.order is None else rows[self.order]).view(-1, 2)

    def rows(self, pairs: Tensor) -> Tensor:
        """The inverse of :meth:`pairs`, ``[S]``."""
        pairs = pairs.reshape(-1)
        # index_put is not in place, so that gradients pass.
        return pairs if self.order is None else torch.empty_like(pairs).index_put((self.order,), pairs)


@dataclass(frozen=True, eq=False)
class Pairs:
    r"""Whole answers, with one value per pair, ``[P, 1]``.

    ``chosen`` and ``rejected`` are :math:`\log(\pi / \pi_{ref})` of the two answers, transformed by the options of
    :func:`pair_up`. ``mask`` is True where both answers have masked-in tokens. ``weight`` is None without a weighting.
    """

    chosen: Tensor
    rejected: Tensor
    mask: Tensor
    beta: Scalar
    weight: Tensor | None
    pairing: Pairing

    @property
    def delta(self) -> Tensor:
        """The lead of the chosen answer over the rejected one, nats."""
        return self.chosen - self.rejected

    def bent(self, alpha: Scalar | None) -> Pairs:
        """A copy with ``(1 - exp(-alpha x)) / alpha`` in place of each log-prob ``x``. No change for ``alpha=None``."""
        if alpha is None:
            return self
        if not isinstance(alpha, Tensor) and not (math.isfinite(alpha) and alpha):
            raise ValueError(f"alpha must be a finite number other than 0, got {alpha}: None is no change.")
        chosen, rejected = (_bend(x, alpha) for x in (self.chosen, self.rejected))
        return replace(self, chosen=chosen, rejected=rejected)

    def terms(self, value: Tensor, *others: LossTerm) -> Terms:
        """A term with one value per pair ``[P, 1]`` and the metrics, followed by ``others``. Pairs outside the mask are 0."""
        mask = self.mask
        # Rewards are logged, not trained.
        won, lost = self.beta * self.chosen.detach(), self.beta * self.rejected.detach()
        margin = won - lost
        metrics = {
            "chosen_reward": masked_mean(won, mask),
            "rejected_reward": masked_mean(lost, mask),
            "reward_margin": masked_mean(margin, mask),
            "reward_accuracy": masked_mean((margin.sign() + 1) / 2, mask),  # a tie is half right
        }
        if self.weight is not None:
            value = self.weight * value
            metrics["weight_mean"] = masked_mean(self.weight, mask)
        return (LossTerm("objective", torch.where(mask, value, 0), mask, metrics=metrics), *others)


def pair_up(
    inputs: LossInputs,
    beta: Scalar,
    *,
    pairing: Pairing | None = None,
    reference: bool = True,
    length_normalised: bool = False,
    ld_alpha: Share | None = None,
    weighting: Weighting = "none",
    f_divergence: FDivergence = "reverse_kl",
    f_alpha: PositiveShare = 0.5,
) -> Pairs:
    """The pairs of a batch. Without ``reference`` they hold plain log-probs. :func:`dpo` describes the options."""
    log_prob, mask = inputs.log_prob, inputs.mask
    pairing = pairing or pairing_of(inputs)
    ratio = log_prob - inputs.ref_log_prob if reference else log_prob
    if ld_alpha is not None:
        ratio = _desensitised(ratio, mask, ld_alpha, pairing)
    ratio = _derivative(sequence_sum(ratio, mask), f_divergence, f_alpha)
    if length_normalised:
        ratio = ratio / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio, present = pairing.pairs(ratio), pairing.pairs(mask.any(-1))
    weight = None
    if weighting != "none":
        aligned = inputs.sharp_log_prob - log_prob if weighting == "aligned" else log_prob
        weight = bounded_exp(pairing.pairs(sequence_mean(aligned.detach(), mask)).sum(-1, keepdim=True))
    return Pairs(ratio[:, :1], ratio[:, 1:], present.all(-1, keepdim=True), beta, weight, pairing)


def _desensitised(ratio: Tensor, mask: Tensor, ld_alpha: Scalar, pairing: Pairing) -> Tensor:
    """Scale the log-ratios of tokens beyond the length of the pair's shorter answer by ``ld_alpha``."""
    shorter = pairing.pairs(mask.sum(-1)).amin(-1, keepdim=True).expand(-1, 2)
    common = mask.cumsum(-1) <= pairing.rows(shorter).view(*mask.shape[:-1], 1)
    return torch.where(common, ratio, ld_alpha * ratio)


#: Cap of the exponents of f-divergences, in nats. :func:`ipo` squares the result, which must still fit into float32.
_LARGEST = LARGEST_LOG_RATIO / 2


def _derivative(ratio: Tensor, f_divergence: FDivergence, f_alpha: Scalar) -> Tensor:
    r"""``f'`` at :math:`\pi / \pi_{ref}`, minus its value at 1. ``ratio`` is the logarithm of that quotient."""
    if f_divergence == "forward_kl":
        return 1 - (-ratio).clamp(max=_LARGEST).exp()
    if f_divergence == "js_divergence":
        return math.log(2) + logsigmoid(ratio)
    if f_divergence == "alpha_divergence":
        return _bend(ratio, f_alpha)
    return ratio


def _bend(x: Tensor, alpha: Scalar) -> Tensor:
    return -torch.expm1((-alpha * x).clamp(max=_LARGEST)) / alpha


def pairing_of(inputs: LossInputs) -> Pairing:
    """The pairs given by ``pair_id`` and ``chosen``, or neighbouring rows if both are missing."""
    pair_id, chosen, shape = inputs.get("pair_id"), inputs.get("chosen"), inputs.mask.shape[:-1]
    if pair_id is not None and chosen is not None:
        return Pairing(interleaving(pair_id.reshape(-1), chosen.reshape(-1)))
    if pair_id is not None or chosen is not None:
        raise ValueError("pass both pair_id and chosen, or neither if rows are chosen, rejected, chosen, ...")
    if shape.numel() % 2:
        raise ValueError(f"expected rows chosen, rejected, chosen, ..., got {shape.numel()}: the last has no partner.")
    return Pairing(None)


def interleaving(pair_id: Tensor, chosen: Tensor, name: str = "pair_id") -> Tensor:
    """The order of rows that makes pairs adjacent, sorted by id, chosen first. Messages call the id ``name``."""
    if not torch.compiler.is_compiling():  # a check that reads values would break the graph
        ids, pair = pair_id.unique(return_inverse=True)
        rows_of = torch.stack([torch.bincount(pair[chosen == side], minlength=len(ids)) for side in (True, False)], -1)
        for at in (rows_of != 1).any(-1).nonzero().flatten().tolist()[:1]:
            rows = f"{int(rows_of[at, 0])} chosen and {int(rows_of[at, 1])} rejected rows"
            raise ValueError(f"{name} {int(ids[at])} has {rows}, expected one of each.")
    # Two stable sorts: by side, then by id.
    first = (~chosen).long().argsort(stable=True)
    return first[pair_id[first].argsort(stable=True)]


# ------------------------------------------------------------------ the family

#: The function of the lead, for losses that offer several.
OfLead = Literal["logistic", "hinge", "ipo"]
SUM: Aggregation = "seq-mean-token-sum"
#: ``f_alpha`` has an effect only with the alpha-divergence.
_OF_ALPHA: dict[str, tuple[str, tuple[object, ...]]] = {"f_alpha": ("f_divergence", ("alpha_divergence",))}


def logistic(logit: Tensor, label_smoothing: Scalar = 0.0) -> Tensor:
    """``-logsigmoid`` of the logit, for labels that are wrong with probability ``label_smoothing``."""
    right, wrong = -logsigmoid(logit), -logsigmoid(-logit)
    return (1 - label_smoothing) * right + label_smoothing * wrong


def of_lead(pairs: Pairs, loss: OfLead, label_smoothing: Scalar = 0.0, margin: Scalar = 0.0) -> Tensor:
    """The loss of the lead as in :func:`dpo`, :func:`hinge` or :func:`ipo`."""
    if loss == "hinge":
        return (1 - pairs.beta * pairs.delta).relu()
    if loss == "ipo":
        return (pairs.delta - 1 / (2 * pairs.beta)).square()
    return logistic(pairs.beta * pairs.delta - margin, label_smoothing)


# ------------------------------------------------------------------ functions of the lead


@objective("dpo", aggregation=SUM, only_with=_OF_ALPHA, options=pair_up)
def dpo(
    inputs: LossInputs,
    *,
    beta: Positive = 0.1,
    length_normalised: bool = False,
    label_smoothing: Smoothing = 0.0,
    **options: Unpack[PairOptions],
) -> Terms:
    r"""Direct preference optimisation: ``-logsigmoid(beta * delta)`` per pair of a chosen and a rejected answer.

    ``c`` and ``l`` are the log-ratios ``log_prob - ref_log_prob`` of the chosen and the rejected (lost) answer, summed over
    tokens, and ``delta = c - l``. The gradient raises the chosen answer and lowers the rejected one, by ``beta`` times
    ``sigmoid(-beta * delta)``. This sigmoid is the probability that the policy still gives to the wrong order.

    Rows are chosen, rejected, chosen, ... unless ``pair_id`` and ``chosen`` are given. Rows may then be in any order, and
    checking them takes one host sync. Leading batch dimensions are flattened into rows. A pair is left out if one of its
    answers has no masked-in token.

    Hyper-parameters:
        beta: strength of the pull to the reference, per nat, above 0.
        label_smoothing: probability that a label is wrong, up to 1/2 (cDPO).
        length_normalised: average log-ratios over tokens instead of summing them.
        ld_alpha: factor, 0 to 1, of the log-probs of tokens beyond the length of the pair's shorter answer (LD-DPO). None for
            1. Below 1, an answer gains less by being longer.
        f_divergence: the divergence that penalises the distance to the reference. With ``u = exp(c)``, ``c`` is replaced by
            ``c`` (``"reverse_kl"``), ``1 - 1 / u`` (``"forward_kl"``), ``log(2 u / (1 + u))`` (``"js_divergence"``) or
            ``(1 - u**-f_alpha) / f_alpha`` (``"alpha_divergence"``), and ``l`` in the same way. Powers of ``u`` are capped at
            exp(40), without gradient above. The metrics use the replaced values.
        f_alpha: parameter of the alpha-divergence, in ``(0, 1]``. It is the reverse KL towards 0 and the forward KL at 1.
        weighting: factor of the pair's loss, without gradient (WPO). ``"probability"`` is the product over both answers of
            ``exp(mean log_prob)``. ``"aligned"`` first subtracts ``log(sum_v p_v**2)`` from each ``log_prob``, the log of the
            mean probability of the policy's own tokens, so that the policy's own answers weigh about 1. It needs
            ``sharp_log_prob``.

    Returns:
        One term, ``objective``, with one value per pair, ``[P, 1]``, in the order of rows or of ``pair_id``. Metrics, as means
        over pairs: ``chosen_reward`` (``beta c``), ``rejected_reward`` (``beta l``), ``reward_margin``, ``reward_accuracy``
        and, with a weighting, ``weight_mean``.

    Raises:
        ValueError: if a pair does not have exactly one chosen and one rejected row.

    Example:
        >>> log_prob = torch.tensor([[-1.0, -1.0], [-2.0, -3.0]])  # chosen, rejected
        >>> ref_log_prob = torch.tensor([[-1.5, -1.5], [-2.0, -2.0]])
        >>> mask = torch.ones(2, 2, dtype=torch.bool)
        >>> dpo(LossInputs(log_prob, mask, ref_log_prob=ref_log_prob), beta=0.5)[0].value
        tensor([[0.3133]])
        >>> dpo(LossInputs(log_prob, mask, ref_log_prob=ref_log_prob), beta=0.5, f_divergence="forward_kl")[0].value
        tensor([[0.2691]])

    Source: Rafailov et al. 2023 (arXiv 2305.18290), eq. 7. Label smoothing: Mitchell 2023, 'A note on DPO with noisy
    preferences & relationship to IPO'. f-divergences: Wang et al. 2023 (arXiv 2309.16240), theorem 1. ld_alpha: Liu et
    al. 2024 (LD-DPO, arXiv 2409.06411). weighting: Zhou et al. 2024 (WPO, arXiv 2406.11827).
    """
    pairs = pair_up(inputs, beta, length_normalised=length_normalised, **options)
    return pairs.terms(logistic(pairs.beta * pairs.delta, label_smoothing))


@objective("robust", aggregation=SUM, only_with=_OF_ALPHA, options=pair_up)
def robust(
    inputs: LossInputs,
    *,
    beta: Positive = 0.1,
    label_smoothing: Annotated[Scalar, Range(0.0, below=0.5)] = 0.0,
    **options: Unpack[PairOptions],
) -> Terms:
    r"""Robust DPO: a loss whose mean over noisy labels is the loss of :func:`dpo` on the true labels.

    With ``e = label_smoothing`` it is ``((1 - e) * right - e * wrong) / (1 - 2 e)``. ``right`` is :func:`dpo`'s loss of the
    pair, and ``wrong`` is the same loss with the answers swapped. The loss has no lower bound. Pairs, metrics and the other
    hyper-parameters are as in :func:`dpo`.

    Hyper-parameters:
        label_smoothing: probability that a label is wrong, below 1/2.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-3.0]]), torch.tensor([[-2.0], [-2.0]])
        >>> mask = torch.ones(2, 1, dtype=torch.bool)
        >>> robust(LossInputs(log_prob, mask, ref_log_prob=ref_log_prob), beta=0.5, label_smoothing=0.2)[0].value
        tensor([[-0.0201]])

    Source: Chowdhury et al. 2024 (arXiv 2403.00409), the loss of robust DPO.
    """
    pairs = pair_up(inputs, beta, **options)
    right, wrong = -logsigmoid(pairs.beta * pairs.delta), -logsigmoid(-pairs.beta * pairs.delta)
    return pairs.terms(((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing))


@objective("hinge", aggregation=SUM, only_with=_OF_ALPHA, options=pair_up)
def hinge(inputs: LossInputs, *, beta: Positive = 0.1, **options: Unpack[PairOptions]) -> Terms:
    r"""SLiC's hinge: ``max(0, 1 - beta * delta)`` for each pair. Everything else is as in :func:`dpo`.

    The gradient is ``-beta`` times the gradient of ``delta`` until the chosen answer leads by ``1 / beta`` nats, then 0.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-3.0]]), torch.tensor([[-2.0], [-2.0]])
        >>> hinge(LossInputs(log_prob, torch.ones(2, 1, dtype=torch.bool), ref_log_prob=ref_log_prob), beta=0.2)[0].value
        tensor([[0.6000]])

    Source: Zhao et al. 2023 (SLiC-HF, arXiv 2305.10425) relative to a reference: Liu et al. 2023 (RSO, arXiv
    2309.06657).
    """
    pairs = pair_up(inputs, beta, **options)
    return pairs.terms(of_lead(pairs, "hinge"))


@objective("ipo", aggregation=SUM, only_with=_OF_ALPHA, options=pair_up)
def ipo(
    inputs: LossInputs, *, beta: Positive = 0.1, length_normalised: bool = False, **options: Unpack[PairOptions]
) -> Terms:
    r"""IPO: ``(delta - 1 / (2 beta))**2`` for each pair, nats squared. Everything else is as in :func:`dpo`.

    The gradient pulls the lead of the chosen answer to ``1 / (2 beta)`` nats from both sides, so the lead stays bounded.
    ``beta`` is the paper's tau, per nat.

    Hyper-parameters:
        length_normalised: average log-ratios over tokens, as TRL does, instead of summing them, as the paper does. With sums,
            long answers reach the target almost at once.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-3.0]]), torch.tensor([[-2.0], [-2.0]])
        >>> ipo(LossInputs(log_prob, torch.ones(2, 1, dtype=torch.bool), ref_log_prob=ref_log_prob), beta=0.1)[0].value
        tensor([[9.]])

    Source: Azar et al. 2023 (arXiv 2310.12036), eq. 17.
    """
    pairs = pair_up(inputs, beta, length_normalised=length_normalised, **options)
    return pairs.terms(of_lead(pairs, "ipo"))


@objective("exo_pair", aggregation=SUM, only_with=_OF_ALPHA, options=pair_up)
def exo_pair(
    inputs: LossInputs,
    *,
    beta: Positive = 0.1,
    label_smoothing: Annotated[Scalar, Range(above=0.0, high=0.5)] = 1e-3,
    **options: Unpack[PairOptions],
) -> Terms:
    r"""Efficient exact optimisation: ``KL(p || q)`` of the policy's order ``p`` of a pair to the labels' order ``q``.

    The policy's probabilities of the two orders are ``p = (sigmoid(beta delta), sigmoid(-beta delta))``. The labels'
    probabilities are ``q = (1 - e, e)`` with ``e = label_smoothing``. :func:`dpo` has the KL in the other direction. Here the
    gradient vanishes both at the labels' odds and where the policy is certain. Everything else is as in :func:`dpo`.

    Hyper-parameters:
        label_smoothing: probability that a label is wrong, above 0 and up to 1/2. The paper uses 1e-3.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-3.0]]), torch.tensor([[-2.0], [-2.0]])
        >>> mask = torch.ones(2, 1, dtype=torch.bool)
        >>> exo_pair(LossInputs(log_prob, mask, ref_log_prob=ref_log_prob), beta=0.5, label_smoothing=0.2)[0].value
        tensor([[0.0138]])

    Source: Ji et al. 2024 (EXO, arXiv 2402.00856), eq. 16 with two answers.
    """
    pairs = pair_up(inputs, beta, **options)
    # As a tensor, because the formula takes its logarithm.
    wrong = torch.as_tensor(label_smoothing, dtype=pairs.delta.dtype, device=pairs.delta.device)
    won, lost = logsigmoid(pairs.beta * pairs.delta), logsigmoid(-pairs.beta * pairs.delta)
    return pairs.terms(won.exp() * (won - torch.log1p(-wrong)) + lost.exp() * (lost - wrong.log()))


@objective("discopop", aggregation=SUM, only_with=_OF_ALPHA, options=pair_up)
def discopop(
    inputs: LossInputs, *, beta: Positive = 0.1, tau: Positive = 0.05, **options: Unpack[PairOptions]
) -> Terms:
    r"""DiscoPOP: a weighted mean of ``-logsigmoid(x)`` and ``exp(-x)``, with ``x = beta * delta``.

    The weight of the first is ``sigmoid(-x / tau)``, and the weight of the second is ``sigmoid(x / tau)``. A language model
    discovered this loss. It has a local minimum below ``x = 0``. Everything else is as in :func:`dpo`.

    Hyper-parameters:
        tau: width in ``x`` of the transition, above 0. The paper uses 0.05. TRL: ``discopop_tau``.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-3.0]]), torch.tensor([[-2.0], [-2.0]])
        >>> mask = torch.ones(2, 1, dtype=torch.bool)
        >>> discopop(LossInputs(log_prob, mask, ref_log_prob=ref_log_prob), beta=0.5, tau=0.5)[0].value
        tensor([[0.3614]])

    Source: Lu et al. 2024 (arXiv 2406.08414), the log-ratio modulated loss.
    """
    pairs = pair_up(inputs, beta, **options)
    logit = pairs.beta * pairs.delta
    exponential = bounded_exp(logsigmoid(logit / tau) - logit)  # sigmoid(x / tau) exp(-x), without overflow
    return pairs.terms((-logit / tau).sigmoid() * -logsigmoid(logit) + exponential)


# ------------------------------------------------------------------ functions of both answers


@objective("apo_zero", aggregation=SUM, options=pair_up)
def apo_zero(inputs: LossInputs, *, beta: Positive = 0.1, **options: Unpack[AnswerOptions]) -> Terms:
    r"""Anchored preference optimisation: ``1 - sigmoid(beta * c) + sigmoid(beta * l)`` for each pair, from 0 to 2.

    The gradient independently raises the chosen answer and lowers the rejected one relative to the reference. It suits data
    whose chosen answers are better than the model's. The paper's formula is smaller by 1. ``c``, ``l`` and everything else
    are as in :func:`dpo`.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-4.0]]), torch.tensor([[-2.0], [-2.0]])
        >>> apo_zero(LossInputs(log_prob, torch.ones(2, 1, dtype=torch.bool), ref_log_prob=ref_log_prob), beta=0.5)[0].value
        tensor([[0.6465]])

    Source: D'Oosterlinck et al. 2024 (arXiv 2408.06266), eq. 7, plus 1.
    """
    pairs = pair_up(inputs, beta, **options)
    return pairs.terms((-pairs.beta * pairs.chosen).sigmoid() + (pairs.beta * pairs.rejected).sigmoid())


@objective("apo_down", aggregation=SUM, options=pair_up)
def apo_down(inputs: LossInputs, *, beta: Positive = 0.1, **options: Unpack[AnswerOptions]) -> Terms:
    r"""Anchored preference optimisation: ``sigmoid(beta * c) + 1 - sigmoid(beta * delta)`` for each pair, from 0 to 2.

    The gradient lowers the chosen answer, and lowers the rejected one more. It suits data whose chosen answers are worse than
    the model's. The paper's formula is smaller by 1. ``c``, ``delta`` and everything else are as in :func:`dpo`.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-4.0]]), torch.tensor([[-2.0], [-2.0]])
        >>> apo_down(LossInputs(log_prob, torch.ones(2, 1, dtype=torch.bool), ref_log_prob=ref_log_prob), beta=0.5)[0].value
        tensor([[0.8049]])

    Source: D'Oosterlinck et al. 2024 (arXiv 2408.06266), eq. 8, plus 1.
    """
    pairs = pair_up(inputs, beta, **options)
    return pairs.terms((pairs.beta * pairs.chosen).sigmoid() + (-pairs.beta * pairs.delta).sigmoid())


@objective("sppo_hard", aggregation=SUM, options=pair_up)
def sppo_hard(inputs: LossInputs, *, beta: Positive = 0.1, **options: Unpack[AnswerOptions]) -> Terms:
    r"""Self-play preference optimisation: ``(c - 1 / (2 beta))**2 + (l + 1 / (2 beta))**2`` for each pair, nats squared.

    The reference is the policy of the previous round of play. The gradient pulls each log-ratio to its own target. ``beta`` is
    one over the paper's eta, per nat. ``c``, ``l`` and everything else are as in :func:`dpo`. (:func:`sppo` is another method,
    which learns from advantages.)

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-4.0]]), torch.tensor([[-2.0], [-2.0]])
        >>> sppo_hard(LossInputs(log_prob, torch.ones(2, 1, dtype=torch.bool), ref_log_prob=ref_log_prob), beta=0.1)[0].value
        tensor([[25.]])

    Source: Wu et al. 2024 (arXiv 2405.00675), eq. 4.7 with probabilities of winning of 1 and 0.
    """
    pairs = pair_up(inputs, beta, **options)
    target = 1 / (2 * pairs.beta)
    return pairs.terms((pairs.chosen - target).square() + (pairs.rejected + target).square())


@objective("nca_pair", aggregation=SUM, options=pair_up)
def nca_pair(inputs: LossInputs, *, beta: Positive = 0.1, **options: Unpack[AnswerOptions]) -> Terms:
    r"""Noise-contrastive alignment: ``-logsigmoid(beta c) - (logsigmoid(-beta c) + logsigmoid(-beta l)) / 2`` for each pair.

    The gradient pulls the chosen answer up to ``c = log(2) / beta`` but no further, and pulls the rejected answer down. It
    trains absolute likelihoods, so the chosen answer does not become less likely. ``c``, ``l`` and everything else are as in
    :func:`dpo`.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-4.0]]), torch.tensor([[-2.0], [-2.0]])
        >>> nca_pair(LossInputs(log_prob, torch.ones(2, 1, dtype=torch.bool), ref_log_prob=ref_log_prob), beta=0.5)[0].value
        tensor([[1.1177]])

    Source: Chen et al. 2024 (arXiv 2402.05369), NCA with two answers whose rewards are far apart.
    """
    pairs = pair_up(inputs, beta, **options)
    chosen, rejected = pairs.beta * pairs.chosen, pairs.beta * pairs.rejected
    return pairs.terms(-logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected))


# ------------------------------------------------------------------ several at once


@objective("preference_sum", aggregation=SUM)
def preference_sum(
    inputs: LossInputs,
    *,
    beta: Positive = 0.1,
    ld_alpha: Share | None = None,
    weighting: Weighting = "none",
    losses: Sequence[str] = ("dpo", "sft"),
    weights: Sequence[float] | None = None,
    label_smoothing: Scalar = 1e-3,
    tau: Positive = 0.05,
) -> Terms:
    r"""A weighted sum of preference losses that use a reference. ``"sft"`` adds ``-log_prob`` of the chosen answers.

    Pairs, options and metrics are as in :func:`dpo`.

    Hyper-parameters:
        losses: names of losses of pairs with a reference, or ``"sft"``. With the ending ``_norm``, log-ratios are averaged over
            tokens. ``aot`` is not allowed, because it compares whole batches. ``bco_pair`` has ``z = 0``.
        weights: one weight for each loss, 1 by default.
        label_smoothing: applies to ``robust`` and ``exo_pair``.
        tau: applies to ``discopop``.

    Returns:
        The term ``objective`` with one value per pair, and with ``"sft"`` the term ``nll``, a mean over tokens.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([[-1.0], [-3.0]]), torch.tensor([[-2.0], [-2.0]])
        >>> inputs = LossInputs(log_prob, torch.ones(2, 1, dtype=torch.bool), ref_log_prob=ref_log_prob)
        >>> preference_sum(inputs, beta=0.5, losses=["dpo", "hinge"], weights=[1.0, 0.5])[0].value  # 0.3133 + 0.5 * 0
        tensor([[0.3133]])

    Source: TRL 1.16: DPO's ``loss_type`` as a list with ``loss_weights``. MPO: Wang et al. 2024 (arXiv 2411.10442).
    """
    if not losses or isinstance(losses, str):
        raise ValueError(f"losses must be a list of at least one name, got {losses!r}.")
    shares = [1.0] * len(losses) if weights is None else list(weights)
    pairs = pair_up(inputs, beta, ld_alpha=ld_alpha, weighting=weighting)
    summed = inputs.replace(reference_point=inputs.mask.any(-1) * 0.0)
    if ld_alpha is not None:
        both = inputs.log_prob, inputs.ref_log_prob
        log_prob, ref = (_desensitised(x, inputs.mask, ld_alpha, pairs.pairing) for x in both)
        summed = summed.replace(log_prob=log_prob, ref_log_prob=ref)
    lengths = inputs.mask.sum(-1, keepdim=True).clamp(min=1)
    # Each loss sums over tokens, so means are obtained by dividing every token by the length.
    averaged = summed.replace(log_prob=summed.log_prob / lengths, ref_log_prob=summed.ref_log_prob / lengths)
    total, likelihood = torch.zeros_like(pairs.chosen), []
    names = ("dpo", "robust", "hinge", "ipo", "exo_pair", "discopop", "apo_zero", "apo_down", "sppo_hard", "nca_pair")
    known = {each: get_objective(each) for each in (*names, "bco_pair")}
    smoothed = {"label_smoothing": label_smoothing}
    own: dict[str, dict[str, Scalar]] = {"robust": smoothed, "exo_pair": smoothed, "discopop": {"tau": tau}}
    for name, share in zip(losses, shares, strict=True):
        base = name.removesuffix("_norm")
        if name == "sft":
            likelihood.append(nll_of_chosen(inputs, pairs, share, "token-mean"))
            continue
        if base not in known:
            raise ValueError(no_such("preference_sum has no loss", name, [*known, "sft"]))
        answers = summed if base == name else averaged
        total = total + share * known[base](answers, beta=beta, **own.get(base, {}))[0].value
    return pairs.terms(total, *likelihood)


def nll_of_chosen(inputs: LossInputs, pairs: Pairs, weight: Scalar, aggregation: Aggregation | None) -> LossTerm:
    """``-log_prob`` at each token of the chosen answers of whole pairs."""
    chosen = pairs.pairing.rows(torch.cat([pairs.mask, torch.zeros_like(pairs.mask)], -1))
    mask = inputs.mask & chosen.view(*inputs.mask.shape[:-1], 1)
    return LossTerm("nll", -inputs.log_prob, mask, weight=weight, aggregation=aggregation)
