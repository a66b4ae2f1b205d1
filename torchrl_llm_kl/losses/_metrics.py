"""Metrics logged beside a loss: 0-dim tensors without graph, over masked-in tokens alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import masked_mean
from torchrl_llm_kl.estimators import k3
from torchrl_llm_kl.losses._arithmetic import LARGEST_LOG_RATIO
from torchrl_llm_kl.losses._objective import LossTerm

RATIO_QUANTILES = {"ratio_min": 0.0, "ratio_q05": 0.05, "ratio_median": 0.5, "ratio_q95": 0.95, "ratio_max": 1.0}


@torch.no_grad()
def common_metrics(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Metrics that do not depend on the objective.

    Args:
        inputs: ``log_prob`` and ``mask``, and any of ``old_log_prob``, ``ref_log_prob``, ``sampler_log_prob`` and
            ``entropy``; ``[*B, T]``.

    Returns:
        ``num_tokens``, ``num_sequences`` (those with a masked-in token); with old log-probs ``ESS``, quantiles of the
        ratio to them and ``kl_to_sampler``; with reference log-probs ``kl_to_ref``; with entropies ``entropy``.
    """
    mask = inputs["mask"]
    log_prob = torch.where(mask, inputs["log_prob"], 0)
    metrics = {"num_tokens": mask.sum(), "num_sequences": mask.any(-1).sum()}
    old = inputs.get("old_log_prob")
    if old is not None:
        metrics |= _ratio_metrics(log_prob, torch.where(mask, old, 0), mask)
    sampler = inputs.get("sampler_log_prob", old)
    if sampler is not None:
        # The sampler produced the tokens, so this is k3 of KL(sampler || policy), which is never negative.
        metrics["kl_to_sampler"] = _k3(torch.where(mask, sampler, 0), log_prob, mask)
    if inputs.get("ref_log_prob") is not None:
        metrics["kl_to_ref"] = _k3(log_prob, torch.where(mask, inputs["ref_log_prob"], 0), mask)
    if inputs.get("entropy") is not None:
        metrics["entropy"] = masked_mean(inputs["entropy"], mask)
    return metrics


def _k3(log_prob: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    """Mean k3, with log-ratios of at most 80 nats so that one token cannot make it infinite."""
    return masked_mean(k3(torch.zeros_like(ref), (ref - log_prob).clamp(max=LARGEST_LOG_RATIO)), mask)


def _ratio_metrics(log_prob: Tensor, old: Tensor, mask: Tensor) -> dict[str, Tensor]:
    log_ratio = (log_prob - old).clamp(max=LARGEST_LOG_RATIO)
    weight = torch.where(mask, log_ratio, -torch.inf)
    count = mask.sum()
    size = (2 * weight.logsumexp((-2, -1)) - (2 * weight).logsumexp((-2, -1))).exp() / count
    metrics = {"ESS": torch.where(count == 0, 0, size).clamp(max=1)}
    ordered = torch.where(mask, log_ratio, torch.inf).flatten().sort().values
    last = (count - 1).clamp(min=0)
    for name, share in RATIO_QUANTILES.items():
        value = ordered.gather(0, (last * share).round().long().reshape(1)).reshape(())
        metrics[name] = torch.where(count == 0, torch.ones_like(value), value.exp())
    return metrics


def merge_metrics(terms: Sequence[LossTerm], metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``metrics`` and those of the terms; where two share a name, the later one is called ``<term>_<name>``."""
    out = dict(metrics)
    for term in terms:
        for name, value in term.metrics.items():
            out[name if name not in out else f"{term.name}_{name}"] = value
    return out
