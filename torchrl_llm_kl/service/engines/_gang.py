""":class:`GangEngine`: one replica's model over several processes, which start and end together."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.scoring import DEFAULT_MEMORY, ScoreOptions, Scorer, ScoreRequest, Scores
from torchrl_llm_kl.service._errors import EngineLost, ServiceTimeout
from torchrl_llm_kl.service._messages import ANSWERED
from torchrl_llm_kl.service.engines._rank import Columns, GangRank, Shard

_LOG = logging.getLogger("torchrl_llm_kl.service")
_TICK = 1.0  # seconds between two looks at the progress of the ranks


class GangEngine:
    """An engine for a model that is sharded over several Ray actors, the ranks of one ``torch.distributed`` group.

    Pass it as the factory of a service: each replica then creates its own ranks in a placement group, and ends with
    them. If one rank dies or hangs, the replica exits, and Ray starts the replica with all its ranks again.

    Args:
        factory: returns the model, on every rank; the process group exists when it is called.

    Keyword Args:
        ranks: number of processes.
        shard: ``"fsdp2"`` shards each layer (``fully_shard``). ``"tp"`` applies
            the tensor parallel plan of transformers, ``"none"`` nothing (the factory may have sharded the model). Or a
            function of the model and the mesh ``[ranks]`` that returns the sharded model. Each rank scores a part of the
            sequences if FSDP shards the model, or nothing does; else all ranks score all of them.
        num_cpus: per rank, as are ``num_gpus`` and ``resources``; the service's own are for the replica's process, which
            only passes requests on: give it few.
        strategy: of the placement group; ``"STRICT_PACK"`` keeps all ranks on one node.
        backend: of the process group; by default ``"nccl"`` with GPUs, else ``"gloo"``.
        start_timeout: seconds until all ranks are placed and have loaded the model.
        timeout: seconds without progress of any rank until a call counts as hung.
        tokens_per_batch: per forward of a rank; see :class:`~torchrl_llm_kl.LogProbScorer`.
        memory: bytes of keys and values that each rank caches for continued conversations.

    Raises:
        ServiceTimeout: if the cluster has no room for the ranks within ``start_timeout``.
        EngineLost: if a rank dies, or hangs for ``timeout`` seconds.
        Exception: the error of the factory.

    Example:
        >>> gang = partial(GangEngine, load, ranks=8, shard="fsdp2", num_gpus=1)  # doctest: +SKIP
        >>> service = ScoringService(factory=gang, name="reference", num_cpus=0.1)  # doctest: +SKIP
    """

    offers = ANSWERED - {"images"}
    place = "a gang of ranks"
    instead = Scorer.instead

    def __init__(
        self,
        factory: Callable[[], Any],
        *,
        ranks: int,
        shard: Shard = "fsdp2",
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        strategy: str = "STRICT_PACK",
        backend: str | None = None,
        start_timeout: float = 600.0,
        timeout: float = 300.0,
        tokens_per_batch: int | None = None,
        memory: int = DEFAULT_MEMORY,
    ) -> None:
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise ValueError(f"ranks must be a whole number of at least 1, got {ranks!r}.")
        if not callable(shard) and shard not in ("fsdp2", "tp", "none"):
            raise ValueError(f"shard must be 'fsdp2', 'tp', 'none' or a function, got {shard!r}.")
        self._timeout = timeout
        self._progress: list[int] = [0] * ranks
        self._polls: dict[int, Any] = {}
        self._ranks: list[Any] = []
        self._lives: list[Any] = []
        self._group: Any = None
        self._lost: EngineLost | None = None
        self._is_closed = False  # by its user, who needs no other gang
        self._lock, self._turn = threading.Lock(), threading.Lock()
        try:
            options = {"num_cpus": num_cpus, "num_gpus": num_gpus, "resources": dict(resources or {})}
            self._place(ranks, options, strategy, start_timeout)
            backend = backend or ("nccl" if num_gpus else "gloo")
            # The store lives in this process, on a free port, so that it ends with the gang.
            address = ray.util.get_node_ip_address()
            self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
            settings = {"tokens_per_batch": tokens_per_batch, "memory": memory}
            where = (address, self._store.port)
            start = (ray.put(factory), shard, where, backend, max(start_timeout, timeout), settings)
            made = self._ask("start", [start] * ranks, limit=start_timeout)
        except BaseException:
            self.close()
            raise
        self._interface: tuple[ModelInterface, bool] = made[0][0]
        self._tensors: list[list[str]] = made[0][2]
        self._split = all(may for _, may, _ in made)

    def _place(self, ranks: int, options: Mapping[str, Any], strategy: str, timeout: float) -> None:
        """Place the ranks. The group and the ranks end with this process, which owns them."""
        bundle = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **options["resources"]}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        self._group = ray.util.placement_group([bundle or {"CPU": 0.001}] * ranks, strategy=strategy)
        if not self._group.wait(timeout):
            raise ServiceTimeout(
                f"{ranks} ranks with {bundle} each ({strategy}) have no room, for {timeout:g} s; the cluster has "
                f"{ray.available_resources()} free. Add nodes, ask for less, or raise start_timeout=."
            )
        make_remote: Any = ray.remote
        remote = make_remote(concurrency_groups=GangRank.GROUPS)(GangRank)
        for rank in range(ranks):
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
            self._ranks.append(remote.options(scheduling_strategy=where, **options).remote(rank, ranks))
        self._lives = [rank.life.remote() for rank in self._ranks]

    # ------------------------------------------------------------------ scores

    def run(self, request: ScoreRequest, options: ScoreOptions) -> Scores:
        """See :class:`Engine`; as one process computes them."""
        ranks = len(self._ranks)
        try:
            return self._run(request, options, split(request, ranks if self._split else 1))
        except ValueError:
            if not self._split or ranks == 1:
                raise
        # The message of a rank counts the sequences of its share: let one rank score them all.
        return self._run(request, options, [request, *[None] * (ranks - 1)])

    def _run(self, request: ScoreRequest, options: ScoreOptions, shares: Sequence[ScoreRequest | None]) -> Scores:
        """The scores of a share for each rank, or of one that all of them score."""
        first = request.select(torch.zeros(1, dtype=torch.long))
        nothing = replace(first, mask=torch.zeros_like(first.mask))  # the rank takes part in the others' collectives
        each = [nothing if share is None else share for share in shares]
        sent = [ray.put(each[0])] * len(self._ranks) if len(shares) == 1 else each
        answers: list[Columns] = self._ask("run", [(share, options) for share in sent])[: len(shares)]
        parts = [answer for answer, share in zip(answers, shares, strict=True) if share is not None]
        columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return Scores.spread(request.layout, request.mask.nonzero().squeeze(-1), **columns)

    def progress(self) -> int:
        """Sum of the ranks' progress, as of the last second of a call."""
        return sum(self._progress)

    def interface(self) -> tuple[ModelInterface, bool]:
        """Keys and tokenizer of the model, for clients that tokenise; and whether it is a TorchRL wrapper."""
        return self._interface

    # ------------------------------------------------------------------ weights

    def check_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights under the model's own names; an error if one does not fit it. Every rank checks, to stay in step."""
        names: dict[str, str] = self._ask("check_weights", [(ray.put(dict(weights)),)] * len(self._ranks))[0]
        return {own: weights[given] for given, own in names.items()}

    def update_weights(self, weights: Mapping[str, Tensor], *, checked: bool = False) -> None:
        """Copy whole weights into the shards: one copy in the object store, of which each rank takes its own.

        The ranks check them again, since their names in the shards are found there.
        """
        self._ask("update_weights", [(ray.put(dict(weights)),)] * len(self._ranks))

    def tensors(self) -> list[list[str]]:
        """Names of each tensor of the whole model, several for a tied one; empty without weights in the ranks."""
        return self._tensors

    # ------------------------------------------------------------------ ranks

    def _ask(self, method: str, arguments: Sequence[tuple[Any, ...]], *, limit: float | None = None) -> list[Any]:
        """Call a method of all ranks, each with its arguments; their answers, or the error of one of them.

        Raises :class:`EngineLost` if a rank dies, if no rank makes progress for ``timeout`` seconds (or the call takes
        ``limit``), or if the ranks are out of step after an error.
        """
        with self._turn:  # two calls at once would reach the ranks in different orders
            answers = self._wait_for(method, arguments, limit)
            errors = [answer for answer in answers if isinstance(answer, Exception)]
            if not errors:
                return answers
            if method != "start":
                apart = [x for x in self._wait_for("in_step", [()] * len(self._ranks), None) if x is not None]
                if apart or (method == "update_weights" and len(errors) < len(answers)):
                    raise self._lose(
                        f"its ranks are out of step after {errors[0]!r}: {(apart or ['weights differ'])[0]}"
                    )
        # Another rank's error is on all ranks: raise the original.
        raise next((error for error in errors if type(error).__name__ != "RankError"), errors[0])

    def _wait_for(self, method: str, arguments: Sequence[tuple[Any, ...]], limit: float | None) -> list[Any]:
        if self._lost is not None:
            raise self._lost.with_traceback(None)
        answers: list[Any] = [None] * len(arguments)
        waiting: dict[Any, int] = {}
        start = moved = time.monotonic()
        for i, (rank, args) in enumerate(zip(self._ranks, arguments, strict=True)):
            waiting[getattr(rank, method).remote(*args)] = i
        while waiting:
            ready, _ = ray.wait([*waiting, *self._lives], num_returns=1, timeout=_TICK)
            for reference in ready:
                try:
                    answer = ray.get(reference)
                except ray.exceptions.RayError as error:
                    rank = waiting[reference] if reference in waiting else self._lives.index(reference)
                    raise self._lose(f"rank {rank} died: {error}") from error
                if limit is not None and isinstance(answer, Exception):
                    return [answer]  # a rank that cannot start: the others would wait for it
                answers[waiting.pop(reference)] = answer
            if ready or self._poll():
                moved = time.monotonic()
            if limit is not None and time.monotonic() - start > limit:
                raise self._lose(f"ranks {sorted(waiting.values())} did not answer {method}() within {limit:g} s.")
            if limit is None and time.monotonic() - moved > self._timeout:
                raise self._lose(f"ranks {sorted(waiting.values())} made no progress for {self._timeout:g} s.")
        return answers

    def _poll(self) -> bool:
        """Read progress that has arrived, and request it again; whether any rank made some."""
        before = self.progress()
        for i, rank in enumerate(self._ranks):
            if i in self._polls:
                if not ray.wait([self._polls[i]], timeout=0)[0]:
                    continue
                with contextlib.suppress(ray.exceptions.RayError):  # the next wait finds the dead rank
                    self._progress[i] = ray.get(self._polls[i])
            self._polls[i] = rank.progress.remote()
        return self.progress() != before

    def when_lost(self, end: Callable[[EngineLost], None]) -> None:
        """Call ``end`` in a thread when a rank dies, also while no call waits for it."""

        def watch() -> None:
            lives = list(self._lives)
            ended, _ = ray.wait(lives, num_returns=1)
            if not self._is_closed:
                end(self._lose(f"rank {lives.index(ended[0])} died."))

        threading.Thread(target=watch, name="gang", daemon=True).start()

    def _lose(self, why: str) -> EngineLost:
        self._lost = self._lost or EngineLost(f"the gang of {len(self._progress)} ranks is lost: {why}")
        self._free()
        return self._lost

    def close(self) -> None:
        """End all ranks and free their resources."""
        self._is_closed = True
        self._lost = self._lost or EngineLost("the gang was closed.")
        self._free()

    def _free(self) -> None:
        with self._lock:
            ranks, group = self._ranks, self._group
            self._ranks, self._group = [], None
        with contextlib.suppress(Exception):  # the cluster may be gone
            for rank in ranks:
                ray.kill(rank, no_restart=True)
            if group is not None:
                ray.util.remove_placement_group(group)


def split(request: ScoreRequest, ranks: int) -> list[ScoreRequest | None]:
    """One share for each rank: neighbouring sequences, with about equally many tokens; None for a rank without any.

    Answers to one prompt are neighbours, so that most of them share its forward.
    """
    if ranks == 1:
        return [request]
    ends, total = request.tokens.offsets[1:], max(request.tokens.values.shape[0], 1)
    owners = ((ends - request.tokens.lengths / 2) * ranks / total).long().clamp(0, ranks - 1)
    rows = [(owners == rank).nonzero().squeeze(-1) for rank in range(ranks)]
    return [request.select(some) if len(some) else None for some in rows]
