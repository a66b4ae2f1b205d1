"""What holds the policy near another one: the reference, or the policy that sampled."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from torchrl_llm_kl.estimators import EstimatorName, get_estimator
from torchrl_llm_kl.losses._numerics import Scalar
from torchrl_llm_kl.losses._objective import term
from torchrl_llm_kl.losses._term import LossTerm
from torchrl_llm_kl.losses.terms._experts import without_experts

__all__ = ["kl_to_ref", "kl_to_sampler"]

#: The name of a registered estimator, or a function of the same signature.
Estimator = EstimatorName | Callable[..., Tensor]


@term(
    "kl_to_ref",
    source="Ziegler et al. 2019 (arXiv 1909.08593), eq. 2; in the loss: Shao et al. 2024 (arXiv 2402.03300)",
)
def kl_to_ref(
    log_prob: Tensor,
    mask: Tensor,
    *,
    ref_log_prob: Tensor | None = None,
    old_log_prob: Tensor | None = None,
    kl: Tensor | None = None,
    estimator: Estimator = "k2",
    coeff: Scalar = 1e-3,
    expert_mask: Tensor | None = None,
    leave_out_experts: bool = False,
) -> tuple[LossTerm, ...]:
    r"""The KL from policy to reference, estimated at each token, as a penalty.

    The gradient is the estimator's, which is not always that of the KL whose value it estimates: ``"k2"`` has that of
    :math:`KL(\pi \| \pi_{ref})`, ``"k3"`` that of the other direction, ``"k1"`` none on average; see each of
    :mod:`torchrl_llm_kl.estimators`.

    Args:
        log_prob: nats, under the current policy; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        ref_log_prob: the same tokens under the reference; same shape. Needed by all but ``"exact"``.
        old_log_prob: the same tokens under the policy that sampled; same shape. Needed by ``"corrected_k3"``.
        kl: the KL over the whole vocabulary at each position, nats, with graph (see
            :func:`~torchrl_llm_kl.estimators.exact_kl`); same shape. Read by ``"exact"``, and needed there.
        estimator: one of :func:`~torchrl_llm_kl.estimators.available_estimators`, or a function
            ``(log_prob, ref_log_prob, old_log_prob)``. Trinity: ``kl_loss_fn``.
        coeff: weight of the term. Trinity: ``kl_coef``.
        expert_mask: True at tokens of experts; bool, same shape.
        leave_out_experts: penalise other tokens alone.

    Returns:
        One term, ``kl_to_ref``, in the estimator's unit.

    Raises:
        ValueError: if shapes differ, what the estimator needs is missing or its name is unknown.

    Example:
        >>> import torch
        >>> log_prob, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]])
        >>> (term,) = kl_to_ref(log_prob, torch.ones(1, 2, dtype=torch.bool), ref_log_prob=ref)
        >>> term.value, term.weight
        (tensor([[0.1250, 0.0000]]), 0.001)

    Source: Ziegler et al. 2019 (arXiv 1909.08593), eq. 2; in the loss: Shao et al. 2024 (GRPO, arXiv 2402.03300), eq. 3;
    the default is Trinity-RFT 0.6.0's.
    """
    mask = without_experts(mask, expert_mask, leave_out_experts)
    if estimator == "exact":
        if kl is None:
            raise ValueError(
                "kl_to_ref with estimator='exact' needs kl: pass kl=, the KL over the vocabulary at each token"
            )
        return (LossTerm("kl_to_ref", kl, mask, weight=coeff),)
    if ref_log_prob is None:
        raise ValueError("kl_to_ref needs ref_log_prob: pass ref_log_prob=, of the shape of log_prob")
    estimate = get_estimator(estimator) if isinstance(estimator, str) else estimator
    return (LossTerm("kl_to_ref", estimate(log_prob, ref_log_prob, old_log_prob), mask, weight=coeff),)


@term("kl_to_sampler", source="prime-rl: the squared log-ratio to the sampler in the loss (2 k2)")
def kl_to_sampler(
    log_prob: Tensor,
    mask: Tensor,
    *,
    old_log_prob: Tensor | None = None,
    sampler_log_prob: Tensor | None = None,
    estimator: Estimator = "k2",
    coeff: Scalar = 1e-3,
    expert_mask: Tensor | None = None,
    leave_out_experts: bool = False,
) -> tuple[LossTerm, ...]:
    r"""The KL from the policy to the one that sampled, estimated at each token: a soft bound on how far an update goes.

    Other than for :func:`kl_to_ref` the tokens come from the second of the two policies, so most estimators have the value and
    the gradient that they are known for only while the two are near each other. ``"corrected_k3"`` has both wherever its
    ratio is not clamped. The gradient of ``"k2"`` is the log-ratio times that of ``log_prob``: always back to the sampler.

    Args:
        log_prob: nats, under the current policy; ``[*B, T]``.
        mask: tokens that count; bool, same shape.

    Keyword Args:
        old_log_prob: the same tokens under the policy that sampled, without graph; same shape.
        sampler_log_prob: the same as the sampler itself computed it, if it is another program than the trainer; it is taken
            instead of ``old_log_prob``. Same shape, without graph.
        estimator: as for :func:`kl_to_ref`, but not ``"exact"``.
        coeff: weight of the term.
        expert_mask: True at tokens of experts; bool, same shape.
        leave_out_experts: penalise other tokens alone: nobody sampled those of experts.

    Returns:
        One term, ``kl_to_sampler``, in the estimator's unit.

    Raises:
        ValueError: if shapes differ, log-probs of the sampler are missing, or the estimator is unknown or ``"exact"``.

    Example:
        >>> import torch
        >>> log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]])
        >>> kl_to_sampler(log_prob, torch.ones(1, 2, dtype=torch.bool), old_log_prob=old)[0].value
        tensor([[0.1250, 0.0000]])

    Source: prime-rl has twice ``"k2"``, the squared log-ratio, in its loss.
    """
    mask = without_experts(mask, expert_mask, leave_out_experts)
    sampler = old_log_prob if sampler_log_prob is None else sampler_log_prob
    if sampler is None:
        raise ValueError("kl_to_sampler needs log-probs of the sampler: pass sampler_log_prob= or old_log_prob=")
    if estimator == "exact":
        raise ValueError("kl_to_sampler has no 'exact': nothing keeps the sampler's whole distributions. Use 'k2'")
    estimate = get_estimator(estimator) if isinstance(estimator, str) else estimator
    return (LossTerm("kl_to_sampler", estimate(log_prob, sampler, sampler), mask, weight=coeff),)
