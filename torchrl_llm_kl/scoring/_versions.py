"""The last versions of a model's weights, and a scorer that scores each token under the version that sampled it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.scoring._model import locked
from torchrl_llm_kl.scoring._options import ScoreOptions
from torchrl_llm_kl.scoring._protocol import Scorer
from torchrl_llm_kl.scoring._request import ScoreRequest
from torchrl_llm_kl.scoring._scorer import LogProbScorer
from torchrl_llm_kl.scoring._scores import Scores


class VersionLostError(ValueError):
    """A request names a version of the weights that is not held."""


class _Change(NamedTuple):
    """The former values of a weight, at the places that an update changed. Without ``places`` these are all values."""

    values: Tensor
    places: Tensor | None = None

    @classmethod
    def between(cls, old: Tensor, new: Tensor) -> Self | None:
        """The smaller form of ``old`` as a change of ``new``. None if both are equal."""
        places = (old != new).flatten().nonzero().squeeze(-1)
        if not len(places):
            return None
        if old.numel() < 2**31:
            places = places.int()  # half the memory
        if len(places) * (places.itemsize + old.itemsize) >= old.numel() * old.itemsize:
            return cls(old)
        return cls(old.flatten()[places.long()], places)

    def undo(self, new: Tensor) -> Tensor:
        """The former values of the whole weight."""
        if self.places is None:
            return self.values
        return new.flatten().index_copy(0, self.places.long(), self.values).view_as(new)

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.itemsize for x in self if x is not None)


class WeightHistory:
    """The last versions of a model's trained weights, lossless.

    The newest version is a copy. Each older one holds only the values that the next update changed: all values of a weight, or
    those at some places if that is smaller. So frozen weights take no memory, and neither do bfloat16 weights that were too
    large for an update to change.

    Args:
        model: the model. Its trained parameters are recorded, or all weights if none is trained.

    Keyword Args:
        keep: the number of versions to keep, at least 1.
        frozen: record the weights that are not trained too, because somebody else may change them.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> history = WeightHistory(layer, keep=2)
        >>> for version in range(3):
        ...     _ = layer.weight.data.fill_(version)
        ...     history.record(version)
        >>> history.versions, history.at(1)["weight"].tolist()
        ([1, 2], [[1.0, 1.0]])
    """

    def __init__(self, model: nn.Module, *, keep: int, frozen: bool = False) -> None:
        check_range(1, keep=keep)
        self.model, self.keep, self.frozen = model, keep, frozen
        self._newest: dict[str, Tensor] = {}
        self._before: dict[int, dict[str, _Change]] = {}  # version -> its differences to the next version
        self._last: int | None = None

    @property
    def versions(self) -> list[int]:
        """The versions that are held, in ascending order."""
        return [*self._before, *([] if self._last is None else [self._last])]

    @property
    def num_bytes(self) -> int:
        """The memory of all versions."""
        changes = sum(change.num_bytes for each in self._before.values() for change in each.values())
        return changes + sum(x.numel() * x.itemsize for x in self._newest.values())

    def _tensors(self) -> dict[str, Tensor]:
        """The recorded tensors of the model by one name each. Those of the first version are recorded ever after."""
        named = self.model.state_dict(keep_vars=True).items()
        every = dict({id(x): (name, x) for name, x in named if isinstance(x, Tensor)}.values())  # tied: several names
        trained = {} if self.frozen else {name: x for name, x in every.items() if x.requires_grad}
        if not self._newest:
            return trained or every
        if new := trained.keys() - self._newest.keys():
            raise ValueError(
                f"{min(new)} is trained now, and was not at the first version: use WeightHistory(model, frozen=True)."
            )
        return {name: every[name] for name in self._newest}

    @torch.no_grad()
    def record(self, version: int) -> None:
        """Record the model's present weights as ``version``, which must be greater than all earlier ones.

        Raises:
            ValueError: if it is not greater.
        """
        if self._last is not None and version <= self._last:
            raise ValueError(f"version {version} comes after version {self._last}: versions must increase.")
        with locked(self.model):
            tensors = self._tensors()
            if self._last is not None:
                changes = self._before[self._last] = {}
                for name, old in self._newest.items():
                    new = tensors[name].detach()
                    change = _Change.between(old, new)
                    if change is not None:
                        changes[name], self._newest[name] = change, new.clone()
            else:
                self._newest = {name: x.detach().clone() for name, x in tensors.items()}
        self._last = version
        # The oldest versions go first, so the differences that lead to the kept ones stay.
        for old_version in self.versions[: -self.keep]:
            del self._before[old_version]

    def at(self, version: int) -> Mapping[str, Tensor]:
        """The weights of a version by name.

        Raises:
            VersionLostError: if the version is not held.
        """
        if version not in self.versions:
            raise VersionLostError(
                f"version {version} of the weights is not held, only {self.versions}. Record each version that samples, raise "
                "keep=, or leave out older rows (drop_stale)."
            )
        # From the newest version back, one update at a time.
        weights = dict(self._newest)
        for each in sorted(self._before, reverse=True):
            if each >= version:
                weights |= {name: change.undo(weights[name]) for name, change in self._before[each].items()}
        return weights

    @contextmanager
    def installed(self, version: int) -> Iterator[None]:
        """Give the model the weights of a version inside the context, which must not change them.

        No other thread may use the model meanwhile.
        """
        with locked(self.model):
            weights, tensors = self.at(version), self._tensors()
            current = {name: tensors[name].data for name in weights}
            try:
                for name, value in weights.items():
                    tensors[name].data = value  # the storage is swapped, so the values of a graph stay as they are
                yield
            finally:
                for name, value in current.items():
                    tensors[name].data = value


def score_versions(history: WeightHistory, request: ScoreRequest, run: Callable[[ScoreRequest], Scores]) -> Scores:
    """Score each token of a request under its version. ``run`` scores a request with the weights that the model has then."""
    assert request.versions is not None
    scores: Scores | None = None
    for version in request.versions[request.mask].unique().tolist():
        # Rows without a token of this version have nothing to score, and are not forwarded.
        part = replace(request, mask=request.mask & (request.versions == version), versions=None)
        with nullcontext() if version < 0 else history.installed(version):
            own = run(part)
        if scores is not None:  # every score is 0 at the tokens of other versions
            others = scores.per_token
            joined: dict[str, Any] = {name: x.like(x.values + others[name].values) for name, x in own.per_token.items()}
            own = own._replace(**joined)
        scores = own
    return run(replace(request, versions=None)) if scores is None else scores


class VersionedScorer(LogProbScorer):
    """A scorer that keeps the last versions of the weights, and scores each token under the version that sampled it.

    Call :meth:`record` whenever the weights change. A request names a version for each token (``versions``). A sequence that
    was sampled across an update has several versions, and is forwarded once for each of them. Tokens without a version (-1),
    and requests without versions, are scored with the present weights.

    It may take the place of a model in a transform: ``RetrieveLogProb(scorer, extras=[PolicyVersions()])`` writes the log-probs
    of the weights that sampled.

    Args:
        model: as in :class:`LogProbScorer`. It must be in this process, and not compiled into graphs of fixed memory.
        options: how to score.

    Keyword Args:
        keep: the number of versions to keep.
        settings: as in :class:`LogProbScorer`.

    Attributes:
        history: the :class:`WeightHistory`.

    Example:
        >>> class Biased(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.bias = nn.Parameter(torch.zeros(2))
        ...     def forward(self, input_ids):
        ...         return (self.bias.expand(*input_ids.shape, 2),)
        >>> model = Biased()
        >>> scorer = VersionedScorer(model, keep=4)  # warns: no separate body and head
        >>> scorer.record(0)
        >>> _ = model.bias.data.copy_(torch.tensor([0.0, 1.0]))
        >>> scorer.record(1)
        >>> scorer.score(ScoreRequest.of([[0, 1, 1]], versions=torch.tensor([0, 0, 1]))).values
        tensor([ 0.0000, -0.6931, -0.3133])

    Source: the snapshots of Guan et al. 2026 (arXiv 2605.12070), here for each token.
    """

    __slots__ = ("history",)

    def __init__(
        self,
        model: nn.Module,
        options: ScoreOptions | None = None,
        *,
        keep: int = 8,
        **settings: Any,
    ) -> None:
        super().__init__(model, options, **settings)
        if self.path == "wrapper":
            raise ValueError(
                f"{type(model).__name__} has its weights in another backend: score the transformers model."
            )
        if self._ranks(None).groups:
            raise ValueError(f"{type(self.model).__name__} is sharded over ranks: its versions cannot be recorded.")
        self.history = WeightHistory(self.model, keep=keep)
        self.offers |= {"versions"}

    def record(self, version: int) -> None:
        """Record the present weights, see :meth:`WeightHistory.record`."""
        self.history.record(version)

    def make_scorer(self, *, options: ScoreOptions) -> VersionedScorer:
        """A scorer with the same versions, for a transform or a loss with these options.

        Raises:
            ValueError: if this scorer has other options, which would be lost.
        """
        if self.options not in (ScoreOptions(), options):
            raise ValueError(
                "this VersionedScorer has options of its own: set them on the transform instead (options=)."
            )
        settings = {name: getattr(self, name) for name in ("tokens_per_batch", "head_chunk", "share_prefixes", "probe")}
        made = VersionedScorer(self.model, options, **settings)
        made.history = self.history
        return made

    def run(
        self, request: ScoreRequest, options: ScoreOptions | None = None, *, reference: Scorer | None = None
    ) -> Scores:
        """See :meth:`Scorer.run`.

        Raises:
            VersionLostError: if a version is not held.
            ValueError: if a request with versions asks for a gradient, a reference, or a record of kept tokens or experts.
        """
        options = options or self.options
        if request.versions is None:
            return super().run(request, options, reference=reference)
        if options.grad or options.return_kept or options.record_routing or reference is not None:
            raise ValueError("versions= is for log-probs without gradient: leave out grad, reference and records.")
        options = options.but(remember=False)  # keys and values belong to one version
        return score_versions(self.history, request, lambda part: super(VersionedScorer, self).run(part, options))
