"""The deployment: a replica loads the model and answers requests.

The keeper imports this file too, so torch is imported inside functions: the keeper starts faster without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import ray
from ray import serve

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
from torchrl_llm_kl.service._spec import DEFAULTS, DEPLOYMENT, OF_ACTORS, ServiceSpec, Settings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchrl_llm_kl.rollouts import ModelInterface
    from torchrl_llm_kl.service._messages import Message, Reply
    from torchrl_llm_kl.service.engines._engine import Engine

#: Number of replicas that may end while they score only one request, before that request is refused.
MAX_TRIALS = 3
_CALM = 2.0  # seconds after its start in which a replica begins no trial
_PROBE = 10.0  # seconds without an answer after which a check of the health scores a probe
_KEEPER = 60.0  # seconds for the keeper to answer
_FETCH = 300.0  # seconds to fetch weights or a model from the object store

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

    The event loop only waits. The model runs in one thread. Calls return their errors as values, so that these keep their type:
    Ray would wrap a raised error.
    """

    def __init__(self, spec: ServiceSpec) -> None:
        from torchrl_llm_kl.service._core import Batcher, ScoringCore
        from torchrl_llm_kl.service.engines._engine import engine_of

        os.environ.setdefault("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "0")  # only the start blocks
        self._spec, self._name = spec, serve.get_replica_context().replica_id.unique_id
        settings = spec.settings
        self._newest = 0  # the latest version that any replica held: this one must not answer with older weights
        self._keeper = keeper_of(spec.name, create=True)  # Serve's own commands deploy without one
        try:
            engine = engine_of(
                self._load(),
                tokens_per_batch=settings.tokens_per_batch,
                memory=settings.memory,
                keep_versions=settings.keep_versions,
            )
            self._core = ScoringCore(engine, self._exit)
            started = self._keeper.started.remote(self._fingerprint(), spec.source, settings.keep_versions)
            held = ray.get(started, timeout=_KEEPER)
            if isinstance(held, Exception):
                raise held
            self._newest = held.seen
            if held.chunks:
                for version, chunks in [*held.earlier, (held.version, held.chunks)]:
                    self._core.update_weights(self._fetch(chunks), version)
            self._batcher = Batcher(self._core.score, max_tokens=settings.max_tokens, max_wait=settings.max_wait)
        except Exception as error:
            _LOG.exception("a replica of %s does not start", spec.name)
            ray.get(self._keeper.failed.remote(portable(error)), timeout=_KEEPER)
            raise
        self._catching_up, self._on_trial, self._began = asyncio.Lock(), asyncio.Lock(), time.monotonic()
        # Loads a push that a check of the health noticed. Kept here, since asyncio holds tasks weakly.
        self._following: asyncio.Task[ReplicaState | Exception] | None = None
        try:
            self._core.probe()
            self._has_probe = True
        except Exception:  # the model cannot score these tokens, and is never probed
            self._has_probe = False

    def _load(self) -> nn.Module | Engine:
        """Runs the factory. Returns its model or engine."""
        packed: Any = self._spec.factory
        if packed is None:
            references = ray.get(self._keeper.model.remote(), timeout=_KEEPER)
            if not references:
                raise ServiceError(
                    f"the model of {self._spec.name!r} was given by value, and is lost with the actor that kept it. Construct "
                    "ScoringService with the model again, or use a factory."
                )
            packed = ray.get(references[0], timeout=_FETCH)
        made: nn.Module | Engine = ray.cloudpickle.loads(packed)()
        return made

    def _fingerprint(self) -> str | None:
        try:
            return self._core.read_fingerprint()[1]
        except Exception as error:  # weights elsewhere, or of an exotic kind: the model can be scored all the same
            _LOG.info("the model of %s has no fingerprint: %s", self._spec.name, error)
            return None

    # ------------------------------------------------------------------ scores

    async def score(self, message: Message) -> Reply | Exception:
        """Returns the scores of a request, or its error."""
        from torchrl_llm_kl.service._messages import read

        try:
            job = read(message)
            if message["service"] not in ("", self._spec.id):
                raise ServiceClosedError(
                    f"the service {self._spec.name!r} was shut down, and a new one has its name. Construct a ScoringService "
                    "again to use the new one."
                )
            await self._catch_up(max(job.version or 0, message["newest"], self._newest), required=job.version or 0)
            if not message["tries"]:
                return await self._batcher.submit(job)
            # A replica ended while it held this request, so the request is on trial: it is scored by itself, one request at a
            # time. If more replicas end during its trials, it is the cause. Its former neighbours are on trial too, and pass.
            async with self._on_trial:
                # Somebody who kills each replica at once, as it starts, must not make a good request look like the cause.
                await asyncio.sleep(max(self._began + _CALM - time.monotonic(), 0.0))
                if await self._keeper.begin_trial.remote(message["id"]) > MAX_TRIALS:
                    raise PoisonedRequest(
                        f"{MAX_TRIALS} replicas ended while they scored only this request, of {job.num_tokens} tokens. It is "
                        f"not tried again. Look for the cause in the logs of {self._spec.name!r}."
                    )
                try:
                    return await self._batcher.submit(job, by_itself=True)
                finally:
                    self._keeper.end_trial.remote(message["id"])
        except ray.exceptions.RayError as error:
            return ServiceError(f"the actor that keeps the weights of {self._spec.name!r} does not answer: {error}")
        except Exception as error:
            return portable(error)

    def _exit(self, error: EngineLost) -> NoReturn:
        """Ends the process of a replica without an engine. Serve replaces it, and clients retry their requests."""
        _LOG.error("replica %s of %s ends: %s", self._name, self._spec.name, error)
        logging.shutdown()
        os._exit(1)

    async def check_health(self) -> None:
        """Serve calls this. It replaces the replica after three calls in a row that raise or time out."""
        with contextlib.suppress(Exception):  # the keeper restarts: the next check asks it again
            held: Held = await asyncio.wait_for(self._keeper.newest.remote(self._core.version), 5.0)
            self._newest = held.seen
            if held.version > self._core.version and not self._catching_up.locked():
                # Not awaited: the weights wait for the running batch, which may take longer than Serve waits for this check.
                self._following = asyncio.create_task(self.take_weights(held.version))
        if time.monotonic() - self._batcher.last_answer > _PROBE and self._has_probe:
            # The probe waits for the running batch, so that a model that hangs fails the check too.
            with contextlib.suppress(ServiceError):  # an HTTP server does not answer: a new replica would not help
                await self._batcher.in_thread(self._core.probe)
            self._batcher.last_answer = time.monotonic()

    async def state(self) -> ReplicaState:
        """Returns the :class:`ReplicaState`."""
        return ReplicaState(self._name, os.getpid(), self._core.version, len(self._batcher), self._batcher.answered)

    async def interface(self) -> tuple[ModelInterface, bool]:
        """Returns keys and tokenizer of the model, for clients that tokenise, and whether it is a TorchRL wrapper."""
        return self._core.engine.interface()

    async def fingerprint(self) -> tuple[int, str] | Exception:
        """Returns version and fingerprint of the weights."""
        try:
            return await self._batcher.in_thread(self._core.read_fingerprint)
        except Exception as error:
            return portable(error)

    # ------------------------------------------------------------------ weights

    async def inspect_push(self, token: str) -> tuple[list[str], bool] | Exception:
        """Checks that a staged push fits the model. Returns one name of each tensor in it, and whether these are all."""
        try:
            weights = await asyncio.to_thread(self._fetch, await self._keeper.staged.remote(token))
        except Exception as error:
            return portable(error)
        tensors = self._core.engine.tensors()
        tied = tensors or [[name] for name in weights]
        held = [names[0] for names in tied if not weights.keys().isdisjoint(names)]
        return held, bool(tensors) and len(held) == len(tensors)

    async def take_weights(self, version: int) -> ReplicaState | Exception:
        """Loads the last push, unless this replica already has ``version``."""
        try:
            await self._catch_up(version)
        except Exception as error:
            return portable(error)
        return await self.state()

    async def _catch_up(self, version: int, *, required: int = 0) -> None:
        """Loads the push ``version`` or a later one. Raises an error if it is lost, or required but not pushed yet."""
        if self._core.version >= version:
            return
        async with self._catching_up:
            held: Held = await self._keeper.newest.remote(self._core.version)
            if held.version > self._core.version:
                for number, chunks in [*held.earlier, (held.version, held.chunks)]:
                    weights = await asyncio.to_thread(self._fetch, chunks)
                    await self._batcher.in_thread(partial(self._core.update_weights, weights, number))
                _LOG.info("replica %s holds version %d of the weights", self._name, held.version)
            self._newest = held.seen
        if self._core.version < version:
            # The request must not wait here: the push needs a free place among the replica's ongoing requests.
            if required == version:
                raise VersionPending(f"version {version} of the weights is not pushed yet.")
            raise WeightVersionError(
                f"version {version} of the weights was pushed, this replica has {self._core.version}. The weights were lost "
                "with the actor that kept them. Push them again."
            )

    def _fetch(self, chunks: Sequence[Any]) -> Mapping[str, Tensor]:
        """Returns the weights of a push under the model's own names. Raises an error if they do not fit."""
        from torchrl_llm_kl.service._messages import tensors_of

        parts = ray.get(list(chunks), timeout=_FETCH)
        weights = {name: value for part in parts for name, value in tensors_of(part).items()}
        return self._core.engine.own_weights(weights)


# ------------------------------------------------------------------ the application


def application(spec: ServiceSpec) -> serve.Application:
    """Builds the application of a service, for ``serve.run``."""
    options: dict[str, object] = {**DEFAULTS, **spec.options}
    actor = {name: options.pop(name) for name in OF_ACTORS if name in options}
    if spec.num_replicas is not None:
        options["num_replicas"] = spec.num_replicas
    options |= {"name": DEPLOYMENT, "ray_actor_options": actor, "graceful_shutdown_wait_loop_s": 0.2}
    logging_config = {"enable_access_log": False}  # writing a line for each call takes time
    deployment: Any = serve.deployment(Replica)
    made: serve.Application = deployment.options(logging_config=logging_config, **options).bind(spec)
    return made


def deploy(spec: ServiceSpec) -> None:
    """Deploys the application, without waiting for its replicas. Clients use handles, so no HTTP proxy is started."""
    serve.start(proxy_location="Disabled")
    if not is_deployed(spec.name):
        if spec.name in serve.status().applications:
            raise ServiceError(f"Serve has another application with the name {spec.name!r}. Choose another name=.")
        target = serve.RunTarget(target=application(spec), name=spec.name, route_prefix=None)
        serve.run_many([target], wait_for_applications_running=False)


def app(args: Mapping[str, Any]) -> serve.Application:
    """Builds the application of a service for a configuration file of Serve: ``import_path: torchrl_llm_kl.service:app``.

    Args:
        args: of the file. ``name`` is the name of the application. ``model`` is a folder or a name of the hub, with ``dtype``.
            Instead of it, ``factory`` names a function, ``"module:function"``, with its ``arguments``. The settings
            ``tokens_per_batch``, ``memory``, ``max_tokens`` and ``max_wait`` are those of :class:`ScoringService`. The
            ``deployments`` of the file hold replicas and resources.

    Raises:
        TypeError: for other arguments.
        KeyError: without a name, or without a model and a factory.

    Example:
        >>> app({"name": "reference", "model": "Qwen/Qwen3-0.6B", "dtype": "bfloat16"})  # doctest: +SKIP
    """
    given = dict(args)
    name = given.pop("name")
    if "model" in given:
        factory = partial(served_model, given.pop("model"), given.pop("dtype", "auto"))
    else:
        factory = partial(resolve_name(given.pop("factory")), **given.pop("arguments", {}))
    packed = ray.cloudpickle.dumps(factory)
    return application(ServiceSpec(name, repr(sorted(args.items())), Settings(**given), factory=packed, detached=True))


def served_model(path: str, dtype: str) -> object:
    """Loads a causal language model of transformers, on the accelerator if the replica has one."""
    import torch
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.to(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else model
