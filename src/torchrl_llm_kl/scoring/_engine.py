"""Log-probs of one micro-batch: the body once, the head where the mask asks, log-sum-exp in chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchrl_llm_kl.head import linear_log_prob
from torchrl_llm_kl.scoring._model import call, find_body, find_head, hidden_of, logit_map, logits_of
from torchrl_llm_kl.scoring._request import MicroBatch

__all__ = ["Route", "head_log_prob", "score_micro_batch", "target_log_prob"]


@dataclass(frozen=True)
class Route:
    """How to get logits out of a model.

    Args:
        path: ``"head"`` runs the body and then the head at scored positions only; ``"full"`` the model's own forward.
        mask: whether to pass ``attention_mask``. No token of a causal model attends to padding on its right; the mask
            spares flash attention the work.
        positions: whether to pass ``position_ids``.
        shared: whether the body gives the same on keys and values of a prefix as on the whole sequence.
    """

    path: Literal["head", "full"]
    mask: bool = True
    positions: bool = True
    shared: bool = False


def score_micro_batch(
    model: nn.Module, batch: MicroBatch, route: Route, *, temperature: float, head_chunk: int, recompute: bool
) -> Tensor:
    """Log-probs of ``batch.targets``; ``[n]`` float32.

    With ``recompute`` a chunk's logits are dropped and computed again in the backward.
    """
    if route.path == "full":
        return _in_chunks(
            _full_logits(model, batch, route),
            batch.slots,
            batch.targets,
            temperature=temperature,
            head_chunk=head_chunk,
            recompute=recompute,
        )
    body = find_body(model)
    if body is None:
        raise TypeError(f"{type(model).__name__} has no separate body and head")
    hidden = hidden_of(_forward(body, batch, route)).flatten(0, 1)[batch.slots]
    return head_log_prob(
        model, hidden, batch.targets, temperature=temperature, head_chunk=head_chunk, recompute=recompute
    )


def head_log_prob(
    model: nn.Module, hidden: Tensor, targets: Tensor, *, temperature: float, head_chunk: int, recompute: bool
) -> Tensor:
    """Log-probs of the tokens that hidden states predict; ``[n, H], [n] -> [n]`` float32.

    A plain linear head goes through the vocabulary tile by tile, ``head_chunk`` and ``recompute`` are then of no use; any
    other (wrapped by an adapter, quantised, hooked) is called as it is, a chunk of positions at a time.
    """
    head, mapped = find_head(model), logit_map(model)
    if head is None:
        raise TypeError(f"{type(model).__name__} has no separate body and head")
    if type(head) is nn.Linear and not head._forward_hooks and not head._forward_pre_hooks:
        hidden, targets = hidden.to(head.weight.device), targets.to(head.weight.device)
        found = linear_log_prob(
            hidden,
            head.weight,
            targets,
            bias=head.bias,
            temperature=temperature,
            scale=mapped.scale,
            soft_cap=mapped.soft_cap,
        )
        return found.log_prob.float()
    return _in_chunks(
        lambda rows: mapped(_wide(head(hidden[rows]))),
        torch.arange(hidden.shape[0], device=hidden.device),
        targets,
        temperature=temperature,
        head_chunk=head_chunk,
        recompute=recompute,
    )


def _in_chunks(
    logits_at: Callable[[Tensor], Tensor],
    slots: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    head_chunk: int,
    recompute: bool,
) -> Tensor:
    parts = []
    for some, wanted in zip(slots.split(head_chunk), targets.split(head_chunk), strict=True):
        if recompute:
            parts.append(checkpoint(_chunk, logits_at, some, wanted, temperature, use_reentrant=False))
        else:
            parts.append(_chunk(logits_at, some, wanted, temperature))
    return torch.cat(parts)


def target_log_prob(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """``log softmax(logits / temperature)`` at ``targets``, in float32 whatever the dtype; ``[n, V], [n] -> [n]``."""
    logits = _wide(logits)
    if temperature != 1.0:
        logits = logits / temperature
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (chosen - logits.logsumexp(-1)).float()


def _chunk(logits_at: Callable[[Tensor], Tensor], slots: Tensor, targets: Tensor, temperature: float) -> Tensor:
    logits = logits_at(slots)
    return target_log_prob(logits, targets.to(logits.device), temperature)


def _full_logits(model: nn.Module, batch: MicroBatch, route: Route) -> Callable[[Tensor], Tensor]:
    # The last positions: prompt tuning puts virtual tokens before the sequence.
    logits = logits_of(_forward(model, batch, route))[:, -batch.input_ids.shape[1] :].flatten(0, 1)
    return lambda slots: logits[slots.to(logits.device)]


def _forward(module: nn.Module, batch: MicroBatch, route: Route) -> object:
    options = {}
    if route.mask:
        options["attention_mask"] = batch.attention_mask
    if route.positions:
        options["position_ids"] = batch.position_ids
    return call(module, batch.input_ids, use_cache=False, **options)


def _wide(logits: Tensor) -> Tensor:
    """At least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
