"""The client: proxies of a model and its scorer."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.scoring import (
    Changes,
    ScoreOptions,
    Scorer,
    ScoreRequest,
    Scores,
    Sequences,
    TokenMask,
)
from torchrl_llm_kl.service._spec import ServiceSpec
from torchrl_llm_kl.service._weights import check_version
from torchrl_llm_kl.service._wire import ANSWERED, Request, checked_top_k
from torchrl_llm_kl.service.client._connection import Connection
from torchrl_llm_kl.service.client._exchange import Exchange, Part
from torchrl_llm_kl.service.client._router import Router

if TYPE_CHECKING:
    from typing_extensions import Unpack

_PROCESS = uuid.uuid4().hex[:8]  # with the process id the name of this process among the callers


class RemoteModel:
    """Proxy of a service's model, accepted wherever a transform takes a model.

    Small and picklable. It connects on first use: each process finds the replicas by name.

    Args:
        spec: the service.

    Keyword Args:
        make: a factory that is not part of the spec: this process hands it in, and again if it is lost.
        timeout: seconds per call, retries included.
    """

    log_probs_only = True  # no distributions: see check_distributions
    replays = True  # scores over recorded tokens: see check_replays

    def __init__(self, spec: ServiceSpec, *, make: Callable[[], Any] | None = None, timeout: float = 120.0) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be a number of seconds greater than 0, got {timeout}.")
        self.timeout = timeout
        self._version: int | None = None
        self._interface: tuple[ModelInterface, bool] | None = None
        self._connect(spec, make)

    def _connect(self, spec: ServiceSpec, make: Callable[[], Any] | None = None) -> None:
        self.connection, self.router = Connection(spec, make), Router()

    @property
    def version(self) -> int | None:
        """Required version of the weights; None for the replica's current one.

        A call waits for a version that was not pushed yet, and raises :class:`WeightVersionError` for an earlier one.
        """
        return self._version

    @version.setter
    def version(self, version: int | None) -> None:
        self._version = None if version is None else check_version(version)

    @property
    def spec(self) -> ServiceSpec:
        """The service."""
        return self.connection.spec

    def __getstate__(self) -> Json:
        kept = ("timeout", "_version", "_interface")
        return {"spec": replace(self.spec, factory=None), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update({name: value for name, value in state.items() if name not in ("spec", "make")})
        self._connect(state["spec"], state.get("make"))

    def __deepcopy__(self, memo: object) -> RemoteModel:
        """A copy in this process, which can hand in the model too."""
        copy = object.__new__(type(self))
        copy.__setstate__({**self.__getstate__(), "spec": self.spec, "make": self.connection.make})
        return copy

    @property
    def interface(self) -> ModelInterface:
        """Keys and tokenizer of the model, requested once."""
        return self._model_interface()

    @property
    def log_probs_key(self) -> Any:
        """That of the TorchRL wrapper; an AttributeError if the model is not one."""
        return self._model_interface("log_probs_key").log_probs_key

    @property
    def pad_output(self) -> bool:
        """That of the TorchRL wrapper; an AttributeError if the model is not one."""
        return bool(self._model_interface("pad_output").pad_output)

    def _model_interface(self, of_wrapper: str = "") -> ModelInterface:
        if self._interface is None:
            self._interface = self.call("interface")
        interface, is_wrapper = self._interface
        if of_wrapper and not is_wrapper:
            raise AttributeError(f"the model of {self!r} is not a TorchRL wrapper: it has no {of_wrapper}.")
        return interface

    def make_scorer(self, options: ScoreOptions | None = None, **changes: Unpack[Changes]) -> RemoteScorer:
        """A scorer with these options. The service's own ``memory`` sizes the cache; 0 here turns it off."""
        return RemoteScorer(self, (options or ScoreOptions()).but(**changes))

    def fingerprint(self) -> tuple[int, str] | None:
        """Version and fingerprint of the weights that a replica holds; None if calls require others.

        See :func:`~torchrl_llm_kl.scoring.fingerprint_of`. The replica reads all weights at the first call, and at the first
        one after each push.
        """
        version, found = self.call("fingerprint")
        self.connection.saw(version)
        old = version < self.connection.newest or self._version not in (None, version)
        return None if old else (version, found)

    @property
    def retries(self) -> int:
        """Number of calls through this object that were retried after their replica failed."""
        return self.connection.retries

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of any replica, with retries until the timeout."""
        return self.connection.call(method, *args, timeout=self.timeout)

    def close(self) -> None:
        """Stop using the service through this object."""
        self.connection.close(f"{self!r} was closed.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec.name!r}, num_replicas={self.spec.num_replicas})"


class RemoteScorer(Scorer):
    """Scores on a service.

    Each of the ``top_k`` tokens, of which there are at most 1024, takes 8 bytes of the reply; their log-probs and the rest's
    are float32 for any model. Each of the recorded tokens that were ``kept`` takes 4 bytes of the request. Calls raise a
    :class:`ServiceError` if the service does not answer.

    Args:
        model: the service.
        options: how to score; a ``memory`` of 0 allows no cache.
    """

    path = "remote"
    offers = ANSWERED
    place = "a service"
    instead = (
        "it sends scores of single tokens. Score the transformers model in this process, with a LogProbScorer, or compare "
        "distributions by their most probable tokens, top_k="
    )
    __slots__ = ("model",)  # other attributes cannot be set: they would have no effect
    model: RemoteModel

    def __init__(self, model: RemoteModel, options: ScoreOptions) -> None:
        self.model, self.options = model, options

    def check(
        self, options: ScoreOptions, request: ScoreRequest | None = None, *, reference: Scorer | None = None
    ) -> None:
        """See :meth:`Scorer.check`."""
        super().check(checked_top_k(options), request, reference=reference)

    def run(
        self, request: ScoreRequest, options: ScoreOptions | None = None, *, reference: Scorer | None = None
    ) -> Scores:
        """See :meth:`Scorer.run`."""
        self.check(self.options if options is None else options, request, reference=reference)
        return self._begun(request, options)()

    async def ascore(self, sequences: Sequences, mask: TokenMask | None = None, **changes: Unpack[Changes]) -> Ragged:
        """:meth:`score` without blocking an event loop; see :meth:`arun`."""
        return (await self.arun(ScoreRequest.of(sequences, mask), self.options.but(**changes))).log_prob

    async def arun(self, request: ScoreRequest, options: ScoreOptions | None = None) -> Scores:
        """:meth:`run` without blocking an event loop. Cancelling it withdraws the requests.

        It takes a thread, of up to 256 in this process.

        Example:
            >>> async def both(scorer, a, b):
            ...     return await asyncio.gather(scorer.ascore(a), scorer.ascore(b, temperature=0.5))
        """
        threads = _threads(os.getpid())
        begun = threads.submit(self.begin, request, options)
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, lambda: begun.result()())
        except asyncio.CancelledError:
            begun.add_done_callback(_withdraw)
            raise

    def begin(self, request: ScoreRequest, options: ScoreOptions | None = None) -> Exchange:
        """Send the requests; the result is a function that waits for the scores of :meth:`run`."""
        self.check(self.options if options is None else options, request)
        return self._begun(request, options)

    def _begun(self, request: ScoreRequest, options: ScoreOptions | None) -> Exchange:
        self.model.connection.check_not_forked()  # before any tensor: torch's own threads do not survive a fork either
        options = self.options if options is None else options
        if options.remember and not options.memory:
            options = options.but(remember=False)
        caller = f"{_PROCESS}-{os.getpid()}/{threading.get_ident()}"
        whole = Request(request, options, self.model.version, caller)
        return Exchange(self.model.connection, self.model.router, Part(whole), timeout=self.model.timeout)


@lru_cache(1)
def _threads(pid: int) -> ThreadPoolExecutor:
    """For all asynchronous calls of process ``pid``."""
    return ThreadPoolExecutor(256, thread_name_prefix="scores")


def _withdraw(begun: Future[Exchange]) -> None:
    """Cancel what was begun: nobody waits for it."""
    if not begun.cancelled() and begun.exception() is None:
        begun.result().cancel()
