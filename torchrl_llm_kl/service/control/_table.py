"""What a service knows about itself: its replicas, clients, versions and end. Independent of Ray and torch."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchrl_llm_kl.service._errors import ServiceClosedError, ServiceConfigError

NAMESPACE = "torchrl_llm_kl"
#: A client that Ray reports as gone loses its lease after this many seconds without a heartbeat.
GRACE = 30.0
#: Any client loses its lease after this many seconds without a heartbeat.
LEASE = 600.0

MISSING, PENDING, STARTING, READY, HUNG, BACKING_OFF, FAILED, DRAINING = (
    "missing",
    "pending",  # the actor exists, its process has not started or imports its code
    "starting",  # its process calls the factory
    "ready",
    "hung",
    "backing off",
    "failed",
    "draining",
)
_AT_WORK = (PENDING, STARTING, READY, HUNG, BACKING_OFF, DRAINING)

_MAX_STARTS, _START_WINDOW = 3, 600.0  # starts without success, within seconds, after which there is no other
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # before a start that follows a failed one
_DIED = "its process ended before the model was made (a crash, os._exit or lack of memory)"
_SILENT = 10.0  # seconds that a pulse waits for its answer until clients avoid the replica
_LEAST = 3.0  # seconds that it waits at least, whatever hang_after is: pulses are a second apart, and a process may be held up
_STOPPED = 10.0  # seconds between two ticks after which the control actor itself was stopped
_QUARANTINED = 1024  # digests of requests
_RELEASED = 4096  # clients that left, of which an older message may still arrive


@dataclass(frozen=True)
class Plan:
    """What a control actor is started with.

    Attributes:
        name, namespace: of the service.
        slots: the most replicas that it may have; they are ``NAME:0`` to ``NAME:{slots - 1}``.
        least: the fewest, with which it starts.
        detached: whether it outlives its clients.
        lease: seconds without a heartbeat after which any client counts as gone.
        hang_after: seconds that a pulse waits for its answer until the replica is started again; 3 at least.
    """

    name: str
    namespace: str = NAMESPACE
    slots: int = 1
    least: int = 1
    detached: bool = False
    lease: float = LEASE
    hang_after: float = 60.0


@dataclass(frozen=True)
class Scaling:
    """When the number of replicas changes.

    Attributes:
        wait: one more replica if queued tokens would take longer than this at the measured rate, in seconds,
        hold: for this many seconds in a row.
        idle: one replica fewer after this many seconds in which one fewer could have done the work.
        busy: the largest share of the time that the remaining replicas may be busy then.
    """

    wait: float = 3.0
    hold: float = 10.0
    idle: float = 300.0
    busy: float = 0.6


@dataclass
class Slot:
    """One replica, or the place of one."""

    state: str = MISSING
    life: str = ""  # mark of its process
    since: float = 0.0  # of the state
    seen: float = 0.0  # its last answer
    asked: float | None = None  # when the pulse was sent that it has not answered yet
    starts: int = 0
    failures: list[tuple[float, str]] = field(default_factory=list)  # of starts since the last success
    facts: dict[str, Any] = field(default_factory=dict)  # of its last answer
    killed: bool = False  # since it hung

    def become(self, state: str, now: float) -> bool:
        """Whether this changes the state."""
        if state == self.state:
            return False
        self.state, self.since = state, now
        return True


@dataclass
class Client:
    """A process that uses the service: when it was heard of, its Ray job and worker (hex ids), its newest lease."""

    seen: float
    where: dict[str, Any]
    lease: int = 0


@dataclass(frozen=True)
class Start:
    """The answer to a process that is about to call the factory: the pause before, or why it must not."""

    pause: float = 0.0
    refusal: str = ""
    starts: int = 1


class Control:
    """The table of one service, and its rules. Not thread-safe.

    Replicas report each start and success, and answer pulses. Clients join, then send heartbeats. :meth:`tick` applies what
    time changes and returns what must be done.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        incarnation: int = 1,
        scaling: Scaling | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan, self.scaling, self._clock = plan, scaling or Scaling(), clock
        self.incarnation = incarnation
        self.config: dict[str, Any] | None = None
        self.fingerprint: str | None = None  # of the weights that the first replica loaded
        self.scale = plan.least
        self.slots = {i: Slot(since=clock()) for i in range(plan.slots)}
        self.clients: dict[str, Client] = {}
        self._released: OrderedDict[str, int] = OrderedDict()  # the newest lease that each client gave back
        self.quarantined: OrderedDict[str, None] = OrderedDict()
        self.ended = ""  # why
        self.version = 1  # of the table
        self.has_model = False
        self._last_used = self._ticked = clock()
        self._busy_since: float | None = None
        self._idle_since: float | None = None

    # ------------------------------------------------------------------ the table

    @property
    def newest(self) -> int:
        """The latest version of the weights that a replica reported."""
        return max((int(slot.facts.get("version", 0)) for slot in self.slots.values()), default=0)

    def table(self) -> dict[str, Any]:
        """What clients need, in plain values."""
        return {
            "version": self.version,
            "incarnation": self.incarnation,
            "scale": self.scale,
            "states": {i: slot.state for i, slot in self.slots.items()},
            "fingerprint": self.fingerprint,
            "newest": self.newest,
            "ended": self.ended,
            "has_model": self.has_model,
            "quarantined": list(self.quarantined),
        }

    def _set(self, slot: Slot, state: str) -> None:
        if slot.become(state, self._clock()):
            self.version += 1

    # ------------------------------------------------------------------ clients

    def join(
        self,
        client: str,
        where: Mapping[str, Any],
        *,
        config: Mapping[str, Any],
        incarnation: int = 0,
        new: bool = False,
        lease: int = 0,
    ) -> dict[str, Any]:
        """Give a client a lease and the table.

        Args:
            client: name of its process.
            where: its job and worker.
            config: what it expects of the service.
            incarnation: that it belongs to; 0 for any.
            new: whether its user asks for the service now (a constructor), which may start over after failures.
            lease: number of the lease, which grows from one call of a client to the next.

        Raises:
            ServiceClosedError: if its incarnation has ended.
            ServiceConfigError: if the service has another configuration.
        """
        if self.ended:
            return self.table()  # this actor exits now: the client finds another
        if 0 < incarnation < self.incarnation:
            raise ServiceClosedError(
                f"the service {self.plan.name!r} was shut down; the one of that name now is another (incarnation "
                f"{self.incarnation}, not {incarnation}): construct a ScoringService again to use it."
            )
        self.incarnation = max(self.incarnation, incarnation)
        differences = compare(self.config, config) if self.config is not None else []
        if differences and not self._replaceable(client, new=new):
            raise ServiceConfigError(
                f"the name {config.get('name', self.plan.name)!r} is in use with another configuration: "
                f"{'; '.join(differences)}. Choose another name, or shut that service down first."
            )
        if differences:
            self.incarnation, self.has_model = self.incarnation + 1, False
        if new and not self._occupied:
            self.fingerprint, self.version = None, self.version + 1
            for slot in self.slots.values():
                slot.failures.clear()
                slot.facts.clear()
        self.config = dict(config)
        self._note(client, where, lease)
        return self.table()

    @property
    def _occupied(self) -> bool:
        return any(slot.state in _AT_WORK for slot in self.slots.values())

    def _replaceable(self, client: str, *, new: bool) -> bool:
        return new and not self._occupied and not self.clients.keys() - {client}

    def hold(
        self, client: str, where: Mapping[str, Any], version: int, lease: int = 0, incarnation: int = 0
    ) -> dict[str, Any] | None:
        """Renew a lease; the table if it is newer than ``version``, and one that says ``ended`` to an earlier incarnation's."""
        if not self.serves(incarnation):
            return {
                **self.table(),
                "ended": f"it was shut down; the name has another one, incarnation {self.incarnation}",
            }
        self._note(client, where, lease)
        return None if version == self.version else self.table()

    def serves(self, incarnation: int) -> bool:
        """Whether a client of this incarnation (0 for any) uses this service, not an earlier one of the same name."""
        self.incarnation = max(self.incarnation, incarnation)  # a table that was lost learns it, as from join()
        return incarnation in (0, self.incarnation)

    def _note(self, client: str, where: Mapping[str, Any], lease: int) -> None:
        if lease <= self._released.get(client, -1):
            return  # a message that was overtaken by the end of its lease
        known = self.clients.get(client)
        self.clients[client] = Client(self._clock(), dict(where), lease if known is None else max(lease, known.lease))
        self._last_used = self._clock()

    def release(self, client: str, lease: int, incarnation: int = 0) -> None:
        """End a client's leases up to ``lease``; that of the last client ends the service, unless it is detached.

        Messages of a client may overtake one another: a newer lease stays, and an older message renews nothing. One of an
        earlier incarnation does nothing.
        """
        if not self.serves(incarnation):
            return
        self._released[client] = max(lease, self._released.pop(client, -1))
        while len(self._released) > _RELEASED:
            self._released.popitem(last=False)
        known = self.clients.get(client)
        if known is not None and known.lease <= lease:
            self._leave(client)

    def _leave(self, client: str) -> None:
        del self.clients[client]
        if not self.clients and not self.plan.detached:
            self.ended = self.ended or "its last client left"

    def silent_clients(self) -> dict[str, dict[str, Any]]:
        """Clients without a heartbeat for :data:`GRACE` seconds, whose end Ray may know."""
        since = self._clock() - GRACE
        return {name: client.where for name, client in self.clients.items() if client.seen <= since}

    # ------------------------------------------------------------------ replicas: starts

    def starting(self, replica: int, life: str) -> Start:
        """A process of a replica, marked ``life``, is about to call the factory."""
        slot, now = self.slots[replica], self._clock()
        if self.ended:
            return Start(refusal=f"the service {self.plan.name!r} was closed: {self.ended}.", starts=slot.starts)
        if slot.state in (STARTING, BACKING_OFF) and slot.life not in ("", life):
            slot.failures.append((now, _DIED))
        slot.failures = [failure for failure in slot.failures if now - failure[0] < _START_WINDOW]
        slot.starts += slot.life != life
        slot.life, slot.seen, slot.killed = life, now, False
        failed = len(slot.failures)
        if failed >= _MAX_STARTS:
            self._set(slot, FAILED)
            return Start(refusal=self._gave_up(replica), starts=slot.starts)
        pause = min(_FIRST_PAUSE * 2 ** (failed - 1), _LONGEST_PAUSE) if failed else 0.0
        self._set(slot, BACKING_OFF if pause else STARTING)
        return Start(pause=pause, starts=slot.starts)

    def _gave_up(self, replica: int) -> str:
        failures = self.slots[replica].failures
        seconds, cause = failures[-1][0] - failures[0][0], failures[-1][1]
        return (
            f"replica {self.plan.name}:{replica} failed to start {len(failures)} times within {seconds:.0f} s: {cause}. See "
            "the worker's log in Ray's session folder, correct the factory, then construct the service again."
        )

    def failed(self, replica: int, life: str, text: str) -> None:
        """The factory raised."""
        slot = self.slots[replica]
        if slot.life == life:
            slot.failures.append((self._clock(), f"its factory raised {text}"))
            self._set(slot, FAILED)

    def ready(self, replica: int, life: str, facts: Mapping[str, Any]) -> str:
        """A replica has its model; the reason if it must not use it.

        Weights that it loaded itself must be those of the first replica, unless pushed ones ``replaced`` all of them.
        """
        slot = self.slots[replica]
        asked = slot.asked  # this is no answer to a pulse
        self.pulse(replica, {**facts, "life": life})
        slot.asked, found = asked, facts.get("fingerprint")
        if found and self.fingerprint and found != self.fingerprint and not facts.get("replaced"):
            self._set(slot, FAILED)
            return (
                f"replica {self.plan.name}:{replica} loaded other weights (fingerprint {found}) than the first replica of the "
                f"service ({self.fingerprint}): the checkpoint changed, or the factory is random. Shut the service down to use "
                "the new weights, or make the factory return the same ones each time."
            )
        slot.failures.clear()
        return ""

    # ------------------------------------------------------------------ replicas: signs of life

    def asked(self, replica: int) -> None:
        """A pulse was sent to a replica, which has answered the last one or is a new process."""
        self.slots[replica].asked = self._clock()

    def pulse(self, replica: int, facts: Mapping[str, Any]) -> None:
        """A replica answered; a control actor that lost its table learns what it must know from such answers."""
        slot, now = self.slots[replica], self._clock()
        slot.facts, slot.seen, slot.asked = dict(facts), now, None
        slot.starts = max(slot.starts, int(facts.get("starts", 1)))
        unknown = not slot.life
        slot.life = str(facts.get("life", slot.life))
        if self.config is None and facts.get("config"):
            self.config = dict(facts["config"])
        if self.fingerprint is None and facts.get("fingerprint"):
            self.fingerprint, self.version = facts["fingerprint"], self.version + 1
        self.incarnation = max(self.incarnation, int(facts.get("incarnation", 0)))
        if unknown and replica >= self.scale:  # the table was lost
            self.scale, self.version = replica + 1, self.version + 1
        if facts.get("failed"):
            self._set(slot, FAILED)
        elif facts.get("hung"):
            self._set(slot, HUNG)
        elif slot.state != DRAINING:
            slot.killed = False
            self._set(slot, READY)

    def found(self, replica: int) -> None:
        """A replica exists and has not answered yet."""
        slot = self.slots[replica]
        if slot.state == MISSING:
            slot.seen = self._clock()
            self._set(slot, PENDING)

    def unheard(self) -> list[int]:
        """Replicas that exist and have long not answered: they start, or were stopped before there was this table."""
        since = self._clock() - min(_SILENT, self.plan.hang_after)
        return [replica for replica, slot in self.slots.items() if slot.state == PENDING and slot.seen < since]

    def stopped(self, replica: int) -> None:
        """A replica that has not answered is not starting: Ray says that its constructor ended."""
        if self.slots[replica].state == PENDING:
            self._set(self.slots[replica], HUNG)

    def lost(self, replica: int) -> None:
        """The process of a replica ended; Ray or a client starts another."""
        slot = self.slots[replica]
        if slot.state in (PENDING, READY, HUNG, DRAINING):
            slot.facts = {"version": slot.facts.get("version", 0)}
            self._set(slot, MISSING)

    def freed(self, replica: int) -> None:
        """There is no actor of a replica any more."""
        slot = self.slots[replica]
        if slot.state == STARTING:
            slot.failures.append((self._clock(), _DIED))
        if slot.state != FAILED:
            slot.facts = {"version": slot.facts.get("version", 0)}
            self._set(slot, MISSING)

    # ------------------------------------------------------------------ versions and quarantine

    def quarantine(self, digests: Iterable[str]) -> None:
        """Remember requests that end the process that scores them; the oldest of more than 1,024 are dropped."""
        for digest in digests:
            if digest not in self.quarantined:
                self.version += 1
            self.quarantined[digest] = None
            self.quarantined.move_to_end(digest)
        while len(self.quarantined) > _QUARANTINED:
            self.quarantined.popitem(last=False)

    # ------------------------------------------------------------------ time

    def tick(self, gone: Iterable[str] = ()) -> list[tuple[str, int]]:
        """Apply the passing of time; ``gone`` are silent clients whose process has ended.

        Returns:
            ``("restart", replica)`` for a replica that hangs, ``("retire", replica)`` for one that is not needed and has
            no more requests, ``("end", 0)`` after the last client.
        """
        now, todo = self._clock(), []
        self._forgive(now)
        ended = set(gone) & self.silent_clients().keys()
        ended |= {name for name, client in self.clients.items() if now - client.seen > self.plan.lease}
        for name in ended:
            self._leave(name)
        # A new control actor, or one that lost its table, gives clients time to appear.
        if not self.clients and not self.plan.detached and now - self._last_used > self.plan.lease:
            self.ended = self.ended or "no client used it"
        if self.ended:
            return [("end", 0)]
        hang_after = max(self.plan.hang_after, _LEAST)
        for replica, slot in self.slots.items():
            # It may have been asked while it started.
            quiet = 0.0 if slot.asked is None else now - max(slot.asked, slot.seen)
            if slot.state == READY and quiet > min(_SILENT, hang_after):
                self._set(slot, HUNG)
            if slot.state == HUNG and not slot.killed and (quiet > hang_after or slot.facts.get("hung")):
                slot.killed = True
                todo.append(("restart", replica))
            drained = slot.facts.get("queue_tokens", 0) == 0 and slot.seen > slot.since
            if slot.state == DRAINING and now - slot.since > _SILENT and drained:
                todo.append(("retire", replica))
        self._rescale(now)
        return todo

    def _forgive(self, now: float) -> None:
        """Do not count time in which this process itself was stopped: nobody could be heard."""
        missed, self._ticked = now - self._ticked, now
        if missed > _STOPPED:
            for slot in self.slots.values():
                slot.seen += missed
                slot.asked = None if slot.asked is None else slot.asked + missed
            for client in self.clients.values():
                client.seen += missed
            self._last_used += missed

    def retired(self, replica: int) -> None:
        """A replica that was not needed has ended."""
        self.slots[replica].facts.clear()
        self._set(self.slots[replica], MISSING)

    def _rescale(self, now: float) -> None:
        """Add a replica if requests wait too long, remove one if the others can do its work."""
        if self.plan.slots == self.plan.least:
            return
        rule, active = self.scaling, [slot for i, slot in self.slots.items() if i < self.scale]
        if any(slot.state != READY for slot in active):  # the last change is not done
            self._busy_since = self._idle_since = None
            return
        queued = sum(slot.facts.get("queue_tokens", 0) for slot in active)
        rate = sum(slot.facts.get("tokens_per_second", 0.0) for slot in active)
        wait = queued / rate if rate else (0.0 if not queued else float("inf"))
        # What one replica fewer would have to do, as a share of its time.
        load = sum(slot.facts.get("busy_share", 0.0) for slot in active) / max(self.scale - 1, 1)
        self._busy_since = (self._busy_since or now) if wait > rule.wait else None
        self._idle_since = (self._idle_since or now) if wait == 0 and load < rule.busy else None
        if self._busy_since is not None and now - self._busy_since >= rule.hold and self.scale < self.plan.slots:
            slot = self.slots[self.scale]
            if slot.state == DRAINING:
                self._set(slot, READY)
            self.scale, self.version, self._busy_since = self.scale + 1, self.version + 1, None
        elif self._idle_since is not None and now - self._idle_since >= rule.idle and self.scale > self.plan.least:
            self.scale, self.version, self._idle_since = self.scale - 1, self.version + 1, None
            self._set(self.slots[self.scale], DRAINING)


def compare(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One text for each entry that differs between the configuration of a service and the requested one."""
    return [
        f"{key}: it has {found.get(key)!r}, requested {wanted.get(key)!r}"
        for key in sorted({*wanted, *found})
        if wanted.get(key) != found.get(key) and key != "name"
    ]


def check_expected(expect: str | None, found: str | None, name: str) -> None:
    """A :class:`ServiceConfigError` if the weights are not those that a client expects."""
    if expect is not None and expect != found:
        has = f"weights with the fingerprint {found}" if found else "a model without a fingerprint"
        raise ServiceConfigError(
            f"the service {name!r} has {has}, expected {expect}: pass the checkpoint's fingerprint_of(), or shut the service "
            "down and start it from that checkpoint."
        )
