"""Sampler settings: temperature and truncations of the model's distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_choice, check_range, check_temperature, widen
from torchrl_llm_kl.head import Truncation, floor_of
from torchrl_llm_kl.scoring._asked import asked

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
            value = given.item() if asked(given, "ndim", int) == 0 else given  # a scalar of numpy or torch
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

    def generate_kwargs(self, model: PreTrainedModel, **others: Any) -> dict[str, Any]:
        """Arguments of transformers' ``generate``, with which ``model`` samples from this distribution.

        They override the model's ``generation_config`` and transformers' own defaults (a top-k of 50). A top-k of 0 becomes
        the size of the vocabulary, because the constructor of torchrl's wrapper refuses 0. That constructor also drops
        ``min_p``. Set ``wrapper.generate_kwargs["top_k"] = 0`` after the construction for faster sampling.

        Args:
            model: a transformers model, for the size of its vocabulary.
            others: further arguments of ``generate``.

        Raises:
            ValueError: if an argument would change the distribution.

        Example:
            >>> from transformers import Qwen2Config, Qwen2ForCausalLM
            >>> model = Qwen2ForCausalLM(Qwen2Config(
            ...     vocab_size=97, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            ...     num_key_value_heads=1,
            ... ))
            >>> Sampling(0.7).generate_kwargs(model, max_new_tokens=64)["top_k"]
            97
        """
        drawn = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "min_p": self.min_p}
        # torchrl's wrapper refuses a top_k of 0.
        drawn |= {"top_k": self.top_k or model.config.get_text_config().vocab_size, **NEUTRAL}
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
