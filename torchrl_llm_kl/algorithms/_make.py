""":func:`make_algorithm`: binds a preset to models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

from tensordict import NestedKey
from torch import Tensor, nn
from typing_extensions import TypedDict, Unpack

from torchrl_llm_kl._foreign import foreign_hint
from torchrl_llm_kl._numerics import check_not_a_name
from torchrl_llm_kl._registry import no_such
from torchrl_llm_kl.advantages import Advantage, advantage_spec
from torchrl_llm_kl.algorithms._algorithm import FIELDS, Algorithm, Rule, apply_overrides, check_rules
from torchrl_llm_kl.algorithms._parts import CHARGED, AlgorithmParts, KeepBest
from torchrl_llm_kl.algorithms._schema import SCHEMAS
from torchrl_llm_kl.algorithms.presets import get_algorithm
from torchrl_llm_kl.estimators import KLPlacementWarning, check_placement
from torchrl_llm_kl.losses import (
    Correction,
    EntropyBonus,
    KLToReference,
    ObjectiveArgs,
    PolicyLoss,
    TermPart,
    ValueLoss,
    check_actor_options,
    spec_of,
)
from torchrl_llm_kl.rollouts import Context, MaskingStrategy, ModelInterface, Scope
from torchrl_llm_kl.scoring import (
    LogProbScorer,
    Model,
    ModelOrScorer,
    SamplerMismatchWarning,
    ScoreOptions,
    check_vocabularies,
    inner_module,
    is_wrapper,
    output_size,
    repair_padding,
    trains_with,
    unwrap,
    warn_of_mismatch,
)
from torchrl_llm_kl.transforms import (
    Adapters,
    AfterPrompt,
    Entropy,
    Extra,
    Moments,
    RetrieveKL,
    RetrieveLogProb,
    RetrieveValue,
    RoutedExperts,
    SamplerLogProbs,
    TopK,
)

if TYPE_CHECKING:
    from torchrl_llm_kl.algorithms import AlgorithmName, AlgorithmOverrides


#: A reference: a model, its scorer, or a name: ``"base"`` for the actor without adapters, ``"data"`` for what the data holds.
Reference: TypeAlias = Model | LogProbScorer | Literal["base", "data"]


class LossArgs(TypedDict, total=False):
    """Arguments of :class:`~torchrl_llm_kl.PolicyLoss` that :func:`make_algorithm` passes on."""

    corrections: Sequence[Correction | Callable[..., tuple[Tensor, dict[str, Tensor]]]]
    tokens_per_batch: int | None
    functional: bool


def make_algorithm(
    algorithm: AlgorithmName | Algorithm,
    actor: ModelOrScorer,
    *,
    reference: Reference | None = None,
    critic: nn.Module | None = None,
    gen_model: Model | LogProbScorer | Literal["from_collector"] | None = None,
    group_key: NestedKey | None = None,
    group_size: int | None = None,
    options: ScoreOptions | None = None,
    masking_strategy: MaskingStrategy = "sft",
    loss_args: LossArgs | None = None,
    context: Context | None = None,
    **overrides: Unpack[AlgorithmOverrides],
) -> AlgorithmParts:
    """Bind an algorithm to its models, ready to train an actor.

    Args:
        algorithm: a name in :data:`ALGORITHMS`, or your own preset.
        actor: see :class:`~torchrl_llm_kl.PolicyLoss`. Temperature, ``dtype`` and ``deterministic`` of a scorer apply to
            the reference too.

    Keyword Args:
        reference: the frozen reference model, the teacher for distillation, or a scorer of it with the actor's temperature,
            ``dtype`` and ``deterministic``; ``"base"`` for the actor without its PEFT adapters; ``"data"`` if the data holds
            ``("next", "ref_log_probs", "full")`` or, for ``top_k=``, a teacher's top k.
        critic: a :class:`~torchrl_llm_kl.TokenCritic`, for algorithms that train one.
        gen_model: scores the policy's own tokens, where their log-probs are read: the actor by default; ``"from_collector"`` if
            :attr:`~AlgorithmParts.kl_transform` is in the env of a collector with another copy of the policy.
        group_key: equal for all answers to a prompt; see :class:`~torchrl_llm_kl.Advantage`.
        group_size: instead of a key: the number of consecutive rows that answer one prompt; an error if their prompts differ.
        options: how old and current log-probs are scored, such as ``ScoreOptions(Sampling(0.7), deterministic=True)``, and
            the reference's, over all tokens; see :class:`~torchrl_llm_kl.PolicyLoss`.
        masking_strategy: the tokens to train on; see :class:`~torchrl_llm_kl.PolicyLoss`.
        loss_args: further arguments of :class:`~torchrl_llm_kl.PolicyLoss`: ``corrections``, ``tokens_per_batch`` and
            ``functional``.
        context: the prompt after which the reference scores the same response, such as one with the solution: a function of the
            conversation, or an entry with token ids; see :class:`~torchrl_llm_kl.RetrieveLogProb`.
        overrides: changes of the preset; see :class:`AlgorithmOverrides`. Each changes something that is computed or required,
            or raises an error. ``kl_loss_coeff`` adds a KL with ``"k2"`` to the loss of a preset that has none there, and
            ``kl_reward_coeff`` one with ``"k1"`` to its reward, beside a KL in the loss. Settings of the objective and the
            advantage are in ``objective_args`` and ``advantage_args``, which are merged into the preset's.

    Returns:
        :class:`AlgorithmParts`: ``prepare(batch)`` scores and writes advantages, ``loss(batch)`` returns the loss terms.

    Raises:
        ValueError: if a required model is missing, or a model or setting has no effect; if a scorer's settings differ from the
            actor's; if the reference is the actor, without a ``context``, or has another vocabulary; for groups of one answer.
        TypeError: for an unknown setting, a setting of the objective or the advantage outside ``objective_args`` and
            ``advantage_args``, or an argument of this function in ``loss_args``.

    Warns:
        KLPlacementWarning: if an estimator is used where its gradient is not the reverse KL's.
        SamplerMismatchWarning: if the actor or ``gen_model`` is a wrapper that is known to sample otherwise than is scored. Of
            a model without a wrapper :attr:`~AlgorithmParts.kl_transform` warns at its first step, in the env of a collector
            whose policy wraps it.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> config = Qwen2Config(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=1)
        >>> actor, reference = Qwen2ForCausalLM(config), Qwen2ForCausalLM(config)
        >>> grpo = make_algorithm("grpo", actor, reference=reference, group_size=2, objective_args={"clip_high": 0.28})
        >>> full = torch.tensor([[3, 4, 5], [3, 4, 6]])
        >>> tokens = TensorDict(prompt=full[:, :2], full=full, batch_size=[2])
        >>> reward = torch.tensor([[1.0], [0.0]])
        >>> batch = grpo.prepare(TensorDict(tokens=tokens, next=TensorDict(reward=reward, batch_size=[2]), batch_size=[2]))
        >>> batch["advantage"].squeeze(-1)
        tensor([ 0.7071, -0.7071])
        >>> out = grpo.loss(batch)
        >>> out.total_loss.backward()
    """
    check_not_a_name(actor=actor, critic=critic)
    check_not_a_name("base", "data", reference=reference)
    check_not_a_name("from_collector", gen_model=gen_model)
    preset = get_algorithm(algorithm) if isinstance(algorithm, str) else algorithm
    preset = apply_overrides(preset, overrides)
    grouping: _Grouping = {"group_key": group_key, "group_size": group_size}
    check_rules(_RULES, _Arguments(preset, reference, critic, grouping, masking_strategy))
    _check_other_model(preset, actor, reference, context)
    preset.check_group_size(group_size)
    if not preset.compares_answers:
        grouping = {}
    if group_size is not None:
        preset = replace(preset, repeat_times=group_size)
    _check_loss_args(loss_args or {})
    options_of_loss, options = options, _options(actor, options)
    scored_reference = _reference_to_score(actor, reference, options)
    name, sampler = ("actor", actor) if gen_model is None else ("gen_model", gen_model)
    policy = _to_score(sampler, options, name)
    check_placement(preset.kl_reward, "reward", stacklevel=2)
    check_placement(preset.kl_loss, "loss", stacklevel=2)
    # A divergence to a teacher at each prefix holds whoever wrote the prefix.
    if preset.on_policy and not (preset.distils and preset.kl_reward == "none"):
        warn_of_mismatch(actor if isinstance(sampler, str) else sampler, options.sampling, trains=True, stacklevel=2)

    once = spec_of(preset.objective).once
    in_loss = preset.kl_loss == "exact" or preset.distils_exactly or (once is not None and once.mismatched)
    objective_args: ObjectiveArgs = {**preset.objective_args}
    if preset.distils:
        objective_args["distribution"] = preset.distribution
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplerMismatchWarning)
        loss = PolicyLoss(
            actor,
            preset.objective,
            terms=_terms(preset),
            aggregation=preset.aggregation,
            max_len=preset.max_len,
            masking_strategy=masking_strategy,
            reference=_reference_of_loss(actor, reference, options) if in_loss else None,
            options=options_of_loss,
            **objective_args,
            **(loss_args or {}),
        )
    advantage = None if preset.advantage is None else _advantage(preset, grouping, masking_strategy)
    if advantage is not None and critic is None and "advantage" not in loss.reads:
        raise ValueError(
            f"advantage={preset.advantage!r} has no effect: the objective {preset.objective} reads no advantage. Leave it out."
        )
    scope: Scope = "full" if masking_strategy == "rlhf" else "turn"
    kl_transform = _kl_transform(
        preset,
        policy,
        scored_reference,
        read={key for part in (loss, advantage) if part is not None for key in part.in_keys},
        in_loss=in_loss,
        context=context,
        own_model=gen_model is not None,
        adapters=reference.options.adapters if isinstance(reference, LogProbScorer) else False,
        options=options,
        own={"scope": scope, "assistant_only": masking_strategy != "generic", "service_backend": "direct"},
    )
    return AlgorithmParts(
        preset,
        SCHEMAS[preset.schema],
        loss,
        kl_transform=kl_transform,
        value_transform=None if critic is None else RetrieveValue(critic, scope=scope),
        advantage=advantage,
        selection=KeepBest(**grouping) if preset.keep_best else None,
        critic_loss=None if critic is None else ValueLoss(critic, masking_strategy=masking_strategy),
    )


class _Grouping(TypedDict, total=False):
    group_key: NestedKey | None
    group_size: int | None


class _Own(TypedDict):
    """Arguments of every transform that scores."""

    scope: Scope
    assistant_only: bool
    service_backend: Literal["direct"]  # a copy of the policy in a service would not be trained


class _Arguments(NamedTuple):
    """Arguments of :func:`make_algorithm` that must fit the preset and one another."""

    preset: Algorithm
    reference: Reference | None
    critic: nn.Module | None
    grouping: _Grouping
    masking_strategy: MaskingStrategy

    @property
    def of_data(self) -> bool:
        """Whether the data holds the reference's scores."""
        return isinstance(self.reference, str) and self.reference == "data"

    @property
    def lacks_reference(self) -> bool:
        """Whether a reference or teacher is needed and missing."""
        return self.preset.needs_reference and self.reference is None


_RULES = (
    Rule[_Arguments](
        lambda x: x.lacks_reference and x.preset.schema != "distill",
        "{0.preset.name} compares with a reference model: pass reference=, or reference='data' if the data holds ('next', "
        "'ref_log_probs', 'full'); without one: kl_loss='none'.",
    ),
    Rule[_Arguments](
        lambda x: x.lacks_reference and not x.preset.distils,
        "{0.preset.name} compares with a teacher: pass reference=, or reference='data' if the data holds ('next', "
        "'ref_log_probs', 'full').",
    ),
    Rule[_Arguments](
        lambda x: x.lacks_reference,
        "{0.preset.name} compares with a teacher: pass reference=, or reference='data' if the data holds a teacher's top k "
        "(with top_k=).",
    ),
    Rule[_Arguments](
        lambda x: x.of_data and x.preset.distils_exactly,
        "{0.preset.name} compares whole distributions, which the data does not hold: pass the teacher as reference=, or "
        "top_k= for the entries that RetrieveLogProb(teacher, extras=[TopK(...)]) writes.",
    ),
    Rule[_Arguments](
        lambda x: x.reference is not None and not x.preset.needs_reference and x.preset.reads_reward,
        "{0.preset.name} uses no reference model: leave it out, pass use_reference=True to log the KL, or place the KL "
        "(kl_loss='k2' or kl_reward='k1').",
    ),
    Rule[_Arguments](
        lambda x: x.reference is not None and not x.preset.needs_reference,
        "{0.preset.name} uses no reference model: leave it out, pass use_reference=True to log the KL, or place the KL "
        "(kl_loss='k2').",
    ),
    Rule[_Arguments](
        lambda x: x.of_data and x.preset.kl_reward != "none",
        "kl_reward={0.preset.kl_reward!r} needs a reference model to score, got reference='data': pass the model, or put the "
        "KL into the reward before (KLRewardTransform) and pass kl_reward='none'.",
    ),
    Rule[_Arguments](
        lambda x: x.preset.use_critic and x.critic is None,
        "{0.preset.name} trains a critic: pass critic=TokenCritic(model).",
    ),
    Rule[_Arguments](
        lambda x: x.critic is not None and not x.preset.use_critic,
        "{0.preset.name} has no critic: leave critic= out.",
    ),
    Rule[_Arguments](
        lambda x: x.critic is not None and x.masking_strategy == "generic",
        "masking_strategy='generic' with a critic: values and returns exist only for the assistant's tokens, and prompts "
        "would be taught a return of 0. Use 'sft' or 'rlhf'.",
    ),
    Rule[_Arguments](
        lambda x: not x.preset.compares_answers and any(value is not None for value in x.grouping.values()),
        "{0.preset.name} does not compare within groups: leave out group_key and group_size.",
    ),
)


def _advantage(preset: Algorithm, grouping: _Grouping, masking_strategy: MaskingStrategy) -> Advantage:
    assert preset.advantage is not None
    spec, hyper = advantage_spec(preset.advantage), {**preset.advantage_args}
    keys: Any = hyper.pop("keys", {})
    if spec.kind == "token" and masking_strategy == "rlhf":
        keys = {"mask": ("masks", "all_assistant_mask"), **keys}
    return Advantage(preset.advantage, **grouping, keys=keys, **hyper)  # type: ignore[arg-type]


# What an advantage or a correction reads beside the policy's log-probs -> what writes it.
_SCORED: dict[NestedKey, type[Extra]] = {
    ("next", "entropy"): Entropy,
    ("next", "moments", "collision"): Moments,
    ("next", "moments", "discriminator"): Moments,
    ("next", "sampler_log_probs", "full"): SamplerLogProbs,
}


def _kl_transform(
    preset: Algorithm,
    policy: Model | str,
    reference: Any,
    *,
    read: set[NestedKey],
    in_loss: bool,
    context: Context | None,
    own_model: bool,
    adapters: bool | str,
    options: ScoreOptions,
    own: _Own,
) -> RetrieveKL | RetrieveLogProb | None:
    """The transform that scores the policy, its reference or both before the loss; None if nothing is left to score.

    ``read`` are the entries that loss and advantage read. ``in_loss`` says whether the loss scores the reference itself, and
    ``own_model`` whether another model than the actor scores the policy's tokens. ``adapters`` are those of the reference
    ``"base"``.
    """
    extras = [kind() for kind in dict.fromkeys(kind for key, kind in _SCORED.items() if key in read)]
    charged, exact = preset.kl_reward != "none", preset.distils_exactly
    old = charged or bool(extras) or ("next", "log_probs", "full") in read
    scored_there = exact or (preset.kl_loss == "exact" and not preset.top_k)
    ref = preset.needs_reference and reference != "data"
    ref = ref and (charged or not scored_there or ("next", "ref_log_probs", "full") in read)
    if own_model and not (ref and isinstance(reference, str)) and not (old and reference != "data"):
        raise ValueError(
            f"gen_model has no effect: log-probs of the policy are not scored for {preset.name}. Leave it out."
        )
    if context is not None and (not ref or in_loss):
        where = "the loss scores it on the data's own prompts" if in_loss else "none is scored"
        advice = (
            "pass top_k=" if exact else "use an algorithm that reads reference log-probs, such as 'on_policy_distill'"
        )
        raise ValueError(
            f"context= is the prompt of the reference, and for {preset.name} {where}: leave context out, or {advice}."
        )
    if ref and old:
        if preset.top_k:
            raise ValueError(
                f"top_k={preset.top_k} beside log-probs of the sampler (for a KL in the reward or a correction): score the "
                "teacher with RetrieveLogProb(teacher, extras=[TopK(...)]) and pass reference='data'."
            )
        if isinstance(reference, str):
            extras.append(Adapters(adapters, of="reference"))
        if context is not None:
            extras.append(AfterPrompt(context, of="reference"))
        if not charged:
            return RetrieveKL(policy, reference, add_to_reward=False, options=options, extras=extras, **own)
        coeff, estimator = preset.kl_reward_coeff, preset.kl_reward
        transform = RetrieveKL(
            policy, reference, coeff=coeff, estimator=estimator, options=options, extras=extras, **own
        )
        transform.charged_key = CHARGED
        return transform
    if ref:
        model, adapters = (policy, adapters) if isinstance(reference, str) else (reference, True)
        extras = ([TopK(preset.top_k)] if preset.top_k else []) + ([AfterPrompt(context)] if context else [])
        options, entry = options.but(sampling=options.sampling.of_reference, adapters=adapters), "ref_log_probs"
    elif old and reference != "data":
        model, entry = policy, "log_probs"
        extras.append(RoutedExperts())  # as the loss replays it
    else:
        return None
    return RetrieveLogProb(model, log_probs_full_key=(entry, "full"), options=options, extras=extras, **own)


def _terms(preset: Algorithm) -> list[TermPart]:
    terms: list[TermPart] = []
    experts = preset.leave_out_experts
    with warnings.catch_warnings():  # make_algorithm has already warned, at its caller's line
        warnings.simplefilter("ignore", KLPlacementWarning)
        if preset.kl_loss != "none":
            terms.append(KLToReference(preset.kl_loss_coeff, preset.kl_loss, leave_out_experts=experts))
    if preset.entropy_coeff != 0:
        terms.append(EntropyBonus(preset.entropy_coeff, leave_out_experts=experts))
    return terms


# ------------------------------------------------------------------ models: one temperature and one precision for all


class _WrappedModel:
    """Scores the model inside a TorchRL wrapper with the wrapper's keys and template, even if the wrapper generates."""

    def __init__(self, wrapper: nn.Module) -> None:
        repair_padding(wrapper)
        self.wrapper = wrapper

    @property
    def interface(self) -> ModelInterface:
        return replace(ModelInterface.of(self.wrapper), pad_output=None)  # scores keep the layout of the batch

    @property
    def model(self) -> nn.Module | None:
        return unwrap(self.wrapper)

    def make_scorer(self, **settings: Any) -> LogProbScorer:
        return LogProbScorer(self.wrapper, **settings)


def _check_other_model(preset: Algorithm, actor: object, reference: object, context: Context | None) -> None:
    """Raise if the reference is the policy itself, or of another vocabulary; models of other processes are not looked at."""
    policy, other = inner_module(actor), inner_module(reference)
    if not (isinstance(policy, nn.Module) and isinstance(other, nn.Module)):
        return
    # After another prompt the policy teaches itself; other adapters of the same model are another model.
    switched = isinstance(reference, LogProbScorer) and reference.options.adapters is not True
    if context is None and not switched and trains_with(policy, other):
        how = "is the actor itself" if policy is other else "holds the actor's own parameters"
        raise ValueError(
            f"reference {how}, so that their KL is 0 at every step: pass a frozen copy (copy.deepcopy(actor)), or 'base' for "
            "the actor without its adapters."
        )
    size, expected = output_size(other), output_size(policy)
    if (preset.distils_exactly or preset.kl_loss == "exact") and None not in (size, expected) and size != expected:
        raise ValueError(
            f"reference has a vocabulary of {size} tokens, and the policy one of {expected}: a comparison of whole "
            "distributions needs the same tokens in both. Pass a reference with the policy's tokenizer. If one head is only "
            "padded, cut it."
        )
    check_vocabularies(actor, reference)


def _check_loss_args(loss_args: Mapping[str, object]) -> None:
    """Raise a TypeError for an argument that belongs to make_algorithm, and for an unknown one."""
    known, own = list(LossArgs.__annotations__), {*FIELDS, *make_algorithm.__annotations__, "terms"}
    for name in loss_args:
        if name not in known:
            hint = " Pass it to make_algorithm." if name in own else foreign_hint(name, known)
            raise TypeError(no_such("loss_args must not hold", name, known, hint=hint))


def _options(actor: Any, given: ScoreOptions | None) -> ScoreOptions:
    """How every model is scored: as an actor that is a scorer is, else as requested."""
    if isinstance(actor, LogProbScorer):
        own = actor.options
        return ScoreOptions(own.sampling, dtype=own.dtype, deterministic=own.deterministic)
    return ScoreOptions() if given is None else check_actor_options(given).but(entropy=False)


def _to_score(model: Any, options: ScoreOptions, name: str) -> Any:
    """Convert a model, a scorer or a wrapper to the form that the transforms accept."""
    if isinstance(model, LogProbScorer):
        _check_same_settings(model, options, name)
        if model.options.adapters is not True:
            raise ValueError(
                f"{name} is a scorer with adapters={model.options.adapters!r} of a model that is not the actor's: "
                "pass a model without adapters, or with this one active."
            )
        return model.model
    return _WrappedModel(model) if is_wrapper(model) and unwrap(model) is not None else model


def _reference_to_score(actor: object, reference: Reference | None, options: ScoreOptions) -> Reference | None:
    """The reference in the form that the transforms accept: ``"base"`` for the actor's model with other adapters, or none."""
    if (
        isinstance(reference, LogProbScorer)
        and reference.options.adapters is not True
        and inner_module(reference) is inner_module(actor)
    ):
        _check_same_settings(reference, options, "reference")
        return "base"
    return _to_score(reference, options, "reference")


def _reference_of_loss(
    actor: object, reference: Reference | None, options: ScoreOptions
) -> Model | LogProbScorer | None:
    """The reference in the form that a loss accepts, for an exact KL or mismatched answers; None without a model."""
    if not isinstance(reference, str):
        return reference
    plain = options.but(sampling=options.sampling.of_reference, adapters=False)
    return LogProbScorer(cast(nn.Module, inner_module(actor)), plain) if reference == "base" else None


def _check_same_settings(scorer: LogProbScorer, options: ScoreOptions, name: str) -> None:
    temperature = options.sampling.temperature
    if scorer.options.temperature != temperature:
        raise ValueError(
            f"{name} is a scorer with temperature {scorer.options.temperature:g}, and the actor is scored at {temperature:g}: "
            "a KL compares the two at the sampler's temperature."
        )
    for setting in ("dtype", "deterministic"):
        own, actors = getattr(scorer.options, setting), getattr(options, setting)
        if own != actors:
            raise ValueError(
                f"{name} is a scorer with {setting}={own}, and the actor has {setting}={actors}: their difference in rounding "
                f"would count as KL. Give both the same (options=ScoreOptions({setting}=...) for the actor)."
            )
