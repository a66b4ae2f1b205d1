"""Message dicts, the conversion from TorchRL's ``History``, and the errors of this layer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torchrl.data.llm import History
    from transformers import PreTrainedTokenizerBase

#: A transformers tokenizer, preferably a fast one.
Tokenizer: TypeAlias = "PreTrainedTokenizerBase"
Message = Mapping[str, object]
#: Variables of a chat template by name, such as ``enable_thinking``.
TemplateArgs: TypeAlias = dict[str, Any]

ASSISTANT = "assistant"
_PLACEHOLDER_ROLE = "<none>"


class AssistantMaskError(ValueError):
    """The assistant's tokens cannot be determined from conversation, template and tokenizer. A base class."""


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

    Args:
        history: a dense or lazily stacked ``History`` of any batch size. Its last dimension is the messages. A single message
            without dimensions is a conversation of one message.

    Returns:
        A list of message dicts for one dimension, nested lists of them for more dimensions. The dicts are copies.

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
        raise TypeError(f"expected a History, found {type(history).__name__}: pass a ChatHistory's `.full`.")
    nested = history.tolist(tolist_first=True)
    return _clean([nested] if isinstance(nested, dict) else nested)


def _clean(nested: list[object]) -> list[object]:
    cleaned: list[object] = []
    for item in nested:
        if isinstance(item, list):
            cleaned.append(_clean(item))
        elif isinstance(item, dict) and item["role"] != _PLACEHOLDER_ROLE:
            # `is_complete` is History's own bookkeeping: plain message dicts lack it, and no template reads it.
            cleaned.append({k: copy.deepcopy(v) for k, v in item.items() if v is not None and k != "is_complete"})
    return cleaned
