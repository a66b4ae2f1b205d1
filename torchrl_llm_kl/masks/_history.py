"""From TorchRL's ``History`` to the plain message dicts that chat templates read."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl.data.llm import History

__all__ = ["history_to_messages"]

_PLACEHOLDER_ROLE = "<none>"
# History's own bookkeeping: no template reads it, and plain message dicts do not have it.
_BOOKKEEPING = frozenset({"is_complete"})


def history_to_messages(history: History) -> list[Any]:
    """Turns a ``torchrl.data.llm.History`` into message dicts, as a plain transformers user would write them.

    Fields that are ``None``, the ``is_complete`` flag and placeholder messages (role ``"<none>"``) are dropped, so that
    a template that asks ``"tool_calls" in message`` sees the truth.

    Args:
        history: any batch size, dense or lazily stacked, conversations of different lengths included. The last
            dimension runs over the messages; a single message without dimensions counts as a conversation of one.

    Returns:
        A list of message dicts for a one-dimensional history; for one with more dimensions, lists nested accordingly.
        The dicts are copies: changing them leaves ``history`` as it is.

    Raises:
        TypeError: if ``history`` is no ``History``.

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
            f"expected a torchrl.data.llm.History, found {type(history).__name__}. A list of message dicts needs no "
            "conversion; a ChatHistory holds several histories: pass its `.full`, `.prompt` or `.response`."
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
