"""Check on a few short sequences that a fast route reproduces the model's own numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring._model import (
    Route,
    Setup,
    body_and_head,
    call,
    find_body,
    find_head,
    has_window,
    model_device,
    position_limit,
    read_output,
    vocab_size,
    whole_logits,
)
from torchrl_llm_kl.scoring._passes import PackedPass, PaddedPass
from torchrl_llm_kl.scoring._request import Request
from torchrl_llm_kl.scoring._scores import Wanted, log_prob_at, read
from torchrl_llm_kl.scoring._tree import PrefixTree
from torchrl_llm_kl.scoring._wrapping import Ranks, inside

_PROBE_LENGTHS = (12, 7, 3)

# In order of preference. In some attention (eager, sliding window, float64) padding without a key to attend to is NaN,
# so a mask may hurt; and a model may use its own position numbering.
_HEAD_ROUTES = (Route("head"), Route("head", mask=False), Route("head", positions=False))
_FULL_ROUTES = (Route("full"), Route("full", mask=False), Route("full", positions=False))

# The packed probe has two levels, a cut inside a node, and a past from an earlier pack.
_TRUNK, _BRANCH, _TAILS, _OTHER = 5, 4, (2, 3), 6
_TOKENS_PER_BATCH = 8

# ---------------------------------------------------------------------- log-probs


def choose_route(model: nn.Module, *, probe: bool, dtype: torch.dtype | None = None) -> tuple[Route, str | None]:
    """The first route that reproduces the model's own forward, and the reason if it is not the fast one.

    The model's own forward here takes one sequence at a time, without padding.
    """
    head = find_head(model)
    has_parts = find_body(model) is not None and head is not None
    name = type(model).__name__
    complaint = "" if has_parts else f"{name} does not expose its body and head (get_decoder, get_output_embeddings)"
    # Some models embed more tokens than they predict.
    vocab, weight = vocab_size(model), getattr(head, "weight", None)
    if vocab is None or not probe:
        return Route("head" if has_parts else "full"), complaint or None
    if isinstance(weight, Tensor) and weight.ndim == 2:
        vocab = min(vocab, weight.shape[0])

    setup = Setup(model, Route("full"), model_device(model, torch.device("cpu")), dtype=dtype)
    ranks = Ranks([model])
    # Graphs of such short sequences would serve nothing else.
    with torch.compiler.set_stance("force_eager"), setup.active():
        limit, generator = position_limit(model), torch.Generator().manual_seed(0)
        lengths = [length if limit is None else min(length, limit) for length in _PROBE_LENGTHS]
        rows = [torch.randint(vocab, (length,), generator=generator) for length in lengths]
        request = Request.build(Ragged.from_list(rows), None)
        plain, tolerance = _plain(model, request)
        route, found = None, ""
        if has_parts:
            work = partial(_first_equal, _HEAD_ROUTES, setup, ranks, request, plain, tolerance, vocab)
            route, found = inside([(model, *body_and_head(model))], work)
            complaint = (
                f"the head of {name}, applied to its body, does not reproduce the model's own log-probs: {found}, "
                f"tolerance {tolerance:.1g}"
            )
        if route is not None:
            return route, None
        # Outside, since these call the model itself.
        route, found = _first_equal(_FULL_ROUTES, setup, ranks, request, plain, tolerance, vocab)
    return route or Route("full"), complaint if route is not None else (
        f"{complaint}; nor does its forward on padded sequences ({found}): scores may be wrong, is the model causal and "
        "deterministic?"
    )


def _first_equal(
    routes: Sequence[Route], setup: Setup, ranks: Ranks, request: Request, plain: Tensor, tolerance: float, vocab: int
) -> tuple[Route | None, str]:
    """The first route that reproduces the plain log-probs, on all ranks; what the first one gave instead."""
    complaint = ""
    for route in routes:
        setup = replace(setup, route=route)
        difference = _difference(setup, request, plain)
        if ranks.all(isinstance(difference, float) and difference <= tolerance):
            packed = route.path == "head" and route.positions and ranks.all(_can_pack(setup, vocab))
            return replace(route, packed=packed), ""
        found = difference if isinstance(difference, str) else f"largest difference {difference:.3g}"
        complaint = complaint or found
    return None, complaint


def _plain(model: nn.Module, request: Request) -> tuple[Tensor, float]:
    """The model's own log-probs, and the largest difference that rounding can explain."""
    parts, spread, precision = [], 0.0, 0.0
    for ids in request.tokens.to_list():
        ids = ids.to(model_device(model, ids.device))
        logits = whole_logits(model, read_output(call(model, ids[:-1].unsqueeze(0)), "logits"))
        logits = logits.squeeze(0)[-(len(ids) - 1) :]
        precision = _relative_precision(logits.dtype, logits.device)
        spread = max(spread, float((logits - logits.mean(-1, keepdim=True)).abs().max()))
        parts.append(log_prob_at(logits, ids[1:].to(logits.device)))
    return torch.cat(parts), precision * spread + 1e-6


def _difference(setup: Setup, request: Request, plain: Tensor) -> float | str:
    """The largest difference from the plain forward, or the error that was raised."""
    try:
        padded = PaddedPass(setup, request, [torch.arange(request.tokens.num_sequences)])
        targets = request.tokens.values[padded.elements[0]].to(setup.device)
        found = read(padded.run(0), targets, Wanted(), chunk=8, recompute=False)["log_prob"]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return float((found.to(plain.device) - plain).abs().max())


def _relative_precision(dtype: torch.dtype, device: torch.device) -> float:
    """The rounding difference between two orders of summation after many layers, relative to the largest value."""
    if dtype == torch.bfloat16:
        return 5e-2
    tf32 = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return 1e-2 if dtype == torch.float16 or tf32 else 1e-4


# ---------------------------------------------------------------------- packs


def _can_pack(setup: Setup, vocab: int) -> bool:
    """Whether packs reproduce the hidden states of one sequence at a time, and no sequence sees another.

    Compares hidden states, not log-probs, since a head of zeros would hide any difference. A state that leaks from one
    sequence into the next may be smaller than half precision resolves, so other tokens in one sequence must change
    nothing in another.
    """
    model, limit = setup.model, position_limit(setup.model)
    has_state = any(getattr(module, "_is_stateful", False) for module in model.modules())  # recurrence, convolution
    if has_state or (limit is not None and limit < _TRUNK + _OTHER + 1):
        return False
    # Two answers to one question and one to another; and these with other tokens at the end of the first two.
    generator = torch.Generator().manual_seed(1)
    lengths = (_TRUNK, _BRANCH, *_TAILS, _OTHER)
    trunk, branch, one, two, other = (torch.randint(vocab, (n,), generator=generator) for n in lengths)
    parts = ((trunk, branch, one), (trunk, branch, two), (trunk, other))
    rows = Ragged.from_list([torch.cat(row) for row in parts])
    untouched = rows.sequence_ids == 2
    ends = ~untouched & (rows.positions >= _TRUNK + _BRANCH)
    others = rows.like(torch.where(ends, (rows.values + 1) % vocab, rows.values))
    try:
        found, passed_window = _packed(setup, rows)
        if has_window(model) and not passed_window:
            return False  # its window is in a mask that packs do not have, and too wide to show in these sequences
        one_by_one = list(torch.arange(rows.num_sequences).split(1))
        apart = _hidden(PaddedPass(setup, Request.build(rows, None), one_by_one), rows)
        precision = _relative_precision(setup.dtype or apart.dtype, setup.device)
        largest = float(apart.abs().max())
        if largest == 0.0 or float((found - apart).abs().max()) > precision * largest:
            return False  # a comparison of zeros shows nothing
        moved = _packed(setup, others)[0] - found
    except Exception:  # for instance an attention that cannot be exchanged
        return False
    half = precision >= 1e-2  # half precision: any change comes from another sequence
    return float(moved[untouched].abs().max()) <= (0.0 if half else 1e-5 * largest)


def _packed(setup: Setup, rows: Ragged) -> tuple[Tensor, bool]:
    """Hidden states in packs, and whether any layer passed a window."""
    request = Request.build(rows, None)
    tree = PrefixTree.build(request.tokens, request.forward_lengths, min_shared=0)
    packs = PackedPass(setup, request, tree, _TOKENS_PER_BATCH)
    return _hidden(packs, rows), packs.has_window


def _hidden(forwards: PackedPass | PaddedPass, rows: Ragged) -> Tensor:
    """The hidden state that predicts each token, 0 for first tokens; ``[N, H]``, on the CPU."""
    sources = [forwards.run(index).source.cpu() for index in range(len(forwards.elements))]
    out = sources[0].new_zeros(rows.values.shape[0], sources[0].shape[-1])
    return out.index_copy(0, torch.cat(forwards.elements), torch.cat(sources))
