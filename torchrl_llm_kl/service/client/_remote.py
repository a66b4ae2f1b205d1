"""The client: proxies of a model and its scorer, and the requests that they send."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.scoring import (
    DEFAULT_MEMORY,
    Changes,
    ScoreOptions,
    Scorer,
    ScoreRequest,
    Scores,
    Sequences,
    TokenMask,
)
from torchrl_llm_kl.service._errors import PoisonedRequest, ReplicaGone, ServiceBusy, ServiceError, ServiceTimeout
from torchrl_llm_kl.service._weights import check_version
from torchrl_llm_kl.service._wire import ANSWERED, Reply, Request, checked_top_k
from torchrl_llm_kl.service.client._replicas import Patience, Replicas, failures
from torchrl_llm_kl.service.client._router import Router
from torchrl_llm_kl.service.control._membership import check_not_forked, client_name
from torchrl_llm_kl.service.control._spec import ServiceSpec

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MOST_TOKENS = 2**21  # of a request, about: 8 MiB


class RemoteModel:
    """Proxy of a service's model, accepted wherever a transform takes a model.

    Small and picklable. It connects on first use: each process finds the replicas by name.

    Args:
        spec: the service.

    Keyword Args:
        timeout: seconds per call, retries included.
    """

    log_probs_only = True  # no distributions: see check_distributions
    replays = True  # scores over recorded tokens: see check_replays

    def __init__(self, spec: ServiceSpec, *, timeout: float = 120.0) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be a number of seconds greater than 0, got {timeout}.")
        self.timeout = timeout
        self._version: int | None = None
        self._top_k_dtype = torch.float32
        self._interface: tuple[ModelInterface, bool] | None = None
        self._connect(spec)

    def _connect(self, spec: ServiceSpec) -> None:
        self.replicas, self.router = Replicas(spec), Router()

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
    def top_k_dtype(self) -> torch.dtype:
        """How log-probs of the top k travel: float32, or float16 with 2 bytes less for each.

        float16 has a relative error of at most 2^-11 (and at most 2^-25 nats below 2^-14 nats): -2.0 is exact to 0.001, -20.0
        to 0.01. Log-probs below -65504 become -65504.
        """
        return self._top_k_dtype

    @top_k_dtype.setter
    def top_k_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.float16):
            raise ValueError(f"top_k_dtype must be torch.float32 or torch.float16, got {dtype}.")
        self._top_k_dtype = dtype

    @property
    def spec(self) -> ServiceSpec:
        """The service."""
        return self.replicas.spec

    def __getstate__(self) -> dict[str, Any]:
        kept = ("timeout", "_version", "_top_k_dtype", "_interface")
        return {"spec": self.spec.for_others(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update({name: value for name, value in state.items() if name != "spec"})
        self._connect(state["spec"])

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteModel:
        copy = object.__new__(type(self))
        copy.__setstate__({**self.__getstate__(), "spec": self.spec})
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
            self._interface = self.call(self.replicas.choose(range(self.spec.num_replicas)), "interface")
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
        found = self.call(self.replicas.choose(range(self.spec.num_replicas)), "fingerprint")
        if isinstance(found, Exception):
            raise found
        version: int = found[0]
        self.replicas.saw(version, found[2])
        old = version < self.replicas.newest or self._version not in (None, version)
        return None if old else (version, str(found[1]))

    @property
    def retries(self) -> int:
        """Number of calls through this object that were retried after their replica failed."""
        return self.replicas.retries

    def call(self, replica: int, method: str, *args: Any) -> Any:
        """Call a method of one replica, with retries until the timeout."""
        return self.replicas.call(replica, method, *args, timeout=self.timeout)

    def close(self) -> None:
        """Stop using the service through this object."""
        self.replicas.close(f"{self!r} was closed.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec.name!r}, num_replicas={self.spec.num_replicas})"


class RemoteScorer(Scorer):
    """Scores on a service.

    Each of the ``top_k`` tokens, of which there are at most 1024, takes 8 bytes of the reply, or 6 if
    :attr:`RemoteModel.top_k_dtype` is float16. Their log-probs and the rest's are float32 for any model. Each of the recorded
    tokens that were ``kept`` takes 4 bytes of the request. Calls raise a :class:`ServiceError` if the service does not answer.

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
        return self.begin(request, options)()

    async def ascore(self, sequences: Sequences, mask: TokenMask | None = None, **changes: Unpack[Changes]) -> Ragged:
        """:meth:`score` without blocking an event loop; see :meth:`arun`."""
        return (await self.arun(ScoreRequest.of(sequences, mask), self.options.but(**changes))).log_prob

    async def arun(self, request: ScoreRequest, options: ScoreOptions | None = None) -> Scores:
        """:meth:`run` without blocking an event loop. Cancelling it withdraws the requests.

        Requests are made, and replies read, in a few threads that all calls of this process share; waiting takes none.

        Example:
            >>> async def both(scorer, a, b):
            ...     return await asyncio.gather(scorer.ascore(a), scorer.ascore(b, temperature=0.5))
        """
        threads = _threads(os.getpid())
        begun = threads.submit(self.begin, request, options)
        try:
            finish = await asyncio.wrap_future(begun)
            await finish.arrival()
            return await asyncio.get_running_loop().run_in_executor(threads, finish)
        except asyncio.CancelledError:
            begun.add_done_callback(_withdraw)
            raise

    def begin(self, request: ScoreRequest, options: ScoreOptions | None = None) -> Pending:
        """Send the requests; the result is a function that waits for the scores of :meth:`run`."""
        check_not_forked()  # before any tensor: torch's own threads do not survive a fork either
        options = self.options if options is None else options
        self.check(options, request)
        options = options.but(remember=options.remember and options.memory > 0, memory=DEFAULT_MEMORY)
        caller, half = f"{client_name()}/{threading.get_ident()}", self.model.top_k_dtype == torch.float16
        whole = Part(Request(request, options, self.model.version, caller, half=half))
        exchange = Exchange(self.model.replicas, self.model.router, whole, timeout=self.model.timeout)
        return Pending(request, exchange)


class Pending:
    """A call whose requests were sent; calling it waits for the scores."""

    def __init__(self, request: ScoreRequest, exchange: Exchange) -> None:
        self._request, self._exchange = request, exchange

    def __call__(self) -> Scores:
        parts, replies = self._exchange.parts, self._exchange.replies()
        for part, reply in zip(parts, replies, strict=True):
            reply.check_answers(part.request)
        columns = {name: torch.cat([reply.columns[name] for reply in replies]) for name in replies[0].columns}
        elements = torch.cat([part.elements for part in parts])
        return replace(replies[0], columns=columns).scores(self._request.layout, elements)

    async def arrival(self) -> None:
        """Wait until a call of this object would hardly block: the answers, or errors, of the requests are here."""
        await self._exchange.arrival()

    def cancel(self) -> None:
        """Withdraw the requests: no replica scores those that still wait there, and a call of this object ends."""
        self._exchange.cancel()


@lru_cache(1)
def _threads(pid: int) -> ThreadPoolExecutor:
    """Send and read for all asynchronous calls of process ``pid``."""
    return ThreadPoolExecutor(32, thread_name_prefix="scores")


def _withdraw(begun: Future[Pending]) -> None:
    """Cancel what was begun, in a thread: nobody waits for it."""
    if not begun.cancelled() and begun.exception() is None:
        _threads(os.getpid()).submit(begun.result().cancel)


# ------------------------------------------------------------------ requests out, replies in


#: Replicas that may die of a request before it is refused: the first of them, which may have died of another one, and three
#: while they tried it alone. So two processes that others kill during trials refuse nobody.
MAX_DEATHS = 4


@dataclass(frozen=True, eq=False)
class Part:
    """One request of a call, and the place of its answer."""

    request: Request
    where: Tensor | None = None  # positions of its tokens among those of the call, int64 [n]; None for all
    replica: int | None = None  # that scores it; None before one was chosen

    @property
    def elements(self) -> Tensor:
        """Positions of the scored tokens in the flat tokens of the call; int64 ``[K]``."""
        scored = self.request.scored.mask.nonzero().squeeze(-1)
        return scored if self.where is None else self.where[scored]

    def divided(self, router: Router, replicas: Sequence[int]) -> list[Part]:
        """One part for each of ``replicas`` that gets some of the sequences; more only beyond ``_MOST_TOKENS``."""
        request, scored = self.request, self.request.scored
        tokens, lengths = scored.tokens.values.numpy(), scored.tokens.lengths.numpy()
        starts = lengths.cumsum() - lengths
        places = np.append(np.flatnonzero(scored.mask.numpy()), len(tokens))
        first = np.minimum(places[places.searchsorted(starts)] - starts, lengths)
        chosen = router.assign(tokens, lengths, first, replicas, continues=request.options.remember)
        sizes, parts = scored.sizes().numpy(), []
        for replica in np.unique(chosen).tolist():
            own = np.where(chosen == replica, sizes, 0)
            pieces = (own.cumsum() - own) // _MOST_TOKENS
            for piece in np.unique(pieces[chosen == replica]):
                rows = (chosen == replica) & (pieces == piece)
                if rows.all():
                    return [replace(self, replica=replica)]
                inside = scored.elements(torch.from_numpy(np.flatnonzero(rows)))
                where = inside if self.where is None else self.where[inside]
                parts.append(Part(request.select(np.flatnonzero(rows)), where, replica))
        return parts or [replace(self, replica=replicas[0])]


class Exchange:
    """Sends a call to the replicas, one request to each; :meth:`replies` waits for them.

    If a replica dies, its sequences are divided among the others. During a weight update, requests are repeated to replicas
    that do not hold the new weights yet. The timeout starts with the call of :meth:`replies`.

    A request whose replica died while it held it may be the cause: its next tries share no batch, and only deaths that come
    while it is scored, each of another process, count from then on. After three of those it raises :class:`PoisonedRequest`.
    A process that dies before it has settled, without a trial, was ended by something else, which may have ended the others
    too: then none of the trials count.

    Attributes:
        parts: the requests so far; one of a replica that died is replaced by several.
    """

    def __init__(self, replicas: Replicas, router: Router, whole: Part, *, timeout: float) -> None:
        self.parts = [whole]
        self._replicas, self._router, self._timeout = replicas, router, timeout
        self._replies: dict[int, Reply] = {}
        self._error: Exception | None = None
        self._sent: list[tuple[int, int, Any]] = []  # part, replica, reference to the answer
        self._arrived = self._withdrawn = False
        self._deaths: dict[int, list[str]] = {}  # names of the replicas that died while they held a part
        # Of parts with deaths: references that are ready once the replica has settled, and once it scores the part.
        self._trials: dict[int, tuple[Any, Any]] = {}
        self._lives: dict[int, set[str]] = {}  # marks of the processes that died while they scored a part alone
        self._start_clock()
        self._send()

    def _start_clock(self) -> None:
        self._patience = Patience(self._timeout, f"scoring on {self._replicas.spec.name!r}")

    def replies(self) -> list[Reply]:
        """Wait for the replies, in the order of the parts and all from the same weights; raises the error of a request."""
        if not self._arrived:
            self._start_clock()
        while True:
            self._collect()
            if self._withdrawn:
                raise ServiceError("the call was cancelled.")
            if self._error is not None:
                self._patience.rest(self._error)
            if len(self._replies) == len(self.parts) and not self._drop_stale():
                return [self._replies[i] for i in range(len(self.parts))]
            self._send()

    def _send(self) -> None:
        """Request all missing replies at once."""
        self._error, self._sent = None, []
        usable = self._replicas.usable()
        stranded = [i for i, part in enumerate(self.parts) if i not in self._replies and part.replica not in usable]
        for i in stranded:
            self.parts[i], *others = self.parts[i].divided(self._router, usable)
            if i in self._deaths:
                places = range(len(self.parts), len(self.parts) + len(others))
                self._deaths |= {j: list(self._deaths[i]) for j in places}
                self._lives |= {j: set(self._lives.get(i, ())) for j in places}
            self.parts += others
        for i, part in enumerate(self.parts):
            replica = part.replica
            if i in self._replies or replica is None:
                continue
            try:
                handle = self._replicas.handle(replica, timeout=self._patience.left)
                deaths = len(self._deaths.get(i, ()))
                request = replace(part.request, newest=self._replicas.newest, deaths=deaths)
                # Slightly less than the remaining time: the replica must report a full queue before the client times out.
                left = self._patience.left
                left = max(left - 0.5, 0.8 * left)
                if deaths:
                    self._await_others(replica, deaths)
                    self._trials[i] = handle.settled.remote(), handle.on_trial.remote(request.digest(), left)
                self._sent.append((i, replica, handle.score.remote(request.pack(), left)))
            except failures() as down:
                self._lose(replica, down)

    def _collect(self) -> None:
        """Wait for the answers; store replies and the last failure of a replica, and raise the error of a request."""
        import ray

        try:
            for i, replica, answer in self._sent:
                try:
                    found = ray.get(answer, timeout=self._patience.left)
                except ray.exceptions.GetTimeoutError:
                    raise self._patience.up() from None
                except failures() as down:
                    self._lose(replica, down)
                    if isinstance(down, ray.exceptions.RayActorError):
                        self._count_death(i, replica)
                    continue
                if isinstance(found, (ServiceBusy, ServiceTimeout)):
                    self._error = found  # dropped there, while this caller's timeout began again
                elif isinstance(found, ReplicaGone):
                    self._lose(replica, found)
                elif isinstance(found, Exception):
                    raise found
                else:
                    self._replies[i] = Reply.unpack(found)
        except BaseException:  # the call fails: no caller waits for the requests that are still queued
            self.cancel()
            raise

    async def arrival(self) -> None:
        """Wait until every request that was sent has an answer or failed; raises :class:`ServiceTimeout` after the timeout."""
        self._start_clock()
        self._arrived = True
        waiting = [asyncio.wrap_future(answer.future()) for _, _, answer in self._sent]
        for each in waiting:
            each.add_done_callback(_seen)
        try:
            if waiting and (await asyncio.wait(waiting, timeout=self._patience.left))[1]:
                self.cancel()
                raise self._patience.up()
        finally:
            for each in waiting:  # an answer may arrive after the loop was closed
                each.cancel()

    def cancel(self) -> None:
        """Withdraw the requests that have no reply; :meth:`replies` raises :class:`ServiceError` then."""
        self._withdrawn = True
        with contextlib.suppress(Exception):
            import ray

            for i, _, answer in self._sent:
                if i not in self._replies:
                    ray.cancel(answer)

    def _lose(self, replica: int, error: Exception) -> None:
        self._replicas.lose(replica, error)
        self._error = error

    def _await_others(self, replica: int, deaths: int) -> None:
        """Before a trial that will probably end in a death: wait until the other replicas can serve other callers."""
        others = [other for other in self._replicas.active if other != replica]
        end = time.monotonic() + self._patience.left / 2
        while deaths == MAX_DEATHS - 1 and others and time.monotonic() < end:
            if self._is_up(others[-1], end - time.monotonic()):
                others.pop()
            else:
                time.sleep(0.2)

    def _is_up(self, replica: int, timeout: float) -> bool:
        try:
            self._replicas.handle(replica, timeout=timeout)
        except failures() as down:
            self._replicas.lose(replica, down)
            return False
        except ServiceTimeout:
            return False
        return True

    def _count_death(self, i: int, replica: int) -> None:
        deaths = self._deaths.setdefault(i, [])
        if deaths:
            settled, life = (_found(reference) for reference in self._trials[i])
            if not settled:  # no suspect had its trial: something else ends processes, and may have ended those before
                del deaths[1:]
            lives = self._lives.setdefault(i, set())
            if not settled or not life or life in lives:  # it waited for its turn, or the process was only out of reach
                return
            lives.add(life)
        deaths.append(self._replicas.spec.replica_name(replica))
        if len(deaths) < MAX_DEATHS:
            return
        request = self.parts[i].request
        self._replicas.quarantine(request.digest())
        for other in self._replicas.active:
            with contextlib.suppress(Exception):  # those that are up
                self._replicas.handle(other, timeout=0.1).quarantine.remote(request.digest())
        raise PoisonedRequest(
            f"{len(deaths)} replicas died while they scored a request of {request.num_sequences} sequences and "
            f"{request.num_tokens} tokens ({', '.join(deaths)}), the last ones while they scored nothing else: it is not tried "
            "again. Look for the cause in their logs, and score its sequences in smaller requests to find the one at fault."
        )

    def _drop_stale(self) -> bool:
        """Whether some replies came from older weights than others; drops the older ones.

        A :class:`WeightVersionError` if two of one version came from different weights.
        """
        newest = max((reply.version for reply in self._replies.values()), default=0)
        for reply in self._replies.values():
            self._replicas.saw(reply.version, reply.weights)
        stale = [i for i, reply in self._replies.items() if reply.version < newest]
        for i in stale:
            del self._replies[i]
        return bool(stale)


def _found(reference: Any) -> Any:
    """The value of a reference that is ready, or nearly; None for an error."""
    import ray

    with contextlib.suppress(Exception):
        return ray.get(reference, timeout=1.0)
    return None


def _seen(answer: asyncio.Future[Any]) -> None:
    """Read an error, which :meth:`Exchange.replies` meets again, so that asyncio does not report it as never retrieved."""
    if not answer.cancelled():
        answer.exception()
