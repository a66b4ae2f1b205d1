"""A run: its configuration, models, checkpoints, the loop, evaluation and a model card."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrl_llm_kl._registry import no_attribute
from torchrl_llm_kl.training._checkpoints import Checkpoint, Checkpoints, CheckpointWarning
from torchrl_llm_kl.training._config import (
    AlgorithmConfig,
    CheckpointsConfig,
    ConfigError,
    DataConfig,
    EvaluationConfig,
    KLConfig,
    LoggingConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ReferenceConfig,
    RewardConfig,
    RunConfig,
    SamplerConfig,
    TrainConfig,
    example_config,
    read_config,
    settings_table,
)
from torchrl_llm_kl.training._models import (
    ModelError,
    chat_tokenizer,
    check_model,
    export_policy,
    load_model,
    load_policy,
    load_tokenizer,
    save_policy,
)
from torchrl_llm_kl.training._report import (
    FiguresFile,
    keep_earlier,
    plot_curves,
    progress,
    read_figures,
    smooth,
    summary,
    write_card,
)

if TYPE_CHECKING:  # they load torchrl, which takes seconds: on first use
    from torchrl_llm_kl.training._build import (
        Training,
        build_training,
        check_algorithm,
        load_function,
        load_prompts,
        load_reference,
        load_reward,
        make_loggers,
        measured_kl,
        sampling_of,
    )
    from torchrl_llm_kl.training._evaluation import evaluate
    from torchrl_llm_kl.training._inputs import RunInputs, load_inputs
    from torchrl_llm_kl.training._run import Run, StopRequest, TrainResult, train
    from torchrl_llm_kl.training._steps import (
        LOSS_KEYS,
        apart,
        forget_scores,
        learn,
        loss_entries,
        make_optimizer,
        make_sampler,
        make_schedule,
        random_state,
        seed_everything,
        set_random_state,
        step_figures,
    )

__all__ = [
    "LOSS_KEYS",
    "AlgorithmConfig",
    "Checkpoint",
    "CheckpointWarning",
    "Checkpoints",
    "CheckpointsConfig",
    "ConfigError",
    "DataConfig",
    "EvaluationConfig",
    "FiguresFile",
    "KLConfig",
    "LoggingConfig",
    "LoraConfig",
    "ModelConfig",
    "ModelError",
    "OptimizerConfig",
    "ReferenceConfig",
    "RewardConfig",
    "Run",
    "RunConfig",
    "RunInputs",
    "SamplerConfig",
    "StopRequest",
    "TrainConfig",
    "TrainResult",
    "Training",
    "apart",
    "build_training",
    "chat_tokenizer",
    "check_algorithm",
    "check_model",
    "evaluate",
    "example_config",
    "export_policy",
    "forget_scores",
    "keep_earlier",
    "learn",
    "load_function",
    "load_inputs",
    "load_model",
    "load_policy",
    "load_prompts",
    "load_reference",
    "load_reward",
    "load_tokenizer",
    "loss_entries",
    "make_loggers",
    "make_optimizer",
    "make_sampler",
    "make_schedule",
    "measured_kl",
    "plot_curves",
    "progress",
    "random_state",
    "read_config",
    "read_figures",
    "sampling_of",
    "save_policy",
    "seed_everything",
    "set_random_state",
    "settings_table",
    "smooth",
    "step_figures",
    "summary",
    "train",
    "write_card",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in ("_steps", "_evaluation", "_build", "_inputs", "_run"):  # each imports of those before it
            found = import_module(f"{__name__}.{module}")
            if hasattr(found, name):
                return getattr(found, name)
    raise no_attribute(__name__, name, __all__)
