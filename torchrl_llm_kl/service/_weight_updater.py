"""A served model behind ``LLMCollector(weight_updater=)``, which takes no newer scheme."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torchrl.collectors import WeightUpdaterBase

from torchrl_llm_kl.service._service import ScoringService
from torchrl_llm_kl.service._state_dict import state_dict_of

__all__ = ["ServiceWeightUpdater"]

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Creating .* which inherits from WeightUpdaterBase")

    class ServiceWeightUpdater(WeightUpdaterBase):
        """Pushes weights into a :class:`~torchrl_llm_kl.service.ScoringService` when a collector updates its policy's.

        Args:
            service: whose model is a copy of the policy.
            policy: whose weights are pushed when ``update_policy_weights_()`` names none.

        Example:
            >>> collector = LLMCollector(  # doctest: +SKIP
            ...     env, policy=policy, weight_updater=ServiceWeightUpdater(service, policy), dialog_turns_per_batch=8
            ... )
            >>> collector.update_policy_weights_()  # doctest: +SKIP
        """

        def __init__(self, service: ScoringService, policy: nn.Module | None = None) -> None:
            self.service, self.policy = service, policy

        def _get_server_weights(self) -> Any:
            if self.policy is None:
                raise ValueError(
                    "no weights were given, and no policy to take them from: ServiceWeightUpdater(service, policy)"
                )
            return self.policy

        def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
            return state_dict_of(policy_or_weights)

        def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
            self.service.update_weights(server_weights, self.service.version + 1)
