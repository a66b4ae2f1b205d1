"""Objectives with other weights than PPO's clipped ratio."""

from __future__ import annotations

from torchrl_llm_kl.algorithms._algorithm import Algorithm
from torchrl_llm_kl.algorithms.presets._sources import KL_K2, REPEATS

__all__ = ["asymre", "cispo", "gspo", "opmd", "rec", "sapo", "sppo", "topr"]

topr = Algorithm(
    "topr",
    objective="topr",
    advantage="reinforce",
    kl_loss="k2",
    repeat_times=2,
    use_reference=True,
    sources={
        "objective": "Le Roux et al. 2025 (arXiv 2503.14286): ratios of bad answers tapered to [0, 1]",
        "advantage": "the same: the reward itself, positive for good answers and negative for bad ones",
        "kl_loss": KL_K2 + "; the paper has no KL",
        "repeat_times": REPEATS,
    },
)

cispo = Algorithm(
    "cispo",
    objective="cispo",
    advantage="grpo",
    kl_loss="k2",
    repeat_times=2,
    use_reference=True,
    sources={
        "objective": "MiniMax-M1 (arXiv 2506.13585), eq. 4: weights clipped from above alone; 0.28: Trinity-RFT 0.6.0",
        "kl_loss": KL_K2 + "; the paper has no KL",
        "repeat_times": REPEATS,
    },
)

gspo = Algorithm(
    "gspo",
    objective="gspo",
    advantage="grpo",
    kl_loss="k2",
    repeat_times=2,
    use_reference=True,
    sources={
        "objective": "Zheng et al. 2025 (arXiv 2507.18071), section 5.1: clip 3e-4 / 4e-4, mean of sequences",
        "kl_loss": KL_K2 + "; the paper leaves the KL out",
        "repeat_times": REPEATS,
    },
)

sapo = Algorithm(
    "sapo",
    objective="sapo",
    advantage="grpo",
    kl_loss="k2",
    repeat_times=2,
    use_reference=True,
    sources={
        "objective": "Gao et al. 2025 (arXiv 2511.20347): temperatures 1.0 and 1.05",
        "kl_loss": KL_K2,
        "repeat_times": REPEATS,
    },
)

opmd = Algorithm(
    "opmd",
    objective="opmd",
    advantage="opmd",
    kl_loss="k2",
    repeat_times=2,
    use_reference=True,
    sources={
        "objective": "Trinity-RFT 0.6.0: tau 1.0; after Kimi k1.5 (arXiv 2501.12599), section 2.3.2",
        "kl_loss": KL_K2,
        "repeat_times": REPEATS,
    },
)

asymre = Algorithm(
    "asymre",
    objective="opmd",
    advantage="asymre",
    repeat_times=2,
    sources={
        "objective": "Trinity-RFT 0.6.0: the plain policy gradient, halved (tau 1.0)",
        "advantage": "Arnal et al. 2025 (arXiv 2506.20520): a baseline 0.1 below the mean of the group",
        "repeat_times": REPEATS,
    },
)

sppo = Algorithm(
    "sppo",
    objective="sppo",
    advantage="opmd",
    repeat_times=2,
    sources={
        "objective": "Vaswani et al. 2021 (arXiv 2108.05828); epsilon 0.3: Trinity-RFT 0.6.0",
        "advantage": "Trinity-RFT 0.6.0",
        "repeat_times": REPEATS,
    },
)

rec = Algorithm(
    "rec",
    objective="rec",
    advantage="rec",
    kl_loss="k2",
    repeat_times=2,
    use_reference=True,
    sources={
        "objective": "Yao et al. 2025 (arXiv 2509.24203): no clipping, no weights by default",
        "advantage": "the same: centred in the group",
        "kl_loss": KL_K2,
        "repeat_times": REPEATS,
    },
)
