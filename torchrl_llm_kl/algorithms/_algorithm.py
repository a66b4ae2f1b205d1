"""An algorithm: a name for choices that belong together, and how to change some of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from torch import Tensor, nn

from torchrl_llm_kl._numerics import check_choice, check_range
from torchrl_llm_kl._registry import did_you_mean
from torchrl_llm_kl.advantages import AdvantageArgs, AdvantageName, advantage_spec, get_advantage
from torchrl_llm_kl.algorithms._schema import SCHEMAS, SchemaName
from torchrl_llm_kl.estimators import AdaptiveKLCoefficient, EstimatorName
from torchrl_llm_kl.losses import Aggregation, ObjectiveArgs, ObjectiveName, get_objective, spec_of

Coefficient = float | Tensor | nn.Module


@dataclass(frozen=True)
class Algorithm:
    """A preset: which objective, which advantage, where the KL goes.

    Each default of :data:`ALGORITHMS` that differs from the defaults here has its source in :attr:`sources`.

    Args:
        name: the algorithm's name.
        objective: a name of :func:`~torchrl_llm_kl.losses.get_objective`.
        objective_args: its hyper-parameters, where they differ from its own defaults.
        advantage: a name of :func:`~torchrl_llm_kl.advantages.get_advantage`; None if the objective needs no advantage.
        advantage_args: its hyper-parameters, where they differ from its own defaults.
        aggregation: how terms are summed over tokens; None for the objective's own way.
        kl_loss: the estimator of the KL to the reference in the loss; ``"none"`` for no KL.
        kl_loss_coeff: its weight: a number, a tensor or a coefficient module.
        kl_reward: the estimator of the KL to the reference in the reward; ``"none"`` for no KL.
        kl_reward_coeff: its weight.
        entropy_coeff: weight of the entropy bonus.
        leave_out_experts: restrict KL and entropy to what the policy sampled.
        keep_best: train on the best answers of each group alone.
        repeat_times: answers per prompt.
        expert_data_ratio: the share of experts' answers in a batch, for the schema ``"mix"``.
        schema: what the data holds, a name of :data:`SCHEMAS`.
        compute_advantage_in_trainer: whether advantages need the trainer's whole batch, or what the trainer scores; otherwise
            they can be computed where a group is collected. A fact for trainers (Trinity-RFT's flag).
        use_reference: score the reference model. None: if the KL, or the objective, needs it. True without such a need logs
            ``kl_to_ref`` alone.
        use_critic: train a critic of token values. None: if the advantage needs values.
        sources: field -> where its value comes from.

    Raises:
        ValueError: if a value is out of range, or ``use_reference=False`` contradicts a KL.
        TypeError: if a coefficient is no number, tensor or module.

    Example:
        >>> mine = Algorithm("mine", objective="cispo", advantage="rloo", kl_reward="k1", kl_reward_coeff=0.05)
        >>> mine.use_reference, mine.use_critic
        (True, False)
    """

    name: str
    objective: ObjectiveName
    objective_args: ObjectiveArgs = field(default_factory=ObjectiveArgs)
    advantage: AdvantageName | None = None
    advantage_args: AdvantageArgs = field(default_factory=AdvantageArgs)
    aggregation: Aggregation | None = None
    kl_loss: EstimatorName = "none"
    kl_loss_coeff: Coefficient = 1e-3
    kl_reward: EstimatorName = "none"
    kl_reward_coeff: Coefficient = 1e-3
    entropy_coeff: Coefficient = 0.0
    leave_out_experts: bool = False
    keep_best: bool = False
    repeat_times: int = 1
    expert_data_ratio: float = 0.5
    schema: SchemaName = "experience"
    compute_advantage_in_trainer: bool = False
    use_reference: bool = None  # type: ignore[assignment]  # filled in by __post_init__
    use_critic: bool = None  # type: ignore[assignment]
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice(tuple(SCHEMAS), schema=self.schema)
        check_range(1, repeat_times=self.repeat_times)
        check_range(0, 1, expert_data_ratio=self.expert_data_ratio)
        for name in ("kl_loss_coeff", "kl_reward_coeff", "entropy_coeff"):
            _check_coefficient(name, getattr(self, name), low=-math.inf if name == "entropy_coeff" else 0.0)
        for name, needed in self.derived.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, needed)
        if not self.use_reference and self.derived["use_reference"]:
            raise ValueError(
                f"{self.name} compares with a reference (kl_loss={self.kl_loss!r}, kl_reward={self.kl_reward!r}, "
                f"objective={self.objective!r}) but use_reference=False: set use_reference=True, or kl_loss and kl_reward to "
                "'none'."
            )

    @property
    def derived(self) -> dict[str, bool]:
        """``use_reference`` and ``use_critic`` as they follow from the other fields."""
        spec = spec_of(get_objective(self.objective))
        reads_reference = spec is not None and "ref_log_prob" in spec.needs
        needs = () if self.advantage is None else advantage_spec(get_advantage(self.advantage)).needs
        return {
            "use_reference": self.kl_loss != "none" or self.kl_reward != "none" or reads_reference,
            "use_critic": "value" in needs,
        }

    @property
    def changed(self) -> dict[str, Any]:
        """The fields that differ from the defaults of this class, but for name, sources and what is derived."""
        plain, given = Algorithm(self.name, self.objective), {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in ("name", "sources", *self.derived) and value != getattr(plain, f.name):
                given[f.name] = value
        return given | {
            name: getattr(self, name) for name, value in self.derived.items() if getattr(self, name) != value
        }

    # Facts that trainers ask for, as in Trinity-RFT.

    @property
    def sample_strategy(self) -> Literal["default", "mix"]:
        """``"mix"`` if batches hold rollouts and experts' answers, see :func:`mix_buffers`."""
        return "mix" if self.schema == "mix" else "default"

    @property
    def use_rollout(self) -> bool:
        """Whether fresh rollouts are needed beside experts' answers."""
        return self.schema == "mix"

    @property
    def can_balance_batch(self) -> bool:
        """Whether rows may be moved between micro-batches and ranks one by one; False for pairs."""
        return not SCHEMAS[self.schema].paired

    @property
    def on_policy(self) -> bool:
        """Whether it learns from answers of the policy itself."""
        return self.schema not in ("sft", "dpo")

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model, or the teacher of a distillation, is scored."""
        return self.use_reference or self.schema == "distill"


def _check_coefficient(name: str, value: Any, *, low: float) -> None:
    if isinstance(value, (Tensor, nn.Module)):  # reading one would stall an accelerator
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, a tensor or a coefficient module, got {value!r}.")
    if not math.isfinite(value) or value < low:
        at_least = "" if low == -math.inf else f" of at least {low:g}"
        raise ValueError(f"{name} must be a finite number{at_least}, got {value}.")


# ------------------------------------------------------------------ overrides


class AlgorithmOverrides(ObjectiveArgs, AdvantageArgs, total=False):
    """What :func:`make_algorithm` takes to change a preset.

    Fields of :class:`Algorithm`, hyper-parameters of its objective or advantage, and the keys of Trinity-RFT's ``algorithm``
    section.
    """

    objective: ObjectiveName
    objective_args: ObjectiveArgs
    advantage: AdvantageName | None
    advantage_args: AdvantageArgs
    aggregation: Aggregation | None
    kl_loss: EstimatorName
    kl_loss_coeff: Coefficient
    kl_reward: EstimatorName
    kl_reward_coeff: Coefficient
    entropy_coeff: Coefficient
    leave_out_experts: bool
    keep_best: bool
    repeat_times: int
    expert_data_ratio: float
    schema: SchemaName
    compute_advantage_in_trainer: bool
    use_reference: bool
    use_critic: bool
    # Trinity-RFT's keys.
    algorithm_type: str
    policy_loss_fn: ObjectiveName
    policy_loss_fn_args: Mapping[str, Any] | None
    advantage_fn: AdvantageName
    advantage_fn_args: Mapping[str, Any] | None
    kl_loss_fn: EstimatorName
    kl_loss_fn_args: Mapping[str, Any] | None
    kl_penalty_fn: EstimatorName
    kl_penalty_fn_args: Mapping[str, Any] | None
    loss_agg_mode: Aggregation
    entropy_loss_fn: Literal["none", "default", "mix"]
    entropy_loss_fn_args: Mapping[str, Any] | None
    sample_strategy: Literal["default", "mix"]
    sample_strategy_args: Mapping[str, Any] | None


_FIELDS = tuple(f.name for f in fields(Algorithm) if f.name not in ("name", "sources"))
_FACTS = ("sample_strategy", "use_rollout", "can_balance_batch", "on_policy")
# Trinity's name -> the field, where the value is the same.
_RENAMED = {
    "policy_loss_fn": "objective",
    "advantage_fn": "advantage",
    "kl_loss_fn": "kl_loss",
    "kl_penalty_fn": "kl_reward",
    "loss_agg_mode": "aggregation",
}
_ARGS = {"policy_loss_fn_args": "objective_args", "advantage_fn_args": "advantage_args"}
_KL_ARGS = {"kl_loss_fn_args": "kl_loss_coeff", "kl_penalty_fn_args": "kl_reward_coeff"}
_SAME = {**_RENAMED, **_KL_ARGS, "entropy_loss_fn_args": "entropy_coeff", "sample_strategy_args": "expert_data_ratio"}


def apply_overrides(algorithm: Algorithm, overrides: Mapping[str, Any]) -> Algorithm:
    """A preset with some values changed; see :class:`AlgorithmOverrides`.

    ``objective_args`` and ``advantage_args`` add to those of the preset. ``use_reference`` and ``use_critic`` follow from the
    changed fields, unless they are given.

    Raises:
        TypeError: if there is no such name, or objective and advantage both have it, or a setting is given under two names.
        ValueError: if a value of Trinity's cannot be honoured.
    """
    for other, own in _SAME.items():
        if other in overrides and own in overrides:
            raise TypeError(f"{other!r} and {own!r} are the same setting: pass one of them.")
    changes: dict[str, Any] = {}
    args: dict[str, dict[str, Any]] = {"objective_args": {}, "advantage_args": {}}
    loose: dict[str, Any] = {}
    for name, value in overrides.items():
        if name in _FIELDS and name not in args:
            changes[name] = value
        elif name in _RENAMED:
            changes[_RENAMED[name]] = value
        elif name in args or name in _ARGS:
            args[_ARGS.get(name, name)] |= dict(value or {})
        elif name in _KL_ARGS:
            changes[_KL_ARGS[name]] = _coefficient(value or {})
        elif name == "sample_strategy_args":
            changes |= _sampling(value)
        elif name not in ("algorithm_type", "entropy_loss_fn", "entropy_loss_fn_args", *_FACTS):
            loose[name] = value
    if "loss_agg_mode" in args["objective_args"]:  # Trinity has it among the objective's
        changes["aggregation"] = args["objective_args"].pop("loss_agg_mode")
    changes = _with_entropy(changes, overrides)
    for part in ("objective", "advantage"):  # another one has other hyper-parameters
        if part in changes and changes[part] != getattr(algorithm, part):
            changes.setdefault(f"{part}_args", {})
    for name, value in algorithm.derived.items():
        if getattr(algorithm, name) == value:
            changes.setdefault(name, None)
    changed = replace(algorithm, **changes)
    _check_facts(changed, overrides)
    for name, value in loose.items():
        args[_owner(changed, name)][name] = value
    merged: dict[str, Any] = {name: {**getattr(changed, name), **more} for name, more in args.items()}
    return replace(changed, **merged)


def _coefficient(args: Mapping[str, Any]) -> Any:
    """Trinity's ``{adaptive, kl_coef, target_kl, horizon}``."""
    given = _known("a KL", args, "adaptive", "kl_coef", "target_kl", "horizon")
    value = given.get("kl_coef", 1e-3)
    if not given.get("adaptive"):
        return value
    if given.get("target_kl") is None or given.get("horizon") is None:
        raise ValueError("an adaptive KL coefficient needs target_kl and horizon.")
    return AdaptiveKLCoefficient(value, target=given["target_kl"], horizon=given["horizon"])


def _sampling(args: Mapping[str, Any] | None) -> dict[str, Any]:
    given = _known("sample_strategy_args", args, "expert_data_ratio", "sft_dataset_name")
    if "sft_dataset_name" in given:
        warnings.warn("sft_dataset_name has no effect here: mix_buffers takes the experts' buffer.", stacklevel=4)
    return {name: given[name] for name in ("expert_data_ratio",) if name in given}


def _with_entropy(changes: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Trinity's two keys for the entropy; ``"none"`` is none, whatever the coefficient."""
    changes = dict(changes)
    if "entropy_loss_fn_args" in overrides:
        given = _known("entropy_loss_fn_args", overrides["entropy_loss_fn_args"], "entropy_coef")
        changes["entropy_coeff"] = given.get("entropy_coef", 0.0)
    if "entropy_loss_fn" not in overrides:
        return changes
    name = overrides["entropy_loss_fn"]
    if name not in ("none", "default", "mix"):
        raise ValueError(f"unknown entropy_loss_fn {name!r}; known: none, default, mix.")
    if name == "none":
        changes["entropy_coeff"] = 0.0
    if name == "mix":
        changes.setdefault("leave_out_experts", True)
    return changes


def _known(name: str, given: Mapping[str, Any] | None, *known: str) -> Mapping[str, Any]:
    unknown = sorted(set(given or {}) - set(known))
    if unknown:
        raise TypeError(f"{name} has no argument {unknown[0]!r}; it has {', '.join(known)}.")
    return given or {}


def _check_facts(algorithm: Algorithm, overrides: Mapping[str, Any]) -> None:
    """Facts follow from the preset; one that is given must agree with it."""
    kind = overrides.get("algorithm_type")
    if kind is not None and str(kind).replace("_", "") != algorithm.name.replace("_", ""):  # Trinity: reinforceplusplus
        raise ValueError(f"algorithm_type={kind!r} is another algorithm than {algorithm.name!r}.")
    for name in _FACTS:
        if name in overrides and overrides[name] != getattr(algorithm, name):
            raise ValueError(
                f"{name}={overrides[name]!r} cannot be set: it is {getattr(algorithm, name)!r} for {algorithm.name}, whose "
                f"schema is {algorithm.schema!r}."
            )


def _owner(algorithm: Algorithm, name: str) -> str:
    """Whether a hyper-parameter is the objective's or the advantage's."""
    spec = spec_of(get_objective(algorithm.objective))
    assert spec is not None
    objective = spec.hyperparameters.accepted
    advantage: tuple[str, ...] = ()
    if algorithm.advantage is not None:
        found = advantage_spec(get_advantage(algorithm.advantage))
        advantage = (*found.hyper, *found.aliases, *found.obsolete, *found.refused)
    if name in objective and name in advantage:
        raise TypeError(
            f"{name!r} is a hyper-parameter of the objective {algorithm.objective} and of the advantage "
            f"{algorithm.advantage}: say objective_args={{{name!r}: ...}} or advantage_args={{{name!r}: ...}}."
        )
    if name in objective:
        return "objective_args"
    if name in advantage:
        return "advantage_args"
    raise TypeError(
        f"{algorithm.name} has no setting {name!r}. Settings: {', '.join(_FIELDS)}; of the objective: "
        f"{', '.join(objective) or 'none'}; of the advantage: {', '.join(advantage) or 'none'}."
        f"{did_you_mean(name, [*_FIELDS, *objective, *advantage])}"
    )
