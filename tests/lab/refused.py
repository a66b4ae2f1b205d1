"""What is refused: tables, with one test for each row, and single calls; and what is warned of."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest


def refused(call: Callable[..., Any], *rows: tuple[Any, ...], error: type[Exception] = ValueError) -> Any:
    """A test for each row: ``call`` raises, given what the row begins with; the row ends with the message, a pattern.

    What is raised is ``error``, or the type before the message.
    """

    @pytest.mark.parametrize("row", rows, ids=[row[-1] for row in rows])
    def test(row: tuple[Any, ...]) -> None:
        *arguments, message = row
        own = isinstance(arguments[-1], type) and issubclass(arguments[-1], Exception)
        with pytest.raises(arguments.pop() if own else error, match=message):
            call(*arguments)

    return test


def warned(call: Callable[[], Any], part: str) -> tuple[Any, list[str]]:
    """What a call returns, and its warnings that hold a text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = call()
    return found, [text for each in caught if part in (text := str(each.message))]


def refusal(call: Callable[..., Any], *arguments: Any, error: Any = (TypeError, ValueError), **options: Any) -> str:
    """Type and message of the error with which a call refuses; empty if it does not."""
    try:
        call(*arguments, **options)
    except error as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""
