"""Score through a TorchRL wrapper whose backend is no module of this process: vLLM, a remote actor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchrl_llm_kl.scoring._request import Request

__all__ = ["is_wrapper", "prepare_wrapper", "score_rows", "unwrap"]

_TOKENS_KEY = ("tokens", "full")
_WANTED = {
    "generate": False,
    "return_log_probs": True,
    "input_mode": "tokens",
    "input_key": _TOKENS_KEY,
    "pad_output": False,
}


def is_wrapper(model: object) -> bool:
    """Whether ``model`` is a TorchRL language-model wrapper."""
    return hasattr(model, "get_new_version")


def unwrap(wrapper: Any) -> nn.Module | None:
    """The transformers model inside a wrapper; None where the weights are not in reach."""
    inner = None if _is_remote(wrapper) else getattr(wrapper, "model", None)
    if not isinstance(inner, nn.Module):
        return None
    of_transformers = any(base.__name__ == "TransformersWrapper" for base in type(wrapper).__mro__)
    return inner if of_transformers or hasattr(inner, "get_output_embeddings") else None


def prepare_wrapper(wrapper: Any) -> Any:
    """A version of ``wrapper`` that returns log-probs of token ids; ``wrapper`` itself stays as it is.

    A remote wrapper is used as it is: a new version of it would bring its weights here. It must have been built with
    ``input_mode="tokens", generate=False, pad_output=False``.
    """
    if _is_remote(wrapper):
        return wrapper
    changes: dict[str, Any] = dict(_WANTED)
    # Some wrappers write the padding into the very dict of the wrapper that they copy: hand them a copy.
    tokenizer_kwargs = getattr(wrapper, "tokenizer_kwargs", None)
    if isinstance(tokenizer_kwargs, dict):
        changes["tokenizer_kwargs"] = {**tokenizer_kwargs, "padding": False}
    version = wrapper.get_new_version(**changes)
    # vLLM's wrapper drops every token equal to its padding value, often the end-of-turn token. Rows come without
    # padding here, so that nothing must be dropped.
    if version is not wrapper and isinstance(getattr(version, "padding_value", None), int):
        version.padding_value = -1
    return version


def score_rows(version: Any, request: Request, rows: Tensor, device: torch.device) -> Tensor:
    """Log-probs of the tokens to score of sequences ``rows``, in the order of ``request.elements(rows)``."""
    from tensordict import TensorDict, lazy_stack

    # Up to and with the last token to score: the backend, not we, pairs a position with the token after it.
    offsets, lengths = request.tokens.offsets[rows].tolist(), (request.forward_lengths[rows] + 1).tolist()
    ids = [request.tokens.values[start : start + length] for start, length in zip(offsets, lengths, strict=True)]
    batch = lazy_stack([TensorDict({_TOKENS_KEY: row.to(device)}) for row in ids])
    found = _full_log_probs(version(batch), version)
    got = [row.shape[-1] for row in found]
    if got != lengths:
        worst = next((i for i, (a, b) in enumerate(zip(got, lengths, strict=False)) if a != b), len(got))
        raise ValueError(
            f"{type(version).__name__} returned log-probs for {len(got)} sequences of {got} tokens, expected "
            f"{lengths}: the first that differs is sequence {int(rows[min(worst, len(rows) - 1)])}. A backend "
            "that drops padding tokens or scores only what it generates cannot score given tokens"
        )
    flat = torch.cat([row.reshape(-1) for row in found])
    first = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    picked = [
        start + request.mask[offset : offset + length].nonzero().squeeze(-1)
        for start, offset, length in zip(first.tolist(), offsets, lengths, strict=True)
    ]
    return flat[torch.cat(picked).to(flat.device)].float()


def _full_log_probs(output: Any, version: Any) -> list[Tensor]:
    from tensordict.utils import unravel_key

    key = unravel_key((getattr(version, "log_probs_key", None) or "log_probs", "full"))
    found = output.get(key, None, as_list=True)
    if found is None:
        raise ValueError(
            f"{type(version).__name__} returned no {key}: found {sorted(map(str, output.keys(True, True)))}. It must "
            "return the log-probs of the tokens that it is given (generate=False)"
        )
    return list(found.unbind(0)) if isinstance(found, Tensor) else list(found)


def _is_remote(wrapper: Any) -> bool:
    return "_remote_wrapper" in getattr(wrapper, "__dict__", {})
