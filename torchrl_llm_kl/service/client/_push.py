"""A push of weights: staged by all replicas at once, then committed by those that answer."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from typing import Any

from torchrl_llm_kl.service._errors import ServiceClosedError, ServiceError, ServiceTimeout, WeightVersionError
from torchrl_llm_kl.service._weights import chunks_of, keeper_of
from torchrl_llm_kl.service._wire import state_dict_of
from torchrl_llm_kl.service.client._connection import Connection

_LOG = logging.getLogger("torchrl_llm_kl.service")


class PushedVersion(int):
    """The version of pushed weights: an ``int`` that :meth:`ScoringService.update_weights` returns.

    Attributes:
        missed: names of the replicas that did not take the weights in time. They load them before they answer a client that
            has seen this version.

    Example:
        >>> version = service.update_weights(policy)  # doctest: +SKIP
        >>> version, version.missed  # doctest: +SKIP
        (7, ('reference:1',))
    """

    missed: tuple[str, ...] = ()


def push_weights(
    connection: Connection, weights: Any, version: int | None, *, timeout: float, wait: float
) -> PushedVersion:
    """Push weights to a service; see :meth:`ScoringService.update_weights`."""
    import ray

    connection.connect()
    spec, token, end = connection.spec, uuid.uuid4().hex, time.monotonic() + timeout
    keeper, everyone = keeper_of(spec), range(spec.num_replicas)

    def left(least: float = 0.001) -> float:
        return max(end - time.monotonic(), least)

    def kept(answer: Any) -> Any:
        try:
            found = ray.get(answer, timeout=left())
        except ray.exceptions.GetTimeoutError:
            raise ServiceTimeout(
                f"the weights of {spec.name!r} were not stored within {timeout:g} s: check that the object store has room."
            ) from None
        if isinstance(found, Exception):
            raise found
        return found

    kept(keeper.check.remote(version, connection.newest))
    try:
        given = state_dict_of(kept(weights) if isinstance(weights, ray.ObjectRef) else weights)
        if not given:
            raise ValueError("there are no weights in the update: pass at least one.")
        count = 0
        for chunk in chunks_of(given.items()):
            kept(keeper.stage.remote(token, chunk))
            count += 1
        staged = connection.gather("stage_weights", token, replicas=everyone, timeout=left(), wait=wait)
        ready = _ready(staged, spec.name, timeout)
        seen = max(connection.newest, *(staged[replica] for replica in ready))
        pushed = PushedVersion(kept(keeper.commit.remote(token, count, version, seen)))
    except BaseException:
        with contextlib.suppress(Exception):
            keeper.drop.remote(token)
            connection.gather("drop_weights", replicas=everyone, timeout=left(wait), needed=())
        raise
    connection.saw(pushed)
    # Those that hold nothing are told too: they load the weights when they can, and nobody waits for them.
    taken = connection.gather("refresh_weights", replicas=everyone, timeout=left(wait), wait=wait, needed=ready)
    missed = [i for i in everyone if taken.get(i, "no answer") is not None]
    pushed.missed = tuple(map(spec.replica_name, missed))
    if missed:
        why = {spec.replica_name(i): str(taken.get(i) or staged.get(i)) for i in missed}
        _LOG.warning(
            "version %d of the weights: replicas that load it when they are back, since they did not take it within "
            "%g s: %s",
            pushed,
            wait,
            why,
        )
    return pushed


def _ready(staged: dict[int, Any], name: str, timeout: float) -> list[int]:
    """Replicas that hold a push: those that returned a version. Raises the error of unfit weights, or of all replicas."""
    failed = [answer for answer in staged.values() if isinstance(answer, Exception)]
    for error in failed:
        unfit = isinstance(error, (KeyError, TypeError, ValueError)) and not isinstance(error, ServiceError)
        if unfit or isinstance(error, (ServiceClosedError, WeightVersionError)):
            raise error
    ready = [replica for replica, answer in staged.items() if not isinstance(answer, Exception)]
    if not ready:
        if failed:
            raise failed[0]
        raise ServiceTimeout(f"no replica of {name!r} took the weights within {timeout:g} s.")
    return ready
