"""The options of a score, one record for scorers, transforms, losses and services, and the sampler's settings in it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast, get_args

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import FLOAT_TYPES, check_choice, check_range, check_temperature, widen
from torchrl_llm_kl._registry import Range
from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.head import Direction, Truncation, floor_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

# ------------------------------------------------------------------ the sampler

# The defaults of transformers 5.x where neither the call nor the model's configuration has a value, and of other engines.
TRANSFORMERS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
OTHERS = {**TRANSFORMERS, "top_k": 0}
# Other settings of transformers change the distribution in ways that cannot be scored. With these values they have no effect.
NEUTRAL = {"repetition_penalty": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "num_beams": 1}


@dataclass(frozen=True)
class Sampling:
    """The distribution that tokens are drawn from: logits over a temperature, then top-k, top-p and min-p, in this order.

    Each truncation applies to the tokens that the previous one kept, and the rest is renormalised, as in transformers and
    vLLM. The defaults keep the model's own distribution. A score with ``sampling=`` always keeps the sampled token, since the
    sampler drew it. Rounding or a newer policy may put that token just outside the truncation.

    None turns a setting off, as in transformers and vLLM. A top-k of -1 does too, as in vLLM.

    Args:
        temperature: divides the logits.
        top_k: keeps the most probable tokens, and all that tie with the last of them. 0 keeps all tokens.
        top_p: keeps the fewest tokens, most probable first, whose probabilities add up to this value. 1 keeps all tokens.
        min_p: keeps tokens of at least this probability, relative to the most probable one. 0 keeps all tokens.
        reference: the tokens over which a reference model is compared. ``"whole"`` uses the reference's distribution over
            all tokens at the same temperature, so the result is the KL of the sampler to the reference. ``"kept"`` uses the
            tokens that the policy keeps, renormalised. ``docs/sampling.md`` shows the effect of each on a KL. A reference
            cannot have a truncation of its own: the KL would be infinite wherever it drops a token that the policy keeps.

    Raises:
        ValueError: if a number is out of range or has another type.

    Example:
        >>> Sampling(0.7, top_p=0.95).truncates
        True
        >>> Sampling(top_k=-1, top_p=None) == Sampling()
        True
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    reference: Literal["whole", "kept"] = "whole"

    def __post_init__(self) -> None:
        for name, off in OTHERS.items():
            given = vars(self)[name]
            value = given.item() if getattr(given, "ndim", None) == 0 else given  # a scalar of numpy or torch
            if value is None or (name == "top_k" and value == -1):
                value = off
            if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else (int, float)):
                kind = "a whole number" if name == "top_k" else "a number"
                raise ValueError(f"{name} must be {kind}, {off:g} or None to turn it off, got {given!r}.")
            object.__setattr__(self, name, value if name == "top_k" else float(value))
        check_temperature(self.temperature)
        check_range(0, top_k=self.top_k)
        check_range(high=1, above=0, top_p=self.top_p)
        check_range(0, 1, min_p=self.min_p)
        check_choice(("whole", "kept"), reference=self.reference)

    @property
    def truncation(self) -> Truncation:
        """Top-k, top-p and min-p as one record."""
        return Truncation(self.top_k, self.top_p, self.min_p)

    @property
    def truncates(self) -> bool:
        """Whether the sampler may drop tokens."""
        return self.truncation.active

    def generate_kwargs(self, **others: object) -> dict[str, Any]:
        """Arguments of transformers' ``generate``, with which a model samples from this distribution.

        They override the model's ``generation_config`` and transformers' own defaults (a top-k of 50). Without truncation
        ``top_k`` is None: ``generate`` then sorts nothing, and the constructor of torchrl's wrapper, which refuses 0, accepts
        it. That constructor drops ``min_p``.

        Args:
            others: further arguments of ``generate``.

        Raises:
            ValueError: if an argument would change the distribution.

        Example:
            >>> drawn = Sampling(0.7).generate_kwargs(max_new_tokens=64)
            >>> drawn["temperature"], drawn["top_k"]
            (0.7, None)
        """
        drawn: dict[str, object] = {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k or None}
        drawn |= {"top_p": self.top_p, "min_p": self.min_p, **NEUTRAL}
        # generate would follow such an argument silently, and scores would no longer match the samples.
        for name in drawn.keys() & others.keys():
            if others[name] != drawn[name]:
                raise ValueError(f"{name}={others[name]!r} is not how {self} samples: expected {name}={drawn[name]!r}.")
        return {**drawn, **others}

    @property
    def of_reference(self) -> Sampling:
        """The settings for a reference that is scored separately: the same temperature, over all tokens."""
        return Sampling(self.temperature)

    def __str__(self) -> str:
        changed = {name: vars(self)[name] for name, off in OTHERS.items() if vars(self)[name] != off}
        return f"Sampling({', '.join(f'{name}={value:g}' for name, value in changed.items())})"


def as_sampling(temperature: float | None, sampling: Sampling | None) -> Sampling:
    """Combine both arguments. Raises a ValueError if they name two temperatures."""
    plain = Sampling(temperature)  # type: ignore[arg-type]
    if sampling is None:
        return plain
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a Sampling(temperature, top_k, top_p, min_p), got {sampling!r}.")
    if plain.temperature not in (1.0, sampling.temperature):
        raise ValueError(f"temperature={plain.temperature:g} and {sampling} name two temperatures: pass one.")
    return sampling


def truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits ``[n, V]`` over the temperature, in float32 or wider, with ``-inf`` at dropped tokens.

    Example:
        >>> truncate(torch.tensor([[4.0, 1.0, 2.0]]), Sampling(0.5, top_k=2))
        tensor([[8., -inf, 4.]])
    """
    (logits,) = widen(logits)
    logits = logits / sampling.temperature
    if not sampling.truncates:
        return logits
    return logits.masked_fill(logits < floor_of(logits, sampling.truncation).unsqueeze(-1), -torch.inf)


# ------------------------------------------------------------------ the options of a score

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
    recompute: bool
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
        recompute: with ``grad``, score without a graph, and forward each branch of the prefix tree again in the backward. Only
            the activations of one path from the start to an answer's end are then held. It costs one more forward, like
            activation checkpointing, and the gradient is the same.
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
    recompute: bool = False
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
        # The checks of a copy take as long as a layer of a small model.
        same = all(vars(self).get(name, self) is value for name, value in given.items())
        return self if same else replace(self, **given)

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
