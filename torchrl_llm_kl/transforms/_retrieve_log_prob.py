"""Score sampled tokens: log-probs under a model, values under a critic."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias, TypeVar, cast, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from torchrl_llm_kl._numerics import check_not_a_name
from torchrl_llm_kl._typing import asked, has
from torchrl_llm_kl.masks import TemplateArgs, Tokenizer
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts import (
    Located,
    MissingEntryError,
    ModelInterface,
    Scope,
    TokenisingOptions,
    describe_entries,
    in_layout,
    locate,
    sub_key,
)
from torchrl_llm_kl.scoring import (
    EntrySpec,
    Extra,
    Images,
    KeptTokens,
    Model,
    ScoredStep,
    ScoreOptions,
    Scorer,
    ScorerSlot,
    Scores,
    ScoringContext,
    ScoringJob,
    asked_of,
    check_distributions,
    check_extras,
    evaluating,
    fill,
    is_wrapper,
    unwrap,
    warn_of_chatml,
    warn_of_mismatch,
    with_defaults,
)
from torchrl_llm_kl.transforms._base import (
    NoCollectorError,
    RayVariant,
    ServiceBackend,
    StepTransform,
    TransformSetting,
    collector_policy,
    in_env,
    on_device,
)

T = TypeVar("T")
#: ``(tokens, mask) -> values``, one for each token.
Critic: TypeAlias = Callable[[Ragged, Tensor], Ragged]


def check_options(options: ScoreOptions | None) -> ScoreOptions:
    options = ScoreOptions() if options is None else options
    decided = [name for name in ("grad", "remember", "record_routing") if vars(options)[name]]
    requested = [*decided, *options.beside]
    if requested:
        raise ValueError(
            f"options asks for {', '.join(requested)}. Use detach=False for a gradient, extras=[Entropy(), ...] for others."
        )
    return options


def check_is_model(name: str, model: object) -> None:
    """Raise a TypeError unless ``model`` can be scored."""
    if not isinstance(model, nn.Module) and not is_wrapper(model) and not has(model, "make_scorer"):
        kind = type(model).__name__
        raise TypeError(f"{name} must be a wrapper or another torch module that returns logits, got {kind}.")


def check_scored_model(model: T, name: str = "model", transform: str = "RetrieveLogProb") -> T:
    """Return ``model``, or raise torchrl's error if its settings exclude log-probs of given tokens."""
    check_is_model(name, model)
    if not asked(model, "return_log_probs", object, True):
        raise ValueError(f"The {name} must have `return_log_probs=True` to use the `{transform}` transform.")
    if asked(model, "generate", bool):
        raise ValueError(f"The {name} must have `generate=False` to use the `{transform}` transform.")
    return model


def over_kept(options: ScoreOptions) -> bool:
    """Whether the reference is compared over the tokens that the sampler keeps."""
    return options.sampling.truncates and options.sampling.reference == "kept"


def full_key_problem(name: str, key: NestedKey) -> str | None:
    """Torchrl's message about a key that does not end with ``"full"``. None for other keys."""
    if isinstance(key, tuple) and key[-1] == "full":
        return None
    return (
        f"The {name} {key} is not a tuple or does not end with 'full'. This may cause issues with the KL computation. "
        "Please use a tuple with the log_probs_key and 'full' as the last element."
    )


def no_record(td: TensorDictBase) -> MissingEntryError:
    """The error for data without the tokens that the sampler kept."""
    return MissingEntryError(
        "Sampling(reference='kept') needs the tokens that the sampler kept, below 'kept' or the key of KeptTokens: found "
        f"{describe_entries(td)}. Record them (RecordKept), or use RetrieveKL with a policy in this process."
    )


#: Attributes that hold a model.
_MODELS = ("model", "ref_model")


def _forgive_models(transform: nn.Module, keys: tuple[list[str], list[str]]) -> None:
    """Hook after loading a state without the weights of models: those are not reported as missing."""
    missing, _ = keys
    missing[:] = [key for key in missing if not key.startswith(transform.__dict__["_without"])]


class ScoringTransform(StepTransform):
    """The base of the transforms that locate the tokens of a step and score them under one model."""

    fixed = frozenset({"device", "padding_side", "tokenizer", "tokenizer_kwargs"})
    assistant_only = TransformSetting[bool]()
    scope = TransformSetting[Scope](choices=get_args(Scope))
    options = TransformSetting(check_options)
    extras = TransformSetting(check_extras)
    #: Extras that read the data, each used unless ``extras`` has one of its type.
    defaults: tuple[Extra, ...] = (KeptTokens(), Images())
    _tokenising: TokenisingOptions
    _slot: ScorerSlot

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_forgive_models)

    # ------------------------------------------------------------------ state: settings, without the models

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The transform's own state, such as a coefficient. The weights of models are not included.

        Save the weights where you keep the model. ``load_state_dict`` also accepts a state with weights, as torchrl's
        transforms save them, and then loads the weights too.
        """
        # Collect the state from a copy without the models. Filtering the full state would gather sharded weights.
        own = object.__new__(type(self))
        own.__dict__.update(self.__dict__)
        own.__dict__["_modules"] = {name: part for name, part in self._modules.items() if name not in _MODELS}
        return super(ScoringTransform, own).state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: Mapping[str, object], prefix: str, *args: Any) -> None:
        models = [f"{prefix}{name}." for name in _MODELS]
        self.__dict__["_without"] = tuple(
            name for name in models if not any(key.startswith(name) for key in state_dict)
        )
        super()._load_from_state_dict(state_dict, prefix, *args)

    # ------------------------------------------------------------------ the model and its interface

    @abstractmethod
    def _scored_model(self) -> Model:
        """The current model."""

    def _interface(self) -> ModelInterface:
        """Keys and tokenisation of the current model."""
        return ModelInterface.of(self._scored_model())

    @property
    def scorer(self) -> Scorer:
        """The scorer of the current model. For ``"from_collector"`` that is the policy of the running collector."""
        return self._slot.get(self._scored_model(), options=self.scored)

    @property
    def scored(self) -> ScoreOptions:
        """The options, including those that the extras set."""
        return asked_of(self.options, self.extras)

    @property
    def prompt_keys(self) -> list[NestedKey]:
        """The entries from which extras read other prompts."""
        return [extra.prompt for extra in self.extras if isinstance(extra.prompt, (str, tuple))]

    @property
    @abstractmethod
    def context(self) -> ScoringContext:
        """The settings that extras read."""

    def arrange(self, data: Ragged) -> Ragged:
        """Convert an output to the layout that the model's ``pad_output`` requests. A bare model keeps the data's layout."""
        return in_layout(data, self._interface(), self._tokenising.padding_side)

    def locate(self, td: TensorDictBase) -> Located:
        """The tokens and the mask of those that this model scores."""
        return locate(
            td, self._interface(), assistant_only=self.assistant_only, scope=self.scope, options=self._tokenising
        )

    def job(self, step: ScoredStep) -> ScoringJob:
        """The request for the tokens of a step, filled by the extras."""
        # If one rank fails to build its request, the others raise too instead of waiting for it.
        with self.scorer.together():
            return fill(with_defaults(self.extras, self.defaults), step)

    def step(self, td: TensorDictBase, next_td: TensorDictBase, located: Located) -> ScoredStep:
        """The record of a step that extras read."""
        return ScoredStep(self.context, td, next_td, lambda: located, located.images)


class RetrieveLogProb(ScoringTransform, metaclass=RayVariant):
    r"""Write the log-probability of each sampled token under a model, for a KL, a ratio or a loss.

    If the data holds the tokens that the policy sampled, ``("tokens", "full")``, those are scored. Otherwise the transform
    renders and tokenises the conversation or text with the model's own template. The result has the layout of the tokens:
    padded in, padded out, and nested in, nested out. A TorchRL wrapper can change this. With ``pad_output=False`` the result
    has unpadded rows, and with ``pad_output=True`` a nested tensor becomes a padded one. A wrapper's ``pad_model_input`` has
    no effect, since the scorer needs no padding.

    The transform works in a ``ChatEnv`` (it writes to ``"next"`` at each step), in an ``LLMCollector``, in a replay buffer (on
    sample, or on extend with ``invert=True``), and on a direct call with any number of batch dimensions, with or without
    ``"next"``.

    Args:
        model: a TorchRL wrapper with ``generate=False``, a transformers causal language model, or ``"from_collector"``
            for the policy of the collector that runs the env. That policy is found at the first step and never modified.

    Keyword Args:
        log_probs_full_key: where to write. Default ``(model.log_probs_key, "full")``.
        assistant_only: score only the assistant's tokens and write 0 elsewhere. Default True.
        tokenizer_kwargs: arguments of the chat template for conversations that must be rendered.
        detach: record no graph. With False the result is differentiable. Default True.
        device: move the model there first. Not for ``"from_collector"``. Data is not moved.
        tokenizer: replaces the model's own tokenizer for text.
        padding_side: the side of padding if a model with ``pad_output=True`` gets text or a nested tensor.
        scope: with ``"turn"`` each step of a conversation scores only its own response. ``"full"`` adds the assistant's
            earlier turns. No effect if the data is one whole conversation.
        options: the sampler's temperature and truncation, adapters, precision and more, see
            :class:`~torchrl_llm_kl.scoring.ScoreOptions`. ``ScoreOptions(Sampling(0.7))`` scores at the policy's sampling
            temperature. In an env, ``memory`` bytes of keys and values are cached, so that each turn of a conversation costs
            only its new tokens. Default: the model's own distribution.
        extras: additional inputs and outputs: :class:`Entropy`, :class:`Moments`, :class:`TopK`, :class:`ExactKL`,
            :class:`KeptTokens`, :class:`Images`, :class:`RoutedExperts`, :class:`SamplerLogProbs`, :class:`AfterPrompt`, or
            your own :class:`Extra`.
        service_backend: as in torchrl. ``"ray"`` builds the Ray variant of the class, whose model runs in a service.
            ``"direct"`` scores in this process. Default None: the scope ``torchrl.service_backend(...)`` if there is one, else
            ``"direct"``.
        service_backend_options: arguments of :class:`~torchrl_llm_kl.service.ScoringService` that are also options of Ray
            actors: ``{"num_gpus": 1, "resources": {...}, "name": "reference"}``.
        use_ray_service: the older form of ``service_backend="ray"``, which torchrl removes in 0.16.

    Arguments are attributes that may change at any time, except ``tokenizer``, ``tokenizer_kwargs``, ``padding_side`` and
    ``device``. If the data holds no tokens, the conversation is read from ``"history"``.

    Shapes:
        float32 nats ``[*B, T]`` in the layout above, exactly 0 at padding and at unscored tokens. The same holds for ids.

    Raises:
        ValueError: at construction, if the model generates or returns no log-probs. On data, if the assistant's tokens
            cannot be separated from the prompt, a sequence is longer than the model's positions, a log-prob is not finite, or
            a context changes the assistant's messages.
        KeyError: if the data has no tokens, text or conversation, or lacks the context or the sampler's log-probs.

    Warns:
        SamplerMismatchWarning: once, if the settings of a wrapper or its model's ``generation_config`` sample from another
            distribution than the scored one, for example because transformers' default top-k of 50 applies. The wrapper is the
            ``model`` argument, or the collector's policy if that wraps the model.

    Example:
        >>> from torchrl_llm_kl import Entropy
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=11, hidden_size=64, num_hidden_layers=1))
        >>> tokens = TensorDict(prompt=torch.tensor([[3, 4]]), full=torch.tensor([[3, 4, 5, 6]]), batch_size=[1])
        >>> data = TensorDict(tokens=tokens, batch_size=[1])
        >>> data = RetrieveLogProb(model, extras=[Entropy()])(data)
        >>> (data["log_probs", "full"] != 0).tolist(), (data["entropy"] > 0).tolist()
        ([[False, False, True, True]], [[False, False, True, True]])

    .. seealso:: :class:`RetrieveKL`, :class:`KLComputation`.
    """

    model = TransformSetting[Model](check_scored_model)
    log_probs_full_key = TransformSetting[NestedKey]()
    detach = TransformSetting[bool]()

    def __init__(
        self,
        model: Model | str,
        *,
        log_probs_full_key: NestedKey | None = None,
        assistant_only: bool = True,
        tokenizer_kwargs: TemplateArgs | None = None,
        detach: bool = True,
        device: torch.device | str | None = None,
        tokenizer: Tokenizer | None = None,
        padding_side: str = "left",
        use_ray_service: bool = False,
        service_backend: ServiceBackend | None = None,
        service_backend_options: Mapping[str, object] | None = None,
        scope: Scope = "turn",
        options: ScoreOptions | None = None,
        extras: Sequence[Extra] = (),
    ) -> None:
        super().__init__()
        self.assistant_only, self.scope, self.detach = assistant_only, scope, detach
        self.options, self.extras = options, extras
        self._compared = False  # whether the sampler's distribution was compared with the scored one
        self._tokenising = TokenisingOptions.make(tokenizer, tokenizer_kwargs, padding_side)
        # A slot rebuilds its scorer when the model or the options change.
        self._slot, self._ref_slot = ScorerSlot(), ScorerSlot()
        self._history_key: NestedKey = "history"
        if self._compared_model is not None:  # check before asking a model in another process for its settings
            check_distributions(model)
        check_not_a_name("from_collector", model=model)
        if not isinstance(model, str):
            check_scored_model(model)
            self.model = on_device(model, device)
            if (tokenizer_kwargs or {}).get("padding") and not self._interface().pad_output:
                raise ValueError(
                    "tokenizer_kwargs['padding']=True has no effect. Build the wrapper with pad_output=True."
                )
        elif device is not None:
            raise ValueError(f"device={str(device)!r}: the policy of a collector stays on its device.")
        if log_probs_full_key is None:
            log_probs_full_key = sub_key(self._interface().log_probs_key, "full")
        elif problem := full_key_problem("log_probs_full_key", log_probs_full_key):
            warnings.warn(problem, stacklevel=2)
        self.log_probs_full_key = log_probs_full_key
        self.declare()
        if not isinstance(model, str):  # a model that cannot be scored raises an error here
            self.compare_sampler()
            # Fail at construction rather than at the first step of an env.
            self.scorer.check(self.asked, reference=self.reference_scorer)

    # ------------------------------------------------------------------ keys and specs

    def keys(self) -> tuple[list[NestedKey], list[NestedKey]]:
        """In: the model's input and the entries that extras read. Out: the log-probs and the entries that extras write."""
        return [*self._interface().in_keys, *self.prompt_keys], list(self.entries)

    @property
    def entries(self) -> dict[NestedKey, EntrySpec]:
        """The log-probs and the entries of the extras."""
        entries: dict[NestedKey, EntrySpec] = {self.log_probs_full_key: EntrySpec()}
        context = self.context
        for extra in self.extras:
            entries |= extra.specs(context)
        return entries

    @property
    def context(self) -> ScoringContext:
        """The settings that extras read."""
        own = self.known_model, self.options, self._interface(), self._tokenising, self.log_probs_full_key
        return ScoringContext(*own, in_env(self))

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer for text: the ``tokenizer`` argument, else the model's."""
        return self._tokenising.tokenizer or self._interface().tokenizer

    # ------------------------------------------------------------------ computation

    def outputs(self, td: TensorDictBase, next_td: TensorDictBase) -> dict[NestedKey, Ragged]:
        """Locate the tokens and score them."""
        step = self.step(td, next_td, self.locate(td))
        scores = self.evaluate(self.job(step), reference=self.reference_scorer)
        return {self.log_probs_full_key: scores.log_prob} | self.written(step, scores)

    def written(self, step: ScoredStep, scores: Scores) -> dict[NestedKey, Ragged]:
        """The entries that the extras write."""
        entries: dict[NestedKey, Ragged | None] = {}
        for extra in self.extras:
            entries |= extra.outputs(step, scores)
        return {key: values for key, values in entries.items() if values is not None}

    @property
    def asked(self) -> ScoreOptions:
        """The options of a call, including those that the transform sets itself."""
        return self.scored.but(grad=not self.detach, remember=in_env(self))

    def evaluate(self, job: ScoringJob, *, reference: Scorer | None = None, return_kept: bool = False) -> Scores:
        """Log-probs of the located tokens ``[N]`` and the other requested scores, from one pass."""
        self.compare_sampler()
        options = self.asked.but(return_kept=True) if return_kept else self.asked
        return job.in_place(self.scorer.run(job.request, options, reference=reference))

    def begin(self, job: ScoringJob) -> Callable[[], Scores]:
        """Start an evaluation and return a function for its scores. A local model only runs when that is called."""
        finish = self.scorer.begin(job.request, self.asked)
        return lambda: job.in_place(finish())

    def tokenises_like(self, other: RetrieveLogProb) -> bool:
        """Whether both tokenise text in the same way, according to their settings."""
        interfaces = [(part.tokenizer, part._interface()) for part in (self, other)]
        ours, theirs = ((tokenizer, each.template_kwargs, each.input_key) for tokenizer, each in interfaces)
        return ours == theirs

    # ------------------------------------------------------------------ the models

    @property
    def reference_scorer(self) -> Scorer | None:
        """The scorer of the model that an extra compares with, without the policy's truncation."""
        if self._compared_model is None:
            return None
        options = self.options.but(sampling=self.options.sampling.of_reference, adapters=True)
        return self._ref_slot.get(self._compared_model, options=options)

    @property
    def _compared_model(self) -> Model | None:
        return next((extra.reference for extra in self.extras if extra.reference is not None), None)

    def compare_sampler(self, stacklevel: int = 2) -> None:
        """Warn once if the model's wrapper, or the collector's policy that wraps it, samples from another distribution."""
        if self._compared:
            return
        model = sampler = self._scored_model()
        if not is_wrapper(model):
            try:
                sampler = collector_policy(self)
            except NoCollectorError:  # compare at a later call, which may be in a collector
                return
        self._compared = True
        if sampler is model or (is_wrapper(sampler) and unwrap(sampler) is model):
            warn_of_mismatch(sampler, self.options.sampling, stacklevel=stacklevel + 1)
            warn_of_chatml(sampler, stacklevel=stacklevel + 1)

    @property
    def known_model(self) -> Model | None:
        """The model. None for the policy of a collector."""
        return cast("Model | None", asked(self, "model", object))

    def _scored_model(self) -> Model:
        model = self.known_model
        return collector_policy(self) if model is None else model

    def _interface(self) -> ModelInterface:
        """The interface of the model, or TorchRL's defaults while no collector runs the env."""
        try:
            interface = super()._interface()
        except NoCollectorError:
            interface = ModelInterface()
        return interface.with_history_key(self._history_key)

    def read_conversation(self, key: NestedKey) -> None:
        """Read the conversation from ``key`` if the data holds no tokens."""
        self._history_key = key
        self.declare()


class RetrieveValue(StepTransform):
    """Write the value of each response token's prefix, for advantages and for a clipped value loss.

    The transform works in the same places as :class:`RetrieveLogProb`. A critic that is a module is evaluated without dropout,
    and its mode is restored.

    Args:
        critic: a :class:`~torchrl_llm_kl.scoring.TokenCritic`, or any function ``(tokens, mask) -> values`` of
            :class:`~torchrl_llm_kl.Ragged`.

    Keyword Args:
        value_key: where to write. Default ``"state_value"``, torchrl's name.
        scope, assistant_only: see :class:`RetrieveLogProb`.

    Shapes:
        float32 ``[*B, T]`` in the layout of the tokens and the unit of the reward, 0 at all other tokens. Without graph.

    Example:
        >>> from tensordict import TensorDict
        >>> lengths = lambda tokens, mask: tokens.like(torch.where(mask, tokens.positions.float(), 0))
        >>> tokens = TensorDict(prompt=torch.tensor([[3, 4]]), full=torch.tensor([[3, 4, 5, 6]]), batch_size=[1])
        >>> RetrieveValue(lengths)(TensorDict(tokens=tokens, batch_size=[1]))["state_value"].tolist()
        [[0.0, 0.0, 2.0, 3.0]]
    """

    critic = TransformSetting[Critic](registers=False)  # keeps the critic out of the env's state
    value_key = TransformSetting[NestedKey]()
    scope = TransformSetting[Scope](choices=get_args(Scope))
    assistant_only = TransformSetting[bool]()

    def __init__(
        self,
        critic: Critic,
        *,
        value_key: NestedKey = "state_value",
        scope: Scope = "turn",
        assistant_only: bool = True,
    ) -> None:
        super().__init__()
        self.critic = critic
        self.value_key, self.scope, self.assistant_only = value_key, scope, assistant_only
        self.declare()

    def keys(self) -> tuple[list[NestedKey], list[NestedKey]]:
        """The tokens and the values."""
        # A critic reads the sampled tokens under TorchRL's default keys.
        return list(ModelInterface().in_keys), [self.value_key]

    @property
    def entries(self) -> dict[NestedKey, EntrySpec]:
        """The values."""
        return {self.value_key: EntrySpec()}

    @torch.no_grad()
    def outputs(self, td: TensorDictBase, next_td: TensorDictBase) -> dict[NestedKey, Ragged]:
        """Locate the tokens and evaluate their prefixes."""
        located = locate(td, assistant_only=self.assistant_only, scope=self.scope)
        with evaluating(self.critic) if isinstance(self.critic, nn.Module) else nullcontext():
            return {self.value_key: self.critic(located.tokens, located.mask)}
