"""The KL penalty (estimator, coefficient, placement), and checks of two sets of log-probs of the same tokens."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, get_args

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.data import Composite
from torchrl.envs import DeviceCastTransform, DTypeCastTransform, RewardScaling, Transform

from torchrl_llm_kl._numerics import all_finite, check_choice, check_finite, send
from torchrl_llm_kl.estimators import EstimatorName, get_estimator
from torchrl_llm_kl.ragged import Dense, PaddingSide, Ragged, read_column, same_rows
from torchrl_llm_kl.rollouts import RewardPlacement, token_reward
from torchrl_llm_kl.scoring import EntrySpec
from torchrl_llm_kl.transforms._base import Setting, StepMixin, StepTransform, declare_entry, later_transforms

#: A name of :func:`~torchrl_llm_kl.estimators.get_estimator`, or a function ``(log_prob, ref_log_prob, old_log_prob)``.
Estimator = EstimatorName | Callable[..., Tensor]

# ------------------------------------------------------------------ the penalty


def resolve_estimator(estimator: Estimator) -> Estimator:
    """Resolve a name to its function; ``"exact"`` stays a name, since that KL is read, not estimated."""
    if isinstance(estimator, str):
        return estimator if estimator == "exact" else get_estimator(estimator)
    if not callable(estimator):
        raise TypeError(f"estimator must be a name or a function, got {type(estimator).__name__}.")
    return estimator


def _check_placement(placement: RewardPlacement) -> RewardPlacement:
    check_choice(get_args(RewardPlacement), reward_placement=placement)
    return placement


class KLPenalty(StepTransform):
    """The base of the transforms that write a KL and charge it to the reward."""

    estimator = Setting(resolve_estimator)  # the function, or "exact"
    reward_placement = Setting(_check_placement)
    add_to_reward = Setting[bool]()
    reward_key = Setting[NestedKey]()
    _order_checked = False

    def kl(self, gen: Tensor, ref: Tensor, old: Tensor, scored: Tensor | None) -> Tensor:
        """The estimate where ``scored`` (None: everywhere), exactly 0 elsewhere; ``[N]``.

        Log-probs that are not scored never enter the estimator.
        """
        assert not isinstance(self.estimator, str)
        if scored is None:
            return self.estimator(gen, ref, old)
        return torch.where(scored, self.estimator(*(torch.where(scored, x, 0) for x in (gen, ref, old))), 0)

    def penalised(self, next_td: TensorDictBase, kl: Ragged, mask: Tensor | None, coefficient: Any) -> Ragged:
        """``reward - coefficient * KL`` per token, ``[N, 1]``; a missing reward is 0; ``mask`` places an outcome."""
        placed = token_reward(read_column(next_td, self.reward_key), kl, mask, self.reward_placement)
        weight = send(coefficient(), kl.values.device)
        return kl.like(torch.addcmul(placed.values, weight, kl.values.unsqueeze(-1), value=-1))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Declare the penalised reward: one number per token, ``[*B, -1, 1]``."""
        self._order_checked = False  # specs are computed again when a transform is appended
        if self.add_to_reward:
            declare_entry(reward_spec, self.reward_key, EntrySpec((1,)))
        return reward_spec

    @property
    def penalised_key(self) -> NestedKey:
        """Where the penalised reward goes."""
        return self.reward_key

    def check_order(self) -> None:
        """Warn once about a later transform that writes the reward: it would change the number of each token."""
        if self._order_checked or not self.add_to_reward or self.reward_placement == "broadcast":
            return
        self._order_checked = True
        for transform in later_transforms(self):
            if _changes(transform, self.penalised_key):
                name = type(transform).__name__
                warnings.warn(
                    f"{name} comes after the KL was charged to {self.penalised_key!r}, which then holds one number per token: "
                    f"it changes each of them, and an amount that it adds counts once per token. Append {name} before the KL "
                    "transform, so that it changes the outcome.",
                    stacklevel=2,
                )


def _changes(transform: Transform, key: NestedKey) -> bool:
    """Whether a transform declares ``key`` as its output and does not treat all tokens of a sequence properly."""
    if isinstance(transform, (StepMixin, DTypeCastTransform, DeviceCastTransform)):
        return False
    if isinstance(transform, RewardScaling) and not bool(transform.loc.any()):
        return False  # a factor alone scales the sum
    return unravel_key(key) in [unravel_key(out) for out in transform.out_keys or ()]


# ------------------------------------------------------------------ two sets of log-probs

_SAME_TOKENS = (
    "one model scored tokens that the other did not: score the same tokens under both models, with the same tokenizer and "
    "template"
)


def check_pair(
    gen: Ragged, other: Ragged, name: str = "ref_log_probs", *, padding_side: PaddingSide, advice: str = _SAME_TOKENS
) -> tuple[Ragged, Ragged]:
    """Convert the policy's log-probs and ``other``, called ``name`` in errors, to the layout of ``gen``."""
    if gen.num_sequences == other.num_sequences:
        gen = _without_padding(gen, other, padding_side)
    return gen, match(gen, other, name, padding_side=padding_side, advice=advice)


def match(gen: Ragged, other: Ragged, name: str, *, padding_side: PaddingSide, advice: str = _SAME_TOKENS) -> Ragged:
    """:func:`check_pair` for a ``gen`` in its final layout: returns only ``other``."""
    if gen.num_sequences != other.num_sequences:
        raise ValueError(
            f"Batch size mismatch: gen_log_probs has {gen.num_sequences} samples, {name} has {other.num_sequences} samples."
        )
    other = _without_padding(other, gen, padding_side)
    a, b = gen.container, other.container
    both_padded = isinstance(a, Dense) and isinstance(b, Dense)
    same_widths = same_rows(a, b)
    if both_padded and same_widths and gen.keep is not None and other.keep is None:
        other = Ragged.from_slots(other.slots(), b, gen.keep)
    if same_widths and gen.keep is other.keep:
        return other
    if gen.sizes != other.sizes:
        # A mask that fits only one of the two means that the widths differ.
        padded = both_padded and not same_widths
        ours, theirs = (a.row_sizes, b.row_sizes) if padded else (gen.sizes, other.sizes)
        i, (m, n) = next((i, pair) for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        raise ValueError(
            f"Sample {i} has different shapes: gen_log_probs[{i}].shape={torch.Size([m])}, {name}[{i}].shape="
            f"{torch.Size([n])}. From position {min(m, n)} on, {advice}."
        )
    return other


def _without_padding(a: Ragged, b: Ragged, side: PaddingSide) -> Ragged:
    """Drop the padding of ``a`` if it is padded and ``b`` holds rows of their own lengths."""
    if not isinstance(a.container, Dense) or isinstance(b.container, Dense) or a.keep is not None:
        return a
    widths = b.container.row_sizes
    if max(widths) > a.container.width:
        return a
    position, limit = torch.arange(a.container.width), torch.tensor(widths).unsqueeze(-1)
    keep = position < limit if side == "right" else position >= a.container.width - limit
    return Ragged.from_slots(a.slots(), a.container, keep.reshape(-1))


LOG_PROB_ADVICE = (
    "A token that the policy sampled cannot have probability 0 under it; check the model's weights and dtype, or mask the "
    "token."
)


def where_scored(entries: Sequence[tuple[str, NestedKey | None, Ragged]], advice: str) -> Tensor | None:
    """True where each of the entries (description, key, values) holds a score; ``[N]``, None for everywhere.

    A leading run of NaN is torchrl's marker for tokens that were not scored.

    Raises:
        ValueError: if any other number is NaN or infinite, naming the entry, the sequence and the position.
    """
    values = [data.values.detach() for _, _, data in entries]
    if all_finite(*values):
        return None
    scored = []
    for (what, key, data), x in zip(entries, values, strict=True):
        numbers = (~x.isnan()).long().cumsum(0)
        before = torch.nn.functional.pad(numbers, (1, 0))[data.offsets[:-1]]
        scored.append(numbers > before[data.sequence_ids])
        check_finite({f"{what} under {key!r}": x}, read=scored[-1], place=place_in(data), advice=advice)
    return reduce(torch.logical_and, scored)


def place_in(data: Ragged) -> Callable[[int], str]:
    """Describes a flat index into ``data``, for :func:`~torchrl_llm_kl._numerics.check_finite`."""

    def place(at: int) -> str:
        return f"sequence {int(data.sequence_ids[at])}, position {int(data.positions[at])}"

    return place
