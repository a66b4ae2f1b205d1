"""Learning from answers of others: experts, preferences, the best of one's own, a teacher."""

from __future__ import annotations

from torchrl_llm_kl.algorithms._algorithm import Algorithm
from torchrl_llm_kl.algorithms.presets._sources import KL_K2, REPEATS

__all__ = ["dpo", "jsd", "mix", "mix_chord", "on_policy_distill", "raft", "sft"]

sft = Algorithm(
    "sft",
    objective="sft",
    schema="sft",
    on_policy=False,
    sources={"objective": "the mean negative log-likelihood of the answers' tokens"},
)

raft = Algorithm(
    "raft",
    objective="sft",
    keep_best=True,
    repeat_times=8,
    sources={
        "objective": "Dong et al. 2023 (arXiv 2304.06767), algorithm 1: SFT on the best answer to each prompt",
        "keep_best": "the same; Trinity-RFT 0.6.0 trains whatever its workflow returns",
        "repeat_times": "the same, section 4: batches of 8 and more answers",
    },
)

dpo = Algorithm(
    "dpo",
    objective="dpo",
    aggregation="seq-mean-token-sum",
    kl_loss="none",
    repeat_times=2,
    use_reference=True,
    can_balance_batch=False,
    schema="dpo",
    on_policy=False,
    sources={
        "objective": "Rafailov et al. 2023 (arXiv 2305.18290), eq. 7; beta 0.1: section 6",
        "kl_loss": "the objective is a KL-regularised one already; Trinity-RFT 0.6.0 adds k2, 1e-3",
        "repeat_times": "a chosen and a rejected answer",
    },
)

mix = Algorithm(
    "mix",
    objective="mix",
    advantage="grpo",
    kl_loss="k2",
    leave_out_experts=True,
    repeat_times=8,
    sample_strategy="mix",
    use_reference=True,
    use_rollout=True,
    schema="mix",
    sources={
        "objective": "Trinity-RFT 0.6.0: mu 0.1",
        "kl_loss": KL_K2,
        "leave_out_experts": "entropy: Trinity-RFT 0.6.0; KL: its estimators are for tokens that the policy sampled",
        "repeat_times": REPEATS,
        "sample_strategy": "Trinity-RFT 0.6.0: half of each batch from experts",
    },
)

mix_chord = Algorithm(
    "mix_chord",
    objective="mix_chord",
    advantage="grpo",
    kl_loss="k2",
    leave_out_experts=True,
    repeat_times=8,
    sample_strategy="mix",
    use_reference=True,
    use_rollout=True,
    schema="mix",
    sources={
        "objective": "Zhang et al. 2025 (arXiv 2508.11408): phi weights; constant mu 0.1: Trinity-RFT 0.6.0",
        "kl_loss": KL_K2,
        "leave_out_experts": "entropy: Trinity-RFT 0.6.0; KL: its estimators are for tokens that the policy sampled",
        "repeat_times": REPEATS,
        "sample_strategy": "Trinity-RFT 0.6.0: half of each batch from experts",
    },
)

on_policy_distill = Algorithm(
    "on_policy_distill",
    objective="ppo",
    advantage="on_policy_distill",
    repeat_times=8,
    compute_advantage_in_trainer=True,
    schema="distill",
    sources={
        "objective": "Trinity-RFT 0.6.0: ppo, for stability where importance_sampling would do",
        "advantage": "Thinking Machines 2025, 'On-Policy Distillation': minus the reverse KL per token, coefficient 1",
        "repeat_times": REPEATS,
    },
)

jsd = Algorithm(
    "jsd",
    objective="ppo",
    advantage="jsd",
    repeat_times=8,
    compute_advantage_in_trainer=True,
    schema="distill",
    sources={
        "objective": "Trinity-RFT 0.6.0",
        "advantage": "Agarwal et al. 2024 (arXiv 2306.13649), generalised JSD; weight 0.5: Trinity-RFT 0.6.0",
        "repeat_times": REPEATS,
    },
)
