"""Scores that are the same to the last bit whatever else is in the call: ``LogProbScorer(deterministic=True)``.

A kernel's rounding depends on the shape of its inputs: a matrix product picks its blocking by the number of rows, an
elementwise function ends in a scalar loop, attention cuts queries and keys by their place in the call. Here every shape is
fixed. All packs have the same number of tokens, the last one padded; attention runs in blocks of queries at fixed positions
of their sequence, over all keys up to the end of the block; and the head's tiles have the same number of positions. In
a kernel of fixed shape a row's result depends on no other row and not on its place: that is checked on the model itself,
see :func:`~torchrl_llm_kl.scoring._probe.find_variance`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrl_llm_kl._numerics import check_range, send
from torchrl_llm_kl._private import compiled_call
from torchrl_llm_kl.scoring._attention import Inputs, PackLayout, attend_block, key_index
from torchrl_llm_kl.scoring._model import Setup, frequency_switches
from torchrl_llm_kl.scoring._wrapping import Ranks

#: Tokens of each forward by default: measured, 128 take a tenth more for answers of 64 tokens, and 512 mean more padding.
PACK = 256
#: Queries of an attention block, and positions of a tile of the head; packs are multiples of it.
BLOCK = 64

# ---------------------------------------------------------------------- where it is possible


def check_pack(tokens_per_batch: int | None) -> None:
    """Raise a ValueError unless forwards of so many tokens are whole blocks."""
    check_range(1, tokens_per_batch=tokens_per_batch)
    if tokens_per_batch is not None and tokens_per_batch % BLOCK:
        raise ValueError(
            f"tokens_per_batch must be a multiple of {BLOCK} with deterministic=True, where every forward has exactly as many "
            f"tokens, got {tokens_per_batch}."
        )


def obstacle(setup: Setup, *, probe: bool, share_prefixes: bool) -> str | None:
    """Why scores of a model depend on the other sequences of a call, judging by its kind; None if nothing is known."""
    model, device = setup.model, setup.device
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} | {setup.options.dtype} - {None}
    narrow = [str(dtype) for dtype in dtypes if dtype not in (torch.float32, torch.float64)]
    reasons = {
        f"is on {device}, and fixed shapes are known to suffice on a CPU only": device.type != "cpu",
        f"computes in {', '.join(narrow)}, and fixed shapes are known to suffice in float32 and float64 only": narrow,
        "was not probed: leave out probe=False": not probe,
        "is scored in padded batches: leave out share_prefixes=False": not share_prefixes,
        "is scored by its own forward, on padded batches": setup.route.path == "full",
        "has rotary frequencies that depend on the longest sequence": frequency_switches(model),
        "cannot attend within a pack and is scored in padded batches": setup.route.sharing != "packs",
        "is wrapped or sharded over ranks": Ranks([model]).groups,
        "has compiled layers, whose kernels torch.compile chooses": any(map(compiled_call, model.modules())),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def drops(model: nn.Module) -> bool:
    """Whether activations or layers are dropped at random: by a module, or by a function with a module's probability."""
    training = [module for module in model.modules() if module.training]
    return any(
        (isinstance(module, nn.Dropout) and module.p > 0)
        or any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items())
        for module in training
    )


# ---------------------------------------------------------------------- packs


def pad_pack(row: Tensor, size: int) -> Tensor:
    """``row [N]`` with zeros up to a multiple of ``size``."""
    return F.pad(row, (0, -row.numel() % size))


class _Blocks(NamedTuple):
    """The ``n`` blocks of a pack with the same place in their sequences."""

    queries: Tensor  # rows of the pack, the row after the last where the pack has no query; int64 [n, BLOCK]
    keys: Tensor  # rows of all keys, the row after the last where a sequence has ended; int64 [n, width]
    first: int  # position of the first query
    start: int  # position of the first key


def attend(layout: PackLayout, past: list[tuple[Tensor, Tensor]], inputs: Inputs) -> Tensor:
    """Attention whose shapes depend on positions alone: ``[1, heads, N, size]`` to ``[1, N, heads, size]``.

    Queries come in blocks that begin at multiples of ``BLOCK`` in their sequence. Each block attends to the keys from the
    start of the sequence, or of its window, to the end of the block. Missing queries and keys are 0. In a pack, blocks with
    the same place in their sequences are one batch.
    """
    if inputs.dropout:
        raise ValueError("the attention's dropout is on: no score is the same twice. Call model.eval().")
    query, key, value = inputs[:3]
    at = ("blocks", inputs.window)
    if at not in layout.shared:
        layout.shared[at] = _plan(layout, query.shape[2], inputs.window, query.device)
    groups, order = layout.shared[at]
    queries = _rows([query])
    keys, values = _rows([*(k for k, _ in past), key]), _rows([*(v for _, v in past), value])
    out = []
    for group in groups:
        q, k, v = (t.transpose(1, 2) for t in (queries[group.queries], keys[group.keys], values[group.keys]))
        mask = layout.mask(BLOCK, group.first - group.start, group.keys.shape[1], inputs.window, query)
        size = 1 if inputs.has_own_scores else len(q)  # one by one: these run elementwise functions
        blocks = zip(q.split(size), k.split(size), v.split(size), strict=True)
        attended = (attend_block(inputs._replace(query=q, key=k, value=v), mask) for q, k, v in blocks)
        out += [block.transpose(1, 2).flatten(0, 1) for block in attended]
    return torch.cat([*out, torch.zeros_like(out[0][:1])])[order].unsqueeze(0)


def _rows(parts: list[Tensor]) -> Tensor:
    """``[1, heads, n, size]`` each, end to end, then a row of zeros; ``[N + 1, heads, size]``."""
    rows = [part[0].transpose(0, 1) for part in parts]
    return torch.cat([*rows, torch.zeros_like(rows[0][:1])])


def _plan(
    layout: PackLayout, num_tokens: int, window: int | None, device: torch.device
) -> tuple[list[_Blocks], Tensor]:
    """The blocks, by position; and the place of each token's result, ``[N]``.

    Results lie end to end, then a row of zeros, for tokens of no piece.
    """
    keys_of = key_index(layout)
    num_keys = sum(kept[0][0].shape[2] for kept in layout.outside()) + num_tokens
    by_position: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for piece, keys in zip(layout.pieces, keys_of, strict=True):
        length, end = piece.last - piece.first, keys.numel()
        begin = end - length
        before, after = begin % BLOCK, -end % BLOCK
        queries = F.pad(torch.arange(piece.first, piece.last), (before, after), value=num_tokens)
        keys = F.pad(keys, (0, after), value=num_keys)
        for first, block in zip(range(begin - before, end, BLOCK), queries.split(BLOCK), strict=True):
            start = 0 if window is None else max(0, first - window + 1) // BLOCK * BLOCK
            by_position.setdefault(first, []).append((block, keys[start : first + BLOCK]))
    order = torch.full((num_tokens + 1,), sum(map(len, by_position.values())) * BLOCK)
    groups, done = [], 0
    for first, blocks in sorted(by_position.items()):
        queries, keys = (torch.stack(each) for each in zip(*blocks, strict=True))
        order[queries.flatten()] = torch.arange(done, done + queries.numel())
        done += queries.numel()
        groups.append(_Blocks(send(queries, device), send(keys, device), first, first + BLOCK - keys.shape[1]))
    return groups, send(order[:num_tokens], device)


# ---------------------------------------------------------------------- the proof


def circumstances(setup: Setup, size: int) -> tuple[object, ...]:
    """What a proof of invariance holds for, besides the model's kind."""
    return torch.get_num_threads(), setup.device, setup.options.dtype, setup.options.adapters, size
