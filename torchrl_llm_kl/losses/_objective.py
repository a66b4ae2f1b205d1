"""The protocol of objectives: a record of named tensors as input, terms as output, checks of both, and the registry."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import cached_property, partial, wraps
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar, cast, get_args

import torch
from tensordict import NestedKey
from torch import Tensor
from typing_extensions import Self

from torchrl_llm_kl._numerics import Scalar, check_is_mask, check_is_number, check_is_scalar, check_same_shape, widen
from torchrl_llm_kl._registry import Range, Registry, Spec, UnknownNameError, signature_of
from torchrl_llm_kl.losses._arithmetic import Aggregation, clean

#: Outcomes of ``M`` teachers have another dimension before the last.
_TOKEN, _OUTCOME, _ROW = "[*B, T]", "[*B, T, k + 1]", "[*B]"


class MissingInputError(AttributeError, ValueError):
    """A function reads an input that the record does not have.

    Args:
        name: name of the input.
        owner: name of the function.
    """

    def __init__(self, name: str, owner: str = "the loss") -> None:
        super().__init__(name, owner)
        self.input, self.owner = name, owner

    def __str__(self) -> str:
        return f"{self.owner} needs {self.input}: pass {self.input}= to LossInputs, {SHAPES[self.input]}."


class _GivenFields:
    """The fields of :class:`LossInputs`. A record lists only the inputs that it has, so ``dataclasses.replace`` works."""

    def __init__(self, every: dict[str, Field[Tensor]]) -> None:
        self.every = every

    def __get__(self, inputs: LossInputs | None, owner: type) -> dict[str, Field[Tensor]]:
        return {name: each for name, each in self.every.items() if inputs is None or name in vars(inputs)}


def _optional(shape: str = _TOKEN, **facts: object) -> Tensor:
    """A field that may be left out. Facts: ``boolean``, and ``graph`` if its gradient is kept."""
    return cast("Tensor", field(default_factory=lambda: None, metadata={"shape": shape, **facts}))


@dataclass(frozen=True, eq=False)
class LossInputs:
    """The tensors that a loss reads, with one number per token, sequence or outcome.

    ``log_prob`` and ``mask`` are required. All other inputs may be left out. Reading an input that was left out raises a
    :class:`MissingInputError`, an ``AttributeError``. :meth:`get` returns None for it.

    The record is clean: every number is in float32 or wider, and 0 (False) where the mask is False. A NaN of a masked-out token
    thus reaches neither a sum nor a gradient. Gradients flow only into ``log_prob``, ``entropy``, ``kl``,
    ``teacher_divergence`` and ``outcomes``. The other inputs are detached. Outcomes of ``M`` teachers are
    ``[*B, T, M, k + 1]``.

    Args:
        log_prob: nats, log-prob of the sampled tokens under the current policy, with graph, ``[*B, T]``.
        mask: bool ``[*B, T]``, True at trained tokens.
        old_log_prob: nats, under the policy that sampled the tokens, ``[*B, T]``.
        ref_log_prob: nats, under the frozen reference, ``[*B, T]``.
        advantage: in units of the reward, ``[*B, T]``.
        expert_mask: bool ``[*B, T]``, True for tokens that an expert wrote and the policy did not sample.
        message_role: integers ``[*B, T]``, the role that wrote each token: its index in system, user, assistant, tool.
        sampler_log_prob: ``old_log_prob`` as computed by the sampling program itself, ``[*B, T]``.
        behavior_log_prob: nats, as computed by the trainer under the weights that sampled each token, where ``old_log_prob`` is
            of later weights, ``[*B, T]``.
        age: optimizer steps between the weights that sampled the token and those of the update, ``[*B, T]``.
        entropy: nats, entropy of the policy's distribution over the vocabulary, with graph, ``[*B, T]``.
        selected: bool ``[*B, T]``, True for tokens selected over a whole batch.
        kl: nats, the KL over the whole vocabulary at each position, with graph, ``[*B, T]``.
        teacher_divergence: nats, the divergence to a teacher over the whole vocabulary, with graph, ``[*B, T]``.
        sharp_log_prob: nats, ``log_prob`` at half the temperature, without graph, ``[*B, T]``.
        outcomes: nats, log-probs of the ids in a teacher's top k and of all other tokens, with graph, ``[*B, T, k + 1]``.
        teacher_outcomes: the same log-probs under the teacher, same shape.
        pair_id: integers ``[*B]``, equal for the two sequences of a pair.
        chosen: bool ``[*B]``, True for a sequence that is preferred in its pair, or good by itself.
        reference_point: nats, ``[*B]``, computed from a whole batch and subtracted from log-ratios.
        match_id: integers ``[*B]``, equal for two sequences that are matched over a whole batch, or for all of a group.

    Raises:
        ValueError: for unequal shapes.
        TypeError: for a mask that is not boolean, or for a boolean tensor in place of numbers.

    Example:
        >>> log_prob, mask = torch.tensor([[-1.0, torch.nan]]), torch.tensor([[True, False]])
        >>> inputs = LossInputs(log_prob, mask, advantage=torch.tensor([[2.0, 3.0]]))
        >>> inputs.log_prob, inputs.advantage, inputs.get("entropy")
        (tensor([[-1., 0.]]), tensor([[2., 0.]]), None)
    """

    log_prob: Tensor = field(metadata={"shape": _TOKEN, "graph": True})
    mask: Tensor = field(metadata={"shape": _TOKEN, "boolean": True})
    old_log_prob: Tensor = _optional()
    ref_log_prob: Tensor = _optional()
    advantage: Tensor = _optional()
    expert_mask: Tensor = _optional(boolean=True)
    message_role: Tensor = _optional()
    sampler_log_prob: Tensor = _optional()
    behavior_log_prob: Tensor = _optional()
    age: Tensor = _optional()
    entropy: Tensor = _optional(graph=True)
    selected: Tensor = _optional(boolean=True)
    kl: Tensor = _optional(graph=True)
    teacher_divergence: Tensor = _optional(graph=True)
    sharp_log_prob: Tensor = _optional()
    outcomes: Tensor = _optional(_OUTCOME, graph=True)
    teacher_outcomes: Tensor = _optional(_OUTCOME)
    pair_id: Tensor = _optional(_ROW)
    chosen: Tensor = _optional(_ROW, boolean=True)
    reference_point: Tensor = _optional(_ROW)
    match_id: Tensor = _optional(_ROW)

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        check_record(given)
        # Inputs that were left out must not be instance attributes. Reading them then calls __getattr__.
        vars(self).clear()
        vars(self).update({name: _cleaned(name, value, given["mask"]) for name, value in given.items()})

    @classmethod
    def of_clean(cls, **given: Tensor) -> Self:
        """A record of tensors that already are 0 or False outside the mask. They are not copied."""
        check_record(given)
        # No torch.where over every input: gathered entries are 0 outside the mask already.
        return cls._of({name: _widened(name, value) for name, value in given.items()})

    @classmethod
    def _of(cls, given: Mapping[str, Tensor]) -> Self:
        inputs = cls.__new__(cls)  # __init__ would check and clean again
        vars(inputs).update(given)
        return inputs

    if not TYPE_CHECKING:  # with a visible __getattr__, a type checker would accept any name

        def __getattr__(self, name: str) -> Tensor:
            if name == "log_ratio":  # Python calls this if the property raised an AttributeError
                raise MissingInputError("old_log_prob")
            if name not in INPUTS:
                raise AttributeError(f"LossInputs has no input {name!r}: its inputs are {', '.join(INPUTS)}.")
            raise MissingInputError(name)

    def __repr__(self) -> str:
        return f"LossInputs({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"

    def get(self, name: str) -> Tensor | None:
        """An input, or None if it was left out."""
        return vars(self).get(name)

    @property
    def log_ratio(self) -> Tensor:
        """``log_prob - old_log_prob``, nats."""
        return self.log_prob - self.old_log_prob

    @property
    def given(self) -> dict[str, Tensor]:
        """The inputs that were not left out, by name."""
        return dict(vars(self))

    def replace(self, **changes: Tensor) -> Self:
        """A copy with some inputs changed or added. They need not be clean. :meth:`within` changes the mask."""
        check_record({"mask": self.mask, **changes})
        return self._of({**vars(self), **{name: _cleaned(name, value, self.mask) for name, value in changes.items()}})

    def within(self, mask: Tensor) -> Self:
        """A copy with only those tokens where ``mask`` is True."""
        mask = self.mask & mask
        return self._of({name: _cleaned(name, value, mask) for name, value in self.given.items()} | {"mask": mask})


LossInputs.__dataclass_fields__ = _GivenFields(LossInputs.__dataclass_fields__)  # type: ignore[assignment]


@dataclass
class InputKeys:
    """The default entries of the inputs that the data holds. Models compute the other inputs."""

    old_log_prob: NestedKey = ("next", "log_probs", "full")
    ref_log_prob: NestedKey = ("next", "ref_log_probs", "full")
    advantage: NestedKey = "advantage"
    expert_mask: NestedKey = "expert_mask"
    message_role: NestedKey = "message_role"
    sampler_log_prob: NestedKey = ("next", "sampler_log_probs", "full")
    behavior_log_prob: NestedKey = ("next", "behavior_log_probs", "full")
    age: NestedKey = "age"
    selected: NestedKey = "selected"
    pair_id: NestedKey = "pair_id"
    chosen: NestedKey = "chosen"
    reference_point: NestedKey = "reference_point"
    match_id: NestedKey = "match_id"


def check_record(given: dict[str, Tensor]) -> None:
    """Raise a ValueError for unequal shapes, and a TypeError for masks that are not boolean or numbers that are."""
    mask = given["mask"]
    per_token = {name: given[name] for name in PER_TOKEN if name in given}
    check_same_shape(mask=mask, **per_token)
    check_is_mask(**{name: given[name] for name in _BOOLEAN if name in given})
    check_is_number(**{name: value for name, value in per_token.items() if name not in _BOOLEAN})
    check_same_shape(**{name: given[name] for name in PER_OUTCOME if name in given})
    whole, rows = mask.shape, mask.shape[:-1]
    for name, shape in {name: given[name].shape for name in (*PER_OUTCOME, *PER_ROW) if name in given}.items():
        fits = shape == rows if name in PER_ROW else shape[: len(whole)] == whole and len(shape) - len(whole) in (1, 2)
        if not fits:
            expected = f"{SHAPES[name]} for a mask of shape {tuple(whole)}"
            raise ValueError(f"{name} has shape {tuple(shape)}, expected {expected}.")


def _widened(name: str, value: Tensor) -> Tensor:
    """Widen the numbers of tokens to float32, and detach data."""
    # Data with a graph would get a gradient through an objective that treats it as a constant.
    value = value if name in _WITH_GRAPH else value.detach()
    # Ids of pairs must stay integers: float32 rounds those above 2**24.
    if value.dtype == torch.bool or (name in PER_ROW and not value.is_floating_point()):
        return value
    return widen(value)[0]


def _cleaned(name: str, value: Tensor, mask: Tensor) -> Tensor:
    if name == "mask":
        return value
    value = _widened(name, value)
    if name in PER_ROW:
        return clean(value, mask.any(-1)) if value.is_floating_point() else value
    return clean(value, mask.reshape(*mask.shape, *[1] * (value.ndim - mask.ndim)))


def _with(**facts: object) -> tuple[str, ...]:
    return tuple(f.name for f in fields(LossInputs) if all(f.metadata.get(key) == x for key, x in facts.items()))


#: The names of all inputs, and their shapes.
INPUTS, SHAPES = _with(), {f.name: str(f.metadata["shape"]) for f in fields(LossInputs)}
#: Inputs with one value per token, except the mask.
PER_TOKEN = tuple(name for name in _with(shape=_TOKEN) if name != "mask")
#: Inputs with several values per token, for one teacher or several.
PER_OUTCOME = _with(shape=_OUTCOME)
#: Inputs with one value per sequence.
PER_ROW = _with(shape=_ROW)
#: Inputs that may be NaN, where the sampler computed no log-prob.
OF_SAMPLER = ("old_log_prob", "sampler_log_prob")
#: Input -> its default entry in the data. Models compute the other inputs.
KEYS: dict[str, NestedKey] = {f.name: f.default for f in fields(InputKeys)}
_BOOLEAN, _WITH_GRAPH = _with(boolean=True), _with(graph=True)
#: Token masks that the data holds.
MASKS = tuple(name for name in PER_TOKEN if name in _BOOLEAN and name in KEYS)


# ------------------------------------------------------------------ which inputs a function reads


def dummy_inputs(*, teachers: int = 1, device: torch.device | None = None) -> LossInputs:
    """Six sequences of one token each, for a dry run before there is data. Six rows form whole pairs and whole triples."""
    # Log-probs of 0 and ratios of 1 are in the domain of every formula.
    zeros = torch.zeros(6, 1, device=device)
    row, place = zeros.squeeze(-1), torch.arange(6, device=device)
    first = place % 2 == 0
    given = dict.fromkeys(PER_TOKEN, zeros)
    given |= dict.fromkeys(PER_OUTCOME, zeros.new_full((6, 1, teachers, 2), 0.5).log())
    given |= dict.fromkeys(("pair_id", "match_id"), place // 2)
    given |= {"selected": zeros == 1, "expert_mask": ~first.unsqueeze(-1), "reference_point": row, "chosen": first}
    return LossInputs.of_clean(mask=zeros == 0, **given)


class Reads(NamedTuple):
    """The inputs that a function reads, except ``log_prob`` and ``mask``."""

    #: The function raises without these.
    required: frozenset[str]
    #: The function reads these with :meth:`LossInputs.get`.
    optional: frozenset[str]

    def among(self, there: Collection[str]) -> frozenset[str]:
        """The inputs that the function reads if the data holds those of ``there``."""
        return self.required | (self.optional & frozenset(there))


class _Watched(LossInputs):
    """Dummy inputs that record which of them a function reads.

    Dummies and record are attributes of a subclass, which :func:`reads_of` makes for each dry run. Copies thus share them.
    """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor:
            if name in INPUTS:
                self._required.add(name)
                return getattr(self._dummy, name)
            return super().__getattr__(name)

        def get(self, name: str) -> Tensor | None:
            if name in vars(self):
                return vars(self)[name]
            self._optional.add(name)
            return self._dummy.get(name) if name in self._there else None

    def __repr__(self) -> str:
        return "LossInputs(dry run)"  # printing must not count as reading

    @property
    def given(self) -> dict[str, Tensor]:
        values = {name: self.get(name) for name in INPUTS}
        return {name: value for name, value in values.items() if value is not None}

    def within(self, mask: Tensor) -> Self:
        return self  # the values of a dry run do not matter


def reads_of(function: Callable[[LossInputs], object], dummy: LossInputs, there: Collection[str] = INPUTS) -> Reads:
    """The inputs that a function reads if the data holds those of ``there``. The function runs once, on dummy tokens."""
    required, optional = set[str](), set[str]()
    state = {"_dummy": dummy, "_there": there, "_required": required, "_optional": optional}
    watched = type("_Watched", (_Watched,), state)
    # A function may raise if an optional input is missing. The inputs that it had read by then are recorded.
    raises = () if {*INPUTS} <= {*there} else (Exception,)
    # fork_rng, because a selection may draw random numbers.
    with torch.no_grad(), torch.random.fork_rng(devices=[]), contextlib.suppress(*raises):
        function(watched(dummy.log_prob, dummy.mask))
    return Reads(frozenset(required), frozenset(optional - required))


# ------------------------------------------------------------------ objectives

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class LossTerm:
    """One part of a loss, before summation over tokens.

    A part with one value per sequence, or per pair of sequences, has ``T = 1``. The mask must not depend on the values of
    log-probs, because denominators are counted from it before any model has run. A token that is dropped for its value
    (clipped, or too far from the sampler) stays in the mask and has the value 0.

    Args:
        name: reported as ``loss_<name>``.
        value: nats or rewards per token, to be minimised, ``[*B, T]``. Ignored where the mask is False.
        mask: bool ``[*B, T]``, the tokens over which the part is summed.
        weight: factor of the whole part, dimensionless.
        metrics: name -> number to log, a 0-dim tensor without graph on the device of ``value``.
        aggregation: how this part is summed, see :func:`~torchrl_llm_kl.losses.aggregate`. None: the aggregation of the loss.

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


#: The result of an objective, or of a term of a loss.
Terms = tuple[LossTerm, ...]
#: The result of a correction: weights of the terms, and metrics.
Weights = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class Once:
    """An input with one value per sequence that is computed once for a whole batch, before the batch is split.

    Args:
        name: name of the input.
        function: computes the input, ``[*B]``, from the other inputs.
        mismatched: whether the function takes log-probs of mismatched prompts and answers.
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
        once: the input that is computed once for a whole batch, if any.
        together: number of neighbouring rows that one value compares. 1 if a ``pair_id`` names them.
        formula: the function without checks.
    """

    aggregation: Aggregation = "token-mean"
    once: Once | None = None
    together: int = 1
    formula: Callable[..., object] | None = None

    @cached_property
    def needs(self) -> frozenset[str]:
        """The inputs that it requires under its default hyper-parameters, except ``log_prob`` and ``mask``.

        Example:
            >>> from torchrl_llm_kl.losses import ppo
            >>> sorted(spec_of(ppo).needs)
            ['advantage', 'old_log_prob']
        """
        assert self.formula is not None
        return reads_of(self.formula, dummy_inputs()).required


class UnknownObjectiveError(UnknownNameError):
    """The name is not registered. The message lists the registered names."""


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

    The function reads required inputs as attributes (``inputs.advantage``), and optional inputs with
    ``inputs.get("selected")``. :class:`~torchrl_llm_kl.losses.PolicyLoss` runs it once on dummy tokens to find out which
    entries the data must hold. The inputs are clean (:class:`LossInputs`), so the body is only the formula.

    The keyword-only parameters are hyper-parameters. A call raises a ``ValueError`` for a value outside the range or the
    choices of the annotation, and a ``TypeError`` for an unknown name. A scalar may be a 0-dim tensor. It is never read on the
    host, so its range is not checked. Metrics are masked means unless documented otherwise.

    The formulas write ``A`` for the advantage, ``r = exp(log_prob - old_log_prob)`` for the probability ratio and ``sg`` for
    stop-gradient.

    Names, types and tables follow from the signature and the docstring, whose last paragraph is ``Source: ...``. ``make docs``
    writes them down. A function without the decorator can also be passed to a loss. The arguments are as in
    :class:`ObjectiveSpec`. ``options`` is for a function that takes ``**options: Unpack[<a TypedDict>]`` and passes them on. It
    is the function that receives them and has their defaults. They become hyper-parameters of the objective.

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
        torchrl_llm_kl.losses._objective.MissingInputError: gpg needs advantage: pass advantage= to LossInputs, [*B, T].
    """
    spec = ObjectiveSpec(name, aggregation=aggregation, only_with=only_with or {}, once=once, together=together)

    def register(function: Callable[P, Terms]) -> Callable[P, Terms]:
        if options is not None:
            # Specs, tables and checks read the signature, in which ``**options`` would hide the keywords.
            own = inspect.signature(function, eval_str=True)
            *named, passed = own.parameters.values()
            names, there = get_args(passed.annotation)[0].__annotations__, signature_of(options)
            whole = own.replace(parameters=[*named, *(there[name] for name in names)])
            function.__signature__ = whole  # type: ignore[attr-defined]
        return cast("Callable[P, Terms]", _REGISTRY.add(name, _with_checks(spec, function)))

    return register


def loss_part(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the hyper-parameters of a term or a correction like those of an objective, without registering it."""
    return lambda function: _with_checks(ObjectiveSpec(name), function)


def _read(spec: ObjectiveSpec, formula: Callable[..., object]) -> ObjectiveSpec:
    """Add the facts of a function, whose first parameter is the record of inputs."""
    inputs, *_ = inspect.signature(formula).parameters
    return replace(spec.reading(formula, (inputs,)), formula=formula)


def name_of(function: Callable[..., object]) -> str:
    """The name of a function, of the function in a partial, or of the class of a callable object."""
    inner = function.func if isinstance(function, partial) else function
    return getattr(inner, "__name__", type(inner).__name__)


def _with_checks(spec: ObjectiveSpec, formula: Callable[P, R]) -> Callable[P, R]:
    """``formula``, preceded by the checks of its hyper-parameters."""
    spec = _read(spec, formula)

    @wraps(formula)
    def call(*args: P.args, **hyper: P.kwargs) -> R:
        spec.check(hyper)
        check_is_scalar(**hyper)  # a tensor of several numbers would broadcast over tokens
        try:
            return formula(*args, **hyper)
        except MissingInputError as error:
            # The record does not know which function reads it.
            raise MissingInputError(error.input, spec.name) from None

    call.spec = spec  # type: ignore[attr-defined]
    return call


def spec_of(function: Callable[..., Terms] | str) -> ObjectiveSpec:
    """The :class:`ObjectiveSpec` of an objective (a function or its name), a term or a correction.

    A function that is not registered gets a new spec, with the defaults of :func:`objective`.

    Example:
        >>> from torchrl_llm_kl.losses import sapo
        >>> spec_of(sapo).aggregation, spec_of(sapo).hyper
        ('seq-mean-token-mean', ('tau_pos', 'tau_neg'))
    """
    function = _REGISTRY[function] if isinstance(function, str) else function
    spec = getattr(function, "spec", None)
    return spec if isinstance(spec, ObjectiveSpec) else _read(ObjectiveSpec(name_of(function)), function)


def available_objectives() -> tuple[str, ...]:
    """Every name that :func:`get_objective` accepts, sorted.

    Example:
        >>> import torchrl_llm_kl.losses
        >>> available_objectives()[:3]
        ('a2po', 'a3po', 'aot')
    """
    return tuple(sorted(_REGISTRY))


def get_objective(name: str) -> Callable[..., Terms]:
    """Look up an objective. Every look-up returns the same object, which can be pickled.

    Args:
        name: one of :func:`available_objectives`.

    Raises:
        UnknownObjectiveError: a ``ValueError`` that lists the names and suggests the nearest one.

    Example:
        >>> from torchrl_llm_kl.losses import ppo
        >>> get_objective("ppo") is ppo
        True
    """
    return _REGISTRY[name]


#: The KL of each position given its prefix, or the KL of whole sequences.
KLLevel = Literal["token", "sequence"]
#: The divergence that penalises a policy's distance to the reference.
FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
#: The weight of a pair of answers: none, the policy's probability of the pair, or that probability relative to its own answers.
Weighting = Literal["none", "probability", "aligned"]
#: The probability that a label is wrong.
Smoothing = Annotated[Scalar, Range(0.0, 0.5)]
