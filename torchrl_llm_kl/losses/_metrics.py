"""Metrics that a policy loss reports for every objective, and the names of the metrics of terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import masked_mean, send
from torchrl_llm_kl.losses._arithmetic import LARGEST_LOG_RATIO
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
