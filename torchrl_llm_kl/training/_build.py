"""From a configuration to the parts of a run: algorithm, KL, rewards, prompts, loggers."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import math
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from torchrl_llm_kl._registry import first_sentence, install_hint, no_such
from torchrl_llm_kl.algorithms import AlgorithmParts, apply_overrides, get_algorithm, make_algorithm
from torchrl_llm_kl.estimators import (
    AdaptiveKLCoefficient,
    DualKLCoefficient,
    PIKLCoefficient,
    as_coefficient,
    get_estimator,
)
from torchrl_llm_kl.scoring import Model, Sampling, ScoreOptions, TokenCritic
from torchrl_llm_kl.tasks import Prompts
from torchrl_llm_kl.training._config import SETTINGS, ConfigError, TrainConfig, refuse
from torchrl_llm_kl.training._models import load_model
from torchrl_llm_kl.transforms import RetrieveKL

if TYPE_CHECKING:
    from torchrl.record.loggers import Logger
    from torchrl.record.loggers.mlflow import MLFlowLogger


#: A function, or weights and functions by name.
Reward = Callable[..., object] | dict[str, tuple[float, Callable[..., object]]]

# ------------------------------------------------------------------ the reference, the KL and the algorithm


def sampling_of(config: TrainConfig) -> Sampling:
    """The distribution that answers are drawn from.

    Example:
        >>> sampling_of(config)  # doctest: +SKIP
    """
    sampler = config.sampler
    return Sampling(sampler.temperature, top_k=sampler.top_k, top_p=sampler.top_p, min_p=sampler.min_p)


def load_reference(config: TrainConfig) -> Model | Literal["base"] | None:
    """The reference of a run: a frozen model, ``"base"`` for the policy without its adapters, a service's, or None.

    Args:
        config: of the run.

    Example:
        >>> reference = load_reference(config)  # doctest: +SKIP
    """
    settings = config.reference
    name = config.model.name if settings.name == "start" else settings.name
    if name == "none" or config.algorithm.teacher is not None:  # the teacher takes its place
        return None
    if settings.service is None and (name == "base" or (settings.name == "start" and config.lora is not None)):
        return "base"
    if Path(name).is_dir():
        name = str(Path(name).resolve())  # a service's process may run in another folder, and sharing runs too
    load = partial(load_model, name, dtype=config.model.dtype, attention=config.model.attention)
    if settings.service is None:
        return load(device=config.model.device)
    check_ray()
    from torchrl_llm_kl.service import ScoringService

    return ScoringService(factory=load, name=settings.service, num_gpus=float(_has_gpu())).model


def _has_gpu() -> bool:
    """Whether Ray finds what it calls a GPU here."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type in ("cuda", "xpu")


def check_ray() -> None:
    """Raise if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"reference.service needs ray: {install_hint('ray')}.")


@dataclass(frozen=True, eq=False)
class Training:
    """An algorithm with what measures and controls its KL.

    Args:
        parts: the algorithm, bound to its models.
        kl: scores the answers in the env; None without a reference.
        coefficient: of the KL; None if nothing is charged.
        charged: whether the KL is subtracted from the rewards.
    """

    parts: AlgorithmParts
    kl: RetrieveKL | None
    coefficient: nn.Module | None
    charged: bool


def build_training(config: TrainConfig, policy: nn.Module, reference: Model | Literal["base"] | None) -> Training:
    """Bind the algorithm of a configuration to its models.

    Args:
        config: of the run.
        policy: the model that is trained.
        reference: of :func:`load_reference`.

    Raises:
        ConfigError: if the algorithm needs what a configuration cannot give, or has no KL to hold at a target.

    Example:
        >>> training = build_training(config, policy, reference)  # doctest: +SKIP
    """
    check_algorithm(config)
    preset = get_algorithm(config.algorithm.name)  # type: ignore[arg-type]
    model, coefficient, critic = config.model, _coefficient(config), None
    if distils := preset.schema == "distill":
        reference = load_model(str(config.algorithm.teacher), dtype="auto", device=model.device)
    if preset.use_critic:  # with a second body, of the weights before training
        body = load_model(model.name, dtype=model.dtype, device=model.device)
        critic = TokenCritic(body.requires_grad_(True))
    parts = _bind(config, policy, reference, critic, coefficient)
    kl = parts.kl_transform
    if not isinstance(kl, RetrieveKL):
        kl = None if reference is None or distils else measured_kl(config, policy, reference)
    return Training(parts, kl, coefficient, "reward" in _charged(config))


def check_parts(config: TrainConfig, policy: nn.Module, reference: nn.Module) -> None:
    """Bind the algorithm to models without weights, so that what it refuses is said before any are loaded.

    Args:
        config: of the run.
        policy: on the meta device.
        reference: another model there, or the teacher's.

    Raises:
        ConfigError: says what it refuses.
    """
    preset = get_algorithm(config.algorithm.name)  # type: ignore[arg-type]
    critic = TokenCritic(copy.deepcopy(policy)) if preset.use_critic else None
    try:
        _bind(config, policy, reference, critic, _coefficient(config))
    except (TypeError, ValueError, KeyError) as error:
        given = config.algorithm.args
        place = f"algorithm.args is {given}" if given else f"algorithm.name is {preset.name}"
        raise ConfigError(f"{place}: {first_sentence(error)}") from error


def _bind(
    config: TrainConfig,
    policy: nn.Module,
    reference: Model | Literal["base"] | None,
    critic: TokenCritic | None,
    coefficient: nn.Module | None,
) -> AlgorithmParts:
    """The algorithm of a configuration with its models; ``reference`` may be a teacher."""
    preset, charged = get_algorithm(config.algorithm.name), _charged(config)  # type: ignore[arg-type]
    settings = {f"kl_{place}": estimator for place, estimator in _estimators(config).items()}
    settings |= {f"kl_{place}_coeff": coefficient for place in charged} | config.algorithm.args
    if apply_overrides(preset, settings).summed == "seq-mean-token-sum-norm":
        settings["max_len"] = config.sampler.max_new_tokens
    return make_algorithm(
        config.algorithm.name,  # type: ignore[arg-type]
        policy,
        reference=reference if charged or preset.schema == "distill" else None,
        critic=critic,
        group_key="group" if preset.compares_answers else None,
        options=ScoreOptions(sampling_of(config)),
        **settings,
    )


def measured_kl(config: TrainConfig, policy: nn.Module, reference: Model | str, **settings: Any) -> RetrieveKL:
    """A transform that measures the KL and charges nothing.

    Example:
        >>> kl = measured_kl(config, policy, reference)  # doctest: +SKIP
    """
    options = ScoreOptions(sampling_of(config))
    # A copy of the policy behind a service would not be trained.
    return RetrieveKL(policy, reference, add_to_reward=False, options=options, service_backend="direct", **settings)


def check_algorithm(config: TrainConfig) -> None:
    """Raise for an algorithm that needs what a configuration cannot give.

    Raises:
        ConfigError: says what it needs, and where it can be trained.

    Example:
        >>> from torchrl_llm_kl.training import read_config
        >>> source = {"model": {"name": "m"}, "data": {"prompts": "p.jsonl"}, "reward": "r.py:f", "algorithm": {"name": "dpo"}}
        >>> check_algorithm(read_config(source))
        Traceback (most recent call last):
        ...
        torchrl_llm_kl.training._config.ConfigError: algorithm.name is dpo, which learns from given answers and needs...
    """
    name, kl, reference, teacher = config.algorithm.name, config.kl, config.reference, config.algorithm.teacher
    preset = get_algorithm(name)  # type: ignore[arg-type]
    needs_more = ("sft", "dpo", "unpaired", "mix", "trajectory", "rewards")
    refuse(config, **{schema: preset.schema == schema for schema in needs_more})
    for argument in sorted(config.algorithm.args):
        if places := [key for key, about in SETTINGS.items() if argument in about.args]:
            raise ConfigError(f"algorithm.args has {argument}: set {' and '.join(places)} instead.")
    distils = preset.schema == "distill"
    refuse(
        config,
        teacher_missing=distils and teacher is None,
        teacher_unused=teacher is not None and not distils,
        teacher_and_kl=distils and (kl.place in ("loss", "reward") or kl.target is not None),
        teacher_and_reference=distils and not (reference.service is reference.decay is reference.reset_every is None),
    )
    try:
        preset.check_group_size(config.data.group_size, name="data.group_size")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    charged = bool(_charged(config))
    refuse(
        config,
        nothing_charged=not (charged or kl.target is kl.coefficient is kl.estimator is None),
        charged_without_reference=charged and reference.name == "none",
    )
    try:
        apply_overrides(preset, config.algorithm.args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"algorithm.args is {config.algorithm.args}: {error}") from error
    for estimator in _estimators(config).values():
        get_estimator(estimator)
    _coefficient(config)


def _estimators(config: TrainConfig) -> dict[str, Any]:
    """The estimator of each place, ``"none"`` without a KL there."""
    kl, preset = config.kl, get_algorithm(config.algorithm.name)  # type: ignore[arg-type]
    found: Mapping[str, object]
    if kl.place == "preset":
        found = {"loss": preset.kl_loss, "reward": preset.kl_reward}
    else:
        found = {place: usual if place == kl.place else "none" for place, usual in (("loss", "k2"), ("reward", "k1"))}
    return {
        place: estimator if estimator == "none" else kl.estimator or estimator for place, estimator in found.items()
    }


def _charged(config: TrainConfig) -> list[str]:
    """The places where a KL is charged."""
    return [place for place, estimator in _estimators(config).items() if estimator != "none"]


def _coefficient(config: TrainConfig) -> nn.Module | None:
    """The coefficient: adaptive with a target, else the configuration's number or the preset's; None if nothing is charged."""
    kl, charged = config.kl, _charged(config)
    if not charged:
        return None
    if kl.target is None:
        preset = get_algorithm(config.algorithm.name)  # type: ignore[arg-type]
        return as_coefficient(getattr(preset, f"kl_{charged[0]}_coeff") if kl.coefficient is None else kl.coefficient)
    refuse(config, coefficient_of_0=kl.coefficient == 0)
    settings = {"init": 0.1 if kl.coefficient is None else kl.coefficient, "target": kl.target, **kl.controller_args}
    kind: type[nn.Module] = {"pi": PIKLCoefficient, "dual": DualKLCoefficient, "ziegler": AdaptiveKLCoefficient}[
        kl.controller
    ]
    if kl.controller == "ziegler":  # changes by at most 10 % per step: 0.2 * n / horizon
        settings = {"horizon": 2 * config.data.num_prompts * config.data.group_size, **settings}
    try:
        return kind(**settings)
    except (TypeError, ValueError) as error:
        own = {"init": "kl.coefficient", "target": "kl.target"}
        text = re.sub(
            rf"\b({'|'.join(inspect.signature(kind).parameters)})\b",
            lambda found: own.get(found[0], f"kl.controller_args.{found[0]}"),
            str(error).rstrip("."),
        )
        raise ConfigError(f"kl.controller_args is {kl.controller_args}: {text}.") from error


# ------------------------------------------------------------------ rewards and prompts


def load_function(place: str, files: dict[Path, ModuleType] | None = None) -> Callable[..., object]:
    """The function of a text such as ``rewards.py:correct`` or ``package.rewards:correct``.

    Args:
        place: a file, or a module, and a name in it.
        files: files that were run already; the function's is added. Without, the file is run anew.

    Raises:
        ConfigError: if the file, the module or the function does not exist, or the file fails.

    Example:
        >>> load_function("math:sqrt")(9.0)
        3.0
    """
    where, colon, name = place.rpartition(":")
    if not colon or not where or not name:
        raise ConfigError(f"{place!r} names no function: write it as module.py:function or package.module:function.")
    module = _module(where, {} if files is None else files)
    found = getattr(module, name, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(no_such(f"{where} has no function", name, known))
    return found


def _module(where: str, files: dict[Path, ModuleType]) -> ModuleType:
    if not where.endswith(".py"):
        sys.path.insert(0, "")  # modules of the current folder, as with `python -m`
        try:
            return importlib.import_module(where)
        except ImportError as error:
            raise ConfigError(f"there is no module {where}: {error}.") from error
        finally:
            sys.path.remove("")
    path = Path(where).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {where}: paths are relative to the folder where the command runs.")
    if path not in files:
        files[path] = _run_file(path)
    return files[path]


def _run_file(path: Path) -> ModuleType:
    name = f"torchrl_llm_kl_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look there
    beside = str(path.parent)  # what it imports, now or in a call
    sys.path.insert(0, beside)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path} cannot be loaded: {type(error).__name__}: {error}.") from error
    finally:
        sys.path.remove(beside)
        if beside not in sys.path:
            sys.path.append(beside)
    return module


def load_reward(config: TrainConfig) -> Reward | None:
    """The reward of a configuration, as :func:`~torchrl_llm_kl.tasks.make_env` takes it; None if only a teacher judges.

    Raises:
        ConfigError: if a part is not a function.

    Example:
        >>> reward = load_reward(config)  # doctest: +SKIP
    """
    functions = config.reward.functions
    if functions is None:
        return None
    if isinstance(functions, str):
        return load_function(functions)
    parts: dict[str, tuple[float, Callable[..., object]]] = {}
    files: dict[Path, ModuleType] = {}  # each is run once: it may load a model
    for name, part in functions.items():
        key, given = f"reward.functions.{name}", {"function": part} if isinstance(part, str) else part
        match given:
            case {"function": str(place), **others} if not others.keys() - {"weight"}:
                weight = others.get("weight", 1.0)
            case _:
                raise ConfigError(f"{key} is {part!r}: expected module.py:function, or {{function: ..., weight: ...}}.")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise ConfigError(f"{key}.weight is {weight!r}: expected a finite number.")
        parts[str(name)] = (float(weight), load_function(place, files))
    return parts


def load_prompts(config: TrainConfig) -> tuple[Prompts, Prompts | None]:
    """The prompts to train on and the held-out ones, if there are any.

    A share is held out by a permutation that is the same in every run; none without a reward to evaluate.

    Example:
        >>> prompts, held_out = load_prompts(config)  # doctest: +SKIP
    """
    data = config.data
    prompts, held_out = Prompts(data.prompts), None if data.held_out is None else Prompts(data.held_out)
    if held_out is None and data.held_out_share and len(prompts) > 1 and config.reward.functions is not None:
        count = min(len(prompts) - 1, max(1, round(data.held_out_share * len(prompts))))
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(0)).tolist()
        prompts, held_out = _some(prompts, sorted(order[count:])), _some(prompts, sorted(order[:count]))
    number = config.evaluation.num_prompts
    if held_out is not None and number is not None and number < len(held_out):
        held_out = _some(held_out, list(range(number)))
    return prompts, held_out


def file_digests(config: TrainConfig) -> dict[str, str]:
    """SHA-256 of the files with prompts and rewards, by path as the configuration has it: what a resumed run reads again.

    Modules (``package.module:function``) and what a file imports are not among them.

    Example:
        >>> file_digests(config)  # doctest: +SKIP
        {'prompts.jsonl': 'e3b0c442...', 'rewards.py': '9f86d081...'}
    """
    names = (config.data.prompts, config.data.held_out, *reward_scripts(config))
    paths = {name: Path(name).expanduser() for name in names if name}
    return {name: sha256(path.read_bytes()).hexdigest() for name, path in paths.items() if path.is_file()}


def reward_scripts(config: TrainConfig) -> list[str]:
    """The files with reward functions, as the configuration has them."""
    functions = config.reward.functions
    parts = list(functions.values()) if isinstance(functions, Mapping) else [functions] if functions else []
    places = [part.get("function") if isinstance(part, Mapping) else part for part in parts]
    return [name for place in places if (name := str(place).rpartition(":")[0]).endswith(".py")]


def _some(prompts: Prompts, numbers: list[int]) -> Prompts:
    return Prompts([{**prompts[i].metadata, "prompt": prompts[i].messages} for i in numbers])


# ------------------------------------------------------------------ loggers


def make_loggers(config: TrainConfig, folder: Path) -> list[Logger]:
    """The loggers of torchrl; what an earlier process wrote to files in ``folder`` is removed, to be written again.

    Raises:
        ConfigError: if a logger's package is not installed.

    Example:
        >>> loggers = make_loggers(config, Path("runs/train/logs"))  # doctest: +SKIP
    """
    from torchrl.record.loggers import get_logger

    check_loggers(config)
    logging = config.logging
    name = logging.name or Path(config.run.out).resolve().name
    loggers = []
    for kind in logging.loggers:
        own = folder / kind
        if kind in ("csv", "tensorboard"):
            shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True, exist_ok=True)
        settings = {}
        if kind == "wandb":
            run_id = own / "id"
            if not run_id.exists():
                run_id.write_text(uuid.uuid4().hex[:12])
            settings = {"id": run_id.read_text(), "project": logging.project, "config": config.to_dict()}
        if kind == "mlflow":
            loggers.append(_mlflow_logger(name, own, logging.project))
        else:
            loggers.append(get_logger(kind, str(own), name, wandb_kwargs=settings))
    return loggers


def check_loggers(config: TrainConfig) -> None:
    """Raise if a logger's package is not installed."""
    for kind in config.logging.loggers:
        if kind != "csv" and importlib.util.find_spec(kind) is None:
            raise ConfigError(f"logging.loggers has {kind!r}, which is not installed: pip install {kind}.")


def _mlflow_logger(name: str, folder: Path, project: str) -> MLFlowLogger:
    """The project is the experiment, and a process that resumes a run continues it there too."""
    import mlflow
    from torchrl.record.loggers.mlflow import MLFlowLogger

    mlflow.end_run()  # of an earlier logger of this process
    own, run_id = folder / "id", "MLFLOW_RUN_ID"  # which mlflow.start_run reads, and torchrl's logger calls
    before = os.environ.get(run_id)
    if own.exists():
        os.environ[run_id] = own.read_text()
    try:
        # In a database: MLflow 3.10 and later refuse folders of files.
        logger = MLFlowLogger(
            project,
            tracking_uri=f"sqlite:///{folder.resolve() / 'mlflow.db'}",
            artifact_location=(folder / "artifacts").resolve().as_uri(),
        )
    finally:
        os.environ.pop(run_id, None)
        if before is not None:
            os.environ[run_id] = before
    if not own.exists():
        mlflow.set_tag("mlflow.runName", name)
        own.write_text(logger.experiment.info.run_id)
    return logger
