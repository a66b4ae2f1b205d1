"""Metrics that a policy loss reports for every objective, and the names of the metrics of terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import masked_mean, send
from torchrl_llm_kl.losses._arithmetic import LARGEST_LOG_RATIO, bounded_exp, prefix_sum
from torchrl_llm_kl.losses._objective import LossInputs, LossTerm
from torchrl_llm_kl.losses.corrections import mismatch_metrics, staleness_metrics

_RATIO_QUANTILES = {"ratio_min": 0.0, "ratio_q05": 0.05, "ratio_median": 0.5, "ratio_q95": 0.95, "ratio_max": 1.0}


def merge_metrics(terms: Sequence[LossTerm], metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge ``metrics`` with the metrics of terms. If a name is taken, the later metric is called ``<term>_<name>``."""
    out = dict(metrics)
    for term in terms:
        for name, value in term.metrics.items():
            out[name if name not in out else f"{term.name}_{name}"] = value
    return out


def improvement_bound(max_token_kl: Tensor, sequence_kl: Tensor, max_len: float | Tensor) -> Tensor:
    r"""Bound on the error of predicting a policy's reward from another policy's answers: a certificate of a policy step.

    ``old`` samples answers ``y`` of at most ``max_len`` tokens with rewards ``R(y)`` from 0 to 1, and ``r_t`` is the ratio of
    the new policy to ``old`` at token ``t``. The surrogate :math:`E_{old}[\sum_t (r_t - 1) R]` predicts the change of the
    expected reward. Prediction and change differ by at most this bound, so the expected reward increases if the surrogate
    exceeds the bound. The bound is in units of the reward, and a value of 1 or more certifies nothing. For rewards of another
    range, multiply it by the range.

    Both KLs have the same direction, which may be either one. The result is a certificate only if ``max_token_kl`` is the
    maximum over all prefixes that the policies can reach. The maximum over sampled prefixes is smaller or equal, so the bound
    of a batch is only an estimate.

    Args:
        max_token_kl: nats, the largest KL over the vocabulary of any next token, 0-dim.
        sequence_kl: nats, the KL of whole answers, 0-dim.
        max_len: tokens, the length of the longest possible answer.

    Returns:
        The smaller of :math:`\frac{4}{3} T^{3/2} D_{token}` and :math:`2 T \sqrt{D_{token} D_{sequence}}`, 0-dim.

    Example:
        >>> improvement_bound(torch.tensor(1e-4), torch.tensor(0.01), 4096)
        tensor(8.1920)

    Source: Li et al. 2025 (arXiv 2512.23075), theorems 3.1 and 3.2. With Pinsker's inequality both hold for either direction.
    """
    marginal = 4 / 3 * max_len**1.5 * max_token_kl
    return torch.minimum(marginal, 2 * max_len * (max_token_kl * sequence_kl).sqrt())


@torch.no_grad()
def step_metrics(kl: Tensor, log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The largest KL to the sampler of the next token, and the :func:`improvement_bound` that sampled prefixes estimate."""
    if not mask.numel():
        return dict.fromkeys(("kl_to_sampler_max", "improvement_bound_sampled"), kl.new_zeros(()))
    kl = kl.clamp(min=0)  # rounding can make the KL of equal policies negative
    largest, rows = torch.where(mask, kl, 0).max(), mask.any(-1).sum().clamp(min=1)
    # The sampler reached the prefixes. The chain rule of the KL from policy to sampler has prefixes of the policy.
    weight = bounded_exp(prefix_sum(log_ratio, mask) - torch.where(mask, log_ratio, 0))
    bound = improvement_bound(largest, torch.where(mask, weight * kl, 0).sum() / rows, mask.sum(-1).max())
    return {"kl_to_sampler_max": largest, "improvement_bound_sampled": bound}


@torch.no_grad()
def common_metrics(inputs: LossInputs, counts: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
    """Metrics that do not depend on the objective.

    ``num_tokens``, ``num_sequences`` (with a masked-in token) and, with entropies, ``entropy`` are over all masked-in tokens.
    All others leave out experts' tokens: with old log-probs ``ESS``, quantiles of the ratio to them and ``kl_to_sampler``,
    with the sampler's own log-probs the :func:`mismatch_metrics`, with log-probs of the weights that sampled the
    :func:`staleness_metrics`, with reference log-probs ``kl_to_ref``.
    """
    mask, experts = inputs.mask, inputs.get("expert_mask")
    sampled = mask if experts is None else mask & ~experts
    log_prob = inputs.log_prob
    old, own, ref = (inputs.get(name) for name in ("old_log_prob", "sampler_log_prob", "ref_log_prob"))
    behavior = inputs.get("behavior_log_prob")
    num_tokens, num_sequences = (mask.sum(), mask.any(-1).sum()) if counts is None else counts
    metrics = {"num_tokens": num_tokens, "num_sequences": num_sequences}
    # The tokens come from the sampler, so k3 estimates KL(sampler || policy). It is never negative.
    pairs = {"old": (log_prob, old), "sampler": (log_prob, old if own is None else own), "ref": (ref, log_prob)}
    pairs = {name: pair for name, pair in pairs.items() if not any(x is None for x in pair)}
    if pairs:
        # All differences at once. Each pair on its own would be a dozen small kernels.
        above, below = (torch.stack(each) for each in zip(*pairs.values(), strict=True))
        used = sampled & (below > -torch.inf)  # False for NaN, which means not scored
        unused, used_tokens = ~used, used.flatten(1).sum(1)
        log_ratio = (above - below).clamp(max=LARGEST_LOG_RATIO)  # one token cannot make a mean infinite
        k3 = (torch.expm1(log_ratio) - log_ratio).masked_fill_(unused, 0).flatten(1).sum(1) / used_tokens.clamp(min=1)
        metrics |= {f"kl_to_{name}": mean for name, mean in zip(pairs, k3.unbind(), strict=True) if name != "old"}
        if "old" in pairs:
            metrics |= _ratio_metrics(log_ratio[0].masked_fill_(unused[0], -torch.inf), used_tokens[0])
    if own is not None:
        # With other weights than the sampler's, the difference would include the steps between both.
        metrics |= mismatch_metrics(next(x for x in (behavior, old, log_prob) if x is not None), own, sampled)
    if behavior is not None:
        metrics |= staleness_metrics(log_prob, behavior, sampled, inputs.get("age"))
    entropy = inputs.get("entropy")
    if entropy is not None:
        metrics["entropy"] = masked_mean(entropy, mask)
    return metrics


def _ratio_metrics(log_ratio: Tensor, count: Tensor) -> dict[str, Tensor]:
    """Effective sample size and quantiles of ``count`` ratios. The other log-ratios are ``-inf``."""
    # One sort gives all quantiles. torch.quantile would need the number of tokens on the host.
    ordered = log_ratio.flatten().sort().values
    weight = (ordered - ordered[-1]).exp()  # the scale cancels. NaN without tokens
    size = (weight.sum() / torch.linalg.vector_norm(weight)).square() / count
    shares = send(torch.tensor(list(_RATIO_QUANTILES.values())), count.device)
    places = ((count - 1) * shares).round().long() - count  # counted from the end, after the -inf entries
    values = ordered[places].nan_to_num(neginf=0.0).exp()
    return {"ESS": size.nan_to_num(0.0).clamp(max=1), **dict(zip(_RATIO_QUANTILES, values.unbind(), strict=True))}
