"""A teacher's top k as transforms write it: ids, their log-probs, and the log of the probability of all other tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torch.nn.functional import pad

from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts._entries import per_token, require_key
from torchrl_llm_kl.rollouts._keys import sub_key

#: Names of the entries below a teacher's key: ids and log-probs ``[*B, T, k]``, and that of all other tokens ``[*B, T]``.
TOP_K_NAMES = ("ids", "log_probs", "rest_log_prob")


class TeacherOutcomes(NamedTuple):
    """The top k of ``M`` teachers at each token; the result of :func:`read_top_k`."""

    ids: Tensor  #: -1 where a teacher has fewer than the others; int64 ``[N, M, k]``
    log_probs: Tensor  #: nats, of the ids and last of all other tokens; ``[N, M, k + 1]``, ``-inf`` at ids of -1


def top_k_entries(key: NestedKey) -> list[NestedKey]:
    """The three entries of a teacher's top k below ``key``.

    Example:
        >>> top_k_entries("top_k")
        [('top_k', 'ids'), ('top_k', 'log_probs'), ('top_k', 'rest_log_prob')]
    """
    return [sub_key(key, name) for name in TOP_K_NAMES]


def read_top_k(
    td: TensorDictBase, keys: Sequence[NestedKey], tokens: Ragged, responses: Tensor | None
) -> TeacherOutcomes:
    """The top k of one or several teachers at each token, in any layout that :func:`per_token` reads.

    Args:
        td: the data.
        keys: that of each teacher's :class:`~torchrl_llm_kl.TopK`; their ``k`` may differ.
        tokens: all tokens.
        responses: True at response tokens; bool ``[N]``; None if unknown.

    Raises:
        KeyError: if an entry is missing.
        ValueError: if the entries of a teacher have other shapes, or ids that are no integers.

    Example:
        >>> from tensordict import TensorDict
        >>> tokens = Ragged.from_list([torch.tensor([7, 8])])
        >>> top = TensorDict(ids=torch.tensor([[[0], [8]]]), log_probs=torch.tensor([[[0.0], [-0.1]]]),
        ...     rest_log_prob=torch.tensor([[0.0, -2.4]]), batch_size=[1])
        >>> found = read_top_k(TensorDict(top_k=top, batch_size=[1]), ["top_k"], tokens, None)
        >>> found.ids[1].tolist(), found.log_probs[1]
        ([[8]], tensor([[-0.1000, -2.4000]]))
    """
    advice = "RetrieveLogProb(teacher, extras=[TopK(64)]) or RayRetrieveLogProb writes it; say where with top_k_key=."
    teachers = []
    for key in keys:
        entries = [
            require_key(td, name, "a distillation needs a teacher's top k", advice) for name in top_k_entries(key)
        ]
        ids = per_token(td, entries[0], tokens, responses, fill=0, features=1)
        log_probs = per_token(td, entries[1], tokens, responses, features=1).detach()
        rest = per_token(td, entries[2], tokens, responses).detach().to(log_probs.dtype)
        if ids.shape != log_probs.shape:
            shapes = f"{tuple(ids.shape[1:])} and {tuple(log_probs.shape[1:])}"
            raise ValueError(f"{entries[0]!r} and {entries[1]!r} hold {shapes} numbers per token: expected the same k.")
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"{entries[0]!r} holds {ids.dtype}: expected integers, the ids of tokens.")
        teachers.append((ids.long(), torch.cat([log_probs, rest.unsqueeze(-1)], -1)))
    most = max(ids.shape[-1] for ids, _ in teachers)
    ids = torch.stack([pad(ids, (0, most - ids.shape[-1]), value=-1) for ids, _ in teachers], 1)
    # Padding before the last outcome, which is all other tokens.
    padded = [
        torch.cat([pad(x[:, :-1], (0, most + 1 - x.shape[-1]), value=-torch.inf), x[:, -1:]], -1) for _, x in teachers
    ]
    return TeacherOutcomes(ids, torch.stack(padded, 1))
