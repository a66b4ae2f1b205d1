"""What a scorer returns when more than log-probs is asked for."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring._states import Readings

__all__ = ["Scores"]


class Scores(NamedTuple):
    """Per-token results in the form of the sequences; nats; exactly 0 where the mask was False.

    Args:
        log_prob: of the tokens; ``[N]``.
        entropy: of the distribution that each was drawn from; ``[N]``.
        ref_log_prob: of the tokens under the reference; ``[N]``.
        kl: the exact KL over the whole vocabulary; ``[N]``.
        top_indices: the most probable tokens, in order; ``[N, k]``.
        top_log_probs: their log-probs; ``[N, k]``.
        tail_log_prob: log of the probability of all other tokens together; ``[N]``, ``-inf`` if there are none.
    """

    log_prob: Ragged
    entropy: Ragged | None = None
    ref_log_prob: Ragged | None = None
    kl: Ragged | None = None
    top_indices: Ragged | None = None
    top_log_probs: Ragged | None = None
    tail_log_prob: Ragged | None = None

    @classmethod
    def spread(cls, sequences: Ragged, elements: Tensor, found: Readings) -> Scores:
        """Put what was read at flat ``elements [K]`` into the form of ``sequences``."""

        def place(values: Tensor | None) -> Ragged | None:
            if values is None:
                return None
            out = values.new_zeros((sequences.values.shape[0], *values.shape[1:]))
            if elements.numel():
                out = out.index_copy(0, elements.to(out.device), values)
            return sequences.like(out.to(sequences.values.device))

        log_prob = place(found.log_prob)
        assert log_prob is not None
        return cls(log_prob, *map(place, found[1:]))
