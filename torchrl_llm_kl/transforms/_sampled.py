"""Log-probs that the policy stored while it sampled."""

from __future__ import annotations

import warnings

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl.ragged import Ragged, read_ragged
from torchrl_llm_kl.transforms._located import Located
from torchrl_llm_kl.transforms._pairs import check_finite

__all__ = ["sampled_log_probs"]


def sampled_log_probs(td: TensorDictBase, key: NestedKey, located: Located) -> tuple[Ragged, Tensor]:
    """Put log-probs of the response at the response's place in the whole sequence.

    torchrl's wrappers store exactly 0 for the first token they generate, whatever its probability. Such a token is left
    out (and a warning says so): a KL of ``0 - ref_log_prob`` would charge it for the reference's whole log-prob.

    Args:
        td: the step.
        key: log-probs of the response, one for each generated token.
        located: the tokens of the whole sequence.

    Returns:
        The log-probs ``[N]``, 0 where there is none, and where they are known ``[N]``.

    Raises:
        ValueError: if a sequence has more log-probs than tokens, or a log-prob that counts is not finite.
    """
    response = read_ragged(td, key)
    assert response is not None
    tokens = located.tokens
    slots = Ragged(tokens.slots(), tokens.container.row_lengths, tokens.container)
    widths = response.container.row_lengths
    starts = slots.lengths - widths
    if bool((starts < 0).any()):
        row = int((starts < 0).nonzero()[0])
        raise ValueError(
            f"sequence {row} has {int(widths[row])} log-probs under {key!r} but {int(slots.lengths[row])} tokens"
        )
    where = slots.positions >= starts[slots.sequence_ids]
    values = torch.zeros(where.shape, dtype=torch.float32, device=where.device)
    values[where] = response.slots().detach().float()
    first = where & (slots.positions == starts[slots.sequence_ids])
    unknown = first & (values == 0)
    if tokens.keep is not None:
        values, where, unknown = values[tokens.keep], where[tokens.keep], unknown[tokens.keep]
    if bool((unknown & located.mask).any()):
        warnings.warn(
            f"{key!r} holds exactly 0 for the first generated token of {int((unknown & located.mask).sum())} sequences: "
            f"torchrl never computes it. That token is left out of the KL; RetrieveKL scores every token.",
            stacklevel=2,
        )
    known = where & ~unknown
    values = torch.where(known & located.mask, values, 0)
    check_finite(tokens.like(values), "the policy", key)
    return tokens.like(values), known
