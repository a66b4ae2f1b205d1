"""Two sets of log-probs of the same tokens: same lengths, finite, in one form."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_llm_kl.ragged import Dense, PaddingSide, Ragged, same_rows
from torchrl_llm_kl.transforms._located import Located

__all__ = ["check_finite", "check_finite_kl", "check_pair", "check_same_tokens", "estimate_kl", "match"]


_SAME_TOKENS = (
    "one model scored tokens that the other did not: score the same tokens under both models, with the same tokenizer and "
    "template"
)


def check_pair(
    gen: Ragged,
    other: Ragged,
    name: str = "ref_log_probs",
    *,
    padding_side: PaddingSide,
    advice: str = _SAME_TOKENS,
) -> tuple[Ragged, Ragged]:
    """Bring the policy's log-probs and ``other``, which the errors call ``name``, to one form, that of ``gen``.

    Raises:
        ValueError: if the number of sequences or a length differs.
    """
    if gen.num_sequences == other.num_sequences:
        gen = _without_padding(gen, other, padding_side)
    return gen, match(gen, other, name, padding_side=padding_side, advice=advice)


def match(gen: Ragged, other: Ragged, name: str, *, padding_side: PaddingSide, advice: str = _SAME_TOKENS) -> Ragged:
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
    same_widths = same_rows(a, b)
    if both_padded and same_widths and gen.keep is not None and other.keep is None:
        other = Ragged.from_slots(other.slots(), b, gen.keep)
    if same_widths and gen.keep is other.keep:
        return other
    if bool((gen.lengths != other.lengths).any()):
        # Of two widths a mask can fit one only: then the widths say what is wrong.
        padded = both_padded and not same_widths
        ours, theirs = (a.row_lengths, b.row_lengths) if padded else (gen.lengths, other.lengths)
        i = int((ours != theirs).nonzero()[0])
        m, n = int(ours[i]), int(theirs[i])
        raise ValueError(
            f"Sample {i} has different shapes: gen_log_probs[{i}].shape={torch.Size([m])}, {name}[{i}].shape="
            f"{torch.Size([n])}. From position {min(m, n)} on, {advice}."
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


def check_finite(log_prob: Ragged, who: str, key: NestedKey) -> Tensor | None:
    """True where there is a score; ``[N]``, None for everywhere.

    A leading run of NaN is torchrl's marker for tokens that were not scored.

    Raises:
        ValueError: if any other log-prob is NaN or infinite, naming the sequence and the position.
    """
    advice = (
        "A token that the policy sampled cannot have probability 0 under it; check the model's weights and dtype, or mask "
        "the token."
    )
    return _check_finite(log_prob, f"the log-prob of {who} under {key!r}", advice)


def check_finite_kl(kl: Ragged, key: NestedKey) -> Tensor | None:
    """The same for an exact KL."""
    advice = (
        "It is infinite where the reference cannot say what the policy can; check both models' weights and dtypes. "
        "RetrieveLogProb(policy, reference=reference) writes this entry."
    )
    return _check_finite(kl, f"the exact KL under {key!r}", advice)


def _check_finite(data: Ragged, what: str, advice: str) -> Tensor | None:
    values = data.values.detach()
    if math.isfinite(values.sum().item()):  # one pass; a sum that overflows is looked at again
        return None
    finite = values.isfinite()
    if bool(finite.all()):
        return None
    seen = finite.long().cumsum(0)
    start = torch.nn.functional.pad(seen, (1, 0))[data.offsets[:-1]]
    leading = (seen - start[data.sequence_ids] == 0) & values.isnan()
    bad = ~finite & ~leading
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        row, position = int(data.sequence_ids[at]), int(data.positions[at])
        raise ValueError(
            f"{what} is {float(values[at])} at sequence {row}, position {position}: expected a finite number. {advice}"
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


def estimate_kl(
    estimator: Callable[..., Tensor], gen: Tensor, ref: Tensor, old: Tensor, scored: Tensor | None
) -> Tensor:
    """The estimator where ``scored`` (None: everywhere), exactly 0 elsewhere: what is not scored never enters it; ``[N]``."""
    if scored is None or bool(scored.all()):
        return estimator(gen, ref, old)
    values = estimator(gen[scored], ref[scored], old[scored])
    return values.new_zeros(scored.shape).index_put((scored,), values)
