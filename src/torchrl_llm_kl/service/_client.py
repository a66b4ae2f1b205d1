"""The client's side: a stand-in for a model, and for its scorer."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring import Scores
from torchrl_llm_kl.service._errors import ServiceClosedError, ServiceTimeout
from torchrl_llm_kl.service._lifecycle import Leases, ServiceSpec, connect
from torchrl_llm_kl.service._wire import Reply, Request, Settings
from torchrl_llm_kl.transforms._interface import ModelInterface

__all__ = ["RemoteModel", "RemoteScorer"]

_ROUTING_TOKENS = 16
_FIRST_PAUSE, _LONGEST_PAUSE, _DEAD_FOR = 0.05, 2.0, 5.0


class RemoteModel:
    """A model behind a service: wherever a transform takes a model, it takes this.

    Small, picklable, and connected when it is first used: each process finds the replicas by name.

    Args:
        spec: the service.

    Keyword Args:
        timeout: seconds for one call, retries included.
    """

    def __init__(self, spec: ServiceSpec, *, timeout: float = 120.0) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be a number of seconds, got {timeout}")
        self.spec, self.timeout = spec, timeout
        self.version: int | None = None
        self._closed = False
        self._interface: tuple[ModelInterface, bool] | None = None
        self._setup()

    def _setup(self) -> None:
        self._lock = threading.Lock()
        self._handles: dict[int, Any] = {}
        self._dead: dict[int, float] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_lock", "_handles", "_dead")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._setup()

    # ------------------------------------------------------------------ what transforms ask of a model

    @property
    def interface(self) -> ModelInterface:
        """Keys and tokenizer of the model, asked for once."""
        return self._known[0]

    @property
    def _known(self) -> tuple[ModelInterface, bool]:
        if self._interface is None:
            self._interface = self.call(0, "interface")
        assert self._interface is not None
        return self._interface

    def _of_wrapper(self, name: str) -> Any:
        interface, is_wrapper = self._known
        if not is_wrapper:
            raise AttributeError(f"the model of {self!r} is no TorchRL wrapper: it has no {name}")
        return getattr(interface, name)

    @property
    def log_probs_key(self) -> Any:
        """As of a TorchRL wrapper, if the model is one."""
        return self._of_wrapper("log_probs_key")

    @property
    def pad_output(self) -> bool:
        """As of a TorchRL wrapper, if the model is one."""
        return self._of_wrapper("pad_output")

    def make_scorer(
        self,
        *,
        temperature: float = 1.0,
        adapters: bool = True,
        dtype: torch.dtype | None = None,
        memory: int | None = None,
    ) -> RemoteScorer:
        """A scorer with these settings. ``memory`` is the service's own."""
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        return RemoteScorer(self, Settings(temperature=temperature, adapters=adapters, dtype=name))

    # ------------------------------------------------------------------ replicas

    def order(self, tokens: np.ndarray) -> list[int]:
        """Replicas in the order in which sequences that begin with ``tokens`` go to them: the same in every process."""
        start = tokens[:_ROUTING_TOKENS].astype(np.int64).tobytes()

        def rank(replica: int) -> bytes:
            return hashlib.blake2b(start + replica.to_bytes(4, "little"), digest_size=8).digest()

        order = sorted(range(self.spec.num_replicas), key=rank)
        now = time.monotonic()
        return sorted(order, key=lambda replica: self._dead.get(replica, 0.0) > now)

    def handle(self, replica: int, *, timeout: float) -> Any:
        """The actor; found or made if this process has not used it yet."""
        if self._closed:
            raise ServiceClosedError(f"{self!r} was closed")
        with self._lock:
            if replica not in self._handles:
                _ensure_ray()
                found = connect(self.spec, replica, timeout=timeout)
                if not self.spec.detached:
                    Leases.hold(self.spec.replica_name(replica), found)
                self._handles[replica] = found
            return self._handles[replica]

    def lost(self, replica: int) -> None:
        """Remember that a replica did not answer."""
        with self._lock:
            self._handles.pop(replica, None)
            self._dead[replica] = time.monotonic() + _DEAD_FOR

    def call(self, replica: int, method: str, *args: Any) -> Any:
        """Call a method of one replica, as often as needed until the time is up."""
        import ray

        deadline, pause = time.monotonic() + self.timeout, _FIRST_PAUSE
        while True:
            left = deadline - time.monotonic()
            try:
                answer = getattr(self.handle(replica, timeout=left), method).remote(*args)
                return ray.get(answer, timeout=max(left, 0.001))
            except ray.exceptions.GetTimeoutError:
                raise _timed_out(self, f"{method} on replica {replica}") from None
            except ray.exceptions.RayActorError as error:
                self.lost(replica)
                pause = _rest(deadline, pause, self, error)

    def close(self) -> None:
        """This process no longer uses the service."""
        self._closed = True
        for replica in list(self._handles):
            Leases.release(self.spec.replica_name(replica))
        self._handles.clear()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec.name!r}, num_replicas={self.spec.num_replicas})"


class RemoteScorer:
    """Scores on a service, with the interface of a :class:`~torchrl_llm_kl.LogProbScorer`.

    Args:
        model: the service.
        settings: how.
    """

    path: Literal["remote"] = "remote"

    def __init__(self, model: RemoteModel, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.temperature = settings.temperature

    def score(
        self, sequences: Ragged, mask: Tensor | None = None, *, grad: bool = False, remember: bool = False
    ) -> Ragged:
        """As :meth:`LogProbScorer.score`, without gradient."""
        return self.evaluate(sequences, mask, grad=grad, remember=remember).log_prob

    def evaluate(
        self,
        sequences: Ragged,
        mask: Tensor | None = None,
        *,
        entropy: bool = False,
        top_k: int = 0,
        reference: Any = None,
        direction: str = "reverse",
        grad: bool = False,
        remember: bool = False,
    ) -> Scores:
        """As :meth:`LogProbScorer.evaluate`, for log-probs and entropies.

        Raises:
            ValueError: for what needs the model in this process: gradients, an exact KL, top-k; and as the scorer does.
            ServiceError: if the service does not answer.
        """
        if grad:
            raise ValueError("a model behind a service gives no gradient: score the policy where it is trained")
        if reference is not None or top_k:
            raise ValueError(
                "an exact KL and top-k need the model in this process: the service sends log-probs and entropies"
            )
        settings = Settings(
            self.settings.temperature, self.settings.adapters, self.settings.dtype, entropy=entropy, remember=remember
        )
        mask = sequences.positions > 0 if mask is None else mask
        parts = self._parts(sequences, mask, settings)
        replies = _gather(self.model, parts)
        log_probs = torch.zeros(sequences.values.shape[0])
        entropies = torch.zeros_like(log_probs) if entropy else None
        for (_, elements, _), reply in zip(parts, replies, strict=True):
            log_probs[elements] = torch.from_numpy(reply.log_prob.copy())
            if entropies is not None and reply.entropy is not None:
                entropies[elements] = torch.from_numpy(reply.entropy.copy())
        device = sequences.values.device
        return Scores(
            sequences.like(log_probs.to(device)), None if entropies is None else sequences.like(entropies.to(device))
        )

    def _parts(self, sequences: Ragged, mask: Tensor, settings: Settings) -> list[tuple[list[int], Tensor, Request]]:
        """For each replica in charge: the order to try, flat positions of what it scores, and the request."""
        model, where = self.model, mask.cpu().nonzero().squeeze(-1)
        ask: dict[str, Any] = {"version": model.version, "caller": Leases.client}
        if model.spec.num_replicas == 1:
            return [([0], where, Request.of(sequences, mask, settings, **ask))]
        rows = sequences.to_list()
        shares: dict[tuple[int, ...], list[int]] = {}
        for i, row in enumerate(rows):
            shares.setdefault(tuple(model.order(row.cpu().numpy())), []).append(i)
        starts, counted = sequences.offsets[:-1].tolist(), sequences.like(mask).to_list()
        parts = []
        for order, members in shares.items():
            part = Ragged.from_list([rows[i] for i in members])
            chosen = torch.cat([counted[i] for i in members])
            elements = torch.cat([counted[i].cpu().nonzero().squeeze(-1) + starts[i] for i in members])
            parts.append((list(order), elements, Request.of(part, chosen, settings, **ask)))
        return parts

    def forget(self) -> None:
        """What a service remembers is its own."""


def _gather(model: RemoteModel, parts: Sequence[tuple[list[int], Tensor, Request]]) -> list[Reply]:
    """Ask all replicas at once; those that die are asked again, or another one in their place, until the time is up."""
    import ray

    deadline, pause = time.monotonic() + model.timeout, _FIRST_PAUSE
    replies: dict[int, Reply] = {}
    tried = [0] * len(parts)
    while len(replies) < len(parts):
        left = max(deadline - time.monotonic(), 0.001)
        pending: list[tuple[int, int, Any]] = []
        error: Exception | None = None
        for i, (order, _, request) in enumerate(parts):
            if i not in replies:
                replica = order[tried[i] % len(order)]
                try:
                    pending.append((i, replica, model.handle(replica, timeout=left).score.remote(request, left)))
                except ray.exceptions.RayActorError as gone:
                    model.lost(replica)
                    tried[i], error = tried[i] + 1, gone
        for i, replica, answer in pending:
            try:
                state, value = ray.get(answer, timeout=max(deadline - time.monotonic(), 0.001))
            except ray.exceptions.GetTimeoutError:
                raise _timed_out(model, f"scoring on replica {replica}") from None
            except ray.exceptions.RayActorError as gone:
                model.lost(replica)
                tried[i], error = tried[i] + 1, gone
                continue
            if state == "error":
                raise value
            replies[i] = value
        if error is not None:
            pause = _rest(deadline, pause, model, error)
    return [replies[i] for i in range(len(parts))]


def _rest(deadline: float, pause: float, model: RemoteModel, error: Exception) -> float:
    """Wait before the next try; the pause after it."""
    if time.monotonic() + pause > deadline:
        raise ServiceTimeout(f"{model!r} did not come back within {model.timeout:g} s: {error}") from error
    time.sleep(pause)
    return min(2 * pause, _LONGEST_PAUSE)


def _timed_out(model: RemoteModel, what: str) -> ServiceTimeout:
    return ServiceTimeout(f"{model!r}: {what} took more than {model.timeout:g} s. Raise timeout=, or add replicas")


def _ensure_ray() -> None:
    import ray

    if not ray.is_initialized():
        ray.init(log_to_driver=False)
