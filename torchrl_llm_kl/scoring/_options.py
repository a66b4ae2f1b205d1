"""The options of a score: one record for scorers, transforms, losses and services."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, TypedDict, cast, get_args

import torch

from torchrl_llm_kl._numerics import FLOAT_TYPES, check_choice, check_range
from torchrl_llm_kl._registry import Range
from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.head import Direction
from torchrl_llm_kl.scoring._sampling import Sampling, as_sampling

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: The default size of a scorer's cache of keys and values, in bytes: 256 MiB.
DEFAULT_MEMORY = 256 * 2**20
#: The options that decide the scores of given tokens. They are sent to another process.
SHARED = ("sampling", "adapters", "dtype", "deterministic", "entropy", "top_k", "moments", "record_routing", "remember")


class Changes(TypedDict, total=False):
    """The fields of :class:`ScoreOptions` as keywords, and ``temperature`` for the temperature of ``sampling``."""

    temperature: float | None
    sampling: Sampling | None
    adapters: bool | str
    dtype: torch.dtype | None
    deterministic: bool
    memory: int
    entropy: bool
    top_k: int
    moments: bool
    direction: Direction
    beta: float
    return_kept: bool
    record_routing: bool
    grad: bool
    remember: bool


@dataclass(frozen=True)
class ScoreOptions:
    """How tokens are scored, and which scores are computed besides their log-probs.

    Scorers take the fields as keywords, both at construction and for one call. They also take ``temperature``, short for
    ``sampling=Sampling(temperature)``.

    Args:
        sampling: the sampler's temperature, top-k, top-p and min-p. Scores are computed over the tokens that remain, and
            their probabilities are renormalised.
        adapters: False disables the model's PEFT adapters during the score. The base model then serves as a reference
            without a second copy of the weights. A name activates only that adapter, for a reference that is itself an
            adapter (for instance from an earlier stage of training). The active adapter is restored afterwards. Both are
            scored without gradient.
        dtype: autocast dtype of the body and of the products of a linear head, for instance ``torch.bfloat16`` on float32
            weights. Everything after the head's product stays float32.
        deterministic: make a sequence's scores the same to the last bit in every call, whatever the other sequences, their
            order and the cache, with and without ``grad`` (gradients may differ). Requires float32 or float64 on a CPU, one
            number of threads, and one ``tokens_per_batch``, a multiple of 64, by default 256. The scorer checks it on the
            model at construction and after a change of these settings.
        memory: the most bytes of keys and values that ``remember`` may cache. The least recently used are evicted first.
            0 disables the cache.
        entropy: compute the entropy of the whole distribution that each token was drawn from.
        top_k: the number of most probable tokens to return, with the log of the total probability of all others. These
            scores have no gradient.
        moments: compute ``collision`` and ``discriminator`` of :class:`Scores`, for advantages. This takes another sweep of
            the head, without gradient.
        direction: the direction of the exact KL to a reference. ``"reverse"`` is ``KL(model || reference)``, ``"forward"``
            is ``KL(reference || model)``, and ``"jensen_shannon"`` a mean of the KLs of both to their mixture. See
            :func:`~torchrl_llm_kl.head.linear_pair`.
        beta: the reference's share of that mixture, inside (0, 1).
        return_kept: return the tokens that ``sampling`` keeps at each scored position, as ``kept`` of the scores. A model in
            another process can then be scored over the same tokens.
        record_routing: return the experts that the routers chose, as ``routing`` of the scores.
        grad: keep the graph, so that the result is differentiable with respect to the model's parameters. Logits are
            recomputed in the backward instead of stored. By default no part of the graph is kept.
        remember: cache keys, values and log-probs for later calls. The next turn of a conversation then costs only its new
            tokens. A change of weights or settings clears the cache. It has no effect with ``grad`` or where prefixes are
            not shared.

    Raises:
        ValueError: for a value out of range.

    Example:
        >>> options = ScoreOptions(entropy=True).but(temperature=0.7)
        >>> options.sampling.temperature, options.entropy
        (0.7, True)
    """

    sampling: Sampling = field(default_factory=Sampling)
    adapters: bool | str = True
    dtype: torch.dtype | None = None
    deterministic: bool = False
    memory: int = DEFAULT_MEMORY
    entropy: bool = False
    top_k: int = 0
    moments: bool = False
    direction: Direction = "reverse"
    beta: float = 0.5
    return_kept: bool = False
    record_routing: bool = False
    grad: bool = False
    remember: bool = False

    def __post_init__(self) -> None:
        if cast(Sampling | None, self.sampling) is None:  # from a configuration file
            object.__setattr__(self, "sampling", Sampling())
        for each in fields(self):
            value = vars(self)[each.name]
            # Configurations and messages are untyped: the text "false" would count as True.
            if each.type in ("bool", "int") and type(value).__name__ != each.type:
                expected = "True or False" if each.type == "bool" else "a whole number of at least 0"
                raise ValueError(f"{each.name} must be {expected}, got {value!r:.60}.")
        as_sampling(1.0, self.sampling)
        check_range(0, top_k=self.top_k, memory=self.memory)
        check_choice(get_args(Direction), direction=self.direction)
        Range(above=0.0, below=1.0).check("beta", self.beta)
        if not isinstance(self.adapters, (bool, str)):
            raise TypeError(f"adapters must be True, False or a name, got {self.adapters!r:.60}: False is the base.")
        if self.dtype is not None:
            check_choice(FLOAT_TYPES.values(), dtype=self.dtype)

    @property
    def temperature(self) -> float:
        """The temperature of ``sampling``."""
        return self.sampling.temperature

    def but(self, **changes: Unpack[Changes]) -> ScoreOptions:
        """A copy with some options changed.

        A ``temperature`` of None means 1. A ``sampling`` of None keeps every token, at the temperature.
        """
        given: Json = {**changes}
        temperature = given.pop("temperature", self.temperature)
        if given.get("sampling") is not None:
            given["sampling"] = as_sampling(changes.get("temperature"), given["sampling"])
        # A temperature changes only that setting of the current sampling.
        elif "sampling" in given or "temperature" in changes:
            others = Sampling() if "sampling" in given else self.sampling
            given["sampling"] = replace(others, temperature=temperature)
        return replace(self, **given) if given else self

    @property
    def beside(self) -> tuple[str, ...]:
        """The requested scores, besides the log-prob, that need the whole distribution of this model."""
        return tuple(name for name in ("entropy", "top_k", "moments", "return_kept") if vars(self)[name])

    # ------------------------------------------------------------------ for another process

    def to_dict(self) -> Json:
        """The :data:`SHARED` options that differ from the defaults, as JSON values."""
        options: Json = {name: vars(self)[name] for name in SHARED if vars(self)[name] != vars(_DEFAULTS)[name]}
        if self.dtype is not None:
            options["dtype"] = str(self.dtype).removeprefix("torch.")
        if "sampling" in options:
            options["sampling"] = dict(vars(self.sampling))
        return options

    @classmethod
    def from_dict(cls, given: Json) -> ScoreOptions:
        """The options of :meth:`to_dict`."""
        if not given:  # the common case
            return _DEFAULTS
        values = dict(given)
        if "dtype" in values:
            values["dtype"] = FLOAT_TYPES[values["dtype"]]
        if "sampling" in values:
            values["sampling"] = Sampling(**values["sampling"])
        return cls(**values)


_DEFAULTS = ScoreOptions()
