"""The client: proxies of a model and its scorer, and the requests that they send."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.scoring import Scores, Sequences, TokenMask, read_sequences
from torchrl_llm_kl.service._errors import PoisonedRequest, ReplicaGone, ServiceBusy, ServiceTimeout
from torchrl_llm_kl.service._lifecycle import ServiceSpec
from torchrl_llm_kl.service._replicas import Patience, Replicas, client_name, failures
from torchrl_llm_kl.service._router import Router
from torchrl_llm_kl.service._weights import check_version
from torchrl_llm_kl.service._wire import Reply, Request, Settings


class RemoteModel:
    """Proxy of a service's model, accepted wherever a transform takes a model.

    Small and picklable. It connects on first use: each process finds the replicas by name.

    Args:
        spec: the service.

    Keyword Args:
        timeout: seconds per call, retries included.
    """

    log_probs_only = True  # no distributions: see check_distributions

    def __init__(self, spec: ServiceSpec, *, timeout: float = 120.0) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be a number of seconds greater than 0, got {timeout}.")
        self.timeout = timeout
        self._version: int | None = None
        self._interface: tuple[ModelInterface, bool] | None = None
        self._connect(spec)

    def _connect(self, spec: ServiceSpec) -> None:
        self.replicas, self.router = Replicas(spec), Router(spec.num_replicas)

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
        return self.replicas.spec

    def __getstate__(self) -> dict[str, Any]:
        kept = ("timeout", "_version", "_interface")
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
    ) -> RemoteScorer:
        """A scorer with these settings. The service's own ``memory`` sizes the cache; 0 here turns it off."""
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        settings = Settings(
            temperature=float(temperature),
            adapters=adapters,
            dtype=name,
            remember=memory != 0,
            deterministic=deterministic,
        )
        return RemoteScorer(self, settings)

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


def _local_only() -> ValueError:
    return ValueError(
        "an exact KL, top-k and moments need the model in this process: the service sends log-probs and entropies."
    )


class RemoteScorer:
    """Scores on a service, with the interface of :class:`~torchrl_llm_kl.LogProbScorer`.

    Args:
        model: the service.
        settings: how to score; ``remember`` allows the cache.
    """

    path: Literal["remote"] = "remote"

    def __init__(self, model: RemoteModel, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.temperature = settings.temperature

    def score(
        self,
        sequences: Sequences,
        mask: TokenMask | None = None,
        *,
        attention_mask: Tensor | None = None,
        grad: bool = False,
        remember: bool = False,
    ) -> Ragged:
        """Log-probs, as :meth:`LogProbScorer.score` returns them, without gradient."""
        return self.evaluate(sequences, mask, attention_mask=attention_mask, grad=grad, remember=remember).log_prob

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
        grad: bool = False,
        remember: bool = False,
    ) -> Scores:
        """Log-probs and entropies, as :meth:`LogProbScorer.evaluate` returns them.

        Raises:
            ValueError: for gradients, an exact KL, top-k and moments, which need the model in this process; and as the
                scorer does.
            ServiceError: if the service does not answer.
        """
        if reference is not None or top_k:
            raise _local_only()
        options: dict[str, Any] = {"entropy": entropy, "moments": moments, "grad": grad, "remember": remember}
        return self.begin(sequences, mask, attention_mask=attention_mask, **options)()

    def begin(
        self,
        sequences: Sequences,
        mask: TokenMask | None = None,
        *,
        attention_mask: Tensor | None = None,
        entropy: bool = False,
        moments: bool = False,
        grad: bool = False,
        remember: bool = False,
    ) -> Callable[[], Scores]:
        """Send the requests; returns a function that waits for the scores of :meth:`evaluate`."""
        if moments:
            raise _local_only()
        if grad:
            raise ValueError("a model behind a service returns no gradient: score the policy where it is trained.")
        settings = replace(self.settings, entropy=entropy, remember=remember and self.settings.remember)
        tokens, mask = read_sequences(sequences, mask, attention_mask)
        parts = self._parts(tokens, tokens.positions > 0 if mask is None else mask, settings)
        exchange = Exchange(self.model.replicas, parts, timeout=self.model.timeout)

        def finish() -> Scores:
            elements = torch.cat([torch.zeros(0, dtype=torch.long), *(part.elements for part in parts)])
            replies = exchange.replies()
            columns = {"log_prob": [reply.log_prob for reply in replies]}
            if entropy:
                columns["entropy"] = [reply.entropy for reply in replies if reply.entropy is not None]
            joined = {
                name: torch.from_numpy(np.concatenate(arrays)) if arrays else torch.zeros(0)
                for name, arrays in columns.items()
            }
            return Scores.spread(tokens, elements, **joined)

        return finish

    def _parts(self, sequences: Ragged, mask: Tensor, settings: Settings) -> list[Part]:
        """Requests of at most ``max_tokens`` for each replica, so that large calls leave room for other callers."""
        if mask.shape != sequences.values.shape:
            raise ValueError(
                f"the mask must have one element for each token, {tuple(sequences.values.shape)}, got {tuple(mask.shape)}."
            )
        router, limit = self.model.router, int(self.model.spec.settings["max_tokens"])
        tokens, chosen, lengths = sequences.values.detach().cpu(), mask.detach().cpu(), sequences.lengths.cpu()
        version, caller = self.model.version, f"{client_name()}/{threading.get_ident()}"
        if router.num_replicas == 1 and tokens.shape[0] <= limit:
            return [Part((0,), Request.of(tokens, lengths, chosen, settings, version=version, caller=caller), chosen)]

        rows, scored = tokens.numpy(), chosen.numpy()
        starts, counts = (lengths.cumsum(0) - lengths).tolist(), lengths.tolist()
        shares: dict[tuple[int, ...], list[list[int]]] = {}
        room: dict[tuple[int, ...], int] = {}
        for i, (start, n) in enumerate(zip(starts, counts, strict=True)):
            selected = scored[start : start + n]
            first = int(selected.argmax()) if n and selected.any() else n
            order = router.order(rows[start : start + n], first, goes_on=settings.remember)
            pieces = shares.setdefault(order, [])
            if not pieces or n > room[order]:
                pieces.append([])
                room[order] = limit
            pieces[-1].append(i)
            room[order] -= n

        positions = torch.arange(tokens.shape[0]).split(counts)
        parts = []
        for order, pieces in shares.items():
            for piece in pieces:
                where = torch.cat([positions[i] for i in piece])
                own = (tokens[where], lengths[piece], chosen[where])
                parts.append(Part(order, Request.of(*own, settings, version=version, caller=caller), own[2], where))
        return parts

    def forget(self) -> None:
        """Does nothing: the service clears its cache when its weights change."""


# ------------------------------------------------------------------ requests out, replies in


#: Replicas that may die of a request before it is refused.
MAX_DEATHS = 3


@dataclass(frozen=True, eq=False)
class Part:
    """One request of a call, and the place of its answer."""

    order: tuple[int, ...]  # replicas, the one in charge first
    request: Request
    mask: Tensor  # of its tokens, [n]
    where: Tensor | None = None  # positions of its tokens among those of the call, int64 [n]; None for all

    @property
    def elements(self) -> Tensor:
        """Positions of the scored tokens in the flat tokens of the call; int64 ``[K]``."""
        return self.mask.nonzero().squeeze(-1) if self.where is None else self.where[self.mask]


class Exchange:
    """Sends all parts of a call at once; :meth:`replies` waits for them.

    If a replica dies, its requests are sent again, to it or to another one. During a weight update, requests are repeated to
    replicas that do not hold the new weights yet. The timeout starts with the call of :meth:`replies`.

    A request whose replica died while it held it may be the cause: its next tries share no batch, and only deaths that come
    while it is scored count from then on. After three it raises :class:`PoisonedRequest`.
    """

    def __init__(self, replicas: Replicas, parts: Sequence[Part], *, timeout: float) -> None:
        self._replicas, self._parts, self._timeout = replicas, parts, timeout
        self._replies: dict[int, Reply] = {}
        self._error: Exception | None = None
        self._sent: list[tuple[int, int, Any]] = []  # part, replica, reference to the answer
        self._deaths: dict[int, list[str]] = {}  # names of the replicas that died while they held a part
        self._trials: dict[int, Any] = {}  # of parts with deaths: a reference that is ready once the replica scores it
        self._start_clock()
        self._send()

    def _start_clock(self) -> None:
        self._patience = Patience(self._timeout, f"scoring on {self._replicas.spec.name!r}")

    def replies(self) -> list[Reply]:
        """Wait for the replies, in the order of the parts and all from the same weights; raises the error of a request."""
        self._start_clock()
        while True:
            self._collect()
            if self._error is not None:
                self._patience.rest(self._error)
            if len(self._replies) == len(self._parts) and not self._drop_stale():
                return [self._replies[i] for i in range(len(self._parts))]
            self._send()

    def _send(self) -> None:
        """Request all missing replies at once."""
        self._error, self._sent = None, []
        for i, part in enumerate(self._parts):
            if i in self._replies:
                continue
            replica = self._replicas.choose(part.order)
            try:
                handle = self._replicas.handle(replica, timeout=self._patience.left)
                deaths = len(self._deaths.get(i, ()))
                request = replace(part.request, newest=self._replicas.newest, deaths=deaths)
                # Slightly less than the remaining time: the replica must report a full queue before the client times out.
                left = self._patience.left
                left = max(left - 0.5, 0.8 * left)
                if deaths:
                    self._await_others(replica, deaths)
                    self._trials[i] = handle.on_trial.remote(request.digest(), left)
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
                if isinstance(
                    found, (ServiceBusy, ServiceTimeout)
                ):  # dropped: the timeout began again since it was sent
                    self._error = found
                elif isinstance(found, ReplicaGone):
                    self._lose(replica, found)
                elif isinstance(found, Exception):
                    raise found
                else:
                    self._replies[i] = Reply.unpack(found)
        except BaseException:  # the call fails: no caller waits for the requests that are still queued
            with contextlib.suppress(Exception):
                for i, _, answer in self._sent:
                    if i not in self._replies:
                        ray.cancel(answer)
            raise

    def _lose(self, replica: int, error: Exception) -> None:
        self._replicas.lose(replica, error)
        self._error = error

    def _await_others(self, replica: int, deaths: int) -> None:
        """Before a trial that will probably end in a death: wait until the other replicas can serve other callers."""
        others = [other for other in range(self._replicas.spec.num_replicas) if other != replica]
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
        import ray

        deaths = self._deaths.setdefault(i, [])
        if deaths:
            begun = False
            with contextlib.suppress(Exception):
                begun = ray.get(self._trials[i], timeout=1.0)
            if not begun:  # it waited for its turn: another request is to blame
                return
        deaths.append(self._replicas.spec.replica_name(replica))
        if len(deaths) < MAX_DEATHS:
            return
        request = self._parts[i].request
        for other in range(self._replicas.spec.num_replicas):
            with contextlib.suppress(Exception):  # those that are up
                self._replicas.handle(other, timeout=0.1).quarantine.remote(request.digest())
        raise PoisonedRequest(
            f"{len(deaths)} replicas died while they scored a request of {len(request.lengths)} sequences and "
            f"{request.num_tokens} tokens ({', '.join(deaths)}), the last ones while they scored nothing else: it is not tried "
            "again. Look for the cause in their logs, and score its sequences in smaller requests to find the one at fault."
        )

    def _drop_stale(self) -> bool:
        """Whether some replies came from older weights than others; drops the older ones."""
        newest = max((reply.version for reply in self._replies.values()), default=0)
        self._replicas.newest = max(self._replicas.newest, newest)
        stale = [i for i, reply in self._replies.items() if reply.version < newest]
        for i in stale:
            del self._replies[i]
        return bool(stale)
