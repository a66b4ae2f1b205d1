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
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.scoring import (
    SampledAlone,
    Sampling,
    Scores,
    Sequences,
    TokenMask,
    VersionedScores,
    as_sampling,
    check_kept,
    read_sequences,
)
from torchrl_llm_kl.service._errors import PoisonedRequest, ReplicaGone, ServiceBusy, ServiceError, ServiceTimeout
from torchrl_llm_kl.service._weights import check_version
from torchrl_llm_kl.service._wire import Reply, Request, Settings
from torchrl_llm_kl.service.client._replicas import Patience, Replicas, failures
from torchrl_llm_kl.service.client._router import Router
from torchrl_llm_kl.service.control._membership import check_not_forked, client_name
from torchrl_llm_kl.service.control._spec import ServiceSpec

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

    def make_scorer(
        self,
        *,
        temperature: float = 1.0,
        adapters: bool | str = True,
        dtype: torch.dtype | None = None,
        memory: int | None = None,
        deterministic: bool = False,
        sampling: Sampling | None = None,
    ) -> RemoteScorer:
        """A scorer with these settings. The service's own ``memory`` sizes the cache; 0 here turns it off."""
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        settings = Settings(adapters=adapters, dtype=name, remember=memory != 0, deterministic=deterministic)
        return RemoteScorer(self, settings.with_sampling(as_sampling(temperature, sampling)))

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


def _local_only(what: str) -> ValueError:
    return ValueError(
        f"{what} needs the models in this process: a service sends log-probs, entropies and, with top_k=, the most probable "
        "tokens and the log-prob of the rest. Ask for top_k= and compare these, or score here with a LogProbScorer."
    )


class RemoteScorer(SampledAlone):
    """Scores on a service, with the interface of :class:`~torchrl_llm_kl.LogProbScorer`.

    ``sampling`` and ``temperature`` may be set at any time; other settings are fixed.

    Args:
        model: the service.
        settings: how to score; ``remember`` allows the cache.
    """

    path: Literal["remote"] = "remote"
    model: RemoteModel
    settings: Settings

    def __init__(self, model: RemoteModel, settings: Settings) -> None:
        self.__dict__.update(model=model, settings=settings.checked())

    @property
    def sampling(self) -> Sampling:
        """How the scored tokens were sampled; it may be set."""
        return self.settings.sampling

    @sampling.setter
    def sampling(self, sampling: Sampling | None) -> None:
        self.__dict__["settings"] = self.settings.with_sampling(self._next_sampling(sampling)).checked()

    def score(
        self,
        sequences: Sequences,
        mask: TokenMask | None = None,
        *,
        attention_mask: Tensor | None = None,
        kept: Kept | None = None,
        grad: bool = False,
        remember: bool = False,
    ) -> Ragged:
        """Log-probs, as :meth:`LogProbScorer.score` returns them, without gradient."""
        options: dict[str, Any] = {"kept": kept, "grad": grad, "remember": remember}
        return self.evaluate(sequences, mask, attention_mask=attention_mask, **options).log_prob

    def evaluate(
        self,
        sequences: Sequences,
        mask: TokenMask | None = None,
        *,
        attention_mask: Tensor | None = None,
        entropy: bool = False,
        top_k: int = 0,
        moments: bool = False,
        reference: Any = None,
        direction: str = "reverse",
        kept: Kept | None = None,
        routing: Any = None,
        record_routing: bool = False,
        grad: bool = False,
        remember: bool = False,
    ) -> Scores:
        """Log-probs, entropies and the top k, as :meth:`LogProbScorer.evaluate` returns them.

        Each of the ``top_k`` tokens takes 8 bytes of the reply, or 6 if :attr:`RemoteModel.top_k_dtype` is float16. Their
        log-probs and the rest's are float32 for any model. Each of the recorded tokens that were ``kept`` takes 4 bytes of the
        request.

        Raises:
            ValueError: for gradients, an exact KL, moments and routing (``routing``, ``record_routing``), which need the model
                in this process; for a ``top_k`` of more than 1024; and as the scorer does.
            ServiceError: if the service does not answer.
        """
        if reference is not None:
            raise _local_only("an exact KL")
        if routing is not None or record_routing:
            raise ValueError(
                "routing is recorded and replayed by a model in this process, and this one is behind a service: score it with "
                "its own routing (routing_key=None), or a local model."
            )
        options: dict[str, Any] = {"entropy": entropy, "top_k": top_k, "moments": moments, "kept": kept, "grad": grad}
        return self.begin(sequences, mask, attention_mask=attention_mask, remember=remember, **options)()

    async def ascore(self, sequences: Sequences, mask: TokenMask | None = None, **options: Any) -> Ragged:
        """:meth:`score` for an event loop, which goes on meanwhile; see :meth:`aevaluate`."""
        return (await self.aevaluate(sequences, mask, **options)).log_prob

    async def aevaluate(
        self,
        sequences: Sequences,
        mask: TokenMask | None = None,
        *,
        reference: Any = None,
        direction: str = "reverse",
        **options: Any,
    ) -> Scores:
        """:meth:`evaluate` for an event loop, which goes on meanwhile. Cancelling it withdraws the requests.

        Requests are made, and replies read, in a few threads that all calls of this process share; waiting takes none.

        Example:
            >>> async def both(scorer, a, b):
            ...     return await asyncio.gather(scorer.ascore(a), scorer.aevaluate(b, top_k=64))
        """
        if reference is not None:
            raise _local_only("an exact KL")
        threads = _threads(os.getpid())
        begun = threads.submit(self.begin, sequences, mask, **options)
        try:
            finish = await asyncio.wrap_future(begun)
            await finish.arrival()
            return await asyncio.get_running_loop().run_in_executor(threads, finish)
        except asyncio.CancelledError:
            begun.add_done_callback(_withdraw)
            raise

    def begin(
        self,
        sequences: Sequences,
        mask: TokenMask | None = None,
        *,
        attention_mask: Tensor | None = None,
        entropy: bool = False,
        top_k: int = 0,
        moments: bool = False,
        kept: Kept | None = None,
        grad: bool = False,
        remember: bool = False,
    ) -> Pending:
        """Send the requests; the result is a function that waits for the scores of :meth:`evaluate`."""
        check_not_forked()  # before any tensor: torch's own threads do not survive a fork either
        if moments:
            raise _local_only("moments=True")
        if grad:
            raise ValueError("a model behind a service returns no gradient: score the policy where it is trained.")
        asked: dict[str, Any] = {"entropy": entropy, "top_k": top_k, "remember": remember and self.settings.remember}
        if top_k:
            asked["top_k_dtype"] = str(self.model.top_k_dtype).removeprefix("torch.")
        settings = replace(self.settings, **asked).checked()
        if top_k and kept is not None:
            raise ValueError(
                "top_k= returns the most probable of all tokens, and kept= leaves some out: score the two apart."
            )
        tokens, mask = read_sequences(sequences, mask, attention_mask)
        whole = self._whole(tokens, tokens.positions > 0 if mask is None else mask, settings, kept)
        exchange = Exchange(self.model.replicas, self.model.router, whole, timeout=self.model.timeout)
        return Pending(tokens, settings, exchange)

    def _whole(self, sequences: Ragged, mask: Tensor, settings: Settings, kept: Kept | None) -> Part:
        """A call as one request."""
        if mask.shape != sequences.values.shape:
            raise ValueError(
                f"the mask must have one element for each token, {tuple(sequences.values.shape)}, got {tuple(mask.shape)}."
            )
        chosen, caller = mask.detach().cpu(), f"{client_name()}/{threading.get_ident()}"
        data = (sequences.values, sequences.lengths, chosen, settings)
        if kept is not None:  # here, where errors name the sequences of the caller
            kept = check_kept(kept, sequences, chosen)
        return Part(Request.of(*data, version=self.model.version, caller=caller, kept=kept), chosen)

    def forget(self) -> None:
        """Does nothing: the service clears its cache when its weights change."""


class Pending:
    """A call whose requests were sent; calling it waits for the scores."""

    def __init__(self, tokens: Ragged, settings: Settings, exchange: Exchange) -> None:
        self._tokens, self._settings, self._exchange = tokens, settings, exchange

    def __call__(self) -> Scores:
        replies = self._exchange.replies()
        for part, reply in zip(self._exchange.parts, replies, strict=True):
            reply.check_answers(int(part.mask.sum()), self._settings)
        elements = torch.cat([torch.zeros(0, dtype=torch.long), *(part.elements for part in self._exchange.parts)])
        k = self._settings.top_k
        columns = {"log_prob": _join([reply.log_prob for reply in replies])}
        if self._settings.entropy:
            columns["entropy"] = _join([reply.entropy for reply in replies])
        if k:
            columns["top_indices"] = _join([reply.top_ids for reply in replies], k).long()
            columns["top_log_probs"] = _join([reply.top_log_probs for reply in replies], k).float()
            columns["tail_log_prob"] = _join([reply.rest_log_prob for reply in replies])
        found = cast(VersionedScores, VersionedScores.spread(self._tokens, elements, **columns))
        found.version = replies[0].version if replies else None
        return found

    async def arrival(self) -> None:
        """Wait until a call of this object would hardly block: the answers, or errors, of the requests are here."""
        await self._exchange.arrival()

    def cancel(self) -> None:
        """Withdraw the requests: no replica scores those that still wait there, and a call of this object ends."""
        self._exchange.cancel()


def _join(arrays: Sequence[np.ndarray | None], k: int = 0) -> Tensor:
    """Scores of several replies, ``[K]`` or ``[K, k]``."""
    given = [array for array in arrays if array is not None]
    return torch.from_numpy(np.concatenate(given)) if given else torch.zeros(0, *[k] * (k > 0))


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
    mask: Tensor  # of its tokens, [n]
    where: Tensor | None = None  # positions of its tokens among those of the call, int64 [n]; None for all
    replica: int | None = None  # that scores it; None before one was chosen

    @property
    def elements(self) -> Tensor:
        """Positions of the scored tokens in the flat tokens of the call; int64 ``[K]``."""
        return self.mask.nonzero().squeeze(-1) if self.where is None else self.where[self.mask]

    def divided(self, router: Router, replicas: Sequence[int]) -> list[Part]:
        """One part for each of ``replicas`` that gets some of the sequences; more only beyond ``_MOST_TOKENS``."""
        request, scored = self.request, self.mask.numpy()
        lengths = request.lengths
        starts = lengths.cumsum() - lengths
        places = np.append(np.flatnonzero(scored), len(scored))
        first = np.minimum(places[places.searchsorted(starts)] - starts, lengths)
        chosen = router.assign(request.tokens, lengths, first, replicas, goes_on=request.settings.remember)
        sizes, replay = lengths, request.replay
        if replay is not None:  # kept tokens are sent too
            sent = np.concatenate([[0], np.cumsum(replay.counts, dtype=np.int64)])
            done = np.concatenate([[0], np.cumsum(scored)])
            sizes = lengths + sent[done[starts + lengths]] - sent[done[starts]]
        parts = []
        for replica in np.unique(chosen).tolist():
            own = np.where(chosen == replica, sizes, 0)
            pieces = (own.cumsum() - own) // _MOST_TOKENS
            for piece in np.unique(pieces[chosen == replica]):
                rows = (chosen == replica) & (pieces == piece)
                if rows.all():
                    return [replace(self, replica=replica)]
                inside_rows = np.repeat(rows, lengths)
                where = np.flatnonzero(inside_rows)
                mask = scored[where]
                some = None if replay is None else replay.take(inside_rows[scored])
                given = {"tokens": request.tokens[where], "lengths": lengths[rows], "mask": np.packbits(mask)}
                mine = replace(request, replay=some, **given)
                inside = torch.from_numpy(where)
                inside = inside if self.where is None else self.where[inside]
                parts.append(Part(mine, torch.from_numpy(mask), inside, replica))
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
            f"{len(deaths)} replicas died while they scored a request of {len(request.lengths)} sequences and "
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
