"""Registries with suggestions, and the specs of registered functions: their hyper-parameters."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Annotated, Generic, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from torchrl_llm_kl._foreign import foreign_hint, foreign_value

T = TypeVar("T")


class UnknownNameError(KeyError, ValueError):
    """Unknown name; the message lists the known names and suggests the nearest one."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would quote it and escape the quotes inside


def nearest(name: object, known: Iterable[str | None]) -> str | None:
    """The known name that is the fewest edits from ``name``; None if none is near. Case, ``-`` and ``_`` do not count.

    Example:
        >>> nearest("gpro", ["gspo", "grpo"]), nearest("TOKEN_MEAN", ["token-mean"]), nearest("x", ["ppo"])
        ('grpo', 'token-mean', None)
    """
    given, folded = _folded(str(name)), {_folded(each): each for each in known if each}
    near = difflib.get_close_matches(given, folded, n=max(1, len(folded)), cutoff=0.5)
    return folded[min(near, key=lambda each: _edits(given, each))] if near else None


def _folded(name: str) -> str:
    return name.casefold().replace("-", "_")


def _edits(one: str, other: str) -> int:
    """Optimal string alignment distance: letters inserted, left out, replaced, or swapped with their neighbour."""
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (a != b)))
            if i > 1 and j > 1 and (a, b) == (other[j - 2], one[i - 2]):
                row[-1] = min(row[-1], before[j - 2] + 1)
        before, last = last, row
    return last[-1]


def did_you_mean(name: object, known: Iterable[str | None]) -> str:
    """A part of a message, such as ``" Did you mean 'grpo'?"``; empty if no known name is near.

    Example:
        >>> did_you_mean("grpoo", ["ppo", "grpo"])
        " Did you mean 'grpo'?"
    """
    near = nearest(name, known)
    return f" Did you mean {near!r}?" if near else ""


def install_hint(extra: str) -> str:
    """A part of a message: how to install an extra. No package index has the package.

    Example:
        >>> install_hint("ray")
        "run pip install '.[ray]' in the checkout of torchrl-llm-kl"
    """
    return f"run pip install '.[{extra}]' in the checkout of torchrl-llm-kl"


def no_such(what: str, name: object, known: Iterable[object], *, also: Iterable[str] = (), hint: str = "") -> str:
    """A message on an unknown name: the suggestion first, then all that would be accepted.

    Args:
        what: the beginning, before the name.
        name: what was given.
        known: the names to list.

    Keyword Args:
        also: other accepted names, such as aliases.
        hint: takes the place of the suggestion.

    Example:
        >>> no_such("unknown shape", "sqare", ["round", "square"], also=["box"])
        "unknown shape 'sqare'. Did you mean 'square'? Known: round, square (or box)."
    """
    names, others = [str(each) for each in known], list(also)
    more = f" (or {', '.join(others)})" if others else ""
    return f"{what} {name!r}.{hint or did_you_mean(name, [*names, *others])} Known: {', '.join(names) or 'none'}{more}."


def no_attribute(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error of a module's ``__getattr__``; it suggests the nearest public name.

    Example:
        >>> print(no_attribute("torchrl_llm_kl", "RetreiveKL", ["RetrieveKL", "Ragged"]))
        module 'torchrl_llm_kl' has no attribute 'RetreiveKL'. Did you mean 'RetrieveKL'?
    """
    near = "" if name.startswith("_") else did_you_mean(name, known)  # Python asks for its own names
    return AttributeError(f"module {module!r} has no attribute {name!r}{near and '.' + near}")


def first_sentence(error: BaseException) -> str:
    """What an error of another library says first, on one line.

    Example:
        >>> first_sentence(OSError("No such model.  Check the name."))
        'No such model.'
    """
    text, dot, _ = " ".join(str(error).split()).partition(". ")
    return text + dot.strip()


def flatten(settings: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested mappings as paths with dots; an empty mapping keeps its own path."""
    out: dict[str, object] = {}
    for name, value in settings.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            out |= flatten(value, f"{path}.")
        else:
            out[path] = value
    return out


class Registry(Mapping[str, T], Generic[T]):
    """Named things of one kind; a read-only mapping with :meth:`add`.

    Iteration yields the names in the order of :meth:`add`.

    Args:
        kind: the noun for messages.
        error: raised for an unknown name; its message suggests the nearest one.

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
        self._items: dict[str, T] = {}

    def add(self, name: str, item: T) -> T:
        """Register ``item`` under a name, and return it.

        Raises:
            ValueError: if the name is taken.
        """
        if name in self._items:
            raise ValueError(f"the {self.kind} {name!r} is registered already: choose another name.")
        self._items[name] = item
        return item

    def __getitem__(self, name: str) -> T:
        if isinstance(name, str) and name in self._items:
            return self._items[name]
        raise self._error(no_such(f"unknown {self.kind}", name, self._items, hint=foreign_value(self.kind, name)))

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@dataclass(frozen=True)
class Spec:
    """Facts about a registered function that its decorator reads from the signature and the docstring.

    Args:
        name: the function's name in its registry.
        hyper: names of its hyper-parameters.
        only_with: hyper-parameters that only some settings use -> (the hyper-parameter that decides, its values).
        source: where the formula comes from: the paragraph "Source: ..." at the end of its docstring.
        types: hyper-parameter -> its type, as annotated.
        defaults: hyper-parameter -> default, for those that have one.
    """

    name: str
    hyper: tuple[str, ...] = ()
    only_with: Mapping[str, tuple[str, tuple[object, ...]]] = field(default_factory=dict)
    source: str = ""
    types: Mapping[str, object] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)

    def reading(self: S, function: Callable[..., object], inputs: Sequence[str]) -> S:
        """A copy with what signature and docstring say: parameters that are not among ``inputs`` are hyper-parameters."""
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
        """Raise unless each is a hyper-parameter of the function under its own name, and one of its choices if it has some."""
        for key, value in given.items():
            if key not in self.hyper:
                hint = foreign_hint(key, self.hyper)
                raise TypeError(no_such(f"{self.name} has no hyper-parameter", key, self.hyper, hint=hint))
            for bounds in ranges_of(self.types.get(key)):
                bounds.check(key, value)
            choices = choices_of(self.types.get(key))
            if choices and value not in choices:
                hint = did_you_mean(value, map(str, choices)) if isinstance(value, str) else ""
                raise ValueError(f"{key} must be one of {', '.join(map(repr, choices))}, got {value!r}.{hint}")

    def unused(self, given: Mapping[str, object]) -> list[str]:
        """Those of ``given``, under own names, that differ from their defaults and that the others make ineffective."""
        deciding = {key: self.only_with[key] for key in given if key in self.only_with}
        return [
            key
            for key, (name, values) in deciding.items()
            if given.get(name, self.defaults[name]) not in values and given[key] != self.defaults[key]
        ]

    def check_used(self, given: Mapping[str, object]) -> None:
        """Raise a ValueError for a hyper-parameter, under its own name, that the others make ineffective."""
        for key in self.unused(given):
            name, values = self.only_with[key]
            raise ValueError(
                f"{self.name}: {key}={given[key]!r} has no effect with {name}={given.get(name, self.defaults[name])!r}: leave "
                f"{key} out, or pass {name}={' or '.join(map(repr, values))}."
            )


S = TypeVar("S", bound=Spec)


def signature_of(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function by name, with evaluated annotations where these can be evaluated."""
    try:
        return inspect.signature(function, eval_str=True).parameters
    except (NameError, AttributeError, TypeError):
        return inspect.signature(function).parameters


class Range(NamedTuple):
    """Numbers in ``[low, high]`` and between ``above`` and ``below``, exclusive: a part of an ``Annotated`` hyper-parameter."""

    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    below: float | None = None

    def check(self, name: str, value: object) -> None:
        """Raise a ValueError for a number outside, a TypeError for a text. Reading a tensor would be a host sync: it passes."""
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
    """The values of a Literal, and None if it is optional; empty for any other type."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    members = [each for each in members_of(annotation) if each is not annotation]
    found = [choices_of(member) for member in members if member is not type(None)]
    if len(found) != 1 or not found[0]:
        return ()
    return (*found[0], *([None] if len(members) > 1 else []))
