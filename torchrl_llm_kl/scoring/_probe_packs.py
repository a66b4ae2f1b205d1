"""The proof, on a few short sequences, that a model may be given several sequences end to end."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring._mode import Mode
from torchrl_llm_kl.scoring._model import has_window, is_stateful, model_device, position_limit
from torchrl_llm_kl.scoring._packed import PackedPass
from torchrl_llm_kl.scoring._padded import PaddedPass, Route
from torchrl_llm_kl.scoring._request import Request
from torchrl_llm_kl.scoring._tree import PrefixTree

__all__ = ["can_pack", "relative_precision"]

# Two levels, a cut inside a node, a past from an earlier pack.
_TRUNK, _BRANCH, _TAILS, _OTHER = 5, 4, (2, 3), 6
_TOKENS_PER_BATCH = 8


def can_pack(model: nn.Module, mode: Mode, route: Route, vocab: int) -> bool:
    """Whether packs give the hidden states that ``route`` gives one sequence at a time, and no sequence sees another.

    Hidden states, not log-probs: a head of zeros hides nothing. A state that leaks from one sequence into the next may be
    smaller than what half precision rounds away: therefore other tokens in one sequence must change nothing in another.
    """
    limit = position_limit(model)
    if is_stateful(model) or (limit is not None and limit < _TRUNK + _OTHER + 1):
        return False
    device = model_device(model, torch.device("cpu"))
    rows, others = _rows(vocab)
    try:
        found, told_of_window = _packed(model, mode, rows, device)
        if has_window(model) and not told_of_window:
            return False  # its window is in a mask that packs do not have, too wide for these sequences to show it
        apart = _apart(model, mode, route, rows, device)
        precision, largest = relative_precision(mode.dtype or apart.dtype, device), float(apart.abs().max())
        if largest == 0.0 or float((found - apart).abs().max()) > precision * largest:
            return False  # zeros prove nothing
        moved = _packed(model, mode, others, device)[0] - found
    except Exception:  # attends in a way of its own
        return False
    untouched = rows.sequence_ids == 2
    exact = precision >= 1e-2  # half precision: any change at all is another sequence's
    return float(moved[untouched].abs().max()) <= (0.0 if exact else 1e-5 * largest)


def relative_precision(dtype: torch.dtype, device: torch.device) -> float:
    """How far two orders of summation may differ after many layers, relative to the largest value."""
    if dtype == torch.bfloat16:
        return 5e-2
    if dtype == torch.float16:
        return 1e-2
    tf32 = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return 1e-2 if tf32 else 1e-4


def _rows(vocab: int) -> tuple[Ragged, Ragged]:
    """Two answers to one question and one to another, and the same with other tokens at the end of the first two."""
    generator = torch.Generator().manual_seed(1)
    trunk, branch, *tails, other = (
        torch.randint(vocab, (n,), generator=generator) for n in (_TRUNK, _BRANCH, *_TAILS, _OTHER)
    )
    rows = [[torch.cat([trunk, branch, (tail + shift) % vocab]) for tail in tails] for shift in (0, 1)]
    first, second = (Ragged.from_list([*some, torch.cat([trunk, other])]) for some in rows)
    return first, second


def _packed(model: nn.Module, mode: Mode, rows: Ragged, device: torch.device) -> tuple[Tensor, bool]:
    request = Request.build(rows, None)
    tree = PrefixTree.build(request.tokens, request.forward_lengths, min_shared=0)
    packs = PackedPass(model, mode, request, tree, tokens_per_batch=_TOKENS_PER_BATCH, temperature=1.0, device=device)
    return _hidden(packs, rows), packs.has_window


def _apart(model: nn.Module, mode: Mode, route: Route, rows: Ragged, device: torch.device) -> Tensor:
    request = Request.build(rows, None)
    one_by_one = list(torch.arange(rows.num_sequences).split(1))
    return _hidden(PaddedPass(model, mode, route, request, one_by_one, temperature=1.0, device=device), rows)


def _hidden(forwards: PackedPass | PaddedPass, rows: Ragged) -> Tensor:
    """What predicts each token, 0 for the first ones; ``[N, H]``, on the CPU."""
    out = torch.zeros(0)
    for index, elements in enumerate(forwards.elements):
        source = forwards.run(index).source.cpu()
        if index == 0:
            out = source.new_zeros(rows.values.shape[0], source.shape[-1])
        out[elements] = source
    return out
