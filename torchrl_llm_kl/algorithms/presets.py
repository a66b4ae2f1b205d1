"""The presets, with a source for each value, and tables of them.

To add an algorithm, add an :class:`~torchrl_llm_kl.algorithms.Algorithm` to this file, its name to :data:`AlgorithmName`, and a
row to ``tests/units/algorithms/test_presets.py``; outside the package: ``ALGORITHMS.add(name, Algorithm(...))``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from torchrl_llm_kl._registry import Registry, UnknownNameError
from torchrl_llm_kl.algorithms._algorithm import Algorithm
from torchrl_llm_kl.losses import get_objective, spec_of

# fmt: off
#: Every preset.
AlgorithmName = Literal[
    "ppo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce_plus_plus", "topr", "cispo", "gspo", "luspo", "sapo", "dro", "opmd",
    "asymre", "sppo", "rec", "opo", "reinforce_plus_plus_baseline", "optimal_token_baseline", "pass_at_k", "gdpo", "clip_b",
    "clip_v", "sft", "raft", "dpo", "simpo", "cpo", "orpo", "kto", "bco", "mix", "mix_chord", "on_policy_distill", "jsd",
    "gkd", "multi_step_grpo", "gigpo",
]
# fmt: on


class UnknownAlgorithmError(UnknownNameError):
    """Unknown algorithm; the message lists the registered names and suggests the nearest one."""


#: Every preset, by name: a read-only mapping. Use ``dataclasses.replace`` to vary one.
ALGORITHMS: Registry[Algorithm] = Registry("algorithm", error=UnknownAlgorithmError)


def get_algorithm(name: AlgorithmName) -> Algorithm:
    """Look a preset up by name.

    Raises:
        UnknownAlgorithmError: a ``ValueError``; lists the names and suggests the nearest one.

    Example:
        >>> get_algorithm("dapo").objective
        'dapo'
    """
    return ALGORITHMS[name]


_TRINITY = "Trinity-RFT 0.6.0"
_KL_K2 = f"{_TRINITY}: k2, 1e-3; k2 is the estimator whose gradient is that of the reverse KL"
_REPEATS = f"{_TRINITY}, default_config"
_EXPERTS = f"entropy: {_TRINITY}; KL: its estimators assume tokens sampled from the policy"


def _add(preset: Algorithm, **sources: str) -> None:
    """Register a preset with the sources of its values: field -> source."""
    ALGORITHMS.add(preset.name, replace(preset, sources=sources))


# ------------------------------------------------------------------ PPO, and groups instead of a critic

_add(
    Algorithm(
        "ppo", "ppo", advantage="gae", advantage_args={"whiten": True}, kl_loss="k2", compute_advantage_in_trainer=True
    ),
    objective="Schulman et al. 2017 (arXiv 1707.06347): clip 0.2",
    advantage=f"Schulman et al. 2016 (arXiv 1506.02438); gamma = lam = 1 and whitening: {_TRINITY}",
    kl_loss=_KL_K2,
)
_add(
    Algorithm("grpo", "ppo", advantage="grpo", kl_loss="k2", repeat_times=2),
    advantage="Shao et al. 2024 (arXiv 2402.03300), section 4.1.2: centred and scaled in the group",
    kl_loss=f"{_KL_K2}; the paper has k3, whose gradient is that of the forward KL",
    repeat_times=f"{_REPEATS}; the paper has 64",
)
_add(
    Algorithm("dr_grpo", "dr_grpo", advantage="dr_grpo", repeat_times=8),
    objective="Liu et al. 2025 (arXiv 2503.20783), section 3.2: sums over tokens, divided by a constant",
    advantage="the same paper: centred, not scaled",
    repeat_times="the same paper, appendix: 8 answers to each question",
)
_add(
    Algorithm("dapo", "dapo", advantage="grpo", repeat_times=16),
    objective="Yu et al. 2025 (arXiv 2503.14476), section 4.1: clip 0.2 / 0.28, mean over tokens, no KL",
    repeat_times="the same section: 16 answers to each prompt",
)
_add(
    Algorithm("rloo", "ppo", advantage="rloo", kl_loss="k2", repeat_times=2, compute_advantage_in_trainer=True),
    advantage="Ahmadian et al. 2024 (arXiv 2402.14740), eq. 7: leave one out",
    kl_loss=_KL_K2,
    repeat_times=f"{_REPEATS}; the paper has 2 and 4",
)
_add(
    Algorithm(
        "reinforce_plus_plus",
        "ppo",
        advantage="reinforce_plus_plus",
        kl_loss="k2",
        repeat_times=2,
        compute_advantage_in_trainer=True,
    ),
    advantage="Hu et al. 2025 (arXiv 2501.03262), section 3: discounted return, whitened over the batch",
    kl_loss=f"{_KL_K2}; the paper puts k1 in the reward",
    repeat_times=_REPEATS,
)

# ------------------------------------------------------------------ weights other than PPO's clipped ratio

_add(
    Algorithm("topr", "topr", advantage="reinforce", kl_loss="k2", repeat_times=2),
    objective="Le Roux et al. 2025 (arXiv 2503.14286): ratios of bad answers tapered to [0, 1]",
    advantage="the same paper: the reward itself, positive for good answers and negative for bad ones",
    kl_loss=f"{_KL_K2}; the paper has no KL",
    repeat_times=_REPEATS,
)
_add(
    Algorithm("cispo", "cispo", advantage="grpo", kl_loss="k2", repeat_times=2),
    objective=f"MiniMax-M1 (arXiv 2506.13585), eq. 4: weights clipped from above only; 0.28: {_TRINITY}",
    kl_loss=f"{_KL_K2}; the paper has no KL",
    repeat_times=_REPEATS,
)
_add(
    Algorithm("gspo", "gspo", advantage="grpo", kl_loss="k2", repeat_times=2),
    objective="Zheng et al. 2025 (arXiv 2507.18071), section 5.1: clip 3e-4 / 4e-4, mean of sequences",
    kl_loss=f"{_KL_K2}; the paper leaves the KL out",
    repeat_times=_REPEATS,
)
_add(
    Algorithm("luspo", "luspo", advantage="grpo", repeat_times=8),
    objective="Liu et al. 2026 (arXiv 2602.05261): GSPO times the length; clip 3e-4 / 4e-4 as GSPO",
    repeat_times="groups of the size of dr_grpo's",
)
_add(
    Algorithm("sapo", "sapo", advantage="grpo", kl_loss="k2", repeat_times=2),
    objective="Gao et al. 2025 (arXiv 2511.20347): temperatures 1.0 and 1.05",
    kl_loss=_KL_K2,
    repeat_times=_REPEATS,
)
_add(
    Algorithm(
        "dro",
        "dro",
        objective_args={"level": "sequence"},
        advantage="opmd",
        aggregation="seq-mean-token-sum",
        repeat_times=8,
    ),
    objective="Richemond et al. 2024 (arXiv 2405.19107), section 3: log-probs of whole answers; beta 0.05: Tinker's example",
    advantage="Kimi k1.5 (arXiv 2501.12599), section 2.3.2: the mean of the group for the value of the prompt",
    aggregation="the same papers: log-probs of whole answers",
    repeat_times="groups of the size of dr_grpo's",
)
_add(
    Algorithm("opmd", "opmd", advantage="opmd", kl_loss="k2", repeat_times=2),
    objective=f"{_TRINITY}: tau 1.0; after Kimi k1.5 (arXiv 2501.12599), section 2.3.2",
    kl_loss=_KL_K2,
    repeat_times=_REPEATS,
)
_add(
    Algorithm("asymre", "opmd", advantage="asymre", repeat_times=2),
    objective=f"{_TRINITY}: the plain policy gradient, halved (tau 1.0)",
    advantage="Arnal et al. 2025 (arXiv 2506.20520): a baseline 0.1 below the mean of the group",
    repeat_times=_REPEATS,
)
_add(
    Algorithm("sppo", "sppo", advantage="opmd", repeat_times=2),
    objective=f"Vaswani et al. 2021 (arXiv 2108.05828); epsilon 0.3: {_TRINITY}",
    advantage=_TRINITY,
    repeat_times=_REPEATS,
)
_add(
    Algorithm("rec", "rec", advantage="rec", kl_loss="k2", repeat_times=2),
    objective="Yao et al. 2025 (arXiv 2509.24203): no clipping, no weights by default",
    advantage="the same paper: centred in the group",
    kl_loss=_KL_K2,
    repeat_times=_REPEATS,
)

# ------------------------------------------------------------------ other baselines, several rewards, control of the entropy

_ANSWERS = "none prescribed: a group of several"
_ENTROPY = "Wang et al. 2026 (arXiv 2602.03392)"

_add(
    Algorithm("opo", "gpg", advantage="opo", repeat_times=8),
    objective="Hao et al. 2025 (arXiv 2505.23585): exactly on-policy, so no ratio to clip; no KL, no entropy bonus",
    advantage="the same paper: the mean reward of the group, weighted by length",
    repeat_times=_ANSWERS,
)
_add(
    Algorithm(
        "reinforce_plus_plus_baseline",
        "ppo",
        advantage="reinforce_plus_plus_baseline",
        kl_loss="k2",
        repeat_times=2,
        compute_advantage_in_trainer=True,
    ),
    advantage="Hu et al. 2025 (arXiv 2501.03262), REINFORCE++-baseline: centred in the group, whitened over the batch",
    kl_loss=_KL_K2,
    repeat_times=_REPEATS,
)
_add(
    Algorithm(
        "optimal_token_baseline",
        "ppo",
        advantage="optimal_token_baseline",
        repeat_times=4,
        compute_advantage_in_trainer=True,
    ),
    advantage="Li et al. 2026, 'The Optimal Token Baseline' (ICML): weights from the logit-gradient proxy",
    repeat_times="the same paper, abstract: as good with 4 answers as others with 32",
)
_add(
    Algorithm("pass_at_k", "ppo", advantage="pass_at_k", kl_loss="k2", repeat_times=8),
    advantage="Tang et al. 2025 (arXiv 2503.19595): pass@k, leave one out; k is the number of answers",
    kl_loss=_KL_K2,
    repeat_times=_ANSWERS,
)
_add(
    Algorithm(
        "gdpo",
        "ppo",
        advantage="gdpo",
        kl_loss="k2",
        repeat_times=8,
        compute_advantage_in_trainer=True,
        schema="rewards",
    ),
    advantage="Liu et al. 2026 (arXiv 2601.05242), eqs. 4-7: each reward scaled in the group, their sum in the batch",
    kl_loss=_KL_K2,
    repeat_times=_ANSWERS,
)
_add(
    Algorithm("clip_b", "ppo", advantage="clip_b", repeat_times=16, compute_advantage_in_trainer=True),
    advantage=f"{_ENTROPY}, Clip_B; 2.5 deviations: {_TRINITY}, by the same authors",
    repeat_times="Trinity-RFT, examples/entropy/clipb.yaml, which has no KL",
)
_add(
    Algorithm("clip_v", "ppo", advantage="clip_v", repeat_times=8, compute_advantage_in_trainer=True),
    advantage=f"{_ENTROPY}, Clip_V; 8.5 deviations, 1e-4 of the tokens: {_TRINITY}, by the same authors",
    repeat_times="Trinity-RFT, examples/entropy/clipv.yaml, which has no KL",
)

# ------------------------------------------------------------------ experts' answers, preferences, a teacher

_add(
    Algorithm("sft", "sft", schema="sft"),
    objective="the mean negative log-likelihood of the response tokens",
)
_add(
    Algorithm("raft", "sft", keep_best=True, repeat_times=8),
    objective="Dong et al. 2023 (arXiv 2304.06767), algorithm 1: SFT on the best answer to each prompt",
    keep_best=f"the same algorithm; {_TRINITY} trains on all that its workflow returns",
    repeat_times="the same paper, section 4: batches of 8 and more answers",
)
_add(
    Algorithm("dpo", "dpo", aggregation="seq-mean-token-sum", kl_loss="none", repeat_times=2, schema="dpo"),
    objective="Rafailov et al. 2023 (arXiv 2305.18290), eq. 7; beta 0.1: section 6",
    kl_loss=f"the objective is already KL-regularised; {_TRINITY} adds k2, 1e-3",
    repeat_times="a chosen and a rejected answer",
)
_add(
    Algorithm("simpo", "simpo", repeat_times=2, schema="dpo"),
    objective="Meng et al. 2024 (arXiv 2405.14734), eq. 6; beta 2.0, margin 1.0: the authors' for Llama-3-Base-8B",
    repeat_times="a chosen and a rejected answer",
)
_add(
    Algorithm("cpo", "cpo", repeat_times=2, schema="dpo"),
    objective="Xu et al. 2024 (arXiv 2401.08417), eq. 3 plus the negative log-likelihood; beta 0.1: the same paper",
    repeat_times="a chosen and a rejected answer",
)
_add(
    Algorithm("orpo", "orpo", repeat_times=2, schema="dpo"),
    objective="Hong et al. 2024 (arXiv 2403.07691), eqs. 3 to 7; weight 0.1: TRL 1.16, the paper's for Mistral-7B",
    repeat_times="a chosen and a rejected answer",
)
_add(
    Algorithm("kto", "kto", schema="unpaired"),
    objective="Ethayarajh et al. 2024 (arXiv 2402.01306), eq. 7; beta 0.1 and weights 1: the same paper, section 4",
)
_add(
    Algorithm("bco", "bco", schema="unpaired"),
    objective="Jung et al. 2024 (arXiv 2404.04656), the loss with the reward shift; beta 0.1: that of dpo",
)
_add(
    Algorithm("mix", "mix", advantage="grpo", kl_loss="k2", leave_out_experts=True, repeat_times=8, schema="mix"),
    objective=f"{_TRINITY}: mu 0.1",
    kl_loss=_KL_K2,
    leave_out_experts=_EXPERTS,
    repeat_times=_REPEATS,
    expert_data_ratio=f"{_TRINITY}: half of each batch from experts",
)
_add(
    Algorithm(
        "mix_chord", "mix_chord", advantage="grpo", kl_loss="k2", leave_out_experts=True, repeat_times=8, schema="mix"
    ),
    objective=f"Zhang et al. 2025 (arXiv 2508.11408): phi weights; constant mu 0.1: {_TRINITY}",
    kl_loss=_KL_K2,
    leave_out_experts=_EXPERTS,
    repeat_times=_REPEATS,
    expert_data_ratio=f"{_TRINITY}: half of each batch from experts",
)
_add(
    Algorithm(
        "on_policy_distill",
        "ppo",
        advantage="on_policy_distill",
        repeat_times=8,
        compute_advantage_in_trainer=True,
        schema="distill",
    ),
    objective=f"{_TRINITY}: ppo for stability, although importance_sampling would suffice",
    advantage="Thinking Machines 2025, 'On-Policy Distillation': minus the reverse KL per token, coefficient 1",
    repeat_times=_REPEATS,
)
_add(
    Algorithm("jsd", "ppo", advantage="jsd", repeat_times=8, compute_advantage_in_trainer=True, schema="distill"),
    objective=_TRINITY,
    advantage=f"Agarwal et al. 2024 (arXiv 2306.13649), generalised JSD; weight 0.5: {_TRINITY}",
    repeat_times=_REPEATS,
)

_add(
    Algorithm("gkd", "distill", schema="distill"),
    objective="Agarwal et al. 2024 (arXiv 2306.13649), algorithm 1; beta 0.5: TRL 1.16, GKDConfig. The share lambda of the "
    "student's own answers is that of the data",
)

# ------------------------------------------------------------------ trajectories of several steps

_add(
    Algorithm("multi_step_grpo", "ppo", advantage="step_wise_grpo", kl_loss="k2", repeat_times=8, schema="trajectory"),
    advantage=f"{_TRINITY}, after rLLM: the last step's advantage, at every step of the run",
    kl_loss=_KL_K2,
    repeat_times=_REPEATS,
)
_add(
    Algorithm(
        "gigpo", "ppo", advantage="gigpo", aggregation="token-mean", kl_loss="k2", repeat_times=8, schema="trajectory"
    ),
    advantage="Feng et al. 2025 (arXiv 2505.10978), eq. 8: omega 1, not scaled",
    aggregation=_TRINITY,
    kl_loss=_KL_K2,
    repeat_times="the paper, section 5.1: groups of 8",
)


# ------------------------------------------------------------------ tables

_FLAGS = ("use_critic", "use_reference", "use_rollout", "compute_advantage_in_trainer", "can_balance_batch")


def algorithm_table(learning_tests: dict[str, str] | None = None) -> str:
    """A Markdown table of objective, advantage, KL placement, aggregation and repeats of each algorithm.

    Args:
        learning_tests: algorithm -> result of its learning test; adds a column.

    Example:
        >>> print(algorithm_table().splitlines()[2])
        | `ppo` | `ppo` | `gae(whiten=True)` | loss: `k2`, 0.001 | `token-mean` | 1 | `experience` |
    """
    header = ["algorithm", "objective", "advantage", "KL to the reference", "sum over tokens", "answers", "data"]
    rows = [_row(preset) for preset in ALGORITHMS.values()]
    if learning_tests:
        header.append("learning test")
        for name, row in zip(ALGORITHMS, rows, strict=True):
            row.append(learning_tests.get(name, "—"))
    return _markdown(header, rows)


def flag_table() -> str:
    """A Markdown table of the flags of each algorithm.

    Example:
        >>> print(flag_table().splitlines()[2])
        | `ppo` | yes | yes |  | yes | yes |
    """
    rows = [
        [f"`{name}`", *("yes" if getattr(preset, flag) else "" for flag in _FLAGS)]
        for name, preset in ALGORITHMS.items()
    ]
    return _markdown(["algorithm", *(f"`{flag}`" for flag in _FLAGS)], rows)


def source_table() -> str:
    """A Markdown table of the source of each value.

    Example:
        >>> print(source_table().splitlines()[2])
        | `ppo` | `objective` | Schulman et al. 2017 (arXiv 1707.06347): clip 0.2 |
    """
    rows = [
        [f"`{name}`", f"`{field}`", source]
        for name, preset in ALGORITHMS.items()
        for field, source in preset.sources.items()
    ]
    return _markdown(["algorithm", "value", "source"], rows)


def _row(preset: Algorithm) -> list[str]:
    advantage = "the best" if preset.keep_best else "—"
    if preset.advantage is not None:
        advantage = _call(preset.advantage, preset.advantage_args)
    kl = []
    if preset.kl_loss != "none":
        kl.append(f"loss: `{preset.kl_loss}`, {preset.kl_loss_coeff:g}")
    if preset.kl_reward != "none":
        kl.append(f"reward: `{preset.kl_reward}`, {preset.kl_reward_coeff:g}")
    spec = spec_of(get_objective(preset.objective))
    assert spec is not None
    if "ref_log_prob" in spec.needs:
        kl.append("in the objective")
    return [
        f"`{preset.name}`",
        _call(preset.objective, preset.objective_args),
        advantage,
        "; ".join(kl) or "none",
        f"`{preset.aggregation or spec.aggregation}`",
        str(preset.repeat_times),
        f"`{preset.schema}`",
    ]


def _call(name: str, args: Mapping[str, object]) -> str:
    shown = ", ".join(f"{key}={value}" for key, value in args.items())
    return f"`{name}({shown})`" if shown else f"`{name}`"


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
