"""The controller of a service: an actor that starts its replicas, watches them, and ends them after the last client.

Ray starts it again when it dies, and sends it the calls of the clients again, so that it knows them. What it must know of
the replicas they tell it. Imports no torch, so that it starts fast.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.service._actors import actor_of, detached, was_restarted
from torchrl_llm_kl.service._errors import ServiceClosedError, ServiceError, portable
from torchrl_llm_kl.service._spec import MAX_CONCURRENCY, MAX_TRIALS, ServiceSpec
from torchrl_llm_kl.service.replica._actor import Replica

PENDING, STARTING, READY, SILENT, FAILED = (
    "pending",  # the actor exists, its process does not yet
    "starting",  # its process loads the model
    "ready",
    "silent",  # its process does not answer: clients send their requests elsewhere
    "failed",  # it is not started again
)
#: Seconds for a process that called ``ray.shutdown()`` to connect again.
GRACE = 30.0
_UNUSED = 60.0  # seconds without a client, at the start, until the service ends
_PULSE, _SILENT = 1.0, 10.0  # seconds between two pulses, and until one that is not answered is noticed
_SILENT_START = 60.0  # seconds that a process may stand still while it makes its model
_LEAST = 3.0  # seconds that a process has to answer, whatever hang_after is
_MAX_STARTS, _START_WINDOW = 3, 600.0  # starts of a process that died before it was ready, within seconds
_PAUSE = 1.0  # seconds before a second start, doubled for each later one
_HANDED_IN = 30.0  # seconds to wait for a model given by value, after this actor was started again
_CLOSE = 10.0  # seconds for replicas to reject what waits
_REMEMBERED = 1024  # requests of which processes died

_LOG = logging.getLogger("torchrl_llm_kl.service")


def controller_of(spec: ServiceSpec) -> Any:
    """The controller, created if there is none."""
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "max_concurrency": 100_000}
    return detached(Controller, spec, "control", spec, **options)


def _create_replica(spec: ServiceSpec, replica: int) -> Any:
    options = {"max_concurrency": MAX_CONCURRENCY, "max_restarts": -1, **spec.options}
    return detached(Replica, spec, str(replica), spec, replica, **options)


@dataclass(eq=False)
class Slot:
    """One replica."""

    handle: Any
    state: str = PENDING
    life: str = ""  # mark of its process
    starts: int = 0
    error: Exception | None = None  # why it failed


class Controller:
    """Supervises the replicas of one service and knows its clients.

    A client is a call of :meth:`hold` that does not return: Ray tells :meth:`watch` when the process that owns it ends.

    Args:
        spec: the service.

    Keyword Args:
        create: makes the actor of a replica, or finds it.
        alive: whether this is an actor, which supervises by itself; otherwise :meth:`run` is called.
    """

    def __init__(
        self, spec: ServiceSpec, *, create: Callable[[ServiceSpec, int], Any] = _create_replica, alive: bool = True
    ) -> None:
        self.spec, self._create = spec, create
        self.hang_after = max(min(float(spec.settings.get("hang_after", 60.0)), 60.0), _LEAST)
        self.slots = [Slot(create(spec, replica)) for replica in range(spec.num_replicas)]
        self.clients: set[str] = set()
        self._held: set[str] = set()  # of them those that called hold()
        self.ended = ""  # why
        self.fingerprint: str | None = None  # of the weights that the first replica loaded
        self._model: Any = None  # reference to a pickled factory that a client handed in
        self._handed_in, self._ending, self._over = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._running = self._again = False  # again: after the end of an earlier process of this actor
        self._trials: OrderedDict[str, dict[str, int]] = OrderedDict()  # digest of a request -> processes that tried it
        self._refused: OrderedDict[str, None] = OrderedDict()
        if alive:
            import ray

            self._again = was_restarted()
            ray.get_runtime_context().current_actor.run.options(max_task_retries=0).remote()

    # ------------------------------------------------------------------ clients

    async def join(
        self, config: Mapping[str, Any], service: str, *, new: bool = False, client: str = ""
    ) -> Json | Exception:
        """The table, for a client; an error as a value.

        Args:
            config: what it expects of the service.
            service: the ``id`` of the service that it belongs to; empty for any.
            new: whether failed replicas are started again.
            client: a client that will call :meth:`hold`: the service does not end between the two calls.
        """
        if self.ended:
            return await self.table()  # a constructor waits for the end, and makes a new one
        if service not in ("", self.spec.id):
            return ServiceClosedError(
                f"the service {self.spec.name!r} was shut down; the one of that name now is another: construct a "
                "ScoringService again to use it."
            )
        try:
            self.spec.check_config(config)
        except Exception as error:
            return error
        if client:
            self.clients.add(client)
            asyncio.get_running_loop().create_task(self._leave_unless_held(client))
        for replica, slot in enumerate(self.slots):
            if new and slot.state == FAILED:
                self.slots[replica] = Slot(self._create(self.spec, replica))
                asyncio.get_running_loop().create_task(self._supervise(replica))
        return await self.table()

    async def hold(self, client: str) -> None:
        """Return at the end of the service: the client that owns this call uses it until it cancels the call, or ends."""
        self.clients.add(client)
        self._held.add(client)
        await self._over.wait()

    async def watch(self, client: str, held: Sequence[Any]) -> None:
        """Wait for the end of :meth:`hold`."""
        from ray.exceptions import OwnerDiedError

        self.clients.add(client)
        try:
            await held[0]
        except asyncio.CancelledError:
            raise
        except OwnerDiedError:  # its process ended, or called ray.shutdown()
            await asyncio.sleep(GRACE)
        except Exception:  # it cancelled the call
            _LOG.info("a client left the service %s", self.spec.name)
        self._leave(client)

    async def _leave_unless_held(self, client: str) -> None:
        await asyncio.sleep(GRACE)
        if client not in self._held:
            self._leave(client)

    def _leave(self, client: str) -> None:
        self.clients.discard(client)
        self._held.discard(client)
        if not self.clients and not self.spec.detached:
            self._end("its last client left")

    async def table(self) -> Json:
        """State of the service, and the handles of its replicas."""
        return {
            "id": self.spec.id,
            "replicas": [slot.handle for slot in self.slots],
            "ended": self.ended,
            "states": [slot.state for slot in self.slots],
            "errors": [slot.error for slot in self.slots],
            "starts": [slot.starts for slot in self.slots],
            "fingerprint": self.fingerprint,
            "has_model": self._model is not None,
            "clients": len(self.clients),
        }

    async def deposit(self, packed: bytes) -> None:
        """Keep a pickled factory, such as one that returns a model given by value, from which replicas start."""
        import ray

        self._model = await asyncio.to_thread(ray.put, packed)
        self._handed_in.set()

    # ------------------------------------------------------------------ requests that end the process

    async def begin_trial(self, digest: str, replica: int, life: str) -> bool:
        """Whether a process may score a request of which others died; by itself, so that its death is the request's doing."""
        tried = self._trials.setdefault(digest, {})
        dead = [mark for mark, place in tried.items() if mark != life and self._is_over(mark, place, replica)]
        if digest in self._refused or len(dead) >= MAX_TRIALS:
            self._refused[digest] = None
            _limit(self._refused)
            return False
        tried[life] = replica
        _limit(self._trials)
        return True

    def _is_over(self, life: str, replica: int, asking: int) -> bool:
        return replica == asking or self.slots[replica].life != life or self.slots[replica].state in (PENDING, STARTING)

    async def end_trial(self, digest: str, life: str = "") -> None:
        """A process survived a request; or the process ``life`` dropped it, which says nothing about the others."""
        if life:
            self._trials.get(digest, {}).pop(life, None)
        else:
            self._trials.pop(digest, None)

    # ------------------------------------------------------------------ replicas

    async def run(self) -> None:
        """Supervise the replicas until the end of the service."""
        import ray

        if self._running:
            return
        self._running = True
        tasks = [asyncio.get_running_loop().create_task(self._supervise(i)) for i in range(len(self.slots))]
        await self._wait_for_end()
        for task in tasks:
            task.cancel()
        await self._close()
        self._over.set()
        await asyncio.sleep(0.2)  # let the calls of the clients return: Ray would report them as failed
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    async def _wait_for_end(self) -> None:
        began = time.monotonic()
        while not self._ending.is_set():
            if not self.clients and not self.spec.detached and time.monotonic() - began > _UNUSED:
                self._end("no client used it")
            await _either(self._ending.wait(), 1.0)

    async def end(self) -> None:
        """Shut the service down."""
        self._end("it was shut down")
        await self._over.wait()

    def _end(self, why: str) -> None:
        self.ended = self.ended or why
        self._ending.set()

    async def _close(self) -> None:
        import ray

        _LOG.info("the service %s ends: %s", self.spec.name, self.ended)
        closing = [asyncio.ensure_future(_answer(slot.handle.close.remote())) for slot in self.slots if slot.life]
        await asyncio.wait([*closing, asyncio.ensure_future(asyncio.sleep(0))], timeout=_CLOSE)
        keeper = actor_of(self.spec, "weights")
        for handle in [*(slot.handle for slot in self.slots), *([] if keeper is None else [keeper])]:
            ray.kill(handle, no_restart=True)

    async def _supervise(self, replica: int) -> None:
        """Start a replica, and again after each end of its process, until it fails or the service ends."""
        from ray.exceptions import ActorDiedError, RayActorError

        slot, deaths, known = self.slots[replica], list[float](), self._again
        name = self.spec.replica_name(replica)
        while not self.ended and slot.state != FAILED:
            try:
                slot.state = PENDING
                # A new process answers once there are resources; one that was there before this controller does at once.
                facts = await (self._heard(slot, self.hang_after) if known else self._ask(slot, "pulse", self._news()))
                known = False
                if not facts["ready"]:
                    slot.state, slot.starts = STARTING, slot.starts + 1
                    facts = await self._started(slot, await self._given_model())
                slot.starts = max(slot.starts, facts["starts"])
                error = facts["failure"] or self._unlike_the_first(name, facts)
                if error is not None:
                    self._fail(slot, error)
                    return
                deaths.clear()
                await self._keep(slot)
            except RayActorError as error:  # noqa: PERF203
                over = isinstance(error, ActorDiedError)  # Ray does not start it again
                if over and error.actor_init_failed:
                    self._fail(slot, ServiceError(f"replica {name} cannot start: {error}"))
                    return
                if slot.state == STARTING or (over and slot.state == PENDING):
                    now = time.monotonic()
                    deaths = [*(death for death in deaths if now - death < _START_WINDOW), now]
                    if len(deaths) >= _MAX_STARTS:
                        self._fail(slot, _gave_up(name, deaths))
                        return
                    await asyncio.sleep(_PAUSE * 2 ** (len(deaths) - 1))
                if over:
                    slot.handle = self._create(self.spec, replica)
                _LOG.warning(
                    "replica %s of the service ended and is started again: %s", name, str(error).split("\n")[0]
                )
                slot.state, slot.life = PENDING, ""
                await asyncio.sleep(0.2)
            except Exception as error:
                self._fail(slot, portable(error))

    async def _started(self, slot: Slot, model: Sequence[Any]) -> dict[str, Any]:
        """The facts of a replica that has made its model, which may take hours: its event loop must answer meanwhile."""
        from ray.exceptions import RayActorError

        asked = asyncio.ensure_future(self._ask(slot, "start", model, slot.starts))
        while not await _either(asked, _PULSE):
            with contextlib.suppress(RayActorError):  # the start raises it too
                await self._heard(slot, _SILENT_START)
        return await asked

    async def _keep(self, slot: Slot) -> None:
        """Exchange news with a replica each second; returns if a new process answers, which has no model yet.

        Ray keeps a pulse that is sent between two processes for the next one, without an error.
        """
        facts: Json = {"ready": True}
        while not self.ended and facts["ready"]:
            slot.state = READY
            await asyncio.sleep(_PULSE)
            facts = await self._heard(slot, self.hang_after)

    async def _heard(self, slot: Slot, limit: float) -> dict[str, Any]:
        """The answer to a pulse; after ``limit`` seconds without one ends the process, and raises the error of Ray."""
        asked, silent = asyncio.ensure_future(self._ask(slot, "pulse", self._news())), min(_SILENT, limit)
        if not await _either(asked, silent):
            if slot.state != STARTING:
                slot.state = SILENT
            if not await _either(asked, limit - silent + 0.1):
                import ray

                _LOG.warning("a replica of %s does not answer: its process is replaced", self.spec.name)
                ray.kill(slot.handle, no_restart=False)
        return await asked

    async def _ask(self, slot: Slot, method: str, *args: Any) -> Json:
        facts: Json = await _answer(getattr(slot.handle, method).remote(*args))
        slot.life = facts["life"]
        return facts

    def _news(self) -> Json:
        return {"clients": len(self.clients), "refused": list(self._refused)}

    async def _given_model(self) -> list[Any]:
        """The reference of a factory that a client handed in; none if it is part of the spec."""
        if self.spec.factory is not None:
            return []
        if not await _either(self._handed_in.wait(), _HANDED_IN):
            raise ServiceError(
                f"the model of {self.spec.name!r} was given by value, and is lost: the controller that kept it ended, and no "
                f"process that passed it made a call within {_HANDED_IN:g} s: construct ScoringService with it again, or use "
                "factory=, with which every replica can start by itself."
            )
        return [self._model]

    def _unlike_the_first(self, name: str, facts: Mapping[str, Any]) -> Exception | None:
        """The error of a replica that loaded other weights than the first one, unless pushed ones replaced them all."""
        found = facts["fingerprint"]
        if not found or self.fingerprint in (None, found) or facts["replaced"]:
            self.fingerprint = self.fingerprint or found
            return None
        return ServiceError(
            f"replica {name} loaded other weights (fingerprint {found}) than the first replica of the service "
            f"({self.fingerprint}): the checkpoint changed, or the factory is random. Shut the service down to use the new "
            "weights, or make the factory return the same ones each time."
        )

    def _fail(self, slot: Slot, error: Exception) -> None:
        import ray

        slot.state, slot.error = FAILED, portable(error)
        _LOG.error("a replica of %s failed: %s", self.spec.name, error)
        ray.kill(slot.handle, no_restart=True)


def _gave_up(name: str, deaths: Sequence[float]) -> ServiceError:
    return ServiceError(
        f"replica {name} failed to start {len(deaths)} times within {deaths[-1] - deaths[0]:.0f} s: its process ended before "
        "the model was made (a crash, os._exit or lack of memory). See the worker's log in Ray's session folder, correct the "
        "factory, then construct the service again."
    )


def _limit(found: OrderedDict[str, Any]) -> None:
    """Drop the oldest of too many entries."""
    while len(found) > _REMEMBERED:
        found.popitem(last=False)


async def _answer(reference: Any) -> Any:
    return await reference


async def _either(awaited: Any, timeout: float) -> bool:
    """Whether something was done within ``timeout`` seconds; it is not cancelled if it was not and is a task."""
    task = asyncio.ensure_future(awaited)
    done, _ = await asyncio.wait([task], timeout=max(timeout, 0.0))
    if not done and not isinstance(awaited, asyncio.Future):
        task.cancel()
    return bool(done)
