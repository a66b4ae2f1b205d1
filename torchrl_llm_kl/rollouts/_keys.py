"""Keys of a rollout's entries: TorchRL's defaults, and a given model's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tensordict import NestedKey

from torchrl_llm_kl.masks import TemplateArgs, Tokenizer

TOKENS_FULL: NestedKey = ("tokens", "full")
ATTENTION_MASK: NestedKey = ("masks", "all_attention_mask")


def sub_key(key: NestedKey, name: str) -> NestedKey:
    """``(key, name)`` as one nested key."""
    return (key, name) if isinstance(key, str) else (*key, name)


@dataclass(frozen=True)
class ModelInterface:
    """Keys and tokenisation of a model. The defaults are a TorchRL wrapper's with ``input_mode="tokens"``.

    Args:
        input_mode: the kind of input: ``"tokens"``, ``"text"`` or ``"history"``.
        input_key: the entry it reads.
        tokens_key: parent of the token entries ``full``, ``prompt`` and ``response``.
        text_key: parent of the text entries.
        masks_key: parent of ``all_attention_mask`` and ``all_assistant_mask``.
        history_key: parent of the conversation entries.
        attention_mask_key: a mask of padding outside ``masks_key``.
        log_probs_key: parent of the log-prob entries.
        in_keys: all entries the model reads.
        pad_output: whether the model's output is padded, or None for a bare model, whose output has the layout of the data.
        layout: of nested output, if it does not pad.
        tokenizer: for text and conversations, or None if there is none.
        template_kwargs: the chat template's arguments.
        bos: the id of the beginning-of-text token, or None if it is not known.

    Example:
        >>> ModelInterface().tokens_full
        ('tokens', 'full')
    """

    input_mode: str = "tokens"
    input_key: NestedKey = TOKENS_FULL
    tokens_key: NestedKey = "tokens"
    text_key: NestedKey = "text"
    masks_key: NestedKey = "masks"
    history_key: NestedKey = "history"
    attention_mask_key: NestedKey = "attention_mask"
    log_probs_key: NestedKey = "log_probs"
    in_keys: tuple[NestedKey, ...] = (TOKENS_FULL,)
    pad_output: bool | None = None
    layout: torch.layout = torch.strided
    tokenizer: Tokenizer | None = None
    template_kwargs: TemplateArgs = field(default_factory=dict)
    bos: int | None = None

    @classmethod
    def of(cls, model: Any) -> ModelInterface:
        """Read the interface from a TorchRL wrapper; a bare transformers model has the defaults."""
        known = getattr(model, "interface", None)  # of a model in another process
        if isinstance(known, cls):
            return known
        if not hasattr(model, "input_mode"):
            bos = getattr(getattr(model, "config", None), "bos_token_id", None)
            return cls(bos=bos if isinstance(bos, int) else None)
        # A generating policy reads the prompt; score it on the sibling entry "full".
        generates = getattr(model, "generate", False) is True
        input_key = model.input_key if hasattr(model, "input_key") else model.in_keys[0]
        if generates and isinstance(input_key, tuple) and input_key[-1] == "prompt":
            input_key = (*input_key[:-1], "full")

        def given(*names: str) -> TemplateArgs:
            return {name: getattr(model, name) for name in names if getattr(model, name, None) is not None}

        return cls(
            input_mode=model.input_mode,
            input_key=input_key,
            in_keys=(input_key,) if generates else tuple(model.in_keys),
            template_kwargs=given("chat_template", "chat_template_name"),
            bos=getattr(getattr(model, "tokenizer", None), "bos_token_id", None),
            **given("tokens_key", "text_key", "masks_key", "history_key", "attention_mask_key", "log_probs_key"),
            **given("pad_output", "layout", "tokenizer"),
        )

    @property
    def tokens_full(self) -> NestedKey:
        """The sampled tokens: the model's own input if it reads tokens."""
        return self.input_key if self.input_mode == "tokens" else sub_key(self.tokens_key, "full")

    @property
    def prompt_tokens(self) -> NestedKey:
        """The prompt's tokens: the response begins after them."""
        return sub_key(self.tokens_key, "prompt")

    @property
    def assistant_mask(self) -> NestedKey:
        """True at every token that the assistant produced."""
        return sub_key(self.masks_key, "all_assistant_mask")

    @property
    def token_keys(self) -> list[NestedKey]:
        """The entries that show which tokens are scored: tokens, prompt and masks."""
        masks = [sub_key(self.masks_key, "all_attention_mask"), self.attention_mask_key, self.assistant_mask]
        return [self.tokens_full, self.prompt_tokens, *masks]

    def with_history_key(self, key: NestedKey) -> ModelInterface:
        """This interface with conversations under ``(key, "full")``, unless the model has its own input key."""
        if key == self.history_key:
            return self
        own = self.input_mode == "history" and self.input_key == sub_key(self.history_key, "full")
        return replace(self, history_key=key, input_key=sub_key(key, "full") if own else self.input_key)
