"""Which tokens a loss is about: where they are, and which of them count."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl.ragged import Ragged, read_column
from torchrl_llm_kl.rollouts import TokenisingOptions
from torchrl_llm_kl.transforms._interface import TOKENS_FULL, ModelInterface, sub_key
from torchrl_llm_kl.transforms._located import Located, locate

__all__ = ["MASKING_STRATEGIES", "MaskingStrategy", "TokenReader"]

#: torchrl's names. ``sft``: the response of each step; ``rlhf``: all that the assistant said; ``generic``: every token that
#: has a prefix.
MaskingStrategy = Literal["sft", "rlhf", "generic"]
MASKING_STRATEGIES: tuple[str, ...] = get_args(MaskingStrategy)


@dataclass(frozen=True)
class TokenReader:
    """Reads tokens and mask of rollouts; conversations without tokens are rendered on the model's own template."""

    interface: ModelInterface
    strategy: MaskingStrategy

    @classmethod
    def of(cls, model: Any, tokens_key: NestedKey, strategy: MaskingStrategy) -> TokenReader:
        """For a model, and an entry that holds the tokens."""
        interface = ModelInterface.of(model)
        if interface.input_mode == "tokens" and tokens_key != TOKENS_FULL:
            interface = replace(interface, input_key=tokens_key)
        elif tokens_key != TOKENS_FULL:
            if not isinstance(tokens_key, tuple) or tokens_key[-1] != "full":
                raise ValueError(
                    f"an actor of input_mode={interface.input_mode!r} needs the whole sequences under (..., 'full'), got "
                    f"the key {tokens_key!r}"
                )
            interface = replace(interface, tokens_key=tokens_key[0] if len(tokens_key) == 2 else tokens_key[:-1])
        return cls(interface, strategy)

    @property
    def prompt_key(self) -> NestedKey:
        """Where prompts are, which tell the response of a step."""
        return sub_key(self.interface.tokens_key, "prompt")

    @property
    def assistant_key(self) -> NestedKey:
        """Where masks of what the assistant said are."""
        return sub_key(self.interface.masks_key, "all_assistant_mask")

    def with_batch_dims(self, td: TensorDictBase) -> TensorDictBase:
        """``td`` with the last dimension of its tokens outside of the batch.

        Keyword arguments arrive in a TensorDict whose batch is what all of them have in common: the tokens' own dimension
        too, if each has it.
        """
        tokens = read_column(td, self.interface.tokens_full)
        if isinstance(tokens, Tensor) and not tokens.is_nested and tokens.ndim == td.batch_dims > 0:
            td = td.copy()
            td.batch_size = td.batch_size[:-1]
        return td

    def locate(self, td: TensorDictBase) -> Located:
        """Tokens, and the mask of the strategy."""
        return locate(
            td,
            self.interface,
            assistant_only=self.strategy != "generic",
            scope="full" if self.strategy == "rlhf" else "turn",
            options=TokenisingOptions(),
        )

    def without_unscored(self, mask: Tensor, old: Tensor, tokens: Ragged, key: NestedKey) -> Tensor:
        """Leave out first generated tokens whose log-prob the sampler never calculated; ``[N]``.

        torchrl's wrappers store exactly 0 for the first token that they generate, at the root. So the first token of a row
        that has other log-probs is left out if its own is exactly 0: if it was certain after all, it has no gradient either.
        """
        if isinstance(key, tuple) and key[0] == "next":  # written by a transform, which scores every token
            return mask
        before = torch.nn.functional.pad(mask[:-1], (1, 0)) if mask.numel() else mask
        first = mask & (~before | (tokens.positions == 0))
        scored = tokens.like((mask & (old != 0)).long()).sum() > 0
        unscored = first & (old == 0) & scored[tokens.sequence_ids]
        if bool(unscored.any()):
            warnings.warn(
                f"{key!r} holds exactly 0 for the first generated token of {int(unscored.sum())} responses: torchrl's "
                "wrappers never calculate it. Those tokens are left out of the loss; RetrieveKL and RetrieveLogProb score "
                "every token.",
                stacklevel=4,
            )
        return mask & ~unscored
