"""The routing that a sampler recorded, in a rollout: for each token the ids of its experts, by layer and slot.

An entry ``[*B, T, L, k]`` of integers in the layout of the tokens, of all tokens or of the response alone. Engines record what
they forward, so that the last token of a sequence may be missing: vLLM's ``routed_experts`` is ``[T - 1, L, k]``.
"""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl.ragged import Ragged, read_ragged
from torchrl_llm_kl.rollouts._entries import find_key


def read_routing(td: TensorDictBase, key: NestedKey, tokens: Ragged, responses: Tensor | None = None) -> Tensor | None:
    """The recorded experts of each token, -1 where there are none; integers ``[N, L, k]``, None if the entry is missing.

    Args:
        td: the data.
        key: the entry, also found on the other side of ``"next"``.
        tokens: all tokens.
        responses: True at response tokens; bool ``[N]``; where the entry is of the response alone, from its first token on.

    Raises:
        ValueError: if the entry holds no integers ``[L, k]`` for each token, or has another length than the tokens or the
            response, with or without the last token.

    Example:
        >>> from tensordict import TensorDict
        >>> data = TensorDict(routed_experts=torch.tensor([[[[3, 1]], [[0, 2]]]]), batch_size=[1])
        >>> read_routing(data, "routed_experts", Ragged.from_list([torch.tensor([5, 6, 7])])).tolist()
        [[[3, 1]], [[0, 2]], [[-1, -1]]]
    """
    found = find_key(td, key)
    if found is None:
        return None
    data = read_ragged(td, found)
    assert data is not None
    values = data.slots().cpu()
    if values.ndim != 3 or values.is_floating_point() or values.dtype == torch.bool:
        raise ValueError(
            f"{found!r} must hold integers [layers, experts] for each token, found {list(values.shape[1:])} of {values.dtype}."
        )
    if data.num_sequences != tokens.num_sequences:
        raise ValueError(f"{found!r} has {data.num_sequences} sequences, the tokens have {tokens.num_sequences}.")
    values = values.to(torch.int16 if values.element_size() == 1 else torch.int32)  # unsigned ones hold no -1
    widths, keep = data.container.row_lengths.cpu(), None if tokens.keep is None else tokens.keep.cpu()
    mask = torch.zeros(tokens.values.shape[0], dtype=torch.bool) if responses is None else responses.cpu()
    every = Ragged(tokens.values.cpu(), tokens.lengths.cpu(), tokens.container)
    slots, in_slots = every, mask
    if keep is not None:  # padding has a place too
        slots = Ragged(keep, tokens.container.row_lengths.cpu(), tokens.container)
        in_slots = torch.zeros_like(keep).index_put((keep,), mask)
    # Whole sequences come first: with prompts of one token, rows without the last token are as long as the response.
    for places, scored in ((slots, None), (every, None), (slots, in_slots), (every, mask)):
        start = torch.zeros_like(places.lengths) if scored is None else places.first_true(scored)
        short, empty = places.lengths - start - widths, places.lengths == start
        if bool((short == 0).all() | (short == (~empty).long()).all()):
            where = places.first(start + widths) & ~places.first(start)
            out = values.new_full((where.shape[0], *values.shape[1:]), -1)
            out[where] = values
            return out[keep] if places is slots and keep is not None else out
    row = int((slots.lengths != widths).nonzero()[0])
    raise ValueError(
        f"{found!r} must have the length of the tokens, all rows with or all without the last one: sequence {row} has "
        f"{int(widths[row])} rows and {int(slots.lengths[row])} tokens. Rows of the response alone begin with its first token."
    )
