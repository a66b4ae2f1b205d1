"""Registries with suggestions for unknown names, and the specs of registered functions."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Annotated, Generic, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from torchrl_llm_kl._foreign import foreign_hint, foreign_value

T = TypeVar("T")


class UnknownNameError(KeyError, ValueError):
    """Unknown name. The message lists the known names and suggests the nearest one."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would quote it and escape the quotes inside


def nearest(name: object, known: Iterable[str | None]) -> str | None:
    """Return the known name that is most similar to ``name``, or None. Case, ``-`` and ``_`` are ignored.

    Example:
        >>> nearest("gpro", ["gspo", "grpo"]), nearest("TOKEN_MEAN", ["token-mean"]), nearest("x", ["ppo"])
        ('grpo', 'token-mean', None)
    """
    given, folded = _folded(str(name)), {_folded(each): each for each in known if each}
    near = difflib.get_close_matches(given, folded, n=max(1, len(folded)), cutoff=0.5)
    # A name with the same letters wins, since swapping two letters is the usual mistake.
    return folded[min(near, key=lambda each: sorted(each) != sorted(given))] if near else None


def _folded(name: str) -> str:
    return name.casefold().replace("-", "_")


def did_you_mean(name: object, known: Iterable[str | None]) -> str:
    """Return a part of a message, such as ``" Did you mean 'grpo'?"``. Empty if no known name is similar.

    Example:
        >>> did_you_mean("grpoo", ["ppo", "grpo"])
        " Did you mean 'grpo'?"
    """
    near = nearest(name, known)
    return f" Did you mean {near!r}?" if near else ""


def check_choice(choices: Collection[object], **named: object) -> None:
    """Raise a ValueError unless each named value is one of ``choices``."""
    for name, value in named.items():
        if value not in choices:
            hint = did_you_mean(value, map(str, choices)) if isinstance(value, str) else ""
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.{hint}")


def install_hint(extra: str) -> str:
    """Return a part of a message: how to install an extra from a checkout, since no package index has the package.

    Example:
        >>> install_hint("ray")
        "run pip install '.[ray]' in the checkout of torchrl-llm-kl"
    """
    return f"run pip install '.[{extra}]' in the checkout of torchrl-llm-kl"


def no_such(what: str, name: object, known: Iterable[object], *, hint: str = "") -> str:
    """Return a message about an unknown name: a suggestion, then all accepted names.

    Args:
        what: the beginning of the message, before the name.
        name: the unknown name.
        known: the accepted names.

    Keyword Args:
        hint: a sentence that replaces the suggestion.

    Example:
        >>> no_such("unknown shape", "sqare", ["round", "square"])
        "unknown shape 'sqare'. Did you mean 'square'? Known: round, square."
    """
    names = [str(each) for each in known]
    return f"{what} {name!r}.{hint or did_you_mean(name, names)} Known: {', '.join(names) or 'none'}."


def no_attribute(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return the error for a module's ``__getattr__``. It suggests the nearest public name.

    Example:
        >>> print(no_attribute("torchrl_llm_kl", "RetreiveKL", ["RetrieveKL", "Ragged"]))
        module 'torchrl_llm_kl' has no attribute 'RetreiveKL'. Did you mean 'RetrieveKL'?
    """
    near = "" if name.startswith("_") else did_you_mean(name, known)  # Python and IPython probe for such names
    return AttributeError(f"module {module!r} has no attribute {name!r}{near and '.' + near}")


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of another library's error message, on one line.

    Example:
        >>> first_sentence(OSError("No such model.  Check the name."))
        'No such model.'
    """
    text, dot, _ = " ".join(str(error).split()).partition(". ")
    return text + dot.strip()


def flatten(settings: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Convert nested mappings to paths with dots. An empty mapping keeps its path."""
    out: dict[str, object] = {}
    for name, value in settings.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            out |= flatten(value, f"{path}.")
        else:
            out[path] = value
    return out


class Registry(Mapping[str, T], Generic[T]):
    """Named things of one kind: a mapping that :meth:`add` extends.

    Iteration yields the names in the order of :meth:`add`.

    Args:
        kind: the noun for messages.
        error: the error for an unknown name. Its message suggests the nearest one.

    Example:
        >>> shapes = Registry[int]("shape")
        >>> shapes.add("square", 4)
        4
        >>> shapes["sqare"]
        Traceback (most recent call last):
        ...
        torchrl_llm_kl._registry.UnknownNameError: unknown shape 'sqare'. Did you mean 'square'? Known: square.
    """

    def __init__(self, kind: str, *, error: type[ValueError] = UnknownNameError) -> None:
        self.kind, self._error = kind, error
        self.data: dict[str, T] = {}

    def add(self, name: str, item: T) -> T:
        """Register ``item`` under a name, and return it.

        Raises:
            ValueError: if the name is taken.
        """
        if name in self:
            raise ValueError(f"the {self.kind} {name!r} is registered already: choose another name.")
        self.data[name] = item
        return item

    def __getitem__(self, name: str) -> T:
        if isinstance(name, str) and name in self.data:
            return self.data[name]
        raise self._error(no_such(f"unknown {self.kind}", name, self, hint=foreign_value(self.kind, name)))

    def __contains__(self, name: object) -> bool:
        return name in self.data

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


@dataclass(frozen=True)
class Spec:
    """Facts about a registered function, which its decorator reads from the signature and the docstring.

    Args:
        name: the function's name in its registry.
        hyper: names of its hyper-parameters.
        only_with: hyper-parameter -> (the hyper-parameter that enables it, the values that do so).
        source: the source of the formula, from the paragraph "Source: ..." at the end of the docstring.
        types: hyper-parameter -> its annotated type.
        defaults: hyper-parameter -> default, for those that have one.
    """

    name: str
    hyper: tuple[str, ...] = ()
    only_with: Mapping[str, tuple[str, tuple[object, ...]]] = field(default_factory=dict)
    source: str = ""
    types: Mapping[str, object] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)

    def reading(self: S, function: Callable[..., object], inputs: Sequence[str]) -> S:
        """Return a copy with the facts of a function. Parameters that are not in ``inputs`` are hyper-parameters."""
        empty = inspect.Parameter.empty
        parameters = {key: x for key, x in signature_of(function).items() if x.kind is not x.VAR_KEYWORD}
        _, found, source = inspect.cleandoc(function.__doc__ or "").rpartition("\n\nSource: ")
        hyper = tuple(key for key in parameters if key not in inputs)
        return replace(
            self,
            hyper=hyper,
            source=" ".join(source.split()).removesuffix(".") if found else "",
            types={key: parameters[key].annotation for key in hyper},
            defaults={key: parameters[key].default for key in hyper if parameters[key].default is not empty},
        )

    def check(self, given: Mapping[str, object]) -> None:
        """Raise unless each name is a hyper-parameter of the function, and each value fits its range or its choices."""
        for key, value in given.items():
            if key not in self.hyper:
                hint = foreign_hint(key, self.hyper)
                raise TypeError(no_such(f"{self.name} has no hyper-parameter", key, self.hyper, hint=hint))
            for bounds in ranges_of(self.types.get(key)):
                bounds.check(key, value)
            choices = choices_of(self.types.get(key))
            if choices:
                check_choice(choices, **{key: value})

    def unused(self, given: Mapping[str, object]) -> list[str]:
        """Return the hyper-parameters that differ from their defaults and that the other ones make ineffective."""
        deciding = {key: self.only_with[key] for key in given if key in self.only_with}
        return [
            key
            for key, (name, values) in deciding.items()
            if given.get(name, self.defaults[name]) not in values and given[key] != self.defaults[key]
        ]

    def check_used(self, given: Mapping[str, object]) -> None:
        """Raise a ValueError for a hyper-parameter that the other ones make ineffective."""
        for key in self.unused(given):
            name, values = self.only_with[key]
            raise ValueError(
                f"{self.name}: {key}={given[key]!r} has no effect with {name}={given.get(name, self.defaults[name])!r}: leave "
                f"{key} out, or pass {name}={' or '.join(map(repr, values))}."
            )


S = TypeVar("S", bound=Spec)


def signature_of(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function by name, with evaluated annotations if they can be evaluated."""
    try:
        return inspect.signature(function, eval_str=True).parameters
    except (NameError, AttributeError, TypeError):
        return inspect.signature(function).parameters


class Range(NamedTuple):
    """The range of an ``Annotated`` hyper-parameter: ``[low, high]``, and exclusively between ``above`` and ``below``."""

    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    below: float | None = None

    def check(self, name: str, value: object) -> None:
        """Raise a ValueError for a number outside the range. Tensors pass, since reading one could be a host sync."""
        if isinstance(value, str):
            raise TypeError(f"{name} must be a number, got {value!r}.")
        low, high, above, below = self
        if not isinstance(value, (int, float)):
            return
        if not low <= value <= high or value <= above or (below is not None and value >= below):
            bounds = [f"at least {low:g}"] * (low > -math.inf)
            bounds += [f"greater than {above:g}"] * (above > -math.inf)
            bounds += [f"at most {high:g}"] * (high < math.inf)
            bounds += [f"less than {below:g}"] if below is not None else []
            raise ValueError(f"{name} must be {' and '.join(bounds) or 'a number'}, got {value}.")


def members_of(annotation: object) -> tuple[object, ...]:
    """The members of a union, or the annotation itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def ranges_of(annotation: object) -> list[Range]:
    """The range of an ``Annotated`` number, which may be optional."""
    marked = [each for each in members_of(annotation) if get_origin(each) is Annotated]
    return [fact for each in marked for fact in get_args(each)[1:] if isinstance(fact, Range)]


def choices_of(annotation: object) -> tuple[object, ...]:
    """The values of a Literal, and None if it is optional. Empty for any other type."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    members = [each for each in members_of(annotation) if each is not annotation]
    found = [choices_of(member) for member in members if member is not type(None)]
    if len(found) != 1 or not found[0]:
        return ()
    return (*found[0], *([None] if len(members) > 1 else []))
