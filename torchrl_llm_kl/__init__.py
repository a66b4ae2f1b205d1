"""KL-regularised post-training of language models on TorchRL.

Public names load on first use: ``import torchrl_llm_kl`` is nearly free and imports neither transformers nor ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_llm_kl.advantages import Advantage
    from torchrl_llm_kl.algorithms import from_trinity, from_trl, from_verl, make_algorithm
    from torchrl_llm_kl.datasets import (
        from_completions,
        from_conversations,
        from_pairs,
        load_batch,
        read_rows,
        save_batch,
    )
    from torchrl_llm_kl.diagnostics import Diagnosis, Doctor, RunMonitor, diagnose, inspect_tokens
    from torchrl_llm_kl.estimators import (
        AdaptiveEntropyCoefficient,
        AdaptiveKLCoefficient,
        DualKLCoefficient,
        FixedKLCoefficient,
        PIKLCoefficient,
        get_estimator,
    )
    from torchrl_llm_kl.losses import LossTerm, PolicyLoss, ValueLoss, get_objective
    from torchrl_llm_kl.ragged import Ragged
    from torchrl_llm_kl.scoring import (
        LogProbScorer,
        ReferenceUpdater,
        RememberedModel,
        SamplerMismatchWarning,
        Sampling,
        ScoreStore,
        TokenCritic,
        prepare_reference,
    )
    from torchrl_llm_kl.tasks import FunctionReward, PromptError, RewardError, make_env
    from torchrl_llm_kl.transforms import (
        KLComputation,
        KLRewardTransform,
        RecordKept,
        RetrieveKL,
        RetrieveLogProb,
        RetrieveValue,
    )

__version__ = "0.1.0"

_PUBLIC = {
    "advantages": ("Advantage",),
    "algorithms": ("from_trinity", "from_trl", "from_verl", "make_algorithm"),
    "datasets": ("from_completions", "from_conversations", "from_pairs", "load_batch", "read_rows", "save_batch"),
    "diagnostics": ("Diagnosis", "Doctor", "RunMonitor", "diagnose", "inspect_tokens"),
    "estimators": (
        "AdaptiveEntropyCoefficient",
        "AdaptiveKLCoefficient",
        "DualKLCoefficient",
        "FixedKLCoefficient",
        "PIKLCoefficient",
        "get_estimator",
    ),
    "losses": ("LossTerm", "PolicyLoss", "ValueLoss", "get_objective"),
    "ragged": ("Ragged",),
    "scoring": (
        "LogProbScorer",
        "ReferenceUpdater",
        "RememberedModel",
        "SamplerMismatchWarning",
        "Sampling",
        "ScoreStore",
        "TokenCritic",
        "prepare_reference",
    ),
    "tasks": ("FunctionReward", "PromptError", "RewardError", "make_env"),
    "transforms": (
        "KLComputation",
        "KLRewardTransform",
        "RecordKept",
        "RetrieveKL",
        "RetrieveLogProb",
        "RetrieveValue",
    ),
}
_HOME = {name: layer for layer, names in _PUBLIC.items() for name in names}
_LAYERS = (*_PUBLIC, "cli", "configs", "masks", "rollouts", "service", "training")

__all__ = [
    "AdaptiveEntropyCoefficient",
    "AdaptiveKLCoefficient",
    "Advantage",
    "Diagnosis",
    "Doctor",
    "DualKLCoefficient",
    "FixedKLCoefficient",
    "FunctionReward",
    "KLComputation",
    "KLRewardTransform",
    "LogProbScorer",
    "LossTerm",
    "PIKLCoefficient",
    "PolicyLoss",
    "PromptError",
    "Ragged",
    "RecordKept",
    "ReferenceUpdater",
    "RememberedModel",
    "RetrieveKL",
    "RetrieveLogProb",
    "RetrieveValue",
    "RewardError",
    "RunMonitor",
    "SamplerMismatchWarning",
    "Sampling",
    "ScoreStore",
    "TokenCritic",
    "ValueLoss",
    "diagnose",
    "from_completions",
    "from_conversations",
    "from_pairs",
    "from_trinity",
    "from_trl",
    "from_verl",
    "get_estimator",
    "get_objective",
    "inspect_tokens",
    "load_batch",
    "make_algorithm",
    "make_env",
    "prepare_reference",
    "read_rows",
    "save_batch",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    if name in _LAYERS:
        return import_module(f"{__name__}.{name}")
    from torchrl_llm_kl._registry import no_attribute

    raise no_attribute(__name__, name, (*_HOME, *_LAYERS))


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_LAYERS})
