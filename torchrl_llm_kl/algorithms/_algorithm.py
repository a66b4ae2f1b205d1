"""An algorithm: a named preset, and its overrides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, cast

from torch import Tensor, nn

from torchrl_llm_kl._foreign import foreign_hint
from torchrl_llm_kl._numerics import check_choice, check_range
from torchrl_llm_kl._registry import no_such
from torchrl_llm_kl.advantages import AdvantageArgs, AdvantageName, advantage_spec
from torchrl_llm_kl.algorithms._schema import SCHEMAS, SchemaName
from torchrl_llm_kl.estimators import EstimatorName, check_penalty
from torchrl_llm_kl.losses import Aggregation, KLLevel, ObjectiveArgs, ObjectiveSpec, Terms, spec_of

#: A name of :func:`~torchrl_llm_kl.losses.get_objective`, or a function of the same protocol.
Objective = str | Callable[..., Terms]
Settings = Mapping[str, object]
Coefficient = float | Tensor | nn.Module
#: Place of a KL -> the estimator that is used if only the weight is given. Its mean gradient there is the reverse KL's.
USUAL_ESTIMATORS: Mapping[str, EstimatorName] = {"kl_loss": "k2", "kl_reward": "k1"}


@dataclass(frozen=True)
class Algorithm:
    """A preset of an objective, an advantage and the placement of the KL.

    Args:
        name: the algorithm's name.
        objective: a name of :func:`~torchrl_llm_kl.losses.get_objective`, or a function of the same protocol.
        objective_args: its hyper-parameters, where they differ from its own defaults.
        advantage: a name of :func:`~torchrl_llm_kl.advantages.get_advantage`, or None if the objective needs no advantage.
        advantage_args: its hyper-parameters, where they differ from its own defaults.
        aggregation: how terms are summed over tokens. None uses the aggregation of the objective.
        max_len: length limit of the sampler in tokens, for aggregations that divide by it.
        kl_loss: estimator of the KL to the reference in the loss, or a function of the same signature. ``"none"`` for no KL.
        kl_loss_coeff: weight of that KL: a number, a tensor or a coefficient module. :func:`make_algorithm` adds a KL with
            the estimator ``"k2"`` if the preset has none in the loss.
        kl_level: ``"token"``, or ``"sequence"`` for the KL of whole sequences in the loss. That is unbiased off-policy too, and
            needs ``kl_loss`` ``"exact"``, ``"k1"`` or ``"k3"``. See :func:`~torchrl_llm_kl.losses.terms.kl_to_ref`.
        kl_reward: estimator of the KL to the reference in the reward. ``"none"`` for no KL. The advantage or ``keep_best`` must
            read the reward.
        kl_reward_coeff: weight of that KL. :func:`make_algorithm` adds a KL with the estimator ``"k1"`` if the preset has none
            in the reward.
        entropy_coeff: weight of the entropy bonus.
        leave_out_experts: restrict KL and entropy to tokens that the policy sampled.
        keep_best: train only on the best answers of each group.
        top_k: distil from this many of the teacher's most probable tokens, and "any other token". 0 distils from the whole
            distribution, which needs the teacher in this process. Used by the objective ``"distill"``. The presets
            ``on_policy_distill`` and ``jsd`` compare only sampled tokens. If :func:`make_algorithm` gets ``top_k`` for them, it
            replaces their objective with ``"distill"``, with ``beta`` 1 or the advantage's ``beta``, and drops the advantage.
        repeat_times: answers per prompt.
        expert_data_ratio: share of experts' answers in a batch, for the schema ``"mix"``.
        schema: the data's entries, a name of :data:`SCHEMAS`.
        compute_advantage_in_trainer: whether advantages need the trainer's whole batch or its scores. Otherwise the collector
            of a group can compute them. Trinity-RFT's flag, for trainers.
        use_reference: score the reference model. None: if the KL or the objective needs it. If nothing needs it, True only
            logs ``kl_to_ref``.
        use_critic: train a critic of token values. None: if the advantage needs values.
        sources: field -> source of its value. The presets of this package state one for each value that is not the default.

    Raises:
        ValueError: if a value is out of range or has no effect, or ``use_reference=False`` contradicts a KL.

    Example:
        >>> mine = Algorithm("mine", objective="cispo", advantage="rloo", kl_reward="k1", kl_reward_coeff=0.05)
        >>> mine.use_reference, mine.use_critic
        (True, False)
    """

    name: str
    objective: Objective
    objective_args: ObjectiveArgs = field(default_factory=ObjectiveArgs)
    advantage: AdvantageName | None = None
    advantage_args: AdvantageArgs = field(default_factory=AdvantageArgs)
    aggregation: Aggregation | None = None
    max_len: int | None = None
    kl_loss: EstimatorName | Callable[..., Tensor] = "none"
    kl_loss_coeff: Coefficient = 1e-3
    kl_level: KLLevel = "token"
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
        check_range(0, top_k=self.top_k)
        check_range(1, repeat_times=self.repeat_times)
        check_range(0, 1, expert_data_ratio=self.expert_data_ratio)
        check_range(entropy_coeff=self.entropy_coeff)
        check_penalty(kl_loss_coeff=self.kl_loss_coeff, kl_reward_coeff=self.kl_reward_coeff)
        # None means "as needed". A frozen dataclass can only be completed in this way.
        vars(self).update({name: needed for name, needed in self.derived.items() if vars(self)[name] is None})
        _check_preset(self)

    @property
    def spec(self) -> ObjectiveSpec:
        """The facts about the objective."""
        return spec_of(self.objective)

    @property
    def advantage_inputs(self) -> tuple[str, ...]:
        """The inputs that the advantage requires. Empty if there is no advantage."""
        return () if self.advantage is None else advantage_spec(self.advantage).needs

    @property
    def reads_reward(self) -> bool:
        """Whether the reward is read: by the advantage, by ``keep_best``, or by a user's own code that writes the advantage."""
        of_user = self.advantage is None and "advantage" in self.spec.needs
        return self.keep_best or of_user or not {"reward", "rewards"}.isdisjoint(self.advantage_inputs)

    @property
    def distils(self) -> bool:
        """Whether the objective reads a teacher's distribution."""
        return "distribution" in self.spec.hyper

    @property
    def distribution(self) -> Literal["top_k", "exact"]:
        """Whether a distillation compares the teacher's top k or whole distributions."""
        return "top_k" if self.top_k else "exact"

    @property
    def distils_exactly(self) -> bool:
        """Whether the loss compares whole distributions with a teacher's."""
        return self.distils and not self.top_k

    @property
    def summed(self) -> Aggregation:
        """The aggregation of the terms: the preset's, or the objective's."""
        return self.aggregation or self.spec.aggregation

    @property
    def derived(self) -> dict[str, bool]:
        """``use_reference`` and ``use_critic``, as the other fields require them."""
        reads_reference = "ref_log_prob" in self.spec.needs
        return {
            "use_reference": self.kl_loss != "none" or self.kl_reward != "none" or reads_reference,
            "use_critic": "value" in self.advantage_inputs,
        }

    # Flags for trainers, as in Trinity-RFT.

    @property
    def use_rollout(self) -> bool:
        """Whether batches mix fresh rollouts with experts' answers, as :func:`mix_buffers` does."""
        return self.schema == "mix"

    @property
    def can_balance_batch(self) -> bool:
        """Whether single rows may move between micro-batches and ranks. False for pairs and triples."""
        return not SCHEMAS[self.schema].paired and self.spec.together == 1

    @property
    def on_policy(self) -> bool:
        """Whether it trains on the policy's own answers."""
        return self.schema not in ("sft", "dpo", "unpaired")

    @property
    def compares_answers(self) -> bool:
        """Whether an answer is compared with the other answers to its prompt."""
        return self.keep_best or "group" in self.advantage_inputs

    def check_group_size(self, size: int | None, *, name: str = "group_size") -> None:
        """Raise a ValueError if the algorithm compares answers and ``size`` is 1. ``name`` is the argument's name."""
        if self.compares_answers and size is not None and size < 2:
            raise ValueError(f"{name} is {size}, and {self.name} compares the answers to a prompt: use at least 2.")

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model, or the teacher of a distillation, is scored."""
        return self.use_reference or self.schema == "distill"


_DEFAULTS = {f.name: f.default for f in fields(Algorithm)}


def _is_set(coeff: object, usual: object = 0) -> bool:
    """Whether a weight is neither 0 nor the default. Tensors count as set, since reading one could be a host sync."""
    return isinstance(coeff, (Tensor, nn.Module)) or coeff not in (usual, 0)


def refuse(name: str, cases: Iterable[tuple[bool, str]]) -> None:
    """Raise a ValueError with the reason of the first case that holds."""
    for holds, reason in cases:
        if holds:
            raise ValueError(f"{name}: {reason}.")


def _check_preset(a: Algorithm) -> None:
    """Raise a ValueError for settings that contradict each other, or that have no effect."""
    charges, several = a.kl_reward != "none", "rewards" in a.advantage_inputs
    cases = [
        (bool(a.top_k) and not a.distils, f"top_k={a.top_k} has no effect on objective={a.spec.name!r}: use 'distill'"),
        (charges and not a.reads_reward, f"kl_reward={a.kl_reward!r} has no effect: nothing reads the reward"),
        (charges and several, f"kl_reward={a.kl_reward!r} needs one reward, {a.advantage} reads several"),
        (a.kl_level != "token" and a.kl_loss == "none", f"kl_level={a.kl_level!r} has no effect without kl_loss"),
        (a.advantage is None and bool(a.advantage_args), "advantage_args has no effect without an advantage"),
        (a.derived["use_reference"] and not a.use_reference, "use_reference=False contradicts its KL or objective"),
    ]
    given = a.objective_args.get("distribution", a.distribution)
    cases.append((a.distils and given != a.distribution, f"distribution={given!r} contradicts top_k={a.top_k}"))
    for place, usual in USUAL_ESTIMATORS.items():
        coeff = vars(a)[f"{place}_coeff"]
        unused = vars(a)[place] == "none" and _is_set(coeff, _DEFAULTS[f"{place}_coeff"])
        cases.append((unused, f"{place}_coeff={coeff!r} has no effect with {place}='none': pass {place}={usual!r}"))
    refuse(a.name, cases)


# ------------------------------------------------------------------ overrides

#: Fields that describe the loop around the loss. Nothing here computes with them.
_OF_LOOP = ("repeat_times", "expert_data_ratio", "compute_advantage_in_trainer")
#: Fields that make_algorithm takes.
FIELDS = tuple(name for name in _DEFAULTS if name not in ("name", "sources", *_OF_LOOP))


def apply_overrides(preset: Algorithm, overrides: Settings) -> Algorithm:
    """Return a copy of a preset with some fields of :class:`AlgorithmOverrides` changed.

    ``objective_args`` and ``advantage_args`` are merged with the preset's. ``use_reference`` and ``use_critic`` follow from the
    changed fields, unless they are given. If the preset lacks a KL and its weight is given, the KL is added with the usual
    estimator.

    Raises:
        TypeError: for a name that is not a field.
        ValueError: for a setting without an effect.
    """
    for name in overrides:
        _check_name(preset, name, overrides)
    # `top_k` can replace the objective. Explicit overrides have precedence over its settings.
    distilled = _of_top_k(preset, overrides)
    changes: dict[str, object] = {**overrides, **distilled}
    own: Settings = vars(preset)
    for part in ("objective", "advantage"):
        args = f"{part}_args"
        # Another objective or advantage has other settings.
        kept = own[args] if changes.get(part, own[part]) == own[part] else {}
        layers = cast("Iterable[Settings]", filter(None, (kept, distilled.get(args), overrides.get(args))))
        changes[args] = {key: value for layer in layers for key, value in layer.items()}
    for place, usual in USUAL_ESTIMATORS.items():
        coeff = f"{place}_coeff"
        if own[place] == "none" and _is_set(changes.get(coeff, 0)):
            changes.setdefault(place, usual)
        elif changes.get(place) == "none":
            changes.setdefault(coeff, _DEFAULTS[coeff])  # the preset's weight would be refused without its KL
    for name, value in preset.derived.items():
        if own[name] == value:
            changes.setdefault(name, None)  # derive it again from the changed fields
    changed = replace(preset, **changes)  # type: ignore[arg-type]
    _check_flags(preset, changed)
    return changed


def _of_top_k(preset: Algorithm, overrides: Settings) -> dict[str, object]:
    """The changes that turn a distillation on sampled tokens into one over a teacher's top k."""
    advantage = overrides.get("advantage", preset.advantage)
    if not overrides.get("top_k") or "objective" in overrides or advantage not in ("on_policy_distill", "jsd"):
        return {}
    # Keep the divergence: the reverse KL for on_policy_distill, the same beta for jsd.
    default = advantage_spec("jsd").defaults["beta"]
    beta = 1.0 if advantage == "on_policy_distill" else preset.advantage_args.get("beta", default)
    distilled = {"objective": "distill", "objective_args": {"beta": beta}, "advantage": None}
    return {**distilled, "compute_advantage_in_trainer": False}


def _check_flags(preset: Algorithm, changed: Algorithm) -> None:
    """Raise for an overridden flag without an effect. A preset may hold such a flag, since later overrides can need it."""
    compares = changed.kl_loss != "none" or changed.entropy_coeff != 0
    left_out = changed.leave_out_experts != preset.leave_out_experts and not compares
    asked = changed.use_reference > preset.use_reference
    scores_teacher = changed.schema == "distill" and not changed.derived["use_reference"]
    cases = (
        (left_out, "leave_out_experts has no effect without a KL in the loss or an entropy bonus"),
        (asked and scores_teacher, "use_reference=True has no effect: the teacher is scored anyway"),
    )
    refuse(changed.name, cases)


def _check_name(preset: Algorithm, name: str, overrides: Settings) -> None:
    """Raise unless ``name`` is a field that an override may change. The message says where the setting belongs."""
    if name in FIELDS:
        return
    if name in _OF_LOOP:
        raise ValueError(f"{name} has no effect in make_algorithm: it describes the training loop. Leave it out.")
    objective = cast("Objective", overrides.get("objective", preset.objective))
    advantage = cast("AdvantageName | None", overrides.get("advantage", preset.advantage))
    settings = {"objective_args": spec_of(objective).hyper}
    if advantage is not None:
        settings["advantage_args"] = advantage_spec(advantage).hyper
    owners = [f"{part}={{{name!r}: ...}}" for part, names in settings.items() if name in names]
    if owners:
        raise TypeError(f"{name} is not a field of the preset: pass {' or '.join(owners)}.")
    known = [*FIELDS, *(name for names in settings.values() for name in names)]
    hint = foreign_hint(name, FIELDS)
    raise TypeError(no_such(f"{preset.name} has no setting", name, known, hint=hint))
