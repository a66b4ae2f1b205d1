"""The tokens that a sampler kept, in a rollout: two entries below one key.

``(key, "counts")`` holds how many were kept at each token, ``[*B, T]`` in the layout of the tokens (or of the response alone),
0 where nothing was recorded. ``(key, "ids")`` holds their ids, those of a sequence one after another, ``[*B, M]``: nested,
leaves of a lazy stack, or padded on the right. At int32 a token of 8 kept ones takes 36 bytes.
"""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl.ragged import Dense, Ragged, Rows, read_ragged, segment_sum, write_ragged
from torchrl_llm_kl.rollouts._entries import find_key, per_token
from torchrl_llm_kl.rollouts._keys import sub_key


def read_kept(
    td: TensorDictBase, key: NestedKey, tokens: Ragged, responses: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """The recorded ids of all tokens, one after another ``[M]``, and where those of each begin ``[N + 1]``; None if missing.

    Args:
        td: the data.
        key: parent of both entries, also found on the other side of ``"next"``.
        tokens: all tokens.
        responses: True at response tokens; bool ``[N]``; where ``counts`` are of the response alone.

    Raises:
        ValueError: if a sequence has fewer ids than its counts add up to.

    Example:
        >>> from tensordict import TensorDict
        >>> kept = TensorDict(counts=torch.tensor([[0, 2, 1]]), ids=torch.tensor([[5, 6, 7, -1]]), batch_size=[1])
        >>> tokens = Ragged.from_list([torch.tensor([3, 6, 7])])
        >>> [x.tolist() for x in read_kept(TensorDict(kept=kept, batch_size=[1]), "kept", tokens)]
        [[5, 6, 7], [0, 0, 2, 3]]
    """
    ids_key, counts_key = (find_key(td, sub_key(key, name)) for name in ("ids", "counts"))
    if ids_key is None or counts_key is None:
        return None
    ids = read_ragged(td, ids_key)
    assert ids is not None
    if ids.num_sequences != tokens.num_sequences:
        raise ValueError(f"{ids_key!r} has {ids.num_sequences} sequences, the tokens have {tokens.num_sequences}.")
    counts = per_token(td, counts_key, tokens, responses, fill=0).long().cpu()
    needed, held = segment_sum(counts, tokens.lengths.cpu()), ids.lengths.cpu()
    short = (needed > held).nonzero()
    if len(short):
        row = int(short[0])
        raise ValueError(
            f"{ids_key!r} holds {int(held[row])} ids for sequence {row}, and {counts_key!r} there add up to "
            f"{int(needed[row])}: expected at least as many. One of them was cut or belongs to other data."
        )
    flat = Ragged(ids.values.reshape(-1).cpu(), held, ids.container).first(needed)
    return ids.values.reshape(-1).cpu()[flat].long(), torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def write_kept(td: TensorDictBase, key: NestedKey, tokens: Ragged, ids: Tensor, counts: Tensor) -> TensorDictBase:
    """Store the ids of all tokens ``[M]`` and their counts ``[N]``; returns the TensorDict that replaces ``td``.

    Example:
        >>> from tensordict import TensorDict
        >>> full = torch.tensor([[3, 6, 7]])
        >>> td = TensorDict(tokens=TensorDict(full=full, batch_size=[1]), batch_size=[1])
        >>> td = write_kept(td, "kept", Ragged.from_padded(full), torch.tensor([5, 6, 7]), torch.tensor([0, 2, 1]))
        >>> td["kept", "ids"], td["kept", "counts"]
        (tensor([[5, 6, 7]], dtype=torch.int32), tensor([[0, 2, 1]], dtype=torch.int32))
    """
    device = tokens.values.device
    td = write_ragged(td, sub_key(key, "counts"), tokens.like(counts.int().to(device)).slots(), tokens.container)
    sizes, shape = segment_sum(counts.cpu(), tokens.lengths.cpu()), tokens.container.batch_shape
    rows = Ragged(ids.int().to(device), sizes.to(device), Rows(sizes.tolist(), shape, device))
    if not isinstance(tokens.container, Dense):
        return write_ragged(td, sub_key(key, "ids"), rows.values, rows.container)
    padded = rows.to_padded(value=-1)
    return write_ragged(td, sub_key(key, "ids"), padded.flatten(), Dense(shape, padded.shape[1], device))
