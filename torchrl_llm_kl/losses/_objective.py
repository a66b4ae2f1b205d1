"""The protocol of objectives: inputs and outputs, checks, the registry, and the typed names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Literal, ParamSpec, cast

from torch import Tensor
from typing_extensions import TypedDict

from torchrl_llm_kl._foreign import foreign_hint
from torchrl_llm_kl._numerics import Scalar, check_is_mask, check_is_number, check_is_scalar, check_same_shape
from torchrl_llm_kl._registry import Hyperparameters, Registry, UnknownNameError, no_such
from torchrl_llm_kl.losses._arithmetic import Aggregation, clean

P = ParamSpec("P")

# Inputs of every objective beside log_prob and mask, read or not.
_SHARED = ("old_log_prob", "ref_log_prob", "advantage", "expert_mask")
#: Inputs of one value per token, beside ``log_prob`` and ``mask``.
PER_TOKEN = (*_SHARED, "sampler_log_prob", "entropy", "selected", "kl", "teacher_divergence", "sharp_log_prob")
#: Inputs that are NaN where the sampler computed no log-prob.
OF_SAMPLER = ("old_log_prob", "sampler_log_prob")
#: Inputs of several values per token, of one teacher or of each: the teacher's top k and all other tokens.
PER_OUTCOME = ("outcomes", "teacher_outcomes")
#: Inputs of one value per sequence.
PER_ROW = ("pair_id", "chosen", "reference_point", "match_id")
#: Every input. All other arguments are hyper-parameters.
INPUTS = ("log_prob", "mask", *PER_TOKEN, *PER_OUTCOME, *PER_ROW)
_BOOLEAN = ("expert_mask", "selected", "chosen")
# Inputs that keep their graph; all others are data.
_WITH_GRAPH = ("log_prob", "entropy", "kl", "teacher_divergence", "outcomes")


@dataclass(frozen=True, eq=False)
class LossTerm:
    """One part of a loss, before summation over tokens.

    A part with one value per sequence, or per pair of sequences, has ``T = 1``. The mask must not depend on values of
    log-probs, because denominators are counted from it before any model has run: a token that is dropped for its value
    (clipped, too far from the sampler) keeps its place in the mask and has the value 0.

    Args:
        name: reported as ``loss_<name>``.
        value: to be minimised; nats or rewards per token; ``[*B, T]``. Ignored where the mask is False.
        mask: the tokens over which the part is summed; bool ``[*B, T]``.
        weight: factor of the whole part, dimensionless.
        metrics: numbers to log, by name: 0-dim tensors without graph, on the device of ``value``.
        aggregation: how this part is summed (see :func:`~torchrl_llm_kl.losses.aggregate`); None: as the rest of the loss.

    Raises:
        ValueError: if value and mask have different shapes, or the weight is not one number.
        TypeError: if the mask is not boolean.
    """

    name: str
    value: Tensor
    mask: Tensor
    weight: float | Tensor = 1.0
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    aggregation: Aggregation | None = None

    def __post_init__(self) -> None:
        check_same_shape(value=self.value, mask=self.mask)
        check_is_mask(mask=self.mask)
        check_is_scalar(weight=self.weight)

    def replace(self, **changes: Any) -> LossTerm:
        """A copy with some fields changed."""
        return replace(self, **changes)


Terms = tuple[LossTerm, ...]
#: An input that some settings require -> the hyper-parameters that decide, and the test of their values.
Conditions = Mapping[str, tuple[str | tuple[str, ...], Callable[..., bool]]]


@dataclass(frozen=True)
class Once:
    """An input of one value per sequence that is computed once for a whole batch, before it is split.

    Args:
        name: of the input.
        function: returns it, ``[*B]``, from other inputs of the objective.
        mismatched: whether the function takes log-probs of answers after other prompts than their own.
    """

    name: str
    function: Callable[..., Tensor]
    mismatched: bool = False


@dataclass(frozen=True)
class ObjectiveSpec:
    """Metadata of an objective.

    Args:
        name: in the registry.
        needs: inputs that it always requires.
        aggregation: how its source aggregates over tokens.
        aliases: hyper-parameters of other libraries -> its own, one or several at once.
        obsolete: hyper-parameters of other libraries that have no effect here -> the reason.
        source: where the formula comes from.
        per_row: its inputs of one value per sequence, ``[*B]``.
        needs_if: inputs that some settings require -> (hyper-parameter or several, test of their values).
        either: optional inputs of which it reads the first that is given.
        reads_if: optional inputs that it reads under some settings, as ``needs_if``.
        hyper: names of its own hyper-parameters.
        defaults: hyper-parameter -> default, for those that have one.
        once: the input that is computed once for a whole batch, if there is one.
    """

    name: str
    needs: tuple[str, ...]
    aggregation: Aggregation
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    obsolete: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    per_row: tuple[str, ...] = ()
    needs_if: Conditions = field(default_factory=dict)
    either: tuple[str, ...] = ()
    reads_if: Conditions = field(default_factory=dict)
    hyper: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    once: Once | None = None

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Own hyper-parameters and their names in other libraries; ``.translate(given)`` returns own names."""
        return Hyperparameters(self.name, self.hyper, self.aliases, self.obsolete)

    def required(self, hyper: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """The inputs without which the objective raises, under these hyper-parameters; defaults for those left out.

        Example:
            >>> from torchrl_llm_kl.losses import ppo
            >>> spec_of(ppo).required(), spec_of(ppo).required({"fallback_to_policy_gradient": True})
            (('advantage', 'old_log_prob'), ('advantage',))
        """
        return (*self.needs, *self._holding(self.needs_if, hyper))

    def optional(self, given: Collection[str], hyper: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """The optional inputs among ``given`` that it reads under these hyper-parameters."""
        first = [name for name in self.either if name in given][:1]
        return (*first, *(name for name in self._holding(self.reads_if, hyper) if name in given))

    def _holding(self, conditions: Conditions, hyper: Mapping[str, Any] | None) -> list[str]:
        """The inputs whose condition these hyper-parameters fulfil."""
        given = {**self.defaults, **(hyper or {})}
        return [key for key, (names, test) in conditions.items() if test(*(given[name] for name in _names(names)))]

    def deciding(self, key: str) -> tuple[str, ...]:
        """The hyper-parameters that decide whether the input ``key`` is required; none if it always is."""
        return _names(self.needs_if[key][0]) if key in self.needs_if else ()


def _names(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


class UnknownObjectiveError(UnknownNameError):
    """The name is not registered; the message lists the registered ones."""


_REGISTRY: Registry[Callable[..., Terms]] = Registry("objective", error=UnknownObjectiveError)


def objective(
    name: str,
    *,
    needs: Sequence[str] = (),
    aggregation: Aggregation = "token-mean",
    aliases: Mapping[str, str | Sequence[str]] | None = None,
    obsolete: Mapping[str, str] | None = None,
    source: str,
    needs_if: Conditions | None = None,
    once: Once | None = None,
) -> Callable[[Callable[P, Terms]], Callable[P, Terms]]:
    r"""Turn a formula into a registered objective; the protocol that all objectives follow.

    An objective is called as ``(log_prob, mask, *, old_log_prob=None, ref_log_prob=None, advantage=None, expert_mask=None,
    **hyper)`` and returns a tuple of :class:`LossTerm`. All objectives and terms share these inputs:

    ====================== ============= ================================================================================
    input                  shape         meaning
    ====================== ============= ================================================================================
    ``log_prob``           ``[*B, T]``   nats, of the sampled tokens under the current policy, with graph
    ``mask``               ``[*B, T]``   bool, True at trained tokens; other positions may hold anything, even NaN
    ``old_log_prob``       ``[*B, T]``   nats, under the policy that sampled the tokens
    ``ref_log_prob``       ``[*B, T]``   nats, under the frozen reference
    ``advantage``          ``[*B, T]``   in units of the reward
    ``expert_mask``        ``[*B, T]``   bool, True for tokens that an expert wrote and the policy did not sample
    ``sampler_log_prob``   ``[*B, T]``   ``old_log_prob`` as the sampling program itself computed it
    ``entropy``            ``[*B, T]``   nats, of the policy's distribution over the vocabulary, with graph
    ``selected``           ``[*B, T]``   bool, True for tokens chosen over a whole batch (``clip_cov``, ``kl_cov``)
    ``kl``                 ``[*B, T]``   nats, the KL over the whole vocabulary at each position, with graph
    ``teacher_divergence`` ``[*B, T]``   nats, the divergence to a teacher over the whole vocabulary, with graph
    ``sharp_log_prob``     ``[*B, T]``   nats, ``log_prob`` at half the temperature, without graph (WPO)
    ``outcomes``           see below     nats, of the ids in a teacher's top k and of all other tokens, with graph
    ``teacher_outcomes``   see below     nats, the same under the teacher
    ``pair_id``            ``[*B]``      integer, the pair that a sequence belongs to
    ``chosen``             ``[*B]``      bool, True for a preferred sequence, of its pair or by itself
    ``reference_point``    ``[*B]``      nats, what log-ratios are compared with, from a whole batch (``kto``, ``bco``)
    ``match_id``           ``[*B]``      integer, equal for two sequences matched over a whole batch (``aot_unpaired``)
    ====================== ============= ================================================================================

    Outcomes are ``[*B, T, k + 1]``, or ``[*B, T, M, k + 1]`` for ``M`` teachers.
    Every objective accepts the first six, whether it reads them or not, so that all can be called alike. Gradients flow into
    ``log_prob``, ``entropy``, ``kl``, ``teacher_divergence`` and ``outcomes`` alone: the others are data, even if they have a
    graph. All objectives raise a
    ``ValueError`` for unequal shapes, for a missing input and for a hyper-parameter out of range, and a ``TypeError`` for a
    mask that is not boolean, numbers that are, and an unknown hyper-parameter. A scalar hyper-parameter may be a 0-dim
    tensor, which is never read on the host (and so not range-checked). Metrics are masked means unless they say otherwise.

    The formulas write ``A`` for the advantage, ``r = exp(log_prob - old_log_prob)`` for the probability ratio and ``sg`` for
    stop-gradient.

    The decorated function contains only the formula, because its inputs are clean: floating-point ones are float32
    or wider and exactly 0 where the mask is False, so that a masked-out NaN reaches neither a sum nor a gradient; booleans
    are False there; and every required input is present. Its parameters that are not inputs are its hyper-parameters. It is
    called with its own hyper-parameter names alone: :class:`~torchrl_llm_kl.losses.PolicyLoss` and
    :func:`~torchrl_llm_kl.make_algorithm` translate those of other libraries once, at construction.

    The arguments are those of :class:`ObjectiveSpec`; an alias of one hyper-parameter may be a plain string. ``needs`` is
    read from the signature: all inputs without a default.

    Raises:
        ValueError: if the name is taken.

    Example:
        >>> import torch
        >>> from torchrl_llm_kl.losses import gpg  # decorated with @objective("gpg", source=...)
        >>> log_prob, mask = torch.tensor([[-2.0, torch.nan]]), torch.tensor([[True, False]])
        >>> gpg(log_prob, mask, advantage=torch.ones(1, 2))[0].value
        tensor([[2., -0.]])
        >>> gpg(log_prob, mask)
        Traceback (most recent call last):
        ...
        ValueError: gpg needs advantage: pass advantage=, of the shape of log_prob.
    """
    several = {other: (own,) if isinstance(own, str) else tuple(own) for other, own in (aliases or {}).items()}
    spec = ObjectiveSpec(
        name, tuple(needs), aggregation, several, obsolete or {}, source, needs_if=needs_if or {}, once=once
    )
    return lambda function: cast("Callable[P, Terms]", _REGISTRY.add(name, _checked(spec, function)))


def term(
    name: str,
    *,
    needs_if: Conditions | None = None,
    either: tuple[str, ...] = (),
    reads_if: Conditions | None = None,
    source: str,
) -> Callable[[Callable[P, Terms]], Callable[P, Terms]]:
    """Turn a formula into a term that is added to an objective (a penalty, a bonus), checked as one; not registered."""
    spec = ObjectiveSpec(
        name, (), "token-mean", source=source, needs_if=needs_if or {}, either=either, reads_if=reads_if or {}
    )
    return lambda function: cast("Callable[P, Terms]", _checked(spec, function))


def variant(
    base: Callable[..., Terms],
    name: str,
    doc: str,
    *,
    aggregation: Aggregation = "token-mean",
    source: str,
    **defaults: Any,
) -> Callable[..., Terms]:
    """Register the formula of ``base`` again, as the objective ``name`` with the docstring ``doc`` and other defaults.

    ``defaults`` are the hyper-parameters of the variant; the others of ``base`` keep their defaults and cannot be set. Inputs
    that ``base`` needs under some settings are always needed. Assign the result to ``name`` in the module of ``base``.
    """
    formula, spec = inspect.unwrap(base), cast("ObjectiveSpec", spec_of(base))

    @wraps(formula)
    def renamed(*args: Any, **given: Any) -> Terms:
        return formula(*args, **{**defaults, **given})

    renamed.__name__ = renamed.__qualname__ = name
    renamed.__doc__ = doc
    parameters = [
        parameter.replace(default=defaults.get(key, parameter.empty if key in spec.needs_if else parameter.default))
        for key, parameter in inspect.signature(formula).parameters.items()
        if key in INPUTS or key in defaults
    ]
    renamed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    aliases = {other: own for other, own in spec.aliases.items() if set(own) <= set(defaults)}
    spec = ObjectiveSpec(name, (), aggregation, aliases, spec.obsolete, source)
    return _REGISTRY.add(name, _checked(spec, renamed))


#: Ends the docstring of every objective and term.
_SHARED_DOC = "Inputs, shapes and errors are those of every objective: see :func:`~torchrl_llm_kl.losses.objective`."


def _checked(spec: ObjectiveSpec, formula: Callable[..., Terms]) -> Callable[..., Terms]:
    """``formula`` after the checks of the protocol."""
    parameters = inspect.signature(formula).parameters
    own = [key for key in INPUTS if key in parameters]
    optional = {key: x.default for key, x in parameters.items() if x.default is not x.empty}
    hyper_names = tuple(key for key in parameters if key not in own)
    defaults = {key: optional[key] for key in hyper_names if key in optional}
    spec = replace(
        spec,
        needs=spec.needs or tuple(key for key in INPUTS[2:] if key in own and key not in optional),
        per_row=tuple(key for key in PER_ROW if key in own),
        hyper=hyper_names,
        defaults=defaults,
    )

    @wraps(formula)
    def call(log_prob: Tensor, mask: Tensor, **given: Any) -> Terms:
        hyper = {key: value for key, value in given.items() if key not in INPUTS}
        for key in hyper.keys() - set(hyper_names):
            raise TypeError(_unknown(spec, key))
        tensors = {key: given[key] for key in PER_TOKEN if given.get(key) is not None}
        rows = {key: given[key] for key in PER_ROW if given.get(key) is not None}
        check_same_shape(mask=mask, log_prob=log_prob, **tensors)
        check_is_mask(mask=mask, **{key: given.get(key) for key in _BOOLEAN})
        check_is_number(log_prob=log_prob, **{key: x for key, x in tensors.items() if key not in _BOOLEAN})
        check_is_scalar(**hyper)
        several = {key: given[key] for key in PER_OUTCOME if given.get(key) is not None}
        check_same_shape(**several)
        for key, value in several.items():
            if value.shape[: mask.ndim] != mask.shape or value.ndim - mask.ndim not in (1, 2):
                expected = f"{(*mask.shape, 'k + 1')} or, for M teachers, {(*mask.shape, 'M', 'k + 1')}".replace(
                    "'", ""
                )
                raise ValueError(f"{spec.name}: {key} has shape {tuple(value.shape)}, expected {expected}.")
        for key, value in rows.items():
            if value.shape != mask.shape[:-1]:
                expected = f"one value per sequence, {tuple(mask.shape[:-1])}"
                raise ValueError(f"{spec.name}: {key} has shape {tuple(value.shape)}, expected {expected}.")
        for key in (tensors | rows | several).keys() - {*_SHARED, *own}:
            raise TypeError(no_such(f"{spec.name} has no input", key, own))
        for key in spec.required(hyper):
            if key not in tensors | rows | several:
                set_to = [f"{name}={({**defaults, **hyper})[name]!r}" for name in spec.deciding(key)]
                otherwise = f", or change {', '.join(set_to)}" if set_to else ""
                shape = "one value per sequence" if key in PER_ROW else "of the shape of log_prob"
                shape = "[*B, T, k + 1]" if key in PER_OUTCOME else shape
                raise ValueError(f"{spec.name} needs {key}: pass {key}=, {shape}{otherwise}{_computed(spec, key)}.")
        tensors = {key: x if key in _WITH_GRAPH else x.detach() for key, x in (tensors | several).items() if key in own}
        cleaned = {key: clean(x, mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))) for key, x in tensors.items()}
        rows = {key: clean(x, mask.any(-1)) if x.is_floating_point() else x for key, x in rows.items()}
        return formula(clean(log_prob, mask), mask, **cleaned, **rows, **hyper)

    call.__doc__ = f"{inspect.cleandoc(formula.__doc__ or '')}\n\n{_SHARED_DOC}\n\nSource: {spec.source}."
    call.spec = spec  # type: ignore[attr-defined]
    return call


def _computed(spec: ObjectiveSpec, key: str) -> str:
    """The end of a message on a missing input, if there is a function that computes it."""
    return f" ({spec.once.function.__name__} computes it)" if spec.once is not None and spec.once.name == key else ""


def _unknown(spec: ObjectiveSpec, key: str) -> str:
    message = f"{spec.name} has no hyper-parameter {key!r}"
    if key not in spec.aliases and key not in spec.obsolete:
        what = f"{spec.name} has no hyper-parameter"
        return no_such(what, key, spec.hyper, hint=foreign_hint(key, spec.hyper))
    own = " and ".join(map(repr, spec.aliases.get(key, ())))
    return (
        f"{message}: {f'pass {own}' if own else 'leave it out'}. PolicyLoss and make_algorithm translate the names of other "
        "libraries, the function does not."
    )


def spec_of(function: Callable[..., Terms]) -> ObjectiveSpec | None:
    """The :class:`ObjectiveSpec` of an objective or a term; None for any other function.

    Example:
        >>> from torchrl_llm_kl.losses import sapo
        >>> spec_of(sapo).aggregation, spec_of(sapo).hyper
        ('seq-mean-token-mean', ('tau_pos', 'tau_neg'))
    """
    return getattr(function, "spec", None)


def available_objectives() -> tuple[str, ...]:
    """Every name that :func:`get_objective` accepts, sorted.

    Example:
        >>> import torchrl_llm_kl.losses
        >>> available_objectives()[:3]
        ('aot', 'aot_unpaired', 'apo_down')
    """
    return tuple(sorted(_REGISTRY))


def get_objective(name: ObjectiveName) -> Callable[..., Terms]:
    """The objective of a name, one of :func:`available_objectives`: always the same object, which can be pickled.

    Raises:
        UnknownObjectiveError: a ``ValueError``; lists the names and the nearest one.

    Example:
        >>> from torchrl_llm_kl.losses import ppo
        >>> get_objective("ppo") is ppo
        True
    """
    return _REGISTRY[name]


# ------------------------------------------------------------------ typed names

#: The divergence that penalises a policy's distance to the reference, in a preference loss.
FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
#: The weight of a pair of answers: none, the policy's probability of them, or that relative to its own answers.
Weighting = Literal["none", "probability", "aligned"]

# fmt: off
#: The names of :func:`get_objective`.
ObjectiveName = Literal[
    "aot", "aot_unpaired", "apo_down", "apo_zero", "bco", "bco_pair", "cispo", "clip_cov", "cpo", "dapo", "discopop",
    "distill", "dpo", "dppo", "dr_grpo", "dro", "exo_pair", "gmpo", "gpg", "gspo", "hinge", "importance_sampling", "ipo",
    "kl_cov", "kto", "luspo", "mix", "mix_chord", "nca_pair", "opmd", "orpo", "ppo", "rec", "robust", "sapo", "sft",
    "sft_is", "sft_phi", "simpo", "sppo", "sppo_hard", "topr", "vespo",
]
# fmt: on


class ObjectiveArgs(TypedDict, total=False):
    """Every hyper-parameter of every registered objective, under its own name and under those of other libraries."""

    advantage_threshold: Scalar
    beta: Scalar
    clip_cov_lb: Scalar
    clip_cov_ratio: float
    clip_cov_ub: Scalar
    clip_epsilon: Scalar | None
    clip_high: Scalar | None
    clip_low: Scalar | None
    clip_mode: Literal["none", "one-side", "two-side", "ring", "gspo-one-side"]
    clip_range: Scalar | None
    clip_range_high: Scalar | None
    clip_range_low: Scalar | None
    clip_ratio: Scalar | None
    clip_ratio_c: Scalar | None
    clip_ratio_high: Scalar | None
    clip_ratio_low: Scalar | None
    coeff: Scalar
    cov_high: Scalar
    cov_low: Scalar
    cpo_alpha: Scalar
    cutoff_prob: Scalar
    delta_sequence_masking: Scalar
    desirable_weight: Scalar
    discopop_tau: Scalar
    distribution: Literal["top_k", "exact"]
    divergence: Literal["tv", "kl"]
    dro_beta: Scalar
    enable_mask_clip: bool
    enable_phi_function: bool
    enable_sequence_masking: bool
    epsilon: Scalar
    epsilon_high: Scalar
    epsilon_high_prime: Scalar
    epsilon_low: Scalar
    epsilon_low_prime: Scalar
    expert_aggregation: Aggregation | None
    f_alpha: Scalar
    f_divergence: FDivergence
    f_divergence_type: FDivergence
    fallback_to_policy_gradient: bool
    fraction: float
    grpo_loss_agg_mode: Aggregation | None
    k_neg: Scalar
    k_pos: Scalar
    kl_cov_ratio: float
    label_smoothing: Scalar
    lambda_neg: Scalar
    lambda_pos: Scalar
    ld_alpha: Scalar | None
    length_normalised: bool
    level: Literal["token", "sequence"]
    margin: Scalar
    mask_clip_high: Scalar
    mask_clip_low: Scalar
    mask_clip_range_high: Scalar
    mask_clip_range_low: Scalar
    mu: Scalar
    mu_decay_steps: int
    mu_peak: Scalar
    mu_valley: Scalar
    mu_warmup_steps: int
    ngpus_trainer: int | None
    nll_aggregation: Aggregation | None
    nll_coeff: Scalar
    ppo_kl_coef: Scalar
    ppo_micro_batch_size_per_gpu: int | None
    ppo_mini_batch_size: int | None
    regularizer: Literal["none", "k2", "forward-kl"]
    regularizer_coef: Scalar
    sapo_temperature_neg: Scalar
    sapo_temperature_pos: Scalar
    sft_loss_agg_mode: Aggregation | None
    simpo_gamma: Scalar
    step: int | Tensor
    tau: Scalar
    tau_neg: Scalar
    tau_pos: Scalar
    teacher_weights: Sequence[float] | None
    temp: Scalar
    train_batch_size_expert: int | None
    train_batch_size_usual: int | None
    undesirable_weight: Scalar
    use_dynamic_bsz: bool | None
    usual_aggregation: Aggregation | None
    vespo_k_neg: Scalar
    vespo_k_pos: Scalar
    vespo_lambda_neg: Scalar
    vespo_lambda_pos: Scalar
    weight: Literal["none", "importance_sampling", "gspo_importance_sampling", "advantage"]
    weighting: Weighting
