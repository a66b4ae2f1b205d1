"""Masks of the assistant's tokens: from chat templates with or without ``{% generation %}`` blocks, or from lengths."""

from __future__ import annotations

from torchrl_llm_kl.masks._conversation import RenderedConversation, render_conversation, render_conversations
from torchrl_llm_kl.masks._messages import (
    AssistantMaskError,
    EmptyAssistantMaskError,
    MissingChatTemplateError,
    TurnNotFoundError,
    history_to_messages,
)
from torchrl_llm_kl.masks._tokens import encode_with_mask as encode_with_mask, mask_from_prompt_lengths

__all__ = [
    "AssistantMaskError",
    "EmptyAssistantMaskError",
    "MissingChatTemplateError",
    "RenderedConversation",
    "TurnNotFoundError",
    "history_to_messages",
    "mask_from_prompt_lengths",
    "render_conversation",
    "render_conversations",
]
