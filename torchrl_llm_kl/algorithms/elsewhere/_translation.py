"""A translation of another library's settings, and the reader that sorts each setting into one of its lists."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from torchrl_llm_kl._foreign import CHOICES, Choice, Foreign, Library, Place, find_row
from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl._registry import did_you_mean, no_such
from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.advantages import advantage_spec
from torchrl_llm_kl.algorithms._algorithm import apply_overrides
from torchrl_llm_kl.algorithms._make import make_algorithm
from torchrl_llm_kl.algorithms._parts import AlgorithmParts
from torchrl_llm_kl.algorithms.presets import get_algorithm
from torchrl_llm_kl.estimators import AdaptiveKLCoefficient
from torchrl_llm_kl.losses import Correction, rollout_corrections
from torchrl_llm_kl.scoring import LogProbScorer, ModelOrScorer, Sampling, ScoreOptions

if TYPE_CHECKING:
    from torchrl_llm_kl.advantages import AdvantageName
    from torchrl_llm_kl.algorithms import AlgorithmName


#: Why GDPO without the division by the deviation is refused.
NOT_APART = "without the division the rewards are not normalised apart: add them up, use dr_grpo"


@dataclass(frozen=True)
class Setting:
    """A setting of another library, and how it was translated.

    Args:
        name: the path in the other library.
        value: the value in the other library.
        here: the name in this package. Empty for a setting without a counterpart.
        note: advice, or the reason for a missing counterpart.
        given: False for a default of the other library.
    """

    name: str
    value: object
    here: str = ""
    note: str = ""
    given: bool = True


@dataclass(frozen=True)
class Translation:
    """An algorithm of another library in this package's terms.

    Each given setting is in exactly one of ``translated``, ``sampled``, ``outside`` and ``refused``. ``print`` shows all lists.

    Args:
        library: the other library.
        algorithm: the preset.
        recipe: :attr:`overrides` whose modules are not constructed yet.
        sampling: the distribution that the library samples from. Its log-probs may be over all tokens, so :meth:`make` passes
            only the temperature.
        translated: settings that ``algorithm`` and ``overrides`` hold.
        sampled: settings that ``sampling`` holds.
        outside: settings of the training loop, with advice. Also defaults of the library that need an action.
        refused: unknown settings and settings without a counterpart, with the reason.
    """

    library: Library
    algorithm: AlgorithmName
    recipe: Mapping[str, object]
    sampling: Sampling = field(default_factory=Sampling)
    translated: tuple[Setting, ...] = ()
    sampled: tuple[Setting, ...] = ()
    outside: tuple[Setting, ...] = ()
    refused: tuple[Setting, ...] = ()

    @property
    def overrides(self) -> Json:
        """Arguments of :func:`make_algorithm` that reproduce the library's algorithm, its defaults included.

        Coefficients and corrections hold state, so each access constructs new ones.
        """
        return {name: _fresh(value) for name, value in self.recipe.items()}

    def make(self, actor: ModelOrScorer, *, without_refused: bool = False, **more: Any) -> AlgorithmParts:
        """Call :func:`make_algorithm` with the preset and the overrides.

        Args:
            actor: the model to train.

        Keyword Args:
            without_refused: ignore the refused settings.
            more: further arguments, such as ``reference=`` and ``critic=``. They replace overrides of the same name.
                ``objective_args``, ``advantage_args`` and ``loss_args`` are merged key by key. ``group_key`` replaces
                ``group_size``.

        Raises:
            ValueError: if settings are refused, with the reasons.

        Example:
            >>> from transformers import Qwen2Config, Qwen2ForCausalLM
            >>> from torchrl_llm_kl import from_trl
            >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=11, hidden_size=8, intermediate_size=8,
            ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))
            >>> parts = from_trl({"loss_type": "dr_grpo", "max_completion_length": 64}).make(model)
            >>> parts.loss.max_len
            64
        """
        if self.refused and not without_refused:
            reasons = "; ".join(f"{row.name}={row.value!r}: {row.note}" for row in self.refused)
            raise ValueError(f"{self.library}'s {reasons}. Change them, or leave them out with without_refused=True.")
        own = self.overrides
        more["loss_args"] = {**(more.get("loss_args") or {})}
        both = [each.get("loss_args", {}).get("corrections", ()) for each in (own, more)]
        if any(both):
            more["loss_args"]["corrections"] = [correction for some in both for correction in some]
        for part in ("objective_args", "advantage_args"):
            more[part] = {**own.get(part, {}), **more.get(part, {})}
        if "group_key" in more:
            own.pop("group_size", None)  # make_algorithm refuses both
        if isinstance(actor, LogProbScorer) and actor.options.temperature == self.sampling.temperature:
            own.pop("options", None)  # the scorer has its own options
        return make_algorithm(self.algorithm, actor, **{**own, **more})

    def __str__(self) -> str:
        lines = [f"{self.library} -> make_algorithm({self.algorithm!r}, actor, ...)", ""]
        width = max((len(name) for name in self.recipe), default=0)
        lines += [f"  {name:<{width}} = {show(value)}" for name, value in self.recipe.items()]
        lines += ["", f"sampled from {self.sampling}"]
        lists = {"translated": self.translated, "sampled": self.sampled}
        lists |= {"outside (settings of the loop)": self.outside, "refused (no counterpart)": self.refused}
        for title, rows in lists.items():
            if rows:
                lines += ["", title]
                width = max(len(f"{row.name} = {show(row.value)}") for row in rows)
                lines += [f"  {f'{row.name} = {show(row.value)}':<{width}}  {_what(row)}".rstrip() for row in rows]
        return "\n".join(lines)


def _what(row: Setting) -> str:
    here = f"-> {', '.join(row.here.split())}" if row.here else ""
    default = "" if row.given else "default"
    return "; ".join(filter(None, (here, row.note, default)))


def _fresh(value: object) -> object:
    """Construct the modules of a recipe, anew for each loss, since they hold state."""
    if isinstance(value, New):
        return value()
    if isinstance(value, dict):
        return {name: _fresh(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_fresh(inner) for inner in value]
    return value


class New(partial[Any]):
    """A module that :meth:`Translation.make` constructs. Its repr is the call."""

    def __repr__(self) -> str:
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.keywords.items())]
        return f"{self.func.__name__}({', '.join(given)})"


def show(value: object) -> str:
    """The text of a value in a table."""
    if isinstance(value, partial) and not isinstance(value, New):
        return New.__repr__(value)  # type: ignore[arg-type]
    if callable(value) and hasattr(value, "__name__"):
        return str(value.__name__)
    return repr(value)


# ------------------------------------------------------------------ sorting


class Reader:
    """Reads settings by the table of their library, and records where each setting goes.

    :meth:`finish` places all settings that no rule has taken, as their rows say. Settings that others make ineffective are
    outside.
    """

    def __init__(self, library: Library, rows: Mapping[str, Foreign], given: Mapping[str, object]) -> None:
        self.library, self.rows, self.given = library, rows, dict(given)
        self.overrides: dict[str, object] = {}
        self.objective: dict[str, object] = {}
        self.advantage: dict[str, object] = {}
        self._corrections: list[New] = []
        self._placed: dict[str, tuple[Place, Setting]] = {}

    def __getitem__(self, name: str) -> Any:
        """The value of a setting, or its default."""
        return self.given[name] if name in self.given else self.rows[name].default

    def place(self, place: Place, *names: str, note: str = "") -> None:
        """Record the place of settings, given or default. The first place of a setting stays."""
        for name in names:
            if not note and name not in self.given and self[name] is None:
                continue  # neither library has this setting
            row = find_row(self.rows, name)
            here = row.here if row and place in ("override", "sampling") else ""
            setting = Setting(name, self[name], here, note or (row.note if row else ""), name in self.given)
            self._placed.setdefault(name, (place, setting))

    def take(self, name: str, note: str = "") -> Any:
        """Mark a setting as translated, and return its value."""
        self.place("override", name, note=note)
        return self[name]

    def set(self, path: str, value: object) -> None:
        """Set an argument of make_algorithm, or the setting of a part: ``objective_args.clip_low``."""
        part, _, own = path.rpartition(".")
        {"": self.overrides, "objective_args": self.objective, "advantage_args": self.advantage}[part][own] = value

    def copy(self, *names: str) -> None:
        """Set the arguments that the rows of these settings name to their values."""
        for name in names:
            for path in self.rows[name].here.split():
                self.set(path, self.take(name))

    def choose(self, name: str, value: object = ..., *, note: str = "") -> Choice:
        """Translate a setting with few values by the table of choices. ``value`` replaces the given one."""
        choices = CHOICES[self.library, self.rows[name].section.lower(), name]
        value = self[name] if value is ... else value
        self.known(name.rpartition(".")[2], value, choices)
        choice = choices[str(value)]
        self.take(name, note or choice.note)
        for path, value in choice.overrides.items():
            self.set(path, value)
        for theirs, own in choice.passed.items():
            if own:
                self.set(own, self.take(theirs))
            else:
                self.copy(theirs)
        return choice

    def preset(self, name: str) -> AlgorithmName:
        """The preset that the value of a setting stands for."""
        return cast("AlgorithmName", self.choose(name).here)

    def known(self, name: str, value: object, known: Iterable[str]) -> None:
        """Raise a ValueError for a value that the library does not know either."""
        if value not in list(known):  # a list is not hashable
            raise ValueError(no_such(f"{self.library} has no {name}", value, known))

    def out(self, name: str, note: str) -> None:
        """Record a setting of the training loop, if it was given."""
        if name in self.given:
            self.place("outside", name, note=note)

    def refuse(self, name: str, note: str) -> None:
        """Record a setting without a counterpart, given or default."""
        if name in self._placed and self._placed[name][0] == "override":
            del self._placed[name]
        self.place("refused", name, note=note)

    def correct(self, correction: Callable[..., Correction], **settings: object) -> None:
        """Add a correction to the loss."""
        self._corrections.append(New(correction, **settings))

    def verls_corrections(self, section: str) -> None:
        """Read verl's ``rollout_correction``, which Trinity-RFT has too."""
        settings: dict[str, object] = {}
        for name in ("rollout_is", "rollout_rs"):
            if self[f"{section}{name}"] is not None:
                both = {own: self.take(f"{section}{own}") for own in (name, f"{name}_threshold")}
                settings |= {own: value for own, value in both.items() if value is not None}
        for made in rollout_corrections(**settings):  # type: ignore[arg-type]
            given = {name: x.item() if isinstance(x, Tensor) else x for name, x in made.hyper.items()}
            self.correct(type(made), **given)

    def adaptive(self, coeff: float, section: str) -> New:
        """A coefficient that adapts to a target KL."""
        target, horizon = (self.take(f"{section}{name}") for name in ("target_kl", "horizon"))
        return New(AdaptiveKLCoefficient, coeff, target=target, horizon=horizon)

    def one_aggregation(self, name: str, what: str, own: str, others: str, advice: str) -> None:
        """Aggregate as the objective does. Refuse the setting if other terms would be aggregated in another way."""
        self.overrides["aggregation"] = own
        if self.overrides.get("kl_loss", "none") != "none" or self.overrides.get("entropy_coeff", 0.0) != 0:
            self.refuse(name, f"{what} would be summed by {own}, the KL and entropy by {others}: {advice}")

    def sample(
        self, temperature: str, top_p: str | None = None, top_k: str | None = None, min_p: str | None = None
    ) -> Sampling:
        """The sampling distribution. -1 and None do not truncate it."""
        names = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
        self.place("sampling", *(name for name in names.values() if name in self.given))
        drawn = Sampling(**{own: self[name] for own, name in names.items() if name})
        # These libraries score all tokens at the sampling temperature, without top-p or top-k.
        self.overrides["options"] = New(ScoreOptions, Sampling(drawn.temperature))
        return drawn

    def group(self, algorithm: AlgorithmName, name: str) -> None:
        """Read the number of answers to a prompt."""
        answers = self[name]
        check_range(1, **{name: answers})
        advantage = cast("AdvantageName | None", self.overrides.get("advantage", get_algorithm(algorithm).advantage))
        if answers > 1 and advantage is not None and "group" in advantage_spec(advantage).needs:
            self.copy(name)
        else:
            self.out(name, "answers to each prompt: the sampler draws them, and nothing compares them")

    def finish(self, algorithm: AlgorithmName, sampling: Sampling | None = None) -> Translation:
        """Place the remaining settings, check the overrides against the preset, and return the translation."""
        for name in self.given:
            row = find_row(self.rows, name)
            if row is None:
                known = [known for known in self.rows if not known.endswith("*")]
                # A misspelt section is near as a path, a misspelt leaf as the last part.
                leaf = {known.rpartition(".")[2]: known for known in known}
                near = did_you_mean(name, known) or did_you_mean(name.rpartition(".")[2], leaf)
                self.place("refused", name, note=f"{self.library} has no such setting.{near}")
            elif row.place in ("override", "sampling"):  # a length limit still limits the sampler
                unused = f"no effect in {self.library} beside these settings: leave it out"
                self.place("outside", name, note=row.note if "max_new_tokens" in row.note else unused)
            else:
                self.place("outside" if self[name] == row.default else row.place, name)
        arguments = {"objective_args": self.objective, "advantage_args": self.advantage}
        arguments |= {"loss_args": {"corrections": self._corrections} if self._corrections else {}}
        recipe = self.overrides | {name: given for name, given in arguments.items() if given}
        # Errors about overrides belong to the translation, not to a later `make`.
        checked = {name: _fresh(value) for name, value in recipe.items() if name not in _OF_MAKE}
        apply_overrides(get_algorithm(algorithm), checked)
        lists: dict[Place, list[Setting]] = {"override": [], "sampling": [], "outside": [], "refused": []}
        for place, setting in self._placed.values():
            lists[place].append(setting)
        placed = (tuple(rows) for rows in lists.values())
        return Translation(self.library, algorithm, recipe, sampling or Sampling(), *placed)


#: Arguments of make_algorithm that are not settings of a preset.
_OF_MAKE = ("group_size", "options", "loss_args")


# ------------------------------------------------------------------ files


def read_mapping(settings: str | os.PathLike[str] | Mapping[str, object], what: str) -> Mapping[str, object]:
    """Read a mapping from a YAML file, from YAML text, or from a mapping."""
    if isinstance(settings, Mapping):
        return settings
    text = os.fspath(settings)
    if isinstance(settings, os.PathLike) or ("\n" not in text and Path(text).is_file()):
        text = Path(text).read_text(encoding="utf-8")
    values = read_yaml(text)
    if not isinstance(values, Mapping):
        raise ValueError(f"expected {what}: a file, YAML or a mapping, got {text[:60]!r}.")
    return values


def read_yaml(text: str) -> object:
    """Parse YAML. ``1e-6`` is a number, as for OmegaConf, while YAML 1.1 reads it as a string."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"^[-+]?(?:\d[\d_]*)(?:\.[\d_]*)?[eE][-+]?\d+$|^[-+]?\.\d[\d_]*(?:[eE][-+]?\d+)?$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    return yaml.load(text, Loader=Loader)


def resolved(
    given: Mapping[str, object], rows: Mapping[str, Foreign], is_default: Callable[[str, object], bool]
) -> dict[str, object]:
    """Leave out references to other settings (``${...}``) that are the library's defaults, by ``is_default(name, value)``.

    Raises:
        ValueError: for any other reference, since its value is unknown.
    """
    out: dict[str, object] = {}
    for name, value in given.items():
        row = find_row(rows, name)
        read = row is not None and row.place in ("override", "sampling")
        if not (read and "${" in str(value)):
            out[name] = value
        elif not is_default(name, value):
            raise ValueError(f"{name}={value!r} refers to another setting: resolve it first, OmegaConf.to_container.")
    return out
