"""The protocol of objectives: inputs and outputs, checks, the registry, and the typed names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, cast, overload

from torch import Tensor

from torchrl_llm_kl._numerics import check_is_mask, check_is_scalar, check_same_shape
from torchrl_llm_kl._registry import Registry, Spec, UnknownNameError, aliases_of, no_such, signature_of
from torchrl_llm_kl.losses._arithmetic import Aggregation
from torchrl_llm_kl.losses._inputs import INPUTS, PER_OUTCOME, PER_ROW, SHARED, LossInputs

if TYPE_CHECKING:
    from torchrl_llm_kl.losses import ObjectiveName

P = ParamSpec("P")


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
class ObjectiveSpec(Spec):
    """Metadata of an objective.

    Args:
        name, hyper, aliases, obsolete, refused, only_with, source, needs, types, defaults: see
            :class:`~torchrl_llm_kl._registry.Spec`.
        aggregation: how its source aggregates over tokens.
        per_row: its inputs of one value per sequence, ``[*B]``.
        needs_if: inputs that some settings require -> (hyper-parameter or several, test of their values).
        either: optional inputs of which it reads the first that is given.
        reads_if: optional inputs that it reads under some settings, as ``needs_if``.
        once: the input that is computed once for a whole batch, if there is one.
        together: neighbouring rows that one value compares; 1 if a ``pair_id`` names them.
    """

    aggregation: Aggregation = "token-mean"
    per_row: tuple[str, ...] = ()
    needs_if: Conditions = field(default_factory=dict)
    either: tuple[str, ...] = ()
    reads_if: Conditions = field(default_factory=dict)
    once: Once | None = None
    together: int = 1

    def required(self, hyper: Mapping[str, object] | None = None) -> tuple[str, ...]:
        """The inputs without which the objective raises, under these hyper-parameters; defaults for those left out.

        Example:
            >>> from torchrl_llm_kl.losses import ppo
            >>> spec_of(ppo).required(), spec_of(ppo).required({"fallback_to_policy_gradient": True})
            (('advantage', 'old_log_prob'), ('advantage',))
        """
        return (*self.needs, *self._holding(self.needs_if, hyper))

    def optional(self, given: Collection[str], hyper: Mapping[str, object] | None = None) -> tuple[str, ...]:
        """The optional inputs among ``given`` that it reads under these hyper-parameters."""
        first = [name for name in self.either if name in given][:1]
        return (*first, *(name for name in self._holding(self.reads_if, hyper) if name in given))

    def _holding(self, conditions: Conditions, hyper: Mapping[str, object] | None) -> list[str]:
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
    aggregation: Aggregation = "token-mean",
    aliases: Mapping[str, str | Sequence[str]] | None = None,
    obsolete: Mapping[str, str] | None = None,
    needs_if: Conditions | None = None,
    only_with: Mapping[str, tuple[str, tuple[object, ...]]] | None = None,
    once: Once | None = None,
    together: int = 1,
) -> Callable[[Callable[P, Terms]], Callable[P, Terms]]:
    r"""Turn a formula into a registered objective; the protocol that all objectives follow.

    An objective is called as ``(log_prob, mask, *, old_log_prob=None, ref_log_prob=None, advantage=None, expert_mask=None,
    **hyper)`` and returns a tuple of :class:`LossTerm`. Its inputs are fields of :class:`LossInputs`, which states shapes and
    meanings. Every objective accepts these six, whether it reads them or not, so that all can be called alike. All raise a
    ``ValueError`` for unequal shapes, for a missing input and for a hyper-parameter out of range, and a ``TypeError`` for a
    mask that is not boolean, numbers that are, and an unknown hyper-parameter. A scalar hyper-parameter may be a 0-dim
    tensor, which is never read on the host (and so not range-checked). Metrics are masked means unless they say otherwise.

    The formulas write ``A`` for the advantage, ``r = exp(log_prob - old_log_prob)`` for the probability ratio and ``sg`` for
    stop-gradient.

    The decorated function contains only the formula, because its inputs are clean: floating-point ones are float32
    or wider and exactly 0 where the mask is False, so that a masked-out NaN reaches neither a sum nor a gradient; booleans
    are False there; and every required input is present. Its parameters that are not inputs are its hyper-parameters; one
    that is annotated with a ``Literal`` has one of its values. The decorator is all that registers it: names, types and
    tables follow from the signature and the docstring, whose last paragraph is ``Source: ...`` (``make docs`` writes them
    down).

    An objective is called with its own hyper-parameter names alone: :class:`~torchrl_llm_kl.losses.PolicyLoss` and
    :func:`~torchrl_llm_kl.make_algorithm` translate other libraries' names once, at construction.

    The arguments are as in :class:`ObjectiveSpec`; an alias of one hyper-parameter may be a plain string. Inputs without
    a default are required.

    Raises:
        ValueError: if the name is taken.

    Example:
        >>> import torch
        >>> from torchrl_llm_kl.losses import gpg  # decorated with @objective("gpg")
        >>> log_prob, mask = torch.tensor([[-2.0, torch.nan]]), torch.tensor([[True, False]])
        >>> gpg(log_prob, mask, advantage=torch.ones(1, 2))[0].value
        tensor([[2., -0.]])
        >>> gpg(log_prob, mask)
        Traceback (most recent call last):
        ...
        ValueError: gpg needs advantage: pass advantage=, of the shape of log_prob.
    """
    spec = ObjectiveSpec(
        name,
        aliases=aliases_of(aliases),
        obsolete=obsolete or {},
        aggregation=aggregation,
        needs_if=needs_if or {},
        only_with=only_with or {},
        once=once,
        together=together,
    )
    return lambda function: cast("Callable[P, Terms]", _REGISTRY.add(name, _checked(spec, function)))


def term(name: str, **conditions: Any) -> Callable[[Callable[P, Terms]], Callable[P, Terms]]:
    """Turn a formula into a term that is added to an objective (a penalty, a bonus), checked as one; not registered.

    ``conditions`` are ``needs_if``, ``either`` and ``reads_if`` of :class:`ObjectiveSpec`.
    """
    return lambda function: cast("Callable[P, Terms]", _checked(ObjectiveSpec(name, **conditions), function))


def variant(
    base: Callable[..., Terms], *, aggregation: Aggregation = "token-mean", **defaults: Any
) -> Callable[[Callable[[], None]], Callable[..., Terms]]:
    """Register the formula of ``base`` again, with name and docstring of the decorated function and other defaults.

    ``defaults`` are the hyper-parameters of the variant; the others of ``base`` keep their defaults and cannot be set. Inputs
    that ``base`` needs under some settings are always needed.
    """
    formula, spec = inspect.unwrap(base), spec_of(base)
    assert spec is not None

    parameters = [
        parameter.replace(default=defaults.get(key, parameter.empty if key in spec.needs_if else parameter.default))
        for key, parameter in signature_of(formula).items()
        if key in INPUTS or key in defaults
    ]
    aliases = {other: own for other, own in spec.aliases.items() if set(own) <= set(defaults)}

    def register(described: Callable[[], None]) -> Callable[..., Terms]:
        @wraps(described)
        def renamed(*args: Any, **given: Any) -> Terms:
            return formula(*args, **{**defaults, **given})

        renamed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        renamed.__annotations__ = formula.__annotations__
        own = ObjectiveSpec(described.__name__, aliases=aliases, obsolete=spec.obsolete, aggregation=aggregation)
        return _REGISTRY.add(own.name, _checked(own, renamed))

    return register


#: In the docstring of every objective and term.
_SHARED_DOC = "Inputs, shapes and errors are as for every objective: see :func:`~torchrl_llm_kl.losses.objective`."


def _checked(spec: ObjectiveSpec, formula: Callable[..., Terms]) -> Callable[..., Terms]:
    """``formula`` after the checks of the protocol."""
    parameters = inspect.signature(formula).parameters
    takes_any = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
    own = [key for key in INPUTS if key in parameters or takes_any]
    spec = spec.reading(formula, own)
    spec = replace(spec, needs=spec.needs[2:], per_row=tuple(key for key in PER_ROW if key in own))

    @wraps(formula)
    def call(log_prob: Tensor, mask: Tensor, *, is_clean: bool = False, **given: Any) -> Terms:
        hyper = {key: value for key, value in given.items() if key not in INPUTS}
        spec.check(hyper)
        check_is_scalar(**hyper)
        found = {key: value for key, value in given.items() if key in INPUTS}
        inputs = LossInputs(log_prob, mask, **found, is_clean=is_clean)
        inputs.check(spec.name)
        for key in inputs.given:
            if key not in {*SHARED, *own}:
                raise TypeError(no_such(f"{spec.name} has no input", key, own))
        for key in spec.required(hyper):
            if getattr(inputs, key) is None:
                set_to = [f"{name}={({**spec.defaults, **hyper})[name]!r}" for name in spec.deciding(key)]
                otherwise = f", or change {', '.join(set_to)}" if set_to else ""
                shape = "one value per sequence" if key in PER_ROW else "of the shape of log_prob"
                shape = "[*B, T, k + 1]" if key in PER_OUTCOME else shape
                raise ValueError(f"{spec.name} needs {key}: pass {key}=, {shape}{otherwise}{_computed(spec, key)}.")
        return formula(**inputs.cleaned(own), **hyper)

    before, found, source = inspect.cleandoc(formula.__doc__ or "").rpartition("\n\nSource: ")
    call.__doc__ = f"{before}\n\n{_SHARED_DOC}{found}{source}" if found else f"{source}\n\n{_SHARED_DOC}"
    call.spec = spec  # type: ignore[attr-defined]
    return call


def _computed(spec: ObjectiveSpec, key: str) -> str:
    """The end of a message on a missing input, if there is a function that computes it."""
    return f" ({spec.once.function.__name__} computes it)" if spec.once is not None and spec.once.name == key else ""


@overload
def spec_of(function: ObjectiveName) -> ObjectiveSpec: ...
@overload
def spec_of(function: Callable[..., Terms]) -> ObjectiveSpec | None: ...
def spec_of(function: Callable[..., Terms] | ObjectiveName) -> ObjectiveSpec | None:
    """The :class:`ObjectiveSpec` of an objective, by itself or by its name, or of a term; None for any other function.

    Example:
        >>> from torchrl_llm_kl.losses import sapo
        >>> spec_of(sapo).aggregation, spec_of(sapo).hyper
        ('seq-mean-token-mean', ('tau_pos', 'tau_neg'))
    """
    return getattr(_REGISTRY[function] if isinstance(function, str) else function, "spec", None)


def available_objectives() -> tuple[str, ...]:
    """Every name that :func:`get_objective` accepts, sorted.

    Example:
        >>> import torchrl_llm_kl.losses
        >>> available_objectives()[:3]
        ('a2po', 'aot', 'aot_unpaired')
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


#: The divergence that penalises a policy's distance to the reference, in a preference loss.
FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
#: The weight of a pair of answers: none, the policy's probability of them, or that relative to its own answers.
Weighting = Literal["none", "probability", "aligned"]
