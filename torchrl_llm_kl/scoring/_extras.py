"""What is scored, read and written beyond log-probs: one small object for each capability, for transforms and losses.

An :class:`Extra` declares the options that it sets and has three hooks: ``fields`` fills the request from the data, ``specs``
declares entries, ``outputs`` computes them. A user's own is a subclass that overrides what applies.
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
    check_context,
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
#: Which models of a :class:`~torchrl_llm_kl.RetrieveKL`.
Of = Literal["policy", "reference", "both"]


class EntrySpec(NamedTuple):
    """An entry that is written for each token: its shape after the token dimension, and its dtype."""

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, eq=False)
class ScoringContext:
    """The settings of a transform or a loss that an extra may read.

    Attributes:
        model: what is scored; None while no collector runs the env whose policy it is.
        options: how it is scored.
        interface: keys and tokenisation of the model.
        tokenising: how text becomes tokens.
        log_probs_key: where the policy's log-probs are.
        in_env: whether an env holds the transform.
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
        td: the step.
        next_td: its result; the same data, if it has no ``"next"``.
        locate: finds the tokens of the step and which of them are scored.
        images: of a conversation that was rendered.
    """

    context: ScoringContext
    td: TensorDictBase
    next_td: TensorDictBase
    locate: Callable[[], Located]
    images: ImageRows | None = None

    @cached_property
    def located(self) -> Located:
        """The tokens of the step, and which of them are scored."""
        return self.locate()

    def first(self, read: Callable[[TensorDictBase], R | None]) -> R | None:
        """The record that a function reads from the result, else from the step."""
        record = read(self.next_td)
        return read(self.td) if record is None and self.next_td is not self.td else record


class ScoringJob(NamedTuple):
    """The tokens that are scored, after another prompt if there is one, and the request for their scores."""

    located: Located
    request: ScoreRequest

    def in_place(self, scores: Scores) -> Scores:
        """The scores at the tokens of the data; ``kept`` stays at the request's tokens."""
        located = self.located
        if not isinstance(located, InContext):
            return scores
        return Scores(**scores._asdict() | {name: located.back(x) for name, x in scores.per_token.items()})


class Extra:
    """A capability of a transform; see :class:`~torchrl_llm_kl.RetrieveLogProb`.

    Attributes:
        of: the model of a :class:`~torchrl_llm_kl.RetrieveKL` that it is for.
        asks: fields of :class:`~torchrl_llm_kl.scoring.ScoreOptions` that it sets.
        columns: entry -> the field of :class:`~torchrl_llm_kl.Scores` that is written there.
        prompt: another prompt to score the response after.
        reference: another model, to compute the exact KL to.

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
        """Fields of the :class:`~torchrl_llm_kl.scoring.ScoreRequest`, in the order of the tokens of the data."""
        return {}

    def specs(self, context: ScoringContext) -> dict[NestedKey, EntrySpec]:
        """The entries that are written; an error if this cannot be done."""
        return dict.fromkeys(self.columns, EntrySpec())

    def outputs(self, step: ScoredStep, scores: Scores) -> dict[NestedKey, Ragged | None]:
        """The entries to write; None writes nothing."""
        return {key: scores._asdict()[name] for key, name in self.columns.items()}


def check_extras(extras: Iterable[Extra]) -> tuple[Extra, ...]:
    """Extras as a tuple; an error for another object, or if a kind comes twice for one model."""
    checked = tuple(extras)
    for extra in checked:
        check_choice(get_args(Of), of=extra.of)
    kinds = [(type(extra), extra.of) for extra in checked]
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"extras has one kind twice: leave one out of {[kind.__name__ for kind, _ in kinds]}.")
    return checked


def with_defaults(extras: Iterable[Extra], defaults: Iterable[Extra]) -> tuple[Extra, ...]:
    """The extras, and those of the defaults of whose kind there is none."""
    given = tuple(extras)
    return *given, *(extra for extra in defaults if type(extra) not in set(map(type, given)))


def asked_of(options: ScoreOptions, extras: Iterable[Extra]) -> ScoreOptions:
    """The options with the changes that the extras ask for."""
    for extra in extras:
        options = options.but(**extra.asks)
    return options


def read_fields(extras: Iterable[Extra], step: ScoredStep) -> RequestFields:
    """The fields of a request that the extras read from the data of a step."""
    given = RequestFields()
    for extra in extras:
        given |= extra.fields(step)
    return given


def fill(extras: Sequence[Extra], step: ScoredStep) -> ScoringJob:
    """The request for a step, with the fields that the extras read from its data."""
    located, given, records = step.located, read_fields(extras, step), False
    for extra in extras:
        records = records or bool(extra.asks.get("record_routing"))
        if extra.prompt is not None:
            context = step.context
            located = in_context(step.td, located, extra.prompt, context.interface, context.tokenising)
    if isinstance(located, InContext):
        if records:
            raise ValueError("AfterPrompt with RoutedExperts(record=True) would record the experts of another prompt.")
        source, target = located.origin.mask, located.mask
        moved = {name: FIELDS[name].moved(name, value, source, target) for name, value in given.items()}
        given = RequestFields(**moved)  # type: ignore[typeddict-item]
    return ScoringJob(located, ScoreRequest.of(located.tokens, located.host_mask, **given))


# ------------------------------------------------------------------ more of each distribution


class _OfScores(Extra):
    """Writes fields of :class:`~torchrl_llm_kl.Scores`: one to the entry ``key``, several below it."""

    key: NestedKey
    scores: ClassVar[tuple[str, ...]]

    @property
    def columns(self) -> Mapping[NestedKey, str]:  # type: ignore[override]
        """The entries."""
        return {self.key if len(self.scores) == 1 else sub_key(self.key, name): name for name in self.scores}


@dataclass(frozen=True)
class Entropy(_OfScores):
    """Write the entropy of the distribution that each token was drawn from; float32 nats ``[*B, T]``."""

    key: NestedKey = "entropy"
    asks: ClassVar[Changes] = {"entropy": True}  # type: ignore[misc]
    scores: ClassVar[tuple[str, ...]] = ("entropy",)


@dataclass(frozen=True)
class Moments(_OfScores):
    """Write ``"collision"`` and ``"discriminator"`` of each distribution below a key; see :class:`~torchrl_llm_kl.Scores`.

    Inputs of the advantages ``optimal_token_baseline`` and ``clip_v``; without gradient.
    """

    key: NestedKey = "moments"
    asks: ClassVar[Changes] = {"moments": True}  # type: ignore[misc]
    scores: ClassVar[tuple[str, ...]] = ("collision", "discriminator")


@dataclass(frozen=True)
class TopK(Extra):
    """Write the most probable tokens at each scored token: a teacher's distribution for distillation. Without gradient.

    Args:
        k: how many.
        key: below which key they go: ``"ids"`` (int64) and ``"log_probs"`` ``[*B, T, k]``, in descending order, and
            ``"rest_log_prob"`` ``[*B, T]``, the log of the total probability of all other tokens.
    """

    k: int
    key: NestedKey = "top_k"

    def __post_init__(self) -> None:
        check_range(1, k=self.k)

    @property
    def asks(self) -> Changes:  # type: ignore[override]
        """The top k."""
        return {"top_k": self.k}

    @property
    def columns(self) -> Mapping[NestedKey, str]:  # type: ignore[override]
        """Ids, log-probs and the rest."""
        return dict(zip(top_k_entries(self.key), ("top_indices", "top_log_probs", "tail_log_prob"), strict=True))

    def specs(self, context: ScoringContext) -> dict[NestedKey, EntrySpec]:
        """See :class:`Extra`."""
        kinds = EntrySpec((self.k,), torch.int64), EntrySpec((self.k,)), EntrySpec()
        return dict(zip(self.columns, kinds, strict=True))


@dataclass(frozen=True, eq=False)
class ExactKL(_OfScores):
    """Write the exact KL to another model over the whole vocabulary, from the same pass; float32 nats ``[*B, T]``.

    Args:
        reference: a model with the same vocabulary, in this process.
        key: where it goes.
    """

    reference: Model
    key: NestedKey = ("exact_kl", "full")
    scores: ClassVar[tuple[str, ...]] = ("kl",)

    def __post_init__(self) -> None:
        check_not_a_name(reference=self.reference)
        check_distributions(self.reference)


# ------------------------------------------------------------------ what was recorded at sampling time


@dataclass(frozen=True)
class KeptTokens(Extra):
    """Score over the tokens that the sampler kept, as it recorded them (:class:`~torchrl_llm_kl.RecordKept`).

    Read where the data holds them and the ``sampling`` of the options leaves tokens out: transforms have one of these with the
    default key then.

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
    """Score rows with their images; see ``docs/images.md``.

    Read where the data holds them, or from a conversation that the transform renders with a processor as its ``tokenizer``:
    transforms have one of these with the default key.

    Args:
        key: parent of the entries, for each row what the processor returned for its images (``pixel_values``,
            ``image_grid_thw``, ...); a row without images lacks them.
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
    """Replay, or record, the experts of a mixture of experts; see ``docs/routing.md``.

    Args:
        key: the entry with the experts that a sampler chose: integers ``[*B, T, L, k]`` for each layer with a router (or each
            layer) and slot. Where the data holds it, the model uses these experts, with its own routers' weights. None: the
            model routes by itself.
        record: write the experts that the model used to the entry, for later scores and losses: the entry's if the
            data holds it already, else its own (in an env always its own).
        of: the model of a :class:`~torchrl_llm_kl.RetrieveKL`.
    """

    key: NestedKey | None = "routed_experts"
    record: bool = False
    of: Of = "policy"

    def __post_init__(self) -> None:
        if self.record and self.key is None:
            raise ValueError("RoutedExperts(None, record=True) needs a place for the record: pass 'routed_experts'.")

    @property
    def asks(self) -> Changes:  # type: ignore[override]
        """The record."""
        return {"record_routing": True} if self.record else {}

    @property
    def columns(self) -> Mapping[NestedKey, str]:  # type: ignore[override]
        """The record."""
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
    """The routers whose choices are recorded."""
    module = unwrap(model) if is_wrapper(model) else model
    if not isinstance(module, nn.Module):
        raise ValueError(f"RoutedExperts(record=True) needs a model in this process, got {type(model).__name__}.")
    return Routers.of(module)


@dataclass(frozen=True)
class SamplerLogProbs(Extra):
    """Move the log-probs that the policy stored when it sampled to another entry, before the model's are written there.

    They are read under the transform's ``log_probs_full_key`` (or the ``"response"`` beside it);
    :class:`~torchrl_llm_kl.PolicyLoss` reads them under the default key. NaN where the sampler returned none, 0 at tokens that
    are not scored. Outside an env, data that already has the entry keeps it.
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
    """Where the policy stored its log-probs: the response's, which no transform writes, before the whole sequence's."""
    names: list[NestedKey] = [key] if isinstance(key, str) else [(*key[:-1], "response"), key]
    places = {name: find_key(td, name) for name in names}
    here = [name for name, place in places.items() if place == name]
    return next(iter([*here, *(place for place in places.values() if place is not None)]), None)


# ------------------------------------------------------------------ another prompt, another adapter, other keys


@dataclass(frozen=True)
class AfterPrompt(Extra):
    """Score the response after another prompt, which replaces all before the assistant's first token.

    Args:
        prompt: a function of the conversation (``History -> History``, or ``(History, row) -> History`` to read other entries
            of the row), or the entry with the ids of the prompts; see :func:`~torchrl_llm_kl.rollouts.in_context`. What is
            written keeps the shape and the mask of the data.
        of: the model of a :class:`~torchrl_llm_kl.RetrieveKL`: the reference after a prompt with the solution, or a policy
            that is not to see a prompt it was sampled with.
    """

    prompt: Context
    of: Of = "policy"

    def __post_init__(self) -> None:
        check_context(self.prompt)


@dataclass(frozen=True)
class Adapters(Extra):
    """Score one model of a :class:`~torchrl_llm_kl.RetrieveKL` with other adapters than the options say.

    ``RetrieveKL(policy, "base", extras=[Adapters("ref", of="reference")])`` compares the policy's active adapter with its
    adapter ``"ref"``.
    """

    adapters: bool | str
    of: Of = "reference"

    @property
    def asks(self) -> Changes:  # type: ignore[override]
        """The adapters."""
        return {"adapters": self.adapters}
