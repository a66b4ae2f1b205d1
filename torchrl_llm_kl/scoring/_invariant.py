"""Scores that do not depend on the other sequences of a call, to the last bit: ``LogProbScorer(deterministic=True)``.

A kernel's rounding depends on the shape of its inputs: a matrix product picks its blocking by the number of rows, an
elementwise function ends in a scalar loop, attention cuts queries and keys by their place in the call. Here every shape is
fixed. All packs have the same number of tokens, and the last one is padded. Attention runs in blocks of queries at fixed
positions of their sequence, over all keys up to the end of the block. The head's tiles have the same number of positions. In
a kernel of fixed shape the result of a row must not depend on its place or on other rows.
:func:`~torchrl_llm_kl.scoring._probe.find_variance` checks this on the model itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrl_llm_kl._numerics import check_range, send
from torchrl_llm_kl.scoring._attention import Inputs, PackLayout, attend_block, key_index
from torchrl_llm_kl.scoring._model import Setup, frequency_switches, is_compiled
from torchrl_llm_kl.scoring._wrapping import Ranks

#: Default number of tokens of each forward. With 128, answers of 64 tokens took a tenth more time. 512 means more padding.
PACK = 256
#: Queries of an attention block, and positions of a tile of the head. The size of a pack is a multiple of it.
BLOCK = 64

# ---------------------------------------------------------------------- which models qualify


def check_pack(tokens_per_batch: int | None) -> None:
    """Raise a ValueError unless ``tokens_per_batch`` is a multiple of the block size."""
    check_range(1, tokens_per_batch=tokens_per_batch)
    if tokens_per_batch is not None and tokens_per_batch % BLOCK:
        raise ValueError(
            f"With deterministic=True every forward has exactly tokens_per_batch tokens. Expected a multiple of {BLOCK}, got "
            f"{tokens_per_batch}."
        )


def obstacle(setup: Setup, *, probe: bool, share_prefixes: bool) -> str | None:
    """The reason why this kind of model cannot be scored deterministically, or None if no reason is known."""
    model, device = setup.model, setup.device
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} | {setup.options.dtype} - {None}
    narrow = [str(dtype) for dtype in dtypes if dtype not in (torch.float32, torch.float64)]
    reasons = {
        f"is on {device}: fixed shapes were verified only on CPUs": device.type != "cpu",
        f"computes in {', '.join(narrow)}: fixed shapes were verified only in float32 and float64": narrow,
        "was not probed: leave out probe=False": not probe,
        "is scored in padded batches: leave out share_prefixes=False": not share_prefixes,
        "is scored by its own forward, in padded batches": setup.route.path == "full",
        "has rotary frequencies that depend on the longest sequence": frequency_switches(model),
        "cannot attend within a pack and is scored in padded batches": setup.route.sharing != "packs",
        "is wrapped or sharded over ranks": Ranks([model]).groups,
        "has compiled layers, whose kernels torch.compile chooses": is_compiled(model),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def drops(model: nn.Module) -> bool:
    """Whether dropout or layerdrop is on, in a dropout module or as a probability that a module stores for a function."""
    training = [module for module in model.modules() if module.training]
    return any(
        (isinstance(module, nn.Dropout) and module.p > 0)
        or any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items())
        for module in training
    )


# ---------------------------------------------------------------------- packs


def pad_pack(row: Tensor, size: int) -> Tensor:
    """``row [N]``, padded with zeros to a multiple of ``size``."""
    return F.pad(row, (0, -row.numel() % size))


class _Blocks(NamedTuple):
    """The ``n`` blocks of a pack that have the same position in their sequences."""

    queries: Tensor  # indices of queries; one past the last for a missing query; int64 [n, BLOCK]
    keys: Tensor  # indices of keys; one past the last after the end of a sequence; int64 [n, width]
    first: int  # position of the first query
    start: int  # position of the first key


def attend(layout: PackLayout, past: list[tuple[Tensor, Tensor]], inputs: Inputs) -> Tensor:
    """Attention whose shapes depend only on positions, ``[1, heads, N, size]`` to ``[1, N, heads, size]``.

    Blocks of queries begin at multiples of ``BLOCK`` in their sequence. Each block attends to the keys from the start of the
    sequence, or of its window, to the end of the block. Missing queries and keys are 0. Blocks of a pack that have the same
    position in their sequences form one batch.
    """
    if inputs.dropout:
        raise ValueError("deterministic=True, but the attention's dropout is on: call model.eval().")
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
        # One by one with scores of our own: the rounding of elementwise functions depends on the size of the batch.
        size = 1 if inputs.has_own_scores else len(q)
        blocks = zip(q.split(size), k.split(size), v.split(size), strict=True)
        attended = (attend_block(inputs._replace(query=q, key=k, value=v), mask) for q, k, v in blocks)
        out += [block.transpose(1, 2).flatten(0, 1) for block in attended]
    return torch.cat([*out, torch.zeros_like(out[0][:1])])[order].unsqueeze(0)


def _rows(parts: list[Tensor]) -> Tensor:
    """Concatenate parts ``[1, heads, n, size]`` and a row of zeros to ``[N + 1, heads, size]``."""
    rows = [part[0].transpose(0, 1) for part in parts]
    return torch.cat([*rows, torch.zeros_like(rows[0][:1])])


def _plan(
    layout: PackLayout, num_tokens: int, window: int | None, device: torch.device
) -> tuple[list[_Blocks], Tensor]:
    """The blocks by position, and for each token the index of its result, ``[N]``.

    The results are concatenated in the order of the blocks. A final row of zeros is for padding tokens.
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
