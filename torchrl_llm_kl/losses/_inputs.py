"""The inputs of a loss: one record of named tensors, which objectives, terms, corrections and metrics read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_llm_kl._numerics import check_is_mask, check_is_number, check_same_shape, widen
from torchrl_llm_kl.losses._arithmetic import clean

_TOKEN, _OUTCOME, _ROW = "[*B, T]", "[*B, T, k + 1]", "[*B]"


def _optional(shape: str = _TOKEN, **facts: object) -> Any:
    """``key`` of the entry that holds it; ``boolean``; ``graph`` if its gradient is kept."""
    return field(default=None, metadata={"shape": shape, **facts})


@dataclass(frozen=True, eq=False)
class LossInputs:
    """What a loss reads of its tokens and sequences; None for what is not there.

    Outcomes of ``M`` teachers are ``[*B, T, M, k + 1]``. Gradients flow into
    ``log_prob``, ``entropy``, ``kl``, ``teacher_divergence`` and ``outcomes`` alone: the others are data, even if they have a
    graph.

    Args:
        log_prob: nats, of the sampled tokens under the current policy, with graph; ``[*B, T]``.
        mask: True at trained tokens, whatever others hold, even NaN; bool ``[*B, T]``.
        old_log_prob: nats, under the policy that sampled the tokens; ``[*B, T]``.
        ref_log_prob: nats, under the frozen reference; ``[*B, T]``.
        advantage: in units of the reward; ``[*B, T]``.
        expert_mask: True for tokens that an expert wrote and the policy did not sample; bool ``[*B, T]``.
        message_role: who wrote each token, as its number in system, user, assistant, tool; integers ``[*B, T]``.
        sampler_log_prob: ``old_log_prob`` as the sampling program itself computed it; ``[*B, T]``.
        entropy: nats, of the policy's distribution over the vocabulary, with graph; ``[*B, T]``.
        selected: True for tokens chosen over a whole batch; bool ``[*B, T]``.
        kl: nats, the KL over the whole vocabulary at each position, with graph; ``[*B, T]``.
        teacher_divergence: nats, the divergence to a teacher over the whole vocabulary, with graph; ``[*B, T]``.
        sharp_log_prob: nats, ``log_prob`` at half the temperature, without graph; ``[*B, T]``.
        outcomes: nats, of the ids in a teacher's top k and of all other tokens, with graph; ``[*B, T, k + 1]``.
        teacher_outcomes: the same under the teacher; same shape.
        pair_id: the pair that a sequence belongs to; integers ``[*B]``.
        chosen: True for a preferred sequence, of its pair or by itself; bool ``[*B]``.
        reference_point: nats, what log-ratios are compared with, from a whole batch; ``[*B]``.
        match_id: equal for two sequences matched over a whole batch; integers ``[*B]``.
        is_clean: whether inputs per token are 0 or False where the mask is False; objectives then need not make them so.

    Example:
        >>> inputs = LossInputs(torch.tensor([[-1.0]]), torch.tensor([[True]]), advantage=torch.tensor([[2.0]]))
        >>> inputs.advantage, sorted(inputs.given)
        (tensor([[2.]]), ['advantage', 'log_prob', 'mask'])
    """

    log_prob: Tensor = field(metadata={"shape": _TOKEN, "graph": True})
    mask: Tensor = field(metadata={"shape": _TOKEN, "boolean": True})
    old_log_prob: Tensor | None = _optional(key=("next", "log_probs", "full"))
    ref_log_prob: Tensor | None = _optional(key=("next", "ref_log_probs", "full"))
    advantage: Tensor | None = _optional(key="advantage")
    expert_mask: Tensor | None = _optional(key="expert_mask", boolean=True)
    message_role: Tensor | None = _optional(key="message_role")
    sampler_log_prob: Tensor | None = _optional(key=("next", "sampler_log_probs", "full"))
    entropy: Tensor | None = _optional(graph=True)
    selected: Tensor | None = _optional(key="selected", boolean=True)
    kl: Tensor | None = _optional(graph=True)
    teacher_divergence: Tensor | None = _optional(graph=True)
    sharp_log_prob: Tensor | None = _optional()
    outcomes: Tensor | None = _optional(_OUTCOME, graph=True)
    teacher_outcomes: Tensor | None = _optional(_OUTCOME)
    pair_id: Tensor | None = _optional(_ROW, key="pair_id")
    chosen: Tensor | None = _optional(_ROW, key="chosen", boolean=True)
    reference_point: Tensor | None = _optional(_ROW, key="reference_point")
    match_id: Tensor | None = _optional(_ROW, key="match_id")
    is_clean: bool = field(default=False, metadata={"shape": None})

    @property
    def given(self) -> dict[str, Tensor]:
        """The inputs that are there, by name."""
        return {name: value for name in INPUTS if (value := getattr(self, name)) is not None}

    def replace(self, **changes: Tensor | None) -> LossInputs:
        """A copy with some inputs changed, which need not be clean."""
        return replace(self, is_clean=False, **changes)  # type: ignore[arg-type]

    def check(self, owner: str) -> None:
        """Raise a ValueError for unequal shapes, a TypeError for a mask that is not boolean or a number that is."""
        given = self.given
        check_same_shape(mask=self.mask, **{key: given[key] for key in PER_TOKEN if key in given})
        check_is_mask(**{key: given[key] for key in _BOOLEAN if key in given})
        check_is_number(**{key: given[key] for key in PER_TOKEN if key in given and key not in _BOOLEAN})
        check_same_shape(**{key: given[key] for key in PER_OUTCOME if key in given})
        shape = tuple(self.mask.shape)
        for key in PER_OUTCOME:
            if key in given and (given[key].shape[: len(shape)] != shape or given[key].ndim - len(shape) not in (1, 2)):
                sizes = ", ".join(map(str, shape))
                expected = f"({sizes}, k + 1) or, for M teachers, ({sizes}, M, k + 1)"
                raise ValueError(f"{owner}: {key} has shape {tuple(given[key].shape)}, expected {expected}.")
        for key in PER_ROW:
            if key in given and given[key].shape != shape[:-1]:
                expected = f"one value per sequence, {shape[:-1]}"
                raise ValueError(f"{owner}: {key} has shape {tuple(given[key].shape)}, expected {expected}.")

    def cleaned(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Some inputs, 0 or False where the mask is False and float32 or wider; data without its graph."""
        out = {"mask": self.mask}
        for key, x in self.given.items():
            if key in names and key in PER_ROW:
                out[key] = clean(x, self.mask.any(-1)) if x.is_floating_point() else x
            elif key in names and key != "mask":
                mask = self.mask.reshape(*self.mask.shape, *[1] * (x.ndim - self.mask.ndim))
                x = x if key in _WITH_GRAPH else x.detach()
                out[key] = clean(x, mask) if not self.is_clean else x if x.dtype == torch.bool else widen(x)[0]
        return out


def _with(**facts: object) -> tuple[str, ...]:
    return tuple(f.name for f in fields(LossInputs) if all(f.metadata.get(key) == x for key, x in facts.items()))


#: Every input. All other arguments of an objective are hyper-parameters.
INPUTS = tuple(name for name in _with() if name != "is_clean")
#: Inputs of one value per token, beside the mask.
PER_TOKEN = tuple(name for name in _with(shape=_TOKEN) if name != "mask")
#: Inputs of several values per token, of one teacher or of each.
PER_OUTCOME = _with(shape=_OUTCOME)
#: Inputs of one value per sequence.
PER_ROW = _with(shape=_ROW)
#: Inputs of every objective beside log_prob and mask, read or not.
SHARED = ("old_log_prob", "ref_log_prob", "advantage", "expert_mask")
#: Inputs that are NaN where the sampler computed no log-prob.
OF_SAMPLER = ("old_log_prob", "sampler_log_prob")
#: Input -> the entry of the data that holds it; a model computes the others.
KEYS: dict[str, NestedKey] = {f.name: f.metadata["key"] for f in fields(LossInputs) if "key" in f.metadata}
_BOOLEAN, _WITH_GRAPH = _with(boolean=True), _with(graph=True)
#: Masks of tokens that the data holds.
MASKS = tuple(name for name in PER_TOKEN if name in _BOOLEAN and name in KEYS)


def dummy_inputs(*, teachers: int = 1, device: torch.device | None = None) -> LossInputs:
    """One token in each of six sequences, pairs or triples, for a dry run before there is data."""
    zeros = torch.zeros(6, 1, device=device)
    row, place = zeros.squeeze(-1), torch.arange(6, device=device)
    first = place % 2 == 0
    given: dict[str, Any] = dict.fromkeys(PER_TOKEN, zeros)
    given |= dict.fromkeys(PER_OUTCOME, zeros.new_full((6, 1, teachers, 2), 0.5).log())
    given |= dict.fromkeys(("pair_id", "match_id"), place // 2)
    return LossInputs(mask=zeros == 0, **given, reference_point=row, chosen=first).replace(
        selected=zeros == 1, expert_mask=~first.unsqueeze(-1)
    )
