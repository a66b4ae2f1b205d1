"""Pushed weights: cut into chunks, kept for replicas that restart or missed them."""

from __future__ import annotations

import operator
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_llm_kl.service._actors import actor_of, detached, was_restarted
from torchrl_llm_kl.service._errors import ServiceError, WeightVersionError
from torchrl_llm_kl.service._spec import ServiceSpec

#: Bytes of an object that holds weights; a larger weight is a separate object.
CHUNK = 256 * 2**20
#: The last version that a message can hold.
MAX_VERSION = 2**63 - 1
_ABANDONED = 3600.0  # seconds after which a push that was not committed is dropped
_FETCH = 300.0  # seconds to fetch weights

#: What a keeper holds: version, token and references of the last push; and why that is lost, if it is.
Held = tuple[int, str, list[Any], Exception | None]
#: Type, shape and bytes of weights by name. Ray maps the bytes into memory where a copy would double them.
Chunk = dict[str, tuple[str, tuple[int, ...], np.ndarray]]


def chunks_of(weights: Iterable[tuple[str, Tensor]], *, size: int = CHUNK) -> Iterator[Chunk]:
    """Weights by name in chunks of at most ``size`` bytes; a larger weight is a separate chunk."""
    chunk: Chunk = {}
    held = 0
    for name, value in weights:
        if value.layout != torch.strided:
            raise TypeError(f"weights must be dense tensors, got {value.layout} for {name!r}.")
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if chunk and held + data.nbytes > size:
            yield chunk
            chunk, held = {}, 0
        chunk[name] = (str(value.dtype).removeprefix("torch."), tuple(value.shape), data)
        held += data.nbytes
    if chunk:
        yield chunk


def tensors_of(chunk: Chunk) -> dict[str, Tensor]:
    """The weights of a chunk, on its memory: not to be written to."""
    found = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        for name, (dtype, shape, data) in chunk.items():
            flat = torch.from_numpy(data) if data.nbytes else torch.zeros(0, dtype=torch.uint8)
            found[name] = flat.view(getattr(torch, dtype)).reshape(shape)
    return found


# ------------------------------------------------------------------ the keeper


@dataclass(eq=False)
class Push:
    """Weights that were pushed together."""

    token: str  # unique
    chunks: list[Any] = field(default_factory=list)  # references
    version: int = 0  # once it is committed
    seen: float = field(default_factory=time.monotonic)  # the last call for it

    def add(self, chunk: Chunk) -> None:
        """Store a part of it."""
        import ray

        self.chunks.append(ray.put(chunk))
        self.seen = time.monotonic()


class WeightKeeper:
    """An actor that keeps the last push in the object store, so that a restarted replica can load it.

    A push is staged in chunks, which changes nothing, and then committed as a whole. The keeper ends with the service.
    """

    def __init__(self, service: str) -> None:
        self._service, self._last = service, Push("")
        self._staged: dict[str, Push] = {}
        self._lost: Exception | None = None
        if was_restarted():
            self._lost = _lost()

    def stage(self, token: str, chunk: Chunk) -> None:
        """Store a part of a push; one that was given up an hour ago is dropped."""
        since = time.monotonic() - _ABANDONED
        self._staged = {name: push for name, push in self._staged.items() if push.seen > since}
        self._staged.setdefault(token, Push(token)).add(chunk)

    def check(self, version: int | None, seen: int = 0) -> Exception | None:
        """The error unless ``version`` is later than the last one; for None, if there is none after it.

        ``seen`` is the last version that the pusher and the replicas know: this actor may have lost it.
        """
        last = max(self._last.version, seen)
        if seen > self._last.version:
            self._lost = _lost()
        try:
            version = check_version(last + 1 if version is None else version)
        except WeightVersionError as error:
            return error
        if version > last:
            return None
        return WeightVersionError(
            f"version {version} of the weights came after version {last}: versions must increase."
        )

    def commit(self, token: str, chunks: int, version: int | None, seen: int = 0) -> int | Exception:
        """Make a staged push of so many chunks the latest one; its version (the next one for None) or an error."""
        if token == self._last.token:  # asked again
            return self._last.version
        push = self._staged.pop(token, Push(token))
        if len(push.chunks) != chunks:
            return ServiceError(f"{len(push.chunks)} of {chunks} chunks of a push are there: push the weights again.")
        error = self.check(version, seen)
        if error is not None:
            return error
        push.version = max(self._last.version, seen) + 1 if version is None else version
        self._last, self._lost = push, None
        return push.version

    def drop(self, token: str) -> None:
        """Free a staged push."""
        self._staged.pop(token, None)

    def get(self, service: str) -> Held:
        """The last push."""
        if service != self._service:  # of an earlier service of that name
            return 0, "", [], None
        return self._last.version, self._last.token, list(self._last.chunks), self._lost

    def staged(self, token: str) -> tuple[list[Any], Exception | None]:
        """References of a push that is not committed, none if it is not known; and why the last one is lost, if it is."""
        return list(self._staged[token].chunks) if token in self._staged else [], self._lost


def _lost() -> WeightVersionError:
    return WeightVersionError("the weights that were pushed are lost, with the actor that kept them: push them again.")


def keeper_of(spec: ServiceSpec) -> Any:
    """The keeper of a service, created if there is none."""
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    return detached(WeightKeeper, spec, "weights", spec.id, **options)


# ------------------------------------------------------------------ the replica's side


class Missing(NamedTuple):
    """A push that a replica lacks."""

    version: int
    token: str
    weights: Mapping[str, Tensor]  # under the model's own names


class Pushes:
    """What a replica has of the pushes that the keeper holds. For one thread, which it may block.

    Args:
        spec: the service.
        check: returns weights under the model's own names, or raises an error.
        tensors: names of each tensor of the model, several if it is tied; empty if the engine does not know them.
    """

    def __init__(
        self,
        spec: ServiceSpec,
        check: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
        tensors: Sequence[Collection[str]] = (),
    ) -> None:
        self._spec, self._check, self._tensors = spec, check, tensors
        self._taken = ""  # token of the last push that is in the model
        self._names: frozenset[str] = frozenset()  # of the pushed weights that are in the model
        self._staged: tuple[str, Mapping[str, Tensor]] = ("", {})

    def stage(self, token: str) -> None:
        """Fetch and check a push before it is committed. Its bytes stay in the object store, one copy for each node.

        It must hold all tensors of the pushes before it, of the model if these are lost: a replica that starts later loads
        nothing else.
        """
        if token == self._taken:
            return
        self._staged = ("", {})
        references, lost = self._ask("staged", token) or ([], None)
        if not references:
            raise ServiceError("the push is not known to the actor that keeps the weights: push them again.")
        weights = self._fetch(references)
        tensors = self._tensors or [[name] for name in sorted(self._names)]
        lacks = [
            tied for tied in tensors if (lost or self._names.intersection(tied)) and weights.keys().isdisjoint(tied)
        ]
        if lacks:
            why = (
                "and what was pushed before is lost: push all tensors" if lost else "which others held: push those too"
            )
            raise WeightVersionError(f"this push lacks {len(lacks)} tensors, such as {next(iter(lacks[0]))!r}, {why}.")
        self._staged = (token, weights)

    def missing(self) -> Missing | None:
        """What brings the model up to date; None if it is."""
        version, token, references, lost = self._ask("get", self._spec.id) or (0, "", [], None)
        if lost is not None:
            raise lost
        if token in ("", self._taken):
            return None
        return Missing(version, token, self._staged[1] if token == self._staged[0] else self._fetch(references))

    def take(self, found: Missing) -> None:
        """Note that the model has what :meth:`missing` returned."""
        self._taken = found.token
        self._names |= found.weights.keys()
        self.drop()

    @property
    def whole(self) -> bool:
        """Whether pushed weights replaced every tensor of the model."""
        return bool(self._tensors) and not any(self._names.isdisjoint(tied) for tied in self._tensors)

    def drop(self) -> None:
        """Free a staged push."""
        self._staged = ("", {})

    def _ask(self, method: str, what: str) -> Any:
        """What a method of the keeper returns; None without a keeper."""
        import ray

        keeper = actor_of(self._spec, "weights")
        return None if keeper is None else ray.get(getattr(keeper, method).remote(what), timeout=_FETCH)

    def _fetch(self, references: Sequence[Any]) -> Mapping[str, Tensor]:
        import ray

        try:
            chunks = ray.get(list(references), timeout=_FETCH)
        except ray.exceptions.RayError as error:
            raise ServiceError(f"pushed weights cannot be read: push them again ({error}).") from error
        return self._check({name: value for chunk in chunks for name, value in tensors_of(chunk).items()})


def check_version(version: Any) -> int:
    """``version`` as an int; a TypeError if it is not a whole number, a WeightVersionError if no request can name it."""
    try:
        found = None if isinstance(version, bool) else operator.index(version)
    except TypeError:
        found = None
    if found is None:
        raise TypeError(f"version must be a whole number, got {version!r}.")
    if not 0 <= found <= MAX_VERSION:
        raise WeightVersionError(f"version of the weights must be from 0 to {MAX_VERSION} (2^63 - 1), got {found}.")
    return found
