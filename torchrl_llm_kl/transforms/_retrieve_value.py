"""Write what a critic expects of each token's prefix."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import nn

from torchrl_llm_kl.rollouts import TokenisingOptions
from torchrl_llm_kl.scoring import evaluating
from torchrl_llm_kl.transforms._base import Output, StepTransform
from torchrl_llm_kl.transforms._interface import ModelInterface
from torchrl_llm_kl.transforms._located import Scope, locate

__all__ = ["RetrieveValue"]


class RetrieveValue(StepTransform):
    """Write the value of each response token's prefix, for advantages and for a clipped value loss.

    A critic that is a module is evaluated without dropout, and its mode restored.

    Works wherever :class:`~torchrl_llm_kl.RetrieveLogProb` does.

    Args:
        critic: a :class:`~torchrl_llm_kl.scoring.TokenCritic`, or any function ``(tokens, mask) -> values`` of
            :class:`~torchrl_llm_kl.Ragged`.

    Keyword Args:
        value_key: where to write. Default ``"state_value"``, torchrl's name.
        scope: as for :class:`~torchrl_llm_kl.RetrieveLogProb`.
        assistant_only: as for :class:`~torchrl_llm_kl.RetrieveLogProb`.

    Shapes:
        float32 ``[*B, T]``, in the form of the tokens and the unit of the reward; 0 where nothing counts. Without graph.

    Example:
        >>> from tensordict import TensorDict
        >>> lengths = lambda tokens, mask: tokens.like(torch.where(mask, tokens.positions.float(), 0))
        >>> tokens = TensorDict(prompt=torch.tensor([[3, 4]]), full=torch.tensor([[3, 4, 5, 6]]), batch_size=[1])
        >>> RetrieveValue(lengths)(TensorDict(tokens=tokens, batch_size=[1]))["state_value"].tolist()
        [[0.0, 0.0, 2.0, 3.0]]
    """

    def __init__(
        self,
        critic: Any,
        *,
        value_key: NestedKey = "state_value",
        scope: Scope = "turn",
        assistant_only: bool = True,
    ) -> None:
        if not callable(critic):
            raise TypeError(f"critic must be a TokenCritic or a function (tokens, mask) -> values, got {type(critic)}")
        if scope not in ("turn", "full"):
            raise ValueError(f"scope must be 'turn' or 'full', got {scope!r}")
        self._interface = ModelInterface()
        super().__init__(in_keys=list(self._interface.in_keys), out_keys=[value_key])
        self.__dict__["critic"] = critic  # not a submodule: an env's state is not the critic's
        self.value_key, self.scope, self.assistant_only = value_key, scope, assistant_only

    @property
    def token_entries(self) -> dict[NestedKey, tuple[int, ...]]:
        """The values."""
        return {self.value_key: ()}

    @torch.no_grad()
    def outputs(self, td: TensorDictBase, next_td: TensorDictBase) -> list[Output]:
        """Locate and evaluate."""
        located = locate(
            td,
            self._interface,
            assistant_only=self.assistant_only,
            scope=self.scope,
            options=TokenisingOptions(),
        )
        with evaluating(self.critic) if isinstance(self.critic, nn.Module) else nullcontext():
            return [Output.of(self.value_key, self.critic(located.tokens, located.mask))]
