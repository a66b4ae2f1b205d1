"""Trajectories of several steps."""

from __future__ import annotations

from torchrl_llm_kl.algorithms._algorithm import Algorithm
from torchrl_llm_kl.algorithms.presets._sources import KL_K2, REPEATS

__all__ = ["gigpo", "multi_step_grpo"]

multi_step_grpo = Algorithm(
    "multi_step_grpo",
    objective="ppo",
    advantage="step_wise_grpo",
    kl_loss="k2",
    repeat_times=8,
    use_reference=True,
    schema="trajectory",
    sources={
        "advantage": "Trinity-RFT 0.6.0, after rLLM: the last step's, at every step of the run",
        "kl_loss": KL_K2,
        "repeat_times": REPEATS,
    },
)

gigpo = Algorithm(
    "gigpo",
    objective="ppo",
    advantage="gigpo",
    aggregation="token-mean",
    kl_loss="k2",
    repeat_times=8,
    use_reference=True,
    schema="trajectory",
    sources={
        "advantage": "Feng et al. 2025 (arXiv 2505.10978), eq. 8: omega 1, not scaled",
        "aggregation": "Trinity-RFT 0.6.0",
        "kl_loss": KL_K2,
        "repeat_times": "the paper, section 5.1: groups of 8",
    },
)
