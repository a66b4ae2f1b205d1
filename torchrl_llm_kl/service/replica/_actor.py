"""One replica: a Ray actor that loads the model when the controller tells it to. Its class imports no torch."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.service._actors import actor_of, was_restarted
from torchrl_llm_kl.service._errors import ReplicaGone, ServiceError, portable
from torchrl_llm_kl.service._spec import ServiceSpec

if TYPE_CHECKING:
    from torchrl_llm_kl.service.replica._server import Server

_ALONE = 60.0  # seconds without a pulse after which a replica looks for the controller

_LOG = logging.getLogger("torchrl_llm_kl.service")


class Replica:
    """The process of a replica. Its event loop only waits; the model runs in a thread.

    Errors of a call are returned as values, since they are not failures of the actor.
    """

    def __init__(self, spec: ServiceSpec, replica: int) -> None:
        _log_to_stderr()
        os.environ.setdefault("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "0")  # threads wait here, not the event loop
        self._spec, self._replica = spec, replica
        self._name, self._life = spec.replica_name(replica), uuid.uuid4().hex
        self._server: Server | None = None
        self._failure: Exception | None = None  # why there is no model
        self._loaded = asyncio.Event()
        self._loading, self._starts, self._pulsed = False, 0, 0.0

    async def pulse(self, news: Mapping[str, Any]) -> Json:
        """What the controller must know of this replica, in exchange for its news."""
        if self._pulsed == 0.0:
            self._watching = asyncio.get_running_loop().create_task(self._watch_controller())
        self._pulsed, server = time.monotonic(), self._server
        facts = {"life": self._life, "ready": self._loaded.is_set(), "starts": self._starts, "failure": self._failure}
        facts |= {"fingerprint": None, "replaced": False} if server is None else server.hear(news)
        return facts

    async def start(self, model: Sequence[Any], starts: int) -> Json:
        """Load the model: ``model`` holds the reference of a pickled factory, or nothing for the one in the spec."""
        if not self._loading:
            self._loading, self._starts = True, max(starts, 1 + was_restarted())  # a controller may have forgotten it
            try:
                self._server = await asyncio.to_thread(self._load, model)
            except Exception as error:
                self._failure = portable(error)
            except BaseException as error:
                self._failure = ServiceError(f"creating the model ended with {type(error).__name__}: {error}")
            self._loaded.set()
            if self._failure is not None:
                _LOG.error("replica %s has no model: %s", self._name, self._failure)
            else:
                _LOG.info(
                    "replica %s %s, pid %d", self._name, "restarted" if self._starts > 1 else "started", os.getpid()
                )
        await self._loaded.wait()
        return await self.pulse({})

    def _load(self, model: Sequence[Any]) -> Server:
        import ray

        from torchrl_llm_kl.service.replica._server import Server

        packed: Any = ray.get(model[0]) if model else self._spec.factory
        factory = ray.cloudpickle.loads(packed)
        return Server(self._spec, self._replica, self._life, factory(), starts=self._starts)

    async def score(self, packed: bytes) -> Any:
        """The packed reply to a packed request; a method of its own with one argument, which Ray calls fastest."""
        return await self.call("score", packed)

    async def call(self, method: str, *args: Any) -> Any:
        """What a method of the :class:`Server` returns, once there is one; or its error."""
        try:
            if self._server is None:
                await self._loaded.wait()
            if self._failure is not None:
                raise ReplicaGone(f"replica {self._name} has no model: {self._failure}")
            return await getattr(self._server, method)(*args)
        except Exception as error:
            return portable(error)

    async def _watch_controller(self) -> None:
        """End with a controller that somebody killed for good: nobody else would end this process."""
        import ray

        while time.monotonic() - self._pulsed < _ALONE or actor_of(self._spec, "control") is not None:
            await asyncio.sleep(_ALONE / 4)
        _LOG.error("replica %s ends: the controller of its service is gone", self._name)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    async def close(self) -> None:
        """Reject waiting and later requests."""
        if self._server is not None:
            await self._server.close()


def _log_to_stderr() -> None:
    """Ray shows the stderr of workers, but sets no log level for this logger."""
    if not _LOG.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
        _LOG.addHandler(handler)
        _LOG.setLevel(logging.INFO)
