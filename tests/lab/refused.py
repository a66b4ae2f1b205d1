"""Tests of errors from tables, with one test for each row, and helpers for single errors and warnings."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest


def refused(call: Callable[..., Any], *rows: tuple[Any, ...], error: type[Exception] = ValueError) -> Any:
    """Return a test with one case for each row: arguments of ``call``, and the pattern of the error's message.

    The error's type is ``error``, or the type before the message.
    """

    @pytest.mark.parametrize("row", rows, ids=[row[-1] for row in rows])
    def test(row: tuple[Any, ...]) -> None:
        *arguments, message = row
        own = isinstance(arguments[-1], type) and issubclass(arguments[-1], Exception)
        with pytest.raises(arguments.pop() if own else error, match=message):
            call(*arguments)

    return test


def warned(call: Callable[[], Any], part: str) -> tuple[Any, list[str]]:
    """The result of a call, and its warnings that contain a text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = call()
    return found, [text for each in caught if part in (text := str(each.message))]


def refusal(call: Callable[..., Any], *arguments: Any, error: Any = (TypeError, ValueError), **options: Any) -> str:
    """Type and message of the error of a call. Empty if it raises none."""
    try:
        call(*arguments, **options)
    except error as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""


def setting_refused(make: Callable[..., Any], name: str, value: Any, message: str, **settings: Any) -> None:
    """Assert that a value of a setting is refused at construction and later, and that the latter changes nothing."""
    made = make(**settings)
    before = getattr(made, name)
    for attempt in (lambda: make(**{**settings, name: value}), lambda: setattr(made, name, value)):
        with pytest.raises((TypeError, ValueError), match=message):
            attempt()
    assert getattr(made, name) is before
