"""Extras: capabilities beyond log-probs, one small object each, for transforms and losses.

An :class:`Extra` declares the options that it sets and has three hooks. ``fields`` fills the request from the data, ``specs``
declares entries, and ``outputs`` computes them. Users add their own by overriding these hooks in a subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, TypeVar, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import nn

from torchrl_llm_kl._numerics import check_choice, check_not_a_name, check_range
from torchrl_llm_kl._typing import ImageRows
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts import (
    Context,
    InContext,
    Located,
    MissingEntryError,
    ModelInterface,
    TokenisingOptions,
    describe_entries,
    find_key,
    find_result,
    in_context,
    per_token,
    read_images,
    read_kept,
    read_routing,
    response_mask,
    sub_key,
    top_k_entries,
    zeros_of_first_tokens,
)
from torchrl_llm_kl.scoring._options import Changes, ScoreOptions
from torchrl_llm_kl.scoring._protocol import Model
from torchrl_llm_kl.scoring._request import FIELDS, RequestFields, ScoreRequest
from torchrl_llm_kl.scoring._routing import Routers
from torchrl_llm_kl.scoring._scores import Scores
from torchrl_llm_kl.scoring._wrapper import check_distributions, is_wrapper, unwrap

R = TypeVar("R")
#: The models of a :class:`~torchrl_llm_kl.RetrieveKL` to which an extra applies.
Of = Literal["policy", "reference", "both"]


class EntrySpec(NamedTuple):
    """The shape, after the token dimension, and the dtype of an entry that is written for each token."""

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, eq=False)
class ScoringContext:
    """The settings of a transform or a loss that an extra may read.

    Attributes:
        model: the scored model. None for ``"from_collector"`` before a collector runs the env.
        options: the options of the score.
        interface: keys and tokenisation of the model.
        tokenising: how text becomes tokens.
        log_probs_key: the entry of the policy's log-probs.
        in_env: whether the transform is part of an env.
    """

    model: object
    options: ScoreOptions
    interface: ModelInterface
    tokenising: TokenisingOptions
    log_probs_key: NestedKey
    in_env: bool = False


@dataclass(frozen=True, eq=False)
class ScoredStep:
    """A step of the data that is scored.

    Attributes:
        context: the settings of the transform or the loss.
        td: the data of the step.
        next_td: its ``"next"``, or ``td`` itself without one.
        locate: finds the tokens of the step and the mask of those to score.
        images: the images of a conversation that the transform rendered.
    """

    context: ScoringContext
    td: TensorDictBase
    next_td: TensorDictBase
    locate: Callable[[], Located]
    images: ImageRows | None = None

    @cached_property
    def located(self) -> Located:
        """The tokens of the step, and the mask of those to score."""
        return self.locate()

    def first(self, read: Callable[[TensorDictBase], R | None]) -> R | None:
        """Read a record from ``next_td``, or from ``td`` if it is not there."""
        record = read(self.next_td)
        return read(self.td) if record is None and self.next_td is not self.td else record


class ScoringJob(NamedTuple):
    """The located tokens, with the prompt that they are scored after, and the request for their scores."""

    located: Located
    request: ScoreRequest

    def in_place(self, scores: Scores) -> Scores:
        """Move the scores to the tokens of the data. ``kept`` stays at the request's tokens."""
        located = self.located
        if not isinstance(located, InContext):
            return scores
        return Scores(**scores._asdict() | {name: located.back(x) for name, x in scores.per_token.items()})


class Extra:
    """A capability of a transform, see :class:`~torchrl_llm_kl.RetrieveLogProb`.

    Attributes:
        of: the model of a :class:`~torchrl_llm_kl.RetrieveKL` to which it applies.
        asks: the fields of :class:`~torchrl_llm_kl.scoring.ScoreOptions` that it sets.
        columns: maps each written entry to its field of :class:`~torchrl_llm_kl.Scores`.
        prompt: another prompt that the response is scored after.
        reference: another model for an exact KL.

    Example:
        >>> class Collision(Extra):
        ...     asks = {"moments": True}
        ...     columns = {"collision": "collision"}
        >>> list(Collision().columns)
        ['collision']
    """

    of: Of = "policy"
    asks: Changes = {}  # noqa: RUF012
    columns: Mapping[NestedKey, str] = {}
    prompt: Context | None = None
    reference: Model | None = None

    def fields(self, step: ScoredStep) -> RequestFields:
        """Read fields of the :class:`~torchrl_llm_kl.scoring.ScoreRequest` from the data, in the order of its tokens."""
        return {}

    def specs(self, context: ScoringContext) -> dict[NestedKey, EntrySpec]:
        """Declare the entries that are written, or raise an error if they cannot be."""
        return dict.fromkeys(self.columns, EntrySpec())

    def outputs(self, step: ScoredStep, scores: Scores) -> dict[NestedKey, Ragged | None]:
        """The entries to write. An entry of None is not written."""
        return {key: scores._asdict()[name] for key, name in self.columns.items()}


def check_extras(extras: Iterable[Extra]) -> tuple[Extra, ...]:
    """Return the extras as a tuple. Raises a ValueError if one kind occurs twice for a model."""
    checked = tuple(extras)
    for extra in checked:
        check_choice(get_args(Of), of=extra.of)
    kinds = [(type(extra), extra.of) for extra in checked]
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"extras has one kind twice: leave one out of {[kind.__name__ for kind, _ in kinds]}.")
    return checked


def with_defaults(extras: Iterable[Extra], defaults: Iterable[Extra]) -> tuple[Extra, ...]:
    """Add the defaults whose kinds are missing from the extras."""
    given = tuple(extras)
    return *given, *(extra for extra in defaults if type(extra) not in set(map(type, given)))


def asked_of(options: ScoreOptions, extras: Iterable[Extra]) -> ScoreOptions:
    """The options, with the changes that the extras need."""
    for extra in extras:
        options = options.but(**extra.asks)
    return options


def read_fields(extras: Iterable[Extra], step: ScoredStep) -> RequestFields:
    """Collect the fields of a request that the extras read from the data of a step."""
    given = RequestFields()
    for extra in extras:
        given |= extra.fields(step)
    return given


def fill(extras: Sequence[Extra], step: ScoredStep) -> ScoringJob:
    """Build the request for a step, with the fields that the extras read from its data."""
    located, given, records = step.located, read_fields(extras, step), False
    for extra in extras:
        records = records or bool(extra.asks.get("record_routing"))
        if extra.prompt is not None:
            context = step.context
            located = in_context(step.td, located, extra.prompt, context.interface, context.tokenising)
    if isinstance(located, InContext):
        if records:
            raise ValueError("AfterPrompt with RoutedExperts(record=True) would record the experts of another prompt.")
        # Records belong to the tokens of the data. Move the response's records after the new prompt.
        source, target = located.origin.mask, located.mask
        moved = {name: FIELDS[name].moved(name, value, source, target) for name, value in given.items()}
        given = RequestFields(**moved)  # type: ignore[typeddict-item]
    return ScoringJob(located, ScoreRequest.of(located.tokens, located.host_mask, **given))


# ------------------------------------------------------------------ other scores of each distribution


class _OfScores(Extra):
    """Writes fields of :class:`~torchrl_llm_kl.Scores`. One field goes to the entry ``key``, several go below it."""

    key: NestedKey
    scores: ClassVar[tuple[str, ...]]

    @property
    def columns(self) -> Mapping[NestedKey, str]:  # type: ignore[override]
        """The entries."""
        return {self.key if len(self.scores) == 1 else sub_key(self.key, name): name for name in self.scores}


@dataclass(frozen=True)
class Entropy(_OfScores):
    """Write the entropy of the distribution that each token was drawn from, as float32 nats ``[*B, T]``."""

    key: NestedKey = "entropy"
    asks: ClassVar[Changes] = {"entropy": True}  # type: ignore[misc]
    scores: ClassVar[tuple[str, ...]] = ("entropy",)


@dataclass(frozen=True)
class Moments(_OfScores):
    """Write ``"collision"`` and ``"discriminator"`` of each distribution below a key. See :class:`~torchrl_llm_kl.Scores`.

    They are inputs of the advantages ``optimal_token_baseline`` and ``clip_v``, and have no gradient.
    """

    key: NestedKey = "moments"
    asks: ClassVar[Changes] = {"moments": True}  # type: ignore[misc]
    scores: ClassVar[tuple[str, ...]] = ("collision", "discriminator")


@dataclass(frozen=True)
class TopK(Extra):
    """Write the most probable tokens at each scored token, as a teacher's distribution for distillation. No gradient.

    Args:
        k: the number of tokens.
        key: the parent of the entries: ``"ids"`` (int64) and ``"log_probs"``, both ``[*B, T, k]`` in descending order, and
            ``"rest_log_prob"`` ``[*B, T]``, the log of the total probability of all other tokens.
    """

    k: int
    key: NestedKey = "top_k"

    def __post_init__(self) -> None:
        check_range(1, k=self.k)

    @property
    def asks(self) -> Changes:  # type: ignore[override]
        """The option ``top_k``."""
        return {"top_k": self.k}

    @property
    def columns(self) -> Mapping[NestedKey, str]:  # type: ignore[override]
        """The entries of the ids, the log-probs and the rest."""
        return dict(zip(top_k_entries(self.key), ("top_indices", "top_log_probs", "tail_log_prob"), strict=True))

    def specs(self, context: ScoringContext) -> dict[NestedKey, EntrySpec]:
        """See :class:`Extra`."""
        kinds = EntrySpec((self.k,), torch.int64), EntrySpec((self.k,)), EntrySpec()
        return dict(zip(self.columns, kinds, strict=True))


@dataclass(frozen=True, eq=False)
class ExactKL(_OfScores):
    """Write the exact KL to another model over the whole vocabulary, as float32 nats ``[*B, T]``, from the same pass.

    Args:
        reference: a model with the same vocabulary, in this process.
        key: the entry of the KL.
    """

    reference: Model
    key: NestedKey = ("exact_kl", "full")
    scores: ClassVar[tuple[str, ...]] = ("kl",)

    def __post_init__(self) -> None:
        check_not_a_name(reference=self.reference)
        check_distributions(self.reference)


# ------------------------------------------------------------------ records of the sampler


@dataclass(frozen=True)
class KeptTokens(Extra):
    """Score over the tokens that the sampler kept, as it recorded them (:class:`~torchrl_llm_kl.RecordKept`).

    They are read if the data holds them and the ``sampling`` of the options drops tokens. Transforms have one of these by
    default, with the default key.

    Args:
        key: parent of the entries.
    """

    key: NestedKey = "kept"

    def fields(self, step: ScoredStep) -> RequestFields:
        """See :class:`Extra`."""
        if not step.context.options.sampling.truncates:
            return {}
        kept = step.first(lambda td: read_kept(td, self.key, step.located.tokens, step.located.mask))
        return {} if kept is None else {"kept": kept}


@dataclass(frozen=True)
class Images(Extra):
    """Score rows with their images, see ``docs/images.md``.

    They are read from the data, or from a conversation that the transform renders with a processor as its ``tokenizer``.
    Transforms have one of these by default, with the default key.

    Args:
        key: parent of the entries. Each row holds the processor's output for its images (``pixel_values``,
            ``image_grid_thw``, ...). A row without images lacks these entries.
    """

    key: NestedKey = "images"
    of: ClassVar[Of] = "both"  # type: ignore[misc]

    def fields(self, step: ScoredStep) -> RequestFields:
        """See :class:`Extra`."""
        stored = step.first(lambda td: read_images(td, self.key))
        images = step.images if stored is None else stored
        return {} if images is None else {"images": images}


@dataclass(frozen=True)
class RoutedExperts(Extra):
    """Replay or record the experts of a mixture of experts, see ``docs/routing.md``.

    Args:
        key: the entry with the experts that a sampler chose, integers ``[*B, T, L, k]`` for each layer with a router (or each
            layer) and slot. If the data holds it, the model uses these experts, with the weights of its own routers. With
            None the model routes by itself.
        record: write the experts that the model used to the entry, for later scores and losses. They are the replayed ones
            if the data holds the entry already, otherwise (and always in an env) the model's own choice.
        of: the model of a :class:`~torchrl_llm_kl.RetrieveKL` to which it applies.
    """

    key: NestedKey | None = "routed_experts"
    record: bool = False
    of: Of = "policy"

    def __post_init__(self) -> None:
        if self.record and self.key is None:
            raise ValueError("RoutedExperts(None, record=True) needs a place for the record: pass 'routed_experts'.")

    @property
    def asks(self) -> Changes:  # type: ignore[override]
        """The option ``record_routing``."""
        return {"record_routing": True} if self.record else {}

    @property
    def columns(self) -> Mapping[NestedKey, str]:  # type: ignore[override]
        """The entry of the record."""
        return {self.key: "routing"} if self.record and self.key is not None else {}

    def specs(self, context: ScoringContext) -> dict[NestedKey, EntrySpec]:
        """See :class:`Extra`."""
        if not self.record:
            return {}
        routers = _routers(context.model)
        return dict.fromkeys(self.columns, EntrySpec((len(routers.modules), routers.k), routers.dtype))

    def fields(self, step: ScoredStep) -> RequestFields:
        """See :class:`Extra`."""
        key = self.key
        if key is None or (self.record and step.context.in_env) or step.first(lambda td: find_result(td, key)) is None:
            return {}
        routing = step.first(lambda td: read_routing(td, key, step.located.tokens, step.located.mask))
        return {} if routing is None else {"routing": routing}


def _routers(model: object) -> Routers:
    """The routers whose choices are recorded, for the shape of the entry."""
    module = unwrap(model) if is_wrapper(model) else model
    if not isinstance(module, nn.Module):
        raise ValueError(f"RoutedExperts(record=True) needs a model in this process, got {type(model).__name__}.")
    return Routers.of(module)


@dataclass(frozen=True)
class SamplerLogProbs(Extra):
    """Move the sampler's log-probs to another entry, before the model's log-probs replace them.

    They are read under the transform's ``log_probs_full_key``, or the ``"response"`` next to it.
    :class:`~torchrl_llm_kl.PolicyLoss` reads the moved ones under the default key. They are NaN where the sampler returned
    none, and 0 at tokens that are not scored. Outside an env, data that already has the entry keeps it.
    """

    key: NestedKey = ("sampler_log_probs", "full")

    def specs(self, context: ScoringContext) -> dict[NestedKey, EntrySpec]:
        """See :class:`Extra`."""
        if self.key == context.log_probs_key:
            raise ValueError(f"SamplerLogProbs and log_probs_full_key are both {self.key!r}: give them different keys.")
        return {self.key: EntrySpec()}

    def outputs(self, step: ScoredStep, scores: Scores) -> dict[NestedKey, Ragged | None]:
        """See :class:`Extra`."""
        td, context = step.td, step.context
        if not context.in_env and find_key(td, self.key) is not None:
            return {}
        stored = _stored_by_sampler(td, context.log_probs_key)
        if stored is None:
            raise MissingEntryError(
                f"SamplerLogProbs({self.key!r}) moves the sampler's log-probs: expected them under "
                f"{context.log_probs_key!r}, found: {describe_entries(td)}. Collect with return_log_probs=True, or leave "
                "SamplerLogProbs out."
            )
        tokens, mask = step.located.tokens, step.located.mask
        responses = response_mask(td, tokens, context.interface)
        values = per_token(td, stored, tokens, responses, repeats=False).detach().float()
        values = values.masked_fill(zeros_of_first_tokens(values, mask, tokens), torch.nan)
        return {self.key: tokens.like(torch.where(mask, values, 0))}


def _stored_by_sampler(td: TensorDictBase, key: NestedKey) -> NestedKey | None:
    """The entry of the sampler's log-probs. Prefers the response's entry, which no transform overwrites."""
    names: list[NestedKey] = [key] if isinstance(key, str) else [(*key[:-1], "response"), key]
    places = {name: find_key(td, name) for name in names}
    here = [name for name, place in places.items() if place == name]
    return next(iter([*here, *(place for place in places.values() if place is not None)]), None)


@dataclass(frozen=True)
class PolicyVersions(Extra):
    """Score each token under the weights that sampled it, by a :class:`~torchrl_llm_kl.scoring.VersionedScorer` as the model.

    Args:
        key: the entry of the versions, integers ``[*B]`` or ``[*B, 1]`` for rows (as torchrl's collectors store them with
            ``track_policy_version=True``), or ``[*B, T]`` for tokens. -1 for the present weights.
    """

    key: NestedKey = "policy_version"

    def fields(self, step: ScoredStep) -> RequestFields:
        """See :class:`Extra`."""
        tokens = step.located.tokens
        versions = step.first(
            lambda td: None if find_key(td, self.key) is None else per_token(td, self.key, tokens, None)
        )
        if versions is None:
            raise MissingEntryError(
                f"PolicyVersions({self.key!r}) reads the version of each row: expected it, found: {describe_entries(step.td)}. "
                "Collect with track_policy_version=True, or leave PolicyVersions out."
            )
        return {"versions": versions.long()}


# ------------------------------------------------------------------ another prompt, another adapter, other keys


@dataclass(frozen=True)
class AfterPrompt(Extra):
    """Score the response after another prompt, which replaces everything before the assistant's first token.

    Args:
        prompt: a function of the conversation (``History -> History``, or ``(History, row) -> History`` to read other entries
            of the row), or the entry with the ids of the prompts. See :func:`~torchrl_llm_kl.rollouts.in_context`. Written
            entries keep the shape and the mask of the data.
        of: the model of a :class:`~torchrl_llm_kl.RetrieveKL` to which it applies. For instance the reference sees a prompt
            with the solution, or the policy does not see a prompt that it was sampled with.
    """

    prompt: Context
    of: Of = "policy"


@dataclass(frozen=True)
class Adapters(Extra):
    """Score one model of a :class:`~torchrl_llm_kl.RetrieveKL` with its own setting of ``adapters``.

    ``RetrieveKL(policy, "base", extras=[Adapters("ref", of="reference")])`` compares the policy's active adapter with its
    adapter ``"ref"``.
    """

    adapters: bool | str
    of: Of = "reference"

    @property
    def asks(self) -> Changes:  # type: ignore[override]
        """The option ``adapters``."""
        return {"adapters": self.adapters}
