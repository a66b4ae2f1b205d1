"""Loads and checks the inputs of a run before its models, so that a mistake shows within seconds and changes no file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import tensordict
import torch
from jinja2 import TemplateError
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_llm_kl.scoring import position_limit
from torchrl_llm_kl.tasks import FunctionReward, PromptOrder, Prompts, RewardFunction, Turns, join_turns, make_env
from torchrl_llm_kl.training._build import AlgorithmPlan, plan_algorithm
from torchrl_llm_kl.training._config import ConfigError, TrainConfig
from torchrl_llm_kl.training._experts import ExpertRows
from torchrl_llm_kl.training._models import (
    chat_tokenizer,
    device_of_setting,
    load_model_config,
    policy_without_weights,
)
from torchrl_llm_kl.training._report import check_loggers
from torchrl_llm_kl.training._steps import seed_everything
from torchrl_llm_kl.training._user_code import file_digests, import_code, imported_function, load_function, user_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: A single function, or pairs of weight and function by name.
LoadedReward = RewardFunction | dict[str, tuple[float, RewardFunction]]


@dataclass(frozen=True, eq=False)
class RunInputs:
    """The inputs of a run except its models.

    Args:
        prompts: the prompts of the training.
        held_out: the prompts of the evaluation. None without an evaluation.
        experts: answers of experts. None if only the policy's own are trained.
        reward: the ``reward`` of :func:`~torchrl_llm_kl.tasks.make_env`. None if only a teacher judges the answers.
        turns: the tools and replies of conversations. None for one answer.
        plan: the algorithm before its models are loaded.
        files: SHA-256 of the prompt files and the user's code, by path.
        tokenizer: the policy's tokenizer.
        memory: bytes of the weights, the gradients and the optimiser's state of all models, without activations and caches.
        disk: the largest number of bytes that the checkpoints and the final model take together.
    """

    prompts: Prompts
    held_out: Prompts | None
    experts: ExpertRows | None
    reward: LoadedReward | None
    turns: Turns | None
    plan: AlgorithmPlan
    files: dict[str, str]
    tokenizer: PreTrainedTokenizerBase
    memory: int
    disk: int

    def rows(self, episodes: TensorDictBase) -> TensorDictBase:
        """The rows on which the algorithm trains: each turn, or each conversation.

        Algorithms that compare the steps of trajectories need a row for each turn. For the others a conversation is one row.
        """
        if self.turns is not None and self.plan.algorithm.schema != "trajectory":
            episodes = join_turns(episodes, self.tokenizer)
            if self.plan.algorithm.objective == "echo":  # its term of observations needs their tokens
                mask = episodes["masks", "all_assistant_mask"] | episodes["expert_mask"]
                episodes.set(("masks", "all_assistant_mask"), mask)
        if self.experts is not None:
            episodes.set("expert_mask", torch.zeros(episodes.batch_size, dtype=torch.bool))
        return episodes


def load_inputs(config: TrainConfig) -> RunInputs:
    """Load the inputs of a run except its models, and make all checks that need no weights. Writes nothing.

    The user's files of ``imports`` run first. Then the algorithm, the device, the loggers, the models' configurations, the
    adapters' layers, the prompts, the reward functions and the tokenizer are checked, and the first prompt is rendered.

    Args:
        config: the settings of the run.

    Raises:
        ConfigError: if settings are invalid, or a file or function does not exist.
        ModelError: if a model or a tokenizer does not exist.
        PromptError, FileNotFoundError: if the prompts are missing.

    Example:
        >>> inputs = load_inputs(read_config("config.yaml"))  # doctest: +SKIP
        >>> len(inputs.prompts)  # doctest: +SKIP
        190
    """
    for place in config.imports:
        import_code(place)
    plan = plan_algorithm(config)
    device_of_setting(config.model.device, name="model.device")
    check_loggers(config.logging.loggers)
    prompts, held_out = load_prompts(config)
    evaluates = held_out is not None and config.evaluation.every > 0
    if config.checkpoints.final == "best" and not evaluates:
        raise ConfigError(
            "checkpoints.final=best needs evaluations: set data.held_out and evaluation.every, or take last."
        )
    policy, reference = _without_weights(config)
    plan.check(policy, reference)
    memory, disk = _memory_and_disk(plan, policy, reference)
    tokenizer = chat_tokenizer(config.model.tokenizer or config.model.name, config.model.template)
    seed_everything(config.run.seed)  # a file of rewards may draw random numbers when it is imported
    reward, turns, files = load_reward(config), load_turns(config, policy), file_digests(config)
    experts = None
    if config.data.experts is not None:
        count, system, seed = config.data.num_experts, config.data.system_prompt, config.run.seed
        experts = ExpertRows(config.data.experts, tokenizer, count=count, seed=seed, system_prompt=system)
    inputs = RunInputs(prompts, held_out, experts, reward, turns, plan, files, tokenizer, memory, disk)
    _render_first(config, inputs)
    return inputs


# ------------------------------------------------------------------ prompts and rewards


def load_prompts(config: TrainConfig) -> tuple[Prompts, Prompts | None]:
    """The prompts of the training and of the evaluation. None without an evaluation.

    By default a share of the prompts is held out. All runs hold out the same prompts of a file.

    Example:
        >>> prompts, held_out = load_prompts(config)  # doctest: +SKIP
    """
    data = config.data
    prompts, held_out = Prompts(data.prompts), None if data.held_out is None else Prompts(data.held_out)
    if held_out is None and data.held_out_share and len(prompts) > 1 and config.reward.parts:
        count = min(len(prompts) - 1, max(1, round(data.held_out_share * len(prompts))))
        # Not run.seed, so that runs with different seeds are evaluated on the same prompts.
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(0)).tolist()
        prompts, held_out = _some(prompts, sorted(order[count:])), _some(prompts, sorted(order[:count]))
    number = config.evaluation.num_prompts
    if held_out is not None and number is not None and number < len(held_out):
        held_out = _some(held_out, list(range(number)))
    return prompts, held_out


def _some(prompts: Prompts, numbers: list[int]) -> Prompts:
    return Prompts([{**prompts[i].metadata, "prompt": prompts[i].messages} for i in numbers])


def load_reward(config: TrainConfig) -> LoadedReward | None:
    """The ``reward`` of :func:`~torchrl_llm_kl.tasks.make_env`. None if only a teacher judges the answers.

    Raises:
        ConfigError: if a part is not a function.

    Example:
        >>> reward = load_reward(config)  # doctest: +SKIP
    """
    if config.reward.function is not None:
        return load_function(config.reward.function)
    files: dict[Path, ModuleType] = {}  # each file runs once for all its functions, since it may load a model
    parts = {name: (part.weight, load_function(part.function, files)) for name, part in config.reward.parts.items()}
    return parts or None


def load_turns(config: TrainConfig, policy: PreTrainedModel) -> Turns | None:
    """The ``turns`` of :func:`~torchrl_llm_kl.tasks.make_env`, with the user's functions. None for one answer.

    Args:
        config: the settings of the run.
        policy: a model whose configuration limits the length of a conversation. It needs no weights.

    Raises:
        ConfigError: if a function does not exist, or does not fit.

    Example:
        >>> turns = load_turns(config, policy)  # doctest: +SKIP
    """
    settings = config.turns
    if settings is None:
        return None
    reply, stop = (None if place is None else imported_function(place) for place in (settings.reply, settings.stop))
    tools = [imported_function(place) for place in settings.tools]
    longest, limit = settings.max_tokens, position_limit(policy)
    if longest is None and limit is not None:
        longest = max(1, limit - config.sampler.max_new_tokens)
    try:
        return Turns(settings.max, tools, reply, stop, workers=settings.workers, max_tokens=longest)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the section turns: {error}") from error


def env_of(
    config: TrainConfig,
    inputs: RunInputs,
    prompts: Prompts,
    *,
    order: PromptOrder,
    num_prompts: int = 1,
    group_size: int = 1,
) -> EnvBase:
    """The env of a run: it renders prompts, runs tools and rewards answers. It does not score them.

    Example:
        >>> env = env_of(config, inputs, inputs.prompts, order=PromptOrder())  # doctest: +SKIP
    """
    each = config.turns is not None and config.turns.reward == "each"
    system, timeout, reward = config.data.system_prompt, config.reward.timeout, None
    if inputs.reward is not None:
        reward = FunctionReward(inputs.reward, timeout=timeout, tokenizer=inputs.tokenizer, each_turn=each)
    make = partial(make_env, prompts, reward, inputs.tokenizer, order=order, num_prompts=num_prompts)
    return make(group_size=group_size, turns=inputs.turns, system_prompt=system, timeout=timeout)


def _render_first(config: TrainConfig, inputs: RunInputs) -> None:
    """Build an env of each source of prompts, which renders the first prompt."""
    with tensordict.set_list_to_stack(True):  # `train` sets it, but a dry run only loads the inputs
        try:
            for prompts in filter(None, (inputs.prompts, inputs.held_out)):
                env_of(config, inputs, prompts, order=PromptOrder())
        except TemplateError as error:
            advice = "change the prompts, data.system_prompt or model.template"
            raise ConfigError(f"the chat template refuses the first prompt ({error}): {advice}.") from error


# ------------------------------------------------------------------ the folder of the run


def check_inputs_stay(config: TrainConfig, written: tuple[str, ...]) -> None:
    """Raise if a run would move or replace one of its inputs.

    Args:
        config: the settings of the run.
        written: the names of the files and folders that the run writes into its folder.

    Raises:
        ConfigError: with the name of the setting.
    """
    places = [*_models(config), ("data.prompts", config.data.prompts), ("data.held_out", config.data.held_out)]
    places += [("data.experts", config.data.experts)]
    places += [("model.template", config.model.template), *user_files(config)]
    folders = [path.resolve() for path in (Path(config.run.out, name) for name in written) if path.exists()]
    for key, value in places:
        path = Path(value or "").expanduser().resolve()
        if value is not None and any(path.is_relative_to(folder) for folder in folders):
            raise ConfigError(
                f"{key} is {value}, which this run would move or replace: copy it, or pass another run.out."
            )


# ------------------------------------------------------------------ the models, without their weights


def _models(config: TrainConfig) -> Iterator[tuple[str, str | None]]:
    """The settings that name a model or a tokenizer."""
    yield "model.name", config.model.name
    yield "model.tokenizer", config.model.tokenizer
    if config.reference.name not in ("start", "base", "none"):
        yield "reference.name", config.reference.name
    yield "algorithm.teacher", config.algorithm.teacher


def _without_weights(config: TrainConfig) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Build the policy, and the reference or the teacher, on the meta device."""
    from transformers import AutoModelForCausalLM

    names = {key: name for key, name in _models(config) if key != "model.tokenizer"}
    configs = {key: load_model_config(name) for key, name in names.items() if name is not None}
    policy = policy_without_weights(config, configs["model.name"])
    other = configs.get("algorithm.teacher", configs.get("reference.name", configs["model.name"]))
    with torch.device("meta"):
        return policy, AutoModelForCausalLM.from_config(other)


def _memory_and_disk(plan: AlgorithmPlan, policy: PreTrainedModel, reference: PreTrainedModel) -> tuple[int, int]:
    """Estimate the bytes of memory and of disk that a run needs from the number of its parameters."""
    config = plan.config

    def size(model: PreTrainedModel, *, trained: bool = False) -> int:
        dtype = model.config.dtype if config.model.dtype == "auto" else getattr(torch, config.model.dtype)
        numbers = sum(each.numel() for each in model.parameters() if each.requires_grad or not trained)
        return numbers * (dtype if isinstance(dtype, torch.dtype) else torch.float32).itemsize

    # Adam keeps two averages of each trained number.
    whole, trained, states = size(policy), size(policy, trained=True), 0 if config.optimizer.name == "sgd" else 2
    saved = (1 + states) * trained
    memory = whole + saved
    elsewhere = config.reference.service is not None or config.reference.name == "none" or config.starts_from_base
    if plan.distils or not elsewhere:
        memory += size(reference)
    if plan.algorithm.use_critic:
        memory, saved = memory + (2 + states) * size(reference), saved + (1 + states) * size(reference)
    # The kept checkpoints, the one that is being written, the best one, and the final model.
    best = trained if config.evaluation.every else 0
    return memory, (config.checkpoints.keep + 1) * saved + best + whole
