"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which is renamed to ``path`` when the body ends.

    If the body raises an error, nothing is left of it, and a file that was there before stays. A link stays a link.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with replacing(folder / "note.txt") as part:
        ...     _ = part.write_text("whole")
        >>> [file.name for file in folder.iterdir()]
        ['note.txt']
    """
    path = path.resolve()
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
