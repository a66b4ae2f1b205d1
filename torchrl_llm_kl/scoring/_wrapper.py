"""TorchRL wrappers: their model, their sampler and vocabulary, and scores through a backend such as vLLM or a remote actor."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor, nn

from torchrl_llm_kl._private import is_remote
from torchrl_llm_kl._typing import asked, call_of, has
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring._model import evaluating, output_size
from torchrl_llm_kl.scoring._options import NEUTRAL, OTHERS, TRANSFORMERS, Sampling
from torchrl_llm_kl.scoring._plans import plan_micro_batches
from torchrl_llm_kl.scoring._protocol import Scorer
from torchrl_llm_kl.scoring._request import ScoreRequest

if TYPE_CHECKING:
    from torchrl.modules.llm import LLMWrapperBase

_TOKENS_KEY = ("tokens", "full")
_DOCS = "docs/sampling.md"
# Heads of one tokenizer may differ by so many rows of padding, and by this share of the larger head. The same share of a
# tokenizer's names may differ, since families rename their reserved tokens.
_MOST_PADDING, _MOST_PADDED = 1024, 0.02
Found = tuple[Tensor, Tensor, list[int]]


def is_wrapper(model: object) -> bool:
    """Whether ``model`` is a TorchRL language-model wrapper."""
    return has(model, "get_new_version")


def unwrap(wrapper: object) -> nn.Module | None:
    """The transformers model inside a wrapper, or None if its weights are not in this process."""
    inner = None if is_remote(wrapper) else asked(wrapper, "model", nn.Module)
    if inner is None:
        return None
    # By name, since an import of the class would load torchrl's wrappers.
    of_transformers = any(base.__name__ == "TransformersWrapper" for base in type(wrapper).__mro__)
    return inner if of_transformers or has(inner, "get_output_embeddings") else None


def vocabulary_of(model: object) -> dict[str, int]:
    """The vocabulary of a model's tokenizer, or an empty dict without a tokenizer."""
    return cast("dict[str, int]", call_of(asked(model, "tokenizer", object), "get_vocab", {}))


def repair_padding(wrapper: object) -> None:
    """Make a wrapper pad prompts with its tokenizer's padding token.

    torchrl pads with the first id of the *encoded* padding token, which is BOS if the tokenizer adds one.
    """
    tokenizer, padding = asked(wrapper, "tokenizer", object), asked(wrapper, "padding_value", int)
    pad, bos = (asked(tokenizer, name, int) for name in ("pad_token_id", "bos_token_id"))
    if is_wrapper(wrapper) and None not in (pad, padding) and padding == bos:
        vars(wrapper)["padding_value"] = pad  # a plain attribute, also if the wrapper is a module


def log_probs_only(model: object) -> bool:
    """Whether a model returns log-probs but no distributions, since it runs in another backend or process."""
    return unwrap(model) is None if is_wrapper(model) else asked(model, "log_probs_only", bool) is True


def check_distributions(*models: object, what: str = "an exact KL") -> None:
    """Raise a ValueError that begins with ``what`` if a model returns only log-probs. None and names pass."""
    for model in filter(log_probs_only, models):
        raise ValueError(
            f"{what} needs whole distributions, and {type(model).__name__} returns log-probs only: pass the transformers model "
            "in this process, or an estimator of log-probs, 'k2' in a loss or 'k1' in a reward. A service sends the most "
            "probable tokens for RetrieveLogProb(model, extras=[TopK(64)])."
        )


def check_replays(*models: object, what: str) -> None:
    """Raise a ValueError that begins with ``what`` if a model cannot score over recorded tokens. None and names pass."""
    check_distributions(*(model for model in models if asked(model, "replays", bool) is not True), what=what)


# ------------------------------------------------------------------ models that must match


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


def _sampler_settings(model: object) -> dict[str, float] | None:
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
    pairs = [(name, asked(config, name, (int, float))) for config in configs for name in names]
    held = {name: value for name, value in pairs if value is not None}
    return {**TRANSFORMERS, "do_sample": False, **held, **own}


def mismatch_of(model: object, scored: Sampling, *, trains: bool = False) -> str | None:
    """Describe how a wrapper's sampler differs from ``scored``, with the remedies. None without a known difference.

    A greedy wrapper passes, since evaluations use one, except if its samples train a policy (``trains``).
    """
    sampler = sampler_of(model)
    config = None if sampler is None else asked(unwrap(model), "config", object)
    everything = asked(config, "vocab_size", int, 0)
    if sampler == "greedy" and trains:
        settings: dict[str, object] = {"do_sample": True, "top_k": None, "top_p": 1.0}
        return (
            "sampler is greedy (do_sample=False), and a policy gradient needs samples. Sample: "
            f"generate_kwargs={settings} ({_DOCS})."
        )
    if not isinstance(sampler, Sampling):
        return None
    if everything:  # a top-k of the whole vocabulary keeps every token
        sampler, scored = (replace(x, top_k=x.top_k * (x.top_k < everything)) for x in (sampler, scored))
    differs, settings = [], {"top_k": scored.top_k or None, "top_p": scored.top_p}
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
        f"KLs are biased. Sample from what is scored: generate_kwargs={settings}{other} ({_DOCS})."
    )


def warn_of_chatml(wrapper: object, stacklevel: int = 1) -> None:
    """Warn if torchrl renders a wrapper's conversations as ChatML, but its markers are not tokens of the model.

    torchrl does so for every tokenizer whose template has no ``{% generation %}`` blocks, except for a few families.
    """
    tokenizer = asked(wrapper, "tokenizer", object)
    marker = "<|im_start|>"
    if tokenizer is None or asked(wrapper, "input_mode", str) != "history":
        return
    # A marker that the model knows is a single token.
    encode = cast("Callable[..., dict[str, list[int]]]", tokenizer)
    if len(encode(marker, add_special_tokens=False)["input_ids"]) == 1:
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


# ------------------------------------------------------------------ scores through another backend


def scoring_version(wrapper: LLMWrapperBase) -> LLMWrapperBase:
    """A version of ``wrapper`` that returns log-probs of token ids. ``wrapper`` itself is not changed.

    A remote wrapper is used directly, since a new version would copy its weights to this process. It must have been built
    with ``input_mode="tokens", generate=False, pad_output=False``.
    """
    if is_remote(wrapper):
        return wrapper
    changes: dict[str, object] = {
        "generate": False,
        "return_log_probs": True,
        "input_mode": "tokens",
        "pad_output": False,
    }
    # Some wrappers write the padding into the dict of the original wrapper, so they get a copy.
    tokenizer_kwargs = asked(wrapper, "tokenizer_kwargs", dict)
    if tokenizer_kwargs is not None:
        changes["tokenizer_kwargs"] = {**tokenizer_kwargs, "padding": False}
    version = wrapper.get_new_version(input_key=_TOKENS_KEY, **changes)
    # vLLM's wrapper drops every token equal to its padding value, which is often the end-of-turn token. These rows have
    # no padding, and no token must be dropped.
    if version is not wrapper and asked(version, "padding_value", int) is not None:
        version.padding_value = -1
    return version


def score_wrapper(
    version: LLMWrapperBase, request: ScoreRequest, device: torch.device, tokens_per_batch: int, grad: bool
) -> tuple[Tensor, Tensor]:
    """Flat elements ``[K]`` of the scored tokens, on the CPU, and their log-probs on ``device``.

    torchrl fills in 0 where an engine returned no score, for instance at a cached prefix. A certain token has a log-prob of
    0 too. If all tokens from the start of a sequence up to a scored one have exactly 0, that token is therefore scored
    again, and so is another token in its place. At most one of the two can be certain.
    """
    score = partial(_score, version, device=device, tokens_per_batch=tokens_per_batch)
    with evaluating(version) if isinstance(version, nn.Module) and not grad else nullcontext():
        elements, log_probs, zeros = score(request)
        if zeros:
            with torch.no_grad():
                _check_zeros(score, request, zeros, type(version).__name__)
    if grad and log_probs.numel() and not log_probs.requires_grad:
        raise ValueError(f"grad=True, but {type(version).__name__} returns log-probs without a graph: pass grad=False.")
    return elements, log_probs


def _score(version: LLMWrapperBase, request: ScoreRequest, device: torch.device, tokens_per_batch: int) -> Found:
    """The result of :func:`score_wrapper`, and the flat elements that end a run of zeros at the start of a sequence."""
    batches = plan_micro_batches(request.forward_lengths, tokens_per_batch)
    parts = [_score_rows(version, request, rows, device) for rows in batches]
    parts.append((torch.zeros(0, dtype=torch.long), torch.zeros(0, device=device), []))  # torch.cat needs at least one
    elements, log_probs, zeros = zip(*parts, strict=True)
    return torch.cat(elements), torch.cat(log_probs), [element for part in zeros for element in part]


def _check_zeros(score: Callable[[ScoreRequest], Found], request: ScoreRequest, zeros: list[int], name: str) -> None:
    """Raise a ValueError unless each token of ``zeros`` is certain: 0 again, and another token in its place is not."""
    tokens = request.tokens
    starts = tokens.offsets[tokens.sequence_ids[zeros]].tolist()
    ends = {tuple(tokens.values[a : b + 1].tolist()): b for a, b in zip(starts, zeros, strict=True)}
    others = [next((x for x in tokens.values.tolist() if x != prefix[-1]), int(prefix[-1] == 0)) for prefix in ends]
    pairs = [row for prefix, other in zip(ends, others, strict=True) for row in (prefix, (*prefix[:-1], other))]
    probe = Ragged.from_list([torch.tensor(row) for row in pairs])
    elements, log_probs, _ = score(ScoreRequest.of(probe, probe.positions == probe.lengths[probe.sequence_ids] - 1))
    scores = log_probs[elements.argsort().to(log_probs.device)].reshape(-1, 2).tolist()
    for element, other, (again, instead) in zip(ends.values(), others, scores, strict=True):
        # Engines round: a certain token has at least 0.999 then, and another token at most 0.37.
        if not (again > -1e-3 and instead < -1):
            raise ValueError(
                f"{name} returned log-probs of exactly 0 up to {request.locate(element)}. Scored again, this token has "
                f"{again:g} and token {other} in its place {instead:g}, so its engine returned no scores: turn its prefix "
                "cache off (vLLM: enable_prefix_caching=False), or score the transformers model."
            )


def _score_rows(version: LLMWrapperBase, request: ScoreRequest, rows: Tensor, device: torch.device) -> Found:
    from tensordict import TensorDict, lazy_stack
    from tensordict.utils import unravel_key

    # Include the last scored token, since the backend pairs each position with the token after it.
    offsets, lengths = request.tokens.offsets[rows].tolist(), (request.forward_lengths[rows] + 1).tolist()
    spans = [torch.arange(start, start + length) for start, length in zip(offsets, lengths, strict=True)]
    output = version(lazy_stack([TensorDict({_TOKENS_KEY: request.tokens.values[s].to(device)}) for s in spans]))
    key = unravel_key((asked(version, "log_probs_key", (str, tuple)) or "log_probs", "full"))
    rows_of_log_probs = output.get(key, as_list=True)
    got = [row.shape[-1] for row in rows_of_log_probs]
    if got != lengths:
        raise ValueError(f"the backend returned log-probs of {got} tokens for sequences of {lengths} tokens.")
    flat, element = torch.cat([row.reshape(-1) for row in rows_of_log_probs]), torch.cat(spans)
    scored = request.mask[element].nonzero().squeeze(-1)
    log_probs = flat[scored.to(flat.device)].float().to(device)
    zeros: list[int] = []
    if bool((log_probs == 0).any()):
        for row, span in zip(rows_of_log_probs, spans, strict=True):
            certain = span[1 : int((row[1:] == 0).long().cumprod(0).sum()) + 1]
            zeros += certain[request.mask[certain]][-1:].tolist()
    return element[scored], log_probs, zeros
