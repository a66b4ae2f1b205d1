"""Score sampled tokens: log-probs under a model, values under a critic."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from torchrl_llm_kl._numerics import check_not_a_name
from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts import (
    Context,
    InContext,
    Located,
    MissingEntryError,
    ModelInterface,
    Scope,
    TokenisingOptions,
    check_context,
    describe_entries,
    find_key,
    in_context,
    in_layout,
    locate,
    per_token,
    read_kept,
    read_routing,
    response_mask,
    sub_key,
    top_k_entries,
    zeros_of_first_tokens,
)
from torchrl_llm_kl.scoring import (
    DEFAULT_MEMORY,
    LogProbScorer,
    Routers,
    Sampling,
    ScoreRequest,
    ScorerSlot,
    Scores,
    as_sampling,
    check_distributions,
    evaluating,
    is_wrapper,
    unwrap,
    warn_of_mismatch,
)
from torchrl_llm_kl.transforms._base import (
    Checks,
    NoCollectorError,
    RayVariant,
    ServiceBackend,
    StepTransform,
    collector_policy,
    in_env,
    to_device,
)


def check_scored_model(model: Any, name: str = "model", transform: str = "RetrieveLogProb") -> Any:
    """Return ``model``; raise torchrl's errors if its settings show that it returns no log-probs of given tokens."""
    if not getattr(model, "return_log_probs", True):
        raise ValueError(f"The {name} must have `return_log_probs=True` to use the `{transform}` transform.")
    if getattr(model, "generate", False) is True:
        raise ValueError(f"The {name} must have `generate=False` to use the `{transform}` transform.")
    return model


def _check_top_k(top_k: int) -> int:
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 0:
        raise ValueError(f"top_k must be a whole number of at least 0, got {top_k!r}.")
    return top_k


def check_sampling(sampling: Sampling | None) -> Sampling | None:
    return None if sampling is None else as_sampling(1.0, sampling)


def _check_reference(reference: Any) -> Any:
    check_not_a_name(reference=reference)
    check_distributions(reference)
    return reference


def full_key_problem(name: str, key: NestedKey) -> str | None:
    """The message of torchrl about a key that does not end with ``"full"``; None for one that does."""
    if isinstance(key, tuple) and key[-1] == "full":
        return None
    return (
        f"The {name} {key} is not a tuple or does not end with 'full'. This may cause issues with the KL computation. "
        "Please use a tuple with the log_probs_key and 'full' as the last element."
    )


_MOMENTS = ("collision", "discriminator")
# Fields of the scores that go to the entries below `top_k_key`.
_TOP_K = ("top_indices", "top_log_probs", "tail_log_prob")
# Attributes that hold a model.
_MODELS = ("model", "reference", "ref_model")


def _forgive_models(transform: nn.Module, keys: Any) -> None:
    """After a state without the weights of models was loaded: they are not missing."""
    keys.missing_keys[:] = [key for key in keys.missing_keys if not key.startswith(transform.__dict__["_without"])]


class ScoringTransform(StepTransform):
    """The base of the transforms that locate the tokens of a step and score them under one model."""

    fixed = frozenset({"device", "padding_side", "tokenizer", "tokenizer_kwargs"})
    adapters: bool | str = True
    assistant_only: bool
    scope: Scope
    temperature: float
    sampling: Sampling | None = None
    dtype: torch.dtype | None
    memory: int
    deterministic: bool
    kept_key: NestedKey = "kept"
    _options: TokenisingOptions
    _slot: ScorerSlot

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_forgive_models)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "temperature":
            value = Sampling(value).temperature
        super().__setattr__(name, value)
        # One temperature, under two names.
        if name == "sampling" and value is not None:
            super().__setattr__("temperature", value.temperature)
        elif name == "temperature" and self.sampling is not None:
            super().__setattr__("sampling", replace(self.sampling, temperature=value))

    # ------------------------------------------------------------------ state: settings, without the models

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The transform's own state, such as a coefficient. Weights of models are left out: whoever owns a model saves it.

        ``load_state_dict`` also takes a state with the weights, as torchrl's transforms save them, and loads these too.
        """
        own = object.__new__(type(self))
        own.__dict__.update(self.__dict__)
        own.__dict__["_modules"] = {name: part for name, part in self._modules.items() if name not in _MODELS}
        return super(ScoringTransform, own).state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        models = [f"{prefix}{name}." for name in _MODELS]
        self.__dict__["_without"] = tuple(
            name for name in models if not any(key.startswith(name) for key in state_dict)
        )
        super()._load_from_state_dict(state_dict, prefix, *args)

    # ------------------------------------------------------------------ the model and its interface

    @abstractmethod
    def _scored_model(self) -> Any:
        """The current model."""

    def _interface(self) -> ModelInterface:
        """Keys and tokenisation of the current model."""
        return ModelInterface.of(self._scored_model())

    @property
    def padding_side(self) -> str:
        """The side of padding where text is tokenised for a model that pads its output."""
        return self._options.padding_side

    @property
    def tokenizer_kwargs(self) -> dict[str, Any]:
        """A copy of the chat template's arguments."""
        return dict(self._options.template_kwargs)

    @property
    def scorer(self) -> LogProbScorer:
        """The scorer; for ``"from_collector"``, of the policy of the collector that currently runs the env."""
        return self._slot.get(self._scored_model(), adapters=self.adapters, **self._settings)

    @property
    def _settings(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("temperature", "dtype", "memory", "deterministic")}
        return own if self.sampling is None else {**own, "sampling": self.sampling}

    def arrange(self, data: Ragged) -> Ragged:
        """An output in the layout that the model's ``pad_output`` requests; in that of the data for a bare model."""
        return in_layout(data, self._interface(), self._options.padding_side)

    def locate(self, td: TensorDictBase) -> Located:
        """The tokens, and the mask of those that this model scores."""
        return locate(
            td, self._interface(), assistant_only=self.assistant_only, scope=self.scope, options=self._options
        )

    def kept(self, td: TensorDictBase, next_td: TensorDictBase, located: Located) -> Kept | None:
        """What the sampler recorded; None if nothing is left out, or nothing was recorded."""
        if self.sampling is None or not self.sampling.truncates:
            return None
        found = None
        for node in (next_td, td) if next_td is not td else (td,):
            found = read_kept(node, self.kept_key, located.tokens, located.mask) if found is None else found
        return None if found is None else Kept(*found)


class RetrieveLogProb(ScoringTransform, metaclass=RayVariant):
    r"""Write the log-probability of each sampled token under a model, for a KL, a ratio or a loss.

    It scores the tokens that the policy sampled, ``("tokens", "full")``, when the data holds them; otherwise it renders
    and tokenises the conversation or text with the model's own template. The result has the layout of those tokens
    (padded in, padded out; nested in, nested out), unless a TorchRL wrapper says otherwise: with ``pad_output=False`` it
    has rows without padding, with ``pad_output=True`` a nested tensor becomes a padded one. A wrapper's ``pad_model_input``
    has no effect, since the engine needs no padding.

    Works in a ``ChatEnv`` (written to ``"next"`` at each step), in an ``LLMCollector``, in a replay buffer (on sample, or
    on extend with ``invert=True``), and called directly, on any number of batch dimensions, with or without ``"next"``.

    Args:
        model: a TorchRL wrapper with ``generate=False``, a transformers causal language model, or ``"from_collector"``
            for the policy of the collector that runs the env (found at the first step, never modified).

    Keyword Args:
        log_probs_full_key: where to write; by default ``(model.log_probs_key, "full")``.
        assistant_only: score only the assistant's tokens, 0 elsewhere. Default True.
        tokenizer_kwargs: arguments of the chat template, used where conversations must be rendered.
        detach: no gradient and no graph. With False the result is differentiable. Default True.
        device: move the model there first; not for ``"from_collector"``. Data is not moved.
        tokenizer: replaces the model's own, where text must be tokenised.
        padding_side: the side of padding where a model with ``pad_output=True`` gets text or a nested tensor.
        temperature: divides the logits; the sampling temperature of the policy. Default 1.
        sampling: in place of ``temperature``, how the policy samples: scores are those of what its top-k, top-p and min-p
            leave; see :class:`~torchrl_llm_kl.Sampling`. Default None: nothing is left out.
        kept_key: parent of the entries in which the sampler recorded what it kept (:class:`~torchrl_llm_kl.RecordKept`): with a
            ``sampling`` that leaves tokens out, the record is replayed where the data holds it. Default ``"kept"``.
        scope: ``"turn"``: in a conversation of several steps each step scores only its own response; ``"full"``: the
            assistant's earlier turns too. No effect when the data is one whole conversation.
        adapters: False disables the model's PEFT adapters and so scores the base model; a name scores that adapter alone.
            Default True: the active ones.
        history_key: where the conversation is, used when the data holds no tokens. Default ``"history"``.
        dtype: autocast dtype of the model's body; see :class:`~torchrl_llm_kl.LogProbScorer`.
        memory: bytes of cached keys and values in an env, so that each turn of a conversation costs only its new tokens; 0
            disables the cache. A change of the weights clears it.
        deterministic: the scores of a sequence are the same to the last bit in any batch; see
            :class:`~torchrl_llm_kl.LogProbScorer`. Default False.
        reference: another model; also write the exact KL to it over the whole vocabulary, from the same pass.
        exact_kl_key: where the exact KL goes. Default ``("exact_kl", "full")``.
        entropy_key: where to write the entropy of the distribution that each token was drawn from, if anywhere.
        moments_key: below which key to write ``"collision"`` and ``"discriminator"`` of that distribution, if anywhere: inputs
            of the advantages ``optimal_token_baseline`` and ``clip_v``; see :class:`~torchrl_llm_kl.scoring.Scores`. They have
            no gradient, and a model behind a service does not return them.
        top_k: number of most probable tokens to write at each scored token: a teacher's distribution for distillation. Default
            0, none. They have no gradient.
        top_k_key: below which key they go: ``"ids"`` (int64) and ``"log_probs"`` ``[*B, T, top_k]``, in descending order, and
            ``"rest_log_prob"`` ``[*B, T]``, the log of the total probability of all other tokens. Default ``"top_k"``.
        context: score the response after another prompt, which replaces all before the assistant's first token: a function of
            the conversation (``History -> History``, or ``(History, row) -> History`` to read other entries of the row), or
            the entry with the ids of the prompts; see :func:`~torchrl_llm_kl.rollouts.in_context`. What is written keeps the
            shape and the mask of the data. Default None: the data's own prompt.
        sampler_log_probs_key: move the log-probs that the policy stored when it sampled, under ``log_probs_full_key`` (or
            the ``"response"`` beside it), to this key before writing there: ``("sampler_log_probs", "full")`` is what
            :class:`~torchrl_llm_kl.PolicyLoss` reads. NaN where the sampler returned none, 0 at tokens that are not scored.
            Outside an env, data that already has the entry keeps it. Default None: they are not read.
        routing_key: the entry with the experts that a sampler chose, for a mixture of experts: integers ``[*B, T, L, k]`` for
            each layer with a router (or each layer) and slot. Where the data holds it, the model uses these experts, with
            weights of its own routers; see ``docs/routing.md``. Default None: the model routes by itself.
        record_routing: write the experts that the model used to ``routing_key``, for later scores and losses: those of the
            entry if the data holds it already, else its own (in an env always its own). Default False.
        service_backend: as in torchrl. ``"ray"`` builds the Ray variant of the class, whose model is behind a service;
            ``"direct"`` scores in this process. Default None: that of the scope ``torchrl.service_backend(...)``, if any, else
            ``"direct"``.
        service_backend_options: arguments of :class:`~torchrl_llm_kl.service.ScoringService` that Ray's actors have too:
            ``{"num_gpus": 1, "resources": {...}, "name": "reference"}``.
        use_ray_service: the older ``service_backend="ray"``; torchrl removes it in 0.16.

    Arguments are attributes that may change at any time, except ``tokenizer``, ``tokenizer_kwargs``, ``padding_side``,
    ``history_key`` and ``device``.

    Shapes:
        float32 nats ``[*B, T]``, in the layout above, exactly 0 at padding and at tokens that are not scored (ids too).

    Raises:
        ValueError: at construction, if the model generates or returns no log-probs; on data, if the assistant's tokens
            cannot be separated from the prompt, a sequence is longer than the model's positions, a log-prob is not finite, or
            a context changes the assistant's messages.
        KeyError: if the data has neither tokens, text nor a conversation; or lacks the context or the sampler's log-probs.

    Warns:
        SamplerMismatchWarning: once, if a wrapper or its model's ``generation_config`` says that tokens are not sampled from
            the distribution that is scored, for instance because transformers' default top-k of 50 applies.

    Example:
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=11, hidden_size=64, num_hidden_layers=1))
        >>> tokens = TensorDict(prompt=torch.tensor([[3, 4]]), full=torch.tensor([[3, 4, 5, 6]]), batch_size=[1])
        >>> data = TensorDict(tokens=tokens, batch_size=[1])
        >>> (RetrieveLogProb(model)(data)["log_probs", "full"] != 0).tolist()
        [[False, False, True, True]]

    .. seealso:: :class:`RetrieveKL`, :class:`KLComputation`.
    """

    checks: ClassVar[Checks] = {
        **StepTransform.checks,
        "model": check_scored_model,
        "reference": _check_reference,
        "sampling": check_sampling,
        "top_k": _check_top_k,
        "context": check_context,
    }
    fixed = ScoringTransform.fixed | {"history_key"}

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
        adapters: bool | str = True,
        history_key: NestedKey = "history",
        dtype: torch.dtype | None = None,
        memory: int = DEFAULT_MEMORY,
        deterministic: bool = False,
        reference: Any = None,
        exact_kl_key: NestedKey | None = None,
        entropy_key: NestedKey | None = None,
        moments_key: NestedKey | None = None,
        top_k: int = 0,
        top_k_key: NestedKey = "top_k",
        sampling: Sampling | None = None,
        kept_key: NestedKey = "kept",
        context: Context | None = None,
        sampler_log_probs_key: NestedKey | None = None,
        routing_key: NestedKey | None = None,
        record_routing: bool = False,
        use_ray_service: bool = False,
        service_backend: ServiceBackend | None = None,
        service_backend_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        as_sampling(temperature, sampling)
        self.assistant_only, self.scope, self.detach = assistant_only, scope, detach
        self.temperature, self.adapters, self.dtype, self.memory = temperature, adapters, dtype, memory
        self.deterministic, self.sampling, self.kept_key = deterministic, sampling, kept_key
        self._compared = False  # whether the sampler was compared with what is scored
        self._options = TokenisingOptions.make(tokenizer, tokenizer_kwargs, padding_side)
        self._slot, self._ref_slot = ScorerSlot(), ScorerSlot()
        if exact_kl_key is not None and reference is None:
            raise ValueError(f"exact_kl_key={exact_kl_key!r} needs the model to compare with: pass reference=.")
        if reference is not None:
            check_distributions(model, _check_reference(reference))
        check_not_a_name("from_collector", model=model)
        if not isinstance(model, str):
            check_scored_model(model)
            self.model = to_device(model, device)
        elif device is not None:
            raise ValueError(f"device={str(device)!r}: the policy of a collector stays on its device, leave it out.")
        self._history_key = history_key
        if (tokenizer_kwargs or {}).get("padding") and hasattr(self, "model") and not self._interface().pad_output:
            raise ValueError(
                "tokenizer_kwargs['padding']=True, but the model's pad_output, which decides about padding, is "
                f"{self._interface().pad_output}: build the wrapper with pad_output=True."
            )
        if log_probs_full_key is None:
            log_probs_full_key = sub_key(self._known_interface().log_probs_key, "full")
        elif problem := full_key_problem("log_probs_full_key", log_probs_full_key):
            warnings.warn(problem, stacklevel=2)
        self.log_probs_full_key = log_probs_full_key
        self.reference = reference
        self.exact_kl_key: NestedKey = ("exact_kl", "full") if exact_kl_key is None else exact_kl_key
        self.entropy_key, self.moments_key = entropy_key, moments_key
        self.top_k, self.top_k_key = top_k, top_k_key
        self.context, self.sampler_log_probs_key = context, sampler_log_probs_key
        self.routing_key, self.record_routing = routing_key, record_routing
        self.declare()
        self.check_models()

    # ------------------------------------------------------------------ keys and specs

    def keys(self) -> tuple[list[NestedKey], list[NestedKey]]:
        """The model's input and a context's entry; the log-probs, and what else is requested."""
        out = [self.log_probs_full_key]
        if self.sampler_log_probs_key is not None:
            if self.sampler_log_probs_key == self.log_probs_full_key:
                raise ValueError(
                    f"sampler_log_probs_key and log_probs_full_key are both {self.log_probs_full_key!r}: the model's log-probs "
                    "would replace the sampler's. Give them different keys."
                )
            out.append(self.sampler_log_probs_key)
        if self.reference is not None:
            out.append(self.exact_kl_key)
        if self.entropy_key is not None:
            out.append(self.entropy_key)
        if self.moments_key is not None:
            out += [sub_key(self.moments_key, name) for name in _MOMENTS]
        if self.record_routing:
            if self.routing_key is None:
                raise ValueError("record_routing=True needs a place for the record: pass routing_key='routed_experts'.")
            _ = self._routers  # an error for a model that cannot be recorded
            out.append(self.routing_key)
        context = [] if self.context is None or callable(self.context) else [self.context]
        return [*self._known_interface().in_keys, *context], out + list(self._top_k_fields)

    @property
    def _top_k_fields(self) -> dict[NestedKey, str]:
        """The entries of the top k, and their fields of the scores."""
        return dict(zip(top_k_entries(self.top_k_key), _TOP_K, strict=True)) if self.top_k else {}

    @property
    def token_entries(self) -> dict[NestedKey, tuple[int, ...]]:
        """All entries that are written."""
        entries: dict[NestedKey, tuple[int, ...]] = dict.fromkeys(self.out_keys, ())
        wide = [key for key, field in self._top_k_fields.items() if field != "tail_log_prob"]
        entries |= dict.fromkeys(wide, (self.top_k,))
        if self.record_routing and self.routing_key is not None:
            entries[self.routing_key] = (len(self._routers.modules), self._routers.k)
        return entries

    def entry_dtype(self, key: NestedKey) -> torch.dtype:
        """int64 for token ids, int8 or int16 for ids of experts, else float32."""
        if self.record_routing and key == self.routing_key:
            return self._routers.dtype
        return torch.int64 if self._top_k_fields.get(key) == "top_indices" else torch.float32

    @property
    def tokenizer(self) -> Any:
        """The tokenizer where text must be tokenised: the one given, else the model's."""
        own = self._options.tokenizer
        return self._known_interface().tokenizer if own is None else own

    # ------------------------------------------------------------------ computation

    def outputs(self, td: TensorDictBase, next_td: TensorDictBase) -> dict[NestedKey, Ragged]:
        """Locate and score."""
        located = self.locate(td)
        kept, routing = self.kept(td, next_td, located), self.routing(td, next_td, located)
        scores = self.evaluate(self.in_context(td, located), self.reference_scorer, kept, routing)
        found = {self.log_probs_full_key: scores.log_prob, self.exact_kl_key: scores.kl}
        found |= self.requested(scores) | self.of_sampler(td, located)
        return {key: values for key, values in found.items() if values is not None}

    def requested(self, scores: Scores) -> dict[NestedKey, Ragged]:
        """The entropy, the moments and the top k among the scores, by key."""
        found = {self.entropy_key: scores.entropy}
        found |= {key: getattr(scores, field) for key, field in self._top_k_fields.items()}
        if self.moments_key is not None:
            found |= {sub_key(self.moments_key, name): getattr(scores, name) for name in _MOMENTS}
        if self.record_routing:
            found[self.routing_key] = scores.routing
        return {key: values for key, values in found.items() if key is not None and values is not None}

    def routing(self, td: TensorDictBase, next_td: TensorDictBase, located: Located) -> Tensor | None:
        """The recorded experts; None if nothing was recorded, or is to be replayed."""
        if self.routing_key is None or (self.record_routing and in_env(self)):
            return None
        found = None
        for node in (next_td, td) if next_td is not td else (td,):
            found = read_routing(node, self.routing_key, located.tokens, located.mask) if found is None else found
        if self.context is not None and (found is not None or self.record_routing):
            raise ValueError(
                f"context= with routing_key={self.routing_key!r}: experts were recorded for the sampled prompt, another "
                "is scored. Leave out one of them."
            )
        return found

    def in_context(self, td: TensorDictBase, located: Located) -> Located:
        """The located tokens after the prompt that :attr:`context` gives; unchanged without one."""
        if self.context is None:
            return located
        return in_context(td, located, self.context, self._interface(), self._options)

    def of_sampler(self, td: TensorDictBase, located: Located) -> dict[NestedKey, Ragged]:
        """The sampler's own log-probs, to be moved to their entry; none without a key or if the data has them there."""
        key = self.sampler_log_probs_key
        if key is None or (not in_env(self) and find_key(td, key) is not None):
            return {}
        found = _stored_by_sampler(td, self.log_probs_full_key)
        if found is None:
            raise MissingEntryError(
                f"sampler_log_probs_key={key!r} moves the sampler's log-probs: expected them under "
                f"{self.log_probs_full_key!r}, found: {describe_entries(td)}. Collect with return_log_probs=True, or leave "
                "sampler_log_probs_key out."
            )
        tokens, mask = located.tokens, located.mask
        values = per_token(td, found, tokens, response_mask(td, tokens, self._interface())).detach().float()
        values = values.masked_fill(zeros_of_first_tokens(values, mask, tokens), torch.nan)
        return {key: tokens.like(torch.where(mask, values, 0))}

    def evaluate(
        self,
        located: Located,
        reference: LogProbScorer | None = None,
        kept: Kept | None = None,
        routing: Tensor | None = None,
        ref_routing: Tensor | None = None,
        *,
        return_kept: bool = False,
    ) -> Scores:
        """Log-probs of the located tokens ``[N]``, and the other requested scores, in one pass."""
        self.compare_sampler()
        options = self._requested | _given(kept=_in_context(located, kept), routing=routing, ref_routing=ref_routing)
        options |= {"return_kept": True} if return_kept else {}
        return _in_place(located, self.scorer.evaluate(located.tokens, located.mask, reference=reference, **options))

    def begin(self, located: Located, kept: Kept | None = None, routing: Tensor | None = None) -> Callable[[], Scores]:
        """:meth:`evaluate` in two steps: a remote model starts now, a local one when the scores are read."""
        if routing is not None:
            return partial(self.evaluate, located, None, kept, routing)
        request = ScoreRequest.of(located.tokens, located.mask, kept=_in_context(located, kept))
        scorer = self.scorer
        finish = scorer.begin(request, scorer.options.but(**self._requested))
        return lambda: _in_place(located, finish())

    @property
    def _requested(self) -> dict[str, Any]:
        extras: dict[str, Any] = {} if self.moments_key is None else {"moments": True}
        if self.top_k:
            extras["top_k"] = self.top_k
        if self.record_routing:
            extras["record_routing"] = True
        return {"entropy": self.entropy_key is not None, "grad": not self.detach, "remember": in_env(self)} | extras

    def tokenises_like(self, other: RetrieveLogProb) -> bool:
        """Whether both tokenise text alike, judging by their settings."""
        ours, theirs = self._interface(), other._interface()
        return (
            self.tokenizer is other.tokenizer
            and ours.template_kwargs == theirs.template_kwargs
            and ours.input_key == theirs.input_key
        )

    # ------------------------------------------------------------------ the models

    def check_models(self) -> None:
        """Build the scorers of the models known so far, so that a model that cannot be scored raises an error here."""
        model = getattr(self, "model", None)
        if self.reference is not None:
            _ = self.reference_scorer
        if model is not None:
            self.compare_sampler(stacklevel=3)
            scorer = self._slot.get(model, adapters=self.adapters, **self._settings)
            if self.entropy_key is not None and scorer.path == "wrapper":
                check_distributions(model, what="the entropy")
            if self.top_k and scorer.path == "wrapper":
                check_distributions(model, what="top_k")

    @property
    def reference_scorer(self) -> LogProbScorer | None:
        """The scorer of ``reference``, if there is one."""
        settings = {name: value for name, value in self._settings.items() if name != "sampling"}  # it samples nothing
        return None if self.reference is None else self._ref_slot.get(self.reference, **settings)

    def compare_sampler(self, stacklevel: int = 2) -> None:
        """Warn once if the model's wrapper samples otherwise than is scored."""
        if not self._compared:
            self._compared = True
            warn_of_mismatch(
                self._scored_model(), as_sampling(self.temperature, self.sampling), stacklevel=stacklevel + 1
            )

    def _scored_model(self) -> Any:
        return self.model if hasattr(self, "model") else collector_policy(self)

    @property
    def _routers(self) -> Routers:
        """The routers whose choices are recorded."""
        model = getattr(self, "model", None)
        module = unwrap(model) if is_wrapper(model) else model
        if not isinstance(module, nn.Module):
            found = "'from_collector'" if model is None else type(model).__name__
            raise ValueError(
                f"record_routing=True declares the layers and experts of the record, and reads them from a model in this "
                f"process: pass a transformers model or a wrapper of one, got {found}."
            )
        return Routers.of(module)

    def _interface(self) -> ModelInterface:
        return super()._interface().with_history_key(self._history_key)

    def _known_interface(self) -> ModelInterface:
        """:meth:`_interface`, or TorchRL's defaults while no collector runs the env."""
        try:
            return self._interface()
        except NoCollectorError:
            return ModelInterface()


def _stored_by_sampler(td: TensorDictBase, key: NestedKey) -> NestedKey | None:
    """Where the policy stored its log-probs: the response's, which no transform writes, before those of the whole sequence."""
    names: list[NestedKey] = [key] if isinstance(key, str) else [(*key[:-1], "response"), key]
    here = [name for name in names if find_key(td, name) == name]
    there = [found for name in names if (found := find_key(td, name)) is not None]
    return next(iter([*here, *there]), None)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _in_place(located: Located, scores: Scores) -> Scores:
    """The scores of sequences in another context, at the tokens of the data."""
    if not isinstance(located, InContext):
        return scores
    moved = scores._replace(**{name: located.back(x) for name, x in scores.per_token.items()})
    kept = scores.kept
    return moved._replace(kept=None if kept is None else _moved(kept, located.mask, located.origin.mask))


def _in_context(located: Located, kept: Kept | None) -> Kept | None:
    """What was recorded for the tokens of the data, at the same tokens after another prompt."""
    if kept is None or not isinstance(located, InContext):
        return kept
    return _moved(kept, located.origin.mask, located.mask)


def _moved(kept: Kept, source: Tensor, target: Tensor) -> Kept:
    """What was kept at the tokens of one mask, at those of another with as many; none elsewhere."""
    device = kept.offsets.device
    chosen = kept.take(source.to(device).nonzero().squeeze(-1))
    counts = torch.zeros(len(target), dtype=torch.long, device=device)
    counts[target.to(device)] = chosen.offsets.diff()
    return Kept(chosen.ids, torch.nn.functional.pad(counts.cumsum(0), (1, 0)))


class RetrieveValue(StepTransform):
    """Write the value of each response token's prefix, for advantages and for a clipped value loss.

    Works wherever :class:`RetrieveLogProb` does. A critic that is a module is evaluated without dropout, and its mode
    restored.

    Args:
        critic: a :class:`~torchrl_llm_kl.scoring.TokenCritic`, or any function ``(tokens, mask) -> values`` of
            :class:`~torchrl_llm_kl.Ragged`.

    Keyword Args:
        value_key: where to write. Default ``"state_value"``, torchrl's name.
        scope, assistant_only: see :class:`RetrieveLogProb`.

    Shapes:
        float32 ``[*B, T]``, in the layout of the tokens and the unit of the reward; 0 at all other tokens. Without graph.

    Example:
        >>> from tensordict import TensorDict
        >>> lengths = lambda tokens, mask: tokens.like(torch.where(mask, tokens.positions.float(), 0))
        >>> tokens = TensorDict(prompt=torch.tensor([[3, 4]]), full=torch.tensor([[3, 4, 5, 6]]), batch_size=[1])
        >>> RetrieveValue(lengths)(TensorDict(tokens=tokens, batch_size=[1]))["state_value"].tolist()
        [[0.0, 0.0, 2.0, 3.0]]
    """

    def __init__(
        self, critic: Any, *, value_key: NestedKey = "state_value", scope: Scope = "turn", assistant_only: bool = True
    ) -> None:
        super().__init__()
        self.critic = critic
        self.value_key, self.scope, self.assistant_only = value_key, scope, assistant_only
        self.declare()

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "critic":
            super().__setattr__(name, value)
        elif callable(value):
            self.__dict__["critic"] = value  # not a submodule: keep the critic out of the env's state
        else:
            raise TypeError(
                f"critic must be a TokenCritic or a function (tokens, mask) -> values, got {type(value).__name__}."
            )

    def keys(self) -> tuple[list[NestedKey], list[NestedKey]]:
        """The tokens and the values."""
        return list(ModelInterface().in_keys), [self.value_key]

    @property
    def token_entries(self) -> dict[NestedKey, tuple[int, ...]]:
        """The values."""
        return {self.value_key: ()}

    @torch.no_grad()
    def outputs(self, td: TensorDictBase, next_td: TensorDictBase) -> dict[NestedKey, Ragged]:
        """Locate and evaluate."""
        located = locate(td, assistant_only=self.assistant_only, scope=self.scope)
        with evaluating(self.critic) if isinstance(self.critic, nn.Module) else nullcontext():
            return {self.value_key: self.critic(located.tokens, located.mask)}
