"""What a body hands to the head at some positions, and everything that can be read from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchrl_llm_kl.head import linear_log_prob, linear_pair, linear_top_k, logits_kl
from torchrl_llm_kl.scoring._mode import Mode
from torchrl_llm_kl.scoring._model import LogitMap, find_head, logit_map

__all__ = ["Readings", "States", "Wanted", "head_states", "join", "join_states", "log_prob_at", "read"]


@dataclass(frozen=True)
class Wanted:
    """What to read besides the log-prob.

    Args:
        entropy: of the whole distribution.
        kl: ``"reverse"`` or ``"forward"``, the exact KL to a reference; None for none.
        top_k: how many of the most probable tokens.
    """

    entropy: bool = False
    kl: Literal["reverse", "forward"] | None = None
    top_k: int = 0


class Readings(NamedTuple):
    """What was read; ``[n]`` float32, ``[n, k]`` for the top k; None if not asked for."""

    log_prob: Tensor
    entropy: Tensor | None = None
    ref_log_prob: Tensor | None = None
    kl: Tensor | None = None
    top_indices: Tensor | None = None
    top_log_probs: Tensor | None = None
    tail_log_prob: Tensor | None = None


@dataclass(frozen=True, eq=False)
class States:
    """The distributions at ``n`` positions.

    Args:
        source: what logits are made of: hidden states ``[n, H]``, or where they are among logits that exist ``[n]``.
        logits: makes them, as the model does; some rows of the source to ``[k, V]``.
        temperature: divides the logits.
        head: a plain linear head, if that makes them.
        map: what is done to its product.
    """

    source: Tensor
    logits: Callable[[Tensor], Tensor]
    temperature: float
    head: nn.Linear | None = None
    map: LogitMap = field(default_factory=LogitMap)

    @property
    def count(self) -> int:
        """``n``."""
        return self.source.shape[0]

    def tempered(self, rows: Tensor) -> Tensor:
        """Logits in float32 or wider, divided by the temperature; indices ``[k]`` to ``[k, V]``."""
        logits = _wide(self.logits(self.source[rows.to(self.source.device)]))
        return logits if self.temperature == 1.0 else logits / self.temperature


def head_states(model: nn.Module, mode: Mode, hidden: Tensor, temperature: float) -> States:
    """States of hidden states ``[n, H]`` under the head of a model in ``mode``.

    A head that is more than a linear map (wrapped by an adapter, quantised, hooked) is called as it is.
    """
    head, mapped = find_head(model), logit_map(model)
    if head is None:
        raise TypeError(f"{type(model).__name__} has no separate body and head")
    weight = getattr(head, "weight", None)
    if isinstance(weight, Tensor):
        # Under autocast the body's output is narrower than the head.
        hidden = hidden.to(weight.device, weight.dtype if weight.is_floating_point() else None)

    def logits(some: Tensor) -> Tensor:
        with mode.of(model), torch.autocast(some.device.type, enabled=False):
            return mapped(_wide(head(some)))

    plain = type(head) is nn.Linear and not head._forward_hooks and not head._forward_pre_hooks
    return States(hidden, logits, temperature, cast(nn.Linear, head) if plain else None, mapped)


def join_states(parts: Sequence[States]) -> States:
    """States of one model with a head, one after another; at least one."""
    return replace(parts[0], source=torch.cat([part.source for part in parts]))


def read(
    states: States, targets: Tensor, wanted: Wanted, ref: States | None = None, *, chunk: int, recompute: bool
) -> Readings:
    """Read everything wanted at once.

    Args:
        states: of the model.
        targets: token ids; ``[n]``.
        wanted: a KL needs ``ref``.
        ref: states of the reference at the same positions; it gets no gradient.
        chunk: positions at a time where whole logits are made.
        recompute: drop a chunk's logits and make them again in the backward.
    """
    if states.head is not None and (ref is None or ref.head is not None):
        return _read_linear(states, targets, wanted, ref)
    parts = []
    for rows in torch.arange(states.count, device=targets.device).split(chunk):
        if recompute:
            parts.append(checkpoint(_read_chunk, states, targets, wanted, ref, rows, use_reentrant=False))
        else:
            parts.append(_read_chunk(states, targets, wanted, ref, rows))
    return join(parts)


def join(parts: list[Readings]) -> Readings:
    """One after another; at least one."""
    columns = zip(*parts, strict=True)
    return Readings(*cast(Any, (None if column[0] is None else torch.cat(column) for column in columns)))


def _read_linear(states: States, targets: Tensor, wanted: Wanted, ref: States | None) -> Readings:
    assert states.head is not None
    hidden, weight = states.source, states.head.weight
    targets = targets.to(hidden.device)
    mapped: dict[str, Any] = {"bias": states.head.bias, "scale": states.map.scale, "soft_cap": states.map.soft_cap}
    own = {**mapped, "temperature": states.temperature}
    if ref is None:
        found = linear_log_prob(hidden, weight, targets, entropy=wanted.entropy, **own)
        out = Readings(found.log_prob.float(), _narrow(found.entropy))
    else:
        assert ref.head is not None
        pair = linear_pair(
            hidden,
            weight,
            ref.source.to(hidden.device),
            ref.head.weight.detach().to(hidden.device),
            targets,
            direction=wanted.kl or "reverse",
            ref_bias=None if ref.head.bias is None else ref.head.bias.detach().to(hidden.device),
            ref_scale=ref.map.scale,
            ref_soft_cap=ref.map.soft_cap,
            entropy=wanted.entropy,
            **own,
        )
        assert pair.log_prob is not None
        assert pair.ref_log_prob is not None
        out = Readings(
            pair.log_prob.float(), _narrow(pair.entropy), pair.ref_log_prob.float().detach(), pair.kl.float()
        )
    if wanted.top_k:
        top = linear_top_k(hidden, weight, wanted.top_k, **own)
        out = out._replace(
            top_indices=top.indices, top_log_probs=top.log_probs.float(), tail_log_prob=top.tail_log_prob.float()
        )
    return out


def _read_chunk(states: States, targets: Tensor, wanted: Wanted, ref: States | None, rows: Tensor) -> Readings:
    logits = states.tempered(rows)
    targets = targets[rows].to(logits.device)
    log_probs = logits.log_softmax(-1)
    out = Readings(log_prob_at(logits, targets))
    if wanted.entropy:
        # 0 log 0 is 0: the -inf is taken out before it meets its probability.
        out = out._replace(
            entropy=-(log_probs.exp() * log_probs.masked_fill(log_probs.isneginf(), 0.0)).sum(-1).float()
        )
    if ref is not None:
        with torch.no_grad():
            ref_logits = ref.tempered(rows).to(logits.device)
        if ref_logits.shape != logits.shape:
            raise ValueError(
                f"the model's logits cover a vocabulary of {logits.shape[-1]} tokens but the reference's one of "
                f"{ref_logits.shape[-1]}: an exact KL needs the same tokens in the same order"
            )
        kl = logits_kl(logits, ref_logits, direction=wanted.kl or "reverse")
        out = out._replace(ref_log_prob=log_prob_at(ref_logits, targets), kl=kl.float())
    if wanted.top_k:
        if wanted.top_k > logits.shape[-1]:
            raise ValueError(
                f"top_k is {wanted.top_k}; expected at most {logits.shape[-1]}, the size of the vocabulary"
            )
        with torch.no_grad():
            top, indices = log_probs.topk(wanted.top_k, -1)
            tail = log_probs.scatter(-1, indices, -torch.inf).logsumexp(-1)
        out = out._replace(top_indices=indices, top_log_probs=top.float(), tail_log_prob=tail.float())
    return out


def log_prob_at(logits: Tensor, targets: Tensor) -> Tensor:
    """``log softmax(logits)`` at ``targets``, in float32 whatever the dtype; ``[n, V], [n] -> [n]``."""
    logits = _wide(logits)
    return (logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)).float()


def _narrow(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.float()


def _wide(logits: Tensor) -> Tensor:
    """At least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
