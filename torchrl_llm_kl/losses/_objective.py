"""The protocol of objectives: inputs and outputs, checks, the registry, and the typed names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, cast, get_args, overload

from torch import Tensor

from torchrl_llm_kl._numerics import Scalar, check_is_mask, check_is_scalar, check_same_shape
from torchrl_llm_kl._registry import Range, Registry, Spec, UnknownNameError, signature_of
from torchrl_llm_kl.losses._arithmetic import Aggregation
from torchrl_llm_kl.losses._inputs import LossInputs, MissingInputError, dummy_inputs, reads_of

P = ParamSpec("P")
R = TypeVar("R")


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


@dataclass(frozen=True)
class Once:
    """An input of one value per sequence that is computed once for a whole batch, before it is split.

    Args:
        name: of the input.
        function: returns it, ``[*B]``, from the other inputs.
        mismatched: whether the function takes log-probs of answers after other prompts than their own.
    """

    name: str
    function: Callable[[LossInputs], Tensor]
    mismatched: bool = False


@dataclass(frozen=True)
class ObjectiveSpec(Spec):
    """Metadata of an objective, a term or a correction.

    Args:
        name, hyper, only_with, source, types, defaults: see :class:`~torchrl_llm_kl._registry.Spec`.
        aggregation: how its source aggregates over tokens.
        once: the input that is computed once for a whole batch, if there is one.
        together: neighbouring rows that one value compares; 1 if a ``pair_id`` names them.
        formula: the function without checks.
    """

    aggregation: Aggregation = "token-mean"
    once: Once | None = None
    together: int = 1
    formula: Callable[..., object] | None = None

    @cached_property
    def needs(self) -> frozenset[str]:
        """The inputs beside ``log_prob`` and ``mask`` without which it raises, under its default hyper-parameters.

        Example:
            >>> from torchrl_llm_kl.losses import ppo
            >>> sorted(spec_of(ppo).needs)
            ['advantage', 'old_log_prob']
        """
        assert self.formula is not None
        return reads_of(self.formula, dummy_inputs()).required


class UnknownObjectiveError(UnknownNameError):
    """The name is not registered; the message lists the registered ones."""


_REGISTRY: Registry[Callable[..., Terms]] = Registry("objective", error=UnknownObjectiveError)


def objective(
    name: str,
    *,
    aggregation: Aggregation = "token-mean",
    only_with: Mapping[str, tuple[str, tuple[object, ...]]] | None = None,
    once: Once | None = None,
    together: int = 1,
    options: Callable[..., object] | None = None,
) -> Callable[[Callable[P, Terms]], Callable[P, Terms]]:
    r"""Register a function ``(inputs: LossInputs, *, <hyper-parameters>) -> tuple[LossTerm, ...]`` as an objective.

    The function reads the inputs that it needs as attributes (``inputs.advantage``), and those that it can do without with
    ``inputs.get("selected")``. :class:`~torchrl_llm_kl.losses.PolicyLoss` runs it once on dummy tokens to find out which
    entries the data must hold. The inputs are clean (:class:`LossInputs`), so the body is just the formula.

    The keyword-only parameters are hyper-parameters. A call raises a ``ValueError`` for a value outside the range or the
    choices of the annotation, and a ``TypeError`` for an unknown name. A scalar may be a 0-dim tensor, which is never read
    on the host (and so not range-checked). Metrics are masked means unless they say otherwise.

    The formulas write ``A`` for the advantage, ``r = exp(log_prob - old_log_prob)`` for the probability ratio and ``sg`` for
    stop-gradient.

    The decorator is all that registers it: names, types and tables follow from the signature and the docstring, whose last
    paragraph is ``Source: ...`` (``make docs`` writes them down). A function without the decorator can be passed to a loss
    too. The arguments are as in :class:`ObjectiveSpec`; ``options`` is the function to which the function passes its
    ``**options: Unpack[<a TypedDict>]``, whose keywords of these names become hyper-parameters.

    Raises:
        ValueError: if the name is taken.

    Example:
        >>> import torch
        >>> from torchrl_llm_kl.losses import gpg  # decorated with @objective("gpg")
        >>> log_prob, mask = torch.tensor([[-2.0, torch.nan]]), torch.tensor([[True, False]])
        >>> gpg(LossInputs(log_prob, mask, advantage=torch.ones(1, 2)))[0].value
        tensor([[2., -0.]])
        >>> gpg(LossInputs(log_prob, mask))
        Traceback (most recent call last):
        ...
        torchrl_llm_kl.losses._inputs.MissingInputError: gpg needs advantage: pass advantage= to LossInputs, [*B, T].
    """
    spec = ObjectiveSpec(name, aggregation=aggregation, only_with=only_with or {}, once=once, together=together)

    def register(function: Callable[P, Terms]) -> Callable[P, Terms]:
        if options is not None:
            own = inspect.signature(function, eval_str=True)
            *named, passed = own.parameters.values()
            there, names = signature_of(options), get_args(passed.annotation)[0].__annotations__
            function.__signature__ = own.replace(parameters=[*named, *map(there.__getitem__, names)])  # type: ignore[attr-defined]
        return cast("Callable[P, Terms]", _REGISTRY.add(name, _with_checks(spec, function)))

    return register


def loss_part(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the hyper-parameters of a term or a correction as those of an objective; it is not registered."""
    return lambda function: _with_checks(ObjectiveSpec(name), function)


def _with_checks(spec: ObjectiveSpec, formula: Callable[P, R]) -> Callable[P, R]:
    """``formula`` after the checks of its hyper-parameters."""
    inputs, *_ = inspect.signature(formula).parameters
    spec = replace(spec.reading(formula, (inputs,)), formula=formula)

    @wraps(formula)
    def call(*args: P.args, **hyper: P.kwargs) -> R:
        spec.check(hyper)
        check_is_scalar(**hyper)
        try:
            return formula(*args, **hyper)
        except MissingInputError as error:
            raise MissingInputError(error.input, spec.name) from None

    call.spec = spec  # type: ignore[attr-defined]
    return call


@overload
def spec_of(function: str) -> ObjectiveSpec: ...
@overload
def spec_of(function: Callable[..., Terms]) -> ObjectiveSpec | None: ...
def spec_of(function: Callable[..., Terms] | str) -> ObjectiveSpec | None:
    """The :class:`ObjectiveSpec` of an objective, by itself or by its name, of a term or a correction; None for others.

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


def get_objective(name: str) -> Callable[..., Terms]:
    """The objective of a name, one of :func:`available_objectives`: always the same object, which can be pickled.

    Raises:
        UnknownObjectiveError: a ``ValueError``; lists the names and the nearest one.

    Example:
        >>> from torchrl_llm_kl.losses import ppo
        >>> get_objective("ppo") is ppo
        True
    """
    return _REGISTRY[name]


#: The divergence that penalises a policy's distance to the reference.
FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
#: The weight of a pair of answers: none, the policy's probability of them, or that relative to its own answers.
Weighting = Literal["none", "probability", "aligned"]
#: The probability that a label is wrong.
Smoothing = Annotated[Scalar, Range(0.0, 0.5)]
