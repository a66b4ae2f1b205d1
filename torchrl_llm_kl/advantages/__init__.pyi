"""Names of the package: it loads them on first use, type checkers read them here."""

from torchrl_llm_kl.advantages._group import (
    asymre as asymre,
    best_of_group as best_of_group,
    dr_grpo as dr_grpo,
    gdpo as gdpo,
    grpo as grpo,
    informative_groups as informative_groups,
    opmd as opmd,
    opo as opo,
    overlong_penalty as overlong_penalty,
    pass_at_k as pass_at_k,
    rec as rec,
    reinforce as reinforce,
    remax as remax,
    rloo as rloo,
)
from torchrl_llm_kl.advantages._registry import (
    AdvantageArgs as AdvantageArgs,
    AdvantageName as AdvantageName,
    AdvantageSpec as AdvantageSpec,
    UnknownAdvantageError as UnknownAdvantageError,
    advantage as advantage,
    advantage_spec as advantage_spec,
    available_advantages as available_advantages,
    get_advantage as get_advantage,
)
from torchrl_llm_kl.advantages._token import (
    clip_b as clip_b,
    clip_v as clip_v,
    gae as gae,
    jsd as jsd,
    on_policy_distill as on_policy_distill,
    optimal_token_baseline as optimal_token_baseline,
    reinforce_plus_plus as reinforce_plus_plus,
    reinforce_plus_plus_baseline as reinforce_plus_plus_baseline,
)
from torchrl_llm_kl.advantages._trajectory import (
    gigpo as gigpo,
    step_wise_grpo as step_wise_grpo,
)
from torchrl_llm_kl.advantages._transform import (
    DEFAULT_KEYS as DEFAULT_KEYS,
    Advantage as Advantage,
)
