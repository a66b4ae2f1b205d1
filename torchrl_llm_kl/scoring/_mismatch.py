"""Checks that models match: the sampler and the scored distribution, the vocabularies of policy and reference."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.scoring._asked import asked, has
from torchrl_llm_kl.scoring._model import output_size
from torchrl_llm_kl.scoring._protocol import Scorer
from torchrl_llm_kl.scoring._sampling import NEUTRAL, OTHERS, TRANSFORMERS, Sampling
from torchrl_llm_kl.scoring._wrapper import is_wrapper, unwrap, vocabulary_of

_DOCS = "docs/sampling.md"
# Heads of one tokenizer may differ by so many rows of padding, and by this share of the larger head. The same share of a
# tokenizer's names may differ, since families rename their reserved tokens.
_MOST_PADDING, _MOST_PADDED = 1024, 0.02


class SamplerMismatchWarning(UserWarning):
    """The sampler draws from another distribution than the scored one, so ratios and KLs are biased."""


def sampler_of(model: object) -> Sampling | Literal["greedy"] | None:
    """How a TorchRL wrapper samples. None if that is unknown, or the model is not a wrapper.

    A wrapper of transformers takes its settings from ``generate_kwargs``, then from the model's ``generation_config``, then
    from the defaults of transformers, whose top-k is 50. Other engines do not truncate by default. A wrapper with
    ``generate=False`` has a known sampler only if it was given sampling settings, like a new version of a policy.
    """
    settings = _sampler_settings(model)
    if settings is None:
        return None
    if not settings["do_sample"] or settings["temperature"] == 0:
        return "greedy"
    try:
        return Sampling(settings["temperature"], max(int(settings["top_k"]), 0), settings["top_p"], settings["min_p"])
    except (TypeError, ValueError):  # the engine itself will refuse these settings
        return None


def _sampler_settings(model: object) -> Json | None:
    """The generation settings of a wrapper. None if it is not known to generate."""
    if not is_wrapper(model):
        return None
    given = dict(asked(model, "generate_kwargs", (Mapping,)) or {})
    # A wrapper that only scores has no sampler, except if it was given settings of one.
    names = (*TRANSFORMERS, *NEUTRAL, "do_sample")
    inner = unwrap(model)
    if asked(model, "generate", bool) is not True and not any(map(given.get, names)):
        return None
    off = {**OTHERS, **NEUTRAL, "do_sample": inner is None}  # None turns a setting off
    own = {name: off[name] if given[name] is None else given[name] for name in names if name in given}
    if inner is None:
        params = asked(model, "sampling_params", object)  # vLLM's
        stated = {name: asked(params, name, (int, float)) for name in TRANSFORMERS}
        own |= {name: value for name, value in stated.items() if value is not None}
        return {**OTHERS, "do_sample": True, **own}
    # A configuration in the call takes missing values from the model's own.
    configs = asked(inner, "generation_config", object), given.get("generation_config")
    pairs = [(name, asked(config, name, object)) for config in configs for name in names]
    held = {name: value for name, value in pairs if value is not None}
    return {**TRANSFORMERS, "do_sample": False, **held, **own}


def mismatch_of(model: object, scored: Sampling, *, trains: bool = False) -> str | None:
    """Describe how a wrapper's sampler differs from ``scored``, with the remedies. None without a known difference.

    A greedy wrapper passes, since evaluations use one, except if its samples train a policy (``trains``).
    """
    sampler = sampler_of(model)
    config = None if sampler is None else asked(unwrap(model), "config", object)
    everything = asked(config, "vocab_size", int, 0)  # stands for a top_k of 0, which torchrl's wrapper refuses
    if sampler == "greedy" and trains:
        settings = {"do_sample": True, "top_k": everything, "top_p": 1.0}
        return (
            "sampler is greedy (do_sample=False), and a policy gradient needs samples. Sample: "
            f"generate_kwargs={json.dumps(settings)} ({_DOCS})."
        )
    if not isinstance(sampler, Sampling):
        return None
    if everything:  # a top-k of the whole vocabulary keeps every token
        sampler, scored = (replace(x, top_k=x.top_k * (x.top_k < everything)) for x in (sampler, scored))
    differs, settings = [], {"top_k": scored.top_k or everything, "top_p": scored.top_p}
    for name in OTHERS:
        ours, theirs = vars(scored)[name], vars(sampler)[name]
        # Engines may store settings in float32.
        if not math.isclose(ours, theirs, rel_tol=1e-6):
            settings |= {} if name == "top_k" else {name: ours}
            differs.append(f"sampler uses {name}={theirs:g}, scorer {name}={ours:g}")
    scorable = bool(differs)
    for name, value in (_sampler_settings(model) or {}).items():
        if value != NEUTRAL.get(name, value):
            settings[name] = NEUTRAL[name]
            differs.append(f"sampler uses {name}={value}, which cannot be scored")
    if not differs:
        return None
    other = f"; or score what is sampled: sampling={sampler}" if scorable else ""
    return (
        f"{'; '.join(differs)}. Log-probs then belong to another distribution than the tokens, and ratios and "
        f"KLs are biased. Sample from what is scored: generate_kwargs={json.dumps(settings)}{other} ({_DOCS})."
    )


def warn_of_chatml(wrapper: object, stacklevel: int = 1) -> None:
    """Warn if torchrl renders a wrapper's conversations as ChatML, but its markers are not tokens of the model.

    torchrl does so for every tokenizer whose template has no ``{% generation %}`` blocks, except for a few families.
    """
    tokenizer: Any = asked(wrapper, "tokenizer", object)
    marker = "<|im_start|>"
    if tokenizer is None or asked(wrapper, "input_mode", str) != "history":
        return
    # A marker that the model knows is a single token.
    if len(tokenizer(marker, add_special_tokens=False)["input_ids"]) == 1:
        return
    from torchrl.data.llm import History

    named = {name: asked(wrapper, name, object) for name in ("chat_template", "chat_template_name")}
    text = History(role=["user"], content=["?"], batch_size=1).apply_chat_template(
        tokenizer=tokenizer, tokenize=False, **named
    )
    if marker in text:
        warnings.warn(
            f"torchrl renders the conversations of this policy as ChatML, but {marker!r} is not a token of its tokenizer: the "
            "model was not trained on such markers. Use torchrl_llm_kl.make_env, which renders with the model's own "
            "template, or pass chat_template= to the policy's wrapper (docs/own_task.md).",
            stacklevel=stacklevel + 1,
        )


def warn_of_mismatch(model: object, scored: Sampling, *, trains: bool = False, stacklevel: int = 1) -> None:
    """Warn if ``model`` is known to sample from another distribution than the ``scored`` one."""
    if problem := mismatch_of(model, scored, trains=trains):
        warnings.warn(problem, SamplerMismatchWarning, stacklevel=stacklevel + 1)


def inner_module(model: object) -> object:
    """The model inside scorers, remembered models and wrappers.

    A wrapper of another backend is returned itself. A service has no model in this process, so the result is None.
    """
    while isinstance(model, Scorer) or has(model, "make_scorer"):
        model = asked(model, "model", object)
    inner = unwrap(model) if is_wrapper(model) else None
    return model if inner is None else inner


def check_vocabularies(policy: object, reference: object) -> None:
    """Raise a ValueError if the models assign different tokens to the same ids. Models in other processes are skipped.

    Two tokenizers are compared by their tokens. Without tokenizers, the vocabulary sizes are compared. They may differ by
    padding.
    """
    ours, theirs = (vocabulary_of(model) for model in (policy, reference))
    advice = "Pass a reference with the policy's tokenizer."
    if ours and theirs:
        names = {index: token for token, index in theirs.items()}
        other = [(index, token) for token, index in ours.items() if names.get(index, token) != token]
        if len(other) > _MOST_PADDED * min(len(ours), len(theirs)):
            index, token = min(other)
            raise ValueError(
                f"the tokenizers of policy and reference give other tokens to {len(other)} ids: id {index} is {token!r} for "
                f"the policy and {names[index]!r} for the reference. {advice}"
            )
        return
    models = [inner_module(model) for model in (policy, reference)]
    expected, size = (output_size(model) if isinstance(model, nn.Module) else None for model in models)
    if expected and size and abs(size - expected) > min(_MOST_PADDING, _MOST_PADDED * max(size, expected)):
        raise ValueError(
            f"reference has a vocabulary of {size} tokens, and the policy one of {expected}: they differ by more than "
            f"padding, so their ids mean other tokens. {advice} If one vocabulary extends the other, pass wrappers with "
            "their tokenizers, which are compared instead."
        )
