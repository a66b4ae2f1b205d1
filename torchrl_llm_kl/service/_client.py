"""The client's side: a stand-in for a model, and for its scorer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.scoring import Readings, Scores
from torchrl_llm_kl.service._exchange import Exchange, Part
from torchrl_llm_kl.service._leases import client_name
from torchrl_llm_kl.service._lifecycle import ServiceSpec
from torchrl_llm_kl.service._replicas import Replicas
from torchrl_llm_kl.service._routing import Router
from torchrl_llm_kl.service._weights import check_version
from torchrl_llm_kl.service._wire import Reply, Request, Settings

__all__ = ["RemoteModel", "RemoteScorer"]


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
            raise ValueError(f"timeout must be a number of seconds greater than 0, got {timeout}")
        self.timeout = timeout
        self._version: int | None = None
        self._interface: tuple[ModelInterface, bool] | None = None
        self._connect(spec)

    def _connect(self, spec: ServiceSpec) -> None:
        self.replicas, self.router = Replicas(spec), Router(spec.num_replicas)

    @property
    def version(self) -> int | None:
        """Of the weights that scores must come from; None for whichever the replica holds.

        A call waits for a version that is still to come, and raises :class:`WeightVersionError` for one that is past.
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

    # ------------------------------------------------------------------ what transforms ask of a model

    @property
    def interface(self) -> ModelInterface:
        """Keys and tokenizer of the model, asked for once."""
        return self._known[0]

    @property
    def _known(self) -> tuple[ModelInterface, bool]:
        if self._interface is None:
            self._interface = self.call(self.replicas.choose(range(self.spec.num_replicas)), "interface")
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
        """A scorer with these settings. How much is remembered is the service's own ``memory``; 0 asks it not to."""
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        settings = Settings(temperature=float(temperature), adapters=bool(adapters), dtype=name, remember=memory != 0)
        return RemoteScorer(self, settings)

    # ------------------------------------------------------------------ the service

    @property
    def retries(self) -> int:
        """Calls of this object that failed with their replica so far, and were made again."""
        return self.replicas.retries

    def call(self, replica: int, method: str, *args: Any) -> Any:
        """Call a method of one replica, as often as needed until the time is up."""
        return self.replicas.call(replica, method, *args, timeout=self.timeout)

    def close(self) -> None:
        """This object no longer uses the service."""
        self.replicas.close(f"{self!r} was closed")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec.name!r}, num_replicas={self.spec.num_replicas})"


class RemoteScorer:
    """Scores on a service, with the interface of a :class:`~torchrl_llm_kl.LogProbScorer`.

    Args:
        model: the service.
        settings: how; ``remember`` says whether it may.
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
        if reference is not None or top_k:
            raise ValueError(
                "an exact KL and top-k need the model in this process: the service sends log-probs and entropies"
            )
        return self.begin(sequences, mask, entropy=entropy, grad=grad, remember=remember)()

    def begin(
        self,
        sequences: Ragged,
        mask: Tensor | None = None,
        *,
        entropy: bool = False,
        grad: bool = False,
        remember: bool = False,
    ) -> Callable[[], Scores]:
        """Send the requests, and do something else meanwhile.

        Returns:
            A function that waits for the scores; see :meth:`evaluate`.
        """
        if grad:
            raise ValueError("a model behind a service gives no gradient: score the policy where it is trained")
        settings = replace(self.settings, entropy=entropy, remember=remember and self.settings.remember)
        mask = sequences.positions > 0 if mask is None else mask
        parts = self._parts(sequences, mask, settings)
        exchange = Exchange(self.model.replicas, parts, timeout=self.model.timeout)

        def finish() -> Scores:
            elements = torch.cat([torch.zeros(0, dtype=torch.long), *(part.elements for part in parts)])
            return Scores.spread(sequences, elements, _joined(exchange.replies(), entropy))

        return finish

    def _parts(self, sequences: Ragged, mask: Tensor, settings: Settings) -> list[Part]:
        """Requests: for each replica those that it is in charge of, in pieces that leave others a turn."""
        if mask.shape != sequences.values.shape:
            raise ValueError(
                f"the mask must have one element for each token, {tuple(sequences.values.shape)}, got {tuple(mask.shape)}"
            )
        router, limit = self.model.router, int(self.model.spec.settings["max_tokens"])
        tokens, chosen = sequences.values.detach().cpu(), mask.detach().cpu()
        lengths = sequences.lengths.cpu()
        if router.num_replicas == 1 and tokens.shape[0] <= limit:
            return [self._part((0,), None, tokens, chosen, lengths, settings)]
        rows, scored = tokens.numpy(), chosen.numpy()
        starts, counts = (lengths.cumsum(0) - lengths).tolist(), lengths.tolist()
        shares: dict[tuple[int, ...], list[list[int]]] = {}
        room: dict[tuple[int, ...], int] = {}
        for i, (start, n) in enumerate(zip(starts, counts, strict=True)):
            asked = scored[start : start + n]
            first = int(asked.argmax()) if n and asked.any() else n
            order = router.order(rows[start : start + n], first, goes_on=settings.remember)
            pieces = shares.setdefault(order, [])
            if not pieces or n > room[order]:
                pieces.append([])
                room[order] = limit
            pieces[-1].append(i)
            room[order] -= n
        return [
            self._part(order, piece, tokens, chosen, lengths, settings)
            for order, pieces in shares.items()
            for piece in pieces
        ]

    def _part(
        self,
        order: tuple[int, ...],
        members: list[int] | None,
        tokens: Tensor,
        mask: Tensor,
        lengths: Tensor,
        settings: Settings,
    ) -> Part:
        where = None
        if members is not None:
            pieces = torch.arange(tokens.shape[0]).split(lengths.tolist())
            where = torch.cat([pieces[i] for i in members])
            tokens, mask, lengths = tokens[where], mask[where], lengths[members]
        request = Request.of(
            tokens,
            lengths,
            mask,
            settings,
            version=self.model.version,
            caller=f"{client_name()}/{threading.get_ident()}",
        )
        return Part(order, request, mask, where)

    def forget(self) -> None:
        """What a service remembers is its own."""


def _joined(replies: Sequence[Reply], entropy: bool) -> Readings:
    def join(arrays: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)) if arrays else torch.zeros(0)

    log_prob = join([reply.log_prob for reply in replies])
    return Readings(
        log_prob, join([reply.entropy for reply in replies if reply.entropy is not None]) if entropy else None
    )
