"""Pairs of a chosen and a rejected answer: who belongs to whom, and how much more likely each has become."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrl_llm_kl.losses._numerics import Scalar, masked_mean, sequence_mean, sequence_sum
from torchrl_llm_kl.losses._term import LossTerm

__all__ = ["Pairs", "pair_up", "preference"]


@dataclass(frozen=True, eq=False)
class Pairs:
    r""":math:`\log(\pi / \pi_{ref})` of whole answers, ``[P, 1]`` each; ``mask`` is True where both have tokens that count."""

    chosen: Tensor
    rejected: Tensor
    mask: Tensor

    @property
    def delta(self) -> Tensor:
        """By how much the policy has come to prefer the chosen one, nats."""
        return self.chosen - self.rejected


def pair_up(
    log_prob: Tensor,
    mask: Tensor,
    ref_log_prob: Tensor,
    pair_id: Tensor | None = None,
    chosen: Tensor | None = None,
    *,
    length_normalised: bool = False,
) -> Pairs:
    """Log-ratios of the answers of each pair, summed over tokens (or averaged, if ``length_normalised``).

    Leading batch dimensions are one list of rows. Rows ``2i`` and ``2i + 1`` are a pair, chosen first, unless ``pair_id`` and
    ``chosen`` (one value per row) say otherwise. With these the order of rows does not matter; to check them they are read on
    the host once.

    Raises:
        ValueError: if rows are left over, or a pair does not have exactly one chosen and one rejected row.
    """
    reduce = sequence_mean if length_normalised else sequence_sum
    ratio = reduce(log_prob - ref_log_prob, mask).reshape(-1)
    counts = mask.any(-1).reshape(-1)
    if pair_id is not None and chosen is not None:
        order = _interleaving(pair_id.reshape(-1), chosen.reshape(-1))
        ratio, counts = ratio[order], counts[order]
    elif pair_id is not None or chosen is not None:
        given, missing = ("pair_id", "chosen") if chosen is None else ("chosen", "pair_id")
        raise ValueError(f"got {given} without {missing}: pass both, or neither for rows chosen, rejected, chosen, ...")
    elif ratio.numel() % 2:
        raise ValueError(
            f"expected pairs of rows (chosen, rejected, chosen, ...), got {ratio.numel()} rows: row {ratio.numel() - 1} has no "
            f"partner. Leave it out, or say which rows are pairs with pair_id= and chosen="
        )
    ratio, counts = ratio.view(-1, 2), counts.view(-1, 2)
    return Pairs(ratio[:, :1], ratio[:, 1:], counts.all(-1, keepdim=True))


def _interleaving(pair_id: Tensor, chosen: Tensor) -> Tensor:
    """The order of rows in which pairs are neighbours, by their id, and the chosen one comes first."""
    if not torch.compiler.is_compiling():
        ids, pair = pair_id.unique(return_inverse=True)
        found = torch.stack([torch.bincount(pair[chosen == side], minlength=len(ids)) for side in (True, False)], -1)
        for at in (found != 1).any(-1).nonzero().flatten().tolist()[:1]:
            raise ValueError(
                f"pair_id {int(ids[at])} has {int(found[at, 0])} chosen and {int(found[at, 1])} rejected rows, expected one of "
                f"each"
            )
    first = (~chosen).long().argsort(stable=True)
    return first[pair_id[first].argsort(stable=True)]


def preference(value: Tensor, pairs: Pairs, beta: Scalar) -> tuple[LossTerm, ...]:
    """One term of one value per pair ``[P, 1]``, 0 for pairs that do not count, with the metrics of the family."""
    mask = pairs.mask
    won, lost = beta * pairs.chosen.detach(), beta * pairs.rejected.detach()
    metrics = {
        "chosen_reward": masked_mean(won, mask),
        "rejected_reward": masked_mean(lost, mask),
        "reward_margin": masked_mean(won - lost, mask),
        "reward_accuracy": masked_mean((won > lost).to(won.dtype), mask),
    }
    return (LossTerm("objective", torch.where(mask, value, 0), mask, metrics=metrics),)
