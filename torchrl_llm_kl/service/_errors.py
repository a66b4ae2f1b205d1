"""Errors of the service. An error of a request itself, such as an unknown token id, keeps its own type."""

from __future__ import annotations

import pickle


class ServiceError(RuntimeError):
    """The service cannot do what was requested."""


class ServiceOverloaded(ServiceError, TimeoutError):
    """The queue of a replica was full until the timeout."""


class ServiceBusy(ServiceOverloaded):
    """A replica rejected a request at once; the client retries until its timeout."""


class ServiceTimeout(ServiceError, TimeoutError):
    """No replica answered in time, retries included."""


class ServiceClosedError(ServiceError):
    """The service was closed, by this process or another."""


class ServiceConfigError(ServiceError, ValueError):
    """The name is in use with another configuration; the message shows the difference."""


class PoisonedRequest(ServiceError):
    """A request after which replicas died, so that it is not tried again. Its message names them."""


class WeightVersionError(ServiceError):
    """The replica does not hold the requested version of the weights and did not receive it in time."""


class EngineLost(ServiceError):
    """The engine of a replica cannot go on: the replica exits, and is started again with a new engine.

    Raised by an engine; callers see it only from an engine outside a service.
    """


class ReplicaGone(Exception):
    """This replica cannot be used, but a replacement may be started."""


def portable(error: Exception) -> Exception:
    """``error`` if it survives pickling, else a :class:`ServiceError` with its class name and message."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    except Exception:  # pickling may raise anything
        pass
    return ServiceError(f"{type(error).__name__}: {error}")
