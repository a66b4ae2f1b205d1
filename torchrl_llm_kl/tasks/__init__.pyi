"""Names of the package: it loads them on first use, type checkers read them here."""

from torchrl_llm_kl.tasks._env import (
    InputMode as InputMode,
    Reply as Reply,
    Turns as Turns,
    make_env as make_env,
)
from torchrl_llm_kl.tasks._episodes import (
    join_turns as join_turns,
    turn_counts as turn_counts,
    turn_figures as turn_figures,
    whole_episodes as whole_episodes,
)
from torchrl_llm_kl.tasks._groups import (
    whole_groups as whole_groups,
)
from torchrl_llm_kl.tasks._prompts import (
    Prompt as Prompt,
    PromptError as PromptError,
    PromptOrder as PromptOrder,
    Prompts as Prompts,
)
from torchrl_llm_kl.tasks._rewards import (
    FunctionReward as FunctionReward,
    Reward as Reward,
    RewardError as RewardError,
    RewardFunction as RewardFunction,
    reward_metrics as reward_metrics,
)
from torchrl_llm_kl.tasks._tiny import (
    tiny_chat_model as tiny_chat_model,
)
from torchrl_llm_kl.tasks._tools import (
    ToolCall as ToolCall,
    ToolParser as ToolParser,
)

# isort: split
# For the layers above, not public:
from torchrl_llm_kl.tasks._episodes import (
    write_answers as write_answers,
)
from torchrl_llm_kl.tasks._rewards import (
    active_rows as active_rows,
    read_rows_of as read_rows_of,
)
