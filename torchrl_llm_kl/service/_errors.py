"""Errors of the service. An error in a request, such as an unknown token id, keeps its own type."""

from __future__ import annotations

import pickle


class ServiceError(RuntimeError):
    """The service failed. The base class of the other errors."""


class ServiceTimeout(ServiceError, TimeoutError):
    """No replica answered in time, retries included."""


class ServiceOverloaded(ServiceError, TimeoutError):
    """This process already has ``max_queued_requests`` waiting calls."""


class ServiceClosedError(ServiceError):
    """The service was closed, by this process or another."""


class ServiceConfigError(ServiceError, ValueError):
    """The name is in use with another configuration. The message shows the difference."""


class ProtocolError(ServiceError, ValueError):
    """Client and replica have releases of this package whose messages differ."""


class PoisonedRequest(ServiceError):
    """Several replicas ended while they scored this request. The client does not retry it."""


class WeightVersionError(ServiceError):
    """The replica does not hold the requested version of the weights and did not receive it in time."""


class VersionPending(WeightVersionError):
    """The required version is not pushed yet. The client sends its request again."""


class EngineLost(ServiceError):
    """The engine of a replica cannot go on. The replica exits, and Serve starts another one.

    Engines raise it. Callers see it only from an engine outside a service.
    """


def portable(error: Exception) -> Exception:
    """Returns ``error`` if it survives pickling, else a :class:`ServiceError` with its class name and message."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    except Exception:  # pickling may raise anything
        pass
    return ServiceError(f"{type(error).__name__}: {error}")
