"""What the transforms need to know of a model: where its inputs are, and how it turns conversations into tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tensordict import NestedKey

__all__ = ["TOKENS_FULL", "ModelInterface", "sub_key"]

TOKENS_FULL: NestedKey = ("tokens", "full")


@dataclass(frozen=True)
class ModelInterface:
    """Keys and tokenisation of a model; the defaults are those of a ``tokens``-mode TorchRL wrapper."""

    input_mode: str = "tokens"
    input_key: NestedKey = TOKENS_FULL
    tokens_key: NestedKey = "tokens"
    text_key: NestedKey = "text"
    masks_key: NestedKey = "masks"
    history_key: NestedKey = "history"
    attention_mask_key: NestedKey = "attention_mask"
    log_probs_key: NestedKey = "log_probs"
    in_keys: tuple[NestedKey, ...] = (TOKENS_FULL,)
    pad_output: bool = False
    layout: torch.layout = torch.strided
    tokenizer: Any = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any) -> ModelInterface:
        """Read it off a TorchRL wrapper; a bare transformers model has the defaults."""
        known = getattr(model, "interface", None)  # of a model in another process
        if isinstance(known, cls):
            return known
        if not hasattr(model, "input_mode"):
            return cls()
        # A policy that generates is scored on what it has produced: the "full" entry beside the prompt that it reads.
        generates = getattr(model, "generate", False) is True
        input_key = model.input_key if hasattr(model, "input_key") else model.in_keys[0]
        if generates and isinstance(input_key, tuple) and input_key[-1] == "prompt":
            input_key = (*input_key[:-1], "full")
        names = ("tokens_key", "text_key", "masks_key", "history_key", "attention_mask_key", "log_probs_key")
        keys = {name: getattr(model, name) for name in names if getattr(model, name, None) is not None}
        template = {
            name: getattr(model, name)
            for name in ("chat_template", "chat_template_name")
            if getattr(model, name, None) is not None
        }
        return cls(
            input_mode=model.input_mode,
            input_key=input_key,
            in_keys=(input_key,) if generates else tuple(model.in_keys),
            pad_output=bool(getattr(model, "pad_output", False)),
            layout=getattr(model, "layout", None) or torch.strided,
            tokenizer=getattr(model, "tokenizer", None),
            template_kwargs=template,
            **keys,
        )

    @property
    def tokens_full(self) -> NestedKey:
        """Where sampled tokens are: the model's own input if it reads tokens."""
        return self.input_key if self.input_mode == "tokens" else sub_key(self.tokens_key, "full")

    def with_history_key(self, key: NestedKey) -> ModelInterface:
        """The same, with conversations read from ``(key, "full")`` unless the model names an input of its own."""
        own = self.input_mode == "history" and self.input_key == sub_key(self.history_key, "full")
        return replace(self, history_key=key, input_key=sub_key(key, "full") if own else self.input_key)


def sub_key(key: NestedKey, name: str) -> NestedKey:
    """``(key, name)`` as one nested key."""
    return (key, name) if isinstance(key, str) else (*key, name)
