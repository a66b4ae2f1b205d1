"""Which tokens the assistant produced: from token bookkeeping, and from chat templates with or without marks."""

from __future__ import annotations

from torchrl_llm_kl.masks._conversation import RenderedConversation, render_conversation, render_conversations
from torchrl_llm_kl.masks._errors import (
    AssistantMaskError,
    EmptyAssistantMaskError,
    MissingChatTemplateError,
    TurnNotFoundError,
)
from torchrl_llm_kl.masks._history import history_to_messages
from torchrl_llm_kl.masks._lengths import mask_from_prompt_lengths
from torchrl_llm_kl.masks._tokens import encode_with_mask as encode_with_mask

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
