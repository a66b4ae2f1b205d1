"""Registries with aliases and suggestions, and hyper-parameters under the names of other libraries."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torchrl_llm_kl._foreign import foreign_hint

T = TypeVar("T")


class UnknownNameError(KeyError, ValueError):
    """Unknown name; the message lists the known names and suggests the nearest one."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would quote it and escape the quotes inside


def nearest(name: object, known: Iterable[str | None]) -> str | None:
    """The known name that is the fewest edits from ``name``; None if none is near. Case, ``-`` and ``_`` are no edits.

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
    near = "" if name.startswith("_") else did_you_mean(name, known)  # Python asks for names of its own
    return AttributeError(f"module {module!r} has no attribute {name!r}{near and '.' + near}")


def first_sentence(error: BaseException) -> str:
    """What an error of another library says first, on one line.

    Example:
        >>> first_sentence(OSError("No such model.  Check the name."))
        'No such model.'
    """
    text = " ".join(str(error).split())
    end = text.find(". ")
    return text if end < 0 else text[: end + 1]


class Registry(Mapping[str, T], Generic[T]):
    """Named things of one kind; a read-only mapping with :meth:`add`.

    Iteration yields the names in the order of :meth:`add`. ``[]`` accepts aliases too; ``in`` and iteration do not.

    Args:
        kind: the noun for messages.
        error: raised for an unknown name; its message suggests the nearest one.
        aliases: other names: alias -> name.

    Example:
        >>> shapes = Registry[int]("shape", aliases={"box": "square"})
        >>> shapes.add("square", 4)
        4
        >>> shapes["box"]
        4
        >>> shapes["sqare"]
        Traceback (most recent call last):
        ...
        torchrl_llm_kl._registry.UnknownNameError: unknown shape 'sqare'. Did you mean 'square'? Known: square.
    """

    def __init__(
        self, kind: str, *, error: type[ValueError] = UnknownNameError, aliases: Mapping[str, str] | None = None
    ) -> None:
        self.kind, self._error, self.aliases = kind, error, dict(aliases or {})
        self._items: dict[str, T] = {}

    def add(self, name: str, item: T) -> T:
        """Register ``item`` and return it.

        Raises:
            ValueError: if the name is taken.
        """
        if name in self._items or name in self.aliases:
            raise ValueError(f"the {self.kind} {name!r} is registered already: choose another name.")
        self._items[name] = item
        return item

    def __getitem__(self, name: str) -> T:
        own = self.aliases.get(name, name) if isinstance(name, str) else name
        if isinstance(own, str) and own in self._items:
            return self._items[own]
        hint = did_you_mean(name, [*self._items, *self.aliases])
        raise self._error(no_such(f"unknown {self.kind}", name, self._items, hint=hint))

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@dataclass(frozen=True)
class Hyperparameters:
    """The hyper-parameters of a registered function, and their names in other libraries.

    Args:
        owner: the function's name, for messages.
        names: its own hyper-parameters.
        aliases: other names: alias -> one name, or several that it sets at once.
        obsolete: hyper-parameters of other libraries that have no effect here -> the reason.
        refused: unsupported ones -> (the one harmless value, the alternative).

    Example:
        >>> ppo = Hyperparameters("ppo", ("clip_low", "clip_high"), {"clip_range": ("clip_low", "clip_high")})
        >>> ppo.translate({"clip_range": 0.2, "clip_high": 0.28})
        {'clip_low': 0.2, 'clip_high': 0.28}
    """

    owner: str
    names: tuple[str, ...]
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    obsolete: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, tuple[Any, str]] = field(default_factory=dict)

    @property
    def accepted(self) -> tuple[str, ...]:
        """Every name that :meth:`translate` accepts."""
        return (*self.names, *self.aliases, *self.obsolete, *self.refused)

    def translate(self, given: Mapping[str, Any], *, stacklevel: int = 3) -> dict[str, Any]:
        """``given`` under the function's own names; None for an alias of several names sets nothing.

        Raises:
            TypeError: for an unknown hyper-parameter, or one given under two names.
            ValueError: for an unsupported value.

        Warns:
            UserWarning: for one that has no effect here.
        """
        out: dict[str, Any] = {}
        # A name for one side overrides one for both: `clip_high=0.28` and `clip_range=0.2`.
        for key in sorted(given, key=lambda key: -len(self._targets(key))):
            value = given[key]
            if key in self.refused:
                harmless, advice = self.refused[key]
                if value != harmless:
                    raise ValueError(f"{self.owner}: {key}={value!r} is not supported: {advice}.")
            elif key in self.obsolete:
                if value is not None:
                    text = f"{self.owner}: {key} has no effect here: {self.obsolete[key]}."
                    warnings.warn(text, stacklevel=stacklevel)
            else:
                out |= self._translated(key, value, given)
        return out

    def _translated(self, key: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        targets = self._targets(key)
        unknown = [target for target in targets if target not in self.names]
        if unknown:
            what, hint = f"{self.owner} has no hyper-parameter", foreign_hint(key, self.names)
            raise TypeError(no_such(what, key, self.names, also=self.aliases, hint=hint))
        if len(targets) > 1:
            return {} if value is None else dict.fromkeys(targets, value)
        twins = [other for other in given if other != key and self._targets(other) == targets]
        if twins:
            raise TypeError(f"{self.owner}: {key!r} and {twins[0]!r} are the same hyper-parameter: pass one of them.")
        return {targets[0]: value}

    def _targets(self, key: str) -> tuple[str, ...]:
        return self.aliases.get(key, (key,))
