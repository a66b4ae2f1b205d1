"""Score what was sampled under a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase

from torchrl_llm_kl.rollouts import TokenisingOptions
from torchrl_llm_kl.scoring import DEFAULT_MEMORY, LogProbScorer, ScorerSlot, Scores
from torchrl_llm_kl.transforms._base import Output, StepTransform
from torchrl_llm_kl.transforms._container import collector_policy, in_env
from torchrl_llm_kl.transforms._factories import RayVariant
from torchrl_llm_kl.transforms._interface import ModelInterface, sub_key
from torchrl_llm_kl.transforms._located import Located, Scope, locate

__all__ = ["RetrieveLogProb"]


class RetrieveLogProb(RayVariant, StepTransform):
    r"""Write the log-probability of each sampled token under a model, for a KL, a ratio or a loss to use.

    Scored are the tokens that the policy sampled, ``("tokens", "full")``, when the data holds them; otherwise the
    conversation or text is rendered and tokenised on the model's own template. The result has the form of those tokens:
    padded in, padded out; nested in, nested out.

    Works in a ``ChatEnv`` (written to ``"next"`` at each step), in an ``LLMCollector``, in a replay buffer (on sample, or
    on extend with ``invert=True``), and called directly, on any number of batch dimensions, with or without ``"next"``.

    Args:
        model: a TorchRL wrapper with ``generate=False``, a transformers causal language model, or ``"from_collector"``
            for the policy of the collector that runs the env (found at the first step, never changed).

    Keyword Args:
        log_probs_full_key: where to write; by default ``(model.log_probs_key, "full")``.
        assistant_only: score only what the assistant produced, 0 elsewhere. Default True.
        tokenizer_kwargs: arguments of the chat template, used where conversations must be rendered.
        detach: no gradient, nothing of the graph kept. With False the result is differentiable. Default True.
        device: move the model there first. Data stays where it is.
        tokenizer: instead of the model's own, where text must be tokenised.
        padding_side: the side of padding where text is tokenised for a model with ``pad_output=True``.
        temperature: divides the logits; the sampling temperature of the policy. Default 1.
        scope: ``"turn"``: in a conversation of several steps each step scores only its own response; ``"full"``: the
            assistant's earlier turns too. Without effect when the data is one whole conversation.
        adapters: False switches the PEFT adapters of the model off while it scores: the base model, with no second copy
            of its weights. Default True.
        history_key: where the conversation is, used when the data holds no tokens. Default ``"history"``.
        dtype: of the model's body while it scores, by autocast; see :class:`~torchrl_llm_kl.LogProbScorer`.
        memory: bytes of keys and values that are remembered in an env, so that each turn of a conversation costs its new
            tokens only; 0 remembers nothing. Weights that change are never served what the old ones gave.
        reference: another model, to which the exact KL over the whole vocabulary is written too, from the same pass.
        exact_kl_key: where that goes. Default ``("exact_kl", "full")``.
        entropy_key: where to write the entropy of each distribution that a token was drawn from, if anywhere.
        use_ray_service: True makes a ``RayRetrieveLogProb``, whose model is behind a service.

    Shapes:
        float32 nats ``[*B, T]``, in the form of the tokens, exactly 0 at padding and wherever nothing is scored.

    Raises:
        ValueError: at construction, if the model generates or returns no log-probs; on data, if the assistant's tokens
            cannot be told, a sequence is longer than the model's positions, or a log-prob is not finite.
        KeyError: if the data holds nothing to score.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=11, hidden_size=8, intermediate_size=8,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))
        >>> tokens = TensorDict(prompt=torch.tensor([[3, 4]]), full=torch.tensor([[3, 4, 5, 6]]), batch_size=[1])
        >>> data = TensorDict(tokens=tokens, batch_size=[1])
        >>> (RetrieveLogProb(model)(data)["log_probs", "full"] != 0).tolist()
        [[False, False, True, True]]

    .. seealso:: :class:`RetrieveKL`, :class:`KLComputation`.
    """

    def __init__(
        self,
        model: Any,
        *,
        log_probs_full_key: NestedKey | None = None,
        assistant_only: bool = True,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        detach: bool = True,
        device: torch.device | str | None = None,
        tokenizer: Any = None,
        padding_side: str = "left",
        temperature: float = 1.0,
        scope: Scope = "turn",
        adapters: bool = True,
        history_key: NestedKey = "history",
        dtype: torch.dtype | None = None,
        memory: int = DEFAULT_MEMORY,
        reference: Any = None,
        exact_kl_key: NestedKey | None = None,
        entropy_key: NestedKey | None = None,
        use_ray_service: bool = False,
    ) -> None:
        if scope not in ("turn", "full"):
            raise ValueError(f"scope must be 'turn' or 'full', got {scope!r}")
        if exact_kl_key is None:
            exact_kl_key = ("exact_kl", "full")
        elif reference is None:
            raise ValueError(f"exact_kl_key={exact_kl_key!r} needs the model to compare with: pass reference=")
        deferred = isinstance(model, str)
        if deferred and model != "from_collector":
            raise ValueError(f"model must be a model or 'from_collector', got {model!r}")
        interface = ModelInterface() if deferred else _checked_interface(model).with_history_key(history_key)
        if log_probs_full_key is None:
            log_probs_full_key = sub_key(interface.log_probs_key, "full")
        elif not isinstance(log_probs_full_key, tuple) or log_probs_full_key[-1] != "full":
            warnings.warn(
                f"The log_probs_full_key {log_probs_full_key} is not a tuple or does not end with 'full'. "
                "This may cause issues with the KL computation. "
                "Please use a tuple with the log_probs_key and 'full' as the last element.",
                stacklevel=2,
            )
        extra = [key for key, wanted in ((exact_kl_key, reference), (entropy_key, entropy_key)) if wanted is not None]
        super().__init__(in_keys=list(interface.in_keys), out_keys=[log_probs_full_key, *extra])
        self.log_probs_full_key = log_probs_full_key
        self.assistant_only = assistant_only
        self.detach = detach
        self.temperature = temperature
        self.scope = scope
        self.adapters = adapters
        self.dtype = dtype
        self.memory = memory
        self.reference = reference
        self.exact_kl_key = exact_kl_key
        self.entropy_key = entropy_key
        self._ref_slot = ScorerSlot()
        self._options = TokenisingOptions.make(tokenizer, tokenizer_kwargs, padding_side)
        self._interface = interface
        self._history_key = history_key
        self._slot = ScorerSlot()
        self._from_collector = deferred
        if not deferred:
            self.model = model if device is None else model.to(device)
            _ = self.scorer  # a model that cannot be scored is refused here
        _ = self.reference_scorer

    # ------------------------------------------------------------------ what it computes

    @property
    def token_entries(self) -> dict[NestedKey, tuple[int, ...]]:
        """The log-probs, and the exact KL and the entropy if they are asked for."""
        return {key: () for key in self.out_keys}

    def outputs(self, td: TensorDictBase, next_td: TensorDictBase) -> list[Output]:
        """Locate and score."""
        scores = self.evaluate(self.locate(td), self.reference_scorer)
        found = {
            self.log_probs_full_key: scores.log_prob,
            self.exact_kl_key: scores.kl,
            self.entropy_key: scores.entropy,
        }
        return [Output.of(key, values) for key, values in found.items() if key is not None and values is not None]

    def locate(self, td: TensorDictBase) -> Located:
        """The tokens that count for this model; see :func:`locate`."""
        self.scorer  # noqa: B018 -- the interface of a collector's policy is known once the policy is
        return locate(td, self._interface, assistant_only=self.assistant_only, scope=self.scope, options=self._options)

    def evaluate(self, located: Located, reference: LogProbScorer | None = None) -> Scores:
        """Log-probs of the located tokens ``[N]``, and what else is asked for, in one pass."""
        return self.scorer.evaluate(
            located.tokens,
            located.mask,
            entropy=self.entropy_key is not None,
            reference=reference,
            grad=not self.detach,
            remember=in_env(self),
        )

    def begin(self, located: Located) -> Callable[[], Scores]:
        """:meth:`evaluate` in two steps: a model in another process is asked now, any other when the scores are asked for."""
        ask = getattr(self.scorer, "begin", None)
        if ask is None:
            return partial(self.evaluate, located)
        found: Callable[[], Scores] = ask(
            located.tokens,
            located.mask,
            entropy=self.entropy_key is not None,
            grad=not self.detach,
            remember=in_env(self),
        )
        return found

    def tokenises_like(self, other: RetrieveLogProb) -> bool:
        """Whether text becomes the same tokens here and there, as far as the settings tell."""
        return (
            self.tokenizer is other.tokenizer
            and self._interface.template_kwargs == other._interface.template_kwargs
            and self._interface.input_key == other._interface.input_key
        )

    @property
    def tokenizer(self) -> Any:
        """The tokenizer where text must be tokenised: the one given, else the model's."""
        return self._options.tokenizer if self._options.tokenizer is not None else self._interface.tokenizer

    @property
    def tokenizer_kwargs(self) -> dict[str, Any]:
        """A copy of the chat template's arguments."""
        return dict(self._options.template_kwargs)

    @property
    def padding_side(self) -> str:
        """The side of padding where text is tokenised for a model that pads its output."""
        return self._options.padding_side

    @property
    def scorer(self) -> LogProbScorer:
        """The engine; for ``"from_collector"`` that of the policy of the collector that runs the env now."""
        model = collector_policy(self) if self._from_collector else self.model
        if self._from_collector:
            self._interface = ModelInterface.of(model).with_history_key(self._history_key)
        return self._slot.get(model, adapters=self.adapters, **self._settings)

    @property
    def reference_scorer(self) -> LogProbScorer | None:
        """The engine of ``reference``, if there is one."""
        return None if self.reference is None else self._ref_slot.get(self.reference, **self._settings)

    @property
    def _settings(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "dtype": self.dtype, "memory": self.memory}


def _checked_interface(model: Any) -> ModelInterface:
    if not getattr(model, "return_log_probs", True):
        raise ValueError("The model must have `return_log_probs=True` to use the `RetrieveLogProb` transform.")
    if getattr(model, "generate", False) is True:
        raise ValueError("The model must have `generate=False` to use the `RetrieveLogProb` transform.")
    return ModelInterface.of(model)
