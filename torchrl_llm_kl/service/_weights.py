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

#: What a keeper holds: version; token and references of each push, oldest first; and why earlier ones were lost, if they were.
Held = tuple[int, list[tuple[str, list[Any]]], Exception | None]
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
    names: set[str] = field(default_factory=set)  # of the weights
    version: int = 0  # once it is committed
    seen: float = field(default_factory=time.monotonic)  # the last call for it

    def add(self, chunk: Chunk) -> None:
        """Store a part of it."""
        import ray

        self.chunks.append(ray.put(chunk))
        self.names |= chunk.keys()
        self.seen = time.monotonic()


class WeightKeeper:
    """An actor that keeps pushed weights in the object store, so that a restarted replica can load them.

    A push is staged in chunks, which changes nothing, and then committed as a whole. The keeper ends with the service.
    """

    def __init__(self, service: str) -> None:
        self._service, self._version = service, 0
        self._pushed: list[Push] = []  # oldest first, without those that later ones replace
        self._staged: dict[str, Push] = {}
        self._lost: Exception | None = None
        if was_restarted():
            self._lost = WeightVersionError(
                "the weights that were pushed are lost, with the actor that kept them: push them again."
            )

    def stage(self, token: str, chunk: Chunk) -> None:
        """Store a part of a push; one that was given up an hour ago is dropped."""
        since = time.monotonic() - _ABANDONED
        self._staged = {name: push for name, push in self._staged.items() if push.seen > since}
        self._staged.setdefault(token, Push(token)).add(chunk)

    def check(self, version: int | None, seen: int = 0) -> Exception | None:
        """The error unless ``version`` is later than the last one; for None, if there is none after it.

        ``seen`` is the last version that the pusher and the replicas know: this actor may have lost it.
        """
        last = max(self._version, seen)
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
        for push in self._pushed:
            if push.token == token:  # asked again
                return push.version
        push = self._staged.pop(token, Push(token))
        if len(push.chunks) != chunks:
            return ServiceError(f"{len(push.chunks)} of {chunks} chunks of a push are there: push the weights again.")
        error = self.check(version, seen)
        if error is not None:
            return error
        push.version = max(self._version, seen) + 1 if version is None else version
        earlier = [] if self._lost else [old for old in self._pushed if not old.names <= push.names]
        self._pushed = [*earlier, push]
        self._version, self._lost = push.version, None
        return push.version

    def drop(self, token: str) -> None:
        """Free a staged push."""
        self._staged.pop(token, None)

    def get(self, service: str, staged: str | None = None) -> Held:
        """What it holds, ``staged`` last."""
        if service != self._service:  # of an earlier service of that name
            return 0, [], None
        found = [*self._pushed, *([self._staged[staged]] if staged in self._staged else [])]
        return self._version, [(push.token, list(push.chunks)) for push in found], self._lost


def keeper_of(spec: ServiceSpec) -> Any:
    """The keeper of a service, created if there is none."""
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    return detached(WeightKeeper, spec, "weights", spec.id, **options)


# ------------------------------------------------------------------ the replica's side


class Missing(NamedTuple):
    """Pushed weights that a replica lacks."""

    version: int
    token: str  # of the last push
    weights: dict[str, Tensor]  # under the model's own names


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
        self._version = -1  # of that push; 0 before the first one, -1 until the keeper said that there is none
        self._names: frozenset[str] = frozenset()  # of all pushed weights that are in the model
        self._staged: tuple[str, Mapping[str, Tensor]] = ("", {})

    def stage(self, token: str, seen: int = 0) -> None:
        """Fetch and check a push before it is committed. Its bytes stay in the object store, one copy for each node.

        ``seen`` is the latest version that the pusher knows of: a keeper with an earlier one has lost something.

        If the keeper lost earlier pushes, this one must hold all tensors of theirs, or of the model if this replica does not
        know theirs: otherwise a replica that starts later would have the factory's in place of those.
        """
        if token == self._taken:
            return
        self._staged = ("", {})
        version, pushes, lost = self._ask(token)
        found = dict(pushes)
        if token not in found:
            raise ServiceError("the push is not known to the actor that keeps the weights: push them again.")
        weights = self._fetch(found[token])
        if lost is not None or version < max(self._version, seen):  # restarted, or created again
            self._check_replaces(weights, max(version, seen))
        self._staged = (token, weights)

    def _check_replaces(self, names: Collection[str], newest: int) -> None:
        """Raise an error unless a push replaces all earlier ones, the last of which had the version ``newest``."""
        lacks = sorted(self._names - set(names))
        known = 0 <= newest <= self._version or not self._tensors
        if (lacks or not known) and not self._covers(names):
            others = f" and {len(lacks) - 1} more" if len(lacks) > 1 else ""
            which = f"without {lacks[0]!r}{others}" if lacks else "of some tensors only"
            raise WeightVersionError(
                "the weights that were pushed before are lost, with the actor that kept them, and this push, "
                f"{which}, does not replace them all: push all tensors of the model."
            )

    def missing(self) -> Missing | None:
        """What brings the model up to date; None if it is."""
        version, pushes, lost = self._ask()
        if lost is not None:
            raise lost
        self._version = max(self._version, 0)
        tokens = [token for token, _ in pushes]
        new = pushes[tokens.index(self._taken) + 1 :] if self._taken in tokens else pushes
        if not new:
            return None
        weights: dict[str, Tensor] = {}
        for token, references in new:
            weights.update(self._staged[1] if token == self._staged[0] else self._fetch(references))
        return Missing(version, tokens[-1], weights)

    def take(self, found: Missing) -> None:
        """Note that the model has what :meth:`missing` returned."""
        self._taken, self._version = found.token, found.version
        self._names |= found.weights.keys()
        self.drop()

    @property
    def whole(self) -> bool:
        """Whether pushed weights replaced every tensor of the model."""
        return self._covers(self._names)

    def _covers(self, names: Collection[str]) -> bool:
        return bool(self._tensors) and all(any(name in names for name in tied) for tied in self._tensors)

    def drop(self) -> None:
        """Free a staged push."""
        self._staged = ("", {})

    def _ask(self, staged: str | None = None) -> Held:
        """See :meth:`WeightKeeper.get`."""
        import ray

        keeper = actor_of(self._spec, "weights")
        if keeper is None:
            return 0, [], None
        found: Held = ray.get(keeper.get.remote(self._spec.id, staged), timeout=_FETCH)
        return found

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
