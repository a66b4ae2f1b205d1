"""A served model as a receiver of torchrl's weight synchronisation."""

from __future__ import annotations

from typing import Any

from torchrl.weight_update.weight_sync_schemes import TransportBackend, WeightSyncScheme

from torchrl_llm_kl.service._service import ScoringService

__all__ = ["ServiceWeightSyncScheme"]


class ServiceTransport:
    """Sends weights to every replica; nothing is received here.

    Args:
        service: whose model takes them.
    """

    def __init__(self, service: ScoringService) -> None:
        self.service = service

    def send_weights(self, weights: Any) -> None:
        """Push them under the next version, and wait until all replicas hold it."""
        self.service.update_weights(weights, self.service.version + 1)

    def setup_connection_and_weights_on_sender(self) -> None:
        """Nothing to do: the service is there."""

    def receive_weights(self, timeout: float | None = None, **kwargs: Any) -> None:
        """Nothing: replicas copy what is sent by themselves."""


class ServiceWeightSyncScheme(WeightSyncScheme):
    """Pushes a policy's weights into a :class:`~torchrl_llm_kl.service.ScoringService`, each time under the next version.

    Args:
        service: whose model is a copy of the policy.

    Example:
        >>> scheme = ServiceWeightSyncScheme(service)  # doctest: +SKIP
        >>> scheme.init_on_sender(model_id="policy")  # doctest: +SKIP
        >>> scheme.connect()  # doctest: +SKIP
        >>> scheme.send(policy)  # after each update  # doctest: +SKIP
    """

    def __init__(self, service: ScoringService) -> None:
        super().__init__()
        self.service = service

    def _init_on_sender_impl(self, model_id: str = "policy", context: Any = None, **kwargs: Any) -> None:
        self.model_id = model_id
        if context is not None:
            self.context = context
        self._register_worker_sender(worker_idx=0)

    def _init_on_receiver_impl(self, *, model_id: str = "policy", context: Any = None, **kwargs: Any) -> None:
        raise NotImplementedError("replicas receive by themselves: call init_on_sender() where the policy is trained")

    def create_transport(self, **kwargs: Any) -> TransportBackend:
        """A way to the replicas."""
        return ServiceTransport(self.service)
