"""The client: proxies of a model and its scorer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.scoring import Changes, ScoreOptions, Scorer, ScoreRequest, Scores, Sequences, TokenMask
from torchrl_llm_kl.service._connection import Connection, Deadline, outside_loop
from torchrl_llm_kl.service._errors import ServiceError, VersionPending
from torchrl_llm_kl.service._messages import ANSWERED, PROTOCOL, Message, Reply, checked_top_k, scores_of
from torchrl_llm_kl.service._weights import check_version

if TYPE_CHECKING:
    from typing_extensions import Unpack

_PAUSE = 0.05  # seconds before a request for a version that is not pushed yet is sent again
_PROCESS = uuid.uuid4().hex[:8]  # with the process id the name of this process among the callers


class RemoteModel:
    """Proxy of a service's model, accepted wherever a transform takes a model.

    Small and picklable. It connects on first use: each process finds the application by its name.

    Args:
        name: of the service.

    Keyword Args:
        timeout: seconds per call, retries included.
        service: the id of the service; by default that of any service with this name.
        address: of the Ray cluster, for a process that has not joined one.
    """

    log_probs_only = True  # no distributions: see check_distributions
    replays = True  # scores over recorded tokens: see check_replays
    #: A call of more numbers than this is sent in parts of about this size, so that small calls of others come between them.
    part_size = 8192

    def __init__(self, name: str, *, timeout: float = 120.0, service: str = "", address: str | None = None) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be a number of seconds greater than 0, got {timeout}.")
        self.timeout = timeout
        self.connection = Connection(name, service, address)
        self._version: int | None = None
        self._interface: tuple[ModelInterface, bool] | None = None

    @property
    def name(self) -> str:
        """Of the service."""
        return self.connection.name

    @property
    def version(self) -> int | None:
        """Required version of the weights; None for the replica's current one.

        A call waits for a version that was not pushed yet, and raises :class:`WeightVersionError` for an earlier one.
        """
        return self._version

    @version.setter
    def version(self, version: int | None) -> None:
        self._version = None if version is None else check_version(version)

    def __reduce__(self) -> tuple[Callable[..., RemoteModel], tuple[Json, Json]]:
        own = self.connection
        given: Json = {"name": own.name, "timeout": self.timeout, "service": own.service, "address": own.address}
        return _restored, (given, {"_version": self._version, "_interface": self._interface})

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
        version, fingerprint = self.call("fingerprint")
        self.connection.saw(version)
        old = version < self.connection.newest or self._version not in (None, version)
        return None if old else (version, fingerprint)

    @property
    def retries(self) -> int:
        """Number of calls through this object that were repeated after their replica ended."""
        return self.connection.retries

    def call(self, method: str, *args: object) -> Any:
        """Call a method of any replica, with retries until the timeout."""
        return self.connection.call(method, *args, timeout=self.timeout)

    def close(self) -> None:
        """Stop using the service through this object."""
        self.connection.close(f"{self!r} was closed.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def _restored(given: Json, state: Json) -> RemoteModel:
    model = RemoteModel(**given)
    model.__dict__.update(state)
    return model


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
        begun = _threads(os.getpid()).submit(self.begin, request, options)
        try:
            exchange = await asyncio.wrap_future(begun)
            return await asyncio.get_running_loop().run_in_executor(_threads(os.getpid()), exchange)
        except asyncio.CancelledError:
            begun.add_done_callback(_withdraw)
            raise

    def begin(self, request: ScoreRequest, options: ScoreOptions | None = None) -> Exchange:
        """Send the request; the result is a function that waits for the scores of :meth:`run`."""
        self.check(self.options if options is None else options, request)
        return self._begun(request, options)

    def _begun(self, request: ScoreRequest, options: ScoreOptions | None) -> Exchange:
        self.model.connection.connect()  # before any tensor: torch's own threads do not survive a fork either
        options = self.options if options is None else options
        if options.remember and not options.memory:
            options = options.but(remember=False)
        return Exchange(self.model, cut(request, self.model.part_size), request, options)


class Exchange:
    """One call of a scorer, sent in parts; calling it waits for the scores, all from the same version of the weights."""

    def __init__(
        self, model: RemoteModel, parts: list[ScoreRequest], request: ScoreRequest, options: ScoreOptions
    ) -> None:
        self._model, self._parts, self._request, self._options = model, parts, request, options
        self._sent = [self._send(part) for part in self._parts]

    def _send(self, part: ScoreRequest, tries: int = 0) -> Any:
        connection = self._model.connection
        message = Message(
            protocol=PROTOCOL,
            service=connection.service,
            arrays=part.to_arrays(),
            options=self._options.to_dict(),
            version=self._model.version,
            newest=connection.newest,
            caller=f"{_PROCESS}-{os.getpid()}/{threading.get_ident()}",
            tries=tries,
        )
        return connection.send("score", message)

    def __call__(self) -> Scores:
        """Wait for the scores; raises the error of a request."""
        return outside_loop(self._wait)

    def _wait(self) -> Scores:
        deadline = Deadline(self._model.timeout, f"scoring on {self._model.name!r}")
        replies: dict[int, Reply] = {}
        try:
            while True:
                for i in range(len(self._parts)):
                    if i not in replies:
                        replies[i] = self._receive(i, deadline)
                newest = max(reply["version"] for reply in replies.values())
                self._model.connection.saw(newest)
                stale = [i for i, reply in replies.items() if reply["version"] < newest]
                if not stale:
                    return scores_of([replies[i] for i in range(len(self._parts))], self._request)
                for i in stale:  # weights were pushed meanwhile
                    del replies[i]
                    self._sent[i] = self._send(self._parts[i])
        except BaseException as error:  # also when the user interrupts
            self.cancel()
            if not isinstance(error, ValueError) or isinstance(error, ServiceError) or len(self._parts) == 1:
                raise
        # The message of a part counts the sequences of the part: one replica checks them all.
        return Exchange(self._model, [self._request], self._request, self._options)()

    def _receive(self, i: int, deadline: Deadline) -> Reply:
        def again(tries: int) -> Any:
            self._sent[i] = self._send(self._parts[i], tries)
            return self._sent[i]

        reply: Reply | VersionPending = self._model.connection.receive(self._sent[i], again, deadline)
        while isinstance(reply, VersionPending):
            if deadline.left <= _PAUSE:
                raise deadline.over(reply) from reply
            time.sleep(_PAUSE)
            reply = self._model.connection.receive(again(0), again, deadline)
        return reply

    def cancel(self) -> None:
        """Withdraw the requests: no replica scores those that wait there."""
        for response in self._sent:
            with contextlib.suppress(Exception):  # Serve raises the error of a call that has failed already
                response.cancel()


def cut(request: ScoreRequest, limit: int) -> list[ScoreRequest]:
    """The request in parts of whole sequences, of about ``limit`` numbers each; neighbours stay together."""
    sizes = request.sizes()
    if int(sizes.sum()) <= limit:
        return [request]
    place = (sizes.cumsum(0) - sizes) // limit
    return [request.select((place == part).nonzero().squeeze(-1)) for part in torch.unique(place).tolist()]


@lru_cache(1)
def _threads(pid: int) -> ThreadPoolExecutor:
    """For all asynchronous calls of process ``pid``."""
    return ThreadPoolExecutor(256, thread_name_prefix="scores")


def _withdraw(begun: Future[Exchange]) -> None:
    """Cancel a call for which nobody waits."""
    if not begun.cancelled() and begun.exception() is None:
        begun.result().cancel()
