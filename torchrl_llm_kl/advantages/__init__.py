"""Advantages: pure functions of rewards, values and log-probs, and the transform that reads and writes them by key.

Functions of one shape share their inputs: outcomes of sequences (``grpo``, ``rloo``, ...), tokens (``gae``, ``jsd``, ...) and
steps of trajectories (``gigpo``, ...). Their modules, ``_group``, ``_token`` and ``_trajectory``, document each input once.
"""

from __future__ import annotations

from torchrl_llm_kl.advantages._group import (
    asymre,
    best_of_group,
    dr_grpo,
    gdpo,
    grpo,
    informative_groups,
    opmd,
    opo,
    overlong_penalty,
    pass_at_k,
    rec,
    reinforce,
    remax,
    rloo,
)
from torchrl_llm_kl.advantages._registry import (
    AdvantageArgs,
    AdvantageName,
    AdvantageSpec,
    UnknownAdvantageError,
    advantage,
    advantage_spec,
    available_advantages,
    get_advantage,
)
from torchrl_llm_kl.advantages._token import (
    clip_b,
    clip_v,
    gae,
    jsd,
    on_policy_distill,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from torchrl_llm_kl.advantages._trajectory import gigpo, step_wise_grpo
from torchrl_llm_kl.advantages._transform import DEFAULT_KEYS, Advantage

__all__ = [
    "DEFAULT_KEYS",
    "Advantage",
    "AdvantageArgs",
    "AdvantageName",
    "AdvantageSpec",
    "UnknownAdvantageError",
    "advantage",
    "advantage_spec",
    "asymre",
    "available_advantages",
    "best_of_group",
    "clip_b",
    "clip_v",
    "dr_grpo",
    "gae",
    "gdpo",
    "get_advantage",
    "gigpo",
    "grpo",
    "informative_groups",
    "jsd",
    "on_policy_distill",
    "opmd",
    "opo",
    "optimal_token_baseline",
    "overlong_penalty",
    "pass_at_k",
    "rec",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "step_wise_grpo",
]
