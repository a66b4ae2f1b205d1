"""What losses of tokens share: which tokens count, how terms are summed, denominators that travel with the rows."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.objectives.common import LossModule

from torchrl_llm_kl._numerics import check_choice
from torchrl_llm_kl.losses._arithmetic import Aggregation, aggregate, check_aggregation
from torchrl_llm_kl.losses._denominators import read_denominators, total_counts, write_denominators
from torchrl_llm_kl.losses._entries import Counted, find_key, per_token
from torchrl_llm_kl.losses._objective import LossTerm
from torchrl_llm_kl.losses._parts import Part
from torchrl_llm_kl.losses._tokens import MASKING_STRATEGIES, MaskingStrategy, TokenReader
from torchrl_llm_kl.ragged import Ragged, own_leaves
from torchrl_llm_kl.transforms._interface import sub_key

__all__ = ["TokenLoss", "merged_metrics", "zero_of"]

_BY_LENGTH = "seq-mean-token-sum-norm"


class TokenLoss(LossModule):
    """Base of the losses here. Subclasses say what they read and return :class:`~torchrl_llm_kl.losses.LossTerm`."""

    def __init__(self, *, aggregation: str, max_len: int | None, masking_strategy: MaskingStrategy) -> None:
        super().__init__()
        mode = check_aggregation(aggregation)
        check_choice(MASKING_STRATEGIES, masking_strategy=masking_strategy)
        if mode == _BY_LENGTH and max_len is None:
            raise ValueError(
                f"aggregation {_BY_LENGTH!r} divides by the longest response that is sampled: pass max_len="
            )
        self.aggregation, self.max_len, self.masking_strategy = mode, max_len, masking_strategy

    # ------------------------------------------------------------------ hyper-parameters

    def _expose(self, named: Mapping[str, tuple[Part, str]]) -> None:
        """Make hyper-parameters of parts attributes of the loss."""
        self.__dict__["_exposed"] = dict(named)

    def __getattr__(self, name: str) -> Any:
        exposed = self.__dict__.get("_exposed", {})
        if name in exposed:
            part, own = exposed[name]
            return part.get(own)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        exposed = self.__dict__.get("_exposed", {})
        if name in exposed:
            part, own = exposed[name]
            if not isinstance(value, Tensor):
                self._check_hyper(part, {**part.hyper, own: value})
            part.put(own, value)
        else:
            super().__setattr__(name, value)

    def _check_hyper(self, part: Part, hyper: Mapping[str, Any]) -> None:
        """Raise if a part cannot work with these hyper-parameters."""

    # ------------------------------------------------------------------ what subclasses say

    @property
    @abstractmethod
    def _reader(self) -> TokenReader:
        """Where tokens are."""

    @abstractmethod
    def _mask_terms(self, td: TensorDictBase) -> Sequence[LossTerm]:
        """The terms with their masks; values do not matter. Runs no model."""

    @property
    @abstractmethod
    def _data_keys(self) -> Sequence[NestedKey]:
        """Entries beside the tokens without which the loss cannot be calculated."""

    # ------------------------------------------------------------------ keys

    @property
    def tensor_keys(self) -> Any:
        """Where entries are read; change them with ``set_keys``."""
        return self._tensor_keys

    def _forward_value_estimator_keys(self, **kwargs: Any) -> None:
        """There is no value estimator; but other keys may be needed now."""
        self.in_keys = None

    @property
    def in_keys(self) -> list[NestedKey]:
        """The entries without which the loss cannot be calculated."""
        given = self.__dict__.get("_in_keys")
        if given is not None:
            return given
        mask = {"sft": [self._reader.prompt_key], "rlhf": [self._reader.assistant_key], "generic": []}
        return list(dict.fromkeys([self.tensor_keys.tokens, *mask[self.masking_strategy], *self._data_keys]))

    @in_keys.setter
    def in_keys(self, values: Sequence[NestedKey] | None) -> None:
        self.__dict__["_in_keys"] = None if values is None else list(values)

    # ------------------------------------------------------------------ tokens

    def _count_tokens(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, Ragged, Tensor, Tensor | None]:
        """The data, its tokens, which of them count (by the strategy, less ``loss_mask``), and where responses are.

        Responses are None if the strategy does not tell; ``loss_mask`` does not move where they begin.
        """
        td = self._reader.with_batch_dims(tensordict)
        located = self._reader.locate(td)
        mask, key = located.mask, find_key(td, self.tensor_keys.loss_mask)
        responses = None if self.masking_strategy == "generic" else mask
        if key is not None:
            mask = mask & per_token(td, key, located.tokens, responses, fill=0).bool()
        return td, located.tokens, mask, responses

    # ------------------------------------------------------------------ sums

    def count(
        self,
        tensordict: TensorDictBase,
        *,
        process_group: Any = None,
        all_ranks: bool | None = None,
        ranks_average: bool = True,
    ) -> TensorDictBase:
        """Write the denominators of a whole batch beside its rows, so that the losses of its parts add up to its loss.

        The entry travels with the rows: index, split or shuffle the batch in any way, and add the gradients up. No model is
        run.

        Args:
            tensordict: the batch of an optimiser step, or this rank's share of it.

        Keyword Args:
            process_group: of the ranks that share the step.
            all_ranks: count over all ranks; by default if ``torch.distributed`` is initialised.
            ranks_average: the gradients of ranks will be averaged, as DDP and FSDP do; False if they will be added.

        Returns:
            The same TensorDict with an entry ``denominators`` (``set_keys``): for each term ``[*B]``, float64.
        """
        td = self._reader.with_batch_dims(tensordict)
        with torch.no_grad():
            terms = self._mask_terms(td)
        counts = total_counts(
            [(term.name, term.mask, self._mode(term)) for term in terms],
            max_len=self.max_len,
            process_group=process_group,
            all_ranks=all_ranks,
            ranks_average=ranks_average,
        )
        own_leaves(tensordict, sub_key(self.tensor_keys.denominators, "any"))  # not into a replay buffer's storage
        write_denominators(tensordict, self.tensor_keys.denominators, counts, td.batch_size)
        return tensordict

    def _output(
        self, td: TensorDictBase, counted: Counted, terms: Sequence[LossTerm], metrics: Mapping[str, Tensor]
    ) -> TensorDict:
        """Terms summed over tokens, and the metrics of all."""
        summed = [(term.name, self._mode(term)) for term in terms if self._mode(term) != "none"]
        denominators = read_denominators(td, self.tensor_keys.denominators, summed)
        if counted.is_empty and denominators is None:
            warnings.warn("the mask is empty: the loss is 0.", stacklevel=3)
        out = {f"loss_{term.name}": self._summed(term, counted, denominators) for term in terms}
        return TensorDict({**out, **{name: x.detach() for name, x in merged_metrics(terms, metrics).items()}})

    def _mode(self, term: LossTerm) -> Aggregation:
        return term.aggregation or self.aggregation

    def _summed(self, term: LossTerm, counted: Counted, denominators: Mapping[str, Tensor] | None) -> Any:
        mode = self._mode(term)
        if mode == "none":
            return counted.spread(term.weight * aggregate(term.value, term.mask, mode))
        denominator = None if denominators is None else denominators[term.name]
        max_len = self.max_len if denominator is None and mode == _BY_LENGTH else None
        with warnings.catch_warnings():  # said once for the batch, not for each term
            warnings.filterwarnings("ignore", message="the mask is empty")
            return term.weight * aggregate(term.value, term.mask, mode, denominator=denominator, max_len=max_len)


def zero_of(parameters: Iterable[Tensor]) -> Tensor:
    """0, with a gradient of 0 to each parameter that is trained."""
    ends = [p.reshape(-1)[:1] for p in parameters if p.requires_grad and p.numel()]
    zeros = [torch.where(torch.zeros_like(end, dtype=torch.bool), end, 0).sum().float() for end in ends]
    return torch.stack(zeros).sum() if zeros else torch.zeros(())


def merged_metrics(terms: Sequence[LossTerm], metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``metrics`` and those of the terms, with the term's name in front where two share a name."""
    out = dict(metrics)
    for term in terms:
        for name, value in term.metrics.items():
            out[name if name not in out else f"{term.name}_{name}"] = value
    return out
