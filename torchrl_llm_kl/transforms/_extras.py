"""What a transform scores, reads and writes beyond log-probs: one small object for each capability.

An :class:`Extra` says what it asks of the scorer, which fields of the request it fills from the data, and which entries it
writes. A user's own is a subclass that overrides what applies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeVar

import torch
from tensordict import NestedKey, TensorDictBase
from torch import nn

from torchrl_llm_kl._numerics import check_choice, check_not_a_name, check_range
from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts import (
    Context,
    Located,
    MissingEntryError,
    ModelInterface,
    TokenisingOptions,
    check_context,
    describe_entries,
    find_key,
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
from torchrl_llm_kl.scoring import (
    Changes,
    Model,
    RequestFields,
    Routers,
    ScoreOptions,
    Scores,
    check_distributions,
    is_wrapper,
    unwrap,
)
from torchrl_llm_kl.transforms._base import in_env

_E = TypeVar("_E", bound="Extra")
_R = TypeVar("_R")
#: Which model of a :class:`~torchrl_llm_kl.RetrieveKL`.
Of = Literal["policy", "reference"]


class Scoring(Protocol):
    """What an extra may ask of its transform."""

    options: ScoreOptions
    extras: tuple[Extra, ...]
    log_probs_full_key: NestedKey
    _options: TokenisingOptions

    def _interface(self) -> ModelInterface: ...


class Extra:
    """A capability of a transform; see :class:`~torchrl_llm_kl.RetrieveLogProb`.

    Attributes:
        of: the model of a :class:`~torchrl_llm_kl.RetrieveKL` that it is for.

    Example:
        >>> class Collision(Extra):
        ...     asks = {"moments": True}
        ...     columns = {"collision": "collision"}
        >>> list(Collision().columns)
        ['collision']
    """

    of: Of = "policy"
    #: Fields of :class:`~torchrl_llm_kl.scoring.ScoreOptions` that it sets.
    asks: Changes = {}  # noqa: RUF012
    #: Entry -> the field of :class:`~torchrl_llm_kl.Scores` that is written there.
    columns: Mapping[NestedKey, str] = {}

    def check(self, transform: Scoring) -> None:
        """Raise an error if the transform cannot do this."""

    def in_keys(self) -> list[NestedKey]:
        """Entries that the data must have."""
        return []

    def out_keys(self, transform: Scoring) -> list[NestedKey]:
        """Entries that are written."""
        return list(self.columns)

    def features(self, transform: Scoring, key: NestedKey) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape of an entry after the token dimension, and dtype."""
        return (), torch.float32

    def place(self, transform: Scoring, td: TensorDictBase, located: Located) -> Located:
        """The tokens to score in place of the data's."""
        return located

    def fields(
        self, transform: Scoring, td: TensorDictBase, next_td: TensorDictBase, located: Located
    ) -> RequestFields:
        """Fields of the :class:`~torchrl_llm_kl.scoring.ScoreRequest`, in the order of the tokens of the data."""
        return {}

    def outputs(
        self, transform: Scoring, td: TensorDictBase, located: Located, scores: Scores
    ) -> dict[NestedKey, Ragged | None]:
        """The entries to write."""
        return {key: getattr(scores, name) for key, name in self.columns.items()}


def find(extras: Iterable[Extra], kind: type[_E]) -> _E | None:
    """The one of a kind; None without it."""
    return next((extra for extra in extras if isinstance(extra, kind)), None)


def check_extras(extras: Iterable[Extra]) -> tuple[Extra, ...]:
    """Extras as a tuple; an error for another object, or if a kind comes twice for one model."""
    found = tuple(extras)
    for extra in found:
        if not isinstance(extra, Extra):
            raise TypeError(f"extras must be objects such as Entropy() or TopK(64), got {extra!r:.60}.")
        check_choice(("policy", "reference"), of=extra.of)
    kinds = [(type(extra), extra.of) for extra in found]
    if twice := [kind.__name__ for kind, of in kinds if kinds.count((kind, of)) > 1]:
        raise ValueError(f"extras has {twice[0]} twice: leave one out.")
    return found


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
        if isinstance(self.k, bool) or not isinstance(self.k, int):
            raise ValueError(f"k must be a whole number of at least 1, got {self.k!r}.")
        check_range(1, k=self.k)

    @property
    def asks(self) -> Changes:  # type: ignore[override]
        """The top k."""
        return {"top_k": self.k}

    @property
    def columns(self) -> Mapping[NestedKey, str]:  # type: ignore[override]
        """Ids, log-probs and the rest."""
        return dict(zip(top_k_entries(self.key), ("top_indices", "top_log_probs", "tail_log_prob"), strict=True))

    def features(self, transform: Scoring, key: NestedKey) -> tuple[tuple[int, ...], torch.dtype]:
        """See :class:`Extra`."""
        name = self.columns[key]
        dtype = torch.int64 if name == "top_indices" else torch.float32
        return () if name == "tail_log_prob" else (self.k,), dtype


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


def _first_record(
    read: Callable[..., _R | None], td: TensorDictBase, next_td: TensorDictBase, key: NestedKey, located: Located
) -> _R | None:
    """What a function reads from the step's result, else from the step."""
    found = read(next_td, key, located.tokens, located.mask)
    return read(td, key, located.tokens, located.mask) if found is None and next_td is not td else found


@dataclass(frozen=True)
class KeptTokens(Extra):
    """Score over the tokens that the sampler kept, as it recorded them (:class:`~torchrl_llm_kl.RecordKept`).

    Read where the data holds them and the ``sampling`` of the options leaves tokens out: transforms have one of these with the
    default key then.

    Args:
        key: parent of the entries.
    """

    key: NestedKey = "kept"

    def fields(
        self, transform: Scoring, td: TensorDictBase, next_td: TensorDictBase, located: Located
    ) -> RequestFields:
        """See :class:`Extra`."""
        if not transform.options.sampling.truncates:
            return {}
        found = _first_record(read_kept, td, next_td, self.key, located)
        return {} if found is None else {"kept": Kept(*found)}


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

    def fields(
        self, transform: Scoring, td: TensorDictBase, next_td: TensorDictBase, located: Located
    ) -> RequestFields:
        """See :class:`Extra`."""
        found = read_images(next_td, self.key)
        found = read_images(td, self.key) if found is None and next_td is not td else found
        found = located.images if found is None else found  # of a rendered conversation
        return {} if found is None else {"images": found}


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

    @property
    def asks(self) -> Changes:  # type: ignore[override]
        """The record."""
        return {"record_routing": True} if self.record else {}

    @property
    def columns(self) -> Mapping[NestedKey, str]:  # type: ignore[override]
        """The record."""
        if self.record and self.key is None:
            raise ValueError("RoutedExperts(None, record=True) needs a place for the record: pass 'routed_experts'.")
        return {self.key: "routing"} if self.record and self.key is not None else {}

    def check(self, transform: Scoring) -> None:
        """A model that cannot be recorded raises an error."""
        if self.record:
            _routers(transform)

    def features(self, transform: Scoring, key: NestedKey) -> tuple[tuple[int, ...], torch.dtype]:
        """See :class:`Extra`."""
        routers = _routers(transform)
        return (len(routers.modules), routers.k), routers.dtype

    def fields(
        self, transform: Scoring, td: TensorDictBase, next_td: TensorDictBase, located: Located
    ) -> RequestFields:
        """See :class:`Extra`."""
        if self.key is None or (self.record and in_env(transform)):
            return {}
        found = _first_record(read_routing, td, next_td, self.key, located)
        if find(transform.extras, AfterPrompt) is not None and (found is not None or self.record):
            raise ValueError(
                f"AfterPrompt with RoutedExperts({self.key!r}): experts were recorded for the sampled prompt, another is "
                "scored. Leave out one of them."
            )
        return {} if found is None else {"routing": found}


def _routers(transform: Scoring) -> Routers:
    """The routers whose choices are recorded."""
    model = getattr(transform, "model", None)
    module = unwrap(model) if is_wrapper(model) else model
    if not isinstance(module, nn.Module):
        found = "'from_collector'" if model is None else type(model).__name__
        raise ValueError(
            "RoutedExperts(record=True) declares the layers and experts of the record, and reads them from a model in this "
            f"process: pass a transformers model or a wrapper of one, got {found}."
        )
    return Routers.of(module)


@dataclass(frozen=True)
class SamplerLogProbs(Extra):
    """Move the log-probs that the policy stored when it sampled to another entry, before the model's are written there.

    They are read under the transform's ``log_probs_full_key`` (or the ``"response"`` beside it);
    :class:`~torchrl_llm_kl.PolicyLoss` reads them under the default key. NaN where the sampler returned none, 0 at tokens that
    are not scored. Outside an env, data that already has the entry keeps it.
    """

    key: NestedKey = ("sampler_log_probs", "full")

    def check(self, transform: Scoring) -> None:
        """Two keys."""
        if self.key == transform.log_probs_full_key:
            raise ValueError(
                f"SamplerLogProbs and log_probs_full_key are both {self.key!r}: the model's log-probs would replace the "
                "sampler's. Give them different keys."
            )

    def out_keys(self, transform: Scoring) -> list[NestedKey]:
        """The entry."""
        return [self.key]

    def outputs(
        self, transform: Scoring, td: TensorDictBase, located: Located, scores: Scores
    ) -> dict[NestedKey, Ragged | None]:
        """See :class:`Extra`."""
        if not in_env(transform) and find_key(td, self.key) is not None:
            return {}
        source = transform.log_probs_full_key
        found = _stored_by_sampler(td, source)
        if found is None:
            raise MissingEntryError(
                f"SamplerLogProbs({self.key!r}) moves the sampler's log-probs: expected them under {source!r}, found: "
                f"{describe_entries(td)}. Collect with return_log_probs=True, or leave SamplerLogProbs out."
            )
        tokens, mask = located.tokens, located.mask
        responses = response_mask(td, tokens, transform._interface())
        values = per_token(td, found, tokens, responses, repeats=False).detach().float()
        values = values.masked_fill(zeros_of_first_tokens(values, mask, tokens), torch.nan)
        return {self.key: tokens.like(torch.where(mask, values, 0))}


def _stored_by_sampler(td: TensorDictBase, key: NestedKey) -> NestedKey | None:
    """Where the policy stored its log-probs: the response's, which no transform writes, before the whole sequence's."""
    names: list[NestedKey] = [key] if isinstance(key, str) else [(*key[:-1], "response"), key]
    here = [name for name in names if find_key(td, name) == name]
    there = [found for name in names if (found := find_key(td, name)) is not None]
    return next(iter([*here, *there]), None)


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

    def in_keys(self) -> list[NestedKey]:
        """The entry with the prompts."""
        return [] if callable(self.prompt) else [self.prompt]

    def place(self, transform: Scoring, td: TensorDictBase, located: Located) -> Located:
        """See :class:`Extra`."""
        return in_context(td, located, self.prompt, transform._interface(), transform._options)


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


@dataclass(frozen=True)
class KLKeys(Extra):
    """Other entries of a :class:`~torchrl_llm_kl.RetrieveKL`; see :class:`~torchrl_llm_kl.KLComputation`."""

    reward_key: NestedKey = "reward"
    old_log_probs_key: NestedKey | None = None
    charged_key: NestedKey | None = None

    def check(self, transform: Scoring) -> None:
        """It is for a transform that computes a KL."""
        raise ValueError(f"{type(transform).__name__} computes no KL: KLKeys are extras of a RetrieveKL.")
