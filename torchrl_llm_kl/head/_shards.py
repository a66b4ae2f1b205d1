"""A head whose vocabulary is sharded over ranks (tensor parallel): each sweeps its own slice, then the results are joined.

With ``w`` the probability of each slice, and results inside a slice under its own softmax, the chain rule gives
``log p(token) = log w + log p(token | slice)``, ``H = sum w (H(slice) - log w)`` and
``KL(p || q) = sum w_p (KL(slice) + log w_p - log w_q)``. ``R`` is the number of slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchrl_llm_kl._numerics import is_dtensor
from torchrl_llm_kl.head._tiles import Plan, Result, Slice, TopKOutput


def local_part(prefix: str, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Slice | None]:
    """Weight and bias on this rank, and its slice; None for a head that is not sharded.

    Raises a ValueError, on all ranks, for a DTensor that is sharded otherwise than over its vocabulary.
    """
    if not is_dtensor(weight):
        return weight, bias, None
    mesh, placements = weight.device_mesh, weight.placements  # type: ignore[attr-defined]
    sharded = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if len(sharded) > 1 or not all(placements[dim].is_shard(0) for dim in sharded):
        raise ValueError(
            f"{prefix}weight is a DTensor with placements {placements}; expected Shard(0), the vocabulary, on at most one "
            "dimension of the mesh. A weight that FSDP2 shards is whole inside a call of its module."
        )
    parts: list[Any] = [None if t is None else t.to_local() for t in (weight, bias)]  # type: ignore[attr-defined]
    if not sharded:
        return parts[0], parts[1], None
    vocab, ranks = weight.shape[0], mesh.size(sharded[0])
    step = -(-vocab // ranks)
    first = mesh.get_local_rank(sharded[0]) * step
    return *parts, Slice(mesh.get_group(sharded[0]), first, parts[0].shape[0], vocab)


def join_slices(
    part: Slice, plan: Plan, targets: Tensor | None, swept: Sequence[Tensor | None], ids: Tensor | None = None
) -> tuple[Result, list[Tensor]]:
    """The results and statistics of a whole head, from this rank's slice.

    ``targets``, and the outcomes' ``ids``, count from its first token.
    """
    kl, log_prob, ref_log_prob, entropy, outcomes, *statistics = swept
    # Of a slice without a possible token the log of the sum is -inf, and all else NaN.
    log_probs = [log_prob, ref_log_prob]
    if targets is not None:
        here = (targets >= 0) & (targets < part.size)
        log_probs = [
            None if each is None else each.masked_fill(~here | statistics[2 * i + 1].isneginf(), -torch.inf)  # type: ignore[union-attr]
            for i, each in enumerate(log_probs)
        ]
    sent = [t for t in (kl, *log_probs, entropy, *statistics) if t is not None]
    rest = iter(part.gather(torch.stack(sent)).unbind(1))
    kl, log_prob, ref_log_prob, entropy = (None if t is None else next(rest) for t in (kl, *log_probs, entropy))
    joined, log_w = [], []
    for top, log_total in zip(rest, rest, strict=True):
        common = top.amax(0)
        shares = top - common + log_total
        # Beside the largest logit, whose exponential is 1: exact where all others add up to little.
        largest = torch.arange(len(top), device=top.device)[:, None] == top.argmax(0)
        joined += [common, torch.where(largest, shares.expm1(), shares.exp()).sum(0).log1p()]
        log_w.append(shares - joined[-1])
    if targets is not None:
        known = (targets >= -part.first) & (targets < part.vocab - part.first)
        log_prob, ref_log_prob = (
            None if t is None else (t + log_w[i]).amax(0).masked_fill(~known, torch.nan)
            for i, t in enumerate((log_prob, ref_log_prob))
        )
    if entropy is not None:
        entropy = _weighted_mean(log_w[0], entropy - log_w[0])
    if kl is not None:
        a, b = plan.weighing, 1 - plan.weighing
        kl = _weighted_mean(log_w[a], (kl + log_w[a] - log_w[b]).masked_fill(log_w[b].isneginf(), torch.inf))
    if outcomes is not None and ids is not None:
        outcomes = _join_outcomes(part, ids, outcomes, statistics[1], log_w[0])
    return Result(kl, log_prob, ref_log_prob, entropy, outcomes), joined


def _join_outcomes(part: Slice, ids: Tensor, outcomes: Tensor, log_total: Tensor | None, log_w: Tensor) -> Tensor:
    """The outcomes ``[N, M, k + 1]`` of a whole head: an id is in one slice, the other tokens are in all."""
    assert log_total is not None
    here = pad((ids >= 0) & (ids < part.size), (0, 1), value=True)
    own = outcomes.masked_fill(~here | log_total.isneginf().view(-1, 1, 1), -torch.inf)
    joined = (part.gather(own) + log_w.unsqueeze(-1).unsqueeze(-1)).logsumexp(0)
    unknown = pad(ids >= part.vocab - part.first, (0, 1), value=False)
    return joined.masked_fill(unknown, torch.nan)


def _weighted_mean(log_w: Tensor, values: Tensor) -> Tensor:
    """``sum w values`` over the slices, where 0 times anything is 0; ``[R, N]`` to ``[N]``."""
    w = log_w.exp()
    return (w * values).masked_fill(w == 0, 0.0).sum(0)


def join_top_k(part: Slice, k: int, own: TopKOutput, log_sum: Tensor, targets: Tensor | None = None) -> TopKOutput:
    """The top ``k`` of a whole head, from this rank's slice and the log-sum-exp of its logits ``[N]``.

    ``targets`` count from the slice's first token. The tail joins the slices' tails and their candidates that are not among
    the ``k``.
    """
    lacking = (0, k - own.indices.shape[1])  # a slice may hold fewer than k tokens
    log_probs = pad(own.log_probs, lacking, value=-torch.inf)
    chosen = torch.full_like(log_sum, -torch.inf)
    if targets is not None and own.log_prob is not None:
        here = (targets >= 0) & (targets < part.size) & ~log_sum.isneginf()
        chosen = torch.where(here, own.log_prob, chosen)
    sent = torch.cat([log_probs, *(x.unsqueeze(-1) for x in (own.tail_log_prob, chosen, log_sum))], -1)
    indices = pad(own.indices + part.first, lacking)
    values, tokens = part.gather(sent).transpose(0, 1), part.gather(indices).transpose(0, 1)  # [N, R, ...]
    log_w = values[:, :, -1:] - values[:, :, -1:].logsumexp(1, keepdim=True)
    # All of a slice without a possible token is NaN.
    values = (values[:, :, :-1] + log_w).masked_fill(log_w.isneginf(), -torch.inf)
    log_probs, order = values[:, :, :-2].flatten(1).sort(dim=-1, descending=True, stable=True)
    tail = torch.cat([values[:, :, -2], log_probs[:, k:]], -1).logsumexp(-1)
    log_prob = None
    if targets is not None:
        known = (targets >= -part.first) & (targets < part.vocab - part.first)
        log_prob = values[:, :, -1].amax(1).masked_fill(~known, torch.nan)
    return TopKOutput(tokens.flatten(1).gather(1, order)[:, :k], log_probs[:, :k], tail, log_prob)
