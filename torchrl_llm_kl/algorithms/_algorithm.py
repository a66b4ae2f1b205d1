"""What an algorithm is: a name for choices that belong together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor, nn

from torchrl_llm_kl._numerics import check_choice
from torchrl_llm_kl.algorithms._schema import SCHEMAS
from torchrl_llm_kl.losses import Aggregation, ObjectiveName

__all__ = ["Algorithm"]


@dataclass(frozen=True)
class Algorithm:
    """A preset. Every value that is not the default here has its source in :attr:`sources`.

    Args:
        name: in :data:`ALGORITHMS`.
        objective: a name of :func:`~torchrl_llm_kl.losses.get_objective`.
        objective_args: its hyper-parameters, where they are not its own defaults.
        advantage: a name of :func:`~torchrl_llm_kl.advantages.get_advantage`, None if the objective needs none.
        advantage_args: its hyper-parameters, where they are not its own defaults.
        aggregation: how terms are summed over tokens; None for the objective's own way.
        kl_loss: the estimator of the KL to the reference in the loss, ``"none"`` for none.
        kl_loss_coeff: its weight.
        kl_reward: the estimator of the KL to the reference in the reward, ``"none"`` for none.
        kl_reward_coeff: its weight.
        entropy_coeff: weight of the entropy bonus.
        leave_out_experts: KL and entropy are of what the policy sampled, not of what experts said.
        keep_best: train the best answers of each group alone.
        repeat_times: answers to each prompt.
        sample_strategy: ``"default"``, or ``"mix"``: batches of rollouts and of experts' answers.
        expert_data_ratio: share of the latter.
        use_critic: a critic of token values is trained beside the policy.
        use_reference: the reference model is needed.
        use_rollout: fresh rollouts are needed beside the data of experts.
        compute_advantage_in_trainer: advantages need the whole batch of the trainer, or what the trainer scores; otherwise
            they can be calculated where the group is.
        can_balance_batch: rows may be moved between micro-batches and ranks one by one.
        schema: a name of :data:`SCHEMAS`: what the data holds.
        on_policy: it learns from what the policy itself answers.
        sources: where each value is from.
    """

    name: str
    objective: ObjectiveName
    objective_args: Mapping[str, Any] = field(default_factory=dict)
    advantage: str | None = None
    advantage_args: Mapping[str, Any] = field(default_factory=dict)
    aggregation: Aggregation | None = None
    kl_loss: str = "none"
    kl_loss_coeff: float = 1e-3
    kl_reward: str = "none"
    kl_reward_coeff: float = 1e-3
    entropy_coeff: float = 0.0
    leave_out_experts: bool = False
    keep_best: bool = False
    repeat_times: int = 1
    sample_strategy: str = "default"
    expert_data_ratio: float = 0.5
    use_critic: bool = False
    use_reference: bool = False
    use_rollout: bool = False
    compute_advantage_in_trainer: bool = False
    can_balance_batch: bool = True
    schema: str = "experience"
    on_policy: bool = True
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice(("default", "mix"), sample_strategy=self.sample_strategy)
        check_choice(tuple(SCHEMAS), schema=self.schema)
        for name in ("kl_loss_coeff", "kl_reward_coeff", "entropy_coeff"):
            _check_coefficient(name, getattr(self, name), low=-math.inf if name == "entropy_coeff" else 0.0)
        if self.repeat_times < 1:
            raise ValueError(f"repeat_times must be at least 1, got {self.repeat_times}")
        if not 0 <= self.expert_data_ratio <= 1:
            raise ValueError(f"expert_data_ratio must lie in [0, 1], got {self.expert_data_ratio}")
        if not self.use_reference and (self.kl_loss != "none" or self.kl_reward != "none"):
            raise ValueError(
                f"{self.name} has a KL (kl_loss={self.kl_loss!r}, kl_reward={self.kl_reward!r}) but use_reference=False: set "
                "use_reference=True, or both to 'none'"
            )

    @property
    def changed(self) -> dict[str, Any]:
        """The fields that are not the defaults of this class."""
        plain = Algorithm(self.name, self.objective)
        return {
            f.name: value
            for f in fields(self)
            if f.name not in ("name", "sources") and (value := getattr(self, f.name)) != getattr(plain, f.name)
        }


def _check_coefficient(name: str, value: Any, *, low: float) -> None:
    if isinstance(value, (Tensor, nn.Module)):  # reading one would stall an accelerator
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, a tensor or a coefficient module, got {value!r}")
    if not math.isfinite(value) or value < low:
        at_least = "" if low == -math.inf else f" of at least {low:g}"
        raise ValueError(f"{name} must be a finite number{at_least}, got {value}")
