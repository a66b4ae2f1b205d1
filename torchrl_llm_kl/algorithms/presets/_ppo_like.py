"""PPO, and what replaced its critic by a group of answers."""

from __future__ import annotations

from torchrl_llm_kl.algorithms._algorithm import Algorithm
from torchrl_llm_kl.algorithms.presets._sources import KL_K2, REPEATS

__all__ = ["dapo", "dr_grpo", "grpo", "ppo", "reinforce_plus_plus", "rloo"]

ppo = Algorithm(
    "ppo",
    objective="ppo",
    advantage="gae",
    advantage_args={"whiten": True},
    kl_loss="k2",
    use_critic=True,
    use_reference=True,
    compute_advantage_in_trainer=True,
    sources={
        "objective": "Schulman et al. 2017 (arXiv 1707.06347): clip 0.2",
        "advantage": "Schulman et al. 2016 (arXiv 1506.02438); gamma = lam = 1 and whitening: Trinity-RFT 0.6.0",
        "kl_loss": KL_K2,
    },
)

grpo = Algorithm(
    "grpo",
    objective="ppo",
    advantage="grpo",
    kl_loss="k2",
    repeat_times=2,
    use_reference=True,
    sources={
        "advantage": "Shao et al. 2024 (arXiv 2402.03300), section 4.1.2: centred and scaled in the group",
        "kl_loss": KL_K2 + "; the paper has k3, whose gradient is that of the forward KL",
        "repeat_times": REPEATS + "; the paper has 64",
    },
)

dr_grpo = Algorithm(
    "dr_grpo",
    objective="dr_grpo",
    advantage="dr_grpo",
    repeat_times=8,
    sources={
        "objective": "Liu et al. 2025 (arXiv 2503.20783), section 3.2: sums over tokens, divided by a constant",
        "advantage": "the same: centred, not scaled",
        "repeat_times": "the same, appendix: 8 answers to each question",
    },
)

dapo = Algorithm(
    "dapo",
    objective="dapo",
    advantage="grpo",
    repeat_times=16,
    sources={
        "objective": "Yu et al. 2025 (arXiv 2503.14476), section 4.1: clip 0.2 / 0.28, mean over tokens, no KL",
        "repeat_times": "the same: 16 answers to each prompt",
    },
)

rloo = Algorithm(
    "rloo",
    objective="ppo",
    advantage="rloo",
    kl_loss="k2",
    repeat_times=2,
    use_reference=True,
    compute_advantage_in_trainer=True,
    sources={
        "advantage": "Ahmadian et al. 2024 (arXiv 2402.14740), eq. 7: leave one out",
        "kl_loss": KL_K2,
        "repeat_times": REPEATS + "; the paper has 2 and 4",
    },
)

reinforce_plus_plus = Algorithm(
    "reinforce_plus_plus",
    objective="ppo",
    advantage="reinforce_plus_plus",
    kl_loss="k2",
    repeat_times=2,
    use_reference=True,
    compute_advantage_in_trainer=True,
    sources={
        "advantage": "Hu et al. 2025 (arXiv 2501.03262), section 3: discounted return, whitened over the batch",
        "kl_loss": KL_K2 + "; the paper puts k1 in the reward",
        "repeat_times": REPEATS,
    },
)
