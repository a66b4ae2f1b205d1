"""The configuration of a run: typed sections with their defaults, YAML, overrides, and checks that name the key.

A section has types and defaults; what else is known of a setting is a row of ``settings.csv``.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from importlib.resources import files
from io import StringIO
from pathlib import Path
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from torchrl_llm_kl._registry import did_you_mean, flatten, nearest, no_such
from torchrl_llm_kl._typing import Json

#: The value of a setting that has no default, as in OmegaConf.
REQUIRED = "???"

#: The most levels of lists and named values in a setting, and bytes of a file.
_DEEPEST, _LONGEST = 20, 1 << 20
_SUCH = "sections such as `model:` and `data:`"


class ConfigError(ValueError):
    """A configuration that no run can have; the message names the key, what was found and what to change."""


# ------------------------------------------------------------------ the sections


@dataclass
class ModelConfig:
    """The model that is trained."""

    name: str = REQUIRED
    tokenizer: str | None = None
    dtype: str = "float32"
    device: str | None = None
    attention: str | None = None
    gradient_checkpointing: bool = False


@dataclass
class LoraConfig:
    """Train LoRA adapters (PEFT) instead of all weights."""

    r: int = 16
    alpha: float = 32.0
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    merge: bool = True


@dataclass
class ReferenceConfig:
    """The reference of the KL."""

    name: str = "start"
    service: str | None = None
    decay: float | None = None
    every: int = 1
    reset_every: int | None = None


@dataclass
class DataConfig:
    """Prompts, and how many answers each gets."""

    prompts: str = REQUIRED
    held_out: str | None = None
    held_out_share: float = 0.05
    system_prompt: str | None = None
    shuffle: bool = True
    num_prompts: int = 8
    group_size: int = 8


@dataclass
class RewardConfig:
    """What an answer is worth."""

    functions: Any = None  # a text, or a mapping: OmegaConf knows no such union
    timeout: float = 30.0


@dataclass
class AlgorithmConfig:
    """How the policy is updated."""

    name: str = "grpo"
    args: Json = field(default_factory=dict)
    teacher: str | None = None
    epochs: int = 1
    minibatches: int = 1
    micro_batch: int | None = None


@dataclass
class SamplerConfig:
    """How answers are drawn; they are scored under the same distribution."""

    max_new_tokens: int = 256
    end: list[str] = field(default_factory=list)
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass
class KLConfig:
    """The KL to the reference, in nats per answer."""

    place: str = "preset"
    estimator: str | None = None
    coefficient: float | None = None
    target: float | None = None
    controller: str = "pi"
    controller_args: Json = field(default_factory=dict)
    stop_above: float | None = None
    stop_after: int = 3


@dataclass
class OptimizerConfig:
    """Optimiser and learning rate."""

    name: str = "adamw"
    lr: float = 1e-06
    critic_lr: float | None = None
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-08
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: str = "constant"
    warmup_steps: int = 0


@dataclass
class EvaluationConfig:
    """Rewards on held-out prompts."""

    every: int = 20
    num_prompts: int | None = None
    batch_size: int = 32
    greedy: bool = True


@dataclass
class LoggingConfig:
    """Where the figures go, besides metrics.jsonl."""

    loggers: list[str] = field(default_factory=list)
    project: str = "torchrl-llm-kl"
    name: str | None = None
    doctor_every: int = 20


@dataclass
class CheckpointsConfig:
    """What is kept, to go on from and to use."""

    every: int = 20
    keep: int = 2
    final: str = "last"


@dataclass
class RunConfig:
    """The run itself."""

    steps: int = 100
    seed: int = 0
    out: str = "runs/train"
    threads: int | None = None


@dataclass
class TrainConfig:
    """All settings of a run, in sections.

    Fields of the sections have their meanings in :func:`example_config`, which prints them all. A reward may be given as
    its function alone.

    Raises:
        ConfigError: at construction, for a value that is missing, out of range, or contradicts another one.

    Example:
        >>> config = TrainConfig(
        ...     model=ModelConfig("model"), data=DataConfig("prompts.jsonl"), reward=RewardConfig("rewards.py:correct")
        ... )
        >>> config.algorithm.name, config.optimizer.lr
        ('grpo', 1e-06)
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig | None = None
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    checkpoints: CheckpointsConfig = field(default_factory=CheckpointsConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        for key, value in _values(self):
            _check_plain(key, value)
            _check_value(key, value)
            if SETTINGS[key].path and value is not None:  # no shell expands what is in a file, or behind a `=`
                section, name = key.split(".")
                setattr(getattr(self, section), name, os.path.expanduser(str(value)))
        _check_together(self)

    def to_dict(self) -> Json:
        """The sections as plain dicts, lists, numbers and texts."""
        from omegaconf import OmegaConf

        return cast(Json, OmegaConf.to_container(OmegaConf.structured(self)))

    def to_yaml(self) -> str:
        """The whole configuration, which :func:`read_config` reads."""
        from omegaconf import OmegaConf

        return OmegaConf.to_yaml(OmegaConf.structured(self))


#: The class of each section.
_SECTIONS: dict[str, type] = {name: (get_args(kind) or [kind])[0] for name, kind in get_type_hints(TrainConfig).items()}


@dataclass(frozen=True)
class Setting:
    """What is known of a setting.

    Args:
        key: section and name.
        kind: its type.
        default: its value; ``"???"`` if it must be given.
        meaning: one sentence, for the commented example and the page.
        choices: all values, if there are few.
        low: least value.
        above: a number that it must exceed.
        high: greatest value.
        also: names that other programs give to it.
        example: its value in the commented example, in YAML.
        may_change: whether a resumed run may have another value.
        path: whether ``~`` is the user's home folder in it; a reward's file is expanded where it is loaded.
        args: arguments of ``make_algorithm`` that it sets.
    """

    key: str
    kind: type | UnionType
    default: object
    meaning: str
    choices: list[str]
    low: float | None
    above: float | None
    high: float | None
    also: list[str]
    example: str
    may_change: bool
    path: bool
    args: list[str]


def _rows(name: str) -> list[dict[str, str]]:
    """The rows of a table of this package."""
    return list(csv.DictReader(files(__package__).joinpath(name).read_text(encoding="utf-8").splitlines()))


def _settings() -> Iterator[Setting]:
    rows = {row.pop("key"): row for row in _rows("settings.csv")}
    for section, kind in _SECTIONS.items():
        types = get_type_hints(kind)
        for each in fields(kind):
            key = f"{section}.{each.name}"
            default = each.default if each.default_factory is MISSING else each.default_factory()
            row: Json = {**rows[key]}
            row |= {name: json.loads(row[name] or "null") for name in ("low", "above", "high")}
            row |= {name: row[name].split() for name in ("choices", "also", "args")}
            row |= {name: row[name] == "yes" for name in ("may_change", "path")}
            row["example"] = row["example"] or _as_yaml(default)
            yield Setting(key, types[each.name], default, **row)


def _as_yaml(value: object) -> str:
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, width=1000).strip()
    return text.removesuffix("\n...").strip()


#: All settings by key.
SETTINGS = {each.key: each for each in _settings()}


# ------------------------------------------------------------------ reading


def read_config(source: str | Path | Mapping[str, object] | None = None, overrides: Iterable[str] = ()) -> TrainConfig:
    """Read a configuration: YAML, with changes.

    Args:
        source: a YAML file, nested dicts, or None for the defaults.
        overrides: changes such as ``"optimizer.lr=1e-5"``; values are YAML. ``{...}`` is added to what a setting holds,
            ``{}`` empties it.

    Returns:
        The configuration, with all defaults.

    Raises:
        ConfigError: for a file that is not YAML, an unknown key (with the nearest known one), a value of the wrong type or out
            of range, or settings that contradict one another.
        FileNotFoundError: if there is no such file.

    Example:
        >>> source = {"model": {"name": "model"}, "data": {"prompts": "prompts.jsonl"}, "reward": "rewards.py:correct"}
        >>> read_config(source, ["kl.target=0.5"]).kl.target
        0.5
        >>> read_config(source, ["optimizer.learning_rate=1e-5"])
        Traceback (most recent call last):
        ...
        torchrl_llm_kl.training._config.ConfigError: unknown key optimizer.learning_rate: did you mean optimizer.lr?
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    changes, emptied = _of_overrides(overrides)
    layers = [_of_source(source), changes]
    for layer in layers:
        _check_keys(layer)
        for name, value in layer.items():
            _check_plain(name, value)
    for *path, name in (key.split(".") for key in emptied):
        held: Any = layers[0]
        for part in path:
            held = held.get(part) if isinstance(held, dict) else None
        if isinstance(held, dict):
            held.pop(name, None)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(TrainConfig), *layers)
        OmegaConf.resolve(merged)
        return cast(TrainConfig, OmegaConf.to_object(merged))
    except MissingMandatoryValue as error:
        raise ConfigError(_missing(str(error.full_key))) from None
    except (OmegaConfBaseException, OverflowError, RecursionError) as error:
        raise ConfigError(_wrong_type(error, layers)) from None


def example_config() -> str:
    """A configuration to start from: YAML with every setting, its default and its meaning.

    Example:
        >>> print(example_config().splitlines()[2])
        model:  # The model that is trained.
    """
    lines = ["# A run: torchrl-llm-kl train config.yaml", "# Settings that are left out have these values."]
    for section, kind in _SECTIONS.items():
        absent = section == "lora"
        lines.append(f"{section}:{' null' * absent}  # {(kind.__doc__ or '').splitlines()[0]}")
        for each in fields(kind):
            about = SETTINGS[f"{section}.{each.name}"]
            lines += _commented(f"{'#' * absent}  {each.name}: {about.example}", _meaning(about))
    return "\n".join(lines) + "\n"


def settings_table() -> str:
    """A Markdown table of every setting: key, default and meaning.

    Example:
        >>> print(settings_table().splitlines()[2])
        | `model.name` | | a folder of save_pretrained, or a name on the hub |
    """
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for each in SETTINGS.values():
        shown = "" if each.default == REQUIRED else f"`{_as_yaml(each.default)}` "
        rows.append(f"| `{each.key}` | {shown}| {_meaning(each)} |")
    return "\n".join(rows) + "\n"


def _meaning(about: Setting) -> str:
    return f"{about.meaning} ({', '.join(about.choices)})" if about.choices else about.meaning


def _commented(text: str, comment: str, *, column: int = 44, width: int = 120) -> list[str]:
    """A setting with its meaning beside it, on as many lines as that takes."""
    first, *others = textwrap.wrap(comment, width - column - 2)
    gap = " " * max(2, column - len(text))
    return [f"{text}{gap}# {first}", *(f"{' ' * column}# {line}" for line in others)]


def differences(old: Mapping[str, object], new: TrainConfig) -> list[str]:
    """Settings in which a run differs from the saved one that it would continue, as ``key: old, now new``.

    Those that a resumed run may change are left out.
    """
    before, now = (
        {key: None if value in ({}, []) else value for key, value in flatten(each).items()}
        for each in (old, new.to_dict())
    )
    changing = {key for key, each in SETTINGS.items() if each.may_change}
    keys = [key for key in {**now, **before} if ".".join(key.split(".")[:2]) not in changing]
    return [f"{key}: {before.get(key)}, now {now.get(key)}" for key in keys if before.get(key) != now.get(key)]


def _of_source(source: str | Path | Mapping[str, object] | None) -> Json:
    from omegaconf import OmegaConf

    if source is None:
        return {}
    given = dict(source) if isinstance(source, Mapping) else _text_of(Path(source))
    name = "the configuration" if isinstance(source, Mapping) else str(source)
    if isinstance(given, str):
        _check_aliases(name, given)
    try:
        found = OmegaConf.to_container(
            OmegaConf.load(StringIO(given)) if isinstance(given, str) else OmegaConf.create(given)
        )
    except Exception as error:  # of two parsers, which raise what they meet
        raise ConfigError(f"{name} is not YAML with {_SUCH}: {_reason(error)}.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{name} holds a {type(found).__name__}: expected {_SUCH}.")
    return _long_reward({str(key): value for key, value in found.items()})


def _check_aliases(name: str, text: str) -> None:
    """Raise for YAML's aliases: a few lines of nested ones stand for billions of values."""
    import yaml

    try:
        aliased = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text))
    except yaml.YAMLError:  # told where the text is read
        return
    if aliased:
        advice = "write the value out, and put quotes around a text that begins with *"
        raise ConfigError(f"{name} has an alias (*name): {advice}.")


def _text_of(path: Path) -> str:
    """The text of a configuration's file."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}: pass the YAML file of the run.")
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "not a regular file"
        raise ConfigError(f"{path} is {kind}: pass the YAML file of the run.")
    if (size := path.stat().st_size) > _LONGEST:
        raise ConfigError(f"{path} has {size:,} bytes, too many for a configuration: pass the YAML file of the run.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is neither YAML nor text: {error}.") from error


def _reason(error: Exception) -> str:
    """What a parser found, without its excerpt of the text."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or contains itself"
    text = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).partition("\n")[0]
    mark = getattr(error, "problem_mark", None)
    return str(text).rstrip(".") + (f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else "")


def _of_overrides(overrides: Iterable[str]) -> tuple[Json, list[str]]:
    """The changes as sections, and the settings whose earlier values ``{}`` drops."""
    from omegaconf import OmegaConf

    layer = OmegaConf.create({})
    emptied: list[str] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{_shown(text)} changes no setting: write it as key=value, such as optimizer.lr=1e-5.")
        key = key.strip()
        if key.count(".") > _DEEPEST:
            raise ConfigError(f"{_shown(text)} is nested too deeply: expected a key such as optimizer.lr.")
        if "[" in key:
            whole = "give the whole list, such as optimizer.betas=[0.9, 0.95]"
            raise ConfigError(f"{_shown(text)} changes one item of a list: {whole}.")
        _check_aliases(_shown(text), value)
        try:
            parsed = cast(Json, OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"])))["value"]
        except Exception as error:  # of two parsers, which raise what they meet
            raise ConfigError(
                f"{_shown(text)} has a value that cannot be read ({_reason(error)}): expected YAML, such as 1e-5, text, [a, b] "
                "or {name: 1}; quotes go around a text with special characters."
            ) from error
        _check_plain(key, parsed)
        key = "reward.functions" if key == "reward" and not isinstance(parsed, Mapping) else key
        try:
            OmegaConf.update(layer, key, parsed, merge=parsed != {}, force_add=True)
        except Exception as error:  # a key within a number
            raise ConfigError(f"{_shown(text)} contradicts an earlier change: {_reason(error)}.") from error
        emptied += [key] if parsed == {} else []
    return _long_reward(cast(Json, OmegaConf.to_container(layer))), emptied


def _long_reward(layer: Json) -> Json:
    """A reward that is given as its function alone, as a section."""
    reward = layer.get("reward")
    return {**layer, "reward": {"functions": reward}} if isinstance(reward, str) else layer


# ------------------------------------------------------------------ what is wrong


def _check_keys(layer: Mapping[str, object]) -> None:
    """Raise for keys that do not exist, all of them at once."""
    complaints = []
    for name, values in layer.items():
        if name not in _SECTIONS:
            complaints.append(f"unknown key {name}{_suggestion(name)}")
        elif isinstance(values, Mapping):
            unknown = [key for key in (f"{name}.{each}" for each in values) if key not in SETTINGS]
            complaints += [f"unknown key {key}{_suggestion(key)}" for key in unknown]
        elif values is not None or name != "lora":
            complaints.append(f"{name} is {_shown(values)}: expected a section with {', '.join(_leaves(name))}.")
    if complaints:
        raise ConfigError(" ".join(each if each[-1] in ".?" else f"{each}." for each in complaints))


def _leaves(section: str) -> dict[str, str]:
    """The keys of a section by the settings' own names."""
    return {key.split(".")[1]: key for key in SETTINGS if key.startswith(f"{section}.")}


def _suggestion(key: str) -> str:
    """``: did you mean optimizer.lr?``, or what there is."""
    section, _, leaf = key.rpartition(".")
    own = _leaves(section)
    for name in (*own.values(), *SETTINGS):
        if leaf == name.split(".")[1] or leaf in SETTINGS[name].also:
            return f": did you mean {name}?"
    if near := nearest(leaf, own):
        return f": did you mean {own[near]}?"
    if own:
        return f"; {section} has {', '.join(own)}."
    near = nearest(key, [*_SECTIONS, *SETTINGS])
    return f": did you mean {near}?" if near else f"; there are {', '.join(_SECTIONS)}."


def _missing(key: str) -> str:
    return f"{key} is missing: set it in the file, or pass {key}=... ({SETTINGS[key].meaning})."


def _wrong_type(error: Exception, layers: Sequence[Mapping[str, object]]) -> str:
    """What no setting of the layers can be: the setting that cannot be merged, or those that refer to others."""
    sections = [
        (section, values) for layer in layers for section, values in layer.items() if isinstance(values, Mapping)
    ]
    given = {f"{section}.{name}": value for section, values in sections for name, value in values.items()}
    wrong = ".".join(re.split(r"[.\[]", str(getattr(error, "full_key", None)))[:2])  # of an item: its setting
    for key, value in given.items():
        if key == wrong or (isinstance(value, Mapping) and get_origin(SETTINGS[key].kind) is list):
            return f"{key} is {_shown(value)}: expected {_expected(SETTINGS[key].kind)}."
    refer = [f"{key} is {_shown(value)}" for key, value in given.items() if "${" in str(value)]
    return ": ".join([*([", ".join(refer)] if refer else []), f"{_reason(error)}."])


_KINDS: dict[object, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _expected(kind: type | UnionType) -> str:
    """A type in words."""
    if get_origin(kind) in (Union, UnionType):
        parts = [_expected(each) for each in get_args(kind) if each is not type(None)]
        return " or ".join([*parts, "null"] if type(None) in get_args(kind) else parts)
    if get_origin(kind) is list:
        return f"a list, each {_expected(get_args(kind)[0])}"
    return "names with values" if get_origin(kind) is dict else _KINDS.get(kind, "another value")


def _shown(value: object) -> str:
    """A value in a message: its beginning, if it is long."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _check_plain(key: str, value: object, depth: int = 0) -> None:
    """Raise for what no setting can hold, also within lists and named values: NaN, numbers of many digits, many levels."""
    if depth > _DEEPEST:
        raise ConfigError(f"{key[:100]} is nested too deeply: expected at most {_DEEPEST} levels.")
    if isinstance(value, Mapping):
        for name, item in value.items():
            _check_plain(f"{key}.{name}", item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_plain(key, item, depth + 1)
    elif isinstance(value, int) and value.bit_length() > 64:
        raise ConfigError(f"{key} is a whole number of {value.bit_length()} bits: expected one of at most 64.")
    elif isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{key} is nan: expected a finite number.")


def _values(config: TrainConfig) -> Iterator[tuple[str, object]]:
    """Key and value of every setting, without sections that are None."""
    for key in SETTINGS:
        section, name = key.split(".")
        if (values := getattr(config, section)) is not None:
            yield key, getattr(values, name)


def _check_value(key: str, value: object) -> None:
    """Raise for a value that is missing, not among the choices, or out of range."""
    about = SETTINGS[key]
    if value == REQUIRED:
        raise ConfigError(_missing(key))
    if about.choices and value not in about.choices:
        hint = did_you_mean(value, about.choices)
        raise ConfigError(f"{key} is {_shown(value)}: choose one of {', '.join(about.choices)}.{hint}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ConfigError(f"{key} is {value}: expected a finite number.")
        for bound, wrong, words in (
            (about.low, lambda bound: value < bound, "at least"),
            (about.above, lambda bound: value <= bound, "more than"),
            (about.high, lambda bound: value > bound, "at most"),
        ):
            if bound is not None and wrong(bound):
                raise ConfigError(f"{key} is {value:g}: expected {words} {bound:g}.")


def _check_together(config: TrainConfig) -> None:
    """Raise for settings that contradict one another."""
    kl, reference, loggers = config.kl, config.reference, config.logging.loggers
    place, functions = reference.name, config.reward.functions
    moves = reference.decay is not None or reference.reset_every is not None
    apart = reference.service is not None
    unjudged = functions is None and config.algorithm.teacher is not None  # the teacher takes the place of rewards
    refuse(
        config,
        betas=len(config.optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in config.optimizer.betas),
        target_without_place=kl.target is not None and kl.place == "none",
        controller_without_target=bool(kl.controller_args) and kl.target is None,
        no_reference=place == "none" and bool(kl.place in ("loss", "reward") or kl.target or kl.stop_above),
        base_without_lora=place == "base" and config.lora is None,
        nothing_moves=moves and (place in ("base", "none") or (place == "start" and config.lora is not None)),
        every_without_decay=reference.every != 1 and reference.decay is None,
        service_moves=moves and apart,
        service_without_model=apart and place in ("base", "none"),
        minibatches=config.algorithm.minibatches > config.data.num_prompts * config.data.group_size,
        warmup=config.optimizer.warmup_steps >= config.run.steps,
        empty_end="" in config.sampler.end,
        loggers_twice=len(set(loggers)) < len(loggers),
        best_of_none=config.checkpoints.final == "best" and not config.evaluation.every,
        reward=not (isinstance(functions, (str, Mapping)) and functions) and not unjudged,
        held_out_without_reward=unjudged and config.data.held_out is not None,
    )
    known = ("csv", "tensorboard", "wandb", "mlflow")
    for name in loggers:
        if name not in known:
            raise ConfigError(no_such("logging.loggers has the unknown logger", name, known))


def refuse(config: TrainConfig, **wrong: object) -> None:
    """Raise for the first contradiction that is there, with its text in ``contradictions.csv``."""
    found = next((name for name, there in wrong.items() if there), None)
    if found is not None:
        texts = {row["name"]: row["text"] for row in _rows("contradictions.csv")}
        answers = config.data.num_prompts * config.data.group_size
        raise ConfigError(texts[found].format(c=config, answers=answers))
