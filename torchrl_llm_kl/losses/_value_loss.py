"""The loss of a critic that predicts the value of each token's prefix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import dispatch
from torch import Tensor, nn
from torchrl.objectives.common import LossModule

from torchrl_llm_kl._numerics import (
    Scalar,
    check_is_scalar,
    check_not_a_name,
    check_range,
    masked_mean,
)
from torchrl_llm_kl.losses._arithmetic import Aggregation, checked, clamp
from torchrl_llm_kl.losses._objective import LossTerm
from torchrl_llm_kl.losses._parts import Part, device_of
from torchrl_llm_kl.losses._token_loss import LossOutput, TokenLoss, with_graph
from torchrl_llm_kl.rollouts import TOKENS_FULL, MaskingStrategy, find_key, per_token, require_key


@dataclass(frozen=True, eq=False)
class ValueInputs:
    """The tensors that the loss of a critic reads, ``[*B, T]`` each, in the unit of the reward.

    Args:
        value: the critic's current value of each token's prefix, with graph.
        mask: the trained tokens; bool.
        value_target: the return; detached.
        old_value: the critic's value when the advantages were computed, detached; None: there is none.

    Raises:
        ValueError: if shapes differ.
        TypeError: if the mask is not boolean.
    """

    value: Tensor
    mask: Tensor
    value_target: Tensor
    old_value: Tensor | None = None

    def __post_init__(self) -> None:
        named = {"value": self.value, "value_target": self.value_target.detach()}
        if self.old_value is not None:
            named["old_value"] = self.old_value.detach()
        vars(self).update(zip(named, checked(self.mask, **named), strict=True))


def value_error(inputs: ValueInputs, *, clip_value: Scalar | None = 0.2, coeff: Scalar = 1.0) -> tuple[LossTerm, ...]:
    r"""Half the squared error of a critic, clipped as PPO's: ``max((v - R)^2, (clip(v, v_old +- clip_value) - R)^2) / 2``.

    It has the gradient of ``(v - R)^2 / 2``, and 0 where the value has moved more than ``clip_value`` from the old one
    towards its target.

    Args:
        inputs: values and targets.

    Keyword Args:
        clip_value: the largest unclipped change of a value, in the unit of the reward. None, or no ``old_value``: no clipping.
        coeff: weight of the term, dimensionless.

    Returns:
        One term, ``critic``; metrics ``value_clip_fraction``, ``value_mean`` and ``explained_variance``, which is 1 minus
        the variance of the error over the target's.

    Raises:
        ValueError: if ``clip_value`` is negative.

    Example:
        >>> one = torch.ones(1, 1)
        >>> inputs = ValueInputs(0.5 * one, one == 1, value_target=one, old_value=0 * one)
        >>> value_error(inputs, clip_value=0.2)[0].value  # (0.2 - 1)^2 / 2
        tensor([[0.3200]])

    Source: Schulman et al., baselines ``ppo2`` (2017).
    """
    check_is_scalar(clip_value=clip_value, coeff=coeff)
    check_range(low=0.0, clip_value=clip_value)
    value, mask, target, old = inputs.value, inputs.mask, inputs.value_target, inputs.old_value
    error = (value - target).square()
    clipped = torch.zeros_like(mask)
    if old is not None and clip_value is not None:
        bounded = (old + clamp(value - old, -clip_value, clip_value) - target).square()
        clipped = bounded > error
        error = torch.maximum(error, bounded)
    with torch.no_grad():
        residual, spread = (x - masked_mean(x, mask) for x in (target - value, target))
        variance = masked_mean(spread.square(), mask).clamp(min=1e-12)
        metrics = {
            "value_clip_fraction": masked_mean(clipped.float(), mask),
            "value_mean": masked_mean(value, mask),
            "explained_variance": 1 - masked_mean(residual.square(), mask) / variance,
        }
    return (LossTerm("critic", error / 2, mask, weight=coeff, metrics=metrics),)


class _ValueError(Part):
    """:func:`value_error` with its hyper-parameters."""

    def dummy(self, hyper: Mapping[str, Any]) -> ValueInputs:
        zero = torch.zeros(1, 1, device=device_of(self))
        return ValueInputs(zero, zero == 0, zero, zero)


class ValueLoss(TokenLoss):
    """The loss of a critic of token values, for PPO: :func:`~torchrl_llm_kl.losses.value_error` on a TensorDict.

    Args:
        critic: a :class:`~torchrl_llm_kl.scoring.TokenCritic`, or a module ``(tokens, mask) -> values`` of
            :class:`~torchrl_llm_kl.Ragged`.

    Keyword Args:
        clip_value, coeff: see :func:`~torchrl_llm_kl.losses.value_error`. Buffers: ``loss.clip_value = 0.1`` changes one in
            place.
        aggregation, max_len, masking_strategy: see :class:`~torchrl_llm_kl.losses.PolicyLoss`.

    Keys (``set_keys``): ``tokens``, ``value_target`` and ``value`` (old values, optional; both are written by
    :class:`~torchrl_llm_kl.RetrieveValue` and the ``gae`` advantage), ``loss_mask``, ``denominators``. An entry is also found
    on the other side of ``"next"``.

    Outputs:
        A :class:`~torchrl_llm_kl.losses.LossOutput`: ``loss_critic`` and the metrics ``value_clip_fraction``,
        ``value_mean``, ``explained_variance``.

    Example:
        >>> from tensordict import TensorDict
        >>> class Constant(nn.Module):
        ...     def forward(self, tokens, mask):
        ...         return tokens.like(torch.where(mask, 0.5, 0.0))
        >>> tokens = TensorDict(prompt=torch.tensor([[3, 4]]), full=torch.tensor([[3, 4, 5]]), batch_size=[1])
        >>> data = TensorDict(tokens=tokens, value_target=torch.tensor([[0.0, 0.0, 1.5]]), batch_size=[1])
        >>> ValueLoss(Constant())(data)["loss_critic"]
        tensor(0.5000)
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        tokens: NestedKey = TOKENS_FULL
        value: NestedKey = ("next", "state_value")
        value_target: NestedKey = "value_target"
        loss_mask: NestedKey = "loss_mask"
        denominators: NestedKey = "value_denominators"

    critic_network: nn.Module

    def __init__(
        self,
        critic: nn.Module,
        *,
        clip_value: float | None = 0.2,
        coeff: float = 1.0,
        aggregation: Aggregation = "token-mean",
        max_len: int | None = None,
        masking_strategy: MaskingStrategy = "sft",
    ) -> None:
        check_not_a_name(critic=critic)
        super().__init__(aggregation=aggregation, max_len=max_len, masking_strategy=masking_strategy)
        self._check_max_len([aggregation])
        self.critic_network = critic
        self.error = _ValueError(value_error, clip_value=clip_value, coeff=coeff)
        self._expose({name: (self.error, name) for name in self.error.names})
        self.out_keys = ["loss_critic", "value_clip_fraction", "value_mean", "explained_variance"]

    @property
    def _data_keys(self) -> Sequence[NestedKey]:
        return [self.tensor_keys.value_target]

    def _mask_terms(self, td: TensorDictBase) -> Sequence[LossTerm]:
        mask = self._read_tokens(td)[1].response.mask
        return [LossTerm("critic", mask.float(), mask)]

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> LossOutput:
        """The loss of a batch or a micro-batch; see the class."""
        td, located, responses = self._read_tokens(tensordict)
        response, tokens, within = located.response, located.tokens, None if responses is None else responses.host_mask
        advice = "Add the entry, or say where it is with set_keys(value_target=...)."
        target = require_key(td, self.tensor_keys.value_target, "ValueLoss needs value_target", advice)
        keys = {"value_target": target, "old_value": find_key(td, self.tensor_keys.value)}
        places = {name: key for name, key in keys.items() if key is not None}
        data = {name: response.gather(per_token(td, key, tokens, within).detach()) for name, key in places.items()}
        response.check_finite({f"{name} ({places[name]!r})": value for name, value in data.items()})
        value = response.gather(self.critic_network(tokens, located.mask).values)
        value = with_graph(value, self.critic_network.parameters())
        return self._output(td, response, self.error.run(ValueInputs(value, response.mask, **data)), {})
