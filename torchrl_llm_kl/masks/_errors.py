"""Errors of the mask functions. All are ``ValueError``: the conversation, the template or the lengths are at fault."""

from __future__ import annotations

__all__ = ["AssistantMaskError", "EmptyAssistantMaskError", "MissingChatTemplateError", "TurnNotFoundError"]


class AssistantMaskError(ValueError):
    """The assistant's tokens could not be told apart; base class of the errors below."""


class MissingChatTemplateError(AssistantMaskError):
    """The tokenizer has no chat template (or no single default one) and none was passed."""


class TurnNotFoundError(AssistantMaskError):
    """An assistant turn could not be located in the rendered text with certainty."""


class EmptyAssistantMaskError(AssistantMaskError):
    """The conversation has assistant turns, yet not one token would be masked."""
