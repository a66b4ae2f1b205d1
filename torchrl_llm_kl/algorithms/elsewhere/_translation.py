"""The result of a translation, and the reader that sorts each setting into one of its lists."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from torchrl_llm_kl._foreign import CHOICES, Choice, Foreign, Library, Place, find_row
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
    from yaml import SafeLoader

    from torchrl_llm_kl.algorithms import AlgorithmName


@dataclass(frozen=True)
class Setting:
    """A setting of another library and what became of it.

    Args:
        name: its path there.
        value: its value there.
        here: its name in this package; empty if it has none.
        note: what to do with it, or why it has no counterpart.
        given: False for a default of that library.
    """

    name: str
    value: object
    here: str = ""
    note: str = ""
    given: bool = True


@dataclass(frozen=True)
class Translation:
    """An algorithm of another library in this package's terms.

    Each setting that was given is in exactly one of ``translated``, ``sampled``, ``outside`` and ``refused``. ``print`` lists
    them.

    Args:
        library: whose settings they are.
        algorithm: the preset.
        recipe: :attr:`overrides`, with modules that are yet to be constructed.
        sampling: how that library samples. Its log-probs may be over all tokens nevertheless: :meth:`make` passes the
            temperature alone.
        translated: settings that ``algorithm`` and ``overrides`` hold.
        sampled: settings that ``sampling`` holds.
        outside: settings of the loop around the loss, with what to do; a default of the library that asks for something, too.
        refused: settings without a counterpart and unknown ones, with the reason.
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
        """Arguments of :func:`make_algorithm` that make it do what the library does, its defaults included.

        Coefficients and corrections, which hold state, are new ones each time.
        """
        return {name: _fresh(value) for name, value in self.recipe.items()}

    def make(self, actor: ModelOrScorer, *, without_refused: bool = False, **more: Any) -> AlgorithmParts:
        """Call :func:`make_algorithm` with the preset and the overrides.

        Args:
            actor: the model to train.

        Keyword Args:
            without_refused: make it without the settings that are refused.
            more: further arguments, such as ``reference=`` and ``critic=``. They replace overrides of the same name;
                ``objective_args``, ``advantage_args`` and ``loss_args`` are merged key by key, and ``group_key`` replaces
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
            raise ValueError(
                f"{len(self.refused)} of {self.library}'s settings have no counterpart here ({reasons}). Change them, or pass "
                "without_refused=True to train without them."
            )
        own = self.overrides
        for part in ("objective_args", "advantage_args"):
            if part in own and part in more:
                more[part] = {**own[part], **more[part]}
        if "group_key" in more:
            own.pop("group_size", None)
        if isinstance(actor, LogProbScorer) and actor.options.temperature == self.sampling.temperature:
            own.pop("options", None)  # it has its own
        ours, theirs = own.pop("loss_args", {}), more.pop("loss_args", None) or {}
        both = [*ours.get("corrections", ()), *theirs.get("corrections", ())]
        if ours or theirs:
            own["loss_args"] = {**ours, **theirs, **({"corrections": both} if both else {})}
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
    """A new coefficient or correction for each loss: they hold state."""
    if isinstance(value, New):
        return value()
    if isinstance(value, dict):
        return {name: _fresh(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_fresh(inner) for inner in value]
    return value


class New(partial[Any]):
    """A module to construct for each :meth:`Translation.make`; shown as the call."""

    def __repr__(self) -> str:
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.keywords.items())]
        return f"{self.func.__name__}({', '.join(given)})"


def show(value: object) -> str:
    """A value for a table."""
    if isinstance(value, partial) and not isinstance(value, New):
        return New.__repr__(value)  # type: ignore[arg-type]
    if callable(value) and hasattr(value, "__name__"):
        return str(value.__name__)
    return repr(value)


# ------------------------------------------------------------------ sorting


class Reader:
    """Reads settings by the table of their library, and notes where each goes.

    Whatever no rule took is placed by :meth:`finish` as its row says; a setting that another makes ineffective is outside.
    """

    def __init__(self, library: Library, rows: Mapping[str, Foreign], given: Mapping[str, object]) -> None:
        self.library, self.rows, self.given = library, rows, dict(given)
        self.overrides: Json = {}
        self._placed: dict[str, tuple[Place, Setting]] = {}

    def __getitem__(self, name: str) -> Any:
        """The value of a setting, or its default."""
        return self.given[name] if name in self.given else self.rows[name].default

    def place(self, place: Place, *names: str, note: str = "") -> None:
        """Note where settings go, given or default; the first place of each stays."""
        for name in names:
            row = find_row(self.rows, name)
            here = row.here if row and place in ("override", "sampling") else ""
            setting = Setting(name, self[name], here, note or (row.note if row else ""), name in self.given)
            self._placed.setdefault(name, (place, setting))

    def take(self, name: str, note: str = "") -> Any:
        """The value of a setting that the caller translates."""
        self.place("override", name, note=note)
        return self[name]

    @property
    def objective(self) -> Json:
        """The settings of the objective."""
        return cast(Json, self.overrides.setdefault("objective_args", {}))

    @property
    def advantage(self) -> Json:
        """The settings of the advantage."""
        return cast(Json, self.overrides.setdefault("advantage_args", {}))

    def set(self, path: str, value: object) -> None:
        """Set an argument of make_algorithm, or the setting of a part: ``objective_args.clip_low``."""
        part, _, own = path.rpartition(".")
        {"": self.overrides, "objective_args": self.objective, "advantage_args": self.advantage}[part][own] = value

    def copy(self, *names: str) -> None:
        """Pass settings on to the paths of their rows."""
        for name in names:
            for path in self.rows[name].here.split():
                self.set(path, self.take(name))

    def choose(self, name: str, value: Any = ..., *, note: str = "") -> Choice:
        """Translate a setting with a few values by the table of choices; ``value`` replaces the one that was given."""
        choices = CHOICES[self.library, self.rows[name].section.lower(), name]
        value = self[name] if value is ... else value
        self.known(name.rpartition(".")[2], value, choices)
        choice = choices[value]
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
        """The preset that a choice stands for."""
        return cast("AlgorithmName", self.choose(name).here)

    def known(self, name: str, value: object, known: Iterable[str]) -> None:
        """Raise a ValueError for a value that the library does not know either."""
        if value not in list(known):  # a list is not a name
            raise ValueError(no_such(f"{self.library} has no {name}", value, known))

    def out(self, name: str, note: str) -> None:
        """A setting of the loop, if it was given."""
        if name in self.given:
            self.place("outside", name, note=note)

    def refer(self, name: str, value: object, *, repeats: bool) -> None:
        """A setting that refers to another one, whose value is not known here; ``repeats``: it is that of its default."""
        row = find_row(self.rows, name)
        place: Place = "outside" if repeats or (row is not None and row.place == "outside") else "refused"
        note = "refers to another setting" + (
            "" if place == "outside" else ": resolve it first (`OmegaConf.to_container`)"
        )
        self._placed[name] = (place, Setting(name, value, note=note))

    def refuse(self, name: str, note: str) -> None:
        """A setting without a counterpart, given or default."""
        if name in self._placed and self._placed[name][0] == "override":
            del self._placed[name]
        self.place("refused", name, note=note)

    def correct(self, correction: Callable[..., Correction], **settings: object) -> None:
        """Add a correction to the loss."""
        loss_args = self.overrides.setdefault("loss_args", {})
        loss_args.setdefault("corrections", []).append(New(correction, **settings))

    def verls_corrections(self, section: str) -> None:
        """Verl's ``rollout_correction``, which Trinity-RFT has too."""
        settings: Json = {}
        for name in ("rollout_is", "rollout_rs"):
            if self[f"{section}{name}"] is not None:
                both = {own: self.take(f"{section}{own}") for own in (name, f"{name}_threshold")}
                settings |= {own: value for own, value in both.items() if value is not None}
        for made in rollout_corrections(**settings):
            given = {name: x.item() if isinstance(x, Tensor) else x for name, x in made.hyper.items()}
            self.correct(type(made), **given)

    def adaptive(self, coeff: float, section: str) -> New:
        """A coefficient adapted to a target KL, that is constructed for each loss."""
        target, horizon = (self.take(f"{section}{name}") for name in ("target_kl", "horizon"))
        if target is None or horizon is None:
            raise ValueError(f"{section[:-1]}: an adaptive KL coefficient needs target_kl and horizon.")
        return New(AdaptiveKLCoefficient, coeff, target=target, horizon=horizon)

    def one_aggregation(self, name: str, what: str, own: str, others: str, advice: str) -> None:
        """An objective that is summed in another way than the other terms, which is refused if there are any."""
        self.overrides["aggregation"] = own
        if self.overrides.get("kl_loss", "none") != "none" or self.overrides.get("entropy_coeff", 0.0) != 0:
            self.refuse(
                name,
                f"{self.library.partition('-')[0]} sums {what} by {own} and the KL and entropy by {others}; here all terms are "
                f"summed in one way: {advice}",
            )

    def sample(
        self, temperature: str, top_p: str | None = None, top_k: str | None = None, min_p: str | None = None
    ) -> Sampling:
        """The distribution that tokens are drawn from; -1 and None do not truncate."""
        names = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
        self.place("sampling", *(name for name in names.values() if name in self.given))
        drawn = Sampling(**{own: self[name] for own, name in names.items() if name})
        self.overrides["options"] = New(ScoreOptions, Sampling(drawn.temperature))
        return drawn

    def group(self, algorithm: AlgorithmName, name: str) -> None:
        """The number of answers to a prompt."""
        answers = self[name]
        if isinstance(answers, bool) or not isinstance(answers, int) or answers < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {answers!r}.")
        advantage = self.overrides.get("advantage", get_algorithm(algorithm).advantage)
        if answers > 1 and advantage is not None and "group" in advantage_spec(advantage).needs:
            self.copy(name)
        else:
            self.out(name, "answers to each prompt, which the sampler draws and nothing compares")

    def finish(self, algorithm: AlgorithmName, sampling: Sampling | None = None) -> Translation:
        """Place what is left, and check that the algorithm exists."""
        for name in self.given:
            row = find_row(self.rows, name)
            if row is None:
                known = [known for known in self.rows if not known.endswith("*")]
                leaf = {known.rpartition(".")[2]: known for known in known}
                near = did_you_mean(name, known) or did_you_mean(name.rpartition(".")[2], leaf)
                self.place("refused", name, note=f"{self.library} has no such setting.{near}")
            elif row.place in ("override", "sampling"):  # a limit of the sampler has an effect there
                unused = f"no effect in {self.library} beside these settings: leave it out"
                self.place("outside", name, note=row.note if "max_new_tokens" in row.note else unused)
            else:
                self.place("outside" if self[name] == row.default else row.place, name)
        self.overrides = {name: value for name, value in self.overrides.items() if value != {}}
        checked = {name: _fresh(value) for name, value in self.overrides.items() if name not in _OF_MAKE}
        apply_overrides(get_algorithm(algorithm), checked)
        lists: dict[Place, list[Setting]] = {"override": [], "sampling": [], "outside": [], "refused": []}
        for place, setting in self._placed.values():
            lists[place].append(setting)
        placed = (tuple(rows) for rows in lists.values())
        return Translation(self.library, algorithm, self.overrides, sampling or Sampling(), *placed)


#: Arguments of make_algorithm that are not settings of a preset.
_OF_MAKE = ("group_size", "options", "loss_args")


# ------------------------------------------------------------------ files


def read_mapping(settings: object, what: str) -> Mapping[str, object]:
    """A mapping from a YAML file, its text, or a mapping."""
    if isinstance(settings, Mapping):
        return settings
    if not isinstance(settings, (str, os.PathLike)):
        raise TypeError(f"expected {what}: a path, YAML or a mapping, got {type(settings).__name__}.")
    import yaml

    text = os.fspath(settings)
    if isinstance(settings, os.PathLike) or ("\n" not in text and Path(text).is_file()):
        text = Path(text).read_text(encoding="utf-8")
    elif "\n" not in text and text.endswith((".yaml", ".yml")):
        raise FileNotFoundError(f"no file {text!r}: expected {what}, as a path, YAML or a mapping.")
    values = yaml.load(text, Loader=_loader())
    if not isinstance(values, Mapping):
        raise ValueError(f"expected {what}: a mapping of settings, got {type(values).__name__} from {text[:60]!r}.")
    return values


def read_scalar(text: str) -> object:
    """The value of ``name=text``."""
    import yaml

    return yaml.load(text, Loader=_loader())


def _loader() -> type[SafeLoader]:
    """YAML's safe loader, which reads ``1e-6`` as a number, as OmegaConf does."""
    import re

    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"^[-+]?(?:\d[\d_]*)(?:\.[\d_]*)?[eE][-+]?\d+$|^[-+]?\.\d[\d_]*(?:[eE][-+]?\d+)?$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    return Loader
