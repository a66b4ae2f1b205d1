"""The C heap of a process that does the same work again and again."""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_MIB = 2**20


def keep_freed_memory(mebibytes: int = 256) -> None:
    """Hand up to so many MiB not back to the system when they are freed: asking for them again costs page faults.

    Does nothing where the C library is not glibc.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_TRIM_THRESHOLD, mebibytes * _MIB)
        libc.mallopt(_MMAP_THRESHOLD, mebibytes * _MIB // 2)
