"""The configuration of a run: typed sections that are read from YAML and from changes such as ``optimizer.lr=1e-5``.

The type of a field defines its valid values. ``settings.csv`` describes its meaning.
"""

from __future__ import annotations

import csv
import math
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, cast, get_args, get_type_hints

from torchrl_llm_kl._registry import Range, flatten, members_of, nearest, no_such
from torchrl_llm_kl._typing import Json

#: A condition in ``run.stop_when``: figure, sign, number, and optionally the number of steps.
CONDITION = re.compile(r"([^\s<>=]+)\s*(<=|>=|<|>)\s*([^\s<>=]+)(?:\s+for\s+([1-9]\d*)(?:\s+steps?)?)?")
#: The value of a setting that has no default, as in OmegaConf.
REQUIRED = "???"


class ConfigError(ValueError):
    """An invalid configuration. The message names the key, its value and the remedy."""


# ------------------------------------------------------------------ the sections


class OneOf(tuple[str, ...]):
    """The valid values of a setting, in its ``Annotated`` type. OmegaConf does not support ``Literal``."""

    def check(self, name: str, value: object) -> None:
        """Raise a ValueError unless ``value`` is one of them."""
        if value not in self:
            raise ValueError(no_such(f"{name} has the unknown value", value, self))


class PathKind:
    """Marks a path in an ``Annotated`` type. ``~`` in the path stands for the user's home folder."""


# `_numerics` has types like these, but loads torch. Printing the example or an error about a key must not take that long.
Amount = Annotated[float, Range(0.0)]
PositiveAmount = Annotated[float, Range(above=0.0)]
Fraction = Annotated[float, Range(0.0, 1.0)]
PathText = Annotated[str, PathKind()]
Whole = Annotated[int, Range(0)]
PositiveWhole = Annotated[int, Range(1)]


@dataclass
class ModelConfig:
    """The model that is trained."""

    name: PathText = REQUIRED
    tokenizer: PathText | None = None
    template: PathText | None = None
    dtype: Annotated[str, OneOf(("float32", "bfloat16", "float64", "auto"))] = "float32"
    device: str | None = None
    attention: str | None = None
    gradient_checkpointing: bool = False
    shard: bool | None = None


@dataclass
class LoraConfig:
    """Train LoRA adapters (PEFT) instead of all weights."""

    r: PositiveWhole = 16
    alpha: PositiveAmount = 32.0
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    merge: bool = True


@dataclass
class ReferenceConfig:
    """The reference of the KL."""

    name: PathText = "start"
    service: str | None = None
    decay: Fraction | None = None
    every: PositiveWhole = 1
    reset_every: PositiveWhole | None = None

    @property
    def moves(self) -> bool:
        """Whether the reference follows the policy."""
        return self.decay is not None or self.reset_every is not None


@dataclass
class DataConfig:
    """The prompts and the number of answers to each."""

    prompts: PathText = REQUIRED
    held_out: PathText | None = None
    held_out_share: Annotated[float, Range(0.0, 0.5)] = 0.05
    experts: PathText | None = None
    num_experts: PositiveWhole = 8
    system_prompt: str | None = None
    shuffle: bool = True
    num_prompts: PositiveWhole = 8
    group_size: PositiveWhole = 8


@dataclass
class RewardPart:
    """One of several rewards: its function and its weight in the sum."""

    function: str = REQUIRED
    weight: float = 1.0


@dataclass
class RewardConfig:
    """The value of an answer."""

    function: str | None = None
    functions: dict[str, RewardPart] = field(default_factory=dict)
    timeout: PositiveAmount = 30.0

    @property
    def parts(self) -> dict[str, RewardPart]:
        """All rewards by name. A single function has the name ``""``. Empty without a reward."""
        return self.functions if self.function is None else {"": RewardPart(self.function)}


@dataclass
class TurnsConfig:
    """Conversations of several answers, with tools or replies of a user."""

    max: Annotated[int, Range(2)] = 4
    tools: list[str] = field(default_factory=list)
    reply: str | None = None
    stop: str | None = None
    reward: Annotated[str, OneOf(("last", "each"))] = "last"
    workers: PositiveWhole | None = None
    max_tokens: PositiveWhole | None = None


@dataclass
class AlgorithmConfig:
    """How the policy is updated."""

    name: str = "grpo"
    args: Json = field(default_factory=dict)
    teacher: PathText | None = None
    max_staleness: Whole = 0
    exact_old: bool = False
    epochs: PositiveWhole = 1
    minibatches: PositiveWhole = 1
    micro_batch: PositiveWhole | None = None


@dataclass
class SamplerConfig:
    """The distribution of the answers, which is also used to score them."""

    max_new_tokens: PositiveWhole = 256
    end: list[str] = field(default_factory=list)
    temperature: PositiveAmount = 1.0
    top_k: Whole = 0
    top_p: Annotated[float, Range(above=0.0, high=1.0)] = 1.0
    min_p: Fraction = 0.0
    engine: str = "transformers"
    command: str = "vllm serve {model}"
    engine_args: list[str] = field(default_factory=list)
    max_weight: PositiveAmount | None = 2.0

    @property
    def is_server(self) -> bool:
        """Whether a server samples."""
        return self.engine != "transformers"


@dataclass
class KLConfig:
    """The KL to the reference, in nats per answer."""

    place: Annotated[str, OneOf(("preset", "loss", "reward", "none"))] = "preset"
    estimator: str | None = None
    coefficient: Amount | None = None
    target: PositiveAmount | None = None
    controller: str = "pi"
    controller_args: Json = field(default_factory=dict)
    stop_above: PositiveAmount | None = None
    stop_after: PositiveWhole = 3


@dataclass
class OptimizerConfig:
    """Optimiser and learning rate."""

    name: Annotated[str, OneOf(("adamw", "adam", "sgd"))] = "adamw"
    lr: PositiveAmount = 1e-06
    critic_lr: PositiveAmount | None = None
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: PositiveAmount = 1e-08
    weight_decay: Amount = 0.0
    max_grad_norm: Amount = 1.0
    schedule: Annotated[str, OneOf(("constant", "linear", "cosine"))] = "constant"
    warmup_steps: Whole = 0


@dataclass
class EvaluationConfig:
    """Rewards on held-out prompts."""

    every: Whole = 20
    num_prompts: PositiveWhole | None = None
    batch_size: PositiveWhole = 32
    greedy: bool = True


LOGGERS = ("csv", "tensorboard", "wandb", "mlflow")


@dataclass
class LoggingConfig:
    """The loggers that get the figures, besides metrics.jsonl."""

    loggers: list[str] = field(default_factory=list)
    project: str = "torchrl-llm-kl"
    name: str | None = None
    doctor_every: Whole = 20


@dataclass
class CheckpointsConfig:
    """The checkpoints, from which a run resumes and whose models can be loaded."""

    every: PositiveWhole = 20
    keep: PositiveWhole = 2
    final: Annotated[str, OneOf(("last", "best"))] = "last"


@dataclass
class RunConfig:
    """The run itself."""

    steps: PositiveWhole = 100
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    out: PathText = "runs/train"
    threads: Annotated[int, Range(1, 4096)] | None = None
    stop_when: list[str] = field(default_factory=list)


@dataclass
class TrainConfig:
    """All settings of a run, in sections.

    :func:`example_config` prints each setting with its meaning.

    Raises:
        ConfigError: at construction, if a value is missing, out of range, or contradicts another one.

    Example:
        >>> config = TrainConfig(
        ...     model=ModelConfig("model"), data=DataConfig("prompts.jsonl"), reward=RewardConfig("rewards.py:correct")
        ... )
        >>> config.algorithm.name, config.optimizer.lr
        ('grpo', 1e-06)
    """

    imports: list[str] = field(default_factory=list)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig | None = None
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    turns: TurnsConfig | None = None
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    checkpoints: CheckpointsConfig = field(default_factory=CheckpointsConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        for section, settings in vars(self).items():
            for name, value in vars(settings).items() if is_dataclass(settings) else ():
                vars(settings)[name] = _valid(f"{section}.{name}", value)
        refuse(*self._contradictions())

    @property
    def starts_from_base(self) -> bool:
        """Whether the reference is the policy without its adapters, which needs no second copy of the weights."""
        return self.reference.name == "base" or (self.reference.name == "start" and self.lora is not None)

    def _contradictions(self) -> Iterator[tuple[object, str]]:
        """Pairs of a condition that makes the configuration invalid, and its message."""
        kl, reference, reward, warmup = self.kl, self.reference, self.reward, self.optimizer.warmup_steps
        name, rewards = reference.name, reward.parts
        needs_model = reference.moves and (self.starts_from_base or name == "none")
        yield kl.target and kl.place == "none", "kl.place=none charges no KL: choose loss or reward, or drop kl.target."
        yield kl.controller_args and not kl.target, "kl.controller_args adapt to a target: set kl.target, or drop them."
        watches = kl.place in ("loss", "reward") or kl.target or kl.stop_above
        yield (
            name == "none" and watches,
            "reference.name=none leaves no KL to charge or watch: set reference.name=start.",
        )
        yield name == "base" and self.lora is None, "reference.name=base is the model without its adapters: set lora."
        yield needs_model, "reference.decay and reset_every need a separate model: set reference.name to a folder."
        yield reference.every != 1 and reference.decay is None, "reference.every spaces averages: set reference.decay."
        shared = reference.service and (reference.moves or name in ("base", "none"))
        yield shared, "reference.service shares a fixed model: set reference.name to it, without decay or reset_every."
        # The rate would never reach optimizer.lr.
        yield warmup >= self.run.steps, f"optimizer.warmup_steps is {warmup}: expected less than run.steps."
        betas, minibatches, loggers = self.optimizer.betas, self.algorithm.minibatches, self.logging.loggers
        wrong_betas = len(betas) != 2 or not all(0 <= beta < 1 for beta in betas)
        yield wrong_betas, f"optimizer.betas is {betas}: expected two numbers of at least 0 and below 1."
        engine = self.sampler.engine
        known = engine in ("transformers", "vllm") or all(
            word.startswith(("http://", "https://")) for word in engine.split()
        )
        yield (
            not known,
            f"sampler.engine is {engine}: expected transformers, vllm, or the address of a server (http://...).",
        )
        command = self.sampler.command
        yield "{model}" not in command, f"sampler.command is {command}: put {{model}} where the model's folder belongs."
        answers = self.data.num_prompts * self.data.group_size
        yield minibatches > answers, f"algorithm.minibatches is {minibatches}: a step has only {answers} answers."
        yield len(set(loggers)) < len(loggers), f"logging.loggers is {loggers}: name each once."
        best = self.checkpoints.final == "best" and not self.evaluation.every
        yield best, "checkpoints.final=best needs evaluations, and evaluation.every is 0: set it, or take last."
        yield (
            "" in self.sampler.end,
            "sampler.end has an empty text, which would end each answer at once: leave it out.",
        )
        for each in self.logging.loggers:
            yield each not in LOGGERS, no_such("logging.loggers has the unknown logger", each, LOGGERS)
        yield reward.function and reward.functions, "reward.function and reward.functions are both set: leave one out."
        yield from ((unreadable(text), unreadable(text)) for text in self.run.stop_when)
        needs_reward = not rewards and self.algorithm.teacher is None
        yield needs_reward, "reward.function is missing: set it to module.py:function, or set reward.functions."
        yield not rewards and self.data.held_out, "data.held_out needs a reward to evaluate: set one, or leave it out."

    def to_dict(self) -> dict[str, object]:
        """The sections as plain dicts, lists, numbers and strings."""
        from omegaconf import OmegaConf

        return cast(dict[str, object], OmegaConf.to_container(OmegaConf.structured(self)))

    def to_yaml(self) -> str:
        """The whole configuration as YAML, which :func:`read_config` reads."""
        from omegaconf import OmegaConf

        return OmegaConf.to_yaml(OmegaConf.structured(self))


def unreadable(text: str) -> str:
    """The error for a text without the form of a condition. Empty if the form is right."""
    parts = CONDITION.fullmatch(text.strip())
    with suppress(ValueError):
        if parts is not None and math.isfinite(float(parts[3])):
            return ""
    return (
        f"run.stop_when has {text!r:.100}: expected FIGURE SIGN NUMBER or FIGURE SIGN NUMBER for STEPS, with a sign of "
        '< <= > >=, such as "ESS < 0.3" or "kl > 20 for 5".'
    )


def refuse(*rows: tuple[object, str]) -> None:
    """Raise a ConfigError with the text of the first pair whose condition holds.

    Example:
        >>> refuse((False, "a"), (2 > 1, "two is more than one."))
        Traceback (most recent call last):
        ...
        torchrl_llm_kl.training._config.ConfigError: two is more than one.
    """
    for holds, text in rows:
        if holds:
            raise ConfigError(text)


# ------------------------------------------------------------------ all settings


@dataclass(frozen=True)
class SettingFacts:
    """The description of a setting in the example and the documentation.

    Args:
        key: section and name, or only the name if the setting has no section.
        kind: the annotated type, with bounds or choices.
        default: the default value, ``"???"`` for a required setting.
        meaning: one sentence.
        also: the names of the setting in other programs.
        example: the value in the commented example, in YAML.
    """

    key: str
    kind: object
    default: object
    meaning: str
    also: tuple[str, ...]
    example: str

    @property
    def text(self) -> str:
        """The meaning, followed by the choices."""
        choices = [extra for extra in self.extras if isinstance(extra, OneOf)]
        return f"{self.meaning} ({', '.join(choices[0])})" if choices else self.meaning

    @property
    def extras(self) -> list[object]:
        """The metadata of its ``Annotated`` type: bounds, choices, or the mark of a path."""
        return [extra for member in members_of(self.kind) for extra in get_args(member)[1:]]


def _settings() -> Iterator[SettingFacts]:
    table = files(__package__).joinpath("settings.csv").read_text(encoding="utf-8")
    rows = {row["key"]: row for row in csv.DictReader(table.splitlines())}
    owners: list[tuple[str, type]] = [("", TrainConfig), *((f"{name}.", kind) for name, kind in _SECTIONS.items())]
    for prefix, owner in owners:
        kinds = get_type_hints(owner, include_extras=True)
        for each in fields(owner):
            if prefix or each.name not in _SECTIONS:
                default = each.default if each.default_factory is MISSING else each.default_factory()
                row = rows[f"{prefix}{each.name}"]
                example = row["example"] or as_yaml(default)
                yield SettingFacts(
                    row["key"], kinds[each.name], default, row["meaning"], tuple(row["also"].split()), example
                )


def as_yaml(value: object) -> str:
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, width=1000).strip()
    return text.removesuffix("\n...").strip()


#: The class of each section.
_SECTIONS: dict[str, type] = {
    name: kind
    for name, annotation in get_type_hints(TrainConfig).items()
    for kind in members_of(annotation)
    if isinstance(kind, type) and is_dataclass(kind)
}
#: The sections that are absent by default.
_OPTIONAL = {name for name in _SECTIONS if TrainConfig.__dataclass_fields__[name].default is None}
#: All settings by key.
SETTINGS = {each.key: each for each in _settings()}
#: Settings and whole sections that a resumed run may change.
MAY_CHANGE = {"run.steps", "run.out", "model.device", "kl.stop_above", "kl.stop_after", "logging"}
MAY_CHANGE |= {"checkpoints.keep", "checkpoints.final", "run.stop_when"}


def _valid(key: str, value: object) -> object:
    """Check the bounds and choices of a value, and expand ``~`` in a path."""
    if value == REQUIRED:
        raise ConfigError(_missing_setting(key))
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key} is {value}: expected a finite number.")
    try:
        for extra in SETTINGS[key].extras:
            if isinstance(extra, (Range, OneOf)):
                extra.check(key, value)
            elif isinstance(value, str):  # the shell does not expand `~` in a file or after an `=`
                return os.path.expanduser(value)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return value


def _missing_setting(key: str) -> str:
    meaning = f" ({SETTINGS[key].meaning})" if key in SETTINGS else ""
    return f"{key} is missing: set it in the file, or pass {key}=...{meaning}."


def _settings_of(saved: Mapping[str, object]) -> dict[str, object]:
    """All settings of saved sections. A setting that did not exist when they were saved has its default."""
    values = flatten(saved)
    for key, about in SETTINGS.items():
        section = key.rpartition(".")[0]
        if key not in values and (not section or isinstance(saved.get(section), Mapping)):
            values |= flatten({key: about.default})
    return values


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """The settings that differ, key -> both values. Settings that a resumed run may change are left out."""
    before, now = _settings_of(old), _settings_of(new)
    for section in _OPTIONAL:  # a section that appears or goes is one difference
        sides = [{key for key in side if key.startswith(f"{section}.")} for side in (before, now)]
        if bool(sides[0]) != bool(sides[1]):
            for side, own, values in ((before, sides[0], old), (now, sides[1], new)):
                side |= {key: None for key in own} | {section: values.get(section)}
    keys = [key for key in {**now, **before} if MAY_CHANGE.isdisjoint({key, key.split(".")[0]})]
    pairs = {key: (before.get(key), now.get(key)) for key in keys}
    # Empty values equal missing ones, so that checkpoints of versions with fewer settings still resume.
    empty: tuple[object, ...] = (None, {}, [])
    return {key: (x, y) for key, (x, y) in pairs.items() if x != y and not (x in empty and y in empty)}


def example_config() -> str:
    """A configuration to start from: YAML with the default and the meaning of every setting.

    Example:
        >>> print(example_config().splitlines()[3])
        model:  # The model that is trained.
    """
    lines = ["# A run: torchrl-llm-kl train config.yaml", "# Settings that are left out have these values."]
    section = ""
    for key, about in SETTINGS.items():
        name, _, leaf = key.rpartition(".")
        absent = name in _OPTIONAL  # written as comments, since any of its keys would turn the section on
        if name != section:
            section = name
            lines.append(f"{name}:{' null' * absent}  # {(_SECTIONS[name].__doc__ or '').splitlines()[0]}")
        text = f"{'#' * absent}{'  ' * bool(name)}{leaf}: {about.example}"
        first, *others = textwrap.wrap(about.text, 74)
        lines += [f"{text}{' ' * max(2, 44 - len(text))}# {first}", *(f"{' ' * 44}# {line}" for line in others)]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------ reading


def read_config(source: str | Path | Mapping[str, object] | None = None, overrides: Iterable[str] = ()) -> TrainConfig:
    """Read a configuration from YAML and apply changes.

    Args:
        source: a YAML file, nested dicts, or None for the defaults.
        overrides: changes such as ``"optimizer.lr=1e-5"``, whose values are YAML. ``{...}`` is merged into the values of a
            setting, and ``{}`` empties it.

    Returns:
        The configuration, with all defaults.

    Raises:
        ConfigError: if the file is not YAML, a key is unknown (the message suggests the nearest one), a value has the wrong
            type or is out of range, or settings contradict one another.
        FileNotFoundError: if the file does not exist.

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

    given: list[tuple[str, object]] = []
    for key, value in (*_of_source(source), *(pair for text in overrides for pair in _of_override(text))):
        if key in _OPTIONAL and value is None:  # a change to null removes the section of the file
            given = [pair for pair in given if not pair[0].startswith(f"{key}.")]
        else:
            given.append((key, value))
    _check_keys([key for key, _ in given])
    config = OmegaConf.structured(TrainConfig)
    # OmegaConf cannot set a field of a section that is None.
    for name in {key.partition(".")[0] for key, _ in given} & _OPTIONAL:
        config[name] = _SECTIONS[name]()
    key, values = "", dict(given)
    try:
        # `{}` replaces a dict, any other dict is merged. `algorithm.args` takes keys that no dataclass has.
        for key, value in given:
            OmegaConf.update(config, key, value, merge=value != {}, force_add=True)
        OmegaConf.resolve(config)
        return cast(TrainConfig, OmegaConf.to_object(config))
    except MissingMandatoryValue as error:
        raise ConfigError(_missing_setting(str(error.full_key))) from None
    except (OmegaConfBaseException, OverflowError) as error:
        at = str(getattr(error, "full_key", None))
        key = at if at in values else key
        raise ConfigError(f"{key} is {values[key]!r:.100}: {_first_line(error)}.") from None


def _of_source(source: str | Path | Mapping[str, object] | None) -> Iterator[tuple[str, object]]:
    """The settings of a file or of nested dicts, as pairs of key and value."""
    from omegaconf import OmegaConf

    name = "the configuration" if source is None or isinstance(source, Mapping) else str(source)
    expected = "expected sections such as `model:` and `data:`"
    try:
        loaded = OmegaConf.load(source) if isinstance(source, (str, Path)) else OmegaConf.create(dict(source or {}))
        plain = OmegaConf.to_container(loaded)
    except OSError:
        raise
    except Exception as error:  # PyYAML and OmegaConf raise errors without a common base
        raise ConfigError(f"{name} is not YAML: {_first_line(error)}. {expected.capitalize()}.") from error
    if not isinstance(plain, dict):
        raise ConfigError(f"{name} holds a {type(plain).__name__}: {expected}.")
    for section, values in plain.items():
        yield from _pairs(str(section), values)


def changed_keys(overrides: Iterable[str]) -> list[str]:
    """The settings that changes such as ``"optimizer.lr=1e-5"`` name."""
    return [key for text in overrides for key, _ in _of_override(text)]


def _of_override(text: str) -> Iterator[tuple[str, object]]:
    """The settings of a change such as ``optimizer.lr=1e-5``, as pairs of key and value."""
    from omegaconf import OmegaConf

    key, equals, value = text.partition("=")
    if not equals or not key.strip() or "[" in key:
        raise ConfigError(f"{text!r:.100} changes no setting: expected key=value, such as optimizer.betas=[0.9, 0.95].")
    try:
        parsed = cast(dict[str, object], OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"])))["value"]
    except Exception as error:  # PyYAML and OmegaConf raise errors without a common base
        raise ConfigError(f"{text!r:.100} has a value that is not YAML: {_first_line(error)}.") from error
    yield from _pairs(key.strip(), parsed)


def _pairs(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Split a section into its settings, and expand the short forms of rewards."""
    if key == "reward" and not isinstance(value, Mapping):
        yield from (("reward.functions", {}), ("reward.function", value))
    elif key.startswith("reward.functions.") and isinstance(value, (str, Mapping)) and key.count(".") == 2:
        yield "reward.functions", {key.split(".")[2]: {"function": value} if isinstance(value, str) else value}
    elif key in _OPTIONAL and value == {}:  # `lora: {}` asks for the section with all defaults
        first = fields(_SECTIONS[key])[0]
        yield f"{key}.{first.name}", first.default
    elif key == "run.stop_when" and isinstance(value, str):  # a single condition
        yield key, [value]
    elif (key in _SECTIONS or (key == "reward.functions" and value)) and isinstance(value, Mapping):
        for name, item in value.items():
            yield from _pairs(f"{key}.{name}", item)
    else:
        yield key, value


def _first_line(error: Exception) -> str:
    """The first line of a parser's message, without the excerpt of the file, which may be long or binary."""
    import yaml

    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} (line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1})"
    return str(error).partition("\n")[0].rstrip(".")


def _check_keys(keys: Iterable[str]) -> None:
    """Raise a ConfigError that names all unknown keys."""
    unknown = [key for key in keys if not {key, ".".join(key.split(".")[:2]), key.split(".")[0]} & SETTINGS.keys()]
    if unknown:
        raise ConfigError(" ".join(map(_unknown, dict.fromkeys(unknown))))


def _unknown(key: str) -> str:
    """A message that suggests the nearest key, or lists the keys of the section."""
    section, _, leaf = (key, "", "") if key in _SECTIONS else key.rpartition(".")
    own = {known.split(".")[-1]: known for known in SETTINGS if known.startswith(f"{section}.")}
    if key in _SECTIONS:
        return f"{key} is a section: expected the names {', '.join(own)} with values."
    same = (known for known in (*own.values(), *SETTINGS) if leaf in (known.split(".")[-1], *SETTINGS[known].also))
    near = next(same, None) or own.get(nearest(leaf, own) or "") or nearest(key, () if own else [*_SECTIONS, *SETTINGS])
    if near:
        return f"unknown key {key}: did you mean {near}?"
    return f"unknown key {key}: {section if own else 'a configuration'} has {', '.join(own or _SECTIONS)}."
