"""Names of the package: it loads them on first use, type checkers read them here."""

from torchrl_llm_kl.training._checkpoints import (
    Checkpoint as Checkpoint,
    Checkpoints as Checkpoints,
    CheckpointWarning as CheckpointWarning,
)
from torchrl_llm_kl.training._config import (
    ConfigError as ConfigError,
    TrainConfig as TrainConfig,
    example_config as example_config,
    read_config as read_config,
)
from torchrl_llm_kl.training._engine import (
    EngineError as EngineError,
)
from torchrl_llm_kl.training._models import (
    ModelError as ModelError,
    chat_tokenizer as chat_tokenizer,
    load_model as load_model,
    save_policy as save_policy,
)
from torchrl_llm_kl.training._ranks import (
    Ranks as Ranks,
    joined_ranks as joined_ranks,
    load_shards as load_shards,
    save_shards as save_shards,
    shard as shard,
    whole as whole,
    whole_weights as whole_weights,
)
from torchrl_llm_kl.training._report import (
    FiguresFile as FiguresFile,
    keep_earlier as keep_earlier,
    plot_curves as plot_curves,
    progress as progress,
    smooth as smooth,
)
from torchrl_llm_kl.training._run import (
    Run as Run,
)
from torchrl_llm_kl.training._samplers import (
    make_sampler as make_sampler,
)
from torchrl_llm_kl.training._steps import (
    evaluate as evaluate,
    first_coefficient as first_coefficient,
    forget_scores as forget_scores,
    learn as learn,
    loss_entries as loss_entries,
    random_state as random_state,
    seed_everything as seed_everything,
    set_random_state as set_random_state,
    step_figures as step_figures,
)
from torchrl_llm_kl.training._train import (
    TrainResult as TrainResult,
    train as train,
)

# isort: split
# For the layers above, not public:
from torchrl_llm_kl.training._config import (
    SETTINGS as SETTINGS,
    as_yaml as as_yaml,
)
from torchrl_llm_kl.training._inputs import (
    load_inputs as load_inputs,
)
from torchrl_llm_kl.training._models import (
    load_tokenizer as load_tokenizer,
)
from torchrl_llm_kl.training._page import (
    compare_runs as compare_runs,
)
from torchrl_llm_kl.training._report import (
    versions as versions,
)
from torchrl_llm_kl.training._user_code import (
    load_function as load_function,
)
