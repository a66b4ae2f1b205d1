"""What can go wrong between a client and the service."""

from __future__ import annotations

import pickle

__all__ = [
    "ReplicaGone",
    "ServiceBusy",
    "ServiceClosedError",
    "ServiceConfigError",
    "ServiceError",
    "ServiceOverloaded",
    "ServiceTimeout",
    "WeightVersionError",
    "portable",
]


class ServiceError(RuntimeError):
    """The service could not do what it was asked for. Errors of a request itself keep their own type."""


class ServiceOverloaded(ServiceError, TimeoutError):
    """The queue was full until the caller's time was up."""


class ServiceBusy(ServiceOverloaded):
    """There is no room even to wait; a client tries again until its time is up."""


class ServiceTimeout(ServiceError, TimeoutError):
    """No replica answered in time, however often it was tried."""


class ServiceClosedError(ServiceError):
    """The service was closed, here or by somebody else."""


class ServiceConfigError(ServiceError, ValueError):
    """The name is in use with another configuration; the message shows the difference."""


class WeightVersionError(ServiceError):
    """The replica does not hold the version of the weights that was asked for, and did not get it in time."""


class ReplicaGone(Exception):
    """The replica that was found is of no use; another one may be made in its place."""


def portable(error: Exception) -> Exception:
    """The error itself if it can travel between processes, else one that says the same."""
    try:
        same = pickle.loads(pickle.dumps(error))
    except Exception:
        return ServiceError(f"{type(error).__name__}: {error}")
    return (
        error
        if type(same) is type(error) and str(same) == str(error)
        else ServiceError(f"{type(error).__name__}: {error}")
    )
