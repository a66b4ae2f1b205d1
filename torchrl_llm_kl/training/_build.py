"""Builds the algorithm of a configuration: the reference model, the KL and its coefficient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, cast

import torch
from torch import nn

from torchrl_llm_kl.advantages import advantage_spec
from torchrl_llm_kl.algorithms import Algorithm, AlgorithmParts, apply_overrides, get_algorithm, make_algorithm
from torchrl_llm_kl.estimators import (
    EstimatorName,
    as_coefficient,
    available_estimators,
    get_controller,
    get_estimator,
)
from torchrl_llm_kl.losses import ImportanceWeights, available_objectives, get_objective, objective, spec_of
from torchrl_llm_kl.scoring import ByteTeacher, Model, ReferenceUpdater, Sampling, ScoreOptions, TokenCritic
from torchrl_llm_kl.training._config import ConfigError, TrainConfig, refuse
from torchrl_llm_kl.training._models import ModelError, chat_tokenizer, load_model, load_tokenizer
from torchrl_llm_kl.training._user_code import FUNCTIONS_OF_ALGORITHM, imported_function, is_place
from torchrl_llm_kl.transforms import RetrieveKL

Reference = Model | Literal["base"]
#: The log-probs of the weights that sampled, in data after a step of the env.
BEHAVIOR = ("next", "behavior_log_probs", "full")

#: Fields of a preset -> the settings that a configuration has for them.
_OWN_SETTINGS = {
    "max_len": "sampler.max_new_tokens",
    "kl_loss_coeff": "kl.coefficient",
    "kl_reward_coeff": "kl.coefficient",
    "kl_loss": "kl.place and kl.estimator",
    "kl_reward": "kl.place and kl.estimator",
}
#: Schemas of data that a run cannot provide -> the reason.
_NEEDS_MORE = {
    **dict.fromkeys(("sft", "dpo", "unpaired"), "learns from given answers and needs no rewards"),
    "mix": "trains on answers of experts beside the policy's own",
    "trajectory": "compares the turns of conversations",
    "rewards": "scales several rewards separately, and a run has their sum",
}

# ------------------------------------------------------------------ the reference


def sampling_of(config: TrainConfig) -> Sampling:
    """The distribution from which answers are sampled.

    Example:
        >>> sampling_of(config)  # doctest: +SKIP
    """
    sampler = config.sampler
    return Sampling(sampler.temperature, top_k=sampler.top_k, top_p=sampler.top_p, min_p=sampler.min_p)


def load_reference(config: TrainConfig) -> Reference | None:
    """Load the reference of a run: a frozen model, a service's model, or ``"base"`` for the policy without its adapters.

    Args:
        config: the settings of the run.

    Returns:
        The reference. None if the run has no reference, or a teacher takes its place.

    Example:
        >>> reference = load_reference(config)  # doctest: +SKIP
    """
    settings = config.reference
    # `AlgorithmPlan.build` loads the teacher.
    if settings.name == "none" or config.algorithm.teacher is not None:
        return None
    if settings.service is None and config.starts_from_base:
        return "base"
    name = config.model.name if settings.name == "start" else settings.name
    if Path(name).is_dir():
        name = str(Path(name).resolve())  # the service, and other runs that share it, may run in other folders
    load = partial(load_model, name, dtype=config.model.dtype, attention=config.model.attention)
    if settings.service is None:
        return load(device=config.model.device)
    from torchrl_llm_kl.service import ScoringService

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    has_gpu = accelerator is not None and accelerator.type in ("cuda", "xpu")  # the types that Ray counts as GPUs
    return ScoringService(factory=load, name=settings.service, num_gpus=float(has_gpu)).model


# ------------------------------------------------------------------ the algorithm


@dataclass(frozen=True, eq=False)
class AlgorithmPlan:
    """The algorithm of a configuration before its models are loaded. :func:`plan_algorithm` makes it.

    Args:
        config: the settings of the run.
        algorithm: the preset with the changes of the configuration.
        coefficient: the coefficient of the KL. None if no KL is charged.
    """

    config: TrainConfig
    algorithm: Algorithm
    coefficient: nn.Module | None

    @property
    def distils(self) -> bool:
        """Whether the reference is a teacher."""
        return self.algorithm.schema == "distill"

    def build(
        self,
        policy: nn.Module,
        reference: Reference | None,
        *,
        shard: Callable[[nn.Module], object] | None = None,
    ) -> tuple[AlgorithmParts, RetrieveKL | None, ReferenceUpdater | None]:
        """Bind the algorithm to its models.

        Args:
            policy: the model that is trained.
            reference: the result of :func:`load_reference`.

        Keyword Args:
            shard: shards each model over the ranks, in place.

        Returns:
            The algorithm with its models, the transform that scores the answers in the env (None without a reference), and the
            updater of the reference (None for a fixed reference).
        """
        config, critic, moved = self.config, None, reference
        if self.distils:
            teacher = load_model(str(config.algorithm.teacher), dtype="auto", device=config.model.device)
            reference = _over_own_tokens(config, teacher)
        if self.algorithm.use_critic:  # its body starts from the policy's weights before training
            body = load_model(config.model.name, dtype=config.model.dtype, device=config.model.device)
            critic = TokenCritic(body.requires_grad_(True))
        parts = self._bind(policy, reference, critic)
        for model in (policy, reference, critic):
            if shard is not None and isinstance(model, nn.Module):
                shard(model)
        kl = parts.kl_transform
        if not isinstance(kl, RetrieveKL):
            kl = None if reference is None or self.distils else measured_kl(config, policy, reference)
        about, updater = config.reference, None
        if about.moves:
            assert isinstance(moved, nn.Module)
            updater = ReferenceUpdater(
                moved, policy, decay=about.decay, every=about.every, reset_every=about.reset_every
            )
        return parts, kl, updater

    def check(self, policy: nn.Module, reference: nn.Module) -> None:
        """Bind the algorithm to models without weights, which raises its errors before weights are loaded.

        Args:
            policy: a model on the meta device.
            reference: another model on the meta device, which stands for the reference or the teacher.

        Raises:
            ConfigError: if the algorithm does not accept the models or its settings.
        """
        critic = TokenCritic(copy.deepcopy(policy)) if self.algorithm.use_critic else None
        try:
            self._bind(policy, _over_own_tokens(self.config, reference) if self.distils else reference, critic)
        except (TypeError, ValueError, KeyError) as error:
            args = self.config.algorithm.args
            given = f"algorithm.args is {args}" if args else f"algorithm.name is {self.algorithm.name}"
            raise ConfigError(f"{given}: {error}") from error

    @property
    def corrects(self) -> bool:
        """Whether the loss corrects for the difference between the sampler's log-probs and the trainer's."""
        config = self.config
        differs = config.sampler.is_server or config.algorithm.max_staleness > 0
        return differs and config.sampler.max_weight is not None and not self.distils

    def _bind(self, policy: nn.Module, reference: Reference | None, critic: TokenCritic | None) -> AlgorithmParts:
        charged, limit = self.coefficient is not None, self.config.sampler.max_weight
        corrections = [ImportanceWeights(high=limit)] if self.corrects and limit is not None else []
        parts = make_algorithm(
            self.algorithm,
            policy,
            reference=reference if charged or self.distils else None,
            critic=critic,
            group_key="group" if self.algorithm.compares_answers else None,
            options=ScoreOptions(sampling_of(self.config)),
            loss_args={"corrections": corrections} if corrections else None,
        )
        if self.config.algorithm.exact_old:
            parts.loss.set_keys(old_log_prob=BEHAVIOR)
        return parts


def _over_own_tokens(config: TrainConfig, teacher: nn.Module) -> Model:
    """The teacher as a distribution over the student's tokens, if it has another tokenizer."""
    own = chat_tokenizer(config.model.tokenizer or config.model.name, config.model.template)
    name = str(config.algorithm.teacher)
    try:
        theirs = load_tokenizer(name)
    except ModelError:
        if Path(name).is_dir():  # a folder with only weights has the student's tokenizer
            return teacher
        raise
    if own.get_vocab() == theirs.get_vocab():
        return teacher
    # The signatures of tools have no counterpart in another template, and plain text shows no roles.
    has_roles = config.model.template != "plain" and (config.turns is None or not config.turns.tools)
    translated = has_roles and theirs.chat_template not in (None, own.chat_template)
    return ByteTeacher(teacher, theirs, own, prompt="template" if translated else None)


def measured_kl(
    config: TrainConfig, policy: nn.Module, reference: Model | str, estimator: EstimatorName = "k1"
) -> RetrieveKL:
    """A transform that measures the KL without charging it.

    Example:
        >>> kl = measured_kl(config, policy, reference)  # doctest: +SKIP
    """
    options = ScoreOptions(sampling_of(config))
    # "direct", also inside a service scope: a copy of the policy in a service would keep its first weights.
    return RetrieveKL(
        policy, reference, add_to_reward=False, options=options, service_backend="direct", estimator=estimator
    )


def plan_algorithm(config: TrainConfig) -> AlgorithmPlan:
    """Plan the algorithm of a configuration.

    Raises:
        ConfigError: if a run cannot train with the algorithm or its settings. The message gives the reason.

    Example:
        >>> from torchrl_llm_kl.training import read_config
        >>> source = {"model": {"name": "m"}, "data": {"prompts": "p.jsonl"}, "reward": "r.py:f", "algorithm": {"name": "dpo"}}
        >>> plan_algorithm(read_config(source))
        Traceback (most recent call last):
        ...
        torchrl_llm_kl.training._config.ConfigError: algorithm.name is dpo, which learns from given answers and needs...
    """
    name, kl, about, teacher = config.algorithm.name, config.kl, config.reference, config.algorithm.teacher
    preset = get_algorithm(name)  # type: ignore[arg-type]
    distils = preset.schema == "distill"
    lacks, own = _NEEDS_MORE.get(preset.schema), [key for key in config.algorithm.args if key in _OWN_SETTINGS]
    charges = kl.place in ("loss", "reward") or kl.target or about.service or about.moves
    estimators = _estimators(config, preset)
    penalised = bool(kl.target or kl.coefficient or kl.estimator)
    turns, by_turn, mixes = config.turns, preset.schema == "trajectory", preset.schema == "mix"
    experts, exact = config.data.experts, config.algorithm.exact_old
    on_policy = not config.algorithm.max_staleness or "old_log_prob" not in spec_of(preset.objective).needs
    each = turns is not None and turns.reward == "each" and preset.advantage == "step_wise_grpo"
    refuse(
        (by_turn and turns is None, f"algorithm.name is {name}, which {lacks}: set turns, or choose another."),
        (each, f"{name} ignores the rewards of earlier answers: set turns.reward=last, or choose gigpo."),
        (mixes and not experts, f"algorithm.name is {name}, which {lacks}: set data.experts, or choose another."),
        (experts and not mixes, f"{name} trains on no answers of experts: choose mix, or leave data.experts out."),
        (
            lacks and not (by_turn or mixes),
            f"algorithm.name is {name}, which {lacks}: choose another, or write the loop with make_algorithm.",
        ),
        (
            exact and on_policy,
            "algorithm.exact_old needs algorithm.max_staleness above 0 and an objective with old log-probs, such as ppo.",
        ),
        (
            "age" in spec_of(preset.objective).needs
            and not (config.algorithm.max_staleness or config.sampler.is_server),
            f"{name} reads the age of answers, and here all are new: set algorithm.max_staleness, or choose another.",
        ),
        *((True, f"algorithm.args has {key}: set {_OWN_SETTINGS[key]} instead.") for key in own),
        (distils and not teacher, f"algorithm.name is {name}: set algorithm.teacher to the folder or name of a model."),
        (teacher and not distils, f"{name} has no teacher: leave algorithm.teacher out, or choose on_policy_distill."),
        (distils and charges, f"{name} has a teacher as its reference: leave kl and reference settings out."),
        (penalised and not estimators, f"{name} has no KL penalty: set kl.place, or leave the other kl settings out."),
        (estimators and about.name == "none", f"{name} charges a KL: set reference.name=start, or kl.place=none."),
    )
    coefficient = None
    if estimators:
        coefficient = _coefficient(config, getattr(preset, f"{next(iter(estimators))}_coeff"))
    # The configuration decides where the KL is charged, so both places of the preset are cleared first.
    changes: dict[str, object] = {"kl_loss": "none", "kl_reward": "none", **estimators}
    changes |= {f"{place}_coeff": coefficient for place in estimators}
    changes |= {key: _registered(key, value) for key, value in config.algorithm.args.items()}
    if by_turn:  # the entries of make_env
        more = cast(dict[str, object], changes.get("advantage_args") or {})
        changes["advantage_args"] = {"keys": {"run": "run", "step": "step"}, **more}
    try:
        if apply_overrides(preset, changes).summed == "seq-mean-token-sum-norm":
            # This aggregation divides by the largest number of sampled tokens in a row.
            answers = 1 if turns is None or by_turn else turns.max
            changes["max_len"] = answers * config.sampler.max_new_tokens
        algorithm = apply_overrides(preset, changes)
        algorithm.check_group_size(config.data.group_size, name="data.group_size")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"algorithm.args is {config.algorithm.args}: {error}") from error
    return AlgorithmPlan(config, algorithm, coefficient)


def _registered(key: str, value: object) -> object:
    """A value of ``algorithm.args``. A function in the user's code is replaced by its registered name."""
    if key not in FUNCTIONS_OF_ALGORITHM or not is_place(value):
        return value
    place = str(value)
    function = imported_function(place)
    if key == "advantage":
        return advantage_spec(function).name
    name = spec_of(function).name
    if name in available_objectives() and get_objective(name) is function:
        return name
    if place not in available_objectives():
        objective(place)(function)  # a function that the user's code did not register
    return place


def _estimators(config: TrainConfig, preset: Algorithm) -> dict[str, object]:
    """The estimator at each place where a KL is charged, ``kl_loss`` and ``kl_reward``."""
    kl, places = config.kl, {"kl_loss": preset.kl_loss, "kl_reward": preset.kl_reward}
    if kl.place != "preset":
        usual: dict[str, EstimatorName] = {"loss": "k2", "reward": "k1"}
        places = {f"kl_{place}": estimator for place, estimator in usual.items() if place == kl.place}
    own: object = kl.estimator
    if is_place(own):
        function = imported_function(str(own))
        # A registered function has a name, which the algorithm shows in its settings.
        names = (name for name in available_estimators() if get_estimator(name) is function)
        own = next(names, function)
    elif own is not None:
        get_estimator(cast(EstimatorName, own))  # raises an error for an unknown name
    return {place: own or estimator for place, estimator in places.items() if estimator != "none"}


def _coefficient(config: TrainConfig, usual: float) -> nn.Module:
    """The coefficient of a KL. It is adaptive with a target, otherwise the number of the configuration or the preset."""
    kl = config.kl
    if kl.target is None:
        return as_coefficient(usual if kl.coefficient is None else kl.coefficient)
    if kl.coefficient == 0:  # controllers multiply the coefficient, so 0 would stay 0
        raise ConfigError(
            "kl.coefficient is 0, from which it cannot adapt to kl.target: set it above 0, or leave it out."
        )
    settings: dict[str, object] = {"init": 0.1 if kl.coefficient is None else kl.coefficient, "target": kl.target}
    if kl.controller == "ziegler":  # it then changes by at most 10 % per step: 0.2 * n / horizon
        settings["horizon"] = 2 * config.data.num_prompts * config.data.group_size
    try:
        own = imported_function(kl.controller) if is_place(kl.controller) else get_controller(kl.controller)
        return own(**{**settings, **kl.controller_args})
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"kl.controller is {kl.controller}, kl.controller_args {kl.controller_args}: {error}"
        ) from error
