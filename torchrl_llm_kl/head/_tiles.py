"""The pieces of every sweep: heads, the logits that they compute, and tiles of positions x vocabulary.

``N`` positions, ``H`` hidden, ``V`` vocabulary; a tile holds ``n`` positions and ``v`` tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchrl_llm_kl._numerics import wide_dtype
from torchrl_llm_kl._private import onednn_linear
from torchrl_llm_kl.head._support import WHOLE, Kept, Support, Truncation, local_index

# exp underflows to 0 below this, in float64 too: log-probs are clamped here before they meet their probability.
LOG_ZERO = -1000.0

# Measured: blocks of 16 positions take twice the time of 128, blocks of 64 a tenth more.
_FEWEST_WHOLE_ROWS = 64

#: Weight ``[v, H]`` and bias ``[v]`` of a tile's tokens.
Columns = tuple[Tensor | None, Tensor | None]


class HeadOutput(NamedTuple):
    """The result of :func:`linear_log_prob`; nats, ``[N]`` each, float32 or wider."""

    log_prob: Tensor  #: of the targets
    entropy: Tensor | None  #: of the whole distribution; None unless requested


class PairOutput(NamedTuple):
    """The result of :func:`linear_pair`; nats, ``[N]`` each, float32 or wider."""

    kl: Tensor  #: the divergence of the two heads
    log_prob: Tensor | None  #: of the targets under the policy; None without targets
    ref_log_prob: Tensor | None  #: of the targets under the reference; None without targets
    entropy: Tensor | None  #: of the policy; None unless requested


class OutcomesOutput(NamedTuple):
    """The result of :func:`linear_outcomes`; nats, float32 or wider."""

    log_prob: Tensor  #: of the targets; ``[N]``
    entropy: Tensor | None  #: of the whole distribution; ``[N]``, None unless requested
    #: of the given ids, and last the log of the total probability of all other tokens; ``[N, *M, k + 1]``
    outcomes: Tensor


class Result(NamedTuple):
    """All that a sweep computes: the fields of :class:`PairOutput` and of :class:`OutcomesOutput`."""

    kl: Tensor | None  # [N] each
    log_prob: Tensor | None
    ref_log_prob: Tensor | None
    entropy: Tensor | None
    outcomes: Tensor | None  # the policy's; [N, M, k + 1]


class TopKOutput(NamedTuple):
    """The result of :func:`linear_top_k`."""

    indices: Tensor  #: tokens, most probable first; ``[N, k]``
    log_probs: Tensor  #: nats; ``[N, k]``
    tail_log_prob: Tensor  #: log of the total probability of all other tokens; ``[N]``, ``-inf`` if there are none
    log_prob: Tensor | None = None  #: of the targets; ``[N]``, None without targets


class Slice(NamedTuple):
    """This rank's tokens of a vocabulary: ``first`` to ``first + size``, of ``vocab``; ``group`` holds the other ranks."""

    group: dist.ProcessGroup
    first: int
    size: int
    vocab: int

    @property
    def ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.group)

    def gather(self, values: Tensor) -> Tensor:
        """Each rank's ``values``, in the order of the vocabulary; ``[R, ...]``."""
        values = values.contiguous()
        out = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(out, values, group=self.group)
        return torch.stack(out)

    def add(self, gradient: Tensor | None) -> None:
        """Add the ranks' gradients, in place: each has the part of its own tokens."""
        if gradient is not None:
            dist.all_reduce(gradient, group=self.group)


class Head(NamedTuple):
    """One model's logits: ``softcap(scale * (hidden @ weight.T + bias)) / temperature``, with the product in ``dtype``.

    Without a weight, ``hidden`` is the product itself, ``[N, V]``.
    """

    hidden: Tensor  # [N, H]
    weight: Tensor | None  # [V, H]
    bias: Tensor | None  # [V]
    dtype: torch.dtype
    temperature: float = 1.0
    scale: float = 1.0
    soft_cap: float | None = None
    part: Slice | None = None  # of a sharded vocabulary, that weight and bias belong to

    @property
    def gain(self) -> float:
        """Factor after the soft cap's tanh."""
        return (self.soft_cap or self.temperature) / self.temperature

    @property
    def slope(self) -> float:
        """Derivative of a logit with respect to the product, without tanh."""
        return self.scale / self.temperature

    @property
    def positions(self) -> int:  # N
        return self.hidden.shape[0]

    @property
    def vocab(self) -> int:  # V on this rank
        return self.hidden.shape[1] if self.weight is None else self.weight.shape[0]

    @property
    def whole_vocab(self) -> int:  # V of all ranks
        return self.vocab if self.part is None else self.part.vocab

    @property
    def requires_grad(self) -> bool:
        return any(t is not None and t.requires_grad for t in self[:3])

    @property
    def wide(self) -> torch.dtype:  # of everything after the product: float32 at least
        return wide_dtype(self.dtype)

    def per_position(self, fill: float) -> Tensor:
        return self.hidden.new_full((self.positions,), fill, dtype=self.wide)

    def columns(self, cols: slice) -> Columns:
        """Weight and bias of some tokens, in the dtype of the product."""
        weight, bias = (None if t is None else t[cols].to(self.dtype) for t in self[1:3])
        return weight, bias

    def logits(self, rows: slice, cols: slice, columns: Columns, out: Tensor) -> Tensor:
        """The logits of a tile, given :meth:`columns` of its tokens, in ``out [n, v]`` or memory of their own."""
        weight, bias = columns
        factor = self.scale / (self.soft_cap or self.temperature)
        if weight is None or out.dtype != self.dtype:
            # A head in half precision rounds its logits first; do the same here.
            hidden = self.hidden[rows, cols] if weight is None else self.hidden[rows].to(self.dtype)
            out.copy_(hidden if weight is None else F.linear(hidden, weight, bias))
            if factor != 1.0:
                out.mul_(factor)
        else:
            hidden = self.hidden[rows].to(self.dtype)
            product = onednn_linear(hidden, weight, bias)
            if product is not None:
                out = product if factor == 1.0 else product.mul_(factor)
            else:
                start, beta = (out, 0.0) if bias is None else (bias, factor)
                torch.addmm(start, hidden, weight.T, beta=beta, alpha=factor, out=out)
        return out if self.soft_cap is None else out.tanh_().mul_(self.gain)


class Tokens(NamedTuple):
    """Token ids that a sweep picks out of the vocabulary."""

    targets: Tensor | None = None  # [N]
    recorded: Kept | None = None  # all that the policy may draw
    ids: Tensor | None = None  # of the policy's outcomes, [N, M, k]


NO_TOKENS = Tokens()


@dataclass(frozen=True)
class Plan:
    """The tiles and the results of a sweep.

    ``shares`` are the weights of the policy's and of the reference's KL in the divergence. If one is 0, the other is the
    KL between the heads; if both are positive, each head's KL is to the mixture of the two.
    """

    chunk: tuple[int, int]  # positions and tokens of a tile
    entropy: bool = False  # the policy's
    shares: tuple[float, float] = (1.0, 0.0)
    truncation: Truncation = WHOLE  # the policy's
    keep_targets: bool = False  # the policy keeps the targets, whatever the truncation
    ref_kept: bool = False  # the reference is restricted to the tokens that the policy keeps

    @property
    def mixture(self) -> bool:
        return self.shares[0] > 0 and self.shares[1] > 0

    @property
    def weighing(self) -> int:
        """Without a mixture: index of the head whose probabilities weigh the KL."""
        return int(self.shares[1] > 0)

    def statistics(self, heads: int) -> int:
        """How many tensors backward needs beside the result and logits."""
        return 2 * heads + 2 * (heads == 2 and self.mixture) + self.truncation.active

    def forward_chunk(self, head: Head) -> tuple[int, int]:
        """Tile of the forward sweep: mixture and truncation need whole rows, so its tiles have fewer of them."""
        (positions, tokens), vocab = self.chunk, head.vocab
        if not (self.mixture or self.truncation.active) or tokens >= vocab:
            return self.chunk
        # As many elements as other tiles, but not too few rows: every block of rows reads the whole head.
        return max(positions * tokens // vocab, min(positions, _FEWEST_WHOLE_ROWS)), vocab


def support_of(plan: Plan, tokens: Tokens, floor: Tensor, *, find: bool) -> Support | None:
    """The support of a plan's policy; None if it is the whole vocabulary."""
    if tokens.recorded is None and not plan.truncation.active:
        return None
    return Support(plan.truncation, tokens.recorded, floor, tokens.targets if plan.keep_targets else None, find)


def tiles(
    chunk: tuple[int, int],
    heads: list[Head],
    spare: int,
    kept: Sequence[Tensor] = (),
    support: Support | None = None,
    both: bool = False,
) -> Iterator[tuple[slice, slice, list[Columns], list[Tensor], list[Tensor]]]:
    """Iterate over positions x vocabulary; tiles of the same tokens are consecutive.

    Yields:
        Positions, tokens, and of each head the tokens' weight and bias and the logits; then ``spare`` uninitialised
        buffers. Logits and buffers are contiguous ``[n, v]``, and the next tile overwrites them. For the first tiles the
        logits in ``kept``, of all heads for each, are copied instead. The first head's logits are restricted to its
        ``support``, and with ``both`` the second's too.
    """
    count, vocab = heads[0].positions, heads[0].vocab
    n, v = min(chunk[0], max(count, 1)), min(chunk[1], vocab)
    flat = [heads[0].hidden.new_empty(n * v, dtype=heads[0].wide) for _ in range(len(heads) + spare)]
    kept = list(kept)
    for cols in (slice(start, min(start + v, vocab)) for start in range(0, vocab, v)):
        columns = [head.columns(cols) for head in heads]
        for rows in (slice(start, min(start + n, count)) for start in range(0, count, n)):
            shape = rows.stop - rows.start, cols.stop - cols.start
            logits = [each[: shape[0] * shape[1]].view(shape) for each in flat]
            known, kept = kept[: len(heads)], kept[len(heads) :]
            for i, head in enumerate(heads):
                if known:
                    logits[i].copy_(known[i])
                else:
                    logits[i] = head.logits(rows, cols, columns[i], out=logits[i])
                    if i == 0 and support is not None:
                        support.restrict(logits[0], rows, cols)
                    elif both:
                        logits[i].masked_fill_(logits[0].isneginf(), -math.inf)
            yield rows, cols, columns, logits[: len(heads)], logits[len(heads) :]


def without_ids(values: Tensor, ids: Tensor, cols: slice, out: Tensor) -> Tensor:
    """Fill ``out`` with a tile's ``values [n, v]``, ``-inf`` at ``ids [n, k]``; equal ids are one."""
    index, inside = local_index(ids, cols)
    ruled_out = torch.where(inside, -torch.inf, torch.zeros((), dtype=values.dtype, device=values.device))
    return out.copy_(values).scatter_add_(1, index, ruled_out)


def rest_of(prob: Tensor, matters: Tensor | None) -> Tensor:
    """Sum of all probabilities but the largest, relative to the largest; from ``prob [n, v]`` to ``[n]``.

    It keeps its digits where the largest is nearly 1, in the rows where that ``matters`` (None: in all): above 0.9, since
    elsewhere the difference from 1 has six digits in float32. On an accelerator it does so in every row: to choose some would
    be a host sync. ``prob`` is as before afterwards.
    """
    if prob.device.type != "cpu":
        best, place = prob.max(-1, keepdim=True)
        rest = prob.scatter_(1, place, 0.0).sum(-1).div_(best.squeeze(1))
        prob.scatter_(1, place, best)
        return rest
    best = prob.amax(-1)
    # The largest probability is exp(0) / sum. One fused kernel beats maximum, difference, exp and sum.
    rest = best.reciprocal().sub_(1.0)
    likely = best > 0.9
    rows = (likely if matters is None else likely & matters).nonzero().squeeze(1)
    chosen = prob[rows]
    rest[rows] = chosen.scatter_(1, chosen.argmax(-1, keepdim=True), 0.0).sum(-1) / best[rows]
    return rest


def log_ratio_to_mixture(plan: Plan, log_probs: Sequence[Tensor], i: int, out: Tensor) -> Tensor:
    """``log p - log m``, finite, with ``p`` the probabilities of head ``i`` and ``m`` the mixture of both."""
    # m / p is 1 + share * (q / p - 1): log1p keeps the digits where the two agree, log p - log m would lose them.
    torch.sub(log_probs[1 - i], log_probs[i], out=out).expm1_().nan_to_num_(nan=0.0)
    out.mul_(plan.shares[1 - i]).log1p_()
    # m is at least p's own share; a share near 1 may have been rounded to 1.
    return out.clamp_(min=math.log(plan.shares[i])).neg_()
