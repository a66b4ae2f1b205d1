"""Scores through a TorchRL wrapper whose model is not in this process, such as vLLM or a remote actor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from torchrl_llm_kl._private import is_remote
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring._asked import asked, call_of, has
from torchrl_llm_kl.scoring._model import evaluating
from torchrl_llm_kl.scoring._passes import plan_micro_batches
from torchrl_llm_kl.scoring._request import ScoreRequest

if TYPE_CHECKING:
    from torchrl.modules.llm import LLMWrapperBase

_TOKENS_KEY = ("tokens", "full")
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
