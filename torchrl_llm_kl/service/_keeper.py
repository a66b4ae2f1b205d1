"""The keeper of a service: a small actor that deploys the application once and keeps the newest weights.

Serve's controller starts, checks, scales and replaces the replicas. The keeper does what Serve has no place for: it compares
the configurations of all drivers that ask for a name, holds a model given by value, holds the last push for replicas that
start later, counts the replicas that a request has killed, and deletes the application after its last driver. Imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray
from ray import serve

from torchrl_llm_kl.service._errors import ServiceConfigError, ServiceError, WeightVersionError, portable
from torchrl_llm_kl.service._spec import DEPLOYMENT, NAMESPACE, ServiceSpec

_LOOK = 2.0  # seconds between two looks at the application
_UNUSED = 60.0  # seconds without a driver, after the start of this actor, until the service ends
_STAGED = 8  # pushes that may be under way


class Held(NamedTuple):
    """The last push, for a replica."""

    version: int
    chunks: list[Any]  # references to the weights
    lost: bool  # whether an earlier push was lost, which this one does not replace


class State(NamedTuple):
    """A service as its keeper sees it."""

    id: str
    ended: str  # why; empty for a service in use
    failure: Exception | None  # the error of the last start of a replica that failed
    fingerprint: str | None  # of the factory's model
    version: int  # of the last push


class Keeper:
    """The actor ``NAME`` in the namespace of this package. All its methods are quick. Errors are returned as values.

    Args:
        name: of the application.
        spec: the service that the first driver asked for; None if Serve's own commands deployed the application.
    """

    def __init__(self, name: str, spec: ServiceSpec | None) -> None:
        self._name, self._spec = name, spec
        self._model: Any = None  # reference to a pickled factory that is not part of the spec
        self._drivers: set[str] = set()
        self._unused_since = time.monotonic()
        self._over = asyncio.Event()
        self._deployed = False
        self._ended = ""
        self._failure: Exception | None = None
        self._fingerprint: str | None = None
        self._source = ""  # of the model with this fingerprint
        self._version, self._chunks = 0, list[Any]()
        self._tensors: frozenset[str] = frozenset()  # of the last push
        self._whole = False  # whether it held all tensors of the model
        self._staged: dict[str, list[Any]] = {}  # pushes that are not committed
        self._trials = Counter[str]()
        self._turn = asyncio.Lock()
        self._seen = 0  # the latest version that replicas hold: this actor may have lost it
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        self._watching: Any = None
        self._ending: Any = None

    # ------------------------------------------------------------------ drivers

    async def join(
        self, spec: ServiceSpec, factory: bytes | None, deploy: Callable[[ServiceSpec], None]
    ) -> Exception | None:
        """Deploy the application for the first driver, and compare the configurations of later ones."""
        async with self._turn:
            if self._ended:
                return None
            if self._spec is None:
                return ServiceError(
                    f"the application {self._name!r} was deployed by Serve's own commands: use it by ScoringService("
                    f"name={self._name!r}), without a model."
                )
            try:
                self._spec.check_same(spec)
                if self._model is None and factory is not None:
                    self._model = await asyncio.to_thread(ray.put, factory)
                if not self._deployed:
                    await asyncio.to_thread(deploy, self._spec)
                    self._deployed = True
            except (ServiceConfigError, ray.exceptions.RayError) as error:
                return portable(error)
            except Exception as error:
                if not self._deployed:  # a corrected configuration must find the name free
                    self._ending = asyncio.get_running_loop().create_task(self.end("it could not be deployed"))
                return portable(error)
            self._watch()
        return None

    async def hold(self, client: str) -> None:
        """Return at the end of the service. The driver that owns this call uses it until it cancels the call, or ends."""
        self._drivers.add(client)
        await self._over.wait()

    async def watch(self, client: str, held: Sequence[Any]) -> None:
        """Wait for the end of :meth:`hold`. Ray fails the call when the process that owns it ends."""
        self._drivers.add(client)
        while await _is_pending(held[0]):
            await asyncio.sleep(_LOOK)
        self._drivers.discard(client)
        self._unused_since = time.monotonic()
        if not self._drivers and not self._stays:
            await self.end("its last driver ended")

    async def state(self) -> State:
        """See :class:`State`."""
        service = "" if self._spec is None else self._spec.id
        return State(service, self._ended, self._failure, self._fingerprint, self._version)

    async def end(self, why: str) -> None:
        """Delete the application, and exit."""
        if self._ended:
            return
        self._ended = why
        async with self._turn:
            while True:
                try:
                    await asyncio.to_thread(_delete, self._name)
                    break
                except Exception as error:  # Serve's controller restarts, or replicas still finish their requests
                    logging.getLogger("torchrl_llm_kl.service").warning("%s is not deleted yet: %s", self._name, error)
                    await asyncio.sleep(_LOOK)
            self._over.set()
            await asyncio.sleep(0.2)  # let the calls of hold() return: Ray would report them as failed
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    @property
    def _stays(self) -> bool:
        """Whether the service does not end with its drivers."""
        return self._spec is None or self._spec.detached

    def _watch(self) -> None:
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch_application())

    async def _watch_application(self) -> None:
        """End after an application that somebody else deleted, and one that no driver has used for a minute."""
        while True:
            await asyncio.sleep(_LOOK)
            if not self._drivers and not self._stays and time.monotonic() - self._unused_since > _UNUSED:
                await self.end("no driver used it")
            try:
                there = await asyncio.to_thread(is_deployed, self._name)
            except Exception:  # Serve's controller restarts
                continue
            if not there and not self._turn.locked():
                await self.end("its application was deleted")

    # ------------------------------------------------------------------ replicas

    async def model(self) -> list[Any]:
        """The reference to the pickled factory that is not part of the spec, if there is one."""
        return [] if self._model is None else [self._model]

    async def started(self, fingerprint: str | None, source: str = "") -> Held | Exception:
        """The last push, for a replica that has loaded its factory's model; an error for one with other weights.

        Serve's own commands may deploy another ``source`` under the same name.
        """
        self._watch()
        self._failure = None
        if self._spec is None and source != self._source:
            self._source, self._fingerprint = source, None
        if self._fingerprint is None:
            self._fingerprint = fingerprint
        if fingerprint != self._fingerprint and not self._whole:
            return ServiceError(
                f"a replica of {self._name!r} loaded weights with the fingerprint {fingerprint}, the first one had "
                f"{self._fingerprint}: the checkpoint changed. Restore it, or make the service again."
            )
        return self._held()

    async def failed(self, error: Exception) -> None:
        """A replica could not start."""
        self._watch()
        self._failure = error

    async def begin_trial(self, digest: str) -> int:
        """Number of replicas that have begun to score a request and no other one, this one included."""
        self._trials[digest] += 1
        return self._trials[digest]

    async def end_trial(self, digest: str) -> None:
        """A replica survived a request."""
        self._trials.pop(digest, None)

    # ------------------------------------------------------------------ weights

    async def newest(self, version: int) -> Held:
        """The last push, for a replica that holds a version."""
        self._seen = max(self._seen, version)
        return self._held()

    def _held(self) -> Held:
        return Held(self._version, self._chunks, self._seen > self._version)

    async def staged(self, token: str) -> Held:
        """A push that is not committed."""
        return Held(self._version, self._staged.get(token, []), lost=False)

    async def stage(self, token: str, chunk: Any) -> None:
        """Store a part of a push, which changes nothing yet. The oldest of several that were given up is dropped."""
        self._staged.setdefault(token, []).append(await asyncio.to_thread(ray.put, chunk))
        if len(self._staged) > _STAGED:
            self._staged.pop(next(iter(self._staged)))

    async def drop(self, token: str) -> None:
        """Free a push that is not committed."""
        self._staged.pop(token, None)

    async def commit(
        self, token: str, version: int | None, seen: int, tensors: Sequence[str], *, whole: bool, parts: int
    ) -> int | Exception:
        """Make a push the last one; its version or an error.

        Args:
            token: of the push.
            version: a number greater than all earlier ones; None for the next one.
            seen: the latest version that the pusher knows, which this actor may have lost.
            tensors: one name of each tensor in the push.

        Keyword Args:
            whole: whether these are all tensors of the model.
            parts: number of chunks that were staged. This actor may have restarted between two of them.
        """
        seen = max(seen, self._seen)
        last = max(self._version, seen)
        version = last + 1 if version is None else version
        if version <= last:
            return WeightVersionError(
                f"version {version} of the weights came after version {last}: versions must increase."
            )
        # A replica that starts later loads only the last push.
        missing = sorted(self._tensors - set(tensors))
        if missing:
            return WeightVersionError(
                f"this push lacks {len(missing)} tensors, such as {missing[0]!r}, which earlier pushes held: push those too."
            )
        if seen > self._version and not whole:
            return WeightVersionError(
                "the weights that were pushed are lost, with the actor that kept them: push all tensors of the model."
            )
        chunks = self._staged.pop(token, [])
        if len(chunks) != parts:
            return ServiceError("the push is not known to the actor that keeps the weights: push them again.")
        self._version, self._chunks, self._tensors, self._whole = version, chunks, frozenset(tensors), whole
        return version


def keeper_of(name: str, spec: ServiceSpec | None = None, *, create: bool = False) -> Any:
    """The keeper of a service, created by the first process that asks; a ValueError if there is none."""
    if not create:
        return ray.get_actor(name, namespace=NAMESPACE)
    remote: Any = ray.remote(Keeper)
    return remote.options(
        name=name,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
    ).remote(name, spec)


async def _is_pending(call: Any) -> bool:
    """Wait for a call that a driver holds; whether its end says nothing about the driver, as after a restart of this actor."""
    try:
        await call
    except (ray.exceptions.OwnerDiedError, ray.exceptions.TaskCancelledError):
        return False
    except Exception as error:
        logging.getLogger("torchrl_llm_kl.service").info("a driver's call is sent again: %r", error)
        return True
    return False


def is_deployed(name: str) -> bool:
    """Whether Serve has a service of this name. An application with other deployments is somebody else's."""
    try:
        application = serve.status().applications.get(name)
    except ray.exceptions.ActorDiedError:  # after serve.shutdown(): Serve caches its dead controller
        return False
    return application is not None and set(application.deployments) <= {DEPLOYMENT}


def _delete(name: str) -> None:
    if is_deployed(name):
        serve.delete(name)
