"""Records as plain bytes: a JSON head and arrays. Reading checks all of it, and takes no more memory than the message has.

A message is a prefix of 12 bytes (a mark, the protocol version, the kind of message, the length of the head), the head, which
lists the name, dtype and shape of each array, and the arrays.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrl_llm_kl._typing import Json

#: Version of the format, and of the fields of requests and replies. A change that the other side would misread gets the next.
PROTOCOL = 8
#: Characters of a name.
MAX_TEXT = 256
#: Dimensions of an array.
MAX_DIMS = 8
_MAX_WHOLE = 2**63 - 1
_MAX_HEAD = 2**14  # bytes
_PREFIX = struct.Struct("<4sHHI")  # mark, protocol, kind, bytes of the head
_MARK = b"KLRL"
#: Kinds of messages.
REQUEST, REPLY = 1, 2
_READER = {REQUEST: ("request", "client", "replica"), REPLY: ("reply", "replica", "client")}
_DTYPES = ("<i1", "<i2", "<i4", "<i8", "<u1", "<f2", "<f4", "<f8")


class ProtocolError(ValueError):
    """A message is damaged, or of another release."""


def pack(kind: int, head: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> bytes:
    """One object, which Ray sends faster than several. The head is padded to 8 bytes."""
    widest_first = sorted(arrays.items(), key=lambda entry: -entry[1].dtype.itemsize)  # so that each is aligned
    little = {name: np.ascontiguousarray(x, x.dtype.newbyteorder("<")) for name, x in widest_first}
    listed = {name: [x.dtype.str.replace("|", "<"), x.shape] for name, x in little.items()}
    text = json.dumps({**head, "arrays": listed}, separators=(",", ":")).encode()
    text += b" " * (-(_PREFIX.size + len(text)) % 8)
    return b"".join(
        (_PREFIX.pack(_MARK, PROTOCOL, kind, len(text)), text, *(x.data for x in little.values() if x.size))
    )


def unpack(packed: bytes, kind: int) -> tuple[Head, Arrays]:
    """The head and the arrays of a message; a :class:`ProtocolError` says what is wrong with it."""
    what, sender, reader = _READER[kind]
    if not isinstance(packed, (bytes, bytearray)):
        raise ProtocolError(f"expected a {what} as bytes, got {type(packed).__name__}.")
    view = memoryview(packed)
    start = bytes(view[:4])
    if len(view) < _PREFIX.size or start != _MARK:
        raise ProtocolError(
            f"a {what} of {len(view)} bytes begins with {start!r}, expected {_MARK!r} and a protocol version (here "
            f"{PROTOCOL}): it is damaged, or the {sender} has a release without versions. Update torchrl_llm_kl there."
        )
    _, protocol, actual_kind, size = _PREFIX.unpack_from(view)
    if protocol != PROTOCOL:
        older = sender if protocol < PROTOCOL else reader
        raise ProtocolError(
            f"the {sender} speaks version {protocol} of the protocol, this {reader} version {PROTOCOL}: update "
            f"torchrl_llm_kl on the side of the {older}."
        )
    if actual_kind != kind:
        raise ProtocolError(f"expected a {what} (kind {kind}), got a message of kind {actual_kind}.")
    end = _PREFIX.size + size
    if size > _MAX_HEAD or end > len(view):
        raise ProtocolError(f"a {what} of {len(view)} bytes declares a head of {size}, expected at most {_MAX_HEAD}.")
    try:
        fields = json.loads(bytes(view[_PREFIX.size : end]).decode(), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise ProtocolError(f"the head of a {what} is not valid JSON: {error!s:.100}.") from None
    if not isinstance(fields, dict):
        raise ProtocolError(f"the head of a {what} is {short(fields)}, expected a JSON object.")
    head = Head(fields, what)
    return head, Arrays(_read_arrays(head, view[end:]), what)


def _read_arrays(head: Head, view: memoryview) -> dict[str, np.ndarray]:
    listed = head.take("arrays")
    expected = 'an object of entries "name": [dtype, shape]'
    if not isinstance(listed, dict):
        raise head.wrong("arrays", listed, expected)
    arrays, start = {}, 0
    for name, entry in listed.items():
        match entry:
            case [str(dtype), [*shape]] if dtype in _DTYPES and len(shape) <= MAX_DIMS and all(map(is_whole, shape)):
                size = math.prod(shape) * np.dtype(dtype).itemsize
            case _:
                raise head.wrong("arrays", entry, expected)
        if start + size > view.nbytes:
            raise ProtocolError(
                f"a {head.what} has {view.nbytes} bytes of arrays, expected {start + size} for {name!r:.60}."
            )
        try:
            arrays[name] = np.frombuffer(view[start : start + size], dtype).reshape(shape)
        except ValueError:  # nothing, of dimensions that numpy cannot count
            raise head.wrong("arrays", entry, expected) from None
        start += size
    if start != view.nbytes:
        raise ProtocolError(f"a {head.what} has {view.nbytes} bytes of arrays, expected {start}.")
    return arrays


class Head:
    """The fields of a message, each read once with its type and range."""

    def __init__(self, fields: Json, what: str) -> None:
        self._fields, self.what = fields, what

    def take(self, name: str) -> Any:
        """A field of any type."""
        if name not in self._fields:
            raise ProtocolError(f"a {self.what} has no field {name!r}.")
        return self._fields.pop(name)

    def whole(self, name: str) -> int:
        """A whole number of at least 0."""
        value = self.take(name)
        if not is_whole(value):
            raise self.wrong(name, value, f"a whole number from 0 to {_MAX_WHOLE}")
        return int(value)

    def flag(self, name: str) -> bool:
        """True or False."""
        value = self.take(name)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str) -> str:
        """A short string."""
        value = self.take(name)
        if not is_text(value):
            raise self.wrong(name, value, f"a string of at most {MAX_TEXT} characters")
        return str(value)

    def wrong(self, name: str, value: object, expected: str) -> ProtocolError:
        """The error of a field."""
        return ProtocolError(f"{name} of a {self.what} is {short(value)}, expected {expected}.")

    def end(self) -> None:
        """Raise a :class:`ProtocolError` if fields are left."""
        if self._fields:
            raise ProtocolError(f"a {self.what} has unknown fields: {short(sorted(self._fields))}.")


@dataclass(frozen=True, eq=False)
class Arrays:
    """The arrays of a message, each read once with its dtype and shape."""

    found: dict[str, np.ndarray]
    what: str

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def take(self, name: str, kinds: str, *shape: int | None) -> np.ndarray:
        """An array whose dtype is of one of the ``kinds`` (numpy's letters); None in ``shape`` is any size."""
        if name not in self.found:
            raise ProtocolError(f"a {self.what} has no array {name!r}.")
        array = self.found.pop(name)
        fits = array.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, array.shape, strict=True))
        if array.dtype.kind not in kinds or not fits:
            raise ProtocolError(
                f"{name} of a {self.what} has the dtype {array.dtype} and the shape {array.shape}, expected a dtype of kind "
                f"{kinds!r} and the shape {tuple('any' if n is None else n for n in shape)}."
            )
        return array

    def end(self) -> None:
        """Raise a :class:`ProtocolError` if arrays are left."""
        if self.found:
            raise ProtocolError(f"a {self.what} has unknown arrays: {short(sorted(self.found))}.")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def is_whole(value: object) -> bool:
    """Whether it is a whole number from 0 to 2^63 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_WHOLE


def is_text(value: object) -> bool:
    """Whether it is a string that is short and can be encoded."""
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in value)


def short(value: object) -> str:
    """A value in an error message; deep or long ones are cut."""
    try:
        text = ascii(value)
    except (RecursionError, ValueError):  # too deep, or a number of too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
