"""The presets, each value with its source, and tables of them.

Adding an algorithm is one :class:`~torchrl_llm_kl.algorithms.Algorithm` in this file (or, outside the package,
``ALGORITHMS.add(name, Algorithm(...))``), its name in :data:`AlgorithmName`, and a row in ``tests/algorithms/test_presets.py``.
"""

from __future__ import annotations

from typing import Literal

from torchrl_llm_kl._registry import Registry, UnknownNameError
from torchrl_llm_kl.algorithms._algorithm import Algorithm
from torchrl_llm_kl.losses import get_objective, spec_of

AlgorithmName = Literal[
    "ppo",
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "reinforce_plus_plus",
    "topr",
    "cispo",
    "gspo",
    "sapo",
    "opmd",
    "asymre",
    "sppo",
    "rec",
    "sft",
    "raft",
    "dpo",
    "mix",
    "mix_chord",
    "on_policy_distill",
    "jsd",
    "multi_step_grpo",
    "gigpo",
]


class UnknownAlgorithmError(UnknownNameError):
    """The name is not registered; the message lists those that are."""


#: Every preset, by name: a read-only mapping. ``dataclasses.replace`` makes a preset with other values.
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
_EXPERTS = f"entropy: {_TRINITY}; KL: its estimators are for tokens that the policy sampled"

_PRESETS = (
    # ------------------------------------------------------------------ PPO, and groups instead of a critic
    Algorithm(
        "ppo",
        objective="ppo",
        advantage="gae",
        advantage_args={"whiten": True},
        kl_loss="k2",
        compute_advantage_in_trainer=True,
        sources={
            "objective": "Schulman et al. 2017 (arXiv 1707.06347): clip 0.2",
            "advantage": f"Schulman et al. 2016 (arXiv 1506.02438); gamma = lam = 1 and whitening: {_TRINITY}",
            "kl_loss": _KL_K2,
        },
    ),
    Algorithm(
        "grpo",
        objective="ppo",
        advantage="grpo",
        kl_loss="k2",
        repeat_times=2,
        sources={
            "advantage": "Shao et al. 2024 (arXiv 2402.03300), section 4.1.2: centred and scaled in the group",
            "kl_loss": f"{_KL_K2}; the paper has k3, whose gradient is that of the forward KL",
            "repeat_times": f"{_REPEATS}; the paper has 64",
        },
    ),
    Algorithm(
        "dr_grpo",
        objective="dr_grpo",
        advantage="dr_grpo",
        repeat_times=8,
        sources={
            "objective": "Liu et al. 2025 (arXiv 2503.20783), section 3.2: sums over tokens, divided by a constant",
            "advantage": "the same paper: centred, not scaled",
            "repeat_times": "the same paper, appendix: 8 answers to each question",
        },
    ),
    Algorithm(
        "dapo",
        objective="dapo",
        advantage="grpo",
        repeat_times=16,
        sources={
            "objective": "Yu et al. 2025 (arXiv 2503.14476), section 4.1: clip 0.2 / 0.28, mean over tokens, no KL",
            "repeat_times": "the same section: 16 answers to each prompt",
        },
    ),
    Algorithm(
        "rloo",
        objective="ppo",
        advantage="rloo",
        kl_loss="k2",
        repeat_times=2,
        compute_advantage_in_trainer=True,
        sources={
            "advantage": "Ahmadian et al. 2024 (arXiv 2402.14740), eq. 7: leave one out",
            "kl_loss": _KL_K2,
            "repeat_times": f"{_REPEATS}; the paper has 2 and 4",
        },
    ),
    Algorithm(
        "reinforce_plus_plus",
        objective="ppo",
        advantage="reinforce_plus_plus",
        kl_loss="k2",
        repeat_times=2,
        compute_advantage_in_trainer=True,
        sources={
            "advantage": "Hu et al. 2025 (arXiv 2501.03262), section 3: discounted return, whitened over the batch",
            "kl_loss": f"{_KL_K2}; the paper puts k1 in the reward",
            "repeat_times": _REPEATS,
        },
    ),
    # ------------------------------------------------------------------ weights other than PPO's clipped ratio
    Algorithm(
        "topr",
        objective="topr",
        advantage="reinforce",
        kl_loss="k2",
        repeat_times=2,
        sources={
            "objective": "Le Roux et al. 2025 (arXiv 2503.14286): ratios of bad answers tapered to [0, 1]",
            "advantage": "the same paper: the reward itself, positive for good answers and negative for bad ones",
            "kl_loss": f"{_KL_K2}; the paper has no KL",
            "repeat_times": _REPEATS,
        },
    ),
    Algorithm(
        "cispo",
        objective="cispo",
        advantage="grpo",
        kl_loss="k2",
        repeat_times=2,
        sources={
            "objective": f"MiniMax-M1 (arXiv 2506.13585), eq. 4: weights clipped from above alone; 0.28: {_TRINITY}",
            "kl_loss": f"{_KL_K2}; the paper has no KL",
            "repeat_times": _REPEATS,
        },
    ),
    Algorithm(
        "gspo",
        objective="gspo",
        advantage="grpo",
        kl_loss="k2",
        repeat_times=2,
        sources={
            "objective": "Zheng et al. 2025 (arXiv 2507.18071), section 5.1: clip 3e-4 / 4e-4, mean of sequences",
            "kl_loss": f"{_KL_K2}; the paper leaves the KL out",
            "repeat_times": _REPEATS,
        },
    ),
    Algorithm(
        "sapo",
        objective="sapo",
        advantage="grpo",
        kl_loss="k2",
        repeat_times=2,
        sources={
            "objective": "Gao et al. 2025 (arXiv 2511.20347): temperatures 1.0 and 1.05",
            "kl_loss": _KL_K2,
            "repeat_times": _REPEATS,
        },
    ),
    Algorithm(
        "opmd",
        objective="opmd",
        advantage="opmd",
        kl_loss="k2",
        repeat_times=2,
        sources={
            "objective": f"{_TRINITY}: tau 1.0; after Kimi k1.5 (arXiv 2501.12599), section 2.3.2",
            "kl_loss": _KL_K2,
            "repeat_times": _REPEATS,
        },
    ),
    Algorithm(
        "asymre",
        objective="opmd",
        advantage="asymre",
        repeat_times=2,
        sources={
            "objective": f"{_TRINITY}: the plain policy gradient, halved (tau 1.0)",
            "advantage": "Arnal et al. 2025 (arXiv 2506.20520): a baseline 0.1 below the mean of the group",
            "repeat_times": _REPEATS,
        },
    ),
    Algorithm(
        "sppo",
        objective="sppo",
        advantage="opmd",
        repeat_times=2,
        sources={
            "objective": f"Vaswani et al. 2021 (arXiv 2108.05828); epsilon 0.3: {_TRINITY}",
            "advantage": _TRINITY,
            "repeat_times": _REPEATS,
        },
    ),
    Algorithm(
        "rec",
        objective="rec",
        advantage="rec",
        kl_loss="k2",
        repeat_times=2,
        sources={
            "objective": "Yao et al. 2025 (arXiv 2509.24203): no clipping, no weights by default",
            "advantage": "the same paper: centred in the group",
            "kl_loss": _KL_K2,
            "repeat_times": _REPEATS,
        },
    ),
    # ------------------------------------------------------------------ answers of others: experts, preferences, a teacher
    Algorithm(
        "sft",
        objective="sft",
        schema="sft",
        sources={"objective": "the mean negative log-likelihood of the answers' tokens"},
    ),
    Algorithm(
        "raft",
        objective="sft",
        keep_best=True,
        repeat_times=8,
        sources={
            "objective": "Dong et al. 2023 (arXiv 2304.06767), algorithm 1: SFT on the best answer to each prompt",
            "keep_best": f"the same algorithm; {_TRINITY} trains whatever its workflow returns",
            "repeat_times": "the same paper, section 4: batches of 8 and more answers",
        },
    ),
    Algorithm(
        "dpo",
        objective="dpo",
        aggregation="seq-mean-token-sum",
        kl_loss="none",
        repeat_times=2,
        schema="dpo",
        sources={
            "objective": "Rafailov et al. 2023 (arXiv 2305.18290), eq. 7; beta 0.1: section 6",
            "kl_loss": f"the objective is a KL-regularised one already; {_TRINITY} adds k2, 1e-3",
            "repeat_times": "a chosen and a rejected answer",
        },
    ),
    Algorithm(
        "mix",
        objective="mix",
        advantage="grpo",
        kl_loss="k2",
        leave_out_experts=True,
        repeat_times=8,
        schema="mix",
        sources={
            "objective": f"{_TRINITY}: mu 0.1",
            "kl_loss": _KL_K2,
            "leave_out_experts": _EXPERTS,
            "repeat_times": _REPEATS,
            "expert_data_ratio": f"{_TRINITY}: half of each batch from experts",
        },
    ),
    Algorithm(
        "mix_chord",
        objective="mix_chord",
        advantage="grpo",
        kl_loss="k2",
        leave_out_experts=True,
        repeat_times=8,
        schema="mix",
        sources={
            "objective": f"Zhang et al. 2025 (arXiv 2508.11408): phi weights; constant mu 0.1: {_TRINITY}",
            "kl_loss": _KL_K2,
            "leave_out_experts": _EXPERTS,
            "repeat_times": _REPEATS,
            "expert_data_ratio": f"{_TRINITY}: half of each batch from experts",
        },
    ),
    Algorithm(
        "on_policy_distill",
        objective="ppo",
        advantage="on_policy_distill",
        repeat_times=8,
        compute_advantage_in_trainer=True,
        schema="distill",
        sources={
            "objective": f"{_TRINITY}: ppo, for stability where importance_sampling would do",
            "advantage": "Thinking Machines 2025, 'On-Policy Distillation': minus the reverse KL per token, coefficient 1",
            "repeat_times": _REPEATS,
        },
    ),
    Algorithm(
        "jsd",
        objective="ppo",
        advantage="jsd",
        repeat_times=8,
        compute_advantage_in_trainer=True,
        schema="distill",
        sources={
            "objective": _TRINITY,
            "advantage": f"Agarwal et al. 2024 (arXiv 2306.13649), generalised JSD; weight 0.5: {_TRINITY}",
            "repeat_times": _REPEATS,
        },
    ),
    # ------------------------------------------------------------------ trajectories of several steps
    Algorithm(
        "multi_step_grpo",
        objective="ppo",
        advantage="step_wise_grpo",
        kl_loss="k2",
        repeat_times=8,
        schema="trajectory",
        sources={
            "advantage": f"{_TRINITY}, after rLLM: the last step's advantage, at every step of the run",
            "kl_loss": _KL_K2,
            "repeat_times": _REPEATS,
        },
    ),
    Algorithm(
        "gigpo",
        objective="ppo",
        advantage="gigpo",
        aggregation="token-mean",
        kl_loss="k2",
        repeat_times=8,
        schema="trajectory",
        sources={
            "advantage": "Feng et al. 2025 (arXiv 2505.10978), eq. 8: omega 1, not scaled",
            "aggregation": _TRINITY,
            "kl_loss": _KL_K2,
            "repeat_times": "the paper, section 5.1: groups of 8",
        },
    ),
)
for _preset in _PRESETS:
    ALGORITHMS.add(_preset.name, _preset)


# ------------------------------------------------------------------ tables

_FLAGS = ("use_critic", "use_reference", "use_rollout", "compute_advantage_in_trainer", "can_balance_batch")


def algorithm_table(learning_tests: dict[str, str] | None = None) -> str:
    """A Markdown table of objective, advantage, KL placement, aggregation and repeats of each algorithm.

    Args:
        learning_tests: algorithm -> what a test has shown it to learn, for a further column.
    """
    learned = learning_tests or {}
    header = ["algorithm", "objective", "advantage", "KL to the reference", "sum over tokens", "answers", "data"]
    rows = [
        [
            f"`{name}`",
            _call(preset.objective, preset.objective_args),
            _advantage(preset),
            _kl(preset),
            f"`{_aggregation(preset)}`",
            str(preset.repeat_times),
            f"`{preset.schema}`",
            *([learned.get(name, "—")] if learned else []),
        ]
        for name, preset in ALGORITHMS.items()
    ]
    return _markdown([*header, *(["learning test"] if learned else [])], rows)


def flag_table() -> str:
    """A Markdown table of the flags of each algorithm."""
    rows = [
        [f"`{name}`", *("yes" if getattr(preset, flag) else "" for flag in _FLAGS)]
        for name, preset in ALGORITHMS.items()
    ]
    return _markdown(["algorithm", *(f"`{flag}`" for flag in _FLAGS)], rows)


def source_table() -> str:
    """A Markdown table of the source of each value."""
    rows = [
        [f"`{name}`", f"`{field}`", source]
        for name, preset in ALGORITHMS.items()
        for field, source in preset.sources.items()
    ]
    return _markdown(["algorithm", "value", "source"], rows)


def _advantage(preset: Algorithm) -> str:
    if preset.advantage is None:
        return "the best" if preset.keep_best else "—"
    return _call(preset.advantage, preset.advantage_args)


def _call(name: str, args: object) -> str:
    shown = ", ".join(f"{key}={value}" for key, value in dict(args).items())  # type: ignore[call-overload]
    return f"`{name}({shown})`" if shown else f"`{name}`"


def _kl(preset: Algorithm) -> str:
    parts = []
    if preset.kl_loss != "none":
        parts.append(f"loss: `{preset.kl_loss}`, {preset.kl_loss_coeff:g}")
    if preset.kl_reward != "none":
        parts.append(f"reward: `{preset.kl_reward}`, {preset.kl_reward_coeff:g}")
    if preset.objective == "dpo":
        parts.append("in the objective")
    return "; ".join(parts) or "none"


def _aggregation(preset: Algorithm) -> str:
    spec = spec_of(get_objective(preset.objective))
    assert spec is not None
    return preset.aggregation or spec.aggregation


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
