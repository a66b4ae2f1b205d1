"""Torchrl's weight synchronisation into a service.

This file imports torchrl's collectors, which takes time, so the package loads it on first use.
"""

from __future__ import annotations

import warnings

from torch import Tensor, nn
from torchrl.collectors import WeightUpdaterBase
from torchrl.weight_update.weight_sync_schemes import TransportBackend, WeightSyncScheme

from torchrl_llm_kl.service._messages import state_dict_of
from torchrl_llm_kl.service._service import ScoringService


class ServiceTransport:
    """Sends weights to every replica. Replicas need no receiver."""

    def __init__(self, service: ScoringService) -> None:
        self.service = service

    def send_weights(self, weights: object) -> None:
        """Pushes weights under the next version, see :meth:`ScoringService.update_weights`."""
        self.service.update_weights(weights)

    def setup_connection_and_weights_on_sender(self) -> None:
        """Does nothing: the sender needs no connection of its own."""

    def receive_weights(self, timeout: float | None = None, **kwargs: object) -> None:
        """Does nothing: replicas take the weights themselves."""


class ServiceWeightSyncScheme(WeightSyncScheme):
    """Pushes a policy's weights into a :class:`~torchrl_llm_kl.service.ScoringService`, each time under the next version.

    Args:
        service: its model is a copy of the policy.

    Example:
        >>> scheme = ServiceWeightSyncScheme(service)  # doctest: +SKIP
        >>> scheme.init_on_sender(model_id="policy")  # doctest: +SKIP
        >>> scheme.connect()  # doctest: +SKIP
        >>> scheme.send(policy)  # after each update  # doctest: +SKIP
    """

    def __init__(self, service: ScoringService) -> None:
        super().__init__()
        self.service = service

    def _init_on_sender_impl(self, model_id: str = "policy", context: object = None, **kwargs: object) -> None:
        self.model_id = model_id
        if context is not None:
            self.context = context
        self._register_worker_sender(worker_idx=0)

    def _init_on_receiver_impl(self, *, model_id: str = "policy", context: object = None, **kwargs: object) -> None:
        raise NotImplementedError("replicas need no receiver. Call init_on_sender() where the policy is trained.")

    def create_transport(self, **kwargs: object) -> TransportBackend:
        """Returns the transport to the replicas."""
        return ServiceTransport(self.service)


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Creating .* which inherits from WeightUpdaterBase")

    class ServiceWeightUpdater(WeightUpdaterBase):
        """Pushes weights into a :class:`~torchrl_llm_kl.service.ScoringService` when a collector updates its policy.

        For ``LLMCollector(weight_updater=)``, which takes no :class:`WeightSyncScheme`.

        Args:
            service: its model is a copy of the policy.
            policy: pushed when ``update_policy_weights_()`` is called without weights.

        Example:
            >>> updater = ServiceWeightUpdater(service, policy)  # doctest: +SKIP
            >>> collector = LLMCollector(env, policy=policy, weight_updater=updater, dialog_turns_per_batch=8)  # doctest: +SKIP
            >>> collector.update_policy_weights_()  # doctest: +SKIP
        """

        def __init__(self, service: ScoringService, policy: nn.Module | None = None) -> None:
            self.service, self.policy = service, policy

        def _get_server_weights(self) -> nn.Module:
            if self.policy is None:
                raise ValueError(
                    "no weights were given, and there is no policy. Pass ServiceWeightUpdater(service, policy)."
                )
            return self.policy

        def _maybe_map_weights(self, policy_or_weights: object) -> dict[str, Tensor]:
            return state_dict_of(policy_or_weights)

        def _sync_weights_with_worker(self, *, worker_id: object = None, server_weights: object) -> None:
            self.service.update_weights(server_weights)
