"""TorchRL's first KL transform: the policy's log-probs are in the data, the reference's are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor, nn
from torchrl.data import Composite

from torchrl_llm_kl.estimators import EstimatorName, as_coefficient, get_estimator
from torchrl_llm_kl.ragged import Ragged, has_entry, read_column, read_ragged
from torchrl_llm_kl.rollouts import TokenisingOptions
from torchrl_llm_kl.scoring import DEFAULT_MEMORY, LogProbScorer, ScorerSlot
from torchrl_llm_kl.transforms._base import Output, StepTransform, declare
from torchrl_llm_kl.transforms._container import in_env
from torchrl_llm_kl.transforms._errors import MissingEntryError, entries
from torchrl_llm_kl.transforms._factories import RayVariant, resolve_factory
from torchrl_llm_kl.transforms._interface import ModelInterface, sub_key
from torchrl_llm_kl.transforms._located import Located, Scope, locate
from torchrl_llm_kl.transforms._pairs import check_finite, check_pair, estimate_kl
from torchrl_llm_kl.transforms._reward import RewardPlacement, check_reward_placement, penalised_reward
from torchrl_llm_kl.transforms._sampled import sampled_log_probs

__all__ = ["KLRewardTransform"]


class KLRewardTransform(RayVariant, StepTransform):
    r"""Penalise the reward with the KL between the policy's log-probs in the data and a reference model's.

    Kept for scripts written against torchrl's class of this name; :class:`RetrieveKL` scores both models and needs no
    log-probs in the data.

    Args:
        ref_model: the reference, a wrapper with ``input_mode="tokens"`` and ``generate=False`` or a transformers model.

    Keyword Args:
        ref_model_factory: makes ``ref_model``.
        coef: a number, a tensor or a coefficient module. Default 1.
        in_keys: the reward's key. Default ``["reward"]``.
        out_keys: where the penalised reward goes, and optionally the KL and the reference's log-probs. Default
            ``["reward", "kl_penalty", "ref_log_probs"]``.
        log_prob_key: the policy's log-probs, of the whole sequence. Default ``("log_probs", "full")``; where that is
            missing, the ``"response"`` entry beside it is used.
        device: move the reference there first. Data stays where it is.
        add_to_reward: write the penalised reward. Default True.
        tokenizer: instead of the reference's own.
        assistant_only: count only what the assistant produced. Default True.
        padding_side: the side of the padding where the data is padded in one entry and nested in another.
        estimator: see :class:`KLComputation`; so is ``reward_placement``. The policy is not run here, so that ``"exact"``
            is not possible.
        temperature: see :class:`RetrieveLogProb`; so are ``scope``, ``dtype`` and ``memory``.

    Shapes:
        KL, reference log-probs and reward: ``[*B, T, 1]``, in the form of the tokens.

    Raises:
        ValueError: see :class:`RetrieveLogProb` and :class:`KLComputation`.
        KeyError: if the data has no log-probs of the policy.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=11, hidden_size=8, intermediate_size=8,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))
        >>> tokens = TensorDict(prompt=torch.tensor([[3, 4]]), full=torch.tensor([[3, 4, 5, 6]]), batch_size=[1])
        >>> log_probs = TensorDict(full=torch.zeros(1, 4), batch_size=[1])
        >>> data = TensorDict(tokens=tokens, log_probs=log_probs, next=TensorDict(reward=torch.ones(1, 1), batch_size=[1]),
        ...     batch_size=[1])
        >>> data = KLRewardTransform(model)(data)
        >>> (data["next", "kl_penalty"] + data["next", "ref_log_probs"]).abs().sum().item()
        0.0
    """

    DEFAULT_IN_KEYS: tuple[NestedKey, ...] = ("reward",)

    def __init__(
        self,
        ref_model: Any = None,
        *,
        ref_model_factory: Callable[[], Any] | None = None,
        coef: float | Tensor | nn.Module = 1.0,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        log_prob_key: NestedKey = ("log_probs", "full"),
        device: torch.device | str | None = None,
        add_to_reward: bool = True,
        tokenizer: Any = None,
        assistant_only: bool = True,
        padding_side: str = "left",
        use_ray_service: bool = False,
        estimator: EstimatorName | Callable[..., Tensor] = "k1",
        temperature: float = 1.0,
        reward_placement: RewardPlacement = "last",
        scope: Scope = "turn",
        dtype: torch.dtype | None = None,
        memory: int = DEFAULT_MEMORY,
    ) -> None:
        ref_model = resolve_factory("ref_model", ref_model, ref_model_factory, default=None)
        if ref_model is None:
            raise ValueError("Must provide exactly one of 'ref_model' or 'ref_model_factory'.")
        reward_key, out = _check_keys(
            list(self.DEFAULT_IN_KEYS) if in_keys is None else list(in_keys),
            None if out_keys is None else list(out_keys),
        )
        if estimator == "exact":
            raise ValueError(
                "estimator='exact' needs the policy's whole distributions, which the data does not hold: use "
                "RetrieveKL(policy, reference, estimator='exact')"
            )
        if getattr(ref_model, "generate", False) is True:
            raise ValueError("The actor is configured to generate text, not compute the log-probs.")
        if getattr(ref_model, "input_mode", "tokens") != "tokens":
            raise ValueError(
                "The ref_model must be configured to use tokens as input. Please set the `input_mode` argument to `tokens`."
            )
        self_interface = ModelInterface.of(ref_model)
        super().__init__(in_keys=[reward_key, *self_interface.in_keys], out_keys=out)
        self._interface = self_interface
        self.ref_model = ref_model if device is None else ref_model.to(device)
        self.reward_key = unravel_key(reward_key)
        self.log_prob_full_key = log_prob_key
        self.add_to_reward = add_to_reward
        self.assistant_only = assistant_only
        self.coef = as_coefficient(coef)
        self.estimator = get_estimator(estimator) if isinstance(estimator, str) else estimator
        self.reward_placement = check_reward_placement(reward_placement)
        self.scope: Scope = scope
        self._options = TokenisingOptions.make(tokenizer, None, padding_side)
        self.temperature = temperature
        self.dtype = dtype
        self.memory = memory
        self._slot = ScorerSlot()
        _ = self.scorer  # a model that cannot be scored is refused here

    def __setattr__(self, name: str, value: Any) -> None:
        # Later too, a coefficient may be given as a number.
        super().__setattr__(name, as_coefficient(value) if name == "coef" else value)

    @property
    def scorer(self) -> LogProbScorer:
        """The engine."""
        return self._slot.get(self.ref_model, temperature=self.temperature, dtype=self.dtype, memory=self.memory)

    @property
    def pad_output(self) -> bool:
        """Whether the reference pads its output."""
        return self._interface.pad_output

    @property
    def tokenizer(self) -> Any:
        """The tokenizer given, else the reference's.

        Raises:
            AttributeError: if there is none.
        """
        tokenizer = self._options.tokenizer or self._interface.tokenizer
        if tokenizer is None:
            raise AttributeError(
                "The ref_model does not have a tokenizer. Please pass the tokenizer to the constructor."
            )
        return tokenizer

    @property
    def token_entries(self) -> dict[NestedKey, tuple[int, ...]]:
        """KL and reference log-probs, and the penalised reward if it does not replace the reward."""
        entries: dict[NestedKey, tuple[int, ...]] = {self.out_keys[1]: (1,), self.out_keys[2]: (1,)}
        if self.add_to_reward and self.out_keys[0] != self.reward_key:
            entries[self.out_keys[0]] = (1,)
        return entries

    def outputs(self, td: TensorDictBase, next_td: TensorDictBase) -> list[Output]:
        """Score the reference and compare."""
        located = locate(
            td, self._interface, assistant_only=self.assistant_only, scope=self.scope, options=self._options
        )
        ref = self.scorer.score(located.tokens, located.mask, remember=in_env(self))
        gen, known = self._policy_log_probs(td, next_td, located)
        scored = located.mask & known
        kl = ref.like(estimate_kl(self.estimator, gen.values, ref.values, gen.values, scored))
        outputs = [
            Output.of(self.out_keys[1], kl.like(kl.values.unsqueeze(-1))),
            Output.of(self.out_keys[2], ref.like(ref.values.unsqueeze(-1))),
        ]
        if self.add_to_reward:
            reward = read_column(next_td, self.reward_key)
            penalised = penalised_reward(reward, kl, located.mask, self.coef, self.reward_placement)
            outputs.append(Output.of(self.out_keys[0], penalised))
        return outputs

    def _policy_log_probs(self, td: TensorDictBase, next_td: TensorDictBase, located: Located) -> tuple[Ragged, Tensor]:
        """Log-probs of the policy at the located tokens, and where they are known; both ``[N]``."""
        for source in (next_td, td):  # what an earlier transform of this step wrote comes before what came in
            if has_entry(source, self.log_prob_full_key):
                gen = read_ragged(source, self.log_prob_full_key)
                assert gen is not None
                gen = self._align(gen, located)
                zero = torch.where(located.mask, gen.values, torch.zeros_like(gen.values)).detach()
                check_finite(gen.like(zero), "the policy", self.log_prob_full_key)
                return gen.like(zero), torch.ones_like(located.mask)
        key = self.log_prob_full_key
        response_key = sub_key(key[:-1], "response") if isinstance(key, tuple) and len(key) > 1 else None
        if response_key is None or not has_entry(td, response_key):
            raise MissingEntryError(
                f"the policy's log-probs are missing: expected {key!r}, found: {entries(td)}. "
                f"Collect with return_log_probs=True, put RetrieveLogProb before, or use RetrieveKL, which scores both."
            )
        return sampled_log_probs(td, response_key, located)

    def _align(self, gen: Ragged, located: Located) -> Ragged:
        tokens = located.tokens
        if torch.equal(gen.container.row_lengths, tokens.container.row_lengths) and gen.keep is None:
            return Ragged.from_slots(gen.slots(), tokens.container, tokens.keep)
        gen, _ = check_pair(gen, tokens, padding_side=self._options.padding_side)
        return tokens.like(gen.values)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """The penalised reward: one number for each token, ``[*B, -1, 1]``."""
        if self.add_to_reward and self.out_keys[0] == self.reward_key:
            declare(reward_spec, self.reward_key, (1,))
        return reward_spec


def _check_keys(in_keys: list[NestedKey], out_keys: list[NestedKey] | None) -> tuple[NestedKey, list[NestedKey]]:
    out = copy(in_keys) if out_keys is None else out_keys
    if len(out) == len(in_keys):
        out = [*out, "kl_penalty", "ref_log_probs"]
    elif len(out) != len(in_keys) + 2:
        raise ValueError(
            "The out_keys must have the same length as the in_keys (plus two additional optional kl entries for logging)."
        )
    if len(in_keys) != 1 or len(out) != 3:
        raise ValueError(f"Only one in_key/out_key is allowed, got in_keys={in_keys}, out_keys={out}.")
    return in_keys[0], [unravel_key(key) for key in out]
