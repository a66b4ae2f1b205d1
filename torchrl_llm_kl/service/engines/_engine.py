"""The engines that compute the scores of a replica. Independent of Ray."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.scoring import (
    DEFAULT_MEMORY,
    ByteTeacher,
    LogProbScorer,
    Sampling,
    ScoreOptions,
    ScoreRequest,
    Scores,
    WeightHistory,
    fingerprint_of,
    score_versions,
)
from torchrl_llm_kl.service._errors import EngineLost
from torchrl_llm_kl.service._messages import ANSWERED, state_dict_of


class Engine(ABC):
    """Scores sequences for a replica, which calls ``own_weights`` from any thread and the other methods from one.

    Attributes:
        offers: the FEATURES of a scorer that it has. Requests for others are refused.
        place: says in the error where it scores.
        instead: says in the error what to do.
    """

    offers: frozenset[str]
    place: str
    instead: str

    @abstractmethod
    def run(self, request: ScoreRequest, options: ScoreOptions) -> Scores:
        """Returns log-probs of the masked-in tokens in nats, 0 elsewhere, and the other scores that the options ask for."""

    @abstractmethod
    def interface(self) -> tuple[ModelInterface, bool]:
        """Returns keys and tokenizer of the model, for clients that tokenise, and whether it is a TorchRL wrapper."""

    def fingerprint(self) -> str:
        """Returns a text that changes with the weights."""
        raise TypeError(
            f"{self.place} reports no fingerprint of its weights. State one, as a text that changes with them: "
            "RememberedModel(model, store, fingerprint=)."
        )

    def own_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the weights under the model's own names. Raises an error if one does not fit, and changes nothing."""
        raise TypeError(f"the weights of {self.place} are not in this process. Update them there.")

    def update_weights(self, weights: Mapping[str, Tensor], *, checked: bool = False) -> None:
        """Takes the weights. An error leaves the old ones. ``checked`` weights are a result of :meth:`own_weights`."""
        self.own_weights(weights)

    def record(self, version: int) -> None:  # noqa: B027
        """Keeps the present weights as ``version``, if the engine keeps versions."""

    def tensors(self) -> list[list[str]]:
        """Returns a list of names for each tensor of the model. A tied tensor has several names.

        The result is empty if this process holds no weights.
        """
        return []


#: The most scorers of one model, each with its own cache. The least recently used one is dropped.
_SCORERS = 4


class TransformersEngine(Engine):
    """An engine for a model in this process, of any kind that :class:`~torchrl_llm_kl.LogProbScorer` scores.

    It creates one scorer for each combination of dtype, adapters, ``deterministic`` and truncation. Each scores at any
    temperature. The engine keeps the last four, whose caches share ``memory``.

    Args:
        model: a model or a TorchRL wrapper of one.

    Keyword Args:
        tokens_per_batch: tokens of one forward, see :class:`~torchrl_llm_kl.LogProbScorer`.
        memory: the most bytes of keys and values in all caches together.
        keep_versions: the number of versions of the weights to keep, see :class:`~torchrl_llm_kl.scoring.WeightHistory`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tokens_per_batch: int | None = None,
        memory: int = DEFAULT_MEMORY,
        keep_versions: int = 0,
    ) -> None:
        self.model = model
        self._tokens_per_batch, self._memory = tokens_per_batch, memory
        self._scorers: OrderedDict[tuple[object, ...], LogProbScorer] = OrderedDict()
        scorer = self._scorer(ScoreOptions())  # refuses a model that cannot be scored
        self.offers, self.place, self.instead = scorer.offers & ANSWERED, scorer.place, scorer.instead
        self._history: WeightHistory | None = None
        if keep_versions:
            # A push may hold any weight, so those that need no gradient are recorded too.
            self._history = WeightHistory(self._module(), keep=keep_versions, frozen=True)
            self.offers |= {"versions"}
            self.record(0)

    def _scorer(self, options: ScoreOptions) -> LogProbScorer:
        """Returns the scorer whose cache serves these options. Temperature and requested scores do not matter for a cache."""
        key = (options.sampling.truncation, options.adapters, options.dtype, options.deterministic)
        if key not in self._scorers:
            own = ScoreOptions(Sampling(1.0, *key[0]), *key[1:], memory=self._memory)
            self._scorers[key] = LogProbScorer(self.model, own, tokens_per_batch=self._tokens_per_batch)
        self._scorers.move_to_end(key)
        while len(self._scorers) > _SCORERS:
            self._scorers.popitem(last=False)
        self._share_memory(self._scorers[key])
        return self._scorers[key]

    def _share_memory(self, scorer: LogProbScorer) -> None:
        """Gives a scorer the memory that the others leave, and shrinks them if that is less than an equal share."""
        others = [other.memory for other in self._scorers.values() if other is not scorer]
        share = self._memory // (len(others) + 1)
        if self._memory - sum(cache.num_bytes for cache in others) < share:
            for cache in others:
                cache.shrink(share)
        scorer.memory.limit = self._memory - sum(cache.num_bytes for cache in others)

    # ------------------------------------------------------------------ scores

    def run(self, request: ScoreRequest, options: ScoreOptions) -> Scores:
        """See :meth:`Engine.run`."""
        scorer = self._scorer(options)
        if request.versions is None or self._history is None:
            return scorer.run(request, options)
        return score_versions(self._history, request, lambda part: scorer.run(part, options.but(remember=False)))

    def interface(self) -> tuple[ModelInterface, bool]:
        """See :meth:`Engine.interface`."""
        return ModelInterface.of(self.model), hasattr(self.model, "input_mode")

    # ------------------------------------------------------------------ weights

    def record(self, version: int) -> None:
        """See :meth:`Engine.record`."""
        if self._history is not None:
            self._history.record(version)

    def own_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the weights under the model's own names. Raises an error if one does not fit or is not finite.

        ``weights`` holds some or all of them, under their ``state_dict()`` names in the model or in its TorchRL wrapper.
        """
        own, given = self._module().state_dict(keep_vars=True), state_dict_of(weights)
        fitting: dict[str, Tensor] = {}
        pushed: dict[int, tuple[str, Tensor]] = {}  # by the model's tensor, which has several names if it is tied
        for theirs, name in self.own_names(given).items():
            if name not in own:
                raise KeyError(f"the model has no weight {name!r}. It has {', '.join(list(own)[:3])}, ...")
            _check_weight(name, own[name], given[theirs])
            other, value = pushed.setdefault(id(own[name]), (theirs, given[theirs]))
            # The last copy would silently replace the first.
            if value is not given[theirs] and not torch.equal(value, given[theirs]):
                raise ValueError(f"{other} and {theirs} are one tensor of the model, but their values differ.")
            fitting[name] = given[theirs]
        return fitting

    def own_names(self, names: Iterable[str]) -> dict[str, str]:
        """Maps the names in an update to the model's own names.

        An update may have the names of a TorchRL wrapper or of PEFT. Unknown names stay. Non-persistent buffers, such as the
        frequencies of rotary embeddings, are left out: TensorDicts hold them, state dicts do not.
        """
        model = self._module()
        own = model.state_dict(keep_vars=True)
        known = own.keys() | {name for name, _ in model.named_buffers()}
        own_of = {name: name for name in names}
        inside = {name: name.removeprefix("model.") for name in own_of if name.startswith("model.")}
        if len(inside) == len(own_of) and set(inside.values()) <= known and not own_of.keys() <= known:
            own_of = inside  # the names in a TorchRL wrapper
        own_of = {given: name for given, name in own_of.items() if name in own or name not in known}
        if not set(own_of.values()) <= own.keys():
            short = _short_names(model, own)
            own_of = {given: short.get(name, name) for given, name in own_of.items()}
        return own_of

    def update_weights(self, weights: Mapping[str, Tensor], *, checked: bool = False) -> None:
        """Copies ``weights`` into the model, in place. An error leaves the model unchanged, except for :class:`EngineLost`.

        ``checked`` weights are a result of :meth:`own_weights`, which is not repeated.
        """
        own, fitting = self._module().state_dict(keep_vars=True), weights if checked else self.own_weights(weights)
        copied = 0
        try:
            with torch.no_grad():
                for name, value in fitting.items():
                    own[name].copy_(value)
                    copied += 1
        except Exception as error:
            if not copied:
                raise
            raise EngineLost(f"only a part of the weights was copied: {error}") from error
        for scorer in self._scorers.values():
            scorer.forget()

    def tensors(self) -> list[list[str]]:
        """See :meth:`Engine.tensors`."""
        inner = next(iter(self._scorers.values())).model
        names: dict[int, list[str]] = {}
        for name, value in inner.state_dict(keep_vars=True).items() if isinstance(inner, nn.Module) else ():
            if isinstance(value, Tensor):  # modules may keep other state
                names.setdefault(id(value), []).append(name)
        return [*names.values()]

    def fingerprint(self) -> str:
        """Returns a digest of all weights, see :func:`~torchrl_llm_kl.scoring.fingerprint_of`."""
        return fingerprint_of(self.model)

    def _module(self) -> nn.Module:
        inner = next(iter(self._scorers.values())).model
        if not isinstance(inner, nn.Module):
            raise TypeError(f"{type(inner).__name__} holds no weights in this process. Update them in its backend.")
        return inner


class ByteTeacherEngine(TransformersEngine):
    """An engine for a teacher with another tokenizer. Requests hold the student's tokens.

    Args:
        model: the teacher.

    Keyword Args:
        tokens_per_batch, memory: see :class:`TransformersEngine`.
        keep_versions: must be 0.
    """

    def __init__(self, model: ByteTeacher, **settings: Any) -> None:
        if settings.get("keep_versions"):
            raise ValueError("keep_versions= is for models with the tokenizer of the requests: leave it out.")
        super().__init__(model.teacher, **settings)
        own = {name: settings[name] for name in ("tokens_per_batch", "memory") if name in settings}
        self._over_bytes = model.make_scorer(**own)
        scorer = self._over_bytes
        self.offers, self.place, self.instead = scorer.offers & ANSWERED, scorer.place, scorer.instead

    def run(self, request: ScoreRequest, options: ScoreOptions) -> Scores:
        """See :meth:`Engine.run`."""
        return self._over_bytes.run(request, options)

    def interface(self) -> tuple[ModelInterface, bool]:
        """See :meth:`Engine.interface`."""
        return ModelInterface.of(self._over_bytes.model), False


def engine_of(model: Engine | nn.Module | ByteTeacher, **settings: Any) -> Engine:
    """Returns the engine for a model. ``settings`` as for :class:`TransformersEngine`."""
    if isinstance(model, Engine):
        return model
    return (
        ByteTeacherEngine(model, **settings)
        if isinstance(model, ByteTeacher)
        else TransformersEngine(model, **settings)
    )


def _short_names(model: nn.Module, own: Mapping[str, Tensor]) -> dict[str, str]:
    """Maps the names that PEFT writes to a file, without the adapter's name, to the model's. Empty without PEFT."""
    if not hasattr(model, "peft_config"):
        return {}
    from peft import get_peft_model_state_dict

    active = cast("str | list[str]", model.active_adapter)
    adapter = active if isinstance(active, str) else active[0]
    names = {id(value): name for name, value in own.items()}  # PEFT renames entries and keeps the tensors
    named = get_peft_model_state_dict(model, state_dict=dict(own), adapter_name=adapter, save_embedding_layers=False)
    return {short: names[id(value)] for short, value in named.items() if id(value) in names}


def _check_weight(name: str, own: Tensor, value: Tensor) -> None:
    """Raises a ValueError unless ``value`` can be copied into ``own`` and its numbers survive the cast."""
    if own.shape != value.shape:
        raise ValueError(f"{name}: the model has shape {tuple(own.shape)}, got {tuple(value.shape)}.")
    if _kind(value.dtype) != _kind(own.dtype):
        raise ValueError(f"{name}: the model has {own.dtype}, got {value.dtype}. Push the model's kind of numbers.")
    cast = value.to(own.dtype)
    if own.is_floating_point() or own.is_complex():
        # torch has no isfinite for the float8 types
        survives = bool((cast.float() if cast.itemsize == 1 else cast).isfinite().all())
    else:
        survives = torch.equal(cast.to(value.dtype), value)
    if not survives:
        raise ValueError(f"{name} holds values that are not finite, or beyond the range of the model's {own.dtype}.")


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    return dtype == torch.bool, dtype.is_complex, dtype.is_floating_point
