"""Names of the package: it loads them on first use, type checkers read them here."""

from torchrl_llm_kl.training._build import (
    Training as Training,
    build_training as build_training,
    check_algorithm as check_algorithm,
    load_function as load_function,
    load_prompts as load_prompts,
    load_reference as load_reference,
    load_reward as load_reward,
    make_loggers as make_loggers,
    measured_kl as measured_kl,
    sampling_of as sampling_of,
)
from torchrl_llm_kl.training._checkpoints import (
    Checkpoint as Checkpoint,
    Checkpoints as Checkpoints,
    CheckpointWarning as CheckpointWarning,
)
from torchrl_llm_kl.training._config import (
    AlgorithmConfig as AlgorithmConfig,
    CheckpointsConfig as CheckpointsConfig,
    ConfigError as ConfigError,
    DataConfig as DataConfig,
    EvaluationConfig as EvaluationConfig,
    KLConfig as KLConfig,
    LoggingConfig as LoggingConfig,
    LoraConfig as LoraConfig,
    ModelConfig as ModelConfig,
    OptimizerConfig as OptimizerConfig,
    ReferenceConfig as ReferenceConfig,
    RewardConfig as RewardConfig,
    RunConfig as RunConfig,
    SamplerConfig as SamplerConfig,
    TrainConfig as TrainConfig,
    example_config as example_config,
    read_config as read_config,
    settings_table as settings_table,
)
from torchrl_llm_kl.training._evaluation import (
    evaluate as evaluate,
)
from torchrl_llm_kl.training._inputs import (
    RunInputs as RunInputs,
    load_inputs as load_inputs,
)
from torchrl_llm_kl.training._models import (
    ModelError as ModelError,
    chat_tokenizer as chat_tokenizer,
    check_model as check_model,
    export_policy as export_policy,
    load_model as load_model,
    load_policy as load_policy,
    load_tokenizer as load_tokenizer,
    save_policy as save_policy,
)
from torchrl_llm_kl.training._report import (
    FiguresFile as FiguresFile,
    keep_earlier as keep_earlier,
    plot_curves as plot_curves,
    progress as progress,
    read_figures as read_figures,
    smooth as smooth,
    summary as summary,
    write_card as write_card,
)
from torchrl_llm_kl.training._run import (
    Run as Run,
    StopRequest as StopRequest,
    TrainResult as TrainResult,
    train as train,
)
from torchrl_llm_kl.training._steps import (
    LOSS_KEYS as LOSS_KEYS,
    apart as apart,
    forget_scores as forget_scores,
    learn as learn,
    loss_entries as loss_entries,
    make_optimizer as make_optimizer,
    make_sampler as make_sampler,
    make_schedule as make_schedule,
    random_state as random_state,
    seed_everything as seed_everything,
    set_random_state as set_random_state,
    step_figures as step_figures,
)
