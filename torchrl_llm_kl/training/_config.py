"""The configuration of a run: typed sections with their defaults, YAML, overrides, and checks that name the key."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from io import StringIO
from pathlib import Path
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from torchrl_llm_kl._registry import did_you_mean, nearest, no_such

#: The value of a setting that has no default, as in OmegaConf.
REQUIRED = "???"

#: Levels of lists and named values in a setting, and bytes of a file, that are no mistake.
_DEEPEST, _LONGEST = 20, 1 << 20


class ConfigError(ValueError):
    """A configuration that no run can have; the message names the key, what was found and what to change."""


def setting(
    default: Any,
    meaning: str,
    *,
    choices: Sequence[str] = (),
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    also: Sequence[str] = (),
    example: Any = None,
    may_change: bool = False,
) -> Any:
    """A field with all that is known of it.

    Args:
        default: its value; a function for a value of its own in each configuration.
        meaning: one sentence, for the commented example and the page.

    Keyword Args:
        choices: all values, if there are few.
        low: least value.
        above: a number that it must exceed.
        high: greatest value.
        also: names that other programs give to it.
        example: its value in the commented example; the default by default.
        may_change: whether a resumed run may have another value.
    """
    metadata = {"meaning": meaning, "choices": tuple(choices), "low": low, "above": above, "high": high}
    metadata |= {"also": tuple(also), "example": default if example is None else example, "may_change": may_change}
    if callable(default):
        metadata["example"] = default() if example is None else example
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


#: Settings in which ``~`` is the user's home folder; a reward's file is expanded where it is loaded.
_PATHS = (
    "model.name", "model.tokenizer", "reference.name", "data.prompts", "data.held_out", "algorithm.teacher", "run.out",
)  # fmt: skip


# ------------------------------------------------------------------ the sections


@dataclass
class ModelConfig:
    """The model that is trained."""

    name: str = setting(
        REQUIRED,
        "a folder of save_pretrained, or a name on the hub",
        example="Qwen/Qwen2.5-0.5B-Instruct",
        also=["path"],
    )
    tokenizer: str | None = setting(None, "another tokenizer than the model's")
    dtype: str = setting(
        "float32",
        "of the weights; auto: as saved. AdamW loses small updates of bfloat16 weights: use it with LoRA",
        choices=["float32", "bfloat16", "auto"],
        also=["torch_dtype", "precision"],
    )
    device: str | None = setting(None, "such as cuda:1; null: a GPU if there is one", may_change=True)
    attention: str | None = setting(
        None, "transformers' implementation: sdpa, eager, flash_attention_2, ...", also=["attn_implementation"]
    )
    gradient_checkpointing: bool = setting(False, "compute layers again in the backward: less memory, slower")


@dataclass
class LoraConfig:
    """Train LoRA adapters (PEFT) instead of all weights."""

    r: int = setting(16, "rank", low=1, also=["rank", "lora_r", "lora_rank"])
    alpha: float = setting(32.0, "the adapters' product is multiplied by alpha / r", above=0, also=["lora_alpha"])
    targets: list[str] = setting(
        lambda: ["all-linear"], "names of the layers that get adapters", also=["target_modules", "lora_target_modules"]
    )
    merge: bool = setting(True, "the final folder holds the whole model with the adapters added; else adapters alone")


@dataclass
class ReferenceConfig:
    """The reference of the KL."""

    name: str = setting(
        "start",
        "start: the weights before training (with LoRA the base model, without a second copy); a folder or hub name; none: "
        "no KL is computed",
        also=["path", "model"],
    )
    service: str | None = setting(None, "name of a ScoringService over Ray that holds it; runs with one name share it")
    decay: float | None = setting(
        None, "the reference follows the policy: weight of the old one in a moving average", low=0.0, high=1.0
    )
    every: int = setting(1, "optimiser steps between two averages", low=1)
    reset_every: int | None = setting(None, "optimiser steps after which it becomes the policy", low=1)


@dataclass
class DataConfig:
    """Prompts, and how many answers each gets."""

    prompts: str = setting(
        REQUIRED, "JSONL or Parquet with a column prompt, question or messages, and for the reward answer and others",
        example="prompts.jsonl", also=["path", "train", "dataset"],
    )  # fmt: skip
    held_out: str | None = setting(None, "prompts for the evaluation; null: held_out_share of the others")
    held_out_share: float = setting(0.05, "share of the prompts that is kept for the evaluation", low=0.0, high=0.5)
    system_prompt: str | None = setting(None, "the first message of each conversation")
    shuffle: bool = setting(True, "a new random order in each epoch; false: as they come")
    num_prompts: int = setting(8, "prompts in a step", low=1, also=["batch_size", "prompts_per_step"])
    group_size: int = setting(
        8, "answers to each prompt, compared with one another", low=1, also=["num_generations", "repeat_times", "n"]
    )


@dataclass
class RewardConfig:
    """What an answer is worth."""

    functions: Any = setting(
        REQUIRED,
        "(question, answer, metadata) -> number, as module.py:function or package.module:function; or several by name, each "
        "alone or as {function: ..., weight: ...}",
        example="rewards.py:correct",
        also=["function", "reward_funcs"],
    )
    timeout: float = setting(30.0, "seconds for the reward of one answer", above=0)


@dataclass
class AlgorithmConfig:
    """How the policy is updated."""

    name: str = setting("grpo", "a preset; `torchrl-llm-kl algorithms` lists them", also=["type", "algorithm_type"])
    args: dict[str, Any] = setting(dict, "changes of the preset, such as {clip_high: 0.28}")
    teacher: str | None = setting(None, "folder or hub name of the teacher, for on_policy_distill, jsd and gkd")
    epochs: int = setting(1, "passes over the answers of a step", low=1, also=["num_iterations", "ppo_epochs"])
    minibatches: int = setting(1, "optimiser steps in a pass", low=1, also=["num_minibatches", "steps_per_generation"])
    micro_batch: int | None = setting(
        None, "most rows in one forward with gradient; their gradients add up", low=1, also=["micro_batch_size"]
    )


@dataclass
class SamplerConfig:
    """How answers are drawn; they are scored under the same distribution."""

    max_new_tokens: int = setting(
        256, "longest answer, in tokens", low=1, also=["max_completion_length", "response_length", "max_tokens"]
    )
    temperature: float = setting(1.0, "divides the logits", above=0)
    top_k: int = setting(0, "the most probable tokens alone; 0: all", low=0)
    top_p: float = setting(1.0, "the most probable tokens up to this probability; 1: all", above=0, high=1)
    min_p: float = setting(0.0, "tokens at least this probable, relative to the most probable one", low=0, high=1)


@dataclass
class KLConfig:
    """The KL to the reference, in nats per answer."""

    place: str = setting(
        "preset",
        "where the penalty is; preset: where the algorithm has it",
        choices=["preset", "loss", "reward", "none"],
    )
    estimator: str | None = setting(None, "null: k2 in the loss, k1 in the reward, or that of the preset")
    coefficient: float | None = setting(
        None, "its weight; the first one if it adapts. null: the preset's, or 0.1 if it adapts", low=0,
        also=["beta", "coeff", "kl_coef", "init"],
    )  # fmt: skip
    target: float | None = setting(None, "KL to hold: the coefficient adapts", above=0, also=["kl_target", "target_kl"])
    controller: str = setting("pi", "how it adapts to the target", choices=["pi", "dual", "ziegler"], also=["adaptive"])
    controller_args: dict[str, Any] = setting(
        dict, "further arguments, such as {integral: 0.05}; ziegler: {horizon: 512}"
    )
    stop_above: float | None = setting(
        None, "end the run if the KL is above this in several steps; null: ten times the target, if there is one", above=0,
        may_change=True,
    )  # fmt: skip
    stop_after: int = setting(3, "how many steps in a row that takes", low=1, may_change=True, also=["patience"])


@dataclass
class OptimizerConfig:
    """Optimiser and learning rate."""

    name: str = setting("adamw", "of torch.optim", choices=["adamw", "adam", "sgd"], also=["optim", "type"])
    lr: float = setting(1e-6, "learning rate", above=0, also=["learning_rate"])
    critic_lr: float | None = setting(None, "of a critic; null: lr", above=0)
    betas: list[float] = setting(lambda: [0.9, 0.999], "of Adam", also=["adam_betas"])
    eps: float = setting(1e-8, "of Adam", above=0, also=["adam_epsilon", "epsilon"])
    weight_decay: float = setting(0.0, "of AdamW; an L2 penalty for the others", low=0)
    max_grad_norm: float = setting(
        1.0, "gradients are scaled down to this norm; 0: never", low=0, also=["clip_grad", "grad_clip", "max_norm"]
    )
    schedule: str = setting(
        "constant", "linear and cosine fall to 0 at the last step",
        choices=["constant", "linear", "cosine"], also=["lr_scheduler", "scheduler", "lr_scheduler_type"],
    )  # fmt: skip
    warmup_steps: int = setting(
        0, "steps in which the learning rate rises from 0", low=0, also=["warmup", "lr_warmup_steps"]
    )


@dataclass
class EvaluationConfig:
    """Rewards on held-out prompts."""

    every: int = setting(
        20, "steps between evaluations; there is one before the first step and one after the last. 0: none", low=0,
        also=["eval_steps", "test_freq"],
    )  # fmt: skip
    num_prompts: int | None = setting(None, "the first held-out prompts alone", low=1)
    batch_size: int = setting(32, "answers that are generated together", low=1)
    greedy: bool = setting(True, "the most probable tokens; false: sampled as in training")


@dataclass
class LoggingConfig:
    """Where the figures go, besides metrics.jsonl."""

    loggers: list[str] = setting(list, "csv, tensorboard, wandb, mlflow", may_change=True)
    project: str = setting("torchrl-llm-kl", "of W&B; the experiment of MLflow", may_change=True)
    name: str | None = setting(None, "of the run there; null: that of run.out", may_change=True)
    doctor_every: int = setting(
        20, "steps between two looks of the doctor, and two pages of tokens; 0: none", low=0, may_change=True
    )


@dataclass
class CheckpointsConfig:
    """What is kept, to go on from and to use."""

    every: int = setting(
        20, "steps between checkpoints; there is one at the end", low=1, also=["save_steps", "save_freq"]
    )
    keep: int = setting(
        2, "the last ones that are kept, besides the best", low=1, also=["save_total_limit"], may_change=True
    )
    final: str = setting("last", "the weights in the final folder", choices=["last", "best"], may_change=True)


@dataclass
class RunConfig:
    """The run itself."""

    steps: int = setting(
        100, "batches of answers to train on", low=1, also=["max_steps", "total_steps"], may_change=True
    )
    seed: int = setting(
        0,
        "of the order of prompts, adapters, sampling and minibatches",
        low=0,
        high=2**63 - 1,  # as torch takes
    )
    out: str = setting("runs/train", "folder of all that the run writes", also=["output_dir"], may_change=True)
    threads: int | None = setting(
        None, "of torch on a CPU; null: torch's default. The figures depend on it", low=1, high=4096
    )


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
        for key, value, at in _leaves(self):
            _check_plain(key, value)
            _check_value(key, value, at.metadata)
            if key in _PATHS and value is not None:  # no shell expands what is in a file, or behind a `=`
                setattr(getattr(self, key.split(".")[0]), key.split(".")[1], os.path.expanduser(value))
        _check_together(self)

    def to_dict(self) -> dict[str, Any]:
        """The sections as plain dicts, lists, numbers and texts."""
        from omegaconf import OmegaConf

        found = OmegaConf.to_container(OmegaConf.structured(self))
        assert isinstance(found, dict)
        return {str(key): value for key, value in found.items()}

    def to_yaml(self) -> str:
        """The whole configuration, which :func:`read_config` reads."""
        from omegaconf import OmegaConf

        return OmegaConf.to_yaml(OmegaConf.structured(self))


# ------------------------------------------------------------------ reading


def read_config(source: str | Path | Mapping[str, Any] | None = None, overrides: Iterable[str] = ()) -> TrainConfig:
    """Read a configuration: YAML, with changes.

    Args:
        source: a YAML file, nested dicts, or None for the defaults.
        overrides: changes such as ``"optimizer.lr=1e-5"``; values are YAML. ``{...}`` is added to what a setting holds,
            ``{}`` empties it.

    Returns:
        The configuration, with all defaults.

    Raises:
        ConfigError: for a file that is no YAML, an unknown key (with the nearest known one), a value of the wrong type or out
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
        found = OmegaConf.to_object(merged)
    except MissingMandatoryValue as error:
        raise ConfigError(_missing(str(error.full_key))) from None
    except (OmegaConfBaseException, OverflowError, RecursionError) as error:
        raise ConfigError(_wrong_type(error, layers)) from None
    assert isinstance(found, TrainConfig)
    return found


def example_config() -> str:
    """A configuration to start from: YAML with every setting, its default and its meaning.

    Example:
        >>> print(example_config().splitlines()[2])
        model:  # The model that is trained.
    """
    lines = ["# A run: torchrl-llm-kl train config.yaml", "# Settings that are left out have these values."]
    for section in fields(TrainConfig):
        kind = _section(section.name)
        lines.append(f"{section.name}:  # {(kind.__doc__ or '').splitlines()[0]}")
        absent = section.name == "lora"
        if absent:
            lines[-1] = f"{section.name}: null  # {(kind.__doc__ or '').splitlines()[0]}"
        for each in fields(kind):
            text = f"  {each.name}: {_as_yaml(each.metadata['example'])}"
            lines += _commented(f"#{text}" if absent else text, _meaning(each.metadata))
    return "\n".join(lines) + "\n"


def settings_table() -> str:
    """A Markdown table of every setting: key, default and meaning.

    Example:
        >>> print(settings_table().splitlines()[2])
        | `model.name` | | a folder of save_pretrained, or a name on the hub |
    """
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for section in fields(TrainConfig):
        for each in fields(_section(section.name)):
            default = each.default if each.default_factory is MISSING else each.default_factory()
            shown = "" if default == REQUIRED else f"`{_as_yaml(default)}` "
            rows.append(f"| `{section.name}.{each.name}` | {shown}| {_meaning(each.metadata)} |")
    return "\n".join(rows) + "\n"


def differences(old: Mapping[str, Any], new: TrainConfig) -> list[str]:
    """Settings in which a run differs from the saved one that it would continue, as ``key: old, now new``.

    Those that a resumed run may change are left out.
    """
    before, now = dict(_flat(old)), dict(_flat(new.to_dict()))
    changing = {
        f"{s.name}.{f.name}" for s in fields(TrainConfig) for f in fields(_section(s.name)) if f.metadata["may_change"]
    }
    keys = [key for key in {**now, **before} if ".".join(key.split(".")[:2]) not in changing]
    return [f"{key}: {before.get(key)}, now {now.get(key)}" for key in keys if before.get(key) != now.get(key)]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", None if item == {} else item


def _of_source(source: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    from omegaconf import OmegaConf

    if source is None:
        return {}
    given: Any = dict(source) if isinstance(source, Mapping) else _text_of(Path(source))
    name = "the configuration" if isinstance(source, Mapping) else str(source)
    if isinstance(given, str):
        _check_aliases(name, given)
    try:
        found: Any = OmegaConf.to_container(
            OmegaConf.load(StringIO(given)) if isinstance(given, str) else OmegaConf.create(given)
        )
    except Exception as error:  # of two parsers, which raise what they meet
        raise ConfigError(f"{name} is no YAML of sections such as `model:` and `data:`: {_reason(error)}.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{name} holds a {type(found).__name__}: expected sections such as `model:` and `data:`.")
    return _long_reward({str(key): value for key, value in found.items()})


def _check_aliases(name: str, text: str) -> None:
    """Raise for YAML's aliases: a few lines of nested ones stand for billions of values."""
    import yaml

    try:
        aliased = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text))
    except yaml.YAMLError:  # told where the text is read
        return
    if aliased:
        raise ConfigError(
            f"{name} has an alias (*name): write the value out, and put quotes around a text that begins with *."
        )


def _text_of(path: Path) -> str:
    """The text of a configuration's file."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: pass the YAML file of the run.")
    if not path.is_file():
        if path.exists():
            raise ConfigError(f"{path} is no regular file: pass the YAML file of the run.")
        raise FileNotFoundError(f"there is no file {path}: pass the YAML file of the run.")
    size = path.stat().st_size
    if size > _LONGEST:
        raise ConfigError(
            f"{path} has {size:,} bytes, more than a configuration can have: pass the YAML file of the run."
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no YAML, nor text: {error}.") from error


def _reason(error: Exception) -> str:
    """What a parser found, without its excerpt of the text."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or contains itself"
    text = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).partition("\n")[0]
    mark = getattr(error, "problem_mark", None)
    return str(text).rstrip(".") + (f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else "")


def _of_overrides(overrides: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """The changes as sections, and the settings whose earlier values ``{}`` drops."""
    from omegaconf import OmegaConf

    layer: Any = OmegaConf.create({})
    emptied: list[str] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                f"{_shown(text)} is no change of a setting: write it as key=value, such as optimizer.lr=1e-5."
            )
        key = key.strip()
        if key.count(".") > _DEEPEST:
            raise ConfigError(f"{_shown(text)} is nested too deeply: expected a key such as optimizer.lr.")
        if "[" in key:
            raise ConfigError(
                f"{_shown(text)} changes one item of a list: give the whole list, such as optimizer.betas=[0.9, 0.95]."
            )
        _check_aliases(_shown(text), value)
        try:
            parsed = cast(Any, OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"])))["value"]
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
    found: Any = OmegaConf.to_container(layer)
    return _long_reward(found), emptied


def _long_reward(layer: dict[str, Any]) -> dict[str, Any]:
    """A reward that is given as its function alone, as a section."""
    reward = layer.get("reward")
    return {**layer, "reward": {"functions": reward}} if isinstance(reward, str) else layer


# ------------------------------------------------------------------ what is wrong


def _check_keys(layer: Mapping[str, Any]) -> None:
    """Raise for keys that do not exist, all of them at once."""
    complaints = []
    sections = {each.name for each in fields(TrainConfig)}
    for name, values in layer.items():
        if name not in sections:
            complaints.append(f"unknown key {name}{_suggestion(name)}")
        elif isinstance(values, Mapping):
            known = {each.name for each in fields(_section(name))}
            complaints += [
                f"unknown key {name}.{key}{_suggestion(f'{name}.{key}')}" for key in values if key not in known
            ]
        elif values is not None or name != "lora":
            complaints.append(
                f"{name} is {_shown(values)}: expected a section with {', '.join(f.name for f in fields(_section(name)))}."
            )
    if complaints:
        raise ConfigError(" ".join(each if each[-1] in ".?" else f"{each}." for each in complaints))


def _suggestion(key: str) -> str:
    """``: did you mean optimizer.lr?``, or what there is."""
    section, _, leaf = key.rpartition(".")
    known = {f"{s.name}.{f.name}": f for s in fields(TrainConfig) for f in fields(_section(s.name))}
    own = [name for name in known if name.startswith(f"{section}.")]
    for among in (own, known):
        for name in among:
            if leaf == name.split(".")[1] or leaf in known[name].metadata["also"]:
                return f": did you mean {name}?"
    leaves = {name.split(".")[1]: name for name in own}
    if near := nearest(leaf, leaves):
        return f": did you mean {leaves[near]}?"
    if leaves:
        return f"; {section} has {', '.join(leaves)}."
    sections = [each.name for each in fields(TrainConfig)]
    near = nearest(key, [*sections, *known])
    return f": did you mean {near}?" if near else f"; there are {', '.join(sections)}."


def _missing(key: str) -> str:
    return f"{key} is missing: set it in the file, or pass {key}=... ({_field(key).metadata['meaning']})."


def _wrong_type(error: Exception, layers: Sequence[Mapping[str, Any]]) -> str:
    key = str(getattr(error, "full_key", None) or "").split("[")[0]
    name = ".".join(key.split(".")[:2])
    if not _is_setting(name):
        return _without_key(error, layers)
    values = [value for layer in layers for at, value in _flat(layer) if at == name or at.startswith(f"{name}.")]
    expected = _expected(_type_of(name))
    return f"{key} is {_shown(values[-1])}: expected {expected}." if values else f"{key}: expected {expected}."


def _without_key(error: Exception, layers: Sequence[Mapping[str, Any]]) -> str:
    """What an error is about that names no key: the setting that cannot be merged, or those that refer to others."""
    settings = [
        (f"{section}.{name}", value)
        for layer in reversed(layers)
        for section, values in layer.items()
        if isinstance(values, Mapping)
        for name, value in values.items()
    ]
    for key, value in settings:
        if not _merges(key, value):
            return f"{key} is {_shown(value)}: expected {_expected(_type_of(key))}."
    refer = [f"{key} is {_shown(value)}" for key, value in settings if "${" in str(value)]
    return ": ".join([*([", ".join(refer)] if refer else []), f"{_reason(error)}."])


def _merges(key: str, value: Any) -> bool:
    from omegaconf import OmegaConf

    section, leaf = key.split(".")
    try:
        OmegaConf.merge(OmegaConf.structured(TrainConfig), {section: {leaf: value}})
    except Exception:  # whatever it is
        return False
    return True


def _is_setting(key: str) -> bool:
    return any(key == f"{s.name}.{f.name}" for s in fields(TrainConfig) for f in fields(_section(s.name)))


def _type_of(key: str) -> Any:
    section, leaf = key.split(".")
    return get_type_hints(_section(section))[leaf]


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _expected(kind: Any) -> str:
    """A type in words."""
    if get_origin(kind) in (Union, UnionType):
        parts = [_expected(each) for each in get_args(kind) if each is not type(None)]
        return " or ".join([*parts, "null"] if type(None) in get_args(kind) else parts)
    if get_origin(kind) is list:
        return f"a list, each {_expected(get_args(kind)[0])}"
    return "names with values" if get_origin(kind) is dict else _KINDS.get(kind, "another value")


def _shown(value: Any) -> str:
    """A value in a message: its beginning, if it is long."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _check_plain(key: str, value: Any, depth: int = 0) -> None:
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


def _check_value(key: str, value: Any, metadata: Mapping[str, Any]) -> None:
    """Raise for a value that is missing, not among the choices, or out of range."""
    if value == REQUIRED:
        raise ConfigError(_missing(key))
    choices = metadata["choices"]
    if choices and value not in choices:
        raise ConfigError(
            f"{key} is {_shown(value)}: choose one of {', '.join(choices)}.{did_you_mean(value, choices)}"
        )
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, above, high = (metadata[name] for name in ("low", "above", "high"))
        if not math.isfinite(value):
            raise ConfigError(f"{key} is {value}: expected a finite number.")
        if low is not None and value < low:
            raise ConfigError(f"{key} is {value:g}: expected at least {low:g}.")
        if above is not None and not value > above:
            raise ConfigError(f"{key} is {value:g}: expected more than {above:g}.")
        if high is not None and value > high:
            raise ConfigError(f"{key} is {value:g}: expected at most {high:g}.")


def _check_together(config: TrainConfig) -> None:
    """Raise for settings that contradict one another."""
    kl, reference = config.kl, config.reference
    if len(config.optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in config.optimizer.betas):
        raise ConfigError(
            f"optimizer.betas is {config.optimizer.betas}: expected two numbers of at least 0 and below 1."
        )
    if kl.target is not None and kl.place == "none":
        raise ConfigError(
            "kl.target holds a KL that kl.place=none does not charge: choose loss or reward, or drop the target."
        )
    if kl.controller_args and kl.target is None:
        raise ConfigError("kl.controller_args adapt the coefficient to a target: set kl.target, or leave them out.")
    if reference.name == "none" and (kl.place in ("loss", "reward") or kl.target or kl.stop_above):
        raise ConfigError(
            "reference.name is none, so there is no KL to charge, to hold or to watch: set reference.name=start."
        )
    if reference.name == "base" and config.lora is None:
        raise ConfigError(
            "reference.name=base is the model without its adapters, and there are none: set lora, or take start."
        )
    moves = reference.decay is not None or reference.reset_every is not None
    if moves and (reference.name in ("base", "none") or (reference.name == "start" and config.lora is not None)):
        raise ConfigError(
            "reference.decay and reference.reset_every move a reference of its own, and there is none: name its folder in "
            "reference.name, or train without lora."
        )
    if reference.every != 1 and reference.decay is None:
        raise ConfigError("reference.every is the time between averages: set reference.decay.")
    if moves and reference.service is not None:
        raise ConfigError(
            "reference.decay and reference.reset_every would move the model of reference.service for all runs that share it: "
            "leave them out, or the service."
        )
    if reference.service is not None and reference.name in ("base", "none"):
        raise ConfigError(
            f"reference.service holds a model of its own, and reference.name is {reference.name}: name its folder."
        )
    rows = config.data.num_prompts * config.data.group_size
    if config.algorithm.minibatches > rows:
        raise ConfigError(
            f"algorithm.minibatches is {config.algorithm.minibatches}: expected at most {rows}, the answers of a step."
        )
    if config.optimizer.warmup_steps >= config.run.steps:
        raise ConfigError(
            f"optimizer.warmup_steps is {config.optimizer.warmup_steps}: expected fewer than run.steps, {config.run.steps}."
        )
    known = ("csv", "tensorboard", "wandb", "mlflow")
    for name in config.logging.loggers:
        if name not in known:
            raise ConfigError(no_such("logging.loggers has the unknown logger", name, known))
        if config.logging.loggers.count(name) > 1:
            raise ConfigError(f"logging.loggers has {name!r} more than once: name each once.")
    if config.checkpoints.final == "best" and not config.evaluation.every:
        raise ConfigError(
            "checkpoints.final=best takes the best evaluation, and evaluation.every is 0: evaluate, or take last."
        )
    functions = config.reward.functions
    if not isinstance(functions, (str, Mapping)) or not functions:
        raise ConfigError(f"reward.functions is {functions!r}: expected module.py:function, or several by name.")


# ------------------------------------------------------------------ fields


def _section(name: str) -> Any:
    """The class of a section."""
    kind = get_type_hints(TrainConfig)[name]
    return next((each for each in get_args(kind) if each is not type(None)), kind)


def _field(key: str) -> Any:
    section, leaf = key.split(".")[:2]
    return next(each for each in fields(_section(section)) if each.name == leaf)


def _leaves(config: TrainConfig) -> Iterator[tuple[str, Any, Any]]:
    """Key, value and field of every setting."""
    for section in fields(config):
        values = getattr(config, section.name)
        if is_dataclass(values):
            for each in fields(values):
                yield f"{section.name}.{each.name}", getattr(values, each.name), each


def _meaning(metadata: Mapping[str, Any]) -> str:
    choices = metadata["choices"]
    return f"{metadata['meaning']} ({', '.join(choices)})" if choices else str(metadata["meaning"])


def _as_yaml(value: Any) -> str:
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, width=1000).strip()
    return text.removesuffix("\n...").strip()


def _commented(text: str, comment: str, *, column: int = 44, width: int = 120) -> list[str]:
    """A setting with its meaning beside it, on as many lines as that takes."""
    first, *others = textwrap.wrap(comment, width - column - 2)
    gap = " " * max(2, column - len(text))
    return [f"{text}{gap}# {first}", *(f"{' ' * column}# {line}" for line in others)]
