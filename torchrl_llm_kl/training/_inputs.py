"""What a run reads, loaded and checked before its models: a mistake costs seconds, and nothing is written or moved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import tensordict
import torch
from jinja2 import TemplateError

from torchrl_llm_kl._registry import first_sentence
from torchrl_llm_kl.algorithms import get_algorithm
from torchrl_llm_kl.tasks import Prompts, make_env
from torchrl_llm_kl.training._build import (
    check_algorithm,
    check_loggers,
    check_parts,
    check_ray,
    file_digests,
    load_prompts,
    load_reward,
    reward_scripts,
)
from torchrl_llm_kl.training._config import ConfigError, TrainConfig, refuse
from torchrl_llm_kl.training._models import ModelError, chat_tokenizer, check_device, check_policy, load_model_config
from torchrl_llm_kl.training._steps import seed_everything

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from torchrl_llm_kl.training._build import Reward


@dataclass(frozen=True, eq=False)
class RunInputs:
    """What a run reads but for its models.

    Args:
        prompts: to train on.
        held_out: for the evaluation; None if there are none.
        reward: as :func:`~torchrl_llm_kl.tasks.make_env` takes it; None if only a teacher judges.
        files: SHA-256 of the files with prompts and rewards, by path.
        tokenizer: of the policy.
        memory: bytes of weights, gradients and the optimiser's state, of all models; activations and caches come on top.
        disk: most bytes of checkpoints and the final model at a time.
    """

    prompts: Prompts
    held_out: Prompts | None
    reward: Reward | None
    files: dict[str, str]
    tokenizer: PreTrainedTokenizerBase
    memory: int
    disk: int


def load_inputs(config: TrainConfig) -> RunInputs:
    """Load what a run reads but for its models, and check all that needs no weights; writes nothing.

    The algorithm, the device, the packages, the models' configurations, the adapters' layers, the prompts, the reward functions
    and the tokenizer are checked, and the first prompt is rendered.

    Args:
        config: of the run.

    Raises:
        ConfigError: for settings that no run can have, or a reward that is not there.
        ModelError: for a model, a tokenizer or a device that is not there.
        PromptError, FileNotFoundError: for prompts that are not there.

    Example:
        >>> inputs = load_inputs(read_config("config.yaml"))  # doctest: +SKIP
        >>> len(inputs.prompts)  # doctest: +SKIP
        190
    """
    check_folder(Path(config.run.out))
    check_algorithm(config)
    check_device(config.model.device, name="model.device")
    check_loggers(config)
    if config.reference.service is not None:
        check_ray()
    prompts, held_out = load_prompts(config)
    refuse(config, best_of_no_prompts=held_out is None and config.checkpoints.final == "best")
    memory, disk = _estimate(config, *_check_models(config))
    tokenizer = chat_tokenizer(config.model.tokenizer or config.model.name)
    seed_everything(config.run.seed)  # a module of rewards may draw
    reward, files = load_reward(config), file_digests(config)
    for some in (prompts, held_out):
        if some is not None:
            _render_first(config, some, reward, tokenizer)
    return RunInputs(prompts, held_out, reward, files, tokenizer, memory, disk)


def check_folder(out: Path) -> None:
    """Raise if a folder cannot be made, or nothing can be written into it.

    Raises:
        ConfigError: names the place.
    """
    place = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not place.is_dir():
        raise ConfigError(f"run.out is {out}, and {place} is a file: pass a folder.")
    if not os.access(place, os.W_OK):
        raise ConfigError(f"run.out is {out}, and nothing can be written in {place}: pass another folder.")


def check_kept(config: TrainConfig, written: tuple[str, ...]) -> None:
    """Raise if a run would move away or replace what it reads.

    Args:
        config: of the run.
        written: what it writes into its folder.

    Raises:
        ConfigError: names the setting.
    """
    places = dict(_models(config)) | {"data.prompts": config.data.prompts, "data.held_out": config.data.held_out}
    places |= {f"reward.functions ({script})": script for script in reward_scripts(config)}
    for (key, value), name in product(places.items(), written):
        if value is not None and _is_within(value, Path(config.run.out, name)):
            advice = "which this run would move or replace: copy it to another folder, or pass another run.out"
            raise ConfigError(f"{key} is {value}, of an earlier run in run.out, {advice}.")


def _is_within(path: str, folder: Path) -> bool:
    """Whether a file or folder is within another one, by its name or by what links point to."""
    if not folder.exists():
        return False
    expanded = os.path.expanduser(path)
    return any(Path(whole(expanded)).is_relative_to(whole(folder)) for whole in (os.path.abspath, os.path.realpath))


def _models(config: TrainConfig) -> Iterator[tuple[str, str | None]]:
    """The settings that name a model or a tokenizer."""
    yield "model.name", config.model.name
    yield "model.tokenizer", config.model.tokenizer
    if config.reference.name not in ("start", "base", "none"):
        yield "reference.name", config.reference.name
    yield "algorithm.teacher", config.algorithm.teacher


def _check_models(config: TrainConfig) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The policy and its reference, or the teacher, without weights."""
    found = {}
    for key, name in _models(config):
        if name is None or key == "model.tokenizer":  # which is loaded
            continue
        try:
            found[key] = load_model_config(name)
        except ModelError as error:
            raise ModelError(f"{key}: {error}") from error
    from transformers import AutoModelForCausalLM

    policy = check_policy(config, found["model.name"])
    other = found.get("algorithm.teacher", found.get("reference.name", found["model.name"]))
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(other)
    check_parts(config, policy, reference)
    return policy, reference


def _estimate(config: TrainConfig, policy: PreTrainedModel, reference: PreTrainedModel) -> tuple[int, int]:
    """Bytes of memory and of disk that a run needs, by the number of its parameters."""

    def size(model: PreTrainedModel, *, trained: bool = False) -> int:
        dtype = model.config.dtype if config.model.dtype == "auto" else getattr(torch, config.model.dtype)
        numbers = sum(each.numel() for each in model.parameters() if each.requires_grad or not trained)
        return numbers * (dtype if isinstance(dtype, torch.dtype) else torch.float32).itemsize

    whole, trained, states = size(policy), size(policy, trained=True), 0 if config.optimizer.name == "sgd" else 2
    saved = (1 + states) * trained
    memory = whole + saved
    own = config.reference.name == "base" or (config.reference.name == "start" and config.lora is not None)
    elsewhere = config.reference.service is not None or config.reference.name == "none" or own
    memory += 0 if elsewhere and config.algorithm.teacher is None else size(reference)
    if get_algorithm(config.algorithm.name).use_critic:  # type: ignore[arg-type]
        memory, saved = memory + (2 + states) * size(reference), saved + (1 + states) * size(reference)
    best = trained if config.evaluation.every else 0
    return memory, (config.checkpoints.keep + 1) * saved + best + whole


def _render_first(
    config: TrainConfig, prompts: Prompts, reward: Reward | None, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Build the env of some prompts, which renders the first."""
    with tensordict.set_list_to_stack(True):
        try:
            system, timeout = config.data.system_prompt, config.reward.timeout
            make_env(prompts, reward, tokenizer, group_size=1, system_prompt=system, timeout=timeout)
        except TemplateError as error:
            system = "" if system is None else ", or leave data.system_prompt out"
            raise ConfigError(
                f"the tokenizer's chat template refuses the first prompt ({first_sentence(error)}): change the prompts{system}."
            ) from error
