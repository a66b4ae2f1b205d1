""":func:`make_algorithm`: binds a preset to models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from tensordict import NestedKey
from torch import nn
from typing_extensions import TypedDict, Unpack

from torchrl_llm_kl._numerics import check_not_a_name
from torchrl_llm_kl.advantages import Advantage, advantage_spec
from torchrl_llm_kl.algorithms._algorithm import Algorithm, apply_overrides, refuse
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
    Weights,
    check_actor_options,
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


#: A model, its scorer, ``"base"`` for the actor without adapters, or ``"data"`` for scores that the data holds.
Reference: TypeAlias = Model | LogProbScorer | Literal["base", "data"]


class LossArgs(TypedDict, total=False):
    """Arguments of :class:`~torchrl_llm_kl.PolicyLoss` that :func:`make_algorithm` passes on."""

    corrections: Sequence[Correction | Callable[..., Weights]]
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
    """Bind an algorithm to its models.

    Args:
        algorithm: a name in :data:`ALGORITHMS`, or your own preset.
        actor: the model to train; see :class:`~torchrl_llm_kl.PolicyLoss`. If it is a scorer, its temperature, ``dtype`` and
            ``deterministic`` apply to the reference too.

    Keyword Args:
        reference: the frozen reference model, or the teacher of a distillation. A scorer of it must have the actor's
            temperature, ``dtype`` and ``deterministic``. ``"base"`` is the actor without its PEFT adapters. With ``"data"``
            the data holds ``("next", "ref_log_probs", "full")`` or, for ``top_k=``, a teacher's top k.
        critic: a :class:`~torchrl_llm_kl.TokenCritic`, for algorithms that train one.
        gen_model: the model that scores the policy's tokens if their log-probs are read. The actor by default. Use
            ``"from_collector"`` if :attr:`~AlgorithmParts.kl_transform` is in the env of a collector that has its own copy of
            the policy.
        group_key: an entry that is equal for all answers to a prompt; see :class:`~torchrl_llm_kl.Advantage`.
        group_size: the number of consecutive rows that answer one prompt, instead of a key. Their prompts must be equal.
        options: how old and current log-probs are scored, such as ``ScoreOptions(Sampling(0.7), deterministic=True)``. The
            reference is scored in the same way, but over all tokens; see :class:`~torchrl_llm_kl.PolicyLoss`.
        masking_strategy: the tokens to train on; see :class:`~torchrl_llm_kl.PolicyLoss`.
        loss_args: more arguments of :class:`~torchrl_llm_kl.PolicyLoss`: ``corrections``, ``tokens_per_batch`` and
            ``functional``.
        context: the prompt after which the reference scores the response, for example one that contains the solution. It is a
            function of the conversation, or an entry with token ids; see :class:`~torchrl_llm_kl.RetrieveLogProb`.
        overrides: changes of the preset; see :class:`AlgorithmOverrides`. Each one changes something that is computed or
            required, or raises an error. ``kl_loss_coeff`` adds a KL with ``"k2"`` to the loss if the preset has none there.
            ``kl_reward_coeff`` adds a KL with ``"k1"`` to the reward, even if there is a KL in the loss. ``objective_args`` and
            ``advantage_args`` hold the settings of the objective and the advantage, and are merged with the preset's.

    Returns:
        :class:`AlgorithmParts`: ``prepare(batch)`` scores and writes advantages, ``loss(batch)`` returns the loss terms.

    Raises:
        ValueError: if a required model is missing, or a model or setting has no effect. If a scorer's settings differ from the
            actor's. If the reference is the actor (without a ``context``) or has another vocabulary. For groups of one answer.
        TypeError: for an unknown setting, for a setting of the objective or the advantage outside ``objective_args`` and
            ``advantage_args``, or for an argument of this function in ``loss_args``.

    Warns:
        KLPlacementWarning: if the gradient of an estimator in its place is not the reverse KL's.
        SamplerMismatchWarning: if the actor or ``gen_model`` is a wrapper that samples from another distribution than the
            scored one. A model without a wrapper shows this only in the env of a collector whose policy wraps it. There
            :attr:`~AlgorithmParts.kl_transform` warns at its first step.

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
    _check_arguments(preset, reference, critic, grouping, masking_strategy)
    _check_other_model(actor, reference, context)
    preset.check_group_size(group_size)
    if not preset.compares_answers:
        grouping = {}  # both are None, and Advantage would refuse them
    if group_size is not None:
        # The preset of the returned algorithm shows the group size.
        preset = replace(preset, repeat_times=group_size)
    options_of_loss, options = options, _options(actor, options)
    scored_reference = _reference_to_score(actor, reference, options)
    name, sampler = ("actor", actor) if gen_model is None else ("gen_model", gen_model)
    policy = _to_score(sampler, options, name)
    # These warnings name the caller's line.
    check_placement(preset.kl_reward, "reward", stacklevel=2)
    if preset.kl_level == "token":
        check_placement(preset.kl_loss, "loss", stacklevel=2)
    # A divergence to a teacher at each prefix does not depend on the distribution that the prefix was sampled from.
    if preset.on_policy and not (preset.distils and preset.kl_reward == "none"):
        warn_of_mismatch(actor if isinstance(sampler, str) else sampler, options.sampling, trains=True, stacklevel=2)

    # These terms read whole distributions or score mismatched answers, so the loss scores the reference itself.
    once = preset.spec.once
    in_loss = preset.kl_loss == "exact" or preset.distils_exactly or (once is not None and once.mismatched)
    objective_args: ObjectiveArgs = {**preset.objective_args}
    if preset.distils:
        objective_args["distribution"] = preset.distribution
    with warnings.catch_warnings():  # both were raised above, at the caller's line
        for category in (SamplerMismatchWarning, KLPlacementWarning):
            warnings.simplefilter("ignore", category)
        loss = PolicyLoss(
            actor,
            preset.objective,
            terms=_terms(preset),
            aggregation=preset.aggregation,
            max_len=preset.max_len,
            masking_strategy=masking_strategy,
            reference=_loss_reference(actor, reference, options) if in_loss else None,
            options=options_of_loss,
            **objective_args,
            **(loss_args or {}),
        )
    # A critic is trained on the advantage's targets, so the advantage is used even if the objective ignores it.
    advantage = None if preset.advantage is None else _advantage(preset, grouping, masking_strategy)
    if advantage is not None and critic is None and "advantage" not in loss.reads:
        raise ValueError(f"advantage={preset.advantage!r} has no effect: {preset.spec.name} reads none. Leave it out.")
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
        # A copy of the policy in a service would not be trained.
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


def _check_arguments(
    preset: Algorithm,
    reference: Reference | None,
    critic: nn.Module | None,
    grouping: _Grouping,
    masking_strategy: MaskingStrategy,
) -> None:
    """Raise a ValueError for arguments of :func:`make_algorithm` that do not fit the preset or each other."""
    needed, given, trains = preset.needs_reference, reference is not None, preset.use_critic
    model = "teacher" if preset.schema == "distill" else "reference model"
    grouped = any(value is not None for value in grouping.values())
    of_data = isinstance(reference, str) and reference == "data"
    whole, charges = preset.distils_exactly, preset.kl_reward != "none"
    generic = critic is not None and masking_strategy == "generic"
    cases = (
        (needed and not given, f"it compares with a {model}: pass reference=, or 'data' if the data holds its scores"),
        (given and not needed, "it uses no reference: leave it out, pass kl_loss='k2', or use_reference=True to log"),
        (of_data and whole, "it compares whole distributions: pass the teacher as reference=, or top_k="),
        (of_data and charges, "kl_reward= needs a reference model to score, got reference='data': pass the model"),
        (trains and critic is None, "it trains a critic: pass critic=TokenCritic(model)"),
        (critic is not None and not trains, "it has no critic: leave critic= out"),
        (generic, "masking_strategy='generic' needs values of prompts, which a critic lacks: use 'sft' or 'rlhf'"),
        (grouped and not preset.compares_answers, "it compares no answers: leave out group_key and group_size"),
    )
    refuse(preset.name, cases)


def _advantage(preset: Algorithm, grouping: _Grouping, masking_strategy: MaskingStrategy) -> Advantage:
    assert preset.advantage is not None
    spec, hyper = advantage_spec(preset.advantage), {**preset.advantage_args}
    keys: Any = hyper.pop("keys", {})
    if spec.kind == "token" and masking_strategy == "rlhf":  # all turns of the assistant, not only the last one
        keys = {"mask": ("masks", "all_assistant_mask"), **keys}
    return Advantage(preset.advantage, **grouping, keys=keys, **hyper)  # type: ignore[arg-type]


# Entry that an advantage or a correction reads, beside the policy's log-probs -> the extra that writes it.
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
    own: dict[str, Any],
) -> RetrieveKL | RetrieveLogProb | None:
    """Return the transform that scores the policy, its reference or both before the loss, or None if nothing is to score.

    Args:
        preset: the algorithm.
        policy: the model that scores the policy's tokens.
        reference: the reference, in the form that the transforms accept.

    Keyword Args:
        read: the entries that the loss and the advantage read.
        in_loss: whether the loss scores the reference itself.
        context: see :func:`make_algorithm`.
        own_model: whether the caller passed ``gen_model``.
        adapters: the adapters of the reference ``"base"``.
        options: how the policy is scored.
        own: further arguments of each transform.
    """
    # Moments serve several entries, but are scored once.
    extras = [kind() for kind in dict.fromkeys(kind for key, kind in _SCORED.items() if key in read)]
    charged, exact = preset.kl_reward != "none", preset.distils_exactly
    old = charged or bool(extras) or ("next", "log_probs", "full") in read
    # The loss scores the reference for these. Others may still read its log-probs before the loss.
    scored_there = exact or (preset.kl_loss == "exact" and not preset.top_k)
    ref = preset.needs_reference and reference != "data"
    ref = ref and (charged or not scored_there or ("next", "ref_log_probs", "full") in read)
    if own_model and not (ref and isinstance(reference, str)) and not (old and reference != "data"):
        raise ValueError(f"gen_model has no effect: {preset.name} scores no log-probs of the policy. Leave it out.")
    if context is not None and (not ref or in_loss):
        raise ValueError(f"context= has no effect: {preset.name} scores no reference before the loss. Leave it out.")
    if ref and old:  # one transform scores both models and their KL
        if preset.top_k:
            raise ValueError("top_k= cannot be scored beside old log-probs: pass reference='data', with a top k there.")
        if isinstance(reference, str):
            extras.append(Adapters(adapters, of="reference"))
        if context is not None:
            extras.append(AfterPrompt(context, of="reference"))
        own |= {"coeff": preset.kl_reward_coeff, "estimator": preset.kl_reward} if charged else {"add_to_reward": False}
        transform = RetrieveKL(policy, reference, options=options, extras=extras, **own)
        transform.charged_key = CHARGED
        return transform
    if ref:
        model, adapters = (policy, adapters) if isinstance(reference, str) else (reference, True)
        extras = ([TopK(preset.top_k)] if preset.top_k else []) + ([AfterPrompt(context)] if context else [])
        options, entry = options.but(sampling=options.sampling.of_reference, adapters=adapters), "ref_log_probs"
    elif old and reference != "data":
        model, entry = policy, "log_probs"
        extras.append(RoutedExperts())  # the loss replays the same experts
    else:
        return None
    return RetrieveLogProb(model, log_probs_full_key=(entry, "full"), options=options, extras=extras, **own)


def _terms(preset: Algorithm) -> list[TermPart]:
    terms: list[TermPart] = []
    if preset.kl_loss != "none":
        level, sampled_only = preset.kl_level, preset.leave_out_experts
        terms.append(KLToReference(preset.kl_loss_coeff, preset.kl_loss, leave_out_experts=sampled_only, level=level))
    if preset.entropy_coeff != 0:
        terms.append(EntropyBonus(preset.entropy_coeff, leave_out_experts=preset.leave_out_experts))
    return terms


# ------------------------------------------------------------------ models: one temperature and one precision for all


class _WrappedModel:
    """Scores the model inside a TorchRL wrapper with the wrapper's keys and template, also if the wrapper generates."""

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


def _check_other_model(actor: object, reference: object, context: Context | None) -> None:
    """Raise if the reference is the policy itself, or has another vocabulary. Models in other processes are not checked."""
    policy, other = inner_module(actor), inner_module(reference)
    if not (isinstance(policy, nn.Module) and isinstance(other, nn.Module)):
        return
    # With a context the policy may teach itself. With other adapters the same model is another reference.
    switched = isinstance(reference, LogProbScorer) and reference.options.adapters is not True
    if context is None and not switched and trains_with(policy, other):
        how = "is the actor itself" if policy is other else "holds the actor's own parameters"
        raise ValueError(f"reference {how}, so their KL is always 0: pass copy.deepcopy(actor), or 'base'.")
    check_vocabularies(actor, reference)


def _options(actor: Any, given: ScoreOptions | None) -> ScoreOptions:
    """The options for all models: those of an actor that is a scorer, otherwise the requested ones."""
    if isinstance(actor, LogProbScorer):
        own = actor.options
        return ScoreOptions(own.sampling, dtype=own.dtype, deterministic=own.deterministic)
    return ScoreOptions() if given is None else check_actor_options(given).but(entropy=False)


def _to_score(model: Any, options: ScoreOptions, name: str) -> Any:
    """Convert a model, a scorer or a wrapper to the form that the transforms accept."""
    if isinstance(model, LogProbScorer):
        _check_same_settings(model, options, name)
        if model.options.adapters is not True:
            adapters = model.options.adapters
            raise ValueError(f"{name} has adapters={adapters!r} of another model than the actor's: pass the model.")
        return model.model
    return _WrappedModel(model) if is_wrapper(model) and unwrap(model) is not None else model


def _reference_to_score(actor: object, reference: Reference | None, options: ScoreOptions) -> Reference | None:
    """The reference in the form that the transforms accept. ``"base"`` is the actor's model with other or no adapters."""
    if (
        isinstance(reference, LogProbScorer)
        and reference.options.adapters is not True
        and inner_module(reference) is inner_module(actor)
    ):
        _check_same_settings(reference, options, "reference")
        return "base"
    return _to_score(reference, options, "reference")


def _loss_reference(actor: object, reference: Reference | None, options: ScoreOptions) -> Model | LogProbScorer | None:
    """The reference in the form that a loss accepts, for an exact KL or mismatched answers. None if there is no model."""
    if not isinstance(reference, str):
        return reference
    plain = options.but(sampling=options.sampling.of_reference, adapters=False)
    return LogProbScorer(cast(nn.Module, inner_module(actor)), plain) if reference == "base" else None


def _check_same_settings(scorer: LogProbScorer, options: ScoreOptions, name: str) -> None:
    """Raise a ValueError if the KL would compare log-probs of two temperatures or two precisions."""
    for setting in ("temperature", "dtype", "deterministic"):
        own, actors = getattr(scorer.options, setting), getattr(options, setting)
        if own != actors:
            raise ValueError(f"{name} is a scorer with {setting}={own}, the actor has {actors}: use one for both.")
