"""The keeper of a service: a small actor that deploys the application once and keeps the newest weights.

Serve's controller starts, checks, scales and replaces the replicas. The keeper does the work that Serve has no place for. It
compares the configurations of all drivers that ask for a name. It holds a model given by value, and the last push for replicas
that start later. It counts the replicas that a request has killed. It deletes the application after the last driver has ended.
This file imports no torch, so that the keeper starts fast.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import NamedTuple, cast

import ray
from ray import serve
from ray.actor import ActorHandle

from torchrl_llm_kl.service._errors import ServiceConfigError, ServiceError, WeightVersionError, portable
from torchrl_llm_kl.service._spec import DEPLOYMENT, NAMESPACE, ServiceSpec

_LOG = logging.getLogger("torchrl_llm_kl.service")
_LOOK = 2.0  # seconds between two looks at the application
_UNUSED = 60.0  # seconds without a driver, after the start of this actor, until the service ends
_STAGED = 600.0  # seconds after which a push counts as given up, by a driver that was killed
#: Ray's own limit for asynchronous actors is 1,000 calls at a time, and each driver holds two for as long as it lives.
_CALLS = 100_000


class Held(NamedTuple):
    """The last push, for a replica."""

    version: int
    chunks: list[object]  # references to the weights
    seen: int  # the latest version that any replica held, greater than `version` if that push is lost
    earlier: Sequence[tuple[int, list[object]]] = ()  # pushes before it that the replica lacks, if replicas keep some


class State(NamedTuple):
    """A service as its keeper sees it."""

    id: str
    ended: str  # the reason, empty for a service in use
    failure: Exception | None  # the error of the last start of a replica that failed
    version: int  # of the last push


class Keeper:
    """The actor with the name of the service, in the namespace of this package. Methods return their errors as values.

    Args:
        name: of the application.
        spec: the service that the first driver asked for, or None if Serve's own commands deployed the application.
    """

    def __init__(self, name: str, spec: ServiceSpec | None) -> None:
        self._name, self._spec = name, spec
        self._stays = spec is None or spec.detached  # after its last driver
        self._model: object = None  # reference to a pickled factory that is not part of the spec
        self._drivers: set[str] = set()
        self._unused_since = time.monotonic()
        self._over = asyncio.Event()
        self._deployed = False
        self._ended = ""
        self._failure: Exception | None = None
        self._fingerprints: dict[str, str | None] = {}  # of the model of each source
        self._version, self._chunks = 0, list[object]()
        self._earlier = list[tuple[int, list[object]]]()  # versions and chunks of the pushes before the last one
        self._keep = 0 if spec is None else spec.settings.keep_versions  # how many pushes replicas keep
        self._tensors: frozenset[str] = frozenset()  # of the last push
        self._whole = False  # whether it held all tensors of the model
        self._staged: dict[str, tuple[float, list[object]]] = {}  # begin and chunks of pushes that are not committed
        self._trials = Counter[str]()
        self._turn = asyncio.Lock()
        self._seen = 0  # the latest version that replicas hold: this actor may have lost it
        self._tasks: dict[str, asyncio.Task[None]] = {}  # asyncio itself holds tasks weakly

    # ------------------------------------------------------------------ drivers

    async def join(
        self, spec: ServiceSpec, factory: bytes | None, deploy: Callable[[ServiceSpec], None]
    ) -> Exception | None:
        """Deploys the application for the first driver, and compares the configurations of later ones."""
        async with self._turn:
            if self._ended:
                return None
            if self._spec is None:
                return ServiceError(
                    f"the application {self._name!r} was deployed by Serve's own commands. Use it with ScoringService("
                    f"name={self._name!r}), without a model."
                )
            try:
                self._spec.check_same(spec)
                if self._model is None and factory is not None:
                    self._model = await asyncio.to_thread(ray.put, factory)
                if not self._deployed:
                    await asyncio.to_thread(deploy, self._spec)
                    self._deployed = True
            except Exception as error:
                is_final = not isinstance(error, (ServiceConfigError, ray.exceptions.RayError))
                if is_final and not self._deployed:  # a corrected configuration must find the name free
                    self._start("end", self.end("it could not be deployed"))
                return portable(error)
            self._watch()
        return None

    async def hold(self, client: str) -> None:
        """Returns at the end of the service. A driver uses the service until it cancels this call, or ends."""
        self._drivers.add(client)
        await self._over.wait()

    async def watch(self, client: str, held: Sequence[Awaitable[None]]) -> None:
        """Waits for the end of :meth:`hold`. Ray fails that call when the process that owns it ends."""
        self._drivers.add(client)
        while await _is_pending(held[0]):
            await asyncio.sleep(_LOOK)
        self._drivers.discard(client)
        self._unused_since = time.monotonic()
        if not self._drivers and not self._stays:
            await self.end("its last driver ended")

    async def state(self) -> State:
        """Returns the :class:`State`."""
        service = "" if self._spec is None else self._spec.id
        return State(service, self._ended, self._failure, self._version)

    async def end(self, why: str) -> None:
        """Deletes the application, and exits. Ray fails this call then, so the caller knows that the name is free."""
        if self._ended:
            await self._over.wait()
            return
        self._ended = why
        async with self._turn:
            while True:
                try:
                    await asyncio.to_thread(_delete, self._name)
                    break
                except Exception as error:  # Serve's controller restarts, or replicas still finish their requests
                    _LOG.warning("%s is not deleted yet: %s", self._name, error)
                    await asyncio.sleep(_LOOK)
            self._over.set()
            await asyncio.sleep(0.2)  # let the calls of hold() return: Ray would otherwise report them as failed
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _start(self, name: str, work: Coroutine[object, object, None]) -> None:
        self._tasks[name] = asyncio.get_running_loop().create_task(work)

    def _watch(self) -> None:
        if "watch" not in self._tasks:
            self._start("watch", self._watch_application())

    async def _watch_application(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            await self._watch_once()

    async def _watch_once(self) -> None:
        """Ends a service whose application somebody else deleted, or that no driver has used for a minute."""
        now = time.monotonic()
        self._staged = {token: push for token, push in self._staged.items() if now - push[0] < _STAGED}
        if not self._drivers and not self._stays and now - self._unused_since > _UNUSED:
            await self.end("no driver used it")
        with contextlib.suppress(Exception):  # Serve's controller restarts
            if not await asyncio.to_thread(is_deployed, self._name) and not self._turn.locked():
                await self.end("its application was deleted")

    # ------------------------------------------------------------------ replicas

    async def model(self) -> list[object]:
        """Returns the reference to the pickled factory, in a list, if the factory is not part of the spec."""
        return [] if self._model is None else [self._model]

    async def started(self, fingerprint: str | None, source: str, keep: int = 0) -> Held | Exception:
        """Returns the last push to a replica that has loaded ``source``, or an error if its checkpoint has changed.

        ``keep`` is the number of versions that the replica keeps.
        """
        self._watch()
        self._failure, self._keep = None, keep
        first = self._fingerprints.setdefault(source, fingerprint)
        if fingerprint != first and not self._whole:
            return ServiceError(
                f"a replica of {self._name!r} loaded weights with the fingerprint {fingerprint}, the first one had {first}: "
                "the checkpoint changed. Restore it, or make the service again."
            )
        return self._held(0)

    async def failed(self, error: Exception) -> None:
        """Notes why a replica could not start."""
        self._watch()
        self._failure = error

    async def begin_trial(self, request: str) -> int:
        """Counts the replicas that have begun to score only this request, the caller included."""
        self._trials[request] += 1
        return self._trials[request]

    async def end_trial(self, request: str) -> None:
        """Forgets a request that a replica survived."""
        self._trials.pop(request, None)

    # ------------------------------------------------------------------ weights

    async def newest(self, version: int) -> Held:
        """Returns the last push to a replica that holds ``version``."""
        self._seen = max(self._seen, version)
        return self._held(version)

    def _held(self, version: int) -> Held:
        earlier = [push for push in self._earlier if push[0] > version]
        return Held(self._version, self._chunks, max(self._seen, self._version), earlier)

    async def staged(self, token: str) -> list[object]:
        """Returns references to the chunks of a push that is not committed."""
        return self._staged.get(token, (0.0, []))[1]

    async def stage(self, token: str, chunk: object) -> None:
        """Stores a part of a push. Replicas ignore it until the commit."""
        stored = await asyncio.to_thread(ray.put, chunk)
        self._staged.setdefault(token, (time.monotonic(), []))[1].append(stored)

    async def drop(self, token: str) -> None:
        """Frees a push that is not committed."""
        self._staged.pop(token, None)

    async def commit(
        self, token: str, version: int | None, seen: int, tensors: Sequence[str], *, whole: bool, parts: int
    ) -> int | Exception:
        """Makes a push the last one. Returns its version or an error.

        Args:
            token: of the push.
            version: greater than all earlier versions, or None for the next one.
            seen: the latest version that the pusher knows. This actor may have lost that push.
            tensors: one name of each tensor in the push.

        Keyword Args:
            whole: whether these are all tensors of the model.
            parts: number of chunks that were staged. This actor may have restarted between two of them.
        """
        last = max(self._version, self._seen, seen)
        version = last + 1 if version is None else version
        missing = sorted(self._tensors - set(tensors))
        chunks = self._staged.pop(token, (0.0, []))[1]
        refused = ""
        if version <= last:
            refused = f"version {version} of the weights came after version {last}, but versions must increase."
        elif missing:  # a replica that starts later loads only the last push
            refused = (
                f"this push lacks {len(missing)} tensors of earlier pushes, such as {missing[0]!r}. Push those too."
            )
        elif last > self._version and not whole:
            refused = "the earlier weights were lost with the actor that kept them. Push all tensors of the model."
        elif len(chunks) != parts:
            refused = "the actor that keeps the weights restarted during this push. Push them again."
        if refused:
            return WeightVersionError(refused)
        # A replica that starts later loads these first, in their order.
        if self._version and self._keep > 1:
            self._earlier = [*self._earlier, (self._version, self._chunks)][1 - self._keep :]
        self._version, self._chunks, self._tensors, self._whole = version, chunks, frozenset(tensors), whole
        return version


def keeper_of(name: str, spec: ServiceSpec | None = None, *, create: bool = False) -> ActorHandle:
    """Returns the keeper of a service. Creates it if asked to, else raises a ValueError if it is missing."""
    if not create:
        return ray.get_actor(name, namespace=NAMESPACE)
    actor = ray.remote(Keeper).options(
        name=name,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_concurrency=_CALLS,
        max_restarts=-1,
        max_task_retries=-1,
    )
    return cast(ActorHandle, actor.remote(name, spec))


async def _is_pending(call: Awaitable[None]) -> bool:
    """Waits for a call that a driver holds. True if it failed although the driver lives, as in a restart of this actor."""
    try:
        await call
    except (ray.exceptions.OwnerDiedError, ray.exceptions.TaskCancelledError):
        return False
    except Exception as error:
        _LOG.info("a driver's call is sent again: %r", error)
        return True
    return False


def is_deployed(name: str) -> bool:
    """Whether Serve has a service of this name. An application with other deployments belongs to somebody else."""
    try:
        application = serve.status().applications.get(name)
    except ray.exceptions.ActorDiedError:  # after serve.shutdown(): Serve caches its dead controller
        return False
    return application is not None and set(application.deployments) <= {DEPLOYMENT}


def _delete(name: str) -> None:
    if is_deployed(name):
        serve.delete(name)
