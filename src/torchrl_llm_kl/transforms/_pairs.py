"""Two sets of log-probs of the same tokens: same lengths, finite, in one form."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_llm_kl.ragged import Dense, PaddingSide, Ragged
from torchrl_llm_kl.transforms._located import Located

__all__ = ["check_finite", "check_pair", "check_same_tokens", "estimate_kl", "match"]


def check_pair(gen: Ragged, ref: Ragged, *, padding_side: PaddingSide) -> tuple[Ragged, Ragged]:
    """Bring two sets of log-probs to one form, that of ``gen``.

    Raises:
        ValueError: if the number of sequences or a length differs.
    """
    if gen.num_sequences == ref.num_sequences:
        gen = _without_padding(gen, ref, padding_side)
    return gen, match(gen, ref, "ref_log_probs", padding_side=padding_side)


def match(gen: Ragged, other: Ragged, name: str, *, padding_side: PaddingSide) -> Ragged:
    """Bring ``other``, which the errors call ``name``, to the form of ``gen``.

    Raises:
        ValueError: if the number of sequences or a length differs.
    """
    if gen.num_sequences != other.num_sequences:
        raise ValueError(
            f"Batch size mismatch: gen_log_probs has {gen.num_sequences} samples, {name} has {other.num_sequences} samples"
        )
    other = _without_padding(other, gen, padding_side)
    a, b = gen.container, other.container
    both_padded = isinstance(a, Dense) and isinstance(b, Dense)
    same_widths = torch.equal(a.row_lengths, b.row_lengths)
    if both_padded and same_widths and gen.keep is not None and other.keep is None:
        other = Ragged.from_slots(other.slots(), b, gen.keep)
    if bool((gen.lengths != other.lengths).any()):
        # Of two widths a mask can fit one only: then the widths say what is wrong.
        padded = both_padded and not same_widths
        ours, theirs = (a.row_lengths, b.row_lengths) if padded else (gen.lengths, other.lengths)
        i = int((ours != theirs).nonzero()[0])
        m, n = int(ours[i]), int(theirs[i])
        raise ValueError(
            f"Sample {i} has different shapes: gen_log_probs[{i}].shape={torch.Size([m])}, {name}[{i}].shape="
            f"{torch.Size([n])}. From position {min(m, n)} on, one model scored tokens that the other did not: score the "
            f"same tokens under both models, with the same tokenizer and template."
        )
    return other


def _without_padding(a: Ragged, b: Ragged, side: PaddingSide) -> Ragged:
    """Drop the padding of ``a`` if it is padded and ``b`` holds rows of their own lengths."""
    if not isinstance(a.container, Dense) or isinstance(b.container, Dense) or a.keep is not None:
        return a
    widths = b.container.row_lengths
    if bool((widths > a.container.width).any()):
        return a
    position = torch.arange(a.container.width, device=a.values.device)
    limit = widths.unsqueeze(-1)
    keep = position < limit if side == "right" else position >= a.container.width - limit
    return Ragged.from_slots(a.slots(), a.container, keep.reshape(-1))


def check_finite(log_prob: Ragged, who: str, key: NestedKey) -> Tensor:
    """True where there is a score; ``[N]``. A leading run of NaN is torchrl's marker for tokens that were not scored.

    Raises:
        ValueError: if any other log-prob is NaN or infinite, naming the sequence and the position.
    """
    finite = log_prob.values.isfinite()
    if bool(finite.all()):
        return finite
    seen = log_prob.like(finite.long())
    before = seen.values.cumsum(0)
    start = torch.nn.functional.pad(before, (1, 0))[log_prob.offsets[:-1]]
    leading = (before - start[log_prob.sequence_ids] == 0) & log_prob.values.isnan()
    bad = ~finite & ~leading
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        row, position = int(log_prob.sequence_ids[at]), int(log_prob.positions[at])
        raise ValueError(
            f"the log-prob of {who} under {key!r} is {float(log_prob.values[at])} at sequence {row}, position {position}: "
            f"expected a finite number. A token that the policy sampled cannot have probability 0 under it; check the "
            f"model's weights and dtype, or mask the token."
        )
    return finite


def check_same_tokens(gen: Located, ref: Located) -> None:
    """Check that both models are about to score the same tokens and the same mask.

    Raises:
        ValueError: with the first sequence and position at which they differ.
    """
    for row, (a, b) in enumerate(zip(gen.tokens.to_list(), ref.tokens.to_list(), strict=True)):
        n = min(len(a), len(b))
        different = (a[:n] != b[:n]).nonzero()
        if len(different) or len(a) != len(b):
            position = int(different[0]) if len(different) else n
            found = f"{a[position : position + 4].tolist()} and {b[position : position + 4].tolist()}"
            raise ValueError(
                f"the two models see different tokens, first at sequence {row}, position {position}: {found} (lengths "
                f"{len(a)} and {len(b)}). Give both the same tokenizer and chat template, or store the sampled tokens."
            )
    if not torch.equal(gen.mask, ref.mask):
        at = int((gen.mask != ref.mask).nonzero()[0])
        row, position = int(gen.tokens.sequence_ids[at]), int(gen.tokens.positions[at])
        raise ValueError(
            f"the two models count different tokens as the assistant's, first at sequence {row}, position {position}: "
            f"give both the same chat template"
        )


def estimate_kl(estimator: Callable[..., Tensor], gen: Tensor, ref: Tensor, old: Tensor, scored: Tensor) -> Tensor:
    """The estimator where ``scored``, exactly 0 elsewhere: what is not scored never enters it. All ``[N]``."""
    values = estimator(gen[scored], ref[scored], old[scored])
    return values.new_zeros(scored.shape).index_put((scored,), values)
