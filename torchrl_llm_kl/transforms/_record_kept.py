"""Record the tokens that a truncated sampler could have drawn, to replay the truncation when scoring."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.ragged import own_leaves
from torchrl_llm_kl.rollouts import locate, sub_key, write_kept
from torchrl_llm_kl.scoring import Sampling, truncate


class RecordKept:
    """A transformers logits processor that truncates the distribution and records which tokens could have been drawn.

    It applies temperature, top-k, top-p and min-p itself, because transformers runs its own warpers after all processors that
    are passed to ``generate``. Disable those with ``Sampling().generate_kwargs()``. The record of one ``generate`` call
    replaces the previous one. A token with 8 kept candidates takes 36 bytes.

    Args:
        sampling: temperature and truncation.

    Keyword Args:
        key: where :meth:`write` puts the record: ``(key, "counts")`` and ``(key, "ids")``.

    Example:
        >>> record = RecordKept(Sampling(top_p=0.7))
        >>> scores = torch.tensor([[4.0, 1.0, 2.0, 1.0]]).log()  # probabilities 1/2, 1/8, 1/4, 1/8
        >>> record(torch.tensor([[9]]), scores).exp()
        tensor([[4., 0., 2., 0.]])
        >>> record.steps
        [(tensor([0, 2], dtype=torch.int32), tensor([2]))]

    .. seealso:: ``docs/sampling.md`` for the replay.
    """

    def __init__(self, sampling: Sampling, *, key: NestedKey = "kept") -> None:
        self.sampling, self.key = sampling, key
        #: For each generated token: the kept ids of all sequences, concatenated, and their number per sequence ``[B]``.
        self.steps: list[tuple[Tensor, Tensor]] = []
        self._length = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The logits ``[B, V]`` divided by the temperature, with ``-inf`` for excluded tokens."""
        if not self.steps or input_ids.shape[1] != self._length + 1:
            self.steps = []  # within one call of generate the length grows by 1, so this is another call
        self._length = input_ids.shape[1]
        scores = truncate(scores, self.sampling)
        kept = scores > -torch.inf
        self.steps.append((kept.nonzero()[:, 1].int().cpu(), kept.sum(-1).cpu()))
        return scores

    def write(self, td: TensorDictBase) -> TensorDictBase:
        """Store the record of the last ``generate`` beside the tokens that it returned.

        Args:
            td: the policy's output, with ``("tokens", "full")`` and either the prompt or the assistant mask. The sequences
                must be in the order of generation.

        Returns:
            The TensorDict that replaces ``td``.

        Raises:
            ValueError: if a generated token is not among its kept tokens, because the record is of another ``generate`` call.
        """
        located = locate(td)
        tokens, mask = located.tokens, located.host_mask
        rows, batch = tokens.sequence_ids.cpu()[mask], len(self.steps[0][1]) if self.steps else 0
        generated = torch.zeros(tokens.num_sequences, dtype=torch.long).index_add(0, rows, torch.ones_like(rows))
        step = torch.arange(len(rows)) - (generated.cumsum(0) - generated)[rows]
        if batch != tokens.num_sequences or int(generated.max()) > len(self.steps):
            raise ValueError(
                f"the record has {batch} sequences and {len(self.steps)} tokens of each, the data has {tokens.num_sequences} "
                f"and up to {int(generated.max())}: call write() on the policy's output before it generates again."
            )
        ids, counts = (torch.cat(each).long() for each in zip(*self.steps, strict=True))
        kept = Kept.of(ids, counts).take(step * batch + rows)
        number, drawn = kept.offsets.diff(), tokens.values.cpu()[mask][kept.rows] == kept.ids
        missing = torch.ones(len(rows), dtype=torch.bool).index_fill(0, kept.rows[drawn], False).nonzero()
        if len(missing):
            at = int(missing[0])
            raise ValueError(
                f"response token {int(step[at])} of sequence {int(rows[at])} is not among the {int(number[at])} kept tokens: "
                "the record is of another call of generate, or generate applies another temperature or penalty."
            )
        all_counts = torch.zeros(len(mask), dtype=torch.long)
        all_counts[mask] = number
        own_leaves(td, *(sub_key(self.key, name) for name in ("counts", "ids")))
        return write_kept(td, self.key, tokens, kept.ids, all_counts)
