"""The proof, on a few short sequences, that a fast route gives the model's own numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring._mode import Mode
from torchrl_llm_kl.scoring._model import (
    call,
    find_body,
    find_head,
    logits_of,
    model_device,
    position_limit,
    vocab_size,
)
from torchrl_llm_kl.scoring._padded import PaddedPass, Route
from torchrl_llm_kl.scoring._probe_packs import can_pack, relative_precision
from torchrl_llm_kl.scoring._request import Request
from torchrl_llm_kl.scoring._states import Wanted, log_prob_at, read

__all__ = ["Verdict", "choose_route"]

_PROBE_LENGTHS = (12, 7, 3)

# In order of preference. Padding without a key to attend to is NaN in some attention (eager, sliding window, float64),
# so that a mask may hurt; and a model may number its positions in its own way.
_HEAD_ROUTES = (Route("head"), Route("head", mask=False), Route("head", positions=False))
_FULL_ROUTES = (Route("full"), Route("full", mask=False), Route("full", positions=False))


@dataclass(frozen=True)
class Verdict:
    """The chosen route, and why it is not the fast one."""

    route: Route
    complaint: str | None = None


def choose_route(model: nn.Module, *, probe: bool, dtype: torch.dtype | None = None) -> Verdict:
    """The first route that reproduces the model's plain forward, one sequence at a time and nothing padded."""
    has_head = find_body(model) is not None and find_head(model) is not None
    vocab = _vocab(model)
    name = type(model).__name__
    if not has_head:
        complaint = f"{name} does not say what its body and head are (get_decoder, get_output_embeddings)"
        if vocab is None or not probe:
            return Verdict(Route("full"), complaint)
    elif vocab is None or not probe:
        return Verdict(Route("head"))
    else:
        complaint = ""

    mode = Mode(dtype=dtype)
    with mode.of(model):
        request = _probe_request(vocab, position_limit(model))
        plain, tolerance = _plain(model, request)
        for route in (*_HEAD_ROUTES, *_FULL_ROUTES) if has_head else _FULL_ROUTES:
            difference = _difference(model, mode, request, route, plain)
            if isinstance(difference, float) and difference <= tolerance:
                packed = route.path == "head" and route.positions and can_pack(model, mode, route, vocab)
                return Verdict(replace(route, packed=packed), complaint if route.path == "full" else None)
            if not complaint:
                complaint = (
                    f"the head of {name}, applied to its body, does not reproduce the model's own log-probs: "
                    f"{_say(difference)}, tolerance {tolerance:.1g}"
                )
    return Verdict(
        Route("full"),
        f"{complaint}; nor does its forward on padded sequences ({_say(difference)}): scores may be wrong, is the "
        "model causal and deterministic?",
    )


def _vocab(model: nn.Module) -> int | None:
    """Tokens that are embedded and predicted: some models embed more than they predict."""
    weight = getattr(find_head(model), "weight", None)
    embedded = vocab_size(model)
    predicted = weight.shape[0] if isinstance(weight, Tensor) and weight.ndim == 2 else embedded
    return None if embedded is None or predicted is None else min(embedded, predicted)


def _probe_request(vocab: int, limit: int | None) -> Request:
    lengths = [length if limit is None else min(length, limit) for length in _PROBE_LENGTHS]
    generator = torch.Generator().manual_seed(0)
    return Request.build(
        Ragged.from_list([torch.randint(vocab, (length,), generator=generator) for length in lengths]), None
    )


def _plain(model: nn.Module, request: Request) -> tuple[Tensor, float]:
    """The model's own log-probs, and how far from them rounding alone may lead."""
    parts, spread, precision = [], 0.0, 0.0
    for ids in request.tokens.to_list():
        ids = ids.to(model_device(model, ids.device))
        logits = logits_of(call(model, ids[:-1].unsqueeze(0))).squeeze(0)[-(len(ids) - 1) :]
        precision = relative_precision(logits.dtype, logits.device)
        spread = max(spread, float((logits - logits.mean(-1, keepdim=True)).abs().max()))
        parts.append(log_prob_at(logits, ids[1:].to(logits.device)))
    return torch.cat(parts), precision * spread + 1e-6


def _difference(model: nn.Module, mode: Mode, request: Request, route: Route, plain: Tensor) -> float | str:
    """The largest difference from the plain forward, or what went wrong."""
    rows = torch.arange(request.tokens.num_sequences)
    device = model_device(model, plain.device)
    try:
        padded = PaddedPass(model, mode, route, request, [rows], temperature=1.0, device=device)
        got = _read(padded, 0, request)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return float((got.to(plain.device) - plain).abs().max())


def _read(forwards: PaddedPass, index: int, request: Request) -> Tensor:
    """Log-probs of the tokens that one forward predicts."""
    states = forwards.run(index)
    targets = request.tokens.values[forwards.elements[index]].to(forwards.device)
    return read(states, targets, Wanted(), chunk=8, recompute=False).log_prob


def _say(difference: float | str) -> str:
    return difference if isinstance(difference, str) else f"largest difference {difference:.3g}"
