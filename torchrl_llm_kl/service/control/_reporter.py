"""A replica's side of the control actor: it asks before it starts, reports what it loaded, and answers pulses."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import nn

from torchrl_llm_kl.scoring import fingerprint_of
from torchrl_llm_kl.service._errors import ServiceClosedError, ServiceError
from torchrl_llm_kl.service.control._actor import control_of, ended, find_control
from torchrl_llm_kl.service.control._spec import ServiceSpec
from torchrl_llm_kl.service.control._table import Start

_LOG = logging.getLogger("torchrl_llm_kl.service")
_ANSWER = 10.0  # seconds to wait for the control actor, without which a replica works too
_HANDED_IN = 30.0  # seconds to wait for a model given by value: a control actor starts again, and a heartbeat follows
_ALONE = 15.0  # seconds without a pulse after which a replica looks for the control actor


class Reporter:
    """Reports one process of a replica to the service's control actor.

    Attributes:
        life: mark of this process.
        starts: how often the replica was started, this time included.
        fingerprint: of the weights that the factory returned; None for an engine without weights here.
        clients: number of processes that use the service.
        quarantined: digests of requests that must not be scored.
    """

    def __init__(self, spec: ServiceSpec, replica: int) -> None:
        self._spec, self._replica = spec, replica
        self.life = uuid.uuid4().hex
        self.starts, self.clients = 1, 0
        self.fingerprint: str | None = None
        self.quarantined: frozenset[str] = frozenset()
        self._pulsed, self._busy, self._tokens = time.monotonic(), 0.0, 0
        self._seconds, self._rate = 0.0, 0.0
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    # ------------------------------------------------------------------ at the start

    def starting(self) -> None:
        """Wait for leave to call the factory; an error if it must not be called."""
        spec = self._spec
        self._check_open()
        answer: Start = self._ask("starting", self._replica, self.life) or Start()
        self.starts = max(answer.starts, 1)
        if answer.refusal:
            raise ServiceError(answer.refusal)
        if answer.pause:
            _LOG.warning("replica %s starts again in %.3g s", spec.replica_name(self._replica), answer.pause)
            time.sleep(answer.pause)

    def _check_open(self) -> None:
        spec = self._spec
        if 0 < spec.incarnation <= ended(spec.namespace, spec.name):
            raise ServiceClosedError(f"the service {spec.name!r} was shut down.")

    def model(self, make_model: Callable[[], Any] | None) -> Any:
        """What the factory returns, or the model that the control actor keeps.

        A control actor that was killed too kept it in vain: its successor gets it again from any process that passed it, with
        that one's next heartbeat.
        """
        if make_model is not None:
            return make_model()
        import ray

        end, waits = time.monotonic() + _HANDED_IN, False
        while time.monotonic() < end:
            self._check_open()
            kept: list[Any] = self._ask("model") or []
            try:
                if kept:
                    with ThreadPoolExecutor(1) as pool:
                        packed: Any = pool.submit(ray.get, kept[0]).result()
                    return ray.cloudpickle.loads(packed)
            except ray.exceptions.ObjectLostError:  # with the control actor, just now
                pass
            if not waits:
                waits = True
                name = self._spec.replica_name(self._replica)
                _LOG.warning("replica %s waits for a process that passed its model by value to hand it in again", name)
            time.sleep(_HANDED_IN / 60)
        raise ServiceError(
            f"the model of {self._spec.name!r} was given by value, and is lost: the control actor that kept it ended, and no "
            f"process that passed it handed it in again within {_HANDED_IN:g} s: construct ScoringService with it again, or "
            "use factory=, with which every replica can start by itself."
        )

    def identify(self, engine: Any) -> None:
        """Take the fingerprint of an engine's model, before any weights are pushed into it."""
        inner = getattr(engine, "model", None)
        if isinstance(getattr(inner, "model", inner), nn.Module):
            try:
                self.fingerprint = fingerprint_of(inner)
            except Exception as error:  # weights of an exotic kind are no reason not to score
                _LOG.warning("the model of %s has no fingerprint: %s", self._spec.name, error)

    def ready(self, version: int, *, replaced: bool = False) -> Exception | None:
        """Report the model; the error if it is not the one that the other replicas have.

        Args:
            version: of the weights.
            replaced: whether pushed weights replaced every tensor that the factory returned.
        """
        facts = {**self._facts(), "version": version, "replaced": replaced}
        reason = self._ask("ready", self._replica, self.life, facts)
        return ServiceError(reason) if reason else None

    def failed(self, error: Exception) -> None:
        """Report that there is no model."""
        self._ask("failed", self._replica, self.life, f"{type(error).__name__}: {error}")

    def _ask(self, method: str, *args: Any) -> Any:
        """The control actor's answer; None without one."""
        import ray

        control = find_control(self._spec.namespace, self._spec.name)
        if control is None:
            return None
        answer = getattr(control, method).remote(*args)
        try:
            with ThreadPoolExecutor(1) as pool:  # Ray warns of a get() in the thread of an event loop
                return pool.submit(ray.get, answer, timeout=_ANSWER).result()
        except ray.exceptions.RayError as error:
            _LOG.warning("the control actor of %s did not answer: %s", self._spec.name, error)
            return None

    # ------------------------------------------------------------------ later

    def _facts(self) -> dict[str, Any]:
        spec = self._spec
        return {
            "life": self.life,
            "pid": os.getpid(),
            "starts": self.starts,
            "fingerprint": self.fingerprint,
            "incarnation": spec.incarnation,
            "config": spec.config(0),
        }

    def pulse(
        self,
        news: Mapping[str, Any],
        *,
        version: int,
        failed: bool,
        queue_tokens: int,
        busy: float,
        tokens: int,
        hung: bool = False,
    ) -> dict[str, Any]:
        """Facts for the control actor; ``busy`` (seconds) and ``tokens`` count from the start."""
        now = time.monotonic()
        since, self._pulsed = max(now - self._pulsed, 1e-3), now
        worked, done = busy - self._busy, tokens - self._tokens
        self._busy, self._tokens = busy, tokens
        if worked > 0:  # the rate of the last ten seconds in the model or so
            keep = max(1.0 - worked / 10.0, 0.0)
            self._seconds, self._rate = self._seconds * keep + worked, self._rate * keep + done
        self.clients, self.quarantined = int(news.get("clients", 0)), frozenset(news.get("quarantined", ()))
        return {
            **self._facts(),
            "version": version,
            "failed": failed,
            "hung": hung,
            "queue_tokens": queue_tokens,
            "tokens_per_second": self._rate / self._seconds if self._seconds else 0.0,
            "busy_share": min(worked / since, 1.0),
        }

    def _watch(self) -> None:
        """Make sure that there is a control actor: it ends the service after the last client."""
        import ray

        spec = self._spec
        while True:
            time.sleep(_ALONE / 3)
            if time.monotonic() - self._pulsed < _ALONE:
                continue
            with contextlib.suppress(Exception):  # the cluster may be going down
                if 0 < spec.incarnation <= ended(spec.namespace, spec.name):
                    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
                control_of(spec.plan)
            self._pulsed = time.monotonic()
