"""Mixtures of experts whose routers are patched to use given experts."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def routers(model: Any) -> list[nn.Module]:
    blocks = [layer.mlp for layer in model.model.layers]
    found = [getattr(block, "router", None) or getattr(block, "gate", None) for block in blocks]
    return [router for router in found if router is not None]


def perturbed(model: nn.Module) -> nn.Module:
    """A copy whose routers choose other experts."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    for router in routers(other):
        router.weight.data += 0.5 * torch.randn(router.weight.shape, generator=generator, dtype=router.weight.dtype)
    return other


def weigh(family: str, model: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    """The weights of chosen experts by the papers' formulas, not by transformers' operators."""
    at = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, chosen, True)
    if family in ("mixtral", "gpt_oss"):  # a softmax over only the chosen experts
        return logits.masked_fill(~at, -torch.inf).softmax(-1).gather(-1, chosen)
    if family == "qwen3_moe":  # shares of the softmax over all experts, not normalised
        return (logits - logits.logsumexp(-1, keepdim=True)).exp().gather(-1, chosen)
    share = torch.where(at, logits.sigmoid(), 0)
    return (model.config.routed_scaling_factor * share / share.sum(-1, keepdim=True)).gather(-1, chosen)


def by_hand(family: str, model: nn.Module, rows: list[Tensor], records: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy ``[N]`` of a model whose routers use the experts ``[T, L, k]``, one sequence at a time."""
    found: list[Tensor] = []
    for row, record in zip(rows, records, strict=True):
        for place, router in enumerate(routers(model)):

            def forward(hidden: Tensor, router: Any = router, experts: Tensor = record, place: int = place) -> Any:
                chosen = experts[:, place].long()
                hidden = hidden.reshape(-1, router.hidden_dim)
                logits = F.linear(hidden, router.weight, getattr(router, "bias", None))
                return logits, weigh(family, model, logits, chosen), chosen

            router.forward = forward
        log_p = model(input_ids=row[None]).logits[0, :-1].log_softmax(-1)
        both = torch.stack([log_p.gather(-1, row[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)], -1)
        found.append(F.pad(both, (0, 0, 1, 0)))
    for router in routers(model):
        del router.__dict__["forward"]
    return tuple(torch.cat(found).unbind(-1))
