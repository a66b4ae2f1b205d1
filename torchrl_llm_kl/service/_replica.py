"""The deployment: a replica loads the model and answers requests. The keeper imports it, so that it loads torch late."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import ray
from ray import serve

from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.service._errors import (
    EngineLost,
    PoisonedRequest,
    ServiceClosedError,
    ServiceError,
    VersionPending,
    WeightVersionError,
    portable,
)
from torchrl_llm_kl.service._keeper import Held, is_deployed, keeper_of
from torchrl_llm_kl.service._spec import DEFAULTS, DEPLOYMENT, OF_ACTORS, ServiceSpec

if TYPE_CHECKING:
    from torch import Tensor

    from torchrl_llm_kl.rollouts import ModelInterface
    from torchrl_llm_kl.service._messages import Message, Reply

#: Replicas that may end while they score a request, and no other one, before it is refused.
MAX_TRIALS = 3
_PROBE = 10.0  # seconds without an answer after which a check of the health scores a probe
_KEEPER = 60.0  # seconds for the keeper to answer
_FETCH = 300.0  # seconds to fetch weights or a model
_PENDING = 1.0  # seconds that a request waits here for a version that is not pushed yet

_LOG = logging.getLogger("torchrl_llm_kl.service")


class ReplicaState(NamedTuple):
    """One replica of a service."""

    name: str
    pid: int
    version: int  # of its weights
    waiting: int  # requests in its queue
    answered: int  # requests since its start


class Replica:
    """Scores the requests of any number of clients, and takes pushed weights between two batches.

    The event loop only waits. The model runs in one thread. Errors of a call are returned as values, with their own type,
    since they are not failures of the replica.
    """

    def __init__(self, spec: ServiceSpec) -> None:
        from torchrl_llm_kl.service._batcher import Batcher
        from torchrl_llm_kl.service._core import ScoringCore, Watchdog
        from torchrl_llm_kl.service.engines._engine import engine_of

        os.environ.setdefault("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "0")  # only the start blocks
        self._spec, self._name = spec, serve.get_replica_context().replica_id.unique_id
        settings = spec.settings
        self._keeper = keeper_of(spec.name, create=True)  # Serve's own commands deploy without one
        try:
            engine = engine_of(self._load(), tokens_per_batch=settings.tokens_per_batch, memory=settings.memory)
            self._core = ScoringCore(engine)
            held = ray.get(self._keeper.started.remote(self._fingerprint(), spec.source), timeout=_KEEPER)
            if isinstance(held, Exception):
                raise held
            self._lost: Exception | None = None
            self._take(held)
        except Exception as error:
            _LOG.exception("a replica of %s has no model", spec.name)
            ray.get(self._keeper.failed.remote(portable(error)), timeout=_KEEPER)
            raise
        self._batcher = Batcher(self._score, max_tokens=settings.max_tokens, max_wait=settings.max_wait)
        self._watchdog = Watchdog(self._core, settings.hang_after)
        self._catching_up, self._on_trial = asyncio.Lock(), asyncio.Lock()
        self._following: asyncio.Task[Any] | None = None  # loads a push that a check of the health found
        try:
            self._probe()
            self._has_probe = True
        except Exception:  # the model has no use for these tokens: its health is that it makes progress
            self._has_probe = False
        if hasattr(engine, "when_lost"):
            engine.when_lost(self._exit)

    def _load(self) -> Any:
        """The model or the engine that the factory returns."""
        packed: Any = self._spec.factory
        if packed is None:
            references = ray.get(self._keeper.model.remote(), timeout=_KEEPER)
            if not references:
                raise ServiceError(
                    f"the model of {self._spec.name!r} was given by value, and is lost with the actor that kept it: construct "
                    "ScoringService with it again, or use a factory."
                )
            packed = ray.get(references[0], timeout=_FETCH)
        return ray.cloudpickle.loads(packed)()

    def _fingerprint(self) -> str | None:
        try:
            return self._core.read_fingerprint()[1]
        except Exception as error:  # weights elsewhere, or of an exotic kind: it can be scored all the same
            _LOG.info("the model of %s has no fingerprint: %s", self._spec.name, error)
            return None

    # ------------------------------------------------------------------ scores

    async def score(self, message: Message) -> Reply | Exception:
        """The scores of a request, or its error."""
        from torchrl_llm_kl.service._messages import check_protocol, read

        try:
            check_protocol(message)
            if message["service"] not in ("", self._spec.id):
                raise ServiceClosedError(
                    f"the service {self._spec.name!r} was shut down; the one of that name now is another: construct a "
                    "ScoringService again to use it."
                )
            job = read(message)
            await self._catch_up(max(job.version or 0, message["newest"]), required=job.version or 0)
            if not message["tries"]:
                return await self._batcher.submit(job)
            # A replica ended while it held this request. From now on it is scored by itself: if the next ones end too, the
            # request is the cause. Requests that waited beside it are on trial as well, and pass.
            digest = digest_of(message)
            async with self._on_trial:
                begun = await self._keeper.begin_trial.remote(digest)
                if begun > MAX_TRIALS and message["tries"] > 1:  # equal requests may be on trial in other replicas
                    raise PoisonedRequest(
                        f"{MAX_TRIALS} replicas ended while they scored a request of {len(message['arrays']['lengths'])} "
                        f"sequences and {job.num_tokens} tokens, and nothing else: it is not tried again. Look for the cause "
                        f"in the logs of {self._spec.name!r}, and score its sequences in smaller requests to find the one at "
                        "fault."
                    )
                try:
                    return await self._batcher.submit(job, alone=True)
                finally:
                    self._keeper.end_trial.remote(digest)
        except ray.exceptions.RayError as error:
            return ServiceError(f"the actor that keeps the weights of {self._spec.name!r} does not answer: {error}")
        except Exception as error:
            return portable(error)

    def _score(self, jobs: Sequence[Any]) -> list[Reply | Exception]:
        try:
            return self._core.score(jobs)
        except EngineLost as error:
            self._exit(error)

    def _exit(self, error: EngineLost) -> NoReturn:
        """End the process of a replica without an engine, so that Serve replaces it and clients retry their requests."""
        _LOG.error("replica %s of %s ends: %s", self._name, self._spec.name, error)
        logging.shutdown()
        os._exit(1)

    async def check_health(self) -> None:
        """Serve calls this. An exception, several times in a row, replaces the replica; one that hangs ends at once."""
        if self._watchdog.hangs():
            _LOG.error("replica %s made no progress for %g s and ends", self._name, self._watchdog.hang_after)
            faulthandler.dump_traceback(all_threads=True)
            os._exit(1)
        with contextlib.suppress(Exception):  # the keeper restarts
            newest: Held = await asyncio.wait_for(self._keeper.newest.remote(self._core.version), 5.0)
            self._check_lost(newest)
            if newest.version > self._core.version:
                if self._following is None or self._following.done():
                    self._following = asyncio.create_task(self.take_weights(newest.version))  # its errors are values
                # The weights wait for the batch that runs, which may take longer than Serve waits for this method.
                await asyncio.wait([self._following], timeout=5.0)
        idle = self._core.running is None and time.monotonic() - self._batcher.last_answer > _PROBE
        if idle and self._has_probe:
            try:
                await self._batcher.in_thread(self._probe)
            except EngineLost as error:
                self._exit(error)
            except ServiceError:  # a server elsewhere does not answer: that is no fault of this process
                pass
            self._batcher.last_answer = time.monotonic()

    def _probe(self) -> None:
        """Score two tokens; an error means that the model is broken."""
        from torchrl_llm_kl.scoring import ScoreOptions
        from torchrl_llm_kl.service._core import probe

        self._core.call(lambda: self._core.engine.run(probe(), ScoreOptions()))

    async def state(self) -> ReplicaState:
        """See :class:`ReplicaState`."""
        return ReplicaState(self._name, os.getpid(), self._core.version, len(self._batcher), self._batcher.answered)

    async def interface(self) -> tuple[ModelInterface, bool]:
        """Keys and tokenizer of the model, for clients that tokenise; and whether it is a TorchRL wrapper."""
        return self._core.engine.interface()

    async def fingerprint(self) -> tuple[int, str] | Exception:
        """Version and fingerprint of the weights."""
        try:
            return await self._batcher.in_thread(self._core.read_fingerprint)
        except Exception as error:
            return portable(error)

    # ------------------------------------------------------------------ weights

    async def check_weights(self, token: str) -> tuple[list[str], bool] | Exception:
        """Whether a staged push fits the model: one name of each tensor in it, and whether these are all."""
        try:
            staged: Held = await self._keeper.staged.remote(token)
            weights = await asyncio.to_thread(self._fetch, staged.chunks)
        except EngineLost as error:
            self._exit(error)
        except Exception as error:
            return portable(error)
        tensors: Sequence[Sequence[str]] = getattr(self._core.engine, "tensors", list)()
        tied = tensors or [[name] for name in weights]
        held = [names[0] for names in tied if not weights.keys().isdisjoint(names)]
        return held, bool(tensors) and len(held) == len(tensors)

    async def take_weights(self, version: int) -> ReplicaState | Exception:
        """Load the last push, unless this replica has ``version`` by then."""
        try:
            await self._catch_up(version)
        except Exception as error:
            return portable(error)
        return await self.state()

    async def _catch_up(self, version: int, *, required: int = 0) -> None:
        """Load the push ``version`` or a later one; wait a moment if a request requires a version that is not pushed yet."""
        end = time.monotonic() + _PENDING
        while self._lost is not None or self._core.version < version:
            async with self._catching_up:
                if self._lost is None and self._core.version >= version:
                    return
                await self._load_newest()
            if self._lost is not None:
                raise self._lost.with_traceback(None)
            if self._core.version < version:
                if required < version:
                    raise WeightVersionError(
                        f"version {version} of the weights was seen before, a replica holds {self._core.version} and finds no "
                        "newer one: it is lost, push it again."
                    )
                if time.monotonic() > end:  # a push needs a free place among the ongoing requests
                    raise VersionPending(f"version {version} of the weights is not pushed yet.")
                await asyncio.sleep(0.02)

    async def _load_newest(self) -> None:
        held: Held = await self._keeper.newest.remote(self._core.version)
        self._check_lost(held)
        if held.version > self._core.version and not held.lost:
            try:
                weights = await asyncio.to_thread(self._fetch, held.chunks)
                await self._batcher.in_thread(lambda: self._update(weights, held.version))
            except EngineLost as error:
                self._exit(error)
            _LOG.info("replica %s holds version %d of the weights", self._name, held.version)

    def _take(self, held: Held) -> None:
        """Load the last push before the first request."""
        self._check_lost(held)
        if self._lost is None and held.chunks:
            self._update(self._fetch(held.chunks), held.version)

    def _update(self, weights: Mapping[str, Tensor], version: int) -> None:
        self._core.update_weights(weights, version)
        self._lost = None  # in the same thread: the task that waits may be cancelled meanwhile

    def _check_lost(self, held: Held) -> None:
        """Answer no requests from now on if pushed weights are lost and this replica has older ones."""
        if held.lost and self._core.version <= held.version:  # better an error than scores from wrong weights
            self._lost = WeightVersionError(
                "the weights that were pushed are lost, with the actor that kept them: push them again."
            )

    def _fetch(self, chunks: Sequence[Any]) -> Mapping[str, Tensor]:
        """The weights of a push under the model's own names; an error if they do not fit."""
        from torchrl_llm_kl.service._weights import tensors_of

        if not chunks:
            raise ServiceError("the push is not known to the actor that keeps the weights: push them again.")
        parts = ray.get(list(chunks), timeout=_FETCH)
        weights = {name: value for part in parts for name, value in tensors_of(part).items()}
        return self._core.engine.check_weights(weights)


def digest_of(message: Message) -> str:
    """Equal for requests of the same tokens, masks, options and records."""
    import hashlib

    digest = hashlib.blake2b(repr(message["options"]).encode(), digest_size=16)
    for name, array in message["arrays"].items():
        digest.update(name.encode() + array.tobytes())
    return digest.hexdigest()


def application(spec: ServiceSpec) -> serve.Application:
    """The application of a service, for ``serve.run``."""
    options: Json = {**DEFAULTS, **spec.options}
    actor = {name: options.pop(name) for name in OF_ACTORS if name in options}
    if spec.num_replicas is not None:
        options["num_replicas"] = spec.num_replicas
    deployment: Any = serve.deployment(Replica)
    options |= {"name": DEPLOYMENT, "ray_actor_options": actor, "graceful_shutdown_wait_loop_s": 0.2}
    logging_config = {"enable_access_log": False}  # a line for each call takes time
    made: serve.Application = deployment.options(logging_config=logging_config, **options).bind(spec)
    return made


def deploy(spec: ServiceSpec) -> None:
    """Deploy the application, without waiting for its replicas. Only handles call it: no HTTP proxy is started."""
    serve.start(proxy_location="Disabled")
    if not is_deployed(spec.name):
        if spec.name in serve.status().applications:
            raise ServiceError(f"Serve has another application with the name {spec.name!r}: choose another name=.")
        target = serve.RunTarget(target=application(spec), name=spec.name, route_prefix=None)
        serve.run_many([target], wait_for_applications_running=False)
