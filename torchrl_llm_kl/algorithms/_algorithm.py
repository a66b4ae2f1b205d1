"""An algorithm: a named preset, and its overrides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Generic, Literal, TypeVar, cast

from torch import Tensor, nn

from torchrl_llm_kl._foreign import foreign_hint
from torchrl_llm_kl._numerics import check_choice, check_range
from torchrl_llm_kl._registry import did_you_mean
from torchrl_llm_kl.advantages import AdvantageArgs, AdvantageName, advantage_spec
from torchrl_llm_kl.algorithms._schema import SCHEMAS, SchemaName
from torchrl_llm_kl.estimators import EstimatorName, check_penalty
from torchrl_llm_kl.losses import Aggregation, ObjectiveArgs, ObjectiveName, spec_of

T = TypeVar("T")
Settings = Mapping[str, object]
Coefficient = float | Tensor | nn.Module
#: Place of a KL -> its estimator where only the weight is given: the mean gradient there is the reverse KL's.
USUAL_ESTIMATORS: Mapping[str, EstimatorName] = {"kl_loss": "k2", "kl_reward": "k1"}


@dataclass(frozen=True)
class Algorithm:
    """A preset of an objective, an advantage and the placement of the KL.

    Args:
        name: the algorithm's name.
        objective: a name of :func:`~torchrl_llm_kl.losses.get_objective`.
        objective_args: its hyper-parameters, where they differ from its own defaults.
        advantage: a name of :func:`~torchrl_llm_kl.advantages.get_advantage`; None if the objective needs no advantage.
        advantage_args: its hyper-parameters, where they differ from its own defaults.
        aggregation: how terms are summed over tokens; None for the objective's own way.
        max_len: length limit of the sampler in tokens, for aggregations that divide by it.
        kl_loss: estimator of the KL to the reference in the loss, or a function of the same signature; ``"none"`` for no KL.
        kl_loss_coeff: its weight: a number, a tensor or a coefficient module. Given to :func:`make_algorithm` for a preset
            without this KL, it adds one with the estimator ``"k2"``.
        kl_reward: estimator of the KL to the reference in the reward; ``"none"`` for no KL. Something must read the reward: the
            advantage, or ``keep_best``.
        kl_reward_coeff: its weight. Given to :func:`make_algorithm` for a preset without this KL, it adds one with the
            estimator ``"k1"``.
        entropy_coeff: weight of the entropy bonus.
        leave_out_experts: restrict KL and entropy to tokens that the policy sampled.
        keep_best: train only on the best answers of each group.
        top_k: distil from this many of the teacher's most probable tokens and "any other token"; 0: from its whole
            distribution, which needs the teacher in this process. For the objective ``"distill"``, and for presets of
            distillation that compare sampled tokens alone (``on_policy_distill``, ``jsd``): given to :func:`make_algorithm`, it
            replaces their objective with ``"distill"``, with ``beta`` 1 or the advantage's, and drops the advantage.
        repeat_times: answers per prompt.
        expert_data_ratio: share of experts' answers in a batch, for the schema ``"mix"``.
        schema: the data's entries, a name of :data:`SCHEMAS`.
        compute_advantage_in_trainer: whether advantages need the trainer's whole batch or its scores; otherwise the collector
            of a group can compute them. Trinity-RFT's flag, for trainers.
        use_reference: score the reference model. None: if the KL or the objective needs it. True without such a need only
            logs ``kl_to_ref``.
        use_critic: train a critic of token values. None: if the advantage needs values.
        sources: field -> source of its value; a preset of this package has one for each value that is not the default.

    Raises:
        ValueError: if a value is out of range or has no effect, or ``use_reference=False`` contradicts a KL.
        TypeError: if a coefficient is not a number, tensor or module.

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
    max_len: int | None = None
    kl_loss: EstimatorName | Callable[..., Tensor] = "none"
    kl_loss_coeff: Coefficient = 1e-3
    kl_reward: EstimatorName = "none"
    kl_reward_coeff: Coefficient = 1e-3
    entropy_coeff: Coefficient = 0.0
    leave_out_experts: bool = False
    keep_best: bool = False
    top_k: int = 0
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
            _check_coefficient(name, getattr(self, name))
        for name, needed in self.derived.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, needed)
        check_rules(_RULES, self)

    @property
    def reads_reward(self) -> bool:
        """Whether something is computed from the reward: by the advantage, or by a user's own if the objective reads one."""
        if self.advantage is None:
            return self.keep_best or "advantage" in spec_of(self.objective).needs
        return self.keep_best or not {"reward", "rewards"}.isdisjoint(advantage_spec(self.advantage).needs)

    @property
    def distils(self) -> bool:
        """Whether the objective reads a teacher's distribution."""
        return "distribution" in spec_of(self.objective).hyper

    @property
    def distribution(self) -> Literal["top_k", "exact"]:
        """What a distillation compares."""
        return "top_k" if self.top_k else "exact"

    @property
    def distils_exactly(self) -> bool:
        """Whether the loss compares whole distributions with a teacher's."""
        return self.distils and not self.top_k

    @property
    def summed(self) -> Aggregation:
        """The aggregation of its terms: its own, or else the objective's."""
        return self.aggregation or spec_of(self.objective).aggregation

    @property
    def derived(self) -> dict[str, bool]:
        """``use_reference`` and ``use_critic`` as they follow from the other fields."""
        reads_reference = "ref_log_prob" in spec_of(self.objective).needs
        needs = () if self.advantage is None else advantage_spec(self.advantage).needs
        return {
            "use_reference": self.kl_loss != "none" or self.kl_reward != "none" or reads_reference,
            "use_critic": "value" in needs,
        }

    @property
    def changed(self) -> dict[str, object]:
        """The fields that differ from their defaults; ``name``, ``objective`` and ``sources`` are left out."""
        plain = Algorithm(self.name, self.objective, sources=self.sources)
        defaults = {f.name: getattr(plain, f.name) for f in fields(self)} | self.derived
        return {name: getattr(self, name) for name, value in defaults.items() if getattr(self, name) != value}

    # Flags for trainers, as in Trinity-RFT.

    @property
    def use_rollout(self) -> bool:
        """Whether batches mix fresh rollouts with experts' answers; see :func:`mix_buffers`."""
        return self.schema == "mix"

    @property
    def can_balance_batch(self) -> bool:
        """Whether rows may be moved between micro-batches and ranks one by one; False for pairs and triples."""
        return not SCHEMAS[self.schema].paired and spec_of(self.objective).together == 1

    @property
    def on_policy(self) -> bool:
        """Whether it trains on the policy's own answers."""
        return self.schema not in ("sft", "dpo", "unpaired")

    @property
    def compares_answers(self) -> bool:
        """Whether an answer is compared with the other answers to its prompt."""
        return self.keep_best or (self.advantage is not None and "group" in advantage_spec(self.advantage).needs)

    def check_group_size(self, size: int | None, *, name: str = "group_size") -> None:
        """Raise a ValueError that begins with ``name`` if answers are compared, in groups of one."""
        if self.compares_answers and size is not None and size < 2:
            raise ValueError(f"{name} is {size}, and {self.name} compares the answers to a prompt: take at least 2.")

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model, or the teacher of a distillation, is scored."""
        return self.use_reference or self.schema == "distill"


_DEFAULTS = {f.name: f.default for f in fields(Algorithm)}


@dataclass(frozen=True)
class Rule(Generic[T]):
    """Settings that contradict one another.

    Args:
        broken: whether a subject breaks the rule.
        message: in the syntax of ``str.format``, with the subject as ``{0}``.
    """

    broken: Callable[[T], bool]
    message: str


def check_rules(rules: Iterable[Rule[T]], subject: T) -> None:
    """Raise a ValueError for the first rule that the subject breaks."""
    for rule in rules:
        if rule.broken(subject):
            raise ValueError(rule.message.format(subject))


def _is_set(coeff: object, usual: object = 0) -> bool:
    """Whether a weight is neither 0 nor the default. A tensor is not read, since that would be a host sync."""
    return isinstance(coeff, (Tensor, nn.Module)) or coeff not in (usual, 0)


_RULES = (
    Rule[Algorithm](
        lambda a: isinstance(a.top_k, bool) or not isinstance(a.top_k, int) or a.top_k < 0,
        "top_k must be a whole number of at least 0, got {0.top_k!r}.",
    ),
    Rule[Algorithm](
        lambda a: bool(a.top_k) and not a.distils,
        "top_k={0.top_k} has no effect on objective={0.objective!r}: choose 'distill', or pass top_k= to make_algorithm with "
        "gkd, on_policy_distill or jsd.",
    ),
    Rule[Algorithm](
        lambda a: a.distils and a.objective_args.get("distribution", a.distribution) != a.distribution,
        "distribution={0.objective_args[distribution]!r} contradicts top_k={0.top_k}: leave it out, it follows from top_k.",
    ),
    Rule[Algorithm](
        lambda a: a.kl_loss == "none" and _is_set(a.kl_loss_coeff, _DEFAULTS["kl_loss_coeff"]),
        "kl_loss_coeff={0.kl_loss_coeff!r} is the weight of a KL, and kl_loss='none' leaves it out: pass kl_loss='k2', or "
        "leave kl_loss_coeff out.",
    ),
    Rule[Algorithm](
        lambda a: a.kl_reward == "none" and _is_set(a.kl_reward_coeff, _DEFAULTS["kl_reward_coeff"]),
        "kl_reward_coeff={0.kl_reward_coeff!r} is the weight of a KL, and kl_reward='none' leaves it out: pass "
        "kl_reward='k1', or leave kl_reward_coeff out.",
    ),
    Rule[Algorithm](
        lambda a: a.kl_reward != "none" and not a.reads_reward,
        "kl_reward={0.kl_reward!r} has no effect: nothing in {0.name} reads the reward that it changes. Leave kl_reward and "
        "kl_reward_coeff out; kl_loss='k2' puts a KL into the loss.",
    ),
    Rule[Algorithm](
        lambda a: a.advantage is None and bool(a.advantage_args),
        "advantage_args={0.advantage_args} has no effect: {0.name} has no advantage. Leave it out.",
    ),
    Rule[Algorithm](
        lambda a: a.derived["use_reference"] and not a.use_reference,
        "{0.name} compares with a reference (kl_loss={0.kl_loss!r}, kl_reward={0.kl_reward!r}, objective={0.objective!r}) but "
        "use_reference=False: set use_reference=True, or kl_loss and kl_reward to 'none'.",
    ),
    Rule[Algorithm](
        lambda a: a.kl_reward != "none" and a.advantage is not None and "rewards" in advantage_spec(a.advantage).needs,
        "kl_reward={0.kl_reward!r} adds the KL to one reward, and {0.advantage} normalises several separately: pass "
        "kl_reward='none', and kl_loss= for a KL in the loss.",
    ),
)


def _check_coefficient(name: str, value: object) -> None:
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
        value = value.item()
    if isinstance(value, (Tensor, nn.Module)):  # reading it would be a host sync
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, a tensor or a coefficient module, got {value!r}.")
    if name != "entropy_coeff":
        check_penalty(**{name: value})
    elif not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}.")


# ------------------------------------------------------------------ overrides

#: Fields that describe the loop around the loss, which nothing here computes with -> where the loop sets them.
_OF_LOOP = {
    "repeat_times": "the sampler draws the answers, and group_size= or group_key= of make_algorithm shows which are compared",
    "expert_data_ratio": "pass it to mix_buffers, which draws the batches",
    "compute_advantage_in_trainer": "it informs a trainer about the preset",
}
#: Fields that make_algorithm takes.
FIELDS = tuple(name for name in _DEFAULTS if name not in ("name", "sources", *_OF_LOOP))


def apply_overrides(preset: Algorithm, overrides: Settings) -> Algorithm:
    """A preset with some fields changed; see :class:`AlgorithmOverrides`.

    ``objective_args`` and ``advantage_args`` are merged into the preset's key by key. ``use_reference`` and ``use_critic``
    follow from the changed fields, unless they are given. The weight of a KL that the preset lacks adds this KL with the
    usual estimator.

    Raises:
        TypeError: for a name that is not a field.
        ValueError: for a setting without an effect.
    """
    for args in ("objective_args", "advantage_args"):
        if not isinstance(overrides.get(args) or {}, Mapping):
            raise TypeError(f"{args} must be a dict of settings, got {overrides[args]!r:.60}.")
    for name in overrides:
        _check_name(preset, name, overrides)
    distilled = _of_top_k(preset, overrides)
    changes: dict[str, object] = {**overrides, **distilled}
    for part in ("objective", "advantage"):
        now, args = getattr(preset, part), f"{part}_args"
        kept = getattr(preset, args) if changes.get(part, now) == now else {}  # another one has other settings
        layers = (kept, distilled.get(args), overrides.get(args))
        changes[args] = {key: value for layer in layers for key, value in cast("Settings", layer or {}).items()}
    for place, usual in USUAL_ESTIMATORS.items():
        coeff = f"{place}_coeff"
        if getattr(preset, place) == "none" and _is_set(changes.get(coeff, 0)):
            changes.setdefault(place, usual)
        elif changes.get(place) == "none":
            changes.setdefault(coeff, _DEFAULTS[coeff])
    for name, value in preset.derived.items():
        if getattr(preset, name) == value:
            changes.setdefault(name, None)
    changed = replace(preset, **changes)  # type: ignore[arg-type]
    _check_flags(preset, changed)
    return changed


def _of_top_k(preset: Algorithm, overrides: Settings) -> dict[str, object]:
    """The changes that make a distillation on sampled tokens one over a teacher's top k."""
    advantage = overrides.get("advantage", preset.advantage)
    if not overrides.get("top_k") or "objective" in overrides or advantage not in ("on_policy_distill", "jsd"):
        return {}
    # The same divergence: the reverse KL, or jsd's own beta.
    default = advantage_spec("jsd").defaults["beta"]
    beta = 1.0 if advantage == "on_policy_distill" else preset.advantage_args.get("beta", default)
    distilled = {"objective": "distill", "objective_args": {"beta": beta}, "advantage": None}
    return {**distilled, "compute_advantage_in_trainer": False}


def _check_flags(preset: Algorithm, changed: Algorithm) -> None:
    """Raise for a changed flag that concerns nothing here; a preset may hold it for changes to come."""
    name = changed.name
    compares = changed.kl_loss != "none" or changed.entropy_coeff != 0
    if changed.leave_out_experts != preset.leave_out_experts and not compares:
        raise ValueError(
            f"leave_out_experts={changed.leave_out_experts} has no effect: {name} has neither a KL in the loss nor an entropy "
            "bonus. Leave it out, or pass kl_loss= or entropy_coeff= too."
        )
    scores_teacher = changed.schema == "distill" and not changed.derived["use_reference"]
    if changed.use_reference > preset.use_reference and scores_teacher:
        raise ValueError(f"use_reference=True has no effect: {name} scores its teacher anyway. Leave it out.")


def _check_name(preset: Algorithm, name: str, overrides: Settings) -> None:
    """Raise unless ``name`` is a field that an override may change; the message says which part has the setting."""
    if name in FIELDS:
        return
    if name in _OF_LOOP:
        raise ValueError(f"{name} has no effect on what make_algorithm builds: {_OF_LOOP[name]}. Leave {name} out.")
    objective = cast("ObjectiveName", overrides.get("objective", preset.objective))
    advantage = cast("AdvantageName | None", overrides.get("advantage", preset.advantage))
    settings = {"objective": spec_of(objective).hyper}
    if advantage is not None:
        settings["advantage"] = advantage_spec(advantage).hyper
    owners = [part for part, names in settings.items() if name in names]
    if owners:
        advice = " or ".join(f"{part}_args={{{name!r}: {overrides[name]!r}}}" for part in owners)
        raise TypeError(f"{name} is a setting of the {' and of the '.join(owners)}: pass {advice}.")
    listed = "".join(f"; of {part}_args: {', '.join(names) or 'none'}" for part, names in settings.items())
    known = [*FIELDS, *(name for names in settings.values() for name in names)]
    hint = foreign_hint(name, FIELDS) or did_you_mean(name, known)
    raise TypeError(f"{preset.name} has no setting {name!r}.{hint} Settings: {', '.join(FIELDS)}{listed}.")
