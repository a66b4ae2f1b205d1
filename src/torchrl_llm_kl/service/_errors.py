"""What can go wrong between a client and the service."""

from __future__ import annotations

__all__ = [
    "ServiceClosedError",
    "ServiceConfigError",
    "ServiceError",
    "ServiceOverloaded",
    "ServiceTimeout",
    "WeightVersionError",
]


class ServiceError(RuntimeError):
    """The service could not do what it was asked for. Errors of a request itself keep their own type."""


class ServiceOverloaded(ServiceError, TimeoutError):
    """The queue was full until the caller's time was up."""


class ServiceTimeout(ServiceError, TimeoutError):
    """No replica answered in time, however often it was tried."""


class ServiceClosedError(ServiceError):
    """The service was closed, here or by somebody else."""


class ServiceConfigError(ServiceError, ValueError):
    """The name is in use with another configuration; the message shows the difference."""


class WeightVersionError(ServiceError):
    """The replica does not hold the version of the weights that was asked for, and did not get it in time."""
