"""Conversations as message dicts, the conversion from TorchRL's ``History``, and the errors of this layer."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torchrl.data.llm import History
    from transformers import PreTrainedTokenizerBase

#: A tokenizer of transformers, preferably a fast one.
Tokenizer: TypeAlias = "PreTrainedTokenizerBase"
Message = Mapping[str, object]
#: Variables of a chat template by name, such as ``enable_thinking``.
TemplateArgs: TypeAlias = dict[str, Any]

ASSISTANT = "assistant"
_PLACEHOLDER_ROLE = "<none>"
# History's own bookkeeping: no template reads it, and plain message dicts lack it.
_BOOKKEEPING = frozenset({"is_complete"})


class AssistantMaskError(ValueError):
    """Base class: conversation, template and tokenizer do not determine the assistant's tokens."""


class MissingChatTemplateError(AssistantMaskError):
    """The tokenizer has no chat template (or several and no default), and none was passed."""


class TurnNotFoundError(AssistantMaskError):
    """An assistant turn cannot be located in the rendered text with certainty."""


class EmptyAssistantMaskError(AssistantMaskError):
    """The conversation has assistant turns, but the mask of their tokens is empty."""


def history_to_messages(history: History) -> list[Any]:
    """Convert a ``torchrl.data.llm.History`` to message dicts, as a transformers user would write them.

    Fields that are ``None``, the ``is_complete`` flag and placeholder messages (role ``"<none>"``) are dropped, so that
    tests such as ``"tool_calls" in message`` work in a template.

    ``history`` has any batch size, dense or lazily stacked; the last dimension is the messages, and a single message
    without dimensions is a conversation of one. Returns a list of message dicts for one dimension, nested lists of them
    for more; the dicts are copies.

    Example:
        >>> import tensordict
        >>> _ = tensordict.set_list_to_stack(True).set()
        >>> from torchrl.data.llm import History
        >>> chats = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
        ...          [{"role": "user", "content": "Bye"}]]
        >>> history_to_messages(History.from_chats(chats)) == chats
        True
    """
    from torchrl.data.llm import History as _History

    if not isinstance(history, _History):
        raise TypeError(
            f"expected a torchrl.data.llm.History, found {type(history).__name__}; of a ChatHistory, pass `.full` or "
            "`.prompt`."
        )
    nested = history.tolist(tolist_first=True)
    return _clean([nested] if isinstance(nested, dict) else nested)


def _clean(nested: list[Any]) -> list[Any]:
    cleaned: list[Any] = []
    for item in nested:
        if not isinstance(item, dict):
            cleaned.append(_clean(item))
        elif item["role"] != _PLACEHOLDER_ROLE:
            cleaned.append({k: copy.deepcopy(v) for k, v in item.items() if v is not None and k not in _BOOKKEEPING})
    return cleaned


def check_messages(messages: object, index: int) -> None:
    """Raise unless conversation ``index`` is a non-empty list of dicts with a role."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(
            f"conversation {index} is a {type(messages).__name__}; expected message dicts: convert with history_to_messages()."
        )
    if not messages:
        raise ValueError(f"conversation {index} has no messages; expected at least one.")
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise TypeError(
                f"message {position} of conversation {index} is {message!r:.80}; expected a dict with 'role'."
            )
